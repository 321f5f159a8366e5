"""Drafters that need no training, and compositions of drafters.

  ngram           copies from the row's own tokens (prompt lookup)
  suffix          most frequent continuations of the row's suffixes
  sampled_suffix  continuations sampled by their counts
  suffix_tree     tree of continuations sampled without replacement
  recycling       tree of tokens that were likely in earlier target passes
  rest            tree of frequent continuations in a datastore
  noise           uniformly random tokens, to measure the cost of drafts
  a+b             cascade: a drafts for b, and b drafts for the target
  a|b             fallback: b drafts in rows where a has no draft

Drafters of files and installed packages (see `extensions`) are composed in the
same way.

`+` binds more tightly than `|`, and both may be repeated. Any other name
denotes a language model. In a cascade, a language model must have the target's
vocabulary.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lib import extensions
import specjax as sj
from specjax import strategies
from specjax import verifiers
from specjax.decoding import rounds
from specjax.models import Transformer
from specjax.strategies import Strategy

_NODES = 16  # size of draft trees
_TREE = sj.trees.sequoia_tree([0.5, 0.15, 0.08], nodes=_NODES)
FREE = {  # functions from gamma to a strategy, by name
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
OWN_DEPTH = ("recycling", "suffix_tree")  # drafters that ignore gamma
_TREES = ("rest", *OWN_DEPTH)
# Drafters that can use a datastore.
LOOK_UP = ("rest", "suffix", "sampled_suffix", "suffix_tree")
HELP = (f"{', '.join(FREE)} (these need no model), {extensions.FORM} (your "
        "own, a function (target, gamma) that returns (strategy, params)), a+b "
        "(a cascade: a drafts for b, half as many tokens) or a|b (b drafts if "
        "a has no draft)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise(sj.interfaces.Drafter):
  """Drafts uniformly random tokens, almost all of which are rejected."""

  gamma: int
  vocab_size: int | None = None

  provides = ("chain", "iid", "conditional", "autoregressive")

  @property
  def num_uniforms(self) -> int:
    return self.gamma

  def bind(self, target: Transformer, transform: sj.LogitsTransform):
    """Returns the drafter with the target's vocabulary size."""
    del transform
    return dataclasses.replace(self, vocab_size=target.vocab_size)

  def propose(self, params: Any, uniforms: jax.Array,
              state: sj.types.DecodeState):
    """Drafts a chain for every row."""
    del params
    # A uniform sample has 2^23 possible values. If the vocabulary size does not
    # divide 2^23, some tokens correspond to one value more than others. `probs`
    # contains the resulting exact probabilities.
    numbers, size = 2**23, self.vocab_size
    tokens = (uniforms * numbers).astype(jnp.int32) % size
    shares = numbers // size + (np.arange(size) < numbers % size)
    probs = jnp.broadcast_to(
        (shares / numbers).astype(np.float32), (*tokens.shape, size))
    root = rounds.roots(state)
    return jax.vmap(sj.Draft.chain)(root, tokens, probs), None


def composes(name: str) -> bool:
  """Returns True if a name is a drafter of this file or a composition."""
  return has_no_model(name) or not os.path.exists(name) and bool(
      {"+", "|"} & set(name))


def has_no_model(name: str) -> bool:
  """Returns True for a drafter of this file, a file or a package."""
  return name in FREE or extensions.is_own("--drafter", name)


def members(name: str) -> list[str]:
  """Returns the names of the language models in a composition.

  Raises:
    ValueError: the composition is malformed.
  """
  found = []
  for one in name.split("|"):
    stages = one.split("+")
    if not all(stages):
      raise ValueError(f"--drafter={name} lacks a name before or after + or |; "
                       "give two names, such as ngram+small or ngram|small")
    for stage in stages[1:]:
      if has_no_model(stage):
        raise ValueError(f"--drafter={name} has a drafter for {stage}, which "
                         "has no model that a drafter could speed up; put "
                         f"{stage} first")
    found += stages
  for tree in _TREES:
    if tree in found and len(found) > 1:
      raise ValueError(f"--drafter={name} contains {tree}, which drafts trees, "
                       "and compositions need chains; set "
                       f"--drafter={tree} alone")
  return [one for one in dict.fromkeys(found) if not has_no_model(one)]
