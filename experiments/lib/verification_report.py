"""Tables and figures of verification_study.py, from the runs of its decoders.

A unit is one rollout of one prompt by every arm: (fingerprint, temperature,
seed, prompt set, index, digest of the prompt).

A gain is block efficiency over that of token verification, less 1: "gain" on
the same drafts, "own_gain" of each rule's own rollouts. Intervals are of 95 %
over prompts; "stderr" is one standard error.
"""

import statistics

import numpy as np

from lib import common
from lib import style
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
          widest = max(widest, _Z * paired["gain_stderr"])
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
        own_gain = analysis.relative_gain(*own[verifier], *own["token"])
        rows.append({
            "prompts": prompts or "all", "drafter": drafter, "gamma": gamma,
            "temperature": temperature, "verifier": verifier,
            "num_prompts": len({unit[3:] for unit in units}),
            "lossless": contract.rule(common.VERIFIERS[verifier]).lossless,
            "block_efficiency": 1 + efficiency, "stderr": error,
            "own_gain": own_gain[0], "own_gain_stderr": own_gain[1],
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
    gain = analysis.relative_gain(
        accepted[verifier], rounds, accepted["token"], rounds)
    return {"paired_block_efficiency": 1 + paired, "paired_stderr": error,
            "more_tokens": more, "more_tokens_stderr": more_error,
            "gain": gain[0], "gain_stderr": gain[1]}

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
    """Measured and predicted speed-up of one cell, and what a round costs.

    A prediction is a prompt's own tokens of a round over what a round cost on
    the other half of the prompts: it says that a round costs alike everywhere,
    and nothing about acceptance.
    """
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


def _judged_afresh(verifier):
  """Whether shared drafts show only its first round, for it remembers."""
  return contract.rule(common.VERIFIERS[verifier]).remembers


def print_table(rows):
  """Every cell over all prompts, on stdout."""
  width = max(len("drafter"), *(len(r["drafter"]) for r in rows))
  print(f"{'':{width}s} {'':4s} {'':5s} {'':15s} {'tokens of a round':>33s} "
        f"{'gain over token':>16s} {'speed-up over':>16s}")
  print(f"{'drafter':{width}s} {'T':>4s} {'gamma':>5s} {'verifier':15s} "
        f"{'own rollouts':>16s} {'same drafts':>16s} {'same drafts':>16s} "
        f"{'autoregressive':>16s} {'predicted':>9s}")
  for r in rows:
    name = style.label(r["verifier"]) + "*" * _judged_afresh(r["verifier"])
    print(f"{r['drafter']:{width}s} {r['temperature']:4g} {r['gamma']:5d} "
          f"{name:15s} "
          f"{r['block_efficiency']:8.3f} ± {_Z * r['stderr']:.3f} "
          f"{r['paired_block_efficiency']:8.3f} ± "
          f"{_Z * r['paired_stderr']:.3f} {_percent(r, 'gain'):>16s} "
          f"{r['speedup']:15.2f}x {r['predicted_speedup']:8.2f}x")
  print("± is 95 % over prompts")
  afresh = {style.label(r["verifier"]) for r in rows
            if _judged_afresh(r["verifier"])}
  if afresh:
    print(f"* on the same drafts {', '.join(afresh)} starts afresh in every "
          "round, which its own rollouts do not allow")
  ratios = [r["measured_over_predicted"] for r in rows]
  print("measured speed-up over what costs on the other half of the prompts "
        f"predict: {min(ratios):.2f} to {max(ratios):.2f}")


def _percent(row, name):
  return (f"{100 * row[name]:+.2f} ± "
          f"{100 * _Z * row[name + '_stderr']:.2f} %")


def write(directory, rows, by_prompts):
  """verification.csv and .md, and the figures of `draw`."""
  common.write_csv(directory / "verification.csv", rows + by_prompts)
  draw(directory, rows + by_prompts)


def draw(directory, rows):
  """verification.md and the figures, from all rows of verification.csv."""
  by_prompts = [r for r in rows if r["prompts"] != "all"]
  rows = [r for r in rows if r["prompts"] == "all"]
  (directory / "verification.md").write_text(_tables(rows, by_prompts))
  _plot_tokens(rows, directory / "verification_tokens.png")
  _plot_gain(rows, directory / "verification_gain.png")
  _plot_speed(rows, directory / "verification_speed.png")


def _tables(rows, by_prompts):
  """The paper's three tables as Markdown."""
  gammas = sorted({r["gamma"] for r in rows})
  gamma = _TABLE_GAMMA if _TABLE_GAMMA in gammas else max(gammas)
  first = rows[0]["temperature"]
  best = rows[0]["drafter"]
  pick = lambda rows, **want: [
      r for r in rows if all(r[k] == v for k, v in want.items())]
  by_set = pick(by_prompts + rows, drafter=best, gamma=gamma,
                temperature=first)
  return "\n".join([
      "Tokens of a round (block efficiency) of each rule on its own rollouts. "
      "Gain: in tokens of a round over token verification, on the same drafts; "
      "for greedy block verification of a first round, for it starts afresh "
      "there; or, where it says so, on each rule's own rollouts. ± is 95 % "
      "over prompts. Speed-up: over autoregressive decoding.", "",
      f"Table 1. By prompts: gamma {gamma}, temperature {first:g}, drafter "
      f"{best}.", "",
      *_table(by_set, ["prompts"]), "",
      f"Table 2. By drafter and gamma: temperature {first:g}, all prompts.", "",
      *_table(pick(rows, temperature=first), ["drafter", "gamma"]), "",
      f"Table 3. By drafter and temperature: gamma {gamma}, all prompts.", "",
      *_table(pick(rows, gamma=gamma), ["drafter", "temperature"]), ""])


def _table(rows, labels):
  """A line for every setting, its verifiers side by side."""
  lines = {}
  for r in rows:
    lines.setdefault(tuple(r[label] for label in labels), []).append(r)
  verifiers = [style.label(r["verifier"]) for r in next(iter(lines.values()))]
  head = [*labels, *verifiers]
  head += [f"{what} of {v}" for v in verifiers if v != "token"
           for what in ("gain", "own rollouts: gain")]
  head += [f"speed-up of {v}" for v in verifiers]
  out = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
  for values, cells in lines.items():
    line = [f"{v:g}" if isinstance(v, float) else str(v) for v in values]
    line += [f"{c['block_efficiency']:.3f}" for c in cells]
    line += [_percent(c, name) for c in cells if c["verifier"] != "token"
             for name in ("gain", "own_gain")]
    line += [f"{c['speedup']:.2f}" for c in cells]
    out.append("| " + " | ".join(line) + " |")
  return out


def _panels(rows):
  """A figure of a panel for every drafter and temperature.

  Returns:
    `(figure, [(axes, [(verifier, its rows, its x)])])`.
  """
  drafters = list(dict.fromkeys(r["drafter"] for r in rows))
  temperatures = list(dict.fromkeys(r["temperature"] for r in rows))
  figure, grid = style.panels(
      len(drafters), len(temperatures), sharex=True, sharey=True)
  found = []
  for line, drafter in zip(grid, drafters):
    for axes, temperature in zip(line, temperatures):
      here = [r for r in rows if r["drafter"] == drafter
              and r["temperature"] == temperature]
      verifiers = list(dict.fromkeys(r["verifier"] for r in here))
      curves = []
      for place, verifier in enumerate(verifiers):
        mine = [r for r in here if r["verifier"] == verifier]
        curves.append((verifier, mine, style.apart(
            [r["gamma"] for r in mine], place, len(verifiers))))
      style.tried(axes, [r["gamma"] for r in here])
      axes.set_title(f"{drafter}, temperature {temperature:g}", fontsize=10)
      found.append((axes, curves))
  for axes in grid[-1]:
    axes.set_xlabel("draft length gamma")
  return figure, found


def _name(verifier):
  """Of a curve that is measured on shared drafts."""
  return style.label(verifier) + (
      "\n(first round only)" * _judged_afresh(verifier))


def _measured(axes, verifier, x, values, errors):
  """Points with their 95 % intervals, from standard errors."""
  axes.errorbar(x, values, [_Z * error for error in errors], marker="o",
                markersize=4, capsize=3, color=style.color(verifier),
                label=_name(verifier))


def _plot_tokens(rows, path):
  """How many tokens does a round give?"""
  figure, found = _panels(rows)
  for axes, curves in found:
    for verifier, mine, x in curves:
      _measured(axes, verifier, x, [r["paired_block_efficiency"] for r in mine],
                [r["paired_stderr"] for r in mine])
    axes.set_ylabel("tokens of a round")
  style.save(figure, path, "Tokens of a round on the same drafts; 95 % over "
             "prompts")


def _plot_gain(rows, path):
  """What does a rule gain over token verification?"""
  figure, found = _panels(rows)
  for axes, curves in found:
    for verifier, mine, x in curves:
      if verifier != "token":
        _measured(axes, verifier, x, [100 * r["gain"] for r in mine],
                  [100 * r["gain_stderr"] for r in mine])
    axes.set_ylabel("gain in %")
  style.save(figure, path, "Gain in tokens of a round over token verification, "
             "on the same drafts; 95 % over prompts")


def _plot_speed(rows, path):
  """Does it pay in time, and is that what a round's costs predict?"""
  figure, found = _panels(rows)
  for axes, curves in found:
    axes.axhline(1, color=style.color("autoregressive"), linewidth=0.8,
                 label=style.label("autoregressive"))
    for verifier, mine, x in curves:
      color = style.color(verifier)
      axes.plot(x, [r["speedup"] for r in mine], marker="o", markersize=4,
                color=color, label=style.label(verifier))
      axes.plot(x, [r["predicted_speedup"] for r in mine], "s",
                markerfacecolor="none", color=color, markersize=8,
                label="predicted by the\nother prompts' costs"
                if verifier == curves[-1][0] else None)
    axes.set_ylabel("speed-up")
  style.save(figure, path, "Speed over that of autoregressive decoding")
