"""What has to pass the bar: every drafter, rule, objective and cache.

A newcomer is listed here, and `contribution_test.py` does the rest; a cache is
listed as that of the models of a drafter. The last entries of each list are
examples of docs/extending.md, short and correct.
"""

import dataclasses
import functools

from contributed import CHAIN
from contributed import Contributed
from contributed import of_kind
from contributed import pair
from contributed import part_of_target
from contributed import paths
from contributed import UNEVEN
from contributed import VOCAB
from contributed import with_cache
from contributed import with_model
import contributed_compositions as compositions
import contributed_examples as examples
import contributed_heads as heads
import contributed_texts as texts

import specjax as sj
from specjax import methods
from specjax import objectives
from specjax.drafters import Best
from specjax.drafters import Chain
from specjax.drafters import EarlyExit
from specjax.drafters import NetworkDrafter
from specjax.drafters import NGram
from specjax.drafters import Online
from specjax.drafters import Recycling
from specjax.drafters import Retrieval
from specjax.drafters import Sampled
from specjax.drafters import Suffix
from specjax.drafters import Swift
from specjax.drafters import Tree
from specjax.methods import stop_rules

DRAFTERS = {
    "Empty": lambda: Contributed(sj.drafters.Empty(), sj.verifiers.Token()),
    "chain": lambda: Contributed(
        with_model(Chain(3)), sj.verifiers.GreedyBlock()),
    "chain with a stop rule": lambda: Contributed(
        with_model(Chain(3, stop_rules.Adaptive(threshold=0.7))),
        sj.verifiers.Block()),
    "chain with a controller": lambda: Contributed(
        with_model(Chain(3)), sj.verifiers.Block(),
        controller=sj.decoding.Controller(
            lengths=(0, 1, 3), seconds=(1.0, 1.1, 1.2))),
    "tree iid": lambda: Contributed(
        with_model(Tree(UNEVEN, "iid")),
        sj.verifiers.KSeq()),
    "tree without_replacement": lambda: Contributed(
        with_model(Tree(UNEVEN)),
        sj.verifiers.Traversal()),
    "tree hybrid": lambda: Contributed(
        with_model(Tree(UNEVEN, "hybrid")),
        sj.verifiers.Recursive()),
    "Paths of one model": lambda: Contributed(
        rule=sj.verifiers.Recursive(), **paths(1)),
    "Paths of two models": lambda: Contributed(
        rule=sj.verifiers.Traversal(), **paths(2)),
    "EAGLE-2 tree of a language model": lambda: Contributed(
        with_model(Best(depth=3, top_k=2, num_nodes=7)),
        sj.verifiers.TargetWalk()),
    "language model, a tree expanded by score": lambda: Contributed(
        with_model(Sampled(depth=3, expanded=2, children=2)),
        sj.verifiers.Traversal()),
    "Medusa top_k": lambda: heads.independent(
        Tree(UNEVEN, "top_k"), sj.verifiers.TargetWalk()),
    "Medusa sampled chain": lambda: heads.independent(
        Chain(3), sj.verifiers.Block()),
    "Medusa chain with a stop rule and a controller": lambda: heads.independent(
        Chain(3, stop_rules.Confidence(threshold=0.3)), sj.verifiers.Block(),
        sj.decoding.Controller(lengths=(0, 1, 3), seconds=(1.0, 1.1, 1.2))),
    "Medusa without_replacement": lambda: heads.independent(
        Tree(UNEVEN), sj.verifiers.Traversal()),
    "Medusa, DDTree's tree": lambda: heads.independent(
        Best(3, top_k=3, num_nodes=8), sj.verifiers.TargetWalk()),
    "Hydra without_replacement": lambda: heads.hydra(
        Tree(UNEVEN), sj.verifiers.Traversal()),
    "Hydra chain with a stop rule and a controller": lambda: heads.hydra(
        Chain(3, stop_rules.Confidence(threshold=0.3)), sj.verifiers.Block(),
        sj.decoding.Controller(lengths=(0, 1, 3), seconds=(1.0, 1.1, 1.2))),
    "Hydra, EAGLE-2's tree": lambda: heads.hydra(
        Best(3, top_k=2, num_nodes=7), sj.verifiers.TargetWalk()),
    "Blockwise with a controller": lambda: heads.independent(
        Tree(CHAIN, "top_k"), sj.verifiers.Token(), sj.decoding.Controller(
            lengths=(0, 1, 3), seconds=(1.0, 1.1, 1.2)), heads.BLOCKWISE),
    "EAGLE-1 chain with a controller": lambda: heads.layer(
        methods.Eagle1Heads, heads.reused, sj.verifiers.Block(),
        drafts=dict(shape=Chain(3)), controller=sj.decoding.Controller(
            lengths=(0, 1, 3), seconds=(1.0, 1.1, 1.2))),
    "EAGLE-3 chain with a stop rule": lambda: heads.layer(
        methods.Eagle3Heads, heads.reused, sj.verifiers.Block(),
        drafts=dict(shape=Chain(3, stop_rules.Adaptive(threshold=0.7)))),
    "EAGLE-3 tree of few tokens": lambda: heads.layer(
        methods.Eagle3Heads, heads.reused, sj.verifiers.Traversal(),
        ids=(0, 2, 3), taps=(0, 1, "final"), drafts=dict(shape=Tree(UNEVEN))),
    "P-EAGLE tree of few tokens": lambda: heads.p_eagle(
        Tree(UNEVEN), sj.verifiers.Traversal(), ids=(0, 2, 3)),
    "P-EAGLE chain with a stop rule and a controller": lambda: heads.p_eagle(
        Chain(3, stop_rules.Confidence(threshold=0.3)), sj.verifiers.Block(),
        controller=sj.decoding.Controller(
            lengths=(0, 1, 3), seconds=(1.0, 1.1, 1.2)), mask_token=1),
    "P-EAGLE, DDTree's tree": lambda: heads.p_eagle(
        Best(3, top_k=3, num_nodes=8), sj.verifiers.TargetWalk()),
    "P-EAGLE tree expanded by score": lambda: heads.p_eagle(
        Sampled(depth=3, expanded=2, children=2), sj.verifiers.Traversal()),
    "EAGLE-2 tree": lambda: heads.layer(
        methods.Eagle1Heads, heads.reused, sj.verifiers.TargetWalk(),
        drafts=dict(shape=Best(depth=3, top_k=2, num_nodes=7))),
    "EAGLE tree expanded by score": lambda: heads.layer(
        methods.Eagle1Heads, heads.reused, sj.verifiers.Traversal(),
        drafts=dict(shape=Sampled(depth=3, expanded=2, children=2))),
    "assistant, a tree of few tokens": lambda: heads.assistant(
        Tree(UNEVEN), sj.verifiers.Traversal(), centroids=5, active=4),
    "assistant, a chain with a stop rule and a controller": lambda: (
        heads.assistant(
            Chain(3, stop_rules.Adaptive(threshold=0.7)), sj.verifiers.Block(),
            controller=sj.decoding.Controller(
                lengths=(0, 1, 3), seconds=(1.0, 1.1, 1.2)))),
    "assistant, EAGLE-2's tree": lambda: heads.assistant(
        Best(depth=3, top_k=2, num_nodes=7), sj.verifiers.TargetWalk()),
    "MTP modules, a tree": lambda: heads.layer(
        methods.MTPHeads, heads.modules, sj.verifiers.Traversal(),
        chained=False, drafts=dict(shape=Tree(UNEVEN))),
    "MTP modules with a stop rule and a controller": lambda: heads.layer(
        methods.MTPHeads, heads.modules, sj.verifiers.Block(),
        drafts=dict(shape=Chain(3, stop_rules.Adaptive(threshold=0.7))),
        controller=sj.decoding.Controller(
            lengths=(0, 1, 3), seconds=(1.0, 1.1, 1.2))),
    "MTP modules, EAGLE-2's tree": lambda: heads.layer(
        methods.MTPHeads, heads.modules, sj.verifiers.TargetWalk(),
        drafts=dict(shape=Best(depth=3, top_k=2, num_nodes=7))),
    "MTP, one module used again": lambda: heads.layer(
        methods.MTPHeads, heads.reused, sj.verifiers.Block(), reuse=True,
        drafts=dict(shape=Chain(3))),
    "layers beside the last one": lambda: heads.layer(
        methods.ParallelLayers, heads.modules, sj.verifiers.Block(),
        drafts=dict(shape=Chain(3))),
    "layers beside the last one, a tree": lambda: heads.layer(
        methods.ParallelLayers, heads.modules, sj.verifiers.Traversal(),
        drafts=dict(shape=Tree(UNEVEN))),
    "PaSS as published": lambda: heads.lookahead(
        sj.verifiers.Block(), folded=False),
    "PaSS, a tree": lambda: heads.lookahead(
        sj.verifiers.Traversal(), folded=False, parents=UNEVEN),
    "PaSS folded": lambda: heads.lookahead(sj.verifiers.Block(), count=2),
    "UNO folded": lambda: heads.lookahead(
        sj.verifiers.Block(), heads.UNO, count=2),
    "UNO, a tree": lambda: heads.lookahead(
        sj.verifiers.Traversal(), heads.UNO, folded=False, parents=UNEVEN),
    "Parallel chain with a stop rule and a controller": lambda: heads.parallel(
        Chain(3, stop_rules.Threshold(threshold=0.4)), sj.verifiers.Block(), {},
        sj.decoding.Controller(lengths=(0, 2), seconds=(1.0, 1.1))),
    "Parallel chain, DSpark's": lambda: heads.parallel(
        Chain(3), sj.verifiers.Block(), {}),
    "Parallel chain, DFlash's": lambda: heads.parallel(
        Chain(3), sj.verifiers.Block(), heads.DFLASH),
    "Parallel tree of independent draws": lambda: heads.parallel(
        Tree(UNEVEN, "iid"), sj.verifiers.KSeq(), {"markov": "gated"}),
    "Parallel without_replacement": lambda: heads.parallel(
        Tree(UNEVEN), sj.verifiers.Traversal(),
        {"markov": "rnn", "ids": (0, 2, 3)}),
    "Parallel, DDTree's tree": lambda: heads.parallel(
        Best(3, top_k=3, num_nodes=8), sj.verifiers.TargetWalk(),
        heads.DFLASH),
    "Parallel, EAGLE-2's tree of a Markov head": lambda: heads.parallel(
        Best(3, top_k=2, num_nodes=8), sj.verifiers.TargetWalk(), {}),
    "Parallel chain, DFlash 2's": lambda: heads.parallel(
        Chain(3), sj.verifiers.Block(), heads.DFLASH_2),
    "Parallel tree of LiLiCorr's candidates": lambda: heads.parallel(
        Tree(UNEVEN), sj.verifiers.Traversal(), heads.LILICORR),
    "Parallel tree, Domino's": lambda: heads.parallel(
        Sampled(3, 2, 2), sj.verifiers.Traversal(), heads.DOMINO),
    "Parallel, best-first tree of candidates": lambda: heads.parallel(
        Best(3, top_k=2, num_nodes=8), sj.verifiers.TargetWalk(),
        heads.DFLASH_2 | {"fusion": "layers"}),
    "TokenIntersection": texts.token_intersection,
    "StringMatch": texts.string_match,
    "NGram": lambda: Contributed(
        NGram(gamma=3, vocab_size=VOCAB), sj.verifiers.Block()),
    "Reference": texts.references,
    "Recycling": lambda: Contributed(
        Recycling(parents=UNEVEN, vocab_size=VOCAB), sj.verifiers.TargetWalk(),
        params={"target": pair().params["target"]}),
    "VocabularySubset": texts.vocabulary_subset,
    "a quantised copy": compositions.quantized,
    "a windowed self-draft": compositions.window,
    "Hierarchy": compositions.hierarchy,
    "Online": lambda: Contributed(
        Online(model=pair().drafter, gamma=3, learning_rate=0.1, rank=2),
        sj.verifiers.Block()),
    "Suffix deterministic": lambda: texts.counted(
        Suffix, sj.verifiers.TargetWalk(), max_depth=6),
    "Suffix sampled": lambda: texts.counted(
        Suffix, sj.verifiers.Block(), max_depth=6, proposal="sampled"),
    "Suffix tree of draws": lambda: texts.counted(
        Suffix, sj.verifiers.Traversal(), max_depth=6, proposal="sampled",
        parents=(-1, 0, 0, 0, 1, 1, 2, 4)),
    "Retrieval tree of draws": lambda: texts.counted(
        Retrieval, sj.verifiers.Traversal(), max_match=4, proposal="sampled",
        parents=(-1, 0, 0, 1, 1)),
    "Retrieval tree": lambda: texts.counted(
        Retrieval, sj.verifiers.TargetWalk(), max_match=4, nodes=8),
    "Retrieval sampled": lambda: texts.counted(
        Retrieval, sj.verifiers.Block(), max_match=4, proposal="sampled"),
    "Cascade": compositions.cascade,
    "Fallback": compositions.fallback,
    "Fallback to another vocabulary": compositions.fallback_to_other_tokens,
    "Merge": compositions.merge,
    "early exit": lambda: part_of_target(
        lambda _: NetworkDrafter(network=EarlyExit(exit=2), shape=Chain(3)),
        sj.verifiers.GreedyBlock()),
    "early exit, a tree": lambda: part_of_target(
        lambda _: NetworkDrafter(
            network=EarlyExit(exit=2), shape=Tree(UNEVEN)),
        sj.verifiers.Traversal()),
    "Kangaroo": lambda: heads.kangaroo(
        Chain(3, stop_rules.Confidence(threshold=0.5)), sj.verifiers.Block()),
    "Kangaroo, a tree": lambda: heads.kangaroo(
        Tree(UNEVEN), sj.verifiers.Traversal()),
    "Swift": lambda: part_of_target(
        lambda _: Swift(gamma=2, count=1, window=2), sj.verifiers.Block()),
    "a part of the target": compositions.skipping,
    "features in a static tree": lambda: heads.features(
        Tree((-1, 0, 0, 1, 1, 2, 3))),
    "features in a dynamic tree": lambda: heads.features(
        Best(3, top_k=2, num_nodes=7)),
    "a text of the row": texts.reference,
    "a decoder": compositions.stage,
    "your cache": lambda: with_cache(examples.SlotCache),
    "Paged": lambda: with_cache(sj.caches.Paged(page=16)),
    "your drafter and rule": lambda: Contributed(
        examples.Repeat(vocab_size=VOCAB), examples.FirstToken()),
    "your model": examples.bigram,
    # Its drafts are often rejected, so they are almost free, or the controller
    # would not draft.
    "recurrent target, chain with a controller": lambda: dataclasses.replace(
        of_kind("recurrent target", DRAFTERS["chain"]),
        rule=sj.verifiers.Block(), controller=sj.decoding.Controller(
            lengths=(0, 1, 3), seconds=(1.0, 1.001, 1.002))),
}

