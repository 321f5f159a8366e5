"""Drafters that flags name without training: copies, and compositions.

  ngram           copies of the row's own text (prompt lookup)
  suffix          the most frequent continuations of its suffixes
  sampled_suffix  drawn from the counts of these continuations
  suffix_tree     a tree that is drawn so, without replacement
  recycling       a tree of what the target found likely before
  rest            a tree of frequent continuations in a datastore
  noise           tokens of equal probability, to see what drafts cost
  a+b             a cascade: a drafts for b, which drafts for the target
  a|b             a fallback: a, and b in rows where a has no draft

`+` binds more tightly than `|` and both may be repeated. All other names are
those of language models; in a cascade they have the target's tokens.
"""

from collections.abc import Mapping
import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lib import models
import specjax as sj
from specjax import drafters
from specjax import strategies
from specjax import verifiers
from specjax.data import datastores
from specjax.decoding import rounds
from specjax.models import Pretrained
from specjax.models import Transformer
from specjax.strategies import Strategy

_NODES = 16  # of trees
_TREE = sj.trees.sequoia_tree([0.5, 0.15, 0.08], nodes=_NODES)
_FREE = {
    "ngram": strategies.prompt_lookup,
    "suffix": strategies.suffix_decoding,
    "sampled_suffix": lambda gamma: strategies.suffix_decoding(
        gamma, proposal="sampled"),
    "suffix_tree": lambda gamma: strategies.suffix_decoding(
        max(sj.trees.depths(_TREE)), proposal="sampled", parents=_TREE),
    "recycling": lambda gamma: strategies.token_recycling(),
    "rest": lambda gamma: strategies.rest(nodes=_NODES, gamma=gamma),
    "noise": lambda gamma: Strategy(Noise(gamma=gamma), verifiers.Block()),
}
OWN_DEPTH = ("recycling", "suffix_tree")  # trees that no length changes
_TREES = ("rest", *OWN_DEPTH)
_LOOK_UP = ("rest", "suffix", "sampled_suffix", "suffix_tree")  # in a datastore
FREE = tuple(_FREE)
# Every name of a drafter that needs no heads, for errors.
NAMES = (*models.DRAFTERS, *FREE, "a+b", "a|b")
HELP = (f"{', '.join(FREE)} (these need no model), a+b (a cascade: a drafts "
        "for b, half as many tokens) or a|b (b drafts if a has no draft)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise(sj.interfaces.Drafter):
  """Drafts tokens of equal probability, of which almost none is accepted."""

  gamma: int
  vocab_size: int | None = None

  chain = True
  iid = True
  conditional = True
  autoregressive = True
  proposal = "iid"

  @property
  def num_uniforms(self) -> int:
    return self.gamma

  def bind(self, target: Transformer, transform: sj.LogitsTransform):
    """The same drafter, for this target."""
    del transform
    return dataclasses.replace(self, vocab_size=target.vocab_size)

  def propose(self, params: Any, uniforms: jax.Array,
              state: sj.types.DecodeState):
    """Drafts a chain for every row."""
    del params
    # A uniform is one of 2^23 numbers, which V tokens may not share evenly.
    numbers, size = 2**23, self.vocab_size
    tokens = (uniforms * numbers).astype(jnp.int32) % size
    shares = numbers // size + (np.arange(size) < numbers % size)
    probs = jnp.broadcast_to(
        (shares / numbers).astype(np.float32), (*tokens.shape, size))
    root = rounds.roots(state)
    return jax.vmap(sj.Draft.chain)(root, tokens, probs), None


def composes(name: str) -> bool:
  """Whether a name is one of these."""
  return name in _FREE or not os.path.exists(name) and bool(
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
                       "such as ngram+small or ngram|small")
    for stage in stages[1:]:
      if stage in _FREE:
        raise ValueError(f"--drafter={name} has a drafter for {stage}, which "
                         f"has no model and needs none; write {stage} first")
    found += stages
  for tree in _TREES:
    if tree in found and len(found) > 1:
      raise ValueError(f"--drafter={name} composes {tree}, which drafts trees, "
                       "and only chains are composed; name it alone")
  return [one for one in dict.fromkeys(found) if one not in _FREE]


def reads_datastore(name: str) -> bool:
  """Whether such a name has a drafter that looks up in a datastore."""
  return composes(name) and not set(_LOOK_UP).isdisjoint(
      name.replace("|", "+").split("+"))


def strategy(name: str, gamma: int, target: Pretrained,
             loaded: Mapping[str, Pretrained], tail: bool = False,
             datastore: str | None = None) -> tuple[Strategy, Any]:
  """The strategy of such a name or of a language model's, and its parameters.

  Args:
    name: see above.
    gamma: drafted tokens of a round; a stage inside of a cascade drafts half
      as many as the next one. Trees have 16 nodes.
    target: the model that is drafted for.
    loaded: `{label: drafter}`, the models that `members` names.
    tail: of the cascades whose tokens the target judges.
    datastore: file of build_datastore.py, which `rest` needs and the suffixes
      use.

  Returns:
    `(Strategy, params["drafter"])`.

  Raises:
    ValueError: a model or the datastore does not fit the target.
  """
  *others, (found, params) = (
      _stages(one.split("+"), gamma, target, loaded, datastore, tail)
      for one in name.split("|"))
  for first, own in reversed(others):
    found = strategies.fallback(first.drafter, found.drafter)
    params = own, params
  return found, params


def _stages(stages: list[str], gamma: int, target: Pretrained,
            loaded: Mapping[str, Pretrained], datastore: str | None,
            tail: bool = False):
  """A cascade, the innermost stage first, or a drafter alone."""
  *inner, last = stages
  if last in _FREE:
    return _FREE[last](gamma), _store(last, datastore, target)
  member = loaded[models.label(last)]
  if not inner:
    chain, params = models.chain(target, member, last)
    return chain(gamma), params
  models.check_tokens(target, member, last)
  found, own = _stages(inner, -(-gamma // 2), target, loaded, datastore)
  return Strategy(drafters.Cascade(
      model=member.model, drafter=found.drafter, gamma=gamma, tail=tail),
      verifiers.Block()), {"target": member.params, "drafter": own}


def _store(name: str, datastore: str | None, target: Pretrained):
  """What a drafter without a model reads besides the row's own text."""
  if name == "rest" and datastore is None:
    raise ValueError("rest drafts from a corpus; give --datastore=FILE, which "
                     "experiments/build_datastore.py writes")
  if datastore is None or name not in _LOOK_UP:
    return None
  return jax.device_put(datastores.load(datastore, target.tokenizer))
