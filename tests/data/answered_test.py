"""Conversations as rows to train on."""

import functools
import json
import sys

import numpy as np
import pytest
from scripts import ROOT

sys.path.append(str(ROOT / "experiments"))

from lib.training import answered  # noqa: E402

from specjax.data.conversations import Conversation  # noqa: E402


class _Letters:
  """A tokenizer of letters; a conversation's end is 2."""

  bos = None

  def encode(self, text, bos=True, special=False):
    del bos, special
    return [ord(letter) for letter in text]

  def decode(self, ids):
    return "".join(map(chr, ids))

  def chat(self, messages, add_generation_prompt=True):
    ids = [i for m in messages for i in (1, *self.encode(m["content"]))]
    return ids + [self.end if add_generation_prompt else self.stop]

  def with_variables(self, variables):
    found = _Letters()
    found.end, found.stop = variables.get("end", 1), variables.get("stop", 2)
    return found

  end, stop = 1, 2

  def chat_answers(self, messages):
    ids = self.chat(messages, add_generation_prompt=False)
    return ids, [i >= len(self.chat(messages[:1])) for i in range(len(ids))]


_prompts = functools.partial(
    answered.prompts, tokenizer=_Letters(), row_tokens=6, prompt_tokens=3,
    seed=0)


def _asked(text, system=(), **variables):
  return Conversation(name=text, place="file line 1", variables=variables,
                      messages=[*({"role": "system", "content": x}
                                  for x in system),
                                {"role": "user", "content": text}])


def test_messages_keep_their_ends_and_answers_their_room():
  # Broken: a message fills its row, or the same ones are drawn for no reason.
  chats = list(map(_asked, ["abcde", "xy", "z"]))
  found = _prompts(chats, count=2)
  assert len(found) == 2
  everything = _prompts(chats, count=9)
  assert sorted(map(len, everything)) == [3, 4, 5]
  assert [1, *map(ord, "cde"), 1] in everything and found == everything[:2]
  with pytest.raises(ValueError, match="row_tokens is 5.*5 tokens.*prompt_tok"):
    _prompts(chats, count=9, row_tokens=5)


def test_messages_are_asked_with_the_rest_of_their_record():
  # Broken: the target answers without the system message of the record, or
  # with the variables of another record.
  first, second = (_prompts([chat], count=1, row_tokens=11)[0] for chat in (
      _asked("abcde", ["stuv"], end=7), _asked("abcde")))
  assert first == [1, *map(ord, "stuv"), 1, *map(ord, "cde"), 7]
  assert second == [1, *map(ord, "cde"), 1]


def test_conversations_follow_each_other(tmp_path):
  # Broken: tokens are lost between conversations, a bad line is dropped, or the
  # template does not see a record's variables.
  path = tmp_path / "given.jsonl"
  turns = lambda *texts: json.dumps({"conversations": [
      {"from": who, "value": text} for who, text in zip(
          ("human", "gpt") * 2, texts)]}) + "\n"
  path.write_text(turns("ab", "c") + turns("d", "e"))
  given = answered.read(str(path), _Letters())
  assert given == [([1, 97, 98, 1, 99, 2], [0, 0, 0, 0, 1, 1]),
                   ([1, 100, 1, 101, 2], [0, 0, 0, 1, 1])]
  stream = answered.join(
      [*given, ([7, 8, 9, 9, 9, 9, 9], [True] * 7)])
  assert stream.starts.tolist() == [0, 6, 11]
  rows = answered.Rows.of(answered.cut(stream, 6), 6)
  tokens, answers = rows.take(np.arange(len(rows)))
  np.testing.assert_array_equal(
      tokens, [given[0][0], [*given[1][0], 7], [8, *[9] * 5]])
  np.testing.assert_array_equal(
      answers, [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1], [1] * 6])
  with pytest.raises(ValueError, match="row_tokens is 6.*5 tokens"):
    answered.cut(answered.join(given[1:]), 6)
  path.write_text(turns("ab", "c") + turns("d", None))
  with pytest.raises(ValueError, match="line 2: turn 2: 'value' is None"):
    answered.read(str(path), _Letters())
  path.write_text(turns("a", "c")[:-2]
                  + ', "chat_template_kwargs": {"stop": 7}}\n')
  assert answered.read(str(path), _Letters())[0][0] == [1, 97, 1, 99, 7]
  path.write_text('{"prompt": "ab", "answer": "c"}\n')
  with pytest.raises(ValueError, match="no conversations, .*'messages' or"):
    answered.read(str(path), _Letters())


def test_rows_of_one_conversation_each():
  # Broken: a row contains a token of the next conversation, padding is trained,
  # a row without a trained token costs a step, or the mask is one token off.
  tokens = np.arange(10, 25, dtype=np.uint32)
  trained = np.zeros(15, bool)
  trained[[2, 3, 4, 10, 14]] = True  # 4 begins the second conversation
  starts = np.array([0, 4, 5, 11])
  rows = answered.Rows.of(answered.Stream(tokens, trained, starts), 5)
  assert len(rows) == 2  # the third is trained only after its fifth token
  rows = answered.Rows.of(answered.Stream(tokens, trained, starts), 6)
  found, mask = rows.take(np.array([2, 0, 1]))
  assert found.dtype == np.int32
  assert [row[:n].tolist() for row, n in zip(found, (4, 4, 6))] == [
      [21, 22, 23, 24], [10, 11, 12, 13], [15, 16, 17, 18, 19, 20]]
  np.testing.assert_array_equal(mask, [
      [0, 0, 0, 1, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1]])
  with pytest.raises(ValueError, match="no row of so many .* an answer"):
    answered.Rows.of(
        answered.Stream(tokens, trained, starts[1:2] + 1), 5)
