"""Converts conversations to token ids with the chat template of a model.

A chat template is a jinja program from the publisher of the weights, so
transformers runs it in jinja's sandbox. The contents of messages are untrusted
and must not become special tokens. For example, a content with `<|im_end|>`
could end its message and begin a system message. Two steps prevent this.

1. If a content contains the text of a special token, this text is put between
   two private-use characters and later encoded as plain text. Other contents
   are not changed. So the template can test and strip them, and the token ids
   equal the ids of transformers.
2. The template is rendered again with contents in which no character can begin
   or end a special token. So all special tokens of this rendering come from the
   template. If the first rendering has other special tokens, contents and
   template together have formed one. The conversation is then rejected.

Roles are not protected, because the calling program writes them. Some templates
form special tokens from roles.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import re
import reprlib
from typing import Any
from typing import NamedTuple
from typing import TYPE_CHECKING

from specjax.data import token_bytes
from specjax.data import tokenizer_files

if TYPE_CHECKING:  # avoids an import cycle
  from specjax.data.tokenizers import Tokenizer

# Template variables. Their values are written before and after the contents of
# `{% generation %}` blocks, which mark answers for training.
GENERATION = ("specjax_opening", "specjax_closing")
BLOCK = re.compile(r"{%([-+]?)\s*(end)?generation\s*([-+]?)%}")


class Rendering(NamedTuple):
  """A conversation as text and as tokens.

  Attributes:
    text: output of the template.
    ids: token ids.
    spans: begin and end of each token, as character offsets in `text`.
  """

  text: str
  ids: list[int]
  spans: list[tuple[int, int]]


def render(tokenizer: "Tokenizer", messages: Sequence[Mapping[str, Any]],
           add_generation_prompt: bool = True) -> Rendering:
  """Renders and encodes a conversation.

  Args:
    tokenizer: a `specjax.data.Tokenizer` with a chat template.
    messages: messages, each with a "role" and a "content" or "tool_calls". A
      key with the value None is ignored.
    add_generation_prompt: if True, appends the header of the model's answer.

  Raises:
    ValueError: see `Tokenizer.chat`.
  """
  write = writer(tokenizer, messages, add_generation_prompt)
  parse = lambda text: tokenizer.parser.encode(text, add_special_tokens=False)

  control = tokenizer.control_tokens
  opening, closing = itertools.islice(
      unused(tokenizer.chat_template, messages), 2)
  looks_special = special_pattern(tokenizer)
  text, marked = unmark(write(lambda content: looks_special.sub(
      rf"{opening}\g<0>{closing}", content)), opening, closing)
  encoding = parse(text)
  ids, spans = encoding.ids, encoding.offsets
  own = [i for i, token in enumerate(ids)
         if token in control and not overlaps(marked, *spans[i])]
  ends, harmless = _ends(control.values())
  expected = write(lambda content: content.translate(harmless))
  if expected != text:  # equal if the contents have no such character
    _check_special([ids[i] for i in own], parse(expected).ids, control, ends)

  offsets = (*spans, (len(text), len(text)))
  found, first, start = Rendering(text, [], []), 0, 0
  for i in [*own, len(ids)]:  # special tokens of the template, and the end
    if overlaps(marked, start, offsets[i][0]):
      for at, part in tokenizer.plain(text[start:offsets[i][0]]):
        found.ids.extend(part.ids)
        found.spans.extend((start + at + a, start + at + b)
                           for a, b in part.offsets)
      first = i
    # If the text since the last special token had marks, it was encoded above
    # (first == i), and only the special token is copied. Otherwise the tokens
    # of the text are copied, too.
    found.ids.extend(ids[first:i + 1])
    found.spans.extend(spans[first:i + 1])
    first, start = i + 1, offsets[i][1]
  return found


def overlaps(spans: Iterable[tuple[int, int]], start: int, end: int) -> bool:
  """Returns True if one of the spans overlaps the span from start to end."""
  return any(start < b and a < end for a, b in spans)


def special_pattern(tokenizer: "Tokenizer") -> re.Pattern[str]:
  """Returns a pattern that matches any control token, the longest first."""
  longest_first = sorted(tokenizer.control_tokens.values(), key=len,
                         reverse=True)
  return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _check_special(written: list[int], expected: list[int],
                   control: Mapping[int, str], ends: list[str]) -> None:
  """Checks that all control tokens outside of contents are from the template.

  Args:
    written: ids of the control tokens outside of the contents.
    expected: token ids of the conversation with harmless contents.
    control: text of all control tokens, by id.
    ends: first and last characters of control tokens, for the error message.

  Raises:
    ValueError: contents and template together formed a control token.
  """
  if written != [token for token in expected if token in control]:
    raise ValueError(
        "the contents of the messages and the chat template together form "
        "special tokens that the template alone does not write; remove "
        f"{' '.join(ends)} from the contents")


def writer(tokenizer: "Tokenizer", messages: Sequence[Mapping[str, Any]],
           add_generation_prompt: bool = True) -> Callable[..., str]:
  """Returns a function that renders a conversation as text.

  The result is `f(change, **variables)`. It applies the function `change` to
  every string of the messages except the roles, and passes `variables` to the
  template.

  Args:
    tokenizer: a `specjax.data.Tokenizer` with a chat template.
    messages: messages (see `render`).
    add_generation_prompt: if True, appends the header of the model's answer.

  Raises:
    ValueError: see `Tokenizer.chat`.
  """
  if tokenizer.chat_template is None:
    raise ValueError("the tokenizer has no chat template; give a chat model's "
                     "tokenizer, or the prompt as plain text")
  messages = _checked(messages)
  try:
    _changed(messages, token_bytes.check_text)
  except RecursionError:
    raise ValueError("a message contains lists or dicts that are nested deeper "
                     "than Python's recursion limit; remove them") from None
  return lambda change, **more: _render(
      tokenizer.chat_template, [
          {key: value if key == "role" else _changed(value, change)
           for key, value in message.items()} for message in messages],
      add_generation_prompt=add_generation_prompt,
      **{**tokenizer.names, **tokenizer.variables, **more})


def _checked(messages) -> list[dict[str, Any]]:
  """Returns the messages without entries whose value is None.

  Most templates would write the text "None" for such a value. transformers
  removes these entries, too.
  """
  found = []
  for message in messages:
    if not (isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and ("content" in message or message.get("tool_calls"))):
      raise ValueError(f"a message is {reprlib.repr(message)}; it must be a "
                       "dict with 'role' and 'content', or with 'role' and "
                       "'tool_calls'")
    found.append({key: value for key, value in message.items()
                  if value is not None})
  return found


def _changed(value: Any, change: Callable[[str], str]) -> Any:
  """Returns a value of plain types with `change` applied to all its strings.

  Raises:
    ValueError: the value has another type, whose methods a template could call.
  """
  if isinstance(value, str):
    return change(str(value))
  if isinstance(value, Mapping):
    return {_changed(key, change): _changed(item, change)
            for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_changed(item, change) for item in value]
  if value is None or type(value) in (bool, int, float):
    return value
  raise ValueError(f"a message contains a {type(value).__name__}; only "
                   "strings, numbers, lists and dicts are possible")


def unused(template: str, messages: Any) -> Iterator[str]:
  """Yields private-use characters that neither template nor messages contain.
  """
  used = set(template)
  _changed(messages, lambda text: used.update(text) or text)
  return (chr(i) for i in range(0xF0000, 0xFFFFE) if chr(i) not in used)


def _ends(tokens: Iterable[str]) -> tuple[list[str], dict[int, str]]:
  """Returns the first and last characters of tokens, and a translation table.

  The table for `str.translate` replaces these characters by another character.
  """
  ends = sorted({token[i] for token in tokens for i in (0, -1)})
  other = next(chr(i) for i in range(ord("x"), 0x10FFFF) if chr(i) not in ends)
  return ends, str.maketrans(dict.fromkeys(ends, other))


def unmark(rendered: str, opening: str, closing: str
            ) -> tuple[str, list[tuple[int, int]]]:
  """Returns the text without its marks, and the spans between the marks."""
  pieces, spans, length, begun = [], [], 0, None
  for piece in re.split(f"([{opening}{closing}])", rendered):
    if piece == opening:
      begun = length
    elif piece == closing:
      if begun is not None:
        spans.append((begun, length))
      begun = None
    else:
      pieces.append(piece)
      length += len(piece)
  return "".join(pieces), spans


def _render(template: str, messages: list[dict[str, Any]], **names: Any) -> str:
  """Renders a template.

  Raises:
    ValueError: the template fails, or a package is missing.
  """
  library = tokenizer_files.library("the chat template")
  try:
    [text], _ = library.utils.chat_template_utils.render_jinja_template(
        [messages], chat_template=BLOCK.sub(_written, template), **names)
    return text
  except ImportError:  # jinja2 is missing, or its sandbox is not safe
    raise ValueError("chat templates need the package 'jinja2' in version "
                     "3.1.6 or newer: pip install -U 'specjax[published]'"
                     ) from None
  except Exception as e:  # a template is a program, which can raise any error
    reason = " ".join(str(e).split()) or type(e).__name__
    raise ValueError(f"the chat template fails: {reason}; change the "
                     "messages, or give the prompt as plain text") from None


def _written(block: re.Match[str]) -> str:
  """Returns statements that write a variable of `GENERATION` instead of a tag.

  `with` is a scope like `{% generation %}`. Its tags outside treat the
  surrounding whitespace as the replaced tag does.
  """
  left, end, right = block.groups()
  if end:
    return (f"{{%{left} endwith %}}{{{{ {GENERATION[1]} }}}}"
            f"{{% endwith {right}%}}")
  return f"{{%{left} with %}}{{{{ {GENERATION[0]} }}}}{{% with {right}%}}"
