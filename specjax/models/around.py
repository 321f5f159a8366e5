"""Base class of models around another model."""

from specjax.interfaces import Model


class AroundModel(Model):
  """Model with the vocabulary and context length of its field `model`.

  Subclasses are frozen dataclasses with the field `model`.
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
