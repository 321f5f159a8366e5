"""Compares losses for the distillation of a draft model.

The target generates the training rows at temperature 1: it continues prompts
that are cut from --data. The weights of --drafter are trained on these rows
once per loss and seed. All runs start from the same weights, and the row order
depends only on the seed. Then each trained drafter is measured on held-out
prompts. Values of --losses:

  forward_kl, reverse_kl, jensen_shannon, likeliest, total_variation,
  lk_alpha, lk_hybrid       divergence between the distributions of target and
                            drafter, averaged over tokens
                            (specjax.training.divergences)
  adaspec                   forward KL on 40 % of the tokens: those where it
                            exceeds the forward KL of a reference drafter most.
                            The reference is trained with forward_kl
  token, block              expected number of accepted tokens per round under
                            this verification rule (objectives.AcceptedLength)

  python experiments/distillation_study.py

The table contains the block efficiency (tokens per target call) of token and
block verification at temperature 1, and the gain over the initial drafter. Each
drafter generates its own text with token verification. Block verification is
evaluated on the same drafts. Results are averaged over seeds. The 95 %
confidence intervals are over held-out prompts. If the script is killed, the
same command resumes it. Writes distillation.csv and distillation.json to
--output_dir.
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
import jax.numpy as jnp
from lib import drafters as drafters_lib
from lib import flags as shared
from lib import meshes
from lib import progress
from lib.configurations.decoders import Batch
from lib.rollouts import batches
import numpy as np

import specjax as sj
from specjax import analysis
from specjax import objectives
from specjax.data import corpora
from specjax.data import Tokenizer
from specjax.models import Pretrained
from specjax.models import Transformer
from specjax.training import distillation
from specjax.training import loop
from specjax.training import optimizers
from specjax.training import runs
from specjax.training.divergences import DIVERGENCES
from specjax.utils import files
from specjax.utils import processes
from specjax.utils.fingerprints import fingerprint

Params = dict[str, Any]
Row = dict[str, Any]  # of the results table
# `{rule: (accepted tokens [P], rounds [P])}` of P prompts.
Totals = dict[str, tuple[np.ndarray, np.ndarray]]
_RULES = ("token", "block")
_ADASPEC, _REFERENCE, _KEEP = "adaspec", "forward_kl", 0.4
_LOSSES = (*DIVERGENCES, _ADASPEC, *_RULES)

_TARGET = shared.target()
_DRAFTER = shared.drafter(
    "Draft model whose weights are trained further: small or tiny (bundled, "
    f"for the bundled target), {shared.PUBLISHED}")
_DTYPE = shared.dtype()
_LOSS = flags.DEFINE_list(
    "losses", list(_LOSSES), "Training losses to compare, comma-separated: "
    f"{', '.join(_LOSSES)}. Default: all")
_SEEDS = flags.DEFINE_integer(
    "seeds", 3, "Number of training runs per loss, each with another order of "
    "the training rows", 1)
_DATA = shared.data("Text from which prompts are cut")
_FIELD = shared.field()
_OUTPUT_DIR = shared.output_dir("results/distillation")
_ROWS = flags.DEFINE_integer(
    "rows", 2048, "Number of training rows. A row is a prompt of "
    "--prompt_tokens with its continuation by the target", 1)
_PROMPT_TOKENS = shared.prompt_tokens(
    32, "Length in tokens of the prompt at the start of each training row. "
    "Held-out prompts have twice this length")
_CONTINUATION = flags.DEFINE_integer(
    "continuation", 160, "Number of tokens that the target generates after the "
    "prompt of each training row; at least twice --gamma", 1)
_BATCH_SIZE = shared.batch_size()
_STEPS = shared.steps(300, "Number of training steps per loss and seed")
_LEARNING_RATE = shared.learning_rate(1e-3, "Peak learning rate of AdamW")
_GAMMA = shared.gamma(8)
_NUM_PROMPTS = flags.DEFINE_integer(
    "num_prompts", 64, "Number of held-out prompts on which the drafters are "
    "measured, at least 2", 2)
_ROUNDS = flags.DEFINE_integer(
    "rounds", 32, "Number of decoding rounds (target calls) per held-out "
    "prompt", 1)
_SEED = shared.seed("Random seed for prompts and sampling")
_BATCH = batches.untimed_flags(32)
_MEASURED = "measured.json"  # results of a training run, in its directory


def _objective(loss: str, model: Transformer, target: Transformer
               ) -> objectives.Objective:
  """Returns the objective of a loss."""
  if loss in _RULES:
    return objectives.AcceptedLength(
        model=model, target=target, rule=loss, gamma=_GAMMA.value)
  if loss == _ADASPEC:
    return objectives.Distillation(model=model, target=target, keep=_KEEP)
  return objectives.Distillation(model=model, target=target, divergence=loss)


def _texts(target: Pretrained, tokenizer: Tokenizer, output_dir: pathlib.Path,
           batch: Batch) -> tuple[np.ndarray, np.ndarray]:
  """Returns training rows `[R, S + 1]` and held-out prompts `[P, T]`.

  The rows are prompts from the training text with the target's continuations.
  """
  learned, held_out = corpora.split(
      corpora.read_documents(_DATA.value, _FIELD.value))
  cut = lambda side, count, length, seed: distillation.cut_prompts(
      tokenizer.encode_stream([d.text for d in side]), count, length, seed)
  rows = distillation.sample_rows(
      common.autoregressive(target.model, 1.0), {"target": target.params},
      cut(learned, _ROWS.value, _PROMPT_TOKENS.value, _SEED.value),
      length=_PROMPT_TOKENS.value + _CONTINUATION.value,
      directory=output_dir / "rows", seed=_SEED.value,
      rows_per_file=batch.size, placement=batch.placement)
  return rows, cut(held_out, _NUM_PROMPTS.value, 2 * _PROMPT_TOKENS.value,
                   _SEED.value + 1)


def _trained(loss: str, seed: int, first: sj.zoo.Member, target: Pretrained,
             rows: np.ndarray, directory: pathlib.Path,
             reference: Params | None, batch: Batch) -> Params:
  """Trains a drafter and returns its parameters.

  Resumes from a checkpoint in `directory` if there is one.
  """
  order = distillation.RowBatches(
      np.arange(len(rows)), _BATCH_SIZE.value, seed)
  weights = np.zeros((_BATCH_SIZE.value, rows.shape[1] - 1), np.float32)
  weights[:, _PROMPT_TOKENS.value - 1:] = 1
  files.claim(directory / runs.MANIFEST, {
      "drafter": fingerprint(first.params), "loss": loss, "seed": seed,
      "rows": fingerprint(rows),
      "reference": fingerprint(reference),
      **{flag.name: flag.value for flag in (
          _BATCH_SIZE, _STEPS, _LEARNING_RATE, _GAMMA, _PROMPT_TOKENS)}},
              "run")
  mesh = batch.placement and batch.placement.mesh
  networks = {"target": target.model, "drafter": first.model}
  frozen = {"target": target.params}
  if loss == _ADASPEC:
    frozen["reference"], networks["reference"] = reference, first.model
  specs = meshes.specs(mesh, networks)
  return loop.Trainer(
      objective=_objective(loss, first.model, target.model),
      optimizer=optimizers.adamw(optimizers.trapezoid(
          _LEARNING_RATE.value, _STEPS.value, _STEPS.value // 20,
          _STEPS.value // 2)),
      batch=lambda step: {"tokens": rows[order.batch(step)],
                          "weights": weights},
      steps=_STEPS.value, directory=directory, seed=seed,
      tokens_per_step=weights.size, mesh=mesh, param_shardings=specs).run(
          {"drafter": loop.cast(first.params, jnp.float32)},
          frozen)["drafter"]


def _measured(decoder: sj.Decoder, params: Params, prompts: np.ndarray,
              batch: Batch) -> Totals:
  """Decodes P prompts and returns `{rule: (accepted [P], rounds [P])}`.

  The accepted tokens are the exact expectation, given the drafts.
  """
  params = batches.placed(batch, decoder, params)
  room = _ROUNDS.value * decoder.num_nodes
  limit = min(prompts.shape[1] + room, decoder.context_length)
  accepted, rounds = [], []
  for start in range(0, len(prompts), batch.size):
    some = prompts[start:start + batch.size]
    padding = batch.size - len(some) if batch.placement else 0
    state = decoder.prefill(
        params, list(np.pad(some, ((0, padding), (0, 0)), "edge")),
        jax.random.key(_SEED.value), limits=limit,
        request_ids=start + np.arange(len(some) + padding),
        placement=batch.placement)
    _, stats = decoder.decode(params, state, rounds=_ROUNDS.value)
    sj.decoding.raise_if_not_finite(stats)
    stats = processes.gathered(stats)
    accepted.append(np.asarray(stats.expected, np.float64).sum(0)[:len(some)])
    rounds.append(np.asarray(stats.active).sum(0)[:len(some)])
  accepted, rounds = map(np.concatenate, (accepted, rounds))
  return {rule: (accepted[:, i], rounds) for i, rule in enumerate(_RULES)}


def _stored(path: pathlib.Path, key: str, measure: Callable[[], Totals]
            ) -> Totals:
  """Returns the totals from a file, or measures and stores them.

  Args:
    path: JSON file.
    key: fingerprint of all settings. A file with another key is replaced.
    measure: function that returns the totals.
  """
  def read():
    stored = files.read_json(path, "delete it") if path.exists() else {}
    return stored["totals"] if stored.get("key") == key else None

  totals = processes.by_the_first(read)
  if totals is None:
    totals = {rule: [x.tolist() for x in pair]
              for rule, pair in measure().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, {"key": key, "totals": totals})
  return {rule: tuple(map(np.asarray, pair)) for rule, pair in totals.items()}


def _row(loss: str, runs: Sequence[Totals], before: Totals) -> Row:
  """Returns the table row of a loss.

  Args:
    loss: name of the loss.
    runs: totals of the drafter of each seed.
    before: totals of the initial drafter.
  """
  row = {"loss": loss, "seeds": len(runs)}
  for rule in _RULES:
    accepted, rounds = (sum(run[rule][i] for run in runs) for i in (0, 1))
    tokens = analysis.block_efficiency(
        accepted, rounds, longest=_GAMMA.value)
    gain = analysis.relative_gain(
        accepted, rounds, *before[rule], longest=_GAMMA.value)
    row |= {"clusters": tokens.clusters, **gain.columns(f"{rule}_gain"),
            **tokens.columns(f"{rule}_tokens_per_round")}
    row[f"{rule}_by_seed"] = [
        1 + float(run[rule][0].sum() / run[rule][1].sum()) for run in runs]
  return row


def _print_table(rows: Sequence[Row]) -> None:
  shown = lambda row, name, form: format(
      analysis.Estimate.of_columns(row, name), form)
  print(f"{'loss':16s}" + "".join(
      f" {rule + ', tokens/round':>26s} {'gain, own rollouts':>30s}"
      for rule in _RULES))
  for row in rows:
    print(f"{row['loss']:16s}" + "".join(
        f" {shown(row, f'{rule}_tokens_per_round', '.3f'):>26s} "
        f"{shown(row, f'{rule}_gain', '+.1%'):>30s}" for rule in _RULES))


def _losses() -> list[str]:
  """Returns the values of --losses, without duplicates."""
  losses = list(dict.fromkeys(common.given(
      "--losses", _LOSS.value, "at least one, such as forward_kl")))
  for loss in losses:
    if loss not in _LOSSES:
      raise ValueError(f"--losses contains {loss!r}; choose among "
                       f"{', '.join(_LOSSES)}")
  if _CONTINUATION.value < 2 * _GAMMA.value:
    raise ValueError(f"--continuation is {_CONTINUATION.value}, less than "
                     f"twice --gamma={_GAMMA.value}; set at least "
                     f"{2 * _GAMMA.value}")
  return losses


def _totals(losses: list[str], target: Pretrained, first: Pretrained,
            texts: tuple[np.ndarray, np.ndarray], output_dir: pathlib.Path,
            batch: Batch) -> tuple[Totals, dict[str, list[Totals]]]:
  """Returns the totals of the initial drafter and of all trained drafters.

  The totals of a trained drafter are stored as soon as they are measured.

  Returns:
    The totals of the initial drafter, and `{loss: [totals of each seed]}`.
  """
  rows, prompts = texts
  decoder = sj.Decoder(
      target=target.model, verifier=sj.verifiers.Token(),
      observers=(sj.verifiers.Block(),),
      drafter=sj.drafters.draft_model(model=first.model, gamma=_GAMMA.value),
      transform=sj.LogitsTransform(temperature=1.0))
  settings = fingerprint(
      target.params, first.params, rows, prompts, repr(decoder), *(
          flag.value for flag in (_BATCH_SIZE, _STEPS, _LEARNING_RATE,
                                  _PROMPT_TOKENS, _ROUNDS, _SEED)))

  @functools.cache
  def trained(loss: str, seed: int) -> Params:
    reference = trained(_REFERENCE, seed) if loss == _ADASPEC else None
    print(f"{loss}, seed {seed}", file=sys.stderr)
    return _trained(
        loss, seed, first, target, rows, common.output_directory(
            output_dir / f"{loss}_{seed}", "run"), reference, batch)

  measure = lambda drafter: _measured(
      decoder, {"target": target.params, "drafter": drafter}, prompts, batch)
  run = lambda loss, seed: _stored(
      output_dir / f"{loss}_{seed}" / _MEASURED, fingerprint(
          settings, loss, seed),
      lambda: measure(loop.cast(
          trained(loss, seed), sj.models.default_dtype())))
  progress.say("measuring the drafter before training")
  before = measure(first.params)
  return before, {loss: [run(loss, seed) for seed in range(_SEEDS.value)]
                  for loss in losses}


def main() -> None:
  losses = _losses()
  batch = batches.settings(_BATCH, splits_prompts=False)
  target, loaded, tokenizer = drafters_lib.load(
      _TARGET.value, [_DRAFTER.value], dtype=_DTYPE.value, same_tokens=True)
  first = next(iter(loaded.values())).draft_model
  for loss in losses:  # rejects invalid combinations before writing
    _objective(loss, first.model, target.model)
  output_dir = common.output_directory(_OUTPUT_DIR.value, "study")
  common.claim(output_dir, "distillation")
  progress.say("reading the text")
  texts = _texts(target, tokenizer, output_dir, batch)
  before, totals = _totals(losses, target, first, texts, output_dir, batch)
  found = [_row("none", [before], before), *(
      _row(loss, runs, before) for loss, runs in totals.items())]
  _print_table(found)
  common.write_csv(output_dir / "distillation.csv", [
      {name: x for name, x in row.items() if not isinstance(x, list)}
      for row in found])
  common.finish(output_dir, "distillation", {
      "rows": found, "gamma": _GAMMA.value, "steps": _STEPS.value,
      "tokens": _STEPS.value * _BATCH_SIZE.value * _CONTINUATION.value})


if __name__ == "__main__":
  common.run(main)
