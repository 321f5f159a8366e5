"""PaSS and UNO, which draft with the target and trained look-ahead tokens.

PaSS (Monea et al. 2023, arXiv:2311.13581) trains the embeddings of look-ahead
tokens. UNO (Sahoo et al. 2026, arXiv:2609.04010) also trains low-rank adapters
of the target's matrices, which only these tokens pass through. The module
contains the drafters and the strategy.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp

from specjax.decoding import constraining as constraints_lib
from specjax.decoding import rounds
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import _common
from specjax.methods import stop_rules
from specjax.methods.draft_shapes import Chain
from specjax.methods.draft_shapes import Shape
from specjax.methods.draft_shapes import Tree
from specjax.methods.drafting import NetworkDrafter
from specjax.methods.heads import _forecasts
from specjax.methods.heads.pass_embeddings import PaSSEmbeddings
from specjax.methods.heads.pass_objective import LABELS
from specjax.methods.heads.pass_objective import LOSSES
from specjax.methods.heads.pass_objective import PaSSObjective
from specjax.methods.networks import Params
from specjax.methods.records import CUTS
from specjax.methods.records import LearningRate
from specjax.methods.records import Method
from specjax.methods.records import Option
from specjax.methods.records import RECURSIVE
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TOKEN
from specjax.methods.strategy import TRAVERSAL
from specjax.models.transformer import Transformer
from specjax.sampling import draw
from specjax.sampling import LogitsTransform
from specjax.sampling import noise_keys
from specjax.sampling import UNIFORMS_A_DRAW
from specjax.trees import topology
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import Verdict


def _check_target(embeddings: PaSSEmbeddings, target: Model) -> None:
  """Raises `ValueError` unless the target contains these look-ahead tokens."""
  wants = tuple(getattr(embeddings, name) for name in (
      "count", "width", "lookahead_rank"))
  config = getattr(target, "config", None)
  has = tuple(getattr(config, name, 0) for name in (
      "lookahead", "width", "lookahead_rank"))
  if has != wants:
    raise ValueError(
        "the target has {} look-ahead tokens of width {}, lookahead_rank {}, "
        "but the drafter has {} of width {}, lookahead_rank {}; make the "
        "target and its parameters with methods.with_lookahead".format(
            *has, *wants))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookAhead(_forecasts.ProductNetwork):
  """The target at look-ahead tokens, as a network: the published scheme.

  A round has two target passes. The first pass reads the root and the
  look-ahead tokens [LA]_1..[LA]_n. Nodes of depth 1 are drawn from the target's
  distribution at the root, and nodes of depth 1 + k from its distribution at
  [LA]_k. The second pass verifies the draft. UNO drafts chains and trees of
  the most likely tokens (`drafters.Chain`, `drafters.Best`).

  The decoder's target must contain the embeddings, see
  `methods.with_lookahead`. `params["drafter"]` is unused and may be ().

  Attributes:
    embeddings: embeddings of the target's L look-ahead tokens.
    target: target model, set by `bind`.
  """

  embeddings: PaSSEmbeddings
  target: Transformer | None = None

  stateless = True
  always_drafts = True
  target_calls = 2

  @property
  def vocab_size(self) -> int:
    return self.target.vocab_size

  @property
  def deepest(self) -> int:
    return 1 + self.embeddings.count

  def bind(self, target: Model) -> "LookAhead":
    _check_target(self.embeddings, target)
    return dataclasses.replace(self, target=target)

  def init(self, params: Params, prompt: Prompt, output: ModelOutput) -> None:
    return None

  def begin(self, params: Params, state: DecodeState, shape: Shape
            ) -> tuple[stop_rules.Forecast, Any]:
    roots = rounds.roots(state)[:, None]
    ids = jnp.broadcast_to(
        self.target.vocab_size + jnp.arange(shape.depth - 1, dtype=jnp.int32),
        (len(roots), shape.depth - 1))
    # The verifying pass must start from the committed tokens only. Therefore
    # the cache of this pass, with look-ahead tokens, is not kept.
    output = self.target(
        params["target"], jnp.concatenate([roots, ids], axis=1),
        *topology.causal(len(roots), shape.depth), state.target_cache)
    return self.extend(params, roots, (
        (output.logits, output.hidden), jnp.zeros((), jnp.int32)))

  def commit(self, params: Params, memory: None, draft: Draft,
             slots: jax.Array | None, shape: Shape, verdict: Verdict,
             output: ModelOutput, count: jax.Array) -> None:
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaSS(Drafter):
  """Drafter of chains from look-ahead tokens, with one target pass per round.

  The target reads the committed tokens up to position t, and then the
  look-ahead tokens [LA]_1..[LA]_n, n = `count`. At [LA]_k the target predicts
  token t + 1 + k, without reading the tokens t + 1..t + k. The decoder's target
  must contain the embeddings, see `methods.with_lookahead`. `params["drafter"]`
  is unused and may be ().

  Drafting and verification are folded into one pass. Every node of the verified
  chain is followed by a separate chain of n look-ahead tokens. The look-ahead
  tokens of the last accepted node predict the n tokens of the next draft. The
  pass reads (1 + n)^2 nodes: a chain of 1 + n nodes, and (1 + n) n look-ahead
  tokens. The verifier treats the look-ahead tokens as padding. The first round
  after a prompt drafts nothing. `LookAhead` is the published scheme.

  Attributes:
    embeddings: embeddings of the target's L look-ahead tokens.
    count: number n of look-ahead tokens in use, at most L. None means L.
    transform: transform of the logits at look-ahead tokens. None means the
      target's transform. Any transform is lossless, because the verifier gets
      the transformed distributions.
    target: target model, set by `bind`.
  """

  embeddings: PaSSEmbeddings
  count: int | None = None
  transform: LogitsTransform | None = None
  target: Transformer | None = None

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
    return UNIFORMS_A_DRAW * self.count

  @property
  def num_nodes(self) -> int:
    return (1 + self.count)**2

  def bind(self, target: Model, transform: LogitsTransform
           ) -> "PaSS":
    """Returns a copy with the target and the transform set.

    Raises:
      ValueError: the target does not contain these look-ahead tokens.
    """
    _check_target(self.embeddings, target)
    return _common.with_transform(self, transform, target=target)

  def init(self, params: chex.ArrayTree, prompt: Prompt,
           prefill_output: ModelOutput) -> _forecasts.Forecast:
    """Returns a `Forecast` without predictions.

    There are no predictions, because prefill reads no look-ahead tokens.
    """
    del params, prefill_output
    batch = prompt.lengths.shape[0]
    return _forecasts.Forecast(
        values=jnp.zeros((batch, self.count, self.target.vocab_size)),
        known=jnp.zeros((batch,), bool))

  def propose(self, params: chex.ArrayTree, uniforms: jax.Array,
              state: DecodeState) -> tuple[Draft, _forecasts.Forecast]:
    if self.transform.coupled:
      uniforms = noise_keys(
          state.keys, state.lengths[:, None] + jnp.arange(self.count)
      ).reshape(uniforms.shape)
    draft = jax.vmap(self._draft)(
        rounds.roots(state), state.drafter.values, state.drafter.known,
        uniforms, state.temperature, state.constraints)
    return draft, state.drafter

  def _draft(self, root, logits, known, uniforms, temperature, memory) -> Draft:
    logits = self._constrained(logits, uniforms, temperature, memory)
    probs = self.transform(logits, temperature)
    tokens = jax.vmap(draw)(probs, uniforms.reshape(-1, UNIFORMS_A_DRAW))
    chain = Draft.chain(root, tokens, jnp.where(known, probs, 0))
    nodes = 1 + self.count
    # The look-ahead tokens of node s have consecutive indices, beginning with
    # nodes + s * count.
    hanging = nodes + jnp.arange(nodes * self.count, dtype=jnp.int32)
    first = (hanging - nodes) % self.count == 0
    ids = self.target.vocab_size + jnp.arange(self.count, dtype=jnp.int32)
    return Draft(
        tokens=jnp.concatenate([chain.tokens, jnp.tile(ids, nodes)]),
        parents=jnp.concatenate([chain.parents, jnp.where(
            first, (hanging - nodes) // self.count, hanging - 1)]),
        probs=jnp.pad(chain.probs, ((0, nodes * self.count), (0, 0))))

  def _constrained(self, logits, uniforms, temperature, memory):
    """Applies the constraints to the logits `[n, V]` of a sampled chain.

    The constraints of each token depend on the tokens sampled before.
    """
    constraints = self.transform.constraints
    if not constraints:
      return logits
    for place, u in enumerate(uniforms.reshape(-1, UNIFORMS_A_DRAW)):
      logits = logits.at[place].set(constraints_lib.constrained(
          constraints, memory, logits[place], drafted=True))
      token = draw(self.transform(logits, temperature)[place], u)
      memory = constraints_lib.advanced(constraints, memory, token)
    return logits

  def commit(self, params: chex.ArrayTree, drafter: _forecasts.Forecast,
             draft: Draft, verdict: Verdict, target_output: ModelOutput,
             count: jax.Array, own: jax.Array) -> _forecasts.Forecast:
    del params, draft
    nodes = 1 + self.count
    logits = target_output.logits[:, nodes:]
    logits = logits.reshape(-1, nodes, self.count, logits.shape[-1])
    return drafter.advance(logits, verdict, count)


def pass_lookahead(embeddings: PaSSEmbeddings, folded: bool = True,
                   count: int | None = None,
                   parents: Sequence[int] | None = None,
                   proposal: str = "without_replacement",
                   verifier: Verifier = BLOCK) -> Strategy:
  """Returns the strategy PaSS or UNO, which drafts with look-ahead tokens.

  PaSS, Monea et al. 2023 (arXiv:2311.13581). UNO, Sahoo et al. 2026
  (arXiv:2609.04010), if the embeddings have adapters. The decoder's target must
  contain the embeddings, see `methods.with_lookahead`.

  >>> from specjax import methods
  >>> own = methods.PaSSEmbeddings(count=3, width=8)
  >>> pass_lookahead(own).drafter.num_nodes  # (1 + 3)^2, folded
  16
  >>> pass_lookahead(own, folded=False).drafter.num_nodes  # 2 + 3
  5

  Args:
    embeddings: embeddings of the target's L look-ahead tokens.
    folded: True for one target pass per round (`drafters.PaSS`), False for the
      published scheme with two (`drafters.LookAhead`).
    count: number of look-ahead tokens in use, at most L. None means L.
    parents: parent index of each node of a draft tree, of depth at most 1 + L.
      It requires `folded=False`. None means a chain.
    proposal: sampling method of children, see `drafters.Tree`.
    verifier: verification rule for these drafts.

  Raises:
    ValueError: `parents` is given with `folded`.
  """
  if folded and parents is not None:
    raise ValueError("parents requires folded=False, because the folded scheme "
                     "drafts only chains")
  if folded:
    return Strategy(PaSS(embeddings=embeddings, count=count), verifier)
  count = embeddings.count if count is None else count
  shape = Chain(1 + count) if parents is None else Tree(parents, proposal)
  return Strategy(NetworkDrafter(
      network=LookAhead(embeddings=embeddings), shape=shape), verifier)


def _compared(heads: PaSSEmbeddings, tree: Callable[[], Sequence[int]]
              ) -> dict[str, tuple[Strategy, ...]]:
  make = lambda rules, **options: tuple(
      pass_lookahead(heads, **options, verifier=rule) for rule in rules)
  # The first level of two passes is the target's prediction of the next token.
  # The tree of the look-ahead tokens begins at this token.
  parents = (-1, *(parent + 1 for parent in tree()))
  return {
      "two passes": make((BLOCK, TOKEN), folded=False),
      "folded": make((BLOCK, TOKEN)),
      "two passes, sampled tree": make(
          (TRAVERSAL, RECURSIVE), folded=False, parents=parents)}


def _objective(target: Transformer, heads: PaSSEmbeddings, cuts: int,
               divergence: str = LABELS) -> PaSSObjective:
  return PaSSObjective(
      model=target, embeddings=heads, cuts=cuts, divergence=divergence)


def _uno_objective(target: Transformer, heads: PaSSEmbeddings, cuts: int,
                   divergence: str = LABELS) -> PaSSObjective:
  if not heads.lookahead_rank:
    raise ValueError("the heads have lookahead_rank 0, which means no adapters;"
                     " use the method pass, or train new heads")
  return _objective(target, heads, cuts, divergence)


PASS = Method(
    name="pass", heads=PaSSEmbeddings,
    learning_rate=LearningRate(bundled=0.05),
    objective=_objective,
    measure=lambda target, heads: _objective(target, heads, cuts=CUTS),
    chain=lambda heads: pass_lookahead(heads, verifier=TOKEN),
    strategy=lambda heads, verifier, gamma, tree: pass_lookahead(
        heads, count=min(gamma, heads.num_forecasts),
        verifier=verifier or BLOCK),
    compared=_compared,
    options=(
        Option("cuts", 32, "pass, uno: positions per training row at which "
               "look-ahead tokens are inserted"),
        Option("divergence", LABELS, "pass, uno: loss at look-ahead tokens, "
               "the cross-entropy of the tokens of the text, or a divergence "
               "from the target's distributions", LOSSES)))
UNO = dataclasses.replace(
    PASS, name="uno", objective=_uno_objective,
    learning_rate=LearningRate(bundled=0.005),
    head_options=(Option(
        "lookahead_rank", 16, "uno: rank of the adapters that look-ahead "
        "tokens pass through in every matrix of the target"),))
