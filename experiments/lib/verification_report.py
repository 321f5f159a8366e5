"""Tables and figures of verification_study.py, from the runs of its decoders.

A unit is one rollout of one prompt by every arm: (fingerprint, temperature,
seed, prompt set, index, digest of the prompt).
"""

import statistics

import numpy as np

from lib import common
from specjax import analysis
from specjax import contract

BASELINE = "autoregressive"
_TABLE_GAMMA = 8  # of the tables by prompt set and by temperature
_Z = 1.96  # standard errors of an interval of 95 %
_FEWEST = 12  # prompts of which an error is estimated


def key(drafter, gamma, verifier):
  """The name of an arm in runs.jsonl."""
  return f"{drafter} {gamma} {verifier}"


def shared_key(drafter):
  """The name of the arm whose drafts all rules are judged on.

  It is token verification at the largest gamma, whose own rollouts these are.
  """
  return f"{drafter} shared"


class Study:
  """The runs of all arms, and the figures of every cell.

  Attributes:
    runs: {unit: {arm: its run}}.
    costs: seconds {"verify": {gamma: ...}, "draft": {drafter: ...}}, which
      only `rows` needs.
  """

  def __init__(self, runs, drafters, gammas, verifiers, costs=None):
    self._runs, self._costs = runs, costs
    self._drafters, self._gammas, self._verifiers = drafters, gammas, verifiers

  def rows(self, prompts=None):
    """A row for every drafter, temperature, gamma and verifier.

    Args:
      prompts: name of a prompt set; None takes all.
    """
    temperatures = dict.fromkeys(unit[1] for unit in self._runs)
    return [row for drafter in self._drafters for temperature in temperatures
            for row in self._cells(drafter, temperature, prompts)]

  def baseline_speed(self):
    """Tokens a second of autoregressive decoding, over all runs."""
    runs = [arms[BASELINE] for arms in self._runs.values()]
    return sum(r["tokens"] for r in runs) / sum(r["seconds"] for r in runs)

  def interval(self, verifier):
    """The widest 95 % interval of its paired gain over token verification.

    Over drafters, temperatures and draft lengths, on all prompts; None with
    fewer than `_FEWEST` prompts, whose scatter says too little.
    """
    widest = 0.0
    for drafter in self._drafters:
      for temperature in dict.fromkeys(unit[1] for unit in self._runs):
        shared = self._shared(self._units(temperature), drafter)
        if len(shared[1]) < _FEWEST:
          return None
        for gamma in self._gammas:
          paired = self._paired(shared, gamma, verifier)
          widest = max(widest, _Z * paired["paired_improvement_stderr"])
    return widest

  def _units(self, temperature, prompts=None):
    return [unit for unit in self._runs
            if unit[1] == temperature and prompts in (None, unit[3])]

  def _cells(self, drafter, temperature, prompts):
    units = self._units(temperature, prompts)
    shared = self._shared(units, drafter)
    rows = []
    for gamma in self._gammas:
      own = {v: self._own(units, drafter, gamma, v) for v in self._verifiers}
      for verifier in self._verifiers:
        efficiency, error = analysis.ratio_estimate(*own[verifier])
        gain = analysis.relative_gain(*own[verifier], *own["token"])
        rows.append({
            "prompts": prompts or "all", "drafter": drafter, "gamma": gamma,
            "temperature": temperature, "verifier": verifier,
            "num_prompts": len({unit[3:] for unit in units}),
            "lossless": contract.rule(common.VERIFIERS[verifier]).lossless,
            "block_efficiency": 1 + efficiency, "stderr": error,
            "gain": gain[0], "gain_stderr": gain[1],
            **self._paired(shared, gamma, verifier),
            **self._speed(units, drafter, gamma, verifier)})
    return rows

  def _paired(self, shared, gamma, verifier):
    """What a verifier and token verification accept of the same drafts."""
    survival, rounds = shared
    # Of the acting rule, which is first, and then of every rule.
    of_rule = lambda v: survival[:, 1 + self._verifiers.index(v)]
    accepted = {v: of_rule(v)[:, 1:gamma + 1].sum(-1)
                for v in ("token", verifier)}
    paired, error = analysis.ratio_estimate(accepted[verifier], rounds)
    more, more_error = analysis.ratio_estimate(
        accepted[verifier] - accepted["token"], rounds)
    improvement = analysis.relative_gain(
        accepted[verifier], rounds, accepted["token"], rounds)
    return {"paired_block_efficiency": 1 + paired, "paired_stderr": error,
            "paired_gain": more, "paired_gain_stderr": more_error,
            "paired_improvement": improvement[0],
            "paired_improvement_stderr": improvement[1]}

  def _own(self, units, drafter, gamma, verifier):
    """Accepted tokens and rounds of every prompt, `[prompts]` each."""
    return self._sums(
        units, lambda arms: arms[key(drafter, gamma, verifier)],
        lambda run: run["expected"][0])

  def _shared(self, units, drafter):
    """Survival of the acting rule and of each, `[prompts, laws, nodes]`."""
    return self._sums(units, lambda arms: arms[shared_key(drafter)],
                      lambda run: np.array(run["survival"]))

  def _sums(self, units, run_of, figure):
    """A figure and the rounds, summed over the seeds of every prompt."""
    sums = {}
    for unit in units:
      run = run_of(self._runs[unit])
      total, rounds = sums.get(unit[3:], (0, 0))
      sums[unit[3:]] = total + figure(run), rounds + run["rounds"]
    return tuple(map(np.array, zip(*sums.values())))

  def _speed(self, units, drafter, gamma, verifier):
    """Measured and predicted speed-up of one cell, and what a round costs."""
    arm = key(drafter, gamma, verifier)
    halves = [[], []]
    for unit in units:
      halves[unit[4] % 2].append((self._runs[unit][arm],
                                  self._runs[unit][BASELINE]))
    # A round in steps of the same prompt's autoregressive decoding, which saw
    # the same machine.
    steps = [statistics.median(
        (r["seconds"] / r["rounds"]) / (b["seconds"] / b["tokens"])
        for r, b in half) for half in halves]
    measured, predicted = [], []
    for half, steps_there in zip(halves, steps[::-1]):
      for run, baseline in half:
        measured.append(baseline["seconds"] / baseline["tokens"]
                        / (run["seconds"] / run["tokens"]))
        efficiency = 1 + run["expected"][0] / run["rounds"]
        predicted.append(efficiency / steps_there)
    runs = [run for half in halves for run, _ in half]
    per_round = statistics.median(r["seconds"] / r["rounds"] for r in runs)
    alone = (self._costs["verify"][gamma]
             + gamma * self._costs["draft"][drafter])
    return {
        "tokens_per_second": (sum(r["tokens"] for r in runs)
                              / sum(r["seconds"] for r in runs)),
        "speedup": statistics.median(measured),
        "predicted_speedup": statistics.median(predicted),
        "measured_over_predicted": statistics.median(
            np.divide(measured, predicted)),
        "verify_ms": 1e3 * self._costs["verify"][gamma],
        "draft_ms": 1e3 * self._costs["draft"][drafter],
        "overhead_ms": 1e3 * (per_round - alone)}


