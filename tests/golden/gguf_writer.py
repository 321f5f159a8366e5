"""GGUF files of the recorded models, as llama.cpp's converters write them.

The names of the tensors are those of the package `gguf`; what its converters
do to the numbers (permuted queries and keys, norms plus one, fused and
reordered parts) is done here, away from what is tested.
"""

import json

import gguf
import ml_dtypes  # noqa: F401  numpy knows bfloat16 by it
import numpy as np
from safetensors.numpy import load_file

_ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3",
    "gpt2": "gpt2", "gpt_neox": "gptneox", "phi3": "phi3", "olmo2": "olmo2"}


def write(directory, path, kind=gguf.GGMLQuantizationType.F32):
  """Writes the model of a Hugging Face directory as a GGUF file.

  Args:
    directory: of the model.
    path: of the file.
    kind: how matrices are stored.
  """
  config = json.loads((directory / "config.json").read_text())
  tensors = {}
  for file in sorted(directory.glob("*.safetensors")):
    tensors |= load_file(file)
  name = _ARCHITECTURES[config["model_type"]]
  [arch] = [key for key, value in gguf.MODEL_ARCH_NAMES.items()
            if value == name]
  writer = gguf.GGUFWriter(path, name)
  layers = config.get("num_hidden_layers") or config["n_layer"]
  _metadata(writer, config, layers)
  names = gguf.get_tensor_name_map(arch, layers)
  for old, x in tensors.items():
    new = names.get_name(old, try_suffixes=(".weight", ".bias"))
    x = np.ascontiguousarray(_changed(config, old, x.astype(np.float32)))
    quantised = kind if x.ndim > 1 else gguf.GGMLQuantizationType.F32
    writer.add_tensor(new, gguf.quantize(x, quantised), raw_dtype=quantised)
  for extra, factors in _factors(config).items():
    writer.add_tensor(extra, np.float32(factors))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def _metadata(writer, c, layers):
  rope = c.get("rope_parameters") or {}
  rope = rope.get("full_attention", rope)
  width = c.get("hidden_size") or c["n_embd"]
  heads = c.get("num_attention_heads") or c["n_head"]
  writer.add_vocab_size(c["vocab_size"])
  writer.add_context_length(c.get("max_position_embeddings")
                            or c["n_positions"])
  writer.add_embedding_length(width)
  writer.add_block_count(layers)
  writer.add_feed_forward_length(c.get("intermediate_size") or 4 * width)
  writer.add_head_count(heads)
  if "num_key_value_heads" in c:
    writer.add_head_count_kv(c["num_key_value_heads"])
  if "rms_norm_eps" in c:
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
  else:
    writer.add_layer_norm_eps(c.get("layer_norm_eps")
                              or c["layer_norm_epsilon"])
  if "head_dim" in c:
    writer.add_key_length(c["head_dim"])
    writer.add_value_length(c["head_dim"])
  if "rope_theta" in rope:
    writer.add_rope_freq_base(rope["rope_theta"])
  head_dim = c.get("head_dim") or width // heads
  if c["model_type"] != "gpt2":
    writer.add_rope_dimension_count(
        int(head_dim * rope.get("partial_rotary_factor", 1)))
  if c["model_type"] == "gpt_neox":
    writer.add_parallel_residual(c["use_parallel_residual"])
  if rope.get("rope_type") in ("linear", "yarn"):
    writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
    writer.add_rope_scaling_factor(rope["factor"])
  if rope.get("rope_type") == "yarn":
    writer.add_rope_scaling_orig_ctx_len(
        rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
  if c["model_type"] == "phi3":
    ratio = (c["max_position_embeddings"]
             / c["original_max_position_embeddings"])
    writer.add_rope_scaling_orig_ctx_len(c["original_max_position_embeddings"])
    if "long_factor" in rope:
      writer.add_rope_scaling_attn_factors(np.sqrt(
          1 + np.log(ratio) / np.log(c["original_max_position_embeddings"])))
  if c["model_type"] == "gemma3_text":
    writer.add_rope_freq_base_swa(
        c["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_sliding_window_pattern(
        [kind == "sliding_attention" for kind in c["layer_types"]])
  if c["model_type"] == "gemma2":
    writer.add_sliding_window_pattern(2)  # every second layer sees all
  if c.get("sliding_window"):
    writer.add_sliding_window(c["sliding_window"])
  for name in ("attn_logit_softcapping", "final_logit_softcapping"):
    if c.get(name):
      getattr(writer, f"add_{name}")(c[name])


def _changed(c, name, x):
  heads = c.get("num_attention_heads") or c["n_head"]
  if c["model_type"] in ("llama", "mistral"):
    for part, count in (("q_proj", heads),
                        ("k_proj", c["num_key_value_heads"])):
      if part in name:
        return x.reshape(count, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(
            x.shape)
  if c["model_type"].startswith("gemma") and name.endswith("norm.weight"):
    return x + 1
  if c["model_type"] == "gpt2" and ".c_" in name and x.ndim > 1:
    return x.T
  if "query_key_value" in name:
    return x.reshape(heads, 3, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
  return x


def _factors(c):
  rope = c.get("rope_parameters") or {}
  if rope.get("rope_type") == "longrope":
    return {"rope_factors_long.weight": rope["long_factor"],
            "rope_factors_short.weight": rope["short_factor"]}
  if rope.get("rope_type") != "llama3":
    return {}
  original, factor = rope["original_max_position_embeddings"], rope["factor"]
  low, high = rope["low_freq_factor"], rope["high_freq_factor"]
  factors = []
  for i in range(0, c["head_dim"], 2):
    length = 2 * np.pi * rope["rope_theta"] ** (i / c["head_dim"])
    smooth = (original / length - low) / (high - low)
    factors.append(1 if length < original / high else
                   factor if length > original / low else
                   1 / ((1 - smooth) / factor + smooth))
  return {"rope_freqs.weight": factors}
