"""Settings, pairs and parameters that drafters refuse."""

import dataclasses
import functools

from contributed import deep
from contributed import pair
from contributed import UNEVEN
from contributed import VOCAB
from contributed import WIDTH
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refusals

import specjax as sj
from specjax import data
from specjax import exact
from specjax import methods
from specjax import models
from specjax import objectives
from specjax import strategies
from specjax import testing
from specjax import verifiers
from specjax.data import datastores
from specjax.drafters import Best
from specjax.drafters import Cascade
from specjax.drafters import Chain
from specjax.drafters import draft_model
from specjax.drafters import Empty
from specjax.drafters import Fallback
from specjax.drafters import Merge
from specjax.drafters import NetworkDrafter
from specjax.drafters import NGram
from specjax.drafters import PaSS
from specjax.drafters import Reference
from specjax.drafters import Retrieval
from specjax.drafters import Suffix
from specjax.drafters import Tree
from specjax.methods import stop_rules
from specjax.methods.self_speculation import skip_search
from specjax.models import cache_views
from specjax.models import frequent_tokens
from specjax.models import Sublayers
from specjax.models import VocabularySubset
from specjax.training import calibration

_CHAIN, _SIBLINGS = (-1, 0, 1, 2), (-1, 0, 0, 0)
_WIDE = sj.trees.full_tree((6,))
_MARKOV, _THREE = testing.MarkovModel(VOCAB), testing.MarkovModel(3)
_TABLE = np.zeros((VOCAB, VOCAB), np.float32)
_LIST = testing.ListTokenizer
_SIZES = dict(width=WIDTH, vocab_size=VOCAB)
_MEDUSA = methods.MedusaHeads(heads=3, **_SIZES)
_EMBEDDINGS = methods.PaSSEmbeddings(count=3, width=WIDTH)
_KANGAROO = methods.KangarooAdapter(exit=1, **_SIZES)
_EAGLE_1 = methods.Eagle1Heads.for_target(pair().target, 3)
_BLOCKS = methods.ParallelHeads(
    layers=2, heads=2, kv_heads=1, head_dim=8, mlp_width=8, context_length=64,
    block_size=3, taps=(0, 1), **_SIZES)
_VIEW = sj.drafters.Hierarchy(
    view=cache_views.Recent(), drafter=Empty(), gamma=2)
_RULE = stop_rules.AcceptanceHead(threshold=0.5, depth=1)
_replace = dataclasses.replace
_with = functools.partial


def _target(**config):
  return models.Transformer(_replace(pair().target.config, **config))


def _decoder(drafter, target=None, rule=None, **kwargs):
  return sj.Decoder(target=target or pair().target, drafter=drafter,
                    verifier=rule or verifiers.TargetWalk(), **kwargs)


def _prefill(drafter, own=None, target=_MARKOV, params=_TABLE, context=None):
  return _decoder(drafter, target).prefill(
      {"target": params, "drafter": own}, [[1]], jax.random.key(0), limits=9,
      context=context)


def _language_model(shape, vocab_size=VOCAB):
  return NetworkDrafter(network=sj.drafters.LanguageModel(
      model=testing.MarkovModel(vocab_size)), shape=shape)


def _paths(count, vocab_size=VOCAB, num_paths=3, length=3):
  return sj.drafters.Paths(models=(testing.MarkovModel(vocab_size),) * count,
                           num_paths=num_paths, length=length)


def _best(vocab_size=VOCAB, depth=3, top_k=2, num_nodes=7):
  return _language_model(Best(depth, top_k, num_nodes), vocab_size)


def _medusa(shape):
  return NetworkDrafter(
      network=sj.drafters.Medusa(heads=_MEDUSA), shape=shape)


def _exit(exit, rule=None, **kwargs):
  return NetworkDrafter(network=sj.drafters.EarlyExit(exit=exit, **kwargs),
                        shape=Chain(2, rule))


def _layer(shape, heads=_EAGLE_1, kind=sj.drafters.FeatureLayer):
  return NetworkDrafter(network=kind(heads=heads), shape=shape)


def _heads(kind, count=3, **kwargs):
  return kind.for_target(pair().target, count, **kwargs)


