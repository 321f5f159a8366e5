"""Distillation from generated text and stored probabilities of a target."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import objectives
from specjax import strategies
from specjax import testing
from specjax.data import reduction
from specjax.data import tokenizers
from specjax.training import distillation

_V, _K, _EOS = 7, 3, 4
_MODEL = testing.MarkovModel(_V)


def _tables():
  teacher, student = (_MODEL.init(jax.random.key(i)) for i in (0, 1))
  return teacher, student


def _batch(teacher, tokens, top):
  """Returns a batch of `StoredLaws` for equal vocabularies."""
  probs = jax.nn.softmax(jax.jit(_MODEL)(teacher, tokens[:, :-1]).logits)
  values, ids = jax.lax.top_k(probs, top)
  in_top = (ids == tokens[:, 1:, None]).any(-1)
  return {"tokens": tokens[:, :-1], "ids": ids, "probs": values,
          "drawn": jnp.where(in_top, -1, tokens[:, 1:]),
          "weights": jnp.ones(tokens[:, 1:].shape)}


def _loss(student, batch):
  return objectives.StoredLaws(model=_MODEL)(
      {"drafter": student}, {}, batch, None)


def test_all_of_a_law_is_the_cross_entropy():
  # Broken: the drafter learns another law than the target's.
  teacher, student = _tables()
  tokens = jax.random.randint(jax.random.key(2), (4, 9), 0, _V)
  p = jax.nn.softmax(_MODEL(teacher, tokens[:, :-1]).logits)
  q = jax.nn.softmax(_MODEL(student, tokens[:, :-1]).logits)
  loss, metrics = _loss(student, _batch(teacher, tokens, _V))
  np.testing.assert_allclose(loss, -(p * jnp.log(q)).sum(-1).mean(), rtol=1e-5)
  np.testing.assert_allclose(
      metrics["acceptance"], jnp.minimum(p, q).sum(-1).mean(), rtol=1e-5)


def test_the_drawn_token_stands_for_the_rest_of_a_law():
  # Broken: tokens outside of the K likeliest are never learned.
  teacher, student = _tables()
  context = jnp.full((_V, 1), 2)
  p = jax.nn.softmax(_MODEL(teacher, context).logits)[0, 0]
  every = jnp.concatenate([context, jnp.arange(_V)[:, None]], axis=1)
  rows = [_loss(student, jax.tree.map(
      lambda x, i=i: x[i:i + 1], _batch(teacher, every, _K)))[0]
          for i in range(_V)]
  whole, _ = _loss(student, _batch(teacher, every[:1], _V))
  np.testing.assert_allclose(jnp.dot(p, jnp.stack(rows)), whole, rtol=1e-5)


def test_tokens_that_the_student_lacks_are_left_out():
  # Broken: they count as its token 0.
  teacher, student = _tables()
  batch = _batch(teacher, jnp.array([[1, 2, 3]]), _K)
  lacking = {**batch, "ids": jnp.where(jnp.arange(_K) == 1, -1, batch["ids"])}
  gone = {**batch, "probs": jnp.where(jnp.arange(_K) == 1, 0, batch["probs"])}
  np.testing.assert_allclose(_loss(student, lacking)[0],
                             _loss(student, gone)[0], rtol=1e-6)
  nothing = {**batch, "weights": jnp.zeros((1, 2))}
  assert _loss(student, nothing)[0] == 0


def test_answers_come_with_their_laws_and_go_on(tmp_path):
  # Broken: laws of other tokens; or a killed run writes other answers.
  teacher, _ = _tables()
  decoder = strategies.autoregressive().decoder(_MODEL, eos=_EOS)
  prompts = [[0], [1, 2], [3, 3, 3], [5], [6, 0]]
  write = lambda: distillation.write_answers(
      decoder, {"target": teacher}, prompts, max_new_tokens=6, top=_K,
      directory=tmp_path, rows_per_file=2)
  answers = write()
  assert [len(a.tokens) for a in answers] == [2, 2, 1]
  row = 0
  for a in answers:
    for tokens, start, length, ids, probs in zip(
        a.tokens, a.starts, a.lengths, a.ids, a.probs):
      assert tokens[:start].tolist() == prompts[row]
      written = tokens[start:length]
      assert len(written) == 6 or written[-1] == _EOS
      law = np.asarray(jax.nn.softmax(
          _MODEL(teacher, tokens[None, :length]).logits[0]))
      best = np.sort(law)[:, ::-1][:, :_K]
      np.testing.assert_allclose(probs[:length - 1], best[:-1], atol=1e-3)
      np.testing.assert_allclose(np.take_along_axis(
          law[:-1], ids[:length - 1], 1), best[:-1], atol=1e-6)
      row += 1
  path = tmp_path / "answers-00001.npz"
  path.write_bytes(path.read_bytes()[:-20])  # killed, or a bad disk
  for a, b in zip(write(), answers):
    for field in dataclasses.fields(a):
      np.testing.assert_array_equal(getattr(a, field.name),
                                    getattr(b, field.name))
  texts = distillation.write_answers(
      decoder, {"target": teacher}, prompts, max_new_tokens=6, top=0,
      directory=tmp_path / "texts", rows_per_file=2)
  for a, b in zip(texts, answers):  # the same, and no law is read
    np.testing.assert_array_equal(a.lengths, b.lengths)
    np.testing.assert_array_equal(a.tokens[:, :7], b.tokens[:, :7])
    assert a.ids.shape[-1] == a.probs.shape[-1] == 0
  with pytest.raises(ValueError, match="limit|context length is"):
    distillation.write_answers(
        decoder, {"target": teacher}, prompts, max_new_tokens=10**6, top=_K,
        directory=tmp_path)


_TEXTS = ["def area(width, height):\n  return width * height\n"] * 4 + [
    "the quick brown fox jumps over the lazy dog\n"]


def test_a_reduced_vocabulary_writes_every_text():
  # Broken: a merge is kept whose parts are gone, or an id means another token.
  whole = tokenizers.train(_TEXTS, 320)
  counts = np.bincount(whole.encode(_TEXTS[0]), minlength=320)
  small = reduction.reduced(whole, counts, 290)
  assert small.vocab_size == 290
  assert small.backend.id_to_token(small.eos) == "<|endoftext|>"
  for text in (*_TEXTS, "naïve 日本語 <|endoftext|>"):
    assert small.decode(small.encode(text)) == text
    assert small.encode(text, special=True).count(small.eos) == (
        1 + text.count("<|endoftext|>"))
  # Tokens that were not seen go first.
  longer = [len(small.encode(t)) / len(whole.encode(t)) for t in _TEXTS]
  assert longer[0] < longer[-1]
  with pytest.raises(ValueError, match="size is 100, but 257 tokens"):
    reduction.reduced(whole, counts, 100)
