"""The literature's methods, each as a drafter and a verifier.

A strategy is a pair of parts that belong together: how tokens are proposed and
how they are judged. The parts do all of the work and can be combined in other
ways; a `Decoder` refuses a pair that would not be exact.

>>> import jax
>>> import specjax as sj
>>> from specjax import testing
>>> model = testing.MarkovModel(7)
>>> table = model.init(jax.random.key(0))
>>> drafter, verifier = block_verification(model, gamma=3)
>>> decoder = sj.Decoder(target=model, drafter=drafter, verifier=verifier)
>>> params = {"target": table, "drafter": table}
>>> text = decoder.generate(params, [[1]], jax.random.key(1), max_new_tokens=8)
>>> int(text.stats.active[0])  # the drafter is the target: rounds of 4 tokens
2

Every strategy is lossless unless its docstring says LOSSY. `params["drafter"]`
is what the drafter's docstring says: the parameters of a language model or of
heads, or a tuple of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from specjax import drafters
from specjax import trees
from specjax import verifiers
from specjax.data import Retokenizer
from specjax.drafters import stop_rules
from specjax.drafters.hierarchy import CacheView
from specjax.models.heads import BlockwiseHeads
from specjax.models.heads import FeatureHeads
from specjax.models.heads import HydraHeads
from specjax.models.heads import KangarooAdapter
from specjax.models.heads import LookaheadEmbeddings
from specjax.models.heads import MedusaHeads
from specjax.models.heads import ParallelHeads
from specjax.models.shortened import Shortened
from specjax.models.sublayers import Sublayers
from specjax.models.transformer import Transformer
from specjax.types import Drafter
from specjax.types import ModelFn
from specjax.types import Verifier

_TOKEN, _BLOCK = verifiers.Token(), verifiers.Block()
_TRAVERSAL = verifiers.Traversal()
_STOP = stop_rules.Adaptive()
_UNSURE = stop_rules.Confidence(threshold=0.6, likeliest=True)


class Strategy(NamedTuple):
  """A drafter and the verifier that judges its drafts."""

  drafter: Drafter
  verifier: Verifier


def autoregressive() -> Strategy:
  """Decoding with the target alone, a token a pass.

  >>> autoregressive().drafter.num_nodes  # the root alone
  1
  """
  return Strategy(drafters.Empty(), verifiers.Token())


def speculative_sampling(model: ModelFn, gamma: int) -> Strategy:
  """A chain of a small model's tokens, each accepted or rejected in turn.

  Leviathan et al. 2022 (arXiv:2211.17192, Algorithm 1) and Chen et al. 2023
  (arXiv:2302.01318, Algorithm 2).

  >>> from specjax import testing
  >>> speculative_sampling(testing.MarkovModel(7), gamma=4).verifier
  Token()

  Args:
    model: the small language model, over the target's vocabulary.
    gamma: drafted tokens of a round; 0 drafts nothing.
  """
  return Strategy(drafters.LanguageModel(model=model, gamma=gamma),
                  verifiers.Token())


def block_verification(model: ModelFn, gamma: int) -> Strategy:
  """The same chain, judged as a whole: never fewer tokens on average.

  Sun et al. 2024 (arXiv:2403.10444, Algorithm 2).

  >>> from specjax import testing
  >>> block_verification(testing.MarkovModel(7), gamma=4).verifier
  Block()

  Args:
    model: the small language model, over the target's vocabulary.
    gamma: drafted tokens of a round.
  """
  return speculative_sampling(model, gamma)._replace(verifier=_BLOCK)


def early_stopping(model: ModelFn, gamma: int,
                   stop: stop_rules.StopRule = _STOP,
                   verifier: Verifier = _BLOCK) -> Strategy:
  """The same chain, ended early where a rule expects a rejection.

  Draft & Verify (Zhang et al. 2023, arXiv:2309.08168) by default; the others
  are in `drafters.stop_rules`.

  >>> from specjax import testing
  >>> rule = drafters.stop_rules.Confidence(threshold=0.4)
  >>> drafter, _ = early_stopping(testing.MarkovModel(7), gamma=4, stop=rule)
  >>> drafter.stop.threshold, drafter.autoregressive
  (0.4, False)

  Args:
    model: the small language model, over the target's vocabulary.
    gamma: drafted tokens of a round, at most.
    stop: the rule.
    verifier: a rule for chains whose drafter need not be autoregressive.
  """
  return Strategy(drafters.LanguageModel(model=model, gamma=gamma, stop=stop),
                  verifier)


def greedy_block_verification(model: ModelFn, gamma: int) -> Strategy:
  """The same chain, judged by the rule that accepts most in a single round.

  Sun et al. 2024 (arXiv:2403.10444, Algorithms 4 to 6). What it gains in a
  round it can lose in the next ones, whose target it modifies.

  >>> from specjax import testing
  >>> greedy_block_verification(testing.MarkovModel(7), gamma=4).verifier
  GreedyBlock()

  Args:
    model: the small language model, over the target's vocabulary.
    gamma: drafted tokens of a round.
  """
  return speculative_sampling(model, gamma)._replace(
      verifier=verifiers.GreedyBlock())


def early_exit(exit: int, gamma: int, stop: stop_rules.StopRule | None = None,
               verifier: Verifier = _BLOCK) -> Strategy:
  """A chain of the target's own first layers, which verifying does not repeat.

  LayerSkip, Elhoushi et al. 2024 (arXiv:2404.16710, section 3.3). It pays with
  a target that was trained for it, as `train_lm.py --exit_scale` does.

  >>> drafter, _ = early_exit(exit=2, gamma=4)
  >>> drafter.exit, drafter.num_nodes, drafter.autoregressive
  (2, 5, True)

  Args:
    exit: layers that draft.
    gamma: drafted tokens of a round, at most.
    stop: a rule that ends a chain, or None.
    verifier: a rule for chains; with a stop rule one whose drafter need not be
      autoregressive.
  """
  return Strategy(drafters.EarlyExit(exit=exit, gamma=gamma, stop=stop),
                  verifier)


def kangaroo(adapter: KangarooAdapter, gamma: int,
             stop: stop_rules.StopRule | None = _UNSURE,
             verifier: Verifier = _BLOCK) -> Strategy:
  """The same with a trained layer after the exit.

  Liu et al. 2024 (arXiv:2404.18911), whose drafts end after a token of less
  than 0.6. At temperature 0 a law is certain, and none ends.

  >>> from specjax.models.heads import KangarooAdapter
  >>> adapter = KangarooAdapter(width=16, vocab_size=7, exit=1)
  >>> kangaroo(adapter, gamma=6).drafter.stop.threshold
  0.6

  Args:
    adapter: its parameters are `params["drafter"]`.
    gamma: drafted tokens of a round, at most; 6 in the paper.
    stop: a rule that ends a chain, or None.
    verifier: as in `early_exit`.
  """
  return Strategy(drafters.Kangaroo(adapter=adapter, gamma=gamma, stop=stop),
                  verifier)


def draft_and_verify(target: Transformer, sublayers: Sublayers, gamma: int,
                     stop: stop_rules.StopRule | None = _STOP,
                     verifier: Verifier = _BLOCK) -> Strategy:
  """A chain of the target without some of its attentions and MLPs.

  Zhang et al. 2023 (arXiv:2309.08168). What to leave out is searched by
  `training.skip_search`; `params["drafter"]` are the target's parameters.

  >>> from specjax import models, testing
  >>> target = testing.tiny_pair(7, layers=3).target
  >>> left = models.Sublayers.without(3, attention=[1])
  >>> draft_and_verify(target, left, gamma=4).drafter.model.sublayers.attention
  (0, 2)

  Args:
    target: the whole model.
    sublayers: what is left of it.
    gamma: drafted tokens of a round, at most.
    stop: a rule that ends a chain; None: all have gamma tokens.
    verifier: as in `early_exit`.
  """
  model = Shortened(target, sublayers)
  return Strategy(drafters.LanguageModel(model=model, gamma=gamma, stop=stop),
                  verifier)


def token_intersection(model: ModelFn, target_size: int, gamma: int,
                       verifier: Verifier = _BLOCK) -> Strategy:
  """A chain of a model with another vocabulary, of the tokens both know.

  Token-level intersection, Timor et al. 2025 (arXiv:2502.05202): its law
  restricted to the common tokens, for any rule at any temperature.

  >>> import jax
  >>> import specjax as sj
  >>> from specjax.testing import ListTokenizer, MarkovModel
  >>> vocabulary = sj.data.map_vocabularies(
  ...     drafter=ListTokenizer((b"a", b"b", b"ab")),
  ...     target=ListTokenizer((b"c", b"b", b"a", b"ba")))
  >>> vocabulary.shared  # a and b
  2
  >>> own, target = MarkovModel(3), MarkovModel(4)
  >>> decoder = sj.Decoder(
  ...     target=target, **token_intersection(own, 4, gamma=2)._asdict())
  >>> params = {"target": target.init(jax.random.key(0)), "drafter": {
  ...     "model": own.init(jax.random.key(1)), "vocabulary": vocabulary}}
  >>> text = decoder.generate(
  ...     params, [[3, 1]], jax.random.key(2), max_new_tokens=6)
  >>> len(text.tokens[0])
  8

  Args:
    model: the small language model, over a vocabulary of its own.
    target_size: V, `vocab_size` of the target.
    gamma: drafted tokens of a round, at least 1.
    verifier: a rule for chains.
  """
  return Strategy(drafters.TokenIntersection(
      model=model, target_size=target_size, gamma=gamma), verifier)


def string_match(model: ModelFn, texts: Retokenizer, gamma: int,
                 length: int | None = None) -> Strategy:
  """A text that another model writes, as the target's tokens of it.

  String-level exact match, Timor et al. 2025 (arXiv:2502.05202), for
  vocabularies with few tokens in common.

  >>> import jax
  >>> import specjax as sj
  >>> from specjax.testing import ListTokenizer, MarkovModel
  >>> texts = sj.data.Retokenizer(
  ...     drafter=ListTokenizer((b"a", b"b")),
  ...     target=ListTokenizer((b"ab", b"ba", b"a", b"b")))
  >>> own, target = MarkovModel(2), MarkovModel(4)
  >>> decoder = sj.Decoder(
  ...     target=target, **string_match(own, texts, gamma=2)._asdict())
  >>> params = {"target": target.init(jax.random.key(0)),
  ...           "drafter": own.init(jax.random.key(1))}
  >>> text = decoder.generate(
  ...     params, [[0, 1]], jax.random.key(2), max_new_tokens=6)
  >>> len(text.tokens[0])
  8

  Args:
    model: the small language model, over a vocabulary of its own.
    texts: its tokenizer and the target's.
    gamma: tokens of the target in a chain, at most.
    length: tokens that the model writes for them in a round; default: gamma.
  """
  return Strategy(drafters.StringMatch(
      model=model, texts=texts, gamma=gamma, length=length),
      verifiers.TargetWalk())


def specinfer(model: ModelFn, parents: Sequence[int]) -> Strategy:
  """A tree of independent draws, whose siblings are tried one after another.

  Miao et al. 2023 (arXiv:2305.09781, multi-step speculative sampling).

  >>> from specjax import testing
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

  >>> from specjax import testing
  >>> pair = testing.MarkovModel(7), testing.MarkovModel(7)
  >>> merged_specinfer(pair, length=3).drafter.num_nodes
  7

  Args:
    models: the small language models; `params["drafter"]` is a tuple.
    length: tokens of a path.
    num_paths: of all models together, which take turns; None: one each.
  """
  models = tuple(models)
  paths = drafters.Paths(
      models=models, num_paths=num_paths or len(models), length=length)
  return Strategy(paths, verifiers.Recursive())


def spectr(model: ModelFn, parents: Sequence[int]) -> Strategy:
  """Independent draws, of which K-SEQ chooses.

  Sun et al. 2023 (arXiv:2310.15141). The paper drafts K chains of L tokens,
  which is the tree `trees.full_tree((K, *[1] * (L - 1)))`.

  >>> from specjax import testing
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

  >>> from specjax import testing
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

  >>> from specjax import testing
  >>> rsd(testing.MarkovModel(7), branching=(2, 2, 1)).drafter.num_nodes
  11

  Args:
    model: the small language model, over the target's vocabulary.
    branching: children of a node at depth 0, 1, ...
  """
  return sequoia(model, trees.full_tree(branching))


def traversal(model: ModelFn, parents: Sequence[int]) -> Strategy:
  """Sequoia's drafts, whose paths are judged as wholes from the leaves up.

  Weng et al. 2025 (arXiv:2505.12398). On a chain it is block verification.

  >>> from specjax import testing
  >>> traversal(testing.MarkovModel(7), trees.full_tree((2, 2))).verifier
  Traversal()

  Args:
    model: the small language model, over the target's vocabulary.
    parents: N entries, the tree with its root.
  """
  return sequoia(model, parents)._replace(verifier=_TRAVERSAL)


def hybrid_tree(model: ModelFn, parents: Sequence[int]) -> Strategy:
  """One draw beside the likeliest children, tried one after another.

  Hu et al. 2025 (arXiv:2502.18779).

  >>> from specjax import testing
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
  drafts no rule accepts more.

  >>> from specjax import testing
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

  >>> from specjax import testing
  >>> eagle2_tree(testing.MarkovModel(7), 3, 2, 6).drafter.num_nodes
  6

  Args:
    model: the small language model, over the target's vocabulary.
    depth: levels below the root, a pass of the model each.
    top_k: nodes of a level that are expanded, and children of each.
    num_nodes: N, the root included.
  """
  return Strategy(
      drafters.DynamicTree(model=model, depth=depth, top_k=top_k,
                           num_nodes=num_nodes), verifiers.TargetWalk())


def medusa(heads: MedusaHeads | BlockwiseHeads, parents: Sequence[int],
           typical: bool = False) -> Strategy:
  """The likeliest tokens of the target's own heads, as a tree.

  Cai et al. 2024 (arXiv:2401.10774). The paper's rule is typical acceptance,
  which is LOSSY; the walk of the target is exact.

  >>> from specjax.models import heads
  >>> own = heads.MedusaHeads(width=8, vocab_size=7, heads=2)
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
  return Strategy(drafters.Medusa(heads=heads, parents=tuple(parents)), rule)


