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
                     overhead): what a round costs in autoregressive steps,
                     measured on one half of the prompts, predicts the other;
                     verify and draft are passes timed alone, and the overhead
                     is the rest of a round

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

from absl import flags
from lib import common
from lib import rollouts
from lib import timing
from lib import verification_report as report

import specjax as sj
from specjax.data import prompt_sets
from specjax.data import prompts as prompts_lib

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
    "num_prompts", 12, "prompts of every set", 2)
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
    prompts[name] = [
        common.last_tokens(tokenizer.encode(text), _PROMPT_TOKENS.value)
        for text in texts]
    sources[name] = sources_of_set
    digest.update(repr(prompts[name]).encode())
  return prompts, {"python": platform.python_version(),
                   "hash": digest.hexdigest()[:16], "sets": sources}


def _arms(target, drafters, temperature, gammas, verifiers, capacity):
  """The baseline and a decoder for every drafter, gamma and verifier."""
  token = common.VERIFIERS["token"]

  def arm(member, drafter, verifier, observers=()):
    decoder = sj.Decoder(
        target=target.model, drafter=drafter, verifier=verifier,
        observers=observers, transform=sj.LogitsTransform(
            temperature=temperature, top_p=_TOP_P.value))
    return rollouts.Arm(
        decoder, {"target": target.params, "drafter": member.params},
        _NEW_TOKENS.value, capacity)

  arms = {report.BASELINE: arm(next(iter(drafters.values())),
                               sj.drafters.Empty(), token)}
  for name, member in drafters.items():
    for gamma in gammas:
      drafter = sj.drafters.LanguageModel(model=member.model, gamma=gamma)
      for verifier in verifiers:
        # The paired figures come from token verification's longest drafts.
        shared = verifier == "token" and gamma == max(gammas)
        observers = tuple(common.VERIFIERS[v] for v in verifiers
                          if shared and v != "token")
        arms[report.key(name, gamma, verifier)] = arm(
            member, drafter, common.VERIFIERS[verifier], observers)
  return arms


def _costs(target, drafters, gammas, capacity):
  """Seconds of the passes that a round is made of, timed alone."""
  used = _PROMPT_TOKENS.value + _NEW_TOKENS.value // 2
  seconds = lambda member, tokens: timing.median(timing.passes(
      member.model, member.params, capacity, used, tokens))
  return {"verify": {gamma: seconds(target, gamma + 1) for gamma in gammas},
          "draft": {name: seconds(drafter, 1)
                    for name, drafter in drafters.items()}}


def main():
  gammas = common.draft_lengths("--gammas", _GAMMAS.value)
  verifiers = common.verifier_names("--verifiers", _VERIFIERS.value)
  if "token" not in verifiers:
    raise ValueError("--verifiers lacks 'token'; the others are compared to "
                     "it: add it")
  temperatures = common.numbers("--temperature", _TEMPERATURE.value)
  target, drafters, tokenizer = common.load_models(
      _TARGET.value, _DRAFTER.value)
  prompts, source = _load_prompts(tokenizer)
  longest = max(len(row) for rows in prompts.values() for row in rows)
  limit = longest + _NEW_TOKENS.value
  capacity = limit + max(gammas) + 1
  make_arms = lambda t: _arms(target, drafters, t, gammas, verifiers, capacity)
  # Decoders refuse what does not fit together when they are made.
  context = min(arm.decoder.context_length for t in temperatures
                for arm in make_arms(t).values())
  if limit > context:
    raise ValueError(f"{longest} tokens of a prompt and --new_tokens="
                     f"{_NEW_TOKENS.value} exceed the context length of "
                     f"{context}; ask for fewer")

  output_dir = pathlib.Path(_OUTPUT_DIR.value)
  output_dir.mkdir(parents=True, exist_ok=True)
  members = [target, *drafters.values()]
  fingerprint = rollouts.fingerprint(
      [m.params for m in members], [m.model for m in members], list(drafters),
      gammas, verifiers, _TOP_P.value, _NEW_TOKENS.value)
  # At temperature 0 all seeds give the same rollout.
  units = [(fingerprint, t, _SEED.value + s, name, i, rollouts.digest(row))
           for t in temperatures for s in range(_SEEDS.value if t > 0 else 1)
           for name, rows in prompts.items() for i, row in enumerate(rows)]
  runs = rollouts.run(
      units, lambda unit: (prompts[unit[3]][unit[4]], unit[2], unit[4]),
      make_arms, output_dir / "runs.jsonl")
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
