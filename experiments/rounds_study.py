"""Computes how many rounds token and block verification need for a sequence.

  python experiments/rounds_study.py

A round is one draft and one target call. The target generates one sequence per
prompt, up to --max_new_tokens or an end-of-text token. Let p and q be the
probabilities of target and drafter. The ratios p/q of the sequence's tokens
determine the exact distribution of the number of rounds, for every draft length
(`text_rounds.given_text`).

Both rules are compared on the same sequences, so random accept and reject
decisions add no noise. With a lossless rule, sequences follow the target's
distribution. So the mean over these sequences estimates the expected rounds of
decoding with the rule, and the mixture of the distributions estimates the
quantiles. Confidence intervals are 95 %, over the sequences.

The drafter's q must depend only on the sequence before a token. Then a draft of
one token determines q at every position. Greedy block verification is not
included, because it has state and no such formula is known for it. Output:
rounds.csv and rounds.json in --output_dir.

With --token_cost, the script also compares stop rules under block verification.
A stop rule chooses the draft length of a round. The compared rules are the best
fixed length, a threshold on the confidence (max q), and optimal stopping with
estimated acceptance rates (`draft_stopping`). They are tuned on one half of the
prompts and evaluated on the other. One draft of the largest --gamma is drawn at
every position. Output: lengths.csv in --output_dir.

  python experiments/rounds_study.py --token_cost=0.02,0.05,0.1,0.2
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

from lib import common  # before jax, which takes long to import

# isort: split
from absl import flags
import jax
import jax.numpy as jnp
from lib import drafters as drafters_lib
from lib import flags as shared
from lib import models
from lib.prompts import reading as prompts_lib
from lib.reports import draft_stopping
from lib.reports import text_rounds
import numpy as np
import tqdm

import specjax as sj
from specjax import interfaces
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

_TOKEN_COST = flags.DEFINE_list(
    "token_cost", [], "Costs of drafting one token relative to a target call, "
    "above 0, comma-separated, such as 0.02,0.1. For each cost, rules that "
    "choose the draft length are also compared. Default: no such comparison")

_ROWS, _ROUNDS = 8, 8  # rows and rounds per call, to limit its memory


@dataclasses.dataclass(frozen=True)
class _RejectAll(sj.Verifier):
  """Rejects every draft, so that each round emits one token of the target."""

  def law(self, draft: sj.Draft, target_probs: jax.Array):
    stop = jnp.zeros(len(draft.tokens), target_probs.dtype).at[0].set(1)
    return sj.Law(stop=stop, next_token=target_probs)


@jax.jit
def _seen(trace: sj.types.Trace):
  """Returns p/q of emitted tokens, and max q and survival along the drafts."""
  at = lambda probs, token: jnp.take_along_axis(
      probs, token[..., None], -1)[..., 0]
  p, q = trace.target_probs[..., :-1, :], trace.draft.probs[..., 1:, :]
  token = trace.verdict.next_token
  ratios = at(p[..., 0, :], token) / at(q[..., 0, :], token)
  drawn = trace.draft.tokens[..., 1:]
  step = lambda survival, ratio: (jnp.minimum(1, survival * ratio),) * 2
  along = jnp.moveaxis(at(p, drawn) / at(q, drawn), -1, 0)
  survival = jax.lax.scan(step, jnp.ones_like(ratios), along)[1]
  return ratios, q.max(-1), jnp.moveaxis(survival, 0, -1)


def _texts(decoder: sj.Decoder, params: Any, prompts: Sequence[Sequence[int]]):
  """Generates the sequences, and returns a `draft_stopping.Text` for each."""
  found = []
  for first in tqdm.trange(0, len(prompts), _ROWS, dynamic_ncols=True):
    some = prompts[first:first + _ROWS]
    state = decoder.prefill(
        params, some, jax.random.key(_SEED.value),
        limits=[len(row) + _NEW_TOKENS.value for row in some],
        request_ids=list(range(first, first + len(some))))
    parts = []
    while not state.done.all():
      state, stats, trace = decoder.decode(params, state, _ROUNDS, traced=True)
      sj.decoding.raise_if_not_finite(stats)
      parts.append(jax.device_get((stats.active, *_seen(trace))))
    active, *seen = (np.concatenate(x) for x in zip(*parts))
    found += [draft_stopping.Text(*(x[active[:, row], row] for x in seen))
              for row in range(len(some))]
  return found


def _rows(name: str, texts: list[draft_stopping.Text], gammas: Sequence[int],
          clusters: Sequence[str]):
  """Returns the table rows of one drafter, one per gamma and rule."""
  rows = []
  for gamma in gammas:
    within = {rule: _padded([text_rounds.given_text(text.ratios, gamma, rule)
                             for text in texts]) for rule in ("token", "block")}
    rows += [{
        "drafter": name, "gamma": gamma, "temperature": _TEMPERATURE.value,
        "verifier": rule, "clusters": len(set(clusters)),
        **text_rounds.columns(mine, clusters),
        **text_rounds.compared(mine, within["token"], clusters)}
             for rule, mine in within.items()]
  return rows


def _padded(within: list[np.ndarray]):
  """Returns cumulative distributions as one array `[N, K]`, padded with 1."""
  most = max(map(len, within))
  return np.stack([np.r_[x, np.ones(most - len(x))] for x in within])


def main():
  gammas = common.draft_lengths("--gamma", _GAMMAS.value)
  prices = (common.numbers("--token_cost", _TOKEN_COST.value)
            if _TOKEN_COST.value else [])
  if min(prices, default=1) <= 0:
    raise ValueError(f"--token_cost contains {min(prices):g}; set costs above "
                     "0, because without a cost the longest draft is best")
  longest = max(gammas) if prices else 1
  target, drafters, tokenizer = drafters_lib.load(
      _TARGET.value, _DRAFTER.value, drafters_lib.Options(gamma=longest),
      dtype=_DTYPE.value)
  read = prompts_lib.read(
      tokenizer, _PROMPTS.value, field=_FIELD.value, count=_NUM_PROMPTS.value,
      tokens=_PROMPT_TOKENS.value, seed=_SEED.value, chat=_CHAT.value)
  output_dir = common.output_directory(_OUTPUT_DIR.value, "study")
  common.claim(output_dir, "rounds")
  rows, lengths = [], []
  for name, drafter in drafters.items():
    decoder = sj.Decoder(
        target=drafter.model, verifier=_RejectAll(),
        drafter=drafter.strategy.drafter,
        transform=sj.LogitsTransform(temperature=_TEMPERATURE.value),
        eos=models.ends(target, tokenizer) if _CHAT.value else None)
    if "autoregressive" not in interfaces.capabilities(decoder.drafter):
      raise ValueError(f"--drafter contains {name}, whose probabilities do not "
                       "depend on the sequence alone; leave it out")
    prompts_lib.check_room(read.longest, _NEW_TOKENS.value,
                           decoder.context_length, decoder.context_owner)
    texts = _texts(decoder, drafter.params, read.all)
    rows += _rows(name, texts, gammas, read.clusters)
    lengths += [{"drafter": name, "temperature": _TEMPERATURE.value, **row}
                for price in prices for row in draft_stopping.compare(
                    texts, read.clusters, price)]
  text_rounds.print_table(rows)
  common.write_csv(output_dir / "rounds.csv", rows)
  if lengths:
    draft_stopping.print_table(lengths)
    common.write_csv(output_dir / "lengths.csv", lengths)
  common.finish(output_dir, "rounds", {
      "rows": rows, "lengths": lengths, "source": read.source})


if __name__ == "__main__":
  common.run(main)
