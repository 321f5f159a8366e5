"""A proof, or the model that refutes it, in one line."""

import dataclasses
import itertools
import math
from typing import Any

from specjax.exact import enumeration
from specjax.exact.optima import full_information_optimum
from specjax.exact.pairs import KINDS
from specjax.exact.pairs import random_pair

_TOLERANCE = {"float64": 1e-9, "float32": 1e-5}


@dataclasses.dataclass(frozen=True)
class Certificate:
  """What `certify` found.

  Attributes:
    lossless: every law was a probability law and no total variation exceeded
      the tolerance.
    total_variation: the worst over all models.
    witness: the model that shows it: `random_pair`'s arguments, gamma, rounds.
    expected_tokens: tokens of one round, averaged over the models tried.
    bound: the average of what no verifier can exceed on those models, with
      full information about both of them (1 + Lemma 8).
    defects: ways in which a law was not a probability law.
    models: pairs of models enumerated.
    laws: laws evaluated.
    dtype: of the numbers handed to the law.
    declared_lossy: the rule itself says `lossless = False`.
  """

  lossless: bool
  total_variation: float
  witness: dict[str, Any]
  expected_tokens: float
  bound: float
  defects: tuple[str, ...]
  models: int
  laws: int
  dtype: str
  declared_lossy: bool = False

  def __str__(self):
    where = ", ".join(f"{k}={v}" for k, v in self.witness.items())
    verdict = "lossless" if self.lossless else "NOT LOSSLESS"
    if self.declared_lossy and not self.lossless:
      verdict += ", as the rule declares"
    lines = [
        verdict,
        f"  worst total variation  {self.total_variation:.2e}  ({where})",
        f"  tokens per round       {self.expected_tokens:.4f}",
        f"  full-information bound {self.bound:.4f}",
        f"  enumerated             {self.models} models, {self.laws:,} laws, "
        f"{self.dtype}",
    ]
    return "\n".join(lines + [f"  defect: {d}" for d in self.defects])


def certify(verifier, *, vocab_sizes=None, gammas=(1, 2, 3, 4), rounds=None,
            seeds=(0,), kinds=KINDS, dtype="float64",
            drafting="autoregressive") -> Certificate:
  """Proves a verifier on chains lossless, or shows the model where it is not.

  Two vocabularies are the least worth trying where there is time: with V = 2
  most real bugs do not show, nor do they where the models ignore their
  context.

  Args:
    verifier: any object with `law(draft, target_probs, state=None)`, and with
      `init` and `commit` if it remembers earlier rounds.
    vocab_sizes: V, each at least 2; default (3, 4), and (3,) for a rule with
      state, whose histories multiply.
    gammas: draft lengths, each at least 1.
    rounds: rounds of the loop, see `enumerate_chains`. One is a proof for a
      rule without state, by induction; default 2, and 3 for one with state.
    seeds: one set of random models for each.
    kinds: see `random_pair`.
    dtype: "float64" or "float32".
    drafting: see `enumerate_chains`.

  Returns:
    A `Certificate`; print it.
  """
  remembers = enumeration.remembers(verifier)
  vocab_sizes = vocab_sizes or ((3,) if remembers else (3, 4))
  rounds = rounds or (3 if remembers else 2)
  if dtype not in _TOLERANCE:
    raise ValueError(f"dtype is {dtype!r}; it must be 'float64' or 'float32'")
  if not gammas or min(gammas) < 1:
    raise ValueError(f"gammas is {gammas}; every draft length must be at "
                     "least 1")
  worst, witness, defects = -1.0, {}, set()
  expected, bounds, laws = [], [], 0
  for vocab_size, gamma, kind, seed in itertools.product(
      vocab_sizes, gammas, kinds, seeds):
    depth = enumeration.depth_of(verifier, gamma, rounds)
    pair = random_pair(kind, vocab_size, depth, seed)
    found = enumeration.enumerate_chains(
        verifier, pair, gamma, rounds, dtype, drafting)
    laws += found.laws
    defects |= found.defects
    expected.append(1 + found.expected_accepted)
    bounds.append(1 + full_information_optimum(pair, gamma))
    if found.total_variation > worst:
      worst = found.total_variation
      witness = dict(kind=kind, vocab_size=vocab_size, seed=seed, gamma=gamma,
                     rounds=rounds)
  return Certificate(
      lossless=worst <= _TOLERANCE[dtype] and not defects,
      total_variation=worst, witness=witness,
      expected_tokens=math.fsum(expected) / len(expected),
      bound=math.fsum(bounds) / len(bounds), defects=tuple(sorted(defects)),
      models=len(expected), laws=laws, dtype=dtype,
      declared_lossy=not getattr(verifier, "lossless", True))
