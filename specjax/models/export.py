"""Export of a `Transformer` as a Hugging Face directory."""

from collections.abc import Mapping
import dataclasses
import os
import pathlib
from typing import Any

import chex
import flax.traverse_util
import jax
import numpy as np

from specjax.data import tokenizer_files
from specjax.data.tokenizers import Tokenizer
from specjax.models import model_files
from specjax.models.architectures import Architecture
from specjax.models.architectures import ARCHITECTURES
from specjax.models.architectures import without_idle_windows
from specjax.models.configuration import TransformerConfig
from specjax.models.configuration_keys import Keys
from specjax.models.pretrained import GenerationDefaults
from specjax.models.rope_settings import write_rope
from specjax.models.safetensors_files import check_arrays
from specjax.models.safetensors_files import converted
from specjax.models.safetensors_files import float_dtype
from specjax.models.safetensors_files import write_safetensors
from specjax.models.settings import ACTIVATIONS
from specjax.models.settings import FULL
from specjax.models.settings import SLIDING
from specjax.models.transformer import Transformer
from specjax.models.weights import places
from specjax.utils.files import write_json

_TYPES = {"conv": "conv", "delta": "linear_attention"}


def export_pretrained(directory: str | os.PathLike[str], model: Transformer,
                      params: Mapping[str, chex.ArrayTree], *,
                      tokenizer: Tokenizer | None = None,
                      generation: GenerationDefaults | None = None,
                      dtype: jax.typing.DTypeLike | None = None) -> str:
  """Writes a model as a Hugging Face directory.

  Each file is replaced atomically. Parameters are copied from the device one at
  a time.

  Args:
    directory: directory of the files, created if it does not exist.
    model: the model. `features` of its configuration is not exported.
    params: parameters of the model.
    tokenizer: tokenizer to write, or None.
    generation: sampling settings to write. None means greedy decoding up to the
      tokenizer's `eos`.
    dtype: dtype of the stored weights. None means the dtype of the embedding in
      `params`.

  Returns:
    The architecture as `model_type`, such as "llama".

  Raises:
    ValueError: the configuration matches no published architecture, a weight
      overflows in `dtype`, a parameter is not an array, or the directory
      contains files of another tokenizer.
  """
  model_type, config = express(model.config)
  architecture = ARCHITECTURES[model_type]
  directory = pathlib.Path(directory)
  if tokenizer is None and (directory / "tokenizer.json").exists():
    raise ValueError(f"{directory} has a tokenizer.json, which readers would "
                     "use with this model; give `tokenizer`, or choose another "
                     "directory")
  tokenizer_files.check_alone(directory)
  flat = flax.traverse_util.flatten_dict(dict(params), sep=".")
  check_arrays(flat)
  directory.mkdir(parents=True, exist_ok=True)
  dtype = float_dtype(dtype or flat["embedding"].dtype)
  _write_weights(directory / model_files.WEIGHTS, architecture, model.config,
                 flat, dtype)
  if tokenizer is not None:
    tokenizer_files.write(directory / "tokenizer.json", tokenizer,
                          model_max_length=model.context_length)
  ids = _end_ids(tokenizer, generation)
  write_json(directory / "generation_config.json",
             ids | _sampling(generation), indent=2)
  write_json(directory / "config.json", {
      "architectures": [architecture.transformers], "model_type": model_type,
      "torch_dtype": dtype.name, **ids, **config}, indent=2)
  return model_type


def _end_ids(tokenizer: Tokenizer | None,
             generation: GenerationDefaults | None) -> dict[str, Any]:
  """Returns the keys for the ids of the tokens that begin and end a sequence.
  """
  ends = list(generation.eos) if generation else []
  if not ends and tokenizer is not None and tokenizer.eos is not None:
    ends = [tokenizer.eos]
  return {"bos_token_id": None if tokenizer is None else tokenizer.bos,
          "eos_token_id": ends[0] if len(ends) == 1 else ends or None}


def _sampling(generation: GenerationDefaults | None) -> dict[str, Any]:
  """Returns all keys of generation_config.json except the eos."""
  if generation is None:
    return {}
  settings = {key: getattr(generation, key) for key in (
      "temperature", "top_k", "top_p", "min_p")
              if getattr(generation, key) is not None}
  always = {"repetition_penalty": generation.repetition_penalty,
            "suppress_tokens": list(generation.suppress_tokens)}
  return {**generation.others, **({"do_sample": True} if settings else {}),
          **settings, **{key: x for key, x in always.items() if x}}


def express(config: TransformerConfig) -> tuple[str, dict[str, Any]]:
  """Returns the first architecture that matches, with its published keys.

  The result is `(model_type, keys)`. `features` of the configuration is
  ignored.

  Raises:
    ValueError: no published architecture matches.
  """
  plain = without_idle_windows(dataclasses.replace(config, features=()))
  keys = _keys(plain)
  for name, architecture in ARCHITECTURES.items():
    if architecture.even_width and plain.width % plain.heads:
      continue
    try:
      asking = Keys(keys, "it", architecture.defaults)
      architecture.read(asking)
      published = {
          key: keys[key] for key in sorted(asking.asked & keys.keys())}
      published["tie_word_embeddings"] = plain.tie_embeddings
      back = architecture.config(
          Keys(published, "it", architecture.defaults, plain.context_length),
          not plain.tie_embeddings)
    except ValueError:
      continue
    if back == plain:
      return name, published
  raise ValueError(
      f"no published architecture matches {plain}; specjax writes "
      f"{', '.join(ARCHITECTURES)}")


