"""Trains self-drafting heads: small modules that draft for a target model.

The target drafts for itself with these modules, without a second language
model. The script trains the modules ("heads"). It also measures on held-out
text, before and after training, how often a head predicts the target's token,
and how many draft tokens the target accepts.

These commands train Medusa heads for the bundled target on the Python standard
library, decode with them, and export them for servers:

  python experiments/train_drafter.py --method=medusa --output_dir=/tmp/medusa
  python experiments/generate.py --drafter=/tmp/medusa
  python experiments/export.py --model=/tmp/medusa --layout=vllm \\
    --output_dir=/tmp/medusa-exported

Methods:

  --method=medusa     Medusa-1 heads; the target is frozen
  --method=medusa2    Medusa-2: heads and target are trained jointly
  --method=hydra      Medusa heads that also read the tokens drafted so far
  --method=blockwise  residual feed-forward heads (Stern et al. 2018)
  --method=eagle1     one layer that predicts the target's next hidden state
                      (EAGLE)
  --method=eagle3     one layer that reads three hidden states of the target,
                      trained on its own predictions (EAGLE-3)
  --method=peagle     EAGLE-3 whose later draft steps read a mask, so that one
                      pass predicts all draft tokens (P-EAGLE)
  --method=mtp        multi-token prediction modules, applied in sequence
  --method=parallel_layers   layers parallel to the target's last layer
  --method=parallel   network that drafts a block of tokens in one pass (DFlash,
                      DSpark; --markov has the transitions of its relatives)
  --method=pass       embeddings of look-ahead tokens, at whose positions the
                      target predicts further tokens (PaSS)
  --method=uno        the same, with low-rank adapters of the target's matrices
                      that only look-ahead tokens pass through (UNO)
  --method=kangaroo   adapter after the first layers of the target

The target is frozen, except with --method=medusa2 and with --train_target. If
the help of a flag begins with names of methods, the flag applies only to these
methods. More examples:

  Train on the assistant's tokens of conversations (messages or ShareGPT):
    python experiments/train_drafter.py --method=medusa --target=smollm2 \\
      --data=sharegpt.json --output_dir=/tmp/chat
  Continue the training of a published drafter of the target:
    python experiments/train_drafter.py --method=eagle3 --target=OWNER/MODEL \\
      --heads_from=PUBLISHED --data=chat.jsonl --output_dir=/tmp/tuned
  Train on text that the target generates:
    python experiments/train_drafter.py --method=medusa --data=self \\
      --output_dir=/tmp/self
  Draft only the 1024 most frequent tokens:
    python experiments/train_drafter.py --method=eagle3 \\
      --draft_vocabulary=1024 --output_dir=/tmp/eagle
  Train target and heads jointly, starting from trained heads (the two stages of
  the Medusa paper):
    python experiments/train_drafter.py --method=medusa2 \\
      --heads_from=/tmp/medusa --output_dir=/tmp/joint
  Compare learning rates in short training runs:
    python experiments/train_drafter.py --method=medusa --steps=200 \\
      --sweep=learning_rate:0.001,0.003,0.01 --output_dir=/tmp/rates

Files in --output_dir:

  heads.safetensors, heads.json   heads of the last evaluation
  best/                the same files, for the evaluation with the largest
                       greedy_block_efficiency (tokens per target call in greedy
                       decoding)
  model.safetensors, config.json, tokenizer.json   target, if it is trained
  train_drafter.json   results before and after training; the last line of
                       stdout names this file
  training.json        number of training tokens, minutes and learning curve,
                       including earlier stages (--heads_from); generate.py
                       reads this file
  metrics.csv, events.out.tfevents.*   losses and evaluations by step
  curves.png           learning curves
  checkpoints/, run.json   training state and settings, to resume the run

SIGTERM and Ctrl-C save a checkpoint and end the run after the current step. The
same command resumes a stopped or killed run. The final weights are then
bit-identical to those of a run without interruption.

With a larger --steps, the same command continues a finished run. It uses the
learning rates of a run of the new length, so the rate may rise before it falls
to 0 again. With a smaller --steps, the script writes the heads of the newest
checkpoint at or before this step: for example, --steps=400 writes the heads of
checkpoint 400 of a longer run.
"""

from collections.abc import Sequence
import pathlib
import sys
from typing import Any

from lib import common  # before jax, which takes long to import

