"""Drafting from predictions of later tokens at one position of the target.

If the last accepted token of a round is at position t, the target call has
computed the hidden state at t. The round also samples token t + 1, the root of
the next draft. The prediction at t for token t + 1 + k is the distribution of
the nodes at depth k.
"""

from typing import Any
from typing import Self

from flax import struct
import jax
import jax.numpy as jnp

from specjax.interfaces import Model
from specjax.methods import _common
from specjax.methods import stop_rules
from specjax.methods.draft_shapes import Shape
from specjax.methods.drafting import Network
from specjax.methods.networks import check_fits
from specjax.methods.networks import Params
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict


@struct.dataclass
class Forecast:
  """Prediction for the next draft, from the last accepted node.

  Attributes:
    values: hidden states or logits `[B, ...]` of B batch rows.
    known: `[B]` bool, False for rows without a prediction, for example after a
      prompt of one token.
  """

  values: jax.Array
  known: jax.Array

  @classmethod
  def of_prompt(cls, prompt: Prompt, output: ModelOutput) -> "Forecast":
    """Returns the target's hidden state at the token before the root.

    The root is the last token of the prompt.
    """
    before = jnp.maximum(prompt.lengths - 2, 0)[:, None, None]
    hidden = jnp.take_along_axis(output.hidden, before, axis=1)
    return cls(values=hidden[:, 0], known=prompt.lengths >= 2)

  def advance(self, values, verdict, count) -> "Forecast":
    """Returns the prediction after a round.

    Rows without new tokens are unchanged.

    Args:
      values: predictions `[B, N, ...]` at every node of the draft.
      verdict: verdicts of the round.
      count: number of tokens committed in the round, `[B]` int32. The last one
        is the next root. The prediction comes from the node before the root.
    """
    last = jnp.take_along_axis(
        verdict.path, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    choose = jax.vmap(lambda moved, new, i, old: jnp.where(moved, new[i], old))
    return Forecast(values=choose(count > 0, values, last, self.values),
                    known=self.known | (count > 0))


class ProductNetwork(Network):
  """Base class of networks that predict all levels of a draft in `begin`.

  The carry is `(forecasts, level)`. `forecasts` contains the logits `[B, K, V]`
  and the hidden states `[B, K, F]` of K levels. `level` is an int32 number.
  """

  is_product = True

  def extend(self, params: Params, token: Any, carry: Any
             ) -> tuple[stop_rules.Forecast, Any]:
    forecasts, level = carry
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, level, 1, keepdims=False),
        forecasts), (forecasts, level + 1)

  def step(self, params: Params, tokens: Any, depths: Any, ancestors: Any,
           above: Any, carry: Any) -> tuple[jax.Array, Any]:
    (logits, _), carry = self.extend(params, tokens, carry)
    return logits[:, None], carry


class HiddenStateNetwork(Network):
  """Base class of networks that read one hidden state of the target.

  `params["drafter"]` contains the parameters of the heads. A draft runs no
  model. After a prompt of one token there is no hidden state, so the first
  draft is padding.

  Subclasses define the field `heads`.
  """

  reads_rounds = True

  @property
  def vocab_size(self) -> int:
    return self.heads.vocab_size

  @property
  def deepest(self) -> int:
    return self.heads.num_forecasts

  def bind(self, target: Model) -> Self:
    check_fits(self.heads, target)
    return self

  def init(self, params: Params, prompt: Prompt, output: ModelOutput
           ) -> Forecast:
    return Forecast.of_prompt(prompt, output)

  def end(self, params: Params, memory: Forecast, carry: Any, draft: Draft,
          slots: jax.Array | None) -> tuple[Draft, Forecast]:
    return _common.known_only(draft, memory.known), memory

  def commit(self, params: Params, memory: Forecast, draft: Draft,
             slots: jax.Array | None, shape: Shape, verdict: Verdict,
             output: ModelOutput, count: jax.Array) -> Forecast:
    return memory.advance(output.hidden, verdict, count)
