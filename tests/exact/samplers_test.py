"""Samplers in plain numpy, as an engine has them, sound and wrong ones.

A sampler has one uniform per drafted token and one for the next token. The
defects are those of planted_defects_test, hidden_defects_test and
tree_defects_test that a sampler without memory can have.
"""

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import exact
from specjax import verifiers
from specjax.exact import samplers
from specjax.exact import schemes
from specjax.types import Draft

_CHAIN = (-1, 0, 1)
_TREES = ((-1, 0, 0), (-1, 0, 0, 1))


def _draw(weights, uniform):
  ends = np.cumsum(weights)
  token = np.searchsorted(ends, uniform * ends[-1], side="right")
  return min(token, np.flatnonzero(weights)[-1])


def _rest(p, q):
  rest = np.maximum(p - q, 0)
  return rest if rest.sum() > 0 else p


def token(tokens, q, p, u, defect=""):
  """Token verification."""
  accepted = 0
  for i, x in enumerate(tokens):
    if not q[i].any():
      return [*tokens[:i], _draw(p[i], u[-1])]
    a, b = (q[i, x], p[i, x])[::1 if defect != "swapped ratio" else -1]
    if u[i] * a >= b:
      break
    accepted += 1
  else:
    return [*tokens, _draw(p[-1], u[-1])]
  rest = {"no residual": p[accepted],
          "scalar residual": _rest(p[accepted], q[accepted, x])}.get(
              defect, _rest(p[accepted], q[accepted]))
  return [*tokens[:accepted], _draw(rest, u[-1])]


def block(tokens, q, p, u, defect=""):
  """Block verification."""
  real = int(np.argmin([*q.any(-1), False]))
  survive = np.ones(real + 1)
  for i, x in enumerate(tokens[:real]):
    survive[i + 1] = survive[i] * p[i, x] / q[i, x]
    if defect != "no minimum":
      survive[i + 1] = min(1, survive[i + 1])
  below = np.concatenate([q[:real], np.zeros_like(p[:1])])
  rest = np.maximum(survive[:, None] * p[:real + 1] - below, 0)
  mass = rest.sum(-1)
  total = mass + 1 - survive
  heads = np.where(total > 0, mass / np.where(total > 0, total, 1), 1)
  if defect == "survival for heads":
    heads = survive
  coins = np.full(real, u[0]) if defect == "one uniform" else u[:real]
  passed = np.append(True, coins < heads[1:])
  stop = int(np.flatnonzero(passed)[-1])
  if defect == "first tails":
    stop = int(np.argmin(np.append(passed, False))) - 1
  if defect == "residual of one":
    rest = np.maximum(p[:real + 1] - below, 0)
  row = rest[stop] if rest[stop].sum() > 0 else p[stop]
  return [*tokens[:stop], _draw(row, u[-1])]


def recursive(tokens, q, p, u, parents, defect=""):
  """Recursive rejection sampling."""
  node, path = 0, []
  row = p[0]
  while True:
    for child in np.flatnonzero(parents == node):
      below, x = q[child - 1], tokens[child - 1]
      if not below.any():
        continue
      if u[child - 1] * below[x] < row[x]:
        node, row = child, p[child]
        path.append(x)
        break
      if defect != "siblings at once":
        row = _rest(row, below) / _rest(row, below).sum()
    else:
      break
  if defect in ("no residual", "siblings at once"):
    row = p[node]
  return [*path, _draw(row, u[-1])]


def traversal(tokens, q, p, u, parents, defect=""):
  """Traversal verification."""
  def visit(node, mass):
    """Returns the accepted path below `node`, or the left mass and row."""
    row = mass * p[node]
    for child in np.flatnonzero(parents == node):
      below, x = q[child - 1], tokens[child - 1]
      if not below.any():
        continue
      found = visit(child, min(1, row[x] / below[x]))
      if found is not None:
        return [x, *found]
      left = np.maximum(row - below, 0)
      total = left.sum() + 1 - mass
      if total > 1e-15:
        row, mass = left / total, left.sum() / total
    if u[node - 1] < mass or not node:
      if defect == "forgotten mass":
        row = p[node]
      return [_draw(row if row.sum() > 0 else p[node], u[-1])]
    return None

  return visit(0, 1.0)


