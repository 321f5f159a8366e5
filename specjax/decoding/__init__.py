"""The decoding loop: prefill, rounds, growth of buffers, placement on a mesh.

`Decoder` is the public class. `rounds.Round` drafts, verifies and commits once.
`rounds_by_length` compiles one round per draft length. A `Controller` chooses
among these lengths by their measured `costs`. `constraining` applies
constraints to the rows of a round.
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
