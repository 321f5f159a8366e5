"""The bar that every drafter, rule, objective and cache must pass.

What is listed in `contributions.py` is tested here, end to end and alike. One
program serves all that is asked of a drafter: greedy and sampled rows, and
rows of several temperatures, ends and limits differ in their data alone.
"""

import dataclasses
import functools
import sys

from contributed import CHAIN
from contributed import deep
from contributed import KINDS
from contributed import pair
from contributed import UNEVEN
from contributed import VOCAB
from contributions import COUNTED
from contributions import CROSSED
from contributions import DRAFTERS
from contributions import HISTORY
from contributions import LAST_READ
from contributions import OBJECTIVES
from contributions import QUICK
from contributions import REFUSED
from contributions import RULES
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts import ROOT

import specjax as sj
from specjax import interfaces
from specjax import objectives
from specjax import testing
from specjax.attention import plain
from specjax.decoding import growth
from specjax.decoding import rounds
from specjax.interfaces import checks
from specjax.testing import drafts
from specjax.testing import recording

sys.path.append(str(ROOT / "experiments"))

from lib.configurations.one_of import OneOf  # noqa: E402

_ROWS, _CALLS, _ROUNDS = 160, 8, 6
_CALLS_MORE, _ROUNDS_MORE = 3, 4  # of every other rule
_CAPACITY, _LONGEST = 256, 32
_LENGTHS, _NEW = (1, 2, 3, 17, 30, _LONGEST), 20
_FEW = 64  # slots, which hold all texts except those of long prompts
# A row that is done from the start, so that all batches have one shape.
_FILLER = dict(prompt=[0], new=0, temperature=0.0, eos=(0, 1))


class _Tried:
  """A drafter in its decoder, with batches of one shape.

  The rules are its own, and for the drafters of `CROSSED` all others that are
  exact for it. One program serves them, and `prefill` is told which one acts.
  """

  def __init__(self, name):
    self.name, self.case = name, DRAFTERS[name]()
    case = self.case
    self.params, self.target = case.parameters, case.model
    self.context = case.context
    self.rules = _sound(case) if name in CROSSED else (case.rule,)
    self.decoder = sj.Decoder(
        target=case.model, drafter=case.drafter, controller=case.controller,
        verifier=OneOf(self.rules) if self.rules[1:] else case.rule)

  def prefill(self, rows, rule=0, first_id=0):
    rows = rows + [_FILLER] * (_ROWS - len(rows))
    state = self.decoder.prefill(
        self.params, [row["prompt"] for row in rows], jax.random.key(0),
        limits=[len(row["prompt"]) + row["new"] for row in rows],
        temperature=[row["temperature"] for row in rows],
        eos=[row.get("eos", ()) for row in rows], capacity=_CAPACITY,
        request_ids=first_id + np.arange(_ROWS), context=self.context(_ROWS))
    return self.acting(rule, state)

  def acting(self, rule, state):
    """The state in which one of the rules acts."""
    return state if not self.rules[1:] else state.replace(
        verifier=self.decoder.verifier.start(
            self.rules[rule], self.decoder.num_nodes - 1, _ROWS))

  def decode(self, state):
    """Tokens `[B, C]`, lengths `[B]`, emitted and accepted tokens `[B]`.

    By the program that records drafts, which serves all tests. The loop of a
    controller is another one without records.
    """
    emitted = accepted = 0
    while not np.asarray(state.done).all():
      if self.decoder.controller:
        state, stats = self.decoder.decode_until(self.params, state)
        new = stats.emitted, stats.accepted
      else:
        state, stats, _ = self.decoder.decode(
            self.params, state, 2, traced=True)
        new = np.sum(stats.emitted, 0), np.sum(stats.accepted, 0)
      sj.decoding.raise_if_not_finite(stats)
      emitted, accepted = emitted + np.asarray(new[0]), accepted + np.asarray(
          new[1])
    return np.asarray(state.tokens), np.asarray(state.lengths), (
        emitted, accepted)