# Every network in a chain and in a tree, and each form of a block's
# dependencies, for all kinds of targets.
_NETWORKS = (
    "chain", "tree without_replacement", "Medusa sampled chain",
    "Medusa without_replacement",
    "Hydra chain with a stop rule and a controller",
    "Hydra without_replacement", "Blockwise with a controller",
    "EAGLE-1 chain with a controller", "EAGLE-2 tree",
    "EAGLE-3 chain with a stop rule", "EAGLE-3 tree of few tokens",
    "P-EAGLE chain with a stop rule and a controller",
    "P-EAGLE tree of few tokens",
    "MTP modules with a stop rule and a controller", "MTP modules, a tree",
    "MTP, one module used again", "layers beside the last one",
    "layers beside the last one, a tree", "PaSS as published", "PaSS, a tree",
    "PaSS folded", "Parallel chain, DSpark's", "Parallel chain, DFlash's",
    "Parallel tree of independent draws", "Parallel without_replacement",
    "Parallel, DDTree's tree", "Parallel chain, DFlash 2's",
    "Parallel tree of LiLiCorr's candidates", "Parallel tree, Domino's",
    "features in a static tree", "features in a dynamic tree", "NGram")
# Networks that cannot draft for a kind of target; recurrent_test.py has their
# refusals. Adapters of UNO and experts are refused in experts_test.py.
REFUSED = {"experts": set(),
           "recurrent target": {"Assistant", "EarlyExit", "Kangaroo"}}
