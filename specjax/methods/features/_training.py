"""Training of feature layers: unrolled draft steps, options and strategies.

At position t, step k = 1..K predicts token t + 1 + k. Step 1 reads the target's
features at t and token t + 1. Step k > 1 reads the output of step k - 1 and
token t + k. The target runs in the same program, and its output is not stored.
If a row of the batch contains several documents, the layer attends across
them, as the target does.
"""

from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from specjax import verifiers
from specjax.interfaces import Verifier
from specjax.methods import _dynamic_trees
from specjax.methods.draft_shapes import Best
from specjax.methods.draft_shapes import Sampled
from specjax.methods.features import eagle
from specjax.methods.features import mtp
from specjax.methods.features.network import FeatureHeads
from specjax.methods.records import Option
from specjax.methods.records import RECURSIVE
from specjax.methods.records import suited
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TOKEN
from specjax.methods.strategy import TRAVERSAL
from specjax.models.transformer import Transformer
from specjax.training.objective import Params
from specjax.training.objective import Score

_FLOOR = 20.0  # nats; `score` raises smaller probabilities to e^-20


class Read(NamedTuple):
  """Output of a target for S tokens.

  Attributes:
    features: hidden states `[B, S, F]` that the heads read, see `heads.taps`.
    final: input `[B, S, D]` of the target's LM head.
    logits: logits `[B, S, V]`.
  """

  features: jax.Array
  final: jax.Array
  logits: jax.Array


def check_rows(tokens: jax.Array, heads: FeatureHeads) -> None:
  """Checks that the rows are long enough to have labels for all steps.

  Args:
    tokens: token ids `[B, S + 1]` int32.
    heads: feature layer.

  Raises:
    ValueError: the rows are too short.
  """
  size, count = tokens.shape[1] - 1, heads.num_forecasts
  if size <= count:
    raise ValueError(f"a row predicts {size} tokens and there are {count} "
                     "heads; give longer rows or fewer heads")


def read(model: Transformer, heads: FeatureHeads, params: Params,
         tokens: jax.Array) -> Read:
  """Runs the target on `tokens [B, S]` and returns its output.

  Args:
    model: target model.
    heads: feature layer, which selects the hidden states.
    params: parameters `{"target": ..., "drafter": ...}`.
    tokens: token ids `[B, S]` int32.
  """
  chex.assert_rank(tokens, 2)
  target, _ = heads.attach(model, params["target"], params["drafter"])
  out = target(params["target"], tokens)
  return Read(heads.taps_of(out.hidden), target.feature(out.hidden),
              out.logits)


def shifted(tokens: jax.Array, by: int, size: int) -> jax.Array:
  """Returns `[B, size]`, token t + `by` at index t, or 0 after the last token.
  """
  rest = tokens[:, by:by + size]
  return jnp.pad(rest, ((0, 0), (0, size - rest.shape[1])))


def forecasts(heads: FeatureHeads, params: Params, features: jax.Array,
              tokens: jax.Array, count: int, kept: Sequence[jax.Array] = ()
              ) -> Iterator[Any]:
  """Yields the `FeatureOutput` of steps 1..count at every position.

  One reused module is trained as in the training-time test of EAGLE-3
  (arXiv:2503.01840, figure 6). At step k, position t attends to the keys of
  step 1 up to position t, and to its own keys of steps 2 to k. If the layer has
  a window, the window ends at position t + k - 1, as in decoding. With several
  modules, a module attends to its own keys up to position t (DeepSeek-V3,
  arXiv:2412.19437, section 2.2).

  Args:
    heads: feature layer.
    params: parameters `{"target": ..., "drafter": ...}`.
    features: features `[B, S, F]` of the target; gradients flow into them.
    tokens: token ids of the sequence, `[B, T]` int32 with T >= S.
    count: number of steps. Without `heads.reuse`, it is at most
      `heads.num_forecasts`.
    kept: for each step after the first, the positions that it computes, as
      indices `[B, n]` into the positions of the step before. () means all
      positions. `heads.reuse` is required.
  """
  chex.assert_rank([features, tokens], [3, 2])
  own, target = params["drafter"], params["target"]
  size = features.shape[1]
  entered = hidden = heads.enter(own, features)
  places = jnp.broadcast_to(
      jnp.arange(size, dtype=jnp.int32), features.shape[:2])
  keys = None
  for k in range(1, count + 1):
    given = shifted(tokens, k, size)
    if heads.reuse:
      if k > 1:
        if kept:
          rows = kept[k - 2]
          places = jnp.take_along_axis(places, rows, axis=1)
          given = jnp.take_along_axis(given, places, axis=1)
          hidden = jnp.take_along_axis(hidden, rows[..., None], axis=1)
          keys = keys.at(rows)
        hidden, given = heads.later_input(own, hidden, given)
      out = heads.step(own, target, hidden, given, positions=places + k - 1,
                       keys=keys)
      hidden, keys = out.hidden, out.keys
    else:
      out = heads.step(own, target, hidden, given, positions=places,
                       module=k - 1)
      hidden = out.hidden if heads.chained else entered
    yield out