def _blocks(shape, **kwargs):
  return NetworkDrafter(network=sj.drafters.Parallel(
      heads=_replace(_BLOCKS, **kwargs)), shape=shape)


def _swift(of=None, gamma=2, count=1, **kwargs):
  return _decoder(sj.drafters.Swift(gamma=gamma, count=count, **kwargs),
                  of or _target(layers=4))


def _skip(dropout=0.0, **kwargs):
  return objectives.LayerSkipObjective(
      model=deep()[0], steps=8, dropout=dropout, **kwargs)


_cascade = _with(Cascade, model=_MARKOV, drafter=Empty(), gamma=2)
_online = _with(sj.drafters.Online, model=_MARKOV, gamma=2)
_ngram, _suffix = _with(NGram, gamma=2), _with(Suffix, gamma=2)
_store = _with(datastores.index, vocab_size=3)
_retrieval = _with(Retrieval, gamma=2)
_edit, _parallel = _with(_replace, _EAGLE_1), _with(_replace, _BLOCKS)
_objective = _with(
    objectives.ParallelObjective, model=_target(layers=2), heads=_BLOCKS)
_intersection = _with(
    strategies.token_intersection, _THREE, target_size=2, gamma=1)

_VALUES = refusals.of_values(
    (_cascade, "gamma", 0), (_online, "gamma", 0), (_online, "rank", -1),
    (_online, "every", 0), (_online, "learning_rate", -1.0),
    (_online, "positions", "some"), (_ngram, "gamma", 0, 2.0, np.nan),
    (_ngram, "min_ngram", 0), (_ngram, "max_ngram", 3.0),
    (_ngram, "prefer", "last"), (Chain, "gamma", 2.0),
    (_with(Reference, gamma=2, min_ngram=2), "max_ngram", 1),
    (_with(sj.drafters.reference_texts, [[[5, 6], [7]]]), "columns", 4, 0, 8.0),
    (_suffix, "gamma", 0), (_suffix, "max_matches", 0, 4096, 8.0),
    (_suffix, "max_depth", 1, 4.0), (_suffix, "max_spec_factor", np.nan, -1),
    (_suffix, "max_spec_offset", np.nan, np.inf),
    (_suffix, "min_token_prob", 1.5), (_suffix, "proposal", "top_k"),
    (_with(_store, [[1]]), "depth", 2.0, 0, 31),
    (_retrieval, "max_match", 31, 3.0, 1), (_retrieval, "nodes", 1),
    (cache_views.Recent, "window", 0),
    (_with(cache_views.Retrieved, chunk=8), "budget", 20),
    (_with(Tree, UNEVEN), "proposal", "beam"), (_with(_paths, 1), "length", 0),
    (_best, "top_k", 0), (_with(_best, depth=2), "num_nodes", 8),
    (_with(_replace, _MEDUSA), "heads", 0),
    (_with(_replace, _MEDUSA), "output", "mine"),
    (_with(_replace, _EMBEDDINGS), "count", 0),
    (_with(PaSS, embeddings=_EMBEDDINGS), "count", 4, 0),
    (_with(strategies.blockwise, methods.BlockwiseHeads(
        heads=3, hidden_width=8, **_SIZES)), "gamma", -1),
    (_target, "lookahead", -1), (_edit, "fusion", "sum"), (_edit, "taps", ()),
    (_edit, "narrow_head", True), (_edit, "entry_bias", True),
    (_edit, "norm_before_residual", True), (_edit, "forecasts", 0),
    (_edit, "windows", (4, 4)), (_parallel, "block_size", 0),
    (_parallel, "markov", "lstm"), (_parallel, "mask_token", 5),
    (_parallel, "window_end", "block"), (_parallel, "causal", (True,)),
    (_objective, "ce_share", 2.0), (_objective, "position_weights", "x"),
    (_objective, "position_decay", 0.0), (_objective, "anchors", 0),
    (sj.drafters.EarlyExit, "exit", 0), (_skip, "dropout", 1.0),
    (_skip, "scale", -1.0), (_skip, "every", 4), (_skip, "ramp", "sine"),
    (_with(skip_search.random_search, len, 6, tries=1), "count", 9),
    (lambda count: skip_search.clasp(*deep(), np.zeros((2, 9), int), count),
     "count", 2),
    (lambda temperature: skip_search.scorer(
        *deep(), np.zeros((2, 13), int), 2,
        temperature=temperature), "temperature", 0.5),
    (_swift, "gamma", 0), (_swift, "count", 0, 4), (_swift, "window", 1),
    (_swift, "tries", -1), (stop_rules.Confidence, "threshold", 1.5),
    (stop_rules.Adaptive, "target", -1), (stop_rules.Adaptive, "step", -5.0),
    (stop_rules.Entropy, "factor", -1.0),
    (stop_rules.Scheduler, "speeds", (1.0, np.nan), (1,)),
    (_with(exact.certify, verifiers.Token()), "stop", 3),
    (_with(calibration.calibration_error, [0.5], [1]), "bins", 0),
    (_intersection, "gamma", 0), (_with(frequent_tokens, [1, 2]), "size", 3),
    (_with(frequent_tokens, [1, 2, 3], always=(0, 1)), "size", 1))

