"""Selection of the attentions and MLPs that a pass runs."""

from collections.abc import Iterable
import dataclasses
from typing import Self


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sublayers:
  """Attentions and MLPs of a decoder that a pass runs.

  All other sublayers are skipped and take no time.

  Attributes:
    attention: sorted layers whose attention runs.
    mlp: sorted layers whose MLP runs.
    packed: True if the cache contains only the layers in `attention`, in this
      order. False if it contains all layers.
  """

  attention: tuple[int, ...]
  mlp: tuple[int, ...]
  packed: bool = False

  def __post_init__(self):
    for name in ("attention", "mlp"):
      object.__setattr__(self, name, tuple(sorted(map(
          int, getattr(self, name)))))

  @classmethod
  def between(cls, first: int, last: int) -> Self:
    """Returns attention and MLP of layers `first` to `last - 1`."""
    layers = tuple(range(first, last))
    return cls(attention=layers, mlp=layers)

  @classmethod
  def without(cls, layers: int, attention: Iterable[int] = (),
              mlp: Iterable[int] = ()) -> Self:
    """Returns all sublayers of a model except the given ones.

    Args:
      layers: number of layers of the model.
      attention: layers whose attention is skipped.
      mlp: layers whose MLP is skipped.

    Raises:
      ValueError: a number is not a layer.

    >>> Sublayers.without(3, attention=[1])
    Sublayers(attention=(0, 2), mlp=(0, 1, 2), packed=False)
    """
    left_out = {"attention": set(attention), "mlp": set(mlp)}
    for name, numbers in left_out.items():
      for number in numbers:
        if number not in range(layers):
          raise ValueError(f"{name} {number} is not a layer; layers are "
                           f"0 to {layers - 1}")
    return cls(**{name: tuple(i for i in range(layers) if i not in numbers)
                  for name, numbers in left_out.items()})

  @property
  def layers(self) -> tuple[int, ...]:
    """Returns the sorted layers with at least one running sublayer."""
    return tuple(sorted({*self.attention, *self.mlp}))

  def slot(self, layer: int) -> int | None:
    """Returns the index of a layer in a packed cache, otherwise None."""
    return self.attention.index(layer) if self.packed else None
