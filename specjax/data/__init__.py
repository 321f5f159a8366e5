"""Training text, prompts and tokenizers."""

from specjax.data import datastores
from specjax.data import tokenizers
from specjax.data.retokenization import Retokenizer
from specjax.data.tokenizers import Tokenizer
from specjax.data.vocabularies import map_vocabularies
from specjax.data.vocabularies import VocabularyMap

__all__ = ["Retokenizer", "Tokenizer", "VocabularyMap", "datastores",
           "map_vocabularies", "tokenizers"]
