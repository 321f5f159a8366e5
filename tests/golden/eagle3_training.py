"""Writes eagle3_training.safetensors, of eagle_training_test.py, again.

  pip install torch transformers safetensors jax
  python tests/golden/eagle3_training.py EAGLE SPECJAX

EAGLE and SPECJAX are checkouts of the public code: SafeAILab/EAGLE cb7e084 and
tails-mpt/SpecJAX d047ed4. Both are fed the same random weights, tokens, taps
and logits of a target; the file has these, what both compute at every step of
the training-time test, and both losses. The script stops where the two differ,
or where a step does not change what the next one computes.
"""

import importlib.util
import pathlib
import sys
import types

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import torch
from transformers import activations  # noqa: F401  (before the stubs)
from transformers import AutoTokenizer  # noqa: F401

_HERE = pathlib.Path(__file__).parent
_BATCH, _TOKENS, _STEPS = 2, 9, 3
_VOCAB, _DRAFTED, _WIDTH, _INNER, _HEADS, _KV_HEADS = 40, 12, 16, 24, 4, 2
_CLOSE, _SEEN = 2e-6, 0.05


def _weights(rng):
  """Official names and shapes; scales that make every part count."""
  d, head = _WIDTH, _WIDTH // _HEADS
  shapes = {
      "fc": (d, 3 * d), "midlayer.self_attn.q_proj": (d, 2 * d),
      "midlayer.self_attn.k_proj": (_KV_HEADS * head, 2 * d),
      "midlayer.self_attn.v_proj": (_KV_HEADS * head, 2 * d),
      "midlayer.self_attn.o_proj": (d, d),
      "midlayer.mlp.gate_proj": (_INNER, d),
      "midlayer.mlp.up_proj": (_INNER, d),
      "midlayer.mlp.down_proj": (d, _INNER), "lm_head": (_DRAFTED, d),
      **{name: (d,) for name in (
          "midlayer.input_layernorm", "midlayer.hidden_norm",
          "midlayer.post_attention_layernorm", "norm")}}

  def draw(shape):
    if len(shape) == 1:
      return 1 + 0.3 * rng.normal(size=shape)
    return 1.6 * rng.normal(size=shape) * shape[1]**-0.5

  return {f"{name}.weight": draw(shape).astype(np.float32)
          for name, shape in shapes.items()}


def _inputs(rng):
  ids = np.sort(rng.permutation(_VOCAB)[:_DRAFTED]).astype(np.int32)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  return {"ids": ids, "embedding": normal(_VOCAB, _WIDTH),
          "tokens": rng.integers(
              _VOCAB, size=(_BATCH, _TOKENS)).astype(np.int32),
          "taps": normal(_BATCH, _TOKENS, 3 * _WIDTH),
          "target_logits": 2 * normal(_BATCH, _TOKENS, _VOCAB)}


def _imported(path, name, **stubs):
  """A module of a checkout, without what it only needs for its data."""
  for stub, contents in stubs.items():
    sys.modules[stub.replace("__", ".")] = types.SimpleNamespace(**contents)
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def _official(checkout, weights, inputs):
  """`([S][hidden, logits], [S] losses)` of eagle/traineagle3/cnets.py."""
  cnets = _imported(
      pathlib.Path(checkout) / "eagle/traineagle3/cnets.py", "cnets",
      modeling_llama_kv=dict(LlamaForCausalLM=None), configs=dict(EConfig=None),
      datasets=dict(load_dataset=None))
  config = types.SimpleNamespace(
      hidden_size=_WIDTH, intermediate_size=_INNER, num_attention_heads=_HEADS,
      num_key_value_heads=_KV_HEADS, max_position_embeddings=64,
      rope_scaling=None, hidden_act="silu", pretraining_tp=1,
      rms_norm_eps=1e-5)
  model = cnets.Model.__new__(cnets.Model)  # the constructor reads a target
  torch.nn.Module.__init__(model)
  model.midlayer = cnets.LlamaDecoderLayeremb(config)
  model.norm = cnets.LlamaRMSNorm(_WIDTH, eps=config.rms_norm_eps)
  model.fc = torch.nn.Linear(3 * _WIDTH, _WIDTH, bias=False)
  model.lm_head = torch.nn.Linear(_WIDTH, _DRAFTED, bias=False)
  model.load_state_dict({k: torch.tensor(v) for k, v in weights.items()})
  model.embed_tokens = torch.nn.Embedding.from_pretrained(
      torch.tensor(inputs["embedding"]))
  model.length, model.gradient_checkpointing = _STEPS, False
  model.t2d = torch.zeros(_VOCAB, dtype=torch.bool)
  model.t2d[inputs["ids"]] = True
  taps = torch.tensor(inputs["taps"]).split(_WIDTH, dim=-1)
  model.target_model = lambda **_: types.SimpleNamespace(
      hidden_states=taps, logits=torch.tensor(inputs["target_logits"]))
  seen = []
  model.midlayer.register_forward_hook(
      lambda _, args, out: seen.append([out[0][0]]))
  model.lm_head.register_forward_hook(
      lambda _, args, out: seen[-1].append(out))
  mask = torch.ones((_BATCH, _TOKENS), dtype=torch.long)
  known = mask.clone()
  known[:, -1] = 0  # nothing follows the last token
  with torch.no_grad():
    losses, _, _ = model(input_ids=torch.tensor(inputs["tokens"]).long(),
                         attention_mask=mask, loss_mask=known)
  return [[x.numpy() for x in step] for step in seen], np.float32(losses)