_DRAFTED_FOR = {
    "experts": (
        *_NETWORKS, "assistant, a chain with a stop rule and a controller",
        "assistant, a tree of few tokens", "early exit", "early exit, a tree",
        "Kangaroo", "Kangaroo, a tree", "Swift", "a part of the target"),
    "recurrent target": (*_NETWORKS, "UNO folded", "UNO, a tree")}
_OF_KINDS = {f"{kind}, {name}": (kind, name)
             for kind, names in _DRAFTED_FOR.items() for name in names}
DRAFTERS |= {
    name: functools.partial(of_kind, kind, DRAFTERS[dense])
    for name, (kind, dense) in _OF_KINDS.items()}

# One of each kind: nothing drafted, chains with and without a stop rule or a
# controller, static and dynamic trees, heads, and copies. The others are slow.
QUICK = {
    "Empty", "chain", "chain with a controller", "tree hybrid",
    "EAGLE-2 tree of a language model", "Medusa top_k",
    "EAGLE-3 chain with a stop rule", "P-EAGLE, DDTree's tree",
    "assistant, a tree of few tokens", "NGram", "Recycling",
    "recurrent target, tree without_replacement",
    "experts, tree without_replacement",
    "experts, EAGLE-3 chain with a stop rule"}
# A chain, a tree of independent draws, and a tree whose shape is known at run
# time. They are decoded with all rules that are exact for them. The others have
# their own rule alone, because rules are proved for any q by enumeration.
CROSSED = {"chain", "tree iid", "Paths of one model"}

