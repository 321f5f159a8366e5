"""Coupled sampling: the text is a function of target and key alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import drafters
from specjax import sampling
from specjax import testing
from specjax import verifiers
from specjax.constraints import OutputPenalty

_VOCAB, _NEW = 32, 24
_LENGTHS = (1, 2, 17, 30)
_ROWS = range(len(_LENGTHS))
_TEMPERATURES = (1.0, 0.6, 0.0, 1.3)  # of the rows; 0 is greedy
_TREE = (-1, 0, 0, 0, 1, 1, 2, 4)
_TRANSFORM = sj.LogitsTransform(coupled=True, top_p=0.95, top_k=20, min_p=0.01)
_PENALTY = sj.LogitsTransform(
    coupled=True, banned=(3,), constraints=(OutputPenalty(presence=1.0),))


@functools.cache
def _pair():
  return testing.tiny_pair(_VOCAB, layers=2, noise=0.2, scale=12, seed=2)


@functools.cache
def _prompts():
  rng = np.random.default_rng(0)
  return [rng.integers(_VOCAB, size=n).astype(np.int32) for n in _LENGTHS]


@functools.cache
def _reference(transform):
  """Returns the sequences of the definition, argmin S / p at every position.

  The passes have no cache and one row, and the penalty is written out.
  """
  pair, size = _pair(), max(_LENGTHS) + _NEW
  has_penalty = bool(transform.constraints)

  @jax.jit
  def extended(tokens, start, length, key, temperature):
    logits = pair.target(pair.params["target"], tokens[None]).logits[0]
    place = jnp.arange(size)
    new = (place >= start) & (place < length)
    seen = jnp.zeros(_VOCAB, bool).at[tokens].max(new)
    logits = logits[length - 1] - (seen if has_penalty else 0)
    p = transform(logits, temperature)
    noise = sampling.noise_keys(key[None], length[None, None])[0, 0]
    return tokens.at[length].set(sampling.draw(p, noise))

  transform = dataclasses.replace(transform, temperature=None, constraints=())
  texts = []
  for row, (prompt, temperature) in enumerate(zip(_prompts(), _TEMPERATURES)):
    tokens = jnp.zeros(size, jnp.int32).at[:len(prompt)].set(prompt)
    for i in range(_NEW):
      tokens = extended(
          tokens, len(prompt), jnp.asarray(len(prompt) + i, jnp.int32),
          jax.random.fold_in(jax.random.key(7), row), temperature)
    texts.append(np.asarray(tokens)[:len(prompt) + _NEW])
  return texts


def _network(shape):
  return drafters.NetworkDrafter(
      network=drafters.LanguageModel(model=_pair().drafter), shape=shape)


def _cascade():
  return drafters.Cascade(
      model=_pair().drafter, gamma=4,
      drafter=sj.strategies.prompt_lookup(gamma=3).drafter)


# Drafter, rule, and the smallest and largest acceptable block efficiency. A
# noise of another position, or of its own, makes a drafter worse.
_CASES = {
    "none": (lambda: drafters.Empty(), verifiers.TargetWalk(), 1, 1),
    "chain of 1": (lambda: _network(drafters.Chain(gamma=1)),
                   verifiers.GreedyBlock(), 1.5, 2),
    "chain of 5": (lambda: _network(drafters.Chain(gamma=5)),
                   verifiers.Block(), 2.2, 6),
    "stop rule": (lambda: _network(drafters.Chain(
        gamma=4, stop=drafters.stop_rules.Confidence(threshold=0.3))),
                  verifiers.Coupled(), 1.5, 5),
    "n-gram": (lambda: sj.strategies.prompt_lookup(gamma=4).drafter,
               verifiers.TargetWalk(), 1, 5),
    "tree": (lambda: _network(drafters.Tree(parents=_TREE)),
             verifiers.Traversal(), 2.2, 4),
    "best": (lambda: _network(drafters.Best(depth=3, top_k=2, num_nodes=7)),
             verifiers.TargetWalk(), 1, 4),
    "sampled": (lambda: _network(drafters.Sampled(
        depth=3, expanded=2, children=2)), verifiers.Recursive(), 2.2, 4),
    "cascade": (_cascade, verifiers.Block(), 2.2, 5),
}


def _params(name):
  own = _pair().params
  if name == "cascade":
    own = {**own, "drafter": {"target": own["drafter"], "drafter": None}}
  return own


def _decoder(name, transform=_TRANSFORM, **more):
  make, rule, *_ = _CASES[name]
  return sj.Decoder(target=_pair().target, drafter=make(), verifier=rule,
                    transform=transform, **more)


def _generated(name, decoder, rows=_ROWS):
  return decoder.generate(
      _params(name), [_prompts()[row] for row in rows], jax.random.key(7),
      temperature=[_TEMPERATURES[row] for row in rows],
      request_ids=list(rows), max_new_tokens=_NEW)


def _check(texts, transform=_TRANSFORM, rows=_ROWS):
  for text, row in zip(texts, rows, strict=True):
    np.testing.assert_array_equal(text, _reference(transform)[row])


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    name if name in ("chain of 5", "tree") else pytest.param(
        name, marks=pytest.mark.slow) for name in _CASES])
def test_no_drafter_changes_the_text(name):
  # Broken: noise of another position or row, or a draft that changes the text.
  found = _generated(name, _decoder(name))
  _check(found.tokens)
  *_, least, most = _CASES[name]
  assert least <= found.stats.block_efficiency <= most


@pytest.mark.slow
def test_no_batch_changes_the_text():
  # Broken: the noise depends on the slot and not on the request.
  for rows in ((2,), (3, 1)):
    _check(_generated("chain of 5", _decoder("chain of 5"), rows).tokens,
           rows=rows)


@pytest.mark.slow
def test_no_controller_changes_the_text():
  # Broken: rounds without drafts draw with other noise.
  control = sj.decoding.Controller(
      lengths=(0, 1, 5), seconds=(1.0, 1.1, 1.5), risk=0.02, credit=1.0)
  found = _generated("chain of 5", _decoder("chain of 5", controller=control))
  _check(found.tokens)
  lengths = np.asarray(found.stats.survival).sum(0)[0]
  assert lengths[1] > 0, "the controller never drafted"


@pytest.mark.parametrize("name", [
    "none", pytest.param("tree", marks=pytest.mark.slow)])
def test_bans_and_penalties_apply_before_the_noise(name):
  # Broken: a drafter or the target draws from p before its constraints.
  _check(_generated(name, _decoder(name, _PENALTY)).tokens, _PENALTY)


def test_keys_and_rows_have_their_own_noise():
  # Broken: all requests get the same text, or neighbouring positions share
  # noise.
  keys = jax.random.split(jax.random.key(0), 3)
  at = jnp.tile(jnp.arange(5), (3, 1))
  noise = np.asarray(sampling.noise_keys(keys, at)).reshape(-1, 2)
  assert len(np.unique(noise, axis=0)) == 15
  np.testing.assert_array_equal(
      sampling.noise_keys(keys, at[:, 2:3])[:, 0], noise.reshape(3, 5, 2)[:, 2])


def _pairs_of_tokens(p, q, count):
  """Draws `count` pairs (X, Y) with shared noise."""
  noise = sampling.noise_keys(
      jax.random.split(jax.random.key(1), 1),
      jnp.arange(count, dtype=jnp.int32)[None])[0]
  drawn = jax.vmap(sampling.draw, (None, 0))
  return np.asarray(drawn(q, noise)), np.asarray(drawn(p, noise))


def test_sampled_pairs_have_the_exact_joint_distribution():
  # Broken: `draw` does not have the distribution that `Coupled` integrates.
  p = jnp.array([0.5, 0.3, 0.15, 0.05, 0.0])
  q = jnp.array([0.2, 0.3, 0.0, 0.3, 0.2])
  x, y = _pairs_of_tokens(p, q, 60_000)
  joint = np.zeros((5, 5))
  for token in range(5):
    draft = sj.Draft.chain(root=0, tokens=jnp.array([token]), probs=q[None])
    law = verifiers.Coupled().law(draft, jnp.stack([p, p]))
    joint[token] = q[token] * law.stop[0] * law.next_token[0]
    joint[token, token] += q[token] * law.stop[1]
  pairs = np.stack([x, y], axis=1)
  assert testing.chi_square(pairs, joint.reshape(-1), 5) > 1e-4
  # The test finds the joint distribution of independent tokens.
  assert testing.chi_square(
      pairs, np.outer(q, p).reshape(-1), 5) < 1e-9


def test_rare_tokens_are_drawn_at_their_rate():
  # Broken: noise of 23 bits, with which tokens of p = 1e-9 are drawn at the
  # rate at which S is 0.
  size = 1 << 15
  p = jnp.full(size, 1e-9).at[0].set(1)
  noise = sampling.noise_keys(
      jax.random.split(jax.random.key(2), 1),
      jnp.arange(400, dtype=jnp.int32)[None])[0]
  tokens = jax.lax.map(lambda key: sampling.draw(p, key), noise)
  assert np.count_nonzero(tokens) <= 1  # the mean is 0.013


def test_acceptance_is_that_of_the_definition():
  # Broken: the sum over sorted pieces.
  rng = np.random.default_rng(0)
  for size in (2, 3, 7):
    p, q = rng.dirichlet(np.ones(size), 2)
    q[0] = 0
    q /= q.sum()
    want = [0 if not q[x] else 1 / np.maximum(q / q[x], p / p[x]).sum()
            for x in range(size)]
    found = sj.analysis.coupled_acceptance(jnp.array(p), jnp.array(q))
    np.testing.assert_allclose(found, want, rtol=1e-5)
    overlap = np.minimum(p, q).sum()
    assert overlap / (2 - overlap) <= sum(want) <= overlap


@pytest.mark.slow
def test_an_observer_has_the_mean_of_the_accepted_tokens():
  # Broken: observers receive the drawn tokens, or drafts are not drawn from q.
  pair = _pair()
  decoder = sj.Decoder(
      target=pair.target, drafter=_network(drafters.Chain(gamma=3)),
      verifier=verifiers.TargetWalk(), transform=_TRANSFORM,
      observers=(verifiers.Coupled(), verifiers.Token()))
  state = decoder.prefill(pair.params, [[1]] * 64, jax.random.key(3),
                          limits=400)
  _, stats = decoder.decode(pair.params, state, rounds=100)
  accepted, expected, token = np.moveaxis(np.asarray(stats.expected), -1, 0)
  difference = (accepted - expected).mean(0)  # of each row
  error = difference.std(ddof=1) / np.sqrt(difference.size)
  assert abs(difference.mean()) < 4 * error
  assert error < 0.03 and token.mean() - expected.mean() > 0.05
