"""Records of drafting methods, which scripts read to train and compare them.

`Method` is the record of a method whose draft heads are trained, for example
Medusa or EAGLE-3. `Family` lists the classes of related methods.
"""

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

# Number of start positions of drafts per sequence in an evaluation, for methods
# whose training objective samples the start positions at random.
CUTS = 128

RECURSIVE = verifiers.Recursive()
_BUNDLED_SIZE = 4.2e6  # parameters of the target that is bundled with specjax


@dataclasses.dataclass(frozen=True)
class Option:
  """Setting of a method. Training scripts offer it as a command-line flag.

  Attributes:
    name: name of the flag and of the keyword argument.
    default: default value. For bool options it may be None: the value is then
      True if the target generates the training data, else False.
    help: help text of the flag, beginning with the names of the methods.
    choices: allowed values; (): any value.
  """

  name: str
  default: bool | int | float | str | None
  help: str
  choices: tuple[str, ...] = ()


# Option of the methods whose draft layers read several of the target's hidden
# states.
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
  """Default peak learning rate of a method, as a function of the target's size.

  The rate is known for two target sizes: that of the target bundled with
  specjax, and that of a published training recipe. Between these sizes,
  log(rate) is interpolated linearly in log(number of parameters). Outside this
  range the rate is constant. If no recipe is published, the rate of the bundled
  target is used for all targets.

  >>> LearningRate(bundled=0.006, published=0.001, size=7e9).of(135e6)
  0.0026

  Attributes:
    bundled: rate for the target bundled with specjax.
    published: rate of the published recipe; None if no recipe is published.
    size: number of parameters of the target in the published recipe.
    source: publication of the recipe; "" if no recipe is published.
  """

  bundled: float
  published: float | None = None
  size: float = 7e9
  source: str = ""

  def of(self, num_parameters: int) -> float:
    """Returns the rate for a target with this number of parameters.

    The result is rounded to two significant digits.
    """
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
  """Record of a drafting method whose draft heads are trained, such as Medusa.

  Attributes:
    name: name of the method in flags and files.
    heads: class of the draft heads.
    learning_rate: default peak learning rate.
    objective: function `(target, heads, **options) -> DrafterObjective` that
      returns the training loss.
    measure: function `(target, heads) -> DrafterObjective` that returns the
      objective whose `score` evaluates predictions on held-out data.
    chain: function `heads -> Strategy` that returns a drafter of the most
      likely chain, with its verifier. Training uses it to measure greedy
      decoding.
    strategy: function `(heads, verifier, gamma, tree) -> Strategy` that returns
      the default drafter and verifier. `verifier` is a verification rule or
      None for the default, `gamma` is the draft length, and `tree` is a
      function without arguments that returns the parents of a draft tree.
    compared: function `(heads, tree) -> {name: strategies}` that returns the
      strategies for a comparison. Strategies of the same name have the same
      drafter and differ in the verification rule; they are evaluated on drafts
      that were generated with the first of them.
    head_options: options that are passed to `heads.for_target`.
    options: options that are passed to `objective`.
    tunes_target: True if the target is always trained together with its heads.
      If False, the target is trained only with the option `train_target`.
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
    """Returns True if these options train the target as well as its heads."""
    return self.tunes_target or bool(options.get("train_target", False))


class Family(NamedTuple):
  """Public classes and functions of a family of related drafting methods.

  Each family lists them in its `__init__.py`.

  Attributes:
    drafters: drafter classes and helpers that `specjax.drafters` exports.
    strategies: functions that `specjax.strategies` exports.
    objectives: classes of training losses that `specjax.objectives` exports.
    methods: records of the methods of the family whose heads are trained.
  """

  drafters: tuple[Any, ...] = ()
  strategies: tuple[Callable[..., Strategy], ...] = ()
  objectives: tuple[type, ...] = ()
  methods: tuple[Method, ...] = ()


def chain_of(heads: Heads, gamma: int) -> tuple[int, ...]:
  """Returns the parent indices of a chain of draft tokens, -1 for the root.

  The chain has `gamma` tokens, or `heads.num_forecasts` if this is less.
  """
  return tuple(range(-1, min(gamma, heads.num_forecasts)))


def suited(rule: Verifier, chain: Callable[[], Strategy],
           ranked: Callable[[], Strategy], drawn: Callable[[str], Strategy]
           ) -> Strategy:
  """Returns a strategy whose drafts have the form that a rule requires.

  Verification rules differ in the drafts that they can verify: some require a
  chain, or siblings that are sampled independently.

  Args:
    rule: verification rule.
    chain: function that returns the strategy with a sampled chain.
    ranked: function that returns the strategy with a tree of the most likely
      tokens. It is used for rules that can verify any draft.
    drawn: function that returns the strategy with a sampled tree. Its argument
      is the sampling method of siblings, "iid" or "without_replacement".
  """
  requires = rule.requires
  if "chain" in requires:
    return chain()
  if not requires:
    return ranked()
  return drawn("iid" if "iid" in requires else "without_replacement")
