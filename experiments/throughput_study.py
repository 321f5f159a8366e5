"""Measures throughput and latency of batched decoding with and without drafts.

Requests have different lengths, temperatures and seeds. They are decoded in two
ways. With continuous batching (`serving.Queue`), the next request replaces a
finished request immediately. With static batching ("waiting"), the next
requests wait until all requests of a batch are finished. In both ways, requests
are decoded without drafts and with each drafter. With continuous batching, each
drafter also runs with the adaptive controller, which chooses the draft length.

  python experiments/throughput_study.py
  python experiments/throughput_study.py --drafter=small,ngram --slots=1,8

First part: all requests arrive at time 0. They are decoded with every batch
size of --slots. The output of each request must equal its output in a batch of
one request ("alone"). With the controller, only outputs at temperature 0 are
compared.

Second part: requests arrive at random times (Poisson process), with each rate
of --loads. The queue uses the smallest batch size that fits all active
requests. Static batching is measured only without drafts.

The latency of a request is the time from its arrival to its last token. The
reported tokens per round are a lower bound, because length limits cut the last
rounds.

Run no other program at the same time. If the script is killed, the same command
resumes it. Output: throughput.csv, throughput_load.csv, throughput.json and two
plots in --output_dir.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import pathlib
import sys
from typing import Any

from absl import flags
from lib import common
from lib import flags as shared
from lib import models
from lib.configurations import compositions
from lib.configurations import serving
from lib.figures import style
from lib.prompts import reading as prompts_lib
from lib.rollouts import resumable
import numpy as np

import specjax as sj
from specjax.data import Tokenizer
from specjax.models import Pretrained

_TARGET = shared.target()
_DRAFTER = shared.drafters(
    help_=f"Drafters to compare, comma-separated: {compositions.HELP}, ")
_DATASTORE = shared.datastore()
_GAMMA = shared.gamma(4)
_CONTROLLER = flags.DEFINE_bool(
    "controller", True, "Also measure every drafter with the adaptive "
    "controller, which chooses the draft length before every target call. The "
    "costs of rounds, from which it chooses, are measured once per machine")
_SLOTS = flags.DEFINE_list(
    "slots", "1,4,16", "Batch sizes to compare (numbers of requests decoded "
    "together), comma-separated")
_ROUNDS = flags.DEFINE_integer(
    "rounds", 16, "Maximum number of decoding rounds per call of the compiled "
    "program. Only between calls are finished requests replaced", 1)
_LOADS = flags.DEFINE_list(
    "loads", "0.25,0.5,1", "Arrival rates of requests in the second part "
    "(random arrivals), comma-separated, as fractions of the highest "
    "throughput without drafts in the first part. 0 skips the second part")
_REQUESTS = flags.DEFINE_integer(
    "requests", 200, "Number of requests in the first part, in which all "
    "requests arrive at time 0. The second part uses half of them", 4)
_PROMPTS = shared.prompts("code,docstrings,tests,prose")
_FIELD = shared.prompt_field()
_PROMPT_TOKENS = shared.prompt_tokens(
    64, "Maximum prompt length in tokens, at least 8")
_NEW_TOKENS = flags.DEFINE_integer(
    "mean_new_tokens", 40, "Mean number of tokens generated per request. "
    "Lengths are drawn from an exponential distribution, and cut at four times "
    "the mean", 4)
_TEMPERATURE = shared.temperatures(
    "0,0.6,1", "Sampling temperatures of consecutive requests, "
    "comma-separated. The list is repeated for further requests")
_SEED = shared.seed(
    "Random seed of prompts, lengths, arrivals and sampling")
_DTYPE = shared.dtype()
_OUTPUT_DIR = shared.output_dir("results/throughput")

_ALONE, _CONTROLLED, _WAITING = "none", ", controller", ", waiting"
_AT_RANDOM = "at random"  # group name of the second part
_FEWEST = 4  # minimum output length; the minimum prompt length is twice this


def _requests(tokenizer: Tokenizer, temperatures: list[float]):
  """Returns random requests, and the source of their prompts."""
  count, sets = _REQUESTS.value, len(_PROMPTS.value)
  read = prompts_lib.read(
      tokenizer, _PROMPTS.value, field=_FIELD.value, count=-(-count // sets),
      tokens=_PROMPT_TOKENS.value, seed=_SEED.value)
  rng = np.random.default_rng(_SEED.value)
  rows = [read.all[i] for i in rng.permutation(len(read.all))]
  made = []
  for i in range(count):
    length = rng.integers(2 * _FEWEST, _PROMPT_TOKENS.value + 1)
    new = np.clip(rng.exponential(_NEW_TOKENS.value), _FEWEST,
                  4 * _NEW_TOKENS.value)
    made.append(sj.serving.Request(
        prompt=tuple(rows[i % len(rows)][-length:]), max_new_tokens=int(new),
        temperature=temperatures[i % len(temperatures)],
        eos=(), seed=(_SEED.value + i) % 2**32))
  return made, read.source


class _Variants:
  """Function from a group to its variants, `{name: configuration}`.

  A group is a batch size, or `_AT_RANDOM` for requests that arrive at random.
  """

  def __init__(self, target: Pretrained, drafters: Mapping[str, Any],
               longest: int):
    alone = common.autoregressive(target.model, 1.0)
    self._decoders = {_ALONE: (alone, {"target": target.params})}
    for name, (strategy, own) in drafters.items():
      self._decoders[name] = (
          strategy.decoder(target.model, transform=alone.transform),
          {"target": target.params, "drafter": own})
    self._longest = longest

  def __call__(self, group: Any):
    at_random = group == _AT_RANDOM
    sizes = _sizes() if at_random else (group,)
    variants = {}
    for name, (decoder, params) in self._decoders.items():
      serve = lambda decoder=decoder, params=params, **options: (
          serving.Refilled(
              decoder, params, sizes, self._longest, _ROUNDS.value, **options))
      variants[name] = serve()
      if not at_random:
        variants[name + _WAITING] = serving.Waiting(
            decoder, params, group, self._longest + decoder.num_nodes)
      elif name == _ALONE:
        variants[name + _WAITING] = serve(held=True)
      if _CONTROLLER.value and name != _ALONE:
        print(f"measuring the cost of rounds of {name} with "
              f"{', '.join(map(str, sizes))} rows, or reading stored costs",
              file=sys.stderr)
        lengths = sorted({0, -(-_GAMMA.value // 2), _GAMMA.value})
        variants[name + _CONTROLLED] = serve(controllers={
            size: sj.decoding.costs.measured(
                decoder, params, batch=size, lengths=lengths,
                used=self._longest // 2,
                capacity=self._longest + decoder.num_nodes)
            for size in sizes})
    return variants


def _sizes():
  return tuple(common.batch_sizes("--slots", _SLOTS.value))


def _different(found: Any, requests: list[Any], alone: dict[str, Any]):
  """Returns `{variant: (sequences compared, sequences that differ)}`.

  Args:
    found: `{variant: record}` of a unit.
    requests: requests of the unit.
    alone: `{variant: sequences of all requests}`, from batches of one row.
  """
  counts = {}
  for name, record in found.items():
    decoder = name.removesuffix(_WAITING)
    greedy = decoder.endswith(_CONTROLLED)
    mine = alone[_ALONE if greedy else decoder]
    counts[name] = [
        text == mine[i] for i, text in enumerate(record["texts"])
        if not greedy or requests[i].temperature == 0]
  return {name: (len(same), same.count(False)) for name, same in counts.items()}


def _row(name: str, record: dict[str, Any], requests: list[Any],
         compared: tuple[int, int], **unit: Any):
  """Returns the table row of a variant."""
  requests = requests[:len(record["texts"])]
  tokens = sum(one.max_new_tokens for one in requests)
  at = lambda what, share: float(np.percentile(record[what], share))
  return {
      **unit, "variant": name, "requests": len(requests), "tokens": tokens,
      "seconds": record["seconds"],
      "tokens_per_second": tokens / record["seconds"],
      "emitted_per_round": tokens / record["rounds"],
      "latency_median": at("last", 50), "latency_p95": at("last", 95),
      "first_median": at("first", 50), "first_p95": at("first", 95),
      "compared": compared[0], "different": compared[1]}


def _rows(runs: dict[tuple, dict[str, Any]], requests: list[Any],
          alone: dict[str, Any]):
  """Returns one table row per variant of every unit.

  Args:
    runs: `{unit: {variant: record}}`.
    requests: requests of the study.
    alone: `{variant: sequences of all requests}`, from batches of one row.
  """
  found = []
  for unit, variants in runs.items():
    compared = _different(variants, requests, alone)
    group = {"load": unit[2]} if unit[1] == _AT_RANDOM else {"slots": unit[1]}
    mine = [_row(name, record, requests, compared[name], **group)
            for name, record in variants.items()]
    speed = {row["variant"]: row["tokens_per_second"] for row in mine}
    latency = {row["variant"]: row["latency_median"] for row in mine}
    for row in mine:
      name = row["variant"]
      row["over_none"] = speed[name] / speed[_ALONE]
      row["latency_over_none"] = latency[name] / latency[_ALONE]
      row["over_waiting"] = (speed[name] / speed[name + _WAITING]
                             if name + _WAITING in speed else None)
    found += mine
  return found


def _print_tables(full: list[dict[str, Any]], load: list[dict[str, Any]]):
  wide = max(len(row["variant"]) for row in full + load)
  print(f"{'slots':>5s} {'drafter':{wide}s} {'tokens/s':>9s} "
        f"{'over none':>10s} {'over waiting':>13s} {'emitted/round':>13s} "
        f"{'same as alone':>15s}")
  for row in full:
    waiting = row["over_waiting"]
    print(f"{row['slots']:5d} {row['variant']:{wide}s} "
          f"{row['tokens_per_second']:9.0f} {row['over_none']:10.2f} "
          f"{'' if waiting is None else f'{waiting:.2f}':>13s} "
          f"{row['emitted_per_round']:13.2f} "
          f"{row['compared'] - row['different']:8d} of {row['compared']:3d}")
  if load:
    print(f"\n{'load':>5s} {'drafter':{wide}s} {'tokens/s':>9s} "
          f"{'median latency':>15s} {'over none':>10s} {'95 %':>8s} "
          f"{'first token':>12s} {'95 %':>8s}")
  for row in load:
    print(f"{row['load']:5.2f} {row['variant']:{wide}s} "
          f"{row['tokens_per_second']:9.0f} {row['latency_median']:13.3f} s "
          f"{row['latency_over_none']:10.2f} {row['latency_p95']:6.2f} s "
          f"{row['first_median']:10.3f} s {row['first_p95']:6.2f} s")


def _draw(full: list[dict[str, Any]], load: list[dict[str, Any]],
          output_dir: pathlib.Path):
  """Plots throughput against the batch size, and latency against the load."""
  _plot(full, "slots", "batch size (requests)", {
      "tokens_per_second": "tokens per second, all requests at time 0"},
        output_dir / "throughput_tokens.png")
  if load:
    _plot(load, "load", "load, over the highest throughput without drafts", {
        "latency_median": "median latency, s",
        "latency_p95": "95 % quantile of latency, s",
        "first_median": "median time to first token, s"},
          output_dir / "throughput_latency.png")


def _plot(rows: list[dict[str, Any]], x: str, label: str,
          columns: dict[str, str], path: pathlib.Path):
  """Plots columns against the column `x`, with a panel per column.

  Each panel contains a curve per variant.

  Args:
    rows: rows of the table.
    x: column of the x-axis.
    label: label of the x-axis.
    columns: `{column: label of the y-axis}`.
    path: file of the figure.
  """
  figure, axes = style.panels(columns=len(columns), width=4.5)
  lines = {}
  for row in rows:
    lines.setdefault(row["variant"], []).append(row)
  drafters = list(dict.fromkeys(
      name.removesuffix(_WAITING) for name in lines))
  colors = dict(zip(drafters, style.shades(len(drafters))))
  for panel, (column, title) in zip(axes[0], columns.items()):
    for variant, line in lines.items():
      panel.plot([row[x] for row in line], [row[column] for row in line],
                 "--" if variant.endswith(_WAITING) else "-", marker="o",
                 label=variant, color=colors[variant.removesuffix(_WAITING)])
    style.tried(panel, [row[x] for row in rows])
    panel.set(xlabel=label, ylabel=title, ylim=(0, None))
  style.save(figure, path)


def main():
  loads = _loads()
  temperatures = common.numbers("--temperature", _TEMPERATURE.value)
  names = list(common.given("--drafter", _DRAFTER.value, "at least one "
                            "drafter, such as small"))
  if _PROMPT_TOKENS.value < 2 * _FEWEST:
    raise ValueError(f"--prompt_tokens is {_PROMPT_TOKENS.value}; set at "
                     f"least {2 * _FEWEST}, the minimum length of a prompt")
  sizes = _sizes()
  target, members, tokenizer = models.load_models(
      _TARGET.value, sum(map(compositions.members, names), []),
      ", ".join(compositions.NAMES), dtype=_DTYPE.value)
  drafters = {name: compositions.strategy(
      name, _GAMMA.value, target, members, datastore=_DATASTORE.value)
              for name in names}
  requests, source = _requests(tokenizer, temperatures)
  longest = max(len(one.prompt) for one in requests)
  prompts_lib.check_room(
      longest, 4 * _NEW_TOKENS.value, target.model.context_length)
  output_dir = common.output_directory(_OUTPUT_DIR.value, "study")
  fingerprint = resumable.fingerprint(
      [m.params for m in (target, *members.values())], names, _GAMMA.value,
      _DATASTORE.value, _CONTROLLER.value, sizes, _ROUNDS.value,
      [dataclasses.astuple(one) for one in requests])
  decode = functools.partial(
      resumable.run, make_configurations=_Variants(
          target, drafters, longest + 4 * _NEW_TOKENS.value),
      path=output_dir / "runs.jsonl")
  full, alone = _full_batches(requests, sizes, fingerprint, decode)
  most = max(row["tokens_per_second"] for row in full
             if row["variant"] == _ALONE)
  load = loads and _random_arrivals(
      requests, loads, most, fingerprint, decode, alone)
  _report(full, load, output_dir, {
      "source": source, "gamma": _GAMMA.value, "sizes": sizes,
      "most_tokens_per_second": most})


def _full_batches(requests: list[sj.serving.Request], sizes: Sequence[int],
                  fingerprint: str, decode: Callable):
  """Measures the first part, in which all requests arrive at once.

  Args:
    requests: requests of the study.
    sizes: batch sizes. Batches of one row are also decoded.
    fingerprint: hash of the settings.
    decode: `resumable.run` of the study's variants.

  Returns:
    The table rows, and `{variant: sequences of all requests}` from batches of
    one row.
  """
  units = [(fingerprint, size) for size in dict.fromkeys((1, *sizes))]
  runs = decode(units, lambda unit: (requests, [0.0] * len(requests), 0))
  alone = {name.removesuffix(_WAITING): record["texts"]
           for name, record in runs[units[0]].items()
           if name.endswith(_WAITING)}
  return _rows(runs, requests, alone), alone


def _random_arrivals(requests: list[sj.serving.Request], loads: list[float],
                     most: float, fingerprint: str, decode: Callable,
                     alone: dict[str, Any]):
  """Measures the second part, in which requests arrive at random times.

  Args:
    requests: requests of the study, half of which are used.
    loads: arrival rates, as fractions of `most`.
    most: highest throughput without drafts, in tokens per second.
    fingerprint: hash of the settings.
    decode: `resumable.run` of the study's variants.
    alone: see `_full_batches`.

  Returns:
    The table rows.
  """
  some = requests[:-(-len(requests) // 2)]
  arrivals = _arrivals(some) / most
  runs = decode([(fingerprint, _AT_RANDOM, share) for share in loads],
                lambda unit: (some, (arrivals / unit[2]).tolist(), 0))
  return _rows(runs, requests, alone)


def _loads() -> list[float]:
  """Returns the positive values of --loads."""
  loads = common.numbers("--loads", _LOADS.value)
  if not all(0 <= x < np.inf for x in loads):
    raise ValueError(f"--loads is {','.join(_LOADS.value)!r}; give shares of "
                     "at least 0, such as 0.25,0.5,1")
  return [x for x in loads if x]


def _arrivals(requests: list[sj.serving.Request]) -> np.ndarray:
  """Returns the arrival times of a Poisson process.

  The unit of time is one generated token. Divide the times by a throughput in
  tokens per second to get seconds. Then the requests need on average exactly
  this throughput.
  """
  mean = np.mean([one.max_new_tokens for one in requests])
  gaps = np.random.default_rng(_SEED.value).exponential(size=len(requests))
  return (np.cumsum(gaps) - gaps[0]) * mean


def _report(full: list[dict[str, Any]], load: list[dict[str, Any]],
            output_dir: pathlib.Path, facts: dict[str, Any]) -> None:
  """Prints and writes the tables and figures.

  Raises:
    ValueError: an output differs from the output of the same request alone.
  """
  _print_tables(full, load)
  for name, rows in (("throughput", full), ("throughput_load", load)):
    if rows:
      common.write_csv(output_dir / f"{name}.csv", rows)
  _draw(full, load, output_dir)
  common.finish(output_dir, "throughput", {
      "rows": full, "load": load, **facts})
  different = sum(row["different"] for row in full + load)
  if different:
    raise ValueError(
        f"{different} outputs differ from the outputs of the same requests "
        f"decoded alone; the tables in {output_dir} name the variants. In "
        "float32, a row must not depend on other rows")


if __name__ == "__main__":
  common.run(main)