def _label(row):
  return row["verifier"] + ("" if row["lossless"] else " (LOSSY)")


def print_table(rows):
  """Every cell over all prompts, on stdout."""
  print(f"{'drafter':10s} {'T':>4s} {'gamma':>5s} {'verifier':15s} "
        f"{'block efficiency':>16s} {'paired':>15s} {'gain':>15s} "
        f"{'speed-up':>8s} {'predicted':>9s}")
  for r in rows:
    print(f"{r['drafter'][-10:]:10s} {r['temperature']:4g} {r['gamma']:5d} "
          f"{_label(r):15s} "
          f"{r['block_efficiency']:8.3f} ± {r['stderr']:.3f} "
          f"{r['paired_block_efficiency']:7.3f} ± {r['paired_stderr']:.3f} "
          f"{_percent(r, 'paired_improvement'):>15s} {r['speedup']:7.2f}x "
          f"{r['predicted_speedup']:8.2f}x")
  ratios = [r["measured_over_predicted"] for r in rows]
  print(f"measured over predicted speed-up: {min(ratios):.2f} to "
        f"{max(ratios):.2f}")


def _percent(row, name):
  return (f"{100 * row[name]:+.2f} ± "
          f"{100 * _Z * row[name + '_stderr']:.2f} %")


def write(directory, rows, by_prompts, prompts):
  """verification.csv, .md and .png of all rows."""
  common.write_csv(directory / "verification.csv", rows + by_prompts)
  (directory / "verification.md").write_text(_tables(rows, by_prompts, prompts))
  _plot(rows, directory / "verification.png")


