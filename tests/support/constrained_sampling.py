"""Constraints in plain Python, beside the objects that they must equal."""

import functools
import itertools
import json
import re

import jax
import jsonschema
import numpy as np

import specjax as sj
from specjax import constraints
from specjax import testing

TREE = (-1, 0, 0, 1)
PROMPT = [1, 0, 2]
_END = 3


def tables(size):
  return np.asarray(jax.random.normal(jax.random.key(5), (3, size, size)))


# A constraint in plain Python: (prompt, output, logits, horizon) -> logits.


def penalised(prompt, output, logits, horizon):
  del horizon
  text = prompt + output
  for token in set(text):
    logits[token] *= 1.7 if logits[token] < 0 else 1 / 1.7
  for token in set(output):
    logits[token] -= 0.6 * output.count(token) + 0.9
  again = [b for a, b in zip(text, text[1:]) if a == text[-1]]
  if len(set(again)) < len(logits):
    logits[again] = -np.inf
  return logits


def _placed(prompt, output, logits, horizon):
  del horizon
  if not output:
    logits[0] = -np.inf
  wanted = {2: 1}.get(len(output), {2: 0}.get((prompt + output)[-1]))
  if wanted is not None and logits[wanted] > -np.inf:
    logits[np.arange(len(logits)) != wanted] = -np.inf
  return logits


_EXPRESSION = "(01|1)*2+"


@functools.cache
def _words(longest):
  texts = ("".join(word) for n in range(longest + 1)
           for word in itertools.product("012", repeat=n))
  return [text for text in texts if re.fullmatch(_EXPRESSION, text)]


def _spelled(prompt, output, logits, horizon):
  del prompt
  text = "".join(map(str, output))
  for token in range(_END):
    if not any(word.startswith(text + str(token)) for word in _words(horizon)):
      logits[token] = -np.inf
  if text not in _words(horizon):
    logits[_END] = -np.inf
  return logits


CASES = {
    "penalties": (3, 3, None, penalised, (
        constraints.Repetition(penalty=1.7),
        constraints.OutputPenalty(frequency=0.6, presence=0.9),
        constraints.NoRepeatNGram(size=2))),
    "places": (3, 3, None, _placed, (
        constraints.Banned(tokens=(0,), first=1),
        constraints.Forced(at=((2, 1),), after=((2, 0),)))),
    "automaton": (4, 4, _END, _spelled, (constraints.Automaton.of_table(
        [[1, 0, 2, -1], [-1, 0, -1, -1], [-1, -1, 2, -1]], final=[2]),)),
}


# A JSON schema, spelled with few tokens; the last of them ends a text.

_SCHEMA = {"type": "array", "maxItems": 2,
           "items": {"enum": [1, 11, [], [1]]}}
_PIECES = ("[", "1", ",", "]")
_CLOSED = len(_PIECES)


@functools.cache
def _documents(longest):
  found = []
  for n in range(longest + 1):
    for word in itertools.product(_PIECES, repeat=n):
      text = "".join(word)
      try:
        jsonschema.validate(json.loads(text), _SCHEMA)
        found.append(text)
      except (ValueError, jsonschema.ValidationError):
        continue
  return found


def _followed(prompt, output, logits, horizon):
  del prompt
  text, words = "".join(_PIECES[x] for x in output), _documents(horizon)
  for token, piece in enumerate(_PIECES):
    if not any(word.startswith(text + piece) for word in words):
      logits[token] = -np.inf
  if text not in words:
    logits[_CLOSED] = -np.inf
  return logits


def schema_case():
  """A case as in `CASES`, of a JSON schema."""
  tokenizer = testing.ListTokenizer((*map(str.encode, _PIECES), b""))
  return (_CLOSED + 1, 5, _CLOSED, _followed, (
      constraints.Automaton.from_json_schema(_SCHEMA, tokenizer),))


def decoder_of(model, drafter, verifier, case, target=None):
  return sj.Decoder(
      target=target or model, drafter=drafter, verifier=verifier, eos=case[2],
      transform=sj.LogitsTransform(temperature=0.8, constraints=case[4]))
