"""Reference models, their file format, and the trained pair in the box."""

from specjax.models import adapters
from specjax.models.checkpoint import load_model
from specjax.models.checkpoint import save_model
from specjax.models.configuration import TransformerConfig
from specjax.models.rotary import RopeScaling
from specjax.models.transformer import default_dtype
from specjax.models.transformer import Transformer

__all__ = [
    "RopeScaling",
    "Transformer",
    "TransformerConfig",
    "adapters",
    "default_dtype",
    "load_model",
    "save_model",
]
