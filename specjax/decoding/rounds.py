"""One round of drafting and verifying, and the loops that run rounds.

  drafter.propose -> target pass -> transform -> law -> verdict -> commit

The drafter proposes a tree of tokens, and the target computes logits after each
node of the tree. The transform converts logits to probabilities. The
verification rule returns the distribution of its outcome (the law), and the
verdict is sampled from it. The commit adds the accepted tokens and one next
token to the sequence.

A round is a pure function. Its components are arguments, and the code does not
depend on any drafting method. The loops over rounds are compiled and call no
host code. `decoding.decoder` contains the public interface.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax import interfaces
from specjax import sampling
from specjax.caches import dense
from specjax.decoding import constraining as constraints_lib
from specjax.decoding import prefill
from specjax.interfaces import Cache
from specjax.interfaces import checks
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.sampling import LogitsTransform
from specjax.trees import topology
from specjax.types import DecodeState
from specjax.types import Draft
from specjax.types import Law
from specjax.types import ModelOutput
from specjax.types import Prompt
from specjax.types import RoundStats
from specjax.types import Trace
from specjax.types import Verdict

# Uniforms are drawn together for this number of rounds. The total number of
# rounds is not known in advance.
_DRAWN_ROUNDS = 32
# Number of tokens of a catch-up pass, in which a drafter reads the tokens of
# rounds without a draft.
CATCH_UP = 16
_KEY_NUMBER = 2**31 - 1  # folded into a round's key for drafters that take keys


def roots(state: DecodeState) -> jax.Array:
  """Returns `[B]`, the last committed token of every row."""
  return jnp.take_along_axis(
      state.tokens, state.lengths[:, None] - 1, axis=1)[:, 0]


def root_only(state: DecodeState, vocab_size: int) -> Draft:
  """Returns a batch of drafts that contain only the root.

  Args:
    state: state before the round.
    vocab_size: V, size of the vocabulary.
  """
  root = roots(state)
  tokens = jnp.zeros((root.shape[0], 0), jnp.int32)
  probs = jnp.zeros((root.shape[0], 0, vocab_size), jnp.float32)
  return jax.vmap(Draft.chain)(root, tokens, probs)


def path_tokens(draft: Draft, verdict: Verdict) -> jax.Array:
  """Returns `[B, N]` int32, the tokens of a round in order.

  A row contains the accepted draft tokens and then the next token of the
  verdict. Later entries are arbitrary.
  """
  chex.assert_equal_shape([draft.tokens, verdict.path])
  below = jnp.roll(verdict.path, -1, axis=-1)
  tokens = jnp.take_along_axis(draft.tokens, below, axis=-1)
  ends = jnp.arange(tokens.shape[-1]) == verdict.num_accepted[:, None]
  return jnp.where(ends, verdict.next_token[:, None], tokens)


def once(wanted: jax.Array,
         function: Callable[[chex.ArrayTree], chex.ArrayTree],
         carry: chex.ArrayTree) -> Any:
  """Returns `function(carry)` if `wanted`, a `[]` bool, is True, else `carry`.

  The implementation is a loop of at most one step, because `lax.cond` would
  copy its operands, including all caches.
  """
  return jax.lax.while_loop(
      lambda loop: loop[0],
      lambda loop: (jnp.zeros((), bool), function(loop[1])), (wanted, carry))[1]


def check_slack(part: Model | Drafter, tokens: int) -> None:
  """Checks that removing rejected tokens from a cache loses no other tokens.

  A `Streaming` cache is a ring buffer of the last tokens, with `slack`
  additional slots. Drafted tokens overwrite its oldest slots. If a rejected
  token overwrote a visible token, the distribution of later tokens would depend
  on the position where a draft began.

  Args:
    part: the model with the cache, or a drafter with such a model.
    tokens: maximum number of tokens that the drafter removes.

  Raises:
    ValueError: the slack of the cache is below `tokens`.
  """
  if part.slack < 0:
    raise ValueError(
        "the draft model has recurrent layers, and rejected tokens cannot be "
        "removed from their state; use this model as the target, and draft "
        "with heads, n-grams or a model whose layers all have attention")
  if part.slack < tokens:
    raise ValueError(
        f"the cache of the draft model has slack={part.slack}, and up to "
        f"{tokens} tokens are removed from it; use Streaming(slack={tokens})")


@dataclasses.dataclass(frozen=True)
class Round:
  """Static configuration of a round. Equal rounds share compiled programs.

  Temperature and eos may differ between rows, so they are in the state.

  Attributes:
    target: target model. The output follows its distribution.
    drafter: drafter, bound to the target.
    rule: verifier whose verdicts are committed.
    transform: transform from logits and temperatures to probabilities.
    observers: further rules that are evaluated on the same drafts.
    debug: True checks the values of every round, see `checks.check_values`.
    drafts: True if the decoded sequence is itself a draft for another target.
      The target of this round may then assign no mass to the tokens that a
      constraint allows, see `constraining`.
  """

  target: Model
  drafter: Drafter
  rule: interfaces.Verifier
  transform: LogitsTransform
  observers: tuple[interfaces.Verifier, ...] = ()
  debug: bool = False
  drafts: bool = False

  def start(self, params: chex.ArrayTree, prompt: Prompt, limits: jax.Array,
            keys: jax.Array, temperature: jax.Array, eos: jax.Array
            ) -> DecodeState:
    """Reads the prompts and returns the state, see `begun`."""
    output = prefill.read_prompt(self.target, params["target"], prompt)
    return self.begun(params, prompt, output, limits, keys, temperature, eos)

  def begun(self, params: chex.ArrayTree, prompt: Prompt, output: ModelOutput,
            limits: jax.Array, keys: jax.Array, temperature: jax.Array,
            eos: jax.Array) -> DecodeState:
    """Returns the state for prompts that the target has read.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      prompt: prompts of B rows.
      output: result of `prefill.read_prompt` for the target.
      limits: `[B]` int32, lengths at which rows are done.
      keys: `[B]` PRNG keys.
      temperature: `[B]` float32, temperatures of the rows.
      eos: `[B, E]` int32, end tokens, padded with -1.
    """
    with _that_reads_params(self._drafter_name):
      drafter = self.drafter.init(params, prompt, output)
    batch, columns = prompt.tokens.shape
    checks.check_rows(f"the first state of the drafter {self._drafter_name}",
                      drafter, batch)
    verifier = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (batch, *jnp.shape(x))),
        self.rule.init(self.drafter.num_nodes - 1))
    tokens = jnp.pad(prompt.tokens, ((0, 0), (0, prompt.capacity - columns)))
    return DecodeState(
        tokens=tokens,
        lengths=prompt.lengths, limits=limits, done=prompt.lengths >= limits,
        keys=keys, rounds=jnp.zeros_like(prompt.lengths),
        temperature=temperature, eos=eos, target_cache=output.cache,
        drafter=drafter, verifier=verifier, context=prompt.context,
        constraints=constraints_lib.start(
            self.transform.constraints, tokens, prompt.lengths, limits, eos,
            self.target.vocab_size),
        made_by=self._drafter_name)

  def draw_uniforms(self, state: DecodeState, rounds: int) -> jax.Array:
    """Returns the uniforms `[rounds, B, count]` of the next rounds.

    `count` is the number of uniforms that verdict and drafter need per round.

    Args:
      state: state before the rounds.
      rounds: number of rounds.
    """
    numbers = state.rounds + jnp.arange(rounds, dtype=jnp.int32)[:, None]
    count = sampling.VERDICT_UNIFORMS + (
        self.drafter.num_uniforms or 0)
    return sampling.uniforms(state.keys, numbers, count)

  def __call__(self, params: chex.ArrayTree, state: DecodeState,
               uniforms: jax.Array, traced: bool = True) -> tuple[Any, ...]:
    """Runs one round. Rows that are done do not change.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      state: state before the round.
      uniforms: `[B, count]` uniforms of this round, first those of the verdict,
        then those of the drafter.
      traced: False leaves out the trace.

    Returns:
      `(state, stats, trace)`, or `(state, stats)`.
    """
    draft, drafter = self.propose(params, state, uniforms)
    return self.judge(params, state, uniforms, draft, drafter)[:2 + traced]

  def some_rounds(self, params: chex.ArrayTree,
                  is_going: Callable[[chex.ArrayTree], jax.Array],
                  play: Callable[..., Any], carry: chex.ArrayTree) -> Any:
    """Runs rounds as long as `is_going(carry)` is True; returns the carry.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      is_going: predicate of the carry, True if another round follows.
      play: function `(carry, one_round=...) -> carry` that runs one round.
      carry: carry of the loop. `carry[0][0]` is the decoding state.
    """
    del params
    return jax.lax.while_loop(is_going, play, carry)

  def judge(self, params: chex.ArrayTree, state: DecodeState,
            uniforms: jax.Array, draft: Draft, drafter: chex.ArrayTree
            ) -> tuple[DecodeState, RoundStats, Trace]:
    """Verifies drafts and commits the accepted tokens.

    Args:
      params: `{"target": ..., "drafter": ...}`.
      state: state before the round.
      uniforms: `[B, count]` uniforms of this round.
      draft: drafts of B rows, from `propose`.
      drafter: the drafter's state, from `propose`.

    Returns:
      `(state, stats, trace)`.
    """
    batch, nodes = state.lengths.shape[0], self.drafter.num_nodes
    if {"chain", "full"} <= interfaces.capabilities(self.drafter):
      depths, ancestors = topology.causal(batch, nodes)  # constants
    else:
      ancestors = jax.vmap(topology.ancestors)(draft.parents)
      depths = topology.depths_of(ancestors)
    output = self.drafter.target_pass(
        self.target, params, drafter, draft, depths, ancestors,
        state.target_cache)
    checks.check_output(type(self.target).__name__, output, batch, nodes,
                        self.target.vocab_size)
    constraints = self.transform.constraints
    memory = constraints_lib.along(constraints, state.constraints, draft)
    logits, stuck = constraints_lib.read(
        constraints, memory, output.logits, drafted=self.drafts)
    probs = self.transform(logits, state.temperature[:, None])
    seen = probs
    if self.transform.coupled:
      tokens = jax.vmap(jax.vmap(sampling.draw))(probs, sampling.noise_keys(
          state.keys, state.lengths[:, None] + depths))
      seen = jax.nn.one_hot(tokens, probs.shape[-1], dtype=probs.dtype)
    verdict, expected, survival, summed, law = self._judged(
        state, draft, probs, seen, depths, ancestors, uniforms)

    # A logit of NaN or +inf makes the sum of the probabilities NaN. A logit of
    # -inf does not, and is allowed: it bans a token. The sum is the cheapest
    # test.
    finite, draft_finite = (jnp.isfinite(jnp.sum(laws, axis=-1)).all(-1)
                            for laws in (probs, draft.probs))
    read = finite & draft_finite
    law_finite = ~read | jnp.isfinite(summed)
    usable = read & law_finite
    # Rows with non-finite numbers are not checked, because the statistics
    # already report them.
    found = checks.check_values(
        self._drafter_name, interfaces.capabilities(self.drafter),
        type(self.rule).__name__, state, roots(state), draft, law, usable
    ) if self.debug else None
    tokens, count, ended, failed = _emitted(
        state, draft, verdict, usable, stuck)
    finite, usable = finite & ~failed, usable & ~failed
    lengths = state.lengths + count
    new_drafter = self.drafter.commit(params, drafter, draft, verdict, output,
                                      count, jnp.ones_like(state.done))
    checks.check_same(f"the state that {self._drafter_name}.commit returned",
                      new_drafter, state.drafter)
    new_state = state.replace(
        tokens=dense.put_rows(state.tokens, tokens, state.lengths),
        lengths=lengths,
        done=state.done | ended | (lengths >= state.limits) | ~usable,
        rounds=state.rounds + 1,
        target_cache=self._committed(state, output.cache, verdict, count),
        drafter=new_drafter,
        verifier=jax.vmap(self.rule.next_state)(
            state.verifier, draft, seen, verdict),
        constraints=constraints_lib.committed(
            constraints, state.constraints, memory, verdict, tokens, count))
    active = ~state.done
    weight = (active & usable)[:, None]
    return new_state, RoundStats(
        emitted=count, accepted=jnp.minimum(verdict.num_accepted, count),
        expected=jnp.where(weight, expected, 0),
        survival=jnp.where(weight[..., None], survival, 0),
        active=active, finite=finite | state.done,
        draft_finite=draft_finite | state.done,
        law_finite=law_finite | state.done, checks=found), Trace(
            draft=draft, target_probs=probs, verdict=verdict)

  @property
  def _drafter_name(self) -> str:
    return interfaces.kind_of(self.drafter)

  @property
  def _is_chain(self) -> bool:
    return "chain" in interfaces.capabilities(self.drafter)

  def propose(self, params: chex.ArrayTree, state: DecodeState,
              uniforms: jax.Array) -> tuple[Draft, Any]:
    """Returns the drafts and the drafter's new state.

    The drafter receives the uniforms after those of the verdict. If its
    `num_uniforms` is None, it receives one PRNG key per row instead.
    """
    count = self.drafter.num_uniforms
    uniforms = uniforms[:, sampling.VERDICT_UNIFORMS:][:, :count]
    if count is None:
      fold_in = jax.vmap(jax.random.fold_in, (0, 0))
      uniforms = jax.vmap(jax.random.fold_in, (0, None))(
          fold_in(state.keys, state.rounds), _KEY_NUMBER)
    with _that_reads_params(self._drafter_name):
      proposal = self.drafter.propose(params, uniforms, state)
    if not isinstance(proposal, tuple) or len(proposal) != 2:
      raise TypeError(
          f"propose of {self._drafter_name} returned a "
          f"{type(proposal).__name__}; return a pair, the drafts and the "
          "drafter's new state (None without a state)")
    draft, drafter = proposal
    checks.check_draft(
        self._drafter_name, draft, state.lengths.shape[0],
        self.drafter.num_nodes, self.target.vocab_size)
    return draft, drafter

  def _committed(self, state: DecodeState, cache: Cache, verdict: Verdict,
                 count: jax.Array) -> Cache:
    """Returns the target's cache after committing the accepted path."""
    if self._is_chain:  # the path consists of the first nodes, in order
      return cache.rollback(state.target_cache.lengths + count)
    return cache.commit(verdict.path, count)

  def _judged(self, state: DecodeState, draft: Draft, probs: jax.Array,
              seen: jax.Array, depths: jax.Array, ancestors: jax.Array,
              uniforms: jax.Array) -> tuple[
                  Verdict, jax.Array, jax.Array, jax.Array, Law | None]:
    """Evaluates the rule and the observers, and samples the verdicts.

    tau is the number of accepted tokens, and J - 1 the number of observers. The
    rule receives `seen`: p, or the one-hot token that is drawn from p with
    shared noise. The observers receive p.

    Returns:
      Five values: the verdicts; E[tau | draft] `[B, J]` and P(tau >= i)
      `[B, J, N]` of the rule and all observers; an array `[B]` that is finite
      if the sampled distributions are finite; and the laws, or None without
      `debug`.
    """
    def one(memory, draft, probs, seen, depths, ancestors, uniforms):
      law = self.rule.evaluate(draft, seen, memory)
      verdict, row = sampling.sample_outcome(law, draft, uniforms, ancestors)
      figures = [self.rule.figures(draft, seen, memory, law, depths)]
      # Observers with a state are evaluated with their first state.
      figures += [
          rule.figures(draft, probs, None, rule.evaluate(draft, probs), depths)
          for rule in self.observers]
      expected, survival = map(jnp.stack, zip(*figures))
      return (verdict, expected, survival, law.stop.sum() + row.sum(),
              law if self.debug else None)

    return jax.vmap(one)(state.verifier, draft, probs, seen, depths, ancestors,
                         uniforms[:, :sampling.VERDICT_UNIFORMS])


