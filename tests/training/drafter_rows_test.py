"""Sources of the rows of a run of train_drafter.py."""

import dataclasses
import json
import pathlib
import sys

import numpy as np
import pytest
from scripts import ROOT

sys.path.append(str(ROOT / "experiments"))

from lib.training import answered  # noqa: E402
from lib.training import drafter_rows  # noqa: E402

from specjax.data import batches  # noqa: E402
from specjax.data import tokenizers  # noqa: E402

# A token is a byte.
_BYTES = tokenizers.train(["text"], 257)
# A conversation of it is "u" question "a" answer "<|endoftext|>" and so on.
_CHAT = tokenizers.Tokenizer(_BYTES.backend, eos=_BYTES.eos, chat_template=(
    "{% for m in messages %}{{ m.role[0] + m.content }}"
    "{{ eos_token if m.role[0] == 'a' else '' }}{% endfor %}"
    "{{ 'a' if add_generation_prompt else '' }}"))


_SOURCE = drafter_rows.Source(
    data="self:texts", field=None, batch_size=2, pass_rows=1, held_out_rows=2,
    self_rows=4, prompt_tokens=3, temperature=1.0, self_chat=False,
    rows_per_file=None, directory=pathlib.Path("self"),
    keeps_features=False, answers_only=None, last_turn=False, seed=0)


@pytest.mark.parametrize("changes, words", [
    (dict(data="stdlib", self_chat=True), "--self_chat requires"),
    (dict(data="stdlib", keeps_features=True), "--keep_features requires"),
    (dict(answers_only=True), "--answers_only requires conversations"),
    (dict(data="stdlib", answers_only=True), "--answers_only requires conv"),
    (dict(data="self:texts,a.jsonl"), "a.jsonl, which requires"),
    (dict(self_chat=True), "needs a chat template")])
def test_what_nothing_would_read_is_refused(changes, words):
  # Broken: a flag is dropped in silence, and the run learns from other rows.
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(_SOURCE, **changes).check(_BYTES)


def test_rows_of_texts_as_they_are(tmp_path):
  # Broken: held-out rows are also trained on, a batch is not a function of
  # the step, or data is taken for the target's.
  for i in range(40):
    (tmp_path / f"{i:02}.txt").write_text(chr(97 + i % 26) * 20 + str(i))
  source = dataclasses.replace(_SOURCE, data=str(tmp_path))
  assert source.own is None
  assert dataclasses.replace(source, data="self").own == "stdlib"
  text = source.text(_BYTES)
  learned, held_out = map(_BYTES.decode, text.streams)
  assert len(text.files.documents) == 2 and text.files.documents[0] > 30
  batch, rows = source.rows(None, None, text, 7, None)()
  assert rows.tokens.shape == (2, 7)
  for row in rows.tokens:
    assert _BYTES.decode(row) in held_out
  np.testing.assert_array_equal(batch(3)["tokens"], batch(3)["tokens"])
  assert batch(3)["tokens"].shape == (2, 7)
  for row in batch(3)["tokens"]:
    assert _BYTES.decode(row) in learned


def _chats(path, count=60, size=2):
  """Conversations of `count` users; their letters are 9 times the answers'."""
  path.write_text("".join(json.dumps({"messages": [
      {"role": role, "content": letter * n} for letter, n in (
          (chr(98 + i % 20), 9 * size), (chr(66 + i % 20), size))
      for role in ["user" if letter.islower() else "assistant"]]}) + "\n"
      for i in range(count)))
  return path


