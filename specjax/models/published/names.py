"""What the tensors of each architecture are called, and how they are stored.

The tables go from the path of a module of `Transformer`, with `{i}` for the
layer, to a `Stored`. Hugging Face's names are those without the prefix of the
base model (`model.`, `transformer.`, `gpt_neox.`), which not all files have.
"""

from collections.abc import Mapping
import dataclasses
import re

from specjax.models.published.layouts import apart
from specjax.models.published.layouts import by_head
from specjax.models.published.layouts import gate_apart
from specjax.models.published.layouts import gate_stacked
from specjax.models.published.layouts import interleaved
from specjax.models.published.layouts import stacked
from specjax.models.published.layouts import Stored
from specjax.models.published.layouts import turned

Table = Mapping[str, Stored]


def locate(table: Table, path: str) -> tuple[Stored, list[str]]:
  """Where a parameter is stored, and the names of the tensors.

  Args:
    table: of an architecture.
    path: of the parameter, such as `attention_3.qkv.kernel`.

  Raises:
    KeyError: the architecture has no such parameter.
  """
  module, _, leaf = path.rpartition(".")
  module = module if leaf in ("kernel", "bias", "scale") else path
  layer = re.search(r"_(\d+)", module)
  stored = table[re.sub(r"_\d+", "_{i}", module)]
  suffix = "bias" if leaf == "bias" else "weight"
  return stored, [f"{name.format(i=layer and layer[1])}.{suffix}"
                  for name in stored.names]


def _table(names):
  """Plain names are stored as they are, or turned where they are matrices."""
  matrices = ("head", "out", "up", "down")
  return {
      path: name if isinstance(name, Stored) else Stored(
          (name,), *([turned] if path.split(".")[-1] in matrices else []))
      for path, name in names.items()}


def _attention(layout, *parts):
  return Stored(tuple(f"layers.{{i}}.self_attn.{part}" for part in parts),
                layout)


LLAMA = _table({
    "embedding": "embed_tokens",
    "final_norm": "norm",
    "head": "lm_head",
    "attention_norm_{i}": "layers.{i}.input_layernorm",
    "mlp_norm_{i}": "layers.{i}.post_attention_layernorm",
    "attention_{i}.qkv": _attention(apart, "q_proj", "k_proj", "v_proj"),
    "attention_{i}.out": "layers.{i}.self_attn.o_proj",
    "attention_{i}.query_norm": "layers.{i}.self_attn.q_norm",
    "attention_{i}.key_norm": "layers.{i}.self_attn.k_norm",
    "mlp_{i}.gate_up": Stored(
        ("layers.{i}.mlp.gate_proj", "layers.{i}.mlp.up_proj"), gate_apart),
    "mlp_{i}.down": "layers.{i}.mlp.down_proj",
})
GEMMA_2 = LLAMA | _table({
    "attention_post_norm_{i}": "layers.{i}.post_attention_layernorm",
    "mlp_norm_{i}": "layers.{i}.pre_feedforward_layernorm",
    "mlp_post_norm_{i}": "layers.{i}.post_feedforward_layernorm",
})
OLMO_2 = LLAMA | _table({
    "attention_post_norm_{i}": "layers.{i}.post_attention_layernorm",
    "mlp_post_norm_{i}": "layers.{i}.post_feedforward_layernorm",
})
PHI_3 = LLAMA | _table({
    "attention_{i}.qkv": _attention(stacked, "qkv_proj"),
    "mlp_{i}.gate_up": Stored(("layers.{i}.mlp.gate_up_proj",), gate_stacked),
})
GPT_2 = _table({
    "embedding": "wte",
    "positions": "wpe",
    "final_norm": "ln_f",
    "head": "lm_head",
    "attention_norm_{i}": "h.{i}.ln_1",
    "mlp_norm_{i}": "h.{i}.ln_2",
    "attention_{i}.qkv": Stored(("h.{i}.attn.c_attn",), stacked, True),
    "attention_{i}.out": Stored(("h.{i}.attn.c_proj",), turned, True),
    "mlp_{i}.up": Stored(("h.{i}.mlp.c_fc",), turned, True),
    "mlp_{i}.down": Stored(("h.{i}.mlp.c_proj",), turned, True),
})
GPT_NEOX = _table({
    "embedding": "embed_in",
    "final_norm": "final_layer_norm",
    "head": "embed_out",
    "attention_norm_{i}": "layers.{i}.input_layernorm",
    "mlp_norm_{i}": "layers.{i}.post_attention_layernorm",
    "attention_{i}.qkv": Stored(
        ("layers.{i}.attention.query_key_value",), by_head),
    "attention_{i}.out": "layers.{i}.attention.dense",
    "mlp_{i}.up": "layers.{i}.mlp.dense_h_to_4h",
    "mlp_{i}.down": "layers.{i}.mlp.dense_4h_to_h",
})

_BLOCK = ("blk.{i}.attn_q", "blk.{i}.attn_k", "blk.{i}.attn_v")
GGUF = _table({
    "embedding": "token_embd",
    "positions": "position_embd",
    "final_norm": "output_norm",
    "head": "output",
    "attention_norm_{i}": "blk.{i}.attn_norm",
    "attention_post_norm_{i}": "blk.{i}.post_attention_norm",
    "mlp_norm_{i}": "blk.{i}.ffn_norm",
    "mlp_post_norm_{i}": "blk.{i}.post_ffw_norm",
    "attention_{i}.qkv": Stored(_BLOCK, apart),
    "attention_{i}.out": "blk.{i}.attn_output",
    "attention_{i}.query_norm": "blk.{i}.attn_q_norm",
    "attention_{i}.key_norm": "blk.{i}.attn_k_norm",
    "mlp_{i}.gate_up": Stored(("blk.{i}.ffn_gate", "blk.{i}.ffn_up"),
                              gate_apart),
    "mlp_{i}.up": "blk.{i}.ffn_up",
    "mlp_{i}.down": "blk.{i}.ffn_down",
})
GGUF_LLAMA = GGUF | {"attention_{i}.qkv": Stored(_BLOCK, interleaved)}
GGUF_FUSED = GGUF | {
    "attention_{i}.qkv": Stored(("blk.{i}.attn_qkv",), stacked),
    "mlp_{i}.gate_up": Stored(("blk.{i}.ffn_up",), gate_stacked)}
# llama.cpp multiplies by a norm's weight where Gemma does by 1 + its weight.
GGUF_GEMMA = {
    path: dataclasses.replace(stored, offset=1.0) if "norm" in path else stored
    for path, stored in GGUF.items()}
