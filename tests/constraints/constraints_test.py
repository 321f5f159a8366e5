"""What constraints do to drafts, and what they refuse."""

from constrained_sampling import CASES
from constrained_sampling import decoder_of
from constrained_sampling import penalised
from constrained_sampling import PROMPT
from constrained_sampling import tables
from constrained_sampling import TREE
from contributed import Contributed
from contributed_texts import DRAFT_TOKENS
from contributed_texts import TARGET_TOKENS
from contributions import DRAFTERS
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import constraints
from specjax import testing


def _drafts(decoder, params, prompts, before=None):
  """What a drafter drafts, after it did so in vain for the texts before."""
  parts = decoder.stage
  propose = jax.jit(parts.propose)

  def drafted(prompts, drafter=None):
    state = decoder.prefill(params, prompts, jax.random.key(1), limits=40)
    if drafter is not None:
      state = state.replace(drafter=drafter)
    return propose(params, state, parts.draw_uniforms(state, 1)[0])

  return drafted(prompts, before and drafted(before)[1])[0]


@pytest.mark.slow
@pytest.mark.parametrize("drafter,own", [
    (lambda model: sj.drafters.draft_model(model=model, gamma=3),
     lambda table: table),
    (lambda model: sj.drafters.NetworkDrafter(
        network=sj.drafters.LanguageModel(model=model),
        shape=sj.drafters.Tree(TREE, "iid")), lambda table: table),
    (lambda model: sj.drafters.Paths(
        models=(model,), num_paths=2, length=2), lambda table: (table,)),
    (lambda model: sj.drafters.NetworkDrafter(
        network=sj.drafters.LanguageModel(model=model),
        shape=sj.drafters.Best(2, top_k=2, num_nodes=5)), lambda table: table),
    (lambda model: sj.drafters.Cascade(
        model=model, gamma=3,
        drafter=sj.drafters.draft_model(model=model, gamma=2)),
     lambda table: {"target": table, "drafter": tables(4)[1]}),
], ids=["chain", "tree", "paths", "dynamic tree", "cascade"])
def test_drafts_are_constrained_like_the_target(drafter, own):
  # Broken: a drafter that is the target drafts by another law than the
  # target's somewhere down a path, and its drafts are rejected.
  case, table = CASES["penalties"], tables(4)[0]
  model = testing.MarkovModel(4)
  decoder = decoder_of(model, drafter(model), sj.verifiers.TargetWalk(), case)
  params = jax.tree.map(
      jnp.asarray, {"target": table, "drafter": own(table)})
  prompts = [PROMPT, [2, 1], [3, 3]]
  draft = jax.tree.map(np.asarray, _drafts(
      decoder, params, prompts, [prompt[:-1] for prompt in prompts]))
  names = decoder.drafter.provides
  for row, prompt in enumerate(prompts):
    texts = {0: []}
    for node in range(1, decoder.num_nodes):
      above = texts[draft.parents[row, node]]
      token = int(draft.tokens[row, node])
      texts[node] = [*above, token]
      logits = np.array(table[(prompt + above)[-1]], np.float64)
      logits = penalised(prompt, above, logits, None) / 0.8
      assert logits[token] > -np.inf
      if "iid" in names and "deterministic" not in names:
        law = np.exp(logits) / np.exp(logits).sum()
        np.testing.assert_allclose(
            draft.probs[row, node], law, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("drafter,own", [
    (lambda model: sj.drafters.draft_model(model=model, gamma=2),
     lambda table: table),
    (lambda model: sj.drafters.Cascade(
        model=model, gamma=2, drafter=sj.drafters.NGram(gamma=1)),
     lambda table: {"target": table, "drafter": None}),
], ids=["chain", "cascade"])
def test_a_drafter_that_knows_no_allowed_token_stops_no_row(drafter, own):
  # Broken: a small head or a drafter's own ban meets a constraint that leaves
  # none of its tokens, its law is 0 / 0, and the row ends with an error.
  model = testing.MarkovModel(4)
  table = jnp.asarray(tables(4)[0])
  own = own(table.at[:, 2:].set(-jnp.inf))
  decoder = sj.Decoder(
      target=model, verifier=sj.verifiers.Block(), eos=3,
      drafter=drafter(model), transform=sj.LogitsTransform(constraints=(
          constraints.Automaton.of_table([[-1, -1, 0, -1]], final=[0]),)))
  text = decoder.generate({"target": table, "drafter": own}, [[1, 0]],
                          jax.random.key(0), max_new_tokens=6)
  assert set(text.tokens[0][2:].tolist()) <= {2, 3}


def test_a_ban_goes_before_constraints():
  # Broken: a constraint leaves only tokens that are banned, is not passed over,
  # and the row ends with an error.
  model = testing.MarkovModel(4)
  decoder = sj.Decoder(
      target=model, verifier=sj.verifiers.Block(),
      drafter=sj.drafters.draft_model(model=model, gamma=2),
      transform=sj.LogitsTransform(banned=(2, 3), constraints=(
          constraints.Repetition(penalty=1.1),
          constraints.Banned(tokens=(0, 1)))))
  target, own, _ = map(jnp.asarray, tables(4))
  text = decoder.generate({"target": target, "drafter": own}, [[1, 0]],
                          jax.random.key(0), max_new_tokens=6).tokens[0]
  assert len(text) == 8 and set(text[2:].tolist()) <= {0, 1}
  assert decoder.changes_law == ("Repetition", "Banned")


def test_contrastive_logits_are_finite():
  # Broken: what the amateur excludes has the logit +inf, and the row ends.
  model = testing.MarkovModel(3)
  both = sj.models.Contrastive(expert=model, amateur=model)
  params = {"expert": jnp.zeros((3, 3)),
            "amateur": jnp.zeros((3, 3)).at[:, 1].set(-jnp.inf)}
  logits = both(params, jnp.zeros((1, 1), jnp.int32)).logits[0, 0]
  assert jnp.isfinite(logits).all() and logits.argmax() == 1


def _translated():
  """A drafter with another vocabulary, whose models are tables."""
  own, target = testing.MarkovModel(6), testing.MarkovModel(5)
  return Contributed(
      sj.drafters.TokenIntersection(model=own, gamma=3, target_size=5),
      sj.verifiers.Block(), target, {
          "target": jnp.asarray(tables(5)[0]), "drafter": {
              "model": jnp.asarray(tables(6)[0]),
              "vocabulary": sj.data.map_vocabularies(
                  DRAFT_TOKENS, TARGET_TOKENS)}})


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("case", [
    DRAFTERS["Medusa sampled chain"], DRAFTERS["PaSS as published"],
    _translated], ids=["heads", "look-ahead", "another vocabulary"])
def test_drafts_are_what_is_allowed(case):
  # Broken: drafters whose laws do not know the path, or the target's tokens,
  # waste drafts on tokens that a constraint forbids there.
  case = case()
  in_turn = constraints.Automaton.of_table(
      [[1, 1, -1, -1, -1], [-1, -1, 0, 0, -1]], final=[0])
  decoder = sj.Decoder(
      target=case.model, drafter=case.drafter, verifier=sj.verifiers.Block(),
      eos=4, transform=sj.LogitsTransform(constraints=(in_turn,)))
  draft = _drafts(decoder, case.parameters, [[1, 2, 3]] * 64)
  seen = set()
  for row in np.asarray(draft.tokens[:, 1:]).tolist():
    for place, token in enumerate(row):
      assert token in ((0, 1, 4), (2, 3), (0, 1, 4), (2, 3))[place]
      if token == 4:  # what is drafted after an end is never emitted
        break
      seen.add(place)
  assert seen == set(range(draft.tokens.shape[1] - 1))


def _with(*given, **kwargs):
  model = testing.MarkovModel(4)
  decoder = sj.Decoder(
      target=model, drafter=sj.drafters.Empty(), verifier=sj.verifiers.Token(),
      transform=sj.LogitsTransform(constraints=given))
  return decoder.prefill({"target": tables(4)[0]}, [[1], [2, 3]],
                         jax.random.key(0), **kwargs)


@pytest.mark.parametrize("call,words", [
    (lambda: _with(constraints.Repetition), ["Repetition", "not an object"]),
    (lambda: constraints.Repetition(penalty=0), ["penalty is 0", "above 0"]),
    (lambda: constraints.OutputPenalty(frequency=1e39), ["is 1e+39", "1e+30"]),
    (lambda: constraints.OutputPenalty(presence=np.nan), ["presence", "nan"]),
    (lambda: constraints.NoRepeatNGram(size=0), ["size is 0", "at least 1"]),
    (lambda: _with(constraints.Banned(tokens=(4,))), ["token 4", "[0, 4)"]),
    (lambda: _with(constraints.Banned(tokens=range(4))), ["all 4 tokens"]),
    (lambda: _with(constraints.Forced(after=((1, 9),))), ["token 9", "[0, 4)"]),
    (lambda: constraints.Forced(at=((1, 2), (1, 3))), ["twice", "leave one"]),
    (lambda: constraints.Forced(at=((-1, 2),)), ["from 0"]),
    (lambda: sj.Decoder(
        target=testing.MarkovModel(4), drafter=sj.drafters.Empty(),
        verifier=sj.verifiers.Token(), transform=sj.LogitsTransform(
            banned=(2,), constraints=(constraints.Forced(at=((0, 2),)),))),
     ["token 2", "Forced", "banned"]),
    (lambda: _with(*CASES["automaton"][4], limits=9), ["prompt 0", "eos"]),
    (lambda: _with(*CASES["automaton"][4], eos=[3, 3], limits=[2, 2]),
     None),
    (lambda: _with(constraints.Automaton.of_table(
        [[1] * 4, [2] * 4, [-1] * 4], [2]), eos=[3, 3], limits=3),
     ["prompt 1 may get 1", "has 2"]),
    (lambda: _with(constraints.Automaton.of_table([[0] * 5], [0])),
     ["5 tokens", "vocab_size=4"]),
    (lambda: constraints.Automaton.of_table([[0, 0], [1, 1]], final=[1]),
     ["accepts no text"]),
    (lambda: constraints.Automaton.of_table([[2, 0], [1, 1]], final=[1]),
     ["states 0 to 2", "there are 2"]),
    (lambda: sj.models.Contrastive(
        expert=testing.MarkovModel(3), amateur=testing.MarkovModel(4)),
     ["amateur is 4", "expert 3"]),
    (lambda: sj.models.Contrastive(
        expert=testing.MarkovModel(3), amateur=testing.MarkovModel(3), alpha=0),
     ["alpha is 0"]),
])
def test_what_cannot_be_is_refused_in_one_line(call, words):
  # Broken: a slip runs, or ends in a traceback of someone else's.
  if words is None:  # a row that gets no tokens needs no room
    call()
    return
  with pytest.raises(ValueError) as error:
    call()
  assert all(word in str(error.value) for word in words)
  assert "\n" not in str(error.value)


_LAST_TOKENS = [
    sj.drafters.Empty(),
    *(sj.drafters.draft_model(model=testing.MarkovModel(6), gamma=gamma)
      for gamma in (1, 4, 8)),
    sj.drafters.NetworkDrafter(
        network=sj.drafters.LanguageModel(model=testing.MarkovModel(6)),
        shape=sj.drafters.Tree(parents=(-1, 0, 0, 1, 1, 3, 5, 6)))]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", _LAST_TOKENS, ids=lambda d: (
    f"{type(d).__name__}-{d.num_nodes}"))
