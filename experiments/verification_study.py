"""What does block verification gain over token verification?

The tables and figures of "Block Verification Accelerates Speculative Decoding"
(Sun et al. 2024, arXiv:2403.10444) for any pair of models and any prompts.
Decodes every prompt with every drafter, temperature, draft length and verifier
and prints for each

  block efficiency   tokens of a round, on the verifier's own rollout
  paired             the same on shared drafts at shared round starts: one
                     rollout at the largest gamma, driven by token
                     verification, on which all laws are evaluated (greedy
                     block verification from a fresh state)
  speed-up           over autoregressive decoding of the same prompt, taken in
                     turn; the median over prompts
  predicted          block efficiency * step / (verify + gamma * draft +
                     overhead): the passes are timed alone, step and overhead
                     on one half of the prompts to predict the other half

No figure of the first two tosses a coin: given the draft, the expected number
of accepted tokens is known exactly (Rao-Blackwell). Errors treat a prompt, over
all its seeds, as one observation; intervals are of 95 %.

  python experiments/verification_study.py
  python experiments/verification_study.py --gammas=4,6,8,16 \\
    --drafter=small,tiny --temperature=1,0.6,0 --seeds=3
  python experiments/verification_study.py --prompts=gsm8k=test.jsonl,mine.txt

Every prompt's results are appended to runs.jsonl in --output_dir; killed and
started again with the same models, prompts and flags, the study goes on there,
also with more temperatures, seeds or prompt sets than before. Writes
verification.md, .csv and .png. The last line of stdout is one JSON object.
"""

import hashlib
import json
import pathlib
import platform
import random
import statistics
import sys
import time

from absl import flags
import common
import jax
import numpy as np
from timing import passes
import tqdm
import verification_report as report

import specjax as sj
from specjax.data import prompt_sets
from specjax.data import prompts as prompts_lib
from specjax.data.files import atomically

_GAMMAS = flags.DEFINE_list("gammas", "2,4,8,16", "draft lengths, in tokens")
_TEMPERATURE = flags.DEFINE_list(
    "temperature", "1", "of both models; 0 is greedy")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "nucleus mass of both models")
_VERIFIERS = flags.DEFINE_list(
    "verifiers", "token,block,greedy_block",
    f"of {', '.join(common.VERIFIERS)}; token must be among them")
_PROMPTS = flags.DEFINE_list(
    "prompts", list(prompt_sets.EMBEDDED),
    "prompt sets: those of the running Python (the default), NAME=PATH for a "
    "published file or NAME for its Hugging Face copy ("
    f"{', '.join(prompt_sets.PROMPT_SETS)}), or a .txt (prompts between blank "
    "lines) or .jsonl file of your own")
_FIELD = flags.DEFINE_string("field", "prompt", "of a JSONL file of your own")
_NUM_PROMPTS = flags.DEFINE_integer(
    "num_prompts", 16, "prompts of every set", 2)
_PROMPT_TOKENS = flags.DEFINE_integer(
    "prompt_tokens", 96, "longer prompts keep their last tokens", 1)
_NEW_TOKENS = flags.DEFINE_integer(
    "new_tokens", 128, "tokens generated for every prompt", 1)
_TARGET = flags.DEFINE_string(
    "target", "bundled", "bundled, or a directory of train_lm.py")
_DRAFTER = flags.DEFINE_list(
    "drafter", "small", "small, tiny, or directories of train_lm.py")
_SEED = flags.DEFINE_integer("seed", 0, "of the prompts and of sampling")
_SEEDS = flags.DEFINE_integer("seeds", 1, "rollouts of every prompt", 1)
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "results/verification", "for results, tables and plots")

_TIMINGS = 15  # of each pass alone


def _texts(item):
  """The texts of one entry of --prompts, its name and its source."""
  name, _, path = item.partition("=")
  if not path and name in prompt_sets.EMBEDDED:
    texts, source = prompt_sets.embedded(
        name, _NUM_PROMPTS.value, 4 * _PROMPT_TOKENS.value, _SEED.value)
    return name, texts, source
  if path or name in prompt_sets.PROMPT_SETS:
    texts = prompt_sets.load(name, path or None)
  else:
    texts = prompts_lib.read_prompts(item, _FIELD.value)
    name = pathlib.Path(item).stem
  if len(texts) < 2:
    raise ValueError(f"{path or item} holds {len(texts)} prompt; a standard "
                     "error needs at least 2")
  kept = random.Random(_SEED.value).sample(
      range(len(texts)), min(_NUM_PROMPTS.value, len(texts)))
  return name, [texts[i] for i in sorted(kept)], {"prompts": path or item}


