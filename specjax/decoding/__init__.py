"""The decoding loop: prefill, rounds, growth of buffers, placement on a mesh.

`Decoder` is the public object, and `rounds.Round` is one draft, verify and
commit. `rounds_by_length` compiles one round per draft length, among which a
`Controller` chooses by `costs`. `constraining` applies constraints to the rows
of a round.
"""

from specjax.decoding import placement
from specjax.decoding.controller import Controller
from specjax.decoding.decoder import Decoder
from specjax.decoding.decoder import Generation
from specjax.decoding.decoder import raise_if_not_finite

__all__ = [
    "Controller",
    "Decoder",
    "Generation",
    "placement",
    "raise_if_not_finite",
]