def sampled_medusa(heads: MedusaHeads | BlockwiseHeads, parents: Sequence[int],
                   proposal: str = "without_replacement",
                   verifier: Verifier = _TRAVERSAL) -> Strategy:
  """Draws from the laws of the target's heads, judged by a rule that uses q.

  Not in the Medusa paper (arXiv:2401.10774), which ranks: a head's law is known
  as well, so that any rule for sampled drafts is exact.

  >>> from specjax.models import heads
  >>> own = heads.MedusaHeads(width=8, vocab_size=7, heads=2)
  >>> sampled_medusa(own, (-1, 0, 1), "iid", verifiers.Block()).drafter.chain
  True

  Args:
    heads: of the target.
    parents: N entries, the tree with its root; `range(-1, K)` is a chain of K.
    proposal: how the children of a node are drawn, "without_replacement" or
      "iid".
    verifier: a rule for these drafts.
  """
  return Strategy(drafters.Medusa(
      heads=heads, parents=tuple(parents), proposal=proposal), verifier)


def hydra(heads: HydraHeads, parents: Sequence[int], proposal: str = "top_k",
          verifier: Verifier | None = None) -> Strategy:
  """Heads that read the drafted tokens draft a tree, or a chain.

  Ankner et al. 2024 (arXiv:2402.05109). The paper ranks; the law of a node
  given its path is known as well, so that drafts may be sampled from it.

  >>> from specjax.models import heads
  >>> own = heads.HydraHeads(width=8, vocab_size=7, heads=2)
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
    verifier = (verifiers.TargetWalk() if proposal == "top_k" else _TRAVERSAL)
  return Strategy(drafters.Hydra(
      heads=heads, parents=tuple(parents), proposal=proposal), verifier)


def blockwise(heads: MedusaHeads | BlockwiseHeads, gamma: int | None = None,
              top_k: int | None = None, distance: int | None = None
              ) -> Strategy:
  """The likeliest token of each head as a chain, kept while it matches.

  Stern et al. 2018 (arXiv:1811.03115). Their looser criteria are LOSSY.

  >>> from specjax.models import heads
  >>> own = heads.BlockwiseHeads(width=8, vocab_size=7, heads=3, hidden_width=4)
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
  return Strategy(drafters.Blockwise(heads=heads, gamma=gamma), rule)


