"""Drafting by strings: a model with another vocabulary generates the draft.

String-level exact match (SLEM), Timor et al. 2025 (arXiv:2502.05202), also
called universal assisted generation. It suits vocabularies with few common
tokens: a byte-level model can draft complete words.

The draft model generates its likeliest tokens, the target's tokenizer splits
their string, and the result is a deterministic chain. Every rule for chains
accepts a token with its probability under the target. The tokens of the string
depend on the position where the draft began. Greedy block verification is not
exact for such drafts, so it raises an error.

  state       tokens of the row, and a cache of a prefix, see
              `methods.other_vocabularies._reading`
  propose     the draft model's tokenizer splits the new string, with its last
              `lookback` tokens, which may change; the model catches up and
              generates; the target's tokenizer splits the generated string,
              with the last `lookback` target tokens before it
  commit      nothing

Both tokenizers run on the host, in two calls per round from the compiled loop
(`jax.pure_callback`). On a TPU a call may cost as much as a pass of a small
model. The persistent compilation cache does not store programs with such calls.
"""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp

from specjax import verifiers
from specjax.data.retokenization import Retokenizer
from specjax.decoding import rounds
from specjax.interfaces import Cache
from specjax.interfaces import Model
from specjax.methods import _common
from specjax.methods.networks import Params
from specjax.methods.other_vocabularies import _reading as reading_lib
from specjax.methods.strategy import Strategy
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.utils import fields

_PIECES = 32  # maximal number of draft tokens per new target token


@dataclasses.dataclass(frozen=True, kw_only=True)
class StringMatch(reading_lib.Reader):
  """Drafts the target's tokens of a string that another model generates.

  `params["drafter"]` are the parameters of the model. A row drafts nothing if
  it has no tokens in the drafter's vocabulary, or too many, see
  `TokenIntersection`.

  Attributes:
    model: draft model over its own vocabulary.
    tokenizers: tokenizers of the draft model and of the target.
    gamma: maximal draft length in target tokens, at least 1.
    length: number of tokens that the model generates per round; default: gamma.
    lookback: number of tokens before new ones that are split again together
      with them, because a tokenizer may join old and new bytes.
    expansion: maximal number of draft tokens per target token of capacity.
  """

  model: Model
  tokenizers: Retokenizer
  gamma: int
  length: int | None = None
  lookback: int = 10
  expansion: int = 2

  chain = True
  iid = True
  conditional = True
  deterministic = True
  autoregressive = False  # tokens depend on the position where a draft began
  num_uniforms = 0
  proposal = "deterministic"

  def __post_init__(self):
    if self.length is None:
      object.__setattr__(self, "length", self.gamma)
    fields.check_fields(self, "gamma", "length", "lookback", "expansion")
    if self.tokenizers.draft_size != self.model.vocab_size:
      raise ValueError(
          f"vocab_size of the draft model is {self.model.vocab_size}, but its "
          f"tokenizer has {self.tokenizers.draft_size} tokens; give "
          f"Retokenizer draft_size={self.model.vocab_size}, or the tokenizer "
          "of the model")

  def bind(self, target: Model, transform: LogitsTransform) -> "StringMatch":
    """Returns the drafter specialised to a target."""
    del transform
    _common.check_target_size(self.tokenizers.target_size, target)
    return self

  def init(self, params: Params, prompt: Prompt, prefill_output: ModelOutput
           ) -> reading_lib.Reading:
    """Reads the prompts in the drafter's tokens."""
    del prefill_output
    width = self._columns(prompt)
    ids, count = jax.pure_callback(
        functools.partial(self.tokenizers.prompts, width),
        _ids_and_counts(len(prompt.tokens), width), prompt.tokens,
        prompt.lengths)
    return reading_lib.begun(
        self.model, params["drafter"], ids, count, prompt.lengths,
        self._room(prompt.capacity), self.length)

  def propose(self, params: Params, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, reading_lib.Reading]:
    """Drafts a chain per row."""
    del uniforms
    model, room = params["drafter"], self._room(state.tokens.shape[1])
    reading = self._read(state, room)
    wanted = ~state.done & (reading.lengths > 0) & (reading.lengths <= room)
    length, logits, cache = reading_lib.caught_up(
        self.model, model, reading, wanted)
    written, finite, cache = self._write(model, logits, cache, room)

    start = jnp.maximum(state.lengths - self.lookback, 0)
    chain = jax.pure_callback(
        functools.partial(self.tokenizers.chains, self.gamma),
        jax.ShapeDtypeStruct((length.shape[0], self.gamma), jnp.int32),
        _window(state.tokens, start, self.lookback), state.lengths - start,
        written, wanted)
    probs = jax.nn.one_hot(chain, self.tokenizers.target_size)
    # `probs` is one-hot, also if the logits are not finite. NaN is put into it,
    # so that the decoding loop reports the error.
    bad = (wanted & ~finite)[:, None, None]
    probs = jnp.where(bad, jnp.nan, probs)
    draft = jax.vmap(Draft.chain)(
        rounds.roots(state), jnp.maximum(chain, 0), probs)
    return draft, reading.drafted(length, written, cache)

  def _read(self, state: DecodeState, room: int) -> reading_lib.Reading:
    """Returns the reading with the tokens committed since the last round."""
    reading, batch = state.drafter, state.lengths.shape[0]
    start = jnp.maximum(reading.lengths - self.lookback, 0)
    # Lost rows are not read any more.
    known = reading.lengths <= room
    width = self.lookback + _PIECES * self.num_nodes
    ids, count = jax.pure_callback(
        functools.partial(self.tokenizers.reread, width),
        _ids_and_counts(batch, width),
        _window(reading.tokens, start, self.lookback),
        jnp.where(known, reading.lengths - start, 0),
        _window(state.tokens, reading.seen, self.num_nodes),
        jnp.where(known, state.lengths - reading.seen, 0))
    count = jnp.where(count <= width, count, room + 1)
    return reading.amended(start, ids, count, state.lengths, room)

  def _write(self, params: chex.ArrayTree, logits: jax.Array, cache: Cache,
             room: int) -> tuple[jax.Array, jax.Array, Any]:
    """Generates the most likely tokens.

    Returns:
      `[B, length]` ids; `[B]` bool, False in rows with non-finite logits at
      places below `room`; and the cache with all tokens except the last.
    """
    depth = jnp.zeros((logits.shape[0], 1), jnp.int32)
    self_only = jnp.ones((logits.shape[0], 1, 1), bool)

    def best(logits, cache):
      # A row with more than `room` tokens may exceed the model's context. It
      # has no draft, so its logits need not be finite.
      finite = jnp.isfinite(jnp.max(logits, axis=-1)) | (cache.lengths > room)
      return jnp.argmax(logits, axis=-1).astype(jnp.int32), finite

    def extend(carry, _):
      cache, logits = carry
      token, finite = best(logits, cache)
      out = self.model(params, token[:, None], depth, self_only, cache)
      cache = out.cache.rollback(cache.lengths + 1)
      return (cache, out.logits[:, 0]), (token, finite)

    (cache, logits), drawn = jax.lax.scan(
        extend, (cache.reserve(self.length), logits),
        length=self.length - 1)
    tokens, finite = jax.tree.map(
        lambda all, last: jnp.concatenate([all, last[None]]),
        drawn, best(logits, cache))
    return tokens.T, finite.all(0), cache.settle()

  def param_specs(self, axis: str, size: int) -> Any:
    """Returns the specifications of the model."""
    return self.model.param_specs(axis, size)


