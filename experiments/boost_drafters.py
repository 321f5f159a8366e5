"""Trains several draft models that complement each other (SpecInfer).

Implements the "boost-tuning" of Miao et al. 2023 (arXiv:2305.09781, section 3).
Drafter 1 is --drafter. The target generates the training rows: it continues
prompts that are cut from --data. Drafter 2 starts from the weights of drafter 1
and is fine-tuned only on the tokens that drafter 1 does not rank first. Each
further drafter also starts from drafter 1, and is fine-tuned on the tokens that
no earlier drafter ranks first.

By default (--window=1), this selection is made for every token. The paper
instead excludes a complete continuation if an earlier drafter ranks all its
tokens first. For the selection of the paper, set --window to the value of
--continuation.

  python experiments/boost_drafters.py --output_dir=/tmp/boosted

Writes a model with its tokenizer, metrics.csv and checkpoints to drafter_2/,
drafter_3/, ... in --output_dir. If the script is killed, the same command
resumes it with identical results. To draft with all models, use
`specjax.drafters.Paths(models=(first, second, ...))`. The last line of stdout
names boost_drafters.json, which contains for k = 1, 2, ... drafters:

  coverage         fraction of the target's held-out tokens that at least one
                   of the first k drafters ranks first
  top_k_coverage   for comparison: fraction of these tokens that drafter 1 ranks
                   among its k most likely tokens

It also contains tokens_per_pass, the block efficiency with one draft path from
each drafter ("boosted"), and with equally many paths from drafter 1
("first_alone").
"""

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
import numpy as np

import specjax as sj
from specjax import objectives
from specjax import strategies
from specjax.data import corpora
from specjax.data import Tokenizer
from specjax.models import checkpoint
from specjax.models import Pretrained
from specjax.models import Transformer
from specjax.training import distillation
from specjax.training import evaluation
from specjax.training import loop
from specjax.training import optimizers
from specjax.training import runs
from specjax.utils import processes
from specjax.utils.files import claim
from specjax.utils.fingerprints import fingerprint

Params = dict[str, Any]
_TARGET = shared.target()
_DRAFTER = shared.drafter(
    "Drafter 1, the draft model from which all others are trained: small or "
    "tiny (bundled, for the bundled target), smol (bundled, for smollm2), "
    f"{shared.PUBLISHED}")
_DTYPE = shared.training_dtype("target and drafters")
_DRAFTERS = flags.DEFINE_integer(
    "num_drafters", 2, "Total number of drafters including --drafter, at least "
    "2. All drafters except --drafter are trained", 2)
_DATA = shared.data("Text from which prompts are cut")
_FIELD = shared.field()
_OUTPUT_DIR = shared.output_dir(
    None, "Directory for the drafters and the sampled rows")
_ROWS = flags.DEFINE_integer(
    "rows", 2048, "Number of training rows. A row is a prompt of "
    "--prompt_tokens with its continuation by the target", 1)
_HELD_OUT_ROWS = shared.held_out_rows(64)
_PROMPT_TOKENS = shared.prompt_tokens(
    64, "Length in tokens of the prompt at the start of each row")
_CONTINUATION = flags.DEFINE_integer(
    "continuation", 192, "Number of tokens that the target generates after the "
    "prompt of each row", 1)
_TEMPERATURE = shared.temperature(1.0, "Sampling temperature of the target")
_WINDOW = flags.DEFINE_integer(
    "window", 1, "Length in tokens of a training window, a divisor of "
    "--continuation. A window is excluded from training if an earlier drafter "
    "ranks all its tokens first. 1 selects single tokens; the value of "
    "--continuation selects complete continuations, as in the paper", 1)
_BATCH_SIZE = shared.batch_size()
_STEPS = shared.steps(1000, "Number of training steps of each drafter")
_LEARNING_RATE = shared.learning_rate(1e-3, "Peak learning rate of AdamW")
_WARMUP_FRACTION = shared.warmup_fraction()
_DECAY_FRACTION = shared.decay_fraction()
_EVALUATE_EVERY = shared.evaluate_every()
_LENGTH = shared.gamma(
    4, "Draft length in tokens of each path, in the final measurement of "
    "tokens_per_pass")
_SAVE_DTYPE = shared.save_dtype()
_SEED = shared.seed("Random seed for prompts, sampling and shuffling")
_MESH = shared.mesh()

_BATCH = 16  # rows per pass that computes ranks


