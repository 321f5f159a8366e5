"""What all models around another model share."""

from specjax.types import ModelFn


class AroundModel:
  """The base of models with the tokens and the contexts of their `model`.

  Classes that derive from it are frozen dataclasses with that field.
  """

  model: ModelFn

  @property
  def vocab_size(self) -> int:
    return self.model.vocab_size

  @property
  def context_length(self) -> int:
    return self.model.context_length
