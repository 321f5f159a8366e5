"""Methods that train heads on the target's last hidden state, or embeddings."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses

from specjax import verifiers
from specjax.methods.heads import blockwise_network
from specjax.methods.heads import blockwise_objective
from specjax.methods.heads import hydra_network
from specjax.methods.heads import hydra_objective
from specjax.methods.heads import lookahead_network
from specjax.methods.heads import lookahead_objective
from specjax.methods.heads import medusa_network
from specjax.methods.heads import medusa_objective
from specjax.methods.heads import strategies
from specjax.methods.networks import Heads
from specjax.methods.records import chain_of
from specjax.methods.records import CUTS
from specjax.methods.records import LearningRate
from specjax.methods.records import Method
from specjax.methods.records import Option
from specjax.methods.records import RECURSIVE
from specjax.methods.records import suited
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TOKEN
from specjax.methods.strategy import TRAVERSAL
from specjax.types import Verifier


def _strategy(make: Callable[..., Strategy]) -> Callable[..., Strategy]:
  """`Method.strategy`, of `make(heads, parents, proposal, rule)`."""
  def strategy(heads, verifier: Verifier | None, gamma, tree) -> Strategy:
    rule = verifiers.TargetWalk() if verifier is None else verifier
    return suited(
        rule, lambda: make(heads, chain_of(heads, gamma), "iid", rule),
        lambda: make(heads, tree(), "top_k", rule),
        lambda proposal: make(heads, tree(), proposal, rule))

  return strategy


def _sampled(make: Callable[..., Strategy], heads: Heads,
             tree: Sequence[int]) -> dict[str, tuple[Strategy, ...]]:
  """The part of `Method.compared` whose drafts are drawn."""
  pairs = lambda parents, proposal, *rules: tuple(
      make(heads, parents, proposal, rule) for rule in rules)
  return {
      "sampled chain": pairs(
          chain_of(heads, heads.num_forecasts), "iid", BLOCK, TOKEN),
      "sampled tree": pairs(
          tree, "without_replacement", TRAVERSAL, RECURSIVE)}


def _medusa_compared(heads, tree) -> dict[str, tuple[Strategy, ...]]:
  tree = tree()
  return {
      "top-k tree": (strategies.medusa(heads, tree),
                     strategies.medusa(heads, tree, typical=True)),
      **_sampled(strategies.sampled_medusa, heads, tree),
      "i.i.d. tree": tuple(
          strategies.sampled_medusa(heads, tree, "iid", rule)
          for rule in (TRAVERSAL, RECURSIVE, verifiers.KSeq()))}


def _hydra_compared(heads, tree) -> dict[str, tuple[Strategy, ...]]:
  tree = tree()
  return {"top-k tree": (strategies.hydra(heads, tree),),
          **_sampled(strategies.hydra, heads, tree)}


PASS = Method(
    name="pass", heads=lookahead_network.LookaheadEmbeddings,
    learning_rate=LearningRate(bundled=0.05),
    objective=lambda target, heads, cuts: lookahead_objective.Lookahead(
        model=target, embeddings=heads, cuts=cuts),
    measure=lambda target, heads: lookahead_objective.Lookahead(
        model=target, embeddings=heads, cuts=CUTS),
    chain=lambda heads: strategies.pass_lookahead(heads, verifier=TOKEN),
    strategy=lambda heads, verifier, gamma, tree: strategies.pass_lookahead(
        heads, count=min(gamma, heads.num_forecasts),
        verifier=verifier or BLOCK),
    compared=lambda heads, tree: {
        name: tuple(strategies.pass_lookahead(heads, folded, verifier=rule)
                    for rule in (BLOCK, TOKEN))
        for name, folded in (("two passes", False), ("folded", True))},
    options=(Option("cuts", 32,
                    "pass: positions per training row at which look-ahead "
                    "tokens are inserted"),))

BLOCKWISE = Method(
    name="blockwise", heads=blockwise_network.BlockwiseHeads,
    learning_rate=LearningRate(bundled=3e-3),
    objective=lambda target, heads, all_heads, train_target:
        blockwise_objective.Blockwise(model=target, heads=heads, one_head=not all_heads),
    measure=lambda target, heads: blockwise_objective.Blockwise(
        model=target, heads=heads),
    chain=strategies.blockwise,
    strategy=lambda heads, verifier, gamma, tree: strategies.blockwise(
        heads, min(gamma, heads.num_forecasts))._replace(
            verifier=verifier or BLOCK),
    compared=lambda heads, tree: {"": tuple(
        strategies.blockwise(heads, top_k=k) for k in (None, 2))},
    head_options=(Option("hidden_width", 512,
                         "blockwise: width of a head's hidden layer"),),
    options=(Option("all_heads", False,
                    "blockwise: train all heads in every step. Default: one "
                    "randomly chosen head per step"),
             Option("train_target", False,
                    "blockwise: train the target jointly with its heads")))

_BLOCKS = Option(
    "blocks", 1, "medusa, medusa2, hydra: residual blocks per head")

MEDUSA = Method(
    name="medusa", heads=medusa_network.MedusaHeads,
    learning_rate=LearningRate(
        bundled=6e-3, published=1e-3, source="README of the Medusa repository"),
    objective=lambda target, heads: medusa_objective.Medusa(
        model=target, heads=heads),
    measure=lambda target, heads: medusa_objective.Medusa(model=target, heads=heads),
    chain=strategies.blockwise,
    strategy=_strategy(strategies.sampled_medusa),
    compared=_medusa_compared,
    head_options=(
        Option("output", "low_rank",
               "medusa, medusa2: output matrix of a head: own, a separate "
               "matrix; low_rank, the LM head plus a low-rank matrix; shared, "
               "the LM head", ("own", "low_rank", "shared")),
        Option("rank", 64, "medusa, medusa2: rank of the matrix of "
               "--output=low_rank"),
        _BLOCKS))

MEDUSA_2 = dataclasses.replace(
    MEDUSA, name="medusa2", tunes_target=True,
    learning_rate=LearningRate(
        bundled=2e-3, published=2e-3, source="arXiv:2401.10774"),
    objective=lambda target, heads, ramp, heads_weight, distill:
        medusa_objective.MedusaJoint(
            medusa=medusa_objective.Medusa(model=target, heads=heads), ramp=ramp,
            weight=heads_weight, distill=distill),
    options=(
        Option("ramp", "sine", "medusa2: shape of the increase of the heads' "
               "loss weight over the run", ("sine", "linear", "constant")),
        Option("heads_weight", 0.2, "medusa2: largest weight of the heads' "
               "loss"),
        Option("distill", None, "medusa2: train the target on its own "
               "distributions from before the run (KL divergence), not on the "
               "data. Default: true with --data=self, else false")))

HYDRA = Method(
    name="hydra", heads=hydra_network.HydraHeads,
    learning_rate=LearningRate(
        bundled=6e-3, published=5e-4, source="README of the Hydra repository"),
    objective=lambda target, heads: hydra_objective.Hydra(model=target, heads=heads),
    measure=lambda target, heads: hydra_objective.Hydra(model=target, heads=heads),
    chain=lambda heads: strategies.hydra(
        heads, chain_of(heads, heads.num_forecasts), "top_k", TOKEN),
    strategy=_strategy(strategies.hydra), compared=_hydra_compared,
    head_options=(_BLOCKS,))
