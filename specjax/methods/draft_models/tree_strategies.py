"""Methods whose drafts are a tree of small language models."""

from collections.abc import Sequence

from specjax import verifiers
from specjax.methods.draft_models.dynamic_tree import DynamicTree
from specjax.methods.draft_models.paths import Paths
from specjax.methods.draft_models.tree_language_model import TreeLanguageModel
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TRAVERSAL
from specjax.trees import shapes
from specjax.types import ModelFn


def specinfer(model: ModelFn, parents: Sequence[int]) -> Strategy:
  """A tree of independent draws, whose siblings are tried one after another.

  Miao et al. 2023 (arXiv:2305.09781, multi-step speculative sampling).

  >>> from specjax import testing, trees
  >>> drafter, _ = specinfer(testing.MarkovModel(7), trees.full_tree((2, 1)))
  >>> drafter.num_nodes, drafter.iid
  (5, True)

  Args:
    model: the small language model, over the target's vocabulary.
    parents: N entries, the tree with its root, see `specjax.trees`.
  """
  return _tree(model, parents, "iid", verifiers.Recursive())


def merged_specinfer(models: Sequence[ModelFn], length: int,
                     num_paths: int | None = None) -> Strategy:
  """Paths of several models, merged into one tree of tokens.

  Miao et al. 2023 (arXiv:2305.09781, merge-based speculation); their models
  are boost-tuned, see `experiments/boost_drafters.py`.

  >>> from specjax import testing, trees
  >>> pair = testing.MarkovModel(7), testing.MarkovModel(7)
  >>> merged_specinfer(pair, length=3).drafter.num_nodes
  7

  Args:
    models: the small language models; `params["drafter"]` is a tuple.
    length: tokens of a path.
    num_paths: of all models together, which take turns; None: one each.
  """
  models = tuple(models)
  paths = Paths(
      models=models, num_paths=num_paths or len(models), length=length)
  return Strategy(paths, verifiers.Recursive())


def spectr(model: ModelFn, parents: Sequence[int]) -> Strategy:
  """Independent draws, of which K-SEQ chooses.

  Sun et al. 2023 (arXiv:2310.15141). The paper drafts K chains of L tokens,
  which is the tree `trees.full_tree((K, *[1] * (L - 1)))`.

  >>> from specjax import testing, trees
  >>> spectr(testing.MarkovModel(7), trees.full_tree((3, 1))).verifier
  KSeq()

  Args:
    model: the small language model, over the target's vocabulary.
    parents: N entries, the tree with its root.
  """
  return _tree(model, parents, "iid", verifiers.KSeq())


def sequoia(model: ModelFn, parents: Sequence[int]) -> Strategy:
  """A static tree whose siblings differ, tried one after another.

  Chen et al. 2024 (arXiv:2402.12374): `trees.sequoia_tree` finds the tree for
  a measured acceptance, and siblings are drawn without replacement.

  >>> from specjax import testing, trees
  >>> best = trees.sequoia_tree([0.5, 0.3], nodes=4)
  >>> drafter, verifier = sequoia(testing.MarkovModel(7), best)
  >>> drafter.parents, verifier
  ((-1, 0, 0, 1), Recursive())

  Args:
    model: the small language model, over the target's vocabulary.
    parents: N entries, the tree with its root.
  """
  return _tree(model, parents, "without_replacement", verifiers.Recursive())


def rsd(model: ModelFn, branching: Sequence[int]) -> Strategy:
  """Recursive speculative decoding with constant branching (RSD-C).

  Jeon et al. 2024 (arXiv:2402.14160): siblings are drawn without replacement,
  as by their Gumbel-top-k trick, and rejected recursively.

  >>> from specjax import testing, trees
  >>> rsd(testing.MarkovModel(7), branching=(2, 2, 1)).drafter.num_nodes
  11

  Args:
    model: the small language model, over the target's vocabulary.
    branching: children of a node at depth 0, 1, ...
  """
  return sequoia(model, shapes.full_tree(branching))


def traversal(model: ModelFn, parents: Sequence[int]) -> Strategy:
  """Sequoia's drafts, whose paths are judged as wholes from the leaves up.

  Weng et al. 2025 (arXiv:2505.12398). On a chain it is block verification.

  >>> from specjax import testing, trees
  >>> traversal(testing.MarkovModel(7), trees.full_tree((2, 2))).verifier
  Traversal()

  Args:
    model: the small language model, over the target's vocabulary.
    parents: N entries, the tree with its root.
  """
  return sequoia(model, parents)._replace(verifier=TRAVERSAL)


def hybrid_tree(model: ModelFn, parents: Sequence[int]) -> Strategy:
  """One draw beside the likeliest children, tried one after another.

  Hu et al. 2025 (arXiv:2502.18779).

  >>> from specjax import testing, trees
  >>> drafter, _ = hybrid_tree(testing.MarkovModel(7), trees.full_tree((3,)))
  >>> drafter.proposal
  'hybrid'

  Args:
    model: the small language model, over the target's vocabulary.
    parents: N entries, the tree with its root.
  """
  return _tree(model, parents, "hybrid", verifiers.Recursive())


def top_k_tree(model: ModelFn, parents: Sequence[int]) -> Strategy:
  """The likeliest children of every node, and a walk of the target over them.

  Miao et al. 2023 (arXiv:2305.09781, expansion-based speculation). Of such
  drafts no valid rule accepts more in one round.

  >>> from specjax import testing, trees
  >>> top_k_tree(testing.MarkovModel(7), trees.full_tree((3, 2))).verifier
  TargetWalk()

  Args:
    model: the small language model, over the target's vocabulary.
    parents: N entries, the tree with its root.
  """
  return _tree(model, parents, "top_k", verifiers.TargetWalk())


def eagle2_tree(model: ModelFn, depth: int = 6, top_k: int = 10,
                num_nodes: int = 60) -> Strategy:
  """A tree that follows the model's confidence, and a walk of the target.

  The dynamic draft trees of EAGLE-2 (Li et al. 2024, arXiv:2406.16858, section
  4), for any language model.

  >>> from specjax import testing, trees
  >>> eagle2_tree(testing.MarkovModel(7), 3, 2, 6).drafter.num_nodes
  6

  Args:
    model: the small language model, over the target's vocabulary.
    depth: levels below the root, a pass of the model each.
    top_k: nodes of a level that are expanded, and children of each.
    num_nodes: N, the root included.
  """
  return Strategy(
      DynamicTree(model=model, depth=depth, top_k=top_k,
                           num_nodes=num_nodes), verifiers.TargetWalk())


def _tree(model, parents, proposal, verifier):
  drafter = TreeLanguageModel(
      model=model, parents=tuple(parents), proposal=proposal)
  return Strategy(drafter, verifier)
