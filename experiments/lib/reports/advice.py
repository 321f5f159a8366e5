"""Tables of advise.py: the fastest drafts for batch sizes and contexts."""

from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import pathlib
import statistics
from typing import Any

from lib import common
from lib.figures import style
from lib.reports import tables
from lib.rollouts import round_costs
from specjax.utils import files

_MOST = 1 << 16  # largest batch size of `limits`
# Drafts are measured if their predicted speed is at most this fraction below
# the best.
_CLOSE = 0.2
_LOSSLESS = [name for name, x in common.ALL_VERIFIERS.items() if x.lossless]


Costs = round_costs.Measured | round_costs.Compiled


def _length(row: Mapping[str, Any], rounds: round_costs.Rounds) -> int:
  """Returns the draft length of a row; trees have only one."""
  return row["gamma"] or rounds.lengths(row["draft"])[0]


def comparable(rows: Sequence[dict[str, Any]], rounds: round_costs.Rounds
               ) -> list[dict[str, Any]]:
  """Returns the rows of arena.py that are lossless and can be decoded.

  Rows of smaller trees are left out, because only rounds with the full tree are
  timed.
  """
  return [row for row in rows if row["verifier"] in _LOSSLESS
          and _length(row, rounds) in rounds.lengths(row["draft"])
          and row.get("nodes") in (None, "", _length(row, rounds) + 1)]


def predict(rows: Sequence[dict[str, Any]], costs: Costs,
            batches: Sequence[int], contexts: Sequence[int]
            ) -> list[dict[str, Any]]:
  """Returns the predicted speed of every draft and rule.

  Args:
    rows: result of `comparable`.
    costs: seconds of rounds.
    batches: batch sizes.
    contexts: tokens per row.
  """
  found = []
  for batch, context, row in itertools.product(batches, contexts, rows):
    plain, seconds = costs.seconds(
        row["draft"], _length(row, costs.rounds), batch, context)
    name = "block_efficiency"
    calls = row.get("target_calls", 1)  # older results have tokens per round
    ratio = calls * plain / seconds
    found.append({
        "temperature": row["temperature"], "batch": batch, "context": context,
        **{key: row[key] for key in ("draft", "verifier", "gamma", name)},
        "target_calls": calls,
        "round_ms": 1e3 * seconds, "no_draft_ms": 1e3 * plain,
        "tokens_per_second": batch * calls * row[name] / seconds,
        **{"speedup" + end: row[name + end] and row[name + end] * ratio
           for end in ("", "_low", "_high")}})
  return found


def confirmed(rows: Sequence[dict[str, Any]], costs: round_costs.Measured,
              batches: Sequence[int], contexts: Sequence[int]
              ) -> list[dict[str, Any]]:
  """Returns `predict`, with measured rounds of drafts that may be the fastest.

  These are the drafts within `_CLOSE` of the best. The fastest draft is then
  chosen from measurements.
  """
  while True:
    found = predict(rows, costs, batches, contexts)
    close = {_place(row, costs) for _, group in _groups(found)
             for row in group
             if row["speedup"] >= (1 - _CLOSE) * _best(group)["speedup"]}
    new = {place for place in close - costs.confirmed
           if costs.is_between(*place)}
    if not new:
      return found
    costs.confirmed |= new


def _place(row: Mapping[str, Any], costs: Costs) -> tuple[str, int, int, int]:
  """Returns the arguments of `costs.seconds` for a row of `predict`."""
  return (row["draft"], _length(row, costs.rounds), row["batch"],
          row["context"])


def _groups(rows: Sequence[dict[str, Any]]):
  """Yields the rows of each temperature, batch size and context."""
  place = lambda row: (row["temperature"], row["batch"], row["context"])
  for key in dict.fromkeys(map(place, rows)):
    yield key, [row for row in rows if place(row) == key]


