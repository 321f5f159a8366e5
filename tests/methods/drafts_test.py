"""Wrong drafters are refused by `testing.assert_drafter_exact`, by name.

Each is one that a real implementation could be. Most of them write texts that
no test of texts can tell from the target's.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import sampling
from specjax import testing

VOCAB, _GAMMA = 5, 3


@functools.cache
def small_pair():
  return testing.tiny_pair(VOCAB, seed=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain(sj.interfaces.Drafter):
  """Draws a chain from a table of the last two tokens; a subclass spoils it.

  It has no model, so that a program of it compiles in a moment.
  """

  gamma: int = _GAMMA
  transform: Any = None
  provides = ("chain", "iid", "conditional")

  @property
  def num_uniforms(self):
    return 2 * self.gamma

  def bind(self, target, transform):
    return dataclasses.replace(self, transform=transform)

  def init(self, params, prompt, prefill_output):
    rows = prompt.lengths.shape[0]
    return {"first": prompt.lengths, "full": jnp.zeros((rows, 2), bool)}

  def propose(self, params, uniforms, state):
    table, u = params["drafter"], self.uniforms(uniforms, state)
    u = u.reshape(-1, self.gamma, 2)
    at = jnp.maximum(state.lengths[:, None] - jnp.array([2, 1]), 0)
    before, last = jnp.take_along_axis(state.tokens, at, axis=1).T
    roots, tokens, rows = last, [], []
    for i in range(self.gamma):
      logits = table[before, last]
      q = self.transform(self.logits(logits, i, state), state.temperature)
      token = jax.vmap(sampling.inverse_cdf)(q, u[:, i])
      rows.append(self.reported(q, logits, token, i, state, rows))
      tokens.append(token)
      before, last = last, token
    tokens, rows = jnp.stack(tokens, 1), jnp.stack(rows, 1)
    tokens, rows = self.finished(tokens, rows, state)
    return jax.vmap(sj.Draft.chain)(roots, tokens, rows), state.drafter

  def commit(self, params, drafter, draft, verdict, target_output, count, own):
    full = verdict.num_accepted == self.gamma
    return {**drafter, "full": jnp.stack([full, drafter["full"][:, 0]], 1)}

  # What is right, for subclasses to change.

  def uniforms(self, uniforms, state):
    return uniforms

  def logits(self, logits, i, state):
    return logits

  def reported(self, q, logits, token, i, state, rows):
    return q

  def finished(self, tokens, rows, state):
    return tokens, rows


@functools.cache
def table_params():
  """A target, and a table that agrees with it often."""
  target = small_pair().params["target"]
  texts = np.indices((VOCAB, VOCAB)).reshape(2, -1).T
  logits = small_pair().target(target, texts).logits[:, 1]
  noise = np.random.default_rng(0).normal(size=logits.shape)
  return {"target": target, "drafter": jnp.asarray(
      logits + 0.7 * noise, jnp.float32).reshape(VOCAB, VOCAB, VOCAB)}


def assert_exact(drafter, where=None, **kwargs):
  params = {**table_params(), "where": jnp.int32(
      -1 if where is None else [*_WHERE].index(where))}
  return testing.assert_drafter_exact(
      drafter, params, small_pair().target, **kwargs)


@pytest.mark.slow
def test_a_right_drafter_passes():
  # Broken: what is refused below is refused for another reason.
  found = assert_exact(Chain())
  assert found.drafts.log_p > np.log(0.01) and found.joint > 0.01
  assert found.texts.log_p > np.log(0.01) and found.tokens > 30_000


@pytest.mark.slow
def test_a_right_drafter_passes_in_small_batches():
  # Broken: a small batch of drafts contains a row twice, with the same draws.
  assert_exact(Chain(), rows=48, calls=8)


@pytest.mark.slow
def test_a_short_context_passes():
  # Broken: prompts or the calls of many rounds need more tokens than there are.
  pair = testing.tiny_pair(VOCAB, seed=2, context_length=24)
  testing.assert_drafter_exact(
      Chain(), table_params(), pair.target, calls=1, rows=8,
      prompts=[[1] * 12, [2, 3]])


def _only(condition, q, other):
  return jnp.where(jnp.asarray(condition)[:, None], other, q)


def at_temperature(logits, temperature):
  return jax.nn.softmax(logits / jnp.maximum(temperature, 1e-3)[:, None])


class _Spoilt(Chain):
  """Reports `wrong(...)` where `where(...)` holds."""

  def reported(self, q, logits, token, i, state, rows):
    return _only(self.where(i, state), q,
                 self.wrong(q, logits, token, rows, state))

  def where(self, i, state):
    return state.lengths > 0

  def wrong(self, q, logits, token, rows, state):
    return at_temperature(logits, 1.6 * state.temperature)


class _OfTemperature1(_Spoilt):
  where = lambda self, i, state: jnp.abs(state.temperature - 0.8) < 0.01
  wrong = lambda self, q, logits, *_: jax.nn.softmax(logits)


class _OfTemperature11(_Spoilt):
  wrong = lambda self, q, logits, token, rows, state: at_temperature(
      logits, 1.1 * state.temperature)


class _InThePrompt17(_Spoilt):
  where = lambda self, i, state: state.drafter["first"] == 17
  wrong = lambda self, q, *_: jnp.full_like(q, 1 / VOCAB)


class _OfThePreviousPosition(_Spoilt):
  wrong = lambda self, q, logits, token, rows, state: rows[-1] if rows else q


class _NearlyCertain(_Spoilt):
  """Rows of q with a large entry are mixed with the uniform law."""

  wrong = lambda self, q, logits, *_: _only(
      (q.max(1) > 0.9) & (q.max(1) < 1), q, 0.9 * q + 0.1 / VOCAB)


class _Learns(_Spoilt):
  """q after one step of training on the token that was drawn."""

  wrong = lambda self, q, logits, token, rows, state: at_temperature(
      logits + 0.3 * (jax.nn.one_hot(token, VOCAB) - q), state.temperature)


_LAST = _GAMMA - 1
_emitted = lambda state: state.lengths - state.drafter["first"]
_active = lambda state: (~state.done).sum()
# Conditions under which a drafter is wrong, of the draft's token i, the state
# and the transform, and the words of the error.
_WHERE = {
    "from row 128": (lambda i, state, _: jnp.arange(
        len(state.lengths)) >= 128, "rows of block 2 of 64"),
    "after four tokens": (
        lambda i, state, _: _emitted(state) >= 4, ""),
    "with an eos": (lambda i, state, _: (state.eos >= 0).any(1),
                    r"an eos in the request \(1\)"),
    "last token": (lambda i, state, _: i == _LAST, "(node|depth) 3"),
    "after full acceptance": (lambda i, state, _: state.drafter["full"][:, 0],
                              "full acceptance"),
    "two rounds after full acceptance": (
        lambda i, state, _: state.drafter["full"][:, 1], "full acceptance"),
    "second round": (lambda i, state, _: state.rounds == 1, "round"),
    "lengths of 16 k": (
        lambda i, state, _: state.lengths % 16 == 0, "0 mod 16 tokens"),
    **{f"temperature {t}": (
        lambda i, state, _, t=t: abs(state.temperature - t) < 0.01,
        f"a temperature of {10 * t:.0f} / 10")
       for t in (0.3, 0.4, 0.5, 0.7, 0.9, 1.1, 1.2, 1.4, 1.5, 2.0)},
    "temperature below 1": (lambda i, state, _: state.temperature < 0.99, ""),
    "temperature below 0.5": (
        lambda i, state, _: state.temperature < 0.49, ""),
    "temperature from 1.4": (lambda i, state, _: state.temperature > 1.39, ""),
    **{f"from round {n}": (
        lambda i, state, _, n=n: state.rounds >= n, "") for n in (6, 16, 30)},
    **{f"prompt over {n}": (
        lambda i, state, _, n=n: state.drafter["first"] > n, "prompt|tokens")
       for n in (32, 64, 100, 128, 180)},
    **{f"over {n} tokens": (
        lambda i, state, _, n=n: state.lengths > n, "")
       for n in (44, 64, 128)},
    "top-k": (lambda i, state, transform: transform.top_k > 0, ""),
    "top-p": (lambda i, state, transform: transform.top_p < 1, ""),
    "min-p": (lambda i, state, transform: transform.min_p > 0, ""),
    "top-k from the third round": (
        lambda i, state, transform: (transform.top_k > 0)
        & (state.rounds >= 2), ""),
    "one row left": (lambda i, state, _: _active(state) == 1, ""),
    "two rows left": (lambda i, state, _: _active(state) == 2, ""),
    "at most two rows left": (lambda i, state, _: _active(state) <= 2, ""),
    "most rows done": (
        lambda i, state, _: _active(state) < len(state.done) / 2, ""),
    "a tenth of the rows left": (
        lambda i, state, _: _active(state) <= len(state.done) / 10, ""),
    "a row is done": (lambda i, state, _: state.done.any(), ""),
    "limit of one token": (
        lambda i, state, _: state.limits - state.drafter["first"] == 1, ""),
    "one token left": (
        lambda i, state, _: state.limits - state.lengths == 1, ""),
}

_QUICK = {"from row 128", "after full acceptance", "temperature 0.7"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WrongWhere(_Spoilt):
  """Wrong under a condition of `_WHERE`, whose number is a parameter.

  So one program serves all conditions.
  """

  def init(self, params, prompt, prefill_output):
    return {**super().init(params, prompt, prefill_output),
            "where": jnp.broadcast_to(
                params["where"], prompt.lengths.shape)}

  def where(self, i, state):
    holds = [jnp.broadcast_to(where(i, state, self.transform), state.done.shape)
             for where, _ in _WHERE.values()]
    return jnp.stack(holds)[state.drafter["where"][0]]


class _TruncatedTo3(Chain):
  """A law of the three likeliest tokens, reported as it was before."""

  def logits(self, logits, i, state):
    least = jax.lax.top_k(logits, 3)[0][:, -1:]
    return jnp.where(logits >= least, logits, -jnp.inf)

  def reported(self, q, logits, token, i, state, rows):
    full = at_temperature(logits, state.temperature)
    return _only(state.temperature > 0, q, full)


class _NotNormalised(_TruncatedTo3):

  def reported(self, q, logits, token, i, state, rows):
    return jnp.where(q > 0, super().reported(
        q, logits, token, i, state, rows), 0)


class _Rounded(Chain):

  def reported(self, q, *_):
    return q.astype(jnp.bfloat16).astype(jnp.float32)


class _EosDropped(Chain):
  """A drawn eos is padding, and so is all after it."""

  def finished(self, tokens, rows, state):
    ends = (tokens[..., None] == state.eos[:, None]).any(-1)
    return tokens, jnp.where(jnp.cumsum(ends, 1)[..., None] > 0, 0, rows)


class _ShortOfUnlikely(Chain):
  """A token is padding if it is unlikely: its existence depends on itself."""

  def finished(self, tokens, rows, state):
    chance = jnp.take_along_axis(rows, tokens[..., None], -1)[..., 0]
    short = jnp.cumsum(chance < 0.1, 1)
    return tokens, jnp.where(short[..., None] > 0, 0, rows)


class _ImpossibleToken(Chain):
  """Once in a while a token that its law does not have."""

  def finished(self, tokens, rows, state):
    last = jax.nn.one_hot((tokens[:, -1] + 1) % VOCAB, VOCAB)
    rare = (state.rounds == 3) & (state.tokens[:, 0] == 1)
    return tokens, rows.at[:, -1].set(_only(rare, rows[:, -1], last))


class _RowsShareUniforms(Chain):
  uniforms = lambda self, uniforms, state: uniforms[
      jnp.arange(len(uniforms)) // 2 * 2]


class _RowsShareUniformsFrom128(Chain):
  uniforms = lambda self, uniforms, state: uniforms[
      jnp.arange(len(uniforms)) % 128]


class _RoundsShareUniforms(Chain):

  def uniforms(self, uniforms, state):
    fixed = jax.vmap(lambda key: jax.random.uniform(key, uniforms.shape[1:]))
    return fixed(state.keys)


class _EverySecondRoundSharesUniforms(Chain):

  def uniforms(self, uniforms, state):
    one = lambda key, turn: jax.random.uniform(
        jax.random.fold_in(key, 77 + turn), uniforms.shape[1:])
    return jax.vmap(one)(state.keys, state.rounds % 2)


class _PositionsShareUniforms(Chain):
  """Uniforms belong to positions, and a rejected token's are used again."""

  def uniforms(self, uniforms, state):
    one = lambda key, at: jax.random.uniform(
        jax.random.fold_in(key, 77 + at), (2,))
    at = state.lengths[:, None] + jnp.arange(self.gamma)
    return jax.vmap(jax.vmap(one, (None, 0)))(state.keys, at).reshape(
        uniforms.shape)


