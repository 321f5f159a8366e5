"""What the loop adds to the laws: ends, keys, traces and statistics."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import testing

_VOCAB = 10
_GREEDY = sj.LogitsTransform(temperature=0.0)
# After token t comes t + 1; after 9 comes 0.
_SUCCESSOR = 20.0 * jnp.roll(jnp.eye(_VOCAB), 1, axis=1)


def _counting_decoder(gamma, **kwargs):
  """Greedy decoding of 0, 1, 2, ..., with drafts that the test dictates."""
  return sj.Decoder(
      target=testing.MarkovModel(_VOCAB), verifier=sj.verifiers.Block(),
      drafter=testing.OracleDrafter(gamma=gamma), transform=_GREEDY, **kwargs)


def _counting_params(rows, length=32):
  count = np.tile(np.arange(length) % _VOCAB, (rows, 1)).astype(np.int32)
  return {"target": _SUCCESSOR, "drafter": jnp.asarray(count)}


def _random_decoder(model=None, **kwargs):
  """Sampling from a random Markov chain with a drafter that is another."""
  model = model or testing.MarkovModel(_VOCAB)
  return sj.Decoder(**{**dict(
      target=model, verifier=sj.verifiers.Token(),
      drafter=sj.drafters.draft_model(model=model, gamma=3)), **kwargs})


def _random_params(drafter_scale=1.0):
  model = testing.MarkovModel(_VOCAB)
  target = model.init(jax.random.key(0), 2.0)
  other = model.init(jax.random.key(1), drafter_scale)
  return {"target": target, "drafter": target + other}


_PROMPTS = [[3], [1, 4], [1, 5, 9, 2]]


def _rows(state):
  return [np.asarray(row[:n]).tolist()
          for row, n in zip(state.tokens, state.lengths)]


def test_markov_model_depends_on_its_context():
  # Broken: the fake hides bugs that only show where the context matters.
  model = testing.MarkovModel(_VOCAB)
  params = model.init(jax.random.key(0))
  logits = model(params, jnp.array([[0, 1, 0]])).logits[0]
  assert (logits[0] == logits[2]).all() and not (logits[0] == logits[1]).any()


@pytest.mark.parametrize("eos,want,rounds,accepted", [
    (3, [0, 1, 2, 3], 1, 3),  # inside the first draft
    (5, [0, 1, 2, 3, 4, 5], 1, 5),  # the last token of the first draft
    (6, [0, 1, 2, 3, 4, 5, 6], 1, 5),  # the bonus token
    (8, list(range(9)), 2, 7),  # inside the second draft
    (0, [*range(10), 0], 2, 9)])  # not in the prompt, where it is the BOS
def test_eos_ends_a_row_where_it_stands(eos, want, rounds, accepted):
  # Broken: text runs on after an EOS inside an accepted draft, or a prompt
  # that starts with the EOS token ends at once.
  got = _counting_decoder(5, eos=eos).generate(
      _counting_params(2), [[0], [0, 1]], jax.random.key(0),
      max_new_tokens=25)
  assert got.tokens[0].tolist() == want
  assert int(got.stats.active[0]) == rounds
  assert int(got.stats.accepted[0]) == accepted
  assert int(got.stats.emitted[0]) == len(want) - 1


def test_limits_cut_a_draft():
  # Broken: a row outgrows its limit, or what it was allocated.
  limits = [1, 2, 4, 7, 8, 20]
  decoder, params = _counting_decoder(5), _counting_params(6)
  state = decoder.prefill(params, [[0]] * 6, jax.random.key(0), limits=limits)
  np.testing.assert_array_equal(state.done, [True] + [False] * 5)
  state, stats = decoder.decode_until(params, state)
  assert _rows(state) == [(np.arange(n) % 10).tolist() for n in limits]
  np.testing.assert_array_equal(stats.emitted, np.array(limits) - 1)
  np.testing.assert_array_equal(stats.active, [0, 1, 1, 1, 2, 4])
  # Six tokens a round, five of them drafted; a cut round counts what it kept.
  np.testing.assert_array_equal(stats.accepted, [0, 1, 3, 5, 6, 16])


def test_done_rows_stay_as_they_are():
  # Broken: rows that wait for the batch go on changing or counting.
  decoder, params = _counting_decoder(4), _counting_params(2)
  state = decoder.prefill(params, [[0], [0, 1]], jax.random.key(0),
                          limits=[3, 30])
  state, first = decoder.decode(params, state, rounds=2)
  before = _rows(state)[0]
  state, stats = decoder.decode(params, state, rounds=2)
  assert before == [0, 1, 2] == _rows(state)[0]
  np.testing.assert_array_equal(first.active, [[True, True], [False, True]])
  assert not np.asarray(stats.active[:, 0]).any()
  for field in (stats.emitted, stats.accepted, stats.expected, stats.survival):
    assert (np.asarray(field)[:, 0] == 0).all()
    assert (np.asarray(field)[:, 1] != 0).any()


def test_decode_until_is_decode_with_summed_stats():
  # Broken: studies and generation do not run the same rounds.
  decoder = _random_decoder(eos=7, observers=(sj.verifiers.Block(),))
  params = _random_params()
  start = lambda: decoder.prefill(params, _PROMPTS, jax.random.key(5),
                                  limits=[40, 12, 25])
  many, stacked = decoder.decode(params, start(), rounds=40)
  until, total = decoder.decode_until(params, start())
  assert many.done.all() and _rows(many) == _rows(until)
  for name in ("emitted", "accepted", "active"):
    np.testing.assert_array_equal(
        np.asarray(getattr(stacked, name)).astype(int).sum(0),
        getattr(total, name))
  for name in ("expected", "survival"):
    np.testing.assert_allclose(np.asarray(getattr(stacked, name)).sum(0),
                               getattr(total, name), rtol=1e-5)
  assert total.finite.all() and total.draft_finite.all()


def test_rounds_can_be_run_in_parts():
  # Broken: a study that pauses between rounds draws other tokens.
  decoder, params = _random_decoder(), _random_params()
  start = lambda: decoder.prefill(params, _PROMPTS, jax.random.key(5))
  whole, stats = decoder.decode(params, start(), rounds=6)
  part, first = decoder.decode(params, start(), rounds=3)
  part, second = decoder.decode(params, part, rounds=3)
  assert _rows(whole) == _rows(part)
  np.testing.assert_array_equal(
      stats.emitted, np.concatenate([first.emitted, second.emitted]))


@functools.cache
def _pair():
  return testing.tiny_pair(16, seed=3)


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_batch():
  # Broken: a result cannot be reproduced without the rows that shared its
  # batch. Through a transformer, at temperature 1, with unequal lengths, and a
  # rule that remembers.
  pair = _pair()
  decoder = sj.Decoder(
      target=pair.target, verifier=sj.verifiers.GreedyBlock(),
      drafter=sj.drafters.draft_model(model=pair.drafter, gamma=4))
  prompts = [[1], [2, 3, 4, 5, 6, 7, 8], [9, 10], [1]]
  ids = [7, 3, 70000, 1]

  def generate(rows):
    tokens = decoder.generate(
        pair.params, [prompts[i] for i in rows], jax.random.key(11),
        max_new_tokens=40, request_ids=[ids[i] for i in rows]).tokens
    return {i: row.tolist() for i, row in zip(rows, tokens)}

  together = generate([0, 1, 2, 3])
  assert generate([3, 1, 0, 2]) == together
  for i in range(4):
    assert generate([i])[i] == together[i]
  assert together[0] != together[3]  # equal prompts, other request ids
  default = decoder.generate(pair.params, prompts, jax.random.key(11),
                             max_new_tokens=40).tokens
  assert default[1].tolist() != together[1]  # its request id was 1 there


_TRACES = []


@dataclasses.dataclass(frozen=True)
class _CountsTraces(testing.MarkovModel):

  def __call__(self, *args, **kwargs):
    _TRACES.append(1)
    return super().__call__(*args, **kwargs)


def test_one_trace_for_equal_decoders():
  # Broken: every call compiles again, which takes seconds.
  def run(prompts, key):
    decoder = _random_decoder(
        _CountsTraces(_VOCAB), observers=[sj.verifiers.Block()],
        transform=sj.LogitsTransform(temperature=0.7, banned=[2]))
    params = _random_params()
    state = decoder.prefill(params, prompts, key, limits=50)
    state, _ = decoder.decode(params, state, rounds=3)
    decoder.decode(params, state, rounds=3)
    decoder.generate(params, prompts, key, max_new_tokens=8)

  _TRACES.clear()
  run(_PROMPTS, jax.random.key(0))
  traced = len(_TRACES)
  assert traced
  run([[7, 7, 7], [0], [1]], jax.random.key(1))
  run(np.ones((3, 5), np.int64), jax.random.key(2))
  assert len(_TRACES) == traced


@dataclasses.dataclass(frozen=True)
class _LawOnly(sj.Verifier):
  """A researcher's rule: one method and nothing else."""

  def law(self, draft, target_probs, state=None):
    return sj.verifiers.Block().law(draft, target_probs)