def eagle(heads: FeatureHeads, parents: Sequence[int] | None = None,
          proposal: str = "without_replacement",
          verifier: Verifier | None = None) -> Strategy:
  """Draws of a layer that reads the target's features, as a chain or a tree.

  EAGLE (Li et al. 2024, arXiv:2401.15077) and EAGLE-3 (arXiv:2503.01840); the
  target is that which `heads.attach` returns.

  >>> import jax
  >>> import specjax as sj
  >>> from specjax.models import heads
  >>> pair = sj.testing.tiny_pair(5)
  >>> own = heads.Eagle3Heads.for_target(pair.target, 4, taps=(0, 1))
  >>> given = pair.params["target"]
  >>> target, params = own.attach(
  ...     pair.target, given, own.init(jax.random.key(0), given))
  >>> decoder = sj.Decoder(target=target, **eagle(own)._asdict())
  >>> text = decoder.generate(
  ...     params, [[3, 1]], jax.random.key(1), max_new_tokens=6)
  >>> len(text.tokens[0]), decoder.verifier
  (8, Block())

  Args:
    heads: the layer, of one module.
    parents: N entries, the tree with its root; None: a drawn chain of as many
      tokens as the layer forecasts.
    proposal: how the children of a node are drawn, see
      `drafters.TreeLanguageModel`; EAGLE's own trees are "top_k".
    verifier: None: block verification of a chain, traversal of a drawn tree,
      and the target's walk through a certain one.
  """
  if parents is None:
    drafter = drafters.EagleChain(heads=heads, gamma=heads.num_forecasts)
    return Strategy(drafter, verifier or _BLOCK)
  drafter = drafters.Eagle(
      heads=heads, parents=tuple(parents), proposal=proposal)
  return Strategy(drafter, verifier or (
      verifiers.TargetWalk() if proposal == "top_k" else
      _BLOCK if drafter.chain else _TRAVERSAL))


