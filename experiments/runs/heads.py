"""Compares drafters that are trained on the same number of tokens.

  python experiments/runs/heads.py

Each method is trained with several seeds by train_drafter.py on the bundled
target, with --row_tokens=256 --batch_size=4, the settings in METHODS and
otherwise the defaults of the method, so no learning rate is tuned. Every
drafter then decodes the same prompts at temperatures 1 and 0, with chains and
with sampled trees of two sizes. All rules are evaluated on these drafts. The
results of the seeds are pooled; intervals are 95 %, over prompts. There
are two controls: DFlash that also predicts a token from the anchor, as DSpark
does, and DFlash and DSpark that draft only the 16 most likely tokens, as DFlash
2 and LiLiCorr do. Output in --output_dir:

  arena.md, arena.csv, arena.png   tokens per target call
  seeds.csv                        the same for each seed, without intervals
  positions.csv                    recall@K and acceptance by position (chains)
  oracle.csv                       oracle length with K candidates
  speed.csv                        predicted speed-up at batch size 1
  speed_h100.csv                   the same for a target of 8B parameters
  heads.json                       trained parameters and minutes of training

The columns are explained in evaluate_drafter.py. The rounds of speed.csv are
measured on this machine. Those of speed_h100.csv have the launches and bytes
that gpu_schedule.py counted, and the acceptance of chains of 4 tokens. The
acceptance is that of the bundled target in both. A script that was killed
resumes.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from absl import flags  # noqa: E402
from lib import common  # noqa: E402
from lib import drafters as drafters_lib  # noqa: E402
from lib import progress  # noqa: E402
from lib.compiler import chips  # noqa: E402
from lib.configurations import decoders  # noqa: E402
from lib.prompts import reading as prompts_lib  # noqa: E402
from lib.reports import advice  # noqa: E402
from lib.reports import arena_report  # noqa: E402
from lib.rollouts import judging  # noqa: E402
from lib.rollouts import round_costs  # noqa: E402

import specjax as sj  # noqa: E402

_BLOCK = ["--method=parallel", "--heads=8", "--layers=2", "--mlp_width=192",
          "--taps=2,4", "--markov_rank=32", "--confidence=none"]
_MASKED = [*_BLOCK, "--nofrom_anchor"]
METHODS = {
    "PaSS": ["--method=pass"],
    "UNO": ["--method=uno"],
    "Medusa": ["--method=medusa"],
    "MTP": ["--method=mtp"],
    "EAGLE-3": ["--method=eagle3"],
    "DFlash": [*_MASKED, "--markov=none"],
    "DFlash with anchor": [*_BLOCK, "--markov=none"],
    "DSpark": [*_BLOCK, "--markov=plain"],
    "Domino": [*_BLOCK, "--markov=gru"],
    "DFlash 2": [*_MASKED, "--markov=selector", "--conv_kernel=2"],
    "LiLiCorr": [*_MASKED, "--markov=lilicorr"],
}
_METHODS = flags.DEFINE_list(
    "methods", list(METHODS), f"Methods: some of {', '.join(METHODS)}")
_STEPS = flags.DEFINE_integer("steps", 400, "Training steps", 1)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Training runs per method", 1)
_PROMPTS = flags.DEFINE_integer("num_prompts", 16, "Prompts per set", 2)
_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens", 128, "New tokens per prompt", 1)
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "results/heads", "Directory of heads and results")
# Names of gpu_schedule.py.
_ROUND = {"EAGLE-3": "eagle3", "DFlash with anchor": "dflash"}
_LAUNCH = 6e-6  # measured seconds of a launch, see docs/results/gpu.md
_TEMPERATURES, _GAMMAS, _NODES = (1.0, 0.0), [2, 4, 8], (16, 32)
_ROOT = pathlib.Path(__file__).parents[2]
_SCHEDULE = _ROOT / "experiments/results/gpu/gpu_schedule.json"


def _directory(method: str, seed: int) -> pathlib.Path:
  return (pathlib.Path(_OUTPUT_DIR.value) / "trained"
          / f"{method.lower().replace(' ', '_')}_{seed}")


def _train(method: str, seed: int) -> dict[str, float]:
  """Trains the heads, unless they exist, and returns their size and time."""
  directory = _directory(method, seed)
  result = directory / "train_drafter.json"
  if not result.exists():
    progress.say(f"training {method}, seed {seed}")
    subprocess.run([
        sys.executable, str(_ROOT / "experiments/train_drafter.py"),
        f"--output_dir={directory}", f"--steps={_STEPS.value}",
        f"--seed={seed}", "--row_tokens=256", "--batch_size=4",
        "--warmup_fraction=0.1", f"--evaluate_every={_STEPS.value}",
        "--checkpoint_every=100", *METHODS[method]], check=True)
  found = json.loads(result.read_text("utf-8"))
  if found["steps"] != _STEPS.value:
    raise ValueError(f"{directory} was trained for {found['steps']} steps and "
                     f"--steps is {_STEPS.value}; choose another --output_dir")
  return {"method": method, "seed": seed,
          **{name: found[name] for name in ("added_parameters", "minutes")}}


def _candidates(seed: int):
  """Returns the target, `{name of a draft: candidate}` and the tokenizer."""
  target, loaded, tokenizer = drafters_lib.load(
      "bundled", [str(_directory(name, seed)) for name in _METHODS.value],
      drafters_lib.Options(gamma=_GAMMAS[-1], nodes=_NODES[-1]),
      batch=decoders.Batch(size=16), compared=True)
  found = {}
  for name, drafter in zip(_METHODS.value, loaded.values()):
    found[f"{name}, chain"] = judging.of_loaded(drafter)
    tree = judging.sampled_tree(drafter, _NODES)
    if tree is not None:
      found[f"{name}, sampled tree"] = tree
  return target, found, tokenizer


def _cut(one: judging.Candidate) -> judging.Candidate:
  """Returns a candidate that drafts only the 16 most likely tokens."""
  drafter = dataclasses.replace(one.drafter, transform=sj.LogitsTransform(
      temperature=None, top_k=16))
  return one._replace(strategies=tuple(
      strategy._replace(drafter=drafter) for strategy in one.strategies))


def _evaluate(output_dir: pathlib.Path):
  """Writes all tables of acceptance, and returns their rows."""
  rules = {"token": sj.verifiers.Token(), "block": sj.verifiers.Block()}
  pooled, by_seed = {}, []
  for seed in range(_SEEDS.value):
    target, candidates, tokenizer = _candidates(seed)
    candidates |= {f"{name} of 16 candidates": _cut(one)
                   for name, one in candidates.items()
                   if name.partition(", ")[0] in ("DFlash", "DSpark")}
    read = prompts_lib.read(
        tokenizer, ["code", "docstrings"], field=None, count=_PROMPTS.value,
        tokens=128, seed=0)
    for name, one in candidates.items():
      results = judging.Judge(
          target=target, candidates={name: one}, rules=rules, gammas=_GAMMAS,
          read=read, eos=None, new_tokens=_NEW_TOKENS.value,
          batch=decoders.Batch(size=16), seed=0, detailed=one.is_chain,
      ).results(_TEMPERATURES, output_dir / "runs" / (
          f"{name.replace(', ', '_').replace(' ', '_')}_{seed}.jsonl"))
      by_seed += [{"seed": seed, **row} for row in results.rows()
                  if row["prompts"] == "all"]
      before = pooled.get(name)
      pooled[name] = results if before is None else dataclasses.replace(
          results, runs={**before.runs, **results.runs})
  rows = [row for results in pooled.values() for row in results.rows()]
  arena_report.write(output_dir, rows, "bundled")
  common.write_csv(output_dir / "seeds.csv", [
      {name: x for name, x in row.items() if not name.endswith(
          ("_low", "_high"))} for row in by_seed])
  for name in ("positions", "oracle"):
    common.write_csv(output_dir / f"{name}.csv", [
        {"draft": draft, **row} for draft, results in pooled.items()
        for row in getattr(results, name)()])
  return rows


def _predict(output_dir: pathlib.Path, rows):
  """Writes the predicted speed of every draft and rule on this machine."""
  target, candidates, _ = _candidates(0)
  rounds = round_costs.Rounds(target=target, candidates=candidates,
                              gammas=_GAMMAS, batches=[1], contexts=[128])
  rows = [row for row in rows if row["draft"] in candidates]  # no controls
  costs = round_costs.Measured(
      rounds, round_costs.Stored(output_dir / "costs.json"))
  common.write_csv(output_dir / "speed.csv", advice.predict(
      advice.comparable(rows, rounds), costs, [1], [128]))


def _predict_gpu(rows):
  """Returns rows of chains with the predicted speed on an H100.

  A round takes the time of reading its weights or of its launches, whichever is
  longer. Without drafts, a token takes the time of reading the target.

  Args:
    rows: rows of the arena over all prompts.
  """
  seconds = lambda read, launches=0: max(
      read * 1e9 / chips.CHIPS["h100"].bandwidth, launches * _LAUNCH)
  schedule = json.loads(_SCHEDULE.read_text("utf-8"))["rows"]
  by_name = {row["round"]: row for row in schedule if row["batch"] == 1}
  plain, found = seconds(by_name["pass"]["gigabytes"]), []
  for row in rows:
    method, _, draft = row["draft"].partition(", ")
    if draft != "chain" or row["gamma"] != 4:
      continue
    counted = by_name[_ROUND.get(method, method.lower().replace(" ", ""))]
    ratio = plain / seconds(counted["gigabytes"], counted["launches"])
    found.append({
        **{key: row[key] for key in ("draft", "verifier", "temperature")},
        **{key: counted[key] for key in ("launches", "gigabytes")},
        **{"speedup" + end: row["block_efficiency" + end] * ratio
           for end in ("", "_low", "_high")}})
  return found


def main() -> None:
  unknown = set(_METHODS.value) - set(METHODS)
  if unknown:
    raise ValueError(f"--methods contains {', '.join(sorted(unknown))}; give "
                     f"some of {', '.join(METHODS)}")
  output_dir = common.output_directory(_OUTPUT_DIR.value, "study")
  common.claim(output_dir, "heads")
  trained = [_train(method, seed) for seed in range(_SEEDS.value)
             for method in _METHODS.value]
  rows = _evaluate(output_dir)
  common.finish(output_dir, "heads", {"rows": rows, "trained": trained})
  rows = [row for row in rows if row["prompts"] == "all"]
  common.write_csv(output_dir / "speed_h100.csv", _predict_gpu(rows))
  _predict(output_dir, rows)


if __name__ == "__main__":
  common.run(main)