def _load_prompts(tokenizer):
  """Token ids by set, and a description of their sources."""
  prompts, sources, digest = {}, {}, hashlib.sha256()
  for item in _PROMPTS.value:
    name, texts, sources_of_set = _texts(item)
    if name in prompts:
      raise ValueError(f"--prompts holds two sets named {name!r}; give each "
                       "once")
    rows = [tokenizer.encode(text) for text in texts]
    keep = _PROMPT_TOKENS.value - 1
    prompts[name] = [[row[0], *row[1:][-keep:]] if keep else row[:1]
                     for row in rows]
    sources[name] = sources_of_set
    digest.update(repr(prompts[name]).encode())
  return prompts, {"python": platform.python_version(),
                   "hash": digest.hexdigest()[:16], "sets": sources}


class _Arm:
  """One decoder of the study."""

  def __init__(self, params, temperature, drafter, verifier, observers=()):
    self.decoder = sj.Decoder(
        target=params["model"], drafter=drafter, verifier=verifier,
        observers=observers, transform=sj.LogitsTransform(
            temperature=temperature, top_p=_TOP_P.value))
    self._params = params["params"]

  def decode(self, prompt, seed, request_id, capacity):
    """Decodes one prompt, alone: speculation is about latency."""
    state = self.decoder.prefill(
        self._params, [prompt], jax.random.key(seed),
        request_ids=[request_id], limits=len(prompt) + _NEW_TOKENS.value,
        capacity=capacity)
    jax.block_until_ready(state)
    start = time.perf_counter()
    _, stats = jax.block_until_ready(
        self.decoder.decode_until(self._params, state))
    seconds = time.perf_counter() - start
    sj.raise_if_not_finite(stats)
    return {"seconds": seconds, "tokens": int(stats.emitted[0]),
            "rounds": int(stats.active[0]),
            "expected": float(stats.expected[0, 0]),
            "survival": np.asarray(stats.survival[0], np.float64).tolist()}


def _arms(target, drafters, temperature, gammas, verifiers):
  """The baseline and a decoder for every drafter, gamma and verifier."""
  token = common.VERIFIERS["token"]
  params = lambda drafter: {"model": target.model, "params": {
      "target": target.params, "drafter": drafter.params}}
  some = next(iter(drafters.values()))
  arms = {report.BASELINE: _Arm(
      params(some), temperature, sj.drafters.Empty(), token)}
  for name, drafter in drafters.items():
    for gamma in gammas:
      for verifier in verifiers:
        # The paired figures come from token verification's longest drafts.
        shared = verifier == "token" and gamma == max(gammas)
        arms[report.key(name, gamma, verifier)] = _Arm(
            params(drafter), temperature, sj.drafters.LanguageModel(
                model=drafter.model, gamma=gamma), common.VERIFIERS[verifier],
            tuple(common.VERIFIERS[v] for v in verifiers if v != "token")
            if shared else ())
  return arms


def _costs(target, drafters, gammas, capacity):
  """Median seconds of the passes that a round is made of, timed alone."""
  used = _PROMPT_TOKENS.value + _NEW_TOKENS.value // 2
  median = lambda timed: statistics.median(timed() for _ in range(_TIMINGS))
  verify = {gamma: median(passes(target.model, target.params, capacity, used,
                                 gamma + 1)) for gamma in gammas}
  draft = {name: median(passes(drafter.model, drafter.params, capacity, used,
                               1)) for name, drafter in drafters.items()}
  return {"verify": verify, "draft": draft}


def _fingerprint(target, drafters, gammas, verifiers):
  """Of everything that a line of runs.jsonl depends on besides its own key."""
  digest = hashlib.sha256(repr((
      gammas, verifiers, list(drafters), _TOP_P.value, _NEW_TOKENS.value,
      jax.default_backend(), jax.__version__,
      [m.model for m in (target, *drafters.values())])).encode())
  for leaf in jax.tree.leaves([m.params for m in (target, *drafters.values())]):
    digest.update(np.asarray(leaf).tobytes())
  return digest.hexdigest()[:16]


def _read_runs(path):
  """Complete lines of runs.jsonl by their unit; a cut last line is dropped."""
  runs = {}
  if path.exists():
    for line in path.read_text("utf-8").splitlines(keepends=True):
      try:
        record = json.loads(line) if line.endswith("\n") else None
      except json.JSONDecodeError:
        record = None
      if record:
        runs[tuple(record["unit"])] = record["arms"]
    # What follows must start on a line of its own.
    with atomically(path) as f:
      for unit, arms in runs.items():
        f.write(_line(unit, arms))
  return runs