# isort: split
from absl import flags
from lib import flags as shared
from lib import meshes
from lib import models
from lib import progress
from lib.training import drafter_heads
from lib.training import drafter_report
from lib.training import drafter_rows
from lib.training import drafter_saves
from lib.training import exports
from lib.training import method_options
from lib.training import sweep
import numpy as np
import optax

from specjax import methods
from specjax.data import Tokenizer
from specjax.models import Pretrained
from specjax.training import evaluation
from specjax.training import loop
from specjax.training import optimizers
from specjax.training import runs
from specjax.training.objective import DrafterObjective
from specjax.training.progress import Log
from specjax.utils import processes
from specjax.utils.fingerprints import fingerprint

Params = dict[str, Any]
_METHODS = {method.name: method for method in methods.available()}

_METHOD = flags.DEFINE_enum(
    "method", None, list(_METHODS), "Training method and form of the heads; "
    "the script's description lists them",
    required=True)
_TARGET = shared.target()
_DTYPE = shared.training_dtype()
_DATA = shared.data(
    "Training text or conversations. Conversations are .jsonl or .json records "
    "with messages (role, content) or in the ShareGPT form (from, value); they "
    "are rendered with the target's chat template. With self or self:SOURCE "
    "the target generates the training text: it continues the beginnings of "
    "documents in SOURCE (default: stdlib), or answers the first messages of "
    "conversations in SOURCE. self:SOURCE,MORE also adds the complete "
    "conversations of MORE. Other values, and values of SOURCE")
_FIELD = shared.field(
    None, "Field of a record with the text or the turns. Default: the first "
    "field with a conversation, otherwise text")
shared.template_variables()
_LAST_TURN = flags.DEFINE_bool(
    "last_turn", False, "With conversations: train only the last answer of "
    "each. Default: all answers")
_PACK = flags.DEFINE_bool(
    "pack", False, "With conversations: join them and cut them into rows of "
    "--row_tokens tokens. A token then also attends to earlier conversations "
    "of its row. Default: each row is one conversation, padded at its end")
_PREVIEW = flags.DEFINE_integer(
    "preview", 0, "Print this number of training rows, with the trained text "
    "in « », and stop before the training. Default: train", 0)
_OUTPUT_DIR = shared.output_dir(
    None, "Directory for the trained heads and checkpoints, required; it is "
    "created if needed")
shared.figure_style()
_HEADS = flags.DEFINE_integer(
    "heads", 4, "Number of tokens that are drafted after the target's next "
    "token. Depending on --method, it is the number of heads, modules, draft "
    "steps or look-ahead tokens", 1)
_HEADS_FROM = flags.DEFINE_string(
    "heads_from", None, "Trained heads whose weights initialise the run: an "
    "--output_dir of this script, or a published drafter of --target (a "
    "directory, or a name on the Hugging Face hub) in a layout of Medusa, "
    "Hydra, EAGLE-1 or 3, P-EAGLE, speculators, SpecForge, DeepSpec, DFlash, "
    "DSpark or MTP modules. Excludes --heads, --draft_vocabulary and the flags "
    "for the form of heads. Default: new heads")
_DRAFT_VOCABULARY = flags.DEFINE_integer(
    "draft_vocabulary", None, "eagle3, peagle, parallel (eagle1 with "
    "--narrow_head): number of different tokens that can be drafted. They are "
    "the most frequent tokens of the training text and the end-of-text tokens. "
    "Default: all tokens", 1)
_NARROW_HEAD = shared.requires(flags.DEFINE_bool(
    "narrow_head", False, "eagle1, eagle3, peagle: draft with the rows of the "
    "target's LM head for the tokens of --draft_vocabulary, which is required. "
    "These rows are neither trained nor stored. Default: the usual output head "
    "of --method"), _DRAFT_VOCABULARY)
_HEAD_OPTIONS = method_options.Options("head_options")
_OPTIONS = method_options.Options("options")
_ROW_TOKENS = flags.DEFINE_integer(
    "row_tokens", None, "Length of a training row in tokens. Conversations "
    "that are longer lose their ends (see --pack). Default: the "
    f"target's context length, at most {drafter_rows.ROW_TOKENS_DEFAULT}", 3)
_BATCH_SIZE = shared.batch_size()
_ACCUMULATE = flags.DEFINE_integer(
    "accumulate", 1, "Gradient accumulation: number of equal parts of a batch "
    "that are processed in turn, to save memory; must divide --batch_size", 1)
