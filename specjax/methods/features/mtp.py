"""Multi-token prediction: heads, a network of their modules, and a strategy.

A draft starts from the target's features of the committed tokens.
`models.features.FeatureConfig` configures the layers. `MTPHeads` and
`ParallelLayers` differ only in the defaults of that configuration.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import ClassVar
from typing import NamedTuple

import chex
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import rounds
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import _common
from specjax.methods.draft_shapes import Chain
from specjax.methods.draft_shapes import Shape
from specjax.methods.draft_shapes import Tree
from specjax.methods.drafting import NetworkDrafter
from specjax.methods.features import _drafter
from specjax.methods.features.eagle import layer_drafter
from specjax.methods.features.network import FeatureHeads
from specjax.methods.stop_rules import Forecast
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import with_default_rule
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPHeads(FeatureHeads):
  """Chained modules of multi-token prediction (DeepSeek-V3).

  Each module reads the output of the previous module.
  """

  fusion_norms: bool = True
  attention_norm: bool = True
  final_norm: str | None = "own"
  reuse: bool = False

  kind: ClassVar[str] = "mtp"

  @classmethod
  def default_taps(cls, layers: int) -> tuple[int | str, ...]:
    """Returns the name of the last layer's output, before the final norm."""
    return (layers,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelLayers(FeatureHeads):
  """Layers parallel to the target's last layer, as heads (Gloeckle et al.).

  The layers do not read tokens, so the draft tokens are independent of each
  other. All layers use the target's final norm and LM head.
  """

  fusion: str = "none"
  attention_norm: bool = True
  final_norm: str | None = "target"
  reuse: bool = False
  chained: bool = False

  kind: ClassVar[str] = "parallel_layers"

  @classmethod
  def default_taps(cls, layers: int) -> tuple[int | str, ...]:
    """Returns the name of the input of the target's last layer."""
    return (layers - 1,)


@struct.dataclass
class ModulesState:
  """Memory of the modules after the committed tokens.

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


class _Ran(NamedTuple):
  """Result of a module that ran over the stored positions, for S paths.

  Attributes:
    module: index of the module, from 0; -1 before the first one.
    text: tokens `[B, S, W + R]` int32. First the token after each of the valid
      stored positions (`ModulesState.after`), then the path to the node.
    output: output `[B, S, W, D]` of the module.
    cache: cache with the keys and values of this pass.
  """

  module: int
  text: jax.Array
  output: jax.Array
  cache: Any


class _Carry(NamedTuple):
  """Results of the modules in a draft.

  Attributes:
    memory: memory before the draft.
    kept: last result whose keys and values the memory may keep. In a tree, only
      the first module has such a result, because the other modules run on
      several paths.
    last: result on the last level.
  """

  memory: ModulesState
  kept: _Ran
  last: _Ran


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureModules(_drafter.FeatureNetwork):
  """Modules on the target's features: module d predicts level d of a draft.

  DeepSeek-V3 (arXiv:2412.19437, section 2.2): at position t, module k = 1, 2,
  ... reads the output of module k - 1 and token t + k, and predicts token
  t + k + 1. Module 0 is the target. The layers of Gloeckle et al. 2024
  (arXiv:2404.19737) read the target's output instead and no tokens. Heads with
  one reused module draft with `FeatureLayer` instead.

  In every round each of the R modules runs one pass over 2 R positions, even if
  the draft has fewer levels. So no module lacks committed tokens when a
  controller makes chains longer again. To run fewer modules, reduce
  `heads.forecasts`.

  At each position, a module also reads later tokens, some of which are draft
  tokens. These differ between the paths of a tree. So a level of a tree with S
  nodes that have children costs one more pass over 2 R S positions.

  Attributes:
    heads: heads with R modules.
  """

  heads: FeatureHeads

  has_loop = False

  @property
  def deepest(self) -> int:
    return self.heads.modules

  @property
  def _window(self) -> int:
    # At most R - 1 positions are not final, and a round adds at most R + 1.
    return 2 * self.heads.modules

  def bind(self, target: Model) -> "FeatureModules":
    if self.heads.reuse:
      raise ValueError("reuse is True, so the heads have one module for all "
                       "tokens; this network needs a module per token: use "
                       "drafters.FeatureLayer")
    return super().bind(target)

  def init(self, params: chex.ArrayTree, prompt: Prompt, output: ModelOutput
           ) -> ModulesState:
    own, heads = params["drafter"], self.heads
    batch, columns = prompt.tokens.shape
    chunks, causal = _drafter.chunked(prompt, output)

    def read(cache, chunk):
      hidden, places = chunk
      entered = before = heads.enter(own, heads.taps_of(hidden))
      start = cache.lengths
      for module in range(heads.modules):
        tokens = prompt.tokens[
            :, jnp.minimum(places + module + 1, columns - 1)]
        out = heads.step(
            own, params["target"], before if heads.chained else entered, tokens,
            visible=causal, cache=cache, module=module)
        before, cache = out.hidden, out.cache
      return cache.after(before).rollback(start + places.shape[0]), entered

    cache = heads.init_cache(own, batch, prompt.capacity + self._window)
    # All cache lengths are 0. If they were constants, XLA would evaluate
    # attention over the empty slots at compile time. So they are computed from
    # the prompt.
    cache, entered = jax.lax.scan(
        read, cache.rollback(jnp.minimum(prompt.lengths, 0)), chunks)
    entered = entered.swapaxes(0, 1).reshape(batch, columns, -1)
    held = jnp.minimum(prompt.lengths - 1, heads.modules)
    first = prompt.lengths - 1 - held
    places = first[:, None] + jnp.arange(self._window)
    take = lambda x, places: _at(x, jnp.minimum(places, columns - 1))
    return ModulesState(
        cache=cache.rollback(first), held=held, hidden=take(entered, places),
        after=take(prompt.tokens, places + 1))

  def begin(self, params: chex.ArrayTree, state: DecodeState, shape: Shape
            ) -> tuple[Forecast, _Carry]:
    memory = state.drafter
    logits, ran = self._run(params, memory, self._unread(memory))
    carry = _Carry(memory, ran, ran)
    return self._forecast(logits, carry), carry

  def extend(self, params: chex.ArrayTree, token: jax.Array, carry: _Carry
             ) -> tuple[Forecast, _Carry]:
    logits, carry = self.step(
        params, token, None, None, jnp.zeros_like(token), carry)
    return self._forecast(logits, carry), carry._replace(kept=carry.last)

  def step(self, params: chex.ArrayTree, tokens: jax.Array, depths: Any,
           ancestors: Any, above: jax.Array, carry: _Carry
           ) -> tuple[jax.Array, _Carry]:
    memory, last = carry.memory, carry.last
    text, output = (jax.vmap(lambda row, at: row[at])(x, above)
                    for x in (last.text, last.output))
    end = memory.held[:, None, None] + last.module
    text = jnp.where(jnp.arange(text.shape[2]) == end, tokens[..., None], text)
    logits, last = self._run(
        params, memory, last._replace(text=text, output=output))
    return logits, carry._replace(last=last)

  def _unread(self, memory: ModulesState) -> _Ran:
    """Returns the input of the first module."""
    text = jnp.pad(memory.after, ((0, 0), (0, self.heads.modules)))
    return _Ran(-1, text[:, None], memory.hidden[:, None], memory.cache)

  def _run(self, params: chex.ArrayTree, memory: ModulesState, before: _Ran
           ) -> tuple[jax.Array, _Ran]:
    """Runs the module after `before`; returns its logits `[B, S, V]` too."""
    heads, size, module = self.heads, self._window, before.module + 1
    batch, ways = before.text.shape[:2]
    flat = lambda x: x.reshape(batch, ways * size, *x.shape[3:])
    each = lambda x: flat(jnp.broadcast_to(
        x[:, None], (batch, ways, *x.shape[1:])))
    causal = np.kron(np.eye(ways), np.tri(size)).astype(bool)
    out = heads.step(
        params["drafter"], params["target"],
        flat(before.output) if heads.chained else each(memory.hidden),
        flat(before.text[..., module:module + size]), module=module,
        visible=jnp.tile(causal, (batch, 1, 1)), cache=before.cache,
        positions=each(memory.cache.lengths[:, None] + jnp.arange(size)))
    split = lambda x: x.reshape(batch, ways, size, -1)
    logits = self.logits(params, _at_root(split(out.read), memory))
    return logits, _Ran(module, before.text, split(out.hidden), out.cache)

  def _forecast(self, logits: jax.Array, carry: _Carry) -> Forecast:
    return logits[:, 0], _at_root(carry.last.output, carry.memory)[:, 0]

  def end(self, params: chex.ArrayTree, memory: ModulesState, carry: _Carry,
          draft: Draft, slots: jax.Array | None) -> tuple[Draft, ModulesState]:
    return (_common.known_only(draft, memory.held > 0),
            self._complete(params, memory, carry.kept))

  def _complete(self, params: chex.ArrayTree, memory: ModulesState, ran: _Ran
                ) -> ModulesState:
    """Runs the other modules and moves positions that are final to the cache.

    Args:
      params: parameters `{"target": ..., "drafter": ...}`.
      memory: memory before the draft.
      ran: result of the last module that ran.
    """
    modules, size = self.heads.modules, self._window
    for _ in range(ran.module + 1, modules):
      _, ran = self._run(params, memory, ran)
    kept = jnp.minimum(memory.held, modules - 1)
    gone = memory.held - kept
    places = jnp.minimum(gone[:, None] + jnp.arange(size), size - 1)
    return ModulesState(
        cache=ran.cache.after(ran.output).rollback(memory.cache.lengths + gone),
        hidden=_at(memory.hidden, places), after=_at(memory.after, places),
        held=kept)

  def commit(self, params: chex.ArrayTree, memory: ModulesState, draft: Draft,
             slots: jax.Array | None, shape: Shape, verdict: Verdict,
             output: ModelOutput, count: jax.Array) -> ModulesState:
    if draft.tokens.shape[1] == 1:  # no row has a draft
      memory = self._complete(params, memory, self._unread(memory))
    heads, size = self.heads, self._window
    new = heads.enter(params["drafter"], _drafter.on_path(
        heads.taps_of(output.hidden), verdict, shape.depth + 1))
    last = new.shape[1] - 1
    after = rounds.path_tokens(draft, verdict)[:, :last + 1]
    order, kept = jnp.arange(size, dtype=jnp.int32), memory.held[:, None]
    source = jnp.where(order < kept, order,
                       size + jnp.clip(order - kept, 0, last))
    take = lambda old, new: _at(jnp.concatenate([old, new], axis=1), source)
    return memory.replace(
        hidden=take(memory.hidden, new), after=take(memory.after, after),
        held=memory.held + count)


def _at(x, places):
  """Gathers `[B, S, ...]` from `x [B, T, ...]` at indices `places [B, S]`."""
  return jnp.take_along_axis(
      x, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), axis=1)


def _at_root(x: jax.Array, memory: ModulesState) -> jax.Array:
  """Returns `x [B, S, W, D]` at the last valid stored position, `[B, S, D]`."""
  last = jnp.maximum(memory.held - 1, 0)[:, None, None, None]
  return jnp.take_along_axis(x, last, axis=2)[:, :, 0]


def mtp(heads: FeatureHeads, gamma: int | None = None,
        verifier: Verifier | None = None,
        parents: Sequence[int] | None = None,
        proposal: str = "without_replacement") -> Strategy:
  """Samples a chain or a tree from modules of multi-token prediction.

  DeepSeek-V3 (arXiv:2412.19437, section 2.2) and Gloeckle et al. 2024
  (arXiv:2404.19737). Heads with one reused module (FastMTP, arXiv:2509.18362)
  and `methods.AssistantHeads` of Gemma 4 use the drafters of EAGLE.

  >>> from specjax import testing
  >>> from specjax import methods
  >>> target = testing.tiny_pair(5).target
  >>> mtp(methods.MTPHeads.for_target(target, 3)).drafter.num_nodes
  4
  >>> again = methods.MTPHeads.for_target(target, 3, reuse=True)
  >>> mtp(again).drafter.num_nodes
  4
  >>> own = methods.MTPHeads.for_target(target, 3)
  >>> mtp(own, parents=(-1, 0, 0, 1)).verifier
  Traversal()

  Args:
    heads: modules of multi-token prediction.
    gamma: draft length of a chain, at most the number of modules unless the
      heads reuse one module. None means `heads.num_forecasts`.
    verifier: verification rule. None means `Block` for a sampled chain,
      `Traversal` for a sampled tree and `TargetWalk` for a deterministic tree.
    parents: draft tree of N nodes; None samples a chain.
    proposal: sampling method of children, see `drafters.Tree`.

  Raises:
    ValueError: both `gamma` and `parents` are given.
  """
  if parents is not None and gamma is not None:
    raise ValueError(f"gamma is {gamma}, and parents is given as well; the "
                     "depth of `parents` is the draft length: give one of the "
                     "two")
  shape = (Tree(tuple(parents), proposal) if parents is not None else
           Chain(heads.num_forecasts if gamma is None else gamma))
  if heads.reuse:
    return with_default_rule(layer_drafter(heads, shape), verifier)
  # Modules that predict no level of the draft need not run.
  heads = dataclasses.replace(
      heads, forecasts=min(heads.forecasts, max(shape.depth, 1)))
  return with_default_rule(NetworkDrafter(
      network=FeatureModules(heads=heads), shape=shape), verifier)