def _share(below, row, count, rho):
  beta = np.minimum(below, row / rho).sum()
  return (1 - max(1 - beta, 0)**count) / beta if beta > 0 else count


@functools.cache
def _rho(below, row, count):
  share = functools.partial(_share, np.array(below), np.array(row), count)
  low, high = 1.0, 1.0 if share(1.0) <= 1 else float(count)
  for _ in range(60):
    middle = (low + high) / 2
    low, high = ((low, middle) if share(middle) <= middle
                 else (middle, high))
  return high


def k_seq(tokens, q, p, u, parents, factor=1.0):
  """K-SEQ, with rho from bisection."""
  node, path = 0, []
  while True:
    children = [c for c in np.flatnonzero(parents == node) if q[c - 1].any()]
    if not children:
      return [*path, _draw(p[node], u[-1])]
    count, below, row = len(children), q[children[0] - 1], p[node]
    rho = _rho(tuple(below), tuple(row), count) * (
        factor if count > 1 else 1)
    for child in children:
      x = tokens[child - 1]
      if u[child - 1] * rho * below[x] < row[x]:
        node = child
        path.append(x)
        break
    else:
      rest = np.maximum(row - _share(below, row, count, rho) * np.minimum(
          below, row / rho), 0)
      return [*path, _draw(rest if rest.sum() > 1e-12 else row, u[-1])]


def target_walk(tokens, q, p, u, parents):
  """Samples from the target along the tree."""
  nodes, path = [0], []
  for depth in range(len(parents)):
    path.append(_draw(p[nodes[0]], u[depth]))
    nodes = [i for i in range(1, len(parents)) if parents[i] in nodes
             and tokens[i - 1] == path[-1] and q[i - 1].any()]
    if not nodes:
      break
  return path


_RULES = {"token": (token, verifiers.Token(), ()),
          "block": (block, verifiers.Block(), ()),
          "recursive": (recursive, verifiers.Recursive(), _TREES),
          "k_seq": (k_seq, verifiers.KSeq(), _TREES),
          "traversal": (traversal, verifiers.Traversal(), _TREES),
          "target_walk": (target_walk, verifiers.TargetWalk(), _TREES)}
_FEW = dict(coins=1, large=0, vocab_sizes=(3,))
_HARD = ("dense", "zeros", "equal", "ties", "nearly_one_hot", "heavy_tails")


@pytest.mark.slow
@pytest.mark.parametrize("name", _RULES)
def test_sound_samplers_are_approved(name):
  # Broken: the audit rejects a rule that is lossless.
  sampler, _, trees = _RULES[name]
  found = exact.audit_sampler(sampler, trees=trees[-1:], gammas=(2,),
                              kinds=_HARD, **_FEW)
  assert found.lossless and found.total_variation < 1e-9, str(found)
  assert found.trees if trees else found.models


