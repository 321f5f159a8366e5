"""Tests whether block verification is optimal, and how much it can gain.

The script checks the theorems of "Block Verification Accelerates Speculative
Decoding" (Sun et al. 2024, arXiv:2403.10444) on the code of specjax. All
expectations are computed exactly by enumeration of drafts, without sampling. No
language model is loaded. The pairs of models are small probability tables.

A verification rule is valid if the tokens of one round, continued by the
target, have the target's distribution from every context. Result: no valid rule
accepts more tokens in one round than block verification, and none needs fewer
expected rounds for a sequence. But some valid rules have more expected tokens
after two rounds. The script computes the best rule for several rounds, and an
upper bound on the gain of block over token verification in one round.

This command takes about six minutes on two CPU cores:

  python experiments/optimality.py

A smaller and faster run:

  python experiments/optimality.py --largest=3 --seeds=1 --gamma=2 \\
    --round_pairs=50

Output: nine tables on stdout; optimality.csv, optimality.json and six plots in
--output_dir. The tables are:

  rounds      Expected tokens after 1, 2, ... rounds of the paper's Bernoulli
              example. Greedy block verification is ahead after the first round,
              and block verification from the third round on.
  one round   Largest deviation of the code from each theorem, on random pairs
              of a target and a drafter that depend on the context. It is 0 up
              to rounding if the theorem holds:
              Theorem 2: no valid rule accepts more tokens than block
              verification (linear program over all valid rules).
              Lemma 4: no valid rule accepts a prefix with a larger probability
              (the same program with random weights of prefixes).
              Theorem 3: greedy block verification attains the optimum of
              lossless rules that know both models completely (full
              information).
              Lemma 8: this optimum equals the optimum of a transport problem.
              Dual certificate: an upper bound on the accepted tokens of all
              lossless rules, in exact fractions, equals the value of block
              verification.
  two rounds  A valid rule with more expected tokens than block verification
              after two rounds (draft length gamma 3, 4, 5) or three (gamma 2).
              Also a pair of models for which a longer draft gives fewer tokens.
              All values are fractions.
  best rules  Expected tokens after two or three rounds of block verification,
              of this rule and of the best valid rule, on the same models. Also
              the probability that a sequence needs at most a number of rounds.
              The best rule is block verification with caps on its acceptance
              probabilities. It uses both models at contexts beyond the draft,
              so it is a bound and not a rule for decoding.
  sequences   Largest deviation from two theorems on random pairs.
              Theorem R: no valid rule needs fewer expected rounds for a
              sequence of any length than block verification. It is checked by
              linear programs over all valid rules at every context c. It is
              also checked by D(c), the number of expected rounds that one more
              token saves.
              Theorem T: for every sequence and number of rounds, block
              verification has emitted at least as many tokens as token
              verification.
  lengths     Mean cost of a sequence (rounds, plus a cost per drafted token),
              for the draft length of optimal stopping and for other stop rules.
  extremal    The largest ratio (1 + E[tau_block]) / (1 + E[tau_token]) of one
              round over all models, where tau is the number of accepted tokens.
              Gradient ascent searches for these models. The column "supremum"
              is computed by dynamic programming on a grid, so it is neither
              an upper nor a lower bound. For gamma 2 and 3 it agrees with the
              exact value within 1e-7.
              The column "bound" is an upper bound. The proofs are in
              docs/results/several_rounds_proofs.md.
  growth      The same ratio for explicit pairs of models up to gamma 4,096,
              and the upper bound. Both grow linearly in gamma.
  constant    The limit superior of (largest ratio) / gamma, approximated on
              grids. These values are not bounds.

The plots are optimality_rounds.png, optimality_pairs.png,
optimality_two_rounds.png, optimality_best_rules.png, optimality_extremal.png
and optimality_growth.png.
The last line of stdout names optimality.json.
"""

import itertools
import sys
from typing import Any

from lib import common  # before jax, which takes long to import

# isort: split
from absl import flags
import jax
import jax.numpy as jnp
from lib import flags as shared
from lib.figures import style
from lib.reports import growth
from lib.reports import optimality_report as report
from lib.reports import several_rounds
import numpy as np
import optax
import tqdm

import specjax as sj

_SEEDS = flags.DEFINE_integer(
    "seeds", 8, "Number of random pairs of models for every vocabulary size, "
    "draft length and kind of pair, in the table 'one round'", 1)