def eagle_dynamic(heads: FeatureHeads, depth: int = 6, top_k: int = 10,
                  num_nodes: int = 60) -> Strategy:
  """EAGLE's tree of the likeliest candidates, whose shape follows them.

  EAGLE-2 (Li et al. 2024, arXiv:2406.16858), and EAGLE-3 as it is served.

  >>> from specjax import testing
  >>> from specjax.models import heads
  >>> own = heads.Eagle1Heads.for_target(testing.tiny_pair(5).target, 4)
  >>> eagle_dynamic(own, depth=3, top_k=2, num_nodes=7).verifier
  TargetWalk()

  Args:
    heads: the layer, of one module.
    depth: levels below the root.
    top_k: nodes expanded of a level, and children of each.
    num_nodes: N, the root included.
  """
  return Strategy(drafters.DynamicEagle(
      heads=heads, depth=depth, top_k=top_k, num_nodes=num_nodes),
      verifiers.TargetWalk())


def eagle_sampled(heads: FeatureHeads, depth: int, expanded: int, children: int,
                  verifier: Verifier = _TRAVERSAL) -> Strategy:
  """A drawn tree of EAGLE's that is expanded where the layer is confident.

  Not in the EAGLE papers, whose trees are certain: nodes are expanded by their
  score and never dropped by it, so that rules for sampled trees are exact.

  >>> from specjax import testing
  >>> from specjax.models import heads
  >>> own = heads.Eagle1Heads.for_target(testing.tiny_pair(5).target, 4)
  >>> eagle_sampled(own, depth=3, expanded=2, children=2).drafter.num_nodes
  11

  Args:
    heads: the layer, of one module.
    depth: levels below the root.
    expanded: nodes of a level that get children.
    children: of each, and of the root.
    verifier: a rule for drawn trees.
  """
  return Strategy(drafters.SampledEagle(
      heads=heads, depth=depth, expanded=expanded, children=children), verifier)


