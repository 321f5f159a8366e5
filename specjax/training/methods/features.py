"""Methods that train layers over the target's features."""

import dataclasses

from specjax import drafters
from specjax import strategies
from specjax import verifiers
from specjax.drafters import drawn_trees
from specjax.drafters import expansion
from specjax.models import heads as heads_lib
from specjax.strategies import Strategy
from specjax.strategies.base import BLOCK
from specjax.strategies.base import TOKEN
from specjax.strategies.base import TRAVERSAL
from specjax.training import objectives
from specjax.training.methods.base import Method
from specjax.training.methods.base import MLP_WIDTH
from specjax.training.methods.base import Option
from specjax.training.methods.base import RECURSIVE
from specjax.training.methods.base import suited
from specjax.training.methods.base import TAPS
from specjax.types import Verifier

_FEED_NORMED = Option(
    "feed_normed", False, "eagle3, mtp: a step is fed what the head read at "
    "the one before, after the norm (EAGLE-3.1, published MTP modules)")
_TOP_K = 8  # nodes that a level of a dynamic tree expands, children of each
_DRAWN = 4  # children of an expanded node, where they are drawn


def _layer_tree(heads, parents, proposal, rule) -> Strategy:
  return strategies.mtp(
      heads, verifier=rule, parents=parents, proposal=proposal)


def _layer_chain(heads, rule=TOKEN, gamma=None) -> Strategy:
  """A sampled chain, of one module used again or of one for each token."""
  if gamma and not heads.reuse:
    gamma = min(gamma, heads.modules)
  return strategies.mtp(heads, gamma, rule)


def _layer_strategy(heads, verifier: Verifier | None, gamma, tree) -> Strategy:
  """A sampled chain or tree, or a top-k tree: what the rule asks for."""
  rule = verifier or BLOCK
  return suited(
      rule, lambda: _layer_chain(heads, rule, gamma),
      lambda: _layer_tree(heads, tree(), "top_k", rule),
      lambda proposal: _layer_tree(heads, tree(), proposal, rule))


def _layer_compared(heads, tree) -> dict[str, tuple[Strategy, ...]]:
  tree, depth, walk = tree(), heads.num_forecasts, verifiers.TargetWalk()
  found = {
      "sampled chain": tuple(
          _layer_chain(heads, rule) for rule in (BLOCK, TOKEN)),
      "top-k tree": (_layer_tree(heads, tree, "top_k", walk),),
      "sampled tree": tuple(
          _layer_tree(heads, tree, "without_replacement", rule)
          for rule in (TRAVERSAL, RECURSIVE))}
  if not heads.reuse:
    return found
  top_k, drawn = (min(x, heads.draft_size) for x in (_TOP_K, _DRAWN))
  dynamic = drafters.DynamicEagle(
      heads=heads, depth=depth, top_k=top_k,
      num_nodes=min(len(tree), expansion.most_nodes(depth, top_k)))
  sampled = drafters.SampledEagle(
      heads=heads, depth=depth, children=drawn,
      expanded=drawn_trees.most_expanded(len(tree), depth, drawn))
  return found | {
      "dynamic tree": (Strategy(dynamic, walk),),
      "sampled dynamic tree": tuple(
          Strategy(sampled, rule) for rule in (TRAVERSAL, RECURSIVE))}


EAGLE_1 = Method(
    name="eagle1", heads=heads_lib.Eagle1Heads, learning_rate=2e-3,
    objective=lambda target, heads, noise, law_weight: objectives.Eagle1(
        model=target, heads=heads, noise=noise, law_weight=law_weight),
    measure=lambda target, heads: objectives.Eagle1(model=target, heads=heads),
    chain=_layer_chain, strategy=_layer_strategy, compared=_layer_compared,
    head_options=(MLP_WIDTH, Option(
        "fusion_norms", False, "eagle1: norm the embedding and the feature "
        "before they are joined (DeepSeek-V3)")),
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
    head_options=(MLP_WIDTH, TAPS, _FEED_NORMED),
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
        MLP_WIDTH, TAPS, _FEED_NORMED,
        Option("reuse", False, "mtp: one module, used again on its own output "
               "(FastMTP), not one for every token"),
        Option("chained", True, "mtp: a module reads the one before, not the "
               "target")),
    options=(Option("depth_decay", 0.6,
                    "mtp: weight of a depth over the one before"),))

PARALLEL_LAYERS = dataclasses.replace(
    MTP, name="parallel_layers", heads=heads_lib.ParallelLayers,
    head_options=(MLP_WIDTH,))
