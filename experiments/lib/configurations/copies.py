"""Copies of a model with quantised weights or another cache."""

import dataclasses

from lib import models
import specjax as sj
from specjax.models import Pretrained

BITS = {"int8": 8, "int4": 4}
CACHES = "int8, int4, or streaming, such as streaming:4:252 (sinks:window)"


def quantized(model: Pretrained, kind: str | None, group: int | None = None
              ) -> Pretrained:
  """Returns the model with quantised weights.

  Args:
    model: language model.
    kind: "int8" or "int4". None: the model is not changed.
    group: number of inputs that share a scale. None: all inputs of a channel.
  """
  if kind is None:
    return model
  return dataclasses.replace(
      model, params=sj.models.quantize(model.params, BITS[kind], group))


def cache(flag: str, name: str) -> sj.caches.QuantizedKV | sj.caches.Streaming:
  """Returns the cache that a flag names.

  Raises:
    ValueError: the cache does not exist.
  """
  kind, *sizes = name.split(":")
  if kind in BITS and not sizes:
    return sj.caches.QuantizedKV(bits=BITS[kind])
  if kind == "streaming" and len(sizes) in (0, 2) and all(
      size.isdecimal() for size in sizes):
    return sj.caches.Streaming(
        **dict(zip(("sinks", "window"), map(int, sizes))))
  raise ValueError(f"{flag}={name} is not a cache; give {CACHES}")


def drafting(model: Pretrained, name: str | None) -> Pretrained:
  """Returns the model with the named cache, see `cache`.

  If the name is None, the model is not changed.
  """
  if name is None:
    return model
  return dataclasses.replace(model, model=dataclasses.replace(
      model.model, cache=cache("--draft_cache", name)))


def check(flags: dict[str, str | None], drafter: str, is_model: bool) -> None:
  """Raises `ValueError` if flags of a draft model are set without one.

  Args:
    flags: `{flag name: value}`. None: the flag is not set.
    drafter: value of --drafter.
    is_model: whether the drafter is a language model.
  """
  for name, value in flags.items():
    if value is not None and not is_model:
      raise ValueError(f"--{name}={value} requires a draft model, and "
                       f"--drafter is {drafter}; leave --{name} out, or set a "
                       f"draft model, such as --drafter={models.ITSELF}")
