"""Rounds under a controller: their lengths, what they cost, what they leave."""

import functools
import re

import controlled
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax.decoding import rounds as rounds_lib


def test_what_broke_down_is_no_padding():
  # Broken: a drafter whose law is NaN goes unseen, for nothing is verified.
  draft = jax.vmap(sj.Draft.chain)(
      jnp.zeros((2,), jnp.int32), jnp.zeros((2, 8), jnp.int32),
      jnp.zeros((2, 8, controlled.V)).at[1, 2].set(jnp.nan))
  needed = functools.partial(controlled.decoder().stage.needed, draft, rung=3)
  assert int(needed(done=jnp.array([False, False]))) == 2
  assert int(needed(done=jnp.array([False, True]))) == 0


@pytest.mark.slow
def test_single_rounds_share_a_program(monkeypatch):
  # Broken: every call of `decode_round` compiles the round again.
  table, text = controlled.greedy()
  decoder = controlled.decoder(risk=0.5)
  params = {"target": table, "drafter": jnp.array([text])}
  state = decoder.prefill(params, [text[:1]], jax.random.key(0), limits=99)
  choose, calls = sj.decoding.Controller.choose, []
  monkeypatch.setattr(sj.decoding.Controller, "choose", lambda *given: (
      calls.append(given), choose(*given))[1])
  for _ in range(3):
    state, _ = decoder.decode_round(params, state)
  assert len(calls) == 1 and int(state.lengths[0]) > 4


def _decoded(proposed, new=320, rounds=320):
  """`(state, drafted [R, B], emitted [R, B])` of a few hundred tokens."""
  table, text = controlled.greedy()
  decoder = controlled.decoder()
  params = {"target": table, "drafter": jnp.array(proposed)}
  state = decoder.prefill(params, [text[:1]] * len(proposed), jax.random.key(0),
                          limits=1 + new)
  state, stats, trace = decoder.decode(params, state, rounds, traced=True)
  assert stats.survival.shape == (rounds, len(proposed), 1, 9)
  np.testing.assert_array_equal(
      state.tokens[:, :1 + new], np.tile(text[:1 + new], (len(proposed), 1)))
  drafted = np.asarray(trace.draft.probs.any(-1).sum(-1))
  active = np.asarray(stats.active)
  return state, np.where(active, drafted, 0), np.asarray(stats.emitted)


def _wrong(text):
  return (text + 1) % controlled.V


@pytest.mark.slow
def test_a_perfect_drafter_drafts_the_longest():
  # Broken: what pays is left out.
  _, text = controlled.greedy()
  _, drafted, emitted = _decoded([text])
  rounds = (emitted > 0).sum()
  assert rounds < 320 / 9 + 4 and (
      drafted[3:rounds - 3] == 8).all()


def test_noise_costs_a_bounded_time_and_is_tried_again():
  # Broken: a drafter that never helps slows decoding down, or is never asked
  # again after it failed.
  _, text = controlled.greedy()
  state, drafted, emitted = _decoded([_wrong(text)])
  assert (emitted == 1).all()
  cost = np.interp(drafted, controlled.LENGTHS, controlled.SECONDS).sum()
  assert 320 < cost <= 1.02 * 320 + 1
  np.testing.assert_allclose(
      state.controller.budget[0], 1 + 1.02 * 320 - cost, atol=1e-2)
  tried = np.flatnonzero(drafted[:, 0])
  assert len(tried) > 6 and np.diff(tried).max() < 50
  assert (drafted[tried[2:]] == 2).all()  # the least that tells


def test_a_text_that_turns():
  # Broken: what was learned of one part of a text rules the next.
  _, text = controlled.greedy()
  turns = np.where(np.arange(len(text)) < 160, _wrong(text), text)
  _, drafted, emitted = _decoded([turns])
  at = np.cumsum(emitted)
  longest = at[np.flatnonzero(drafted[:, 0] == 8)[0]]
  assert 160 < longest < 215
  turns = np.where(np.arange(len(text)) < 160, text, _wrong(text))
  _, drafted, emitted = _decoded([turns])
  late = drafted[np.cumsum(emitted) > 166]
  assert (late > 0).mean() < 0.35 and (late == 8).mean() < 0.1


