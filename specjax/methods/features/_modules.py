"""Base class of drafters with one module per depth of the draft.

DeepSeek-V3 (arXiv:2412.19437, section 2.2): at position t, module k = 1, 2, ...
reads the output of module k - 1 and token t + k, and predicts token t + k + 1.
Module 0 is the target. The layers of Gloeckle et al. 2024 (arXiv:2404.19737)
read the target's output instead and no tokens.
"""

from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax.decoding import rounds
from specjax.methods.features import _drafter
from specjax.trees import topology
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict


@struct.dataclass
class ModulesState:
  """State of the modules after the committed tokens.

  Position t of module k is final once token t + k is committed, because the
  module reads this token. After n tokens, numbered from 0, the last final
  position of module k is n - 1 - k. The cache contains only positions that are
  final for all modules. For later positions the state stores the target's
  features. The modules read these positions in every round, the last ones with
  draft tokens.

  Attributes:
    cache: cache with a layer for each module.
    hidden: target's features `[B, W, D]` of the positions after the cached
      ones, up to position n - 2. Only the first `held` of the W are valid.
    after: token after each of these positions, `[B, W]` int32.
    held: number of valid positions, `[B]` int32; 0 if the sequence has one
      token.
  """

  cache: Any
  hidden: jax.Array
  after: jax.Array
  held: jax.Array


class ModulesDrafter(_drafter.LayerDrafter):
  """Base class of drafters with one module per depth of the draft.

  Subclasses are frozen dataclasses with four fields: `heads`; `transform`;
  `depth`, the number of levels below the root; and `readers`, the number R of
  modules that read the sequence, at least `depth`.

  Decode with the target that `heads.attach` returns. `params["drafter"]`
  contains the parameters of the modules. In a round each of the R modules runs
  one pass over 2 R positions. After a prompt of one token there are no
  features, so the first draft is padding.
  """

  @property
  def window(self) -> int:
    """Maximum number W of stored positions.

    At most R - 1 positions are not final, and a round adds at most R + 1.
    """
    return 2 * self.readers

  def init(self, params: chex.ArrayTree, prompt: Prompt,
           prefill_output: ModelOutput) -> Any:
    """Returns the state after the prompts, a `ModulesState`."""
    own, heads = params["drafter"], self.heads
    batch, columns = prompt.tokens.shape
    chunks, causal = _drafter.chunked(prompt, prefill_output)

    def read(cache, chunk):
      hidden, places = chunk
      entered = before = heads.enter(own, heads.taps_of(hidden))
      start = cache.lengths
      for module in range(self.readers):
        tokens = prompt.tokens[
            :, jnp.minimum(places + module + 1, columns - 1)]
        before, _, cache = self.run(
            params, module, entered, before, tokens, causal, cache)
      return cache.after(before).rollback(start + places.shape[0]), entered

    cache = heads.init_cache(
        own, batch, prompt.capacity + self.window, self.readers)
    # All cache lengths are 0. If they were constants, XLA would evaluate
    # attention over the empty slots at compile time. So they are computed from
    # the prompt.
    cache, entered = jax.lax.scan(
        read, cache.rollback(jnp.minimum(prompt.lengths, 0)), chunks)
    entered = entered.swapaxes(0, 1).reshape(batch, columns, -1)
    held = jnp.minimum(prompt.lengths - 1, self.readers)
    first = prompt.lengths - 1 - held
    places = first[:, None] + jnp.arange(self.window)
    take = lambda x, places: at(x, jnp.minimum(places, columns - 1))
    return ModulesState(
        cache=cache.rollback(first), held=held, hidden=take(entered, places),
        after=take(prompt.tokens, places + 1))

  def run(self, params, module, entered, before, tokens, visible, cache,
          positions=None):
    """Runs a module; returns its output, the LM head's input and the cache.

    Args:
      params: parameters `{"target": ..., "drafter": ...}`.
      module: index of the module, from 0.
      entered: features `[B, S, D]` of the target.
      before: output `[B, S, D]` of the previous module.
      tokens: tokens that this module reads, `[B, S]` int32.
      visible: attention mask `[B, S, S]` bool over the positions of this pass.
      cache: cache of all modules, with this pass's keys and values of the
        earlier modules.
      positions: positions `[B, S]` int32; None means consecutive positions
        after the cached ones.
    """
    out = self.heads.step(
        params["drafter"], params["target"],
        before if self.heads.chained else entered, tokens, visible=visible,
        positions=positions, cache=cache, module=module)
    return out.hidden, out.read, out.cache

  def read(self, params, own, draw=None):
    """Runs all modules and moves positions that are now final to the cache.

    Each module reads the stored positions of the state in one pass.

    Args:
      params: parameters `{"target": ..., "drafter": ...}`.
      own: state, a `ModulesState`.
      draw: function `(module, input of the LM head) -> tokens [B]` that drafts
        a token from a module's output. Later modules read this token. None
        drafts nothing.

    Returns:
      The new state.
    """
    size, readers = self.window, self.readers
    _, causal = topology.causal(len(own.held), size)
    order = jnp.arange(size + readers, dtype=jnp.int32)
    text = jnp.pad(own.after, ((0, 0), (0, readers)))
    before, cache = own.hidden, own.cache
    for module in range(readers):
      before, read, cache = self.run(
          params, module, own.hidden, before, text[:, module:module + size],
          causal, cache)
      if draw is not None and module < self.depth:
        text = jnp.where(order == own.held[:, None] + module,
                         draw(module, read)[:, None], text)
    kept = jnp.minimum(own.held, readers - 1)
    gone = own.held - kept
    places = jnp.minimum(gone[:, None] + order[:size], size - 1)
    return ModulesState(
        cache=cache.after(before).rollback(own.cache.lengths + gone),
        hidden=at(own.hidden, places), after=at(own.after, places), held=kept)

  def commit(self, params: chex.ArrayTree, drafter: ModulesState, draft: Draft,
             verdict: Verdict, target_output: ModelOutput, count: jax.Array,
             own: jax.Array) -> ModulesState:
    """Returns the state with the features of the accepted tokens appended."""
    if draft.tokens.shape[1] == 1:  # no row has a draft
      drafter = self.read(params, drafter)
    heads, size = self.heads, self.window
    new = heads.enter(params["drafter"], _drafter.on_path(
        heads.taps_of(target_output.hidden), verdict, self.depth + 1))
    last = new.shape[1] - 1
    after = rounds.path_tokens(draft, verdict)[:, :last + 1]
    order, kept = jnp.arange(size, dtype=jnp.int32), drafter.held[:, None]
    source = jnp.where(order < kept, order,
                       size + jnp.clip(order - kept, 0, last))
    take = lambda old, new: at(jnp.concatenate([old, new], axis=1), source)
    return drafter.replace(
        hidden=take(drafter.hidden, new), after=take(drafter.after, after),
        held=drafter.held + count)


def at(x, places):
  """Gathers `[B, S, ...]` from `x [B, T, ...]` at indices `places [B, S]`."""
  return jnp.take_along_axis(
      x, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), axis=1)
