"""Exact analysis of several rounds of block verification, for optimality.py.

The paper is "Block Verification Accelerates Speculative Decoding". This module
computes tables of the counterexample to its Theorem 2, of the best rules for
several rounds, of the theorems on expected rounds (R and T), and of the
cheapest draft lengths.
"""

from collections.abc import Callable
from collections.abc import Mapping
import fractions
import itertools
import pathlib
from typing import Any

import numpy as np
import tqdm

from lib.figures import style
import specjax as sj
from specjax.methods import stop_rules

_KINDS = ("dense", "zeros", "one_hot_target", "one_hot_draft", "equal",
          "disjoint", "mixed", "ties")
_SIZES = ((2, 1, 5), (2, 2, 5), (2, 3, 5), (2, 4, 6), (3, 1, 4), (3, 2, 4),
          (3, 3, 4))  # V, gamma, length
_ROUNDS = 4
_COSTS = (0.02, 0.05, 0.1, 0.2)
_THRESHOLDS = (0.2, 0.4, 0.6, 0.8)


def counterexample(compiled: Mapping[str, sj.exact.Compiled]) -> list[dict]:
  """Returns expected tokens of block verification and of the rule `Patient`.

  Args:
    compiled: `exact.Compiled` rules by name, including "block".

  Returns:
    One row per pair of models, with gamma, the number of rounds, and a list of
    the expected tokens after each round for both rules. The last row has block
    verification with a longer draft in the place of `Patient`.
  """
  rules = {"block": compiled["block"],
           "patient": sj.exact.Compiled(sj.analysis.Patient())}
  rows = []
  for gamma, rounds in ((2, 3), (3, 2), (4, 2), (5, 2)):
    pair = sj.analysis.patient_pair(gamma, rounds * (gamma + 1))
    row = dict(gamma=gamma, rounds=rounds)
    for name, rule in rules.items():
      row[name] = sj.exact.expected_tokens(rule, pair, gamma, rounds).tolist()
    rows.append(row)
  pair = sj.analysis.patient_pair(5, 14, certain=6)
  rows.append(dict(gamma=5, rounds=2, **{
      name: sj.exact.expected_tokens(rules["block"], pair, gamma, 2).tolist()
      for name, gamma in (("block", 5), ("block_longer", 6))}))
  return rows


def print_counterexample(rows: list[dict[str, Any]]) -> None:
  """Prints the expected tokens after the first and last round, as fractions."""
  print("\nExpected tokens after the first and the last round; Theorem 2 of "
        "the paper fails:")
  print(f"{'gamma':>5s} {'rounds':>6s}  {'block':>12s}  other rule")
  for row in rows:
    name = next(key for key in row if key not in ("gamma", "rounds", "block"))
    other = {"patient": "Patient",
             "block_longer": f"block, gamma {row['gamma'] + 1}"}[name]
    show = lambda tokens: ", ".join(map(as_fraction, (tokens[0], tokens[-1])))
    print(f"{row['gamma']:5d} {row['rounds']:6d}  {show(row['block']):>12s}  "
          f"{show(row[name]):>12s}  {other}")


