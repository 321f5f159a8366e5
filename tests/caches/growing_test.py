"""Slots that are added while rows grow."""

import dataclasses
import functools

from contributed import VOCAB
from contributions import DRAFTERS
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import testing
from specjax.decoding import growth
from specjax.decoding import rounds

_PROMPTS = ([1, 3, 0, 2], [4] * 30, [2], [0, 1])
# One is done near the end of the first slots, while the others go on.
_LIMITS = (200, 190, 126, 150)
_GREEDY, _SAMPLED = 0.0, 1.0


# A chain, a tree, a text and a cache in another vocabulary.
@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "chain", "tree without_replacement",
    "TokenIntersection"])
def test_grown_in_the_middle_is_as_allocated_whole(name):
  # Broken: what a row had is lost or moved when slots are added, a row writes
  # after its last slot before they are, or uniforms are drawn twice.
  case = DRAFTERS[name]()
  decoder = sj.Decoder(
      target=case.model, drafter=case.drafter, verifier=case.rule)

  def decoded(**options):
    state = decoder.prefill(
        case.parameters, _PROMPTS, jax.random.key(3), limits=_LIMITS,
        temperature=[_GREEDY, _SAMPLED, _SAMPLED, _SAMPLED], **options)
    before = state.tokens.shape[1]
    state, stats = decoder.decode_until(case.parameters, state)
    rows = [row[:n].tolist()
            for row, n in zip(np.asarray(state.tokens), state.lengths)]
    return rows, stats, before, state.tokens.shape[1]

  rows, stats, *slots = decoded(grows=True)
  assert slots == [128, 256]
  want, all_stats, *slots = decoded()
  assert slots == [256, 256]
  assert rows == want and list(map(len, rows)) == list(_LIMITS)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5),
               stats, all_stats)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Fallback to another vocabulary",
                                  "Cascade", "your cache"])
def test_a_grown_state_is_one_of_that_capacity(name):
  # Broken: a part of a part keeps its slots, and the rows run out of them; a
  # grown state and a fresh row do not fit together.
  case = DRAFTERS[name]()
  decoder = sj.Decoder(target=case.model, drafter=case.drafter,
                       verifier=case.rule, controller=case.controller)
  state = lambda slots: decoder.prefill(
      case.parameters, _PROMPTS, jax.random.key(3), limits=40, capacity=slots)
  grown = decoder.grow(case.parameters, state(128), 300)
  data = lambda x: jax.random.key_data(x) if jnp.issubdtype(
      x.dtype, jax.dtypes.prng_key) else x
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(data(x), data(y)),
               grown, state(384))


@pytest.mark.slow
def test_one_program_for_every_power_of_two():
  # Broken: a longer answer or a longer prompt compiles a program of its own.
  model = testing.MarkovModel(VOCAB, context_length=500)
  table = model.init(jax.random.key(0))
  params = {"target": table, "drafter": table}
  decoder = sj.Decoder(
      target=model, verifier=sj.verifiers.Block(),
      drafter=sj.drafters.draft_model(model=model, gamma=4))

  def programs(prompt, new):
    before = rounds.until._cache_size()
    text = decoder.generate(params, [[1] * prompt, [2]], jax.random.key(1),
                            max_new_tokens=new, grows=True)
    assert [len(row) for row in text.tokens] == [prompt + new, 1 + new]
    return rounds.until._cache_size() - before

  assert programs(3, 400) == 3  # of 128, 256 and 512 slots
  assert programs(7, 333) == programs(170, 290) == 0


def test_capacities_are_powers_of_two_up_to_the_whole():
  # Broken: a row begins with fewer slots than its prompt and next drafts need.
  one = sj.Decoder(target=testing.MarkovModel(VOCAB), verifier=(
      sj.verifiers.Block()), drafter=sj.drafters.NGram(gamma=7)).stage
  first = lambda lengths, limits, whole=4096: growth.first(
      one, np.array(lengths), np.array(limits), whole)
  assert first([3, 56], [4000, 900]) == 128
  assert first([57], [900]) == 256
  assert first([57], [120]) == 128  # it gets no more than that
  assert first([3000], [3900], whole=3968) == 3968


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ring(sj.drafters.NGram):
  """A drafter whose state wraps around its end, say."""

  grows = False


def test_what_cannot_grow_is_refused():
  # Broken: a state that is not zeros after its end grows by zeros; slots that
  # hold text are cut off.
  model = testing.MarkovModel(VOCAB)
  params = {"target": model.init(jax.random.key(0))}
  make = lambda drafter: sj.Decoder(
      target=model, drafter=drafter, verifier=sj.verifiers.Block())
  ring = make(sj.drafters.Fallback(first=_Ring(gamma=2),
                                   second=sj.drafters.NGram(gamma=2)))
  with pytest.raises(ValueError, match="_Ring says `grows = False`.*leave out"):
    ring.prefill(params, [[1]], jax.random.key(0), limits=9, grows=True)
  decoder = make(sj.drafters.NGram(gamma=2))
  state = decoder.prefill(params, [[1]], jax.random.key(0), limits=200)
  with pytest.raises(ValueError, match="capacity is 128 .* has 256 slots"):
    decoder.grow(params, state, 128)
  state = ring.prefill(params, [[1]], jax.random.key(0), limits=9)
  with pytest.raises(ValueError, match="_Ring says"):
    ring.grow(params, state, 512)


def test_values_are_checked_while_slots_double():
  # Broken: the checks of a program do not fit together with the next one's.
  model = testing.MarkovModel(VOCAB, context_length=500)
  decoder = sj.Decoder(
      target=model, drafter=sj.drafters.Empty(), debug=True,
      verifier=sj.verifiers.TargetWalk())
  text = decoder.generate(
      {"target": model.init(jax.random.key(0))}, [[1]], jax.random.key(1),
      max_new_tokens=200, grows=True)
  assert len(text.tokens[0]) == 201
  assert any("in 128 slots" in said for said in text.stats.checks)
  assert any("in 256 slots" in said for said in text.stats.checks)
