"""A chat on the terminal: what the model reads of it, and the loop."""

from collections.abc import Callable
import sys

from lib.prompts import reading as prompts
from lib.prompts import streaming
from specjax.data import Tokenizer

_SLOTS = 1024  # of a chat; doubled when it has outgrown them
_FIX = "shorten it, give a smaller --max_new_tokens, or --keep_last"
_RESET = "; /reset begins a new one"


def fitting(tokenizer: Tokenizer, messages: list[dict[str, str]], room: int,
            keep_last: bool, fix: str = _FIX):
  """What of a conversation is read: token ids that are at most `room`.

  What is too long loses its oldest exchanges first, and then the beginning of
  the last message; the system's message stays.

  Args:
    tokenizer: with a chat template.
    messages: `{"role", "content"}`, the user's last.
    room: tokens.
    keep_last: whether anything may be lost.
    fix: what the user may do otherwise.

  Returns:
    `(ids, the messages that they are of)`.

  Raises:
    ValueError: it is too long.
  """
  system = [m for m in messages[:1] if m["role"] == "system"]
  rest = messages[len(system):]
  ids = tokenizer.chat(system + rest)
  if len(ids) > room and not keep_last:
    raise ValueError(f"the conversation has {len(ids)} tokens and there is "
                     f"room for {room}; {fix}")
  while len(ids) > room and len(rest) > 1:
    rest = rest[2:]
    ids = tokenizer.chat(system + rest)
  kept = len(tokenizer.encode(rest[0]["content"], bos=False))
  while len(ids) > room:
    kept -= len(ids) - room
    if kept < 1:
      raise ValueError(f"there is room for {room} tokens, and the chat "
                       "template alone takes more; give a smaller "
                       "--max_new_tokens")
    rest = [prompts.user(tokenizer, rest[0]["content"], kept)]
    ids = tokenizer.chat(system + rest)
  return ids, system + rest


def cut(tokenizer: Tokenizer, ids: list[int], room: int, keep_last: bool):
  """The ids of a prompt that are at most `room`, see `fitting`.

  Raises:
    ValueError: it is too long.
  """
  if len(ids) > room and not keep_last:
    raise ValueError(f"the prompt has {len(ids)} tokens and there is room for "
                     f"{room}; {_FIX}")
  return prompts.last_tokens(tokenizer, ids, room)


def lines(first: str | None = None):
  """What the user says: `first`, if any, and then a line after the other.

  Ctrl-D and /quit end it. Ctrl-C while typing begins a new line; where nobody
  types, it ends the program.
  """
  if first:
    yield first
  while True:
    try:
      if sys.stdin.isatty():
        line = input("> ")
      else:
        line = sys.stdin.readline()
        if not line:
          return
        line = line.removeprefix("\ufeff")  # a byte-order mark
    except EOFError:
      print()  # the shell's prompt gets a line of its own
      return
    except KeyboardInterrupt:
      if not sys.stdin.isatty():
        raise
      print()
      continue
    if line.strip() == "/quit":
      return
    if line.strip():
      yield line.strip()


def chat(writer: streaming.Writer, tokenizer: Tokenizer,
         printer_of: Callable[[], streaming.Printer], *, room: int,
         new_tokens: int, keep_last: bool, first: str | None,
         system: str | None, keep: Callable[[str], None]):
  """Answers every message, with all before it in mind, until the user leaves.

  On a terminal, Ctrl-C ends an answer, of which is kept what was said;
  elsewhere it ends the chat. A message that cannot be answered is told in one
  line and forgotten, and /reset forgets all but the system's.

  Args:
    writer: a `streaming.Writer`.
    tokenizer: with a chat template.
    printer_of: makes a `streaming.Printer`.
    room: tokens of a conversation, at most.
    new_tokens: of an answer, at most.
    keep_last: see `fitting`; what is lost is not read again.
    first: what the user says before the lines of standard input, or None.
    system: a message of the system that comes first, or None.
    keep: called after every answer with all that was said so far.
  """
  beginning = [{"role": "system", "content": system}] * (system is not None)
  said, messages = [*beginning], [*beginning]
  for number, line in enumerate(lines(first)):
    if line == "/reset":
      messages = [*beginning]
      continue
    asked = {"role": "user", "content": line}
    try:
      ids, messages = fitting(
          tokenizer, [*messages, asked], room, keep_last, _FIX + _RESET)
    except ValueError as e:
      print(f"error: {' '.join(str(e).split())}", file=sys.stderr)
      continue
    slots = _SLOTS
    while slots < len(ids) + new_tokens + writer.decoder.num_nodes:
      slots *= 2
    printer, answer = printer_of(), streaming.Answer()
    try:
      state = writer.start(ids, new_tokens, number, slots)
      writer.write(state, printer, answer)
    except KeyboardInterrupt:
      if not sys.stdin.isatty():
        raise
    finally:
      answered = {"role": "assistant", "content": printer.text}
      said += [asked, answered]
      messages = [*messages, answered]
      keep("".join(f"{m['role']}: {m['content']}\n" for m in said))
    print(flush=True)
    print(f"[{answer}]", file=sys.stderr, flush=True)