_COMBINED = [
    (lambda: _cascade(verifier=verifiers.Typical()), "Typical, which is lossy"),
    (lambda: _decoder(_cascade(model=_THREE)),
     "drafter has 3 tokens and the target 5"),
    (lambda: _decoder(_cascade(drafter=_language_model(Tree(_SIBLINGS)))),
     "Block is exact only"),
    *((lambda inner=inner: _decoder(_cascade(
        drafter=inner, verifier=verifiers.Traversal())),
       "drafter (is a|of the) Hierarchy") for inner in (
           _VIEW, Fallback(first=_ngram(), second=_VIEW),
           Merge(drafters=(_ngram(), _VIEW)),
           Fallback(first=_ngram(), second=Merge(drafters=(_ngram(), _VIEW))))),
    (lambda: _decoder(Fallback(first=_language_model(Chain(3)), second=Empty(),
                               min_tokens=2)), "min_tokens is 2"),
    (lambda: _decoder(Fallback(first=_ngram(), second=Empty(), min_tokens=3)),
     "drafts at most 2"),
    (lambda: Merge(drafters=(Empty(),)), "drafters has 1"),
    (lambda: _decoder(Merge(drafters=(Empty(), Empty())),
                      rule=verifiers.Block()), "is chain"),
    (lambda: _prefill(Fallback(
        first=Empty(), second=_language_model(Tree((-1, 0)))), (None, _TABLE)),
     "LanguageModel with Tree has a state and does not provide `follow"),
    (lambda: _prefill(Fallback(first=Empty(), second=Empty()), (None,)),
     "of its 2 drafters"),
    (lambda: _prefill(_cascade(), _TABLE), "of a cascade"),
    (lambda: cache_views.Retrieved(budget=256, chunk=256).choose(
        pair().target, pair().params["target"], jnp.zeros((1,), jnp.int32),
        pair().target.init_cache(pair().params["target"], 1, 128)),
     "chunk is 256; the cache has only 128 slots"),
    (lambda: _decoder(_VIEW, _MARKOV), "MarkovModel without a KVCache"),
    (lambda: _decoder(_VIEW, _target(windows=(3,))), "windows of the target")]

