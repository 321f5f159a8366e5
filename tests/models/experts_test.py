"""A mixture of experts: its products, its routes, and what a mesh splits."""

import dataclasses
import functools
import json
import re
import sys

from golden.recorded import loaded
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu_processes

import specjax as sj
from specjax.models import experts
from specjax.models.configuration import ExpertConfig

_E, _D, _F = 5, 128, 256
_FORMS = {
    "loop": functools.partial(experts._loop, every=False),
    "loop over all": functools.partial(experts._loop, every=True),
    "groups": experts._grouped, "pairs": experts._pairs,
    "kernel": functools.partial(experts._kernel, interpret=True)}


def _inputs(tokens, some=2, outside=0):
  """Inputs of `mixed`; with `outside`, some experts are of other devices."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 8, jnp.float32)
  chosen = np.stack([rng.permutation(_E + 2 * outside)[:some]
                     for _ in range(tokens)]) - outside
  return (draw(tokens, _D), jnp.asarray(chosen, jnp.int32),
          jnp.abs(draw(tokens, some)), draw(_E, _D, 2 * _F), draw(_E, _F, _D))


def _expected(x, chosen, weights, gate_up, down):
  out = np.zeros(x.shape)
  for t, i in np.ndindex(*chosen.shape):
    e = int(chosen[t, i])
    if 0 <= e < _E:
      gate, up = np.split(np.float64(x[t]) @ np.float64(gate_up[e]), 2)
      out[t] += weights[t, i] * (
          gate / (1 + np.exp(-gate)) * up @ np.float64(down[e]))
  return out


@pytest.mark.parametrize("form", _FORMS)
def test_all_forms_compute_the_same(form):
  # Broken: a form reads the experts of other tokens, counts experts of other
  # devices, or skips the last one.
  for tokens, some, outside in (7, 2, 0), (1, 3, 0), (6, 2, 3):
    inputs = _inputs(tokens, some, outside)
    np.testing.assert_allclose(
        jax.jit(functools.partial(_FORMS[form], jax.nn.silu))(*inputs),
        _expected(*inputs), atol=1e-5)


def test_no_expert_of_this_device_is_chosen():
  # Broken: an expert that nobody chose is added, or the division of nothing.
  x, chosen, *others = _inputs(3)
  for form in _FORMS.values():
    out = form(jax.nn.silu, x, chosen + _E, *others)
    np.testing.assert_array_equal(out, np.zeros(x.shape))


def test_training_differentiates_the_products():
  # Broken: a mixture cannot be trained, or its router gets no gradient.
  x, chosen, *others = _inputs(4)

  def dense(x, weights, gate_up, down):
    gate, up = jnp.split(jnp.einsum("td,edf->tef", x, gate_up), 2, axis=-1)
    out = jnp.einsum("tef,efd->ted", jax.nn.silu(gate) * up, down)
    own = jnp.take_along_axis(out, chosen[..., None], axis=1)
    return jnp.sum(own * weights[..., None])

  mixed = lambda x, *others: jnp.sum(experts.mixed(
      x, chosen, *others, activation=jax.nn.silu, differentiable=True))
  for found, wanted in zip(*(jax.jit(jax.grad(f, argnums=(0, 1, 2, 3)))(
      x, *others) for f in (mixed, dense))):
    np.testing.assert_allclose(found, wanted, atol=1e-4)
  model, params = (loaded("glm4_moe").model, loaded("glm4_moe").params)
  grads = jax.grad(lambda params: model(
      params, jnp.array([[3, 5, 7]])).logits.sum())(params)
  assert np.abs(grads["mlp_1"]["router"]).max() > 0
  assert np.isfinite(jax.tree.leaves(jax.tree.map(np.sum, grads))).all()


def test_routes_are_those_of_the_pass():
  # Broken: the routes of a dense layer are returned, or experts other than the
  # most probable.
  found = loaded("qwen3_moe")  # its layer 1 is dense
  tokens = np.arange(8, dtype=np.int32).reshape(2, 4)
  routes = np.asarray(found.model.routes(found.params, tokens))
  assert routes.shape == (2, 2, 4, 2) and routes.max() < 5
  embedded = found.params["embedding"][tokens]
  zero = jax.tree.map(jnp.copy, found.params)
  zero["attention_0"]["out"]["kernel"] = jnp.zeros_like(
      zero["attention_0"]["out"]["kernel"])
  normed = embedded * jax.lax.rsqrt(
      jnp.mean(embedded**2, -1, keepdims=True)
      + found.model.config.norm_epsilon) * zero["mlp_norm_0"]["scale"]
  first = np.argsort(-np.asarray(normed @ zero["mlp_0"]["router"]))[..., :2]
  np.testing.assert_array_equal(
      np.sort(found.model.routes(zero, tokens)[0]), np.sort(first))
  with pytest.raises(ValueError, match="no experts"):
    loaded("qwen3").model.routes(None, tokens)


@pytest.mark.parametrize("options,words", [
    (dict(chosen=9), "chosen is 9 and count 4"),
    (dict(scores="relu"), "scores is 'relu'"), (dict(width=0), "width is 0")])
def test_bad_experts(options, words):
  with pytest.raises(ValueError, match=words):
    ExpertConfig(**dict(count=4, chosen=2, width=8) | options)


def test_what_experts_exclude():
  config = loaded("qwen3_moe").model.config
  for options in dict(gated=False), dict(mlp_bias=True), dict(
      lookahead=1, lookahead_rank=2):
    with pytest.raises(ValueError, match=f"{[*options][-1]} is .* experts"):
      dataclasses.replace(config, **options)
  with pytest.raises(ValueError, match="expert.*quantize"):
    sj.models.quantize(loaded("mixtral").params)
  sj.models.Transformer(config).param_specs("model", 1)
  with pytest.raises(ValueError, match=r"experts.count is 5 .*2 dev"):
    sj.models.Transformer(config).param_specs("model", 2)


def _split(data, model):
  """Texts with and without a mesh, and what it moves between devices."""
  from jax.sharding import Mesh

  pair = sj.testing.tiny_pair(8, kv_heads=2, layers=2, experts=dict(
      count=8, chosen=2, width=16, shared_width=8, dense_layers=(1,)))
  decoder = sj.Decoder(
      target=pair.target, verifier=sj.verifiers.Block(),
      drafter=sj.drafters.draft_model(model=pair.drafter, gamma=3))
  mesh = Mesh(np.array(jax.devices()).reshape(data, model), ("data", "model"))
  placement = sj.decoding.Placement(mesh=mesh)
  prompts = [[1, 2, 3], [4], [5, 6], [7, 1]]
  texts = [decoder.generate(
      params, prompts, jax.random.key(0), max_new_tokens=12, **options).tokens
           for params, options in (
               (pair.params, {}),
               (placement.put(decoder, pair.params), dict(
                   placement=placement)))]
  params = placement.put(decoder, pair.params)["target"]
  hlo = jax.jit(lambda params, tokens: decoder.target(
      params, tokens).logits).lower(
          params, jnp.zeros((4, 3), jnp.int32)).compile().as_text()
  gathered = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather", hlo)
  print(json.dumps([[[row.tolist() for row in text] for text in texts],
                    gathered]))


@pytest.mark.slow
@pytest.mark.parametrize("question", ["1,2", "2,2", "4,1"])
def test_a_mesh_splits_the_experts(question):
  # Broken: a device counts experts of another one or misses its own, or all
  # experts travel to every device.
  (plain, split), gathered = tpu_processes.answer(
      __file__, question, XLA_FLAGS="--xla_force_host_platform_device_count="
      f"{eval(question.replace(',', '*'))}")  # pylint: disable=eval-used
  assert plain == split
  assert not [sizes for sizes in gathered if sizes.startswith("8,16,")]


if __name__ == "__main__":
  _split(*map(int, sys.argv[1].split(",")))
