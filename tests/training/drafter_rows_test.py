"""Sources of the rows of a run of train_drafter.py."""

import dataclasses
import json
import pathlib
import sys
import types

import jax
import numpy as np
import pytest
from scripts import ROOT

sys.path.append(str(ROOT / "experiments"))

from lib.training import answered  # noqa: E402
from lib.training import drafter_rows  # noqa: E402

from specjax import testing  # noqa: E402
from specjax.data import batches  # noqa: E402
from specjax.data import tokenizers  # noqa: E402
from specjax.training import distillation  # noqa: E402

# A token is a byte.
_BYTES = tokenizers.train(["text"], 257)
# A conversation of it is "u" question "a" answer "<|endoftext|>" and so on.
_CHAT = tokenizers.Tokenizer(_BYTES.backend, eos=_BYTES.eos, chat_template=(
    "{% for m in messages %}{{ m.role[0] + m.content }}"
    "{{ eos_token if m.role[0] == 'a' else '' }}{% endfor %}"
    "{{ 'a' if add_generation_prompt else '' }}"))


_SOURCE = drafter_rows.Source(
    data="self:texts", field=None, batch_size=2, accumulate=2, held_out_rows=2,
    self_rows=4, self_prompt_tokens=3, self_temperature=1.0, self_chat=False,
    self_rows_per_file=None, directory=pathlib.Path("self"),
    keep_features=False, answers_only=None, last_turn=False, pack=False,
    seed=0)
_TARGET = types.SimpleNamespace(
    model=types.SimpleNamespace(context_length=60))


