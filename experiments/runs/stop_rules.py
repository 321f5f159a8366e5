"""Compares rules that stop a draft early, on the bundled models.

  python experiments/runs/stop_rules.py

The head of SpecDec++ is trained on sequences that the target generated. Each
rule is then measured on other prompts. Columns: block efficiency (tokens per
target call), drafted tokens per round, and block efficiency divided by the cost
of a round. The unit of the cost is a target pass. A round costs 1 for
verification, plus 0.3 for each drafted token. The script measures no times, so
other programs may run at the same time.
"""

from collections.abc import Sequence
import pathlib
import sys
import tempfile
from typing import Any

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import jax  # noqa: E402
from lib import common  # noqa: E402
from lib.prompts import reading as prompts_lib  # noqa: E402
import numpy as np  # noqa: E402

import specjax as sj  # noqa: E402
from specjax import objectives  # noqa: E402
from specjax.data import corpora  # noqa: E402
from specjax.methods import stop_rules  # noqa: E402
from specjax.training import distillation  # noqa: E402
from specjax.training import loop  # noqa: E402
from specjax.training import optimizers  # noqa: E402

LENGTHS = 1, 2, 4, 8  # draft lengths without a rule
GAMMA, ROWS, ROW_TOKENS, STEPS, BATCH = 8, 1024, 160, 400, 16
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, ROUND = 48, 128, 96, 16
DRAFT_COST = 0.3  # cost of a pass of the draft model, in target passes


def own_text(pair: Any, directory: pathlib.Path):
  """Returns `[R, 161]`, training text that the target continued."""
  training, _ = corpora.split(corpora.read_documents("stdlib"))
  stream = pair.tokenizer.encode_stream([one.text for one in training])
  return distillation.sample_rows(
      common.autoregressive(pair.target.model, 1.0),
      {"target": pair.target.params},
      distillation.cut_prompts(stream, ROWS, 32, 0), length=ROW_TOKENS + 1,
      directory=directory, seed=0)


def trained_head(pair: Any, head: Any, rows: np.ndarray,
                 directory: pathlib.Path):
  """Trains the head of SpecDec++ and returns its parameters."""
  drafter = pair.drafters["small"]
  order = distillation.RowBatches(rows, BATCH, 0)
  return loop.Trainer(
      objective=objectives.Acceptance(
          model=drafter.model, target=pair.target.model, head=head),
      optimizer=optimizers.by_name({"stop": optimizers.adamw(
          optimizers.trapezoid(3e-3, STEPS, 20, STEPS // 2),
          weight_decay=0.0)}),
      batch=lambda step: {"tokens": order.batch(step)}, steps=STEPS,
      directory=directory, tokens_per_step=BATCH * ROW_TOKENS,
  ).run({"stop": head.init_params(
      jax.random.key(0), drafter.model.config.width)}, {
          "target": pair.target.params, "drafter": drafter.params})["stop"]


def measured(pair: Any, prompts: Sequence[Sequence[int]], stop: Any, own: Any,
             temperature: float, gamma: int):
  """Returns tokens per round and drafted tokens per round.

  Args:
    pair: models from `sj.zoo.load`.
    prompts: token ids of the prompts.
    stop: stop rule, or None.
    own: parameters of the stop rule, or None if it has none.
    temperature: sampling temperature.
    gamma: maximum draft length.
  """
  drafter = pair.drafters["small"]
  decoder = sj.Decoder(
      target=pair.target.model, verifier=sj.verifiers.Block(),
      transform=sj.LogitsTransform(temperature=temperature),
      drafter=sj.drafters.draft_model(
          model=drafter.model, gamma=gamma, stop=stop))
  params = {"target": pair.target.params, "drafter": (
      {"model": drafter.params, "stop": own} if own is not None
      else drafter.params)}
  accepted = rounds = drafted = 0  # sums, including tokens beyond the limits
  for start in range(0, len(prompts), ROUND):
    some = prompts[start:start + ROUND]
    state = decoder.prefill(params, some, jax.random.key(1), limits=[
        len(row) + NEW_TOKENS for row in some])
    while not bool(state.done.all()):
      state, stats, trace = decoder.decode(params, state, 8, traced=True)
      active = np.asarray(stats.active)
      real = np.asarray(trace.draft.drafted).sum(-1)
      accepted += float(np.asarray(stats.expected, np.float64)[..., 0].sum())
      drafted += int(real[active].sum())
      rounds += int(active.sum())
  return 1 + accepted / rounds, drafted / rounds


def rules():
  """Returns `{name: (rule, draft length)}`. None is the absence of a rule."""
  some = {f"none, gamma {gamma}": (None, gamma) for gamma in LENGTHS}
  some |= {f"SpecDec++, threshold {share}": (
      stop_rules.AcceptanceHead(threshold=share), GAMMA)
           for share in (0.3, 0.5, 0.7, 0.9)}
  some["AdaEDL"] = stop_rules.Entropy(), GAMMA
  some["Draft & Verify"] = stop_rules.Adaptive(threshold=0.6), GAMMA
  return some | {f"confidence {share}": (
      stop_rules.Confidence(threshold=share), GAMMA)
                 for share in (0.3, 0.5, 0.7)}


def main():
  pair = sj.zoo.load()
  head = stop_rules.AcceptanceHead()
  with tempfile.TemporaryDirectory() as directory:
    directory = pathlib.Path(directory)
    rows = own_text(pair, directory / "rows")
    own = trained_head(pair, head, rows, directory / "run")
  prompts = prompts_lib.read(
      pair.tokenizer, ["code", "docstrings", "tests"], field=None,
      count=PROMPTS // 3, tokens=PROMPT_TOKENS, seed=0, chat=False).all
  for temperature in (0.0, 1.0):
    print(f"temperature {temperature:g}: tokens per round, drafted tokens per "
          f"round, tokens per cost (a drafted token costs {DRAFT_COST})")
    for name, (rule, gamma) in rules().items():
      needs = rule is not None and rule.has_params
      if temperature == 0 and rule is not None and not needs:
        continue  # q is one-hot, so these rules never stop a draft
      tokens, drafted = measured(
          pair, prompts, rule, own if needs else None, temperature, gamma)
      print(f"{name:26s} {tokens:6.3f} {drafted:6.3f} "
            f"{tokens / (1 + DRAFT_COST * drafted):6.3f}", flush=True)


if __name__ == "__main__":
  main()
