"""Windows, documents and the tokenizer."""

import functools

import numpy as np
import pytest
import tokenizers as library

from specjax.analysis import estimate
from specjax.data import batches
from specjax.data import corpora
from specjax.data import token_streams
from specjax.data import tokenizers


def test_every_window_once_per_epoch():
  # Broken: text is seen twice or never, or batches depend on what came
  # before, which breaks exact resume.
  length, count = 7, 203
  windows = batches.TokenWindows(np.arange(count, dtype=np.uint16), 3, length,
                                 seed=1)
  per_epoch = windows.batches_per_epoch
  assert per_epoch == ((count - 1) // length - 1) // 3
  offsets, orders = set(), []
  for epoch in range(4):
    rows = np.concatenate([windows.batch(epoch * per_epoch + i)
                           for i in range(per_epoch)])
    assert rows.dtype == np.int32 and rows.shape == (3 * per_epoch, length + 1)
    # Tokens are their own positions, so each window shows where it was cut.
    np.testing.assert_array_equal(np.diff(rows), 1)
    starts = rows[:, 0]
    assert len(set(starts)) == len(starts)
    assert len(set(starts % length)) == 1
    assert starts.min() >= 0 and rows.max() < count
    offsets.add(starts[0] % length)
    orders.append(tuple(starts // length))
  assert len(offsets) > 1 and len(set(orders)) == 4


def test_batch_is_a_function_of_the_step():
  # Broken: a resumed run sees other batches.
  tokens = np.random.default_rng(0).integers(99, size=500)
  make = lambda **kwargs: batches.TokenWindows(tokens, 4, 8, **kwargs)
  once, again = make(seed=3), make(seed=3)
  forward = [once.batch(i) for i in range(40)]
  for i in reversed(range(40)):
    np.testing.assert_array_equal(again.batch(i), forward[i])
  assert not np.array_equal(make(seed=4).batch(0), forward[0])


def test_the_least_corpus():
  # Broken: a corpus that is just long enough fails, or one that is not dies
  # with an index error in the middle of a run.
  needed = (4 + 1) * 8 + 1
  windows = batches.TokenWindows(np.arange(needed), 4, 8)
  assert windows.batches_per_epoch == 1
  for step in range(30):
    assert windows.batch(step).max() < needed


def test_held_out_is_decided_by_the_name():
  # Broken: a model is measured on text that another run trained on.
  names = [f"module_{i}.py" for i in range(2000)]
  held_out = [corpora.Document(name, "a").held_out for name in names]
  assert held_out == [corpora.Document(name, "b").held_out for name in names]
  assert 60 <= sum(held_out) <= 140  # one in twenty
  # Fixed forever: published figures depend on it.
  assert [i for i in range(60) if held_out[i]] == [10, 37]


def test_small_corpora_have_two_sides():
  # Broken: a small corpus cannot be trained on, for the hash of its names
  # holds out nothing.
  documents = [corpora.Document(f"{i}", "text") for i in range(3)]
  assert not any(d.held_out for d in documents)
  training, held_out = corpora.split(documents)
  assert len(training) == 2 and len(held_out) == 1
  many = [corpora.Document(f"{i}", "text") for i in range(200)]
  assert corpora.split(many) == ([d for d in many if not d.held_out],
                                 [d for d in many if d.held_out])


def test_documents_of_files(tmp_path):
  # Broken: a source is read in another order or under other names, which
  # moves the split.
  (tmp_path / "b.txt").write_text("second " * 2000)
  (tmp_path / "a").mkdir()
  (tmp_path / "a" / "c.md").write_text("première\n", encoding="utf-8")
  (tmp_path / "empty.txt").write_text(" \n")
  folder = corpora.read_documents(str(tmp_path))
  assert [d.name for d in folder] == ["a/c.md", "b.txt"]
  assert folder[0].text == "première\n"
  chunks = corpora.read_documents(str(tmp_path / "b.txt"))
  assert [d.name for d in chunks] == ["b.txt:0", "b.txt:8192"]
  assert "".join(d.text for d in chunks) == "second " * 2000
  lines = tmp_path / "d.jsonl"
  lines.write_text('{"text": "one\\u2028"}\n\n{"body": 1, "text": "two"}\n')
  documents = corpora.read_documents(str(lines))
  # Copies of a text are in the same part of a corpus.
  assert documents == [corpora.Document(x, x) for x in ("one\u2028", "two")]


def test_stdlib_is_there_and_split():
  # Broken: the embedded corpus is empty, holds installed packages, or has
  # nothing to measure on.
  documents = corpora.stdlib_documents(include_tests=False)
  names = [d.name for d in documents]
  assert "dataclasses.py" in names and names == sorted(set(names))
  assert not any("site-packages" in name for name in names)
  held_out = sum(d.held_out for d in documents)
  assert 0.02 < held_out / len(documents) < 0.1


@functools.cache
def _tokenizer():
  return tokenizers.train(["def verify(draft):\n  return law\n"] * 20, 280)


@pytest.mark.parametrize("text", [
    "", " ", "  leading and trailing \n\n", "tabs\tand\r\nlines\x00\x7f",
    "naïve café — 漢字 \U0001f600 e\u0301 \ufeff\uffff",
    "".join(map(chr, range(1, 0x250))), "a<|endoftext|>b"])
def test_tokenizer_round_trip(text):
  # Broken: a prompt is changed before the model sees it; the last case lets a
  # user's text end a document.
  tokenizer = _tokenizer()
  ids = tokenizer.encode(text)
  assert ids[0] == tokenizer.bos == tokenizer.eos
  assert tokenizer.bos not in ids[1:]
  assert tokenizer.encode(text, bos=False) == ids[1:]
  assert tokenizer.decode(ids) == tokenizer.decode(ids[1:]) == text
  assert max(ids) < tokenizer.vocab_size <= 280


def test_tokenizer_survives_broken_utf8():
  # Broken: a sampled continuation that ends within a character raises.
  tokenizer = _tokenizer()
  ids = tokenizer.encode("\U0001f600", bos=False)
  assert len(ids) > 1
  assert "\ufffd" in tokenizer.decode(np.array(ids[:-1], np.int32))


def test_stream_of_documents():
  # Broken: documents run into each other in the training array, or ids of a
  # large vocabulary do not fit it.
  tokenizer = _tokenizer()
  stream = tokenizer.encode_stream(iter(["law", "", "draft law"]))
  assert stream.dtype == np.uint32
  assert stream.tolist() == [*tokenizer.encode("law"), tokenizer.bos,
                             *tokenizer.encode("draft law")]
  words = library.Tokenizer(library.models.WordLevel(
      {str(i): i for i in range(2**16 + 9)}))
  large = tokenizers.Tokenizer(words, eos=2**16 + 8)  # and no bos
  assert large.encode_stream(["65540", "7"]).tolist() == [
      65544, 65540, 65544, 7]


def test_long_texts_in_pieces(monkeypatch):
  # Broken: a text that is too long for one piece has other tokens, or it is
  # encoded in one piece, which takes 40 times its size.
  tokenizer = _tokenizer()
  text = "def verify(draft):\n  return law\nlaw = draft\n\n" * 99
  expected = tokenizer.encode_stream(["law", text])
  for name, value in (
      ("_LONG", 300), ("TOGETHER", 100), ("_NEAR", 30)):
    monkeypatch.setattr(token_streams, name, value)
  pieces = list(token_streams.cut(tokenizer, text))
  assert "".join(pieces) == text and max(map(len, pieces)) <= 300
  parts = list(token_streams.encode(tokenizer, ["law", text]))
  assert len(parts) > 10
  np.testing.assert_array_equal(np.concatenate(parts), expected)
  spaced = library.Tokenizer.from_str(tokenizer.backend.to_str())
  spaced.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=True)
  spaced = tokenizers.Tokenizer(spaced, bos=0)
  assert list(token_streams.cut(spaced, text)) == [text]


def test_tokenizer_files(tmp_path):
  # Broken: target and drafter are trained with other vocabularies.
  path = tmp_path / "tokenizer.json"
  _tokenizer().save(path)
  text = "def law(draft): é"
  assert tokenizers.Tokenizer.load(path).encode(text) == _tokenizer().encode(
      text)


@pytest.mark.parametrize("documents, length, size", [
    (5, 700, 128), (8, 600, 512), (16, 600, 128), (16, 300, 512),
    (64, 300, 128)])
def test_intervals_over_held_out_rows_cover(documents, length, size):
  # Broken: rows that overlap, or rows of one document, count as independent
  # observations; 64 rows of a short text covered 0 to 73 %.
  rng, mean, draws = np.random.default_rng(0), 1.5, 400
  starts = np.arange(documents) * length
  held_out = batches.held_out_rows(
      np.arange(documents * length, dtype=np.uint32), starts, 64, size)
  tokens = held_out.tokens.ravel()
  assert len(set(tokens.tolist())) == len(tokens)  # no token is in two rows
  covered = 0
  for _ in range(draws):
    level = rng.gamma(20, mean / 20, documents)  # documents differ
    accepted = rng.poisson(level[:, None], (documents, length)).ravel()
    found = estimate(
        lambda total, count: total / count,
        accepted[held_out.tokens].sum(axis=1).astype(float),
        np.full(len(held_out.tokens), float(size)), clusters=held_out.clusters)
    covered += found.low <= mean <= found.high
  assert 0.93 <= covered / draws <= 0.97


def test_held_out_rows_of_few_documents():
  # Broken: an interval over rows of one document, or a row is cut from a text
  # that is too short.
  tokens = np.arange(20)
  rows = batches.held_out_rows(tokens, np.array([0, 3, 6, 14]), 9, 4)
  # Short documents continue into the next ones, whose rows begin later.
  assert rows.tokens[:, 0].tolist() == [0, 6, 10, 14]
  assert rows.clusters.tolist() == [0, 2, 2, 3]
  assert rows.counted.all() and rows.counted.shape == rows.tokens.shape
  useful = tokens >= 16
  rows = batches.held_out_rows(tokens, np.array([0, 3, 6, 14]), 9, 4, useful)
  assert rows.clusters.tolist() == [3]
  assert rows.counted.tolist() == [[False, False, True, True]]