def _keys(c: TransformerConfig) -> dict[str, Any]:
  """Returns the configuration as the keys of all architectures together."""
  activation = next(name for name in ("silu", "gelu", "gelu_pytorch_tanh")
                    if ACTIVATIONS[name] == c.activation)
  scaling = write_rope(c)
  keys = dict(
      vocab_size=c.vocab_size, hidden_size=c.width, n_embd=c.width,
      num_hidden_layers=c.layers, n_layer=c.layers,
      num_attention_heads=c.heads, n_head=c.heads,
      num_key_value_heads=c.kv_heads, head_dim=c.head_dim,
      intermediate_size=c.mlp_width, n_inner=c.mlp_width,
      max_position_embeddings=c.context_length, n_positions=c.context_length,
      rms_norm_eps=c.norm_epsilon, layer_norm_eps=c.norm_epsilon,
      layer_norm_epsilon=c.norm_epsilon,
      hidden_act=activation, hidden_activation=activation,
      activation_function=activation,
      attention_bias=c.qkv_bias, qkv_bias=c.qkv_bias, mlp_bias=c.mlp_bias,
      use_parallel_residual=c.parallel_residual,
      scale_attn_weights=c.query_scale is None,
      query_pre_attn_scalar=round((c.query_scale or c.head_dim**-0.5) ** -2),
      attn_logit_softcapping=c.attention_softcap,
      final_logit_softcapping=c.logit_softcap,
      sliding_window=max(c.windows, default=0) or None,
      use_sliding_window=bool(c.windows), max_window_layers=c.layers,
      no_rope_layers=[int(i not in c.unrotated) for i in range(c.layers)],
      position_embedding_type="nope" if c.unrotated else "rope",
      attention_multiplier=c.query_scale or c.head_dim**-0.5,
      embedding_multiplier=c.embedding_scale,
      residual_multiplier=c.residual_scale, logits_scaling=c.logit_divisor,
      use_qk_norm=c.qk_norm is not None, num_local_experts=0,
      shared_intermediate_size=c.mlp_width,
      layer_types=[_TYPES.get(c.layer_kind(i), SLIDING if c.window(i) else FULL)
                   for i in range(c.layers)],
      attn_output_gate=c.attention_gate, norm_eps=c.norm_epsilon,
      block_auto_adjust_ff_dim=False,
      rope_theta=c.rope_theta, rotary_emb_base=c.rope_theta,
      partial_rotary_factor=c.rope_fraction, rotary_pct=c.rope_fraction,
      rope_local_base_freq=c.local_rope_theta or c.rope_theta)
  if r := c.recurrent:
    keys |= dict(
        conv_L_cache=r.taps, linear_conv_kernel_dim=r.taps,
        linear_num_value_heads=r.heads, linear_num_key_heads=r.key_heads,
        linear_key_head_dim=r.key_dim, linear_value_head_dim=r.value_dim)
  if c.experts:
    e = c.experts
    keys |= dict(
        num_experts=e.count, num_local_experts=e.count,
        n_routed_experts=e.count, num_experts_per_tok=e.chosen,
        moe_intermediate_size=e.width, norm_topk_prob=e.normalise,
        mlp_only_layers=list(e.dense_layers),
        first_k_dense_replace=len(e.dense_layers),
        routed_scaling_factor=e.scale, swiglu_limit=e.limit,
        n_shared_experts=e.shared_width // e.width,
        shared_intermediate_size=e.shared_width,
        shared_expert_intermediate_size=e.shared_width)
  if c.value_norm:
    head_dim, full = c.global_head_dim or c.head_dim, dict(
        scaling or {"rope_type": "default"}, rope_theta=c.rope_theta)
    keys |= dict(
        global_head_dim=head_dim, attention_k_eq_v=not c.global_values,
        num_global_key_value_heads=c.global_kv_heads,
        num_kv_shared_layers=c.shared_layers,
        use_double_wide_mlp=c.wide_shared,
        hidden_size_per_layer_input=c.layer_inputs,
        vocab_size_per_layer_input=c.vocab_size, rope_parameters={
            "full_attention": full, "sliding_attention": {
                "rope_type": "default", "rope_theta": c.local_rope_theta}})
  elif scaling:
    keys["rope_scaling"] = scaling
    if "original_max_position_embeddings" in scaling:
      keys["original_max_position_embeddings"] = scaling[
          "original_max_position_embeddings"]
  return keys


def _write_weights(path: pathlib.Path, architecture: Architecture,
                   config: TransformerConfig, params: Mapping[str, jax.Array],
                   dtype: np.dtype) -> None:
  [head] = architecture.names["head"].names
  stored, kinds = places(params, architecture.names), {}
  for place in stored:
    for name, shape in zip(place.names,
                           place.stored.shapes(config, place.shape)):
      prefix = "" if name == f"{head}.weight" else architecture.prefix
      kinds[prefix + name] = shape, place.stored.dtype(dtype)
  write_safetensors(path, kinds, (
      tensor for place in stored for tensor in place.stored.split(
          config, converted(np.asarray(params[place.path]),
                            place.stored.dtype(dtype)))))
