"""Methods that draft a whole block in one pass over the target's features."""

from collections.abc import Sequence

from specjax import verifiers
from specjax.methods import stop_rules
from specjax.methods.blocks.parallel_drafter import Parallel
from specjax.methods.blocks.parallel_drafter import ParallelTree
from specjax.methods.blocks.parallel_network import ParallelHeads
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.types import Verifier


def parallel(heads: ParallelHeads, gamma: int | None = None,
             parents: Sequence[int] | None = None, proposal: str = "iid",
             verifier: Verifier = BLOCK,
             stop: stop_rules.StopRule | None = None) -> Strategy:
  """A chain or a tree drawn from the laws of one block.

  DSpark (arXiv:2607.05147) has a Markov head, by which the laws are conditional
  ones, and DFlash (arXiv:2602.06036) none. They are published with chains and
  token verification.

  >>> from specjax import methods
  >>> own = methods.ParallelHeads(
  ...     width=8, vocab_size=7, layers=1, heads=1, kv_heads=1, head_dim=8,
  ...     mlp_width=8, context_length=64, block_size=3, taps=(1,))
  >>> parallel(own).drafter.parents, parallel(own).verifier
  ((-1, 0, 1, 2), Block())

  Args:
    heads: of the target.
    gamma: drafted tokens of a chain, at most K; None: K.
    parents: N entries, a tree with its root, in place of the chain.
    proposal: how the children of a node are drawn, see `drafters.Parallel`.
    verifier: a rule for these drafts.
    stop: one of `methods.stop_rules`, for a chain.
  """
  if parents is None:
    most = heads.num_forecasts
    parents = range(-1, most if gamma is None else min(gamma, most))
  return Strategy(Parallel(
      heads=heads, parents=tuple(parents), proposal=proposal, stop=stop),
      verifier)


def ddtree(heads: ParallelHeads, num_nodes: int = 64) -> Strategy:
  """The likeliest paths of one block, and a walk of the target over them.

  DDTree (arXiv:2604.12989): without a Markov head, the best tree of the laws.

  >>> from specjax import methods
  >>> own = methods.ParallelHeads(
  ...     width=8, vocab_size=7, layers=1, heads=1, kv_heads=1, head_dim=8,
  ...     mlp_width=8, context_length=64, block_size=3, taps=(1,))
  >>> ddtree(own, num_nodes=12).verifier
  TargetWalk()

  Args:
    heads: of the target.
    num_nodes: N, the root included.
  """
  drafter = ParallelTree(
      heads=heads, num_nodes=num_nodes, top_k=min(10, heads.draft_size))
  return Strategy(drafter, verifiers.TargetWalk())