def test_observers_report_laws_and_change_nothing():
  # Broken: measuring a rule changes the text, or the figures of an observer
  # are not those of the rule itself on the same drafts.
  token, block = sj.verifiers.Token(), sj.verifiers.Block()
  params = _random_params()
  key = jax.random.key(3)

  def one_round(verifier, *observers):
    decoder = _random_decoder(verifier=verifier, observers=observers)
    state = decoder.prefill(params, _PROMPTS * 20, key, limits=60)
    return decoder.decode(params, state, rounds=1)

  alone, _ = one_round(token)
  observed, stats = one_round(token, block, _LawOnly())
  _, as_actor = one_round(block, token)
  assert _rows(alone) == _rows(observed)
  np.testing.assert_allclose(stats.expected[..., 1], as_actor.expected[..., 0],
                             rtol=1e-6)
  np.testing.assert_allclose(stats.expected[..., 0], as_actor.expected[..., 1],
                             rtol=1e-6)
  np.testing.assert_allclose(stats.survival[:, :, 1],
                             as_actor.survival[:, :, 0], rtol=1e-6)
  # A rule without `survival` is given that of its law: P(tau >= i | draft).
  np.testing.assert_allclose(stats.expected[..., 2], stats.expected[..., 1],
                             rtol=1e-6)
  np.testing.assert_allclose(stats.survival[0, :, 2, 1:].sum(-1),
                             stats.expected[0, :, 2], rtol=1e-5)


