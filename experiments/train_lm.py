"""Trains a language model: a target model or a draft model.

The script reads text, trains a byte-level BPE tokenizer (unless --tokenizer is
set), and trains a model of the Llama architecture. Files in --output_dir:

  model.safetensors, config.json, tokenizer.json   the model
  metrics.csv, events.out.tfevents.*, curves.png   loss and bits per byte by
                       step
  checkpoints/         training state, to resume the run exactly
  train_lm.json        training data and bits per byte; the last line of stdout
                       names this file

SIGTERM and Ctrl-C save a checkpoint and end the run after the current step. The
same command resumes a stopped or killed run. The final weights are then
bit-identical to those of a run without interruption.

With a larger --steps, the same command continues a finished run. It uses the
learning rates of a run of the new length, so the rate may rise before it falls
to 0 again. With a smaller --steps, the script writes the model of the newest
checkpoint at or before this step.

With --mtp, the script also trains self-drafting heads together with the model.
It writes heads.safetensors, heads.json and training.json, in the format of
train_drafter.py.

A target and a small draft model on Python's standard library:

  python experiments/train_lm.py --output_dir=/tmp/target
  python experiments/train_lm.py --output_dir=/tmp/drafter \\
    --tokenizer=/tmp/target/tokenizer.json \\
    --width=96 --layers=2 --heads=3 --kv_heads=1 --head_dim=32 --mlp_width=192

A target with a module that predicts the token after the next token
(DeepSeek-V3), and a target with three layers parallel to its last layer
(Gloeckle et al. 2024):

  python experiments/train_lm.py --output_dir=/tmp/mtp --mtp=modules
  python experiments/train_lm.py --output_dir=/tmp/mtp4 --mtp=parallel \\
    --mtp_heads=3 --layers=3

A target that drafts with its first layers (LayerSkip, for drafters.EarlyExit):

  python experiments/train_lm.py --output_dir=/tmp/layer_skip --exit_scale=1

LayerSkip training that starts from a trained target, as in the paper:

  python experiments/train_lm.py --output_dir=/tmp/layer_skip --exit_scale=1 \\
    --initial=bundled --steps=200 --learning_rate=0.01
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools
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
from lib.training import token_cache
import numpy as np
import optax

from specjax import methods
from specjax import objectives
from specjax.data import batches
from specjax.data import corpora
from specjax.data import tokenizers
from specjax.data.token_files import TokenFiles
from specjax.models import checkpoint
from specjax.models import Pretrained
from specjax.models import Transformer
from specjax.models import TransformerConfig
from specjax.training import evaluation
from specjax.training import loop
from specjax.training import metrics
from specjax.training import optimizers
from specjax.training import runs
from specjax.training.progress import Log
from specjax.utils import processes
from specjax.utils.files import write_json
from specjax.utils.fingerprints import fingerprint

Params = dict[str, Any]
_KINDS = {"modules": methods.MTPHeads, "parallel": methods.ParallelLayers}

_DTYPE = shared.training_dtype("the model and its heads")
_DATA = shared.data()
_FIELD = shared.field()
_OUTPUT_DIR = shared.output_dir(
    None, "Directory for the model and its checkpoints, required; it is "
    "created if needed")
shared.figure_style()
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "Tokenizer of the model: a file tokenizer.json, or a "
    f"model whose tokenizer is used ({shared.PUBLISHED}). Default: train a "
    "tokenizer on --data")
_INITIAL = flags.DEFINE_string(
    "initial", None, "Trained model whose shape, initial weights and tokenizer "
    f"are used: bundled, small, tiny, {shared.PUBLISHED}. Default: random "
    "initial weights")
_VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size", 4096, "Number of tokens in the vocabulary of a newly trained "
    "tokenizer", 257)
_WIDTH = flags.DEFINE_integer(
    "width", 256, "Width of the model's hidden states (residual stream)", 1)
_LAYERS = flags.DEFINE_integer(
    "layers", 4, "Number of transformer layers of the model", 1)
_HEADS = flags.DEFINE_integer(
    "heads", 4, "Number of query heads of the model's attention", 1)
_KV_HEADS = flags.DEFINE_integer(
    "kv_heads", 2, "Number of key-value heads of the model's attention; must "
    "divide --heads", 1)
_HEAD_DIM = flags.DEFINE_integer(
    "head_dim", 64, "Width of one attention head of the model", 2)
_MLP_WIDTH = flags.DEFINE_integer(
    "mlp_width", 768, "Width of the hidden layer of the model's SwiGLU MLP", 1)
_OF_INITIAL = (_TOKENIZER, _VOCAB_SIZE, _WIDTH, _LAYERS, _HEADS, _KV_HEADS,
               _HEAD_DIM, _MLP_WIDTH)  # excluded by --initial
_CONTEXT_LENGTH = flags.DEFINE_integer(
    "context_length", 512, "Number of tokens in a training window. It is also "
    "the maximum sequence length of a new model", 2)
_BATCH_SIZE = shared.batch_size(
    "Number of windows of --context_length tokens per training step")
_STEPS = shared.steps(3000)
_OPTIMIZER = flags.DEFINE_enum(
    "optimizer", "muon", ["muon", "adamw"],
    "Optimiser: muon (Muon for the matrices of the layers, Adam for all other "
    "parameters) or adamw (AdamW for all parameters)")
_LEARNING_RATE = shared.learning_rate(
    0.02, "Peak learning rate. Use about 0.02 with --optimizer=muon, and 0.003 "
    "with --optimizer=adamw")
_WARMUP_FRACTION = shared.warmup_fraction(0.0333)
_DECAY_FRACTION = shared.decay_fraction()
_EVALUATE_EVERY = shared.evaluate_every(1000)
_EVALUATION_STRIDE = flags.DEFINE_integer(
    "evaluation_stride", 256, "Number of tokens between the starts of "
    "overlapping held-out windows, in evaluation. Each token is predicted from "
    "at least --context_length minus --evaluation_stride earlier tokens", 1)
_CHECKPOINT_EVERY = shared.checkpoint_every()
_MTP = flags.DEFINE_enum(
    "mtp", "none", ["none", *_KINDS], "Form of the multi-token prediction "
    "heads that are trained with the model: modules (applied in sequence), "
    "parallel (layers parallel to the last layer) or none (no such heads)")
_MTP_HEADS = flags.DEFINE_integer(
    "mtp_heads", 1, "Number of tokens, after the next token, that the "
    "multi-token prediction heads predict; requires --mtp", 1)
_MTP_WEIGHT = flags.DEFINE_float(
    "mtp_weight", None, "Weight of the mean loss of the multi-token prediction "
    "heads, relative to the next-token loss; requires --mtp. Default: 0.3 for "
    "--mtp=modules, and the value of --mtp_heads for --mtp=parallel, so that "
    "each predicted token has the same weight as the next token", 0.0)
_HELD_OUT_ROWS = 16  # rows on which the heads are measured
_EXIT_SCALE = flags.DEFINE_float(
    "exit_scale", None, "LayerSkip: weight of the next-token losses after "
    "earlier layers, usually from 0.1 to 1. Default: train without LayerSkip",
    0.0)
_EXIT_EVERY = flags.DEFINE_integer(
    "exit_every", 2, "LayerSkip: number of training steps after which the same "
    "earlier layers have a loss again; requires --exit_scale", 1)
_LAYER_DROPOUT = flags.DEFINE_float(
    "layer_dropout", 0.1, "LayerSkip: probability with which the last layer is "
    "dropped at the end of the run. It is smaller for earlier layers, and, for "
    "a new model, in earlier steps; requires --exit_scale", 0.0)
_LAYER_SKIP = _EXIT_SCALE, _EXIT_EVERY, _LAYER_DROPOUT
shared.requires(_EXIT_EVERY, _EXIT_SCALE)
shared.requires(_LAYER_DROPOUT, _EXIT_SCALE)
shared.requires(_MTP_HEADS, _MTP)
shared.requires(_MTP_WEIGHT, _MTP)
_WANDB = shared.wandb()
_SAVE_DTYPE = shared.save_dtype()
_SEED = shared.seed("Random seed for initial weights and shuffling")
_MESH = shared.mesh()


def _initial() -> Pretrained | None:
  """Returns the model of --initial, or None if the flag is not set.

  Raises:
    ValueError: another flag contradicts the model.
  """
  if _INITIAL.value is None:
    return None
  shared.reject_unread((flag.name for flag in _OF_INITIAL),
                       f"--initial={_INITIAL.value}")
  found = models.load_model(_INITIAL.value, "float32")
  models.tokenizer_of(found, _INITIAL.value)
  if _CONTEXT_LENGTH.value > found.model.context_length:
    raise ValueError(f"--context_length is {_CONTEXT_LENGTH.value} and "
                     f"{_INITIAL.value} reads {found.model.context_length} "
                     "tokens; set a smaller value")
  return found


def _tokenizer(path: pathlib.Path, training_texts: Iterable[str],
               initial: Pretrained | None) -> tokenizers.Tokenizer:
  """Returns the tokenizer of the run.

  It is the tokenizer of --tokenizer or --initial, the tokenizer stored by an
  earlier start of the run, or a newly trained tokenizer.

  Args:
    path: tokenizer.json of the run.
    training_texts: documents for training a tokenizer.
    initial: model of --initial, or None.
  """
  stored = tokenizers.Tokenizer.load(path) if path.exists() else None
  flag = _TOKENIZER if initial is None else _INITIAL
  if flag.value:
    return _named_tokenizer(flag, initial, stored, path)
  if stored is None:
    return tokenizers.train(training_texts, _VOCAB_SIZE.value)
  # A tokenizer that was trained on a small text can have fewer tokens than
  # --vocab_size. So the size is not checked if the run itself stored the file.
  begun = path.with_name(runs.MANIFEST).exists()
  if _has_other_vocab_size(stored) and not begun:
    raise ValueError(f"--vocab_size is {_VOCAB_SIZE.value} and {path} has "
                     f"{stored.vocab_size} tokens; leave the flag out, or move "
                     "the file")
  return stored


def _named_tokenizer(flag: flags.FlagHolder, initial: Pretrained | None,
                     stored: tokenizers.Tokenizer | None, path: pathlib.Path
                     ) -> tokenizers.Tokenizer:
  """Returns the tokenizer of --tokenizer or --initial.

  Raises:
    ValueError: the run has stored another tokenizer in `path`, or --vocab_size
      is another size.
  """
  named = (models.load_tokenizer(flag.value) if initial is None
           else initial.tokenizer)
  if stored and not stored.same_tokens(named):
    raise ValueError(f"--{flag.name} is {flag.value} and {path} is another "
                     "tokenizer; leave the flag out, or choose another "
                     "--output_dir")
  if _has_other_vocab_size(named):
    raise ValueError(f"--vocab_size is {_VOCAB_SIZE.value} and --{flag.name} "
                     f"{flag.value} has {named.vocab_size} tokens; leave one "
                     "of the two out")
  return named


def _has_other_vocab_size(tokenizer: tokenizers.Tokenizer) -> bool:
  """Returns whether --vocab_size is set and is not the tokenizer's size."""
  return _VOCAB_SIZE.present and _VOCAB_SIZE.value != tokenizer.vocab_size


