"""Keys of a published configuration. Unknown keys raise an error."""

from collections.abc import Iterable
from collections.abc import Mapping
import math
import re
from typing import Any

from specjax.models.safetensors_files import NOT_QUANTIZED

# Keys of training, generation, other tasks and other libraries. They do not
# change the model's output, so they may have any value.
_HARMLESS = frozenset("""
    _attn_implementation _attn_implementation_autoset _name_or_path
    _num_labels add_bos_token architectures attention_dropout
    attention_probs_dropout_prob attn_implementation attn_pdrop auto_map
    bad_words_ids begin_suppress_tokens block_mlp_init_scale
    block_out_init_scale block_use_xavier_init bos_token_id
    cache_implementation chunk_size_feed_forward classifier_dropout
    conv_use_xavier_init custom_pipelines
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    embd_pdrop embedding_dropout encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id gradient_checkpointing hidden_dropout
    hidden_dropout_prob id2label initializer_range is_decoder
    is_llama_config keys_to_ignore_at_inference label2id length_penalty
    max_length max_sequence_length medusa_num_heads medusa_num_layers
    min_length model_type n_ctx no_repeat_ngram_size num_beam_groups
    num_beams num_labels num_nextn_predict_layers num_return_sequences
    output_attentions output_hidden_states output_past output_scores
    pad_token_id predict_special_tokens prefix pretraining_tp problem_type
    remove_invalid_values reorder_and_upcast_attn repetition_penalty
    resid_pdrop return_dict return_dict_in_generate sep_token_id
    summary_activation summary_first_dropout summary_proj_to_labels
    summary_type summary_use_proj suppress_tokens task_specific_params
    temperature tokenizer_class top_k top_p torch_dtype torchscript
    transformers.js_config transformers_version typical_p unk_token_id
    unsloth_fixed unsloth_version use_bfloat16 use_cache
""".split())
_OFF = (None, False, 0, "", [], {})
# Keys for which only one value is accepted. It has no effect, and any other
# value raises an error.
_PLAIN = {"is_causal": True, "attention.causal": True,
          "partial_rotary_factor": 1, "block_use_swiglu": True,
          "use_pos_enc": True,
          "rope.scaling.factor": 1, "rope.scaling.attn_factor": 1}
# Synonyms. If a file contains two names of a key, their values must be equal.
_NAMES = (
    ("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"), ("intermediate_size", "n_inner"),
    ("max_position_embeddings", "n_positions"),
    ("layer_norm_eps", "layer_norm_epsilon"), ("rope_type", "type"),
    ("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct"),
    ("sliding_window", "sliding_window_size"),
    ("tie_word_embeddings", "tie_embedding"),
    ("sliding_window_pattern", "_sliding_window_pattern"),
    ("num_experts", "num_local_experts", "n_routed_experts"),
    ("num_experts_per_tok", "experts_per_token"),
    ("layer_types", "layers_block_type"),
)
_SYNONYMS = {name: names for names in _NAMES for name in names}
# For these keys, null means "off". For other keys, null means a missing key.
_OFF_BY_NULL = ("sliding_window",)
_NO_ROPE = ("the architecture of layers without rotary positions is smollm3; "
            "use another model, or correct model_type")
_ADVICE = {
    "no_rope_layers": _NO_ROPE, "no_rope_layer_interval": _NO_ROPE,
    # Keys with lists of layers. If a user removed such a key, a drafter would
    # read other layers.
    "layers": "if it lists the target's layers that a drafter reads, write it "
              "as eagle_aux_hidden_state_layer_ids, where i is the input of "
              "layer i; do not take it out",
}
_NUMBERS = re.compile(r"layers?_(ids|ind|num|to_)|aux_hidden|capture")


