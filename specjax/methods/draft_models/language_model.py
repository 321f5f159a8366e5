"""Drafting with a second, smaller language model.

The shape of a draft is a chain (Leviathan et al. 2022, arXiv:2211.17192; Chen
et al. 2023, arXiv:2302.01318) or a tree, see `methods.draft_shapes`.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import chex
import jax

from specjax import interfaces
from specjax import verifiers
from specjax.decoding.prefill import read_prompt
from specjax.interfaces import Cache
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import _common
from specjax.methods import stop_rules
from specjax.methods.draft_shapes import Best
from specjax.methods.draft_shapes import Chain
from specjax.methods.draft_shapes import Shape
from specjax.methods.draft_shapes import Tree
from specjax.methods.drafting import Network
from specjax.methods.drafting import NetworkDrafter
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import STOP
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TRAVERSAL
from specjax.sampling import LogitsTransform
from specjax.trees import shapes
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel(Network):
  """A language model over the target's vocabulary, which has its own cache.

  A round begins with a pass over the last *two* committed tokens. The model
  never reads the last token of a chain, or the leaves of a tree. If such a
  token was accepted, the cache lacks it and the next token. Otherwise the cache
  lacks only one token, and reading the other again does not change the cache.
  So one pass of fixed size completes the caches of all rows. Then each level
  below the root costs one pass over its nodes with children.

  Attributes:
    model: the draft model.
  """

  model: Model

  context_only = True
  always_drafts = True

  def __post_init__(self):
    interfaces.check_model("LanguageModel.model", self.model)

  @property
  def vocab_size(self) -> int:
    return self.model.vocab_size

  @property
  def context_length(self) -> float:
    return self.model.context_length

  @property
  def slack(self) -> float:
    return self.model.slack

  def init(self, params: chex.ArrayTree, prompt: Prompt, output: ModelOutput
           ) -> Cache:
    return read_prompt(self.model, params["drafter"], prompt).cache

  def begin(self, params: chex.ArrayTree, state: DecodeState, shape: Shape
            ) -> tuple[stop_rules.Forecast, Cache]:
    logits, hidden, cache = _common.read_last(
        self.model, params["drafter"], state, state.drafter, size=2,
        more=shape.fed)
    return (logits, hidden), cache

  def step(self, params: chex.ArrayTree, tokens: jax.Array, depths: jax.Array,
           ancestors: jax.Array, above: jax.Array, carry: Cache
           ) -> tuple[jax.Array, Cache]:
    out = self.model(params["drafter"], tokens, depths, ancestors, carry)
    return out.logits, out.cache

  def extend(self, params: chex.ArrayTree, token: jax.Array, carry: Cache
             ) -> tuple[stop_rules.Forecast, Cache]:
    out, cache = _common.read_token(self.model, params["drafter"], token, carry)
    return (out.logits[:, 0], out.hidden[:, 0]), cache

  def end(self, params: chex.ArrayTree, memory: Cache, carry: Cache,
          draft: Draft, slots: jax.Array | None) -> tuple[Draft, Cache]:
    return draft, carry.settle() if slots is None else carry

  def commit(self, params: chex.ArrayTree, memory: Cache, draft: Draft,
             slots: jax.Array | None, shape: Shape, verdict: Verdict,
             output: ModelOutput, count: jax.Array) -> Cache:
    # After a chain, `begin` rolls the cache back.
    return memory if slots is None else _common.keep_path(
        memory, slots, verdict.path, shape.fed, count)

  def catch_up(self, params: chex.ArrayTree, state: DecodeState,
               since: jax.Array) -> Cache:
    return _common.catch_up(
        self.model, params["drafter"], state, state.drafter, since)

  def param_specs(self, axis: str, size: int) -> Any:
    return self.model.param_specs(axis, size)


def draft_model(model: Model, gamma: int, *,
                transform: LogitsTransform | None = None,
                stop: stop_rules.StopRule | None = None) -> NetworkDrafter:
  """Returns a drafter that samples a chain from a language model.

  >>> from specjax import testing
  >>> draft_model(testing.MarkovModel(7), gamma=4).num_nodes
  5

  Args:
    model: draft model over the target's vocabulary.
    gamma: draft length; 0 drafts nothing.
    transform: transform of the draft logits, see `NetworkDrafter`.
    stop: stop rule, see `draft_shapes.Chain`.
  """
  return NetworkDrafter(network=LanguageModel(model=model),
                        shape=Chain(gamma, stop), transform=transform)


def speculative_sampling(model: Model, gamma: int) -> Strategy:
  """Drafts a chain whose tokens are accepted or rejected one after another.

  Leviathan et al. 2022 (arXiv:2211.17192, Algorithm 1) and Chen et al. 2023
  (arXiv:2302.01318, Algorithm 2).

  >>> from specjax import testing
  >>> speculative_sampling(testing.MarkovModel(7), gamma=4).verifier
  Token()

  Args:
    model: draft model over the target's vocabulary.
    gamma: draft length; 0 drafts nothing.
  """
  return Strategy(draft_model(model, gamma), verifiers.Token())


def block_verification(model: Model, gamma: int) -> Strategy:
  """Drafts a chain and verifies it as a block.

  Sun et al. 2024 (arXiv:2403.10444, Algorithm 2). On average it accepts at
  least as many tokens as `speculative_sampling`.

  >>> from specjax import testing
  >>> block_verification(testing.MarkovModel(7), gamma=4).verifier
  Block()

  Args:
    model: draft model over the target's vocabulary.
    gamma: draft length.
  """
  return speculative_sampling(model, gamma)._replace(verifier=BLOCK)


def early_stopping(model: Model, gamma: int,
                   stop: stop_rules.StopRule = STOP,
                   verifier: Verifier = BLOCK) -> Strategy:
  """Drafts a chain that ends early by a stop rule.

  Draft & Verify (Zhang et al. 2023, arXiv:2309.08168) by default; other rules
  are in `methods.stop_rules`.

  >>> from specjax import testing
  >>> rule = stop_rules.Confidence(threshold=0.4)
  >>> drafter, _ = early_stopping(testing.MarkovModel(7), gamma=4, stop=rule)
  >>> drafter.stop.threshold, "autoregressive" in drafter.provides
  (0.4, False)

  Args:
    model: draft model over the target's vocabulary.
    gamma: maximal draft length.
    stop: stop rule.
    verifier: rule for chains. It must not require an autoregressive drafter.
  """
  return Strategy(draft_model(model, gamma, stop=stop), verifier)


def greedy_block_verification(model: Model, gamma: int) -> Strategy:
  """Drafts a chain and verifies it with greedy block verification.

  Sun et al. 2024 (arXiv:2403.10444, Algorithms 4 to 6). The rule accepts the
  most tokens in a single round. To stay exact, it modifies the target
  distribution of the following rounds. These rounds accept fewer tokens, and
  the loss can outweigh the gain.

  >>> from specjax import testing
  >>> greedy_block_verification(testing.MarkovModel(7), gamma=4).verifier
  GreedyBlock()

  Args:
    model: draft model over the target's vocabulary.
    gamma: draft length.
  """
  return speculative_sampling(model, gamma)._replace(
      verifier=verifiers.GreedyBlock())


def specinfer(model: Model, parents: Sequence[int]) -> Strategy:
  """Drafts a tree of i.i.d. children for recursive rejection sampling.

  Miao et al. 2023 (arXiv:2305.09781, multi-step speculative sampling).

  >>> from specjax import testing, trees
  >>> drafter, _ = specinfer(testing.MarkovModel(7), trees.full_tree((2, 1)))
  >>> drafter.num_nodes, "iid" in drafter.provides
  (5, True)

  Args:
    model: draft model over the target's vocabulary.
    parents: draft tree of N nodes, see `specjax.trees`.
  """
  return _tree(model, parents, "iid", verifiers.Recursive())


def spectr(model: Model, parents: Sequence[int]) -> Strategy:
  """Drafts a tree of i.i.d. children for the verifier K-SEQ.

  Sun et al. 2023 (arXiv:2310.15141). The paper drafts K chains of L tokens,
  which is the tree `trees.full_tree((K, *[1] * (L - 1)))`.

  >>> from specjax import testing, trees
  >>> spectr(testing.MarkovModel(7), trees.full_tree((3, 1))).verifier
  KSeq()

  Args:
    model: draft model over the target's vocabulary.
    parents: draft tree of N nodes.
  """
  return _tree(model, parents, "iid", verifiers.KSeq())


def sequoia(model: Model, parents: Sequence[int]) -> Strategy:
  """Drafts a static tree without replacement for recursive rejection sampling.

  Chen et al. 2024 (arXiv:2402.12374). Siblings are drawn without replacement.
  `trees.sequoia_tree` computes the best tree for measured acceptance rates.

  >>> from specjax import testing, trees
  >>> best = trees.sequoia_tree([0.5, 0.3], nodes=4)
  >>> drafter, verifier = sequoia(testing.MarkovModel(7), best)
  >>> drafter.shape.parents, verifier
  ((-1, 0, 0, 1), Recursive())

  Args:
    model: draft model over the target's vocabulary.
    parents: draft tree of N nodes.
  """
  return _tree(model, parents, "without_replacement", verifiers.Recursive())


def rsd(model: Model, branching: Sequence[int]) -> Strategy:
  """Drafts a tree with constant branching per level (RSD-C).

  Jeon et al. 2024 (arXiv:2402.14160). Siblings are drawn without replacement,
  with the same distribution as in the paper's Gumbel-top-k trick. Recursive
  rejection sampling verifies them.

  >>> from specjax import testing, trees
  >>> rsd(testing.MarkovModel(7), branching=(2, 2, 1)).drafter.num_nodes
  11

  Args:
    model: draft model over the target's vocabulary.
    branching: number of children of each node at depth 0, 1, ...
  """
  return sequoia(model, shapes.full_tree(branching))


def traversal(model: Model, parents: Sequence[int]) -> Strategy:
  """Drafts a tree without replacement for traversal verification.

  Weng et al. 2025 (arXiv:2505.12398). The rule verifies the tree from the
  leaves to the root. On a chain it equals block verification.

  >>> from specjax import testing, trees
  >>> traversal(testing.MarkovModel(7), trees.full_tree((2, 2))).verifier
  Traversal()

  Args:
    model: draft model over the target's vocabulary.
    parents: draft tree of N nodes.
  """
  return sequoia(model, parents)._replace(verifier=TRAVERSAL)


def hybrid_tree(model: Model, parents: Sequence[int]) -> Strategy:
  """Drafts one sampled child and the most likely children of every node.

  Hu et al. 2025 (arXiv:2502.18779).

  >>> from specjax import testing, trees
  >>> drafter, _ = hybrid_tree(testing.MarkovModel(7), trees.full_tree((3,)))
  >>> drafter.shape.proposal
  'hybrid'

  Args:
    model: draft model over the target's vocabulary.
    parents: draft tree of N nodes.
  """
  return _tree(model, parents, "hybrid", verifiers.Recursive())


def top_k_tree(model: Model, parents: Sequence[int]) -> Strategy:
  """Drafts the most likely children of every node, verified by `TargetWalk`.

  Miao et al. 2023 (arXiv:2305.09781, expansion-based speculation). `TargetWalk`
  samples the target's token at a node. If a child has this token, it continues
  there. For deterministic drafts no exact rule accepts more tokens in one
  round.

  >>> from specjax import testing, trees
  >>> top_k_tree(testing.MarkovModel(7), trees.full_tree((3, 2))).verifier
  TargetWalk()

  Args:
    model: draft model over the target's vocabulary.
    parents: draft tree of N nodes.
  """
  return _tree(model, parents, "top_k", verifiers.TargetWalk())


def _tree(model: Model, parents: Sequence[int], proposal: str,
          verifier: Verifier) -> Strategy:
  return Strategy(NetworkDrafter(
      network=LanguageModel(model=model),
      shape=Tree(tuple(parents), proposal)), verifier)


def eagle2_tree(model: Model, depth: int = 6, top_k: int = 10,
                num_nodes: int = 60) -> Strategy:
  """Drafts the likeliest nodes of a tree expanded by the draft model.

  The dynamic draft trees of EAGLE-2 (Li et al. 2024, arXiv:2406.16858, section
  4), for any language model. The draft is deterministic, and
  `verifiers.TargetWalk` verifies it.

  >>> from specjax import testing
  >>> eagle2_tree(testing.MarkovModel(7), 3, 2, 6).drafter.num_nodes
  6

  Args:
    model: draft model over the target's vocabulary.
    depth: number of levels below the root; each level costs one pass of the
      model.
    top_k: number of nodes per level that get children, and number of children
      of each.
    num_nodes: number N of nodes of the draft, including the root.
  """
  return Strategy(NetworkDrafter(
      network=LanguageModel(model=model),
      shape=Best(depth, top_k, num_nodes)), verifiers.TargetWalk())