def _line(unit, arms):
  return (json.dumps({"unit": unit, "arms": arms}) + "\n").encode()


def _run(units, prompts, make_arms, capacity, path):
  """Decodes the units that `path` does not hold yet, appending to it."""
  runs = _read_runs(path)
  missing = [unit for unit in units if unit not in runs]
  if len(missing) < len(units):
    print(f"{len(units) - len(missing)} of {len(units)} prompts are in {path}; "
          "delete it to measure them again", file=sys.stderr)
  longest = max((row for rows in prompts.values() for row in rows), key=len)
  temperature, arms = None, {}
  with (tqdm.tqdm(total=len(units), initial=len(units) - len(missing),
                  unit="prompt", dynamic_ncols=True) as bar,
        open(path, "ab") as f):
    for unit in missing:
      _, new_temperature, seed, name, index, _ = unit
      if new_temperature != temperature:
        temperature, arms = new_temperature, make_arms(new_temperature)
        for number, arm in enumerate(arms.values(), 1):
          bar.set_description(f"compiling {number} of {len(arms)}")
          arm.decode(longest, 0, 0, capacity)
        bar.set_description(f"temperature {temperature:g}")
      # In turn, so that all arms see the same machine.
      runs[unit] = {key: arm.decode(prompts[name][index], seed, index, capacity)
                    for key, arm in arms.items()}
      f.write(_line(unit, runs[unit]))
      f.flush()
      bar.update()
  return {unit: runs[unit] for unit in units}


def _temperatures():
  try:
    return [float(t) for t in dict.fromkeys(_TEMPERATURE.value)]
  except ValueError:
    raise ValueError(f"--temperature is {','.join(_TEMPERATURE.value)!r}; give "
                     "numbers between commas, such as 1,0.6") from None


def main():
  gammas = common.draft_lengths("--gammas", _GAMMAS.value)
  verifiers = common.verifier_names("--verifiers", _VERIFIERS.value)
  if "token" not in verifiers:
    raise ValueError("--verifiers lacks 'token'; the others are compared to "
                     "it: add it")
  temperatures = _temperatures()
  target, drafters, tokenizer = common.load_models(
      _TARGET.value, _DRAFTER.value)
  prompts, source = _load_prompts(tokenizer)
  make_arms = lambda t: _arms(target, drafters, t, gammas, verifiers)
  longest = max(len(row) for rows in prompts.values() for row in rows)
  limit = longest + _NEW_TOKENS.value
  # Decoders refuse what does not fit together when they are made.
  context = min(arm.decoder.context_length for t in temperatures
                for arm in make_arms(t).values())
  if limit > context:
    raise ValueError(f"{longest} tokens of a prompt and --new_tokens="
                     f"{_NEW_TOKENS.value} exceed the context length of "
                     f"{context}; ask for fewer")
  capacity = limit + max(gammas) + 1

  output_dir = pathlib.Path(_OUTPUT_DIR.value)
  output_dir.mkdir(parents=True, exist_ok=True)
  fingerprint = _fingerprint(target, drafters, gammas, verifiers)
  digests = {name: [hashlib.sha256(repr(row).encode()).hexdigest()[:16]
                    for row in rows] for name, rows in prompts.items()}
  units = [(fingerprint, t, _SEED.value + s, name, i, digests[name][i])
           for t in temperatures for s in range(_SEEDS.value)
           for name, rows in prompts.items() for i in range(len(rows))]
  runs = _run(units, prompts, make_arms, capacity, output_dir / "runs.jsonl")
  costs = _costs(target, drafters, gammas, capacity)

  study = report.Study(runs, list(drafters), gammas, verifiers, costs)
  rows = study.rows()
  by_prompts = [row for name in prompts for row in study.rows(name)]
  report.print_table(rows)
  report.write(output_dir, rows, by_prompts, list(prompts))
  print(f"wrote verification.md, .csv and .png to {output_dir}")
  print(json.dumps({
      "study": "verification", "rows": rows, "by_prompts": by_prompts,
      "source": source, "seeds": _SEEDS.value,
      "num_prompts": sum(map(len, prompts.values())),
      "autoregressive_tokens_per_second": study.baseline_speed()}))


if __name__ == "__main__":
  common.run(main)
