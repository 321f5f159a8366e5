"""Corpora as token ids in files."""

import functools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from scripts import ROOT

from specjax.data import corpora
from specjax.data import token_files
from specjax.data import tokenizers
from specjax.utils.fingerprints import fingerprint

sys.path.append(str(ROOT / "experiments"))

from lib.training import token_cache  # noqa: E402


@functools.cache
def _tokenizer():
  return tokenizers.train(["def verify(draft):\n  return law\n"] * 20, 280)


def _write(path, count=50):
  path.write_text("".join(
      json.dumps({"text": f"law {i} " * (i % 7 + 1)}) + "\n"
      for i in range(count)))
  return str(path)


def _read(path, directory, field="text", tokenizer=None):
  return token_files.read(path, field, tokenizer or _tokenizer(), directory)


@pytest.mark.parametrize("piece", [token_files._PIECE, 60])
def test_the_same_tokens_as_of_texts_in_memory(tmp_path, monkeypatch, piece):
  # Broken: a piece of the text is lost, or a run that was begun before tokens
  # were kept is refused because its fingerprints differ.
  monkeypatch.setattr(token_files, "_PIECE", piece)
  # Broken: the bar of a corpus of one large document stands still.
  bars, bar = [], token_files.tqdm.tqdm
  monkeypatch.setattr(token_files.tqdm, "tqdm", lambda **kwargs: bars.append(
      bar(**kwargs | {"disable": False})) or bars[-1])
  path = _write(tmp_path / "a.jsonl")
  found = _read(path, tmp_path / "kept")
  [size] = {one.total for one in bars}
  assert size == sum(found.num_bytes) and bars[0].n == size
  documents = corpora.read_documents(path)
  sides = [[d.text for d in side] for side in corpora.split(documents)]
  streams = tuple(map(_tokenizer().encode_stream, sides))
  for tokens, expected in zip(found.tokens, streams):
    np.testing.assert_array_equal(tokens, expected)
    assert tokens.dtype == expected.dtype
  assert found.documents == tuple(map(len, sides)) and found.answered is None
  assert found.num_bytes == tuple(sum(map(len, side)) for side in sides)
  assert found.corpus == fingerprint(documents)
  assert found.fingerprints == (fingerprint(streams), fingerprint(streams[0]))
  np.testing.assert_array_equal(
      found.counts(280, False), np.bincount(streams[0], minlength=280))


def test_tokens_are_read_again(tmp_path, monkeypatch):
  # Broken: every start tokenises the text, or a text, a field or a tokenizer
  # has the tokens of another.
  path, kept = _write(tmp_path / "a.jsonl"), tmp_path / "kept"
  first = _read(path, kept)
  other = tokenizers.train(["law and draft "] * 20, 270)
  assert _read(path, kept, tokenizer=other).path != first.path
  with pytest.raises(ValueError, match="no field 'body'"):
    _read(path, kept, field="body")
  with monkeypatch.context() as patch:
    patch.setattr(corpora, "iter_documents", None)
    again = _read(path, kept)
    np.testing.assert_array_equal(again.tokens[0], first.tokens[0])
    assert again.path == first.path
  text = (tmp_path / "a.jsonl").read_text()
  (tmp_path / "a.jsonl").write_text(text.replace("law 3 ", "LAW 3 "))
  assert _read(path, kept).corpus != first.corpus
  assert len(list(kept.iterdir())) == 3  # nothing of what failed is left


@pytest.mark.parametrize("name", ["training.tokens", "about.json"])
def test_tokens_that_are_damaged(tmp_path, name):
  # Broken: a cut file is trained on, or stops every later run.
  path, kept = _write(tmp_path / "a.jsonl"), tmp_path / "kept"
  first = _read(path, kept)
  expected = first.tokens[0].tolist()
  (first.path / name).write_bytes((first.path / name).read_bytes()[:-9])
  again = _read(path, kept)
  assert again.path == first.path and again.tokens[0].tolist() == expected


