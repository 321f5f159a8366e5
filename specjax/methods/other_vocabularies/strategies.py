"""Methods whose small language model has a vocabulary of its own."""

from specjax import verifiers
from specjax.data import Retokenizer
from specjax.methods.other_vocabularies.string_match import StringMatch
from specjax.methods.other_vocabularies.token_intersection import (
  TokenIntersection,
)
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.types import ModelFn
from specjax.types import Verifier


def token_intersection(model: ModelFn, target_size: int, gamma: int,
                       verifier: Verifier = BLOCK) -> Strategy:
  """A chain of a model with another vocabulary, of the tokens both know.

  Token-level intersection, Timor et al. 2025 (arXiv:2502.05202): its law
  restricted to the common tokens, for any rule at any temperature.

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
    model: the small language model, over a vocabulary of its own.
    target_size: V, `vocab_size` of the target.
    gamma: drafted tokens of a round, at least 1.
    verifier: a rule for chains.
  """
  return Strategy(TokenIntersection(
      model=model, target_size=target_size, gamma=gamma), verifier)


def string_match(model: ModelFn, texts: Retokenizer, gamma: int,
                 length: int | None = None) -> Strategy:
  """A text that another model writes, as the target's tokens of it.

  String-level exact match, Timor et al. 2025 (arXiv:2502.05202), for
  vocabularies with few tokens in common.

  >>> import jax
  >>> import specjax as sj
  >>> from specjax.testing import ListTokenizer, MarkovModel
  >>> texts = sj.data.Retokenizer(
  ...     drafter=ListTokenizer((b"a", b"b")),
  ...     target=ListTokenizer((b"ab", b"ba", b"a", b"b")))
  >>> own, target = MarkovModel(2), MarkovModel(4)
  >>> decoder = string_match(own, texts, gamma=2).decoder(target)
  >>> params = {"target": target.init(jax.random.key(0)),
  ...           "drafter": own.init(jax.random.key(1))}
  >>> text = decoder.generate(
  ...     params, [[0, 1]], jax.random.key(2), max_new_tokens=6)
  >>> len(text.tokens[0])
  8

  Args:
    model: the small language model, over a vocabulary of its own.
    texts: its tokenizer and the target's.
    gamma: tokens of the target in a chain, at most.
    length: tokens that the model writes for them in a round; default: gamma.
  """
  return Strategy(StringMatch(
      model=model, texts=texts, gamma=gamma, length=length),
      verifiers.TargetWalk())
