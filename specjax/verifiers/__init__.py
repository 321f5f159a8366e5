"""Verification rules as laws; one file per family."""

from specjax.verifiers.block import Block
from specjax.verifiers.token import Token

__all__ = ["Block", "Token"]
