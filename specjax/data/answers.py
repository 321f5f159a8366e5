"""Locates the assistant's answers among the tokens of a conversation.

A drafter for a chat model is trained on the tokens that the model generates:

* text of the chat template between the header of an answer and its content,
  such as an empty `<think>` block,
* the content of the answer,
* the token that ends the turn.

Headers and the text between two messages are not generated.

The template is a program, so the answers must be located in its output. This
module tries three methods in turn:

1. Blocks `{% generation %}` in the template mark the answers, as in
   transformers.
2. The conversation is rendered again with *marks*, private-use characters,
   around every content. Without the marks, the text must be the same as before.
   This works for templates that drop the reasoning of earlier answers, or write
   their end-of-text token only once.
3. Every prefix of the conversation is rendered. Each result must be a prefix
   of the complete conversation's text.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import re
from typing import Any
from typing import TYPE_CHECKING

import numpy as np

from specjax.data import chat

if TYPE_CHECKING:  # avoids an import cycle
  from specjax.data.tokenizers import Tokenizer


def encode(tokenizer: "Tokenizer", messages: Sequence[Mapping[str, Any]]
           ) -> tuple[list[int], list[bool]]:
  """Implements `Tokenizer.chat_answers`."""
  last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"),
             default=-1)
  trained = [m.get("weight", 1) != 0 for m in messages[:last + 1]
             if m["role"] == "assistant"]
  messages = [{key: x for key, x in m.items() if key != "weight"}
              for m in messages[:last + 1]]
  if not messages:
    return [], []
  text, ids, places = chat.render(
      tokenizer, messages, add_generation_prompt=False)
  spans = _spans(tokenizer, messages, text)
  if not all(trained):
    if len(spans) != len(trained):
      raise ValueError(
          f"the chat template has {len(spans)} blocks {{% generation %}} for "
          f"{len(trained)} answers, so answers of weight 0 cannot be found; "
          "remove the blocks from the template")
    spans = list(itertools.compress(spans, trained))
  # Number of characters of answers before each offset.
  before = np.zeros(len(text) + 2, int)
  for start, end in spans:
    before[start + 1:end + 1] = 1
  before = before.cumsum()
  starts, ends = np.asarray(places, int).reshape(-1, 2).T
  # The offsets of some tokenizers exclude spaces. So a token may begin after
  # the end of the previous token.
  last = np.maximum.accumulate(np.append(0, ends))[:-1]
  starts = np.minimum(starts, last)
  ends = np.maximum(ends, starts + 1)
  return ids, (before[ends] > before[starts]).tolist()


def _spans(tokenizer, messages, text):
  """Returns the offsets `(start, end)` of every answer in the text.

  Raises:
    ValueError: the answers cannot be located.
  """
  if chat.BLOCK.search(tokenizer.chat_template):
    marks = list(itertools.islice(
        chat.unused(tokenizer.chat_template, messages), 2))
    marked = chat.writer(tokenizer, messages, False)(
        str, **dict(zip(chat.GENERATION, marks)))
    return chat.unmark(marked, *marks)[1]
  found = (_by_contents(tokenizer, messages, text)
           or _by_beginnings(tokenizer, messages, text))
  if not found:
    raise ValueError(
        "the chat template changes a message if another message follows, so "
        "the tokens of answers cannot be located; put {% generation %} and {% "
        "endgeneration %} around answers in the template")
  return found


def _by_contents(tokenizer, messages, text):
  """Returns the offsets of the answers by the second method, or None."""
  if not all(_has_text(m) for m in messages if m["role"] == "assistant"):
    return None
  marked, marks = _marked(tokenizer, messages)
  written = _written(tokenizer, marked, False)
  if written is None:
    return None
  plain, found = _offsets(written, marks)
  closed = [found.get((i, 1)) for i, m in enumerate(messages) if _has_text(m)]
  if plain != text or None in closed or closed != sorted(closed):
    return None
  return _around(tokenizer, messages, text, found)


def _written(tokenizer, messages, add_generation_prompt):
  """Returns the text of a conversation, or None if the template raises.

  Some templates raise for two answers in a row, or for a first message of an
  assistant.
  """
  try:
    return chat.writer(tokenizer, messages, add_generation_prompt)(str)
  except ValueError:
    return None


def _has_text(message):
  content = message.get("content")
  return isinstance(content, str) and bool(content.strip())


def _marked(tokenizer, messages):
  """Puts marks before and after every content.

  Returns the messages with marks, and a dict `{mark: place}`. The place
  `(i, 0)` is the beginning of message i's content, and `(i, 1)` is its end.
  """
  unused = chat.unused(tokenizer.chat_template, messages)
  marked, marks = [], {}
  for i, message in enumerate(messages):
    if _has_text(message):
      head, tail = _spaces(message["content"])
      opening, closing = next(unused), next(unused)
      marks |= {opening: (i, 0), closing: (i, 1)}
      message = {**message, "content": (
          head + opening + message["content"].strip() + closing + tail)}
    marked.append(message)
  return marked, marks


def _offsets(written, marks):
  """Returns a text without its marks, and `{place: offset}` of the marks.

  The dict is empty if the template wrote a mark twice.

  Args:
    written: text with marks.
    marks: places by mark (see `_marked`).
  """
  # Text and marks alternate in `pieces`.
  pieces = re.split(f"([{''.join(marks)}])", written)
  places = [marks[mark] for mark in pieces[1::2]]
  found = dict(zip(places, itertools.accumulate(map(len, pieces[::2]))))
  return "".join(pieces[::2]), found if len(found) == len(places) else {}


def _around(tokenizer, messages, text, found):
  """Returns the offsets of the answers from the offsets of contents, or None.

  Args:
    tokenizer: tokenizer with the template.
    messages: messages. The last one is an assistant's.
    text: text of the conversation.
    found: offsets by place. The place `(i, 0)` is the beginning of message i's
      content and may be missing. `(i, 1)` is its end.
  """
  longer = _written(tokenizer, messages, True) or ""
  header = longer[len(text):] if longer.startswith(text) else ""
  # The end of a turn reaches to the first special token, because generation
  # stops there.
  tail = text[found[len(messages) - 1, 1]:]
  match = chat.special_pattern(tokenizer).search(tail)
  end_of_turn = (tail[:match.end()] if match else tail).strip()
  spans, low = [], 0
  for i, message in enumerate(messages):
    begin, end = found.get((i, 0)), found.get((i, 1))
    if message["role"] == "assistant":
      # The answer begins at the end of its header, the last header before the
      # content. If the beginning of the content is unknown, it is the first
      # header after the previous message.
      at = -1 if not header else (
          text.find(header, low, end) if begin is None
          else text.rfind(header, low, begin))
      if at < 0 and begin is None:
        return None
      head, tail = _spaces(message["content"])
      if at >= 0:
        start = at + len(header)
      else:
        # The model generates all text after the prompt, such as the space after
        # Llama 2's `[/INST]`.
        prompt = _written(tokenizer, messages[:i], True) or ""
        inside = low <= len(prompt) <= begin and text.startswith(prompt)
        start = len(prompt) if prompt and inside else (
            begin - len(head) * text.endswith(head, low, begin))
      space = len(text[end:]) - len(text[end:].lstrip())
      if end_of_turn and text.startswith(end_of_turn, end + space):
        end += space + len(end_of_turn)
      else:
        end += len(tail) * text.startswith(tail, end)
      spans.append((start, end))
    low = end or low
  return spans


def _spaces(content):
  """Returns the leading and the trailing whitespace of a content."""
  return (content[:len(content) - len(content.lstrip())],
          content[len(content.rstrip()):])


def _by_beginnings(tokenizer, messages, text):
  """Returns the offsets of the answers by the third method, or None."""
  spans = []
  for i, message in enumerate(messages):
    if message["role"] != "assistant":
      continue
    asked = _written(tokenizer, messages[:i], True)
    answered = _written(tokenizer, messages[:i + 1], False)
    if None in (asked, answered) or not (
        text.startswith(answered) and answered.startswith(asked)):
      return None
    tail = answered[len(asked):]
    control = [x for x in tokenizer.control_tokens.values()
               if tail.rstrip().endswith(x)]
    spans.append((len(asked), len(asked) + len(
        tail.rstrip() if control else tail)))
  return spans
