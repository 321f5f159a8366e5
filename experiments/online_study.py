"""Measures whether an online drafter adapts to a change of topic.

Simulated users send prompts to the target: first code, then prose. The online
drafter (`drafters.Online`) is a draft model with a small trainable correction
of its logits. During decoding, the correction is trained on the target's
distributions. Each user has a separate correction, and all requests of the user
train it. For comparison, the same draft model without a correction ("fixed")
decodes the same requests.

  python experiments/online_study.py
  python experiments/online_study.py --prose=mine.txt --positions=rejected

The table contains the expected number of accepted tokens per round, given the
drafts, averaged over windows of --window generated tokens per user. Confidence
intervals are 95 %, over the users of all --seeds. Three values summarise the
accepted tokens per round of each drafter:

  lost        last window of code minus first window of prose
  recovered   (last window of prose minus first window of prose) / lost. The
              value is meaningless if the interval of "lost" contains 0
  over_fixed  (this drafter minus fixed drafter, in the last window of prose) /
              (mean over code minus mean over prose, of the fixed drafter). This
              value does not depend on the first window of prose, in which the
              online drafter already adapts

All random choices depend on --seed. Runs with the same flags generate the same
text. To compare runs, online.json contains hashes of the text of each drafter
and seed ("texts"). If the script is killed, or started again with more --seeds,
it resumes after the last completed seed. Writes online.csv, online.json and
online.png to --output_dir.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import pathlib
import sys
from typing import Any

from lib import common  # before jax, which takes long to import

# isort: split
from absl import flags
import jax
from lib import drafters as drafters_lib
from lib import flags as shared
from lib import progress
from lib.figures import style
import numpy as np
import optax

import specjax as sj
from specjax import analysis
from specjax.data import corpora
from specjax.data import Tokenizer
from specjax.methods.draft_models import online
from specjax.training import distillation
from specjax.training import runs
from specjax.utils import files
from specjax.utils.fingerprints import fingerprint

Params = dict[str, Any]
Row = dict[str, Any]  # of a results table
# `{(topic, window): accepted tokens per round [users]}`.
Windows = dict[tuple[int, int], np.ndarray]
_OPTIMIZERS = {
    "adam": optax.adam, "rmsprop": optax.rmsprop, "sgd": optax.sgd}
_LICENSE = pathlib.Path(__file__).parents[1] / "LICENSE"

_TARGET = shared.target()
_DRAFTER = shared.drafter()
_DTYPE = shared.dtype()
_CODE = shared.data("Text of the first topic, from whose held-out documents "
                    "prompts are cut")
_FIELD = shared.field()
_PROSE = flags.DEFINE_string(
    "prose", None, "Text of the second topic, from which prompts are cut; it "
    "takes the same values as --data. Default: the licence of specjax")
_CODE_TOKENS = flags.DEFINE_integer(
    "code_tokens", 5000, "Number of tokens generated per user before the "
    "change of topic", 1)
_PROSE_TOKENS = flags.DEFINE_integer(
    "prose_tokens", 20000, "Number of tokens generated per user after the "
    "change of topic", 1)
_WINDOW = flags.DEFINE_integer(
    "window", 1000, "Number of generated tokens per user over which accepted "
    "tokens per round are averaged for one row of the table", 1)
_USERS = flags.DEFINE_integer(
    "users", 8, "Number of simulated users (batch rows), at least 2. The "
    "online drafter trains one correction per user", 2)
_PROMPT_TOKENS = shared.prompt_tokens(
    64, "Length in tokens of each request's prompt")
_ROUNDS = flags.DEFINE_integer(
    "rounds", 24, "Number of decoding rounds (target calls) per request", 1)
_GAMMA = shared.gamma(4)
_TEMPERATURE = shared.temperature()
_OPTIMIZER = flags.DEFINE_enum(
    "optimizer", "sgd", list(_OPTIMIZERS), "Optimiser that trains the online "
    "drafter's correction of its logits")
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 0.03, "Learning rate of the online drafter's correction",
    0.0)
_RANK = flags.DEFINE_integer(
    "rank", 8, "Rank of the online drafter's correction, a low-rank map from "
    "hidden states to logits with a bias. 0 trains only the bias", 0)
_POSITIONS = flags.DEFINE_enum(
    "positions", "path", list(online.POSITIONS), "Positions of a draft on "
    "which the online drafter is trained: rejected (the first rejected token), "
    "path (all accepted tokens and the next token) or all (all draft tokens "
    "and the position after the last)")
_SEEDS = flags.DEFINE_integer(
    "seeds", 1, "Number of repetitions, each with --users other users and "
    "other random prompts", 1)
_SEED = shared.seed()
_OUTPUT_DIR = shared.output_dir("results/online")
shared.figure_style()


def _streams(tokenizer: Tokenizer) -> list[np.ndarray]:
  """Returns the token ids of the documents of both topics."""
  _, code = corpora.split(corpora.read_documents(_CODE.value, _FIELD.value))
  prose = corpora.read_documents(_PROSE.value or str(_LICENSE), _FIELD.value)
  return [tokenizer.encode_stream([d.text for d in side])
          for side in (code, prose)]


def _decoded(decoder: sj.Decoder, params: Params, streams: Sequence[np.ndarray],
             learns: bool, seed: int) -> tuple[Windows, str]:
  """Decodes all requests of all users for one seed.

  Args:
    decoder: decoder with the online or the fixed drafter.
    params: parameters of target and drafter.
    streams: token ids of both topics.
    learns: whether the drafter is online.
    seed: seed of prompts and sampling.

  Returns:
    `{(topic, window): accepted tokens per round [users]}`, with windows of
    --window tokens per user, and a hash of the generated text.
  """
  drafter, learned, found, written = decoder.drafter, None, [], []
  limit = _PROMPT_TOKENS.value + _ROUNDS.value * decoder.num_nodes
  for topic, (stream, most) in enumerate(zip(
      streams, (_CODE_TOKENS.value, _PROSE_TOKENS.value))):
    before = 0.0
    while before < most:
      number = len(found)
      prompts = distillation.cut_prompts(
          stream, _USERS.value, _PROMPT_TOKENS.value,
          number + (seed << 20))
      state = decoder.prefill(
          params, list(prompts),
          jax.random.fold_in(jax.random.key(seed), number),
          limits=limit)
      if learns and learned is not None:
        state = drafter.going_on(state, learned)
      state, stats = decoder.decode(params, state, _ROUNDS.value)
      sj.decoding.raise_if_not_finite(stats)
      learned, tokens = state.drafter, np.asarray(state.tokens)
      new = np.asarray(state.lengths) - _PROMPT_TOKENS.value
      found.append({
          "topic": topic, "before": before, "written": new,
          "accepted": np.asarray(stats.expected, np.float64)[..., 0].sum(0)})
      written += [row[:_PROMPT_TOKENS.value + n] for row, n in zip(tokens, new)]
      before += float(new.mean())
      if number % 20 == 0:
        print(f"{('code', 'prose')[topic]}: {before:.0f} tokens",
              file=sys.stderr)
  return _windows(found), fingerprint(np.concatenate(written))


def _kept(path: pathlib.Path, decode: Callable[[], tuple[Windows, str]]
          ) -> tuple[Windows, str]:
  """Returns the result of `decode`, cached in the JSON file `path`."""
  if path.exists():
    kept = files.read_json(path, "delete it")
  else:
    windows, text = decode()
    kept = {"text": text, "windows": [
        [*key, found.tolist()] for key, found in windows.items()]}
    files.write_json(path, kept)
  return {(topic, window): np.asarray(found)
          for topic, window, found in kept["windows"]}, kept["text"]


def _windows(found: Sequence[Row]) -> Windows:
  """Returns the mean over the requests that start in each window.

  Args:
    found: one dict per request of all users.
  """
  groups = {}
  for one in found:
    groups.setdefault(
        (one["topic"], int(one["before"] // _WINDOW.value)), []).append(
            one["accepted"] / _ROUNDS.value)
  return {key: np.mean(group, axis=0) for key, group in groups.items()}


def _joined(seeds: Sequence[Windows]) -> Windows:
  """Returns the windows that all seeds have, with the users of all seeds."""
  return {key: np.concatenate([windows[key] for windows in seeds])
          for key in seeds[0] if all(key in windows for windows in seeds)}


def _of_all_seeds(decoder: sj.Decoder, params: Params,
                  streams: Sequence[np.ndarray], output_dir: pathlib.Path
                  ) -> tuple[Windows, tuple[str, ...]]:
  """Returns the windows of all users, and a hash of the text of each seed."""
  learns = isinstance(decoder.drafter, sj.drafters.Online)
  name = "learning" if learns else "fixed"
  seeds = range(_SEED.value, _SEED.value + _SEEDS.value)
  found, texts = zip(*(_kept(
      output_dir / f"{name}_{seed}.json", functools.partial(
          _decoded, decoder, params, streams, learns, seed))
                       for seed in seeds))
  return _joined(found), texts


def _topic(windows: Windows, topic: int) -> list[np.ndarray]:
  return [windows[key] for key in windows if key[0] == topic]


def _summary(windows: Windows, fixed: Windows) -> Row:
  """Returns `lost`, `recovered` and `over_fixed` (see the module docstring).

  Fractions are ratios of means over users. They are returned even if `lost` is
  negative by chance. To omit them in this case would bias them, because it
  would select results by a noisy value.

  Args:
    windows: windows of the drafter.
    fixed: windows of the fixed drafter.
  """
  code, first, last = (_topic(windows, topic)[at]
                       for topic, at in ((0, -1), (1, 0), (1, -1)))
  costs = np.mean(_topic(fixed, 0), axis=0) - np.mean(_topic(fixed, 1), axis=0)
  found = {
      "lost": analysis.estimate(np.divide, code - first, np.ones(len(code))),
      "recovered": analysis.estimate(np.divide, last - first, code - first),
      "over_fixed": analysis.estimate(
          np.divide, last - _topic(fixed, 1)[-1], costs)}
  columns = {"clusters": found["lost"].clusters}
  for name, one in found.items():
    columns |= one.columns(name)
  return columns


def _rows(arm: str, windows: Windows) -> list[Row]:
  rows = []
  for (topic, window), accepted in windows.items():
    mean = analysis.ratio_estimate(accepted, np.ones(len(accepted)),
                                   least=0, most=_GAMMA.value)
    rows.append({
        "drafter": arm, "topic": ("code", "prose")[topic],
        "tokens": (window + 0.5) * _WINDOW.value, "clusters": mean.clusters,
        **mean.columns("accepted")})
  return rows


def _plot(rows: Sequence[Row], path: pathlib.Path) -> None:
  figure, grid = style.panels(width=6.0)
  axes, arms = grid[0, 0], list(dict.fromkeys(r["drafter"] for r in rows))
  for arm, look in zip(arms, style.looks(len(arms))):
    mine = [r for r in rows if r["drafter"] == arm]
    place = [r["tokens"] - (r["topic"] == "code") * _CODE_TOKENS.value
             for r in mine]
    axes.errorbar(place, [r["accepted"] for r in mine],
                  style.errors(mine, "accepted"), label=arm, markersize=4,
                  **look)
  axes.axvline(0, color="black", linewidth=0.8)
  axes.set_xlabel("tokens generated after the change from code to prose")
  axes.set_ylabel("accepted tokens per round")
  style.save(figure, path, "Drafter that is trained during decoding; 95 % "
             "intervals over users")


def _print_table(rows: Sequence[Row], summaries: dict[str, Row]) -> None:
  for row in rows:
    print(f"{row['drafter']:20s} {row['topic']:5s} {row['tokens']:7.0f} "
          f"{analysis.Estimate.of_columns(row, 'accepted'):.3f}")
  for arm, found in summaries.items():
    for name, words in (
        ("lost", "accepted tokens per round lost by the change to prose"),
        ("recovered", "of this loss recovered at the end (fraction)"),
        ("over_fixed", "of the fixed drafter's loss gained at the end")):
      print(f"{arm}: {analysis.Estimate.of_columns(found, name):.3f} {words}")


def main() -> None:
  target, loaded, tokenizer = drafters_lib.load(
      _TARGET.value, [_DRAFTER.value], dtype=_DTYPE.value, same_tokens=True)
  [(name, drafter)] = loaded.items()
  small = drafter.draft_model
  output_dir = common.output_directory(_OUTPUT_DIR.value, "study")
  common.claim(output_dir, "online")
  streams = _streams(tokenizer)
  params = {"target": target.params, "drafter": small.params}
  files.claim(output_dir / runs.MANIFEST, {
      "weights": fingerprint(params),
      "texts": fingerprint(streams),
      **{flag.name: flag.value for flag in (
          _CODE_TOKENS, _PROSE_TOKENS, _WINDOW, _USERS, _PROMPT_TOKENS, _ROUNDS,
          _GAMMA, _TEMPERATURE, _OPTIMIZER, _LEARNING_RATE, _RANK, _POSITIONS)
         }}, "study")
  drafters = {
      f"{name}, fixed": sj.drafters.draft_model(
          model=small.model, gamma=_GAMMA.value),
      f"{name}, learning": sj.drafters.Online(
          model=small.model, gamma=_GAMMA.value, rank=_RANK.value,
          learning_rate=_LEARNING_RATE.value, positions=_POSITIONS.value,
          optimizer=_OPTIMIZERS[_OPTIMIZER.value])}
  windows, texts = {}, {}
  for arm, drafter in drafters.items():
    decoder = sj.Decoder(
        target=target.model, drafter=drafter, verifier=sj.verifiers.Block(),
        transform=sj.LogitsTransform(temperature=_TEMPERATURE.value))
    progress.say(f"decoding with {arm}")
    windows[arm], texts[arm] = _of_all_seeds(
        decoder, params, streams, output_dir)
  rows = [row for arm, found in windows.items() for row in _rows(arm, found)]
  fixed = windows[next(iter(windows))]
  summaries = {arm: _summary(found, fixed) for arm, found in windows.items()}
  _print_table(rows, summaries)
  common.write_csv(output_dir / "online.csv", rows)
  _plot(rows, output_dir / "online.png")
  common.finish(output_dir, "online", {
      "rows": rows, "summaries": summaries, "texts": texts,
      "gamma": _GAMMA.value, "learning_rate": _LEARNING_RATE.value,
      "optimizer": _OPTIMIZER.value, "rank": _RANK.value,
      "positions": _POSITIONS.value, "temperature": _TEMPERATURE.value,
      "users": _USERS.value, "seeds": _SEEDS.value})


if __name__ == "__main__":
  common.run(main)