def _rows(target: Pretrained, first: sj.zoo.Member, tokenizer: Tokenizer,
          output_dir: pathlib.Path, mesh: jax.sharding.Mesh | None
          ) -> dict[str, np.ndarray]:
  """Returns rows of prompts with the target's continuations.

  Returns:
    `{"training": ids, "held_out": ids}`. The ids are `[R, S + 1]`.

  Raises:
    ValueError: the lengths or numbers of rows do not fit together.
  """
  length = _PROMPT_TOKENS.value + _CONTINUATION.value
  context, owner = min((target.model.context_length, "target"),
                       (first.model.context_length, "drafter"),
                       key=lambda pair: pair[0])
  if length > context:
    raise ValueError(
        f"--prompt_tokens is {_PROMPT_TOKENS.value} and --continuation "
        f"{_CONTINUATION.value}; together they may be {context}, the context "
        f"length of the {owner}")
  if _CONTINUATION.value % _WINDOW.value:
    raise ValueError(f"--window is {_WINDOW.value} and does not divide "
                     f"--continuation={_CONTINUATION.value}; set a divisor")
  if _ROWS.value < _BATCH_SIZE.value:
    raise ValueError(f"--rows is {_ROWS.value}, less than --batch_size="
                     f"{_BATCH_SIZE.value}; set at least one batch of rows")
  decoder = common.autoregressive(target.model, _TEMPERATURE.value)
  sides = corpora.split(corpora.read_documents(_DATA.value, _FIELD.value))
  return {
      name: distillation.sample_rows(
          decoder, {"target": target.params}, distillation.cut_prompts(
              tokenizer.encode_stream([d.text for d in side]), count,
              _PROMPT_TOKENS.value, _SEED.value + i),
          length=length, directory=output_dir / "rows" / name,
          seed=_SEED.value + i, placement=meshes.placement(mesh))
      for i, (name, side, count) in enumerate(zip(
          ("training", "held_out"), sides,
          (_ROWS.value, _HELD_OUT_ROWS.value)))}


@functools.partial(jax.jit, static_argnames=("model", "first"))
def _ranks_of(model: Transformer, params: Params, tokens: jax.Array, first: int
              ) -> jax.Array:
  logits = model(params, tokens[:, :-1]).logits[:, first:]
  return evaluation.rank(logits, tokens[:, first + 1:])


def _ranks(drafter: sj.zoo.Member, rows: np.ndarray) -> np.ndarray:
  """Returns the drafter's ranks of the target's tokens, `[R, continuation]`."""
  return np.concatenate([
      np.asarray(processes.gathered(_ranks_of(
          drafter.model, drafter.params, rows[i:i + _BATCH],
          _PROMPT_TOKENS.value - 1)))
      for i in range(0, len(rows), _BATCH)])


