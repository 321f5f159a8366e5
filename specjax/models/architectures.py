"""Published architectures, by the `model_type` of their configurations.

An `Architecture` converts published configuration keys to a
`TransformerConfig`, with the default values of transformers. It also contains
the names of the tensors.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
from typing import Any

from specjax.models import settings
from specjax.models import tensor_names
from specjax.models.configuration import TransformerConfig
from specjax.models.configuration_keys import Keys
from specjax.models.tensor_layouts import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
  """Description of a published architecture.

  Attributes:
    read: function from configuration keys to fields of `TransformerConfig`.
    names: table of the tensor names.
    transformers: class name in transformers.
    prefix: prefix of all tensor names except that of the head. Files may omit
      it.
    defaults: values of keys that a configuration may omit.
    tied: default value of the key `tie_word_embeddings`.
    even_width: True if transformers requires a width that is a multiple of the
      number of heads.
  """

  read: Callable[[Keys], dict[str, Any]]
  names: Table
  transformers: str
  prefix: str = "model."
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  tied: bool = False
  even_width: bool = False

  def config(self, keys: Keys, has_head: bool) -> TransformerConfig:
    """Returns the model configuration.

    Args:
      keys: the published configuration. An unknown key is an error.
      has_head: True if the file has a tensor for the LM head. If False, the
        embedding is the head, unless the configuration denies it.

    Raises:
      ValueError: a key is missing or unknown.
    """
    fields = self.read(keys)
    tied = keys.switch("tie_word_embeddings", self.tied or not has_head)
    keys.refuse_others()
    return without_idle_windows(
        TransformerConfig(**fields, tie_embeddings=tied))


def without_idle_windows(config: TransformerConfig) -> TransformerConfig:
  """Returns the configuration without windows of at least the context length.

  Such an attention window has no effect, but costs time. All windows remain if
  layers with a window have another rotary base.
  """
  if config.local_rope_theta is not None:
    return config
  windows = tuple(size if size < config.context_length else 0
                  for size in config.windows)
  return dataclasses.replace(config, windows=windows if any(windows) else ())


_SILU = dict(hidden_act="silu", rms_norm_eps=1e-6, rope_theta=1e4)
_GEMMA = dict(
    head_dim=256, hidden_act="gelu_pytorch_tanh", rms_norm_eps=1e-6,
    rope_theta=1e4, max_position_embeddings=8192)
_GEMMA_2 = _GEMMA | dict(
    hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256,
    sliding_window=4096, attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0)
_QWEN = _SILU | dict(max_position_embeddings=32768, max_window_layers=28,
                     sliding_window=4096)
_EXPERTS = _SILU | dict(num_experts_per_tok=2, num_experts=8)

_HYBRID = _SILU | dict(
    head_dim=256, partial_rotary_factor=0.25, max_position_embeddings=32768,
    linear_conv_kernel_dim=4, linear_key_head_dim=128,
    linear_value_head_dim=128, linear_num_key_heads=16,
    linear_num_value_heads=32)
_HYBRID_EXPERTS = _HYBRID | dict(
    num_key_value_heads=2, norm_topk_prob=True, moe_intermediate_size=512,
    shared_expert_intermediate_size=512)

ARCHITECTURES = {
    "llama": Architecture(
        read=settings.llama, names=tensor_names.LLAMA,
        transformers="LlamaForCausalLM", even_width=True,
        defaults=_SILU | dict(max_position_embeddings=2048)),
    "mistral": Architecture(
        read=settings.mistral, names=tensor_names.LLAMA,
        transformers="MistralForCausalLM",
        defaults=_SILU | dict(max_position_embeddings=131_072,
                              sliding_window=4096, num_key_value_heads=8)),
    "qwen2": Architecture(
        read=settings.qwen2, names=tensor_names.LLAMA,
        transformers="Qwen2ForCausalLM", defaults=_QWEN),
    "qwen3": Architecture(
        read=settings.qwen3, names=tensor_names.LLAMA,
        transformers="Qwen3ForCausalLM", defaults=_QWEN | dict(head_dim=128)),
    "mimo": Architecture(
        read=settings.mimo, names=tensor_names.LLAMA,
        transformers="MiMoForCausalLM", defaults=_QWEN),
    "smollm3": Architecture(
        read=settings.smollm3, names=tensor_names.LLAMA,
        transformers="SmolLM3ForCausalLM", tied=True, defaults=_SILU | dict(
            rope_theta=2e6, max_position_embeddings=32768,
            num_key_value_heads=4)),
    "ministral3": Architecture(
        read=settings.ministral3, names=tensor_names.LLAMA,
        transformers="Ministral3ForCausalLM", defaults=_SILU | dict(
            rms_norm_eps=1e-5, max_position_embeddings=262_144, head_dim=128,
            num_key_value_heads=8, rope_theta=1e6)),
    "granite": Architecture(
        read=settings.granite, names=tensor_names.LLAMA, even_width=True,
        transformers="GraniteForCausalLM",
        defaults=_SILU | dict(max_position_embeddings=2048)),
    "mixtral": Architecture(
        read=settings.mixtral, names=tensor_names.MIXTRAL,
        transformers="MixtralForCausalLM", defaults=_EXPERTS | dict(
            rms_norm_eps=1e-5, max_position_embeddings=131_072, rope_theta=1e6,
            num_key_value_heads=8)),
    "olmoe": Architecture(
        read=settings.olmoe, names=tensor_names.EXPERTS, even_width=True,
        transformers="OlmoeForCausalLM", defaults=_SILU | dict(
            rms_norm_eps=1e-5, max_position_embeddings=4096,
            num_experts_per_tok=8, num_experts=64)),
    "qwen2_moe": Architecture(
        read=settings.qwen2_moe, names=tensor_names.QWEN_EXPERTS,
        transformers="Qwen2MoeForCausalLM", defaults=_QWEN | dict(
            num_experts_per_tok=4, num_experts=60, moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632)),
    "qwen3_moe": Architecture(
        read=settings.qwen3_moe, names=tensor_names.EXPERTS,
        transformers="Qwen3MoeForCausalLM", defaults=_QWEN | dict(
            num_experts_per_tok=8, num_experts=128, moe_intermediate_size=768,
            num_key_value_heads=4)),
    "granitemoe": Architecture(
        read=settings.granitemoe, names=tensor_names.GRANITE_EXPERTS,
        transformers="GraniteMoeForCausalLM", even_width=True,
        defaults=_EXPERTS | dict(max_position_embeddings=2048)),
    "granitemoeshared": Architecture(
        read=settings.granitemoeshared, names=tensor_names.GRANITE_EXPERTS,
        transformers="GraniteMoeSharedForCausalLM", even_width=True,
        defaults=_EXPERTS | dict(max_position_embeddings=2048)),
    "granitemoehybrid": Architecture(
        read=settings.granitemoehybrid, names=tensor_names.GRANITE_EXPERTS,
        transformers="GraniteMoeHybridForCausalLM", even_width=True,
        defaults=_EXPERTS | dict(
            max_position_embeddings=2048, shared_intermediate_size=1024)),
    "glm4_moe": Architecture(
        read=settings.glm4_moe, names=tensor_names.EXPERTS,
        transformers="Glm4MoeForCausalLM", defaults=_SILU | dict(
            rms_norm_eps=1e-5, max_position_embeddings=131_072,
            partial_rotary_factor=0.5, num_experts_per_tok=8, num_experts=128,
            moe_intermediate_size=1408, num_key_value_heads=8)),
    "gpt_oss": Architecture(
        read=settings.gpt_oss, names=tensor_names.GPT_OSS,
        transformers="GptOssForCausalLM", defaults=dict(
            hidden_act="silu", rms_norm_eps=1e-5, rope_theta=1.5e5, head_dim=64,
            max_position_embeddings=131_072, num_key_value_heads=8,
            sliding_window=128, attention_bias=True, num_local_experts=128,
            num_experts_per_tok=4)),
    "olmo2": Architecture(
        read=settings.olmo2, names=tensor_names.OLMO_2,
        transformers="Olmo2ForCausalLM", defaults=_SILU | dict(
            rms_norm_eps=1e-5, max_position_embeddings=2048)),
    "olmo3": Architecture(
        read=settings.olmo3, names=tensor_names.OLMO_2,
        transformers="Olmo3ForCausalLM", defaults=_SILU | dict(
            rms_norm_eps=1e-5, max_position_embeddings=2048,
            sliding_window=4096, rope_theta=5e5)),
    "phi3": Architecture(
        read=settings.phi3, names=tensor_names.PHI_3,
        transformers="Phi3ForCausalLM", defaults=_SILU | dict(
            rms_norm_eps=1e-5, max_position_embeddings=4096,
            original_max_position_embeddings=4096)),
    "gemma": Architecture(
        read=settings.gemma, names=tensor_names.LLAMA,
        transformers="GemmaForCausalLM", defaults=_GEMMA, tied=True),
    "gemma2": Architecture(
        read=settings.gemma2, names=tensor_names.GEMMA_2,
        transformers="Gemma2ForCausalLM", tied=True, even_width=True,
        defaults=_GEMMA_2 | dict(num_key_value_heads=4)),
    # Configurations of models with image input omit even the sizes below.
    "gemma3_text": Architecture(
        read=settings.gemma3, names=tensor_names.GEMMA_2,
        transformers="Gemma3ForCausalLM", tied=True, even_width=True,
        defaults=_GEMMA_2 | dict(
            attn_logit_softcapping=None, final_logit_softcapping=None,
            vocab_size=262_208, num_attention_heads=8, num_key_value_heads=4,
            max_position_embeddings=131_072, rope_theta=1e6,
            rope_local_base_freq=1e4)),
    "gemma4_text": Architecture(
        read=settings.gemma4, names=tensor_names.GEMMA_4,
        transformers="Gemma4ForCausalLM", tied=True, defaults=dict(
            head_dim=256, global_head_dim=512, num_key_value_heads=4,
            hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-6,
            max_position_embeddings=131_072, sliding_window=512,
            hidden_size_per_layer_input=256, vocab_size=262_144,
            vocab_size_per_layer_input=262_144,
            rope_parameters=dict(
                full_attention=dict(rope_type="proportional", rope_theta=1e6,
                                    partial_rotary_factor=0.25),
                sliding_attention=dict(rope_theta=1e4)))),
    "lfm2": Architecture(
        read=settings.lfm2, names=tensor_names.LFM_2,
        transformers="Lfm2ForCausalLM", tied=True, even_width=True,
        defaults=dict(
            norm_eps=1e-5, rope_theta=1e6, conv_L_cache=3,
            num_key_value_heads=8, max_position_embeddings=128_000,
            block_multiple_of=256, block_ffn_dim_multiplier=1.0)),
    "qwen3_5_text": Architecture(
        read=settings.qwen3_5, names=tensor_names.QWEN_3_5,
        transformers="Qwen3_5ForCausalLM", defaults=_HYBRID | dict(
            num_key_value_heads=4)),
    "qwen3_5_moe_text": Architecture(
        read=settings.qwen3_5_moe, names=tensor_names.QWEN_3_5_EXPERTS,
        transformers="Qwen3_5MoeForCausalLM", defaults=_HYBRID_EXPERTS | dict(
            num_experts_per_tok=8, num_experts=256)),
    "qwen3_next": Architecture(
        read=settings.qwen3_next, names=tensor_names.QWEN_3_NEXT,
        transformers="Qwen3NextForCausalLM", defaults=_HYBRID_EXPERTS | dict(
            num_experts_per_tok=10, num_experts=512)),
    "gpt2": Architecture(
        read=settings.gpt2, names=tensor_names.GPT_2, prefix="transformer.",
        transformers="GPT2LMHeadModel", tied=True, defaults=dict(
            activation_function="gelu_new", layer_norm_epsilon=1e-5,
            scale_attn_weights=True, n_positions=1024)),
    "gpt_neox": Architecture(
        read=settings.gpt_neox, names=tensor_names.GPT_NEOX, prefix="gpt_neox.",
        transformers="GPTNeoXForCausalLM", even_width=True, defaults=dict(
            hidden_act="gelu", layer_norm_eps=1e-5, rotary_emb_base=1e4,
            rotary_pct=0.25, attention_bias=True, use_parallel_residual=True,
            max_position_embeddings=2048)),
}
