"""Draft models that sample static trees, with one pass per level.

SpecInfer (Miao et al. 2023, arXiv:2305.09781), Sequoia (Chen et al. 2024,
arXiv:2402.12374), RSD (Jeon et al. 2024, arXiv:2402.14160) and the drafts of
Hu et al. 2025 (arXiv:2502.18779) are choices of `parents` and `proposal`.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp

from specjax import verifiers
from specjax.decoding import constraining as constraints_lib
from specjax.decoding import rounds
from specjax.decoding.prefill import read_prompt
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import _common
from specjax.methods import _trees
from specjax.methods.networks import Params
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TRAVERSAL
from specjax.sampling import LogitsTransform
from specjax.trees import shapes
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModelTree(_common.OneModel, _trees.StaticTree):
  """Samples the children of every node from a draft model.

  A round costs one pass over the last two committed tokens, and one pass over
  the nodes with children of each level below the root. The model does not read
  leaves. An accepted path ends with at most one leaf, so at most two committed
  tokens are missing from the cache.

  Attributes:
    model: draft model over the target's vocabulary.
    parents: draft tree in any order, see `specjax.trees`; stored breadth-first.
    proposal: sampling method of the K children of a node. "iid": independent
      samples, all equal at temperature 0; "without_replacement": distinct
      samples, each from the renormalised remaining probabilities; "top_k": the
      K most likely tokens; "hybrid": first a sample outside the K - 1 most
      likely tokens, then these. At temperature 0 the last three methods draft
      the same children. "hybrid" puts the least likely child first, which makes
      a difference if the subtrees of siblings differ.
    transform: transform of the draft logits; None: the decoder's. Any transform
      is lossless, because the verifier gets the distributions after it.
  """

  model: Model
  parents: tuple[int, ...]
  proposal: str = "without_replacement"
  transform: LogitsTransform | None = None

  @property
  def autoregressive(self) -> bool:
    # Without i.i.d. children, the distribution of a child also depends on its
    # earlier siblings.
    return self.iid

  def init(self, params: Params, prompt: Prompt, prefill_output: ModelOutput
           ) -> Any:
    """Returns the cache after the prompt."""
    del prefill_output
    return read_prompt(self.model, params["drafter"], prompt).cache

  def propose(self, params: Params, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, Any]:
    """Samples the tokens of the tree for each row."""
    if self.num_nodes == 1:
      return rounds.root_only(state, self.model.vocab_size), state.drafter

    params = params["drafter"]
    logits, cache = _common.feed_last(
        self.model, params, state, state.drafter, size=2,
        more=_trees.fed_slots(self.parents)[1])
    step, carry, logits = constraints_lib.steered(
        self.transform.constraints, state.constraints,
        _common.model_step(self.model, params), cache, logits)
    tokens, probs, (cache, _) = self.draw(step, carry, logits, uniforms, state)
    return _common.tree_drafts(state, self.parents, tokens, probs), cache

  def commit(self, params: Params, drafter: chex.ArrayTree, draft: Draft,
             verdict: Verdict, target_output: ModelOutput, count: jax.Array
             ) -> Any:
    """Returns the cache with the accepted path compacted."""
    del params, draft, target_output
    slots, size = _trees.fed_slots(self.parents)
    slots = jnp.tile(slots, (count.shape[0], 1))
    return _common.keep_path(drafter, slots, verdict.path, size, count)


def specinfer(model: Model, parents: Sequence[int]) -> Strategy:
  """Drafts a tree of independent samples for recursive rejection.

  Miao et al. 2023 (arXiv:2305.09781, multi-step speculative sampling).

  >>> from specjax import testing, trees
  >>> drafter, _ = specinfer(testing.MarkovModel(7), trees.full_tree((2, 1)))
  >>> drafter.num_nodes, drafter.iid
  (5, True)

  Args:
    model: draft model over the target's vocabulary.
    parents: draft tree of N nodes, see `specjax.trees`.
  """
  return _tree(model, parents, "iid", verifiers.Recursive())


def spectr(model: Model, parents: Sequence[int]) -> Strategy:
  """Drafts a tree of independent samples for K-SEQ.

  Sun et al. 2023 (arXiv:2310.15141). The paper drafts K chains of L tokens,
  which is the tree `trees.full_tree((K, *[1] * (L - 1)))`.

  >>> from specjax import testing, trees
  >>> spectr(testing.MarkovModel(7), trees.full_tree((3, 1))).verifier
  KSeq()

  Args:
    model: draft model over the target's vocabulary.
    parents: draft tree of N nodes.
  """
  return _tree(model, parents, "iid", verifiers.KSeq())


def sequoia(model: Model, parents: Sequence[int]) -> Strategy:
  """Drafts a static tree with different siblings for recursive rejection.

  Chen et al. 2024 (arXiv:2402.12374): `trees.sequoia_tree` finds the tree for
  a measured acceptance, and siblings are drawn without replacement.

  >>> from specjax import testing, trees
  >>> best = trees.sequoia_tree([0.5, 0.3], nodes=4)
  >>> drafter, verifier = sequoia(testing.MarkovModel(7), best)
  >>> drafter.parents, verifier
  ((-1, 0, 0, 1), Recursive())

  Args:
    model: draft model over the target's vocabulary.
    parents: draft tree of N nodes.
  """
  return _tree(model, parents, "without_replacement", verifiers.Recursive())


def rsd(model: Model, branching: Sequence[int]) -> Strategy:
  """Drafts a tree with constant branching per level (RSD-C).

  Jeon et al. 2024 (arXiv:2402.14160): siblings are drawn without replacement,
  as by their Gumbel-top-k trick, and rejected recursively.

  >>> from specjax import testing, trees
  >>> rsd(testing.MarkovModel(7), branching=(2, 2, 1)).drafter.num_nodes
  11

  Args:
    model: draft model over the target's vocabulary.
    branching: children of a node at depth 0, 1, ...
  """
  return sequoia(model, shapes.full_tree(branching))


def traversal(model: Model, parents: Sequence[int]) -> Strategy:
  """Drafts a tree with different siblings for traversal verification.

  Weng et al. 2025 (arXiv:2505.12398). The rule verifies the tree from the
  leaves to the root. On a chain it equals block verification.

  >>> from specjax import testing, trees
  >>> traversal(testing.MarkovModel(7), trees.full_tree((2, 2))).verifier
  Traversal()

  Args:
    model: draft model over the target's vocabulary.
    parents: draft tree of N nodes.
  """
  return sequoia(model, parents)._replace(verifier=TRAVERSAL)


def hybrid_tree(model: Model, parents: Sequence[int]) -> Strategy:
  """Drafts one sampled child and the most likely children of every node.

  Hu et al. 2025 (arXiv:2502.18779).

  >>> from specjax import testing, trees
  >>> drafter, _ = hybrid_tree(testing.MarkovModel(7), trees.full_tree((3,)))
  >>> drafter.proposal
  'hybrid'

  Args:
    model: draft model over the target's vocabulary.
    parents: draft tree of N nodes.
  """
  return _tree(model, parents, "hybrid", verifiers.Recursive())


def top_k_tree(model: Model, parents: Sequence[int]) -> Strategy:
  """Drafts the most likely children of every node, verified by `TargetWalk`.

  Miao et al. 2023 (arXiv:2305.09781, expansion-based speculation). `TargetWalk`
  samples the target's token at a node, and continues at the child with this
  token, if there is one. For deterministic drafts no exact rule accepts more
  tokens in one round.

  >>> from specjax import testing, trees
  >>> top_k_tree(testing.MarkovModel(7), trees.full_tree((3, 2))).verifier
  TargetWalk()

  Args:
    model: draft model over the target's vocabulary.
    parents: draft tree of N nodes.
  """
  return _tree(model, parents, "top_k", verifiers.TargetWalk())


def _tree(model: Model, parents: Sequence[int], proposal: str,
          verifier: Verifier) -> Strategy:
  drafter = DraftModelTree(
      model=model, parents=tuple(parents), proposal=proposal)
  return Strategy(drafter, verifier)