# By design, their drafts depend on more than the tokens of the row. A prefill
# of these tokens gives another draft than the rounds that wrote them.
HISTORY = {
    "Empty": "it drafts nothing",
    **dict.fromkeys(("PaSS folded", "UNO folded"),
                    "it forecasts from look-ahead tokens of the last draft, "
                    "and a prompt has none"),
    "Recycling": "it collects the target's logits at all nodes of all drafts",
    "Merge": "its third part is Recycling; cascade_test.py has other parts",
    "Online": "it learns from the verdicts",
    "Hierarchy": "the chunks are selected at the end of the prompt; "
                 "hierarchy_test.py has the view of recent tokens",
    "Swift": "it chooses the skipped layers by the accepted tokens; `a part of "
             "the target` has a fixed choice",
}
HISTORY |= {name: HISTORY[dense] for name, (_, dense) in _OF_KINDS.items()
            if dense in HISTORY}

RULES = (
    sj.verifiers.Token(), sj.verifiers.Block(), sj.verifiers.GreedyBlock(),
    sj.verifiers.Recursive(), sj.verifiers.KSeq(), sj.verifiers.TargetWalk(),
    sj.verifiers.Traversal(), sj.verifiers.Typical(), sj.verifiers.TopK(k=2),
    sj.verifiers.Distance(epsilon=1), examples.FirstToken(),
)