def test_statistics_of_a_round():
  # Broken: block efficiency is computed from wrong counts.
  decoder = _random_decoder(verifier=sj.verifiers.Block(),
                            observers=(sj.verifiers.Token(),))
  params = _random_params()
  state = decoder.prefill(params, _PROMPTS * 50, jax.random.key(0), limits=200)
  start = np.asarray(state.lengths)
  state, stats = decoder.decode(params, state, rounds=10)
  stats = jax.tree.map(np.asarray, stats)
  np.testing.assert_array_equal(stats.emitted.sum(0),
                                np.asarray(state.lengths) - start)
  np.testing.assert_array_equal(stats.emitted, stats.accepted + 1)
  assert stats.active.all() and stats.finite.all()
  assert stats.accepted.min() == 0 and stats.accepted.max() == 3
  assert (stats.survival[..., 0] == 1).all()
  assert (np.diff(stats.survival[:, :, 1], axis=-1) <= 1e-6).all()
  assert (stats.survival[:, :, 0] >= stats.survival[:, :, 1] - 1e-6).all()
  # The counts are draws whose means are `expected` and the summed survival;
  # six standard errors make a false alarm of 1e-8.
  error = 6 * stats.accepted.std() / stats.accepted.size**0.5
  assert abs(stats.accepted.mean() - stats.expected[..., 0].mean()) < error
  assert abs(stats.survival[:, :, 0, 1:].sum(-1).mean()
             - stats.expected[..., 0].mean()) < error


@dataclasses.dataclass(frozen=True)
class _Remembers(sj.Verifier):
  """Counts its rounds and the tokens that it accepted."""

  def init(self, gamma):
    return jnp.array([gamma, 0, 0], jnp.int32)

  def law(self, draft, target_probs, state=None):
    return sj.verifiers.Token().law(draft, target_probs)

  def commit(self, state, draft, target_probs, verdict):
    return state + jnp.array([0, 1, 0]) + verdict.num_accepted * jnp.array(
        [0, 0, 1])


def test_a_verifier_with_state_is_committed_every_round():
  # Broken: a rule with memory, such as greedy block verification, is blind.
  decoder, params = _random_decoder(verifier=_Remembers()), _random_params()
  state = decoder.prefill(params, _PROMPTS, jax.random.key(0))
  state, stats = decoder.decode(params, state, rounds=4)
  np.testing.assert_array_equal(state.verifier[:, :2], [[3, 4]] * 3)
  np.testing.assert_array_equal(state.verifier[:, 2], stats.accepted.sum(0))


def test_gamma_0_is_autoregressive():
  # Broken: the smallest draft, with no token at all, is no draft.
  decoder = _random_decoder(drafter=sj.drafters.draft_model(
      model=testing.MarkovModel(_VOCAB), gamma=0))
  got = decoder.generate(_random_params(), _PROMPTS, jax.random.key(0),
                         max_new_tokens=9)
  assert [len(row) for row in got.tokens] == [10, 11, 13]
  assert (np.asarray(got.stats.active) == 9).all()
  assert (np.asarray(got.stats.accepted) == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("rule,shape", [
    (sj.verifiers.GreedyBlock(), sj.drafters.Chain(3)),
    (sj.verifiers.Traversal(), sj.drafters.Best(2, top_k=2, num_nodes=4))])
def test_the_loop_in_64_bits(rule, shape):
  # Broken: under jax_enable_x64 an index of another width stops the loop, or
  # with float64 weights some step computes in float32.
  pair = testing.tiny_pair(5)
  with jax.enable_x64(True):
    params = jax.tree.map(lambda x: x.astype(jnp.float64), pair.params)
    decoder = sj.Decoder(target=pair.target, verifier=rule,
                         drafter=sj.drafters.NetworkDrafter(
                             network=sj.drafters.LanguageModel(
                                 model=pair.drafter), shape=shape))
    state = decoder.prefill(params, [[1, 2], [3]], jax.random.key(0), limits=30)
    state, stats, traces = decoder.decode(params, state, rounds=3, traced=True)
    starts = np.array([2, 1]) + np.cumsum(stats.emitted, 0) - stats.emitted
    sj.decoding.raise_if_not_finite(stats)
    alone = jax.nn.softmax(
        jax.jit(pair.target)(params["target"], state.tokens).logits)
    for start, law in zip(starts, np.asarray(traces.target_probs[:, :, 0])):
      assert law.dtype == np.float64
      np.testing.assert_allclose(law, alone[np.arange(2), start - 1],
                                 atol=1e-12)
