"""What has to pass the bar: every drafter, rule, objective and cache.

A newcomer is listed here, and `contribution_test.py` does the rest; a cache is
listed as that of the models of a drafter. The last entries of each list are
examples of CONTRIBUTING.md, short and correct.
"""

import dataclasses
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import newcomers
import numpy as np

import specjax as sj
from specjax import kv_cache
from specjax import testing
from specjax.data import datastores
from specjax.drafters import Blockwise
from specjax.drafters import Cascade
from specjax.drafters import DynamicEagle
from specjax.drafters import DynamicTree
from specjax.drafters import Eagle
from specjax.drafters import EagleChain
from specjax.drafters import EarlyExit
from specjax.drafters import Fallback
from specjax.drafters import Hierarchy
from specjax.drafters import Hydra
from specjax.drafters import Kangaroo
from specjax.drafters import LanguageModel
from specjax.drafters import Lookahead
from specjax.drafters import Medusa
from specjax.drafters import Merge
from specjax.drafters import MTP
from specjax.drafters import MTPTree
from specjax.drafters import NGram
from specjax.drafters import Online
from specjax.drafters import Parallel
from specjax.drafters import ParallelTree
from specjax.drafters import Paths
from specjax.drafters import Recycling
from specjax.drafters import Reference
from specjax.drafters import Retrieval
from specjax.drafters import SampledEagle
from specjax.drafters import stop_rules
from specjax.drafters import StringMatch
from specjax.drafters import Suffix
from specjax.drafters import Swift
from specjax.drafters import TokenIntersection
from specjax.drafters import TreeLanguageModel
from specjax.models import heads as heads_lib
from specjax.training import objectives

VOCAB = 5
WIDTH, HEADS = 16, 3
UNEVEN = (-1, 0, 1, 2, 1, 0, 5, 0)  # depth-first; the first child is deepest
CHAIN = (-1, 0, 1, 2)

_MEDUSA = heads_lib.MedusaHeads(width=WIDTH, vocab_size=VOCAB, heads=HEADS)
_BLOCKWISE = heads_lib.BlockwiseHeads(
    width=WIDTH, vocab_size=VOCAB, heads=HEADS, hidden_width=8)
_HYDRA = heads_lib.HydraHeads(
    width=WIDTH, vocab_size=VOCAB, heads=HEADS, blocks=2)
_EMBEDDINGS = heads_lib.LookaheadEmbeddings(count=HEADS, width=WIDTH)
_PARALLEL = heads_lib.ParallelHeads(
    width=WIDTH, vocab_size=VOCAB, layers=1, heads=2, kv_heads=1, head_dim=8,
    mlp_width=8, context_length=512, block_size=HEADS, taps=(0, 1),
    markov="plain", markov_rank=4, confidence="markov")


@functools.cache
def pair(noise: float = 0.5) -> testing.TinyPair:
  """A target and a drafter that agree often, but not always."""
  return testing.tiny_pair(VOCAB, noise=noise, seed=1)


@functools.cache
def disturbed(heads):
  """Parameters of untrained heads, moved so that each has its own laws."""
  rng = np.random.default_rng(0)
  params = heads.init(jax.random.key(0), pair().params["target"])
  return jax.tree.map(
      lambda x: x + 0.4 * rng.normal(size=x.shape).astype(np.float32), params)


@dataclasses.dataclass(frozen=True)
class Contributed:
  """A drafter with a rule that is exact for it, and what it drafts for.

  Attributes:
    drafter: the drafter.
    rule: a rule that is exact for it, the strongest as a rule.
    target: the model; None: that of `pair`.
    params: of the decoder; None: those of `pair`.
    context: from a number of rows to what the drafter reads of each.
    controller: of the decoder.
  """

  drafter: Any
  rule: Any
  target: Any = None
  params: Any = None
  context: Any = lambda rows: None
  controller: Any = None

  @property
  def model(self):
    return self.target or pair().target

  @property
  def parameters(self):
    return self.params or pair().params