_SCRIPT = """
import resource, sys
from specjax.data import token_files, tokenizers
tokenizer = tokenizers.train(["def verify(draft)"] * 20, 280)
peaks = []
for path in sys.argv[2:]:
  token_files.read(path, "text", tokenizer, sys.argv[1])
  peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(*peaks)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path):
  # Broken: a corpus of a gigabyte needs 37 of memory; these 4 MB needed 0.3.
  pytest.importorskip("resource")
  text = "def verify(draft): return law\n" * 30
  for name, count in (("a", 1000), ("b", 5000)):
    (tmp_path / f"{name}.txt").write_text(text * count)
  (tmp_path / "c.jsonl").write_text(
      "".join(json.dumps({"text": f"{i} {text}"}) + "\n" for i in range(2500)))
  result = subprocess.run(
      [sys.executable, "-c", _SCRIPT, "kept", "a.txt", "b.txt", "c.jsonl"],
      cwd=tmp_path, capture_output=True, text=True, check=True,
      env={**os.environ, "PYTHONPATH": str(ROOT)})
  small, *large = map(int, result.stdout.split())
  unit = 1 if sys.platform == "darwin" else 1024
  assert (max(large) - small) * unit < 60e6, result.stdout


def test_settings_of_records_reach_the_tokens(tmp_path):
  # Broken: copies are not counted, an answer of weight 0 is trained, or the
  # template does not see a record's variables.
  talk = lambda i, *weights, **keys: {"messages": [
      message for j, weight in enumerate(weights) for message in (
          {"role": "user", "content": f"{i} {j}"},
          {"role": "assistant", "content": "yes", "weight": weight})], **keys}
  path = tmp_path / "a.jsonl"
  path.write_text("".join(json.dumps(record) + "\n" for record in (
      *(talk(i, 1, 1) for i in range(40)), *(talk(i, 1, 1) for i in range(7)),
      talk("none", 0, 0), talk("thinks", 0, 1, chat_template_kwargs={
          "mode": "loud"}))))
  tokenizer = _tokenizer()
  tokenizer.chat_template = (
      "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ mode or '.' }}"
      "{% endfor %}{% if add_generation_prompt %}a{% endif %}")
  read = lambda **options: token_files.read(
      str(path), "messages", tokenizer, tmp_path / "kept", chat=True, **options)
  both, last = read(), read(last_turn=True)
  assert both.copies == 7 and sum(both.documents) == 48
  assert "1 of 49 conversations are left out" in both.note
  text = tokenizer.decode(np.concatenate(both.tokens))
  assert "athinks 1loudayesloud" not in text and "uthinks 1loudayesloud" in text
  trained = lambda found: sum(int(x.sum()) for x in found.answered)
  # 47 conversations have two answers, and one has one.
  assert trained(both) / trained(last) == pytest.approx(95 / 48, rel=0.05)


def test_where_tokens_are_kept(tmp_path, monkeypatch, capsys):
  # Broken: nobody finds the files, they fill the disk, or a home that cannot be
  # written to ends the run.
  monkeypatch.setenv(token_cache.DIRECTORY, str(tmp_path / "kept"))
  path = _write(tmp_path / "a.jsonl")
  found = token_cache.read(path, "text", _tokenizer())
  assert found.path.parent == tmp_path / "kept"
  told = capsys.readouterr().err
  assert f"tokens are in {found.path} (" in told and "tokenising" in told
  token_cache.read(path, "text", _tokenizer())
  assert "tokenising" not in capsys.readouterr().err
  other = token_cache.read(
      _write(tmp_path / "b.jsonl", 60), "text", _tokenizer())
  monkeypatch.setattr(token_cache, "_LARGEST", 1)
  token_cache.read(str(tmp_path / "b.jsonl"), "text", _tokenizer())
  assert list((tmp_path / "kept").iterdir()) == [other.path]
  (tmp_path / "file").write_text("")
  monkeypatch.setenv(token_cache.DIRECTORY, str(tmp_path / "file" / "kept"))
  again = token_cache.read(path, "text", _tokenizer())
  assert len(again.tokens[0]) == len(found.tokens[0])
  assert "variable SPECJAX_TOKENS" in capsys.readouterr().err