@pytest.mark.parametrize("only", [None, False])
def test_rows_of_conversations(tmp_path, only):
  # Broken: the weights are those of other tokens, heads learn from rows in
  # which nothing counts or from held-out conversations, or are measured by
  # rows without an answer.
  pytest.importorskip("jinja2")
  source = dataclasses.replace(
      _SOURCE, data=str(_chats(tmp_path / "a.jsonl", size=3)),
      answers_only=only)
  source.check(_CHAT)
  with pytest.raises(ValueError, match="which holds conv.* needs a chat temp"):
    source.check(_BYTES)
  text = source.text(_CHAT)
  assert text.is_chat and sum(text.files.documents) == 60
  batch, held_out = source.rows(None, None, text, 8, None)()
  held_out = held_out.tokens
  assert len(held_out) == 2 and held_out.dtype == np.int32
  letters = lambda tokens: np.array([
      bytes.isupper(_CHAT.token_bytes(t)) or t == _CHAT.eos
      for t in tokens.ravel()]).reshape(tokens.shape)
  assert letters(held_out[:, 1:]).any(axis=1).all()
  rows = []
  for step in range(60):
    found = batch(step)
    assert found["tokens"].shape == (2, 8)
    rows += [row.tobytes() for row in found["tokens"]]
    if only is False:
      assert "weights" not in found
    else:
      np.testing.assert_array_equal(
          found["weights"], letters(found["tokens"][:, 1:]))
      assert (found["weights"].sum(axis=1) > 0).all()
  answered = np.concatenate([letters(np.frombuffer(x, np.int32)) for x in rows])
  assert (answered.mean() < 0.2) == (only is False)


def test_short_and_useless_conversations(tmp_path, capsys):
  # Broken: a small file leaves no held-out rows, omitted rows are not
  # reported, or a run starts without data.
  pytest.importorskip("jinja2")
  path = _chats(tmp_path / "a.jsonl", count=4)
  with open(path, "a") as f:
    f.write(json.dumps({"messages": []}) + "\n")
  source = dataclasses.replace(_SOURCE, data=str(path))
  text = source.text(_CHAT)
  assert ("1 of 5 conversations are left out; "
          f"{path} line 5: it has no answer") in capsys.readouterr().err
  batch, held_out = source.rows(None, None, text, 30, None)()
  assert batch(0)["tokens"].shape == (2, 30)
  assert held_out.tokens.shape == (1, len(text.streams[1]))
  with pytest.raises(ValueError, match="--row_tokens is 300"):
    source.rows(None, None, text, 300, None)
  path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 3)
  with pytest.raises(ValueError, match="no conversation with an answer"):
    source.text(_CHAT)


def test_conversations_that_the_target_goes_on_from(tmp_path):
  # Broken: the target answers an assistant's turn, or plain text is read as
  # messages.
  path = _chats(tmp_path / "a.jsonl", count=4)
  source = dataclasses.replace(
      _SOURCE, data=f"self:{path},b.jsonl", self_chat=None)
  assert source.chat and source.weighs and source.complete == "b.jsonl"
  text = source.text(_CHAT)
  assert text.files is None
  assert sorted(sum(text.sides, [])) == [x * 18 for x in "bcde"]
  plain = dataclasses.replace(source, data="self")
  assert not plain.chat and not plain.weighs and plain.complete is None


def test_tokens_of_answers_alone():
  # Broken: a weight is that of another row or of the token before.
  rows = np.arange(6 * 5).reshape(6, 5)
  chats = answered.Rows(rows, rows % 3 == 0), batches.HeldOutRows(
      rows[:2], np.arange(2))
  source = dataclasses.replace(_SOURCE, self_chat=True, answers_only=True)
  text = drafter_rows.Text(corpus="", chats=chats)
  batch, held_out = source.rows(None, None, text, 5, None)()
  assert held_out is chats[1]
  for step in (0, 4):
    found = batch(step)
    np.testing.assert_array_equal(
        found["weights"], found["tokens"][:, 1:] % 3 == 0)
    assert found["weights"].dtype == np.float32


def test_rows_that_the_target_cannot_write_are_refused(tmp_path):
  # Broken: a batch that is never full, or a row that is all of the source's.
  (tmp_path / "a.txt").write_text("a" * 90)
  source = dataclasses.replace(_SOURCE, data=f"self:{tmp_path}")
  with pytest.raises(ValueError, match="--self_rows is 1, less than"):
    dataclasses.replace(source, self_rows=1).text(_BYTES)
  (tmp_path / "b.txt").write_text("b" * 90)
  text = source.text(_BYTES)
  with pytest.raises(ValueError, match="--self_prompt_tokens is 3 and a row "
                     "has 3 tokens"):
    source.rows(None, None, text, 3, None)
