"""Models in GGUF files, the format of llama.cpp.

The metadata of a file is translated to the keys of a Hugging Face
configuration. Both formats then use one description of each architecture. The
package `gguf` dequantises tensors.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import math
import os
import pathlib
import types
from typing import Any
from typing import NamedTuple

import numpy as np

from specjax.models import gguf_headers
from specjax.models import tensor_names
from specjax.models.configuration_keys import Keys
from specjax.models.safetensors_files import StoredTensor
from specjax.models.settings import FULL
from specjax.models.settings import SLIDING
from specjax.models.tensor_layouts import Table
from specjax.utils.files import check_downloaded

_TYPES = {
    "llama": ("llama", tensor_names.GGUF_LLAMA),
    "qwen2": ("qwen2", tensor_names.GGUF),
    "qwen3": ("qwen3", tensor_names.GGUF),
    "olmo2": ("olmo2", tensor_names.GGUF),
    "gemma": ("gemma", tensor_names.GGUF_GEMMA),
    "gemma2": ("gemma2", tensor_names.GGUF_GEMMA),
    "gemma3": ("gemma3_text", tensor_names.GGUF_GEMMA),
    "gpt2": ("gpt2", tensor_names.GGUF_FUSED),
    "phi3": ("phi3", tensor_names.GGUF_FUSED),
    "gptneox": ("gpt_neox", tensor_names.GGUF_FUSED),
}
_KEYS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "use_parallel_residual": "use_parallel_residual",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}
# Keys whose names in Hugging Face configurations differ by architecture.
_RENAMED = {
    "gpt2": {
        "max_position_embeddings": "n_positions", "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
        "intermediate_size": "n_inner", "layer_norm_eps": "layer_norm_epsilon"},
    "gpt_neox": {"rope_theta": "rotary_emb_base"},
}
# Most models scale queries by head_dim, but some scale them by width / heads.
# Files have no key for this property. Like llama.cpp, specjax recognises the
# models that use width / heads by their number of layers.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3_text": 62}
# Control tokens that always end a sequence in llama.cpp.
_ENDS = ("<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|im_end|>",
         "<|endoftext|>", "<|end_of_text|>")
_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight",
            "rope_factors_long.weight")


@dataclasses.dataclass(frozen=True)
class GGUFFile:
  """Header of a GGUF file.

  Attributes:
    model_type: `model_type` of the architecture in Hugging Face configurations.
    table: names of the tensors.
    config: metadata as keys of a Hugging Face configuration.
    metadata: metadata of the file.
    tensors: tensors of the parameters, by name.
  """

  model_type: str
  table: Table
  config: dict[str, Any]
  metadata: Mapping[str, Any]
  tensors: Mapping[str, StoredTensor]


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
  """Reads the header of a GGUF file.

  Raises:
    ValueError: the package `gguf` is missing, the file is truncated, or its
      metadata has an unknown value.
  """
  try:
    import gguf
  except ImportError:
    raise ValueError(f"reading {path} requires the package gguf: pip install "
                     "'specjax[published]'") from None
  path = pathlib.Path(path)
  check_downloaded(path)
  metadata, headers = gguf_headers.read(path)
  tensors = {name: _stored(path, header, _type(gguf, path, header.kind))
             for name, header in headers.items()}
  kind = metadata.get("general.architecture")
  if kind not in _TYPES:
    raise ValueError(f"{path} has the architecture {kind!r}; specjax reads "
                     f"GGUF files of {', '.join(_TYPES)}")
  model_type, table = _TYPES[kind]
  config = _config(str(path), kind, model_type, metadata, tensors)
  if kind == "llama" and config.get("sliding_window"):
    model_type = "mistral"
  tensors = {name: tensor for name, tensor in tensors.items()
             if name not in _FACTORS}
  return GGUFFile(model_type, table, config, metadata, tensors)


def ends(metadata: Mapping[str, Any], control: Mapping[int, str]
         ) -> tuple[int, ...]:
  """Returns the ids of tokens that end a sequence or a chat turn.

  Args:
    metadata: metadata of the file.
    control: control tokens of the file's tokenizer, by id.
  """
  named = [metadata.get(f"tokenizer.ggml.{kind}_token_id")
           for kind in ("eos", "eot", "eom")]
  chats = [token for token, text in control.items() if text in _ENDS]
  return tuple(dict.fromkeys(
      token for token in (*named, *chats) if token is not None))


class _Type(NamedTuple):
  """Storage type of tensors. Weights are stored in blocks of equal size.

  Attributes:
    numbers: number of weights in a block.
    size: number of bytes of a block.
    dequantized: function from the bytes `[1, N]` of blocks to the weights.
  """

  numbers: int
  size: int
  dequantized: Callable[[np.ndarray], np.ndarray]


def _type(gguf: types.ModuleType, path: pathlib.Path, number: int) -> _Type:
  """Returns the storage type `number`.

  Raises `ValueError` if the package `gguf` cannot dequantise this type.
  """
  try:
    kind = gguf.GGMLQuantizationType(number)
  except ValueError:
    raise ValueError(
        f"{path} has a tensor of type {number}, which the installed version of "
        "the package gguf does not support: pip install --upgrade gguf"
        ) from None
  numbers, size = gguf.GGML_QUANT_SIZES[kind]
  result = _Type(numbers, size, lambda data: gguf.dequantize(data, kind))
  try:
    result.dequantized(np.zeros((1, size), np.uint8))
  except NotImplementedError:
    raise ValueError(
        f"{path} has tensors of type {kind.name}, which the package gguf does "
        "not dequantise; take another quantisation of the model") from None
  return result


class _Rows(NamedTuple):
  """Rows of a tensor. A slice of rows is dequantised when it is read."""

  data: np.ndarray
  shape: tuple[int, ...]
  type: _Type

  def __getitem__(self, rows: slice) -> np.ndarray:
    data = self.data[rows]
    # The package processes 16 rows at a time, which is slow for many rows.
    # Passing all blocks as one row is faster.
    return self.type.dequantized(data.reshape(1, -1)).reshape(
        len(data), *self.shape[1:])


def _stored(path: pathlib.Path, header: gguf_headers.TensorHeader, kind: _Type
            ) -> StoredTensor:
  shape = header.shape if len(header.shape) > 1 else (1, *header.shape)
  size = math.prod(header.shape) // kind.numbers * kind.size
  if header.offset + size > path.stat().st_size:
    raise ValueError(f"{path} is truncated; download it again")
  return StoredTensor(header.shape, np.dtype(np.float32), lambda: _Rows(
      np.asarray(np.memmap(path, np.uint8, "r", header.offset,
                           (shape[0], size // shape[0]))), shape, kind))


def _config(source: str, kind: str, model_type: str,
            metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
            ) -> dict[str, Any]:
  """Returns the metadata as keys of a Hugging Face configuration."""
  given = {name.removeprefix(kind + "."): value
           for name, value in metadata.items() if name.startswith(kind + ".")}
  if metadata.get("split.count", 1) > 1:
    raise ValueError(f"{source} is one of {metadata['split.count']} parts; "
                     "join them with llama-gguf-split --merge")
  keys = Keys(given, source)
  config = {name: keys(key) for key, name in _KEYS.items() if key in given}
  if "token_embd.weight" in tensors:
    config.setdefault("vocab_size", tensors["token_embd.weight"].shape[0])
  layers = keys.size("block_count")
  head_dim = _add_head_dim(config, keys, model_type, layers)
  if model_type == "phi3":
    _add_window(config, keys, layers)
  config |= _layer_types(keys, layers)
  config |= _biases(model_type, tensors)
  config |= _rotated_share(keys, model_type, head_dim)
  config |= _rope_scaling(keys, tensors)
  for name in ("rope.scaling.finetuned", "tensor_data_layout"):
    keys(name)  # accepts the key, which only describes the file's conversion
  keys.refuse_others()
  config["tie_word_embeddings"] = "output.weight" not in tensors
  renamed = _RENAMED.get(model_type, {})
  return {renamed.get(name, name): value for name, value in config.items()}


def _add_window(config: dict[str, Any], keys: Keys, layers: int) -> None:
  """Adds the attention window to `config` for the first Phi-3 files.

  The first files of Phi-3 mini and medium lack the key. llama.cpp adds the same
  window to such files.
  """
  if layers in (32, 40) and keys.size("context_length") == 4096:
    config.setdefault("sliding_window", 2047)


def _add_head_dim(config: dict[str, Any], keys: Keys, model_type: str,
                  layers: int) -> int:
  """Returns the width of a head, and adds the query scale to `config`."""
  heads = keys.size("attention.head_count")
  width = keys.size("embedding_length")
  head_dim = config.get("head_dim") or width // heads
  if keys("attention.value_length", head_dim) != head_dim:
    keys.refuse("attention.value_length", keys("attention.value_length"))
  if model_type in _SCALED_BY_WIDTH:
    config["query_pre_attn_scalar"] = (
        width // heads if layers == _SCALED_BY_WIDTH[model_type] else head_dim)
  return head_dim


def _biases(model_type: str, tensors: Mapping[str, StoredTensor]
            ) -> dict[str, bool]:
  """Returns the configuration keys of biases.

  GGUF files have no such keys. The presence of a bias tensor determines a key.
  """
  biases = {}
  if "blk.0.attn_q.bias" in tensors and model_type != "qwen2":
    biases["attention_bias"] = True
  if "blk.0.ffn_up.bias" in tensors and model_type == "llama":
    biases["mlp_bias"] = True
  return biases


def _layer_types(keys: Keys, layers: int) -> dict[str, Any]:
  """Returns the configuration key of the layers with an attention window."""
  pattern = keys("attention.sliding_window_pattern")
  if not pattern:
    return {}
  if not isinstance(pattern, list):
    pattern = [(i + 1) % pattern for i in range(layers)]
  return {"layer_types": [SLIDING if slides else FULL for slides in pattern[
      :layers]]}


def _rotated_share(keys: Keys, model_type: str, head_dim: int
                   ) -> dict[str, Any]:
  """Returns the configuration key of the rotated share of a head."""
  fraction = keys("rope.dimension_count", head_dim) / head_dim
  names = {"gpt_neox": "rotary_pct", "phi3": "partial_rotary_factor"}
  if model_type in names:
    return {names[model_type]: fraction}
  if fraction != 1:
    keys.refuse("rope.dimension_count", keys("rope.dimension_count"))
  return {}


def _rope_scaling(keys: Keys, tensors: Mapping[str, StoredTensor]
                  ) -> dict[str, Any]:
  """Returns the configuration keys of rope scaling."""
  length = keys.size("context_length")
  all_lengths, short, long = (
      tensors[name].read().tolist() if name in tensors else None
      for name in _FACTORS)
  # Each branch reads only the keys that it uses. A key with no meaning for the
  # type of scaling therefore raises an error in `refuse_others`.
  if all_lengths:  # a tensor with divisors of the frequencies (Llama 3)
    _scaling_type(keys, "none", "linear")
    return dict(rope_scaling=dict(
        rope_type="longrope", short_factor=all_lengths, long_factor=all_lengths,
        attention_factor=1.0, original_max_position_embeddings=length))
  original = keys("rope.scaling.original_context_length")
  if short:
    _scaling_type(keys, "none", "linear", "longrope")
    return dict(original_max_position_embeddings=original, rope_scaling=dict(
        rope_type="longrope", short_factor=short, long_factor=long,
        attention_factor=keys("rope.scaling.attn_factor")))
  if keys("rope.scaling.type") == "none":
    return {}
  factor = keys("rope.scaling.factor")
  if factor is None:
    _scaling_type(keys, "linear")
    return {}
  kind = _scaling_type(keys, "linear", "yarn")
  if kind == "linear":
    return dict(rope_scaling=dict(rope_type=kind, factor=factor))
  return dict(rope_scaling=dict(
      rope_type=kind, factor=factor, original_max_position_embeddings=original,
      beta_fast=keys("rope.scaling.yarn_beta_fast"),
      beta_slow=keys("rope.scaling.yarn_beta_slow")))


def _scaling_type(keys: Keys, *expected: str) -> str:
  """Returns the type of rope scaling.

  Raises `ValueError` unless the type is in `expected`.
  """
  kind = keys("rope.scaling.type", "linear")  # llama.cpp has the same default
  if kind not in expected:
    keys.refuse("rope.scaling.type", kind)
  return kind
