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

As in the papers, p is the target's distribution of the next token, q is the
drafter's, and tau is the number of accepted draft tokens. x+ is max(x, 0), and
norm(x) is x divided by its sum.
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
      of `probs` are look-ahead positions, which no rule accepts.
    parents: `[N]` int32, `parents[0] == -1` and `parents[i] < i`.
    probs: `[N, V]`, row i is the distribution q that `tokens[i]` was drawn
      from, given all tokens drawn before it (its parent and earlier siblings
      included). The existence of node i may depend on those tokens, but not on
      `tokens[i]`. Row 0 is unused. A deterministic proposal is one-hot; an
      all-zero row is padding and is never accepted.

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
    """Nodes below the root that are not padding, `[N]` or `[B, N]` bool.

    A node with NaN in `probs` counts as drafted, so that the loop reports it
    (`RoundStats.draft_finite`).
    """
    below_root = jnp.arange(self.probs.shape[-2]) > 0
    return below_root & (jnp.asarray(self.probs).sum(-1) != 0)

  @classmethod
  def chain(cls, root: jax.Array, tokens: jax.Array, probs: jax.Array
            ) -> "Draft":
    """Returns a chain of gamma tokens below `root`.

    Args:
      root: `[]`, the last committed token.
      tokens: `[gamma]`, the drafted tokens in order.
      probs: `[gamma, V]`, row i is the distribution of `tokens[i]`.
    """
    parents = jnp.arange(-1, jnp.shape(tokens)[0], dtype=jnp.int32)
    return cls.tree(root, parents, tokens, probs)

  @classmethod
  def tree(cls, root: jax.Array, parents: jax.Array, tokens: jax.Array,
           probs: jax.Array) -> "Draft":
    """Returns a tree of N nodes below `root`.

    Args:
      root: `[]`, the last committed token.
      parents: `[N]` int32, the root's -1 included.
      tokens: `[N - 1]`, the drafted tokens.
      probs: `[N - 1, V]`, row i is the distribution of `tokens[i]`.
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
  """Distribution of a verifier's outcome, given the draft.

  Attributes:
    stop: `[N]`, the probability that verification stops at node i: the path
      root..i is accepted, and no further node. Sums to 1.
    next_token: `[N, V]`, the distribution of the bonus token after a stop at
      node i. Rows whose `stop` is 0 are arbitrary.

  Example, token verification: the drafted token 0 is accepted with probability
  p / q = 0.25 / 0.5. After a rejection the bonus token follows the residual
  distribution norm((p - q)+), and after an acceptance it follows p.

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
    """Returns `[V]`, the distribution of the bonus token after this stop."""
    return jnp.asarray(self.next_token)[node]


@struct.dataclass
class Verdict:
  """Outcome sampled from a `Law`.

  Attributes:
    path: `[N]` int32, the accepted nodes root..stop in order, then zeros.
    num_accepted: `[]` int32, tau: accepted draft tokens, without the root.
    next_token: `[]` int32, the bonus token.
  """

  path: jax.Array
  num_accepted: jax.Array
  next_token: jax.Array


@struct.dataclass
class Prompt:
  """Right-padded prompts.

  Attributes:
    tokens: `[B, P]` int32.
    lengths: `[B]` int32, tokens of each row without padding.
    capacity: cache slots per row that the decoding loop needs.
    context: arrays `[B, ...]` that a drafter may read, such as reference
      documents, or None.
  """

  tokens: jax.Array
  lengths: jax.Array
  capacity: int = struct.field(pytree_node=False)
  context: Any = None


@struct.dataclass
class ModelOutput:
  """Result of one pass of a model.

  Attributes:
    logits: `[B, S, V]`, float32 at least.
    hidden: `[B, S, F]`, the hidden states named by
      `TransformerConfig.features`, joined along their last axis; F is their
      total width. Default: the input of the LM head.
    cache: the model's cache with the keys and values of the S new tokens, which
      are not committed; None if the pass ran without a cache.
  """

  logits: jax.Array
  hidden: jax.Array
  cache: Any = None


@struct.dataclass
class DecodeState:
  """State of the decoding loop, which donates it.

  All arrays are preallocated and have fixed shapes. The first axis of every
  leaf is the batch. A row can therefore be replaced (`Decoder.insert`), and
  rows can be split over devices. A cache may have another layout, such as
  pages, if `has_rows_first` is False.

  Attributes:
    tokens: `[B, C]` int32, prompt and output; slots after `lengths` are unused.
    lengths: `[B]` int32, committed tokens. The target's cache has one less,
      because the last token is the root of the next draft.
    limits: `[B]` int32, length at which a row is done.
    done: `[B]` bool, True if a row is complete.
    keys: `[B]` PRNG keys, constant. Each round folds in its number.
    rounds: `[B]` int32, rounds since the prompt was read. It also increases
      after the row is done.
    temperature: `[B]` float32, temperature of the target, and of a drafter that
      shares its transform; 0 is greedy.
    eos: `[B, E]` int32, token ids that end a row, padded with -1.
    target_cache: the target's cache.
    drafter: state of the drafter.
    verifier: state of the verifier.
    context: `Prompt.context`, constant.
    controller: state of the controller.
    constraints: states of the transform's constraints after the committed
      tokens, see `specjax.constraints`, or None.
    made_by: class name of the drafter, static; None if it is not known.
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
  """Statistics of one round, or sums over rounds.

  The axis J lists the rules: first the verifier, then `Decoder.observers`.

  Attributes:
    emitted: `[B]` int32, committed tokens; 0 for a row that was done.
    accepted: `[B]` int32, committed tokens that were drafted.
    expected: `[B, J]` float32, E[tau | draft] of each rule; 0 for a row that
      was done.
    survival: `[B, J, N]` float32, P(tau >= i | the first i drafted tokens) for
      i = 0..N-1 if the verifier implements `survival`, else P(depth of the stop
      >= i | draft); 0 for a row that was done.
    active: `[B]` bool, True if the row took part in this round.
    finite: `[B]` bool, False if the target's logits were NaN or +inf.
    draft_finite: `[B]` bool, False if the drafter's `probs` were not finite.
    law_finite: `[B]` bool, False if the verifier's `Law` was not finite
      although the numbers of both models were.
    checks: `{error: [B] bool}` with `Decoder(debug=True)`, else None; see
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
    """Tokens per target call: committed tokens divided by rounds, of all rows.

    The last round of a row counts only the tokens up to its limit or end token.
    """
    return jnp.sum(self.emitted) / jnp.sum(self.active)

  @property
  def acceptance_rate(self) -> jax.Array:
    """Accepted tokens divided by drafted tokens, of all rows.

    A round drafts N - 1 tokens; padding counts as drafted.
    """
    drafted = jnp.sum(self.active) * (self.survival.shape[-1] - 1)
    return jnp.sum(self.accepted) / drafted


@struct.dataclass
class Trace:
  """Inputs and outcome of the verifier in one round, batched.

  Attributes:
    draft: drafts.
    target_probs: `[B, N, V]`, distribution p of the token after every node.
    verdict: verdicts.
  """

  draft: Draft
  target_probs: jax.Array
  verdict: Verdict
