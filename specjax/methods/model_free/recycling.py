"""Token recycling: drafts from the target's earlier predictions.

See Luo et al. 2024 (arXiv:2408.08696). Every sequence of a batch has a table
M `[V, K]` with K likely successors of each of the V tokens of the vocabulary.
The draft is a tree of fixed shape. If a node has token x, its child r = 0..K-1
has token M[x, r].

Every pass of the target computes logits at all nodes of the draft. The K most
likely next tokens after a node replace the successors of the node's token in
the table, even if the node was rejected. A round needs one gather per level of
the tree, one top-K of the target's logits and one scatter.

The draft distributions are one-hot. The output distribution is exact with
`verifiers.TargetWalk` for trees, and with every verification rule for chains.
"""

from collections.abc import Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import interfaces
from specjax import verifiers
from specjax.decoding import rounds
from specjax.interfaces import Model
from specjax.methods import _common
from specjax.methods import _trees
from specjax.methods.networks import Params
from specjax.methods.strategy import Strategy
from specjax.sampling import LogitsTransform
from specjax.trees import shapes
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict

# Entry r is the fraction of rounds in which the target's next token was child r
# of the root. It was measured with SmolLM2-135M-Instruct at temperature 0 and a
# tree of 40 nodes, on 64 to 96 tokens after eight prompts of
# data/copy_prompts.py. experiments/free_drafts_study.py uses the same prompts,
# so its results for the tree below are not results on unseen prompts.
_ACCEPTANCE = (0.42, 0.15, 0.05, 0.05, 0.015, 0.015, 0.01, 0.01)
_NODES, _DEPTH = 16, 6


