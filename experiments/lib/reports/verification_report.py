"""Tables and figures of verification_study.py."""

import pathlib
from typing import Any

from lib import common
from lib.figures import style
from lib.reports import tables
from lib.reports import text_rounds
from lib.reports import verification_cells as cells
from specjax.utils import files

# Columns of the printed table: name, format, width, two lines of the header.
_SHOWN = (
    ("block_efficiency", ".2f", 20, "tokens of a round", "own rollouts"),
    ("paired_block_efficiency", ".2f", 20, "tokens of a round", "same drafts"),
    ("own_gain", "+.1%", 21, "gain over token", "own rollouts"),
    ("gain", "+.1%", 21, "gain over token", "same drafts"),
    ("speedup", "", 17, "speed-up over", "autoregressive"),
    ("predicted_speedup", "", 9, "", "predicted"))
_TABLE_GAMMA = 8  # draft length of the tables by prompt set and by temperature


def _judged_afresh(row: dict[str, Any]):
  """Returns True if a verifier's state is reset before every shared draft.

  This applies to verifiers with a state that depends on earlier rounds. On
  shared drafts, such a verifier decides as in its first round.
  """
  # Files of earlier versions have no such column, and no rules but these.
  return (row["remembers"] if "remembers" in row
          else common.VERIFIERS[row["verifier"]].remembers)


def print_table(rows: list[dict[str, Any]]):
  """Prints the results of all cells over all prompts."""
  width = max(len("drafter"), *(len(r["drafter"]) for r in rows))
  rules = max(13, *(len(_starred(r)) for r in rows))
  shown = [column for column in _SHOWN if column[0] in rows[0]]
  print(f"{'':{width + rules + 12}s} " + " ".join(
      f"{head:>{wide}s}" for *_, wide, head, _ in shown))
  print(f"{'drafter':{width}s} {'T':>4s} {'gamma':>5s} {'verifier':{rules}s} "
        + " ".join(f"{head:>{wide}s}" for *_, wide, _, head in shown))
  for r in rows:
    print(f"{r['drafter']:{width}s} {r['temperature']:4g} {r['gamma']:5d} "
          f"{_starred(r):{rules}s} " + " ".join(
              f"{tables.shown(r, x, form) if form else _speedup(r, x):>{wide}s}"
              for x, form, wide, *_ in shown))
  print(f"95 % intervals over {rows[0]['clusters']} clusters of prompts"
        + (f", those of own rollouts over {rows[0]['own_clusters']}"
           if "own_clusters" in rows[0] else ""))
  afresh = {style.label(r["verifier"]) for r in rows
            if _judged_afresh(r)}
  if afresh:
    print(f"* On the same drafts, {', '.join(afresh)} decides every round as "
          "a first round. On its own rollouts it does not")
  if "rounds" in rows[0]:
    print("Number of rounds until a sequence is complete, own rollouts:")
    text_rounds.print_table(rows)
  _print_speed(rows)


def _starred(row: dict[str, Any]) -> str:
  return style.label(row["verifier"]) + "*" * _judged_afresh(row)


def _print_speed(rows: list[dict[str, Any]]):
  """Prints the throughput, and the ratios of measured to predicted speed-up."""
  if "throughput" in rows[0]:
    for r in rows:
      print(f"{r['drafter']}, temperature {r['temperature']:g}, gamma "
            f"{r['gamma']}, {style.label(r['verifier'])}: {r['throughput']:.1f}"
            f" tokens per second, {r['throughput_gain']:+.0%} over "
            "autoregressive decoding with the same batch size")
  if "speedup" in rows[0]:
    ratios = [r["measured_over_predicted"] for r in rows]
    print("measured speed-up divided by the prediction from the other half of "
          f"the prompts: {min(ratios):.2f} to {max(ratios):.2f}")


def _speedup(row: dict[str, Any], name: str):
  """Returns a speed-up as text, or "-" if it was not measured."""
  return f"{row[name]:.2f}x" if name in row else "-"


def write(directory: pathlib.Path, rows: list[dict[str, Any]],
          prompt_rows: list[dict[str, Any]]):
  """Writes both CSV files, and the tables and figures of `draw`.

  Args:
    directory: output directory.
    rows: rows of verification.csv.
    prompt_rows: rows of verification_prompts.csv.
  """
  common.write_csv(directory / "verification.csv", rows)
  common.write_csv(directory / cells.PROMPTS, prompt_rows)
  draw(directory, rows)


