"""The trained models in the box, no network needed.

A target, two small drafters, and what the target drafts for itself with; and a
drafter and an EAGLE layer for SmolLM2-135M-Instruct, which is not in the box.

`models/zoo/CARD.md` says what they were trained on, by which command,
and how good they are.
"""

import dataclasses
import pathlib
from typing import Any

from specjax.data.tokenizers import Tokenizer
from specjax.models.checkpoint import load_model
from specjax.models.transformer import Transformer

_DIRECTORY = pathlib.Path(__file__).parent / "models" / "zoo"
DRAFTERS = ("small", "tiny")
FOR_SMOLLM2 = ("smol",)
HEADS = ("pass", "medusa", "eagle3", "parallel")
HEADS_FOR_SMOLLM2 = ("smol_eagle",)


@dataclasses.dataclass(frozen=True, eq=False)
class Member:
  """A model and its parameters."""

  model: Transformer
  params: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
  """A target, drafters by name, and the tokenizer that they share."""

  target: Member
  drafters: dict[str, Member]
  tokenizer: Tokenizer


def heads_path(name: str) -> pathlib.Path:
  """The directory of heads, for `methods.load_heads`.

  Args:
    name: one of `HEADS` or `HEADS_FOR_SMOLLM2`.
  """
  return _DIRECTORY / name


def model_path(name: str) -> pathlib.Path:
  """The directory of a language model, for `models.load_pretrained`.

  Args:
    name: "target", or one of `DRAFTERS` or `FOR_SMOLLM2`.
  """
  return _DIRECTORY / name


def tokenizer_path() -> pathlib.Path:
  """The file of the tokenizer that the target and its drafters share."""
  return _DIRECTORY / "tokenizer.json"


def load(dtype: Any = None) -> Pair:
  """Loads the bundled pair.

  Args:
    dtype: of the parameters; None is float32 on CPU, else bfloat16.
  """
  member = lambda name: Member(*load_model(_DIRECTORY / name, dtype))
  return Pair(
      target=member("target"),
      drafters={name: member(name) for name in DRAFTERS},
      tokenizer=Tokenizer.load(tokenizer_path()))
