"""The data that flows through a round, and the protocols of its parts.

Axis letters, used in every docstring of specjax:

  B  batch rows            N  draft nodes, the root included
  S  new tokens of a pass  C  cache slots of a row
  V  vocabulary            L  layers
  H  attention heads       D  width

p is the target's law and q the drafter's, as in the papers.
"""

from typing import Any
from typing import Protocol
from typing import runtime_checkable

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
    probs: `[N, V]`, row i is the law that `tokens[i]` was drawn from, given
      everything before it in depth-first order. Row 0 is unused. A
      deterministic proposal is one-hot; an all-zero row is padding and is
      never accepted.
  """

  tokens: jax.Array
  parents: jax.Array
  probs: jax.Array

  @classmethod
  def chain(cls, root, tokens, probs) -> "Draft":
    """A chain of gamma tokens below `root`.

    Args:
      root: `[]` the last committed token.
      tokens: `[gamma]` the drafted tokens, in order.
      probs: `[gamma, V]` the laws that they were drawn from.
    """
    parents = jnp.arange(-1, jnp.shape(tokens)[0], dtype=jnp.int32)
    return cls.tree(root, parents, tokens, probs)

  @classmethod
  def tree(cls, root, parents, tokens, probs) -> "Draft":
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
  """

  stop: jax.Array
  next_token: jax.Array


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
  """

  tokens: jax.Array
  lengths: jax.Array
  capacity: int = struct.field(pytree_node=False)


@struct.dataclass
class ModelOutput:
  """What one pass of a model returns.

  Attributes:
    logits: `[B, S, V]` float32.
    hidden: `[B, S, D]`, the features the model is configured to return.
    cache: the model's cache with the keys and values of the S new tokens in
      scratch slots; `None` when the pass ran without a cache.
  """

  logits: jax.Array
  hidden: jax.Array
  cache: Any = None


@struct.dataclass
class RoundStats:
  """Diagnostics of one round; they never enter the carry of a loop.

  V1 is the number of laws evaluated: the verifier's, then one per observer.

  Attributes:
    emitted: `[B]` int32, tokens committed: 0 once a row is done.
    accepted: `[B]` int32, drafted tokens among those committed.
    expected: `[B, V1]` float32, E[tau | draft] of each law. Multiplied by
      `active`, so that finished rows add nothing.
    survival: `[B, V1, N]` float32, P(tau >= i | the first i drafted tokens)
      for i = 0..N-1 where the verifier offers it, else P(depth of the stop
      >= i | draft). Also multiplied by `active`.
    active: `[B]` bool, the row took part in this round.
    finite: `[B]` bool, False: the target's logits were NaN or +inf.
    draft_finite: `[B]` bool, False: the drafter reported a law that is none.
  """

  emitted: jax.Array
  accepted: jax.Array
  expected: jax.Array
  survival: jax.Array
  active: jax.Array
  finite: jax.Array
  draft_finite: jax.Array


@struct.dataclass
class Trace:
  """What a verifier saw and decided in one round, batched.

  Attributes:
    draft: the `Draft`s.
    target_probs: `[B, N, V]`, the target's law behind every node.
    verdict: the `Verdict`s.
  """

  draft: Draft
  target_probs: jax.Array
  verdict: Verdict


@runtime_checkable
class ModelFn(Protocol):
  """A language model as the loop sees it: a hashable, static callable.

  `model(params, tokens [B, S], depths [B, S], ancestors [B, S, T], cache)`
  runs one pass over the last S of the T tokens of a block; the first T - S are
  in scratch slots behind `cache.lengths`, written by the passes before, so
  that a drafter can add a level to its tree. A whole block has T = S. A
  token's position is `cache.lengths + depth`; it sees the committed past and
  its ancestors in the block (`ancestors[b, i, j]`: token j is on the path to
  new token i, i itself included).
  """

  @property
  def vocab_size(self) -> int:
    ...

  @property
  def context_length(self) -> int:
    ...

  def init_cache(self, params, batch: int, capacity: int) -> Any:
    ...

  def __call__(self, params, tokens, depths, ancestors, cache) -> ModelOutput:
    ...


@runtime_checkable
class Verifier(Protocol):
  """A verification rule: the law of its outcome, for one sequence, no coins.

  Optional members, with the defaults the loop assumes: `lossless` (True);
  `requires` (()), names of attributes that must not be False of the drafter;
  `survival(draft, target_probs) -> [N]`, P(tau >= i | the first i drafted
  tokens), for chains. A rule that remembers has `init(gamma) -> state` and
  `commit(state, draft, target_probs, verdict) -> state`; its `law` and
  `survival` get the state as third argument, and no state is a fresh one.
  """

  def law(self, draft: Draft, target_probs: jax.Array, state=None) -> Law:
    ...


@runtime_checkable
class Drafter(Protocol):
  """A proposal of tokens for the whole batch.

  `num_nodes` is the static N of its drafts, `proposal` names how they are
  drawn ("iid", "without_replacement", "deterministic", ...). What a verifier
  can require, each True or False: `chain`, every draft is one; `iid`, the
  children of a node are independent draws from one law; `conditional`, every
  row of `probs` is the law of its token given what came before it, as `Draft`
  asks; `autoregressive`, q depends on the context alone. Optional: `bind(
  target, transform)` returns the drafter specialised to a target, or raises
  a `ValueError` where the two do not fit; `context_length`.
  """

  @property
  def num_nodes(self) -> int:
    ...

  def init(self, params, prompt: Prompt, prefill_output: ModelOutput) -> Any:
    ...

  def propose(self, params, keys, state) -> tuple[Draft, Any]:
    ...

  def commit(self, params, drafter_state, draft, verdict, target_output, count):
    ...
