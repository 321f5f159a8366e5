"""Chat on the terminal, and truncation of long conversations."""

from collections.abc import Callable
import sys

from lib.prompts import reading as prompts
from lib.prompts import streaming
from specjax.data import Tokenizer

_SLOTS = 1024  # initial number of cache slots, doubled for longer chats
_FIX = "shorten it, set a smaller --max_new_tokens, or add --keep_last"
_RESET = "; /reset begins a new one"


def fitting(tokenizer: Tokenizer, messages: list[dict[str, str]], room: int,
            keep_last: bool, context: str = "the context", fix: str = _FIX):
  """Returns the token ids of a conversation, truncated to `room` tokens.

  Truncation removes the oldest pairs of message and answer, then the beginning
  of the last message. The system message is always kept.

  Args:
    tokenizer: tokenizer with a chat template.
    messages: messages with "role" and "content". The last one is the user's.
    room: maximum number of tokens.
    keep_last: if True, truncation is allowed.
    context: name of the limiting context in errors, such as "the drafter's
      context of 64 tokens".
    fix: advice at the end of the error message.

  Returns:
    `(ids, messages)`, with the remaining messages.

  Raises:
    ValueError: the conversation is too long and truncation is not allowed, or
      the chat template alone is too long.
  """
  system = [m for m in messages[:1] if m["role"] == "system"]
  rest = messages[len(system):]
  ids = tokenizer.chat(system + rest)
  if len(ids) > room and not keep_last:
    raise ValueError(f"the conversation has {len(ids)} tokens, and {context} "
                     f"has room for {room} before the answer; {fix}")
  while len(ids) > room and len(rest) > 1:
    rest = rest[2:]
    ids = tokenizer.chat(system + rest)
  kept = len(tokenizer.encode(rest[0]["content"], bos=False))
  while len(ids) > room:
    kept -= len(ids) - room
    if kept < 1:
      raise ValueError(f"{context} has room for {room} tokens before the "
                       "answer, and the chat template alone has more; set a "
                       "smaller --max_new_tokens")
    rest = [prompts.user(tokenizer, rest[0]["content"], kept)]
    ids = tokenizer.chat(system + rest)
  return ids, system + rest


def cut(tokenizer: Tokenizer, ids: list[int], room: int, keep_last: bool,
        context: str = "the context"):
  """Returns the last `room` ids of a prompt.

  Raises:
    ValueError: the prompt is longer and `keep_last` is False.
  """
  if len(ids) > room and not keep_last:
    raise ValueError(f"the prompt has {len(ids)} tokens, and {context} has "
                     f"room for {room} before the output; {_FIX}")
  return prompts.last_tokens(tokenizer, ids, room)


def lines(first: str | None = None):
  """Yields the user's messages: `first` (unless None), then lines of stdin.

  Ctrl-D and /quit end the input. On a terminal, Ctrl-C discards the current
  line. If stdin is not a terminal, Ctrl-C ends the program.
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
      print()  # so that the shell's prompt begins a new line
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
         new_tokens: int, keep_last: bool, context: str, first: str | None,
         system: str | None, keep: Callable[[str], None]):
  """Runs a chat until the input ends.

  On a terminal, Ctrl-C ends the current answer. The printed part of the answer
  stays in the conversation. If stdin is not a terminal, Ctrl-C ends the chat. A
  message that is too long is skipped with an error message. /reset removes all
  messages except the system message.

  Args:
    writer: writer that generates the answers.
    tokenizer: tokenizer with a chat template.
    printer_of: function that returns a new `streaming.Printer`.
    room: maximum number of tokens of a conversation.
    new_tokens: maximum number of tokens of an answer.
    keep_last: if True, truncation is allowed (see `fitting`). Removed messages
      are not restored.
    context: name of the limiting context in errors (see `fitting`).
    first: first message of the user, or None to read it from stdin.
    system: system message, or None.
    keep: function that is called with the entire transcript after every answer.
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
          tokenizer, [*messages, asked], room, keep_last, context,
          _FIX + _RESET)
    except ValueError as e:
      print(f"error: {' '.join(str(e).split())}", file=sys.stderr)
      continue
    slots = _SLOTS
    while slots < len(ids) + new_tokens + writer.decoder.num_nodes:
      slots *= 2
    printer, answer = printer_of(), streaming.Answer(
        target_calls=writer.decoder.drafter.target_calls)
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
