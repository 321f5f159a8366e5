"""PaSS and UNO, which draft with the target and trained look-ahead tokens.

PaSS (Monea et al. 2023, arXiv:2311.13581) trains the embeddings of look-ahead
tokens. UNO (Sahoo et al. 2026, arXiv:2609.04010) also trains low-rank adapters
of the target's matrices, which only these tokens pass through. The module
contains the parameters, the training loss, the drafters and the strategy.
"""

import dataclasses
from typing import Any
from typing import ClassVar
from typing import Self

import chex
from flax import traverse_util
import jax
import jax.numpy as jnp

from specjax.caches.dense import BlockCache
from specjax.decoding import constraining as constraints_lib
from specjax.decoding import rounds
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import _common
from specjax.methods.heads import _forecasts
from specjax.methods.networks import check_fits
from specjax.methods.networks import Params
from specjax.methods.records import CUTS
from specjax.methods.records import LearningRate
from specjax.methods.records import Method
from specjax.methods.records import Option
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TOKEN
from specjax.models.transformer import Transformer
from specjax.sampling import inverse_cdf
from specjax.sampling import LogitsTransform
from specjax.sampling import UNIFORMS_A_DRAW
from specjax.training import divergences
from specjax.training.next_token import cross_entropy
from specjax.training.objective import Batch
from specjax.training.objective import has_weight
from specjax.training.objective import Loss
from specjax.training.objective import Score
from specjax.training.objective import weights_of
from specjax.trees import topology
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict
from specjax.utils import fields

