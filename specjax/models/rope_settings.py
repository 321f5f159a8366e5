"""Rotary positions of published configurations.

The formulas are those of transformers, so equal keys give equal frequencies.
The type "dynamic" is read as no scaling: it scales only for sequences longer
than the context length, and specjax rejects such sequences.
"""

from collections.abc import Collection
from collections.abc import Mapping
import dataclasses
import math
from typing import Any

from specjax.models.configuration import TransformerConfig
from specjax.models.configuration_keys import is_number
from specjax.models.configuration_keys import Keys
from specjax.models.rotary import RopeScaling

Fields = dict[str, Any]
_ORIGINAL = "original_max_position_embeddings"


def read_rope(keys: Keys, theta: str = "rope_theta",
              fraction: str | None = None, ignored: Collection[str] = (),
              growth: bool = False
              ) -> dict[str, Any]:
  """Returns the fields of `TransformerConfig` for rotary positions.

  Args:
    keys: the published configuration. It may contain `rope_parameters`
      (transformers 5), `rope_scaling` (earlier versions), or both with equal
      values.
    theta: name of the key for the base.
    fraction: name of the key for the rotated share of a head, or None if the
      architecture has no such key.
    ignored: names of settings that have no effect on a text, such as the
      division of the frequencies over the axes of an image.
    growth: True if the architecture has `RopeScaling.query_growth`.

  Raises:
    ValueError: the type of scaling or one of its keys is unknown, or a key has
      two different values.
  """
  given = _merged(keys, {place: {
      name: value for name, value in keys.mapping(place).items()
      if name not in ignored} for place in ("rope_parameters", "rope_scaling")},
                  _ORIGINAL, theta, *([fraction] if fraction else []))
  base = given.pop("rope_theta", None) or keys.number(theta, positive=True)
  share = given.pop("partial_rotary_factor", None)
  if fraction:
    share = share or keys.number(fraction, 1.0, positive=True)
  elif share not in (None, 1):
    keys.refuse("partial_rotary_factor", share)
  by = given.pop("llama_4_scaling_beta", 0.0) if growth else 0.0
  if growth:
    given.pop("max_position_embeddings", None)  # a copy of the outer key
  scaling, length = _scaling(keys, given)
  if by:
    if scaling is None or not scaling.original_length:
      keys.refuse("llama_4_scaling_beta", by)
    scaling = dataclasses.replace(scaling, query_growth=float(by))
  return dict(rope_theta=float(base), rope_scaling=scaling,
              rope_fraction=share or 1.0, context_length=length)


def read_two_ropes(keys: Keys, local: str = "rope_local_base_freq"
                   ) -> dict[str, Any]:
  """Returns the fields of `read_rope`, for models with two rotary bases.

  Layers with a window have a separate base (Gemma 3) and no scaling.

  Args:
    keys: the published configuration.
    local: name of the key for the base of layers with a window, outside of
      `rope_parameters`.
  """
  place, local_place = (f"rope_parameters.{name}" for name in (
      "full_attention", "sliding_attention"))
  given = keys.mapping("rope_parameters")
  for name in given.keys() - {"full_attention", "sliding_attention"}:
    keys.refuse(f"rope_parameters.{name}", given[name])
  parts = Keys(given, keys.source)
  full = _merged(keys, {place: parts.mapping("full_attention"),
                        "rope_scaling": keys.mapping("rope_scaling")},
                 _ORIGINAL, "rope_theta")
  of_windows = _merged(keys, {local_place: parts.mapping("sliding_attention")})
  base = full.pop("rope_theta", None) or keys.number(
      "rope_theta", positive=True)
  local_base = of_windows.pop("rope_theta", None)
  beside = keys.number(local, local_base, positive=True)
  if local_base is not None and keys.said(local):
    keys.agreed({local: beside, f"{local_place}.rope_theta": local_base})
  if _kind(of_windows) != "default" or of_windows:
    keys.refuse("rope_parameters.sliding_attention", of_windows)
  scaling, length = _scaling(keys, full)
  return dict(rope_theta=float(base),
              local_rope_theta=float(local_base or beside),
              rope_scaling=scaling, context_length=length)


def _merged(keys: Keys, parts: Mapping[str, Mapping[str, Any]], *beside: str
            ) -> Fields:
  """Returns the union of several objects of rope scaling.

  Raises `ValueError` for an invalid value.

  Args:
    keys: the published configuration.
    parts: objects of rope scaling, by their place in the configuration.
    *beside: keys that may also be at the top level of the configuration.
  """
  given = keys.merged({place: _spelled(part) for place, part in parts.items()},
                      beside)
  for name, value in given.items():
    is_valid, form = _FORMS.get(name, _NUMBER)
    if not is_valid(value):
      place = next((place for place, x in keys.said(name).items()
                    if x == value), f"{name} of rope scaling")
      keys.needs(place, value, form)
  return given


def _is_positive(value: Any) -> bool:
  return is_number(value) and value > 0


def _are_positive(values: Any) -> bool:
  return isinstance(values, list) and all(map(_is_positive, values))


