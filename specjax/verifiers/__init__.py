"""Verification rules as laws; one file per family."""

from specjax.verifiers.block import Block
from specjax.verifiers.greedy_block import GreedyBlock
from specjax.verifiers.greedy_block import GreedyBlockState
from specjax.verifiers.token import Token
from specjax.verifiers.typical import Typical

__all__ = ["Block", "GreedyBlock", "GreedyBlockState", "Token", "Typical"]
