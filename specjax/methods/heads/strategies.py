"""Methods that draft with heads, or embeddings, that the target is given."""

from collections.abc import Sequence

from specjax import verifiers
from specjax.methods.heads.blockwise_drafter import Blockwise
from specjax.methods.heads.blockwise_network import BlockwiseHeads
from specjax.methods.heads.hydra_drafter import Hydra
from specjax.methods.heads.hydra_network import HydraHeads
from specjax.methods.heads.lookahead_drafter import Lookahead
from specjax.methods.heads.lookahead_network import LookaheadEmbeddings
from specjax.methods.heads.medusa_drafter import Medusa
from specjax.methods.heads.medusa_network import MedusaHeads
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TRAVERSAL
from specjax.types import Verifier


def medusa(heads: MedusaHeads | BlockwiseHeads, parents: Sequence[int],
           typical: bool = False) -> Strategy:
  """The likeliest tokens of the target's own heads, as a tree.

  Cai et al. 2024 (arXiv:2401.10774). The paper's rule is typical acceptance,
  which is LOSSY; the walk of the target is exact.

  >>> from specjax import trees
  >>> from specjax import methods
  >>> own = methods.MedusaHeads(width=8, vocab_size=7, heads=2)
  >>> medusa(own, trees.full_tree((3, 2))).verifier
  TargetWalk()
  >>> medusa(own, trees.full_tree((3, 2)), typical=True).verifier.lossless
  False

  Args:
    heads: of the target.
    parents: N entries, the tree with its root, at most as deep as there are
      heads; `trees.medusa_tree` finds the paper's for measured accuracies.
    typical: whether to accept what the target finds plausible. LOSSY.
  """
  rule = verifiers.Typical() if typical else verifiers.TargetWalk()
  return Strategy(Medusa(heads=heads, parents=tuple(parents)), rule)


def sampled_medusa(heads: MedusaHeads | BlockwiseHeads, parents: Sequence[int],
                   proposal: str = "without_replacement",
                   verifier: Verifier = TRAVERSAL) -> Strategy:
  """Draws from the laws of the target's heads, judged by a rule that uses q.

  Not in the Medusa paper (arXiv:2401.10774), which ranks: a head's law is known
  as well, so that any rule for sampled drafts is exact.

  >>> from specjax import methods
  >>> own = methods.MedusaHeads(width=8, vocab_size=7, heads=2)
  >>> sampled_medusa(own, (-1, 0, 1), "iid", verifiers.Block()).drafter.chain
  True

  Args:
    heads: of the target.
    parents: N entries, the tree with its root; `range(-1, K)` is a chain of K.
    proposal: how the children of a node are drawn, "without_replacement" or
      "iid".
    verifier: a rule for these drafts.
  """
  return Strategy(Medusa(
      heads=heads, parents=tuple(parents), proposal=proposal), verifier)


def hydra(heads: HydraHeads, parents: Sequence[int], proposal: str = "top_k",
          verifier: Verifier | None = None) -> Strategy:
  """Heads that read the drafted tokens draft a tree, or a chain.

  Ankner et al. 2024 (arXiv:2402.05109). The paper ranks; the law of a node
  given its path is known as well, so that drafts may be sampled from it.

  >>> from specjax import trees
  >>> from specjax import methods
  >>> own = methods.HydraHeads(width=8, vocab_size=7, heads=2)
  >>> hydra(own, trees.full_tree((3, 2))).verifier
  TargetWalk()
  >>> hydra(own, (-1, 0, 1), "iid", verifiers.Block()).drafter.chain
  True

  Args:
    heads: of the target.
    parents: N entries, the tree with its root, at most as deep as there are
      heads; `range(-1, K)` is a chain of K.
    proposal: how the children of a node are drawn: "top_k",
      "without_replacement" or "iid".
    verifier: a rule for these drafts; None: what is exact for them.
  """
  if verifier is None:
    verifier = (verifiers.TargetWalk() if proposal == "top_k" else TRAVERSAL)
  return Strategy(Hydra(
      heads=heads, parents=tuple(parents), proposal=proposal), verifier)


def blockwise(heads: MedusaHeads | BlockwiseHeads, gamma: int | None = None,
              top_k: int | None = None, distance: int | None = None
              ) -> Strategy:
  """The likeliest token of each head as a chain, kept while it matches.

  Stern et al. 2018 (arXiv:1811.03115). Their looser criteria are LOSSY.

  >>> from specjax import methods
  >>> own = methods.BlockwiseHeads(width=8, vocab_size=7, heads=3, hidden_width=4)
  >>> blockwise(own).drafter.gamma, blockwise(own).verifier
  (3, Token())
  >>> blockwise(own, top_k=2).verifier.lossless
  False

  Args:
    heads: of the target.
    gamma: drafted tokens, at most K; None: K.
    top_k: accept what is among the target's `top_k` likeliest. LOSSY.
    distance: accept ids at most so far from the target's choice. LOSSY.

  Raises:
    ValueError: both criteria are given.
  """
  if top_k is not None and distance is not None:
    raise ValueError(f"top_k is {top_k} and distance {distance}; give one of "
                     "the two criteria")
  rule = (verifiers.TopK(k=top_k) if top_k is not None else
          verifiers.Distance(epsilon=distance) if distance is not None else
          verifiers.Token())
  return Strategy(Blockwise(heads=heads, gamma=gamma), rule)


def pass_lookahead(embeddings: LookaheadEmbeddings, folded: bool = True,
                   count: int | None = None, verifier: Verifier = BLOCK
                   ) -> Strategy:
  """What the target predicts after look-ahead tokens, as a chain.

  PaSS (Monea et al. 2023, arXiv:2311.13581). The decoder's target must hold the
  embeddings, see `methods.with_lookahead`.

  >>> from specjax import methods
  >>> own = methods.LookaheadEmbeddings(count=3, width=8)
  >>> pass_lookahead(own).drafter.num_nodes  # (1 + 3)^2, folded
  16
  >>> pass_lookahead(own, folded=False).drafter.num_nodes  # 2 + 3
  5

  Args:
    embeddings: of the target, L of them.
    folded: whether a round has one pass or, as published, two.
    count: look-ahead tokens that are read, at most L; None: L.
    verifier: a rule for chains.
  """
  return Strategy(Lookahead(
      embeddings=embeddings, folded=folded, count=count), verifier)