_MODEL_FREE = [
    *((_with(_store, documents), words) for documents, words in (
        ([], "the corpus has no tokens"), ([[]], "the corpus has no tokens"),
        ([[1], [2, 3]], r"document 1 has token id 3; .* \[0, 3\)"),
        ([[-1]], "document 0 has token id -1"),
        ([[], [0, 1.5]], "document 1 is not a list of integers"),
        ([np.ones(2)], "document 0 is not a list of integers"),
        ([[[0, 1], [1]]], "document 0 is not a list of integers"),
        ([[[0, 1]]], "document 0 is not a list"), ([0, 1], "document 0 is"),
        (["ab"], "document 0 is not a list"))),
    (lambda: _retrieval(nodes=4, proposal="sampled"),
     "nodes is 4 and proposal 'sampled'"),
    (lambda: _prefill(_retrieval()), "NoneType, but Retrieval needs a Datast"),
    (lambda: _prefill(_retrieval(), datastores.index([[1]], VOCAB, 6)),
     "max_match is 16, but the datastore is sorted by 6 tokens"),
    (lambda: _prefill(_suffix(), datastores.index([[1, 6]], 7)),
     "ids of 7 tokens.*target has"),
    (lambda: _prefill(_suffix(), (datastores.index([[1]], VOCAB),)),
     "is a tuple, but Suffix.*Datastore"),
    (lambda: _prefill(_suffix(), {}), "is a dict, but Suffix needs a Datast"),
    *((_with(lambda proposal, parents: _suffix(
        parents=parents, proposal=proposal).bind(
            testing.MarkovModel(2), sj.LogitsTransform()), *tree), words)
      for *tree, words in (
          ("deterministic", (-1, 0), "a tree and proposal is 'deterministic'"),
          ("sampled", _CHAIN, "is 3 levels deep"),
          ("sampled", (-1, 2), r"parents\[1\] is 2"),
          ("sampled", (-1,), "nodes of `parents` is 1"),
          ("sampled", _SIBLINGS, "has 3 children, but"))),
    *((_with(lambda context: _prefill(
        Reference(gamma=2), context=context), context),
       words) for context, words in (
           (None, r'context\["reference"\].* is missing'),
           ({"texts": np.zeros((1, 4), np.int32)}, "missing"),
           ({"reference": np.zeros(1, np.int32)}, r"shape \(1,\).*\[B, T\]"),
           ({"reference": np.zeros((1, 4), np.float32)}, "float32"))),
    (lambda: sj.drafters.Recycling(parents=(-1,)), "drafts nothing.*Empty"),
    *((_with(lambda parents, table: _prefill(
        sj.drafters.Recycling(parents=parents), table), *row), words)
      for *row, words in (
          ((-1, 0, 0), np.zeros((5, 3), np.int32), r"\(5, 3\).*\(5, 2\)"),
          ((-1, 0), {"head": np.zeros(3)}, r"drafter'\] has shape"),
          ((-1, *[0] * 6), None, "6 children.*5 tokens"))),
    (lambda: _prefill(_ngram(vocab_size=7)), "of 7 tokens.*has 5")]

_DRAFT_MODELS = [
    (lambda: Tree((-1, 1), "iid"), r"parents\[1\] is 1"),
    (lambda: _decoder(_language_model(Tree(_WIDE, "top_k"))),
     "6 children.*5 tokens.*narrower"),
    *((_with(_decoder, drafter), "16 tokens.*5") for drafter in (
        _language_model(Tree(UNEVEN), 16), _paths(1, 16), _best(16))),
    (lambda: _paths(2, num_paths=1), "models has 2 entries and num_paths is 1"),
    (lambda: _paths(0), "models has 0 entries"),
    (lambda: _decoder(_best(top_k=6)), "6 children.*5 tokens"),
    (lambda: _prefill(_paths(1), _TABLE), "must be a tuple.*1 models"),
    (lambda: stop_rules.Scheduler(
        speeds=(1.0, 0.9, 0.7, 0.4, 0.3), temperatures=(2,)),
     "no effect with learned=False"),
    (lambda: stop_rules.Threshold(temperatures=(1, 0)), "each must be above"),
    (lambda: exact.certify(verifiers.Token(), stop=_RULE), "has parameters"),
    (lambda: exact.certify(
        verifiers.TargetWalk(), stop=stop_rules.Confidence(),
        trees=[(-1, 0)]), "stop and trees"),
    (lambda: _prefill(draft_model(model=_MARKOV, gamma=2, stop=_RULE), _TABLE),
     "'model': ..., 'stop'"),
    (lambda: calibration.temperatures(np.zeros((2, 3)), np.zeros((2, 2))),
     "logits is .2, 3. and accepted .2, 2."),
    (lambda: calibration.temperatures(
        np.zeros((2, 1)), np.zeros((2, 1)), grid=[0.0, 1.0]), "grid is"),
    (lambda: calibration.calibration_error([0.5], [1, 0]), "predicted has 1")]

