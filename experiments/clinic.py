"""Tests the verification of public engines for bias, each from a few lines.

  python experiments/clinic.py

Every case is a rule, or a rule and a drafter, that a public engine has or had.
It was written for this script from a description, from the text of a thread, or
after reading the public code; no code is copied, and no engine is run.
`exact.audit_sampler` computes the exact distribution of the emitted tokens on
small models. A case is exact if it has the target's distribution on all of
them. The command takes about two minutes on two CPU cores.

Output: a table on stdout; clinic.csv and clinic.json in --output_dir. The
columns are the case, the verdict, the largest total variation between the
output and the target on the tested models, the source, and how the source was
checked:

  code        the public code was read
  thread      the text of the issue or pull request was read
  described   a description only; the code is not public or was not found

The report of one case has a draft that shows the error, with p, q, and the
expected and obtained distributions:

  python experiments/clinic.py --case=gemma4_assistant

--installed tests functions of installed packages instead: transformers (which
needs torch), economize and keras_hub. They draw their own random numbers, so
rounds are sampled: a total variation of 0.05 is found with a probability of at
least 0.95, and a smaller one can be missed. Packages that are not installed are
named. Output: installed.csv and installed.json.

  python experiments/clinic.py --installed
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
from importlib import metadata
import sys
from typing import Any

from lib import common  # before jax, which takes long to import

# isort: split
from absl import flags
import jax.numpy as jnp
from lib import engines
from lib import flags as shared
import numpy as np

import specjax as sj
from specjax.exact import schemes

_CASE = flags.DEFINE_list(
    "case", [], "Names of cases, comma-separated. Their full reports are "
    "printed. Default: all cases, as a table")
_INSTALLED = flags.DEFINE_bool(
    "installed", False, "Test functions of the installed packages transformers "
    "(with torch), economize and keras_hub instead of the cases")
_OUTPUT_DIR = shared.output_dir("results/clinic")

_STAR, _TREE = (-1, 0, 0), (-1, 0, 0, 1)
_KINDS = ("dense", "zeros", "one_hot_target", "equal", "ties", "nearly_one_hot",
          "heavy_tails", "uniform")
_EPS = 1e-5  # the added constant of the case `epsilon`
_TEMPERATURE, _TOP_P = 1.5, 0.9  # of the case `filter_order`


def _draw(weights, uniform):
  """Draws from unnormalised weights by the inverse cumulative distribution."""
  ends = np.cumsum(weights)
  token = np.searchsorted(ends, uniform * ends[-1], side="right")
  return int(min(token, np.flatnonzero(weights)[-1]))


def _rest(p, q):
  rest = np.maximum(p - q, 0)
  return rest if rest.sum() > 0 else p


def _only(p, tokens):
  """Returns p without some tokens, or p if nothing is left."""
  rest = p.copy()
  rest[list(tokens)] = 0
  return rest if rest.sum() > 0 else p


def _token(tokens, q, p, u, accept=None, residual=_rest):
  """Token verification with a probability of acceptance and a residual.

  `accept(p [V], q [V], x)` and `residual(p, q)` replace those of the paper.
  """
  accept = accept or (lambda p, q, x: p[x] / q[x])
  for i, x in enumerate(tokens):
    if not q[i].any():
      return [*tokens[:i], _draw(p[i], u[-1])]
    if u[i] >= accept(p[i], q[i], x):
      return [*tokens[:i], _draw(residual(p[i], q[i]), u[-1])]
  return [*tokens, _draw(p[-1], u[-1])]


def _block(tokens, q, p, u, first=False, plain_residual=False):
  """Block verification: the last prefix i with u_i < h_i is accepted."""
  real = int(np.argmin([*q.any(-1), False]))
  survive = np.ones(real + 1)
  for i, x in enumerate(tokens[:real]):
    survive[i + 1] = min(1, survive[i] * p[i, x] / q[i, x])
  below = np.concatenate([q[:real], np.zeros_like(p[:1])])
  rest = np.maximum(survive[:, None] * p[:real + 1] - below, 0)
  total = rest.sum(-1) + 1 - survive
  heads = np.where(total > 0, rest.sum(-1) / np.where(total > 0, total, 1), 1)
  passed = np.append(True, u[:real] < heads[1:])
  stop = (int(np.argmin(np.append(passed, False))) - 1 if first
          else int(np.flatnonzero(passed)[-1]))
  if plain_residual and stop < real:
    return [*tokens[:stop], _draw(_rest(p[stop], q[stop]), u[-1])]
  row = rest[stop] if rest[stop].sum() > 0 else p[stop]
  return [*tokens[:stop], _draw(row, u[-1])]


_SAMPLED = dict(coins=None, kinds=("dense",), seeds=range(4))


def _cumulative(tokens, q, p, rng, known_q):
  """Accepts the last prefix whose product of ratios exceeds that of uniforms.

  The ratio is capped at 1 after every factor. After a rejection the next token
  is that of token verification. With `known_q` False, q is 1 at drafted tokens.
  A product of uniforms has no boxes, so the rounds are sampled.
  """
  u = rng.random(len(p))
  ratio, coins, stop = 1.0, 1.0, 0
  for i, x in enumerate(tokens):
    if not q[i].any():
      tokens = tokens[:i]
      break
    ratio = min(1, ratio * p[i, x] / (q[i, x] if known_q else 1))
    coins *= u[i]
    if coins < ratio:
      stop = i + 1
  if stop == len(tokens):
    return [*tokens, _draw(p[stop], u[-1])]
  rest = (_rest(p[stop], q[stop]) if known_q
          else _only(p[stop], tokens[stop:stop + 1]))
  return [*tokens[:stop], _draw(rest, u[-1])]


def _match(tokens, q, p, u):
  """Samples from the target at every position until a draft token differs."""
  emitted = []
  for i in range(len(p)):
    emitted.append(_draw(p[i], u[i]))
    if i == len(tokens) or not q[i].any() or emitted[-1] != tokens[i]:
      break
  return emitted


def _walk(tokens, q, p, u, parents, step):
  """Walks down a tree.

  `step(row, children, u) -> (child or None, weights)` decides at one node.
  `children` are (node, token, row of q). The weights are those of the next
  token if no child is accepted.
  """
  node, path = 0, []
  while True:
    children = [(c, tokens[c - 1], q[c - 1])
                for c in np.flatnonzero(parents == node) if q[c - 1].any()]
    child, rest = step(p[node], children, u, node)
    if child is None:
      return [*path, _draw(rest, u[-1])]
    node = child
    path.append(tokens[node - 1])


def _recursive(row, children, u, node, residual=_rest):
  """Recursive rejection sampling at one node."""
  del node
  for child, x, q in children:
    if u[child - 1] * q[x] < row[x]:
      return child, None
    row = residual(row, q) if residual is _rest else residual(row, x)
    row = row / row.sum()
  return None, row


def _target_only(row, children, u, node, single=1.0):
  """Tree sampling with one uniform per node and sums of p over siblings."""
  seen, total = [], 0.0
  coin = u[node - 1] if node else u[-2]
  for child, x, _ in children:
    total += row[x]
    if coin < total or row[x] >= single:
      return child, None
    seen.append(x)
  return None, _only(row, seen)


def _share(q, p, count, rho):
  beta = np.minimum(q, p / rho).sum()
  return (1 - max(1 - beta, 0)**count) / beta if beta > 0 else count


@functools.cache
def _rho(q, p, count):
  """Returns the least rho of K-SEQ, from bisection."""
  share = functools.partial(_share, np.array(q), np.array(p), count)
  low, high = 1.0, 1.0 if share(1.0) <= 1 else float(count)
  for _ in range(60):
    middle = (low + high) / 2
    low, high = (low, middle) if share(middle) <= middle else (middle, high)
  return high


def _k_seq(row, children, u, node):
  """K-SEQ at one node."""
  del node
  if not children:
    return None, row
  q, count = children[0][2], len(children)
  rho = _rho(tuple(q), tuple(row), count)
  for child, x, _ in children:
    if u[child - 1] * rho * q[x] < row[x]:
      return child, None
  rest = np.maximum(
      row - _share(q, row, count, rho) * np.minimum(q, row / rho), 0)
  return None, rest if rest.sum() > 1e-12 else row


def _tree(step, **kwargs):
  return functools.partial(_walk, step=functools.partial(step, **kwargs))


def _other_slice(tokens, q, p, u, parents):
  """Recursive rejection with the rows of p shifted by one node."""
  return _tree(_recursive)(tokens, q, np.roll(p, 1, axis=0), u, parents)


def _traversal(tokens, q, p, u, parents):
  """Traversal verification: children before parents."""
  def visit(node, mass):
    row = mass * p[node]
    for child in np.flatnonzero(parents == node):
      below, x = q[child - 1], tokens[child - 1]
      if not below.any():
        continue
      found = visit(child, min(1, row[x] / below[x]))
      if found is not None:
        return [x, *found]
      left = np.maximum(row - below, 0)
      total = left.sum() + 1 - mass
      if total > 1e-15:
        row, mass = left / total, left.sum() / total
    if u[node - 1] < mass or not node:
      return [_draw(row if row.sum() > 0 else p[node], u[-1])]
    return None

  return visit(0, 1.0)


def _shared_noise(tokens, q, p, u):
  """Token verification whose second draw reuses the drafter's noise.

  The drafter emits x = argmin S_i / q_i, with S_i ~ Exp(1). After a rejection,
  the next token is y = argmin S_i / r_i with the same S, where r is the
  residual. Then P(y | x) = r_y int_a^b dt / C(t)^2 for y != x, with
  C(t) = sum_i max(q_i, t r_i), a = q_y / r_y and b = infinity, as r_x = 0.
  The integral is a sum over pieces on which C is linear.
  """
  x = tokens[0]
  if not q[0].any():
    return [_draw(p[0], u[-1])]
  if u[0] * q[0, x] < p[0, x]:
    return [x, _draw(p[1], u[-1])]
  r = _rest(p[0], q[0])
  r = r / r.sum()
  at = lambda t: np.maximum(q[0], t * r).sum()
  law = np.zeros_like(r)
  for y in np.flatnonzero(r):
    ends = sorted({q[0, y] / r[y], *(
        t for t in q[0, r > 0] / r[r > 0] if t > q[0, y] / r[y])})
    law[y] = sum((b - a) / at(a) / at(b) for a, b in zip(ends, ends[1:]))
    # Beyond the last end, C(t) = t + the sum of q where r = 0.
    law[y] += 1 / at(ends[-1])
    law[y] *= r[y]
  return [_draw(law, u[-1])]


def _min_of_batch(tokens, q, p, u):
  """Token verification cut at the fewest accepted tokens of a batch of two.

  The other row rejects its first token with probability 1/2, by the uniform
  u[-2]. The next token after the cut is drawn from the residual, also if this
  row has accepted the token there. Requires two uniforms per node.
  """
  stop = 0
  while stop < len(tokens) and (
      q[stop].any() and u[stop] * q[stop, tokens[stop]]
      < p[stop, tokens[stop]]):
    stop += 1
  if len(tokens) > stop and not q[stop].any():
    return [*tokens[:stop], _draw(p[stop], u[-1])]
  if u[-2] < 0.5:
    stop = 0
  rest = _rest(p[stop], q[stop]) if stop < len(tokens) else p[-1]
  return [*tokens[:stop], _draw(rest, u[-1])]


def _argmax_miss(tokens, q, p, u):
  """Accepts tokens that equal the argmax of p, then samples from p."""
  stop = 0
  while (stop < len(tokens) and q[stop].any()
         and tokens[stop] == np.argmax(p[stop])):
    stop += 1
  return [*tokens[:stop], _draw(p[stop], u[-1])]


def _at_temperature_1(tokens, q, p, u):
  """Judges with the distributions of temperature 1 instead of 1/2."""
  flat = lambda rows: np.sqrt(rows) / np.maximum(
      np.sqrt(rows).sum(-1, keepdims=True), 1e-300)
  return _token(tokens, flat(q), flat(p), u)


# Drafters, as schemes of `exact.schemes`.


def _reported(drafts, q, parents):
  for node, parent in enumerate(parents[1:], 1):
    drafts.probs[:, node] = q[drafts.at(parent)]
  return drafts


def _argmax_with_softmax(drafts, q, parents):
  """Drafts the likeliest tokens and reports the softmax as q."""
  return _reported(schemes.top_k(drafts, q, parents), q, parents)


def _drawn_by(law_of):
  """Returns a drafter that draws from `law_of(q [n, V])` and reports q."""
  def scheme(drafts, q, parents):
    for parent in parents[1:]:
      row = q[drafts.at(parent)]
      drafts = drafts.grow(parent, law_of(row), row)
    return drafts

  return scheme


def _bfloat16(rows):
  """Rounds to 8 significant bits and normalises, as a sampler does."""
  bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
  rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(
      np.uint32).view(np.float32).astype(np.float64)
  return rounded / rounded.sum(-1, keepdims=True)


def _middle_stage(rows):
  """Law of a token that stage B accepts from A, or draws again from B.

  A is a shifted copy of B. The residual (B - A)+ is not used.
  """
  kept = np.minimum(rows, np.roll(rows, 1, axis=-1))
  return kept + (1 - kept.sum(-1, keepdims=True)) * rows


def _with_share(drafts, keep):
  """Splits the last node into itself and padding, with share `keep [n]`."""
  both = drafts.rows(np.repeat(np.arange(len(keep)), 2))
  share = np.stack([keep, 1 - keep], -1).reshape(-1)
  probs = both.probs.copy()
  probs[1::2, -1] = 0
  both = dataclasses.replace(both, weights=both.weights * share, probs=probs)
  return both.rows(share > 0)


def _batch_cut(grow):
  """Returns a drafter of one token in a batch of two that verifies one token.

  The row whose drafted token has the larger q is verified (D-Cut). `grow`
  is "sampled" or "argmax". The other row has the same models.
  """
  def scheme(drafts, q, parents):
    row = q[drafts.at(0)]
    if grow == "argmax":
      return _with_share(schemes.top_k(drafts, q, parents),
                         np.full(len(row), 0.5))
    drafts = drafts.grow(0, row)
    mine = np.take_along_axis(drafts.probs[:, 1], drafts.tokens[:, 1:], -1)
    law = drafts.probs[:, 1]
    return _with_share(drafts, np.minimum(
        1, (law * (law < mine)).sum(-1) + 0.5 * (law * (law == mine)).sum(-1)))

  return scheme


def _ended_before(drafts, q, parents):
  """Draws a chain that ends where the largest q is below 0.6.

  The drafted token itself has no influence.
  """
  ended = np.zeros(len(drafts.weights), bool)
  for parent in parents[1:]:
    row = q[drafts.at(parent)]
    ended = ended | (row.max(-1) < 0.6)
    drafts = drafts.grow(parent, row * ~ended[:, None])
    # `grow` makes one draft per possible token; the flags follow their draft.
    ended = np.repeat(ended, np.where(ended, 1, (row > 0).sum(-1)))
  return drafts


def _dropped(drafts, q, parents):
  """Draws a chain and drops drafted tokens with q below 1 / V, and the rest."""
  drafts = schemes.confident(drafts, q, parents)
  for node in range(2, drafts.tokens.shape[1]):
    drafts.probs[:, node] *= drafts.probs[:, node - 1].any(-1)[:, None]
  return drafts


def _filter_order():
  """Returns the largest total variation of two orders of top-p and temperature.

  The maximum is over 200 vectors of random logits of 8 tokens.
  """
  def softmax(logits):
    x = np.exp(logits - logits.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)

  def top_p(logits):
    order = np.argsort(-logits, axis=-1)
    mass = np.cumsum(np.take_along_axis(softmax(logits), order, -1), -1)
    drop = np.concatenate([np.zeros((len(logits), 1), bool),
                           mass[:, :-1] >= _TOP_P], -1)
    out = logits.copy()
    np.put_along_axis(out, order, np.where(
        drop, -np.inf, np.take_along_axis(logits, order, -1)), -1)
    return out

  logits = np.random.default_rng(0).normal(size=(200, 8)) * 2
  plain = softmax(top_p(logits / _TEMPERATURE))
  verified = softmax(top_p(logits) / _TEMPERATURE)
  distance = 0.5 * np.abs(plain - verified).sum(-1)
  worst = np.argmax(distance)
  shown = lambda row: " ".join(f"{x:.3f}" for x in row)
  return float(distance.max()), (
      f"logits {shown(logits[worst])}\n  plain sampling {shown(plain[worst])}\n"
      f"  verification   {shown(verified[worst])}")


def _shared_budget(score, is_capped=True):
  """Returns the measure of a budget of 2 tokens for two rows of 2 tokens.

  The tokens with the largest scores are verified. With `is_capped` False, they
  are selected without the minimum over the earlier tokens of their row, and
  only those before the first gap of a row are verified.

  Args:
    score: function `(probs [2, 2, V], q [2, 2]) -> [2, 2]`, where q is the
      probability of the drafted tokens.
    is_capped: if True, select by `analysis.best_first`.
  """
  def budget(probs, tokens):
    q = jnp.take_along_axis(probs, tokens[..., None], -1)[..., 0]
    scores = score(probs, q)
    if is_capped:
      return sj.analysis.best_first(scores, 2)
    best = jnp.argsort(-scores.T.reshape(-1), stable=True)[:2]
    taken = jnp.zeros(scores.size, int).at[best].set(1).reshape(2, 2)
    return jnp.cumprod(taken, axis=0).sum(0)

  def measure():
    found = sj.analysis.certify_budget(
        budget, sj.verifiers.Token(), vocab_sizes=(3,), gammas=(2,),
        kinds=_KINDS)
    return found.total_variation, str(found)

  return measure


@dataclasses.dataclass(frozen=True)
class Case:
  """A verification rule, or a rule and a drafter, of a public engine.

  Attributes:
    name: name for --case.
    what: the rule in one line.
    source: repository and thread or file.
    checked: "code", "thread" or "described"; "run" for installed packages.
    advice: what a user should do.
    exact: expected verdict.
    sampler: function for `exact.audit_sampler`. Of an installed package: a
      function that returns the sampler.
    scheme: the drafter.
    trees: parents of the trees; () means chains.
    gammas: draft lengths of chains.
    settings: other arguments of `exact.audit_sampler`.
    measure: function that returns the total variation and a text, for a case
      that is not a sampler.
  """

  name: str
  what: str
  source: str
  checked: str
  advice: str = "nothing to do"
  exact: bool = True
  sampler: Callable[..., Any] | None = None
  scheme: Any = "iid"
  trees: Sequence[tuple[int, ...]] = ()
  gammas: Sequence[int] = (2,)
  settings: dict[str, Any] = dataclasses.field(default_factory=dict)
  measure: Callable[[], tuple[float, str]] | None = None


_R, _D = Case, functools.partial(Case, exact=False)
CASES = (
    # Exact rules.
    _R("vllm_token", "token verification, real q", "vllm-project/vllm: v1/"
       "sample/rejection_sampler.py", "code", sampler=_token),
    _R("vllm_one_hot", "no q: accept x with p(x), else p without x",
       "vllm-project/vllm: the same file, draft_probs=None; #40651", "code",
       sampler=lambda x, q, p, u: _token(
           x, (q > 0) * 1.0, p, u), scheme="top_k"),
    _R("vllm_block", "block verification", "vllm-project/vllm #46781", "thread",
       sampler=_block, gammas=(1, 2, 3)),
    _R("vllm_adaptive", "draft length from max q before the token is drawn",
       "vllm-project/vllm #52228, after #47808", "described",
       sampler=_token, scheme=_ended_before),
    _R("sglang_target_only", "one uniform per node, sums of p over top-k "
       "siblings", "sgl-project/sglang: tree_speculative_sampling_target_only",
       "code", sampler=_tree(_target_only), scheme="top_k",
       trees=(_TREE,)),
    _R("tensorrt_chain", "rejection sampling on chains",
       "NVIDIA/TensorRT-LLM #12588 (merged)", "thread", sampler=_token),
    _R("transformers_assistant", "token verification, sampled assistant",
       "huggingface/transformers 5.24: _speculative_sampling", "code",
       sampler=functools.partial(
           _token, accept=lambda p, q, x: np.nextafter(p[x] / q[x], 2))),
    _R("transformers_lookup", "sample and match, drafts copied from the prompt",
       "huggingface/transformers 5.24: generation/utils.py", "code",
       sampler=_match, scheme="top_k"),
    _R("mlxcel_match", "sample and match, sampled drafts; called biased",
       "lablup/mlxcel #992, corrects #902", "thread", sampler=_match),
    _R("dflash_match", "sample and match, argmax drafts; called biased",
       "z-lab/dflash #74", "thread", sampler=_match, scheme="top_k",
       advice="nothing to do for exactness; sampled drafts with their q and a "
       "rejection rule accept more"),
    _R("eagle2_tree", "top-k tree with q = 1; called biased",
       "SafeAILab/EAGLE #183, #221, #329", "thread",
       sampler=_tree(_recursive), scheme="top_k", trees=(_TREE,)),
    _R("eagle4_tree", "children without replacement, recursive rejection",
       "EAGLE-4 (its code is not open source)", "described",
       sampler=_tree(_recursive), scheme="without_replacement",
       trees=(_TREE,)),
    _R("hipfire_swor", "tree without replacement, renormalised q",
       "warpfront/hipfire #483", "thread", sampler=_tree(_recursive),
       scheme="without_replacement", trees=((-1, 0, 0, 0),)),
    _R("economize_tree", "recursive rejection on independent children",
       "Thiggel/economize 0.3.2", "code", sampler=_tree(_recursive),
       trees=(_TREE,)),
    _R("tpu_one_hot", "argmax drafts, draft_probs=None",
       "vllm-project/tpu-inference: rejection_sampler.py", "code",
       sampler=lambda x, q, p, u: _token(x, (q > 0) * 1.0, p, u),
       scheme="top_k"),
    _R("dcut_argmax", "confidence cut of a batch, argmax drafts",
       "Tencent/AngelSpec, D-Cut (arXiv:2607.14647)", "described",
       sampler=_token, scheme=_batch_cut("argmax"), gammas=(1,)),
    _R("batch_max_q", "two rows share tokens by the product of max q",
       "vllm-project/vllm #52228, ranking over a batch", "described",
       measure=_shared_budget(lambda probs, q: jnp.cumprod(probs.max(-1), 1))),
    _R("spectr_k_seq", "K-SEQ on independent children", "arXiv:2310.15141",
       "described", sampler=_tree(_k_seq), trees=(_TREE,)),
    _R("traversal", "traversal verification", "arXiv:2505.12398", "described",
       sampler=_traversal, trees=(_TREE,)),
    _R("ssd_epsilon", "accept with p / (q + 1e-10)",
       "tanishqkumar/ssd: ssd/utils/verify.py", "code",
       sampler=functools.partial(
           _token, accept=lambda p, q, x: p[x] / (q[x] + 1e-10)),
       advice="exact up to 1e-10 per token; compare u q < p to have no bound"),
    # Biased.
    _D("gemma4_assistant", "argmax drafts, softmax as q",
       "huggingface/transformers 5.24, #47932 (closed)", "code",
       "use do_sample=False, or another assistant, until q is one-hot",
       sampler=_token, scheme=_argmax_with_softmax),
    _D("keras_hub", "argmax drafts, softmax as q",
       "keras-team/keras-hub 71453d0: speculative_sampler.py", "code",
       "use greedy sampling, or make q one-hot", sampler=_token,
       scheme=_argmax_with_softmax),
    _D("keras_hub_batch", "batch cut at its fewest accepted tokens, then a "
       "residual draw", "keras-team/keras-hub 71453d0: speculative_sampler.py",
       "code", "decode one row at a time", sampler=_min_of_batch, gammas=(1,),
       settings=dict(coins=2)),
    _D("filter_order", "top-p before the temperature in verification only",
       "vllm-project/tpu-inference b8692ff: _compute_probs", "code",
       "use temperature 1, or no top-k and top-p, with drafts",
       measure=_filter_order),
    _D("shared_noise", "the residual draw reuses the drafter's Gumbel noise",
       "vllm-project/vllm #54282 (merged), #47386", "thread",
       "update; draft_sample_method=greedy is not affected",
       sampler=_shared_noise, gammas=(1,),
       settings=dict(kinds=("dense",), seeds=range(40))),
    _D("ascend_block", "products of ratios and of uniforms, residual of token "
       "verification", "vllm-project/vllm-ascend #3794, #7807", "thread",
       "update; disabled in later releases (#7839)",
       sampler=functools.partial(_cumulative, known_q=True),
       settings=_SAMPLED),
    _D("ascend_block_no_q", "the same with q = 1 for n-gram drafts",
       "vllm-project/vllm-ascend #7603 (merged)", "thread", "update",
       sampler=functools.partial(_cumulative, known_q=False), scheme="top_k",
       settings=_SAMPLED),
    _D("early_stop", "block verification that stops at the first u >= h, as a "
       "review bot demands", "vllm-project/vllm-ascend #11985", "thread",
       "do not follow the review: the rule under review is right",
       sampler=functools.partial(_block, first=True)),
    _D("block_plain_residual", "block test, residual (p - q)+ of token "
       "verification", "vllm-project/vllm-ascend #7807 (second defect)",
       "thread", "update",
       sampler=functools.partial(_block, plain_residual=True),
       settings=dict(kinds=("dense",), seeds=range(20))),
    _D("accept_all", "every draft token is accepted (u = 0)",
       "vllm-project/vllm-ascend #13470", "thread", "update; an acceptance "
       "rate of 1.0 is the symptom", sampler=functools.partial(
           _token, accept=lambda p, q, x: 2.0)),
    _D("ssd_miss", "after a cache miss: accept the argmax of p, then sample",
       "tanishqkumar/ssd: ssd/utils/verify.py", "code",
       "set jit_speculate, or temperature 0", sampler=_argmax_miss),
    _D("epsilon", f"accept with p / (q + {_EPS:g})", "a common idiom",
       "described", "compare u q < p; the bias is at most V times the constant",
       sampler=functools.partial(
           _token, accept=lambda p, q, x: p[x] / (q[x] + _EPS))),
    _D("bfloat16_q", "drawn from q in bfloat16, judged in float32",
       "deepseek-ai/DeepSpec #30", "thread",
       "cast the logits to float32 before the draft is drawn",
       sampler=_token, scheme=_drawn_by(_bfloat16)),
    _D("dropped_by_value", "drafted tokens below a threshold are dropped",
       "vllm-project/vllm #43522 (closed), if drafts are sampled", "thread",
       "decide before the token is drawn, or use argmax drafts",
       sampler=_token, scheme=_dropped),
    _D("dcut_sampled", "confidence cut of a batch, sampled drafts",
       "Tencent/AngelSpec, D-Cut (arXiv:2607.14647)", "described",
       "rank by max q, which is known before the draw, or use argmax drafts",
       sampler=_token, scheme=_batch_cut("sampled"), gammas=(1,)),
    _D("dcut_two_rows", "two rows share tokens by the product of q of the "
       "drafted tokens", "Tencent/AngelSpec, D-Cut (arXiv:2607.14647)",
       "described",
       "rank each token by a score of earlier tokens and max q, see "
       "analysis.best_first",
       measure=_shared_budget(lambda probs, q: jnp.cumprod(q, 1))),
    _D("batch_single_max_q", "two rows share tokens by max q of single tokens, "
       "up to the first gap of a row", "a variant of vllm-project/vllm #52228",
       "described", "use the product, or the minimum, of max q up to the token",
       measure=_shared_budget(lambda probs, q: probs.max(-1), False)),
    _D("tree_slice", "rows of p of another node",
       "NVIDIA/TensorRT-LLM #15098 (merged)", "thread", "update",
       sampler=_other_slice, trees=(_TREE,)),
    _D("repeated_siblings", "sums of p over siblings that can repeat",
       "sgl-project/sglang kernel, if fed with independent draws", "code",
       "SGLang feeds top-k tokens; merge equal siblings before the kernel",
       sampler=_tree(_target_only), trees=(_STAR,)),
    _D("sglang_threshold", "accept if p(x) >= 0.6; lossy by design",
       "sgl-project/sglang: --speculative-accept-threshold-single", "code",
       "keep the default of 1.0", sampler=_tree(_target_only, single=0.6),
       scheme="top_k", trees=(_STAR,)),
    _D("triforce_middle", "middle stage draws again from B after a rejection",
       "Infini-AI-Lab/TriForce: utils/decoding.py, Middle_Spec", "code",
       "draw from (B - A)+ there", sampler=_token,
       scheme=_drawn_by(_middle_stage)),
    _D("lattice_temperature", "judges at temperature 1 whatever was set",
       "ohdearquant/lattice #388", "thread",
       "use the rule at temperature 1 only", sampler=_at_temperature_1),
    _D("eagle1_scalar", "only the rejected token's probability is reduced",
       "SafeAILab/EAGLE #20 (repaired 2023)", "thread", "update",
       sampler=_tree(_recursive, residual=lambda row, x: _only(row, [x])),
       trees=(_STAR,)),
    _D("transformers_ensemble", "accept with w p / q + 1 - w, w = 1/2; lossy "
       "by design", "huggingface/transformers 5.24: assistant_ensemble_weight",
       "code", "leave assistant_ensemble_weight unset",
       sampler=functools.partial(
           _token, accept=lambda p, q, x: 0.5 + 0.5 * p[x] / q[x])),
)


def _of_package(package: str, function: str, name: str, what: str, sampler: Any,
                batched: bool = True, **kwargs):
  return Case(
      name, what, f"{package}: {function}", "run", sampler=sampler, **kwargs,
      settings=dict(coins=None, kinds=("dense", "equal", "ties"),
                    batched=batched))


_ARGMAX = dict(scheme=_argmax_with_softmax, exact=False)
INSTALLED = (
    _of_package("transformers", "_speculative_sampling", "transformers_token",
                "token verification, sampled drafts",
                engines.transformers_token, batched=False),
    _of_package("transformers", "_speculative_sampling", "transformers_argmax",
                "argmax drafts, softmax as q (Gemma-4 assistants)",
                engines.transformers_token, batched=False, **_ARGMAX,
                advice="use do_sample=False with these assistants"),
    _of_package("keras-hub", "SpeculativeSampler", "keras_hub",
                "argmax drafts, softmax as q", engines.keras_hub, **_ARGMAX,
                advice="use greedy sampling"),
    _of_package("economize", "RejectionVerifier.verify_batch",
                "economize_token", "token verification, sampled drafts",
                engines.economize_token),
    _of_package("economize", "RejectionVerifier.verify_tree", "economize_tree",
                "recursive rejection on independent children",
                engines.economize_tree, trees=(_STAR, _TREE)),
)


def _installed() -> list[Case]:
  """Returns the cases whose package is installed, with its version."""
  found = []
  for case in INSTALLED:
    package = case.source.partition(":")[0]
    try:
      found.append(dataclasses.replace(
          case, sampler=case.sampler(), source=case.source.replace(
              ":", f" {metadata.version(package)}:", 1)))
    except ImportError as e:
      print(f"{case.name} is left out: {e}; pip install {package}",
            file=sys.stderr)
  if not found:
    raise ValueError("--installed requires one of the packages transformers "
                     "and torch, keras-hub, and economize; install one")
  return found


def examine(case: Case) -> tuple[float, bool, str]:
  """Returns the total variation, the verdict and the report of a case."""
  if case.measure is not None:
    distance, text = case.measure()
    return distance, distance < 1e-9, text
  found = sj.exact.audit_sampler(case.sampler, **{
      **dict(coins=1, trees=case.trees, scheme=case.scheme, gammas=case.gammas,
             vocab_sizes=(3,), kinds=_KINDS, padding=False, large=0),
      **case.settings})
  return found.total_variation, found.lossless, str(found)


def main():
  cases = _installed() if _INSTALLED.value else CASES
  study = "installed" if _INSTALLED.value else "clinic"
  names = {case.name: case for case in cases}
  for name in _CASE.value:
    if name not in names:
      raise ValueError(f"--case contains {name!r}; it must be one of "
                       f"{', '.join(names)}")
  for name in _CASE.value:
    case = names[name]
    print(f"{name}: {case.what}\n  {case.source}\n  {case.advice}")
    print(examine(case)[-1])
  if _CASE.value:
    return
  output_dir = common.output_directory(_OUTPUT_DIR.value, "study")
  width = max(map(len, names))
  print(f"{'case':{width}s} {'verdict':7s} {'TV':>8s}  {'source':9s} what")
  rows, wrong = [], []
  for case in cases:
    distance, lossless, _ = examine(case)
    verdict = "exact" if lossless else "BIASED"
    print(f"{case.name:{width}s} {verdict:7s} {distance:8.1e}  "
          f"{case.checked:9s} {case.what}", flush=True)
    rows.append({"case": case.name, "what": case.what, "verdict":
                 verdict.lower(), "total_variation": distance,
                 "source": case.source, "checked": case.checked,
                 "advice": case.advice})
    wrong += [case.name] * (lossless != case.exact)
  if wrong:
    raise ValueError("the verdict differs from the expected one for "
                     f"{', '.join(wrong)}; see --case")
  common.write_csv(output_dir / f"{study}.csv", rows)
  common.finish(output_dir, study, {"rows": rows})


if __name__ == "__main__":
  common.run(main)
