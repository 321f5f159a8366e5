"""What does block verification gain over token verification?

Decodes prompts with a target and a drafter, for every draft length and every
verifier, and prints for each

  block efficiency   tokens of a round, on the verifier's own rollout
  paired             the same on shared drafts at shared round starts: one
                     rollout at the largest gamma, driven by token
                     verification, on which all laws are evaluated
  tokens per second  beside autoregressive decoding of the same prompts, taken
                     in turn; the speed-up is the median over prompts

No figure of the first two tosses a coin: given the draft, the expected number
of accepted tokens is known exactly (Rao-Blackwell). Standard errors treat a
prompt as one observation.

  python experiments/verification_study.py
  python experiments/verification_study.py --drafter=small,tiny --gammas=4,8
  python experiments/verification_study.py --prompts=mine.txt --temperature=0.6

Writes verification.csv and verification.png to --output_dir. The last line of
stdout is one JSON object.
"""

import csv
import json
import pathlib
import platform
import statistics
import sys
import time

from absl import flags
import common
import jax
import numpy as np
import tqdm

import specjax as sj
from specjax.data import corpora
from specjax.data import prompts as prompts_lib

_GAMMAS = flags.DEFINE_list("gammas", "2,4,8,16", "draft lengths, in tokens")
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 1.0, "of both models; 0 is greedy")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "nucleus mass of both models")
_NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 64, "prompts to decode", 2)
_PROMPTS = flags.DEFINE_string(
    "prompts", None, "a .txt (prompts between blank lines) or .jsonl file; "
    "default: held-out modules of the running Python")
_FIELD = flags.DEFINE_string("field", "prompt", "of a JSONL prompts file")
_PROMPT_TOKENS = flags.DEFINE_integer(
    "prompt_tokens", 96, "longer prompts keep their last tokens", 1)
_NEW_TOKENS = flags.DEFINE_integer(
    "new_tokens", 128, "tokens generated for every prompt", 1)
_TARGET = flags.DEFINE_string(
    "target", "bundled", "bundled, or a directory of train_lm.py")
_DRAFTER = flags.DEFINE_list(
    "drafter", "small", "small, tiny, or directories of train_lm.py")
_SEED = flags.DEFINE_integer("seed", 0, "of prompts and of sampling")
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "results/verification", "for the table and the plot")


def _load_prompts(tokenizer):
  """Token ids of the prompts, and a description of their source."""
  if _PROMPTS.value:
    texts = prompts_lib.read_prompts(_PROMPTS.value, _FIELD.value)
    texts = texts[:_NUM_PROMPTS.value]
    source = {"prompts": _PROMPTS.value}
  else:
    held_out = [d for d in corpora.stdlib_documents() if d.held_out]
    texts = prompts_lib.excerpts(
        held_out, _NUM_PROMPTS.value, 4 * _PROMPT_TOKENS.value, _SEED.value)
    source = {
        "prompts": "held-out modules of the standard library",
        "python": platform.python_version(),
        "hash": corpora.fingerprint(held_out)}
  if len(texts) < 2:
    raise ValueError(f"{_PROMPTS.value} holds {len(texts)} prompt; a standard "
                     "error needs at least 2")
  ids = [tokenizer.encode(text) for text in texts]
  keep = _PROMPT_TOKENS.value - 1
  ids = [[row[0], *row[1:][-keep:]] if keep else row[:1] for row in ids]
  return ids, source


class _Arm:
  """One decoder and what its rollouts gave, a row for every prompt."""

  def __init__(self, name, params, **parts):
    self.name = name
    self.decoder = sj.Decoder(
        transform=sj.LogitsTransform(temperature=_TEMPERATURE.value,
                                     top_p=_TOP_P.value), **parts)
    self._params = params
    self.seconds, self.tokens = [], []
    self.rounds, self.expected, self.survival = [], [], []

  def decode(self, index, prompt, record=True):
    """Decodes one prompt, alone: speculation is about latency."""
    state = self.decoder.prefill(
        self._params, [prompt], jax.random.key(_SEED.value),
        request_ids=[index], limits=len(prompt) + _NEW_TOKENS.value)
    jax.block_until_ready(state)
    start = time.perf_counter()
    _, stats = jax.block_until_ready(
        self.decoder.decode_until(self._params, state))
    seconds = time.perf_counter() - start
    sj.raise_if_not_finite(stats)
    if record:
      self.seconds.append(seconds)
      self.tokens.append(int(stats.emitted[0]))
      self.rounds.append(int(stats.active[0]))
      self.expected.append(np.asarray(stats.expected[0], np.float64))
      self.survival.append(np.asarray(stats.survival[0], np.float64))


