"""Measures throughput and latency of batched decoding with and without drafts.

A batch of --slots rows decodes requests of different lengths, temperatures and
seeds. A refilled batch (continuous batching) replaces each finished request by
the next one (`decode_rows`). A waiting batch (static batching) starts the next
requests when all its requests are finished. Larger batches have a higher
throughput, but each request takes longer.

  python experiments/throughput_study.py
  python experiments/throughput_study.py --drafter=small,ngram --slots=1,8

The latency of a request is the time from its prefill to its last token. The
output of each request must equal its output in a batch of one row ("alone").
The reported tokens per round are a lower bound, because length limits cut the
last rounds.

Run no other program at the same time. If the script is killed, the same command
resumes it. Output: throughput.csv, throughput.json and a plot in --output_dir.
"""

from lib import common  # before jax, which takes long to import

# isort: split
from collections.abc import Mapping
from collections.abc import Sequence
import pathlib
import time
from typing import Any
from typing import NamedTuple

from absl import flags
import jax
from lib import drafters as drafters_lib
from lib import flags as shared
from lib.configurations import base
from lib.figures import style
from lib.prompts import reading as prompts_lib
from lib.rollouts import resumable
import numpy as np

import specjax as sj
from specjax.data import Tokenizer
from specjax.decoding import prefill
from specjax.decoding import row_batches
from specjax.models import Pretrained
from specjax.utils import fingerprints

_TARGET = shared.target()
_DRAFTER = shared.drafters(help_=drafters_lib.HELP)
_DATASTORE = shared.datastore()
_GAMMA = shared.gamma(4)
_SLOTS = flags.DEFINE_list(
    "slots", "1,4,16", "Batch sizes to compare (numbers of requests decoded "
    "together), comma-separated")
_REQUESTS = flags.DEFINE_integer("requests", 200, "Number of requests", 1)
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
shared.figure_style()

_NO_DRAFTS, _WAITING = "none", ", waiting"
_FEWEST = 4  # minimum output length; the minimum prompt length is twice this
_ROUNDS = 16  # rounds per call; finished requests are replaced between calls
_WARM_TOKENS = 2  # tokens of warm-up requests, which are not timed


class _Request(NamedTuple):
  """A prompt and the settings of its continuation."""

  prompt: Sequence[int]
  new_tokens: int
  temperature: float
  seed: int


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
    made.append(_Request(
        tuple(rows[i % len(rows)][-length:]), int(new),
        temperatures[i % len(temperatures)], (_SEED.value + i) % 2**32))
  return made, read.source


class _Batch(base.Configuration):
  """Decodes all requests in the rows of a batch.

  In `resumable.run`, the prompt of this configuration is the list of requests.
  """

  def __init__(self, decoder: sj.Decoder, params: Any, rows: int,
               capacity: int, waits: bool):
    """Creates a configuration.

    Args:
      decoder: decoder of all requests.
      params: parameters of the decoder's models.
      rows: batch size.
      capacity: number of cache slots per row.
      waits: if True, the next requests start when all rows are finished.
    """
    self._decoder, self._params = decoder, params
    self._rows, self._capacity, self._waits = rows, capacity, waits
    self.program = decoder, rows

  def compile(self, requests: Sequence[_Request]) -> None:
    """Compiles programs for all prompt lengths."""
    short = {prefill.padded_length(len(one.prompt)): one._replace(
        new_tokens=_WARM_TOKENS) for one in requests}
    self.decode(list(short.values()), 0, 0)

  def decode(self, requests: Sequence[_Request], seed: int, request_id: int
             ) -> dict[str, Any]:
    """Decodes all requests and measures the time.

    Returns:
      Dict. "seconds" is the total time and "rounds" the number of rounds of all
      requests. "latency" and "texts" are lists over requests of the seconds
      from prefill to last token, and of hashes of the output.
    """
    del seed, request_id
    size = self._rows if self._waits else len(requests)
    begun, starts, rows, latency = time.perf_counter(), {}, {}, {}

    def start(index: int) -> sj.types.DecodeState:
      starts[index], one = time.perf_counter(), requests[index]
      return self._prefill([one.prompt], one.seed, index, one.temperature,
                           len(one.prompt) + one.new_tokens)

    for first in range(0, len(requests), size):
      group = range(first, min(first + size, len(requests)))
      idle = self._prefill([[0]] * self._rows, 0, len(requests), 1.0, 1)
      for place, row in row_batches.decode_rows(
          self._decoder, self._params, idle,
          [lambda index=index: start(index) for index in group],
          rounds=_ROUNDS):
        rows[first + place] = row
        latency[first + place] = time.perf_counter() - starts[first + place]
    order = range(len(requests))
    return {"seconds": time.perf_counter() - begun,
            "rounds": sum(len(row.stats.active) for row in rows.values()),
            "latency": [latency[i] for i in order],
            "texts": [fingerprints.fingerprint(rows[i].tokens)
                      for i in order]}

  def _prefill(self, prompts: Sequence[Sequence[int]], seed: int,
               request_id: int, temperature: float, limit: int):
    return self._decoder.prefill(
        self._params, prompts, jax.random.key(seed), limits=limit,
        request_ids=range(request_id, request_id + len(prompts)),
        temperature=temperature, capacity=self._capacity)