def mtp(heads: FeatureHeads, gamma: int | None = None,
        verifier: Verifier = _BLOCK) -> Strategy:
  """A chain of modules of multi-token prediction, each one token of it.

  DeepSeek-V3 (arXiv:2412.19437, section 2.2) and Gloeckle et al. 2024
  (arXiv:2404.19737). One module that is used again and again (FastMTP,
  arXiv:2509.18362) drafts as EAGLE does.

  >>> from specjax import testing
  >>> from specjax.models import heads
  >>> target = testing.tiny_pair(5).target
  >>> mtp(heads.MTPHeads.for_target(target, 3)).drafter.gamma
  3
  >>> again = heads.MTPHeads.for_target(target, 3, reuse=True)
  >>> mtp(again).drafter.num_nodes
  4

  Args:
    heads: its modules.
    gamma: drafted tokens of a round, at most as many as modules unless one is
      used again; None: as many as the layer forecasts.
    verifier: a rule for chains.
  """
  if heads.reuse:
    gamma = heads.num_forecasts if gamma is None else gamma
    return Strategy(
        drafters.EagleChain(heads=heads, gamma=gamma), verifier)
  return Strategy(drafters.MTP(heads=heads, gamma=gamma), verifier)


def pass_lookahead(embeddings: LookaheadEmbeddings, folded: bool = True,
                   count: int | None = None, verifier: Verifier = _BLOCK
                   ) -> Strategy:
  """What the target predicts after look-ahead tokens, as a chain.

  PaSS (Monea et al. 2023, arXiv:2311.13581). The decoder's target must hold the
  embeddings, see `models.heads.with_lookahead`.

  >>> from specjax.models import heads
  >>> own = heads.LookaheadEmbeddings(count=3, width=8)
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
  return Strategy(drafters.Lookahead(
      embeddings=embeddings, folded=folded, count=count), verifier)


def parallel(heads: ParallelHeads, gamma: int | None = None,
             parents: Sequence[int] | None = None, proposal: str = "iid",
             verifier: Verifier = _BLOCK,
             stop: stop_rules.StopRule | None = None) -> Strategy:
  """A chain or a tree drawn from the laws of one block.

  DSpark (arXiv:2607.05147) has a Markov head, by which the laws are conditional
  ones, and DFlash (arXiv:2602.06036) none. They are published with chains and
  token verification.

  >>> from specjax.models import heads
  >>> own = heads.ParallelHeads(
  ...     width=8, vocab_size=7, layers=1, heads=1, kv_heads=1, head_dim=8,
  ...     mlp_width=8, context_length=64, block_size=3, taps=(1,))
  >>> parallel(own).drafter.parents, parallel(own).verifier
  ((-1, 0, 1, 2), Block())

  Args:
    heads: of the target.
    gamma: drafted tokens of a chain, at most K; None: K.
    parents: N entries, a tree with its root, in place of the chain.
    proposal: how the children of a node are drawn, see `drafters.Parallel`.
    verifier: a rule for these drafts.
    stop: one of `drafters.stop_rules`, for a chain.
  """
  if parents is None:
    most = heads.num_forecasts
    parents = range(-1, most if gamma is None else min(gamma, most))
  return Strategy(drafters.Parallel(
      heads=heads, parents=tuple(parents), proposal=proposal, stop=stop),
      verifier)


def ddtree(heads: ParallelHeads, num_nodes: int = 64) -> Strategy:
  """The likeliest paths of one block, and a walk of the target over them.

  DDTree (arXiv:2604.12989): without a Markov head, the best tree of the laws.

  >>> from specjax.models import heads
  >>> own = heads.ParallelHeads(
  ...     width=8, vocab_size=7, layers=1, heads=1, kv_heads=1, head_dim=8,
  ...     mlp_width=8, context_length=64, block_size=3, taps=(1,))
  >>> ddtree(own, num_nodes=12).verifier
  TargetWalk()

  Args:
    heads: of the target.
    num_nodes: N, the root included.
  """
  drafter = drafters.ParallelTree(
      heads=heads, num_nodes=num_nodes, top_k=min(10, heads.vocab_size))
  return Strategy(drafter, verifiers.TargetWalk())


def prompt_lookup(gamma: int, max_ngram: int = 3, min_ngram: int = 2,
                  verifier: Verifier = _TOKEN) -> Strategy:
  """A copy of what followed the last tokens earlier in the row.

  Saxena 2023 (https://github.com/apoorvumang/prompt-lookup-decoding), called
  n-gram speculation elsewhere. There the first match is copied, up to the
  text's end; here the latest one, and over again where the text ends. It needs
  no parameters.

  >>> import jax
  >>> import specjax as sj
  >>> target = sj.testing.MarkovModel(4)
  >>> table = 50 * jax.numpy.roll(jax.numpy.eye(4), 1, axis=1)  # 0, 1, 2, 3, 0
  >>> decoder = sj.Decoder(target=target, **prompt_lookup(gamma=7)._asdict())
  >>> text = decoder.generate({"target": table}, [[0, 1, 2, 3, 0, 1]],
  ...                         jax.random.key(0), max_new_tokens=16)
  >>> text.tokens[0].tolist()[-5:], int(text.stats.active[0])  # rounds
  ([1, 2, 3, 0, 1], 2)

  Args:
    gamma: tokens that are copied.
    max_ngram: last tokens that are looked for, at most.
    min_ngram: and at least. A copy after a single token that agrees seldom
      pays for its verification.
    verifier: a rule for chains; all accept the same of such drafts.
  """
  return Strategy(drafters.NGram(
      gamma=gamma, max_ngram=max_ngram, min_ngram=min_ngram), verifier)


def llma(gamma: int, max_ngram: int = 3, own_text: bool = False,
         verifier: Verifier = _TOKEN) -> Strategy:
  """A copy out of texts that come with the prompt, such as retrieved ones.

  Yang et al. 2023 (arXiv:2304.04487): `prefill` and `generate` take the texts
  as `context={"reference": drafters.reference_texts(...)}`.

  >>> drafters.reference_texts([[[5, 6, 7], [5, 8]], []])[:, :7].tolist()
  [[5, 6, 7, -1, 5, 8, -1], [-1, -1, -1, -1, -1, -1, -1]]
  >>> llma(gamma=8).drafter.num_nodes
  9

  Args:
    gamma: tokens that are copied.
    max_ngram: last tokens that are looked for, at most.
    own_text: whether the row's own text is searched as well.
    verifier: a rule for chains; all accept the same of such drafts.
  """
  return Strategy(drafters.Reference(
      gamma=gamma, max_ngram=max_ngram, own_text=own_text), verifier)


def token_recycling(parents: Sequence[int] | None = None) -> Strategy:
  """A tree of what the target found likely after the same tokens before.

  Luo et al. 2024 (arXiv:2408.08696). It needs no parameters.

  >>> token_recycling(trees.full_tree((2, 2))).drafter.num_nodes
  7
  >>> token_recycling().verifier
  TargetWalk()

  Args:
    parents: N entries, the tree with its root; default:
      `drafters.recycling_tree()`.
  """
  parents = None if parents is None else tuple(parents)
  return Strategy(
      drafters.Recycling(parents=parents), verifiers.TargetWalk())


def suffix_decoding(gamma: int, proposal: str = "certain",
                    verifier: Verifier = _BLOCK) -> Strategy:
  """What followed the last tokens where they stood before, by its counts.

  SuffixDecoding, Oliaro et al. 2024 (arXiv:2411.04975). Drawing from the counts
  is not in the paper: of certain drafts all rules accept as much, and of drawn
  ones block verification accepts most.

  >>> suffix_decoding(gamma=8).drafter.num_coins  # certain
  0
  >>> suffix_decoding(gamma=8, proposal="sampled").drafter.num_coins
  16

  Args:
    gamma: drafted tokens of a round, at most.
    proposal: "certain" or "sampled".
    verifier: a rule for chains.
  """
  return Strategy(drafters.Suffix(gamma=gamma, proposal=proposal), verifier)


def rest(nodes: int = 64, gamma: int = 10, max_match: int = 16) -> Strategy:
  """What follows the last tokens in a corpus, as a tree of frequent prefixes.

  REST, He et al. 2023 (arXiv:2311.08252). `params["drafter"]` is a datastore,
  see `experiments/build_datastore.py`. Of the places where the tokens stand 64
  are counted, evenly out of all; the published code counts up to 5000.

  >>> rest().drafter.num_nodes, rest().verifier
  (64, TargetWalk())

  Args:
    nodes: N, the root included.
    gamma: tokens of the longest path.
    max_match: last tokens that are looked for, at most the datastore's depth.
  """
  return Strategy(
      drafters.Retrieval(nodes=nodes, gamma=gamma, max_match=max_match),
      verifiers.TargetWalk())


def cascade(model: ModelFn, drafter: Drafter, gamma: int,
            inner: Verifier = _BLOCK, verifier: Verifier = _BLOCK,
            tail: bool = False) -> Strategy:
  """A chain of a small model that is drafted for in turn, to any depth.

  Staged speculation (Spector and Re 2023, arXiv:2308.04623), the vertical
  cascade of CS Drafting (Chen et al. 2023, arXiv:2312.11462), TriForce (Sun et
  al. 2024, arXiv:2404.11912). The drafts are those of the small model alone,
  and need fewer of its passes.

  >>> import jax
  >>> import specjax as sj
  >>> small = sj.testing.MarkovModel(7)
  >>> tiny = drafters.LanguageModel(model=small, gamma=3)
  >>> table = small.init(jax.random.key(0))
  >>> decoder = sj.Decoder(
  ...     target=small, **cascade(small, tiny, gamma=8)._asdict())
  >>> params = {"target": table,
  ...           "drafter": {"target": table, "drafter": table}}
  >>> state = decoder.prefill(params, [[1]], jax.random.key(1), limits=20)
  >>> state, _ = decoder.decode_round(params, state)
  >>> int(state.lengths[0]) - 1, int(state.drafter.rounds[0])
  (9, 2)

  Args:
    model: the small language model, over the target's vocabulary.
    drafter: what drafts for it; it may be a cascade.
    gamma: drafted tokens of a round.
    inner: the rule between the two, lossless.
    verifier: a rule for chains.
    tail: whether the inner drafter drafts on after these tokens, as in the
      horizontal cascade of CS Drafting.
  """
  return Strategy(drafters.Cascade(
      model=model, drafter=drafter, gamma=gamma, verifier=inner, tail=tail),
      verifier)


def triforce(view: CacheView, drafter: Drafter, gamma: int,
             inner: Verifier = _BLOCK, verifier: Verifier = _BLOCK
             ) -> Strategy:
  """The target drafts from a part of its cache, and is drafted for in turn.

  TriForce (Sun et al. 2024, arXiv:2404.11912) for long contexts; with
  `drafters.Empty()` inside MagicDec (Sadhukhan et al. 2024, arXiv:2408.11049).

  >>> from specjax import cache_views, testing
  >>> tiny = drafters.LanguageModel(model=testing.MarkovModel(7), gamma=1)
  >>> view = cache_views.Retrieved(budget=4096, chunk=8)
  >>> triforce(view, tiny, gamma=6).drafter.num_nodes
  7

  Args:
    view: what the drafts read, of `cache_views`.
    drafter: what drafts for them, such as a tiny model with a cache
      `Streaming()`.
    gamma: drafted tokens of a round.
    inner: the rule between the two, lossless.
    verifier: a rule for chains.
  """
  return Strategy(drafters.Hierarchy(
      view=view, drafter=drafter, gamma=gamma, verifier=inner), verifier)


def online(model: ModelFn, gamma: int, learning_rate: float = 1e-3,
           positions: str = "path", verifier: Verifier = _BLOCK) -> Strategy:
  """A chain of a model that learns from the target's laws as it drafts.

  Online speculative decoding (Liu et al. 2023, arXiv:2310.07177), of a
  correction of the model's logits for each row.

  >>> from specjax import testing
  >>> model = testing.tiny_pair(7).drafter
  >>> online(model, gamma=4, positions="rejected").drafter.learning_rate
  0.001

  Args:
    model: the small language model, over the target's vocabulary.
    gamma: drafted tokens of a round.
    learning_rate: of Adam.
    positions: where it learns, see `drafters.Online`.
    verifier: a rule for chains whose drafter need not be autoregressive.
  """
  return Strategy(drafters.Online(
      model=model, gamma=gamma, learning_rate=learning_rate,
      positions=positions), verifier)


def fallback(first: Drafter, second: Drafter, verifier: Verifier = _BLOCK
             ) -> Strategy:
  """The drafts of one drafter, and of another one where that has none.

  As SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975) and SAM-Decoding (Hu
  et al. 2024, arXiv:2411.10666) fall back to a trained drafter.

  >>> from specjax.testing import MarkovModel
  >>> short = drafters.LanguageModel(model=MarkovModel(7), gamma=2)
  >>> long = drafters.LanguageModel(model=MarkovModel(7), gamma=5)
  >>> fallback(short, long).drafter.num_nodes
  6

  Args:
    first: the drafter that is preferred, row by row.
    second: the other one.
    verifier: a rule that is exact for both.
  """
  return Strategy(drafters.Fallback(first=first, second=second), verifier)


def merged(members: Sequence[Drafter], verifier: Verifier = _TRAVERSAL
           ) -> Strategy:
  """The drafts of several drafters in one tree, equal beginnings once.

  The merge of SpecInfer (Miao et al. 2023, arXiv:2305.09781) for drafters of
  any kind.

  >>> from specjax.testing import MarkovModel
  >>> short = drafters.LanguageModel(model=MarkovModel(7), gamma=2)
  >>> long = drafters.LanguageModel(model=MarkovModel(7), gamma=5)
  >>> merged((long, short)).drafter.num_nodes
  8

  Args:
    members: the drafters, in the order in which their drafts are tried.
    verifier: a rule for trees.
  """
  return Strategy(drafters.Merge(drafters=tuple(members)), verifier)


def _tree(model, parents, proposal, verifier):
  drafter = drafters.TreeLanguageModel(
      model=model, parents=tuple(parents), proposal=proposal)
  return Strategy(drafter, verifier)