def _ratio(totals, rounds):
  """`1 + sum(totals) / sum(rounds)` and its standard error over prompts."""
  totals, rounds = np.asarray(totals), np.asarray(rounds, np.float64)
  mean = totals.sum() / rounds.sum()
  residual = totals - mean * rounds
  error = np.sqrt((residual**2).sum() * len(rounds) / (len(rounds) - 1))
  return 1 + mean, error / rounds.sum()


def _arms(target, drafter, params, gammas):
  """The baseline and a decoder for every verifier and draft length."""
  token = common.VERIFIERS["token"]
  others = tuple(v for v in common.VERIFIERS.values() if v != token)
  baseline = _Arm("autoregressive", params, target=target.model,
                  drafter=sj.drafters.Empty(), verifier=token)
  arms = {}
  for gamma in gammas:
    for name, verifier in common.VERIFIERS.items():
      # The paired figures come from token verification's own longest drafts.
      shared = verifier == token and gamma == max(gammas)
      arms[name, gamma] = _Arm(
          f"{name} {gamma}", params, target=target.model,
          drafter=sj.drafters.LanguageModel(model=drafter.model, gamma=gamma),
          verifier=verifier, observers=others if shared else ())
  return baseline, arms


def _rows(drafter_name, baseline, arms, gammas):
  """The table of one drafter."""
  paired = arms["token", max(gammas)]
  laws = ["token", *(n for n in common.VERIFIERS if n != "token")]
  survival = np.stack(paired.survival)  # [prompts, laws, nodes]
  accepted = {name: survival[:, laws.index(name), 1:].cumsum(-1)
              for name in laws}
  pace = lambda arm: np.divide(arm.seconds, arm.tokens)
  rows = []
  for (name, gamma), arm in arms.items():
    own, error = _ratio([e[0] for e in arm.expected], arm.rounds)
    shared, shared_error = _ratio(accepted[name][:, gamma - 1], paired.rounds)
    gain, gain_error = _ratio(
        accepted[name][:, gamma - 1] - accepted["token"][:, gamma - 1],
        paired.rounds)
    rows.append({
        "drafter": drafter_name, "gamma": gamma,
        "temperature": _TEMPERATURE.value, "verifier": name,
        "block_efficiency": own, "stderr": error,
        "paired_block_efficiency": shared, "paired_stderr": shared_error,
        "paired_gain": gain - 1, "paired_gain_stderr": gain_error,
        "tokens_per_second": sum(arm.tokens) / sum(arm.seconds),
        "speedup": statistics.median(pace(baseline) / pace(arm))})
  return rows


def _print_table(rows, baseline_speed):
  print(f"{'drafter':10s} {'gamma':>5s} {'verifier':10s} "
        f"{'block efficiency':>18s} {'paired':>16s} {'gain':>7s} "
        f"{'tokens/s':>9s} {'speed-up':>8s}")
  tokens = {(r["drafter"], r["gamma"]): r["paired_block_efficiency"]
            for r in rows if r["verifier"] == "token"}
  for r in rows:
    gain = r["paired_gain"] / tokens[r["drafter"], r["gamma"]]
    print(f"{r['drafter'][-10:]:10s} {r['gamma']:5d} {r['verifier']:10s} "
          f"{r['block_efficiency']:10.3f} ± {r['stderr']:.3f} "
          f"{r['paired_block_efficiency']:8.3f} ± {r['paired_stderr']:.3f} "
          f"{100 * gain:+6.2f}% {r['tokens_per_second']:9.1f} "
          f"{r['speedup']:7.2f}x")
  print(f"autoregressive: {baseline_speed:.1f} tokens/s")


