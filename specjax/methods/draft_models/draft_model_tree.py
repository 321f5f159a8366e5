"""Draft models that sample static trees, with one pass per level.

SpecInfer (Miao et al. 2023, arXiv:2305.09781), Sequoia (Chen et al. 2024,
arXiv:2402.12374), RSD (Jeon et al. 2024, arXiv:2402.14160) and the drafts of
Hu et al. 2025 (arXiv:2502.18779) differ only in `parents` and `proposal`.
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

  The first pass of a round reads the last two committed tokens. Then each level
  below the root costs one pass over its nodes with children. The model does not
  read leaves. An accepted path ends with at most one leaf, and the next token
  follows it. So the cache lacks at most two committed tokens.

  Attributes:
    model: draft model over the target's vocabulary.
    parents: draft tree in any order, see `specjax.trees`; stored breadth-first.
    proposal: sampling method of the K children of a node. "iid": independent
      samples, all equal at temperature 0; "without_replacement": distinct
      samples, each from the renormalised remaining probabilities; "top_k": the
      K most likely tokens; "hybrid": a sample outside the K - 1 most likely
      tokens, followed by these K - 1 tokens. At temperature 0 the last three
      methods draft the same children. Only their order differs: "hybrid" puts
      the least likely child first. The order matters if the subtrees of
      siblings differ.
    transform: transform of the draft logits; None uses the decoder's transform.
      Any transform is lossless, because the verifier receives the transformed
      distributions.
  """

  model: Model
  parents: tuple[int, ...]
  proposal: str = "without_replacement"
  transform: LogitsTransform | None = None

  @property
  def autoregressive(self) -> bool:
    # An autoregressive drafter's q depends on the context alone. Unless the
    # children are i.i.d., q of a child also depends on its earlier siblings.
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
    """Returns the cache with only the accepted path of the draft."""
    del params, draft, target_output
    slots, size = _trees.fed_slots(self.parents)
    slots = jnp.tile(slots, (count.shape[0], 1))
    return _common.keep_path(drafter, slots, verdict.path, size, count)


def specinfer(model: Model, parents: Sequence[int]) -> Strategy:
  """Drafts a tree of i.i.d. children for recursive rejection sampling.

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
  """Drafts a tree of i.i.d. children for the verifier K-SEQ.

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
  """Drafts a static tree without replacement for recursive rejection sampling.

  Chen et al. 2024 (arXiv:2402.12374). Siblings are drawn without replacement.
  `trees.sequoia_tree` computes the best tree for measured acceptance rates.

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

  Jeon et al. 2024 (arXiv:2402.14160). Siblings are drawn without replacement,
  with the same distribution as in the paper's Gumbel-top-k trick. Recursive
  rejection sampling verifies them.

  >>> from specjax import testing, trees
  >>> rsd(testing.MarkovModel(7), branching=(2, 2, 1)).drafter.num_nodes
  11

  Args:
    model: draft model over the target's vocabulary.
    branching: number of children of each node at depth 0, 1, ...
  """
  return sequoia(model, shapes.full_tree(branching))


def traversal(model: Model, parents: Sequence[int]) -> Strategy:
  """Drafts a tree without replacement for traversal verification.

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
  samples the target's token at a node. If a child has this token, it continues
  there. For deterministic drafts no exact rule accepts more tokens in one
  round.

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