def _tables(rows, by_prompts, prompts):
  """The paper's three tables as Markdown."""
  gammas = sorted({r["gamma"] for r in rows})
  gamma = _TABLE_GAMMA if _TABLE_GAMMA in gammas else max(gammas)
  first = rows[0]["temperature"]
  best = rows[0]["drafter"]
  pick = lambda rows, **want: [
      r for r in rows if all(r[k] == v for k, v in want.items())]
  at_gamma = pick(rows, gamma=gamma)
  by_set = [r for name in (*prompts, "all")
            for r in pick(by_prompts + rows, prompts=name, drafter=best,
                          gamma=gamma, temperature=first)]
  return "\n".join([
      "Block efficiency: tokens of a round, on each verifier's own rollouts. "
      "Gain: over token verification, on own rollouts and paired on the same "
      "drafts (greedy block verification from a fresh state there). Intervals "
      "of 95 % over prompts. Speed-up: over autoregressive decoding.", "",
      f"Table 1. By prompts: gamma {gamma}, temperature {first:g}, drafter "
      f"{best}.", "",
      *_table(by_set, ["prompts"]), "",
      f"Table 2. By drafter and gamma: temperature {first:g}, all prompts.", "",
      *_table(pick(rows, temperature=first), ["drafter", "gamma"]), "",
      f"Table 3. By drafter and temperature: gamma {gamma}, all prompts.", "",
      *_table(at_gamma, ["drafter", "temperature"]), ""])


def _table(rows, labels):
  """A line for every setting, its verifiers side by side."""
  lines = {}
  for r in rows:
    lines.setdefault(tuple(r[label] for label in labels), []).append(r)
  verifiers = [_label(r) for r in next(iter(lines.values()))]
  head = [*labels, *verifiers]
  head += [f"{v}, {what}" for v in verifiers if v != "token"
           for what in ("gain", "paired")]
  head += [f"speed-up {v}" for v in verifiers]
  out = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
  for values, cells in lines.items():
    line = [f"{v:g}" if isinstance(v, float) else str(v) for v in values]
    line += [f"{c['block_efficiency']:.3f}" for c in cells]
    line += [_percent(c, name) for c in cells if c["verifier"] != "token"
             for name in ("gain", "paired_improvement")]
    line += [f"{c['speedup']:.2f}" for c in cells]
    out.append("| " + " | ".join(line) + " |")
  return out


def _plot(rows, path):
  import matplotlib  # pylint: disable=g-import-not-at-top
  matplotlib.use("Agg")
  import matplotlib.pyplot as plt  # pylint: disable=g-import-not-at-top
  first = rows[0]["temperature"]
  rows = [r for r in rows if r["temperature"] == first]
  drafters = list(dict.fromkeys(r["drafter"] for r in rows))
  verifiers = list(dict.fromkeys(r["verifier"] for r in rows))
  figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4))
  percent = lambda rows, name: [100 * r[name] for r in rows]
  for drafter in drafters:
    for verifier in verifiers:
      mine = [r for r in rows if r["drafter"] == drafter
              and r["verifier"] == verifier]
      gammas = [r["gamma"] for r in mine]
      # From a fresh state, which only its first round has.
      once = contract.rule(common.VERIFIERS[verifier]).remembers
      label = f"{_label(mine[0])}, {drafter}" + ", one round" * once
      left.errorbar(gammas, [r["paired_block_efficiency"] for r in mine],
                    [_Z * r["paired_stderr"] for r in mine], marker="o",
                    capsize=3, label=label)
      if verifier != "token":
        middle.errorbar(
            gammas, percent(mine, "paired_improvement"),
            np.multiply(_Z, percent(mine, "paired_improvement_stderr")),
            marker="o", capsize=3, label=label)
  gammas = sorted({r["gamma"] for r in rows})
  for place, gamma in enumerate(gammas):
    mine = [r for r in rows if r["gamma"] == gamma and r["verifier"] == next(
        (v for v in verifiers if v != "token"), "token")]
    offset = (place - (len(gammas) - 1) / 2) * 0.8 / len(gammas)
    right.bar(np.arange(len(drafters)) + offset,
              percent(mine, "paired_improvement"), 0.8 / len(gammas),
              yerr=np.multiply(_Z, percent(mine, "paired_improvement_stderr")),
              capsize=3, label=f"$\\gamma={gamma}$, {_label(mine[0])}")
  left.set(xlabel="draft length $\\gamma$", ylabel="tokens per round",
           title="block efficiency (paired)")
  middle.set(xlabel="draft length $\\gamma$", ylabel="gain in %",
             title="improvement over token verification")
  right.set(ylabel="gain in %", title="improvement by drafter",
            xticks=range(len(drafters)), xticklabels=drafters)
  for axes in (left, middle, right):
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
  figure.suptitle(f"temperature {first:g}; intervals of 95 % over prompts")
  figure.tight_layout()
  figure.savefig(path, dpi=150)
