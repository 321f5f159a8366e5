"""Measures the exact acceptance of drafters under several rules.

A `Candidate` is a drafter with one kind of draft, such as a chain or a sampled
tree. For each candidate, the prompts are decoded once per temperature, in
batches and with one rule. All other rules are evaluated on the same drafts.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import pathlib
from typing import Any
from typing import NamedTuple

import jax.numpy as jnp

from lib import common
from lib import drafters
from lib.configurations import decoders
from lib.prompts import reading
from lib.reports import drafter_evaluation
from lib.rollouts import batches
from lib.rollouts import resumable
from lib.rollouts import statistics
import specjax as sj
from specjax import interfaces
from specjax.strategies import Strategy


class Candidate(NamedTuple):
  """Drafter with one kind of draft, and the rules for such drafts.

  Attributes:
    strategies: strategies with this drafter. They differ only in their rule.
    params: parameters of the decoder, `{"target": ..., "drafter": ...}`.
    model: target model. For heads, it also returns the hidden states that the
      heads read.
    restarts: whether a long draft is evaluated as several short rounds (see
      `statistics.Shorter`). If False, only its first tokens are used. False for
      heads, because they are less accurate later in a draft.
    smaller: smaller trees in increasing size, which are evaluated on the same
      drafts. Each one is the indices of its nodes (see `statistics.Subtree`).
  """

  strategies: tuple[Strategy, ...]
  params: Any
  model: Any
  restarts: bool
  smaller: tuple[tuple[int, ...], ...] = ()

  @property
  def drafter(self) -> interfaces.Drafter:
    return self.strategies[0].drafter

  @property
  def is_chain(self) -> bool:
    return "chain" in interfaces.capabilities(self.drafter)


def of_loaded(drafter: drafters.Loaded) -> Candidate:
  """Returns the candidate of a loaded drafter with its default strategy."""
  return Candidate((drafter.strategy,), drafter.params, drafter.model,
                   restarts=drafter.heads is None)


def candidates(loaded: Mapping[str, drafters.Loaded]) -> dict[str, Candidate]:
  """Returns the candidates of drafters for all their kinds of drafts, by name.

  `loaded` is the result of `drafters.load` with compared=True.
  """
  return {", ".join(filter(None, (label, kind))): of_loaded(drafter)._replace(
      strategies=some) for label, drafter in loaded.items()
          for kind, some in drafter.compared.items()}


def sampled_tree(drafter: drafters.Loaded, sizes: Sequence[int]
                 ) -> Candidate | None:
  """Returns the candidate with sampled trees of heads.

  None if the drafter has no heads, or if their method drafts no trees.

  Args:
    drafter: drafter, loaded with the largest size and compared=True.
    sizes: sizes of the trees in nodes. The largest tree is drafted, and the
      others are `smaller`.
  """
  found = drafter.compared.get("sampled tree")
  if drafter.heads is None or found is None:
    return None
  *smaller, largest = sorted(set(map(drafter.heads.tree, sizes)), key=len)
  return of_loaded(drafter)._replace(strategies=found, smaller=tuple(
      statistics.part(largest, tree) for tree in smaller))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judge:
  """Target, candidates and prompts of an evaluation.

  Attributes:
    target: target model, or a `traces.Trace`.
    candidates: candidates by name.
    rules: rules for chains by name. The rules for trees are those of their
      strategies, and the rules in this dict that are not part of specjax, if
      the drafter provides all properties that they require.
    gammas: draft lengths of chains in increasing order. The last one is that of
      the drafts, except for heads with their own length.
    read: prompts.
    eos: token ids that end a row, or None.
    new_tokens: largest number of new tokens per prompt.
    batch: settings of the rollouts.
    seed: seed of the rollouts.
    detailed: if True, the `statistics` of draft tokens are computed for chains.
    greedy: whether all temperatures are 0, see `statistics.statistics`.
  """

  target: Any
  candidates: Mapping[str, Candidate]
  rules: Mapping[str, sj.Verifier]
  gammas: Sequence[int]
  read: reading.Prompts
  eos: tuple[int, ...] | None
  new_tokens: int
  batch: decoders.Batch
  seed: int
  detailed: bool = False
  greedy: bool = False

  def rules_of(self, name: str) -> dict[str, sj.Verifier]:
    """Returns the rules for the drafts of a candidate, by name."""
    one = self.candidates[name]
    if one.is_chain:
      return dict(self.rules)
    provided = interfaces.capabilities(one.drafter)
    return {common.verifier_name(x.verifier): x.verifier
            for x in one.strategies} | {
                name: rule for name, rule in self.rules.items()
                if name not in common.ALL_VERIFIERS
                and provided.issuperset(rule.requires)}

  def observed(self, name: str) -> dict[str, sj.Verifier]:
    """Returns the observers of a candidate: rules and statistics, by name."""
    one, found = self.candidates[name], self.rules_of(name)
    if not one.is_chain:
      return found | {
          statistics.sized(name, len(nodes)): statistics.Subtree(rule, nodes)
          for name, rule in found.items() for nodes in one.smaller}
    if one.restarts:
      found |= {
          statistics.sized(name, gamma): statistics.Shorter(rule, gamma)
          for name, rule in self.rules.items() for gamma in self.gammas[:-1]}
    if self.detailed:
      found |= statistics.statistics(
          self.target.model.vocab_size, self.greedy)
    return found

  def decoder(self, name: str, temperature: float) -> sj.Decoder:
    """Returns the decoder of a candidate.

    Chains are decoded with token verification.
    """
    one = self.candidates[name]
    rule = (sj.verifiers.Token() if one.is_chain
            else one.strategies[0].verifier)
    return sj.Decoder(
        target=one.model, drafter=one.drafter, verifier=rule, eos=self.eos,
        observers=tuple(self.observed(name).values()),
        transform=sj.LogitsTransform(temperature=temperature))

  def params(self, name: str) -> dict[str, Any]:
    """Returns the parameters of a candidate's decoder."""
    return self.candidates[name].params

  def configurations(self, temperature: float
                     ) -> dict[str, decoders.DecoderRows]:
    """Returns the configuration of each candidate, by name."""
    def to(state):
      return state.replace(temperature=jnp.full_like(
          state.temperature, temperature))

    return {name: decoders.DecoderRows(
        self.decoder(name, temperature), self.params(name), self.new_tokens,
        self._capacity, reader=self._readers[name], change=to,
        batch=self.batch) for name in self.candidates}

  @property
  def _capacity(self) -> int:
    """Number of cache slots per row."""
    nodes = max(one.drafter.num_nodes for one in self.candidates.values())
    return self.read.longest + self.new_tokens + nodes

  @functools.cached_property
  def _readers(self) -> dict[str, decoders.Reader]:
    """Reader of each candidate, which all temperatures share."""
    return {name: decoders.Reader(
        self.decoder(name, 1.0), self.params(name), self._capacity,
        memory=batches.window(self.batch)) for name in self.candidates}

  def fingerprint(self) -> str:
    """Returns a hash of all settings that affect a run (see `resumable`)."""
    return resumable.fingerprint(
        [self.target.params, *(
            drafters.own_params(x.params, self.target.params)
            for x in self.candidates.values())],
        [(name, x.strategies, list(self.observed(name).items()))
         for name, x in self.candidates.items()], self.eos, self.new_tokens)

  def runs(self, temperatures: Sequence[float], path: pathlib.Path
           ) -> dict[tuple, dict[str, Any]]:
    """Decodes all prompts and returns the runs of all candidates.

    Args:
      temperatures: sampling temperatures.
      path: JSONL file of the runs. An interrupted evaluation resumes from it.

    Returns:
      `{unit: {name of a candidate: run}}` (see `resumable`).
    """
    fingerprint = self.fingerprint()
    units = [(fingerprint, t, self.seed, name, i, resumable.digest(row))
             for t in temperatures
             for name, i, row in reading.alternating(self.read.sets)]
    return resumable.run(
        units, lambda unit: (
            self.read.sets[unit[3]][unit[4]], unit[2], unit[4]),
        self.configurations, path, window=batches.window(self.batch),
        new_tokens=self.new_tokens)

  def results(self, temperatures: Sequence[float], path: pathlib.Path
              ) -> drafter_evaluation.Results:
    """Decodes all prompts and returns the results (see `runs`)."""
    return drafter_evaluation.Results(
        runs=self.runs(temperatures, path), gammas=self.gammas,
        cluster_of=self.read.cluster,
        sizes={name: [*map(len, x.smaller), x.drafter.num_nodes]
               for name, x in self.candidates.items() if not x.is_chain},
        temperatures=temperatures,
        rules={name: list(self.rules_of(name)) for name in self.candidates},
        target_calls={name: x.drafter.target_calls
                      for name, x in self.candidates.items()},
        observed={name: list(self.observed(name)) for name in self.candidates})


def context(judged: Mapping[str, Candidate]) -> tuple[int, str]:
  """Returns the smallest context length of all candidates.

  The result is `(length, owner)`. The owner is "target" or "drafter", the model
  with this context length.
  """
  decoders = [one.strategies[0].decoder(one.model) for one in judged.values()]
  return min((decoder.context_length, decoder.context_owner)
             for decoder in decoders)
