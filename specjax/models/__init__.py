"""Reference models, their file format, and the trained pair in the box."""

from specjax.models.checkpoint import load_model
from specjax.models.checkpoint import save_model
from specjax.models.transformer import default_dtype
from specjax.models.transformer import Transformer
from specjax.models.transformer import TransformerConfig

__all__ = [
    "Transformer",
    "TransformerConfig",
    "default_dtype",
    "load_model",
    "save_model",
]