def _plot(rows, path):
  import matplotlib  # pylint: disable=g-import-not-at-top
  matplotlib.use("Agg")
  import matplotlib.pyplot as plt  # pylint: disable=g-import-not-at-top
  figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
  for drafter in dict.fromkeys(r["drafter"] for r in rows):
    curves = {}
    for name in common.VERIFIERS:
      mine = [r for r in rows
              if r["drafter"] == drafter and r["verifier"] == name]
      gammas = [r["gamma"] for r in mine]
      curves[name] = np.array([r["paired_block_efficiency"] for r in mine])
      left.errorbar(gammas, curves[name], [r["paired_stderr"] for r in mine],
                    marker="o", capsize=3, label=f"{name}, {drafter} drafter")
      if name != "token":
        error = np.array([r["paired_gain_stderr"] for r in mine])
        right.errorbar(
            gammas, 100 * (curves[name] / curves["token"] - 1),
            100 * error / curves["token"], marker="o", capsize=3,
            label=f"{name} over token, {drafter} drafter")
  left.set(xlabel="draft length $\\gamma$", ylabel="tokens per round",
           title="block efficiency (paired)")
  right.set(xlabel="draft length $\\gamma$", ylabel="gain in %",
            title="improvement over token verification")
  for axes in (left, right):
    axes.grid(alpha=0.3)
    axes.legend()
  figure.suptitle(f"temperature {_TEMPERATURE.value:g}; bars: one standard "
                  "error over prompts")
  figure.tight_layout()
  figure.savefig(path, dpi=150)


def main():
  try:
    gammas = sorted({int(g) for g in _GAMMAS.value})
  except ValueError:
    raise ValueError(f"--gammas is {','.join(_GAMMAS.value)!r}; give whole "
                     "numbers between commas, such as 2,4,8") from None
  if not gammas or gammas[0] < 1:
    raise ValueError(f"--gammas holds {gammas[:1]}; draft lengths start at 1")
  target, drafters, tokenizer = common.load_models(
      _TARGET.value, _DRAFTER.value)
  prompts, source = _load_prompts(tokenizer)
  output_dir = pathlib.Path(_OUTPUT_DIR.value)

  experiments = {}
  for name, drafter in drafters.items():
    params = {"target": target.params, "drafter": drafter.params}
    experiments[name] = _arms(target, drafter, params, gammas)
  arms = [arm for baseline, others in experiments.values()
          for arm in (baseline, *others.values())]
  print(", ".join(f"{k}: {v}" for k, v in source.items()), file=sys.stderr)
  longest = max(prompts, key=len)
  with tqdm.tqdm(total=len(arms) * (len(prompts) + 1), unit="run",
                 dynamic_ncols=True) as bar:
    for arm in arms:
      bar.set_description(f"compiling {arm.name}")
      arm.decode(0, longest, record=False)
      bar.update()
    output_dir.mkdir(parents=True, exist_ok=True)
    bar.set_description("decoding")
    for index, prompt in enumerate(prompts):
      for arm in arms:  # in turn, so that all see the same machine
        arm.decode(index, prompt)
        bar.update()

  rows = []
  for name, (baseline, others) in experiments.items():
    rows += _rows(name, baseline, others, gammas)
  speed = sum(baseline.tokens) / sum(baseline.seconds)
  _print_table(rows, speed)
  with open(output_dir / "verification.csv", "w", newline="") as f:
    writer = csv.DictWriter(f, rows[0])
    writer.writeheader()
    writer.writerows(rows)
  _plot(rows, output_dir / "verification.png")
  print(f"wrote {output_dir}/verification.csv and verification.png")
  print(json.dumps({"study": "verification", "rows": rows, "source": source,
                    "num_prompts": len(prompts),
                    "autoregressive_tokens_per_second": speed}))


if __name__ == "__main__":
  common.run(main)
