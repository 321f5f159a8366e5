"""Statistical test of drafters in the decoding loop: drafts and output.

q is the distribution of a draft token in `Draft.probs`. The tests use sums of
f(x) - E[f] over many tokens x, for a function f of a token. The expected value
E[f] is known (`testing.evidence`). A large sum is evidence for an error.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import chex
import jax
import numpy as np

from specjax import interfaces
from specjax import verifiers
from specjax.decoding import decoder as decoder_lib
from specjax.interfaces import checks
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.sampling import LogitsTransform
from specjax.testing import evidence
from specjax.testing import laws as laws_lib
from specjax.testing import nodes as nodes_lib
from specjax.testing import recording
from specjax.types import Draft
from specjax.utils import fields

_TOTAL = 3e-5  # tolerance of the sum of a row of q in float32
_FEW = 0.01  # share of drafts that may differ because of rounding
# Smallest mean number of samples per possible sequence in the joint test. It
# limits the number of tokens of these sequences.
_TEXTS_A_CELL = 10
_FEW_ROWS = (1, 2, 16, 1)  # active rows in the calls of many rounds
_MANY = 8  # factor on the number of rounds in these calls
_TRUNCATED_CALLS = 8  # calls with truncated distributions
# Widths of the passes over generated texts. Each requires a program.
_NARROW, _STEP = 96, 32
_PLAIN = LogitsTransform()


class DraftReport(NamedTuple):
  """Result of `assert_drafter_exact`.

  Attributes:
    drafts: largest deviation of a sum over draft tokens, see the docstring of
      this module. None if there are no tested draft tokens.
    texts: largest deviation of a sum over generated tokens.
    joint: p-value of the joint distribution of the first generated tokens.
    tokens: number of draft tokens.
  """

  drafts: evidence.Deviation | None
  texts: evidence.Deviation
  joint: float
  tokens: int


def assert_drafter_exact(drafter: Drafter, params: chex.ArrayTree,
                         target: Model, *, verifier: Verifier | None = None,
                         controller: Any = None,
                         transform: LogitsTransform = _PLAIN,
                         context: Callable[[int], Any] = lambda rows: None,
                         prompts: Sequence[Sequence[int]] | None = None,
                         rows: int = 160, calls: int = 32, rounds: int = 6,
                         capacity: int = 0) -> DraftReport:
  """Tests a drafter in the decoding loop.

  There are two main tests. Each draft token must be a sample of its row of q
  (`Draft.probs`), given all earlier draws. The output must follow the target's
  distributions, computed in a pass without a cache. `Nodes.deviation` lists the
  sums and the groups of tokens. In addition, rows of q must sum to 1, the
  drafts must have the declared capabilities, and a row must not depend on other
  rows.

  By default, a batch has more than 128 rows, with temperatures from 0 to 2 and
  up to two eos ids. Half of the rows have prompts of 33 to 200 tokens, or up to
  the context length minus the new tokens. The others have shorter prompts.
  Every call uses other random numbers. There are three kinds of calls:

  * `calls` calls of several rounds. Half of the rows end after one token.
  * Up to four calls of many rounds, with one, two or 16 active rows.
  * Up to eight calls that draw drafts under top-k, top-p and min-p, in batches
    of 20 rows. These drafts are not verified.

  The guide `docs/guides/own_drafter.md` lists what is never tried.

  Use a small target, such as that of `tiny_pair`, with 5 to 50 tokens and
  distributions far from uniform. Drafter and target should often agree.

  Args:
    drafter: the drafter.
    params: `{"target": ..., "drafter": ...}` parameters.
    target: target model.
    verifier: lossless rule. None means the strongest rule of this library that
      is lossless with the drafter.
    controller: controller of the decoder, or None. With a controller, rows
      depend on each other, and the check of this property is skipped.
    transform: transform of the decoder, without constraints.
    context: function from a number of rows to the context of the drafter, a
      tree of arrays `[rows, ...]` or None.
    prompts: lists of token ids for most rows. The drafter must be able to draft
      after some of them. None means random prompts. Long prompts are tested
      only if this list contains some.
    rows: number of rows B, at least 8. Some errors appear only above 128.
    calls: number of calls with all rows. More calls find smaller errors.
    rounds: number of rounds per call, even and at least 2. Calls of many rounds
      have eight times as many.
    capacity: smallest number of slots, see `Decoder.prefill`.

  Returns:
    A `DraftReport`.

  Raises:
    AssertionError: a test fails. The message names the sum, and the group of
      rows or nodes with the largest deviation. A correct drafter fails with a
      probability of at most 1e-6.
    ValueError: an argument is out of range.

  Example:
    >>> import specjax as sj
    >>> pair = sj.testing.tiny_pair(5)
    >>> report = sj.testing.assert_drafter_exact(
    ...     sj.drafters.draft_model(model=pair.drafter, gamma=2),
    ...     pair.params, pair.target, calls=2)
    >>> report.tokens > 1000
    True
  """
  fields.check_at_least("rows", rows, 8)
  fields.check_at_least("calls", calls, 1)
  if not fields.is_whole(rounds) or rounds < 2 or rounds % 2:
    raise ValueError(f"rounds is {rounds!r}; it must be even and at least 2")
  if transform.constraints:
    raise ValueError("the transform has constraints; the law of a text with "
                     "constraints is known only in the loop: leave them out")
  make = functools.partial(
      decoder_lib.Decoder, target=target, drafter=drafter,
      verifier=verifier or sound_rule(
          interfaces.bind(drafter, target, transform)))
  decoder = make(transform=transform, controller=controller)
  new, many = 2 * rounds, _MANY * rounds
  requests = recording.Requests.mixed(
      target.vocab_size, rows, new, prompts,
      min(recording.LONGEST, decoder.context_length - new))
  start = lambda requests, context: requests.prefill(
      decoder, params, recording.LONGEST, capacity=capacity, context=context)
  state = start(requests, context(rows))
  ids = np.arange((2 * calls + len(_FEW_ROWS)) * rows).reshape(-1, rows)
  shared = decoder, params, requests
  record = functools.partial(recording.record, *shared, state=state)
  found = record(ids[:calls], rounds=rounds, new=requests.shortened(calls))
  few = _FEW_ROWS[:1 + calls // 4]
  long = record(ids[calls:][:len(few)], rounds=many,
                new=requests.few(few, decoder.context_length))
  truncated = recording.record_drafts(
      *shared, ids[calls + len(few):][:min(calls, _TRUNCATED_CALLS)],
      rounds=rounds, state=state, other=make(
          transform=_truncated(transform, target.vocab_size)))
  declared = interfaces.capabilities(decoder.stage.drafter)
  check = functools.partial(
      check_drafts, interfaces.kind_of(drafter), alike=context(1) is None)
  check(declared, truncated, crossed=False)
  if controller is not None:
    declared -= {"full"}  # a controller shortens drafts
  check(declared, long, crossed=False)
  drafts = check(declared, found)
  texts, joint = check_texts(target, params, transform, found, rounds)
  check_texts(target, params, transform, long, many, joint=False)
  if controller is None:
    _check_rows_alone(decoder, params, found, ids[0], start, context(rows))
  return DraftReport(drafts, texts, joint, int(sum(
      one.drafted.sum() for one in (found, long, truncated))))


def _truncated(transform, vocab_size):
  """Returns a transform with top-k, top-p and min-p, for the third record."""
  return dataclasses.replace(
      transform, top_k=vocab_size // 2 + 1, top_p=0.95, min_p=0.02)


def sound_rule(drafter: Drafter) -> Verifier:
  """Returns the strongest rule that is lossless with a drafter."""
  declared = interfaces.capabilities(drafter)
  for rule in (verifiers.Block(), verifiers.Traversal(),
               verifiers.TargetWalk()):
    if {*rule.requires} <= declared:
      return rule
  raise AssertionError("TargetWalk is sound for every drafter")


def check_drafts(name: str, declared: Collection[str],
                 found: recording.Record, *, alike: bool = True,
                 crossed: bool = True) -> evidence.Deviation | None:
  """Tests that draft tokens are samples of their rows of q.

  Args:
    name: class name of the drafter.
    declared: declared capabilities, a subset of `interfaces.CAPABILITIES`.
    found: recorded rounds.
    alike: True if all rows have the same context.
    crossed: True also tests combinations of two groups of draft tokens.

  Returns:
    The largest deviation of a sum. None if there are no draft tokens, or if the
    drafter does not provide "conditional".

  Raises:
    AssertionError: see `assert_drafter_exact`.
  """
  _check_values(name, declared, found)
  if not found.drafted.any() or "conditional" not in declared:
    return None
  nodes = nodes_lib.Nodes(found)
  if "iid" in declared:
    nodes.check_siblings(name)
  if "autoregressive" in declared:
    nodes.check_contexts(name, alike)
  nodes.check_possible(name)
  deviation = nodes.deviation(crossed)
  if deviation.log_p < np.log(nodes_lib.LEVEL):
    raise AssertionError(
        f"{name}: drafted tokens are not samples of the rows of q reported "
        f"for them: {deviation}")
  return deviation


def check_texts(target: Model, params: chex.ArrayTree,
                transform: LogitsTransform, found: recording.Record, count: int,
                kinds: np.ndarray | None = None, joint: bool = True
                ) -> tuple[evidence.Deviation, float]:
  """Tests the first `count` new tokens of every row.

  `count` must not exceed the number of recorded rounds, because each round
  emits at least one token. Later tokens are not tested: their presence depends
  on the number of accepted tokens, and so on the tokens themselves.

  Args:
    target: target model.
    params: `{"target": ..., "drafter": ...}` parameters.
    transform: transform of the decoder.
    found: recorded rounds.
    count: number of tested new tokens per row.
    kinds: `[K]` kind of each of K calls, an integer from 0. Calls of each kind
      are also tested separately. None means that all calls have one kind.
    joint: True tests the joint distribution. The rows of `recording.TEXTS` must
      have at least `count` new tokens in all calls.

  Returns:
    The largest deviation of a sum, and the p-value of the joint distribution of
    the first tokens (1 without this test).

  Raises:
    AssertionError: the text does not follow the target.
  """
  requests = found.requests
  starts, lengths = requests.lengths, np.arange(count)
  law_of = functools.partial(
      _laws, target, dataclasses.replace(transform, temperature=None),
      params["target"])
  tokens = np.take_along_axis(found.texts, np.minimum(
      starts[:, None] + lengths, found.texts.shape[2] - 1)[None], axis=2)
  ends = (tokens[..., None] == requests.eos[:, None]).any(-1)
  there = ((np.cumsum(ends, axis=-1) - ends == 0)
           & (lengths < found.new[..., None]))
  call, row, at = np.nonzero(there)
  x = tokens[there]
  p = nodes_lib.normalised(_text_laws(law_of, found, call, row, at))
  nodes_lib.check_chances("the generated text holds a token", x, p, row)
  index = nodes_lib.numbered(there)
  before = lambda back: np.where(
      at >= back, tokens[call, row, np.maximum(at - back, 0)] % 8, -1)
  of_prompts = nodes_lib.prompt_groups(starts[row])  # not combined in pairs
  groups = {
      **nodes_lib.row_groups(requests, row),
      "position {} after the prompt": at,
      "a token of {} mod 8 before": before(1),
      "a token of {} mod 8 two places before": before(2),
      **of_prompts,
  }
  if kinds is not None:
    groups = {"calls of kind {}": kinds[call], **groups}
  partners = nodes_lib.lags(index, (call, row, at), row_axis=1)
  deviation = evidence.largest(
      evidence.functions(x, p, None, requests.eos[row], "p"),
      evidence.pairs(x, p, partners), groups,
      crossed=len(groups) - len(of_prompts))
  if deviation.log_p < np.log(nodes_lib.LEVEL):
    raise AssertionError(
        f"the generated text does not follow the target: {deviation}")
  p_value = _joint_p_value(law_of, found, tokens, p.shape[1]) if joint else 1.0
  if p_value < nodes_lib.LEVEL:
    raise AssertionError(
        "the generated text does not follow the target: the joint law of the "
        f"first tokens has the p-value {p_value:.2g}")
  return deviation, p_value


def _text_laws(law_of, found, call, row, at):
  """Returns the target's distributions `[n, V]` of n generated tokens.

  Equal texts of a row are read once. So a prompt of a row with a limit of one
  token is read once for all calls.
  """
  starts = found.requests.lengths
  needed = np.zeros(found.new.shape, int)  # tokens before the last tested one
  np.maximum.at(needed, (call, row), starts[row] + at)
  texts = np.where(np.arange(found.texts.shape[2]) < needed[..., None],
                   found.texts, 0)
  laws = None
  for narrow in (True, False):
    own = (needed > 0) & ((needed <= _NARROW) == narrow)
    if not own.any():
      continue
    width = _NARROW if narrow else -(-needed.max() // _STEP) * _STEP
    rows = np.broadcast_to(np.arange(len(starts)), own.shape)[own]
    distinct, place = np.unique(np.concatenate(
        [rows[:, None], texts[own][:, :width]], axis=1), axis=0,
                                return_inverse=True)
    number = np.zeros(own.shape, int)
    number[own] = place.reshape(-1)
    values = law_of(distinct[:, 1:], found.requests.temperature[distinct[:, 0]])
    if laws is None:
      laws = np.zeros((len(at), values.shape[-1]))
    here = own[call, row]
    laws[here] = values[number[call, row][here], (starts[row] + at - 1)[here]]
  return laws


def _joint_p_value(law_of, found, tokens, size):
  """Returns the p-value of the joint distribution of the first tokens.

  There is one p-value for each prompt of `recording.TEXTS`. The result is the
  smallest of them times their number.
  """
  step = recording.EVERY * len(recording.TEXTS)
  texts = tokens.shape[0] * (tokens.shape[1] // step)
  horizon = 1
  while (_TEXTS_A_CELL * size ** (horizon + 1) <= texts
         and horizon < tokens.shape[2]):
    horizon += 1
  if size > texts:
    return 1.0  # too few samples for so many cells
  digits = np.indices((size,) * horizon).reshape(horizon, -1).T
  values = []
  for i, (_, temperature) in enumerate(recording.TEXTS):
    first = recording.EVERY * i
    prompt = found.requests.prompts[first]
    ahead = np.concatenate(
        [np.tile(prompt, (len(digits), 1)), digits,
         np.zeros((len(digits), _NARROW - len(prompt) - horizon), int)], axis=1)
    probs = law_of(ahead, np.full(len(digits), temperature))[
        :, len(prompt) - 1:][:, :horizon].astype(np.float64)
    law = np.take_along_axis(probs, digits[..., None], 2)[..., 0].prod(-1)
    values.append(laws_lib.chi_square(
        tokens[:, first::step, :horizon].reshape(-1, horizon), law, size))
  return min(1.0, len(values) * min(values))


def _laws(model, transform, params, texts, temperature):
  """Returns the target's distributions `[n, W, V]` after every token of texts.

  They are computed in passes without a cache, of equal shapes, so that they
  share a program. `texts` is `[n, W]`, `temperature` is `[n]`.
  """
  rows = 128
  more = -len(texts) % rows
  width = int(min(texts.shape[1], model.context_length))  # the rest is padding
  texts = np.pad(texts[:, :width], ((0, more), (0, 0))).astype(np.int32)
  temperature = np.pad(temperature, (0, more)).astype(np.float32)
  parts = [np.asarray(_pass(model, transform, params, texts[i:i + rows],
                            temperature[i:i + rows]))
           for i in range(0, len(texts), rows)]
  return np.concatenate(parts)[:len(texts) - more]


# Not optimised, because compilation takes most of the time.
@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options={
    "xla_backend_optimization_level": 0})
def _pass(model, transform, params, texts, temperature):
  return transform(model(params, texts).logits, temperature[:, None])


def _check_values(name, declared, found):
  """Raises an error for a malformed draft or one without a declared capability.
  """
  for turn in np.ndindex(found.probs.shape[:2]):
    values = _draft_values(name, tuple(sorted(declared)), Draft(
        tokens=found.tokens[turn], parents=found.parents[turn],
        probs=found.probs[turn]))
    for text, good in values.items():
      bad = ~np.asarray(good) & found.active[turn]
      if bad.any():
        raise AssertionError(text.format(row=bad.argmax()))
  total = found.probs.astype(np.float64).sum(-1)
  worst = np.where(found.drafted, np.abs(total - 1), 0)
  if worst.max() > _TOTAL:
    call, turn, row, node = np.unravel_index(worst.argmax(), worst.shape)
    raise AssertionError(
        f"{name}: the row of q of node {node} in row {row} and round {turn} "
        f"sums to {total[call, turn, row, node]:.6f}; it must sum to 1, or to "
        "0 for padding: normalise after a truncation or a change of dtype")


_draft_values = jax.jit(checks.draft_values, static_argnums=(0, 1))


def _check_rows_alone(decoder, params, found, ids, start, context):
  """Raises an error if a row's drafts change with its place or other rows.

  The same rows are decoded again in another order and batch. Half of the other
  rows are done from the start.
  """
  rows = np.arange(len(ids))[::-1]
  others = rows % 3 == 0
  requests = found.requests.taken(np.where(others, rows[0], rows))
  state = start(requests, jax.tree.map(lambda x: x[rows], context))
  rounds = min(4, found.active.shape[1])
  other = recording.record(
      decoder, params, requests, np.where(
          others, found.active.shape[0] * len(ids) + rows, ids[rows])[None],
      rounds=rounds, state=state, new=np.where(
          others, requests.new * (rows % 2), found.new[0][rows])[None])
  kept = ~others
  for what, tolerance in (("tokens", 0), ("probs", nodes_lib.SAME)):
    want = getattr(found, what)[0, :rounds][:, rows[kept]]
    got = getattr(other, what)[0][:, kept]
    active = found.active[0, :rounds][:, rows[kept]]
    differ = (np.abs(want.astype(np.float64) - got) > tolerance)
    differ = differ.reshape(*active.shape, -1).any(-1) & active
    if differ.mean() > _FEW * active.mean():
      turn, row = np.argwhere(differ)[0]
      raise AssertionError(
          f"{interfaces.kind_of(decoder.drafter)}: the draft of row "
          f"{rows[kept][row]} in round {turn} depends on its place or on the "
          "other rows; draw with the keys or uniforms of the row alone")
