"""How a target learns to draft for itself: one record a method.

A `Method` says which heads it trains, by which objective, and how the target
drafts with them. Scripts read everything from the record, so that another
method (another kind of head) is one record here beside its own files: its class
of `models.heads.Heads`, its objective and its strategy.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import os
from typing import Any

from specjax import contract
from specjax import drafters
from specjax import strategies
from specjax import verifiers
from specjax.models import heads as heads_lib
from specjax.models.heads import Heads
from specjax.models.transformer import Transformer
from specjax.strategies import Strategy
from specjax.training import objectives
from specjax.training.objectives import DrafterObjective
from specjax.types import Verifier

_TOP_K = 8  # nodes that a level of a dynamic tree expands, children of each
_DRAWN = 4  # children of an expanded node, where they are drawn
_CUTS = 128  # cut points of a row that is measured, for look-ahead tokens

_TOKEN, _BLOCK = verifiers.Token(), verifiers.Block()
_RECURSIVE, _TRAVERSAL = verifiers.Recursive(), verifiers.Traversal()


@dataclasses.dataclass(frozen=True)
class Option:
  """A setting of a method, which a script offers as a flag.

  Attributes:
    name: of the keyword argument.
    default: of its type; None is a bool that follows the data: whether the
      target wrote it itself.
    help: what it sets, after the method's name.
    choices: the values that it may take; empty: any.
  """

  name: str
  default: bool | int | float | str | None
  help: str
  choices: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
  """A way to train and to use what a target drafts for itself with.

  Attributes:
    name: what flags and files call it.
    heads: the class of the heads.
    learning_rate: default peak, of the heads.
    objective: `(target, heads, **options) -> DrafterObjective`, what is
      minimised.
    measure: `(target, heads) -> DrafterObjective`, whose `score` measures the
      forecasts.
    chain: `heads -> Strategy`, exact on the likeliest chain: by which greedy
      decoding is measured while the heads train.
    strategy: `(heads, verifier, gamma, tree) -> Strategy`, for a rule or None
      (the method's own), gamma tokens of a chain, and a function that makes the
      parents of a tree.
    compared: `(heads, tree) -> {name: strategies of one drafter}`, what a study
      compares; the first one's rollouts are those that the others share.
    head_options: of `heads.for_target`.
    options: of `objective`.
    tunes_target: whether the target is always trained with its heads. A method
      with the option `train_target` leaves that to its user.
  """

  name: str
  heads: type[Heads]
  learning_rate: float
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
    """Whether the target is trained too, with these values of the options."""
    return self.tunes_target or bool(options.get("train_target", False))


def of(heads: Heads) -> Method:
  """The first method that has heads of this kind; it knows how to draft."""
  return next(m for m in METHODS if m.heads.kind == heads.kind)


def load_heads(directory: str | os.PathLike[str], target: Transformer,
               dtype: Any = None) -> tuple[Heads, dict[str, Any]]:
  """`models.heads.load_heads`, of whatever kind a method here has."""
  kinds = tuple(dict.fromkeys(method.heads for method in METHODS))
  return heads_lib.load_heads(directory, target, dtype, kinds)


def _chain_of(heads, gamma):
  return tuple(range(-1, min(gamma, heads.num_forecasts)))


def _medusa_strategy(heads, verifier: Verifier | None, gamma, tree) -> Strategy:
  """A sampled chain or tree, or a top-k tree: what the rule asks for."""
  rule = verifiers.TargetWalk() if verifier is None else verifier
  requires = contract.rule(rule).requires
  if "chain" in requires:
    chain = _chain_of(heads, gamma)
    return strategies.sampled_medusa(heads, chain, "iid", rule)
  if not requires:
    return strategies.medusa(heads, tree())._replace(verifier=rule)
  return strategies.sampled_medusa(
      heads, tree(), "iid" if "iid" in requires else "without_replacement",
      rule)


def _medusa_compared(heads, tree) -> dict[str, tuple[Strategy, ...]]:
  tree, chain = tree(), _chain_of(heads, heads.num_forecasts)
  sampled = lambda parents, proposal, *rules: tuple(
      strategies.sampled_medusa(heads, parents, proposal, rule)
      for rule in rules)
  return {
      "top-k tree": (strategies.medusa(heads, tree),
                     strategies.medusa(heads, tree, typical=True)),
      "sampled chain": sampled(chain, "iid", _BLOCK, _TOKEN),
      "sampled tree": sampled(
          tree, "without_replacement", _TRAVERSAL, _RECURSIVE),
      "i.i.d. tree": sampled(
          tree, "iid", _TRAVERSAL, _RECURSIVE, verifiers.KSeq())}


def _eagle(heads, parents, proposal, rule) -> Strategy:
  return Strategy(drafters.Eagle(
      heads=heads, parents=tuple(parents), proposal=proposal), rule)


def _layer_chain(heads, rule=_TOKEN, gamma=None) -> Strategy:
  """A sampled chain, of one module used again or of one for each token."""
  if gamma and not heads.reuse:
    gamma = min(gamma, heads.modules)
  return strategies.mtp(heads, gamma, rule)


def _layer_strategy(heads, verifier: Verifier | None, gamma, tree) -> Strategy:
  """A sampled chain or tree, or a top-k tree: what the rule asks for."""
  rule = verifier or _BLOCK
  requires = contract.rule(rule).requires
  if not heads.reuse or "chain" in requires:
    return _layer_chain(heads, rule, gamma)
  if not requires:
    return _eagle(heads, tree(), "top_k", rule)
  return _eagle(
      heads, tree(), "iid" if "iid" in requires else "without_replacement",
      rule)


def _layer_compared(heads, tree) -> dict[str, tuple[Strategy, ...]]:
  found = {"sampled chain": tuple(
      _layer_chain(heads, rule) for rule in (_BLOCK, _TOKEN))}
  if not heads.reuse:
    return found
  tree, depth, walk = tree(), heads.num_forecasts, verifiers.TargetWalk()
  top_k, drawn = (min(x, heads.draft_size) for x in (_TOP_K, _DRAWN))
  dynamic = drafters.DynamicEagle(
      heads=heads, depth=depth, top_k=top_k,
      num_nodes=min(len(tree), 1 + top_k + (depth - 1) * top_k**2))
  expanded = ((len(tree) - 1) // drawn - 1) // max(depth - 1, 1)
  sampled = drafters.SampledEagle(
      heads=heads, depth=depth, expanded=max(expanded, 1), children=drawn)
  return found | {
      "top-k tree": (_eagle(heads, tree, "top_k", walk),),
      "dynamic tree": (Strategy(dynamic, walk),),
      "sampled tree": tuple(
          _eagle(heads, tree, "without_replacement", rule)
          for rule in (_TRAVERSAL, _RECURSIVE)),
      "sampled dynamic tree": tuple(
          Strategy(sampled, rule) for rule in (_TRAVERSAL, _RECURSIVE))}


def _hydra_strategy(heads, verifier: Verifier | None, gamma, tree) -> Strategy:
  """A sampled chain or tree, or a top-k tree: what the rule asks for."""
  rule = verifiers.TargetWalk() if verifier is None else verifier
  requires = contract.rule(rule).requires
  if "chain" in requires:
    return strategies.hydra(heads, _chain_of(heads, gamma), "iid", rule)
  proposal = ("top_k" if not requires else
              "iid" if "iid" in requires else "without_replacement")
  return strategies.hydra(heads, tree(), proposal, rule)


def _hydra_compared(heads, tree) -> dict[str, tuple[Strategy, ...]]:
  tree, chain = tree(), _chain_of(heads, heads.num_forecasts)
  sampled = lambda parents, proposal, *rules: tuple(
      strategies.hydra(heads, parents, proposal, rule) for rule in rules)
  return {
      "top-k tree": (strategies.hydra(heads, tree),),
      "sampled chain": sampled(chain, "iid", _BLOCK, _TOKEN),
      "sampled tree": sampled(
          tree, "without_replacement", _TRAVERSAL, _RECURSIVE)}


def _parallel_strategy(heads, verifier: Verifier | None, gamma, tree
                       ) -> Strategy:
  """A sampled chain or tree, or the likeliest paths: what the rule asks for."""
  rule = verifier or _BLOCK
  requires = contract.rule(rule).requires
  if "chain" in requires:
    return strategies.parallel(heads, gamma, verifier=rule)
  if not requires:
    return strategies.ddtree(heads, len(tree()))._replace(verifier=rule)
  return strategies.parallel(
      heads, parents=tree(), verifier=rule,
      proposal="iid" if "iid" in requires else "without_replacement")


def _parallel_compared(heads, tree) -> dict[str, tuple[Strategy, ...]]:
  tree = tree()
  walked = strategies.ddtree(heads, len(tree))
  return {
      "sampled chain": tuple(strategies.parallel(heads, verifier=rule)
                             for rule in (_BLOCK, _TOKEN)),
      "sampled tree": tuple(
          strategies.parallel(heads, parents=tree, verifier=rule,
                              proposal="without_replacement")
          for rule in (_TRAVERSAL, _RECURSIVE)),
      "best-first tree": (walked,)}


PASS = Method(
    name="pass", heads=heads_lib.LookaheadEmbeddings, learning_rate=0.05,
    objective=lambda target, heads, cuts: objectives.Lookahead(
        model=target, embeddings=heads, cuts=cuts),
    measure=lambda target, heads: objectives.Lookahead(
        model=target, embeddings=heads, cuts=_CUTS),
    chain=lambda heads: strategies.pass_lookahead(heads, verifier=_TOKEN),
    strategy=lambda heads, verifier, gamma, tree: strategies.pass_lookahead(
        heads, count=min(gamma, heads.num_forecasts),
        verifier=verifier or _BLOCK),
    compared=lambda heads, tree: {
        name: tuple(strategies.pass_lookahead(heads, folded, verifier=rule)
                    for rule in (_BLOCK, _TOKEN))
        for name, folded in (("two passes", False), ("folded", True))},
    options=(Option("cuts", 32,
                    "PaSS: cut points of a row that is trained on"),))

BLOCKWISE = Method(
    name="blockwise", heads=heads_lib.BlockwiseHeads, learning_rate=3e-3,
    objective=lambda target, heads, all_heads, train_target:
        objectives.Blockwise(model=target, heads=heads, one_head=not all_heads),
    measure=lambda target, heads: objectives.Blockwise(
        model=target, heads=heads),
    chain=strategies.blockwise,
    strategy=lambda heads, verifier, gamma, tree: strategies.blockwise(
        heads, min(gamma, heads.num_forecasts))._replace(
            verifier=verifier or _BLOCK),
    compared=lambda heads, tree: {"": tuple(
        strategies.blockwise(heads, top_k=k) for k in (None, 2))},
    head_options=(Option("hidden_width", 512,
                         "blockwise: of a head's inner layer"),),
    options=(Option("all_heads", False,
                    "blockwise: train all heads in every step, not one"),
             Option("train_target", False,
                    "blockwise: train the target with its heads")))

_BLOCKS = Option("blocks", 1, "Medusa and Hydra: residual blocks a head")

MEDUSA = Method(
    name="medusa", heads=heads_lib.MedusaHeads, learning_rate=6e-3,
    objective=lambda target, heads: objectives.Medusa(
        model=target, heads=heads),
    measure=lambda target, heads: objectives.Medusa(model=target, heads=heads),
    chain=strategies.blockwise,
    strategy=_medusa_strategy, compared=_medusa_compared,
    head_options=(
        Option("output", "low_rank",
               "Medusa: a head's output matrix, its own, the LM head plus a "
               "low rank, or the LM head", ("own", "low_rank", "shared")),
        Option("rank", 64, "Medusa: of that low rank"),
        _BLOCKS))

MEDUSA_2 = dataclasses.replace(
    MEDUSA, name="medusa2", learning_rate=2e-3, tunes_target=True,
    objective=lambda target, heads, ramp, heads_weight, distill:
        objectives.MedusaJoint(
            medusa=objectives.Medusa(model=target, heads=heads), ramp=ramp,
            weight=heads_weight, distill=distill),
    options=(
        Option("ramp", "sine", "medusa2: how the weight of the heads' loss "
               "rises over the run", ("sine", "linear", "constant")),
        Option("heads_weight", 0.2, "medusa2: peak of that weight"),
        Option("distill", None, "medusa2: hold the target to its own laws "
               "before training, not to the data; default: with --data=self")))

HYDRA = Method(
    name="hydra", heads=heads_lib.HydraHeads, learning_rate=6e-3,
    objective=lambda target, heads: objectives.Hydra(model=target, heads=heads),
    measure=lambda target, heads: objectives.Hydra(model=target, heads=heads),
    chain=lambda heads: strategies.hydra(
        heads, _chain_of(heads, heads.num_forecasts), "top_k", _TOKEN),
    strategy=_hydra_strategy, compared=_hydra_compared,
    head_options=(_BLOCKS,))

# Of every method whose layers read the target's hidden states.
_TAPS = Option(
    "taps", "", "eagle3, parallel: the target's hidden states that are read, "
    "such as 2,4,final; default: three, from low to high")
_MLP_WIDTH = Option(
    "mlp_width", 512, "eagle1, eagle3, mtp, parallel: inner width of a layer's "
    "MLP")

EAGLE_1 = Method(
    name="eagle1", heads=heads_lib.Eagle1Heads, learning_rate=2e-3,
    objective=lambda target, heads, noise, law_weight: objectives.Eagle1(
        model=target, heads=heads, noise=noise, law_weight=law_weight),
    measure=lambda target, heads: objectives.Eagle1(model=target, heads=heads),
    chain=_layer_chain, strategy=_layer_strategy, compared=_layer_compared,
    head_options=(_MLP_WIDTH,),
    options=(
        Option("noise", 0.2, "eagle1: width of the noise on features, in rows "
               "of 512 tokens"),
        Option("law_weight", 0.1, "eagle1: of the law's loss, beside the "
               "feature's")))

EAGLE_3 = dataclasses.replace(
    EAGLE_1, name="eagle3", heads=heads_lib.Eagle3Heads,
    objective=lambda target, heads, step_decay, normalizer, drop_outside:
        objectives.Eagle3(
            model=target, heads=heads, decay=step_decay, normalizer=normalizer,
            drop_outside=drop_outside),
    measure=lambda target, heads: objectives.Eagle3(model=target, heads=heads),
    head_options=(_MLP_WIDTH, _TAPS, Option(
        "feed_normed", False, "eagle3: a step is fed what the head read at the "
        "one before, after the norm (EAGLE-3.1)")),
    options=(
        Option("step_decay", 0.8, "eagle3: weight of a step over the one "
               "before"),
        Option("normalizer", "rows", "eagle3: what sums are divided by, all "
               "places or those that count", ("rows", "mask")),
        Option("drop_outside", True, "eagle3: leave out places whose likeliest "
               "token cannot be drafted")))

MTP = dataclasses.replace(
    EAGLE_1, name="mtp", heads=heads_lib.MTPHeads,
    objective=lambda target, heads, depth_decay: objectives.MTP(
        model=target, heads=heads, decay=depth_decay),
    measure=lambda target, heads: objectives.MTP(model=target, heads=heads),
    head_options=(
        _MLP_WIDTH,
        Option("reuse", False, "mtp: one module, used again on its own output "
               "(FastMTP), not one for every token"),
        Option("chained", True, "mtp: a module reads the one before, not the "
               "target")),
    options=(Option("depth_decay", 0.6,
                    "mtp: weight of a depth over the one before"),))

PARALLEL_LAYERS = dataclasses.replace(
    MTP, name="parallel_layers", heads=heads_lib.ParallelLayers,
    head_options=(_MLP_WIDTH,))

PARALLEL = Method(
    name="parallel", heads=heads_lib.ParallelHeads, learning_rate=2e-3,
    objective=lambda target, heads, anchors, position_weights, position_decay,
        ce_share, confidence_weight: objectives.Parallel(
            model=target, heads=heads, anchors=anchors,
            position_weights=position_weights, position_decay=position_decay,
            ce_share=ce_share, confidence_weight=confidence_weight),
    measure=lambda target, heads: objectives.Parallel(
        model=target, heads=heads, anchors=_CUTS),
    chain=lambda heads: strategies.parallel(
        heads, proposal="top_k", verifier=_TOKEN),
    strategy=_parallel_strategy, compared=_parallel_compared,
    head_options=(
        Option("layers", 1, "parallel: draft layers"),
        _MLP_WIDTH, _TAPS,
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

KANGAROO = Method(
    name="kangaroo", heads=heads_lib.KangarooAdapter, learning_rate=1e-3,
    objective=lambda target, heads: objectives.Kangaroo(
        model=target, adapter=heads),
    measure=lambda target, heads: objectives.Kangaroo(
        model=target, adapter=heads),
    chain=lambda heads: strategies.kangaroo(
        heads, heads.num_forecasts, stop=None, verifier=_TOKEN),
    strategy=lambda heads, verifier, gamma, tree: strategies.kangaroo(
        heads, gamma, stop=None, verifier=verifier or _BLOCK),
    compared=lambda heads, tree: {"": tuple(
        strategies.kangaroo(heads, heads.num_forecasts, None, rule)
        for rule in (_BLOCK, _TOKEN, verifiers.GreedyBlock()))},
    head_options=(Option("exit", 1, "kangaroo: layers of the target before "
                         "the adapter"),))

METHODS = (PASS, BLOCKWISE, MEDUSA, MEDUSA_2, HYDRA, EAGLE_1, EAGLE_3, MTP,
           PARALLEL_LAYERS, PARALLEL, KANGAROO)