def _window(tokens: jax.Array, start: jax.Array, size: int) -> jax.Array:
  """Returns `size` columns of `tokens` after `start [B]`."""
  return jnp.take_along_axis(
      tokens, start[:, None] + jnp.arange(size), axis=1, mode="clip")


def _ids_and_counts(batch: int, width: int
                    ) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
  return (jax.ShapeDtypeStruct((batch, width), jnp.int32),
          jax.ShapeDtypeStruct((batch,), jnp.int32))


def string_match(model: Model, tokenizers: Retokenizer, gamma: int,
                 length: int | None = None) -> Strategy:
  """Drafts the target's tokens of a string that another model generates.

  String-level exact match, Timor et al. 2025 (arXiv:2502.05202), for
  vocabularies with few common tokens.

  >>> import jax
  >>> import specjax as sj
  >>> from specjax.testing import ListTokenizer, MarkovModel
  >>> both = sj.data.Retokenizer(
  ...     drafter=ListTokenizer((b"a", b"b")),
  ...     target=ListTokenizer((b"ab", b"ba", b"a", b"b")))
  >>> own, target = MarkovModel(2), MarkovModel(4)
  >>> decoder = string_match(own, both, gamma=2).decoder(target)
  >>> params = {"target": target.init(jax.random.key(0)),
  ...           "drafter": own.init(jax.random.key(1))}
  >>> text = decoder.generate(
  ...     params, [[0, 1]], jax.random.key(2), max_new_tokens=6)
  >>> len(text.tokens[0])
  8

  Args:
    model: draft model over another vocabulary.
    tokenizers: tokenizers of the draft model and of the target.
    gamma: maximal draft length in target tokens.
    length: number of tokens that the model generates per round; default: gamma.
  """
  return Strategy(StringMatch(
      model=model, tokenizers=tokenizers, gamma=gamma, length=length),
      verifiers.TargetWalk())
