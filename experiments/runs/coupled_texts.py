"""Compares the texts of coupled sampling with and without drafters.

  python experiments/runs/coupled_texts.py > coupled_texts.csv

With `LogitsTransform(coupled=True)`, the text depends on the target and the
key, but not on the drafter or the batch. The script decodes the same prompts
with several drafters of the bundled target. Every text is compared with the
text without a drafter at batch 1. Columns:

  different         number of texts that differ from it
  near_tie          of these, texts whose first different token is decided by
                    rounding: the scores p_i / S_i of the two tokens differ by
                    less than 1e-4 of their value
  block_efficiency  tokens per target call
  accepted, exact   accepted tokens per round, and their exact mean over the
                    noise (observer `Coupled`, for chains of a draft model)
  low, high         95 % interval of accepted - exact, over prompts
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from absl import flags  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from lib import common  # noqa: E402
from lib import drafters as drafters_lib  # noqa: E402
from lib import progress  # noqa: E402
from lib.prompts import reading as prompts_lib  # noqa: E402
import numpy as np  # noqa: E402

import specjax as sj  # noqa: E402
from specjax import drafters  # noqa: E402
from specjax import sampling  # noqa: E402

_PROMPTS = flags.DEFINE_integer("num_prompts", 200, "Number of prompts", 2)
_NEW_TOKENS = flags.DEFINE_integer(
    "new_tokens", 24, "Number of new tokens per prompt", 1)
_TOP_P, _TEMPERATURES, _BATCHES = 0.95, (1.0, 0.6), (1, 8)


def _decoders(pair):
  """Returns `{name: (decoder, parameters)}`."""
  transform = sj.LogitsTransform(top_p=_TOP_P, coupled=True)
  small = drafters.LanguageModel(model=pair.drafters["small"].model)
  shape = lambda shape: drafters.NetworkDrafter(network=small, shape=shape)
  block = sj.verifiers.Block()

  def own(drafter, rule=block, **more):
    return sj.Decoder(
        target=pair.target.model, drafter=drafter, verifier=rule,
        transform=transform, **more), pair.params("small")

  chain = shape(drafters.Chain(gamma=6))
  eagle = drafters_lib.load("bundled", ["eagle3"], drafters_lib.Options(
      verifier=block))[1]["eagle3"]
  walk = sj.verifiers.TargetWalk()
  return {
      "none": own(drafters.Empty()),
      "small": own(chain, observers=(sj.verifiers.Coupled(),)),
      "ngram": own(sj.strategies.prompt_lookup(gamma=6).drafter, walk),
      "eagle3": (eagle.strategy.decoder(eagle.model, transform=transform),
                 eagle.params),
      "sampled tree": own(shape(drafters.Sampled(
          depth=4, expanded=3, children=3)), sj.verifiers.Traversal()),
      "EAGLE-2 tree": own(shape(drafters.Best(
          depth=4, top_k=3, num_nodes=16)), walk),
      "controller": own(chain, controller=sj.decoding.Controller(
          lengths=(0, 2, 4, 6), seconds=(1.0, 1.6, 2.1, 2.6))),
  }


def _texts(decoder, params, prompts, temperature, batch):
  """Returns the texts, and the sums over rounds of each row."""
  texts, sums = [], []
  for start in range(0, len(prompts), batch):
    rows = range(start, min(start + batch, len(prompts)))
    found = decoder.generate(
        params, [prompts[row] for row in rows], jax.random.key(0),
        request_ids=list(rows), max_new_tokens=_NEW_TOKENS.value,
        temperature=temperature)
    stats = found.stats
    texts += [row.tolist() for row in found.tokens]
    sums.append(np.column_stack(jax.tree.map(np.asarray, (
        stats.active, stats.emitted, stats.expected))))
  return texts, np.concatenate(sums)


def _gap(pair, text, other, row, temperature):
  """Returns the relative difference of the scores of two tokens.

  These are the first tokens in which `text` and `other` differ.
  """
  at = next(i for i, (a, b) in enumerate(zip(text, other)) if a != b)
  logits = pair.target.model(
      pair.target.params, jnp.array([text[:at]], jnp.int32)).logits[0, -1]
  p = sj.LogitsTransform(temperature=temperature, top_p=_TOP_P)(logits)
  key = jax.random.fold_in(jax.random.key(0), row)
  noise = sampling.noise(sampling.noise_keys(
      key[None], jnp.array([[at]], jnp.int32))[0, 0], len(p))
  scores = np.log(np.asarray(p / noise, np.float64))
  return abs(scores[text[at]] - scores[other[at]])


def main():
  pair = sj.zoo.load()
  prompts = prompts_lib.read(
      pair.tokenizer, ["code", "docstrings"], field=None,
      count=-(-_PROMPTS.value // 2), tokens=96, seed=0).all[:_PROMPTS.value]
  wanted = {}
  print("drafter,temperature,batch,prompts,different,near_tie,"
        "block_efficiency,accepted,exact,low,high")
  for name, (decoder, params) in _decoders(pair).items():
    for batch in _BATCHES:
      for temperature in _TEMPERATURES:
        progress.say(f"{name}, batch {batch}, temperature {temperature}")
        texts, sums = _texts(decoder, params, prompts, temperature, batch)
        first = wanted.setdefault(temperature, texts)
        gaps = [_gap(pair, one, other, row, temperature)
                for row, (one, other) in enumerate(zip(first, texts))
                if one != other]
        rounds, emitted, accepted = sums.T[:3]
        measures = [emitted.sum() / rounds.sum()]
        if decoder.observers:
          exact = sums[:, 3]
          error = sj.analysis.ratio_estimate(accepted - exact, rounds)
          measures += [accepted.sum() / rounds.sum(),
                       exact.sum() / rounds.sum(), error.low, error.high]
        print(name, temperature, batch, len(texts), len(gaps),
              sum(gap < 1e-4 for gap in gaps),
              *(f"{x:.4f}" for x in measures), *[""] * (5 - len(measures)),
              sep=",", flush=True)


if __name__ == "__main__":
  common.run(main)