def _lm(cls, **kwargs):
  return cls(model=pair().drafter, **kwargs)


def _paths(models):
  worse = pair(1.0).params["drafter"]
  own = (pair().params["drafter"], worse)[:models]
  return dict(
      drafter=Paths(models=(pair().drafter,) * models, num_paths=3, length=2),
      params={**pair().params, "drafter": own})


def _heads(heads, **kwargs):
  params = {"target": pair().params["target"], "drafter": disturbed(heads)}
  return Contributed(params=params, **kwargs)


def _layer(kind, drafter, rule, count=3, drafts=None, controller=None,
           **options):
  heads = kind.for_target(pair().target, count, **options)
  target, params = heads.attach(
      pair().target, pair().params["target"], disturbed(heads))
  return Contributed(drafter(heads=heads, **(drafts or {})), rule, target,
                     params, controller=controller)


def _lookahead(rule, **kwargs):
  model, params = heads_lib.with_lookahead(
      pair().target, pair().params["target"], disturbed(_EMBEDDINGS))
  return Contributed(Lookahead(embeddings=_EMBEDDINGS, **kwargs), rule, model,
                     {"target": params, "drafter": ()})


def _parallel(drafter, rule, options, controller=None, **kwargs):
  heads = dataclasses.replace(_PARALLEL, **options)
  model, params = heads.attach(
      pair().target, pair().params["target"], disturbed(heads))
  return Contributed(drafter(heads=heads, **kwargs), rule, model, params,
                     controller=controller)


# Another vocabulary than the target's: of its tokens a has two ids, abca is
# three draft tokens, d is none, and the drafter's bc and ca are no token. In
# its place a drafter writes ab as two.
TARGET_TOKENS = testing.ListTokenizer((b"a", b"abca", b"c", b"b", b"d"))
WRITTEN_TOKENS = testing.ListTokenizer((b"a", b"b", b"c", b"ab", b"d"))
DRAFT_TOKENS = testing.ListTokenizer((b"c", b"a", b"b", b"a", b"bc", b"ca"))


def _other_vocabulary(drafter, rule, like, in_params, **kwargs):
  like = jnp.array(like)  # whose weights a draft token has
  params = pair().params["drafter"]
  own = {**params, "embedding": params["embedding"][like],
         "head": params["head"][:, like]}
  model = sj.models.Transformer(dataclasses.replace(
      pair().drafter.config, vocab_size=len(like)))
  return Contributed(
      drafter(model=model, gamma=3, **kwargs), rule,
      params={**pair().params, "drafter": in_params(own)})


def _token_intersection():
  vocabulary = sj.data.map_vocabularies(DRAFT_TOKENS, TARGET_TOKENS)
  return _other_vocabulary(
      TokenIntersection, sj.verifiers.GreedyBlock(), [2, 0, 3, 0, 1, 4],
      lambda own: {"model": own, "vocabulary": vocabulary}, target_size=VOCAB)


def _string_match():
  return _other_vocabulary(
      StringMatch, sj.verifiers.TargetWalk(), [2, 0, 1, 0, 3, 4],
      lambda own: own, lookback=3,
      texts=sj.data.Retokenizer(DRAFT_TOKENS, WRITTEN_TOKENS))


@functools.cache
def store():
  """A datastore of random documents, with every pair of tokens."""
  rng = np.random.default_rng(0)
  return jax.device_put(datastores.index(
      [rng.integers(VOCAB, size=n) for n in (1, 40, 7, 200)], VOCAB, depth=4))


def _counted(cls, rule, **kwargs):
  drafter = cls(gamma=3, max_matches=8, vocab_size=VOCAB, **kwargs)
  return Contributed(drafter, rule, params={**pair().params,
                                            "drafter": store()})


