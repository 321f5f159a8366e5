"""What a target drafts for itself with: heads and look-ahead embeddings.

At position t the target's own LM head predicts token t + 1. Head k = 1..K
predicts token t + 1 + k from the same hidden state, and so does look-ahead
token k, which the target reads k positions after t. The hidden state is the
one that the LM head sees (`TransformerConfig.features` empty), p^(k) the law
of head k.

The parameters of K heads are stacked along their first axis. `ParallelHeads`
are a network of their own, which reads other hidden states. A file of heads
names the target that they were trained for, and is refused by any other.
"""

from specjax.models.heads.base import check_fits
from specjax.models.heads.base import Heads
from specjax.models.heads.base import lm_head
from specjax.models.heads.blockwise import BlockwiseHeads
from specjax.models.heads.features import Eagle1Heads
from specjax.models.heads.features import Eagle3Heads
from specjax.models.heads.features import FeatureHeads
from specjax.models.heads.features import FeatureOutput
from specjax.models.heads.features import MTPHeads
from specjax.models.heads.features import ParallelLayers
from specjax.models.heads.files import KINDS
from specjax.models.heads.files import load_heads
from specjax.models.heads.files import save_heads
from specjax.models.heads.hydra import HydraHeads
from specjax.models.heads.kangaroo import KangarooAdapter
from specjax.models.heads.lookahead import LookaheadEmbeddings
from specjax.models.heads.lookahead import with_lookahead
from specjax.models.heads.medusa import MedusaHeads
from specjax.models.heads.parallel import ParallelHeads

__all__ = [
    "KINDS",
    "BlockwiseHeads",
    "Eagle1Heads",
    "Eagle3Heads",
    "FeatureHeads",
    "FeatureOutput",
    "Heads",
    "HydraHeads",
    "KangarooAdapter",
    "LookaheadEmbeddings",
    "MTPHeads",
    "MedusaHeads",
    "ParallelHeads",
    "ParallelLayers",
    "check_fits",
    "lm_head",
    "load_heads",
    "save_heads",
    "with_lookahead",
]
