"""Records of families and of trained methods, and helpers to build them."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
from typing import Any
from typing import NamedTuple

from specjax import verifiers
from specjax.interfaces import Verifier
from specjax.methods.networks import Heads
from specjax.methods.strategy import Strategy
from specjax.models.transformer import Transformer
from specjax.training.objective import DrafterObjective

# Number of positions per row at which drafts begin, when a method is measured
# whose objective samples these positions.
CUTS = 128

RECURSIVE = verifiers.Recursive()
_BUNDLED_SIZE = 4.2e6  # number of parameters of the bundled target


@dataclasses.dataclass(frozen=True)
class Option:
  """Setting of a method, offered by scripts as a flag.

  Attributes:
    name: name of the keyword argument.
    default: default value. None is for bool options: True if the target
      generates the training data, else False.
    help: description, beginning with the method's name.
    choices: allowed values; empty: any.
  """

  name: str
  default: bool | int | float | str | None
  help: str
  choices: tuple[str, ...] = ()


# Option of every method whose layers read the target's hidden states.
TAPS = Option(
    "taps", "", "eagle3, mtp, parallel: hidden states of the target that the "
    "drafter reads, such as 2,4,final (after layers 2 and 4, and after the "
    "final norm). Default: three layers from low to high; for mtp the last "
    "layer")
MLP_WIDTH = Option(
    "mlp_width", 512, "eagle1, eagle3, mtp, parallel_layers, parallel: inner "
    "width of a layer's MLP")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningRate:
  """Default peak learning rate of a method, by the size of the target.

  Between the size of the bundled target and the size of the target in a
  published recipe, log(rate) is linear in log(number of parameters). Outside
  this range the rate is constant. A method without a published rate has one
  rate for all targets.

  >>> LearningRate(bundled=0.006, published=0.001, size=7e9).of(135e6)
  0.0026

  Attributes:
    bundled: rate for the bundled target.
    published: rate of a published recipe; None if there is none.
    size: number of parameters of the target in the published recipe.
    source: publication of the recipe; "" if there is none.
  """

  bundled: float
  published: float | None = None
  size: float = 7e9
  source: str = ""

  def of(self, num_parameters: int) -> float:
    """Returns the rate for this size of target, to two significant digits."""
    if self.published is None:
      return self.bundled
    share = (math.log(num_parameters / _BUNDLED_SIZE)
             / math.log(self.size / _BUNDLED_SIZE))
    share = min(max(share, 0.0), 1.0)
    return float(f"{self.bundled**(1 - share) * self.published**share:.2g}")

  def __str__(self) -> str:
    if self.published is None:
      return f"{self.bundled:g} for all targets (none is published)"
    return (f"{self.bundled:g} to {self.published:g} at {self.size / 1e9:g}B "
            f"({self.source})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
  """Record of a method with trained heads.

  Attributes:
    name: name in flags and files.
    heads: class of the heads.
    learning_rate: default peak learning rates of the heads.
    objective: training loss, `(target, heads, **options) -> DrafterObjective`.
    measure: objective whose `score` measures the predictions,
      `(target, heads) -> DrafterObjective`.
    chain: strategy with the most likely chain, `heads -> Strategy`, for
      measuring greedy decoding in training.
    strategy: default strategy, `(heads, verifier, gamma, tree) -> Strategy`.
      `verifier` is a rule or None, `gamma` the draft length, and `tree` a
      function that returns the parents of a draft tree.
    compared: strategies that a study compares, `(heads, tree) -> {name:
      strategies}`. The strategies of one name have the same drafter and are
      compared on the rollouts of the first.
    head_options: options of `heads.for_target`.
    options: options of `objective`.
    tunes_target: True if the target is always trained with its heads. With the
      option `train_target` the user decides.
  """

  name: str
  heads: type[Heads]
  learning_rate: LearningRate
  objective: Callable[..., DrafterObjective]
  measure: Callable[[Transformer, Heads], DrafterObjective]
  chain: Callable[[Heads], Strategy]
  strategy: Callable[..., Strategy]
  compared: Callable[[Heads, Callable[[], Sequence[int]]],
                     dict[str, tuple[Strategy, ...]]]
  head_options: tuple[Option, ...] = ()
  options: tuple[Option, ...] = ()
  tunes_target: bool = False

  def trains_target(self, options: Mapping[str, Any]) -> bool:
    """Returns True if the target is also trained with these options."""
    return self.tunes_target or bool(options.get("train_target", False))


class Family(NamedTuple):
  """Public parts of a family of methods, listed in its `__init__.py`.

  Attributes:
    drafters: contents of `specjax.drafters`, classes and their helpers.
    strategies: functions of `specjax.strategies`.
    objectives: classes of `specjax.objectives`.
    methods: records of the methods that are trained.
  """

  drafters: tuple[Any, ...] = ()
  strategies: tuple[Callable[..., Strategy], ...] = ()
  objectives: tuple[type, ...] = ()
  methods: tuple[Method, ...] = ()


def chain_of(heads: Heads, gamma: int) -> tuple[int, ...]:
  """Returns the parents of a chain of `gamma` tokens, at most one per head."""
  return tuple(range(-1, min(gamma, heads.num_forecasts)))


def suited(rule: Verifier, chain: Callable[[], Strategy],
           ranked: Callable[[], Strategy], drawn: Callable[[str], Strategy]
           ) -> Strategy:
  """Returns the strategy whose drafts have the form that a rule requires.

  Args:
    rule: verification rule.
    chain: function that makes the strategy with a sampled chain.
    ranked: function that makes the strategy with the most likely tokens, for
      rules that accept any draft.
    drawn: function that makes the strategy with a sampled tree. Its argument is
      the sampling method of children.
  """
  requires = rule.requires
  if "chain" in requires:
    return chain()
  if not requires:
    return ranked()
  return drawn("iid" if "iid" in requires else "without_replacement")
