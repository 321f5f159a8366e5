"""Drafters: how tokens are proposed; one file each.

`common`, `growth` and `children` hold what several of them share.
"""

from specjax.drafters.dynamic_tree import DynamicTree
from specjax.drafters.dynamic_tree import DynamicTreeState
from specjax.drafters.empty import Empty
from specjax.drafters.language_model import LanguageModel
from specjax.drafters.paths import Paths
from specjax.drafters.tree_language_model import TreeLanguageModel

__all__ = ["DynamicTree", "DynamicTreeState", "Empty", "LanguageModel",
           "Paths", "TreeLanguageModel"]
