"""String-level exact match (SLEM): drafts are translated as strings.

See Timor et al. 2025 (arXiv:2502.05202); the method is also called universal
assisted generation. The draft model and the target have different vocabularies,
possibly with few common tokens: a byte-level model can draft complete words.

The draft model generates its most likely tokens. The target's tokenizer splits
their string into target tokens, which form a deterministic draft chain. Every
verification rule for chains accepts such a token with its probability under the
target. The split of a string depends on the position where the draft began.
Greedy block verification is not exact for such drafts, so it raises an error.

In every round, `propose` does the following:

  1. The draft model's tokenizer splits the string of the newly committed target
     tokens into draft tokens. It splits the last `lookback` draft tokens before
     this string again, because their split may change.
  2. The draft model reads the new draft tokens and generates a continuation.
  3. The target's tokenizer splits the generated string into target tokens,
     together with the last `lookback` target tokens before this string.

The drafter's state is the sequence in draft tokens, and the draft model's cache
(`_reading.Reading`). `commit` does not change it.

Both tokenizers run on the host, in two calls per round from the compiled loop
(`jax.pure_callback`). On a TPU a call may take as long as a pass of a small
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

_PIECES = 32  # maximum number of draft tokens per newly committed target token


@dataclasses.dataclass(frozen=True, kw_only=True)
class StringMatch(reading_lib.Reader):
  """SLEM: a draft model with another vocabulary than the target.

  The draft model generates a string, and the target's tokenizer splits this
  string into target tokens. `params["drafter"]` contains the parameters of the
  draft model. Nothing is drafted for a row that has no draft tokens, or more
  than `expansion` allows.

  Attributes:
    model: draft model over its own vocabulary.
    tokenizers: tokenizers of the draft model and of the target.
    gamma: maximum draft length in target tokens, at least 1.
    length: number of draft tokens that the draft model generates per round;
      None means gamma.
    lookback: number of old tokens whose bytes a tokenizer splits again together
      with the new bytes, because a token may join old and new bytes.
    expansion: maximum number of draft tokens of a row, as a multiple of the
      row's slots for target tokens.
  """

  model: Model
  tokenizers: Retokenizer
  gamma: int
  length: int | None = None
  lookback: int = 10
  expansion: int = 2

  # Not autoregressive: the target's tokenizer may split the same string
  # differently if the draft begins at another position.
  provides = ("chain", "iid", "conditional", "deterministic")
  num_uniforms = 0

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
    """Returns the drafter unchanged, after comparing vocabulary sizes.

    Raises:
      ValueError: the target's tokenizer has another vocabulary size than the
        target.
    """
    del transform
    _common.check_target_size(self.tokenizers.target_size, target)
    return self

  def init(self, params: Params, prompt: Prompt, prefill_output: ModelOutput
           ) -> reading_lib.Reading:
    """Returns the state after the draft model has read the prompts.

    The prompts are translated to draft tokens on the host.
    """
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
    # `one_hot` returns finite probabilities even if the draft model's logits
    # are not finite. So NaN is written to `probs`: the decoding loop tests
    # `probs` and reports the error.
    bad = (wanted & ~finite)[:, None, None]
    probs = jnp.where(bad, jnp.nan, probs)
    draft = jax.vmap(Draft.chain)(
        rounds.roots(state), jnp.maximum(chain, 0), probs)
    return draft, reading.drafted(length, written, cache)

  def _read(self, state: DecodeState, room: int) -> reading_lib.Reading:
    """Returns the state with the newly committed tokens, in draft tokens.

    Args:
      state: decoding state; `state.drafter` is the old state.
      room: maximum number of draft tokens of a row.
    """
    reading, batch = state.drafter, state.lengths.shape[0]
    start = jnp.maximum(reading.lengths - self.lookback, 0)
    # A row with more than `room` draft tokens is lost: nothing is drafted for
    # it any more. So its new tokens are not translated: the counts are 0.
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
    """Generates the draft model's most likely continuation of each row.

    Args:
      params: parameters of the draft model.
      logits: logits `[B, D]` of the next token over its D tokens.
      cache: cache of the draft model.
      room: maximum number of draft tokens of a row.

    Returns:
      Draft tokens `[B, length]`; `[B]` bool, False if logits at a position up
      to `room` were not finite; and the cache with all tokens except the last.
    """
    depth = jnp.zeros((logits.shape[0], 1), jnp.int32)
    self_only = jnp.ones((logits.shape[0], 1, 1), bool)

    def best(logits, cache):
      # A row with more than `room` tokens may exceed the model's context
      # length, so its logits may be non-finite. This is not an error, because
      # nothing is drafted for such a row.
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
    return self.model.param_specs(axis, size)


def _window(tokens: jax.Array, start: jax.Array, size: int) -> jax.Array:
  """Returns `size` tokens of every row of `tokens`, from `start [B]` on."""
  return jnp.take_along_axis(
      tokens, start[:, None] + jnp.arange(size), axis=1, mode="clip")


def _ids_and_counts(batch: int, width: int
                    ) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
  return (jax.ShapeDtypeStruct((batch, width), jnp.int32),
          jax.ShapeDtypeStruct((batch,), jnp.int32))


def string_match(model: Model, tokenizers: Retokenizer, gamma: int,
                 length: int | None = None) -> Strategy:
  """Returns the strategy string-level exact match (Timor et al. 2025).

  The draft model has another vocabulary than the target, possibly with few
  common tokens. The draft model generates a string, and the target's tokenizer
  splits this string into the tokens of the draft (arXiv:2502.05202).

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
    gamma: maximum draft length in target tokens.
    length: number of draft tokens that the draft model generates per round;
      None means gamma.
  """
  return Strategy(StringMatch(
      model=model, tokenizers=tokenizers, gamma=gamma, length=length),
      verifiers.TargetWalk())
