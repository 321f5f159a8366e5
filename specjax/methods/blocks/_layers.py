"""Draft layers of a block-parallel network, see `parallel_network`."""

from typing import Any
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from specjax.models import layers as layers_lib


class DraftLayers(nn.Module):
  """Draft layers and the final norm."""

  config: Any  # ParallelHeads

  @nn.compact
  def __call__(self, x, positions, visible, cache):
    c = self.config
    tables = layers_lib.RotaryTables.of(c, positions, x.dtype)
    size, count = visible.shape[1:]
    earlier = jnp.tril(jnp.ones((size, count), bool), count - size)
    if any(c.windows) and cache is not None:
      cache = _Windowed(cache, c, positions - cache.lengths[:, None])
    layer = (_convolved_layer if c.conv_kernel > 1
             else layers_lib.decoder_layer)
    for i in range(c.layers):
      x, cache = layer(
          c, i, x, tables,
          visible & earlier if c.causal and c.causal[i] else visible, cache)
    return layers_lib.Norm(c, name="final_norm")(x)


def _convolved_layer(c, i, x, tables, visible, cache):
  """Applies a draft layer with convolutions around attention and MLP."""
  for name in ("attention", "mlp"):
    read = layers_lib.Norm(c, name=f"{name}_norm_{i}")(x)
    kernels = _Kernels(c, name=f"{name}_conv_{i}")(read)
    read = _convolve(c, kernels[0], read)
    if name == "attention":
      out, cache = layers_lib.Attention(c, i, name=f"{name}_{i}")(
          read, tables, visible, cache)
    else:
      out = layers_lib.MLP(c, name=f"{name}_{i}")(read)
    x = x + _convolve(c, kernels[1], out)
  return x, cache


class _Kernels(nn.Module):
  """Convolution kernels before and after a sublayer, from its input (DFlash 2).

  Each kernel is a trained kernel plus an input-dependent one, which the
  `conv_group` channels of a group share. The initial kernels change nothing.
  """

  config: Any  # ParallelHeads

  @nn.compact
  def __call__(self, x):
    """Returns the kernels `[2, B, S, taps, D]` for inputs `[B, S, D]`."""
    c = self.config
    identity = lambda key, shape, dtype: jnp.zeros(shape, dtype).at[:, 0].set(1)
    base = layers_lib.parameter(
        self, "base", identity, (2, c.conv_kernel, c.width))
    own = layers_lib.Linear(
        (2, c.conv_kernel, c.width // c.conv_group), scale=0.0,
        name="dynamic")(x)
    kernels = base.astype(x.dtype) + jnp.repeat(own, c.conv_group, axis=-1)
    return jnp.moveaxis(kernels, 2, 0)


def _convolve(c, kernels, x):
  """Returns the causal convolution of each block's slots, `[B, S, D]`.

  Args:
    c: configuration of the network.
    kernels: kernels `[B, S, taps, D]`. Tap t multiplies the slot t earlier.
    x: inputs `[B, S, D]` of the slots of one or several blocks.
  """
  blocks = x.reshape(len(x), -1, c.block_size, c.width)
  out = jnp.zeros_like(x)
  for tap in range(c.conv_kernel):
    earlier = jnp.pad(blocks, ((0, 0), (0, 0), (tap, 0), (0, 0)))
    out += kernels[:, :, tap] * earlier[:, :, :c.block_size].reshape(x.shape)
  return out


class _Windowed(NamedTuple):
  """Cache wrapper that ends the windows of slots as `window_end` says.

  Without the wrapper, the window of a query ends at the last token of its mask.
  In a layer that is not causal, this is the last slot of the block.

  Attributes:
    cache: cache of the draft layers.
    config: configuration `ParallelHeads` of the draft layers.
    depths: number `[B, S]` int32 of tokens between the committed tokens of the
      cache and each slot.
  """

  cache: Any
  config: Any  # ParallelHeads
  depths: jax.Array

  def append(self, layer, key, value, after):
    return self._replace(
        cache=self.cache.append(layer, key, value, after=after))

  def attend(self, layer, query, ancestors, window=0, **options):
    if not window:
      return self.cache.attend(layer, query, ancestors, **options)
    depths = self.depths
    if self.config.window_end == "anchor":
      slots = jnp.arange(depths.shape[1]) % self.config.block_size
      # A window of the cache includes the token at its end, here the anchor.
      depths, window = depths - slots, window + 1
    return self.cache.attend(
        layer, query, ancestors, window=window, depths=depths, **options)


class Kept(NamedTuple):
  """Cache wrapper that stores keys and values, and skips the attention."""

  cache: Any

  def append(self, layer, key, value, after):
    return Kept(self.cache.append(layer, key, value, after=after))

  def attend(self, layer, query, ancestors, **options):
    del layer, ancestors, options
    return jnp.zeros_like(query)