class _CallsShareUniforms(Chain):

  def uniforms(self, uniforms, state):
    one = lambda row, turn: jax.random.uniform(jax.random.fold_in(
        jax.random.fold_in(jax.random.key(1), row), turn), uniforms.shape[1:])
    return jax.vmap(one)(jnp.arange(len(uniforms)), state.rounds)


class _TokensShareUniforms(Chain):
  uniforms = lambda self, uniforms, state: jnp.tile(
      uniforms[:, :2], (1, self.gamma))


class _DependsOnTheBatch(Chain):
  """Its q is its own, of a text that another row has."""

  def logits(self, logits, i, state):
    return logits + 0.5 * jnp.roll(logits, 1, 0)

  def reported(self, q, *_):
    return q


class _SaysAutoregressive(Chain):
  """q depends on where the draft began, and it says that it does not."""

  provides = (*Chain.provides, "autoregressive")

  def logits(self, logits, i, state):
    return logits * (1 + 0.2 * i)


class _SaysCertain(Chain):
  provides = (*Chain.provides, "deterministic")


WRONG_Q = "are not samples of the rows of q"
_PLANTED = {
    _OfTemperature1: f"{WRONG_Q}.*temperature of 8 / 10",
    _OfTemperature11: WRONG_Q,
    _InThePrompt17: WRONG_Q,
    _OfThePreviousPosition: "not samples|a token was drafted",
    _Learns: WRONG_Q,
    _TruncatedTo3: WRONG_Q,
    _NotNormalised: "sum|no law",
    _Rounded: "must sum to 1|is no law",
    _EosDropped: f"{WRONG_Q}.*x is an eos",
    _ShortOfUnlikely: WRONG_Q,
    _ImpossibleToken: "a token was drafted whose probability was 0",
    _RowsShareUniforms: f"{WRONG_Q}.*drawn 1 rows before",
    _RowsShareUniformsFrom128: f"{WRONG_Q}.*drawn 128 rows before",
    _RoundsShareUniforms: f"{WRONG_Q}.*same node in the round before",
    _EverySecondRoundSharesUniforms:
        f"{WRONG_Q}.*same node (2 rounds|in the round) before",
    _PositionsShareUniforms: f"{WRONG_Q}.*same position in the round before",
    _NearlyCertain: rf"{WRONG_Q}.*7 / 8 or more",
    _CallsShareUniforms: f"{WRONG_Q}.*(call|rows) before",
    _TokensShareUniforms: f"{WRONG_Q}.*its parent",
    _DependsOnTheBatch: "depends on its place or on the other rows",
    _SaysAutoregressive: "provides `autoregressive`",
    _SaysCertain: "provides `deterministic`",
}


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [
    pytest.param(drafter, marks=() if drafter in (
        _InThePrompt17, _NotNormalised, _RowsShareUniforms)
                 else pytest.mark.slow) for drafter in _PLANTED],
    ids=lambda d: d.__name__)
def test_a_wrong_chain_is_refused(drafter):
  # Broken: a drafter of this kind passes the bar.
  # Few draws are wrong, or all are by little.
  calls = 64 if drafter is _InThePrompt17 else 32 if drafter in (
      _OfTemperature11, _NearlyCertain) else 8
  drafter = dataclasses.dataclass(frozen=True, kw_only=True)(drafter)
  with pytest.raises(AssertionError, match=_PLANTED[drafter]):
    assert_exact(drafter(), calls=calls)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("where", [
    pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow)
    for name in _WHERE])
def test_a_chain_that_is_wrong_at_times_is_refused(where):
  # Broken: nothing is drawn under this condition, or too little.
  with pytest.raises(AssertionError, match=f"{WRONG_Q}.*{_WHERE[where][1]}"):
    assert_exact(_WrongWhere(), where=where, calls=32)