def test_what_is_drafted_beyond_a_row_uses_up_no_token(drafter):
  # Broken: drafts of many tokens use up the vocabulary below the row's limit or
  # its eos, and the row fails where it does not without drafts; or it does not
  # fail where it does without, or has another text before.
  table = jnp.asarray(tables(6)[0])
  params = {"target": table, "drafter": table}
  decoder = sj.Decoder(
      target=testing.MarkovModel(6), drafter=drafter,
      verifier=sj.verifiers.TargetWalk(), transform=sj.LogitsTransform(
          temperature=0.0, constraints=(constraints.NoRepeatNGram(size=1),)))
  want = [0]  # the likeliest token that the text does not have
  for _ in range(5):
    logits = np.array(table[want[-1]])
    logits[want] = -np.inf
    want.append(int(logits.argmax()))
  # To the last token; with an end before it; one token too many.
  state = decoder.prefill(
      params, [[0]] * 3, jax.random.key(0), limits=[6, 9, 9],
      eos=[[], [want[4]], []])
  state, stats = decoder.decode_until(params, state)
  for row, length in enumerate((6, 5, 6)):
    assert state.tokens[row, :state.lengths[row]].tolist() == want[:length]
  np.testing.assert_array_equal(stats.finite, [True, True, False])
  with pytest.raises(FloatingPointError, match="row 2.*left a token"):
    sj.decoding.raise_if_not_finite(stats)
  assert stats.draft_finite.all() and stats.law_finite.all()
