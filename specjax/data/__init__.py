"""Text to train on, prompts to decode from, and tokenizers."""

from specjax.data.tokenizers import Tokenizer

__all__ = ["Tokenizer"]