def _sound(case):
  """A drafter's own rule, and the other lossless ones that it declares all for.

  Not those of newcomers, which need not take every draft.
  """
  declared = {*interfaces.capabilities(case.drafter)}
  return (case.rule, *(
      rule for rule in RULES if type(rule).__module__.startswith("specjax")
      and rule != case.rule and rule.lossless and {*rule.requires} <= declared))


@pytest.fixture(autouse=True, scope="module")
def _short_texts():
  """Texts are short: nothing is drawn, attended to or padded in vain."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(rounds, "_DRAWN_ROUNDS", 2)  # few are used
    patch.setattr(growth, "STEP", _FEW)
    patch.setattr(plain, "_buckets", lambda slots, size: [
        *[0] * (size >= _LONGEST), *[_FEW] * (slots > _FEW), slots])
    yield


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in DRAFTERS])
def tried(request):
  return _Tried(request.param)


def _prompts():
  rng = np.random.default_rng(0)
  return [rng.integers(VOCAB, size=n).tolist() for n in _LENGTHS]


def _kind(target):
  """What tells the targets of the drafters apart, but for taps of features."""
  config = getattr(target, "config", None)
  return type(target), *(
      getattr(config, name, None) for name in ("recurrent", "experts"))


_TEXTS = {}  # of every kind of target


def _greedy_texts(target, params):
  """Each prompt's greedy continuation, from passes without a cache."""
  if (kind := _kind(target)) in _TEXTS:
    return _TEXTS[kind]
  lengths, rows = jnp.array(_LENGTHS), jnp.arange(len(_LENGTHS))
  tokens = np.zeros((len(_LENGTHS), _LONGEST + _NEW), np.int32)
  for row, prompt in zip(tokens, _prompts()):
    row[:len(prompt)] = prompt

  @jax.jit
  def continued(tokens):
    def extend(i, tokens):
      logits = target(params, tokens).logits
      return tokens.at[rows, lengths + i].set(
          jnp.argmax(logits[rows, lengths + i - 1], -1))

    return jax.lax.fori_loop(0, _NEW, extend, tokens)

  _TEXTS[kind] = [row[:n + _NEW].tolist()
                  for row, n in zip(np.asarray(continued(tokens)), _LENGTHS)]
  return _TEXTS[kind]


@pytest.mark.default_cases(3)
def test_greedy_rows_ends_and_limits(tried):
  # Broken: a slot, a position, a mask or a verdict is off by one; a row goes
  # on after its end or its limit; a prompt of one token is special.
  texts = _greedy_texts(tried.target, tried.params["target"])
  end = texts[3][_LENGTHS[3] + 9]
  rows = [dict(prompt=p, new=_NEW, temperature=0.0) for p in _prompts()]
  rows += [dict(rows[3], eos=(end,)), dict(rows[4], new=7)]
  stop = _LENGTHS[3] + texts[3][_LENGTHS[3]:].index(end) + 1
  want = texts + [texts[3][:stop], texts[4][:_LENGTHS[4] + 7]]
  for i, rule in enumerate(tried.rules):
    tokens, lengths, (emitted, accepted) = tried.decode(
        tried.prefill(rows, i))
    got = [row[:n].tolist() for row, n in zip(tokens, lengths)]
    assert got[:len(want)] == want, rule
    # Finished rows stay.
    assert (lengths[len(want):] == len(_FILLER["prompt"])).all()
    assert (emitted[len(want):] == 0).all()
    drafts_some = tried.decoder.drafter.num_nodes > 1
    assert accepted[:len(want)].sum() > 0 or not drafts_some