def draw(directory: pathlib.Path, rows: list[dict[str, Any]]):
  """Writes verification.md and the figures, from rows of verification.csv."""
  with files.atomically(directory / "verification.md") as f:
    f.write((_EXPLAINED + "".join(
        f"\nTable {number}. {caption}.\n\n{tables.markdown(table)}"
        for number, (caption, table) in enumerate(
            captioned(rows).items(), 1))).encode())
  rows = [r for r in rows if r["prompts"] == "all"]
  if "speedup" in rows[0]:
    _plot_speed(rows, directory / "verification_speed.png")
  # In a figure of shared drafts, a rule that decides every round as a first
  # round would appear to be better than on its own rollouts.
  rows = [r for r in rows if not _judged_afresh(r)]
  _plot_estimate(
      rows, directory / "verification_tokens.png", "paired_block_efficiency",
      "tokens per target call", "Tokens per target call on the same drafts; "
      "95 % intervals over prompts")
  _plot_estimate(
      rows, directory / "verification_gain.png", "gain", "gain in %",
      "Gain in tokens per target call over token verification, on the same "
      "drafts; 95 % intervals over prompts", scale=100, skipped=("token",))


def conclusion(rows: list[dict[str, Any]]) -> str:
  """Returns a line per rule: its gain on the same drafts.

  The lines are for the first drafter and temperature, and the largest length.
  """
  last = max((row["gamma"] for row in rows), default=0)
  gain = lambda row: tables.shown(row, "gain", "+.1%")
  return "".join(
      f"{style.rule(row['verifier'])}, {row['drafter']}, temperature "
      f"{row['temperature']:g}, gamma {last}: {gain(row)} tokens per target "
      "call over token verification, on the same drafts\n"
      for row in rows if row["gamma"] == last and row["verifier"] != "token"
      and not _judged_afresh(row)
      and all(row[x] == rows[0][x] for x in ("drafter", "temperature")))


def summary(rows: list[dict[str, Any]]):
  """Returns a table of the gain of block verification by draft length.

  It is the first table of the README, for the first drafter and the first
  temperature. The tokens per target call and the second gain are from the
  rollouts of each verifier.
  """
  mine = [r for r in rows if r["prompts"] == "all" and all(
      r[name] == rows[0][name] for name in ("drafter", "temperature"))]
  of_rule = lambda rule: {
      r["gamma"]: r for r in mine if r["verifier"] == rule}
  token, block = of_rule("token"), of_rule("block")
  tokens = lambda row: f"{row['block_efficiency']:.3f}"
  return [{
      "gamma": str(gamma),
      "token: tokens per target call": tokens(token[gamma]),
      "block: tokens per target call": tokens(row),
      "gain on the same drafts": tables.shown(row, "gain", "+.1%"),
      "gain of own rollouts": tables.shown(row, "own_gain", "+.1%"),
      "n": str(row["clusters"])} for gamma, row in block.items()]


_EXPLAINED = (
    "Tokens: tokens per target call (block efficiency). Gain: relative "
    "increase in tokens per target call over token verification. Same drafts: "
    "all rules are evaluated on the drafts of one output. Own rollouts: each "
    "rule generates its own output. On the same drafts, greedy block "
    "verification decides every round as a first round. Intervals: 95 %, over "
    "n clusters of prompts. Speed-up: speed over autoregressive decoding, "
    "median over prompts.\n")


def captioned(rows: list[dict[str, Any]]) -> dict[str, tables.Table]:
  """Returns the tables of verification.md by caption.

  Args:
    rows: rows of verification.csv.
  """
  every = [r for r in rows if r["prompts"] == "all"]
  gammas = sorted({r["gamma"] for r in every})
  gamma = _TABLE_GAMMA if _TABLE_GAMMA in gammas else max(gammas)
  first, best = every[0]["temperature"], every[0]["drafter"]
  pick = lambda rows, **want: [
      r for r in rows if all(r[k] == v for k, v in want.items())]
  by_set = sorted(pick(rows, drafter=best, gamma=gamma, temperature=first),
                  key=lambda r: r["prompts"] == "all")
  return {
      f"By prompt set: gamma {gamma}, temperature {first:g}, drafter {best}":
          _table(by_set, ["prompts"]),
      f"By drafter and gamma: temperature {first:g}, all prompts":
          _table(pick(every, temperature=first), ["drafter", "gamma"]),
      f"By drafter and temperature: gamma {gamma}, all prompts":
          _table(pick(every, gamma=gamma), ["drafter", "temperature"])}