def _variants(target: Pretrained, drafters: Mapping[str, drafters_lib.Loaded],
              longest: int):
  """Returns a function from a batch size to `{variant: configuration}`."""
  alone = common.autoregressive(target.model, 1.0)
  found = {_NO_DRAFTS: (alone, {"target": target.params})}
  for name, drafter in drafters.items():
    found[name] = drafter.strategy.decoder(
        drafter.model, transform=alone.transform), drafter.params

  def of(size: int):
    return {name + _WAITING * waits: _Batch(
        decoder, params, size, longest + decoder.num_nodes, waits)
            for name, (decoder, params) in found.items()
            for waits in (False, True)[:1 + (size > 1)]}

  return of


def _rows(runs: Mapping[int, Mapping[str, Any]], requests: list[_Request]
          ) -> list[dict[str, Any]]:
  """Returns one table row per variant of every batch size.

  Args:
    runs: `{batch size: {variant: record}}`, including batches of one row.
    requests: requests of the study.
  """
  tokens, found = sum(one.new_tokens for one in requests), []
  for size, records in runs.items():
    speed = {name: tokens / record["seconds"]
             for name, record in records.items()}
    for name, record in records.items():
      alone = runs[1][name.removesuffix(_WAITING)]["texts"]
      waiting = speed.get(name + _WAITING)
      found.append({
          "slots": size, "variant": name, "requests": len(requests),
          "tokens": tokens, "seconds": record["seconds"],
          "tokens_per_second": speed[name],
          "emitted_per_round": tokens / record["rounds"],
          "latency_median": float(np.median(record["latency"])),
          "latency_p95": float(np.percentile(record["latency"], 95)),
          "over_none": speed[name] / speed[_NO_DRAFTS],
          "over_waiting": waiting and speed[name] / waiting,
          "different": sum(map(str.__ne__, record["texts"], alone))})
  return found


def _print_table(rows: list[dict[str, Any]]) -> None:
  wide = max(len(row["variant"]) for row in rows)
  print(f"{'slots':>5s} {'drafter':{wide}s} {'tokens/s':>9s} "
        f"{'over none':>10s} {'over waiting':>13s} {'median latency':>15s} "
        f"{'95 %':>8s} {'emitted/round':>14s}")
  for row in rows:
    waiting = row["over_waiting"]
    print(f"{row['slots']:5d} {row['variant']:{wide}s} "
          f"{row['tokens_per_second']:9.0f} {row['over_none']:10.2f} "
          f"{f'{waiting:.2f}' if waiting else '':>13s} "
          f"{row['latency_median']:13.3f} s {row['latency_p95']:6.2f} s "
          f"{row['emitted_per_round']:14.2f}")


def _draw(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
  """Plots throughput and latency against the batch size."""
  columns = {"tokens_per_second": "tokens per second, all requests",
             "latency_median": "median latency of a request, s"}
  figure, axes = style.panels(columns=len(columns), width=4.5)
  lines = {}
  for row in rows:
    lines.setdefault(row["variant"], []).append(row)
  drafters = list(dict.fromkeys(
      name.removesuffix(_WAITING) for name in lines))
  looks = dict(zip(drafters, style.looks(len(drafters))))
  for panel, (column, title) in zip(axes[0], columns.items()):
    for variant, line in lines.items():
      look = looks[variant.removesuffix(_WAITING)] | {
          "linestyle": "--" if variant.endswith(_WAITING) else "-"}
      panel.plot([row["slots"] for row in line], [row[column] for row in line],
                 label=variant, markersize=4, **look)
    style.tried(panel, [row["slots"] for row in rows])
    panel.set(xlabel="batch size (requests)", ylabel=title, ylim=(0, None))
  style.save(figure, path)


def main():
  temperatures = common.numbers("--temperature", _TEMPERATURE.value)
  names = list(common.given("--drafter", _DRAFTER.value, "at least one "
                            "drafter, such as small"))
  if _PROMPT_TOKENS.value < 2 * _FEWEST:
    raise ValueError(f"--prompt_tokens is {_PROMPT_TOKENS.value}; set at "
                     f"least {2 * _FEWEST}, the minimum length of a prompt")
  sizes = common.batch_sizes("--slots", _SLOTS.value)
  target, loaded, tokenizer = drafters_lib.load(
      _TARGET.value, names, drafters_lib.Options(
          gamma=_GAMMA.value, datastore=_DATASTORE.value), dtype=_DTYPE.value)
  drafters = dict(zip(names, loaded.values()))
  requests, source = _requests(tokenizer, temperatures)
  longest = max(len(one.prompt) for one in requests)
  prompts_lib.check_room(
      longest, 4 * _NEW_TOKENS.value, target.model.context_length)
  output_dir = common.output_directory(_OUTPUT_DIR.value, "study")
  common.claim(output_dir, "throughput")
  fingerprint = resumable.fingerprint(
      [target.params, *(drafters_lib.own_params(x.params, target.params)
                        for x in drafters.values())], names, _GAMMA.value,
      _DATASTORE.value, requests)
  runs = resumable.run(
      [(fingerprint, size) for size in dict.fromkeys((1, *sizes))],
      lambda unit: (requests, 0, 0),
      _variants(target, drafters, longest + 4 * _NEW_TOKENS.value),
      output_dir / "runs.jsonl")
  rows = _rows({size: records for (_, size), records in runs.items()},
               requests)
  _print_table(rows)
  common.write_csv(output_dir / "throughput.csv", rows)
  _draw(rows, output_dir / "throughput.png")
  common.finish(output_dir, "throughput", {
      "rows": rows, "source": source, "gamma": _GAMMA.value, "sizes": sizes})
  different = sum(row["different"] for row in rows)
  if different:
    raise ValueError(
        f"{different} outputs differ from the outputs of the same requests "
        f"decoded alone; the table in {output_dir} names the variants. In "
        "float32, a row must not depend on other rows")


if __name__ == "__main__":
  common.run(main)