# Short and correct examples; CONTRIBUTING.md has most of them.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repeat:
  """Drafts the token before the root again, with certainty."""

  vocab_size: int
  num_nodes = 2
  chain = iid = conditional = autoregressive = True

  def init(self, params, prompt, prefill_output):
    return None  # no state of its own

  def propose(self, params, keys, state):
    at = jnp.maximum(state.lengths[:, None] - jnp.array([2, 1]), 0)
    last = jnp.take_along_axis(state.tokens, at, axis=1)
    probs = jax.nn.one_hot(last[:, :1], self.vocab_size)
    return jax.vmap(sj.Draft.chain)(last[:, 1], last[:, :1], probs), None

  def commit(self, params, drafter, draft, verdict, target_output, count):
    return drafter


@dataclasses.dataclass(frozen=True)
class FirstToken:
  """Token verification of the first drafted token; the others are dropped."""

  def law(self, draft, target_probs):
    x, p, q = draft.tokens[1], target_probs[0], draft.probs[1]
    drawn = q.at[x].get(mode="fill", fill_value=0)  # 0: padding
    accept = jnp.where(
        drawn > 0, jnp.minimum(1, p[x] / jnp.where(drawn > 0, drawn, 1)), 0)
    rest = jnp.maximum(p - q, 0)
    some = rest.sum() > 0
    rest = jnp.where(some, rest / jnp.where(some, rest.sum(), 1), p)
    stop = jnp.zeros(len(target_probs)).at[:2].set(jnp.stack(
        [1 - accept, accept])).astype(p.dtype)
    return sj.Law(stop=stop, next_token=target_probs.at[0].set(rest))


@struct.dataclass
class SlotCache:
  """A cache whose arrays have the slots before the heads: `[B, C, H, D]`."""

  k: tuple[jax.Array, ...]
  v: tuple[jax.Array, ...]
  lengths: jax.Array

  @classmethod
  def empty(cls, *, layers, batch, heads, capacity, head_dim, dtype):
    zeros = (jnp.zeros((batch, capacity, heads, head_dim), dtype),) * layers
    return cls(k=zeros, v=zeros, lengths=jnp.zeros((batch,), jnp.int32))

  @property
  def capacity(self):
    return self.k[0].shape[1]

  def append(self, layer, k, v, after=0):
    return self._put(layer, k, v, self.lengths + after)

  def _put(self, layer, k, v, starts):
    at = starts[:, None] + jnp.arange(k.shape[1])
    put = lambda all, new: tuple(
        old.at[jnp.arange(len(at))[:, None], at].set(new) if i == layer else old
        for i, old in enumerate(all))
    return self.replace(k=put(self.k, k), v=put(self.v, v))

  def attend(self, layer, query, ancestors):
    slot = jnp.arange(self.capacity) - self.lengths[:, None]
    block = jnp.pad(ancestors, ((0, 0), (0, 0), (0, self.capacity)))
    index = jnp.broadcast_to(jnp.maximum(slot, 0)[:, None], (
        *ancestors.shape[:2], self.capacity))
    visible = (slot < 0)[:, None] | jnp.take_along_axis(block, index, axis=2)
    return kv_cache.grouped_attention(
        query, self.k[layer].swapaxes(1, 2), self.v[layer].swapaxes(1, 2),
        visible & (slot < ancestors.shape[2])[:, None])

  def commit(self, path, count):
    take = lambda x: jnp.take_along_axis(
        x, (self.lengths[:, None] + path)[..., None, None], axis=1)
    new = self
    for i, (k, v) in enumerate(zip(self.k, self.v)):
      new = new._put(i, take(k), take(v), self.lengths)
    return new.rollback(self.lengths + count)

  def rollback(self, lengths):
    return self.replace(lengths=jnp.asarray(lengths, jnp.int32))

  def specs(self, axis, rows=None):
    split = lambda all: (PartitionSpec(rows, None, axis, None),) * len(all)
    return SlotCache(split(self.k), split(self.v), PartitionSpec(rows))