_HEADS = [
    *((_with(refuse, _target(**config)), words)
      for refuse in (_with(methods.check_fits, _MEDUSA),
                     _with(_decoder, _medusa(Tree(UNEVEN, "top_k"))))
      for config, words in (
          (dict(width=8), "width.* 16 .* 8"), (dict(features=(0,)), "features"),
          (dict(vocab_size=9), "vocab_size.* 5 .* 9"))),
    (lambda: methods.check_fits(_MEDUSA, _MARKOV),
     "a MarkovModel.*models.Transformer"),
    (lambda: _decoder(_medusa(Tree(UNEVEN)), _target(context_length=3)),
     "Medusa with Tree drafts 3 tokens in a row"),
    (lambda: _decoder(_medusa(Tree((*_CHAIN, 3), "iid"))),
     "4 tokens deep.*predicts 3"),
    (lambda: _decoder(NetworkDrafter(network=sj.drafters.Hydra(
        heads=methods.HydraHeads(heads=3, blocks=2, **_SIZES)),
                                     shape=Tree((*_CHAIN, 3)))),
     "4 tokens deep.*predicts 3"),
    (lambda: _decoder(_medusa(Tree(_WIDE, "top_k"))),
     "6 children.*5 tokens.*narrower"),
    (lambda: strategies.blockwise(_MEDUSA, top_k=2, distance=1),
     "top_k is 2 and distance is 1"),
    *((_with(lambda **config: _decoder(
        PaSS(embeddings=_EMBEDDINGS), _target(**config)), **config), words)
      for config, words in (
          ({}, "0 look-ahead tokens.*3 of width 16.*with_lookahead"),
          (dict(lookahead=2), "2 look-ahead tokens.*3"),
          (dict(lookahead=3, width=8), "width 8, .*width 16"))),
    (lambda: methods.with_lookahead(
        pair().target, pair().params["target"],
        {"embeddings": jnp.zeros((2, 8))}), "width.* 8 .* 16")]

_LAYERS = [
    *((_with(_edit, **change), words) for change, words in (
        (dict(taps=(0, 1)), "taps have width 32"),
        (dict(ids=(3, 1)), "ids must be sorted"),
        (dict(ids=(0, 9)), r"\[0, 5\)"), (dict(ids=(0, 1)), "own_head"),
        (dict(narrow_head=True, own_head=True, ids=(0, 1)), "own_head is True"),
        (dict(fusion="none"), "reuse=False"),
        (dict(entry_norm="each"), "entry=True"),
        (dict(fusion="attention"), "fusion_bias is True"),
        (dict(chained=False), "reuse True"),
        (dict(learned_positions=True), "learned_positions True"),
        (dict(fusion="attention", attention_norm=True), "attention_norm=False"),
        (dict(width=24, entry=True), "own_head is False"))),
    (lambda: _decoder(_layer(Tree(_CHAIN), _heads(methods.Eagle3Heads))),
     r"reads \(1,\) first"),
    (lambda: _decoder(_layer(Tree(_CHAIN)), _target(width=24)),
     "width 16, but the target has 24"),
    (lambda: _EAGLE_1.attach(_target(vocab_size=9), {}, {}), "vocab_size 5"),
    (lambda: _decoder(_layer(Tree(_CHAIN), _heads(methods.MTPHeads))),
     "drafters.FeatureModules"),
    (lambda: _decoder(_layer(Chain(1), kind=sj.drafters.FeatureModules)),
     "drafters.FeatureLayer"),
    (lambda: _heads(methods.Eagle3Heads, taps="0,5"), "taps contains 5"),
    (lambda: _heads(methods.Eagle3Heads, taps="low"), "taps contains 'low'"),
    (lambda: _heads(methods.Eagle3Heads, layers=2), "set layers=1"),
    (lambda: _heads(methods.PEagleHeads, mask_token=5), r"id in \[0, 5\)"),
    (lambda: _heads(methods.PEagleHeads, feed_normed=True), "feed_normed is T"),
    (lambda: _decoder(strategies.mtp(_heads(
        methods.MTPHeads, taps="final"), gamma=4).drafter),
     "4 tokens deep, but the network predicts 3"),
    (lambda: _decoder(strategies.mtp(_heads(
        methods.MTPHeads, 2, taps="final"), parents=_CHAIN).drafter),
     "3 tokens deep, but the network predicts 2"),
    (lambda: _decoder(_layer(Tree(_SIBLINGS), _heads(
        methods.Eagle3Heads, taps=("final",), ids=(0, 1)))),
     "3 children, but the drafter has 2"),
    (lambda: _layer(Best(depth=2, top_k=2, num_nodes=9)), "num_nodes is 9"),
    (lambda: _layer(sj.drafters.Sampled(2, expanded=0, children=2)),
     "expanded is 0"),
    (lambda: _layer(sj.drafters.Sampled(
        2, expanded=1, children=2, proposal="best")), "'best'"),
    (lambda: strategies.mtp(_heads(methods.MTPHeads), 2, parents=_CHAIN),
     "gamma is 2, and parents"),
    *((_with(_target, layers=2, features=features), words)
      for features, words in (
          ((3,), "features contains 3"), ((-1,), "contains -1"),
          (("last",), "'last'"), ((1, 1), "once"))),
    (lambda: _target(features=(1,)).feature(jnp.zeros((1, 3, WIDTH))),
     "not 'final'")]

