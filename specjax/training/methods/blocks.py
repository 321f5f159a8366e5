"""The method that trains a network which forecasts a whole block."""

from specjax import strategies
from specjax.models import heads as heads_lib
from specjax.strategies import Strategy
from specjax.strategies.base import BLOCK
from specjax.strategies.base import TOKEN
from specjax.strategies.base import TRAVERSAL
from specjax.training import objectives
from specjax.training.methods.base import CUTS
from specjax.training.methods.base import Method
from specjax.training.methods.base import MLP_WIDTH
from specjax.training.methods.base import Option
from specjax.training.methods.base import RECURSIVE
from specjax.training.methods.base import suited
from specjax.training.methods.base import TAPS
from specjax.types import Verifier

_SHORT = 4  # tokens of a shorter chain, as many as other methods draft


def _parallel_strategy(heads, verifier: Verifier | None, gamma, tree
                       ) -> Strategy:
  """A sampled chain or tree, or the likeliest paths: what the rule asks for."""
  rule = verifier or BLOCK
  return suited(
      rule, lambda: strategies.parallel(heads, gamma, verifier=rule),
      lambda: strategies.ddtree(heads, len(tree()))._replace(verifier=rule),
      lambda proposal: strategies.parallel(
          heads, parents=tree(), proposal=proposal, verifier=rule))


def _parallel_compared(heads, tree) -> dict[str, tuple[Strategy, ...]]:
  tree, longest = tree(), heads.num_forecasts
  walked = strategies.ddtree(heads, len(tree))
  chain = lambda gamma: tuple(strategies.parallel(heads, gamma, verifier=rule)
                              for rule in (BLOCK, TOKEN))
  return {
      "sampled chain": chain(longest),
      **({f"sampled chain of {_SHORT}": chain(_SHORT)}
         if longest > _SHORT else {}),
      "sampled tree": tuple(
          strategies.parallel(heads, parents=tree, verifier=rule,
                              proposal="without_replacement")
          for rule in (TRAVERSAL, RECURSIVE)),
      "best-first tree": (walked,)}


PARALLEL = Method(
    name="parallel", heads=heads_lib.ParallelHeads, learning_rate=2e-3,
    objective=lambda target, heads, anchors, position_weights, position_decay,
        ce_share, confidence_weight: objectives.Parallel(
            model=target, heads=heads, anchors=anchors,
            position_weights=position_weights, position_decay=position_decay,
            ce_share=ce_share, confidence_weight=confidence_weight),
    measure=lambda target, heads: objectives.Parallel(
        model=target, heads=heads, anchors=CUTS),
    chain=lambda heads: strategies.parallel(
        heads, proposal="top_k", verifier=TOKEN),
    strategy=_parallel_strategy, compared=_parallel_compared,
    head_options=(
        Option("layers", 1, "parallel: draft layers"),
        MLP_WIDTH, TAPS,
        Option("from_anchor", True, "parallel: whether the anchor's slot "
               "predicts as well (DSpark), or the masks alone (DFlash)"),
        Option("markov", "plain", "parallel: the Markov head",
               ("none", "plain", "gated", "rnn")),
        Option("markov_rank", 32, "parallel: of the Markov head"),
        Option("confidence", "markov", "parallel: what the confidence head "
               "reads", ("none", "hidden", "markov"))),
    options=(
        Option("anchors", 32, "parallel: blocks of a row that is trained on"),
        Option("position_weights", "decay", "parallel: by which the slots of "
               "a block count", ("decay", "dpace")),
        Option("position_decay", 4.0, "parallel: slots after which a weight is "
               "1/e"),
        Option("ce_share", 0.1, "parallel: share of the data's cross-entropy "
               "beside the distance from the target's law"),
        Option("confidence_weight", 1.0, "parallel: of the confidence head's "
               "loss")))
