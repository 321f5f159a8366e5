"""Drafters with which a target drafts for itself: Medusa, blockwise, PaSS."""

import dataclasses
import functools
import itertools

from contributed import disturbed
from contributed import pair
from first_drafts import first_draft
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import methods
from specjax.drafters import Best
from specjax.drafters import Chain
from specjax.drafters import LookAhead
from specjax.drafters import Medusa
from specjax.drafters import NetworkDrafter
from specjax.drafters import PaSS
from specjax.drafters import Tree
from specjax.methods.heads import _forecasts
from specjax.models import load_model
from specjax.models import save_model
from specjax.models import Transformer
from specjax.verifiers import Block
from specjax.verifiers import KSeq
from specjax.verifiers import TargetWalk
from specjax.verifiers import Token
from specjax.verifiers import Traversal

_V, _D, _K = 5, 16, 3
_MEDUSA = methods.MedusaHeads(width=_D, vocab_size=_V, heads=_K)
_BLOCKWISE = methods.BlockwiseHeads(width=_D, vocab_size=_V, heads=_K,
                                      hidden_width=8)
_EMBEDDINGS = methods.PaSSEmbeddings(count=3, width=_D)
_CHAIN = (-1, 0, 1, 2)
_UNEVEN = (-1, 0, 1, 2, 1, 0, 5, 0)  # depth-first; the first child is deepest


def _medusa(proposal="top_k", parents=_UNEVEN):
  return _heads(Tree(parents, proposal))


def _heads(shape):
  return NetworkDrafter(network=Medusa(heads=_MEDUSA), shape=shape)


_CASES = {
    "heads": (_medusa("iid"), KSeq()),
    "published": (NetworkDrafter(
        network=LookAhead(embeddings=_EMBEDDINGS), shape=Chain(4)), Block()),
    "folded": (PaSS(embeddings=_EMBEDDINGS, count=2), Block())}


def _setup(drafter):
  """`(target, params)` of a decoder."""
  model, params = pair().target, pair().params["target"]
  if not isinstance(getattr(drafter, "network", None), Medusa):
    model, params = methods.with_lookahead(
        model, params, disturbed(_EMBEDDINGS))
    return model, {"target": params, "drafter": ()}
  return model, {"target": params, "drafter": disturbed(drafter.network.heads)}


# The first draft of a prompt. contribution_test.py compares later drafts with
# it, and asks whether the output follows the target.

_PROMPTS = ([1, 3, 0, 2], [2], [4, 1], [3] * 7, [*range(5)] * 4) * 8


@functools.cache
def _first(name):
  """`(texts, draft)`: the first draft of each row, and the tokens before it.

  A prompt has no look-ahead tokens inside, so the folded ones are known after
  the first round.
  """
  drafter, rule = _CASES[name]
  model, params = _setup(drafter)
  decoder = sj.Decoder(target=model, drafter=drafter, verifier=rule)
  state = decoder.prefill(params, _PROMPTS, jax.random.key(0), limits=48)
  state, stats, traces = decoder.decode(params, state, rounds=2, traced=True)
  turn = int(name == "folded")
  lengths = [len(p) for p in _PROMPTS] + turn * np.asarray(stats.emitted[0])
  texts = [row[:n] for row, n in zip(np.asarray(state.tokens), lengths)]
  return texts, jax.tree.map(lambda x: np.asarray(x[turn]), traces.draft)


def _forecast(drafter, texts, shift):
  """The law of every depth, from passes without a cache: `[B, depth, V]`.

  Heads are applied behind the token before the root, and look-ahead tokens are
  put after the text. 0 where nothing is known.
  """
  folded = isinstance(drafter, PaSS)
  reads = folded or isinstance(drafter.network, LookAhead)
  ends = np.array([len(text) for text in texts])
  ends = np.maximum(ends - folded + shift, 0)
  padded = np.zeros((len(texts), 48), np.int32)
  for row, text, end in zip(padded, texts, ends):
    row[:end] = [*text, 0][:end]
    row[end:end + 3] = _V + np.arange(3) if reads else 0
  model, params = _setup(drafter)
  out, rows = jax.jit(model)(params["target"], padded), np.arange(len(texts))
  if reads:
    behind = np.arange(int(folded), (drafter.count if folded else 3) + 1)
    return np.asarray(jax.nn.softmax(
        out.logits[rows[:, None], ends[:, None] - 1 + behind]))
  logits = _MEDUSA(
      params["drafter"], out.hidden[rows, np.maximum(ends - 2, 0)],
      methods.lm_head(params["target"]))
  known = np.array([len(text) >= 2 for text in texts])
  return np.asarray(jax.nn.softmax(logits)) * known[:, None, None]