def _model(tokenizer: tokenizers.Tokenizer) -> Transformer:
  return Transformer(TransformerConfig(
      vocab_size=tokenizer.vocab_size, width=_WIDTH.value,
      layers=_LAYERS.value, heads=_HEADS.value, kv_heads=_KV_HEADS.value,
      head_dim=_HEAD_DIM.value, mlp_width=_MLP_WIDTH.value,
      context_length=_CONTEXT_LENGTH.value))


def _schedule(lengths: Sequence[int]) -> optax.Schedule:
  return runs.trapezoid(
      lengths, _LEARNING_RATE.value, _WARMUP_FRACTION.value,
      _DECAY_FRACTION.value)


def _objective(model: Transformer
               ) -> tuple[objectives.Objective, methods.Heads | None]:
  """Returns the objective, and the heads that are trained with it, or None."""
  if _MTP.value == "none":
    return _layer_skip(model) or objectives.NextToken(model=model), None
  shared.reject_unread((flag.name for flag in _LAYER_SKIP),
                       f"--mtp={_MTP.value}")
  if _MTP_HEADS.value >= _CONTEXT_LENGTH.value:
    raise ValueError(f"--mtp_heads is {_MTP_HEADS.value} and --context_length "
                     f"{_CONTEXT_LENGTH.value}, so no training window contains "
                     "the token of the last head; set fewer heads")
  heads = _KINDS[_MTP.value].for_target(model, _MTP_HEADS.value)
  weight = _MTP_WEIGHT.value
  if weight is None:
    weight = {"modules": 0.3, "parallel": float(_MTP_HEADS.value)}[_MTP.value]
  return objectives.MTPJointObjective(
      mtp=objectives.MTPObjective(model=model, heads=heads),
      weight=weight), heads


