"""Answers in a conversation: the tokens that an assistant writes.

A drafter for a chat model is trained on the tokens that the model generates:
the content of an answer, text of the template between header and content (such
as an empty `<think>` block), and the token that ends the turn. Headers and the
text between two messages are excluded.

The template is a program, so the answers have to be located in its output. The
first of these methods that succeeds is used:

1. `{% generation %}` in the template marks them, as in transformers.
2. The conversation is rendered again with two private-use characters around
   every content. Without these characters the text must be the same. This
   works for templates that drop the reasoning of earlier answers, or write
   their end-of-text token only once.
3. Every prefix of the conversation is rendered. Each result must be a prefix
   of the complete text.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import re
from typing import Any

from specjax.data import chat

_MARKED = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")


def encode(tokenizer: Any, messages: Sequence[Mapping[str, Any]]
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
    start = min(start, last)  # some tokenizers' offsets exclude spaces
    answered.append(any(a < max(end, start + 1) and start < b
                        for a, b in spans))
    last = max(last, end)
  return ids, answered


def _spans(tokenizer, messages, text):
  """Returns `(start, end)` in the text of every answer.

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
        "the chat template changes a message when another one follows, so the "
        "tokens of answers cannot be separated from the rest; put {% "
        "generation %} and {% endgeneration %} around answers in the template")
  return found


def _by_contents(tokenizer, messages, text):
  """Returns the answers by the second method; None if it fails."""
  contents = [m.get("content") for m in messages]
  places = [isinstance(x, str) and bool(x.strip()) for x in contents]
  if not all(place for place, m in zip(places, messages)
             if m["role"] == "assistant"):
    return None
  unused = chat.unused(tokenizer.chat_template, messages)
  marks, marked = {}, []
  for i, (message, place) in enumerate(zip(messages, places)):
    if place:
      head, tail = _spaces(contents[i])
      core = contents[i].strip()
      opening, closing = next(unused), next(unused)
      marks |= {opening: (i, 0), closing: (i, 1)}
      message = {**message, "content": head + opening + core + closing + tail}
    marked.append(message)
  try:
    written = chat.writer(tokenizer, marked, False)(str)
  except ValueError:
    return None
  found, length = {}, 0
  for piece in re.split(f"([{''.join(marks)}])", written):
    if piece not in marks:
      length += len(piece)
    elif marks[piece] in found:  # written twice
      return None
    else:
      found[marks[piece]] = length
  closed = [found.get((i, 1)) for i, place in enumerate(places) if place]
  if (re.sub(f"[{''.join(marks)}]", "", written) != text or None in closed
      or closed != sorted(closed)):
    return None
  return _around(tokenizer, messages, text, found)


def _around(tokenizer, messages, text, found):
  """Returns the answers from the known ends of their contents.

  Args:
    tokenizer: the tokenizer with the template.
    messages: messages; the last is an assistant's.
    text: text of the conversation.
    found: offsets in the text: `(message, 0)` is where the content begins, if
      known, and `(message, 1)` where it ends.
  """
  header = _header(tokenizer, messages, text)
  end_of_turn = _end_of_turn(tokenizer, text[found[len(messages) - 1, 1]:])
  spans, low = [], 0
  for i, message in enumerate(messages):
    begin, end = found.get((i, 0)), found.get((i, 1))
    if message["role"] == "assistant":
      # If the beginning of the content is unknown, use the first header.
      at = -1 if not header else (
          text.find(header, low, end) if begin is None
          else text.rfind(header, low, begin))
      if at < 0 and begin is None:
        return None
      head, tail = _spaces(message["content"])
      start = (at + len(header) if at >= 0 else
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
  """Returns the space before and after a content."""
  return (content[:len(content) - len(content.lstrip())],
          content[len(content.rstrip()):])


def _header(tokenizer, messages, text):
  """Returns the text before an answer: the generation prompt, or ""."""
  try:
    longer = chat.writer(tokenizer, messages, True)(str)
  except ValueError:  # some templates refuse two answers in a row
    return ""
  return longer[len(text):] if longer.startswith(text) else ""


def _end_of_turn(tokenizer, tail):
  """Returns the text that ends a turn, given the text after the last answer.

  It ends with the first special token, because the model stops there.
  """
  control = sorted(tokenizer.control_tokens.values(), key=len, reverse=True)
  match = re.search("|".join(map(re.escape, control)) or "(?!)", tail)
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