def test_what_is_not_drafted_is_not_paid():
  # Broken: an n-gram without a match is verified at full length.
  _, text = controlled.greedy()
  state, drafted, _ = _decoded([text[:3]])  # padding after two tokens
  assert drafted[3:].sum() == 0
  assert float(state.controller.budget[0]) > 7  # 2 % of 300 tokens
  assert float(state.controller.needed[0, 0]) < 0.1


@pytest.mark.slow
def test_rows_of_a_batch_share_a_length():
  # Broken: rows learn from each other's tokens; one good row costs the others
  # more than it gains.
  _, text = controlled.greedy()
  state, drafted, emitted = _decoded([text, _wrong(text)])
  both = np.flatnonzero((drafted > 0).all(1))
  assert len(both)
  np.testing.assert_array_equal(drafted[both, 0], drafted[both, 1])
  accepted = np.asarray(
      state.controller.accepted.sum((1, 2))
      / state.controller.reached.sum((1, 2)))
  assert accepted[0] > 0.9 and accepted[1] < 0.05
  assert (drafted[:5] == 8).any() and emitted[:5, 0].sum() > 9


@pytest.mark.slow
def test_parted_loops_choose_like_single_rounds():
  # Broken: what is decoded depends on how many rounds a call has.
  table, text = controlled.greedy()
  turns = np.where(np.arange(len(text)) % 90 < 40, _wrong(text), text)
  decoder = controlled.decoder()
  params = {"target": table, "drafter": jnp.array([turns, text])}
  start = lambda: decoder.prefill(
      params, [text[:1]] * 2, jax.random.key(0), limits=[121, 200])
  one, _ = decoder.decode(params, start(), rounds=200)
  whole, _ = decoder.decode_until(params, start())
  parts = start()
  for _ in range(29):  # 7 rounds at a time
    parts, *_ = rounds_lib.until(decoder.stage, params, parts, 7)
  assert float(one.controller.reached[1, 0, 7]) > 0.5  # all lengths, and rests
  assert bool(one.done.all())
  for state in (whole, parts):
    np.testing.assert_array_equal(state.lengths, one.lengths)
    for name in ("budget", "known", "until", "reached"):
      np.testing.assert_allclose(
          getattr(state.controller, name), getattr(one.controller, name),
          rtol=1e-4, err_msg=name)


def test_a_drafter_reads_what_it_missed():
  # Broken: after rounds of rest a model drafts from a cache with holes.
  pair = controlled.pair()
  drafter = sj.drafters.draft_model(
      model=pair.drafter, gamma=1, transform=sj.LogitsTransform())
  rng = np.random.default_rng(0)
  text = rng.integers(controlled.V, size=(2, 60)).astype(np.int32)

  @jax.jit
  def first_law(lengths, since):
    prompt = sj.types.Prompt(tokens=jnp.array(text[:, :32]), lengths=since + 1,
                       capacity=128)
    state = sj.types.DecodeState(
        tokens=jnp.pad(text, ((0, 0), (0, 68))), lengths=lengths,
        limits=lengths + 9, done=jnp.zeros((2,), bool), keys=None,
        rounds=lengths, temperature=jnp.ones((2,)), eos=None,
        target_cache=None, drafter=drafter.init(pair.params, prompt, None))
    state = state.replace(drafter=drafter.catch_up(pair.params, state, since))
    uniforms = jnp.zeros((2, drafter.num_uniforms))
    return drafter.propose(pair.params, uniforms, state)[0].probs[:, 1]

  logits = jax.jit(pair.drafter)(pair.params["drafter"], text).logits
  for lengths, since in (((58, 20), (3, 17)), ((9, 20), (1, 18)),
                         ((30, 31), (28, 30))):
    got = first_law(jnp.array(lengths), jnp.array(since))
    want = jax.nn.softmax(logits[jnp.arange(2), jnp.array(lengths) - 1])
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.slow
def test_rest_leaves_no_trace():
  # Broken: the loop loses count of what a drafter has read; its state after
  # rounds of rest is not that of one which drafted; caches are copied.
  pair = controlled.pair()
  decoder = sj.Decoder(
      target=pair.target, verifier=sj.verifiers.Block(),
      drafter=sj.drafters.draft_model(model=pair.drafter, gamma=3),
      controller=controlled.controller(lengths=(0, 3), seconds=(1, 1.5)),
      transform=sj.LogitsTransform(temperature=0))
  state = decoder.prefill(pair.params, [[1, 2], [3]], jax.random.key(0),
                          limits=90)
  with_purse = lambda state, value: state.replace(
      controller=state.controller.replace(
          budget=jnp.full((2,), value), until=jnp.copy(state.lengths)))
  emitted = []
  for value in (-100.0, 16.0, -100.0, 16.0):
    state, stats = decoder.decode(
        pair.params, with_purse(state, value), rounds=5)
    emitted.append(np.asarray(stats.emitted))
  assert (np.stack(emitted[::2]) == 1).all()
  assert (np.stack(emitted[1::2]) == 4).all()  # the drafter is the target

  size = ",".join(map(str, state.target_cache.k[0].shape))
  program = rounds_lib.scan.lower(
      decoder.stage, pair.params, state, rounds=5).compile().as_text()
  assert f"f32[{size}]" in program
  assert not re.search(rf"f32\[{size}\]\S* copy", program)