def floored(logits: jax.Array) -> jax.Array:
  """Raises `logits [..., V]` so that all probabilities are at least e^-20."""
  return jnp.maximum(logits, jax.nn.logsumexp(
      logits, axis=-1, keepdims=True) - _FLOOR)


def score(model: Transformer, heads: FeatureHeads, params: Params,
          tokens: jax.Array, score: Score) -> Any:
  """Evaluates `score` on the logits of every step, and stacks the results.

  The layer reads the true tokens. So step k predicts as in a draft whose first
  k - 1 tokens are correct. Probabilities below e^-20 are raised to e^-20,
  including those of tokens that the heads cannot draft.

  Args:
    model: target model.
    heads: feature layer.
    params: parameters `{"target": ..., "drafter": ...}`.
    tokens: token ids `[B, S + 1]` int32.
    score: function `(k, logits [B, P, V], positions [B, P]) -> tree`, see
      `DrafterObjective.score`.
  """
  chex.assert_rank(tokens, 2)
  check_rows(tokens, heads)
  count, size = heads.num_forecasts, tokens.shape[1] - 1
  places = jnp.broadcast_to(
      jnp.arange(size - count), (tokens.shape[0], size - count))
  features = read(model, heads, params, tokens[:, :-1]).features
  found = []
  for k, out in enumerate(
      forecasts(heads, params, features, tokens, count), 1):
    logits = heads.logits(
        params["drafter"], params["target"], out.read[:, :size - count])
    found.append(score(
        jnp.int32(k), floored(heads.whole(logits)), places))
  return jax.tree.map(lambda *x: jnp.stack(x), *found)


_FEED_NORMED = Option(
    "feed_normed", False, "eagle3, mtp: feed the next draft step with the "
    "hidden state after the final norm (EAGLE-3.1, published MTP modules), not "
    "before it")


_TOP_K = 8  # nodes per level that get children, and children of each


_DRAWN = 4  # children of a node if they are sampled


def _layer_tree(heads, parents, proposal, rule) -> Strategy:
  return mtp.mtp(
      heads, verifier=rule, parents=parents, proposal=proposal)


def _layer_chain(heads, rule=TOKEN, gamma=None) -> Strategy:
  """Returns a strategy that samples a chain.

  Unless the module is reused, the chain has at most one token per module.
  """
  if gamma and not heads.reuse:
    gamma = min(gamma, heads.modules)
  return mtp.mtp(heads, gamma, rule)


def _layer_strategy(heads, verifier: Verifier | None, gamma, tree) -> Strategy:
  """Returns a strategy whose drafts have the form that a rule requires."""
  rule = verifier or BLOCK
  return suited(
      rule, lambda: _layer_chain(heads, rule, gamma),
      lambda: _layer_tree(heads, tree(), "top_k", rule),
      lambda proposal: _layer_tree(heads, tree(), proposal, rule))


def _layer_compared(heads, tree) -> dict[str, tuple[Strategy, ...]]:
  tree, depth, walk = tree(), heads.num_forecasts, verifiers.TargetWalk()
  found = {
      "sampled chain": tuple(
          _layer_chain(heads, rule) for rule in (BLOCK, TOKEN)),
      "top-k tree": (_layer_tree(heads, tree, "top_k", walk),),
      "sampled tree": tuple(
          _layer_tree(heads, tree, "without_replacement", rule)
          for rule in (TRAVERSAL, RECURSIVE))}
  if not heads.reuse:
    return found
  top_k, drawn = (min(x, heads.draft_size) for x in (_TOP_K, _DRAWN))
  dynamic = Best(depth, top_k, min(
      len(tree), _dynamic_trees.most_nodes(depth, top_k)))
  sampled = Sampled(depth, children=drawn, expanded=(
      _dynamic_trees.most_expanded(len(tree), depth, drawn)))
  return found | {
      "dynamic tree": (Strategy(eagle.layer_drafter(heads, dynamic), walk),),
      "sampled dynamic tree": tuple(
          Strategy(eagle.layer_drafter(heads, sampled), rule)
          for rule in (TRAVERSAL, RECURSIVE))}
