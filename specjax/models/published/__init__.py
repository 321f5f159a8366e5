"""Published checkpoints: read into a `Transformer`, and written from one.
"""

from specjax.models.published.export import export_pretrained
from specjax.models.published.load import GenerationDefaults
from specjax.models.published.load import load_pretrained
from specjax.models.published.load import load_tokenizer
from specjax.models.published.load import Pretrained

__all__ = [
    "GenerationDefaults",
    "Pretrained",
    "export_pretrained",
    "load_pretrained",
    "load_tokenizer",
]