def _best(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
  return max(rows, key=lambda row: row["speedup"])


def limits(rows: Sequence[dict[str, Any]], costs: Costs,
           batches: Sequence[int], contexts: Sequence[int]) -> list[str]:
  """Returns a sentence per temperature and context: where drafts pay.

  Measured costs are only interpolated. Costs of a chip are linear in the batch
  size, so batches larger than the compiled ones are also predicted.
  """
  most = _MOST if costs.extrapolates else max(batches)
  sizes = [n for n in (2 ** i for i in range(most.bit_length()))
           if min(batches) < n < most]
  sizes = [min(batches), *sizes, *({most} - {min(batches)})]
  found = []
  for temperature in dict.fromkeys(row["temperature"] for row in rows):
    mine = [row for row in rows if row["temperature"] == temperature]
    for context in contexts:
      paying = [n for n in sizes
                if _best(predict(mine, costs, [n], [context]))["speedup"] > 1]
      text = ("at no batch size" if not paying else
              "at all batch sizes" if paying == sizes else
              f"at batch sizes {', '.join(map(str, paying))}")
      found.append(f"Temperature {temperature:g}, {context:,} tokens per row: "
                   f"{text}.")
  return [f"Tested batch sizes: {', '.join(map(str, sizes))}.", *found]


def check(rows: Sequence[dict[str, Any]], costs: round_costs.Measured) -> str:
  """Measures all rounds, and returns the errors of predictions and advice.

  Args:
    rows: result of `confirmed`.
    costs: the costs that predicted them.
  """
  errors, losses = {}, []  # errors by round, which several rules share
  for _, group in _groups(rows):
    for row in group:
      place = _place(row, costs)
      plain, seconds = costs.exact(*place)
      row["measured_speedup"] = (
          row["block_efficiency"] * row["target_calls"] * plain / seconds)
      if costs.is_between(*place):
        predicted = costs.interpolated(*place)
        errors[place] = abs(
            predicted[0] / predicted[1] * seconds / plain - 1)
    best, advised = max(row["measured_speedup"] for row in group), _best(group)
    speed = advised["measured_speedup"] if advised["speedup"] > 1 else 1
    losses.append(1 - speed / max(best, 1))
  text = (f"The advice for {len(losses)} combinations of temperature, batch "
          "size and context was measured against all drafts and against "
          "decoding without drafts. It is slower than the best of them by "
          f"{statistics.median(losses):.1%} in the median and by "
          f"{max(losses):.1%} at most.")
  if len(errors) > 1:
    deciles = statistics.quantiles(errors.values(), n=10)
    text += (f" Of the rounds, {len(errors)} were predicted by interpolation. "
             "Their predicted speed-ups differ from measured ones by "
             f"{deciles[4]:.1%} in the median, and by {deciles[8]:.1%} at the "
             "90th percentile.")
  return text


def write(output_dir: pathlib.Path, rows: Sequence[dict[str, Any]], *,
          title: str, chip: str | None, limits: Sequence[str],
          check: str | None) -> None:
  """Prints the report, and writes it with the table of all drafts.

  Args:
    output_dir: directory of advice.md and advice.csv.
    rows: rows of `predict`.
    title: names of the target and the machine.
    chip: name of the chip; None if rounds were measured.
    limits: sentences of `limits`.
    check: text of `check`, or None.
  """
  source = (
      "Rounds are measured on this machine at every second draft length, batch "
      "size and context (and the largest), and interpolated between them. "
      "Rounds of drafts whose predicted speed is within "
      f"{100 * _CLOSE:g} % of the best are also measured."
      if chip is None else
      "The bytes and operations of a round are counts of the TPU compiler for "
      f"one chip of a TPU v5e, and the peak figures are those of a {chip}. "
      "Weights and caches are bfloat16. Real rounds take longer than these.")
  text = (f"# Advice for {title}\n\n{source} Speed-ups are relative to "
          "decoding without drafts, with the 95 % intervals of the recorded "
          "acceptance. Only lossless rules are considered.\n")
  table = []
  for (temperature, batch, context), group in _groups(rows):
    best = _best(group)
    gamma = "tree" if best["gamma"] is None else str(best["gamma"])
    interval = "" if best["speedup_low"] is None else (
        f" [{best['speedup_low']:.2f}, {best['speedup_high']:.2f}]")
    names = ("none", "", "") if best["speedup"] <= 1 else (
        best["draft"], style.rule(best["verifier"]), gamma)
    table.append({
        "T": f"{temperature:g}", "batch": str(batch), "context": str(context),
        **dict(zip(("draft", "verifier", "gamma"), names)),
        "speed-up": f"{best['speedup']:.2f}{interval}",
        "round (ms)": f"{best['round_ms']:.3g}",
        "without draft (ms)": f"{best['no_draft_ms']:.3g}"})
  text += "\n## Fastest draft\n\n" + tables.markdown(table)
  text += ("\nIf the draft is *none*, the numbers are those of the fastest "
           "draft, and decoding without drafts is faster.\n")
  text += "\n## Where drafts pay\n\n" + "".join(
      f"- {line}\n" for line in limits)
  if check:
    text += f"\n## Check\n\n{check}\n"
  print(text, end="")
  with files.atomically(output_dir / "advice.md") as f:
    f.write(text.encode())
  common.write_csv(output_dir / "advice.csv", list(rows))
