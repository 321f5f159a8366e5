"""Drafters: how tokens are proposed; one file each."""

from specjax.drafters.empty import Empty
from specjax.drafters.language_model import LanguageModel

__all__ = ["Empty", "LanguageModel"]
