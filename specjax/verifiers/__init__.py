"""Verification rules as laws; one file per family."""

from specjax.verifiers.block import Block
from specjax.verifiers.blockwise import Distance
from specjax.verifiers.blockwise import TopK
from specjax.verifiers.greedy_block import GreedyBlock
from specjax.verifiers.greedy_block import GreedyBlockState
from specjax.verifiers.k_seq import KSeq
from specjax.verifiers.recursive import Recursive
from specjax.verifiers.target_walk import TargetWalk
from specjax.verifiers.token import Token
from specjax.verifiers.traversal import Traversal
from specjax.verifiers.typical import Typical

__all__ = [
    "Block",
    "Distance",
    "GreedyBlock",
    "GreedyBlockState",
    "KSeq",
    "Recursive",
    "TargetWalk",
    "Token",
    "TopK",
    "Traversal",
    "Typical",
]
