"""Reads prompt sets as token ids, as plain text or as chat messages."""

from collections.abc import Sequence
import functools
import itertools
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

# Documents of the shipped set "summarise": its prompts without the instruction.
_TEXTS = {x.split("\n\n", 1)[1] for x in copy_prompts.SUMMARISE}


class Prompts(NamedTuple):
  """Token ids of prompts.

  Attributes:
    sets: prompts of each set, by the name of the set.
    extra: more prompts of the same sets, for measurements before the study.
    source: origin of the prompts, JSON-serialisable.
    documents: name or text of a prompt's document, by the digest of the prompt.
      Prompts of unknown documents are missing.
  """

  sets: dict[str, list[list[int]]]
  extra: list[list[int]]
  source: dict[str, Any]
  documents: dict[str, str]

  @property
  def all(self) -> list[list[int]]:
    """Prompts of all sets, one set after the other."""
    return [row for rows in self.sets.values() for row in rows]

  @property
  def longest(self) -> int:
    """Number of tokens of the longest prompt, including extra prompts."""
    return max(map(len, self.all + self.extra))

  def cluster(self, digest: str) -> str:
    """Returns the cluster label of a prompt for `analysis.estimate`.

    Equal prompts have the same label. Prompts of one document also have the
    same label, because they are correlated. An example is the code and the
    docstrings of a module.
    """
    return self.documents.get(digest, digest)

  @property
  def clusters(self) -> list[str]:
    """Cluster labels of the prompts in `all` (see `cluster`)."""
    return [self.cluster(fingerprint(row)) for row in self.all]