def _distance(name, shift=0):
  """The largest distance of a row of q from that `shift` positions further."""
  drafter, (texts, draft) = _CASES[name][0], _first(name)
  worst = 0
  for row, laws in enumerate(_forecast(drafter, texts, shift)):
    parents, drawn = draft.parents[row], draft.tokens[row]
    depths = np.asarray(sj.trees.topology.depths(parents))
    for i in range(1, len(parents)):
      if drawn[i] >= _V:
        assert not draft.probs[row, i].any()
        continue
      distance = np.abs(draft.probs[row, i] - laws[depths[i] - 1]).max()
      worst = max(worst, distance)
  return worst


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", _CASES)
def test_rows_are_the_laws_of_their_position(name):
  # Broken: a hidden state or a look-ahead token is that of another position
  # or row. Drafts are worse then, and no test of the text can see it.
  assert _distance(name) < 1e-4
  for shift in (-1, 1):  # the comparison sees one position
    assert _distance(name, shift) > 0.1


@pytest.mark.slow
def test_the_best_tree_of_heads_has_the_likeliest_paths():
  # Broken: a level of DDTree's tree has the law of another head, or a tree with
  # `top_k` = 1, which declares a chain, has siblings.
  model, params = _setup(_medusa())
  texts, depth = [text for text in _PROMPTS[:4] if len(text) > 1], 3
  tree, chain = (
      first_draft(sj.Decoder(target=model, verifier=TargetWalk(),
                             drafter=_heads(Best(depth, top_k, num_nodes))),
                  params, texts)
      for top_k, num_nodes in ((2, 8), (1, 4)))
  np.testing.assert_array_equal(chain.parents, [[-1, 0, 1, 2]] * len(texts))
  for row, laws in enumerate(_forecast(_medusa(), texts, 0)):
    reach = {path: np.prod([law[x] for law, x in zip(laws, path)])
             for n in range(1, depth + 1)
             for path in itertools.product(range(_V), repeat=n)}
    paths = [()]
    for parent, token in zip(tree.parents[row, 1:], tree.tokens[row, 1:]):
      paths.append((*paths[parent], int(token)))
    assert set(paths[1:]) == set(sorted(reach, key=reach.get)[-7:])
    np.testing.assert_array_equal(chain.tokens[row, 1:], laws.argmax(axis=-1))


def test_a_forecast_follows_what_is_committed():
  # Broken: a row that was cut by its limit, or is done, goes on from a node
  # that it did not commit.
  before = _forecasts.Forecast(values=jnp.full((4, 2), -1.0),
                              known=jnp.array([True, False, False, False]))
  verdict = sj.types.Verdict(
      path=jnp.tile(jnp.array([0, 2, 5, 0, 0, 0]), (4, 1)),
      num_accepted=jnp.full((4,), 2), next_token=jnp.zeros((4,), jnp.int32))
  values = jnp.arange(48.0).reshape(4, 6, 2)
  after = before.advance(values, verdict, jnp.array([0, 0, 2, 3]))
  np.testing.assert_array_equal(after.known, [True, False, True, True])
  np.testing.assert_array_equal(
      after.values, [[-1, -1], [-1, -1], values[2, 2], values[3, 5]])


