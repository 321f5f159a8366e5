"""Every drafter under `jax_enable_x64`, where numbers have 64 bits unless told.

Programs are traced and not compiled: what goes wrong is a dtype.
"""

import functools

from contributions import DRAFTERS
from contributions import QUICK
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import testing
from specjax.decoding import inputs
from specjax.decoding import rounds


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in DRAFTERS])
def test_a_round_of_every_drafter_in_64_bits(name):
  # Broken: float64 into float32, or the reverse, with weights of either.
  case = DRAFTERS[name]()
  with jax.enable_x64(True):
    decoder = sj.Decoder(
        target=case.model, drafter=case.drafter, verifier=case.rule,
        controller=case.controller)

    def started(params, context):
      prompt = sj.types.Prompt(
          tokens=jnp.zeros((2, 16), jnp.int32),
          lengths=jnp.array([2, 3], jnp.int32), capacity=128, context=context)
      keys = inputs.row_keys(jax.random.key(0), None, 2)
      return decoder.start(
          params, prompt, jnp.array([20, 20], jnp.int32), keys)

    for dtype in (jnp.float32, jnp.float64):
      params = jax.tree.map(
          lambda x, dtype=dtype: x.astype(dtype) if x.dtype == jnp.float32
          else x, case.parameters)
      state = jax.eval_shape(started, params, case.context(2))
      new, _ = jax.eval_shape(
          functools.partial(rounds.scan, decoder.stage, rounds=2), params,
          state)
      assert new == state


def test_the_text_is_that_of_32_bits():
  # Broken: under x64 a row draws other numbers.
  model = testing.MarkovModel(5)
  table = np.asarray(model.init(jax.random.key(0)))
  params = {"target": table, "drafter": table[::-1]}

  def text():
    decoder = sj.Decoder(
        target=model, verifier=sj.verifiers.Block(),
        drafter=sj.drafters.draft_model(model=model, gamma=3))
    return decoder.generate(params, [[1], [2, 3]], jax.random.key(0),
                            max_new_tokens=40).tokens

  want = text()
  with jax.enable_x64(True):
    for a, b in zip(text(), want):
      np.testing.assert_array_equal(a, b)
