"""Conversion of published configuration keys to `TransformerConfig` fields.

There is one function per architecture.
"""

from typing import Any

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


def layer_windows(keys: Keys, types: list[str]) -> Fields:
  """Returns the field `windows`, for layers of types SLIDING and FULL.

  Args:
    keys: the published configuration.
    types: type of each layer, used if the configuration has no `layer_types`.
  """
  types = keys("layer_types", types)
  layers = keys.size("num_hidden_layers")
  if not isinstance(types, list) or len(types) != layers or any(
      kind not in (SLIDING, FULL) for kind in types):
    keys.needs("layer_types", types, f"a list with the type of each of {layers}"
               f" layers, and specjax supports {SLIDING} and {FULL}")
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


def llama(keys: Keys) -> Fields:
  return (_sizes(keys) | read_rope(keys) | _biases(keys)
          | dict(mlp_bias=keys.switch("mlp_bias", False)))


def mistral(keys: Keys) -> Fields:
  return _sizes(keys) | read_rope(keys) | _same_window(keys)


def qwen2(keys: Keys) -> Fields:
  return (_sizes(keys) | read_rope(keys) | _upper_windows(keys)
          | dict(qkv_bias=True))


def qwen3(keys: Keys) -> Fields:
  return (_sizes(keys) | read_rope(keys) | _upper_windows(keys) | _biases(keys)
          | dict(qk_norm="head"))


def olmo2(keys: Keys) -> Fields:
  return (_sizes(keys) | read_rope(keys) | _biases(keys)
          | dict(qk_norm="all", pre_norm=False, post_norm=True))


def phi3(keys: Keys) -> Fields:
  for name in ("interpolate_factor", "full_attn_mod"):  # keys of Phi-4-mini
    if (value := keys.number(name, 1)) != 1:
      keys.refuse(name, value)
  return (_sizes(keys) | read_rope(keys, fraction="partial_rotary_factor")
          | _same_window(keys))


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