def _table(rows: list[dict[str, Any]], labels: list[str]) -> tables.Table:
  """Returns a table with one line per setting, for all verifiers.

  Tokens are those of own rollouts, or without them those of the same drafts.

  Args:
    rows: rows of verification.csv.
    labels: columns that identify a setting.
  """
  lines = {}
  for r in rows:
    values = tuple(r[label] for label in labels)
    lines.setdefault(values, dict(zip(labels, (
        f"{v:g}" if isinstance(v, float) else str(v) for v in values)))
        | {"n": str(r["clusters"]),
           "n of own rollouts": str(r.get("own_clusters") or "")})
  own = "block_efficiency" in rows[0]
  for part in ("tokens", "gain", "speed-up"):
    for r in rows:
      line = lines[tuple(r[x] for x in labels)]
      name, same = style.label(r["verifier"]), "same drafts" + (
          ", first round" * _judged_afresh(r))
      if part == "tokens":
        kind, column = (("own rollouts", "block_efficiency") if own else
                        (same, "paired_block_efficiency"))
        line[f"{kind}: tokens of {name}"] = tables.shown(r, column, ".2f")
      elif part == "speed-up":
        line[f"speed-up of {name}"] = _speedup(r, "speedup").rstrip("x")
      elif r["verifier"] != "token":
        for kind, column in ((same, "gain"), ("own rollouts", "own_gain")):
          line[f"{kind}: gain of {name}"] = tables.shown(r, column, "+.1%")
  return tables.without_empty(list(lines.values()))


def _panels(rows: list[dict[str, Any]]):
  """Creates a figure with a panel for every drafter and temperature.

  Returns:
    `(figure, [(axes, curves)])`, with the curves of `_curves`.
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
      style.tried(axes, [r["gamma"] for r in here])
      axes.set_title(f"{drafter}, temperature {temperature:g}", fontsize=10)
      found.append((axes, _curves(here)))
  for axes in grid[-1]:
    axes.set_xlabel("draft length gamma")
  return figure, found


def _curves(rows: list[dict[str, Any]]) -> list[tuple]:
  """Returns the curves of a panel.

  A curve is a tuple `(verifier, rows, arguments of style.apart)`.
  """
  verifiers = list(dict.fromkeys(r["verifier"] for r in rows))
  return [(verifier, [r for r in rows if r["verifier"] == verifier],
           (place, len(verifiers)))
          for place, verifier in enumerate(verifiers)]


def _measured(axes: Any, verifier: str, rows: list[dict[str, Any]], name: str,
              place: tuple[int, int], scale: float = 1):
  """Plots the points of an estimate with their 95 % intervals."""
  style.apart(axes.errorbar(
      [r["gamma"] for r in rows], [scale * r[name] for r in rows],
      scale * style.errors(rows, name), markersize=4, capsize=3,
      label=style.label(verifier), **style.look(verifier)), *place)


def _plot_estimate(rows: list[dict[str, Any]], path: pathlib.Path, name: str,
                   label: str, title: str, *, scale: float = 1,
                   skipped: tuple[str, ...] = ()):
  """Plots one estimate with its intervals, as one curve for each verifier."""
  figure, found = _panels(rows)
  for axes, curves in found:
    for verifier, mine, place in curves:
      if verifier not in skipped:
        _measured(axes, verifier, mine, name, place, scale)
    axes.set_ylabel(label)
  style.save(figure, path, title)


def _plot_speed(rows: list[dict[str, Any]], path: pathlib.Path):
  """Plots the measured and the predicted speed-ups."""
  figure, found = _panels(rows)
  for axes, curves in found:
    axes.axhline(1, color=style.color("autoregressive"), linewidth=0.8,
                 label=style.label("autoregressive"))
    for verifier, mine, place in curves:
      x = [r["gamma"] for r in mine]
      style.apart(axes.errorbar(
          x, [r["speedup"] for r in mine], style.errors(mine, "speedup"),
          markersize=4, capsize=3, label=style.label(verifier),
          **style.look(verifier)), *place)
      style.apart(axes.plot(
          x, [r["predicted_speedup"] for r in mine], "o",
          markerfacecolor="none", color=style.color(verifier), markersize=8,
          label="predicted by the\nother prompts' costs"
          if verifier == curves[-1][0] else None), *place)
    axes.set_ylabel("speed-up")
  style.save(figure, path, "Speed over that of autoregressive decoding, median "
             "over prompts" + "; 95 % intervals" * ("speedup_low" in rows[0]))