@pytest.mark.slow
def test_a_fallback_has_a_length_to_choose():
  # Broken: it drafts all or nothing; a part keeps its own length.
  pair = controlled.pair()
  decoder = sj.Decoder(
      target=pair.target, verifier=sj.verifiers.Block(),
      drafter=sj.drafters.Fallback(
          first=sj.drafters.NGram(gamma=4, max_ngram=2, min_ngram=2),
          second=sj.drafters.draft_model(model=pair.drafter, gamma=4)),
      controller=controlled.controller(
          lengths=(0, 2, 4), seconds=(1, 1.1, 1.1), first=(1, 1.05, 1.05),
          credit=16.0),
      transform=sj.LogitsTransform(temperature=0))
  params = {**pair.params, "drafter": (None, pair.params["drafter"])}
  state, _ = decoder.decode_until(params, decoder.prefill(
      params, [[1, 2], [3]], jax.random.key(0), limits=[42, 41]))
  assert (np.asarray(state.controller.reached[..., 0]) > 0).all()  # both kinds
  alone = sj.strategies.autoregressive().decoder(
      decoder.target, transform=decoder.transform, eos=decoder.eos)
  want = alone.generate(
      pair.params, [[1, 2], [3]], jax.random.key(0), max_new_tokens=40)
  for got, row in zip(state.tokens, want.tokens):
    np.testing.assert_array_equal(got[:len(row)], row)
  rungs = decoder.stage.rungs
  assert [one.drafter.num_nodes for one in rungs] == [1, 3, 5]
  assert [one.drafter.second.num_nodes for one in rungs[1:]] == [3, 5]


def test_refusals():
  # Broken: a controller runs where it is not exact or cannot be right.
  pair = controlled.pair()
  lm = sj.drafters.draft_model(model=pair.drafter, gamma=3)
  make = lambda drafter, rule, **options: sj.Decoder(
      target=pair.target, drafter=drafter, verifier=rule,
      controller=controlled.controller(**options))
  tree = sj.drafters.NetworkDrafter(
      network=sj.drafters.LanguageModel(model=pair.drafter),
      shape=sj.drafters.Tree(parents=(-1, 0, 0)))
  heads = sj.methods.MedusaHeads(
      width=16, vocab_size=controlled.V, heads=2)
  medusa = sj.strategies.medusa(heads, (-1, 0, 0, 1)).drafter
  walk, block = sj.verifiers.TargetWalk(), sj.verifiers.Block()
  for call, words in (
      (lambda: make(lm, sj.verifiers.GreedyBlock()), "GreedyBlock has a state"),
      (lambda: make(tree, walk), "does not provide `rests`"),
      (lambda: make(medusa, walk), r"lengths=\(0, 3\)"),
      (lambda: make(lm, block, lengths=(1, 2, 3, 4)), "increase from 0"),
      (lambda: make(lm, block, lengths=(0, 4)), "each of the 2 lengths"),
      (lambda: make(lm, block, seconds=(1, 2, 3, 0)), "number above 0"),
      (lambda: make(lm, block, first=(1, 2)), r"first is \(1, 2\)"),
      (lambda: make(lm, block, first=controlled.SECONDS),
       "LanguageModel with Chain cannot tell"),
      (lambda: make(lm, block, memory=2), "memory is 2"),
      (lambda: make(lm, block, seconds=(1, 18, 19, 20)), "18 times .* cheaper"),
      (lambda: make(lm, block, risk=-1), "risk is -1")):
    with pytest.raises(ValueError, match=words):
      call()
  make(medusa, walk, lengths=(0, 3), seconds=(1, 2))
