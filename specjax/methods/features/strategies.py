"""Methods whose drafter is a layer over the target's features."""

from collections.abc import Sequence

from specjax import verifiers
from specjax.methods.features.eagle_drafter import Eagle
from specjax.methods.features.eagle_drafter import EagleChain
from specjax.methods.features.eagle_trees import DynamicEagle
from specjax.methods.features.eagle_trees import SampledEagle
from specjax.methods.features.mtp_drafter import MTP
from specjax.methods.features.mtp_drafter import MTPTree
from specjax.methods.features.network import FeatureHeads
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TRAVERSAL
from specjax.types import Verifier


def eagle(heads: FeatureHeads, parents: Sequence[int] | None = None,
          proposal: str = "without_replacement",
          verifier: Verifier | None = None) -> Strategy:
  """Draws of a layer that reads the target's features, as a chain or a tree.

  EAGLE (Li et al. 2024, arXiv:2401.15077) and EAGLE-3 (arXiv:2503.01840); the
  target is that which `heads.attach` returns.

  >>> import jax
  >>> import specjax as sj
  >>> from specjax import methods
  >>> pair = sj.testing.tiny_pair(5)
  >>> own = methods.Eagle3Heads.for_target(pair.target, 4, taps=(0, 1))
  >>> given = pair.params["target"]
  >>> target, params = own.attach(
  ...     pair.target, given, own.init(jax.random.key(0), given))
  >>> decoder = eagle(own).decoder(target)
  >>> text = decoder.generate(
  ...     params, [[3, 1]], jax.random.key(1), max_new_tokens=6)
  >>> len(text.tokens[0]), decoder.verifier
  (8, Block())

  Args:
    heads: the layer, of one module.
    parents: N entries, the tree with its root; None: a drawn chain of as many
      tokens as the layer forecasts.
    proposal: how the children of a node are drawn, see
      `drafters.TreeLanguageModel`; EAGLE's own trees are "top_k".
    verifier: None: block verification of a chain, traversal of a drawn tree,
      and the target's walk through a deterministic one.
  """
  if parents is None:
    drafter = EagleChain(heads=heads, gamma=heads.num_forecasts)
    return Strategy(drafter, verifier or BLOCK)
  return _tree(Eagle(
      heads=heads, parents=tuple(parents), proposal=proposal), verifier)


def eagle_dynamic(heads: FeatureHeads, depth: int = 6, top_k: int = 10,
                  num_nodes: int = 60) -> Strategy:
  """EAGLE's tree of the likeliest candidates, whose shape follows them.

  EAGLE-2 (Li et al. 2024, arXiv:2406.16858), and EAGLE-3 as it is served.

  >>> from specjax import testing
  >>> from specjax import methods
  >>> own = methods.Eagle1Heads.for_target(testing.tiny_pair(5).target, 4)
  >>> eagle_dynamic(own, depth=3, top_k=2, num_nodes=7).verifier
  TargetWalk()

  Args:
    heads: the layer, of one module.
    depth: levels below the root.
    top_k: nodes expanded of a level, and children of each.
    num_nodes: N, the root included.
  """
  return Strategy(DynamicEagle(
      heads=heads, depth=depth, top_k=top_k, num_nodes=num_nodes),
      verifiers.TargetWalk())


def eagle_sampled(heads: FeatureHeads, depth: int, expanded: int, children: int,
                  verifier: Verifier = TRAVERSAL) -> Strategy:
  """A drawn tree of EAGLE's that is expanded where the layer is confident.

  Not in the EAGLE papers, whose trees are deterministic: nodes are expanded by
  their score and never dropped by it, so that rules for sampled trees are
  exact.

  >>> from specjax import testing
  >>> from specjax import methods
  >>> own = methods.Eagle1Heads.for_target(testing.tiny_pair(5).target, 4)
  >>> eagle_sampled(own, depth=3, expanded=2, children=2).drafter.num_nodes
  11

  Args:
    heads: the layer, of one module.
    depth: levels below the root.
    expanded: nodes of a level that get children.
    children: of each, and of the root.
    verifier: a rule for drawn trees.
  """
  return Strategy(SampledEagle(
      heads=heads, depth=depth, expanded=expanded, children=children), verifier)


def mtp(heads: FeatureHeads, gamma: int | None = None,
        verifier: Verifier | None = None,
        parents: Sequence[int] | None = None,
        proposal: str = "without_replacement") -> Strategy:
  """Modules of multi-token prediction draft a chain or a tree, each a depth.

  DeepSeek-V3 (arXiv:2412.19437, section 2.2) and Gloeckle et al. 2024
  (arXiv:2404.19737). One module that is used again and again (FastMTP,
  arXiv:2509.18362) drafts as EAGLE does.

  >>> from specjax import testing
  >>> from specjax import methods
  >>> target = testing.tiny_pair(5).target
  >>> mtp(methods.MTPHeads.for_target(target, 3)).drafter.gamma
  3
  >>> again = methods.MTPHeads.for_target(target, 3, reuse=True)
  >>> mtp(again).drafter.num_nodes
  4
  >>> own = methods.MTPHeads.for_target(target, 3)
  >>> mtp(own, parents=(-1, 0, 0, 1)).verifier
  Traversal()

  Args:
    heads: its modules.
    gamma: drafted tokens of a chain, at most as many as modules unless one is
      used again; None: as many as the layer forecasts.
    verifier: None: block verification of a chain, traversal of a drawn tree,
      and the target's walk through a deterministic one.
    parents: N entries, the tree with its root; None: a drawn chain.
    proposal: how the children of a node are drawn, see
      `drafters.TreeLanguageModel`.

  Raises:
    ValueError: both a tree and the length of a chain are given.
  """
  if parents is not None and gamma is not None:
    raise ValueError(f"gamma is {gamma} and parents is given as well; a tree "
                     "has its own depth: give one of the two")
  if parents is not None:
    kind = Eagle if heads.reuse else MTPTree
    return _tree(kind(heads=heads, parents=tuple(parents), proposal=proposal),
                 verifier)
  if heads.reuse:
    gamma = heads.num_forecasts if gamma is None else gamma
    return Strategy(
        EagleChain(heads=heads, gamma=gamma), verifier or BLOCK)
  return Strategy(MTP(heads=heads, gamma=gamma), verifier or BLOCK)


def _tree(drafter, verifier: Verifier | None) -> Strategy:
  """A static tree and the rule for it, unless one is given."""
  return Strategy(drafter, verifier or (
      verifiers.TargetWalk() if drafter.proposal == "top_k" else
      BLOCK if drafter.chain else TRAVERSAL))