@pytest.mark.default_cases(3)
def test_drafts_and_texts_are_exact(tried):
  # Broken: what is reported of a draft, or anything between it and the text, at
  # any temperature, with any end. drafts_test.py has what this refuses.
  case = tried.case
  testing.assert_drafter_exact(
      case.drafter, tried.params, tried.target,
      verifier=tried.decoder.verifier, controller=case.controller,
      context=tried.context, capacity=_CAPACITY, rows=_ROWS, calls=_CALLS,
      rounds=_ROUNDS)
  # The other rules draw numbers of their own, and are looked at together and
  # one by one.
  requests = recording.Requests.mixed(
      VOCAB, _ROWS, 2 * _ROUNDS, longest=_LONGEST)
  state = requests.prefill(tried.decoder, tried.params, capacity=_CAPACITY,
                           context=tried.context(_ROWS))
  ids = _ROWS * (_CALLS + np.arange(len(tried.rules) * _CALLS_MORE)).reshape(
      len(tried.rules), _CALLS_MORE)[..., None] + np.arange(_ROWS)
  found = [recording.record(
      tried.decoder, tried.params, requests, ids[rule], rounds=_ROUNDS_MORE,
      state=state, prepare=functools.partial(tried.acting, rule))
           for rule in range(1, len(tried.rules))]
  if found:
    drafts.check_texts(
        tried.target, tried.params, sj.LogitsTransform(),
        recording.joined(found), _ROUNDS_MORE,
        kinds=np.repeat(np.arange(1, len(tried.rules)), _CALLS_MORE))


@pytest.mark.default_cases(6)
def test_state_after_rounds_is_that_of_a_prompt(tried):
  # Broken: after a round, a slot, a position, a mask or a hidden state is that
  # of another token. The drafts are worse then, and the output is as before.
  if tried.name in HISTORY:
    pytest.skip(HISTORY[tried.name])
  rng = np.random.default_rng(0)
  row = np.arange(_ROWS)
  lengths = 1 + row % 20
  prompts = [rng.integers(VOCAB, size=n).tolist() for n in lengths]
  # Some rows are done early. No text has more tokens than a prompt of the other
  # tests, so that all prefills have one shape.
  limits = np.minimum(lengths + np.where(row % 5, _NEW, 4), _LONGEST)
  for rounds_before in (2, 6):
    testing.assert_state_exact(
        tried.decoder, tried.params, prompts, rounds=rounds_before,
        temperature=np.array([0.0, 0.6, 1.0])[row % 3], limits=limits,
        eos=[(0, 1) if i % 7 == 0 else () for i in row], capacity=_CAPACITY,
        context=tried.context(_ROWS))


def _rows():
  return [dict(prompt=[[1, 3, 0, 2], [4]][i % 2], new=3,
               temperature=(1.0, 0.6)[i % 2]) for i in range(_ROWS - 1)]


def test_rows_depend_on_nothing_but_themselves(tried):
  # Broken: a row's text depends on who shares its batch or on its slot, or a
  # leaf of the state does not have the rows first.
  fresh = tried.prefill(_rows())
  checks.check_rows("state", fresh, _ROWS)
  if tried.decoder.controller:
    pytest.skip("all rows of a batch have one length, which depends on them")
  want, lengths, _ = tried.decode(tried.prefill(_rows()))
  other = tried.prefill(_rows(), first_id=7 * _ROWS)
  slots = np.random.default_rng(1).permutation(_ROWS)
  tokens, got_lengths, _ = tried.decode(
      tried.decoder.insert(other, slots, fresh))
  np.testing.assert_array_equal(got_lengths[slots], lengths)
  for row, other, n in zip(tokens[slots], want, lengths):
    np.testing.assert_array_equal(row[:n], other[:n])


def test_what_a_drafter_does_not_declare_is_refused(tried):
  # Broken: a rule runs with a drafter for which it is not exact.
  drafter = tried.decoder.drafter
  declared = interfaces.capabilities(drafter)
  assert "conditional" in declared
  rule = type("Rule", (sj.verifiers.Token,), {})
  for need in interfaces.CAPABILITIES:
    rule.requires = (need,)
    if need in declared:
      interfaces.check_pair(rule(), drafter)
      continue
    with pytest.raises(ValueError, match=f"Rule is exact only.*{need}"):
      sj.Decoder(target=tried.target, drafter=drafter, verifier=rule())