def best_rules(compiled: Mapping[str, sj.exact.Compiled],
               rows: list[dict[str, Any]]) -> dict[str, Any]:
  """Returns tables of the best valid rule for several rounds.

  Args:
    compiled: `exact.Compiled` rules by name, including "block".
    rows: result of `counterexample`.

  Returns:
    A dictionary with three entries. "best_tokens" has the expected tokens after
    the last round on the models of the counterexample, and the number of caps
    of the best rule. "best_quantiles" has the probability of at most this
    number of rounds for a sequence, on the models with gamma 3. "best_random"
    has the number of random pairs (gamma 3, two rounds), and the number of
    pairs whose best rule has caps. Without caps it is block verification.
  """
  tokens, quantiles = [], []
  for row in rows:
    if "patient" in row:
      gamma, rounds = row["gamma"], row["rounds"]
      best = sj.analysis.best_rule_over_rounds(
          sj.analysis.patient_pair(gamma, rounds * (gamma + 1)), gamma, rounds)
      tokens.append(dict(
          gamma=gamma, rounds=rounds, block=row["block"][-1],
          patient=row["patient"][-1], best=best.tokens, caps=len(best.caps)))
  rules = {"block": compiled["block"],
           "patient": sj.exact.Compiled(sj.analysis.Patient())}
  for length, rounds in ((5, 2), (6, 2), (7, 2), (7, 3), (8, 3)):
    pair = sj.analysis.patient_pair(3, length + 3)
    quantiles.append(dict(length=length, rounds=rounds) | {
        name: float(sj.analysis.rounds_distribution(
            rule, pair, 3, length).probs[:rounds + 1].sum())
        for name, rule in rules.items()} | dict(
            best=sj.analysis.best_quantile(pair, 3, length, rounds)))
  capped = [
      bool(sj.analysis.best_rule_over_rounds(
          sj.exact.random_pair(kind, 2, 8, seed), 3, 2).caps)
      for seed in range(10) for kind in ("dense", "zeros", "mixed", "ties")]
  return dict(best_tokens=tokens, best_quantiles=quantiles,
              best_random=dict(pairs=len(capped), capped=sum(capped)))


def print_best_rules(tables: dict[str, Any]) -> None:
  """Prints the results of `best_rules`, probabilities and tokens as fractions.
  """
  for rows, first, title in (
      (tables["best_tokens"], "gamma", "Expected tokens after the last round"),
      (tables["best_quantiles"], "length",
       "P(at most this number of rounds for the length), gamma 3")):
    print(f"\n{title}; best: over all valid rules:")
    print(f"{first:>6s} {'rounds':>6s} {'block':>8s} {'Patient':>8s} "
          f"{'best':>8s}")
    for row in rows:
      print(f"{row[first]:6d} {row['rounds']:6d} " + " ".join(
          f"{as_fraction(row[name]):>8s}"
          for name in ("block", "patient", "best")))
  random = tables["best_random"]
  print(f"The best rule for gamma 3 and two rounds has caps on "
        f"{random['capped']} of {random['pairs']} random pairs.")


def plot_best_rules(tables: dict[str, Any], path: pathlib.Path) -> None:
  """Plots expected tokens and probabilities of the best rules as bars."""
  figure, grid = style.panels(1, 2)
  for axes, rows, name, tick in (
      (grid[0, 0], tables["best_tokens"], "gamma", "gamma {},\n{} rounds"),
      (grid[0, 1], tables["best_quantiles"], "length",
       "{} tokens,\n{} rounds")):
    for side, rule, label, color in (
        (-0.27, "block", "block", style.color("block")),
        (0, "patient", "Patient", "black"),
        (0.27, "best", "best valid rule", style.looks(7)[6]["color"])):
      axes.bar(np.arange(len(rows)) + side, [row[rule] for row in rows], 0.27,
               color=color, label=label)
    axes.set_xticks(range(len(rows)), [
        tick.format(row[name], row["rounds"]) for row in rows], fontsize=8)
  grid[0, 0].set(ylabel="expected tokens")
  grid[0, 1].set(ylabel="P(tokens within rounds)")
  style.save(figure, path, "Best valid rule for several rounds, on the models "
             "of the counterexample")


def as_fraction(value: float) -> str:
  """Returns the simplest fraction within 1e-12 of a number, or the number."""
  near = fractions.Fraction(value).limit_denominator(1000)
  return str(near) if abs(float(near) - value) < 1e-12 else f"{value:.6f}"


def _ties(vocab: int, depth: int, seed: int):
  """Returns a pair of models with multiples of 1/4 as probabilities.

  So many probability ratios are equal.
  """
  rng = np.random.default_rng([vocab, seed])
  table = lambda n: rng.multinomial(
      4, np.full(vocab, 1 / vocab), size=vocab**n) / 4
  return sj.exact.Pair(*([table(n) for n in range(depth)] for _ in "pq"))


