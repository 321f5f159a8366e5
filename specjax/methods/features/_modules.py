"""Base of drafters with one module per depth.

DeepSeek-V3 (arXiv:2412.19437, section 2.2): module k reads, at position t, what
module k - 1 returned there and the token t + k, and forecasts t + k + 1. The
layers of Gloeckle et al. 2024 (arXiv:2404.19737) read no token.
"""

from typing import Any

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

  After n tokens module k is sure of positions up to n - 1 - k: it reads k
  tokens ahead. So the last features are kept, and read anew with what is
  drafted; those before them are in the cache.

  Attributes:
    cache: a layer for each module.
    hidden: features `[B, W, D]` of the last positions, the first `held` of
      them. They begin at the end of the cache and end at position n - 2.
    after: `[B, W]` int32, the token after each of these positions.
    held: `[B]` int32; 0: the text has one token, and no position is known.
  """

  cache: Any
  hidden: jax.Array
  after: jax.Array
  held: jax.Array


class ModulesDrafter(_drafter.LayerDrafter):
  """Base of drafters with one module per depth.

  Classes that derive from it are frozen dataclasses that have `heads`,
  `transform`, `depth`, the levels of a draft below its root, and `readers`, R:
  modules that read the text, at least `depth`. The target is that of
  `heads.attach`, and `params["drafter"]` are the modules' parameters. A round
  costs a pass of each of the R modules over the last 2 R positions. After a
  prompt of one token there is no feature yet, and the first draft is padding.
  """

  @property
  def window(self) -> int:
    """W, the positions that are read again, and those of a round."""
    return 2 * self.readers

  def init(self, params: Any, prompt: Prompt, prefill_output: ModelOutput
           ) -> Any:
    """Returns the caches after the prompt and its last features."""
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
    # That it is empty is not told to XLA, see `prefill.empty_cache`.
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
    """Runs a module; returns its output, the head's input and the cache.

    Args:
      params: parameters `{"target", "drafter"}`.
      module: counted from 0.
      entered: features `[B, S, D]` of the target.
      before: output `[B, S, D]` of the module before.
      tokens: `[B, S]` int32, which this one reads.
      visible: `[B, S, S]` bool, what each position sees of this pass.
      cache: cache of all modules, with the inputs of those before.
      positions: `[B, S]` int32; None: one after the other, as `cache` ends.
    """
    out = self.heads.step(
        params["drafter"], params["target"],
        before if self.heads.chained else entered, tokens, visible=visible,
        positions=positions, cache=cache, module=module)
    return out.hidden, out.read, out.cache

  def read(self, params, own, draw=None):
    """Returns the state with all settled positions in the cache.

    Args:
      params: parameters `{"target", "drafter"}`.
      own: the `ModulesState`; what it keeps is read in one pass of each module.
      draw: function `(module, head input) -> tokens [B]` of the draft so far,
        for later modules; None: no draft.
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

  def commit(self, params: Any, drafter: ModulesState, draft: Draft,
             verdict: Verdict, target_output: ModelOutput, count: jax.Array
             ) -> ModulesState:
    """Appends the features of the accepted tokens."""
    if draft.tokens.shape[1] == 1:  # a round in which nobody drafted
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
  """Gathers `[B, S, ...]` from `x [B, T, ...]` at `places [B, S]`."""
  return jnp.take_along_axis(
      x, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), axis=1)