def test_another_target_is_refused(tried):
  # Broken: tokens of one vocabulary are read as those of another.
  if isinstance(tried.decoder.drafter, sj.drafters.Empty):
    pytest.skip("it drafts nothing, for any target")
  drafter, other = tried.decoder.drafter, testing.MarkovModel(VOCAB + 2)
  make = lambda: sj.Decoder(target=other, drafter=drafter,
                            verifier=sj.verifiers.TargetWalk())
  if type(drafter).__module__.startswith("specjax"):
    words = "vocab|tokens|hidden states|width|Transformer"
    with pytest.raises(ValueError, match=words):
      make()
    return
  # A newcomer need not look: its draft is refused by its shape, or its weights
  # do not fit the target's.
  params = {**tried.params, "target": other.init(jax.random.key(0))}
  state = make().prefill(params, [[1, 2]], jax.random.key(0), limits=9,
                         context=tried.context(1))
  with pytest.raises((ValueError, TypeError), match="probs of|shape"):
    make().decode_round(params, state)


def _name(rule):
  return type(rule).__name__


@pytest.mark.parametrize("rule", RULES, ids=_name)
def test_padding_is_never_accepted(rule):
  # Broken: the loop's ragged drafts, whose ends are padding, are not exact.
  # 0 as a token, ids that are none, and a real node before them.
  p = jax.nn.softmax(jax.random.normal(jax.random.key(0), (4, VOCAB)))
  q = jnp.zeros((4, VOCAB))
  law = jax.jit(rule.evaluate)
  shapes = [CHAIN] if "chain" in rule.requires else [CHAIN, (-1, 0, 0, 1)]
  for parents in shapes:
    for token in (0, VOCAB, VOCAB + 7):
      draft = sj.Draft(tokens=jnp.array([1, *[token] * 3], jnp.int32),
                       parents=jnp.array(parents, jnp.int32), probs=q)
      found = law(draft, p)
      np.testing.assert_allclose(found.stop, [1, 0, 0, 0], atol=1e-6)
      if rule.lossless:
        np.testing.assert_allclose(found.next_token[0], p[0], atol=1e-6)
      real = draft.replace(tokens=draft.tokens.at[1].set(2),
                           probs=q.at[1].set(0.2))
      np.testing.assert_allclose(law(real, p).stop[2:], 0, atol=1e-6)


@pytest.mark.default_cases(5)
@pytest.mark.parametrize("rule", [
    pytest.param(rule, marks=() if rule in RULES[:10] else pytest.mark.slow)
    for rule in RULES], ids=_name)
def test_a_rule_is_what_it_says(rule):
  # Broken: a rule that calls itself lossless and is not, or the reverse. Of
  # ours lossless_test.py and tree_laws_test.py have the proofs in full.
  trees = () if "chain" in rule.requires else (UNEVEN[:5],)
  found = sj.exact.certify(rule, vocab_sizes=(3,), gammas=(2,), trees=trees,
                           kinds=("dense", "zeros"), thorough=not isinstance(
                               rule, tuple(map(type, RULES[:10]))))
  assert found.lossless == rule.lossless


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in ("NextToken", "MedusaObjective")
                 else pytest.mark.slow) for name in OBJECTIVES])
