"""Chains that end early: exact where they must be, and refused elsewhere."""

import dataclasses
import functools

import contributed_heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import exact
from specjax import testing
from specjax.drafters import Chain
from specjax.drafters import draft_model
from specjax.exact import enumeration
from specjax.methods import Eagle3Heads
from specjax.methods import stop_rules

_V, _GAMMA = 5, 4
_SPEEDS = (1.0, 0.9, 0.7, 0.4, 0.3)
_RULES = (
    stop_rules.Confidence(threshold=0.5),
    stop_rules.Confidence(threshold=0.6, likeliest=True),
    stop_rules.Adaptive(threshold=0.5),
    stop_rules.Entropy(threshold=0.65),
    stop_rules.Scheduler(speeds=_SPEEDS),
)
_LEARNED = (stop_rules.AcceptanceHead(threshold=0.5, depth=1),
            stop_rules.Scheduler(speeds=_SPEEDS, learned=True),
            stop_rules.Scheduler(speeds=_SPEEDS, learned=True,
                                 temperatures=(0.5, 3.0)))
_FEW = dict(vocab_sizes=(3,), gammas=(3,), kinds=("dense", "mixed"), rounds=1,
            thorough=False)


def _name(rule):
  own = getattr(rule, "likeliest", "") or getattr(rule, "temperatures", "")
  return f"{type(rule).__name__} {own or ''}".strip()


@functools.cache
def _compiled(rule):
  return exact.Compiled(rule)


def _params(rule):
  if isinstance(rule, stop_rules.AcceptanceHead):
    params = rule.init_params(jax.random.key(3), _V)
    return jax.tree.map(lambda x: 2 * x, params)
  kernel = jnp.linspace(-1, 1, _V)
  return {"kernel": kernel, "bias": jnp.float32(1)} if rule.has_params else None


@pytest.mark.parametrize("rule", _RULES, ids=_name)
def test_chains_that_end_by_a_rule_are_exact(rule):
  # Broken: a stop rule decides about a token by its value, or a verifier takes
  # the end of a ragged chain for something else.
  for verifier in (sj.verifiers.Token(), sj.verifiers.Block()):
    compiled = _compiled(verifier)
    found = exact.certify(compiled, stop=rule, **_FEW)
    assert found.lossless and found.total_variation < 1e-12
    whole = exact.certify(compiled, **_FEW)
    assert 1 < found.expected_tokens < whole.expected_tokens


def _dropped(probs, tokens):
  """Draws x_k, looks at it, and drops it: a planted defect."""
  drawn = jnp.take_along_axis(probs, tokens[:, None], axis=1)[:, 0]
  return jnp.sum(jnp.cumprod(drawn >= 1 / probs.shape[1]), dtype=jnp.int32)


def _theta(probs, tokens):
  """DSpark's Theta_0, Theta_1, ..., of the largest entries of q."""
  del tokens
  reach = jnp.append(1, jnp.cumprod(probs.max(-1)))
  return jnp.cumsum(reach) * jnp.array([1, 0.6, 0.5, 0.45])[:len(reach)]


def _global_search(probs, tokens):
  """The best Theta of all, past a dip: a planted defect."""
  return jnp.argmax(_theta(probs, tokens)).astype(jnp.int32)


@pytest.mark.parametrize("stop", [_dropped, _global_search],
                         ids=lambda stop: stop.__name__)
def test_certify_rejects_what_looks_at_the_token(stop):
  # Broken: tokens are dropped for their value, by a low confidence or by a
  # search that looks past them, and nobody notices.
  for verifier in (sj.verifiers.Token(), sj.verifiers.Block()):
    found = exact.certify(_compiled(verifier), stop=stop, **_FEW)
    assert not found.lossless and 0.005 < found.total_variation < 0.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Appendix(stop_rules.Scheduler):
  """DSpark's Appendix A: c_1 = 0.8; c_2 = 0.9 after A and 0 after B."""

  def confidence(self, params, seen):
    second = jnp.where(seen.token == 0, 0.9, 0.0)
    return jnp.where(seen.place == 0, 0.8, second).astype(jnp.float32)


