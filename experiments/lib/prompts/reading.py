"""What studies decode from: prompt sets as token ids, plain or as messages."""

from collections.abc import Sequence
import pathlib
import platform
import random
import sys
from typing import Any
from typing import NamedTuple

from lib import common
from lib import progress
from specjax.data import copy_prompts
from specjax.data import prompt_sets
from specjax.data import prompts as prompts_lib
from specjax.data import Tokenizer
from specjax.utils.fingerprints import fingerprint

# What the shipped prompts ask about, behind the instruction.
_TEXTS = {x.split("\n\n", 1)[1] for x in copy_prompts.SUMMARISE}


class Prompts(NamedTuple):
  """Token ids of prompts.

  Attributes:
    sets: {name of a set: its prompts}.
    extra: other prompts of the same sets, to measure beforehand with.
    source: where they come from, as JSON.
    documents: {digest of a prompt: its document}, where documents have names.
  """

  sets: dict[str, list[list[int]]]
  extra: list[list[int]]
  source: dict[str, Any]
  documents: dict[str, str]

  @property
  def all(self) -> list[list[int]]:
    """The prompts of all sets, one set after the other."""
    return [row for rows in self.sets.values() for row in rows]

  @property
  def longest(self) -> int:
    """Tokens of the longest prompt, the extra ones included."""
    return max(map(len, self.all + self.extra))

  def cluster(self, digest: str) -> str:
    """Returns the label of a prompt in `analysis.estimate`.

    Prompts of one document, such as the code and the docstrings of a module,
    resemble each other and have one label. So have prompts that are equal.
    """
    return self.documents.get(digest, digest)

  @property
  def clusters(self) -> list[str]:
    """Labels of `all`, see `cluster`."""
    return [self.cluster(fingerprint(row)) for row in self.all]