def test_objective(name):
  # Broken: a run trains something else than it says, is not a function of its
  # key, or recompiles in every step.
  model, target = deep() if name in (
      "KangarooObjective", "LayerSkipObjective") else (
      pair().target, pair().params["target"])
  objective, init, more = OBJECTIVES[name](model)
  assert objective == OBJECTIVES[name](model)[0]
  assert hash(objective) == hash(OBJECTIVES[name](model)[0])
  trainable, frozen = {"target": target}, {}
  if init is not None:
    own = "stop" if "stop" in objective.needs else "drafter"
    frozen = {"target": target, "drafter": pair().params["drafter"]}
    trainable = {own: jax.jit(init)(jax.random.key(0), target)}
    frozen.pop(own, None)
  tokens = jax.random.randint(jax.random.key(1), (3, 13), 0, VOCAB)
  batch = {"tokens": tokens[:2], "progress": jnp.float32(0.5),
           "weights": jnp.ones((2, 12)), **more}
  step = jax.jit(jax.value_and_grad(
      lambda trainable, key, batch=batch: objective(
          trainable, frozen, batch, key), has_aux=True))
  (loss, metrics), grads = step(trainable, jax.random.key(2))
  again, _ = step(trainable, jax.random.key(2))
  assert loss.shape == () and jnp.isfinite(loss) and loss == again[0]
  assert all(x.shape == () for x in jax.tree.leaves(metrics))
  # In NumPy, because every eager operation compiles one program per shape.
  grads = jax.tree.map(np.asarray, grads)
  moved = [float(np.abs(g).max()) for g in jax.tree.leaves(grads)]
  assert np.isfinite(moved).all() and max(moved) > 0
  # A step by which a straight line would fall by a hundredth.
  size = 0.01 * abs(float(loss)) / sum(
      float(np.sum(g**2)) for g in jax.tree.leaves(grads))
  lower = jax.tree.map(
      lambda x, g: np.asarray(x) - np.float32(size) * g, trainable, grads)
  assert step(lower, jax.random.key(2))[0][0] < loss
  # Tokens count by their weights, alike where there are none.
  if not more:
    plain = {k: x for k, x in batch.items() if k != "weights"}
    np.testing.assert_allclose(jax.jit(objective)(
        trainable, frozen, plain, jax.random.key(2))[0], loss, rtol=1e-5)
  ignored = jnp.asarray(batch["weights"]).at[1].set(0)
  one, other = (step(trainable, jax.random.key(2), {
      **batch, "weights": ignored,
      "tokens": batch["tokens"].at[1].set(row[:batch["tokens"].shape[1]])})
                for row in tokens[1:])
  jax.tree.map(np.testing.assert_array_equal, one, other)
  assert one[0][0] != loss
  # A loss reads no token after the last one that counts.
  batch["weights"] = (jnp.arange(batch["weights"].shape[1]) < COUNTED
                      ) * jnp.ones_like(batch["weights"])
  loss_of = lambda tokens: step(
      trainable, jax.random.key(2), {**batch, "tokens": tokens})[0][0]
  rows, loss = batch["tokens"], loss_of(batch["tokens"])
  read = [t for t in range(rows.shape[1])
          if loss_of(rows.at[:, t].add(1) % VOCAB) != loss]
  assert max(read) == LAST_READ.get(name, COUNTED)


@pytest.mark.slow
def test_all_are_listed():
  # Broken: a newcomer is exported and nobody asks whether it passes.
  assert QUICK | CROSSED <= {*DRAFTERS}
  protocols = "Objective", "DrafterObjective"
  assert {*objectives.__all__} - {*protocols} == {*OBJECTIVES}

  def find(part, used):
    if type(part).__module__.startswith("specjax."):
      used.add(type(part).__name__)
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
      for field in dataclasses.fields(part):
        find(getattr(part, field.name), used)
    if isinstance(part, tuple):
      for one in part:
        find(one, used)

  used = {kind: set() for kind in ("dense", *KINDS)}
  for name, make in DRAFTERS.items():
    kind = name.split(",")[0]
    find(make().drafter, used[kind if kind in KINDS else "dense"])
  named = lambda attribute: {
      name for name in sj.drafters.__all__
      if hasattr(getattr(sj.drafters, name), attribute)}
  assert not named("propose") - used["dense"]
  for kind in KINDS:
    assert named("begin") & (used["dense"] - used[kind]) == REFUSED[kind]
