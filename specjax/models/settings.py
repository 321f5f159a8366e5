"""Conversion of published configuration keys to `TransformerConfig` fields.

There is one function per architecture.
"""

from collections.abc import Callable
import functools
from typing import Any

from specjax.models.configuration import ExpertConfig
from specjax.models.configuration import RecurrentLayers
from specjax.models.configuration_keys import Keys
from specjax.models.rope_settings import read_rope
from specjax.models.rope_settings import read_two_ropes

Fields = dict[str, Any]
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
SLIDING, FULL = "sliding_attention", "full_attention"


def _sizes(keys: Keys, epsilon: str = "rms_norm_eps",
           activation: str = "hidden_act") -> Fields:
  heads, width = keys.size("num_attention_heads"), keys.size("hidden_size")
  return dict(
      vocab_size=keys.size("vocab_size"), width=width,
      layers=keys.size("num_hidden_layers"), heads=heads,
      kv_heads=keys.size("num_key_value_heads", heads),
      head_dim=keys.size("head_dim", width // heads),
      mlp_width=keys.size("intermediate_size"),
      norm_epsilon=keys.number(epsilon, positive=True),
      activation=keys.choice(activation, ACTIVATIONS))


def _biases(keys: Keys) -> Fields:
  return dict.fromkeys(("qkv_bias", "out_bias"),
                       keys.switch("attention_bias", False))


def _layer_types(keys: Keys, types: list[str], one: str, other: str
                 ) -> list[str]:
  """Returns `layer_types`, or `types`. Each must be one of two types."""
  types = keys("layer_types", types)
  layers = keys.size("num_hidden_layers")
  if not isinstance(types, list) or len(types) != layers or any(
      kind not in (one, other) for kind in types):
    keys.needs("layer_types", types, f"a list with the type of each of {layers}"
               f" layers, and specjax supports {one} and {other}")
  return types


def layer_windows(keys: Keys, types: list[str]) -> Fields:
  """Returns the field `windows`, for layers of types SLIDING and FULL.

  Args:
    keys: the published configuration.
    types: type of each layer, used if the configuration has no `layer_types`.
  """
  types = _layer_types(keys, types, SLIDING, FULL)
  keys("sliding_window")  # accepted, and required only if a layer has a window
  if SLIDING not in types:
    return {}
  size = keys.size("sliding_window")
  return dict(windows=tuple(
      size if kind == SLIDING else 0 for kind in types))


def _same_window(keys: Keys) -> Fields:
  if not keys("sliding_window"):
    return {}
  return dict(windows=(keys.size("sliding_window"),)
              * keys.size("num_hidden_layers"))


def _upper_windows(keys: Keys) -> Fields:
  """Returns the field `windows` of Qwen models.

  Windows are optional. If used, all layers from `max_window_layers` have one.
  """
  layers = range(keys.size("num_hidden_layers"))
  on = keys.switch("use_sliding_window", False)
  first = keys.number("max_window_layers", 0)
  types = [SLIDING if on and i >= first else FULL for i in layers]
  given = keys("layer_types", types)
  if not on:
    keys("sliding_window")  # accepted; has no effect
    if given != types:
      keys.refuse("use_sliding_window", on)
    return {}
  return layer_windows(keys, types)


def _basic(keys: Keys) -> Fields:
  return _sizes(keys) | read_rope(keys) | _biases(keys)


def llama(keys: Keys) -> Fields:
  return _basic(keys) | dict(mlp_bias=keys.switch("mlp_bias", False))


def mistral(keys: Keys) -> Fields:
  return _sizes(keys) | read_rope(keys) | _same_window(keys)


def qwen2(keys: Keys) -> Fields:
  return (_sizes(keys) | read_rope(keys) | _upper_windows(keys)
          | dict(qkv_bias=True))


def mimo(keys: Keys) -> Fields:
  if not keys.switch("attention_bias", True):
    keys.refuse("attention_bias", False)
  return qwen2(keys)


def smollm3(keys: Keys) -> Fields:
  """Returns the fields of SmolLM3. In `no_rope_layers`, 0 means no rotation."""
  layers = range(keys.size("num_hidden_layers"))
  period = keys.size("no_rope_layer_interval", 4)
  rotated = keys.whole_numbers("no_rope_layers") or tuple(
      int((i + 1) % period > 0) for i in layers)
  if len(rotated) < len(layers) or {*rotated} - {0, 1}:
    keys.needs("no_rope_layers", list(rotated), "a list with 1 (rotation) or 0 "
               f"(no rotation) for each of {len(layers)} layers")
  on = keys.switch("use_sliding_window", False) and keys("sliding_window")
  types = [SLIDING if on and not rotated[i] else FULL for i in layers]
  keys("sliding_window")  # accepted; has no effect without use_sliding_window
  windows = layer_windows(keys, types)
  if windows and not on:
    keys.refuse("layer_types", keys("layer_types"))
  return llama(keys) | windows | dict(
      unrotated=tuple(i for i in layers if not rotated[i]))


def _check_rope(keys: Keys) -> None:
  """Raises `ValueError` if the scaling of positions is missing."""
  if not (keys("rope_parameters") or keys("rope_scaling")):
    keys.needs("rope_parameters", None,
               "an object, because transformers would scale by YaRN without it")


def ministral3(keys: Keys) -> Fields:
  _check_rope(keys)
  return _sizes(keys) | read_rope(keys, growth=True) | _same_window(keys)


def _granite_scales(keys: Keys, fields: Fields) -> Fields:
  """Adds Granite's factors. The usual factor on scores is `query_scale` None.
  """
  scale = keys.number("attention_multiplier", 1.0, positive=True)
  usual = fields["head_dim"]**-0.5
  return fields | dict(
      query_scale=None if scale == usual else float(scale),
      embedding_scale=float(keys.number("embedding_multiplier", 1.0)),
      residual_scale=float(keys.number("residual_multiplier", 1.0)),
      logit_divisor=float(keys.number("logits_scaling", 1.0, positive=True)))


def granite(keys: Keys) -> Fields:
  return _granite_scales(keys, llama(keys))


def _experts(keys: Keys, count: str, width: str, **fields: Any) -> ExpertConfig:
  """Returns the experts.

  Args:
    keys: the published configuration.
    count: key of the number of experts.
    width: key of the inner width of an expert.
    **fields: other fields of `ExpertConfig`.
  """
  for name in ("output_router_logits", "router_aux_loss_coef",
               "router_jitter_noise"):
    keys(name)  # only training reads these keys
  total, chosen = keys.size(count), keys.size("num_experts_per_tok")
  if chosen > total:
    keys.needs("num_experts_per_tok", chosen,
               f"at most {total}, the number of experts")
  return ExpertConfig(count=total, chosen=chosen, width=keys.size(width),
                      **fields)


def granitemoe(keys: Keys, shared_width: int = 0) -> Fields:
  return _granite_scales(keys, _basic(keys)) | dict(experts=_experts(
      keys, "num_local_experts", "intermediate_size",
      shared_width=shared_width))


def granitemoeshared(keys: Keys) -> Fields:
  return granitemoe(keys, int(keys.number("shared_intermediate_size", 0)))


def granitemoehybrid(keys: Keys) -> Fields:
  """Returns the fields of Granite 4 without recurrent layers."""
  types = keys("layer_types")
  if not isinstance(types, list) or {*types} - {"attention", FULL}:
    keys.needs("layer_types", types, f"a list of 'attention' or {FULL!r}: "
               "specjax does not have Mamba layers")
  keys.ignore(*(f"mamba_{name}" for name in (
      "chunk_size", "conv_bias", "d_conv", "d_head", "d_state", "expand",
      "n_groups", "n_heads", "proj_bias")), "time_step_limit",
              "normalization_function", "init_method")
  rotated = keys("position_embedding_type") == "rope"
  if keys("position_embedding_type") not in ("rope", "nope", None):
    keys.refuse("position_embedding_type", keys("position_embedding_type"))
  if keys.number("num_local_experts", 8):
    fields = granitemoeshared(keys)
  else:
    keys.ignore("num_experts_per_tok", "output_router_logits",
                "router_aux_loss_coef")
    keys.trust("intermediate_size", keys.size("shared_intermediate_size"))
    fields = _granite_scales(keys, _basic(keys))
  layers = tuple(range(fields["layers"]))
  return fields | ({} if rotated else dict(unrotated=layers))


def mixtral(keys: Keys) -> Fields:
  return mistral(keys) | dict(experts=_experts(
      keys, "num_local_experts", "intermediate_size"))


def olmoe(keys: Keys) -> Fields:
  return _basic(keys) | dict(
      qk_norm="all", experts=_experts(
          keys, "num_experts", "intermediate_size",
          normalise=keys.switch("norm_topk_prob", False)))


def _qwen_experts(keys: Keys, shared: bool = True) -> Fields:
  """Returns the field `experts`, or {} if all layers have an ordinary MLP.

  Args:
    keys: the published configuration.
    shared: True if the architecture has a shared expert with a gate.
  """
  layers = range(keys.size("num_hidden_layers"))
  step = keys.size("decoder_sparse_step", 1)
  only = keys.whole_numbers("mlp_only_layers") or ()
  dense = tuple(i for i in layers if i in only or (i + 1) % step)
  if not keys("num_experts") or len(dense) == len(layers):
    keys.ignore("num_experts_per_tok", "norm_topk_prob",
                "moe_intermediate_size", "shared_expert_intermediate_size",
                "output_router_logits", "router_aux_loss_coef")
    return {}
  return dict(experts=_experts(
      keys, "num_experts", "moe_intermediate_size", dense_layers=dense,
      normalise=keys.switch("norm_topk_prob", False),
      shared_gate=shared, shared_width=int(shared and keys.size(
          "shared_expert_intermediate_size"))))


def qwen2_moe(keys: Keys) -> Fields:
  if keys.switch("use_sliding_window", False):  # its windows alternate
    keys.refuse("use_sliding_window", True)
  return (_sizes(keys) | read_rope(keys) | _upper_windows(keys)
          | _qwen_experts(keys)
          | dict(qkv_bias=keys.switch("qkv_bias", True)))


def qwen3_moe(keys: Keys) -> Fields:
  return qwen3(keys) | _qwen_experts(keys, shared=False)


def glm4_moe(keys: Keys) -> Fields:
  """Returns the fields of GLM 4.5 and its successors."""
  for name in ("n_group", "topk_group"):
    if keys.size(name, 1) != 1:
      keys.refuse(name, keys(name))
  width = keys.size("moe_intermediate_size")
  dense = int(keys.number("first_k_dense_replace", 1))
  return _sizes(keys) | read_rope(
      keys, fraction="partial_rotary_factor") | dict(
          qkv_bias=keys.switch("attention_bias", False),
          qk_norm="head" if keys.switch("use_qk_norm", False) else None,
          experts=_experts(
              keys, "n_routed_experts", "moe_intermediate_size",
              scores="sigmoid", choice_bias=True,
              normalise=keys.switch("norm_topk_prob", True),
              scale=float(keys.number("routed_scaling_factor", 1.0)),
              shared_width=width * int(keys.number("n_shared_experts", 1)),
              dense_layers=tuple(range(dense))))


def gpt_oss(keys: Keys) -> Fields:
  types = [FULL if i % 2 else SLIDING
           for i in range(keys.size("num_hidden_layers"))]
  _check_rope(keys)
  if keys("swiglu_alpha", 1.702) != 1.702:
    keys.refuse("swiglu_alpha", keys("swiglu_alpha"))
  keys.ignore("initial_context_length")  # a copy in rope_scaling is read
  return _basic(keys) | layer_windows(keys, types) | dict(
      sinks=True, experts=_experts(
          keys, "num_local_experts", "intermediate_size", biases=True,
          limit=float(keys.number("swiglu_limit", 7.0, positive=True))))


def qwen3(keys: Keys) -> Fields:
  return (_sizes(keys) | read_rope(keys) | _upper_windows(keys) | _biases(keys)
          | dict(qk_norm="head"))


def olmo2(keys: Keys, rope: Callable[[Keys], Fields] = read_rope) -> Fields:
  return (_sizes(keys) | rope(keys) | _biases(keys)
          | dict(qk_norm="all", pre_norm=False, post_norm=True))


def olmo3(keys: Keys) -> Fields:
  types = [SLIDING if (i + 1) % 4 else FULL
           for i in range(keys.size("num_hidden_layers"))]
  fields = olmo2(keys, functools.partial(
      read_two_ropes, local="rope_theta")) | layer_windows(keys, types)
  if not fields.get("windows") or (
      fields["local_rope_theta"] == fields["rope_theta"]
      and fields["rope_scaling"] is None):
    fields["local_rope_theta"] = None  # all layers have the same frequencies
  return fields


def phi3(keys: Keys) -> Fields:
  for name in ("interpolate_factor", "full_attn_mod"):  # keys of Phi-4-mini
    if (value := keys.number(name, 1)) != 1:
      keys.refuse(name, value)
  return (_sizes(keys) | read_rope(keys, fraction="partial_rotary_factor")
          | _same_window(keys))


_KINDS = {FULL: "attention", "conv": "conv", "linear_attention": "delta"}


def _recurrent(keys: Keys, kind: str, types: list[str], **sizes: int) -> Fields:
  """Returns the field `recurrent`, or {} if all layers have attention.

  Args:
    keys: the published configuration.
    kind: type of the recurrent layers, a key of `_KINDS`.
    types: type of each layer, used if the configuration has no `layer_types`.
    **sizes: fields of `RecurrentLayers`.
  """
  types = _layer_types(keys, types, FULL, kind)
  if kind not in types:
    return {}
  if FULL not in types:
    keys.refuse("layer_types", types)
  return dict(recurrent=RecurrentLayers(
      kinds=tuple(_KINDS[one] for one in types), **sizes))


def lfm2(keys: Keys) -> Fields:
  for name, other in (
      ("block_dim", "hidden_size"), ("conv_dim", "hidden_size"),
      ("conv_dim_out", "hidden_size"), ("num_heads", "num_attention_heads"),
      ("block_norm_eps", "norm_eps"), ("theta", "rope_theta")):
    if values := keys.said(other) | keys.said(name):
      keys.agreed(values)
  if keys.switch("conv_bias", False):
    keys.refuse("conv_bias", True)
  inner = keys.size("block_ff_dim" if keys("block_ff_dim")
                    else "intermediate_size")
  multiple, factor = keys.size("block_multiple_of"), keys(
      "block_ffn_dim_multiplier")
  if keys.switch("block_auto_adjust_ff_dim", True):
    inner = int(2 * inner / 3)
    if factor is not None:
      inner = -(-int(factor * inner) // multiple) * multiple
  keys.trust("intermediate_size", inner)
  keys.trust("hidden_act", "silu")  # transformers reads no other
  attends = keys.whole_numbers("full_attn_idxs")
  types = [FULL if attends is None or i in attends else "conv"
           for i in range(keys.size("num_hidden_layers"))]
  return (_sizes(keys, epsilon="norm_eps") | read_rope(keys)
          | dict(qk_norm="head") | _recurrent(
              keys, "conv", types, taps=keys.size("conv_L_cache")))


def qwen3_next(keys: Keys) -> Fields:
  return _hybrid(keys) | _qwen_experts(keys)


def _hybrid(keys: Keys) -> Fields:
  """Returns the fields of Qwen's models with Gated DeltaNet."""
  every = keys.size("full_attention_interval", 4)
  types = ["linear_attention" if (i + 1) % every else FULL
           for i in range(keys.size("num_hidden_layers"))]
  if not keys.switch("attn_output_gate", True):
    keys.refuse("attn_output_gate", False)
  if keys("mamba_ssm_dtype", "float32") != "float32":
    keys.refuse("mamba_ssm_dtype", keys("mamba_ssm_dtype"))
  size = lambda name: keys.size(f"linear_{name}")
  return (_sizes(keys) | _biases(keys) | dict(
      norm_plus_one=True, qk_norm="head", attention_gate=True) | read_rope(
          keys, fraction="partial_rotary_factor", ignored=(
              "mrope_section", "mrope_interleaved")) | _recurrent(
                  keys, "linear_attention", types,
                  taps=size("conv_kernel_dim"), heads=size("num_value_heads"),
                  key_heads=size("num_key_heads"), key_dim=size("key_head_dim"),
                  value_dim=size("value_head_dim")))


def qwen3_5(keys: Keys) -> Fields:
  keys.ignore("mtp_num_hidden_layers")  # `load_drafter` reads the module
  if keys("mlp_only_layers"):
    keys.refuse("mlp_only_layers", keys("mlp_only_layers"))
  return _hybrid(keys)


def qwen3_5_moe(keys: Keys) -> Fields:
  """Returns the fields of Qwen3.5 with experts in all layers."""
  for name in ("norm_topk_prob", "decoder_sparse_step"):
    if keys(name, 1) != 1:  # transformers ignores these keys
      keys.refuse(name, keys(name))
  # There is no MLP of this width.
  keys.trust("intermediate_size", keys.size("moe_intermediate_size"))
  return qwen3_5(keys) | _qwen_experts(keys)


def _norms(keys: Keys) -> Fields:
  return dict(norm_plus_one=True,
              embedding_scale=float(keys.size("hidden_size") ** 0.5))


def gemma(keys: Keys) -> Fields:
  # Gemma's first configurations have "gelu", but the models use the tanh
  # approximation.
  name = "hidden_activation" if keys("hidden_activation") else "hidden_act"
  fields = _sizes(keys, activation=name)
  if fields["activation"] == "gelu":
    fields["activation"] = "gelu_tanh"
  return fields | read_rope(keys) | _biases(keys) | _norms(keys)


def _softcap(keys: Keys, name: str) -> float | None:
  """Returns the value of a key, a number above 0 or None."""
  return None if keys(name) is None else keys.number(name, positive=True)


def _parts(keys: Keys) -> Fields:
  keys("hidden_act")  # accepted; has no effect
  return (_sizes(keys, activation="hidden_activation") | _biases(keys)
          | _norms(keys) | dict(
              post_norm=True,
              attention_softcap=_softcap(keys, "attn_logit_softcapping"),
              logit_softcap=_softcap(keys, "final_logit_softcapping"),
              query_scale=float(keys.size("query_pre_attn_scalar") ** -0.5)))


def gemma2(keys: Keys) -> Fields:
  types = [(SLIDING, FULL)[i % 2]
           for i in range(keys.size("num_hidden_layers"))]
  return _parts(keys) | read_rope(keys) | layer_windows(keys, types)


def gemma3(keys: Keys) -> Fields:
  period = keys.size("sliding_window_pattern", 6)
  types = [SLIDING if (i + 1) % period else FULL
           for i in range(keys.size("num_hidden_layers"))]
  return (_parts(keys) | read_two_ropes(keys) | layer_windows(keys, types)
          | dict(qk_norm="head"))


def gemma4(keys: Keys) -> Fields:
  if keys.switch("enable_moe_block", False):
    keys.refuse("enable_moe_block", True)
  if keys.switch("attention_bias", False):
    keys.refuse("attention_bias", True)
  if keys("use_bidirectional_attention") not in (None, "vision"):
    keys.refuse("use_bidirectional_attention",
                keys("use_bidirectional_attention"))
  keys.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
  layers = keys.size("num_hidden_layers")
  types = [SLIDING if (i + 1) % 6 and i + 1 < layers else FULL
           for i in range(layers)]
  if keys("layer_types", types)[-1:] != [FULL]:  # transformers changes it
    keys.refuse("layer_types", keys("layer_types"))
  fields = _sizes(keys, activation="hidden_activation")
  inputs = keys.number("hidden_size_per_layer_input", 0)
  size = keys.number("vocab_size_per_layer_input", fields["vocab_size"])
  if inputs and size != fields["vocab_size"]:
    keys.refuse("vocab_size_per_layer_input", size)
  same = keys.switch("attention_k_eq_v", False)
  head_dim, kv_heads = _of_full_layers(keys, keys("layer_types", types), same)
  return fields | read_two_ropes(keys) | layer_windows(keys, types) | dict(
      qk_norm="head", value_norm=True, post_norm=True, query_scale=1.0,
      embedding_scale=float(fields["width"] ** 0.5),
      logit_softcap=_softcap(keys, "final_logit_softcapping"),
      global_head_dim=head_dim, global_values=not same,
      global_kv_heads=kv_heads,
      shared_layers=keys.number("num_kv_shared_layers", 0),
      wide_shared=keys.switch("use_double_wide_mlp", False),
      layer_inputs=inputs, layer_scales=True)


def _of_full_layers(keys: Keys, types: list[str], same: bool
                    ) -> tuple[int, int | None]:
  """Returns the sizes of heads of Gemma 4 in layers without a window.

  They are the width of a head, and the number of key-value heads or None.
  transformers writes them for every layer, and published files do not.

  Args:
    keys: the published configuration.
    types: type of each layer.
    same: True if the values are the keys. Otherwise published files do not
      change the number of heads.
  """
  given = keys.mapping("per_layer_config")
  if not given:
    name = "num_global_key_value_heads"
    kv_heads = keys(name) and keys.size(name)
    return keys.size("global_head_dim"), kv_heads if same else None
  # transformers pads the numbers with zeros in models of 10 and more layers.
  layers = {int(i): sizes for i, sizes in given.items() if i.isdecimal()}
  full = [i for i, kind in enumerate(types) if kind == FULL]
  sizes = next(iter(layers.values()), {})
  if len(layers) < len(given) or layers != dict.fromkeys(full, sizes) or not (
      {"head_dim"} <= {*sizes} <= {"head_dim", "num_key_value_heads"}):
    keys.refuse("per_layer_config", given)
  return sizes["head_dim"], sizes.get("num_key_value_heads")


def gpt2(keys: Keys) -> Fields:
  heads, width = keys.size("n_head"), keys.size("n_embd")
  if keys.switch("scale_attn_by_inverse_layer_idx", False):
    keys.refuse("scale_attn_by_inverse_layer_idx", True)
  return dict(
      vocab_size=keys.size("vocab_size"), width=width,
      layers=keys.size("n_layer"), heads=heads, kv_heads=heads,
      head_dim=width // heads, mlp_width=keys.size("n_inner", 4 * width),
      context_length=keys.size("n_positions"), learned_positions=True,
      norm="layer", gated=False,
      norm_epsilon=keys.number("layer_norm_epsilon", positive=True),
      activation=keys.choice("activation_function", ACTIVATIONS),
      query_scale=None if keys.switch("scale_attn_weights", True) else 1.0,
      qkv_bias=True, out_bias=True, mlp_bias=True)


def gpt_neox(keys: Keys) -> Fields:
  return (_sizes(keys, epsilon="layer_norm_eps")
          | read_rope(keys, theta="rotary_emb_base", fraction="rotary_pct")
          | _biases(keys) | dict(
              norm="layer", gated=False, mlp_bias=True,
              parallel_residual=keys.switch("use_parallel_residual", True)))