# Checks of the values of rope scaling, with the required form. Values of other
# keys must be numbers.
_NUMBER = is_number, "a number"
_POSITIVE = _is_positive, "a number above 0"
_LIST = _are_positive, "a list of numbers above 0"
_FORMS = dict.fromkeys((
    "rope_theta", "partial_rotary_factor", "factor", "attention_factor",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", _ORIGINAL),
    _POSITIVE) | {
        "rope_type": (lambda value: isinstance(value, str), "a string"),
        "short_factor": _LIST, "long_factor": _LIST,
        "truncate": (lambda value: isinstance(value, bool), "true or false")}


def _spelled(part: Mapping[str, Any]) -> Fields:
  """Returns the settings with "longrope" instead of Phi-3's old names of it."""
  old = ("su", "yarn") if "short_factor" in part else ("su",)
  return {name: "longrope" if name in ("type", "rope_type") and value in old
          else value for name, value in part.items()}


def _kind(given: Fields) -> str:
  return given.pop("rope_type", "default")


def _scaling(keys: Keys, given: Fields) -> tuple[RopeScaling | None, int]:
  """Returns the scaling and the context length.

  Args:
    keys: the published configuration.
    given: settings of rope scaling. Each setting is removed from the dict when
      it is read. A remaining setting is an error.
  """
  kind = _kind(given)
  length = keys.size("max_position_embeddings")
  original = given.pop(_ORIGINAL, None) or keys.size(_ORIGINAL, length)
  if kind not in _KINDS:
    keys.needs("rope_type of rope scaling", kind,
               f"one of {', '.join(_KINDS)}, which specjax supports")
  long = (keys.context_length or 0) > original
  try:
    values = _KINDS[kind](given, length / original, original, long)
  except KeyError as e:
    raise ValueError(f"{keys.source} has no {e.args[0]} for rope scaling {kind}"
                     ", which requires it; download the file again") from None
  for name, value in given.items():
    keys.refuse(f"{name} of rope scaling {kind}", value)
  # "longrope" has factors for short and for long sequences. Keys in the cache
  # are already rotated, so the factors of a growing sequence cannot change. If
  # the short factors are used, the context length is limited to the original
  # length.
  return values, min(length, original) if kind == "longrope" and not long else (
      length)


def _none(given: Fields, ratio: float, original: int, long: bool
          ) -> RopeScaling | None:
  del ratio, original, long
  given.pop("factor", None)


def _linear(given: Fields, ratio: float, original: int, long: bool
            ) -> RopeScaling:
  del ratio, original, long
  return RopeScaling(kind="linear", factor=given.pop("factor"))


def _llama3(given: Fields, ratio: float, original: int, long: bool
            ) -> RopeScaling:
  del ratio, long
  return RopeScaling(
      kind="llama3", factor=given.pop("factor"), original_length=original,
      low_frequency_factor=given.pop("low_freq_factor"),
      high_frequency_factor=given.pop("high_freq_factor"))


def _yarn(given: Fields, ratio: float, original: int, long: bool
          ) -> RopeScaling:
  del long
  factor = given.pop("factor", None) or ratio
  grown = lambda scale: 1 + 0.1 * scale * math.log(max(factor, 1))
  scale, below = (given.pop(name, None)
                  for name in ("mscale", "mscale_all_dim"))
  by_formula = grown(scale) / grown(below) if scale and below else grown(1)
  attention_factor = given.pop("attention_factor", None)
  truncate = given.pop("truncate", None)
  return RopeScaling(
      kind="yarn", factor=factor, original_length=original,
      beta_fast=given.pop("beta_fast", None) or 32.0,
      beta_slow=given.pop("beta_slow", None) or 1.0,
      truncate=truncate is None or truncate,
      attention_factor=float(by_formula if attention_factor is None
                             else attention_factor))


def _longrope(given: Fields, ratio: float, original: int, long: bool
              ) -> RopeScaling:
  factor = given.pop("factor", None) or ratio
  by_formula = (1.0 if factor <= 1 else
                math.sqrt(1 + math.log(factor) / math.log(original)))
  attention_factor = given.pop("attention_factor", None)
  factors = [given.pop("short_factor"), given.pop("long_factor")]
  return RopeScaling(
      kind="longrope", factors=factors[long],
      attention_factor=float(by_formula if attention_factor is None
                             else attention_factor))


def _proportional(given: Fields, ratio: float, original: int, long: bool
                  ) -> RopeScaling:
  del ratio, original, long
  return RopeScaling(
      kind="proportional", factor=given.pop("factor", 1.0),
      fraction=given.pop("partial_rotary_factor", 1.0))


_KINDS = {"default": _none, "dynamic": _none, "linear": _linear,
          "llama3": _llama3, "yarn": _yarn, "longrope": _longrope,
          "proportional": _proportional}


def write_rope(c: TransformerConfig) -> dict[str, Any] | None:
  """Returns the key `rope_scaling` for a configuration, or None.

  This function is the inverse of `read_rope`.
  """
  s = c.rope_scaling
  if s is None:
    return None
  kind = {"rope_type": s.kind}
  if s.kind == "linear":
    return kind | {"factor": s.factor}
  if s.kind == "proportional":
    return kind | {"factor": s.factor, "partial_rotary_factor": s.fraction}
  if s.kind == "longrope":
    return kind | {"short_factor": [*s.factors], "long_factor": [*s.factors],
                   "attention_factor": s.attention_factor,
                   "original_max_position_embeddings": c.context_length}
  kind |= {"factor": s.factor,
           "original_max_position_embeddings": s.original_length}
  if s.kind == "llama3":
    return kind | {"low_freq_factor": s.low_frequency_factor,
                   "high_freq_factor": s.high_frequency_factor}
  growth = {"llama_4_scaling_beta": s.query_growth} if s.query_growth else {}
  return kind | growth | {
      "beta_fast": s.beta_fast, "beta_slow": s.beta_slow,
      "truncate": s.truncate, "attention_factor": s.attention_factor}
