"""Draft trees.

The functions in this package build static trees on the host. `trees.topology`
computes ancestors and depths on the device. A tree is stored as `parents`, N
numbers: the index of every node's parent, and -1 for the root. Parents come
before their children.
"""

from specjax.trees import topology
from specjax.trees.shapes import best_tree
from specjax.trees.shapes import breadth_first
from specjax.trees.shapes import depths
from specjax.trees.shapes import expected_tokens
from specjax.trees.shapes import from_choices
from specjax.trees.shapes import full_tree
from specjax.trees.shapes import medusa_tree
from specjax.trees.shapes import sequoia_tree

__all__ = [
    "best_tree",
    "breadth_first",
    "depths",
    "expected_tokens",
    "from_choices",
    "full_tree",
    "medusa_tree",
    "sequoia_tree",
    "topology",
]
