"""Drafting from predictions of later tokens at one position of the target.

If the last accepted token of a round is at position t, the target call has
computed the hidden state at t. The round also samples token t + 1, the root of
the next draft. The prediction at t for token t + 1 + k is the distribution of
all nodes at depth k. It does not depend on the tokens above a node.
"""

from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from specjax import sampling
from specjax.decoding import constraining as constraints_lib
from specjax.decoding import rounds
from specjax.interfaces import Model
from specjax.methods import _common
from specjax.methods import _trees
from specjax.methods.networks import check_fits
from specjax.methods.networks import lm_head
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict


@struct.dataclass
class Forecast:
  """Prediction for the next draft, from the last accepted node.

  Attributes:
    values: hidden states or logits `[B, ...]` of B batch rows.
    known: `[B]` bool, False for rows without a prediction, for example after a
      prompt of one token.
  """

  values: jax.Array
  known: jax.Array

  @classmethod
  def of_prompt(cls, prompt: Prompt, output: ModelOutput) -> "Forecast":
    """Returns the target's hidden state at the token before the root.

    The root is the last token of the prompt.
    """
    before = jnp.maximum(prompt.lengths - 2, 0)[:, None, None]
    hidden = jnp.take_along_axis(output.hidden, before, axis=1)
    return cls(values=hidden[:, 0], known=prompt.lengths >= 2)

  def advance(self, values, verdict, count) -> "Forecast":
    """Returns the prediction after a round.

    Rows without new tokens are unchanged.

    Args:
      values: predictions `[B, N, ...]` at every node of the draft.
      verdict: verdicts of the round.
      count: number of tokens committed in the round, `[B]` int32. The last one
        is the next root. The prediction comes from the node before the root.
    """
    last = jnp.take_along_axis(
        verdict.path, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    choose = jax.vmap(lambda moved, new, i, old: jnp.where(moved, new[i], old))
    return Forecast(values=choose(count > 0, values, last, self.values),
                    known=self.known | (count > 0))


def draw(logits, parents, uniforms, proposal, transform):
  """Samples a tree of N nodes for one sequence.

  Args:
    logits: logits `[depth, V]`. Row d - 1 applies to all nodes of depth d.
    parents: parent index of each of the N >= 2 nodes, breadth-first.
    uniforms: uniform samples in [0, 1), `[(N - 1) UNIFORMS_A_DRAW]`.
    proposal: sampling method of children, a key of `_trees.DRAWS`.
    transform: transform of logits to probabilities.

  Returns:
    Tokens `[N - 1]` and probs `[N - 1, V]` of the nodes below the root.
  """
  chex.assert_rank(logits, 2)
  uniforms = uniforms.reshape(len(parents) - 1, sampling.UNIFORMS_A_DRAW)
  found = []
  for row, level in zip(logits, _trees.levels(parents)):
    mine = uniforms[level.below]
    # All nodes of a depth have the same distribution of children. For "top_k",
    # one ranking of the tokens therefore serves all nodes of the depth.
    if proposal == "top_k":
      ranks = np.concatenate([np.arange(count) for count in level.counts])
      tokens, probs = _trees.top_k(
          row[None], (max(level.counts),), mine, transform)
      found.append((tokens[ranks], probs[ranks]))
    else:
      rows = jnp.broadcast_to(row, (len(level.counts), *row.shape))
      found.append(
          _trees.DRAWS[proposal](rows, level.counts, mine, transform))
  tokens, probs = zip(*found)
  return jnp.concatenate(tokens), jnp.concatenate(probs)


class HeadsDrafter(_trees.StaticTree):
  """Base class of drafters with heads on the target's last hidden state.

  `params["drafter"]` contains the parameters of the heads. The LM head comes
  from `params["target"]`. A round applies the heads to one hidden state and
  runs no draft model. After a prompt of one token there is no hidden state, so
  the first draft is padding.

  Subclasses define the field `heads` and the fields of `StaticTree`.
  """

  @property
  def autoregressive(self) -> bool:
    # The distribution of a token depends on its depth, and therefore on the
    # start position of the draft. This does not matter if the depth is 1.
    return self.iid and self.depth <= 1

  def bind(self, target: Model, transform: LogitsTransform
           ) -> Any:
    """Returns a copy with its transform set, after checking the target.

    Raises:
      ValueError: the heads do not fit the target, or the tree is deeper than
        the number of heads.
    """
    check_fits(self.heads, target)
    _common.check_depth(self.depth, self.heads.heads)
    return super().bind(target, transform)

  def init(self, params: chex.ArrayTree, prompt: Prompt,
           prefill_output: ModelOutput) -> Any:
    del params
    return Forecast.of_prompt(prompt, prefill_output)

  def propose(self, params: chex.ArrayTree, uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, Any]:
    """Returns a draft tree for each row."""
    forecast = state.drafter
    if self.num_nodes == 1:
      return rounds.root_only(state, self.heads.vocab_size), forecast
    used = jax.tree.map(lambda x: x[:self.depth], params["drafter"])
    logits = self.heads(used, forecast.values, lm_head(params["target"]))
    if self.transform.constraints:
      drawn = self._constrained(logits, uniforms, state)
    else:
      drawn = jax.vmap(lambda logits, uniforms, temperature: draw(
          logits, self.parents, uniforms, self.proposal,
          self.transform.at(temperature)))(logits, uniforms, state.temperature)
    draft = _common.tree_drafts(state, self.parents, *drawn)
    return _common.known_only(draft, forecast.known), forecast

  def _constrained(self, logits, uniforms, state):
    """Returns the tokens and probs of trees sampled under constraints."""
    def step(tokens, depths, ancestors, above, carry):
      del tokens, ancestors, above
      return jnp.take_along_axis(logits, depths[..., None] + 1, axis=1), carry

    step, carry, first = constraints_lib.steered(
        self.transform.constraints, state.constraints, step, None,
        logits[:, 0])
    return self.draw(step, carry, first, uniforms, state)[:2]

  def commit(self, params: chex.ArrayTree, drafter: chex.ArrayTree,
             draft: Draft, verdict: Verdict, target_output: ModelOutput,
             count: jax.Array,
             own: jax.Array) -> Any:
    """Returns the target's hidden state at the token before the next root."""
    del params, draft
    return drafter.advance(target_output.hidden, verdict, count)

  def param_specs(self, axis: str, size: int) -> PartitionSpec:
    """Returns an empty `PartitionSpec`, which replicates the heads."""
    del axis, size
    return PartitionSpec()
