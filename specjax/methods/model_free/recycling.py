"""Token recycling: drafts from the target's earlier predictions.

Luo et al. 2024 (arXiv:2408.08696). Every row has a table M `[V, K]` with K
likely successors of each token. A draft is a static tree of successors: below a
node with token x, the child of rank r = 0..K-1 has token M[x, r].

After every pass of the target, its K likeliest tokens at each node of the
draft, accepted or not, become the successors of that node's token. A round
needs one gather per level, one top-K of the target's logits and one scatter.
Drafts are deterministic. A tree is exact with `verifiers.TargetWalk`, and a
chain with each rule for chains.
"""

from collections.abc import Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

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

# Share of rounds in which the target's next token was the root's successor of
# rank 0, 1, ... It was measured with SmolLM2-135M-Instruct at temperature 0 and
# a tree of 40 nodes, on 64 to 96 tokens after eight prompts of
# data/copy_prompts.py. experiments/free_drafts_study.py uses these prompts too,
# so its results for this tree are not on unseen prompts.
_ACCEPTANCE = (0.42, 0.15, 0.05, 0.05, 0.015, 0.015, 0.01, 0.01)
_NODES, _DEPTH = 16, 6


@functools.cache
def recycling_tree(nodes: int = _NODES) -> tuple[int, ...]:
  """Returns the tree of N nodes with the most expected accepted tokens.

  `trees.sequoia_tree` computes it from measured acceptance, with at most 6
  levels and at most 8 children of a node. The paper uses 80 nodes on a GPU.
  Fewer nodes are better on devices where the cost of a pass grows with them.

  Args:
    nodes: number of nodes N, the root included.
  """
  return shapes.sequoia_tree(_ACCEPTANCE, nodes, min(_DEPTH, nodes - 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recycling(_common.ModelFree):
  """Drafts a tree of likely successors of each token.

  The drafter's state is the table of successors, `[B, V, K]` int32, where V is
  the vocabulary size and K the largest number of children of a node. The id V
  is an empty entry, which is padding in a draft. The default tree needs 0.8 MB
  per row for V = 49,152. The initial table of each row is `params["drafter"]`,
  `[V, K]` int32, such as the table `state.drafter[row]` of an earlier sequence.
  Without parameters (None, (), or no entry) all entries are empty.

  If several nodes of a round have the same token, the deepest of them on the
  accepted path sets its successors. If none is on the path, the last node does.

  Attributes:
    parents: draft tree, see `specjax.trees`; stored breadth-first.
      `range(-1, K)` is a chain of K tokens. Default: `recycling_tree()`.
    from_prompt: True to enter each prompt token's next token as a successor,
      the latest first. The paper enters the target's likeliest tokens after
      each prompt token, which the decoder does not compute.
    vocab_size: V; `bind` sets it.
  """

  parents: tuple[int, ...] | None = None
  from_prompt: bool = True
  vocab_size: int | None = None

  conditional = True
  deterministic = True
  autoregressive = False  # the table depends on earlier drafts
  num_uniforms = 0
  proposal = "top_k"

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
    """K, the columns of the table."""
    return max(max(level.counts) for level in _trees.levels(self.parents))

  @property
  def chain(self) -> bool:
    return self.num_successors == 1

  @property
  def iid(self) -> bool:
    return self.chain  # siblings differ

  def bind(self, target: Model, transform: LogitsTransform) -> "Recycling":
    """Returns the drafter specialised to a target."""
    _common.check_siblings(self.num_successors, target)
    return super().bind(target, transform)

  def follow(self) -> "Recycling":
    """Returns the drafter unchanged, because any draft updates its table."""
    return self

  def init(self, params: Params, prompt: Prompt, prefill_output: ModelOutput
           ) -> jax.Array:
    """Returns the table of each row, `[B, V, K]`."""
    del prefill_output
    shape = (self.vocab_size, self.num_successors)
    known = params.get("drafter")
    if not jax.tree.leaves(known):
      known = jnp.full(shape, self.vocab_size, jnp.int32)
    _check_table(known, shape)
    batch = prompt.tokens.shape[0]
    known = jnp.asarray(known, jnp.int32)
    # A negative id would select a row from the table's end. So ids outside of
    # the vocabulary become empty entries.
    known = jnp.where((known >= 0) & (known < self.vocab_size), known,
                      self.vocab_size)
    table = jnp.tile(known, (batch, 1, 1))
    return _with_pairs(table, prompt) if self.from_prompt else table

  def propose(self, params: Params, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, jax.Array]:
    """Drafts the tree per row."""
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
             verdict: Verdict, target_output: ModelOutput, count: jax.Array
             ) -> jax.Array:
    """Enters the target's likeliest tokens at all nodes of the round.

    Rows without committed tokens, such as finished rows, keep their table.
    """
    del params
    _, likeliest = jax.lax.top_k(target_output.logits, self.num_successors)
    # The draft may have another shape than this drafter's: only the root, or
    # the draft of a merge.
    nodes = draft.tokens.shape[1]
    node = jnp.arange(nodes)
    drafted = jnp.take_along_axis(
        draft.probs, draft.tokens[..., None], axis=2)[..., 0] > 0
    real = (drafted | (node == 0)) & (count > 0)[:, None]
    accepted = (verdict.path[:, None] == node[:, None]).any(-1)
    order = node + nodes * accepted
    same = draft.tokens[:, :, None] == draft.tokens[:, None]
    # If several nodes have the same token, the order in which a scatter writes
    # them is undefined. So only the last of them in `order` writes.
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
  """Enters each prompt's pairs of tokens, the latest successors first."""
  size, successors = table.shape[1:]
  row, rank = jnp.arange(table.shape[0]), jnp.arange(successors)

  def enter(table, at):
    token, after = prompt.tokens[:, at], prompt.tokens[:, at + 1, None]
    old = table[row, token]
    # The new successor becomes the first. It is removed from its old rank, or
    # the last successor is dropped.
    was = jnp.min(jnp.where(old == after, rank, successors - 1), axis=1)
    moved = jnp.roll(old, 1, axis=1).at[:, 0].set(after[:, 0])
    new = jnp.where(rank <= was[:, None], moved, old)
    token = jnp.where(at + 1 < prompt.lengths, token, size)
    return table.at[row, token].set(new, mode="drop"), None

  columns = jnp.arange(prompt.tokens.shape[1] - 1, dtype=jnp.int32)
  return jax.lax.scan(enter, table, columns)[0]


def token_recycling(parents: Sequence[int] | None = None) -> Strategy:
  """Drafts a tree of tokens that the target predicted earlier.

  Luo et al. 2024 (arXiv:2408.08696), without parameters.

  >>> from specjax import trees
  >>> token_recycling(trees.full_tree((2, 2))).drafter.num_nodes
  7
  >>> token_recycling().verifier
  TargetWalk()

  Args:
    parents: draft tree of N nodes; default: `drafters.recycling_tree()`.
  """
  parents = None if parents is None else tuple(parents)
  return Strategy(
      Recycling(parents=parents), verifiers.TargetWalk())
