"""Methods whose drafter is made of other drafters."""

from collections.abc import Sequence

from specjax.methods.combined.cascade import Cascade
from specjax.methods.combined.fallback import Fallback
from specjax.methods.combined.merge import Merge
from specjax.methods.self_speculation.hierarchy import Hierarchy
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TRAVERSAL
from specjax.models.cache_views import CacheView
from specjax.types import Drafter
from specjax.types import ModelFn
from specjax.types import Verifier


def cascade(model: ModelFn, drafter: Drafter, gamma: int,
            inner: Verifier = BLOCK, verifier: Verifier = BLOCK,
            tail: bool = False) -> Strategy:
  """A chain of a small model that is drafted for in turn, to any depth.

  Staged speculation (Spector and Re 2023, arXiv:2308.04623), the vertical
  cascade of CS Drafting (Chen et al. 2023, arXiv:2312.11462), TriForce (Sun et
  al. 2024, arXiv:2404.11912). The drafts are those of the small model alone,
  and need fewer of its passes.

  >>> import jax
  >>> import specjax as sj
  >>> from specjax import drafters
  >>> small = sj.testing.MarkovModel(7)
  >>> tiny = drafters.LanguageModel(model=small, gamma=3)
  >>> table = small.init(jax.random.key(0))
  >>> decoder = cascade(small, tiny, gamma=8).decoder(small)
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
  return Strategy(Cascade(
      model=model, drafter=drafter, gamma=gamma, verifier=inner, tail=tail),
      verifier)


def triforce(view: CacheView, drafter: Drafter, gamma: int,
             inner: Verifier = BLOCK, verifier: Verifier = BLOCK
             ) -> Strategy:
  """The target drafts from a part of its cache, and is drafted for in turn.

  TriForce (Sun et al. 2024, arXiv:2404.11912) for long contexts; with
  `drafters.Empty()` inside MagicDec (Sadhukhan et al. 2024, arXiv:2408.11049).

  >>> from specjax import drafters, testing
  >>> from specjax.models import cache_views
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
  return Strategy(Hierarchy(
      view=view, drafter=drafter, gamma=gamma, verifier=inner), verifier)


def fallback(first: Drafter, second: Drafter, verifier: Verifier = BLOCK
             ) -> Strategy:
  """The drafts of one drafter, and of another one where that has none.

  As SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975) and SAM-Decoding (Hu
  et al. 2024, arXiv:2411.10666) fall back to a trained drafter.

  >>> from specjax import drafters
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
  return Strategy(Fallback(first=first, second=second), verifier)


def merged(members: Sequence[Drafter], verifier: Verifier = TRAVERSAL
           ) -> Strategy:
  """The drafts of several drafters in one tree, equal beginnings once.

  The merge of SpecInfer (Miao et al. 2023, arXiv:2305.09781) for drafters of
  any kind.

  >>> from specjax import drafters
  >>> from specjax.testing import MarkovModel
  >>> short = drafters.LanguageModel(model=MarkovModel(7), gamma=2)
  >>> long = drafters.LanguageModel(model=MarkovModel(7), gamma=5)
  >>> merged((long, short)).drafter.num_nodes
  8

  Args:
    members: the drafters, in the order in which their drafts are tried.
    verifier: a rule for trees.
  """
  return Strategy(Merge(drafters=tuple(members)), verifier)
