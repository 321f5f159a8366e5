"""Data types of a decoding round.

`specjax.interfaces` defines the components that exchange these types.

Axis letters, used in every docstring of specjax:

  B  batch rows            N  draft nodes, including the root
  S  new tokens of a pass  C  cache slots of a row
  V  vocabulary            L  layers
  H  attention heads       D  width
  T  tokens of a block     E  token ids that end a row

In a cache, H counts key-value heads, G the query heads per key-value head, and
D is the width of a head. Other letters are defined where they are used.

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
    parents: `[N]` int32, the index of each node's parent: `parents[0] == -1`
      and `parents[i] < i`.
    probs: `[N, V]`, row i is the distribution q from which `tokens[i]` was
      drawn, given all tokens drawn before it, including its parent and earlier
      siblings. The existence of node i may depend on those tokens, but not on
      `tokens[i]`. Row 0 is unused. The row of a deterministic proposal is
      one-hot. An all-zero row is padding and is never accepted.

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
    """Mask of the nodes below the root that are not padding, `[..., N]` bool.

    A node with NaN in `probs` counts as drafted, so that the decoding loop
    reports it in `RoundStats.draft_finite`.
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
      parents: `[N]` int32, the parents of all nodes, with -1 for the root.
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
    stop: `[N]`, the probability that verification stops at node i. A stop at i
      accepts the path root..i and no further node. Sums to 1.
    next_token: `[N, V]`, the distribution of the next token after a stop at
      node i. Rows whose `stop` is 0 are arbitrary.

  Example, token verification: the drafted token 0 is accepted with probability
  p / q = 0.25 / 0.5. After a rejection the next token follows the residual
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
    """Returns `[V]`, the distribution of the next token after a stop at `node`.
    """
    return jnp.asarray(self.next_token)[node]


@struct.dataclass
class Verdict:
  """Outcome sampled from a `Law`.

  Attributes:
    path: `[N]` int32, the accepted nodes root..stop in order, then zeros.
    num_accepted: `[]` int32, tau: number of accepted draft tokens, without the
      root.
    next_token: `[]` int32, the token after the accepted ones.
  """

  path: jax.Array
  num_accepted: jax.Array
  next_token: jax.Array


@struct.dataclass
class Prompt:
  """Right-padded prompts.

  Attributes:
    tokens: `[B, P]` int32, P is the padded length.
    lengths: `[B]` int32, number of tokens of each row without padding.
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
    cache: the model's cache, which now contains the keys and values of the S
      new tokens, not yet committed. None if the pass ran without a cache.
  """

  logits: jax.Array
  hidden: jax.Array
  cache: Any = None


@struct.dataclass
class DecodeState:
  """State of the decoding loop.

  The loop donates the state's buffers, so a state can be used only once. All
  arrays are preallocated and have fixed shapes. The first axis of every
  leaf is the batch. A row can therefore be replaced (`Decoder.insert`), and
  rows can be split over devices. A cache may have another layout, such as
  pages, if `has_rows_first` is False.

  Attributes:
    tokens: `[B, C]` int32, prompt and output. Slots at and after `lengths` are
      unused.
    lengths: `[B]` int32, number of committed tokens. The target's cache
      contains one token less, because the last token is the root of the next
      draft.
    limits: `[B]` int32, length at which a row is done.
    done: `[B]` bool, True if a row is complete.
    keys: `[B]` PRNG keys, constant. Each round folds its number into them.
    rounds: `[B]` int32, number of rounds since the prompt was read. It also
      increases after the row is done.
    temperature: `[B]` float32, temperature of the target, and of a drafter that
      shares its transform; 0 is greedy.
    eos: `[B, E]` int32, token ids that end a row, padded with -1.
    target_cache: the target's cache.
    drafter: state of the drafter.
    verifier: state of the verifier.
    context: value of `Prompt.context`, constant.
    controller: state of the controller.
    constraints: states of the transform's constraints after the committed
      tokens, see `specjax.constraints`, or None.
    made_by: class name of the drafter, static. None if unknown.
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
  `emitted`, `expected` and `survival` are 0 for a row that was done.

  Attributes:
    emitted: `[B]` int32, number of committed tokens.
    accepted: `[B]` int32, number of committed tokens that were drafted.
    expected: `[B, J]` float32, E[tau | draft] of each rule.
    survival: `[B, J, N]` float32, for i = 0..N-1: P(tau >= i | the first i
      drafted tokens) if the rule implements `survival`, else P(depth of the
      stop >= i | draft).
    active: `[B]` bool, True if the row took part in this round.
    finite: `[B]` bool, False if the target's logits were NaN or +inf.
    draft_finite: `[B]` bool, False if the drafter's `probs` were not finite.
    law_finite: `[B]` bool, False if the verifier's `Law` was not finite
      although the outputs of target and drafter were finite.
    checks: results of the checks of `Decoder(debug=True)`, `{error: [B] bool}`,
      see `checks.raise_if_bad`. None without `debug`.
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
    """Tokens per round: committed tokens of all rows divided by rounds.

    They are tokens per target call, except with a drafter of several
    `target_calls`. In the last round of a row, only the tokens up to its limit
    or end token count.
    """
    return jnp.sum(self.emitted) / jnp.sum(self.active)

  @property
  def acceptance_rate(self) -> jax.Array:
    """Accepted tokens of all rows divided by drafted tokens.

    Every round counts as N - 1 drafted tokens, including padding.
    """
    drafted = jnp.sum(self.active) * (self.survival.shape[-1] - 1)
    return jnp.sum(self.accepted) / drafted


@struct.dataclass
class Trace:
  """Inputs and outcome of the verifier in one round, batched.

  Attributes:
    draft: drafts of all rows.
    target_probs: `[B, N, V]`, distribution p of the token after every node.
    verdict: verdicts of all rows.
  """

  draft: Draft
  target_probs: jax.Array
  verdict: Verdict