@dataclasses.dataclass(frozen=True)
class Bigram:
  """A model whose logits are the row of a table: the last token's."""

  vocab_size: int = VOCAB
  context_length: int = 512

  def init_cache(self, params, batch, capacity):
    return testing.LengthCache(lengths=jnp.zeros((batch,), jnp.int32))

  def __call__(self, params, tokens, depths=None, ancestors=None, cache=None):
    logits = params[tokens]
    return sj.ModelOutput(logits=logits, hidden=logits, cache=cache)


def _bigram():
  tables = 2 * jax.random.normal(jax.random.key(5), (2, VOCAB, VOCAB))
  return Contributed(
      LanguageModel(model=Bigram(), gamma=2), sj.verifiers.Block(), Bigram(),
      {"target": tables[0], "drafter": (tables[0] + tables[1]) / 2})


def _with_cache(cache):
  model = sj.models.Transformer(pair().target.config, cache=cache)
  return Contributed(TreeLanguageModel(model=model, parents=UNEVEN),
                     sj.verifiers.Traversal(), model)


def _features(dynamic):
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  own = {"mix": draw(WIDTH, WIDTH) / 4, "embedding": draw(VOCAB, WIDTH),
         "head": draw(WIDTH, VOCAB)}
  return Contributed(
      newcomers.FeatureTree(parents=(-1, 0, 0, 1, 1, 2, 3), dynamic=dynamic),
      (sj.verifiers.TargetWalk if dynamic else sj.verifiers.Traversal)(),
      params={**pair().params, "drafter": own})


def _vocabulary_subset():
  model = sj.models.VocabularySubset(pair().drafter)
  own = model.parameters(pair().params["drafter"], [0, 2, 3])
  return Contributed(
      LanguageModel(model=model, gamma=3), sj.verifiers.GreedyBlock(),
      params={**pair().params, "drafter": own})


class Deeper(sj.models.Transformer):
  """Three layers; a class of its own, for its greedy texts are others."""


@functools.cache
def deep():
  """A target with layers to leave out, and its parameters."""
  found = testing.tiny_pair(VOCAB, seed=2, scale=12.0, layers=3)
  return Deeper(found.target.config), found.params["target"]


def _part_of_target(make, rule, own=lambda target: target):
  """A drafter that is made of the target: `make(model)`."""
  model, target = deep()
  return Contributed(make(model), rule, model,
                     {"target": target, "drafter": own(target)})


def _kangaroo():
  adapter = heads_lib.KangarooAdapter(width=WIDTH, vocab_size=VOCAB, exit=1)
  return _part_of_target(
      lambda _: Kangaroo(adapter=adapter, gamma=3,
                         stop=stop_rules.Confidence(threshold=0.5)),
      sj.verifiers.Block(), lambda target: adapter.init(None, target))


def _skipping():
  left = sj.models.Sublayers.without(3, attention=[1], mlp=[2])
  return _part_of_target(
      lambda model: LanguageModel(
          model=sj.models.Shortened(model, left), gamma=3),
      sj.verifiers.GreedyBlock())


def _quantized():
  """The target's own copy, with keys and values of few bits."""
  model = sj.models.Transformer(pair().target.config,
                                cache=sj.QuantizedKV(bits=4))
  own = sj.models.quantize(pair().params["target"], bits=4)
  return Contributed(
      LanguageModel(model=model, gamma=3), sj.verifiers.GreedyBlock(),
      params={**pair().params, "drafter": own})


def _window():
  """Autoregressive: what is seen of a text does not depend on the round."""
  cache = sj.Streaming(sinks=1, window=3, slack=6)
  return Contributed(
      LanguageModel(model=sj.models.Transformer(
          pair().target.config, cache=cache), gamma=3),
      sj.verifiers.GreedyBlock(),
      params={**pair().params, "drafter": pair().params["target"]})


