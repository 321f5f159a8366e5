"""What `certify` must not approve, beside the defects that small models show.

Each rule here is right on chains of up to 4 tokens, V <= 4, in float64, as
small language models draft them.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import exact
from specjax.exact import drafts
from specjax.exact import enumeration
from specjax.exact import larger
from specjax.interfaces import Verifier
from specjax.types import Draft
from specjax.types import Law
from specjax.verifiers import Block
from specjax.verifiers import GreedyBlock
from specjax.verifiers import KSeq
from specjax.verifiers import Recursive
from specjax.verifiers import residual
from specjax.verifiers import TargetWalk
from specjax.verifiers import Token
from specjax.verifiers import Traversal

_FEW = dict(vocab_sizes=(3,), gammas=(2, 3), kinds=("mixed",))


def _bonus_only(draft, p):
  """A law that is wrong: what was drafted is accepted, all of it."""
  del draft
  return Token().law(Draft.chain(
      0, jnp.zeros(p.shape[0] - 1, jnp.int32),
      jnp.tile(jnp.eye(1, p.shape[1]), (p.shape[0] - 1, 1))), p).replace(
          stop=jnp.zeros_like(p[:, 0]).at[-1].set(1))


@dataclasses.dataclass(frozen=True)
class _WrongWhere(Verifier):
  """Token verification, and wrong where `where(draft, p)` holds."""

  where: Any

  def law(self, draft, p):
    wrong = self.where(draft, p)
    a, b = _bonus_only(draft, p), Token().law(draft, p)
    return Law(stop=jnp.where(wrong, a.stop, b.stop),
               next_token=jnp.where(wrong, a.next_token, b.next_token))


@dataclasses.dataclass(frozen=True)
class _SmallestQ(Verifier):
  """Divides by max(q, 1e-30), and so accepts padding."""

  def law(self, draft, p):
    q = jnp.maximum(residual.at_drafted(draft, draft.probs), 1e-30)
    accept = jnp.minimum(residual.at_drafted(draft, p, first=0) / q, 1)
    reach = jnp.append(1, jnp.cumprod(accept))
    rest = jnp.maximum(p - residual.next_draft_probs(draft, p), 0)
    return Token().law(draft, p).replace(
        stop=reach * (1 - jnp.append(accept, 0)),
        next_token=residual.normalise(rest, p))


@dataclasses.dataclass(frozen=True)
class _Forgetful(Verifier):
  """Token verification that is wrong after its eighth commit."""

  def init(self, gamma):
    del gamma
    return jnp.zeros((), jnp.int32)

  def law(self, draft, p, state):
    return _WrongWhere(lambda *_: state >= 8).law(draft, p)

  def commit(self, state, draft, p, verdict):
    del draft, p, verdict
    return state + 1


class _AnyQ(GreedyBlock):
  """Does not say that it needs an autoregressive drafter."""

  requires = ("chain",)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("rule,witness", [
    (_SmallestQ(), "padding="),
    (_AnyQ(), "drafting=product"),
    (_WrongWhere(lambda draft, p: draft.tokens.shape[0] > 5), "gamma=8"),
    (_WrongWhere(lambda draft, p: p.shape[1] > 4), "vocab_size=1"),
    (_WrongWhere(lambda draft, p: p.dtype == jnp.float32), "dtype=float32"),
    (_Forgetful(), "real=0"),  # one token per round
], ids=lambda x: type(x).__name__)
def test_certify_sees_what_small_models_do_not_show(rule, witness):
  # Broken: a wrong rule is approved.
  assert exact.certify(rule, thorough=False, **_FEW).lossless
  found = exact.certify(rule, **_FEW)
  assert not found.lossless and found.total_variation > 1e-3
  assert witness in str(found)


def test_roots_are_tokens_of_their_context():
  # Broken: a rule that is wrong below some root is approved.
  for root in range(3):
    rule = _WrongWhere(lambda draft, p, root=root: draft.tokens[0] == root)
    assert not exact.certify(rule, thorough=False, **_FEW).lossless


def test_progress_is_reported_if_it_is_wanted(capsys):
  # Broken: half a minute without a word, or bars in logs and tests.
  few = dict(vocab_sizes=(3,), gammas=(1,), kinds=("mixed",), thorough=False)
  assert exact.certify(Token(), **few) == exact.certify(
      Token(), progress=False, **few)
  assert capsys.readouterr().err == ""
  exact.certify(Token(), progress=True, **few)
  assert "certifying: 100%" in capsys.readouterr().err


def test_a_sparse_enumeration_is_the_dense_one():
  # Broken: the total variation of large models is not what it says.
  gamma, vocab_size = 2, 3
  scheme = lambda q, contexts: drafts.chains(q, contexts, gamma)
  wrong = _WrongWhere(lambda draft, p: p[0, 0] > 0.3)
  for rule, narrow in ((wrong, False), (Block(), False), (GreedyBlock(), True)):
    compiled = exact.Compiled(rule)
    depth = enumeration.depth_of(compiled.rule, gamma, 2)
    sparse = larger.sparse_pair(vocab_size, depth, 0, narrow)
    contexts = enumeration.first_contexts(vocab_size, depth)
    tables = [[side[np.arange(a, b)] for a, b in zip(contexts, contexts[1:])]
              for side in sparse.tables()]
    dense = exact.enumerate_chains(compiled, exact.Pair(*tables), gamma, 2)
    found = larger.enumerate_sparse(
        compiled, sparse, scheme, gamma + 1, gamma, 2, "float64")
    assert found.laws == dense.laws
    assert found.total_variation == pytest.approx(
        dense.total_variation, abs=1e-12)
    assert (found.total_variation > 0.01) == (rule is wrong)


def _drafts(kind):
  """Parents, tokens, and the logits of q and p, of one tree or chain."""
  rng = np.random.default_rng(0)
  parents = {"chain": (-1, 0, 1, 2), "tree": (-1, 0, 0, 1)}[kind]
  tokens = jnp.array([0, 1, 1, 2])
  return parents, tokens, rng.normal(size=(2, 4, 4))


def _laws(logits, kind):
  """Rows as laws: 0 dense; 1 with zeros, drafted tokens too; 2 one-hot."""
  rows = jax.nn.softmax(logits)
  keep = jnp.array([
      np.ones((4, 4)),
      [[1, 0, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0]],
      np.eye(4)[[1, 1, 2, 3]]])
  rows = rows * keep[kind]
  return rows / rows.sum(-1, keepdims=True)


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("rule,kind", [
    (Token(), "chain"), (Block(), "chain"), (GreedyBlock(), "chain"),
    (Recursive(), "tree"), (Traversal(), "tree"), (TargetWalk(), "tree"),
    (KSeq(), "tree")], ids=lambda x: type(x).__name__)
def test_laws_are_differentiable_in_reverse(rule, kind):
  # Broken: training through a law raises, or its gradient is NaN where a
  # probability is 0 (an unguarded division), or is wrong.
  parents, tokens, logits = _drafts(kind)
  state = None
  if rule == GreedyBlock():
    state = rule.init(3).replace(remaining=jnp.array([1, 2]),
                                 weights=jnp.array([0.3, 0.2]))

  @jax.jit
  @jax.value_and_grad
  def value_and_gradient(logits, kind_of_q, kind_of_p):
    q = _laws(logits[0], kind_of_q)
    if rule == KSeq():  # siblings share one law
      q = q.at[2].set(q[1])
    draft = Draft(tokens=tokens, parents=jnp.array(parents), probs=q)
    law = rule.evaluate(draft, _laws(logits[1], kind_of_p), state)
    weights = jnp.arange(1.0, 17).reshape(4, 4)**0.5
    return jnp.sum(law.stop[:, None] * law.next_token * weights)

  with jax.enable_x64(True):
    for kinds in itertools.product(range(3), repeat=2):
      assert np.isfinite(value_and_gradient(logits, *kinds)[1]).all()
    step = np.random.default_rng(1).normal(size=logits.shape)
    ahead, back = (value_and_gradient(logits + h * step, 0, 0)[0]
                   for h in (1e-6, -1e-6))
    found = value_and_gradient(logits, 0, 0)[1]
    np.testing.assert_allclose(np.sum(found * step), (ahead - back) / 2e-6,
                               rtol=1e-5)
