"""Laws by row: the row that is drawn from is the row of the law."""

import dataclasses
import functools

from contributions import RULES
import jax
import numpy as np
import pytest

from specjax import exact
from specjax import interfaces
from specjax import sampling
from specjax.types import Draft
from specjax.types import LawByRow
from specjax.verifiers import Block
from specjax.verifiers import GreedyBlock
from specjax.verifiers import KSeq
from specjax.verifiers import residual
from specjax.verifiers import Token

_DRAFTS, _NODES, _VOCAB = 200, 4, 5


def _cases(rule):
  """Drafts, target laws, states and uniforms, with zeros and padding."""
  rng = np.random.default_rng(5)
  shape = (_DRAFTS, _NODES, _VOCAB)

  def laws():
    weights = rng.random(shape)**3 * (rng.random(shape) < 0.7)
    weights[..., 0] += 1e-3
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)

  p, q = laws(), laws()
  chain = "chain" in interfaces.rule(rule).requires
  parents = np.array([-1, 0, 1, 2] if chain else [-1, 0, 0, 1], np.int32)
  if isinstance(rule, KSeq):  # siblings share one law
    q[:, 2] = q[:, 1]
  q[::5, 3:] = 0
  tokens = (rng.random((_DRAFTS, _NODES, 1)) > q.cumsum(-1)).sum(-1)
  states = None
  if isinstance(rule, GreedyBlock):
    states = rule.init(_NODES - 1).replace(
        remaining=np.tile(np.array([1, 2], np.int32), (_DRAFTS, 1)),
        weights=rng.random((_DRAFTS, 2)).astype(np.float32))
  draft = Draft(tokens=np.minimum(tokens, _VOCAB - 1).astype(np.int32),
                parents=np.tile(parents, (_DRAFTS, 1)), probs=q)
  uniforms = rng.random((_DRAFTS, 8, sampling.VERDICT_UNIFORMS), np.float32)
  return draft, p, states, uniforms


def _outcomes(rule):
  """Of every case the law, the verdicts of both forms, and all rows."""
  one = interfaces.rule(rule)

  @jax.jit
  @jax.vmap
  def both(draft, p, state, uniforms):
    law, rows = one.law(draft, p, state), one.by_row(draft, p, state)
    draw = lambda law: jax.vmap(
        functools.partial(sampling.sample_verdict, law, draft))(uniforms)
    return law, rows.law(), draw(law), draw(rows)

  return jax.device_get(both(*_cases(rule)))


def _check(law, rows, said, drawn):
  jax.tree.map(np.testing.assert_array_equal, said, drawn)
  np.testing.assert_allclose(rows.stop, law.stop, atol=1e-6)
  reached = law.stop[..., None] > 0
  np.testing.assert_allclose(np.where(reached, rows.next_token, 0),
                             np.where(reached, law.next_token, 0), atol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_what_is_drawn_from_is_the_law(rule, monkeypatch):
  # Broken: the loop draws from something else than `law` says, or an
  # accelerator draws from something else than a CPU.
  found = _outcomes(rule)
  _check(*found)
  assert len(np.unique(found[-1].next_token)) == _VOCAB

  def accelerated(*operands, default, tpu=None, **_):
    return (tpu or default)(*operands)

  monkeypatch.setattr(jax.lax, "platform_dependent", accelerated)
  elsewhere = _outcomes(rule)
  _check(found[0], elsewhere[1], found[2], elsewhere[3])


@dataclasses.dataclass(frozen=True)
class _LawAlone(Block):
  """Overrides `law`, and inherits rows of another one."""

  def law(self, draft, p, state=None):
    return Block().law(draft, p).replace(next_token=p)


def test_rows_of_another_law_are_not_inherited():
  # Broken: a researcher overrides `law` and the loop does not notice.
  draft, p, *_ = jax.tree.map(lambda x: x[1], _cases(_LawAlone()))
  one = interfaces.rule(_LawAlone())
  np.testing.assert_array_equal(one.by_row(draft, p).next_row(1), p[1])
  assert not one.makes_rows and interfaces.rule(Block()).makes_rows


@dataclasses.dataclass(frozen=True)
class _OtherRows(Token):
  """Draws the extra token from p, whatever its law says."""

  def law(self, draft, p, state=None):
    return Token().law(draft, p)

  def by_row(self, draft, p, state=None):
    return LawByRow(stop=self.law(draft, p).stop,
                    next_row=functools.partial(residual.at_node, p))


@dataclasses.dataclass(frozen=True)
class _OtherLaw(Token):
  """Draws as it should, and says another law."""

  def law(self, draft, p, state=None):
    return Token().law(draft, p).replace(next_token=p)

  def by_row(self, draft, p, state=None):
    return Token().by_row(draft, p)


@pytest.mark.parametrize("rule", [_OtherRows(), _OtherLaw()])
def test_certify_proves_what_is_drawn_from(rule):
  # Broken: a certificate of a law from which nobody draws.
  found = exact.certify(rule, vocab_sizes=(3,), gammas=(1,), rounds=1,
                        kinds=("dense",), seeds=range(2), thorough=False)
  assert not found.lossless and "by_row is not the law" in found.defects
  wrong = found.total_variation > 1e-3
  assert wrong == isinstance(rule, _OtherRows)


@pytest.mark.parametrize("rows,message", [
    (lambda law: law.law(), "law by row of the verifier Rule is a Law"),
    (lambda law: dataclasses.replace(law, stop=law.stop[1:]),
     r"stop of the verifier Rule has shape \(3,\)"),
    (lambda law: dataclasses.replace(law, next_row=lambda node: law.stop),
     r"a row of next_token of the verifier Rule has shape \(4,\).*\[V\]")])
def test_rows_of_another_shape_are_refused(rows, message):
  # Broken: a wrong row is drawn from, or an error names no part.
  rule = type("Rule", (Token,), {
      "by_row": lambda self, draft, p: rows(Token().by_row(draft, p))})()
  draft, p, *_ = jax.tree.map(lambda x: x[1], _cases(rule))
  with pytest.raises(ValueError, match=message):
    interfaces.rule(rule).by_row(draft, p).next_row(0)