def test_the_search_past_a_dip():
  # Broken: the scheduler of DSpark leaks x_1 through c_2.
  speeds = (1, 0.5, 0.45)
  pair = exact.iid_pair([0.7, 0.3], [0.5, 0.5], depth=3)

  def searched(probs, tokens):
    second = jnp.where(tokens[0] == 0, 0.9, 0.0)
    reach = jnp.array([1, 0.8, 0.8]) * jnp.array([1, 1, second])
    theta = jnp.cumsum(reach) * jnp.array(speeds)
    return jnp.argmax(theta).astype(jnp.int32)

  for stop, want in ((searched, 0.85), (_Appendix(speeds=speeds), 0.7)):
    found = enumeration.enumerate_chains(
        _compiled(sj.verifiers.Token()), pair, 2, ended=exact.ended_by(stop))
    law = found.law.reshape(2, -1).sum(1)
    np.testing.assert_allclose(law, [want, 1 - want], atol=1e-9)


def test_greedy_block_is_not_exact_for_them_and_refused():
  # Broken: a pair that is not exact decodes.
  rule = stop_rules.Confidence(threshold=0.5)
  found = exact.certify(
      sj.verifiers.GreedyBlock(), stop=rule, vocab_sizes=(3,), gammas=(2,),
      kinds=("dense",), thorough=False)
  assert not found.lossless
  model = testing.MarkovModel(_V)
  with pytest.raises(ValueError, match="autoregressive.*padding"):
    sj.Decoder(target=model, verifier=sj.verifiers.GreedyBlock(),
               drafter=draft_model(model=model, gamma=2, stop=rule))