_STEPS = shared.steps()
_LEARNING_RATE = shared.learning_rate(
    None, "Peak learning rate of the heads. The default depends on the method "
    "and on the target's number of parameters. It is interpolated on a "
    "logarithmic scale between a rate for the bundled target (4.2M parameters) "
    "and a published rate. With --optimizer=muon the default is "
    f"{optimizers.MUON_RATE:g}. " + "; ".join(
        f"{m.name}: {m.learning_rate}" for m in methods.available()))
_OPTIMIZER = flags.DEFINE_enum(
    "optimizer", "adamw", ["adamw", "muon"], "Optimiser of the heads. If the "
    "target is also trained (medusa2, --train_target), its optimiser is always "
    "AdamW")
_KEEP_FEATURES = flags.DEFINE_bool(
    "keep_features", False, "eagle1, eagle3, peagle with --data=self: keep the "
    "target's hidden states of all rows in memory, so that they are computed "
    "only once. Default: compute them again in every epoch")
_RATE_RATIO = flags.DEFINE_float(
    "rate_ratio", 4.0, "Learning rate of the heads divided by the learning "
    "rate of the target, if the target is also trained (medusa2, "
    "--train_target)", 0.01)
_SWEEP = sweep.define()
_SCHEDULE = flags.DEFINE_enum(
    "schedule", "trapezoid", ["trapezoid", "cosine"], "Schedule of the "
    "learning rate after the warm-up: trapezoid (constant, then falling "
    "linearly to 0, see --decay_fraction) or cosine (half a cosine from the "
    "peak to 0)")
_WARMUP_FRACTION = shared.warmup_fraction()
_DECAY_FRACTION = shared.decay_fraction()
_SELF_DIR = shared.written(flags.DEFINE_string(
    "self_dir", None, "With --data=self: directory of the rows that the target "
    "generates, which several runs can share. Default: self/ in --output_dir"),
                           "directory")
_SELF_CHAT = flags.DEFINE_bool(
    "self_chat", None, "With --data=self:SOURCE: use each document of SOURCE "
    "as a user message, which the target answers in its chat template. "
    "Default: true if SOURCE contains conversations, otherwise false")
_ANSWERS_ONLY = flags.DEFINE_bool(
    "answers_only", None, "With conversations: train only on the assistant's "
    "tokens, and evaluate only their prediction. --noanswers_only uses all "
    "tokens. Default: true if the data contains conversations")
_SELF_ROWS = flags.DEFINE_integer(
    "self_rows", 2048, "With --data=self: number of rows (with --self_chat: "
    "messages) that the target generates for training. It generates "
    "--held_out_rows further rows for evaluation", 1)
_SELF_PROMPT_TOKENS = flags.DEFINE_integer(
    "self_prompt_tokens", 32, "With --data=self: number of tokens from SOURCE "
    "at the start of each row. With --self_chat: maximum length of a message "
    "in tokens", 1)
_SELF_TEMPERATURE = flags.DEFINE_float(
    "self_temperature", 1.0, "With --data=self: sampling temperature of the "
    "target; 0 is greedy decoding", 0.0)
_SELF_ROWS_PER_FILE = flags.DEFINE_integer(
    "self_rows_per_file", None, "With --data=self: number of rows that are "
    "generated in one batch and stored in one file. On a GPU or TPU, use "
    "several hundred. Default: 32, or 64 with --self_chat", 1)
_HELD_OUT_ROWS = shared.held_out_rows(64)
_EVALUATE_EVERY = shared.evaluate_every()
_CHECKPOINT_EVERY = shared.checkpoint_every()
_KEEP_CHECKPOINTS = flags.DEFINE_integer(
    "keep_checkpoints", 5, "Maximum number of checkpoints on disk; older "
    "checkpoints are deleted. A later run with a smaller --steps can write the "
    "heads of a stored checkpoint", 2)
_WANDB = shared.wandb()
_SAVE_DTYPE = shared.save_dtype()
_SEED = shared.seed("Random seed for initial weights, shuffling and sampling")
_MESH = shared.mesh()


def _values(*of: flags.FlagHolder) -> dict[str, Any]:
  """Returns the values of flags by name."""
  return {flag.name: flag.value for flag in of}


