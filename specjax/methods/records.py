"""Records of drafting methods, for scripts that train and compare methods.

`Method` is the record of a method with trained draft heads, for example Medusa
or EAGLE-3. `Family` lists the classes of related methods.
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
  """Setting of a method, a command-line flag of training scripts.

  Attributes:
    name: name of the flag and of the keyword argument.
    default: default value. The default of a bool option may be None, meaning
      True if the target generates the training data, and False otherwise.
    help: help text of the flag, beginning with the names of the methods.
    choices: allowed values. () allows any value.
  """

  name: str
  default: bool | int | float | str | None
  help: str
  choices: tuple[str, ...] = ()


# Option of the methods whose draft layers read several of the target's hidden
# states.
TAPS = Option(
    "taps", "", "eagle3, peagle, mtp, parallel: hidden states of the target "
    "that the drafter reads, such as 2,4,final (after layers 2 and 4, and "
    "after the final norm). Default: three layers from low to high; for mtp "
    "the last layer")
MLP_WIDTH = Option(
    "mlp_width", 512, "eagle1, eagle3, peagle, mtp, parallel_layers, parallel: "
    "inner width of a layer's MLP")
LAYERS = Option("layers", 1, "peagle, parallel: number of draft layers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningRate:
  """Default peak learning rate of a method, as a function of the target's size.

  The rate is known for two target sizes: the size of the target bundled with
  specjax, and the size of the target in a published training recipe. Between
  these sizes, log(rate) is interpolated linearly in log(number of parameters).
  Outside this range the rate is constant. If no recipe is published, the rate
  of the bundled target applies to all targets.

  >>> LearningRate(bundled=0.006, published=0.001, size=7e9).of(135e6)
  0.0026

  Attributes:
    bundled: rate for the target bundled with specjax.
    published: rate of the published recipe. None if no recipe is published.
    size: number of parameters of the target in the published recipe.
    source: publication of the recipe. "" if no recipe is published.
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
  """Record of a drafting method with trained draft heads, such as Medusa.

  Attributes:
    name: name of the method in flags and files.
    heads: class of the draft heads.
    learning_rate: default peak learning rate.
    objective: function `(target, heads, **options) -> DrafterObjective` that
      returns the training loss.
    measure: function `(target, heads) -> DrafterObjective` that returns the
      objective for held-out data. The method `score` of this objective
      evaluates predictions.
    chain: function `heads -> Strategy` that returns a strategy whose drafter
      proposes the chain of the most likely tokens. Training measures greedy
      decoding with this strategy.
    strategy: function `(heads, verifier, gamma, tree) -> Strategy` that returns
      the default drafter with a verifier. `verifier` is a verification rule, or
      None for the default rule. `gamma` is the draft length. `tree` is a
      function without arguments that returns the parents of a draft tree.
    compared: function `(heads, tree) -> {name: strategies}` that returns the
      strategies for a comparison. Strategies of the same name have the same
      drafter and different verification rules. Their rules are compared on the
      drafts of the first of these strategies.
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

  The `__init__.py` of each family contains this record.

  Attributes:
    drafters: drafter classes and helpers that `specjax.drafters` exports.
    strategies: functions that `specjax.strategies` exports.
    objectives: classes of training losses that `specjax.objectives` exports.
    methods: records of the family's methods with trained heads.
  """

  drafters: tuple[Any, ...] = ()
  strategies: tuple[Callable[..., Strategy], ...] = ()
  objectives: tuple[type, ...] = ()
  methods: tuple[Method, ...] = ()


def chain_of(heads: Heads, gamma: int) -> tuple[int, ...]:
  """Returns the parent index of each node of a chain, -1 for the root.

  The chain has `min(gamma, heads.num_forecasts)` nodes below the root.
  """
  return tuple(range(-1, min(gamma, heads.num_forecasts)))


def suited(rule: Verifier, chain: Callable[[], Strategy],
           ranked: Callable[[], Strategy], drawn: Callable[[str], Strategy]
           ) -> Strategy:
  """Returns a strategy whose drafts have the form that a rule requires.

  Some verification rules require a chain, or independently sampled siblings.
  Other rules can verify any draft.

  Args:
    rule: verification rule.
    chain: function that returns the strategy with a sampled chain.
    ranked: function that returns the strategy with a tree of the most likely
      tokens. It is used for rules that can verify any draft.
    drawn: function that returns the strategy with a sampled tree. The
      function's argument is the sampling method of siblings, "iid" or
      "without_replacement".
  """
  requires = rule.requires
  if "chain" in requires:
    return chain()
  if not requires:
    return ranked()
  return drawn("iid" if "iid" in requires else "without_replacement")
