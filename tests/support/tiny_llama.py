"""A tiny chat model as it is published: a Llama directory made by hand."""

import json

import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers

WORDS = ("what", "is", "a", "draft", "token", "root", "user", "assistant",
         "system")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>"
    "assistant\n{% endif %}")
_WIDTH, _LAYERS, _HEADS, _INNER, _CONTEXT = 16, 2, 2, 24, 256


def write_llama(directory, *, seed=0, words=WORDS, template=TEMPLATE):
  """Random weights, a byte-level vocabulary with `words`, two ends of a text.

  There is no token that begins a text.
  """
  directory.mkdir()
  vocab_size = _write_tokenizer(directory, words, template)
  rng = np.random.default_rng(seed)
  normal = lambda *shape: (0.3 * rng.normal(size=shape)).astype(np.float32)
  ones = np.ones(_WIDTH, np.float32)
  tensors = {"model.embed_tokens.weight": normal(vocab_size, _WIDTH),
             "model.norm.weight": ones}
  for i in range(_LAYERS):
    layer = f"model.layers.{i}."
    tensors |= {
        **{f"{layer}self_attn.{name}_proj.weight": normal(_WIDTH, _WIDTH)
           for name in "qkvo"},
        **{f"{layer}mlp.{name}_proj.weight": normal(_INNER, _WIDTH)
           for name in ("gate", "up")},
        f"{layer}mlp.down_proj.weight": normal(_WIDTH, _INNER),
        f"{layer}input_layernorm.weight": ones,
        f"{layer}post_attention_layernorm.weight": ones}
  safetensors.numpy.save_file(
      tensors, directory / "model.safetensors", {"format": "pt"})
  ends = [i for i, name in enumerate(SPECIAL) if name != "<|im_start|>"]
  _write(directory / "generation_config.json", {"eos_token_id": ends})
  _write(directory / "config.json", {
      "architectures": ["LlamaForCausalLM"], "model_type": "llama",
      "vocab_size": vocab_size, "hidden_size": _WIDTH,
      "intermediate_size": _INNER, "num_hidden_layers": _LAYERS,
      "num_attention_heads": _HEADS, "num_key_value_heads": _HEADS,
      "max_position_embeddings": _CONTEXT, "rms_norm_eps": 1e-5,
      "rope_theta": 10000.0, "hidden_act": "silu", "attention_bias": False,
      "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 2,
      "torch_dtype": "float32"})
  return directory


def _write_tokenizer(directory, words, template):
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  tokens, merges = [*SPECIAL, *alphabet], []
  for word in words:  # each grows from its left end
    for end in range(2, len(word) + 1):
      if word[:end] not in tokens:
        tokens.append(word[:end])
        merges.append((word[:end - 1], word[end - 1]))
  backend = tokenizers.Tokenizer(models.BPE(
      {token: i for i, token in enumerate(tokens)}, merges))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens(
      [tokenizers.AddedToken(name, special=True) for name in SPECIAL])
  backend.save(str(directory / "tokenizer.json"))
  _write(directory / "tokenizer_config.json", {
      "tokenizer_class": "GPT2TokenizerFast", "bos_token": None,
      "eos_token": "<|im_end|>",
      **({"chat_template": template} if template else {})})
  return len(tokens)


def _write(path, value):
  path.write_text(json.dumps(value))
