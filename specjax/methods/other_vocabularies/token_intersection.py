"""Token-level intersection: samples from the tokens of both vocabularies.

Token-level intersection (TLI), Timor et al. 2025 (arXiv:2502.05202).

Let q be the distribution of the draft model over its tokens d, and I the tokens
whose bytes are also a token of the target. Drafts are sampled from the
distribution q' over the target's tokens x,

  q'(x) = sum over d with the bytes of x of q(d) / q(I) for x in I, else 0.

Several draft tokens can have the bytes of one x. So a draft that samples a
token d and contains only q(d) would be biased. Here x is sampled from q'.

The input of the draft model is a function of the target's tokens t_1..t_n,

  E(t) = pieces(t_1) ... pieces(t_n),

where a common token has one piece, its twin: a draft token with the same bytes.
The pieces of any other token are its bytes, split by the draft model's
tokenizer. Drafted tokens are common tokens, so while drafting the model also
reads E of the tokens so far. So the draft distribution of a token depends only
on the tokens before it (`autoregressive`). If the target splits a word more
finely than the draft model would, E differs from the draft model's split of the
complete string. This lowers the acceptance rate, but the output is exact.

  state       tokens E(t), and a cache of a prefix, see `_reading`
  propose     E grows by the pieces of new tokens, most of which are in the
              cache already; the model reads the missing ones, and samples gamma
              tokens
  commit      nothing
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
from specjax.methods import _following
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
  """Samples gamma common tokens from a model with another vocabulary.

  `params["drafter"]` is `{"model": parameters of the model, "vocabulary": the
  VocabularyMap}`, made by `data.map_vocabularies`.

  A row drafts nothing if it has no tokens in the drafter's vocabulary, or too
  many. Limits are `expansion` times the slots of a row, the model's context,
  and `expansion` times the columns of a prompt. So a row may be longer than the
  model's context, and the drafter has no `context_length`.

  Attributes:
    model: draft model over its own vocabulary.
    gamma: draft length, at least 1.
    target_size: vocabulary size V of the target.
    transform: transform of the draft logits; None: the decoder's. Any transform
      is lossless, because the verifier gets the distributions after it.
    expansion: maximal number of draft tokens per slot of a row. A slot is a
      place for a target token.
  """

  model: Model
  gamma: int
  target_size: int
  transform: LogitsTransform | None = None
  expansion: int = 2

  autoregressive = True

  def __post_init__(self):
    fields.check_fields(self, "gamma", "expansion")

  def bind(self, target: Model, transform: LogitsTransform
           ) -> "TokenIntersection":
    """Returns the drafter specialised to a target."""
    _common.check_target_size(self.target_size, target)
    return super().bind(target, transform)

  def init(self, params: Params, prompt: Prompt, prefill_output: ModelOutput
           ) -> reading_lib.Reading:
    """Reads the prompts in the drafter's tokens."""
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
    """Drafts a chain per row."""
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

    # Padding has token 0, which may have no twin (index D). So the index is
    # clipped.
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
    """Spells all committed tokens again in the drafter's vocabulary.

    The cache keeps the tokens before the first that changed, and `propose`
    reads the others. A lost row drafts again if its tokens now fit.
    """
    del since
    room = self._room(state.tokens.shape[1])
    ids, count = self._spelled(params["drafter"]["vocabulary"], state.tokens,
                               state.lengths, room)
    none = jnp.zeros_like(count)
    return state.drafter.replace(lengths=none).amended(
        none, ids, count, state.lengths, room)

  def follow(self) -> _following.Following:
    """Returns a drafter that follows any sequence."""
    return _following.Following(drafter=self)

  def _spelled(self, vocabulary: VocabularyMap, tokens: jax.Array,
               lengths: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Returns tokens `[B, S]` in the drafter's vocabulary, and their numbers.

    The drafter's beginning-of-sequence token, if it has one, replaces the
    target's.
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
    """Returns the reading with the pieces of newly committed tokens."""
    reading = state.drafter
    slots = reading.seen[:, None] + jnp.arange(self.num_nodes)
    new = jnp.take_along_axis(state.tokens, slots, axis=1, mode="clip")
    spelled = functools.partial(
        _translation.spelled, vocabulary=vocabulary,
        width=self.gamma + vocabulary.longest)
    ids, count = jax.vmap(spelled)(new, state.lengths - reading.seen)
    return reading.amended(reading.lengths, ids, count, state.lengths, room)

  def param_specs(self, axis: str, size: int) -> Any:
    """Returns the model's specifications; replicates the tables."""
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
  """Returns the distribution `law [B, V]` under the constraints.

  The constraints get log-probabilities instead of logits. This changes the
  effect of a repetition penalty on drafts, but the output stays exact.
  """
  return jax.nn.softmax(constraints_lib.constrained(
      constraints, memory, jnp.log(law), drafted=True), axis=-1)


def token_intersection(model: Model, target_size: int, gamma: int,
                       verifier: Verifier = BLOCK) -> Strategy:
  """Drafts the tokens that the model's vocabulary shares with the target's.

  Token-level intersection, Timor et al. 2025 (arXiv:2502.05202). It samples
  from the model's distribution restricted to the common tokens.

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
    target_size: vocabulary size V of the target.
    gamma: draft length, at least 1.
    verifier: rule for chains.
  """
  return Strategy(TokenIntersection(
      model=model, target_size=target_size, gamma=gamma), verifier)
