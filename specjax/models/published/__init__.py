"""Published checkpoints: read into a `Transformer`, and written from one.

Drafters that others trained for a target are in `drafters`.
"""

from specjax.methods.published import export_drafter
from specjax.methods.published import load_drafter
from specjax.models.published.export import export_pretrained
from specjax.models.published.load import GenerationDefaults
from specjax.models.published.load import load_pretrained
from specjax.models.published.load import load_tokenizer
from specjax.models.published.load import Pretrained

__all__ = [
    "GenerationDefaults",
    "Pretrained",
    "export_drafter",
    "export_pretrained",
    "load_drafter",
    "load_pretrained",
    "load_tokenizer",
]
