"""Base class of models that wrap another model."""

from specjax.interfaces import Model


class AroundModel(Model):
  """Model that wraps another model, its field `model`.

  Both have the same vocabulary, context length and slack. Subclasses are frozen
  dataclasses with the field `model`.
  """

  model: Model

  @property
  def vocab_size(self) -> int:
    return self.model.vocab_size

  @property
  def context_length(self) -> int:
    return self.model.context_length

  @property
  def slack(self) -> float:
    return self.model.slack
