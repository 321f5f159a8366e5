"""Tables of tensor names per architecture.

A table maps the path of a module of `Transformer` to a `Stored`. `{i}` is the
number of the layer. Some Hugging Face files have a prefix (`model.`,
`transformer.`, `gpt_neox.`) before the names. The tables omit the prefix.
"""

import dataclasses

from specjax.models.tensor_layouts import Alternating
from specjax.models.tensor_layouts import apart
from specjax.models.tensor_layouts import Batched
from specjax.models.tensor_layouts import by_head
from specjax.models.tensor_layouts import delta_apart
from specjax.models.tensor_layouts import delta_by_head
from specjax.models.tensor_layouts import Each
from specjax.models.tensor_layouts import gate_apart
from specjax.models.tensor_layouts import gate_stacked
from specjax.models.tensor_layouts import interleaved
from specjax.models.tensor_layouts import Same
from specjax.models.tensor_layouts import stacked
from specjax.models.tensor_layouts import Stored
from specjax.models.tensor_layouts import Table
from specjax.models.tensor_layouts import table
from specjax.models.tensor_layouts import Taps
from specjax.models.tensor_layouts import turned


def decoder_layer(layer: str, before: str = "", number: str = "{i}") -> Table:
  """Returns the table of a decoder layer, with the tensor names of Llama.

  Args:
    layer: name of the layer in files, such as "layers.{i}".
    before: prefix of the paths of the layer's modules.
    number: number of the layer in the paths of the layer's modules.
  """
  attention, mlp = f"{before}attention_{number}", f"{before}mlp_{number}"
  parts = lambda *names: tuple(f"{layer}.{name}" for name in names)
  return table({
      f"{before}attention_norm_{number}": f"{layer}.input_layernorm",
      f"{before}mlp_norm_{number}": f"{layer}.post_attention_layernorm",
      f"{attention}.qkv": Stored(parts(
          "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), apart),
      f"{attention}.out": f"{layer}.self_attn.o_proj",
      f"{attention}.query_norm": f"{layer}.self_attn.q_norm",
      f"{attention}.key_norm": f"{layer}.self_attn.k_norm",
      f"{mlp}.gate_up": Stored(parts("mlp.gate_proj", "mlp.up_proj"),
                               gate_apart),
      f"{mlp}.down": f"{layer}.mlp.down_proj",
  })


LLAMA = decoder_layer("layers.{i}") | table({
    "embedding": "embed_tokens", "final_norm": "norm", "head": "lm_head"})
GEMMA_2 = LLAMA | table({
    "attention_post_norm_{i}": "layers.{i}.post_attention_layernorm",
    "mlp_norm_{i}": "layers.{i}.pre_feedforward_layernorm",
    "mlp_post_norm_{i}": "layers.{i}.post_feedforward_layernorm",
})
GEMMA_4 = GEMMA_2 | table({
    "layer_embedding": "embed_tokens_per_layer",
    "layer_projection": Stored(("per_layer_model_projection",), by_head),
    "layer_projection_norm": "per_layer_projection_norm",
    "end_{i}.gate": "layers.{i}.per_layer_input_gate",
    "end_{i}.out": "layers.{i}.per_layer_projection",
    "end_{i}.norm": "layers.{i}.post_per_layer_input_norm",
    "end_{i}.factor": Same(("layers.{i}.layer_scalar",), ending=""),
})
OLMO_2 = LLAMA | table({
    "attention_post_norm_{i}": "layers.{i}.post_attention_layernorm",
    "mlp_post_norm_{i}": "layers.{i}.post_feedforward_layernorm",
})
PHI_3 = LLAMA | table({
    "attention_{i}.qkv": Stored(("layers.{i}.self_attn.qkv_proj",), stacked),
    "mlp_{i}.gate_up": Stored(("layers.{i}.mlp.gate_up_proj",), gate_stacked),
})
LFM_2 = LLAMA | table({
    "final_norm": "embedding_norm",
    "attention_norm_{i}": "layers.{i}.operator_norm",
    "mlp_norm_{i}": "layers.{i}.ffn_norm",
    "attention_{i}.out": "layers.{i}.self_attn.out_proj",
    "attention_{i}.query_norm": "layers.{i}.self_attn.q_layernorm",
    "attention_{i}.key_norm": "layers.{i}.self_attn.k_layernorm",
    "mlp_{i}.gate_up": Stored((
        "layers.{i}.feed_forward.w1", "layers.{i}.feed_forward.w3"),
                              gate_apart),
    "mlp_{i}.down": "layers.{i}.feed_forward.w2",
    "conv_{i}.inputs": Stored(("layers.{i}.conv.in_proj",), by_head),
    "conv_{i}.taps": Taps(("layers.{i}.conv.conv",)),
    "conv_{i}.out": "layers.{i}.conv.out_proj",
})
_DELTA = "layers.{i}.linear_attn."
QWEN_3_5 = LLAMA | table({
    "delta_{i}.inputs": Stored(tuple(_DELTA + f"in_proj_{part}" for part in (
        "qkv", "z", "b", "a")), delta_apart),
    "delta_{i}.taps": Taps((_DELTA + "conv1d",)),
    "delta_{i}.rate": Same((_DELTA + "A_log",), ending="", wide=True),
    "delta_{i}.rate_bias": Same((_DELTA + "dt_bias",), ending=""),
    "delta_{i}.norm": _DELTA + "norm",
    "delta_{i}.out": _DELTA + "out_proj",
})


def _experts(router: str, experts: str, gate: str, up: str, down: str
             ) -> Table:
  """Returns the table of experts with one matrix each, of layer `{i}`."""
  layer, one = "layers.{i}.", f"layers.{{i}}.{experts}.{{}}."
  return table({
      "mlp_{i}.router": layer + router,
      "mlp_{i}.expert_gate_up": Each((one + gate, one + up)),
      "mlp_{i}.expert_down": Each((one + down,))})


MIXTRAL = LLAMA | _experts("block_sparse_moe.gate", "block_sparse_moe.experts",
                           "w1", "w3", "w2")
EXPERTS = LLAMA | _experts(
    "mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj") | table({
        "mlp_{i}.choice_bias": Stored((
            "layers.{i}.mlp.gate.e_score_correction_bias",), ending="",
                                       wide=True),
        "mlp_{i}.shared.gate_up": Stored((
            "layers.{i}.mlp.shared_experts.gate_proj",
            "layers.{i}.mlp.shared_experts.up_proj"), gate_apart),
        "mlp_{i}.shared.down": "layers.{i}.mlp.shared_experts.down_proj"})
_SHARED_EXPERT = "layers.{i}.mlp.shared_expert"
QWEN_EXPERTS = EXPERTS | table({
    "mlp_{i}.shared.gate_up": Stored((
        f"{_SHARED_EXPERT}.gate_proj", f"{_SHARED_EXPERT}.up_proj"),
                                     gate_apart),
    "mlp_{i}.shared.down": f"{_SHARED_EXPERT}.down_proj",
    "mlp_{i}.shared_gate": Stored((f"{_SHARED_EXPERT}_gate",), turned)})
QWEN_3_5_EXPERTS = QWEN_EXPERTS | QWEN_3_5
QWEN_3_NEXT = QWEN_3_5_EXPERTS | table({
    "delta_{i}.inputs": Stored((
        _DELTA + "in_proj_qkvz", _DELTA + "in_proj_ba"), delta_by_head),
})
# The same experts in files that store those of a layer in one tensor.
FUSED_EXPERTS = table({
    "mlp_{i}.expert_gate_up": Batched((
        "layers.{i}.mlp.experts.gate_up_proj",), ending=""),
    "mlp_{i}.expert_down": Batched((
        "layers.{i}.mlp.experts.down_proj",), ending="")})
GPT_OSS = LLAMA | table({
    "attention_{i}.sinks": Same(("layers.{i}.self_attn.sinks",), ending=""),
    "mlp_{i}.router": "layers.{i}.mlp.router",
    "mlp_{i}.router_bias": "layers.{i}.mlp.router",
    **{f"mlp_{{i}}.expert_{part}{rest}": layout((
        f"layers.{{i}}.mlp.experts.{part}_proj{rest}",), ending="")
       for part, layout in (("gate_up", Alternating), ("down", Same))
       for rest in ("", "_bias")}})
_SHARED = Stored(("layers.{i}.shared_mlp.input_linear",), gate_stacked)
GRANITE_EXPERTS = LLAMA | table({
    "mlp_{i}.router": "layers.{i}.block_sparse_moe.router.layer",
    "mlp_{i}.expert_gate_up": Batched((
        "layers.{i}.block_sparse_moe.input_linear",)),
    "mlp_{i}.expert_down": Batched((
        "layers.{i}.block_sparse_moe.output_linear",)),
    "mlp_{i}.shared.gate_up": _SHARED,
    "mlp_{i}.shared.down": "layers.{i}.shared_mlp.output_linear",
    # Granite 4 without experts has only the shared MLP.
    "mlp_{i}.gate_up": _SHARED,
    "mlp_{i}.down": "layers.{i}.shared_mlp.output_linear"})
GPT_2 = table({
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
GPT_NEOX = table({
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
GGUF = table({
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
# Gemma's norms multiply by 1 + scale. The parameter is scale, but GGUF files
# store 1 + scale.
GGUF_GEMMA = {
    path: dataclasses.replace(stored, offset=1.0) if "norm" in path else stored
    for path, stored in GGUF.items()}
