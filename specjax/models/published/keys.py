"""The keys of a published configuration, of which none may be overlooked."""

from collections.abc import Mapping
from typing import Any

# What training, generation, other tasks and other libraries note in it. It
# says nothing about what the model computes.
_HARMLESS = frozenset("""
    _attn_implementation _attn_implementation_autoset _name_or_path _num_labels
    add_bos_token architectures attention_dropout attn_implementation attn_pdrop
    auto_map bos_token_id cache_implementation chunk_size_feed_forward
    classifier_dropout do_sample dtype embd_pdrop embedding_dropout eos_token_id
    finetuning_task gradient_checkpointing hidden_dropout id2label
    initializer_range is_decoder is_llama_config keys_to_ignore_at_inference
    label2id max_length min_length model_type n_ctx num_labels output_attentions
    output_hidden_states pad_token_id pretraining_tp problem_type
    reorder_and_upcast_attn repetition_penalty resid_pdrop return_dict
    sep_token_id summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj task_specific_params
    temperature tokenizer_class top_k top_p torch_dtype torchscript
    transformers.js_config transformers_version unk_token_id unsloth_fixed
    unsloth_version use_cache
""".split())
_OFF = (None, False, 0, "", [], {})


class Keys:
  """A configuration that remembers which of its keys were asked for.

  Attributes:
    context_length: the tokens that the caller wants to be possible, or None.
    asked: the keys that were asked for.
  """

  def __init__(self, given: Mapping[str, Any], source: str,
               defaults: Mapping[str, Any] | None = None,
               context_length: int | None = None) -> None:
    """Takes a configuration.

    Args:
      given: its keys and values.
      source: what errors call it.
      defaults: values of keys that it may leave out.
      context_length: see the class.
    """
    self._given, self._defaults = given, defaults or {}
    self._source = source
    self.context_length = context_length
    self.asked: set[str] = set()

  def __call__(self, name: str, otherwise: Any = None) -> Any:
    """A value, that of the architecture, or `otherwise` where it is None."""
    self.asked.add(name)
    value = self._given.get(name, self._defaults.get(name))
    return otherwise if value is None else value

  def size(self, name: str) -> int:
    """A whole number that must be there.

    Raises:
      ValueError: it is missing, or something else.
    """
    value = self(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
      raise ValueError(f"{self._source} has {value!r} for {name}; a whole "
                       "number of at least 1 is needed")
    return value

  def choice(self, name: str, choices: Mapping[Any, Any]) -> Any:
    """What a value stands for.

    Raises:
      ValueError: it is none of `choices`.
    """
    value = self(name)
    if value not in choices:
      raise ValueError(f"{self._source} has {value!r} for {name}; specjax "
                       f"knows {', '.join(map(str, choices))}")
    return choices[value]

  def refuse(self, name: str, value: Any) -> None:
    """Raises a `ValueError` about a value that is not understood."""
    text = repr(value)
    text = text if len(text) < 60 else text[:60] + "..."
    raise ValueError(
        f"{self._source} has {text} for {name}, which specjax does not know "
        "for this architecture and which may change what the model computes; "
        "use another model, or take the key out if it does not")

  def refuse_others(self) -> None:
    """Raises a `ValueError` if a key was neither asked for nor is harmless.

    A key that is off (null, false, 0 or empty) changes nothing.
    """
    for name, value in self._given.items():
      if (name not in self.asked and name not in _HARMLESS
          and value not in _OFF):
        self.refuse(name, value)