def _reference(rule, params, probs, hidden, tokens):
  """How many tokens stay, token by token, written from the papers."""
  if isinstance(rule, stop_rules.Scheduler):
    reach = theta = tokens_a_pass = 1.0
    theta = _SPEEDS[0]
    for k, q in enumerate(probs):
      sure = max(q)
      if rule.learned:
        by = [*rule.temperatures, *[1] * len(probs)][k]
        sure = 1 / (1 + np.exp(-(hidden[k] @ params["kernel"]
                                 + params["bias"]) / by))
      reach *= sure
      tokens_a_pass += reach
      if tokens_a_pass * _SPEEDS[k + 1] <= theta:
        return k
      theta = tokens_a_pass * _SPEEDS[k + 1]
    return len(probs)
  reach = 1.0
  for k, (q, x) in enumerate(zip(probs, tokens)):
    if isinstance(rule, stop_rules.Entropy):
      entropy = -(q * np.log(q)).sum()
      if 1 - np.sqrt(0.2 * entropy) < rule.threshold:
        return k
      continue
    if isinstance(rule, stop_rules.AcceptanceHead):
      block, out = params["blocks"][0], params["out"]
      y = hidden[k] @ block["kernel"] + block["bias"]
      y = hidden[k] + y / (1 + np.exp(-y))
      logits = y @ out["kernel"] + out["bias"]
      reach *= 1 if k == 0 else 1 / (1 + np.exp(logits[0] - logits[1]))
      if 1 - reach > rule.threshold and k + 1 >= rule.least:
        return k + 1
      continue
    if (max(q) if getattr(rule, "likeliest", False) else q[x]) < rule.threshold:
      return k + 1
  return len(probs)


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("rule", _RULES + _LEARNED, ids=_name)
def test_a_drafter_ends_its_chains_where_the_rule_says(rule):
  # Broken: a rule is not the paper's; the drafter stops a token early or late,
  # hands it another hidden state, or goes on when all of its rows have stopped.
  model, rows = testing.MarkovModel(_V), 64
  table = model.init(jax.random.key(1), scale=2.0)
  whole = draft_model(model=model, gamma=_GAMMA, transform=sj.LogitsTransform())
  drafter = dataclasses.replace(whole, shape=Chain(_GAMMA, rule))
  params = _params(rule)
  own = {"model": table, "stop": params} if rule.has_params else table
  tokens = jnp.tile(jnp.arange(_V, dtype=jnp.int32)[:, None], (rows // _V, 8))
  count = tokens.shape[0]
  prompt = sj.types.Prompt(
      tokens=tokens, lengths=jnp.full((count,), 3, jnp.int32), capacity=16)
  uniforms = jax.random.uniform(
      jax.random.key(2), (count, drafter.num_uniforms))

  def drafted(drafter, own, done=False):
    state = sj.types.DecodeState(
        tokens=tokens, lengths=prompt.lengths, limits=prompt.lengths + 9,
        done=jnp.full((count,), done), keys=None, rounds=prompt.lengths,
        temperature=jnp.ones((count,)), eos=None, target_cache=None,
        drafter=drafter.init({"drafter": own}, prompt, None))
    return drafter.propose({"drafter": own}, uniforms, state)

  want, _ = drafted(whole, table)
  got, state = drafted(drafter, own)
  probs, chosen = np.asarray(want.probs[:, 1:]), np.asarray(want.tokens[:, 1:])
  before = np.asarray(want.tokens[:, :-1])
  kept = [_reference(rule, params, p, np.asarray(table)[b], x)
          for p, x, b in zip(probs, chosen, before)]
  assert 0 < np.mean(kept) < _GAMMA and len(set(kept)) > 1
  stays = np.arange(_GAMMA) < np.array(kept)[:, None]
  np.testing.assert_array_equal(got.tokens[:, 1:], np.where(stays, chosen, 0))
  np.testing.assert_array_equal(
      got.probs[:, 1:], np.where(stays[..., None], probs, 0))
  # Passes after the first: none for what no row drafts.
  passes = int(state.memory.lengths[0]) - 3
  assert passes == min(max(kept) - rule.keeps, _GAMMA - 1)
  done, state = drafted(drafter, own, done=True)
  assert not done.probs.any() and int(state.memory.lengths[0]) == 3


def test_an_eagle_chain_ends_where_the_rule_says():
  # Broken: the layer reads other states or positions in a loop that may end
  # than in a chain of fixed length, or what a row drafted stays in its cache.
  case = contributed_heads.layer(
      Eagle3Heads, contributed_heads.reused, sj.verifiers.Block(),
      drafts=dict(shape=Chain(4)))
  rule = stop_rules.Confidence(threshold=0.6)
  found = {}
  for stop in (None, rule):
    decoder = sj.Decoder(
        target=case.model, verifier=case.rule,
        drafter=dataclasses.replace(case.drafter, shape=Chain(4, stop)))
    state = decoder.prefill(
        case.parameters, [[1, 2, 3, 0]] * 8 + [[3, 1]] * 8 + [[2]],
        jax.random.key(0), limits=40)
    uniforms = jax.random.uniform(
        jax.random.key(1), (17, decoder.stage.drafter.num_uniforms))
    found[stop] = jax.jit(decoder.stage.drafter.propose)(
        case.parameters, uniforms, state)
  (want, _), (got, after) = found[None], found[rule]
  own = np.take_along_axis(
      np.asarray(want.probs), np.asarray(want.tokens)[..., None], -1)[:, 1:, 0]
  # The token that the drafter was not sure of stays, and none after it.
  sure = np.cumprod(own >= rule.threshold, axis=1)
  stays = np.pad(sure[:, :-1], ((0, 0), (1, 0)), constant_values=1) == 1
  stays &= np.arange(17)[:, None] < 16  # a text of one token has no feature
  assert 0 < stays[:16, 1:].mean() < 1
  np.testing.assert_array_equal(
      np.where(stays, got.tokens[:, 1:], 0),
      np.where(stays, want.tokens[:, 1:], 0))
  np.testing.assert_allclose(
      got.probs[:, 1:], np.where(stays[..., None], want.probs[:, 1:], 0),
      atol=1e-6)
  cache = after.memory.cache
  assert cache.held is None and not cache.block_k


def test_an_adaptive_threshold_follows_what_was_accepted():
  # Broken: the threshold moves the wrong way, or a finished row's moves.
  rule = stop_rules.Adaptive(threshold=0.6)
  state = rule.init()
  threshold, matched = 0.6, 1.0
  for drafted, accepted in ((4, 4), (4, 1), (3, 3), (2, 2), (2, 2), (4, 4),
                            (3, 3)):
    state = rule.commit(state, jnp.int32(drafted), jnp.int32(accepted), 4)
    matched = (matched + accepted / drafted) / 2
    step = 0.01 if matched < 0.9 else -0.01 if drafted < 4 else 0
    threshold += 0.1 * step
    np.testing.assert_allclose(state.threshold, threshold, rtol=1e-6)
    np.testing.assert_allclose(state.matched, matched, rtol=1e-6)
  assert threshold != 0.6
  # One that was refused its first token lowers it, and it stays a share.
  refused = rule.commit(state, jnp.int32(0), jnp.int32(0), 4)
  np.testing.assert_allclose(refused.threshold, threshold - 1e-3, rtol=1e-6)
  assert refused.matched == state.matched
  high = stop_rules.Adapted(threshold=jnp.float32(1), matched=jnp.float32(0.5))
  assert rule.commit(high, jnp.int32(4), jnp.int32(0), 4).threshold == 1

  model = testing.MarkovModel(_V)
  table = model.init(jax.random.key(0))
  decoder = sj.Decoder(
      target=model, verifier=sj.verifiers.Token(),
      drafter=draft_model(model=model, gamma=2, stop=rule))
  params = {"target": table, "drafter": table[::-1]}
  state = decoder.prefill(params, [[1], [2]], jax.random.key(0), limits=[60, 1])
  state, _ = decoder.decode(params, state, rounds=8)
  rows = np.asarray(state.drafter.rule.memory.threshold)
  assert rows[0] != rows[1] and rows[1] == np.float32(0.6)


def _threshold(drafter, controller=None, gamma=4, rounds=20):
  """The threshold of a rule after some rounds; the small model is the target.
  """
  model = testing.MarkovModel(_V)
  table = 3 * model.init(jax.random.key(0))
  decoder = sj.Decoder(target=model, verifier=sj.verifiers.Token(),
                       drafter=drafter(model), controller=controller)
  if isinstance(decoder.drafter, sj.drafters.Fallback):
    params = {"target": table, "drafter": (jnp.zeros((1, 99), int), table)}
  else:
    params = {"target": table, "drafter": table}
  state = decoder.prefill(
      params, [[1]], jax.random.key(0), limits=1 + rounds * (gamma + 1))
  state, stats = decoder.decode(params, state, rounds)
  last = state.drafter
  last = last[1].drafter if isinstance(last, tuple) else last
  return float(last.rule.memory.threshold[0]), stats


@pytest.mark.parametrize("rule", [
    stop_rules.Entropy(threshold=1.0, step=1.0), stop_rules.Adaptive(
        threshold=1.0)], ids=["entropy", "adaptive"])
def test_a_threshold_that_is_too_high_does_not_end_drafting(rule):
  # Broken: a drafter that was wrong for a while never drafts again.
  found, stats = _threshold(
      lambda model: draft_model(model=model, gamma=4, stop=rule))
  assert found < 1 and stats.accepted.sum() > 0


@pytest.mark.slow
def test_a_controller_does_not_shorten_what_a_rule_may_draft():
  # Broken: a chain that the rule ended counts as one that was as long as it
  # might be, for it is verified among shorter ones, and so the threshold never
  # falls.
  rule = stop_rules.Adaptive(threshold=0.9, target=0.5)
  lm = lambda model: draft_model(model=model, gamma=4, stop=rule)
  alone, stats = _threshold(lm)
  assert alone < 0.9 and stats.accepted.max() < 4
  controller = sj.decoding.Controller(
      lengths=(0, 1, 2, 4), seconds=(1, 1, 1, 1), prior=1.0, credit=16.0)
  assert _threshold(lm, controller)[0] == alone


def test_a_rule_learns_of_its_own_chains():
  # Broken: what becomes of another drafter's draft moves the threshold of a
  # model that was not asked; in a merge it is moved by the nodes of all.
  rule = stop_rules.Adaptive(threshold=0.6)
  lm = lambda model: draft_model(model=model, gamma=2, stop=rule)
  oracle = testing.OracleDrafter(gamma=2)
  fallback = lambda model: sj.drafters.Fallback(first=oracle, second=lm(model))
  found, stats = _threshold(fallback, gamma=2)
  assert int(stats.emitted.sum()) > 0 and found == np.float32(0.6)
  model = testing.MarkovModel(_V)
  merge = lambda *drafters: sj.drafters.Merge(drafters=drafters)
  for drafters in ((oracle, lm(model)), (oracle, fallback(model))):
    with pytest.raises(ValueError, match="stop is Adaptive, .* Confidence"):
      merge(*drafters)
  merge(oracle, draft_model(
      model=model, gamma=2, stop=stop_rules.Confidence(threshold=0.5)))