def _settings(method: methods.Method, tokenizer: Tokenizer
              ) -> tuple[drafter_rows.Source, drafter_heads.Start]:
  """Returns the source of the rows and the settings of the heads.

  Raises `ValueError` for flags that have no effect or cannot be combined.
  """
  source = drafter_rows.Source(
      directory=pathlib.Path(_SELF_DIR.value or f"{_OUTPUT_DIR.value}/self"),
      **_values(_DATA, _FIELD, _BATCH_SIZE, _ACCUMULATE, _HELD_OUT_ROWS,
                _SELF_ROWS, _SELF_PROMPT_TOKENS, _SELF_TEMPERATURE, _SELF_CHAT,
                _SELF_ROWS_PER_FILE, _KEEP_FEATURES, _ANSWERS_ONLY, _LAST_TURN,
                _PACK, _SEED))
  own_text = source.own is not None
  start = drafter_heads.Start(
      method=method, head_options=_HEAD_OPTIONS.values(method, own_text),
      options=_OPTIONS.values(method, own_text),
      **_values(_HEADS, _KEEP_FEATURES, _HEADS_FROM, _DRAFT_VOCABULARY,
                _NARROW_HEAD, _SEED))
  if _HEADS_FROM.value is not None:  # determines the form of the heads
    shared.reject_unread(("heads", "draft_vocabulary", *_HEAD_OPTIONS.flags),
                         f"--heads_from={_HEADS_FROM.value}")
  _check_rates(start.trains_target)
  source.check(tokenizer, [flag.name for flag in (
      _SELF_DIR, _SELF_ROWS, _SELF_PROMPT_TOKENS, _SELF_TEMPERATURE,
      _SELF_ROWS_PER_FILE) if flag.present])
  return source, start


def _check_rates(tuned: bool) -> None:
  """Raises `ValueError` if a flag of the learning rate has no effect."""
  if _SCHEDULE.value == "cosine":  # the rate falls from the warm-up on
    shared.reject_unread(["decay_fraction"], "--schedule=cosine")
  if not tuned:
    shared.reject_unread(["rate_ratio"], f"--method={_METHOD.value}, which "
                         "trains only the heads with these flags")


def _rate(method: methods.Method, target: Pretrained) -> float:
  """Returns --learning_rate, or prints and returns its default."""
  if _LEARNING_RATE.value is not None:
    return _LEARNING_RATE.value
  rate = (optimizers.MUON_RATE if _OPTIMIZER.value == "muon" else
          method.learning_rate.of(common.num_parameters(target.params)))
  print(f"learning rate {rate:g}, the default for --method={method.name} and "
        "this target; --sweep compares others", file=sys.stderr)
  return rate


def _claim(output_dir: pathlib.Path, objective: DrafterObjective,
           source: drafter_rows.Source, text: drafter_rows.Text,
           row_tokens: int, given: tuple[Params, Params], rate: float,
           dtype: str) -> tuple[int, ...]:
  """Claims the output directory for this run.

  New heads are identified by `objective` and the seed, so that a run can resume
  on another machine. Their initial values are not compared, because they
  contain means over the target's embeddings. The last bits of these means
  depend on the number of CPU cores.

  Returns:
    Every value of --steps with which the run was started or continued.
  """
  return runs.claim_run(output_dir, {
      "objective": repr(objective), "corpus": text.corpus,
      "tokens": text.tokens, "row_tokens": row_tokens,
      "parameters": fingerprint(given), "learning_rate": rate,
      "self": source.own is not None, "dtype": dtype,
      **_values(
          _SELF_ROWS, _SELF_PROMPT_TOKENS, _SELF_TEMPERATURE, _HELD_OUT_ROWS,
          _OPTIMIZER, _KEEP_FEATURES, _BATCH_SIZE, _RATE_RATIO, _SCHEDULE,
          _WARMUP_FRACTION, _DECAY_FRACTION, _SEED),
      **({_ANSWERS_ONLY.name: True} if source.weighs else {}),
      # Runs of versions without --pack joined conversations.
      **({_PACK.name: False} if source.has_conversations and not source.pack
         else {})}, _STEPS.value)


def _trainer(learner: drafter_heads.Learner, lengths: Sequence[int],
             rate: float, tuned: bool, data: drafter_rows.Data,
             **more: object) -> loop.Trainer:
  """Returns a trainer whose batches contain the progress of the run."""
  def schedule(peak: float) -> optax.Schedule:
    if _SCHEDULE.value == "cosine":
      return runs.cosine(lengths, peak, _WARMUP_FRACTION.value)
    return runs.trapezoid(
        lengths, peak, _WARMUP_FRACTION.value, _DECAY_FRACTION.value)

  by_name = {"drafter": optimizers.muon(schedule(rate))
             if _OPTIMIZER.value == "muon"
             else optimizers.adamw(schedule(rate), weight_decay=0.0)}
  if tuned:
    by_name["target"] = optimizers.adamw(schedule(rate / _RATE_RATIO.value))
  share = lambda step: np.float32(step / runs.part_length(lengths, step))
  log = Log(
      loss=f"weighted sum over {learner.heads.num_forecasts} heads",
      learning_rate=schedule(rate), wandb=_WANDB.value,
      steps_per_epoch=data.num_rows / _BATCH_SIZE.value)
  return loop.Trainer(
      objective=learner.objective, optimizer=optimizers.by_name(by_name),
      batch=lambda step: {**data.batch(step), "progress": share(step)}, log=log,
      evaluate_every=_EVALUATE_EVERY.value,
      checkpoint_every=_CHECKPOINT_EVERY.value,
      keep_checkpoints=_KEEP_CHECKPOINTS.value, accumulate=_ACCUMULATE.value,
      seed=_SEED.value, **more)


