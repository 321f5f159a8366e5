"""Text to train on, prompts to decode from, and tokenizers."""

from specjax.data.retokenization import Retokenizer
from specjax.data.tokenizers import Tokenizer
from specjax.data.vocabularies import map_vocabularies
from specjax.data.vocabularies import VocabularyMap

__all__ = ["Retokenizer", "Tokenizer", "VocabularyMap", "map_vocabularies"]