def theorems(compiled: Mapping[str, sj.exact.Compiled],
             pairs: int) -> list[dict]:
  """Returns the margins by which both theorems hold, one row per random pair.

  Args:
    compiled: `exact.Compiled` rules by name, including "block" and "token".
    pairs: number of pairs of models. Every second pair has an eos.
  """
  kinds = list(itertools.product(_SIZES, _KINDS, (None, 1)))
  rows = []
  for number in tqdm.trange(pairs, unit="pair", desc="rounds of a text",
                            dynamic_ncols=True):
    seed, case = divmod(number, len(kinds))
    (vocab, gamma, length), kind, eos = kinds[case]
    depth = length + gamma
    pair = (_ties(vocab, depth, seed) if kind == "ties"
            else sj.exact.random_pair(kind, vocab, depth, seed))
    row = dict(kind=kind, vocab=vocab, gamma=gamma, length=length, eos=eos,
               seed=seed)
    settings = dict(pair=pair, gamma=gamma, length=length, eos=eos)
    block = sj.analysis.remaining_rounds(compiled["block"], **settings)
    fewest = sj.analysis.fewest_remaining_rounds(**settings)
    row["lp_gap"] = float(np.abs(block - fewest).max())
    row["value_margin"] = _value_margin(compiled["block"], block, settings)
    if eos is None:  # all sequences have the same length
      behind = [np.cumsum(sj.analysis.progress_given_text(
          compiled[name], pair, gamma, length, _ROUNDS), axis=-1)
                for name in ("token", "block")]
      row["text_margin"] = float((behind[0] - behind[1]).min())
    else:
      row["text_margin"] = None
    rows.append(row)
  return rows


def _value_margin(rule: sj.exact.Compiled, rounds: np.ndarray,
                  settings: dict[str, Any]):
  """Returns the minimum over contexts c of D(c) - q(p = 0 or eos | c).

  D(c) is the number of expected rounds that one more token saves. The second
  term is the drafter's total probability of eos and of tokens that the target
  never generates. Theorem R requires that the difference is not negative.
  """
  length, eos = settings["length"], settings["eos"]
  p, q = (np.concatenate(tables[:length]) for tables in settings["pair"])
  unseen = np.where(p > 0, 0, q)
  if eos is not None:
    unseen[:, eos] = q[:, eos]
  value = sj.analysis.token_value(rule, **settings)
  return float((value - unseen.sum(-1))[rounds > 0].min())


def print_theorems(rows: list[dict[str, Any]]) -> dict[str, float]:
  """Prints and returns the worst margin of each theorem."""
  texts = [r["text_margin"] for r in rows if r["text_margin"] is not None]
  worst = {"lp_gap": max(r["lp_gap"] for r in rows),
           "value_margin": min(r["value_margin"] for r in rows),
           "text_margin": min(texts, default=0.0)}
  eos = sum(r["eos"] is not None for r in rows)
  print(f"\n{len(rows)} random pairs ({', '.join(_KINDS)}; {eos} with an eos); "
        "worst over all contexts:")
  for name, text in (
      ("lp_gap", "Theorem R: |block - fewest expected rounds by LP|"),
      ("value_margin", "Theorem R: least D(c) - q(p = 0 | c)"),
      ("text_margin", f"Theorem T: block ahead of token, 1 to {_ROUNDS} "
                      f"rounds, {len(texts)} pairs")):
    print(f"  {text:62s}{worst[name]:9.1e}")
  return worst


def _within(length: int, ended: Callable = lambda drafts: drafts):
  """Returns a function that shortens drafts.

  The function applies `ended`. It then cuts the drafts so that a round with its
  next token does not generate more than `length` tokens in total.
  """
  def within(drafts):
    drafts = ended(drafts)
    first = np.cumsum([0, *(3**n for n in range(2 * length))])
    written = np.searchsorted(first, drafts.contexts[:, 0], "right") - 1
    return drafts.cut(np.maximum(length - written - 1, 0))

  return within


