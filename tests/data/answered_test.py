"""Conversations as rows to train on."""

import dataclasses
import json
import sys

import numpy as np
import pytest
from scripts import ROOT

sys.path.append(str(ROOT / "experiments"))

from lib.training import answered  # noqa: E402


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
    return ids + [1 if add_generation_prompt else 2]

  def chat_answers(self, messages):
    ids = self.chat(messages, add_generation_prompt=False)
    return ids, [i >= len(self.chat(messages[:1])) for i in range(len(ids))]


_CHATS = answered.Conversations(
    target=None, tokenizer=_Letters(), temperature=0.0, row_tokens=6,
    prompt_tokens=3, seed=0)


def test_messages_keep_their_ends_and_answers_their_room():
  # Broken: a message fills its row, or the same ones are drawn for no reason.
  found = _CHATS.prompts(["abcde", "xy", "z"], 2)
  assert len(found) == 2
  everything = _CHATS.prompts(["abcde", "xy", "z"], 9)
  assert sorted(map(len, everything)) == [3, 4, 5]
  assert [1, *map(ord, "cde"), 1] in everything and found == everything[:2]
  _CHATS.check_room(everything)
  with pytest.raises(ValueError, match="row_tokens is 5.*5 tokens.*prompt_tok"):
    dataclasses.replace(_CHATS, row_tokens=5).check_room(everything)


def test_conversations_follow_each_other(tmp_path):
  # Broken: tokens are lost between conversations, or a bad line is dropped.
  path = tmp_path / "given.jsonl"
  turns = lambda *texts: json.dumps({"conversations": [
      {"from": who, "value": text} for who, text in zip(
          ("human", "gpt") * 2, texts)]}) + "\n"
  path.write_text(turns("ab", "c") + turns("d", "e"))
  given = _CHATS.read(str(path))
  assert given == [([1, 97, 98, 1, 99, 2], [0, 0, 0, 0, 1, 1]),
                   ([1, 100, 1, 101, 2], [0, 0, 0, 1, 1])]
  tokens, answers = _CHATS.rows(given)
  np.testing.assert_array_equal(tokens, [given[0].tokens])
  np.testing.assert_array_equal(answers, [[0, 0, 0, 0, 1, 1]])
  tokens, answers = _CHATS.rows(
      [*given, answered.Conversation([7, 8, 9, 9, 9, 9, 9], [True] * 7)])
  np.testing.assert_array_equal(
      tokens, [given[0].tokens, [*given[1].tokens, 7], [8, *[9] * 5]])
  np.testing.assert_array_equal(
      answers, [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1], [1] * 6])
  with pytest.raises(ValueError, match="row_tokens is 6.*5 tokens"):
    _CHATS.rows(given[1:])
  path.write_text(turns("ab", "c") + turns("d", None))
  with pytest.raises(ValueError, match="line 2: turn 2: 'value' is None"):
    _CHATS.read(str(path))
  path.write_text('{"prompt": "ab", "answer": "c"}\n')
  with pytest.raises(ValueError, match="no conversations, .*'messages' or"):
    _CHATS.read(str(path))
