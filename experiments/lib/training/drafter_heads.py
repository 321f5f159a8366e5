"""Initial heads and training objective of train_drafter.py."""

from collections.abc import Callable
import dataclasses
import sys
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lib import models
from specjax import methods
from specjax.data import Tokenizer
from specjax.methods import Heads
from specjax.methods import Method
from specjax.models import frequent_tokens
from specjax.models import Pretrained
from specjax.training import loop
from specjax.training.objective import DrafterObjective

Counted = Callable[[int], np.ndarray]
Params = dict[str, Any]


class Learner(NamedTuple):
  """Heads, their parameters and their training objective.

  Attributes:
    heads: initial heads.
    params: float32 parameters of the heads.
    objective: training objective.
  """

  heads: Heads
  params: Params
  objective: DrafterObjective


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Start:
  """Settings of the initial heads, from the flags of `train_drafter.py`.

  Attributes:
    method: training method.
    heads: number of tokens that new heads predict after the next token.
    head_options: keyword arguments of new heads (see `method_options`).
    options: keyword arguments of the objective (see `method_options`).
    keep_features: True if the target's hidden states are stored in memory.
    heads_from: directory or name of the heads at which training starts. None
      creates new heads.
    draft_vocabulary: number of different tokens that the heads can draft. None
      means all tokens.
    narrow_head: True if the heads draft with the target's LM head, restricted
      to the columns of the draft vocabulary.
    seed: seed for the initialisation of new heads.
  """

  method: Method
  heads: int
  head_options: dict[str, Any]
  options: dict[str, Any]
  keep_features: bool
  heads_from: str | None
  draft_vocabulary: int | None
  narrow_head: bool
  seed: int

  def make(self, target: Pretrained, tokenizer: Tokenizer,
           counted: Counted | None) -> Learner:
    """Returns the initial heads with their parameters and objective.

    Args:
      target: target model of the heads.
      tokenizer: tokenizer of the target.
      counted: function that maps V to the counts `[V]` of tokens in the
        training text. If None, the draft vocabulary consists of placeholder
        ids.

    Raises:
      ValueError: the heads do not match the method, the target or the flags.
    """
    if self.heads_from is None:
      heads, params = self._new(target, tokenizer, counted)
    else:
      heads, params = methods.load_heads(
          self.heads_from, target.model, jnp.float32, target.params)
      if heads.kind != self.method.heads.kind:
        fitting = [m.name for m in methods.available()
                   if m.heads.kind == heads.kind]
        raise ValueError(
            f"--heads_from contains {type(heads).__name__} and --method="
            f"{self.method.name} trains {self.method.heads.__name__}; set "
            f"--method={' or --method='.join(fitting)}, or give other heads")
    objective = self.method.objective(target.model, heads, **self.options)
    if self.keep_features and not hasattr(objective, "read"):
      raise ValueError(
          f"--keep_features is set and --method={self.method.name} does not "
          "train on stored hidden states; leave --keep_features out, or set "
          "--method=eagle1, eagle3 or peagle")
    return Learner(heads, params, objective)

  @property
  def trains_target(self) -> bool:
    """True if the target is trained with the heads."""
    return self.method.trains_target(self.options)

  def weights(self, learner: Learner, target: Pretrained
              ) -> tuple[Params, Params]:
    """Returns the trainable and the frozen parameters, as dicts of trees.

    Trainable parameters are float32. The teacher, if the objective needs one,
    is the target before training.
    """
    trainable = {"drafter": learner.params}
    frozen = {"target": target.params}
    if self.trains_target:
      trainable["target"] = loop.cast(frozen.pop("target"), jnp.float32)
    if "teacher" in learner.objective.needs:
      frozen["teacher"] = target.params
    return trainable, frozen

  def _new(self, target: Pretrained, tokenizer: Tokenizer,
           counted: Counted | None) -> tuple[Heads, Params]:
    """Returns new heads and their parameters."""
    heads = self.method.heads.for_target(
        target.model, self.heads, **self.head_options)
    if self.draft_vocabulary is not None:
      fields = {}
      if self.narrow_head:
        if not hasattr(heads, "narrow_head"):
          raise ValueError(
              f"--narrow_head is set and --method={self.method.name} has no "
              "such head; leave --narrow_head out, or set --method=eagle1, "
              "eagle3 or peagle")
        fields = {"own_head": False, "narrow_head": True}
      elif not (hasattr(heads, "ids") and getattr(heads, "own_head", True)):
        raise ValueError(
            f"--draft_vocabulary is {self.draft_vocabulary} and the heads of "
            f"--method={self.method.name} draft with the target's LM head; "
            "leave --draft_vocabulary out, or set --method=eagle3, peagle or "
            "parallel")
      heads = dataclasses.replace(
          heads, ids=self._frequent(target, tokenizer, counted), **fields)
    return heads, heads.init(jax.random.key(self.seed), target.params)

  def _frequent(self, target: Pretrained, tokenizer: Tokenizer,
                counted: Counted | None) -> tuple[int, ...]:
    """Returns the ids of the draft vocabulary.

    These are the most frequent tokens and the end-of-text tokens.
    """
    size, vocab_size = self.draft_vocabulary, target.model.vocab_size
    always = [end for end in models.ends(target, tokenizer) or ()
              if end < vocab_size]
    if not len(always) < size <= vocab_size:
      raise ValueError(f"--draft_vocabulary is {size}; the target has "
                       f"{vocab_size} tokens, and {len(always)} end-of-text "
                       "tokens are always included: give a number between "
                       "these two")
    if counted is None:
      return tuple(range(size))
    counts = counted(vocab_size)
    ids = frequent_tokens(counts, size, always)
    print(f"{size:,} of {vocab_size:,} tokens can be drafted, which are "
          f"{counts[ids].sum() / counts.sum():.1%} of the text",
          file=sys.stderr)
    return tuple(ids.tolist())