@pytest.mark.parametrize("changes, words", [
    (dict(data="stdlib", self_chat=True), "--self_chat requires"),
    (dict(data="stdlib", keep_features=True), "--keep_features requires"),
    (dict(accumulate=3), "--accumulate is 3 and does not divide --batch_size"),
    (dict(answers_only=True), "--answers_only requires conversations"),
    (dict(data="stdlib", answers_only=True), "--answers_only requires conv"),
    (dict(data="stdlib", pack=True), "--pack requires conversations"),
    (dict(pack=True), "--pack requires conversations"),
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
  learned, held_out = map(_BYTES.decode, text.files.tokens)
  assert len(text.files.documents) == 2 and text.files.documents[0] > 30
  batch, rows, *_ = source.rows(None, None, text, 7, None)()
  assert rows.tokens.shape == (2, 7) and rows.counted.all()
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


def _letters(tokens):
  """Mask of the tokens of answers: capital letters, and the token after them.
  """
  return np.array([
      bytes.isupper(_CHAT.token_bytes(t)) or t == _CHAT.eos
      for t in tokens.ravel()]).reshape(tokens.shape)


@pytest.mark.parametrize("only", [None, False])
def test_joined_conversations(tmp_path, only):
  # Broken: the rows are not those of a stream that is cut, the weights are
  # those of other tokens, heads learn from rows in which nothing counts or from
  # held-out conversations, or are measured by rows without an answer.
  pytest.importorskip("jinja2")
  source = dataclasses.replace(
      _SOURCE, data=str(_chats(tmp_path / "a.jsonl", size=3)),
      answers_only=only, pack=True)
  source.check(_CHAT)
  with pytest.raises(ValueError, match="which holds conv.* needs a chat temp"):
    source.check(_BYTES)
  text = source.text(_CHAT)
  assert sum(text.files.documents) == 60
  data = source.rows(None, None, text, 8, None)()
  held_out = data.held_out
  assert len(held_out.tokens) == 2 and held_out.tokens.dtype == np.int32
  np.testing.assert_array_equal(
      held_out.counted, _letters(held_out.tokens) | (only is False))
  assert held_out.counted[:, 1:].any(axis=1).all()
  stream, mask = text.files.tokens[0], text.files.answered[0]
  cut = lambda x: x[:len(x) // 8 * 8].reshape(-1, 8)
  useful = np.flatnonzero(
      cut(mask)[:, 1:].any(axis=1) | (only is False))
  assert (len(useful) == len(cut(stream))) == (only is False)
  order = distillation.RowBatches(useful, 2, 0)
  assert data.num_rows == len(useful) and data.tokens_per_row == 7
  for step in range(60):
    found, rows = data.batch(step), order.batch(step)
    np.testing.assert_array_equal(found["tokens"], cut(stream)[rows])
    np.testing.assert_array_equal(
        found["weights"], cut(mask)[rows, 1:] | (only is False))
  np.testing.assert_array_equal(mask, _letters(stream))
  np.testing.assert_array_equal(source.counted(text)(257), np.bincount(
      stream[mask | (only is False)], minlength=257))


@pytest.mark.parametrize("only", [None, False])
def test_a_row_is_a_conversation(tmp_path, capsys, only):
  # Broken: a row begins in the middle of a conversation, padding is trained or
  # measured, conversations lose their ends in silence, or a held-out
  # conversation is trained.
  pytest.importorskip("jinja2")
  path = _chats(tmp_path / "a.jsonl", count=50)
  with open(path, "a") as f:
    f.write(_chats(tmp_path / "b.jsonl", count=4, size=5).read_text())
    f.write(_chats(tmp_path / "c.jsonl", count=2, size=9).read_text())
  source = dataclasses.replace(
      _SOURCE, data=str(path), answers_only=only, held_out_rows=9)
  text = source.text(_CHAT)
  assert capsys.readouterr().err
  data = source.rows(_TARGET, None, text, 40, None)()
  # Conversations have 23, 53 and 93 tokens. The context has 60.
  ends = [np.diff(starts, append=len(tokens)) for starts, tokens in zip(
      text.files.starts, text.files.tokens)]
  assert [set(x.tolist()) for x in ends][0] == {23, 53, 93}
  count = int((ends[0] > 40).sum())
  err = capsys.readouterr().err
  assert (f"{count} of {len(ends[0])} conversations lose their ends, because "
          "they are longer than --row_tokens=40; --row_tokens=60 keeps all "
          f"except {(ends[0] > 60).sum()}\n") in err
  assert f"{len(ends[1])} held-out rows of 40 tokens" in err
  # All answers of the long conversations are beyond their rows.
  assert data.num_rows == len(ends[0]) - count * (only is None)
  assert data.tokens_per_row == np.mean(
      np.minimum(ends[0][(ends[0] < 40) | (only is False)], 40) - 1)
  seen = set()
  for step in range(60):
    found = data.batch(step)
    assert found["tokens"].shape == (2, 40)
    for row, weights in zip(found["tokens"], found["weights"]):
      number = next(
          i for i, start in enumerate(text.files.starts[0])
          if (text.files.tokens[0][start:][:23] == row[:23]).all())
      seen.add(number)
      want = np.zeros(40, bool)
      end = min(ends[0][number], 40)
      want[:end] = _letters(row[:end]) | (only is False)
      np.testing.assert_array_equal(weights, want[1:])
  assert len(seen) > 15
  held_out = data.held_out
  assert held_out.tokens.shape == (len(held_out.clusters), 40)
  assert len(set(held_out.clusters.tolist())) == len(held_out.clusters)
  for row, counted in zip(held_out.tokens, held_out.counted):
    assert _CHAT.decode(row[:1]) == "u" and counted.any()
    if only is None:
      np.testing.assert_array_equal(counted[:23], _letters(row[:23]))
      assert not counted[23:].any()
  source.rows(_TARGET, None, text, 60, None)
  assert "the target's context length allows no longer rows" in (
      capsys.readouterr().err)
  source.rows(types.SimpleNamespace(model=types.SimpleNamespace(
      context_length=900)), None, text, 93, None)
  assert "lose their ends" not in capsys.readouterr().err
  source.preview(_CHAT, data.batch, 2)
  for line in capsys.readouterr().out.splitlines():
    assert line.endswith("»") and ": u" in line.replace("«", "")


def test_short_and_useless_conversations(tmp_path, capsys):
  # Broken: a small file leaves no held-out rows, omitted rows are not
  # reported, or a run starts without data.
  pytest.importorskip("jinja2")
  path = _chats(tmp_path / "a.jsonl", count=4)
  with open(path, "a") as f:
    f.write(json.dumps({"messages": []}) + "\n")
  source = dataclasses.replace(_SOURCE, data=str(path), pack=True)
  text = source.text(_CHAT)
  assert ("1 of 5 conversations are left out; "
          f"{path} line 5: it has no answer") in capsys.readouterr().err
  batch, held_out, *_ = source.rows(None, None, text, 30, None)()
  assert batch(0)["tokens"].shape == (2, 30)
  assert held_out.tokens.shape == (1, len(text.files.tokens[1]))
  with pytest.raises(ValueError, match="--row_tokens is 300"):
    source.rows(None, None, text, 300, None)
  with pytest.raises(ValueError, match="--row_tokens is 9, and no row of so"):
    dataclasses.replace(source, pack=False).rows(_TARGET, None, text, 9, None)
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
  assert sorted(chat.messages[-1]["content"] for chat in sum(text.sides, [])
                ) == [x * 18 for x in "bcde"]
  plain = dataclasses.replace(source, data="self")
  assert not plain.chat and not plain.weighs and plain.complete is None


def test_messages_with_the_rest_of_their_record(tmp_path):
  # Broken: the target answers without the system message or the tools of the
  # record, or sees a turn after the message.
  path = tmp_path / "a.jsonl"
  turns = [{"role": role, "content": role[0]} for role in (
      "system", "user", "assistant", "user")]
  tools = [{"name": "f"}]
  path.write_text("".join(json.dumps(record) + "\n" for record in (
      {"messages": turns, "system": "unused"},
      {"messages": turns[1:], "system": "S", "tools": tools},
      {"messages": [{"role": "user", "content": " "}]},
      {"messages": [{"role": "unknown", "content": "x"},
                    {"role": "user", "content": "w"}, *turns]})))
  source = dataclasses.replace(_SOURCE, data=f"self:{path}", self_chat=None)
  sides = source.text(_CHAT).sides
  found = {tuple((m["role"], m["content"]) for m in chat.messages):
           chat.variables for side in sides for chat in side}
  assert found == {(("system", "s"), ("user", "u")): {},
                   (("system", "S"), ("user", "u")): {"tools": tools},
                   (("user", "w"),): {}}
  # Copies of a message are on the same side.
  assert sorted(map(len, sides)) == [1, 2]


def test_documents_that_the_target_continues(tmp_path, capsys):
  # Broken: a run with too few held-out documents for an interval says nothing,
  # or rows of generated text are padded or left out.
  for i in range(40):
    (tmp_path / f"{i:02}.txt").write_text(chr(97 + i % 26) * 20)
  source = dataclasses.replace(
      _SOURCE, data=f"self:{tmp_path}", directory=tmp_path / "self")
  model = testing.MarkovModel(257, context_length=12)
  target = types.SimpleNamespace(
      model=model, params=model.init(jax.random.key(0)))
  text = source.text(_BYTES)
  capsys.readouterr()
  make = source.rows(target, None, text, 8, None)
  assert "2 held-out rows of 8 tokens (--held_out_rows=2) are from " in (
      capsys.readouterr().err)  # before the target writes
  data = make()
  assert data.num_rows == 4 and data.tokens_per_row == 7
  assert data.held_out.counted.all()
  assert (data.batch(0)["weights"] == 1).all()
  assert data.batch(0)["tokens"].shape == (2, 8)


def test_tokens_of_answers_alone():
  # Broken: a weight is that of another row or of the token before.
  tokens = np.arange(6 * 5)
  rows = tokens.reshape(6, 5)
  chats = answered.Rows.of(answered.Stream(
      tokens, tokens % 3 == 0, tokens[::5]), 5), batches.HeldOutRows(
          rows[:2], np.arange(2), rows[:2] % 3 == 0)
  source = dataclasses.replace(_SOURCE, self_chat=True, answers_only=True)
  text = drafter_rows.Text(corpus="", chats=chats)
  batch, held_out, *_ = source.rows(None, None, text, 5, None)()
  assert held_out is chats[1]
  assert source.counted(text)(30).nonzero()[0].tolist() == [*range(0, 30, 3)]
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
