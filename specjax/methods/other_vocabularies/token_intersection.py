"""Token-level intersection (TLI): drafts tokens that both vocabularies contain.

See Timor et al. 2025 (arXiv:2502.05202). The draft model and the target have
different vocabularies. Two tokens are equal if they have the same bytes, and a
common token is one that both vocabularies contain.

Let q be the draft model's distribution over its tokens d, and q(I) the total
probability of the common tokens. The distribution q' from which drafts are
sampled is a distribution over the target's tokens x:

  q'(x) = (sum of q(d) over all d with the bytes of x) / q(I)

It is 0 if no d has the bytes of x. The sum is needed because several draft
tokens can have the same bytes.

The draft model reads a translation E of the target's tokens t_1..t_n,

  E(t) = pieces(t_1) ... pieces(t_n).

A common token has one piece, its twin: a draft token with the same bytes. The
pieces of any other token are its bytes, split by the draft model's tokenizer.
Drafted tokens are common tokens, and the draft model reads their twins while
drafting. So the draft model always reads E of the sequence, and the draft
distribution of a token depends only on the tokens before it (capability
"autoregressive"). If the target splits a word more finely than the draft model
would, E differs from the draft model's own split of the string. This lowers the
acceptance rate, but the output distribution is exact.

The drafter's state is E of the sequence, and the draft model's cache
(`_reading.Reading`). `propose` appends the pieces of the newly committed
tokens; most of these pieces are already in the cache. The draft model reads the
missing pieces, and samples gamma tokens. `commit` does not change the state.
"""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax.data.vocabularies import VocabularyMap
from specjax.decoding import constraining as constraints_lib
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import _common
from specjax.methods.networks import Params
from specjax.methods.other_vocabularies import _reading as reading_lib
from specjax.methods.other_vocabularies import _translation
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.sampling import LogitsTransform
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.utils import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenIntersection(_common.DrawnChain, reading_lib.Reader):
  """TLI: samples drafts from the tokens that two vocabularies share.

  The two vocabularies are those of the draft model and of the target.

  `params["drafter"]` is `{"model": parameters of the draft model, "vocabulary":
  map}`, where `map` is a `VocabularyMap` from `data.map_vocabularies`.

  A row may have at most `expansion` draft tokens per slot for target tokens,
  and at most as many as the draft model's context length. Its prompt may have
  at most `expansion` draft tokens per column of the prompts. Rows that exceed a
  limit, or have no draft tokens, are decoded without drafts. So the drafter
  does not limit the context length.

  Attributes:
    model: draft model over its own vocabulary.
    gamma: draft length, at least 1.
    target_size: vocabulary size of the target.
    transform: transform from logits to draft probabilities; None uses the
      target's transform. Every transform is lossless, because the verifier
      receives the transformed probabilities.
    expansion: maximum number of draft tokens of a row, as a multiple of the
      row's slots for target tokens.
  """

  model: Model
  gamma: int
  target_size: int
  transform: LogitsTransform | None = None
  expansion: int = 2

  provides = (*_common.DrawnChain.provides, "autoregressive", "rests",
              "follows")

  def __post_init__(self):
    fields.check_fields(self, "gamma", "expansion")

  def bind(self, target: Model, transform: LogitsTransform
           ) -> "TokenIntersection":
    """Returns the drafter with its transform, see `_common.with_transform`.

    Raises:
      ValueError: the vocabulary size of the target is not `target_size`.
    """
    _common.check_target_size(self.target_size, target)
    return super().bind(target, transform)

  def init(self, params: Params, prompt: Prompt, prefill_output: ModelOutput
           ) -> reading_lib.Reading:
    """Returns the state after the draft model has read the prompts.

    The prompts are translated to draft tokens.
    """
    del prefill_output
    own = params["drafter"]
    vocabulary = own["vocabulary"]
    self._check(vocabulary)
    ids, count = self._spelled(
        vocabulary, prompt.tokens, prompt.lengths, self._columns(prompt))
    return reading_lib.begun(
        self.model, own["model"], ids, count, prompt.lengths,
        self._room(prompt.capacity), self.gamma)

  def propose(self, params: Params, uniforms: jax.Array, state: DecodeState
              ) -> tuple[Draft, reading_lib.Reading]:
    model, vocabulary = (
        params["drafter"][name] for name in ("model", "vocabulary"))
    room = self._room(state.tokens.shape[1])
    reading = self._read(state, vocabulary, room)
    length, logits, cache = reading_lib.caught_up(
        self.model, model, reading,
        ~state.done & (reading.lengths > 0) & (reading.lengths <= room))

    def law(logits, memory, place):
      probs = _translation.common_law(
          logits, vocabulary, self.transform, state.temperature)
      if self.transform.constraints:
        probs = _constrained(self.transform.constraints, memory, probs)
      fits = (length > 0) & (length + place <= room + 1)
      return jnp.where(fits[:, None], probs, 0)

    # The twin of a target token is the draft token with the same bytes. Drafted
    # tokens have a twin, but padding is token 0, which may have no twin. The
    # table's entry is then the size of the draft vocabulary. So it is clipped.
    twin = lambda token: jnp.minimum(
        vocabulary.twins[token], vocabulary.draft_size - 1)

    def read(token, cache):
      out, cache = _common.read_token(self.model, model, twin(token), cache)
      return out.logits[:, 0], cache

    draft, cache = _common.draw_chain(
        law, read, cache.reserve(self.gamma), logits, uniforms, state,
        self.transform, self.target_size)
    return draft, reading.drafted(
        length, twin(draft.tokens[:, 1:]), cache.settle())

  def catch_up(self, params: Params, state: DecodeState, since: jax.Array
               ) -> reading_lib.Reading:
    """Returns the state with all committed tokens translated to draft tokens.

    The part of the cache before the first changed draft token remains valid.
    The draft model reads the other tokens in `propose`. If the draft tokens of
    a row did not fit before but fit now, tokens are drafted for it again.
    """
    del since
    room = self._room(state.tokens.shape[1])
    ids, count = self._spelled(params["drafter"]["vocabulary"], state.tokens,
                               state.lengths, room)
    none = jnp.zeros_like(count)
    return state.drafter.replace(lengths=none).amended(
        none, ids, count, state.lengths, room)

  def _spelled(self, vocabulary: VocabularyMap, tokens: jax.Array,
               lengths: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Translates target tokens to draft tokens.

    The target's beginning-of-sequence token is replaced by that of the draft
    model. If the draft model has none, the token is removed.

    Args:
      vocabulary: map between the vocabularies.
      tokens: target tokens `[B, S]` int32 of B rows.
      lengths: number `[B]` int32 of valid tokens.
      width: maximum number of returned draft tokens per row.

    Returns:
      Draft tokens `[B, width]`, and the number `[B]` of all draft tokens of
      each row, which may exceed `width`.
    """
    def spell(tokens, length):
      has_bos = tokens[0] == vocabulary.first[0]
      tokens = jnp.where(has_bos, jnp.roll(tokens, -1), tokens)
      ids, count = _translation.spelled(
          tokens, length - has_bos, vocabulary, width)
      puts_bos = vocabulary.first[1] >= 0
      with_bos = jnp.roll(ids, 1).at[0].set(vocabulary.first[1])
      return (jnp.where(puts_bos, with_bos, ids),
              (count + puts_bos).astype(jnp.int32))

    return jax.vmap(spell)(tokens, lengths)

  def _read(self, state: DecodeState, vocabulary: VocabularyMap, room: int
            ) -> reading_lib.Reading:
    """Returns the state after appending the pieces of newly committed tokens.

    Args:
      state: decoding state; `state.drafter` is the old state.
      vocabulary: map between the vocabularies.
      room: maximum number of draft tokens of a row.
    """
    reading = state.drafter
    slots = reading.seen[:, None] + jnp.arange(self.num_nodes)
    new = jnp.take_along_axis(state.tokens, slots, axis=1, mode="clip")
    spelled = functools.partial(
        _translation.spelled, vocabulary=vocabulary,
        width=self.gamma + vocabulary.longest)
    ids, count = jax.vmap(spelled)(new, state.lengths - reading.seen)
    return reading.amended(reading.lengths, ids, count, state.lengths, room)

  def param_specs(self, axis: str, size: int) -> Any:
    """Returns the partition specifications of `params["drafter"]`.

    The tables of the vocabulary map are replicated on every device.
    """
    return {"model": self.model.param_specs(axis, size),
            "vocabulary": PartitionSpec()}

  def _check(self, vocabulary: VocabularyMap) -> None:
    for part, has, wants in (
        ("drafter", vocabulary.draft_size, self.model.vocab_size),
        ("target", vocabulary.target_size, self.target_size)):
      if has != wants:
        raise ValueError(
            f"params['drafter']['vocabulary'] maps {has} tokens of the {part}, "
            f"which has {wants}; call data.map_vocabularies with the sizes of "
            "both models")


def _constrained(constraints: Any, memory: chex.ArrayTree, law: jax.Array
                 ) -> jax.Array:
  """Returns a draft distribution `[B, V]` that satisfies the constraints.

  Constraints are functions of logits, but here their argument contains
  log-probabilities. This changes the effect of a repetition penalty on the
  draft distribution. The output distribution remains exact.

  Args:
    constraints: constraints of the logits transform.
    memory: state of the constraints after the tokens so far.
    law: draft distribution `[B, V]` without constraints.
  """
  return jax.nn.softmax(constraints_lib.constrained(
      constraints, memory, jnp.log(law), drafted=True), axis=-1)


def token_intersection(model: Model, target_size: int, gamma: int,
                       verifier: Verifier = BLOCK) -> Strategy:
  """Returns the strategy token-level intersection (Timor et al. 2025).

  The draft model has another vocabulary than the target. Drafts are sampled
  from the draft model's distribution, restricted to the tokens that both
  vocabularies contain (arXiv:2502.05202).

  >>> import jax
  >>> import specjax as sj
  >>> from specjax.testing import ListTokenizer, MarkovModel
  >>> vocabulary = sj.data.map_vocabularies(
  ...     drafter=ListTokenizer((b"a", b"b", b"ab")),
  ...     target=ListTokenizer((b"c", b"b", b"a", b"ba")))
  >>> vocabulary.shared  # a and b
  2
  >>> own, target = MarkovModel(3), MarkovModel(4)
  >>> decoder = token_intersection(own, 4, gamma=2).decoder(target)
  >>> params = {"target": target.init(jax.random.key(0)), "drafter": {
  ...     "model": own.init(jax.random.key(1)), "vocabulary": vocabulary}}
  >>> text = decoder.generate(
  ...     params, [[3, 1]], jax.random.key(2), max_new_tokens=6)
  >>> len(text.tokens[0])
  8

  Args:
    model: draft model over another vocabulary.
    target_size: vocabulary size of the target.
    gamma: draft length, at least 1.
    verifier: verification rule for chains.
  """
  return Strategy(TokenIntersection(
      model=model, target_size=target_size, gamma=gamma), verifier)