@pytest.mark.slow
@pytest.mark.parametrize("name", _RULES)
@pytest.mark.parametrize("vocab_size", [3, 4])
def test_boxes_have_the_law_of_the_rule(name, vocab_size):
  # Broken: the volumes of the boxes are not the probabilities of the tokens.
  sampler, rule, trees = _RULES[name]
  parents = (*trees, _CHAIN)[-1]
  pair = exact.random_pair("dense", vocab_size, 3, 1)
  p, q = pair.tables()
  drafts = schemes.draw("iid", parents, q, np.zeros(1, int))
  rows = samplers._Rows(drafts.weights, drafts.tokens[:, 1:],
                        drafts.probs[:, 1:], p[drafts.contexts],
                        np.array(parents))
  box = samplers._Box(sampler, 1, False, bool(trees), "float64",
                      np.random.default_rng(0))
  draft, tokens, mass = samplers._boxes(box, rows)
  with jax.enable_x64(True):
    laws = jax.vmap(lambda *x: rule.law(Draft(*x[:3]), x[3]))(*map(
        jnp.asarray, (drafts.tokens, drafts.parents, drafts.probs, rows.p)))
  for i in range(len(drafts.weights)):
    want, got = {}, {}
    for node, extra in np.argwhere(np.asarray(laws.stop)[i, :, None]
                                   * np.asarray(laws.next_token)[i] > 0):
      path, at = [extra], node
      while at:
        path, at = [drafts.tokens[i, at], *path], parents[at]
      key = tuple(map(int, path))
      want[key] = want.get(key, 0) + float(
          laws.stop[i, node] * laws.next_token[i, node, extra])
    here = draft == i
    for emitted, weight in zip(tokens[here], mass[here]):
      key = tuple(map(int, emitted[emitted >= 0]))
      got[key] = got.get(key, 0) + weight / drafts.weights[i]
    for key in want | got:
      assert got.get(key, 0) == pytest.approx(want.get(key, 0), abs=1e-9)


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("sampler,defect", [
    *((block, defect) for defect in (
        "residual of one", "first tails", "survival for heads", "no minimum",
        "one uniform")),
    *((token, defect) for defect in (
        "scalar residual", "no residual", "swapped ratio"))])
def test_planted_defects_of_chains(sampler, defect):
  # Broken: a wrong sampler is approved.
  wrong = functools.partial(sampler, defect=defect)
  few = dict(gammas=(2,), kinds=("dense",), padding=False, large=0)
  found = exact.audit_sampler(wrong, coins=1, seeds=range(6), vocab_sizes=(3,),
                              **few)
  assert not found.lossless and found.total_variation > 1e-3
  assert "NOT LOSSLESS" in str(found) and found.example is not None
  if found.total_variation < 0.03:  # more than 40,000 rounds
    return
  # The same sampler as a black box, on the same models.
  found = exact.audit_sampler(
      lambda x, q, p, rng: wrong(x, q, p, rng.random(len(p))),
      seeds=(found.witness["seed"],), total_variation=found.total_variation,
      **few)
  assert not found.lossless


@pytest.mark.parametrize("sampler,defect", [
    (recursive, dict(defect="no residual")),
    (recursive, dict(defect="siblings at once")),
    (traversal, dict(defect="forgotten mass")), (k_seq, dict(factor=0.95))])
def test_planted_defects_of_trees(sampler, defect):
  # Broken: a wrong sampler of trees is approved.
  found = exact.audit_sampler(
      functools.partial(sampler, **defect), trees=_TREES[:1], kinds=("dense",),
      seeds=range(3), padding=False, **_FEW)
  assert not found.lossless and found.total_variation > 1e-3


def _merged(drafts, q, parents):
  drafts = schemes.iid(drafts, q, parents)
  for node in range(1, len(parents)):
    drafts.probs[drafts.first(node) != node, node] = 0
  return drafts


def _likeliest_as_random(drafts, q, parents):
  drafts = schemes.top_k(drafts, q, parents)
  for node, parent in enumerate(parents[1:], 1):
    drafts.probs[:, node] = q[drafts.at(parent)]
  return drafts


@pytest.mark.parametrize("scheme", [
    _merged, _likeliest_as_random, schemes.larger_of_two, schemes.confident])
def test_drafts_that_are_not_what_they_are_said_to_be(scheme):
  # Broken: a sound sampler with a wrong drafter is approved; or the audit
  # blames the drafter although the sampler ignores q.
  settings = dict(trees=((-1, 0, 0),), scheme=scheme, kinds=("dense",),
                  seeds=range(2), padding=False, **_FEW)
  assert not exact.audit_sampler(recursive, **settings).lossless
  assert exact.audit_sampler(target_walk, **settings).lossless


def _ties(rows):
  rows = np.sort(rows, axis=-1)
  return ((rows[:, 1:] == rows[:, :-1]) & (rows[:, 1:] > 0)
          & (rows[:, 1:] < 1)).any()


def _ratio(value):
  return lambda x, q, p: ((p[np.arange(len(x)), x] == value * q[
      np.arange(len(x)), x]) & (p[:-1].max(-1) < 1)).any()


