"""Location of the assistant's answers among the tokens of a conversation.

A drafter for a chat model is trained on the tokens that the model generates.
These are the content of an answer, text of the chat template between the
answer's header and its content (such as an empty `<think>` block), and the
token that ends the turn. Headers and the text between two messages are not
generated.

The template is a program, so the answers must be located in its output. This
module tries three methods in turn:

1. `{% generation %}` in the template marks them, as in transformers.
2. The conversation is rendered again with *marks*, private-use characters,
   around every content. Without the marks the text must be the same as before.
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

from specjax.data import chat

if TYPE_CHECKING:  # avoids an import cycle
  from specjax.data.tokenizers import Tokenizer

_MARKED = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")


def encode(tokenizer: "Tokenizer", messages: Sequence[Mapping[str, Any]]
           ) -> tuple[list[int], list[bool]]:
  """Implements `Tokenizer.chat_answers`."""
  last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"),
             default=-1)
  messages = messages[:last + 1]
  if not messages:
    return [], []
  text, ids, places = chat.render(
      tokenizer, messages, add_generation_prompt=False)
  spans = _spans(tokenizer, messages, text)
  answered, last = [], 0
  for start, end in places:
    # The offsets of some tokenizers exclude spaces. So a span can begin after
    # the end of the previous token.
    start = min(start, last)
    answered.append(chat.overlaps(spans, start, max(end, start + 1)))
    last = max(last, end)
  return ids, answered


def _spans(tokenizer, messages, text):
  """Returns the offsets `(start, end)` of every answer in the text.

  Raises:
    ValueError: the answers cannot be separated from the rest.
  """
  if _MARKED.search(tokenizer.chat_template):
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
  """Returns the answers by the second method; None if it fails."""
  if not all(_has_text(m) for m in messages if m["role"] == "assistant"):
    return None
  marked, marks = _marked(tokenizer, messages)
  try:
    written = chat.writer(tokenizer, marked, False)(str)
  except ValueError:
    return None
  plain, found = _offsets(written, marks)
  closed = [found.get((i, 1)) for i, m in enumerate(messages) if _has_text(m)]
  if plain != text or None in closed or closed != sorted(closed):
    return None
  return _around(tokenizer, messages, text, found)


def _has_text(message):
  content = message.get("content")
  return isinstance(content, str) and bool(content.strip())


def _marked(tokenizer, messages):
  """Returns the messages with a mark before and after every content.

  Also returns `{mark: place}`. The place `(i, 0)` is the beginning of message
  i's content, `(i, 1)` its end.
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
    marks: places by mark, see `_marked`.
  """
  # Text and marks alternate in `pieces`.
  pieces = re.split(f"([{''.join(marks)}])", written)
  places = [marks[mark] for mark in pieces[1::2]]
  found = dict(zip(places, itertools.accumulate(map(len, pieces[::2]))))
  return "".join(pieces[::2]), found if len(found) == len(places) else {}


def _around(tokenizer, messages, text, found):
  """Returns the offsets of the answers, given the ends of their contents.

  Args:
    tokenizer: the tokenizer with the template.
    messages: messages; the last is an assistant's.
    text: text of the conversation.
    found: offsets by place: `(i, 0)` is the beginning of message i's content,
      if it is known, and `(i, 1)` the end.
  """
  header = _header(tokenizer, messages, text)
  end_of_turn = _end_of_turn(tokenizer, text[found[len(messages) - 1, 1]:])
  spans, low = [], 0
  for i, message in enumerate(messages):
    begin, end = found.get((i, 0)), found.get((i, 1))
    if message["role"] == "assistant":
      # The header ends where the answer begins. Without the beginning of the
      # content, the first header after the previous message is used.
      at = -1 if not header else (
          text.find(header, low, end) if begin is None
          else text.rfind(header, low, begin))
      if at < 0 and begin is None:
        return None
      head, tail = _spaces(message["content"])
      start = (at + len(header) if at >= 0 else
               begin - len(head) * text.endswith(head, low, begin))
      end = _end(text, end, tail, end_of_turn)
      spans.append((start, end))
    low = end or low
  return spans


def _end(text, end, tail, end_of_turn):
  """Returns the offset of an answer's end, given the end of its content.

  Args:
    text: text of the conversation.
    end: offset of the content's end, without trailing whitespace.
    tail: trailing whitespace of the content.
    end_of_turn: text that ends a turn.
  """
  space = len(text[end:]) - len(text[end:].lstrip())
  if end_of_turn and text.startswith(end_of_turn, end + space):
    return end + space + len(end_of_turn)
  return end + len(tail) * text.startswith(tail, end)


def _spaces(content):
  """Returns the leading and the trailing whitespace of a content."""
  return (content[:len(content) - len(content.lstrip())],
          content[len(content.rstrip()):])


def _header(tokenizer, messages, text):
  """Returns the text before an answer: the generation prompt, or ""."""
  try:
    longer = chat.writer(tokenizer, messages, True)(str)
  except ValueError:  # some templates raise for two answers in a row
    return ""
  return longer[len(text):] if longer.startswith(text) else ""


def _end_of_turn(tokenizer, tail):
  """Returns the text that ends a turn, given the text after the last answer.

  It ends with the first special token, because generation stops there.
  """
  match = chat.special_pattern(tokenizer).search(tail)
  return (tail[:match.end()] if match else tail).strip()


def _by_beginnings(tokenizer, messages, text):
  """Returns the answers by the third method; None if it fails."""
  spans = []
  for i, message in enumerate(messages):
    if message["role"] != "assistant":
      continue
    try:
      asked = chat.writer(tokenizer, messages[:i], True)(str)
      answered = chat.writer(tokenizer, messages[:i + 1], False)(str)
    except ValueError:
      return None
    if not (text.startswith(answered) and answered.startswith(asked)):
      return None
    tail = answered[len(asked):]
    control = [x for x in tokenizer.control_tokens.values()
               if tail.rstrip().endswith(x)]
    spans.append((len(asked), len(asked) + len(
        tail.rstrip() if control else tail)))
  return spans
