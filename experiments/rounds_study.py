"""Rounds that texts need under token and block verification, given the text.

  python experiments/rounds_study.py

The target writes a text for every prompt, up to --max_new_tokens or an eos. Its
tokens' ratios p/q then give the distribution of the number of rounds exactly,
for every draft length (`lib.text_rounds.given_text`). All rules have the same
texts, so a comparison has no noise from sampling or accept and reject
decisions; intervals are over the texts alone. All lossless rules write texts of
the same distribution, so the mean over texts estimates the expected rounds of a
rule's own rollouts, and the mixture over texts their quantiles.

The drafter's q must depend on the text alone, so that a draft of one token
gives q at every position. Greedy block verification has state and no such
formula. Writes rounds.csv to --output_dir.
"""

import dataclasses

from lib import common  # before jax, which takes long to import

# isort: split
import jax
import jax.numpy as jnp
from lib import flags as shared
from lib import models
from lib import prompts as prompts_lib
from lib import text_rounds
import numpy as np
import tqdm

import specjax as sj
from specjax import contract
from specjax.data import prompt_sets

_GAMMAS = shared.gammas("2,4,8,16")
_TEMPERATURE = shared.temperature()
_PROMPTS = shared.prompts(list(prompt_sets.EMBEDDED))
_FIELD = shared.prompt_field()
_CHAT = shared.chat()
_NUM_PROMPTS = shared.num_prompts(12)
_PROMPT_TOKENS = shared.prompt_tokens()
_NEW_TOKENS = shared.new_tokens(128)
_TARGET = shared.target()
_DRAFTER = shared.drafters()
_DTYPE = shared.dtype()
_SEED = shared.seed()
_OUTPUT_DIR = shared.output_dir("results/rounds")

_ROWS, _ROUNDS = 8, 8  # decoded at a time: bounds the memory of the trace


@dataclasses.dataclass(frozen=True)
class _RejectAll:
  """Rejects every draft, so that each round emits one token of the target."""

  lossless = True

  def law(self, draft, target_probs):
    stop = jnp.zeros(len(draft.tokens), target_probs.dtype).at[0].set(1)
    return sj.Law(stop=stop, next_token=target_probs)


@jax.jit
def _ratios(trace):
  """p/q of the emitted tokens."""
  token = trace.verdict.next_token[..., None]
  at = lambda probs, node: jnp.take_along_axis(
      probs[..., node, :], token, -1)[..., 0]
  return at(trace.target_probs, 0) / at(trace.draft.probs, 1)


def _texts(decoder, params, prompts):
  """The ratios of one text per prompt, `[T]` arrays."""
  found = []
  for first in tqdm.trange(0, len(prompts), _ROWS, dynamic_ncols=True):
    some = prompts[first:first + _ROWS]
    state = decoder.prefill(
        params, some, jax.random.key(_SEED.value),
        limits=[len(row) + _NEW_TOKENS.value for row in some],
        request_ids=list(range(first, first + len(some))))
    parts = []
    while not state.done.all():
      state, stats, trace = decoder.decode_traced(params, state, _ROUNDS)
      sj.raise_if_not_finite(stats)
      parts.append(jax.device_get((_ratios(trace), stats.active)))
    ratios, active = (np.concatenate(x) for x in zip(*parts))
    found += [ratios[active[:, row], row] for row in range(len(some))]
  return found


def _rows(name, texts, gammas, clusters):
  """Rows of one drafter: every gamma and rule."""
  rows = []
  for gamma in gammas:
    within = {rule: _padded([text_rounds.given_text(text, gamma, rule)
                             for text in texts]) for rule in ("token", "block")}
    rows += [{
        "drafter": name, "gamma": gamma, "temperature": _TEMPERATURE.value,
        "verifier": rule, "clusters": len(set(clusters)),
        **text_rounds.columns(mine, clusters),
        **text_rounds.compared(mine, within["token"], clusters)}
             for rule, mine in within.items()]
  return rows


def _padded(within):
  """`[texts, K]` of probabilities that end at 1."""
  most = max(map(len, within))
  return np.stack([np.r_[x, np.ones(most - len(x))] for x in within])


def main():
  gammas = common.draft_lengths("--gamma", _GAMMAS.value)
  target, drafters, tokenizer = models.load_models(
      _TARGET.value, _DRAFTER.value, dtype=_DTYPE.value)
  read = prompts_lib.read(
      tokenizer, _PROMPTS.value, field=_FIELD.value, count=_NUM_PROMPTS.value,
      tokens=_PROMPT_TOKENS.value, seed=_SEED.value, chat=_CHAT.value)
  output_dir = common.output_directory(_OUTPUT_DIR.value, "study")
  rows = []
  for name, drafter in drafters.items():
    chain, params = models.chain(target, drafter, name)
    decoder = sj.Decoder(
        target=target.model, drafter=chain(1).drafter, verifier=_RejectAll(),
        transform=sj.LogitsTransform(temperature=_TEMPERATURE.value),
        eos=models.ends(target, tokenizer) if _CHAT.value else None)
    if "autoregressive" not in contract.capabilities(decoder.drafter):
      raise ValueError(f"--drafter holds {name}, whose q does not depend on "
                       "the text alone; leave it out")
    prompts_lib.check_room(read.longest, _NEW_TOKENS.value,
                           decoder.context_length)
    texts = _texts(decoder, {"target": target.params, "drafter": params},
                   read.all)
    rows += _rows(name, texts, gammas, read.clusters)
  text_rounds.print_table(rows)
  common.write_csv(output_dir / "rounds.csv", rows)
  common.finish(output_dir, "rounds", {
      "rows": rows, "source": read.source})


if __name__ == "__main__":
  common.run(main)
