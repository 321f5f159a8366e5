"""The method that trains a network which forecasts a whole block."""

from specjax.methods.blocks import parallel_network
from specjax.methods.blocks import parallel_objective
from specjax.methods.blocks import strategies
from specjax.methods.records import CUTS
from specjax.methods.records import LearningRate
from specjax.methods.records import Method
from specjax.methods.records import MLP_WIDTH
from specjax.methods.records import Option
from specjax.methods.records import RECURSIVE
from specjax.methods.records import suited
from specjax.methods.records import TAPS
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TOKEN
from specjax.methods.strategy import TRAVERSAL
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
    name="parallel", heads=parallel_network.ParallelHeads,
    learning_rate=LearningRate(
        bundled=2e-3, published=6e-4, size=4e9,
        source="DSpark configurations of DeepSpec"),
    objective=lambda target, heads, anchors, position_weights, position_decay,
        ce_share, confidence_weight: parallel_objective.ParallelObjective(
            model=target, heads=heads, anchors=anchors,
            position_weights=position_weights, position_decay=position_decay,
            ce_share=ce_share, confidence_weight=confidence_weight),
    measure=lambda target, heads: parallel_objective.ParallelObjective(
        model=target, heads=heads, anchors=CUTS),
    chain=lambda heads: strategies.parallel(
        heads, proposal="top_k", verifier=TOKEN),
    strategy=_parallel_strategy, compared=_parallel_compared,
    head_options=(
        Option("layers", 1, "parallel: number of draft layers"),
        MLP_WIDTH, TAPS,
        Option("from_anchor", True, "parallel: predict a token at the last "
               "known token too (DSpark); with --nofrom_anchor only at the "
               "mask tokens (DFlash)"),
        Option("markov", "plain", "parallel: type of the Markov head, which "
               "conditions a token on the token before it; none: tokens of a "
               "block are independent", ("none", "plain", "gated", "rnn")),
        Option("markov_rank", 32, "parallel: rank of the Markov head"),
        Option("confidence", "markov", "parallel: input of the head that "
               "predicts acceptance: hidden, the hidden state; markov, also "
               "the token before; none: no such head",
               ("none", "hidden", "markov"))),
    options=(
        Option("anchors", 32, "parallel: blocks drawn per training row, at "
               "most"),
        Option("position_weights", "decay", "parallel: loss weights of the "
               "tokens of a block: decay, exponential; dpace, from the "
               "drafter's probabilities (D-PACE)", ("decay", "dpace")),
        Option("position_decay", 4.0, "parallel: number of tokens after which "
               "the weight of --position_weights=decay falls to 1/e"),
        Option("ce_share", 0.1, "parallel: share of the cross-entropy on the "
               "data in the loss, in [0, 1]; the rest is the L1 distance to "
               "the target's distribution"),
        Option("confidence_weight", 1.0, "parallel: loss weight of the "
               "confidence head, with --confidence")))