def _layer_skip(model: Transformer) -> objectives.LayerSkipObjective | None:
  """Returns the objective of LayerSkip, or None without --exit_scale."""
  if _EXIT_SCALE.value is not None:
    return objectives.LayerSkipObjective(
        model=model, steps=_STEPS.value, scale=_EXIT_SCALE.value,
        every=_EXIT_EVERY.value, dropout=_LAYER_DROPOUT.value,
        ramp="exponential" if _INITIAL.value is None else "constant")
  return None


def _save_heads(output_dir: pathlib.Path,
                objective: objectives.MTPJointObjective, trained: Params,
                corpus: TokenFiles, spent: dict[str, Any], dtype: str
                ) -> dict[str, Any]:
  """Measures and writes the multi-token prediction heads.

  Args:
    output_dir: directory of the run.
    objective: objective of the run.
    trained: `{"target": params, "drafter": params}` in the saved precision.
    corpus: tokens with a held-out part.
    spent: training data and number of training tokens.
    dtype: dtype of the evaluation.

  Returns:
    `{"heads": content of training.json, "loss": losses by head}`.
  """
  heads = objective.mtp.heads
  methods.save_heads(
      output_dir, heads, trained["drafter"], objective.model)
  held_out = batches.held_out_rows(
      corpus.tokens[1], corpus.starts[1], _HELD_OUT_ROWS,
      min(_CONTEXT_LENGTH.value + 1, len(corpus.tokens[1])))
  measured = evaluation.head_accuracy(objective, held_out.tokens)(
      loop.cast(trained, dtype))
  tokens_per_step = _BATCH_SIZE.value * _CONTEXT_LENGTH.value
  _, minutes = metrics.spent(
      output_dir, tokens_per_step, spent["tokens"] // tokens_per_step)
  training = {
      "method": heads.kind, **spent, "minutes": minutes,
      "curve": [(spent["tokens"], measured["greedy_block_efficiency"])],
      "accuracy": evaluation.by_head(measured, "top")}
  write_json(output_dir / "training.json", training)
  return {"heads": training, "loss": evaluation.by_head(measured, "loss")}


def _begun(initial: Pretrained | None, tokenizer: tokenizers.Tokenizer
           ) -> tuple[
    Transformer, objectives.Objective, methods.Heads | None, Params]:
  """Returns `(model, objective, heads, parameters)` at the start of the run.

  The heads are None without --mtp.
  """
  model = initial.model if initial else _model(tokenizer)
  objective, heads = _objective(model)
  key = jax.random.key(_SEED.value)
  trainable = {"target": initial.params if initial else model.init(key)}
  if heads is not None:
    trainable["drafter"] = heads.init(
        jax.random.fold_in(key, 1), trainable["target"])
  return model, objective, heads, trainable


def _training_texts() -> Iterator[str]:
  """Yields the training documents."""
  documents = functools.partial(
      corpora.iter_documents, _DATA.value, _FIELD.value)
  held_out = corpora.held_out(d.name for d in documents())
  yield from (d.text for d, out in zip(documents(), held_out) if not out)


def _measure(model: Transformer, corpus: TokenFiles) -> evaluation.Measure:
  """Returns a function `{"target": params} -> {metric: value}`.

  The metrics are computed on held-out text.
  """
  measure = evaluation.bits_per_byte(
      model, corpus.tokens[1], corpus.num_bytes[1], _CONTEXT_LENGTH.value,
      min(_EVALUATION_STRIDE.value, _CONTEXT_LENGTH.value))
  return lambda params: measure(params["target"])


def _claim(output_dir: pathlib.Path, corpus: TokenFiles, model: Transformer,
           trainable: Params, objective: objectives.Objective,
           initial: Pretrained | None, dtype: str) -> tuple[int, ...]:
  """Claims the output directory for this run.

  Returns:
    Every value of --steps with which the run was started or continued.
  """
  return runs.claim_run(output_dir, {
      "model": repr(model), "corpus": corpus.corpus,
      "tokens": corpus.fingerprints[1], "dtype": dtype,
      **({"objective": repr(objective)} if "drafter" in trainable else {}),
      **({"initial": fingerprint(trainable["target"]),
          _CONTEXT_LENGTH.name: _CONTEXT_LENGTH.value} if initial else {}),
      **({} if initial or _TOKENIZER.value else {
          _VOCAB_SIZE.name: _VOCAB_SIZE.value}),
      **{flag.name: flag.value for flag in (
          *(_LAYER_SKIP if _EXIT_SCALE.value is not None else ()),
          _BATCH_SIZE, _OPTIMIZER, _LEARNING_RATE, _WARMUP_FRACTION,
          _DECAY_FRACTION, _SEED)}}, _STEPS.value)


def main() -> None:
  mesh = meshes.join(_MESH, _BATCH_SIZE.value)
  initial = _initial()
  progress.say("reading the text")
  tokenizer_path = pathlib.Path(_OUTPUT_DIR.value) / "tokenizer.json"
  tokenizer = _tokenizer(tokenizer_path, _training_texts(), initial)
  corpus = token_cache.read(_DATA.value, _FIELD.value, tokenizer)
  output_dir = common.output_directory(_OUTPUT_DIR.value, "run")

  model, objective, heads, trainable = _begun(initial, tokenizer)
  specs = meshes.specs(mesh, {"target": model})
  num_params = common.num_parameters(trainable)
  evaluate = evaluation.remembered(_measure(model, corpus), ["target"])
  windows = batches.TokenWindows(
      corpus.tokens[0], _BATCH_SIZE.value, _CONTEXT_LENGTH.value, _SEED.value)
  dtype = common.dtype_of(_DTYPE)
  lengths = _claim(
      output_dir, corpus, model, trainable, objective, initial, dtype)
  steps = runs.last_step(output_dir, _STEPS.value)
  if isinstance(objective, objectives.LayerSkipObjective):
    objective = dataclasses.replace(objective, steps=lengths[-1])
  if not tokenizer_path.exists():
    tokenizer.save(tokenizer_path)
  schedule, make = _schedule(lengths), {
      "muon": optimizers.muon, "adamw": optimizers.adamw}
  before = evaluate(loop.cast(trainable, dtype))
  trained = loop.Trainer(
      objective=objective, optimizer=make[_OPTIMIZER.value](schedule),
      batch=lambda step: {"tokens": windows.batch(step),
                          "progress": np.float32(
                              step / runs.part_length(lengths, step))},
      steps=steps, directory=output_dir,
      evaluate=evaluate, evaluate_every=_EVALUATE_EVERY.value,
      saved_dtype=_SAVE_DTYPE.value,
      checkpoint_every=_CHECKPOINT_EVERY.value,
      tokens_per_step=_BATCH_SIZE.value * _CONTEXT_LENGTH.value,
      log=Log(learning_rate=schedule, wandb=_WANDB.value,
              steps_per_epoch=windows.batches_per_epoch),
      compute_dtype=dtype, mesh=mesh, param_shardings=specs).run(trainable)

  saved = loop.cast(processes.gathered(trained), _SAVE_DTYPE.value)
  checkpoint.save_model(output_dir, model, saved["target"])
  final = evaluate(loop.cast(saved, dtype))
  spent = {"data": _DATA.value, "corpus": corpus.corpus,
           "tokens": steps * windows.batch_size * windows.length}
  if heads is not None:
    final |= _save_heads(
        output_dir, objective, saved, corpus, spent, dtype)
  curves.draw(output_dir, ["bits_per_byte"], "nats per token", before)
  common.finish(output_dir, "train_lm", {
      **spent, "parameters": num_params, **final})


if __name__ == "__main__":
  common.run(main)