@pytest.mark.parametrize("rule", [Token(), Block(), Traversal()])
def test_hanging_look_ahead_tokens_change_no_law(rule):
  # Broken: `chain = True` of a draft that has more than a chain.
  _, draft = _first("folded")
  assert draft.tokens.shape[1] == 9
  p = jax.nn.softmax(2 * jax.random.normal(
      jax.random.key(0), (len(draft.tokens), 9, _V)))
  alone = jax.vmap(sj.Draft.chain)(
      draft.tokens[:, 0], draft.tokens[:, 1:3], draft.probs[:, 1:3])
  law = jax.jit(jax.vmap(rule.law))
  got, want = law(draft, p), law(alone, p[:, :3])
  assert (np.asarray(got.stop)[:, 3:] == 0).all()
  np.testing.assert_allclose(got.stop[:, :3], want.stop, atol=1e-6)
  np.testing.assert_allclose(
      got.stop[:, :3, None] * got.next_token[:, :3],
      want.stop[..., None] * want.next_token, atol=1e-6)


# A target that reads look-ahead tokens.


def test_look_ahead_tokens_are_read_as_rows_of_a_longer_table(tmp_path):
  # Broken: an embedding is of its neighbour, or a plain text's law changes.
  model = Transformer(dataclasses.replace(
      pair().target.config, tie_embeddings=True))
  params = {k: x for k, x in pair().params["target"].items() if k != "head"}
  extended, both = methods.with_lookahead(
      model, params, disturbed(_EMBEDDINGS))
  assert extended.vocab_size == _V
  tokens = jnp.array([[0, 4, 5, 6, 7], [2, 1, 0, 3, 4]])
  got = jax.jit(extended)(both, tokens)
  np.testing.assert_array_equal(got.logits[1:],
                                jax.jit(model)(params, tokens[1:]).logits)
  longer = Transformer(dataclasses.replace(model.config, vocab_size=_V + 3))
  table = jnp.concatenate(
      [params["embedding"], disturbed(_EMBEDDINGS)["embeddings"]])
  want = jax.jit(longer)({**params, "embedding": table}, tokens)
  np.testing.assert_allclose(got.hidden, want.hidden, atol=1e-5)

  save_model(tmp_path, extended, both)
  loaded, read = load_model(tmp_path)
  assert loaded == extended
  jax.tree.map(np.testing.assert_array_equal, read, both)


# What the drafters say of themselves, and what is refused.


@pytest.mark.parametrize("drafter,chain,iid,autoregressive", [
    (_medusa(), 0, 0, 0),
    (_medusa("iid"), 0, 1, 0),
    (_medusa("iid", _CHAIN), 1, 1, 0),
    (_medusa("top_k", (-1, 0)), 1, 1, 1),
    (_medusa("iid", (-1, 0, 0)), 0, 1, 1),
    (_medusa("top_k", (-1,)), 1, 1, 1),
    (_heads(Chain(3)), 1, 1, 0),
    (_heads(Best(3, 2, 8)), 0, 0, 0),
    (sj.strategies.blockwise(_BLOCKWISE).drafter, 1, 1, 0),
    (sj.strategies.blockwise(_MEDUSA, 1).drafter, 1, 1, 1),
    (PaSS(embeddings=_EMBEDDINGS, count=1), 1, 1, 0),
    (_CASES["published"][0], 1, 1, 0)])
def test_drafters_tell_the_truth(drafter, chain, iid, autoregressive):
  # Broken: a rule runs with a drafter for which it is not lossless.
  wanted = sj.interfaces.provided(
      chain=chain, iid=iid, autoregressive=autoregressive, conditional=True)
  assert {*wanted} == {*drafter.provides} & {
      "chain", "iid", "autoregressive", "conditional"}
  assert hash(drafter) == hash(dataclasses.replace(drafter))
  assert isinstance(drafter, sj.interfaces.Drafter)


def test_target_calls():
  # Broken: a drafter that drafts with a complete pass of the target is ranked
  # by half of its cost, also as a member of a combination.
  twice, once = _CASES["published"][0], PaSS(embeddings=_EMBEDDINGS)
  assert (twice.target_calls, once.target_calls) == (2, 1)
  ngram = sj.drafters.NGram(gamma=2)
  for drafter, calls in ((twice, 2), (once, 1)):
    assert sj.drafters.Fallback(
        first=ngram, second=drafter).target_calls == calls