def _hierarchy():
  """TriForce: a tiny drafter, the target with few chunks, the target."""
  tiny = sj.models.Transformer(
      pair().drafter.config, cache=sj.Streaming(sinks=1, window=4, slack=16))
  return Contributed(
      Hierarchy(view=sj.cache_views.Retrieved(budget=4, chunk=2, recent=3),
                drafter=LanguageModel(model=tiny, gamma=1), gamma=3),
      sj.verifiers.Block(),
      params={**pair().params, "drafter": {
          "target": pair().params["target"],
          "drafter": pair().params["drafter"]}})


def _references():
  text = sj.drafters.reference_texts([[[3, 0, 2, 4], [1, 1, 2, 0, 2, 0]]])
  return Contributed(
      Reference(gamma=3, own_text=True, vocab_size=VOCAB), sj.verifiers.Token(),
      context=lambda rows: {"reference": np.tile(text, (rows, 1))})


def _reference():
  text = [3, 0, 2, 4, 1, 1, 2, 0, -1]
  return Contributed(
      newcomers.Reference(gamma=3, vocab_size=VOCAB), sj.verifiers.Block(),
      context=lambda rows: {"reference": np.tile(text, (rows, 1))})


def _cascade():
  """Of three stages."""
  middle = testing.tiny_pair(VOCAB, seed=1, noise=0.3)
  return Contributed(
      Cascade(model=middle.drafter, drafter=NGram(gamma=2), gamma=3),
      sj.verifiers.GreedyBlock(),
      params={**pair().params,
              "drafter": {"target": middle.params["drafter"]}})


def _fallback():
  """N-grams, which often have nothing, and a language model."""
  return Contributed(
      Fallback(first=NGram(gamma=2, min_ngram=2),
               second=_lm(LanguageModel, gamma=3)), sj.verifiers.Block(),
      params={**pair().params, "drafter": (None, pair().params["drafter"])})


def _fallback_to_another_vocabulary():
  """It misses what the n-grams drafted, and rounds without a draft."""
  other = _token_intersection()
  return Contributed(
      Fallback(first=NGram(gamma=2, min_ngram=2), second=other.drafter),
      sj.verifiers.Block(),
      params={**other.params, "drafter": (None, other.params["drafter"])},
      controller=sj.Controller(
          lengths=(0, 3), seconds=(1.0, 1.1), first=(1.0, 1.05)))


def _merge():
  """Drawn tokens, certain ones, and a certain tree that remembers."""
  return Contributed(
      Merge(drafters=(_lm(LanguageModel, gamma=2), NGram(gamma=2),
                      Recycling(parents=(-1, 0, 0, 1)))),
      sj.verifiers.Traversal(),
      params={**pair().params, "drafter": (
          pair().params["drafter"], None, None)})


def _stage():
  middle = testing.tiny_pair(VOCAB, seed=1, noise=0.3)
  inner = sj.Decoder(
      target=middle.drafter, verifier=sj.verifiers.Block(),
      drafter=_lm(LanguageModel, gamma=2))
  own = {"target": middle.params["drafter"],
         "drafter": pair().params["drafter"]}
  return Contributed(
      newcomers.Stage(inner=inner, gamma=3), sj.verifiers.Block(),
      params={**pair().params, "drafter": own})