_SIZES = flags.DEFINE_integer(
    "largest", 4, "Largest vocabulary size V and largest draft length gamma of "
    "the pairs in the table 'one round', from 2 to 4. All values from 2 up to "
    "it are tested", 2, 4)
_ROUND_PAIRS = flags.DEFINE_integer(
    "round_pairs", 1008, "Number of random pairs of models in the table "
    "'sequences'", 1)
_GAMMAS = shared.gammas(
    "2,3,4,8", "Draft lengths in tokens, at most 12, in the table 'extremal', "
    "comma-separated")
_STEPS = shared.steps(
    4000, "Number of steps of gradient ascent in the table 'extremal'")
_STARTS = flags.DEFINE_integer(
    "starts", 16, "Number of random starts of gradient ascent in the table "
    "'extremal'. Cases with more than 300 possible drafts use a quarter of it",
    1)
_OUTPUT_DIR = shared.output_dir("results/optimality")
shared.figure_style()

_KINDS = ("dense", "zeros", "mixed")
_RULES = {"token": sj.verifiers.Token(), "block": sj.verifiers.Block(),
          "greedy_block": sj.verifiers.GreedyBlock()}
_COMPILED = {name: sj.exact.Compiled(rule) for name, rule in _RULES.items()}
_ROUNDS = 4
_LEAVES = 4096  # maximum number of drafts of a pair in gradient ascent


def _bernoulli():
  """Prints and returns expected tokens after 1 to 4 rounds, by rule.

  The pair of models is the Bernoulli example of the paper.
  """
  gamma = 2
  pair = sj.exact.iid_pair((1 / 3, 2 / 3), (2 / 3, 1 / 3),
                           _ROUNDS * (gamma + 1))
  table = {name: sj.exact.expected_tokens(rule, pair, gamma, _ROUNDS).tolist()
           for name, rule in _COMPILED.items()}
  print("Bernoulli example, p = (1/3, 2/3), q = (2/3, 1/3), gamma = 2:")
  print(f"{'expected tokens after round':28s}"
        + "".join(f"{r + 1:9d}" for r in range(_ROUNDS)))
  for name, totals in table.items():
    print(f"{style.label(name):28s}" + "".join(f"{x:9.3f}" for x in totals))
  return table


def _block_value(pair: sj.exact.Pair, gamma: int, weights: list[np.ndarray]):
  """Returns the expected weight of prefixes accepted by block verification.

  The value is E[sum_{i<=tau} w_i(X^i)]. tau is the number of accepted tokens,
  and X^i the first i draft tokens.

  Args:
    pair: models of target and drafter.
    gamma: draft length.
    weights: `weights[i - 1]` `[V**i]` contains the weight w_i of each X^i.
  """
  digits, rows = _drafts(pair.vocab_size, gamma)
  p, q = (np.stack([tables[i][rows[:, i]] for i in range(gamma)], axis=1)
          for tables in (pair.p, pair.q))
  with jax.enable_x64(True):
    survival, drawn = map(np.asarray, _survival("block", digits, p, q))
  return sum(
      (drawn * survival[:, i] * weights[i - 1][rows[:, i] if i < gamma else
                                               np.arange(len(drawn))]).sum()
      for i in range(1, gamma + 1))


def _theorems():
  """Returns one row per random pair of models.

  A row contains the expected accepted tokens of every rule, and the differences
  between two values that are equal according to a theorem ("gaps").
  """
  sizes = range(2, _SIZES.value + 1)
  cases = list(itertools.product(sizes, sizes, _KINDS, range(_SEEDS.value)))
  rows = []
  for vocab, gamma, kind, seed in tqdm.tqdm(cases, unit="pair",
                                            dynamic_ncols=True):
    pair = sj.exact.random_pair(kind, vocab, gamma + 1, seed)
    row = dict(vocab=vocab, gamma=gamma, kind=kind, seed=seed)
    for name, rule in _COMPILED.items():
      tokens = sj.exact.expected_tokens(rule, pair, gamma, rounds=1)
      row[name] = float(tokens[0]) - 1
    row["full_information"] = sj.exact.full_information_optimum(pair, gamma)
    row["lp_gap"] = sj.analysis.verifier_optimum(pair, gamma) - row["block"]
    rng = np.random.default_rng([vocab, gamma, seed])
    weights = [rng.exponential(size=vocab**i) for i in range(1, gamma + 1)]
    row["prefix_gap"] = (sj.analysis.verifier_optimum(pair, gamma, weights)
                         - _block_value(pair, gamma, weights))
    row["transport_gap"] = (sj.analysis.transport_optimum(pair, gamma)
                            - row["full_information"])
    certificate = sj.analysis.dual_bound(
        pair, range(-1, gamma), "iid", sj.analysis.chain_potential(pair, gamma))
    row["certificate_gap"] = float(certificate) - row["block"]
    row["greedy_gap"] = row["full_information"] - row["greedy_block"]
    rows.append(row)
  return rows


