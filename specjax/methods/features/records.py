"""Methods that train layers over the target's features."""

import dataclasses

from specjax import verifiers
from specjax.methods import _drawn_trees
from specjax.methods import _expansion
from specjax.methods.features import eagle_objective
from specjax.methods.features import eagle_trees
from specjax.methods.features import mtp_objective
from specjax.methods.features import network
from specjax.methods.features import strategies
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

_FEED_NORMED = Option(
    "feed_normed", False, "eagle3, mtp: feed the next draft step with the "
    "hidden state after the final norm (EAGLE-3.1, published MTP modules), not "
    "before it")
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
  dynamic = eagle_trees.DynamicEagle(
      heads=heads, depth=depth, top_k=top_k,
      num_nodes=min(len(tree), _expansion.most_nodes(depth, top_k)))
  sampled = eagle_trees.SampledEagle(
      heads=heads, depth=depth, children=drawn,
      expanded=_drawn_trees.most_expanded(len(tree), depth, drawn))
  return found | {
      "dynamic tree": (Strategy(dynamic, walk),),
      "sampled dynamic tree": tuple(
          Strategy(sampled, rule) for rule in (TRAVERSAL, RECURSIVE))}


EAGLE_1 = Method(
    name="eagle1", heads=network.Eagle1Heads,
    learning_rate=LearningRate(
        bundled=2e-3, published=5e-5, size=8e9,
        source="main_deepspeed.py of the EAGLE repository"),
    objective=lambda target, heads, noise, law_weight:
        eagle_objective.Eagle1Objective(
            model=target, heads=heads, noise=noise, law_weight=law_weight),
    measure=lambda target, heads: eagle_objective.Eagle1Objective(
        model=target, heads=heads),
    chain=_layer_chain, strategy=_layer_strategy, compared=_layer_compared,
    head_options=(MLP_WIDTH, Option(
        "fusion_norms", False, "eagle1: normalise the token embedding and "
        "the feature before they are joined (DeepSeek-V3)")),
    options=(
        Option("noise", 0.2, "eagle1: width of the uniform noise added to the "
               "features that the layer reads, for rows of 512 tokens; it is "
               "scaled by 512 / row length"),
        Option("law_weight", 0.1, "eagle1: weight of the cross-entropy with "
               "the target's distribution; the feature loss has weight 1")))

EAGLE_3 = dataclasses.replace(
    EAGLE_1, name="eagle3", heads=network.Eagle3Heads,
    learning_rate=LearningRate(
        bundled=2e-3, published=1e-4, size=8e9,
        source="EAGLE-3 configurations of SpecForge"),
    objective=lambda target, heads, step_decay, normalizer, drop_outside:
        eagle_objective.Eagle3Objective(
            model=target, heads=heads, decay=step_decay, normalizer=normalizer,
            drop_outside=drop_outside),
    measure=lambda target, heads: eagle_objective.Eagle3Objective(
        model=target, heads=heads),
    head_options=(MLP_WIDTH, TAPS, _FEED_NORMED),
    options=(
        Option("step_decay", 0.8, "eagle3: factor by which the loss weight "
               "falls from one draft step to the next"),
        Option("normalizer", "rows", "eagle3: number by which each step's loss "
               "is divided: rows, all positions; mask, only the positions that "
               "contribute", ("rows", "mask")),
        Option("drop_outside", True, "eagle3: exclude positions whose most "
               "likely token under the target is not in the draft "
               "vocabulary")))

MTP = dataclasses.replace(
    EAGLE_1, name="mtp", heads=network.MTPHeads,
    learning_rate=LearningRate(
        bundled=2e-3, published=5e-5,
        source="sft.sh of the FastMTP repository"),
    objective=lambda target, heads, depth_decay: mtp_objective.MTPObjective(
        model=target, heads=heads, decay=depth_decay),
    measure=lambda target, heads: mtp_objective.MTPObjective(
        model=target, heads=heads),
    head_options=(
        MLP_WIDTH, TAPS, _FEED_NORMED,
        Option("reuse", False, "mtp: train one module that is applied again to "
               "its own output (FastMTP). Default: one module per draft token"),
        Option("chained", True, "mtp: each module reads the output of the "
               "module before it; with --nochained all read the target")),
    options=(Option("depth_decay", 0.6,
                    "mtp, parallel_layers: factor by which the loss weight "
                    "falls from one draft token to the next"),))

PARALLEL_LAYERS = dataclasses.replace(
    MTP, name="parallel_layers", heads=network.ParallelLayers,
    head_options=(MLP_WIDTH,))