def read(tokenizer: Tokenizer, items: Sequence[str], *, field: str, count: int,
         tokens: int, seed: int, chat: bool = False, extra: int = 0,
         needs_extra: bool = True) -> Prompts:
  """Reads the prompt sets of the flag --prompts.

  Args:
    tokenizer: tokenizer of the target.
    items: entries of the flag (see `flags.prompts`).
    field: field of the prompt in the user's JSON and CSV files.
    count: maximum number of prompts per set.
    tokens: maximum prompt length in tokens, without the chat template. Longer
      prompts are cut to their last tokens.
    seed: seed for the choice of prompts.
    chat: if True, each prompt is formatted as a user message.
    extra: number of extra prompts over all sets. A short file yields fewer.
    needs_extra: if True, up to a third of a short file is reserved for `extra`.
      If False, extra prompts are those that remain after `count`.

  Raises:
    ValueError: no set is named, a name occurs twice, a set has too few prompts,
      or the tokenizer lacks the chat template that `chat` requires.
  """
  common.given("--prompts", items, "one set at least, or leave it out")
  check_chat(tokenizer, chat)
  progress.say("reading prompts")

  sets, others, sources, documents = {}, [], {}, {}
  share = -(-extra // len(items))
  for item in items:
    name, texts, more, where = _texts(
        item, field, count, share, tokens, seed, needs_extra)
    if name in sets:
      raise ValueError(f"--prompts contains two sets named {name!r}; leave one "
                       "out, or rename a file")
    encode = functools.partial(_encode, tokenizer, item, tokens, chat)
    sets[name], further = list(map(encode, texts)), list(map(encode, more))
    others += further
    cut = chat and name not in prompt_sets.EMBEDDED and sum(
        len(tokenizer.encode(text, bos=False)) > tokens for text in texts)
    if cut:  # the messages may lack instructions
      print(f"{cut} of {len(texts)} messages of {name} lost their beginning, "
            f"because --prompt_tokens={tokens} keeps only so many tokens",
            file=sys.stderr)
    sources[name] = where
    # The shipped sets "summarise" and "questions" share their documents.
    named = where.get("documents") or [
        next((piece for piece in text.split("\n\n") if piece in _TEXTS), None)
        for text in texts + more]
    documents |= {
        fingerprint(row): document
        for row, document in zip(sets[name] + further, named) if document}
  return Prompts(sets, others, {
      "python": platform.python_version(), "hash": fingerprint(sets),
      "chat": chat, "sets": sources}, documents)


def _encode(tokenizer: Tokenizer, item: str, tokens: int, chat: bool,
            text: str) -> list[int]:
  """Returns the token ids of one prompt.

  Args:
    tokenizer: tokenizer of the target.
    item: entry of --prompts that contains the prompt.
    tokens: maximum prompt length in tokens (see `read`).
    chat: if True, the prompt is formatted as a user message.
    text: text of the prompt.
  """
  try:
    if chat:
      return tokenizer.chat([user(tokenizer, text, tokens)])
    return last_tokens(tokenizer, tokenizer.encode(text), tokens)
  except ValueError as e:
    raise ValueError(f"--prompts={item}, in the prompt that begins "
                     f"{text[:40]!r}: {e}") from None


def alternating(sets: dict[str, list[list[int]]]
                ) -> list[tuple[str, int, list[int]]]:
  """Returns `(set, index, ids)` of all prompts in alternating order of sets."""
  turns = itertools.zip_longest(*sets.values())
  return [(name, i, row) for i, rows in enumerate(turns)
          for name, row in zip(sets, rows) if row is not None]


def last_tokens(tokenizer: Tokenizer, ids: list[int], count: int) -> list[int]:
  """Returns the last `count` ids. If the first id is BOS, it is kept, too."""
  first = ids[:1] if tokenizer.bos is not None and count > 0 and (
      ids[:1] == [tokenizer.bos]) else []
  kept = max(0, count - len(first))
  return first + ids[max(len(first), len(ids) - kept):]


def user(tokenizer: Tokenizer, text: str, tokens: int) -> dict[str, str]:
  """Returns a user message with the last `tokens` tokens of a text.

  An incomplete character at the beginning is removed.
  """
  ids = tokenizer.encode(text, bos=False)
  if len(ids) > tokens:
    text = tokenizer.decode(ids[len(ids) - tokens:]).lstrip("\ufffd")
  return {"role": "user", "content": text}


def check_chat(tokenizer: Tokenizer, chat: bool, flag: str = "--chat") -> None:
  """Raises `ValueError` if `flag` requires a missing chat template."""
  if chat and tokenizer.chat_template is None:
    raise ValueError(f"{flag} needs a chat template, and the target's "
                     f"tokenizer has none; leave {flag} out, or give a model "
                     "that was trained to chat")


def check_room(longest: int, new_tokens: int, context: int,
               owner: str = "target") -> None:
  """Raises `ValueError` if rows are longer than a model's context.

  Args:
    longest: number of tokens of the longest prompt.
    new_tokens: number of generated tokens.
    context: smallest context length of all models.
    owner: name of the model with this context length, for the error.
  """
  if longest + new_tokens > context:
    raise ValueError(f"{longest} tokens of a prompt and --max_new_tokens="
                     f"{new_tokens} exceed the context length of the "
                     f"{owner}, {context}; set a smaller --max_new_tokens or "
                     "--prompt_tokens")


def _texts(item: str, field: str | None, count: int, extra: int, tokens: int,
           seed: int, needs_extra: bool):
  """Returns the name, the prompts, the extra prompts and the source of a set.
  """
  name, _, path = item.partition("=")
  if not path and name in prompt_sets.EMBEDDED:
    texts, source = prompt_sets.embedded(name, count + extra, 4 * tokens, seed)
    found = min(count, max(2, len(texts) - extra))
    if found < count:
      print(f"{name} has {found:,} prompts of this length, and --num_prompts "
            f"is {count:,}", file=sys.stderr)
    return name, texts[:found], texts[found:], source
  if path or name in prompt_sets.PROMPT_SETS:
    texts = prompt_sets.load(name, path or None)
  else:
    file = pathlib.Path(item)
    if not file.suffix and not file.exists():
      raise ValueError(f"--prompts contains {item!r}, which is neither a "
                       "prompt set nor a file; choose among "
                       f"{', '.join(prompt_sets.EMBEDDED)}, or give a file")
    texts = prompts_lib.read_prompts(item, field)
    name = file.stem
  total = len(texts)
  further = min(extra, total // 3 if needs_extra else max(total - count, 0))
  count = min(count, total - further)
  needs = bool(needs_extra and extra)
  if count < 2 or needs and not further:
    raise ValueError(f"{path or item} holds {total} prompt{'s' * (total != 1)};"
                     " a study needs at least 2"
                     + ", and one more for measurements before it" * needs)
  kept = random.Random(seed).sample(range(len(texts)), count + further)
  pick = lambda places: [texts[i] for i in sorted(places)]
  return name, pick(kept[:count]), pick(kept[count:]), {
      "prompts": pathlib.PurePath(path or item).name}