def _near_one(k):
  return lambda x, q, p: ((p > 1 - 1.5 * 10.0**-k) & (p < 1 - 1e-9)).any()


_HIDDEN = {
    "ties of p": lambda x, q, p: _ties(p),
    "ties of q": lambda x, q, p: _ties(q),
    **{f"ratio {r}": _ratio(r) for r in (0.5,)},
    "uniform q": lambda x, q, p: (q == 1 / p.shape[1]).all(-1).any(),
    **{f"nearly one-hot, {k}": _near_one(k) for k in (2, 4, 7)},
    "q nearly one-hot": lambda x, q, p: ((q > 0.98) & (q < 1)).any(),
    **{f"below 1e-{k}": lambda x, q, p, k=k: (
        (p > 0) & (p < 10.0**-k)).any() for k in (3, 6, 9)},
    "tails of q": lambda x, q, p: ((q > 0) & (q < 1e-6)).any(),
    "last token": lambda x, q, p: (x == p.shape[1] - 1).any(),
    "token 0": lambda x, q, p: (x == 0).any(),
    "padding": lambda x, q, p: (~q.any(-1)).any() and q.any(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _HIDDEN)
def test_numbers_that_real_models_have(name):
  # Broken: a sampler that is wrong at numbers of real models is approved.
  where = _HIDDEN[name]
  wrong = lambda x, q, p, u: token(
      x, q, p, u, "no residual" if where(x, q, p) else "")
  kinds = (*_HARD, "uniform")
  assert not exact.audit_sampler(
      wrong, gammas=(2,), kinds=kinds, **_FEW).lossless


@pytest.mark.slow
@pytest.mark.parametrize("where", [
    lambda x, q, p: True, lambda x, q, p: (q > 0).all(),
    lambda x, q, p: (q[0] == 0).sum() > 1000])
def test_large_vocabularies_are_sampled(where):
  # Broken: a sampler that is wrong only with a large vocabulary is approved.
  def wrong(x, q, p, u):
    here = p.shape[1] > 10_000 and where(x, q, p)
    return token(x, q, p, u, "no residual" if here else "")

  found = exact.audit_sampler(wrong, coins=1, vocab_sizes=(3,), gammas=(1,),
                              kinds=("dense",))
  assert not found.lossless and found.witness["vocab_size"] == 32_000
  assert "32000" in str(found)


@pytest.mark.parametrize("sampler,defect", [
    (lambda x, q, p, u: [], samplers.NO_TOKEN),
    (lambda x, q, p, u: [0] * 9, samplers.NO_TOKEN),
    (lambda x, q, p, u: [p.shape[1]], samplers.OUTSIDE),
    (lambda x, q, p, u: [int(np.argmin(p[0]))], samplers.IMPOSSIBLE)])
def test_results_that_are_no_tokens(sampler, defect):
  # Broken: the audit stops with an error, or approves the sampler.
  found = exact.audit_sampler(sampler, kinds=("zeros",), gammas=(1,), **_FEW)
  assert not found.lossless and defect in str(found)


def _batched(tokens, q, p, rng):
  """Token verification of a batch of chains of one token."""
  row = np.arange(len(tokens))
  x = tokens[:, 0]
  accept = rng.random(len(x)) * q[row, 0, x] < p[row, 0, x]
  rest = np.maximum(p[:, 0] - q[:, 0], 0)
  rest = np.where(rest.any(-1, keepdims=True), rest, p[:, 0])
  rest = np.where(accept[:, None], p[:, 1], rest)
  ends = np.cumsum(rest, axis=-1)
  extra = (ends <= rng.random((len(x), 1)) * ends[:, -1:]).sum(-1)
  return np.stack([np.where(accept, x, extra), np.where(accept, extra, -1)], 1)


_LIGHT = dict(gammas=(1,), kinds=("dense",), padding=False, large=0,
              batched=True, total_variation=0.15, false_alarm=0.05)


@pytest.mark.slow
def test_false_alarms_are_rare():
  # Broken: sound samplers are refuted more often than the stated level.
  refuted = sum(not exact.audit_sampler(_batched, seed=seed, **_LIGHT).lossless
                for seed in range(1000))
  assert refuted <= 50


def test_power_at_the_stated_total_variation():
  # Broken: a sampler at the stated distance passes too often.
  def shifted(tokens, q, p, rng):
    """Emits one token from p, with 0.15 moved to the least likely token."""
    del q
    row = p[:, 0].copy()
    each = np.arange(len(row))
    row[each, row.argmax(-1)] -= 0.15
    row[each, p[:, 0].argmin(-1)] += 0.15
    assert row.min() >= 0
    ends = np.cumsum(row, axis=-1)
    extra = (ends <= rng.random((len(row), 1)) * ends[:, -1:]).sum(-1)
    return np.minimum(extra, 2)[:, None]

  found = [exact.audit_sampler(shifted, seed=seed, **_LIGHT)
           for seed in range(200)]
  assert sum(not x.lossless for x in found) >= 190


@pytest.mark.slow
def test_other_random_numbers_and_regions_are_refused():
  # Broken: a law that is not exact is reported as exact.
  rng = np.random.default_rng(0)
  race = lambda x, q, p, u: [int(np.argmin(-np.log(u[:2]) / p[0, :2]))]
  for sampler, words in (
      (lambda x, q, p, u: [_draw(p[0], rng.random())], "equal uniforms"),
      (race, "boxes")):
    with pytest.raises(ValueError, match=words):
      exact.audit_sampler(sampler, kinds=("dense",), gammas=(1,), **_FEW)


def test_a_sampler_in_torch():
  # Broken: a sampler of torch tensors cannot be audited as the guide shows.
  torch = pytest.importorskip("torch")

  def sampler(tokens, q, p, uniforms):
    tokens, q, p, u = map(torch.as_tensor, (tokens, q, p, uniforms))
    x = tokens[:, :1].long()
    at = lambda rows: rows[:, 0].gather(1, x)
    accept = (u[:, :1] * at(q) < at(p)) & (at(q) > 0)
    rest = (p[:, 0] - q[:, 0]).clamp(min=0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p[:, 0])
    ends = torch.where(accept, p[:, 1], rest).cumsum(-1)
    extra = (ends <= u[:, 1:] * ends[:, -1:]).sum(-1, keepdim=True)
    found = torch.where(accept, torch.cat([x, extra], 1), torch.cat(
        [extra, torch.full_like(x, -1)], 1))
    return found.numpy()

  found = exact.audit_sampler(sampler, batched=True, gammas=(1,), **_FEW)
  assert found.lossless, str(found)


_PROGRAM = """
import json, sys
for line in sys.stdin:
  draft = json.loads(line)
  found = []
  for x, q, p, u in zip(*(draft[k] for k in ("tokens", "q", "p", "uniforms"))):
    x, q, total = x[0], q[0], 0
    if u[0] * q[x] < p[0][x] and q[x] > 0:
      head, row = [x], p[1]
    else:
      head, row = [], [max(a - b, 0) for a, b in zip(p[0], q)]
      row = row if sum(row) else p[0]
    for extra, weight in enumerate(row):
      total += weight
      if total > u[1] * sum(row):
        break
    found.append((head + [extra, -1])[:2])
  print(json.dumps(found), flush=True)
"""


def test_a_sampler_in_another_process():
  # Broken: an engine in another language cannot be audited as the guide shows.
  with subprocess.Popen([sys.executable, "-c", _PROGRAM], text=True,
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    def sampler(*arguments):
      names = ("tokens", "q", "p", "uniforms")
      line = json.dumps({k: x.tolist() for k, x in zip(names, arguments)})
      print(line, file=child.stdin, flush=True)
      return json.loads(child.stdout.readline())

    found = exact.audit_sampler(sampler, batched=True, gammas=(1,),
                                kinds=("dense", "ties"), **_FEW)
    child.stdin.close()
  assert found.lossless, str(found)