DRAFTERS = {
    "Empty": lambda: Contributed(sj.drafters.Empty(), sj.verifiers.Token()),
    "LanguageModel": lambda: Contributed(
        _lm(LanguageModel, gamma=3), sj.verifiers.GreedyBlock()),
    "LanguageModel with a stop rule": lambda: Contributed(
        _lm(LanguageModel, gamma=3, stop=stop_rules.Adaptive(threshold=0.7)),
        sj.verifiers.Block()),
    "LanguageModel with a controller": lambda: Contributed(
        _lm(LanguageModel, gamma=3), sj.verifiers.Block(),
        controller=sj.Controller(lengths=(0, 1, 3), seconds=(1.0, 1.1, 1.2))),
    "TreeLanguageModel iid": lambda: Contributed(
        _lm(TreeLanguageModel, parents=UNEVEN, proposal="iid"),
        sj.verifiers.KSeq()),
    "TreeLanguageModel without_replacement": lambda: Contributed(
        _lm(TreeLanguageModel, parents=UNEVEN), sj.verifiers.Traversal()),
    "TreeLanguageModel hybrid": lambda: Contributed(
        _lm(TreeLanguageModel, parents=UNEVEN, proposal="hybrid"),
        sj.verifiers.Recursive()),
    "Paths of one model": lambda: Contributed(
        rule=sj.verifiers.Recursive(), **_paths(1)),
    "Paths of two models": lambda: Contributed(
        rule=sj.verifiers.Traversal(), **_paths(2)),
    "DynamicTree": lambda: Contributed(
        _lm(DynamicTree, depth=3, top_k=2, num_nodes=7),
        sj.verifiers.TargetWalk()),
    "Medusa top_k": lambda: _heads(
        _MEDUSA, drafter=Medusa(heads=_MEDUSA, parents=UNEVEN),
        rule=sj.verifiers.TargetWalk()),
    "Medusa sampled chain": lambda: _heads(
        _MEDUSA, drafter=Medusa(heads=_MEDUSA, parents=CHAIN, proposal="iid"),
        rule=sj.verifiers.Block()),
    "Medusa without_replacement": lambda: _heads(
        _MEDUSA, drafter=Medusa(heads=_MEDUSA, parents=UNEVEN,
                                proposal="without_replacement"),
        rule=sj.verifiers.Traversal()),
    "Hydra without_replacement": lambda: _heads(
        _HYDRA, drafter=Hydra(heads=_HYDRA, parents=UNEVEN,
                              proposal="without_replacement"),
        rule=sj.verifiers.Traversal()),
    "Blockwise": lambda: _heads(
        _BLOCKWISE, drafter=Blockwise(heads=_BLOCKWISE),
        rule=sj.verifiers.Token()),
    "EAGLE-1 chain with a controller": lambda: _layer(
        heads_lib.Eagle1Heads, EagleChain, sj.verifiers.Block(),
        drafts=dict(gamma=3), controller=sj.Controller(
            lengths=(0, 1, 3), seconds=(1.0, 1.1, 1.2))),
    "EAGLE-3 tree of few tokens": lambda: _layer(
        heads_lib.Eagle3Heads, Eagle, sj.verifiers.Traversal(), ids=(0, 2, 3),
        taps=(0, 1, "final"), drafts=dict(parents=UNEVEN)),
    "EAGLE-2 tree": lambda: _layer(
        heads_lib.Eagle1Heads, DynamicEagle, sj.verifiers.TargetWalk(),
        drafts=dict(depth=3, top_k=2, num_nodes=7)),
    "EAGLE tree expanded by score": lambda: _layer(
        heads_lib.Eagle1Heads, SampledEagle, sj.verifiers.Traversal(),
        drafts=dict(depth=3, expanded=2, children=2)),
    "MTP modules": lambda: _layer(
        heads_lib.MTPHeads, MTP, sj.verifiers.Block()),
    "MTP modules, a tree": lambda: _layer(
        heads_lib.MTPHeads, MTPTree, sj.verifiers.Traversal(), chained=False,
        drafts=dict(parents=UNEVEN)),
    "Lookahead as published": lambda: _lookahead(
        sj.verifiers.Block(), folded=False),
    "Lookahead folded": lambda: _lookahead(sj.verifiers.Block(), count=2),
    "Parallel chain with a stop rule and a controller": lambda: _parallel(
        Parallel, sj.verifiers.Block(), {}, parents=CHAIN,
        stop=stop_rules.Threshold(threshold=0.4),
        controller=sj.Controller(lengths=(0, 2), seconds=(1.0, 1.1))),
    "Parallel without_replacement": lambda: _parallel(
        Parallel, sj.verifiers.Traversal(), {"markov": "rnn", "ids": (
            0, 2, 3)}, parents=UNEVEN,
        proposal="without_replacement"),
    "ParallelTree": lambda: _parallel(
        ParallelTree, sj.verifiers.TargetWalk(), {
            "markov": "none", "confidence": "none", "from_anchor": False,
            "block_size": HEADS + 1}, num_nodes=8),
    "TokenIntersection": _token_intersection,
    "StringMatch": _string_match,
    "NGram": lambda: Contributed(
        NGram(gamma=3, vocab_size=VOCAB), sj.verifiers.Block()),
    "Reference": _references,
    "Recycling": lambda: Contributed(
        Recycling(parents=UNEVEN, vocab_size=VOCAB), sj.verifiers.TargetWalk(),
        params={"target": pair().params["target"]}),
    "VocabularySubset": _vocabulary_subset,
    "a quantised copy": _quantized,
    "a windowed self-draft": _window,
    "Hierarchy": _hierarchy,
    "Online": lambda: Contributed(
        _lm(Online, gamma=3, learning_rate=0.1, rank=2), sj.verifiers.Block()),
    "Suffix certain": lambda: _counted(
        Suffix, sj.verifiers.TargetWalk(), max_depth=6),
    "Suffix sampled": lambda: _counted(
        Suffix, sj.verifiers.Block(), max_depth=6, proposal="sampled"),
    "Retrieval tree": lambda: _counted(
        Retrieval, sj.verifiers.TargetWalk(), max_match=4, nodes=8),
    "Retrieval sampled": lambda: _counted(
        Retrieval, sj.verifiers.Block(), max_match=4, proposal="sampled"),
    "Cascade": _cascade,
    "Fallback": _fallback,
    "Fallback to another vocabulary": _fallback_to_another_vocabulary,
    "Merge": _merge,
    "EarlyExit": lambda: _part_of_target(
        lambda _: EarlyExit(exit=2, gamma=3), sj.verifiers.GreedyBlock()),
    "Kangaroo": _kangaroo,
    "Swift": lambda: _part_of_target(
        lambda _: Swift(gamma=2, count=1, window=2), sj.verifiers.Block()),
    "a part of the target": _skipping,
    "features in a static tree": lambda: _features(False),
    "features in a dynamic tree": lambda: _features(True),
    "a text of the row": _reference,
    "a decoder": _stage,
    "your cache": lambda: _with_cache(SlotCache),
    "Paged": lambda: _with_cache(sj.Paged(page=16)),
    "your drafter and rule": lambda: Contributed(
        Repeat(vocab_size=VOCAB), FirstToken()),
    "your model": _bigram,
}

