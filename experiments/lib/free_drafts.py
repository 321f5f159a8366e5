"""The drafters of free_drafts_study.py: by name, with a rule and parameters.

  ngram           copies of the row's own text (prompt lookup)
  suffix          the most frequent continuations of its suffixes
  sampled_suffix  drawn from the counts of these continuations
  recycling       a tree of what the target found likely before
  rest            a tree of frequent continuations in a datastore
  noise           tokens drawn with equal probability, to see what it costs
  a|b             a, and b in rows where a has no draft
  others          language models, in the box or published
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lib import models
import specjax as sj
from specjax import strategies
from specjax.data import datastores
from specjax.drafters import common
from specjax.models import Pretrained
from specjax.strategies import Strategy

_NODES = 16  # of trees
_FREE = {
    "ngram": strategies.prompt_lookup,
    "suffix": strategies.suffix_decoding,
    "sampled_suffix": lambda gamma: strategies.suffix_decoding(
        gamma, proposal="sampled"),
    "recycling": lambda gamma: strategies.token_recycling(),
    "rest": lambda gamma: strategies.rest(nodes=_NODES, gamma=gamma),
    "noise": lambda gamma: Strategy(Noise(gamma=gamma), sj.verifiers.Block()),
}
NAMES = tuple(_FREE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise:
  """Drafts tokens of equal probability, of which almost none is accepted."""

  gamma: int
  vocab_size: int | None = None

  chain = True
  iid = True
  conditional = True
  autoregressive = True
  proposal = "iid"

  @property
  def num_nodes(self) -> int:
    return self.gamma + 1

  @property
  def num_coins(self) -> int:
    return self.gamma

  def bind(self, target, transform):
    """The same drafter, for this target."""
    del transform
    return dataclasses.replace(self, vocab_size=target.vocab_size)

  def init(self, params, prompt, prefill_output):
    """Nothing: noise remembers nothing."""
    del params, prompt, prefill_output

  def propose(self, params, coins, state):
    """Drafts a chain for every row."""
    del params
    tokens = (coins * self.vocab_size).astype(jnp.int32)
    probs = jnp.full((*tokens.shape, self.vocab_size), 1 / self.vocab_size)
    return jax.vmap(sj.Draft.chain)(common.roots(state), tokens, probs), None

  def commit(self, params, drafter, draft, verdict, target_output, count):
    """Nothing."""
    del params, drafter, draft, verdict, target_output, count


def language_models(names: list[str]) -> list[str]:
  """The language models that these drafters need."""
  parts = [part for name in names for part in name.split("|")]
  return [part for part in dict.fromkeys(parts) if part not in _FREE]


def method(name: str, gamma: int, target: Pretrained,
           members: Mapping[str, Pretrained], datastore: str | None
           ) -> tuple[Strategy, Any]:
  """A drafter with its rule, and `params["drafter"]`.

  Args:
    name: see above.
    gamma: drafted tokens of a chain.
    target: the model that is drafted for.
    members: `{label: language model}`.
    datastore: file of build_datastore.py, which `rest` needs and `suffix` uses.

  Raises:
    ValueError: there is no datastore, or it does not fit.
  """
  *others, (strategy, params) = (
      _part(part, gamma, target, members, datastore)
      for part in name.split("|"))
  for first, own in reversed(others):
    strategy = strategies.fallback(
        first.drafter, strategy.drafter, strategy.verifier)
    params = own, params
  return strategy, params


def _part(name, gamma, target, members, datastore):
  if name not in _FREE:
    chain, params = models.chain(target, members[models.label(name)], name)
    return chain(gamma), params
  if name == "rest" and datastore is None:
    raise ValueError("rest drafts from a corpus; give --datastore=FILE, which "
                     "experiments/build_datastore.py writes")
  params = None
  if datastore is not None and name in ("rest", "suffix", "sampled_suffix"):
    params = jax.device_put(datastores.load(datastore, target.tokenizer))
  return _FREE[name](gamma), params