@functools.cache
def recycling_tree(nodes: int = _NODES) -> tuple[int, ...]:
  """Returns the default draft tree of token recycling, as parent indices.

  `trees.sequoia_tree` computes it from measured acceptance rates. The tree has
  at most 6 levels and at most 8 children per node. Among all such trees of this
  size, it has the largest expected number of accepted tokens. The paper uses a
  tree of 80 nodes on a GPU. Fewer nodes are better on devices where the time of
  a pass grows with the number of nodes, such as CPUs.

  Args:
    nodes: number of nodes, including the root.
  """
  return shapes.sequoia_tree(_ACCEPTANCE, nodes, min(_DEPTH, nodes - 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recycling(_common.ModelFree):
  """Token recycling: drafts a tree of likely successors of each token.

  The drafter's state is a table of successors, `[B, V, K]` int32, for B rows
  and V tokens. K is the largest number of children of a node. An entry with the
  value V is empty, and is padding in a draft. With the default tree, a row's
  table needs 0.8 MB for V = 49,152. The initial table of each row is
  `params["drafter"]`, `[V, K]` int32, for example the table
  `state.drafter[row]` of an earlier sequence. If `params["drafter"]` is None,
  () or missing, the initial table is empty.

  After a pass, the target's most likely tokens after a node become the
  successors of the node's token. If several nodes have the same token, the
  deepest accepted node decides. If none of them is accepted, the last node
  decides.

  Attributes:
    parents: parent index of each node of the draft tree, see `specjax.trees`;
      stored in breadth-first order. `range(-1, n)` is a chain of n tokens.
      None means `recycling_tree()`.
    from_prompt: True to initialise the table from the prompt: the token after
      each prompt token becomes one of its successors, the latest first. The
      paper uses the target's most likely tokens after each prompt token
      instead. The decoder does not compute these.
    vocab_size: vocabulary size V. If it is None, `bind` sets it.
  """

  parents: tuple[int, ...] | None = None
  from_prompt: bool = True
  vocab_size: int | None = None

  num_uniforms = 0

  def __post_init__(self):
    parents = recycling_tree() if self.parents is None else self.parents
    object.__setattr__(self, "parents", shapes.breadth_first(parents))
    if self.num_nodes < 2:
      raise ValueError("parents is (-1,), which drafts nothing; give a tree of "
                       "at least 2 nodes, or use drafters.Empty")

  @property
  def num_nodes(self) -> int:
    return len(self.parents)

  @property
  def num_successors(self) -> int:
    """Number K of successors of each token in the table."""
    return max(max(level.counts) for level in _trees.levels(self.parents))

  @property
  def provides(self) -> tuple[str, ...]:
    # "iid" requires that siblings are sampled independently. Siblings in a tree
    # are distinct tokens, so only a chain, which has no siblings, satisfies it.
    # Not autoregressive: the table of successors also depends on rejected
    # drafts.
    is_chain = self.num_successors == 1
    return interfaces.provided(
        chain=is_chain, iid=is_chain, conditional=True, deterministic=True,
        rests=True, follows=True)

  def bind(self, target: Model, transform: LogitsTransform) -> "Recycling":
    """Returns the drafter with the target's vocabulary size.

    Raises:
      ValueError: a node has more children than the vocabulary has tokens, or
        the drafter was made for another vocabulary size.
    """
    _common.check_siblings(self.num_successors, target)
    return super().bind(target, transform)

  def init(self, params: Params, prompt: Prompt, prefill_output: ModelOutput
           ) -> jax.Array:
    del prefill_output
    shape = (self.vocab_size, self.num_successors)
    known = params.get("drafter")
    if not jax.tree.leaves(known):
      known = jnp.full(shape, self.vocab_size, jnp.int32)
    _check_table(known, shape)
    batch = prompt.tokens.shape[0]
    known = jnp.asarray(known, jnp.int32)
    # JAX counts a negative index from the end of an array, so a negative id
    # would read another token's successors. Ids outside of the vocabulary are
    # replaced by V, the value of an empty entry.
    known = jnp.where((known >= 0) & (known < self.vocab_size), known,
                      self.vocab_size)
    table = jnp.tile(known, (batch, 1, 1))
    return _with_pairs(table, prompt) if self.from_prompt else table

  def propose(self, params: Params, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, jax.Array]:
    del params, uniforms
    row = jnp.arange(state.lengths.shape[0])[:, None]
    tokens = rounds.roots(state)[:, None]
    for level in _trees.levels(self.parents):
      parent = np.repeat(level.nodes, level.counts)
      rank = np.concatenate([np.arange(count) for count in level.counts])
      below = state.drafter.at[row, tokens[:, parent], rank].get(
          mode="fill", fill_value=self.vocab_size)
      tokens = jnp.concatenate([tokens, below], axis=1)
    return _common.deterministic(
        state, self.parents, tokens[:, 1:], self.vocab_size), state.drafter

  def commit(self, params: Params, drafter: jax.Array, draft: Draft,
             verdict: Verdict, target_output: ModelOutput, count: jax.Array,
             own: jax.Array) -> jax.Array:
    """Returns the table, updated with the target's most likely tokens.

    The successors of every token in the draft are replaced. The tables of rows
    for which no token was committed, such as finished rows, do not change.
    """
    del params
    _, likeliest = jax.lax.top_k(target_output.logits, self.num_successors)
    # The shape is taken from the draft, because it may come from a round
    # without drafts (only the root) or from a combination of drafters.
    nodes = draft.tokens.shape[1]
    node = jnp.arange(nodes)
    drafted = jnp.take_along_axis(
        draft.probs, draft.tokens[..., None], axis=2)[..., 0] > 0
    real = (drafted | (node == 0)) & (count > 0)[:, None]
    accepted = (verdict.path[:, None] == node[:, None]).any(-1)
    order = node + nodes * accepted
    same = draft.tokens[:, :, None] == draft.tokens[:, None]
    # If several nodes have the same token, the scatter below would write the
    # same table row several times, in undefined order. So only the node with
    # the highest `order` writes: the deepest accepted node, or the last node.
    later = same & real[:, None] & (order[:, None] > order[:, :, None])
    place = jnp.where(real & ~later.any(-1), draft.tokens, self.vocab_size)
    row = jnp.arange(count.shape[0])[:, None]
    return drafter.at[row, place].set(
        likeliest.astype(drafter.dtype), mode="drop")


def _check_table(table: jax.Array, shape: tuple[int, int]) -> None:
  if np.shape(table) != shape or not jnp.issubdtype(
      jnp.result_type(table), jnp.integer):
    raise ValueError(
        f"params['drafter'] has shape {np.shape(table)}; it must be an integer "
        f"table of token ids, [V, K] = {shape}: take the table of a decoder "
        "with this tree, or ()")


def _with_pairs(table: jax.Array, prompt: Prompt) -> jax.Array:
  """Returns the table with the successors that occur in each prompt.

  The latest successor of a token becomes the first in the table.
  """
  size, successors = table.shape[1:]
  row, rank = jnp.arange(table.shape[0]), jnp.arange(successors)

  def enter(table, at):
    token, after = prompt.tokens[:, at], prompt.tokens[:, at + 1, None]
    old = table[row, token]
    # The new successor becomes the first, and the others move back by one rank.
    # If the new successor was already in the list, it is removed from its old
    # rank. Otherwise the last successor is removed.
    was = jnp.min(jnp.where(old == after, rank, successors - 1), axis=1)
    moved = jnp.roll(old, 1, axis=1).at[:, 0].set(after[:, 0])
    new = jnp.where(rank <= was[:, None], moved, old)
    token = jnp.where(at + 1 < prompt.lengths, token, size)
    return table.at[row, token].set(new, mode="drop"), None

  columns = jnp.arange(prompt.tokens.shape[1] - 1, dtype=jnp.int32)
  return jax.lax.scan(enter, table, columns)[0]


def token_recycling(parents: Sequence[int] | None = None) -> Strategy:
  """Returns the strategy of token recycling (Luo et al. 2024).

  The drafts are trees of tokens that the target predicted earlier
  (arXiv:2408.08696). No parameters are needed.

  >>> from specjax import trees
  >>> token_recycling(trees.full_tree((2, 2))).drafter.num_nodes
  7
  >>> token_recycling().verifier
  TargetWalk()

  Args:
    parents: parent index of each node of the draft tree. None means
      `drafters.recycling_tree()`.
  """
  parents = None if parents is None else tuple(parents)
  return Strategy(
      Recycling(parents=parents), verifiers.TargetWalk())
