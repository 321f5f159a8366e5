"""Compares budgets that share verified tokens over the rows of a batch.

  python experiments/runs/budgets.py OUTPUT.csv

The bundled target decodes the 48 bundled prompts at temperature 1 with drafts
of 8 tokens of the draft model `small`. Batches of 4 recorded prompts then share
a number of verified tokens. Every budget verifies the same total number.
Results are in docs/results/budgets.md. The command takes about four minutes on
two CPU cores.

The estimated acceptance is fitted on one half of the prompts and used on the
other, so it is history of the evaluated rounds. The row `best possible` takes
the tokens with the largest probability of acceptance given the draft. It reads
p, so it is a bound and not a budget. It is computed for token verification
only, of which the probability of accepting i tokens does not depend on later
tokens.
"""

import pathlib
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).parents[1]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from lib import common  # noqa: E402
from lib.prompts import reading as prompts_lib  # noqa: E402
import numpy as np  # noqa: E402

import specjax as sj  # noqa: E402
from specjax import analysis  # noqa: E402
from specjax.data import prompt_sets  # noqa: E402

GAMMA, ROWS, NEW_TOKENS, SEED = 8, 4, 128, 0
PER_ROW = (1, 2, 3, 4, 6)  # verified tokens per row
RULES = {"token": sj.verifiers.Token(), "block": sj.verifiers.Block()}
BINS = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99])


def drawn(probs, tokens):
  """Returns q `[R, gamma]` of the drafted tokens."""
  return jnp.take_along_axis(probs, tokens[..., None], -1)[..., 0]


def before(x):
  """Returns the product of the entries before each one."""
  return jnp.cumprod(jnp.concatenate(
      [jnp.ones_like(x[:, :1]), x[:, :-1]], axis=1), axis=1)


def budgets(rates, nodes):
  """Returns {name: (is exact, function for `analysis.evaluate_budget`)}.

  `rates` are the estimated acceptance rates of tokens by their largest q.
  """
  scores = {
      "product of the largest q": (True, lambda q, largest: jnp.cumprod(
          largest, axis=1)),
      "q of earlier tokens, then the largest q": (
          True, lambda q, largest: before(q) * largest),
      "estimated acceptance": (True, lambda q, largest: jnp.cumprod(
          jnp.asarray(rates)[jnp.digitize(largest, BINS)], axis=1)),
      "q of the drafted tokens (D-Cut)": (
          False, lambda q, largest: jnp.cumprod(q, axis=1)),
  }
  shared = lambda score: lambda probs, tokens: analysis.best_first(
      score(drawn(probs, tokens), probs.max(-1)), nodes)
  fixed = lambda probs, tokens: jnp.full(len(tokens), nodes // len(tokens))
  return {"fixed length": (True, fixed), **{
      name: (is_exact, shared(score))
      for name, (is_exact, score) in scores.items()}}


def acceptance_rates(record):
  """Returns the acceptance rates of tokens by bins of their largest q."""
  accepted, reached = np.zeros(len(BINS) + 1), np.full(len(BINS) + 1, 1e-9)
  for rollout in record:
    where = np.digitize(rollout.trace.draft.probs[:, 1:].max(-1), BINS)
    np.add.at(accepted, where, rollout.survival[:, 1:])
    np.add.at(reached, where, rollout.survival[:, :-1])
  return accepted / reached


def best(record, nodes):
  """Returns the largest expected accepted tokens of every batch and round."""
  survival = analysis.evaluate(record, RULES["token"]).survival
  sums = []
  for i in range(0, len(survival) - ROWS + 1, ROWS):
    rounds = min(map(len, survival[i:i + ROWS]))
    every = np.stack([x[:rounds, 1:] for x in survival[i:i + ROWS]], 1)
    largest = -np.sort(-every.reshape(rounds, -1), axis=1)[:, :nodes]
    sums.append((largest.sum(dtype=np.float64), rounds * ROWS))
  return sums


def main(output: str):
  pair = sj.zoo.load()
  target, small = pair.target, pair.drafters["small"]
  decoder = sj.Decoder(
      target=target.model, verifier=RULES["token"],
      drafter=sj.drafters.draft_model(model=small.model, gamma=GAMMA),
      transform=sj.LogitsTransform(temperature=1.0))
  prompts = prompts_lib.read(
      pair.tokenizer, list(prompt_sets.EMBEDDED), field=None, count=12,
      tokens=64, seed=SEED, chat=False).all
  # Neighbours in this order are of different sets.
  prompts = [prompts[i] for i in np.random.default_rng(SEED).permutation(
      len(prompts))]
  with tempfile.TemporaryDirectory() as path:
    halves = [analysis.record(
        decoder, {"target": target.params, "drafter": small.params},
        prompts[i::2], jax.random.key(SEED + i), pathlib.Path(path) / str(i),
        max_new_tokens=NEW_TOKENS, batch=ROWS) for i in range(2)]
    common.write_csv(pathlib.Path(output), rows_of(halves))


def rows_of(halves):
  """Returns the rows of the table."""
  rows, rates = [], [acceptance_rates(half) for half in reversed(halves)]
  for rule, verifier in RULES.items():
    for per_row in PER_ROW:
      nodes = per_row * ROWS
      sums = {name: [] for name in budgets(rates[0], nodes)}
      for half, rate in zip(halves, rates):
        for name, (_, budget) in budgets(rate, nodes).items():
          found = analysis.evaluate_budget(half, verifier, budget, ROWS)
          sums[name] += [
              (sum(x.sum(dtype=np.float64) for x in batch),
               sum(map(len, batch)))
              for batch in (found.expected[i:i + ROWS] for i in range(
                  0, len(found.expected), ROWS))]
      if rule == "token":
        sums["best possible"] = [
            x for half in halves for x in best(half, nodes)]
      exact = {name: is_exact for name, (is_exact, _) in budgets(
          rates[0], nodes).items()}
      base = list(zip(*sums["fixed length"]))
      for name, batches in sums.items():
        totals, counts = zip(*batches)
        rows.append({
            "budget": name, "exact": exact.get(name, ""), "rule": rule,
            "per_row": per_row,
            "tokens": float(1 + sum(totals) / sum(counts)),
            **analysis.relative_gain(totals, counts, *base).columns("gain")})
        print(rows[-1], flush=True)
  return rows


if __name__ == "__main__":
  main(*sys.argv[1:])