def _specjax(checkout, weights, inputs):
  """The same of specjax/models/draft/eagle3.py of tails-mpt/SpecJAX."""
  root = pathlib.Path(checkout) / "specjax"
  ops = {f"specjax__ops__{name}": vars(
      _imported(root / f"ops/{name}.py", f"ops_{name}"))
         for name in ("norm", "rope")}
  eagle3 = _imported(
      root / "models/draft/eagle3.py", "eagle3", specjax={}, specjax__ops={},
      **ops)
  config = eagle3.Eagle3Config(
      hidden_size=_WIDTH, intermediate_size=_INNER, num_heads=_HEADS,
      num_kv_heads=_KV_HEADS, head_dim=_WIDTH // _HEADS, vocab_size=_VOCAB,
      draft_vocab_size=_DRAFTED, rope_theta=10_000.0, rms_norm_eps=1e-5)
  seen, forward = [], eagle3.eagle3_forward

  def recorded(*args, **kwargs):
    out = forward(*args, **kwargs)
    seen.append([np.asarray(out[1]), np.asarray(out[0])])
    return out

  eagle3.eagle3_forward = recorded
  to_draft = np.full(_VOCAB, -1, np.int32)
  to_draft[inputs["ids"]] = np.arange(_DRAFTED)
  _, losses, _ = eagle3.compute_ttt_loss(
      {k: jnp.asarray(v) for k, v in weights.items()},
      jnp.asarray(inputs["taps"]), jnp.asarray(inputs["embedding"]),
      jnp.asarray(inputs["tokens"]), jnp.ones((_BATCH, _TOKENS), jnp.int32),
      jnp.asarray(inputs["target_logits"]), jnp.asarray(inputs["ids"]),
      jnp.asarray(to_draft), config, ttt_length=_STEPS)
  return seen, np.float32(losses)


def main():
  rng = np.random.default_rng(0)
  weights, inputs = _weights(rng), _inputs(rng)
  official, losses = _official(sys.argv[1], weights, inputs)
  other, other_losses = _specjax(sys.argv[2], weights, inputs)
  for i, (one, two) in enumerate(zip(official, other, strict=True)):
    scale = max(np.abs(x).max() for x in one)
    apart = max(np.abs(x - y).max() for x, y in zip(one, two)) / scale
    print(f"step {i}: values up to {scale:.1f}; the two differ by {apart:.1e} "
          "of that")
    assert apart < _CLOSE
  # Its mean leaves out the last row, of which nothing is known.
  np.testing.assert_allclose(
      other_losses * (_TOKENS - 1) / _TOKENS, losses, rtol=1e-5)
  for before, after in zip(official, official[1:]):
    assert np.abs(before[1] - after[1]).max() > _SEEN * np.abs(after[1]).max()
  safetensors.numpy.save_file(
      {**weights, **inputs, "losses": losses,
       "hidden": np.stack([x for x, _ in official]),
       "logits": np.stack([x for _, x in official]),
       "specjax_hidden": np.stack([x for x, _ in other]),
       "specjax_logits": np.stack([x for _, x in other]),
       "specjax_losses": other_losses},
      _HERE / "eagle3_training.safetensors")


if __name__ == "__main__":
  main()
