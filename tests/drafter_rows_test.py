"""Where the rows of a run of train_drafter.py come from."""

import dataclasses
import pathlib
import sys

import numpy as np
import pytest
from scripts import ROOT

sys.path.append(str(ROOT / "experiments"))

from lib import answered  # noqa: E402
from lib import drafter_rows  # noqa: E402


class _Letters:
  """A tokenizer of letters, without a chat template."""

  chat_template = None

  def encode_stream(self, texts):
    return np.array([ord(x) for text in texts for x in text], np.int32)


_SOURCE = drafter_rows.Source(
    data="self:texts", field=None, batch_size=2, pass_rows=1, held_out_rows=2,
    self_rows=4, prompt_tokens=3, temperature=1.0, chat=False,
    conversations=None, rows_per_file=None, directory=pathlib.Path("self"),
    keeps_features=False, answers_only=False, seed=0)


@pytest.mark.parametrize("changes, words", [
    (dict(data="texts", chat=True), "--self_chat is for rows that"),
    (dict(data="texts", keeps_features=True), "--keep_features is for rows"),
    (dict(answers_only=True), "--answers_only is for the conversations"),
    (dict(conversations="a.jsonl"), "--conversations is a.jsonl and is read"),
    (dict(chat=True), "needs a chat template")])
def test_what_nothing_would_read_is_refused(changes, words):
  # Broken: a flag is dropped in silence, and the run learns from other rows.
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(_SOURCE, **changes).check(_Letters())


def test_rows_of_texts_as_they_are(tmp_path):
  # Broken: rows that heads are measured by are among those they learn from, a
  # batch is not a function of the step, or texts are taken for the target's.
  for i in range(40):
    (tmp_path / f"{i:02}.txt").write_text(chr(97 + i % 26) * 20 + str(i))
  source = dataclasses.replace(_SOURCE, data=str(tmp_path))
  assert source.own is None
  assert dataclasses.replace(source, data="self").own == "stdlib"
  text = source.text(_Letters())
  held_out = "".join(text.sides[1])
  batch, rows = source.rows(None, None, text, None, 7, None)()
  assert rows.shape == (2, 7)
  for row in rows:
    assert "".join(map(chr, row)) in held_out
  np.testing.assert_array_equal(batch(3)["tokens"], batch(3)["tokens"])
  assert batch(3)["tokens"].shape == (2, 7)
  learned = "".join(text.sides[0])
  for row in batch(3)["tokens"]:
    assert "".join(map(chr, row)) in learned


def test_tokens_of_answers_alone():
  # Broken: a weight is that of another row or of the token before.
  rows = np.arange(6 * 5).reshape(6, 5)
  chats = answered.Rows(rows, rows % 3 == 0), answered.Rows(rows[:2], None)
  source = dataclasses.replace(_SOURCE, chat=True, answers_only=True)
  batch, held_out = source.rows(None, None, None, chats, 5, None)()
  assert held_out is chats[1].tokens
  for step in (0, 4):
    found = batch(step)
    np.testing.assert_array_equal(
        found["weights"], found["tokens"][:, 1:] % 3 == 0)
    assert found["weights"].dtype == np.float32


def test_rows_that_the_target_cannot_write_are_refused(tmp_path):
  # Broken: a batch that is never full, or a row that is all of the source's.
  (tmp_path / "a.txt").write_text("a" * 90)
  source = dataclasses.replace(_SOURCE, data=f"self:{tmp_path}")
  with pytest.raises(ValueError, match="--self_rows is 1 and a batch has 2"):
    dataclasses.replace(source, self_rows=1).text(_Letters())
  text = drafter_rows.Text(sides=(["a"], ["b"]), streams=(None, None),
                           corpus="")
  with pytest.raises(ValueError, match="--self_prompt_tokens is 3 and a row "
                     "has 3 tokens"):
    source.rows(None, None, text, None, 3, None)
