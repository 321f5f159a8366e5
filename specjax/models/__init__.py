"""Transformers, files of published models, and models that wrap a model."""

from specjax.models import adapters
from specjax.models import cache_views
from specjax.models import quantization
from specjax.models.checkpoint import load_model
from specjax.models.checkpoint import save_model
from specjax.models.configuration import RecurrentLayers
from specjax.models.configuration import TransformerConfig
from specjax.models.contrastive import Contrastive
from specjax.models.export import export_pretrained
from specjax.models.pretrained import GenerationDefaults
from specjax.models.pretrained import load_pretrained
from specjax.models.pretrained import load_tokenizer
from specjax.models.pretrained import Pretrained
from specjax.models.quantization import quantize
from specjax.models.quantization import QuantizedMatrix
from specjax.models.rotary import RopeScaling
from specjax.models.shortened import Masked
from specjax.models.shortened import Shortened
from specjax.models.sublayers import Sublayers
from specjax.models.transformer import default_dtype
from specjax.models.transformer import Transformer
from specjax.models.vocabulary_subset import frequent_tokens
from specjax.models.vocabulary_subset import VocabularySubset

__all__ = [
    "Contrastive",
    "GenerationDefaults",
    "Masked",
    "Pretrained",
    "QuantizedMatrix",
    "RecurrentLayers",
    "RopeScaling",
    "Shortened",
    "Sublayers",
    "Transformer",
    "TransformerConfig",
    "VocabularySubset",
    "adapters",
    "cache_views",
    "default_dtype",
    "export_pretrained",
    "frequent_tokens",
    "load_model",
    "load_pretrained",
    "load_tokenizer",
    "quantization",
    "quantize",
    "save_model",
]