def main() -> None:
  if _SWEEP.value is not None:
    return sweep.run(_SWEEP, _OUTPUT_DIR.value, main)
  method = _METHODS[_METHOD.value]
  for options in (_HEAD_OPTIONS, _OPTIONS):
    options.check(method)
  mesh = meshes.join(_MESH, _BATCH_SIZE.value // _ACCUMULATE.value)
  dtype = common.dtype_of(_DTYPE)
  target, tokenizer = models.load_target(_TARGET.value, dtype)
  specs = meshes.specs(mesh, {"target": target.model, "teacher": target.model})
  source, start = _settings(method, tokenizer)
  # All flags are checked before the target answers messages (--self_chat),
  # which can take hours.
  progress.say("reading the text")
  text = source.text(tokenizer)
  learner = start.make(target, tokenizer, source.counted(text))
  row_tokens = source.row_length(_ROW_TOKENS.value, target.model, learner.heads)
  if not source.chat:
    rows = source.rows(target, learner.objective, text, row_tokens, mesh)
  output_dir = common.output_directory(_OUTPUT_DIR.value, "run")
  runs.check_claimable(output_dir)
  if source.chat:
    text = source.answered(target, tokenizer, text, row_tokens, mesh)
    learner = start.make(target, tokenizer, source.counted(text))
    rows = source.rows(target, learner.objective, text, row_tokens, mesh)
  if _PREVIEW.value:
    return source.preview(tokenizer, rows().batch, _PREVIEW.value)
  heads, params, objective = learner
  added = common.num_parameters(params)
  print(f"{method.name}: {added:,} parameters in addition to the target's "
        f"{common.num_parameters(target.params):,}", file=sys.stderr)

  trainable, frozen = start.weights(learner, target)
  rate = _rate(method, target)
  lengths = _claim(
      output_dir, objective, source, text, row_tokens,
      (target.params, params if _HEADS_FROM.value else ()), rate, dtype)
  steps = runs.last_step(output_dir, _STEPS.value)
  data = rows()
  evaluate = evaluation.remembered(drafter_report.evaluation_of(
      method, target, heads, params, objective, data.held_out), list(trainable))
  measure = lambda trained: evaluate({**frozen, **loop.cast(trained, dtype)})
  before = measure(trainable)
  tokens_per_step = round(_BATCH_SIZE.value * data.tokens_per_row)
  taken = lambda steps: {
      "data": _DATA.value, "corpus": text.corpus, "steps": steps,
      **drafter_report.spent(output_dir, tokens_per_step, before[
          drafter_report.CURVE], _HEADS_FROM.value, steps)}
  saves = drafter_saves.Saves(
      directory=output_dir, method=method, heads=heads, target=target,
      tokenizer=tokenizer, dtype=_SAVE_DTYPE.value, taken=taken)
  trainer = _trainer(
      learner, lengths, rate, start.trains_target, data, steps=steps,
      directory=output_dir,
      evaluate=lambda params: drafter_report.scalars(evaluate(params)),
      saved_dtype=_SAVE_DTYPE.value, evaluated=saves.evaluated, mesh=mesh,
      tokens_per_step=tokens_per_step, compute_dtype=dtype,
      param_shardings=specs and {name: tree for name, tree in specs.items()
                                 if name in {**trainable, **frozen}})
  saved = saves.write(processes.gathered(trainer.run(trainable, frozen)))

  drafter_report.draw_curves(output_dir, heads, trainer.log.loss, before)
  saves.print_best()
  drafter_report.write(output_dir, method, taken(steps), added, before,
                       measure(saved))
  print(exports.advice(output_dir, heads, target.model, _TARGET.value),
        file=sys.stderr)


if __name__ == "__main__":
  common.run(main)
