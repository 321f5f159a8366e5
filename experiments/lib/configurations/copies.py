"""Copies of a model that draft for it, or stand in its place, by flag."""

import dataclasses

from lib import models
import specjax as sj
from specjax.models import Pretrained

BITS = {"int8": 8, "int4": 4}
CACHES = "int8, int4, or streaming, such as streaming:4:252 (sinks:window)"


def quantized(model: Pretrained, kind: str | None, group: int | None = None
              ) -> Pretrained:
  """The model with weights of few bits.

  Args:
    model: a language model.
    kind: "int8", "int4", or None: the model as it is.
    group: inputs that share a scale; None: all of a channel.
  """
  if kind is None:
    return model
  return dataclasses.replace(
      model, params=sj.models.quantize(model.params, BITS[kind], group))


def cache(flag: str, name: str) -> sj.caches.QuantizedKV | sj.caches.Streaming:
  """The cache that a flag names.

  Raises:
    ValueError: there is none of this name.
  """
  kind, *sizes = name.split(":")
  if kind in BITS and not sizes:
    return sj.caches.QuantizedKV(bits=BITS[kind])
  if kind == "streaming" and len(sizes) in (0, 2) and all(
      size.isdecimal() for size in sizes):
    return sj.caches.Streaming(
        **dict(zip(("sinks", "window"), map(int, sizes))))
  raise ValueError(f"{flag}={name} names no cache; give {CACHES}")


def drafting(model: Pretrained, name: str | None) -> Pretrained:
  """The model with another cache, see `cache`; None: its own."""
  if name is None:
    return model
  return dataclasses.replace(model, model=dataclasses.replace(
      model.model, cache=cache("--draft_cache", name)))


def check(flags: dict[str, str | None], drafter: str, is_model: bool) -> None:
  """Refuses what is said of a language model that drafts, without one.

  Args:
    flags: `{flag: its value}`, None where it is not given.
    drafter: what --drafter names.
    is_model: whether that has a language model.
  """
  for name, value in flags.items():
    if value is not None and not is_model:
      raise ValueError(f"--{name}={value} is of a language model that drafts, "
                       f"and --drafter is {drafter}; leave it out, or name "
                       f"one, such as {models.ITSELF}")
