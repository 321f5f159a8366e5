"""Which parts of a decoder a pass goes through."""

from collections.abc import Iterable
import dataclasses
from typing import Self


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sublayers:
  """The attentions and the MLPs of a decoder that a pass runs.

  The residual stream goes past the others, which cost nothing.

  Attributes:
    attention: numbers of the layers whose attention is run, in order.
    mlp: of those whose MLP is run.
    packed: whether the cache of such a pass has the keys and values of these
      attentions alone, in their order; else it has those of all layers.
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
    """The whole layers `first` to `last - 1`."""
    layers = tuple(range(first, last))
    return cls(attention=layers, mlp=layers)

  @classmethod
  def without(cls, layers: int, attention: Iterable[int] = (),
              mlp: Iterable[int] = ()) -> Self:
    """All of `layers` layers but these attentions and these MLPs.

    >>> Sublayers.without(3, attention=[1])
    Sublayers(attention=(0, 2), mlp=(0, 1, 2), packed=False)

    Raises:
      ValueError: one of them is no layer.
    """
    left_out = {"attention": set(attention), "mlp": set(mlp)}
    for name, numbers in left_out.items():
      for number in numbers:
        if number not in range(layers):
          raise ValueError(f"{name} {number} is to be left out; layers are "
                           f"numbered from 0 to {layers - 1}")
    return cls(**{name: tuple(i for i in range(layers) if i not in numbers)
                  for name, numbers in left_out.items()})

  @property
  def layers(self) -> tuple[int, ...]:
    """The layers of which something is run, in order."""
    return tuple(sorted({*self.attention, *self.mlp}))

  def slot(self, layer: int) -> int:
    """Where the cache has the keys and values of a layer."""
    return self.attention.index(layer) if self.packed else layer