RULES = (
    sj.verifiers.Token(), sj.verifiers.Block(), sj.verifiers.GreedyBlock(),
    sj.verifiers.Recursive(), sj.verifiers.KSeq(), sj.verifiers.TargetWalk(),
    sj.verifiers.Traversal(), sj.verifiers.Typical(), sj.verifiers.TopK(k=2),
    sj.verifiers.Distance(epsilon=1), FirstToken(),
)

OBJECTIVES = {
    "NextToken": lambda model: (objectives.NextToken(model=model), None),
    "Medusa": lambda model: (
        objectives.Medusa(model=model, heads=_MEDUSA), _MEDUSA),
    "MedusaJoint": lambda model: (objectives.MedusaJoint(
        medusa=objectives.Medusa(model=model, heads=_MEDUSA)), _MEDUSA),
    "Blockwise": lambda model: (objectives.Blockwise(
        model=model, heads=_BLOCKWISE, one_head=False), _BLOCKWISE),
    "Hydra": lambda model: (
        objectives.Hydra(model=model, heads=_HYDRA), _HYDRA),
    "Lookahead": lambda model: (objectives.Lookahead(
        model=model, embeddings=_EMBEDDINGS, cuts=4), _EMBEDDINGS),
    "Parallel": lambda model: (objectives.Parallel(
        model=model, heads=_PARALLEL, anchors=4), _PARALLEL),
}