class Keys:
  """Published configuration that records the keys read from it.

  After reading, `refuse_others` rejects unknown keys. A key may have several
  names, and may also be in an enclosing configuration. All its values must then
  be equal.

  Attributes:
    source: name of the configuration in errors.
    context_length: context length that the caller requires, or None.
    asked: keys that were read, by the names used by the caller.
  """

  def __init__(self, given: Mapping[str, Any], source: str,
               defaults: Mapping[str, Any] | None = None,
               context_length: int | None = None, place: str = "",
               outer: "Keys | None" = None) -> None:
    """Stores a configuration.

    Args:
      given: the configuration, a mapping from keys to values.
      source: name of the configuration in errors.
      defaults: values of keys that the configuration may omit.
      context_length: context length that the caller requires, or None.
      place: key of this configuration in `outer`.
      outer: the enclosing configuration, which may have the same keys, or None.
    """
    self._given, self._defaults = given, defaults or {}
    self.source = source
    self.context_length = context_length
    self.asked: set[str] = set()
    self._trusted: dict[str, Any] = {}
    self._known: set[str] = set()  # names of keys that were read or accepted
    self._place, self._outer = place, outer

  def __call__(self, name: str, otherwise: Any = None) -> Any:
    """Returns the value of a key.

    A missing key has its value of `defaults`, or `otherwise` if `defaults` has
    none. A null value means `otherwise`.

    Raises:
      ValueError: the configuration has two different values for the key.
    """
    self.asked.add(name)
    values, names = self.said(name), _SYNONYMS.get(name, (name,))
    if name in self._trusted:
      value = self._trusted[name]
    elif values:
      value = self.agreed(values)
    elif any(x in self._given for x in names):
      value = None
    else:
      value = next((self._defaults[x] for x in names if x in self._defaults),
                   None)
    return otherwise if value is None else value

  def said(self, name: str) -> dict[str, Any]:
    """Returns all values of a key in the configuration.

    The result is a dict from names, with the place as prefix, to values.
    """
    names = _SYNONYMS.get(name, (name,))
    self._known.update(names)
    before = f"{self._place}." if self._place else ""
    values = {before + x: self._given[x] for x in names
              if x in self._given and (
                  self._given[x] is not None or x in _OFF_BY_NULL)}
    return values if self._outer is None else self._outer.said(name) | values

  def agreed(self, values: Mapping[str, Any]) -> Any:
    """Returns the common value of a key.

    Args:
      values: values of the key by name or place, at least one.

    Raises:
      ValueError: the values differ.
    """
    (name, value), *others = values.items()
    for other, another in others:
      if another != value:
        raise ValueError(
            f"{self.source} has {_short(value)} for {name} and "
            f"{_short(another)} {'in' if '.' in other else 'for'} {other}; the "
            "two must be equal: remove the wrong one")
    return value

  def merged(self, parts: Mapping[str, Mapping[str, Any]],
             beside: Iterable[str] = ()) -> dict[str, Any]:
    """Returns the union of several objects of the configuration.

    The result contains a key with synonyms under its first name.

    Args:
      parts: objects (JSON mappings) by place. Null values are omitted.
      beside: keys that may also be at the top level, outside the objects.

    Raises:
      ValueError: a key has two different values.
    """
    first = lambda name: _SYNONYMS.get(name, (name,))[0]
    found = {}
    for name in beside:
      self.asked.add(name)
      found.setdefault(first(name), {}).update(self.said(name))
    for place, part in parts.items():
      for name, value in part.items():
        if value is not None:
          found.setdefault(first(name), {})[f"{place}.{name}"] = value
    return {name: self.agreed(values) for name, values in found.items()
            if values}

  def ignore(self, *names: str) -> None:
    """Accepts keys without reading them, because they have no effect here."""
    self._known.update(names)

  def trust(self, name: str, value: Any) -> None:
    """Replaces a key's value, for example by a size of the tensors."""
    self._trusted[name] = value
    self.said(name)

  def size(self, name: str, otherwise: int | None = None) -> int:
    """Returns the value of a key, an integer of at least 1.

    Raises:
      ValueError: the value is missing or of another type.
    """
    value = self(name, otherwise)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
      self.needs(name, value, "a whole number of at least 1")
    return value

  def number(self, name: str, otherwise: float | None = None, *,
             positive: bool = False) -> float:
    """Returns the value of a key, a number.

    Raises:
      ValueError: the value is missing, of another type, or `positive` is set
        and the value is not above 0.
    """
    value = self(name, otherwise)
    if not is_number(value) or (positive and value <= 0):
      self.needs(name, value, "a number" + positive * " above 0")
    return value

  def switch(self, name: str, otherwise: bool) -> bool:
    """Returns the value of a key, a boolean.

    Raises:
      ValueError: the value is of another type.
    """
    value = self(name, otherwise)
    if not isinstance(value, bool):
      self.needs(name, value, "true or false")
    return value

  def mapping(self, name: str) -> dict[str, Any]:
    """Returns the value of a key, an object. It is empty if the key is missing.

    Raises:
      ValueError: the value is of another type.
    """
    value = self(name, {})
    if not isinstance(value, Mapping):
      self.needs(name, value, "an object of keys and values")
    return dict(value)

  def whole_numbers(self, name: str) -> tuple[int, ...] | None:
    """Returns the value of a key, a list of integers, as a tuple.

    The result is None if the key is missing.

    Raises:
      ValueError: the value is of another type.
    """
    return whole_numbers(self.source, name, self(name))

  def needs(self, name: str, value: object, what: str) -> None:
    """Raises `ValueError` for a value that is not of the form `what`."""
    _needs(self.source, name, value, what)

  def choice(self, name: str, choices: Mapping[str, Any]) -> Any:
    """Returns `choices[value]` for the value of a key.

    Raises:
      ValueError: the value is not in `choices`.
    """
    value = self(name)
    if not isinstance(value, str) or value not in choices:
      raise ValueError(f"{self.source} has {_short(value)} for {name}; specjax "
                       f"supports {', '.join(choices)}")
    return choices[value]

  def refuse(self, name: str, value: Any) -> None:
    """Raises `ValueError` for a value that specjax does not support."""
    names = [name, *value] if isinstance(value, Mapping) else [name]
    numbers = "layer" in name and isinstance(value, list) and value and all(
        map(is_number, value))
    advice = _ADVICE.get(name) or _ADVICE.get(
        "layers" if numbers or any(map(_NUMBERS.search, map(str, names))) else
        "", "use another model, or take the key out if it does not")
    raise ValueError(
        f"{self.source} has {_short(value)} for {name}, which specjax does not "
        "support for this architecture and which may change the model's "
        f"output; {advice}")

  def refuse_quantized(self) -> None:
    """Raises `ValueError` for quantised weights, unless they are in MXFP4."""
    # mlx-lm writes both keys with equal values, which do not name the method.
    for name, method in (("quantization", "mlx"), ("quantization_config", "")):
      value = self._given.get(name)
      if isinstance(value, Mapping):
        method = value.get("quant_method") or method
      if value and method == "mxfp4":
        self.ignore(name)
      elif value:
        raise ValueError(
            f"{self.source} has {_short(value)} for {name}, so the weights are "
            f"quantised{f' by {method}' if method else ''}; {NOT_QUANTIZED}")

  def refuse_others(self) -> None:
    """Raises `ValueError` if a key was not read and may change the output.

    A value that is null, false, 0 or empty is assumed to have no effect, except
    for the keys of `_PLAIN`.
    """
    self.refuse_quantized()
    for name, value in self._given.items():
      if name in self._known or name in _HARMLESS:
        continue
      if name in _PLAIN:
        plain = value is None or value == _PLAIN[name]
      else:
        plain = value in _OFF
      if not plain:
        self.refuse(name, value)


def whole_numbers(source: str, name: str, value: Any
                  ) -> tuple[int, ...] | None:
  """Returns `value`, a list of integers or None, as a tuple or None.

  Args:
    source: name of the configuration in errors.
    name: name of the key.
    value: value of the key.

  Raises:
    ValueError: the value is of another type.
  """
  if value is not None and not (isinstance(value, list) and all(
      isinstance(x, int) and not isinstance(x, bool) for x in value)):
    _needs(source, name, value, "a list of whole numbers")
  return value and tuple(value)


def _needs(source: str, name: str, value: object, what: str) -> None:
  raise ValueError(f"{source} has {_short(value)} for {name}; it must be "
                   f"{what}")


def is_number(value: Any) -> bool:
  """Returns True for a finite int or float."""
  return (isinstance(value, int | float) and not isinstance(value, bool)
          and math.isfinite(value))


def _short(value: object) -> str:
  text = repr(value)
  return text if len(text) < 60 else text[:60] + "..."
