"""Parts of the records of several methods with heads."""

from collections.abc import Callable
from collections.abc import Sequence

from specjax import verifiers
from specjax.methods.networks import Heads
from specjax.methods.records import chain_of
from specjax.methods.records import Option
from specjax.methods.records import RECURSIVE
from specjax.methods.records import suited
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TOKEN
from specjax.methods.strategy import TRAVERSAL
from specjax.types import Verifier


def strategy_of(make: Callable[..., Strategy]) -> Callable[..., Strategy]:
  """`Method.strategy`, of `make(heads, parents, proposal, rule)`."""
  def strategy(heads, verifier: Verifier | None, gamma, tree) -> Strategy:
    rule = verifiers.TargetWalk() if verifier is None else verifier
    return suited(
        rule, lambda: make(heads, chain_of(heads, gamma), "iid", rule),
        lambda: make(heads, tree(), "top_k", rule),
        lambda proposal: make(heads, tree(), proposal, rule))

  return strategy


def sampled(make: Callable[..., Strategy], heads: Heads,
             tree: Sequence[int]) -> dict[str, tuple[Strategy, ...]]:
  """The part of `Method.compared` whose drafts are drawn."""
  pairs = lambda parents, proposal, *rules: tuple(
      make(heads, parents, proposal, rule) for rule in rules)
  return {
      "sampled chain": pairs(
          chain_of(heads, heads.num_forecasts), "iid", BLOCK, TOKEN),
      "sampled tree": pairs(
          tree, "without_replacement", TRAVERSAL, RECURSIVE)}


BLOCKS = Option(
    "blocks", 1, "medusa, medusa2, hydra: residual blocks per head")
