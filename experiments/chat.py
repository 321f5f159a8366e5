"""Chats with the target by speculative decoding.

Each line of the terminal or of standard input is a user message, and the answer
is printed as it is generated, in the colours of generate.py. On a terminal,
Ctrl-C stops an answer, /reset starts a new conversation, and /quit or Ctrl-D
ends the program. Every answer is followed by its number of tokens and rounds,
and its speed.

  python experiments/chat.py --target=smollm2
  python experiments/chat.py --target=smollm2 --system='Be brief.'

The target must have a chat template. The flags of target, drafter and sampling
are those of generate.py.
"""

from lib import common  # before jax, which takes long to import

# isort: split
from absl import flags
from lib import flags as shared
from lib.configurations import speculation
from lib.prompts import conversation

_PROMPT = flags.DEFINE_string(
    "prompt", None, "First message of the user. Default: the first line of "
    "standard input")
_SPECULATION = speculation.Speculation()
shared.template_variables()


def main() -> None:
  # Every process would have to read the messages.
  shared.reject_unread(["coordinator"], "chat.py")
  session = _SPECULATION.load(chat="chat.py")
  conversation.chat(
      session.writer, session.tokenizer,
      lambda: _SPECULATION.printer(session.tokenizer), room=session.room,
      new_tokens=_SPECULATION.max_new_tokens.value,
      keep_last=_SPECULATION.keep_last.value, context=session.context,
      first=_PROMPT.value, system=_SPECULATION.system.value,
      keep=_SPECULATION.keep)


if __name__ == "__main__":
  common.run(main)
