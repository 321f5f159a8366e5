"""Data types of a decoding round.

The components that exchange them are in `specjax.interfaces`.

Axis letters, used in every docstring of specjax:

  B  batch rows            N  draft nodes, the root included
  S  new tokens of a pass  C  cache slots of a row
  V  vocabulary            L  layers
  H  attention heads       D  width
  T  tokens of a block     E  ids that end a row

In a cache H are key-value heads, G the query heads of each, and D the width of
a head. Other letters are defined where they are used.

p is the target's law and q the drafter's, as in the papers.
"""

from typing import Any

from flax import struct
import jax
import jax.numpy as jnp


@struct.dataclass
class Draft:
  """A token tree proposed for one sequence.

  Node 0 is the *root*: the last committed token, whose keys and values are not
  in the target's cache yet. Siblings are tried in index order.

  Attributes:
    tokens: `[N]` int32, the token of each node. Ids >= V with an all-zero row
      of `probs` are look-ahead positions: they change no law.
    parents: `[N]` int32, `parents[0] == -1` and `parents[i] < i`.
    probs: `[N, V]`, row i is q of `tokens[i]` given all tokens that were drawn
      before it, its parent and its earlier siblings included, as it was drawn.
      Whether node i exists may depend on those tokens too
      (`methods._drawn_trees`), and never on its own. Row 0 is unused. A
      deterministic proposal is one-hot; an all-zero row is padding and is never
      accepted.

  Example:
    >>> import jax.numpy as jnp
    >>> import specjax as sj
    >>> draft = sj.Draft.chain(
    ...     root=1, tokens=jnp.array([2, 0]),
    ...     probs=jnp.array([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]]))
    >>> draft.tokens.tolist(), draft.parents.tolist()
    ([1, 2, 0], [-1, 0, 1])
  """

  tokens: jax.Array
  parents: jax.Array
  probs: jax.Array

  @property
  def drafted(self) -> jax.Array:
    """`[N]` bool, the nodes below the root that are no padding; or `[B, N]`.

    A node whose row of `probs` is NaN is among them; the loop reports it, see
    `RoundStats.draft_finite`.
    """
    below_root = jnp.arange(self.probs.shape[-2]) > 0
    return below_root & (jnp.asarray(self.probs).sum(-1) != 0)

  @classmethod
  def chain(cls, root: jax.Array, tokens: jax.Array, probs: jax.Array
            ) -> "Draft":
    """A chain of gamma tokens below `root`.

    Args:
      root: `[]` the last committed token.
      tokens: `[gamma]` the drafted tokens, in order.
      probs: `[gamma, V]` the laws that they were drawn from.
    """
    parents = jnp.arange(-1, jnp.shape(tokens)[0], dtype=jnp.int32)
    return cls.tree(root, parents, tokens, probs)

  @classmethod
  def tree(cls, root: jax.Array, parents: jax.Array, tokens: jax.Array,
           probs: jax.Array) -> "Draft":
    """A tree of N nodes with `root` at its top.

    Args:
      root: `[]` the last committed token.
      parents: `[N]` int32, the root's -1 included.
      tokens: `[N - 1]` the drafted tokens.
      probs: `[N - 1, V]` the laws that they were drawn from.
    """
    tokens, probs = jnp.asarray(tokens), jnp.asarray(probs)
    unused = jnp.zeros((1, probs.shape[-1]), probs.dtype)
    root = jnp.asarray(root, jnp.int32).reshape(1)
    return cls(
        tokens=jnp.concatenate([root, tokens.astype(jnp.int32)]),
        parents=jnp.asarray(parents, jnp.int32),
        probs=jnp.concatenate([unused, probs]),
    )


@struct.dataclass
class Law:
  """The law of a verifier's outcome, given the draft.

  Attributes:
    stop: `[N]`, the probability that decoding stops at node i: everything on
      the path root..i is accepted and nothing more. Sums to 1.
    next_token: `[N, V]`, the law of the extra token emitted after a stop at
      node i. Rows whose `stop` is 0 are arbitrary.

  Example: the law of token verification. The drafted token 0 is accepted with
  probability p / q = 0.25 / 0.5; after a rejection the extra token follows
  norm((p - q)+), and after an acceptance it follows p.

    >>> import jax.numpy as jnp
    >>> import specjax as sj
    >>> draft = sj.Draft.chain(root=1, tokens=jnp.array([0]),
    ...                        probs=jnp.array([[0.5, 0.5]]))
    >>> target_probs = jnp.array([[0.25, 0.75], [0.5, 0.5]])
    >>> law = sj.verifiers.Token().law(draft, target_probs)
    >>> print(law.stop)
    [0.5 0.5]
    >>> print(law.next_token)
    [[0.  1. ]
     [0.5 0.5]]
  """

  stop: jax.Array
  next_token: jax.Array

  def next_row(self, node: jax.Array) -> jax.Array:
    """`[V]`, the law of the extra token after a stop at `node []`."""
    return jnp.asarray(self.next_token)[node]

  def __getattr__(self, name: str) -> jax.Array:
    # Only laws of `verifiers._by_row` have no `next_token` of their own.
    if name != "next_token" or "next_row" not in vars(self):
      raise AttributeError(f"Law has no attribute {name!r}")
    nodes = jnp.arange(self.stop.shape[0], dtype=jnp.int32)
    return jax.vmap(self.next_row)(nodes)


