"""The bundled models: a target, its draft models and its heads.

They load without network access. A draft model and an EAGLE layer for
SmolLM2-135M-Instruct are also bundled, but not SmolLM2 itself.
`models/zoo/CARD.md` lists training data, commands and results of every model.

>>> pair = load()
>>> pair.target.model.config.vocab_size
4096
>>> sorted(pair.params("small"))
['drafter', 'target']
"""

import dataclasses
import pathlib
from typing import Any

import jax

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
  """A target, draft models by name, and the tokenizer that they share."""

  target: Member
  drafters: dict[str, Member]
  tokenizer: Tokenizer

  def params(self, drafter: str) -> dict[str, Any]:
    """Returns the `Decoder` parameters of the target and one draft model.

    Args:
      drafter: name of the draft model, a key of `drafters`.
    """
    return {"target": self.target.params,
            "drafter": self.drafters[drafter].params}


def heads_path(name: str) -> pathlib.Path:
  """Returns the directory of bundled heads, for `methods.load_heads`.

  Args:
    name: one of `HEADS` or `HEADS_FOR_SMOLLM2`.
  """
  return _DIRECTORY / name


def model_path(name: str) -> pathlib.Path:
  """Returns the directory of a bundled model, for `models.load_pretrained`.

  Args:
    name: "target", or one of `DRAFTERS` or `FOR_SMOLLM2`.
  """
  return _DIRECTORY / name


def tokenizer_path() -> pathlib.Path:
  """Returns the path of the tokenizer file of the bundled target and drafts."""
  return _DIRECTORY / "tokenizer.json"


def load(dtype: jax.typing.DTypeLike | None = None) -> Pair:
  """Loads the bundled target, draft models and tokenizer.

  Args:
    dtype: dtype of the parameters. None means float32 on CPUs and bfloat16 on
      other devices.
  """
  member = lambda name: Member(*load_model(_DIRECTORY / name, dtype))
  return Pair(
      target=member("target"),
      drafters={name: member(name) for name in DRAFTERS},
      tokenizer=Tokenizer.load(tokenizer_path()))