@contextlib.contextmanager
def _that_reads_params(drafter: str) -> Iterator[None]:
  """Raises an error that names the drafter if its parameters are missing.

  No earlier check is possible, because some drafters have no parameters.
  """
  try:
    yield
  except KeyError as error:
    if error.args != ("drafter",):
      raise
    raise ValueError(
        f"params have no 'drafter', and the drafter {drafter} reads it; give "
        '{"target": ..., "drafter": ...}, the parameters of both models'
    ) from None


def _emitted(state: DecodeState, draft: Draft, verdict: Verdict,
             usable: jax.Array, stuck: jax.Array | None
             ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Returns the tokens that a round adds to every row.

  Args:
    state: state before the round.
    draft: drafts of all rows.
    verdict: verdicts of all rows.
    usable: `[B]` bool, True if all numbers are finite.
    stuck: `[B, N]` bool, True for nodes after which no token is allowed. None
      without constraints.

  Returns:
    Four values: the tokens `[B, N]` of the verdict; `[B]` int32, the number of
    tokens to commit; `[B]` bool, True if these contain an end token; and `[B]`
    bool, True if the row needs a token after a node without allowed tokens.
  """
  tokens = path_tokens(draft, verdict)
  slot = jnp.arange(tokens.shape[-1])
  left = state.limits - state.lengths
  count = wanted = jnp.minimum(verdict.num_accepted + 1, left)
  if stuck is not None:  # the row ends at the first stuck node of its path
    on_path = jnp.take_along_axis(stuck, verdict.path, axis=-1)
    on_path &= slot <= verdict.num_accepted[:, None]
    count = jnp.where(jnp.any(on_path, axis=-1), jnp.minimum(
        wanted, jnp.argmax(on_path, axis=-1)), wanted)
  is_end = (tokens[..., None] == state.eos[:, None]).any(-1)
  is_end &= slot < count[:, None]
  ended = jnp.any(is_end, axis=-1)
  failed = (count < wanted) & ~ended & ~state.done & usable
  count = jnp.where(ended, jnp.argmax(is_end, axis=-1) + 1, count)
  count = jnp.where(state.done | ~usable, 0, count)
  return tokens, count.astype(jnp.int32), ended & ~state.done, failed


def _scan(stage: Round, params: chex.ArrayTree, state: DecodeState, rounds: int,
          traced: bool = False) -> tuple[DecodeState, Any]:
  forms = None

  def step(state, uniforms):
    nonlocal forms
    state, stats, *trace = stage(params, state, uniforms, traced)
    forms = jax.eval_shape(lambda: stats)
    # The loop writes each output with a kernel of its own, so the statistics
    # are one array.
    rows = [x.reshape(len(x), -1) for x in jax.tree.leaves(stats)]
    return state, (jnp.concatenate(rows, axis=1, dtype=jnp.result_type(
        jnp.float32, *rows)), trace)

  state, (rows, traces) = jax.lax.scan(
      step, state, stage.draw_uniforms(state, rounds))
  leaves, form = jax.tree.flatten(forms)
  ends = np.cumsum([x.size // len(x) for x in leaves])[:-1]
  stats = jax.tree.unflatten(form, [
      x.reshape(rounds, *leaf.shape).astype(leaf.dtype)
      for x, leaf in zip(jnp.split(rows, ends, axis=2), leaves)])
  return state, stats, *traces


def add(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns the sum of two statistics, or the conjunction of bools."""
  return a & b if a.dtype == jnp.bool_ else a + b


def _until(stage: Round, params: chex.ArrayTree, state: DecodeState,
           rounds: jax.Array | None = None
           ) -> tuple[DecodeState, RoundStats, jax.Array]:
  """Runs rounds until all rows are done.

  The loop ends earlier after `rounds` rounds, or if a row has no slots for
  another draft, see `growth`.

  Args:
    stage: `Round` or `RoundsByLength`.
    params: `{"target": ..., "drafter": ...}`.
    state: state of the decoding loop.
    rounds: `[]` int32, maximum number of rounds. None: no maximum.

  Returns:
    The state, the sum of the statistics, and `[]` bool, True if all rows are
    done.
  """
  def is_going(carry):
    (state, _, played), i = carry
    # Done rows also write their drafts, so their lengths are included.
    has_room = jnp.max(state.lengths) + stage.drafter.num_nodes <= (
        state.tokens.shape[1])
    is_open = ~jnp.all(state.done) & has_room
    if rounds is not None:
      is_open &= played < rounds
    return is_open & (i < _DRAWN_ROUNDS)

  def drawn_rounds(carry):
    uniforms = stage.draw_uniforms(carry[0], _DRAWN_ROUNDS)

    def play(carry, one_round=one_round):
      (state, total, played), i = carry
      state, stats = one_round(params, state, uniforms[i])
      stats = stats.replace(active=stats.active.astype(jnp.int32))
      return (state, jax.tree.map(add, total, stats), played + 1), i + 1

    return stage.some_rounds(
        params, is_going, play, (carry, jnp.zeros((), jnp.int32)))[0]

  # `eval_shape` below and the loop both trace the round. With a separate jit,
  # they share one trace.
  one_round = jax.jit(functools.partial(stage, traced=False))
  uniforms = jax.eval_shape(
      lambda state: stage.draw_uniforms(state, 1)[0], state)
  shapes = jax.eval_shape(one_round, params, state, uniforms)[1]
  zero = jax.tree.map(
      lambda x: (jnp.ones if x.dtype == jnp.bool_ else jnp.zeros)(
          x.shape, x.dtype), shapes)
  zero = zero.replace(active=jnp.zeros_like(state.lengths))
  state, stats, _ = jax.lax.while_loop(
      lambda carry: is_going((carry, 0)), drawn_rounds,
      (state, zero, jnp.zeros((), jnp.int32)))
  return state, stats, jnp.all(state.done)


# Both loops donate the state. So caches are updated in place, and the caller
# must not use the old state again.
scan = jax.jit(_scan, static_argnames=("stage", "rounds", "traced"),
               donate_argnames="state")
until = jax.jit(_until, static_argnames="stage", donate_argnames="state")


@functools.partial(jax.jit, static_argnames="stage")
def start(stage: Round, params: chex.ArrayTree, prompt: Prompt,
          limits: jax.Array, keys: jax.Array, temperature: jax.Array,
          eos: jax.Array) -> DecodeState:
  """Runs `Round.start` as a compiled program."""
  return stage.start(params, prompt, limits, keys, temperature, eos)


@functools.partial(jax.jit, donate_argnames="state")
def insert(state: DecodeState, slots: jax.Array, fresh: DecodeState
           ) -> DecodeState:
  """Runs `Decoder.insert` as a compiled program, without checks."""
  return interfaces.map_caches(
      lambda cache, new: cache.with_rows(slots, new),
      lambda all, new: all.at[slots].set(new), state, fresh)