@struct.dataclass
class Verdict:
  """One outcome drawn from a `Law`.

  Attributes:
    path: `[N]` int32, the accepted nodes root..stop in order, then zeros.
    num_accepted: `[]` int32, tau: accepted draft tokens, the root not counted.
    next_token: `[]` int32, the extra token.
  """

  path: jax.Array
  num_accepted: jax.Array
  next_token: jax.Array


@struct.dataclass
class Prompt:
  """Right-padded prompts.

  Attributes:
    tokens: `[B, P]` int32.
    lengths: `[B]` int32, real tokens of each row.
    capacity: slots that a cache of the decoding loop must have.
    context: arrays `[B, ...]` that a drafter may read, such as reference
      texts; None without any.
  """

  tokens: jax.Array
  lengths: jax.Array
  capacity: int = struct.field(pytree_node=False)
  context: Any = None


@struct.dataclass
class ModelOutput:
  """What one pass of a model returns.

  Attributes:
    logits: `[B, S, V]`, float32 at least.
    hidden: `[B, S, F]`, the hidden states that the model is configured to
      return, joined along their last axis; for heads it is what the LM head
      reads. How they are named: see `TransformerConfig.features`.
    cache: the model's cache with the keys and values of the S new tokens, not
      committed; `None` when the pass ran without a cache.
  """

  logits: jax.Array
  hidden: jax.Array
  cache: Any = None


@struct.dataclass
class DecodeState:
  """The carry of the loop: preallocated, of fixed shapes, donated.

  Every leaf of a state has the rows B as its first axis, those of its parts
  included. So one row can be put into the place of another, see
  `Decoder.insert`, and rows can be split over devices. Only a cache may have
  others, such as pages, if it has `with_rows`, see `specjax.interfaces`.

  Attributes:
    tokens: `[B, C]` int32, prompt and output; the slots after `lengths` are
      scratch.
    lengths: `[B]` int32, committed tokens. The target's cache holds one less:
      the last token is the root of the next draft.
    limits: `[B]` int32, the length at which a row is done.
    done: `[B]` bool.
    keys: `[B]` PRNG keys, constant: a round folds its number in.
    rounds: `[B]` int32, rounds since the prompt was read, counted on after the
      row is done.
    temperature: `[B]` float32, of the target and of a drafter that shares its
      transform; 0 is greedy.
    eos: `[B, E]` int32, the token ids that end a row, filled up with -1.
    target_cache: the target's cache.
    drafter: the drafter's own state.
    verifier: the verifier's own state.
    context: the prompt's, constant.
    controller: the controller's own state.
    constraints: the memories of the transform's constraints after the
      committed tokens, see `specjax.constraints`; None without any.
    made_by: class name of the drafter whose state this is, static; None: not
      known.
  """

  tokens: jax.Array
  lengths: jax.Array
  limits: jax.Array
  done: jax.Array
  keys: jax.Array
  rounds: jax.Array
  temperature: jax.Array
  eos: jax.Array
  target_cache: Any
  drafter: Any = None
  verifier: Any = None
  context: Any = None
  controller: Any = None
  constraints: Any = None
  made_by: str | None = struct.field(pytree_node=False, default=None)


@struct.dataclass
class RoundStats:
  """Diagnostics of one round; they never enter the carry of a loop.

  The axis J lists the rules: the verifier first, then every observer.

  Attributes:
    emitted: `[B]` int32, tokens committed: 0 once a row is done.
    accepted: `[B]` int32, drafted tokens among those committed.
    expected: `[B, J]` float32, E[tau | draft] of each law. Multiplied by
      `active`, so that finished rows add nothing.
    survival: `[B, J, N]` float32, P(tau >= i | the first i drafted tokens)
      for i = 0..N-1 where the verifier offers it, else P(depth of the stop
      >= i | draft). Also multiplied by `active`.
    active: `[B]` bool, the row took part in this round.
    finite: `[B]` bool, False: the target's logits were NaN or +inf.
    draft_finite: `[B]` bool, False: the drafter's `probs` were NaN or infinite.
    law_finite: `[B]` bool, False: the verifier's law was NaN or infinite, and
      both models' numbers were not.
    checks: `{text: [B] bool}` with `Decoder(debug=True)`, else None; see
      `checks.raise_if_bad`.
  """

  emitted: jax.Array
  accepted: jax.Array
  expected: jax.Array
  survival: jax.Array
  active: jax.Array
  finite: jax.Array
  draft_finite: jax.Array
  law_finite: jax.Array
  checks: dict[str, jax.Array] | None = None

  @property
  def block_efficiency(self) -> jax.Array:
    """Tokens per target call: tokens committed over rounds, of all rows.

    The last round of a row counts only the tokens up to its limit or end token.
    """
    return jnp.sum(self.emitted) / jnp.sum(self.active)

  @property
  def acceptance_rate(self) -> jax.Array:
    """Accepted over drafted tokens, of all rows.

    A round drafts N - 1 tokens; padding counts as drafted.
    """
    drafted = jnp.sum(self.active) * (self.survival.shape[-1] - 1)
    return jnp.sum(self.accepted) / drafted


@struct.dataclass
class Trace:
  """What a verifier saw and decided in one round, batched.

  Attributes:
    draft: the `Draft`s.
    target_probs: `[B, N, V]`, the target's law of the token after every node.
    verdict: the `Verdict`s.
  """

  draft: Draft
  target_probs: jax.Array
  verdict: Verdict