def _drafter(key, target):
  """The parameters of a drafter that is a language model."""
  del target
  return pair().drafter.init(key)


# Where the first 7 tokens after the first of a row count, the last one that a
# loss reads is the 7th, or before it where labels are laws: the law of a token
# does not read the token. Windows of 3 tokens count whole or not at all.
COUNTED = 7
LAST_READ = {"AcceptedLength": 4} | dict.fromkeys(
    ("Eagle1Objective", "Eagle3Objective", "PEagleObjective",
     "KangarooObjective", "Distillation", "Acceptance", "StoredLaws"), 6)

# `model -> (objective, (key, target's parameters) -> what it trains, or None
# for the target, and what a batch has besides its tokens)`.
OBJECTIVES = {
    "NextToken": lambda model: (objectives.NextToken(model=model), None, {}),
    "MedusaObjective": lambda model: (
        objectives.MedusaObjective(model=model, heads=heads.MEDUSA),
        heads.MEDUSA.init, {}),
    "MedusaJointObjective": lambda model: (objectives.MedusaJointObjective(
        medusa=objectives.MedusaObjective(model=model, heads=heads.MEDUSA)),
                                  heads.MEDUSA.init, {}),
    "BlockwiseObjective": lambda model: (objectives.BlockwiseObjective(
        model=model, heads=heads.BLOCKWISE, one_head=False),
                                heads.BLOCKWISE.init, {}),
    "HydraObjective": lambda model: (
        objectives.HydraObjective(model=model, heads=heads.HYDRA),
        heads.HYDRA.init, {}),
    "PaSSObjective": lambda model: (objectives.PaSSObjective(
        model=model, embeddings=heads.EMBEDDINGS, cuts=4),
                                heads.EMBEDDINGS.init, {}),
    "ParallelObjective": lambda model: (objectives.ParallelObjective(
        model=model, heads=heads.PARALLEL, anchors=4), heads.PARALLEL.init, {}),
    "Eagle1Objective": lambda model: (
        objectives.Eagle1Objective(model=model, heads=heads.EAGLE_1),
        heads.EAGLE_1.init, {}),
    "Eagle3Objective": lambda model: (
        objectives.Eagle3Objective(model=model, heads=heads.EAGLE_3),
        heads.EAGLE_3.init, {}),
    "PEagleObjective": lambda model: (
        objectives.PEagleObjective(model=model, heads=heads.P_EAGLE),
        heads.P_EAGLE.init, {}),
    "MTPObjective": lambda model: (
        objectives.MTPObjective(model=model, heads=heads.MODULES),
        heads.MODULES.init, {}),
    "MTPJointObjective": lambda model: (objectives.MTPJointObjective(
        mtp=objectives.MTPObjective(model=model, heads=heads.MODULES)),
                               heads.MODULES.init, {}),
    "KangarooObjective": lambda model: (
        objectives.KangarooObjective(model=model, adapter=heads.ADAPTER),
        heads.ADAPTER.init, {}),
    "LayerSkipObjective": lambda model: (
        objectives.LayerSkipObjective(model=model, steps=10), None, {}),
    "Distillation": lambda model: (objectives.Distillation(
        model=pair().drafter, target=model), _drafter, {}),
    "AcceptedLength": lambda model: (objectives.AcceptedLength(
        model=pair().drafter, target=model, gamma=3), _drafter, {}),
    "Acceptance": lambda model: (objectives.Acceptance(
        model=pair().drafter, target=model, head=heads.ACCEPTANCE),
                                 heads.acceptance_head, {}),
    "StoredLaws": lambda model: (
        objectives.StoredLaws(model=pair().drafter), _drafter,
        texts.stored_laws()),
}
