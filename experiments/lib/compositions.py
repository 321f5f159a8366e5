"""Drafters that a flag makes of others: ngram, ngram+small, ngram|small.

  ngram         copies of the row's own text, which need no model
  a+b           a cascade: a drafts for b, which drafts for the target
  a|b           a fallback: a, and b in rows where a has no draft

`+` binds more tightly than `|`, both may be repeated, and all other names are
those of language models that have the target's tokens.
"""

import os
from typing import Any

from lib import models
from specjax import drafters
from specjax import verifiers
from specjax.models import Pretrained
from specjax.strategies import Strategy

NGRAM = "ngram"
HELP = (f"{NGRAM} (copies of the text so far), a+b (a cascade: a drafts for b, "
        "half as many tokens) or a|b (a, or b where a has no draft)")


def composes(name: str) -> bool:
  """Whether a name is one of these."""
  return name == NGRAM or not os.path.exists(name) and bool(
      {"+", "|"} & set(name))


def members(name: str) -> list[str]:
  """The names of the language models in it.

  Raises:
    ValueError: it is malformed.
  """
  found = []
  for one in name.split("|"):
    stages = one.split("+")
    if not all(stages):
      raise ValueError(f"--drafter={name} lacks a name beside + or |; write "
                       f"such as {NGRAM}+small or {NGRAM}|small")
    if NGRAM in stages[1:]:
      raise ValueError(f"--drafter={name} has a drafter for {NGRAM}, which "
                       f"copies and needs none; write {NGRAM} first")
    found += stages
  return [one for one in dict.fromkeys(found) if one != NGRAM]


def strategy(name: str, gamma: int, target: Pretrained,
             loaded: dict[str, Pretrained], tail: bool = False
             ) -> tuple[Strategy, Any]:
  """The strategy of such a name, and `params["drafter"]`.

  Args:
    name: see above.
    gamma: drafted tokens of a round; a stage inside of a cascade drafts half
      as many as the next one.
    target: the model that is drafted for.
    loaded: `{label: drafter}`, the models that `members` names.
    tail: of the cascades whose tokens the target judges.

  Raises:
    ValueError: a model has other tokens than the target.
  """
  *others, (drafter, params) = (
      _cascade(one.split("+"), gamma, target, loaded, tail)
      for one in name.split("|"))
  for first, own in reversed(others):
    drafter = drafters.Fallback(first=first, second=drafter)
    params = own, params
  return Strategy(drafter, verifiers.Block()), params


def _cascade(stages, gamma, target, loaded, tail=False):
  """`(drafter, params)` of stages, the innermost first."""
  *inner, last = stages
  if last == NGRAM:
    return drafters.NGram(gamma=gamma), None
  member = loaded[models.label(last)]
  models.check_tokens(target, member, last)
  if not inner:
    return drafters.LanguageModel(
        model=member.model, gamma=gamma), member.params
  drafter, own = _cascade(inner, -(-gamma // 2), target, loaded)
  return drafters.Cascade(
      model=member.model, drafter=drafter, gamma=gamma, tail=tail), {
          "target": member.params, "drafter": own}
