"""Copies of a model with quantised weights or another cache."""

import dataclasses

import specjax as sj
from specjax.models import Pretrained

BITS = {"int8": 8, "int4": 4}
CACHES = "int8, int4, or streaming, such as streaming:4:252 (sinks:window)"


def quantized(model: Pretrained, kind: str | None, group: int | None = None
              ) -> Pretrained:
  """Returns the model with quantised weights.

  Args:
    model: language model.
    kind: "int8" or "int4". None returns the model unchanged.
    group: number of inputs that share a scale. None means all inputs of a
      channel.
  """
  if kind is None:
    return model
  return dataclasses.replace(
      model, params=sj.models.quantize(model.params, BITS[kind], group))


def cache(flag: str, name: str) -> sj.caches.QuantizedKV | sj.caches.Streaming:
  """Returns the cache that the value of a flag describes.

  Args:
    flag: name of the flag, for error messages.
    name: value of the flag, such as "int8" or "streaming:4:252".

  Raises:
    ValueError: the value does not describe a cache.
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
  """Returns the model with the cache `name` (see `cache`).

  If the name is None, returns the model unchanged.
  """
  if name is None:
    return model
  return dataclasses.replace(model, model=dataclasses.replace(
      model.model, cache=cache("--draft_cache", name)))