def _print_theorems(rows: list[dict[str, Any]]):
  worst = {name: max(abs(r[name]) for r in rows) for name in (
      "lp_gap", "prefix_gap", "certificate_gap", "greedy_gap",
      "transport_gap")}
  ordered = all(r["token"] <= r["block"] + 1e-12
                and r["block"] <= r["full_information"] + 1e-12 for r in rows)
  print(f"\n{len(rows)} random pairs, V and gamma 2..{_SIZES.value}, kinds "
        f"{', '.join(_KINDS)}; largest absolute gap:")
  for name, what in (
      ("lp_gap", "Theorem 2, one round: LP over valid verifiers - block"),
      ("prefix_gap", "Lemma 4: the same under random prefix weights"),
      ("certificate_gap", "Dual certificate in fractions - block"),
      ("greedy_gap", "Theorem 3: full information - greedy block, one round"),
      ("transport_gap", "Lemma 8: transport LP - sum of min(p, q)")):
    print(f"  {what:56s}{worst[name]:9.1e}")
  print(f"  token <= block <= full information in every pair: {ordered}")
  mean = {name: np.mean([r[name] for r in rows]) for name in (
      "token", "block", "full_information")}
  print("  mean accepted: " + ", ".join(f"{k} {v:.4f}"
                                        for k, v in mean.items()))
  return worst, ordered