def read(tokenizer: Tokenizer, items: Sequence[str], *, field: str, count: int,
         tokens: int, seed: int, chat: bool = False, extra: int = 0,
         needs_extra: bool = True) -> Prompts:
  """The prompt sets that the flag --prompts names.

  Args:
    tokenizer: the target's.
    items: of the flag, see `flags.prompts`.
    field: of a JSONL file of the user's own.
    count: prompts of every set, at most.
    tokens: longer prompts keep their last ones.
    seed: of the choice.
    chat: whether each prompt is a user's message; the tokens of the chat
      template come on top.
    extra: further prompts, of all sets together; fewer where a file has not
      enough.
    needs_extra: whether a file must spare some of `count` for them.

  Raises:
    ValueError: no set, two of one name, one with too few prompts, or a
      tokenizer without a chat template.
  """
  common.given("--prompts", items, "one set at least, or leave it out")
  check_chat(tokenizer, chat)
  progress.say("reading prompts")

  def encode(item, text):
    try:
      if chat:
        return tokenizer.chat([user(tokenizer, text, tokens)])
      return last_tokens(tokenizer, tokenizer.encode(text), tokens)
    except ValueError as e:
      raise ValueError(f"--prompts={item}, in the prompt that begins "
                       f"{text[:40]!r}: {e}") from None

  sets, others, sources, documents = {}, [], {}, {}
  share = -(-extra // len(items))
  for item in items:
    name, texts, more, where = _texts(
        item, field, count, share, tokens, seed, needs_extra)
    if name in sets:
      raise ValueError(f"--prompts holds two sets named {name!r}; give each "
                       "once")
    sets[name] = [encode(item, text) for text in texts]
    further = [encode(item, text) for text in more]
    others += further
    if chat and name not in prompt_sets.EMBEDDED:
      _tell_of_cuts(tokenizer, name, texts, tokens)
    sources[name] = where
    named = where.get("documents") or map(_document, texts + more)
    documents |= {
        fingerprint(row): document
        for row, document in zip(sets[name] + further, named) if document}
  return Prompts(sets, others, {
      "python": platform.python_version(), "hash": fingerprint(sets),
      "chat": chat, "sets": sources}, documents)


def last_tokens(tokenizer: Tokenizer, ids: list[int], count: int) -> list[int]:
  """The last `count` ids; a token that begins every text stays the first."""
  first = ids[:1] if tokenizer.bos is not None and count > 0 and (
      ids[:1] == [tokenizer.bos]) else []
  kept = max(0, count - len(first))
  return first + ids[max(len(first), len(ids) - kept):]


def user(tokenizer: Tokenizer, text: str, tokens: int) -> dict[str, str]:
  """A user's message of the last tokens of a text; no character is halved."""
  ids = tokenizer.encode(text, bos=False)
  if len(ids) > tokens:
    text = tokenizer.decode(ids[len(ids) - tokens:]).lstrip("\ufffd")
  return {"role": "user", "content": text}


def check_chat(tokenizer: Tokenizer, chat: bool, flag: str = "--chat") -> None:
  """Refuses a chat with a model that knows none; `flag` is what asks for it."""
  if chat and tokenizer.chat_template is None:
    raise ValueError(f"{flag} needs a chat template, and the target's "
                     f"tokenizer has none; leave {flag} out, or give a model "
                     "that was trained to chat")


def check_room(longest: int, new_tokens: int, context: int) -> None:
  """Refuses rows that are longer than the models' context."""
  if longest + new_tokens > context:
    raise ValueError(f"{longest} tokens of a prompt and --max_new_tokens="
                     f"{new_tokens} exceed the context length of {context}, "
                     "the target's or that of a drafter with its tokens; ask "
                     "for fewer, also by --prompt_tokens")


def _document(text: str):
  """Returns the text that two shipped sets ask about, None for other prompts.

  "summarise" and "questions" have one prompt each about these texts.
  """
  return next((piece for piece in text.split("\n\n") if piece in _TEXTS), None)


def _report_missing(name: str, count: int, asked: int):
  """Reports that a set has fewer prompts than --num_prompts."""
  if count < asked:
    print(f"{name} has {count:,} prompts of this length, and --num_prompts is "
          f"{asked:,}", file=sys.stderr)


def _tell_of_cuts(tokenizer: Tokenizer, name: str, texts: list[str],
                  tokens: int):
  """What a message asks for may stand at its beginning."""
  cut = sum(len(tokenizer.encode(text, bos=False)) > tokens for text in texts)
  if cut:
    print(f"{cut} of {len(texts)} messages of {name} lost their beginning; "
          f"--prompt_tokens={tokens} keeps that many of their tokens",
          file=sys.stderr)


def _texts(item: str, field: str | None, count: int, extra: int, tokens: int,
           seed: int, needs_extra: bool):
  """A set's name, its texts, further ones, and where they come from."""
  name, _, path = item.partition("=")
  if not path and name in prompt_sets.EMBEDDED:
    texts, source = prompt_sets.embedded(name, count + extra, 4 * tokens, seed)
    asked, count = count, min(count, max(2, len(texts) - extra))
    _report_missing(name, count, asked)
    return name, texts[:count], texts[count:], source
  if path or name in prompt_sets.PROMPT_SETS:
    texts = prompt_sets.load(name, path or None)
  else:
    texts = prompts_lib.read_prompts(item, field)
    name = pathlib.Path(item).stem
  count, further = _shares(path or item, len(texts), count, extra, needs_extra)
  kept = random.Random(seed).sample(range(len(texts)), count + further)
  pick = lambda places: [texts[i] for i in sorted(places)]
  return name, pick(kept[:count]), pick(kept[count:]), {
      "prompts": pathlib.PurePath(path or item).name}


def _shares(place: str, total: int, count: int, extra: int, needs_extra: bool
            ) -> tuple[int, int]:
  """Returns how many prompts of a file are measured, and how many are extra.

  Extra prompts are never among the measured ones.
  """
  further = min(extra, total // 3 if needs_extra else max(total - count, 0))
  count = min(count, total - further)
  needs = bool(needs_extra and extra)
  if count < 2 or needs and not further:
    raise ValueError(f"{place} holds {total} prompt{'s' * (total != 1)}; a "
                     "study needs at least 2"
                     + ", and one more to measure with" * needs)
  return count, further