_PARALLEL = [
    (lambda: _parallel(from_anchor=False, block_size=1), "at least 2"),
    (lambda: _parallel(confidence="markov"), "set confidence='hidden'"),
    (lambda: _parallel(taps=()), "at least one hidden"),
    (lambda: _parallel(ids=(3, 1)), "ids must be sorted"),
    (lambda: _heads(methods.ParallelHeads, taps="1,x"), "taps is '1,x'"),
    (lambda: _heads(methods.ParallelHeads, taps="3"), "taps contains 3"),
    (lambda: _objective(anchors=2).draw(jax.random.key(0), 3, 4),
     "a row predicts 3 tokens"),
    (lambda: strategies.parallel(
        _BLOCKS, parents=(-1, 0, 0), stop=stop_rules.Confidence()),
     "stop is Confidence, a rule for sampled chains"),
    (lambda: _prefill(
        _blocks(Chain(1, stop_rules.Threshold())), {},
        _BLOCKS.tapped(pair().target), pair().params["target"]),
     "stop is Threshold, a rule with param"),
    (lambda: _decoder(
        _blocks(Tree(_SIBLINGS), ids=(1, 3)), _BLOCKS.tapped(pair().target)),
     "but the drafter has 2 tokens"),
    (lambda: _decoder(_blocks(Chain(1))), "heads.attach"),
    (lambda: _decoder(_blocks(Chain(4)), _BLOCKS.tapped(pair().target)),
     "4 tokens deep, but the network predicts 3")]

_SELF_SPECULATION = [
    (lambda: _decoder(_exit(3), deep()[0]), "exit is 3.*3 layers"),
    (lambda: _decoder(_exit(1), deep()[0], controller=sj.decoding.Controller(
        lengths=(0, 2), seconds=(1.0, 1.1))), "shares_pass=False"),
    (lambda: _prefill(_exit(1, _RULE), None, *deep()),
     "AcceptanceHead, a rule with.*; give"),
    (lambda: _prefill(Merge(drafters=(
        NetworkDrafter(network=sj.drafters.Kangaroo(
            adapter=_KANGAROO, shares_pass=False), shape=Chain(2)),
        _exit(1, shares_pass=False))),
        (_KANGAROO.init(None, deep()[1]), None), *deep()),
     "Kangaroo with Chain has a state"),
    (lambda: _decoder(Merge(drafters=(_exit(1), _exit(1))), deep()[0]),
     "give the network shares_pass=F"),
    (lambda: models.Shortened(deep()[0], Sublayers(attention=(), mlp=(0,))),
     "no attention"),
    (lambda: models.Shortened(deep()[0], Sublayers.between(0, 4)),
     "layer 3.*0 to 2"),
    (lambda: Sublayers.without(3, mlp=[3]), "mlp 3.*0 to 2"),
    (lambda: objectives.KangarooObjective(
        model=deep()[0], adapter=_replace(_KANGAROO, exit=3)),
     "exit is 3.*from 1 to 2"),
    (lambda: skip_search.scorer(*deep(), np.zeros((2, 13), int), 20),
     "12 generated tokens.*gamma is 20"),
    (lambda: skip_search.local_search(len, 6, frozenset(), tries=1),
     "count is 0; 6 layers.*1 to 8"),
    (lambda: _swift(_target(layers=2)), "2 layers allows at most 0"),
    (lambda: _swift(_replace(_target(layers=4), cache=sj.caches.Streaming(
        slack=50)), window=48), "slack=50, and up to 51"),
    (lambda: _swift(_MARKOV), "models.Transformer")]