def _drafts(vocab: int, gamma: int):
  """Returns all drafts and the table rows of their prefixes.

  Both have shape `[V**gamma, gamma]`.
  """
  drafts = np.arange(vocab**gamma)
  rows = np.stack([drafts // vocab**(gamma - i) for i in range(gamma)], axis=1)
  last = [*rows.T[1:], drafts]
  return np.stack(last, axis=1) % vocab, rows


def _survival(name: str, digits: np.ndarray, p: jax.Array, q: jax.Array):
  """Returns the survival and the probability of every draft.

  The survival is the probability that a rule accepts at least i tokens, for
  every prefix length i.

  Args:
    name: rule name, a key of `_RULES`.
    digits: `[drafts, gamma]` tokens of every draft.
    p: `[drafts, gamma, V]` target distributions along every draft.
    q: `[drafts, gamma, V]` draft distributions along every draft.

  Returns:
    `(survival [drafts, gamma + 1], q [drafts])`.
  """
  # A rule expects one target distribution more than draft tokens, for the bonus
  # token. The survival does not depend on this distribution, so the last one is
  # repeated.
  p = jnp.concatenate([p, p[:, -1:]], axis=1)
  survive = jax.vmap(lambda tokens, p, q: _RULES[name].survival(
      sj.Draft.chain(0, tokens, q), p))(digits, p, q)
  drawn = jnp.take_along_axis(q, digits[..., None], axis=2)[..., 0]
  return survive, jnp.prod(drawn, axis=1)


def _ascend(vocab: int, gamma: int, iid: bool):
  """Returns the largest ratio of expected tokens found by gradient ascent.

  The ratio is that of block verification over token verification in one round.

  Args:
    vocab: vocabulary size.
    gamma: draft length.
    iid: if True, the models do not depend on the context.
  """
  digits, rows = _drafts(vocab, gamma)
  starts = np.cumsum([0, *(vocab**d for d in range(gamma))])
  rows = np.zeros_like(rows) if iid else rows + starts[:-1]
  contexts = 1 if iid else int(starts[-1])

  def ratio(logits):
    p, q = jax.nn.softmax(logits)[:, rows]
    tokens = []
    for name in ("block", "token"):
      survive, drawn = _survival(name, digits, p, q)
      tokens.append(1 + drawn @ jnp.sum(survive[:, 1:], axis=1))
    return tokens[0] / tokens[1]

  optimizer = optax.adam(optax.cosine_decay_schedule(0.2, _STEPS.value))
  gradient = jax.vmap(jax.grad(lambda logits: -jnp.log(ratio(logits))))

  @jax.jit
  def ascend(logits):
    def step(carry, _):
      logits, state = carry
      updates, state = optimizer.update(gradient(logits), state)
      return (optax.apply_updates(logits, updates), state), None

    carry = (logits, optimizer.init(logits))
    (logits, _), _ = jax.lax.scan(step, carry, length=_STEPS.value)
    return jax.vmap(ratio)(logits)

  starts = _STARTS.value if len(digits) <= 300 else -(-_STARTS.value // 4)
  with jax.enable_x64(True):
    logits = jax.random.normal(
        jax.random.key(0), (starts, 2, contexts, vocab), jnp.float64)
    return float(jnp.nanmax(ascend(logits)))


def _extremal(gammas: list[int]):
  print("\nlargest (1 + E[tau_block]) / (1 + E[tau_token]) in one round:")
  print(f"{'gamma':>5s} {'V':>2s} {'models':8s} {'ascent':>8s} "
        f"{'two-phase':>9s} {'supremum':>8s} {'bound':>6s}")
  cases = [case for case in itertools.product(gammas, (2, 3, 4), (True, False))
           if case[1]**case[0] <= _LEAVES]
  suprema, rows = {}, []
  for gamma, vocab, iid in tqdm.tqdm(cases, unit="ascent", dynamic_ncols=True):
    if gamma not in suprema:
      suprema[gamma] = growth.supremum(gamma)
    row = dict(gamma=gamma, vocab=vocab, ratio=_ascend(vocab, gamma, iid),
               models="i.i.d." if iid else "context",
               two_phase=growth.two_phase(gamma), supremum=suprema[gamma],
               bound=growth.ratio_bound(gamma))
    rows.append(row)
    print(f"{gamma:5d} {vocab:2d} {row['models']:8s} {row['ratio']:8.3f} "
          f"{row['two_phase']:9.3f} {row['supremum']:8.3f} "
          f"{row['bound']:6.3f}", flush=True)
  return rows


def main():
  gammas = common.draft_lengths("--gamma", _GAMMAS.value)
  if 2**max(gammas) > _LEAVES:
    raise ValueError(f"--gamma contains {max(gammas)}; gradient ascent "
                     f"enumerates all drafts, at most {_LEAVES}: set lengths "
                     f"of at most {_LEAVES.bit_length() - 1}")
  output_dir = common.output_directory(_OUTPUT_DIR.value, "study")
  common.claim(output_dir, "optimality")
  print("compiling the rules; the whole study takes minutes", file=sys.stderr,
        flush=True)
  bernoulli = _bernoulli()
  rows = _theorems()
  worst, ordered = _print_theorems(rows)
  two_rounds = several_rounds.counterexample(_COMPILED)
  several_rounds.print_counterexample(two_rounds)
  best_rules = several_rounds.best_rules(_COMPILED, two_rounds)
  several_rounds.print_best_rules(best_rules)
  texts = several_rounds.theorems(_COMPILED, _ROUND_PAIRS.value)
  margins = several_rounds.print_theorems(texts)
  lengths = several_rounds.draft_lengths(_COMPILED)
  several_rounds.print_draft_lengths(lengths)
  extremal = _extremal(gammas)
  explicit = growth.table()
  constants = growth.constants()
  found = {
      "bernoulli": bernoulli, "pairs": len(rows),
      "max_lp_gap": worst["lp_gap"], "max_prefix_gap": worst["prefix_gap"],
      "max_certificate_gap": worst["certificate_gap"],
      "max_full_information_gap": worst["greedy_gap"],
      "max_transport_gap": worst["transport_gap"], "ordered": ordered,
      "two_rounds": two_rounds, **best_rules, "round_pairs": len(texts),
      **margins,
      "draft_lengths": lengths, "extremal": extremal, "growth": explicit,
      "constant": constants}
  common.write_csv(output_dir / "optimality.csv", rows)
  report.draw(output_dir, rows, found)
  print(f"wrote optimality.csv and six figures to {output_dir}")
  common.finish(output_dir, "optimality", found)


if __name__ == "__main__":
  common.run(main)