def missed(proposed: np.ndarray, window: int) -> np.ndarray:
  """Returns a mask of the windows that no drafter proposes completely.

  Args:
    proposed: bool `[drafters, R, T]`. True if the drafter ranks the token
      first.
    window: length of a window in tokens, a divisor of T.

  Returns:
    bool `[R, T]`. True for each token of such a window.
  """
  rows, size = proposed.shape[1:]
  whole = proposed.reshape(-1, rows, size // window, window).all(-1).any(0)
  return ~np.repeat(whole, window, axis=-1)


def _train(number: int, first: sj.zoo.Member, drafters: Sequence[sj.zoo.Member],
           rows: np.ndarray, held_out: np.ndarray, tokenizer: Tokenizer,
           output_dir: pathlib.Path, mesh: jax.sharding.Mesh | None,
           specs: Params | None, dtype: str) -> sj.zoo.Member:
  """Trains and returns drafter `number`.

  It is trained on the windows of `rows` that the earlier `drafters` miss.
  """
  directory = common.output_directory(output_dir / f"drafter_{number}", "run")
  model = first.model
  weights = np.zeros((len(rows), rows.shape[1] - 1), np.float32)
  weights[:, _PROMPT_TOKENS.value - 1:] = missed(
      np.stack([_ranks(d, rows) == 0 for d in drafters]), _WINDOW.value)
  print(f"drafter {number}: trained on {weights.sum():,.0f} of "
        f"{weights[:, _PROMPT_TOKENS.value - 1:].size:,} tokens of the target",
        file=sys.stderr)
  claim(directory / runs.MANIFEST, {
      "first": fingerprint(first.params),
      "rows": fingerprint(rows),
      "trained_on": fingerprint(weights), "dtype": dtype,
      **{flag.name: flag.value for flag in (
          _BATCH_SIZE, _STEPS, _LEARNING_RATE, _WARMUP_FRACTION,
          _DECAY_FRACTION, _SEED)}}, "run")
  before = np.stack([_ranks(d, held_out) == 0 for d in drafters]).any(0)
  order = distillation.RowBatches(
      np.arange(len(rows)), _BATCH_SIZE.value, _SEED.value)

  def batch(step: int) -> dict[str, np.ndarray]:
    at = order.batch(step)
    return {"tokens": rows[at], "weights": weights[at]}

  def evaluate(params: Params) -> dict[str, float]:
    mine = _ranks(sj.zoo.Member(model, params["target"]), held_out) == 0
    return {"coverage": (before | mine).mean(), "accuracy": mine.mean()}

  trained = loop.Trainer(
      objective=objectives.NextToken(model=model),
      optimizer=optimizers.adamw(optimizers.trapezoid(
          _LEARNING_RATE.value, _STEPS.value,
          round(_STEPS.value * _WARMUP_FRACTION.value),
          int(_STEPS.value * _DECAY_FRACTION.value))),
      batch=batch, steps=_STEPS.value, directory=directory, evaluate=evaluate,
      evaluate_every=_EVALUATE_EVERY.value,
      tokens_per_step=_BATCH_SIZE.value * (rows.shape[1] - 1),
      compute_dtype=dtype, mesh=mesh,
      param_shardings=specs).run({"target": loop.cast(
          first.params, jnp.float32)})["target"]
  saved = loop.cast(processes.gathered(trained), _SAVE_DTYPE.value)
  checkpoint.save_model(directory, model, saved)
  tokenizer.save(directory / "tokenizer.json")
  return sj.zoo.Member(model, loop.cast(saved, dtype))


def _tokens_per_pass(target: Pretrained, drafters: Sequence[sj.zoo.Member],
                     prompts: np.ndarray, temperature: float) -> float:
  """Returns the block efficiency with one path per drafter (SpecInfer).

  The paths are merged into a draft tree. If all drafters are the same object,
  it drafts all paths.
  """
  models = tuple(d.model for d in drafters)
  same = all(d is drafters[0] for d in drafters)
  strategy = strategies.merged_specinfer(
      models[:1] if same else models, _LENGTH.value, len(drafters))
  decoder = strategy.decoder(
      target.model, transform=sj.LogitsTransform(temperature=temperature))
  rounds = max(1, min(
      32, (decoder.context_length - prompts.shape[1]) // (_LENGTH.value + 1)))
  params = tuple(d.params for d in drafters)
  measured = evaluation.block_efficiency(decoder, prompts, rounds=rounds)(
      {"target": target.params, "drafter": params[:1] if same else params})
  return measured["block_efficiency"]


def main() -> None:
  mesh = meshes.join(_MESH, _BATCH_SIZE.value)
  dtype = common.dtype_of(_DTYPE)
  target, loaded, tokenizer = drafters_lib.load(
      _TARGET.value, [_DRAFTER.value], dtype=dtype, same_tokens=True)
  first = next(iter(loaded.values())).draft_model
  specs = meshes.specs(mesh, {"target": first.model})
  output_dir = common.output_directory(_OUTPUT_DIR.value, "run")
  rows = _rows(target, first, tokenizer, output_dir, mesh)
  drafters = [first]
  for number in range(2, _DRAFTERS.value + 1):
    drafters.append(_train(number, first, drafters, rows["training"],
                           rows["held_out"], tokenizer, output_dir, mesh,
                           specs, dtype))

  progress.say("measuring the drafters")
  held_out = rows["held_out"]
  ranks = [_ranks(d, held_out) for d in drafters]
  proposed = np.logical_or.accumulate([r == 0 for r in ranks])
  coverage = [float(x.mean()) for x in proposed]
  top_k = [float((ranks[0] <= k).mean()) for k in range(len(drafters))]
  prompts = held_out[:, :_PROMPT_TOKENS.value]
  tokens = {
      f"{temperature:g}": {
          "boosted": _tokens_per_pass(target, drafters, prompts, temperature),
          "first_alone": _tokens_per_pass(
              target, [first] * len(drafters), prompts, temperature)}
      for temperature in dict.fromkeys((0.0, _TEMPERATURE.value, 1.0))}
  print("drafters  coverage  top-k of the first alone")
  for k, (mine, alone) in enumerate(zip(coverage, top_k), 1):
    print(f"{k:8d}  {mine:8.3f}  {alone:8.3f}")
  for temperature, value in tokens.items():
    print(f"temperature {temperature}: {value['boosted']:.3f} tokens per pass "
          f"with {len(drafters)} drafters, {value['first_alone']:.3f} with as "
          "many paths from the first drafter")
  common.finish(output_dir, "boost_drafters", {
      "drafters": len(drafters), "window": _WINDOW.value, "coverage": coverage,
      "top_k_coverage": top_k, "tokens_per_pass": tokens})


if __name__ == "__main__":
  common.run(main)
