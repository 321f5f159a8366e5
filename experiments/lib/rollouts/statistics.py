"""Statistics of drafted tokens, computed in the decoding loop.

A `Statistic` is an observer of a decoder (`Decoder.observers`). Other observers
report the survival under a verification rule. A `Statistic` reports one number
per draft position instead. So the probabilities themselves never leave the
loop. The drafts of a `Statistic` must be chains.

The number at position i is weighted by the probability that token verification
accepts the i - 1 tokens before it. This weight is computed exactly from the
probabilities of both models, without random decisions. The sum of a statistic
divided by the sum of "drafted" is its mean over the draft positions that
verification reaches.

`Shorter` and `Subtree` are observers that evaluate a rule with shorter drafts
and smaller trees.
"""

from collections.abc import Sequence
import dataclasses
import math

import jax
import jax.numpy as jnp

import specjax as sj
from specjax.types import Draft

TOPS = (1, 4, 16)
BINS = (0.0, 0.25, 0.5, 1.0, 2.0, math.inf)  # entropy of the target in nats


class _Observer(sj.Verifier):
  """Base class of observers that report statistics of drafts."""

  lossless = True
  requires = ("chain",)

  def law(self, draft: Draft, target_probs: jax.Array) -> sj.Law:
    """Returns the law of token verification. The law is never used."""
    return sj.verifiers.Token().law(draft, target_probs)