_LABELS = "cross_entropy"
_DIVERGENCES = (_LABELS, *divergences.DIVERGENCES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaSSEmbeddings:
  """Embeddings of the look-ahead tokens [LA]_1..[LA]_L, and their adapters.

  PaSS, Monea et al. 2023 (arXiv:2311.13581, section 3). The embeddings, L
  vectors of width D, are the only parameters that PaSS trains.

  UNO, Sahoo et al. 2026 (arXiv:2609.04010), adds an adapter to every kernel of
  the target: query, key and value (one kernel here), attention output, and the
  kernels of the MLP. Look-ahead tokens pass through the adapters, and all other
  tokens through the unchanged kernels. So the target's output is that of the
  target without adapters. The inputs of UNO are noise tokens of the vocabulary;
  here they are trained embeddings, as in PaSS.

  Attributes:
    count: number L of look-ahead tokens. Their ids are V..V + L - 1, after the
      V tokens of the vocabulary.
    width: hidden width D.
    lookahead_rank: rank of the adapters. 0 means PaSS, without adapters.
  """

  count: int
  width: int
  lookahead_rank: int = 0

  kind: ClassVar[str] = "lookahead"

  def __post_init__(self):
    fields.check_fields(self, "count", "width")
    fields.check_at_least(
        "lookahead_rank", self.lookahead_rank, 0, ": 0 is PaSS")

  @property
  def num_forecasts(self) -> int:
    """Number L of draft tokens after the next token."""
    return self.count

  @classmethod
  def for_target(cls, target: Transformer, count: int, **options: int) -> Self:
    """Returns embeddings of `count` tokens with the target's width.

    Args:
      target: target model.
      count: number L of look-ahead tokens.
      **options: `lookahead_rank`.
    """
    return cls(count=count, width=target.config.width, **options)

  def attach(self, target: Transformer, target_params: Params, params: Params
             ) -> tuple[Transformer, dict[str, Any]]:
    """Returns the target and the parameters for a decoder, `(target, params)`.

    The target and `params["target"]` contain the embeddings and the adapters.
    `params["drafter"]` is ().
    """
    target, extended = with_lookahead(target, target_params, params)
    return target, {"target": extended, "drafter": ()}

  def init(self, key: jax.Array, target_params: Params) -> dict[str, Any]:
    """Returns random float32 parameters `{"embeddings": [L, D]}`.

    Each column has the mean and standard deviation of the target's embeddings.
    With `lookahead_rank`, the entry "adapters" contains the adapters under the
    names of the target's kernels (see `layers.Adapted`). `adapter_out` is 0, so
    that untrained adapters have no effect.

    Args:
      key: PRNG key.
      target_params: parameters of the target.
    """
    table = target_params["embedding"].astype(jnp.float32)
    noise = jax.random.normal(key, (self.count, self.width), jnp.float32)
    params = {"embeddings": table.mean(0) + table.std(0) * noise}
    if not self.lookahead_rank:
      return params
    adapters = {}
    for i, (path, kernel) in enumerate(sorted(
        traverse_util.flatten_dict(target_params).items())):
      if path[-1] == "kernel":
        width, *outputs = kernel.shape
        adapters[*path[:-1], "adapter_in"] = width**-0.5 * jax.random.normal(
            jax.random.fold_in(key, i), (width, self.lookahead_rank),
            jnp.float32)
        adapters[*path[:-1], "adapter_out"] = jnp.zeros(
            (self.lookahead_rank, *outputs), jnp.float32)
    return {**params, "adapters": traverse_util.unflatten_dict(adapters)}


def with_lookahead(target: Transformer, params: Params, embeddings: Params
                   ) -> tuple[Transformer, dict[str, Any]]:
  """Adds the embeddings of look-ahead tokens and their adapters to a target.

  Args:
    target: target model for which the embeddings were trained.
    params: parameters of the target.
    embeddings: parameters of `PaSSEmbeddings`, `{"embeddings": [L, D]}` and,
      with adapters, `{"adapters": ...}`.

  Returns:
    `(target, params)` for a decoder with `drafters.PaSS`. The outputs for the V
    tokens of the vocabulary are unchanged.

  Raises:
    ValueError: the width of the embeddings differs from the target's.
  """
  table = embeddings["embeddings"]
  count, width = table.shape
  if width != target.config.width:
    raise ValueError(
        f"width of the look-ahead embeddings is {width} and of the target "
        f"{target.config.width}; both must be equal: train them for this "
        "target")
  added = traverse_util.flatten_dict(embeddings.get("adapters", {}))
  rank = next((x.shape[-1] for path, x in added.items()
               if path[-1] == "adapter_in"), 0)
  config = dataclasses.replace(
      target.config, lookahead=count, lookahead_rank=rank)
  added = {path: x.astype(params["embedding"].dtype)
           for path, x in {**added, ("lookahead",): table}.items()}
  return (dataclasses.replace(target, config=config),
          traverse_util.unflatten_dict(
              {**traverse_util.flatten_dict(params), **added}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaSSObjective:
  """Loss of the target's predictions at look-ahead tokens.

  A row x is cut after a random position m, and the look-ahead tokens
  [LA]_1..[LA]_L are appended. The loss (equation 1 of the paper) is

    -sum_{t=1..L} log p(x_{m+t+1} | x_1..x_m, [LA]_1..[LA]_t),

  averaged over `cuts` positions m of every row. With `divergence`, each term is
  the divergence from the target's distribution p(. | x_1..x_{m+t}) instead. UNO
  is trained with the total variation. One pass reads the row. A second pass
  reads the cuts * L look-ahead tokens of all cuts. Each cut's tokens attend to
  the row up to m and to each other. Only the second pass is differentiated.

  Attributes:
    model: target model.
    embeddings: look-ahead embeddings of the target.
    cuts: number of cut points per row.
    divergence: name in `training.divergences.DIVERGENCES`, or "cross_entropy".
  """

  model: Transformer
  embeddings: PaSSEmbeddings
  cuts: int = 32
  divergence: str = _LABELS

  needs = ("target", "drafter")

  def __post_init__(self):
    check_fits(self.embeddings, self.model)
    if self.cuts < 1:
      raise ValueError(f"cuts is {self.cuts}; it must be at least 1")
    if self.divergence not in _DIVERGENCES:
      raise ValueError(f"divergence is {self.divergence!r}; it must be one of "
                       f"{_DIVERGENCES}")

  def __call__(self, trainable: Params, frozen: Params, batch: Batch,
               key: jax.Array) -> Loss:
    """Returns the loss, and the loss at [LA]_t as `head_<t>/train_loss`."""
    chex.assert_rank(batch["tokens"], 2)
    params = {**frozen, **trainable}
    tokens = batch["tokens"]
    weights = weights_of(batch)
    every = self._cuts(key, weights.all)
    label = lambda x, positions, k: jnp.take_along_axis(
        x, positions + k, axis=1)
    positions = weights.of_part(every)
    row, logits = self._read(params, tokens[:, :-1], positions)

    def loss(k, logits):
      if self.divergence == _LABELS:
        values = cross_entropy(logits, label(tokens[:, 1:], positions, k))
      else:
        values = divergences.DIVERGENCES[self.divergence](
            self.model.logits_at(params["target"], row, positions + k), logits)
      return weights.mean(values, label(weights.all, every, k))

    losses = self._stacked(loss, logits)
    return jnp.sum(losses), {
        f"head_{k}/train_loss": x for k, x in enumerate(losses, 1)}

  def score(self, params: Params, tokens: jax.Array, key: jax.Array,
            score: Score) -> Any:
    """Returns the results of `score` for t = 1..L, stacked along axis 0.

    Args:
      params: parameters `{"target": ..., "drafter": ...}`.
      tokens: token ids `[B, S + 1]` int32.
      key: PRNG key of the cuts.
      score: function `(t, logits [B, cuts, V], positions [B, cuts])`, called
        for the logits at [LA]_t. `positions` are the positions m of the last
        true token before each cut.
    """
    positions = self._cuts(key, jnp.ones_like(tokens[:, 1:]))
    _, logits = self._read(params, tokens[:, :-1], positions)
    return self._stacked(lambda k, x: score(k, x, positions), logits)

  def _cuts(self, key, weights):
    """Returns random cut positions `[B, cuts]` for `weights [B, S]`.

    A look-ahead token of each cut predicts a token with a positive weight. In
    rows without such cuts, all positions are possible.
    """
    batch, size = weights.shape
    count = self.embeddings.count
    if size <= count:
      raise ValueError(f"a row predicts {size} tokens and there are {count} "
                       "look-ahead tokens; give longer rows or fewer "
                       "look-ahead tokens")
    # Entry m is the mask of the tokens that a cut after position m predicts.
    useful = has_weight(weights[:, 1:], count)
    positions = jax.random.randint(key, (batch, self.cuts), 0, size - count)
    # Positions that predict no trained token are drawn again, from the useful
    # ones. The distribution is then uniform over the useful positions.
    number = jnp.sum(useful, axis=1, keepdims=True)
    again = jax.random.randint(
        jax.random.fold_in(key, 1), positions.shape, 0, jnp.maximum(number, 1))
    again = jnp.take_along_axis(
        jnp.argsort(~useful, axis=1, stable=True), again, axis=1)
    keep = jnp.take_along_axis(useful, positions, axis=1) | (number == 0)
    return jnp.where(keep, positions, again)

  def _stacked(self, score, logits):
    """Returns `score(t, logits at [LA]_t)` for t = 1..L, stacked."""
    scores = [score(t, logits[:, :, t - 1])
              for t in range(1, self.embeddings.count + 1)]
    return jax.tree.map(lambda *x: jnp.stack(x), *scores)

  def _read(self, params: Params, tokens: jax.Array, positions: jax.Array
            ) -> tuple[ModelOutput, jax.Array]:
    """Runs the target over rows, and over the look-ahead tokens after each cut.

    Args:
      params: parameters `{"target": ..., "drafter": ...}`.
      tokens: token ids `[B, S]` int32.
      positions: position m of the last token before each cut, `[B, n]` int32.

    Returns:
      Output of the target at the rows, without gradient, and logits `[B, n, L,
      V]`. Entry t - 1 of the axis L predicts the token at position m + 1 + t.
    """
    chex.assert_rank([tokens, positions], 2)
    batch, size = tokens.shape
    cuts, count = positions.shape[1], self.embeddings.count
    branch = cuts * count
    target = params["target"]
    cache = BlockCache(lengths=jnp.zeros((batch,), jnp.int32))
    row, causal = topology.causal(batch, size)
    read = jax.lax.stop_gradient(
        self.model(target, tokens, row, causal, cache))

    steps = jnp.tile(jnp.arange(1, count + 1, dtype=jnp.int32), cuts)
    cut = jnp.repeat(jnp.arange(cuts), count)
    last = jnp.repeat(positions, count, axis=1)
    own = (cut[:, None] == cut) & (steps[:, None] >= steps)
    ancestors = jnp.concatenate(
        [row[:, None, :] <= last[..., None],
         jnp.broadcast_to(own, (batch, branch, branch))], axis=-1)
    model, extended = with_lookahead(self.model, target, params["drafter"])
    ids = jnp.broadcast_to(self.model.vocab_size - 1 + steps, (batch, branch))
    logits = model(extended, ids, last + steps, ancestors, read.cache).logits
    return read, logits.reshape(batch, cuts, count, -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaSS(Drafter):
  """Drafter of chains from the target's predictions at look-ahead tokens.

  The target reads the committed tokens up to position t, and then the
  look-ahead tokens [LA]_1..[LA]_n, n = `count`. At [LA]_k the target predicts
  token t + 1 + k, without reading the tokens t + 1..t + k. The decoder's target
  must contain the embeddings, see `methods.with_lookahead`. `params["drafter"]`
  is unused and may be ().

  In the published scheme (`folded=False`), a round has two target passes. The
  first pass reads the root and the look-ahead tokens. Draft token 1 is sampled
  from the target's distribution, so it is always accepted. Draft tokens
  2..n + 1 are sampled from the distributions at the look-ahead tokens. The
  second pass verifies the draft.

  In the folded scheme, a round has one target pass. Every node of the verified
  chain is followed by a separate chain of n look-ahead tokens. The look-ahead
  tokens of the last accepted node predict the n tokens of the next draft. The
  pass reads (1 + n)^2 nodes: a chain of 1 + n nodes, and (1 + n) n look-ahead
  tokens. The verifier treats the look-ahead tokens as padding. The first round
  after a prompt drafts nothing.

  Attributes:
    embeddings: embeddings of the target's L look-ahead tokens.
    folded: True for one target pass per round, False for the published scheme
      with two.
    count: number n of look-ahead tokens in use, at most L. None means L.
    transform: transform of the logits at look-ahead tokens. None means the
      target's transform. Any transform is lossless, because the verifier gets
      the transformed distributions.
    target: target model, set by `bind`.
    target_transform: transform of the target's logits, set by `bind`.
  """

  embeddings: PaSSEmbeddings
  folded: bool = True
  count: int | None = None
  transform: LogitsTransform | None = None
  target: Transformer | None = None
  target_transform: LogitsTransform | None = None

  # Look-ahead nodes are padding for the verifier. Not autoregressive: a token's
  # distribution also depends on the distance from the start of the draft.
  provides = ("chain", "iid", "conditional")

  def __post_init__(self):
    if self.count is None:
      object.__setattr__(self, "count", self.embeddings.count)
    if not 1 <= self.count <= self.embeddings.count:
      raise ValueError(f"count is {self.count}; it must be a whole number from "
                       f"1 to {self.embeddings.count}, the number of "
                       "look-ahead embeddings")

  @property
  def num_uniforms(self) -> int:
    return UNIFORMS_A_DRAW * (self.count + (not self.folded))

  @property
  def num_nodes(self) -> int:
    return (1 + self.count)**2 if self.folded else 2 + self.count

  def bind(self, target: Model, transform: LogitsTransform
           ) -> "PaSS":
    """Returns a copy with the target and the transforms set.

    Raises:
      ValueError: the target does not contain these look-ahead tokens.
    """
    wants = (self.embeddings.count, self.embeddings.width)
    config = getattr(target, "config", None)
    has = (getattr(config, "lookahead", 0), getattr(config, "width", 0))
    if has != wants:
      raise ValueError(
          f"the target has {has[0]} look-ahead tokens of width {has[1]}, but "
          f"the drafter has {wants[0]} of width {wants[1]}; make the target "
          "and its parameters with methods.with_lookahead")
    return _common.with_transform(
        self, transform, target=target, target_transform=transform)

  def init(self, params: chex.ArrayTree, prompt: Prompt,
           prefill_output: ModelOutput) -> Any:
    """Returns a `Forecast` without predictions, or None if `folded` is False.

    There are no predictions, because prefill reads no look-ahead tokens.
    """
    del params, prefill_output
    if not self.folded:
      return None
    batch = prompt.lengths.shape[0]
    return _forecasts.Forecast(
        values=jnp.zeros((batch, self.count, self.target.vocab_size)),
        known=jnp.zeros((batch,), bool))

  def propose(self, params: chex.ArrayTree, uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, Any]:
    roots = rounds.roots(state)
    rows = (uniforms, state.temperature, state.constraints)
    if self.folded:
      draft = jax.vmap(self._folded)(
          roots, state.drafter.values, state.drafter.known, *rows)
    else:
      draft = jax.vmap(self._published)(
          roots, self._read(params, state), *rows)
    return draft, state.drafter

  def _read(self, params, state):
    """Returns logits `[B, 1 + count, V]` at the root and look-ahead tokens."""
    batch, size = state.lengths.shape[0], 1 + self.count
    ids = jnp.tile(self._ids, (batch, 1))
    # The verifying pass must start from the committed tokens only. Therefore
    # the cache of this pass, with look-ahead tokens, is not kept.
    return self.target(
        params["target"],
        jnp.concatenate([rounds.roots(state)[:, None], ids], axis=1),
        *topology.causal(batch, size), state.target_cache).logits

  @property
  def _ids(self):
    """Ids `[count]` of the look-ahead tokens."""
    return self.target.vocab_size + jnp.arange(self.count, dtype=jnp.int32)

  def _published(self, root, logits, uniforms, temperature, memory) -> Draft:
    laws = lambda logits: jnp.concatenate([
        self.target_transform(logits[:1], temperature),
        self.transform(logits[1:], temperature)])
    probs = laws(self._constrained(logits, uniforms, memory, laws))
    return Draft.chain(root, _drawn(probs, uniforms), probs)

  def _folded(self, root, logits, known, uniforms, temperature, memory
              ) -> Draft:
    laws = lambda logits: self.transform(logits, temperature)
    probs = laws(self._constrained(logits, uniforms, memory, laws))
    chain = Draft.chain(
        root, _drawn(probs, uniforms), jnp.where(known, probs, 0))
    nodes = 1 + self.count
    # The look-ahead tokens of node s have consecutive indices, beginning with
    # nodes + s * count.
    hanging = nodes + jnp.arange(nodes * self.count, dtype=jnp.int32)
    first = (hanging - nodes) % self.count == 0
    return Draft(
        tokens=jnp.concatenate([chain.tokens, jnp.tile(self._ids, nodes)]),
        parents=jnp.concatenate([chain.parents, jnp.where(
            first, (hanging - nodes) // self.count, hanging - 1)]),
        probs=jnp.pad(chain.probs, ((0, nodes * self.count), (0, 0))))

  def _constrained(self, logits, uniforms, memory, laws):
    """Applies the constraints to the logits `[n, V]` of a sampled chain.

    The constraints of each token depend on the tokens sampled before.
    """
    constraints = self.transform.constraints
    if not constraints:
      return logits
    for place, u in enumerate(uniforms.reshape(-1, UNIFORMS_A_DRAW)):
      logits = logits.at[place].set(constraints_lib.constrained(
          constraints, memory, logits[place], drafted=True))
      token = inverse_cdf(laws(logits)[place], u)
      memory = constraints_lib.advanced(constraints, memory, token)
    return logits

  def commit(self, params: chex.ArrayTree, drafter: chex.ArrayTree,
             draft: Draft, verdict: Verdict, target_output: ModelOutput,
             count: jax.Array, own: jax.Array) -> Any:
    del params, draft
    if not self.folded:
      return drafter
    nodes = 1 + self.count
    logits = target_output.logits[:, nodes:]
    logits = logits.reshape(-1, nodes, self.count, logits.shape[-1])
    return drafter.advance(logits, verdict, count)


def _drawn(probs, uniforms):
  """Samples one token from each of n distributions; returns tokens `[n]`.

  Args:
    probs: distributions `[n, V]`.
    uniforms: uniform samples in [0, 1), `[n * UNIFORMS_A_DRAW]`.
  """
  return jax.vmap(inverse_cdf)(probs, uniforms.reshape(-1, UNIFORMS_A_DRAW))


def pass_lookahead(embeddings: PaSSEmbeddings, folded: bool = True,
                   count: int | None = None, verifier: Verifier = BLOCK
                   ) -> Strategy:
  """Returns the strategy PaSS, which drafts a chain with look-ahead tokens.

  Monea et al. 2023 (arXiv:2311.13581). The decoder's target must contain the
  embeddings, see `methods.with_lookahead`.

  >>> from specjax import methods
  >>> own = methods.PaSSEmbeddings(count=3, width=8)
  >>> pass_lookahead(own).drafter.num_nodes  # (1 + 3)^2, folded
  16
  >>> pass_lookahead(own, folded=False).drafter.num_nodes  # 2 + 3
  5

  Args:
    embeddings: embeddings of the target's L look-ahead tokens.
    folded: True for one target pass per round, False for the published scheme
      with two.
    count: number of look-ahead tokens in use, at most L. None means L.
    verifier: verification rule for chains.
  """
  return Strategy(PaSS(
      embeddings=embeddings, folded=folded, count=count), verifier)


PASS = Method(
    name="pass", heads=PaSSEmbeddings,
    learning_rate=LearningRate(bundled=0.05),
    objective=lambda target, heads, **options: PaSSObjective(
        model=target, embeddings=heads, **options),
    measure=lambda target, heads: PaSSObjective(
        model=target, embeddings=heads, cuts=CUTS),
    chain=lambda heads: pass_lookahead(heads, verifier=TOKEN),
    strategy=lambda heads, verifier, gamma, tree: pass_lookahead(
        heads, count=min(gamma, heads.num_forecasts),
        verifier=verifier or BLOCK),
    compared=lambda heads, tree: {
        name: tuple(pass_lookahead(heads, folded, verifier=rule)
                    for rule in (BLOCK, TOKEN))
        for name, folded in (("two passes", False), ("folded", True))},
    options=(
        Option("cuts", 32, "pass, uno: positions per training row at which "
               "look-ahead tokens are inserted"),
        Option("divergence", _LABELS, "pass, uno: loss at look-ahead tokens, "
               "the cross-entropy of the tokens of the text, or a divergence "
               "from the target's distributions", _DIVERGENCES)))
UNO = dataclasses.replace(
    PASS, name="uno", learning_rate=LearningRate(bundled=0.005),
    head_options=(Option(
        "lookahead_rank", 16, "uno: rank of the adapters that look-ahead "
        "tokens pass through in every matrix of the target"),))