_VOCABULARIES = [
    (lambda: data.map_vocabularies(_LIST((b"a", b"b", b"c")),
                                   _LIST((b"x", b"y"))),
     "3 tokens.*2.*none in common"),
    (lambda: data.Retokenizer(_LIST((b"a", b"b", b"c")), _LIST((b"x", b"y"))),
     "3 can be spelled with.*2 tokens"),
    (lambda: strategies.string_match(_THREE, data.Retokenizer(
        _LIST((b"a",)), _LIST((b"a", b"b"))), 2), "model is 3,.*1"),
    (lambda: _intersection().decoder(_THREE),
     "target of 2 tokens, but this target has 3"),
    (lambda: _prefill(_intersection().drafter, {
        "model": jnp.zeros((3, 3)), "vocabulary": data.map_vocabularies(
            _LIST((b"a",)), _LIST((b"a", b"b")))}, testing.MarkovModel(2),
                      np.zeros((2, 2), np.float32)),
     "maps 1 tokens of the drafter.*has 3"),
    *((_with(lambda ids: VocabularySubset(pair().target).parameters(
        pair().params["target"], ids), ids), words) for ids, words in (
            ([], "at least one token id"), ([0.5], "float64"),
            ([1, 5], "has 5"), ([-1, 2], "has -1"),
            ([2, 1, 2], "has 2 twice"))),
    (lambda: VocabularySubset(_target(features=(0,))), "'final'.*features"),
    (lambda: VocabularySubset(_THREE), "is a MarkovModel"),
    (lambda: frequent_tokens([1, 2], 1, always=(5,)), "always has 5"),
    (lambda: frequent_tokens([0.5, np.nan], 1), "no value below 0"),
    (lambda: frequent_tokens([[1, 2]], 1), r"shape \(1, 2\)")]


@pytest.mark.parametrize("call, words", [
    *_VALUES, *_COMBINED, *_MODEL_FREE, *_DRAFT_MODELS, *_HEADS, *_LAYERS,
    *_PARALLEL, *_SELF_SPECULATION, *_VOCABULARIES])
def test_bad_input_is_refused(call, words):
  # Broken: a slip fails inside a compiled program, shows as a traceback of
  # shapes, or runs and drafts something else.
  with pytest.raises(ValueError, match=words) as e:
    call()
  assert "\n" not in str(e.value)


class _Unconditional(NetworkDrafter):
  @property
  def provides(self):
    return tuple({*super().provides} - {"conditional"})


_MERGES = _Unconditional(
    network=sj.drafters.LanguageModel(model=_MARKOV), shape=Tree(UNEVEN))


@pytest.mark.parametrize("drafter, rule, need", [
    (_language_model(Tree(UNEVEN, "iid")), verifiers.Token(), "chain"),
    (_language_model(Tree(UNEVEN, "top_k")), verifiers.Block(), "chain"),
    (_language_model(Tree(UNEVEN)), verifiers.KSeq(), "iid"),
    (_language_model(Tree(UNEVEN, "hybrid")), verifiers.KSeq(), "iid"),
    (_paths(1), verifiers.GreedyBlock(), "chain"),
    (_paths(2), verifiers.KSeq(), "iid"), (_best(), verifiers.KSeq(), "iid"),
    (_MERGES, verifiers.Recursive(), "conditional"),
    (_MERGES, verifiers.Traversal(), "conditional"),
    (_medusa(Tree(UNEVEN, "top_k")), verifiers.Block(), "chain"),
    (_medusa(Tree(UNEVEN)), verifiers.KSeq(), "iid"),
    (_medusa(Tree(_CHAIN, "iid")), verifiers.GreedyBlock(), "autoregressive"),
    (_medusa(Chain(3)), verifiers.GreedyBlock(), "autoregressive"),
    (_suffix(), verifiers.GreedyBlock(), "autoregressive")])
def test_unsound_pairs_are_refused(drafter, rule, need):
  # Broken: a pair decodes that is not exact.
  for kwargs in (dict(rule=rule), dict(observers=(rule,))):
    with pytest.raises(ValueError, match=f"{type(rule).__name__} is .*{need}"):
      _decoder(drafter, **kwargs)