def _stop_rules(gamma: int, length: int) -> dict[str, list[Callable]]:
  """Returns the stop rules of every family, as functions that shorten drafts.
  """
  families = {
      "confidence": [
          stop_rules.Confidence(threshold=t) for t in _THRESHOLDS],
      "confidence, likeliest": [
          stop_rules.Confidence(threshold=t, likeliest=True)
          for t in _THRESHOLDS],
      "entropy (AdaEDL)": [
          stop_rules.Entropy(threshold=t) for t in _THRESHOLDS],
      "product of q": [
          stop_rules.Scheduler(speeds=tuple(
              1 / (1 + price * k) for k in range(gamma + 1)))
          for price in _COSTS]}
  return {"fixed length": [_within(length)]} | {
      name: [_within(length, sj.exact.ended_by(rule)) for rule in rules]
      for name, rules in families.items()}


def draft_lengths(compiled: Mapping[str, sj.exact.Compiled],
                  pairs: int = 12) -> list[dict]:
  """Returns the mean cost of a sequence by stop rule and price.

  The price is the cost of a drafted token. The unit of costs is a target call,
  so the cost of a sequence is rounds + price * drafted tokens. For each price
  and family of stop rules, the threshold and the maximum gamma are those with
  the smallest mean cost over all pairs of models. No draft exceeds the end of
  the sequence.

  Args:
    compiled: `exact.Compiled` rules by name, including "block".
    pairs: number of pairs of models.
  """
  gamma, length = 4, 5
  ended = _stop_rules(gamma, length)
  models = [sj.exact.random_pair(kind, 3, length + gamma, seed)
            for seed in range(pairs // 2) for kind in ("dense", "mixed")]
  rows = []
  for price in tqdm.tqdm(_COSTS, unit="price", desc="draft lengths",
                         dynamic_ncols=True):
    cost = lambda pair, gamma, ended, price=price: (
        sj.analysis.remaining_rounds(compiled["block"], pair, gamma, length,
                                  ended=ended, token_cost=price)[0])
    row = dict(token_cost=price, best=float(np.mean([
        sj.analysis.best_draft_lengths(pair, gamma, length, price).cost[0]
        for pair in models])))
    for name, stops in ended.items():
      row[name] = min(
          float(np.mean([cost(pair, gamma=most, ended=stop)
                         for pair in models]))
          for stop in stops
          for most in range(name != "fixed length", gamma + 1))
    rows.append(row)
  return rows


def print_draft_lengths(rows: list[dict[str, Any]]) -> None:
  """Prints the optimal costs, and the excess costs of all stop rules."""
  names = [name for name in rows[0] if name not in ("token_cost", "best")]
  print("\nCost of 5 tokens in target calls with block verification, and its "
        "excess in % under other stop rules:")
  print(f"{'price of a drafted token':>24s} {'best':>7s}  " + "  ".join(
      f"{name:>12s}" for name in names))
  for row in rows:
    excess = "  ".join(
        f"{100 * (row[name] / row['best'] - 1):{max(12, len(name))}.1f}"
        for name in names)
    print(f"{row['token_cost']:24g} {row['best']:7.4f}  {excess}")


def plot_counterexample(path: pathlib.Path) -> None:
  """Plots the distribution of tokens after two rounds of the counterexample.

  The draft length gamma is 3.
  """
  gamma, rounds = 3, 2
  longest = rounds * (gamma + 1)
  pair = sj.analysis.patient_pair(gamma, longest + gamma)
  texts = np.ones(1)
  for table in pair.p[:longest]:
    texts = (texts[:, None] * table).reshape(-1)
  figure, [[axes]] = style.panels()
  for side, name, color, rule in (
      (-0.2, "block", style.color("block"), sj.verifiers.Block()),
      (0.2, "Patient", "black", sj.analysis.Patient())):
    progress = sj.analysis.progress_given_text(
        rule, pair, gamma, longest, rounds)
    probs = texts @ progress[-1]
    mean = probs @ np.arange(longest + 1)
    axes.bar(np.arange(longest + 1) + side, probs, 0.4, color=color,
             label=f"{name}, mean {as_fraction(mean)}")
  axes.set(xlabel="tokens after two rounds", ylabel="probability",
           xlim=(3.4, longest + 0.6))
  style.save(figure, path, "Block verification is not optimal in the tokens "
             "after two rounds, gamma 3")