@dataclasses.dataclass(frozen=True)
class Statistic(_Observer):
  """Weighted number per draft position (see the docstring of the module).

  Let p be the target's distribution at a position, and q the drafter's.

  Attributes:
    kind: kind of the number before weighting. "drafted" is 1. "overlap" is
      sum_x min(p(x), q(x)), the probability that token verification accepts a
      token drawn from q. "recall" is the probability under p of the `top` most
      likely tokens of q.
    top: number of tokens for "recall".
    low: smallest entropy of p in nats. The number is 0 at positions with a
      smaller entropy.
    high: limit for the entropy of p in nats. The number is 0 at positions with
      this or a larger entropy.
  """

  kind: str
  top: int = 1
  low: float = 0.0
  high: float = math.inf

  def figures(self, draft: Draft, target_probs: jax.Array, state: None,
              law: sj.Law, depths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns 0 (no expected number of tokens), and the numbers `[N]` by node.

    The number of the root is 0.
    """
    del state, law, depths
    p, q = target_probs[:-1], draft.probs[1:].astype(target_probs.dtype)
    weights = sj.verifiers.Token().survival(draft, target_probs)[:-1]
    counted = weights * draft.drafted[1:]
    if self.low > 0 or self.high < math.inf:
      entropy = -jnp.sum(jax.scipy.special.xlogy(p, p), axis=-1)
      counted *= (self.low <= entropy) & (entropy < self.high)
    value = counted * self._value(p, q)
    return jnp.zeros(()), jnp.concatenate([jnp.zeros(1, value.dtype), value])

  def _value(self, p: jax.Array, q: jax.Array) -> jax.Array:
    if self.kind == "drafted":
      return jnp.ones(len(p), p.dtype)
    if self.kind == "overlap":
      return jnp.minimum(p, q).sum(-1)
    # All recalls search for equally many tokens, so that XLA searches once.
    likely, tokens = jax.lax.top_k(q, max(self.top, min(TOPS[-1], q.shape[-1])))
    gained = jnp.take_along_axis(p, tokens, axis=-1) * (likely > 0)
    return jnp.sum(gained[..., :self.top], axis=-1)


@dataclasses.dataclass(frozen=True)
class Shorter(_Observer):
  """Acceptance of a rule with shorter drafts, computed from long drafts.

  After a completely accepted short draft of `gamma` tokens, token verification
  emits one token without a draft. So a short draft begins at every
  (`gamma` + 1)-th position of a long draft. Each one is weighted by the
  probability that token verification accepts all tokens before it.

  The end of the long draft may cut the last short draft. A cut draft has too
  few tokens. Without it, a long draft that is accepted would count as too few
  rounds. So the last short draft begins earlier, such that it has `gamma`
  tokens. It counts as a fraction of a round: its tokens before the cut, and the
  next token, divided by `gamma` + 1.

  If the drafter ends the long draft early, it also ends the short draft there.
  No short draft begins there, because a drafter that copies would find more
  tokens.

  The values are exact if all tokens have the same acceptance rate. Otherwise
  they are approximate, because rounds of short drafts begin at other positions.

  Attributes:
    rule: verification rule.
    gamma: length of the short drafts, less than that of the long draft.
    version: number of this computation. Stored runs of another version are
      decoded again.
  """

  rule: sj.Verifier
  gamma: int
  version: int = 2

  def figures(self, draft: Draft, target_probs: jax.Array, state: None,
              law: sj.Law, depths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns 0 (no expected number of tokens), and an array `[N]`.

    Its first number is the expected number of short rounds. The number at i > 0
    is the expected number of short rounds that accept at least i tokens.
    """
    del state, law, depths
    reach = sj.verifiers.Token().survival(draft, target_probs)
    found = jnp.zeros_like(reach)
    begins = draft.drafted.at[1].set(True)  # the first round always begins
    for first in range(0, len(reach), self.gamma + 1):
      start = min(first, len(reach) - 1 - self.gamma)
      fraction = min(1, (len(reach) - first) / (self.gamma + 1))
      nodes = slice(start, start + self.gamma + 1)
      tokens, probs = draft.tokens[nodes], draft.probs[nodes]
      short = Draft.chain(tokens[0], tokens[1:], probs[1:])
      p = target_probs[nodes]
      _, survival = self.rule.figures(
          short, p, None, self.rule.evaluate(short, p), jnp.arange(len(tokens)))
      found = found.at[:len(tokens)].add(
          fraction * begins[start + 1] * reach[start] * survival)
    return jnp.zeros(()), found


@dataclasses.dataclass(frozen=True)
class Subtree(_Observer):
  """Acceptance of a rule with a part of a draft.

  Attributes:
    rule: verification rule.
    nodes: indices of the nodes of the part in increasing order, starting with
      the root. It contains the parents and the earlier siblings of its nodes.
  """

  rule: sj.Verifier
  nodes: tuple[int, ...]

  @property
  def requires(self) -> tuple[str, ...]:
    return self.rule.requires

  def figures(self, draft: Draft, target_probs: jax.Array, state: None,
              law: sj.Law, depths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the figures of the rule for the part of the tree."""
    del state, law
    nodes = jnp.array(self.nodes)
    parents = jnp.searchsorted(nodes, draft.parents[nodes]).at[0].set(-1)
    part = Draft.tree(draft.tokens[0], parents, draft.tokens[nodes[1:]],
                      draft.probs[nodes[1:]])
    p = target_probs[nodes]
    expected, survival = self.rule.figures(
        part, p, None, self.rule.evaluate(part, p), depths[nodes])
    return expected, jnp.zeros(len(depths), survival.dtype).at[
        :len(nodes)].set(survival)


def part(parents: Sequence[int], smaller: Sequence[int]) -> tuple[int, ...]:
  """Returns the nodes of a tree that form a smaller tree.

  Args:
    parents: parent index of each node.
    smaller: parent index of each node of a smaller tree. It must be a part of
      the tree, and have its nodes in the same order.
  """
  def paths(parents):  # ranks among the siblings, for the path to every node
    found, children = [()], [0] * len(parents)
    for parent in parents[1:]:
      found.append((*found[parent], children[parent]))
      children[parent] += 1
    return found

  places = {path: i for i, path in enumerate(paths(parents))}
  return tuple(places[path] for path in paths(smaller))


def sized(rule: str, size: int) -> str:
  """Returns the name of a rule with drafts of another size."""
  return f"{rule}, size {size}"


GREEDY = ("drafted", "overlap", "recall 1")  # statistics at temperature 0


def statistics(vocab_size: int, greedy: bool = False) -> dict[str, Statistic]:
  """Returns the statistics of a rollout by name.

  Args:
    vocab_size: vocabulary size.
    greedy: whether all rollouts have temperature 0. p and q are then one-hot,
      so the recall of several tokens and statistics by entropy are left out.
  """
  found = {"drafted": Statistic("drafted"), "overlap": Statistic("overlap"),
           **{f"recall {top}": Statistic("recall", top)
              for top in TOPS if top <= vocab_size}}
  if greedy:
    return {name: found[name] for name in GREEDY}
  for low, high in zip(BINS, BINS[1:]):
    for kind in "drafted", "overlap":
      found[f"{kind} {low:g}"] = Statistic(kind, low=low, high=high)
  return found
