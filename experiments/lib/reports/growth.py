"""Largest gain of block over token verification, as a function of gamma.

gamma is the draft length. p and q are the distributions of target and drafter.
Let s and t be the probabilities that the draft so far survives block and token
verification. Let r = p(x)/q(x) be the ratio of the next token x. Block
verification updates s to min(1, s r). Token verification multiplies t by
min(1, r). The models matter only through the distribution of r, which must
satisfy one linear constraint, E_q[r] <= 1. So a distribution on two points is
sufficient. A vocabulary of two tokens is sufficient if the models depend on
their context.

The ratio of expected tokens, block over token, grows linearly in gamma. `walk`
computes the ratio for an explicit pair of models. In this pair, the first token
has probability 1 under q and d under p. Then s changes by +m or -m, each with
probability 1/2 under q. So r = 1 + m/s or 1 - m/s, and E[s] is constant. But
every step down multiplies t by a factor below 1.

The step sizes are m_k = c (k + k0)^-a with 1/2 < a < 1. The sum of m_k^2 is
finite. So for small c, s stays away from 0 and 1 with positive probability, and
block verification accepts at least a constant times gamma tokens in
expectation. Also, E[t_k] <= exp(-b k^(1 - a)), and the sum over k is finite. So
the expected number of tokens that token verification accepts is bounded.

No pair of models exceeds the ratio B(gamma) of `ratio_bound`, which is about
(gamma + 2) / 4. The exact value of lim sup (largest ratio) / gamma is not
known. `constant` approximates it.
"""

import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
import scipy.sparse.linalg

from lib.figures import style

_POINTS = 400  # the grid of s in `walk` has the step 1 / _POINTS
GAMMAS = (16, 64, 256, 1024, 4096)
GRIDS = ((20, 1e-4), (40, 1e-4), (20, 1e-5), (40, 1e-5))  # of `constant`


def two_phase(gamma: int) -> float:
  """Returns the ratio of the best two-phase ("simple") pair, in closed form.

  The first token has probability 1 under q and d under p. The second token
  restores s = 1 with probability d and otherwise ends the block. After that,
  p = q. The ratio is (1 + gamma d) / (1 + d + (gamma - 1) d^2), and the best d
  is 1 / (1 + w) with w = sqrt(1 + gamma).
  """
  w = math.sqrt(1 + gamma)
  return (1 + w)**2 / (3 + 2 * w)


def walk(gamma: int, d: float = 0.2, e: float = 0.9, c: float = 0.6,
         k0: float = 8, a: float = 0.7) -> float:
  """Returns the ratio of an explicit pair of models, linear in gamma.

  The docstring of the module describes the pair and the parameters. Values of s
  and steps are multiples of 1 / 400, and no step leaves [0, 1]. At s = 1, the
  next token has probability 1 under q and e under p. The default parameters are
  the result of a coarse search at gamma = 4,096.
  """
  index = np.arange(_POINTS + 1)
  # P(s = i / _POINTS), and E[t; s = i / _POINTS].
  mass, token = np.zeros(_POINTS + 1), np.zeros(_POINTS + 1)
  start, back = round(d * _POINTS), round(e * _POINTS)
  mass[start], token[start] = 1, start / _POINTS
  accepted = np.zeros(2)
  for k in range(1, gamma + 1):
    accepted += mass @ index / _POINTS, token.sum()
    step = max(1, round(_POINTS * c / (k + k0)**a))
    step = np.minimum(step, np.minimum(index, _POINTS - index))
    inner = 0.5 * (step > 0)
    down = 1 - step / np.maximum(index, 1)
    move = lambda up, low, step=step: (
        np.bincount(index + step, up, _POINTS + 1)
        + np.bincount(index - step, low, _POINTS + 1))
    ends, ends_token = mass[-1], token[-1]
    mass = move(inner * mass, inner * mass)
    token = move(inner * token, inner * token * down)
    mass[back] += ends
    token[back] += ends_token * back / _POINTS
  return (1 + accepted[0]) / (1 + accepted[1])


def supremum(gamma: int, points: int = 96) -> float:
  """Returns an approximation of the largest ratio over all models.

  Consider the largest expected value of the total s - lambda t over all models.
  The supremum of the ratio is the largest lambda for which this value is
  positive. Dynamic programming computes the value on a grid of s and u = t / s,
  both in [0, 1]. A move replaces s by a random s' with mean at most s. The
  distribution of s' is one point below s, or two points around s. If s' < s, t
  changes by the same factor, so u is constant. If s' > s, t is constant.

  Values between grid points in u are interpolated, so the result is neither a
  lower nor an upper bound. With 48 points instead of 96, it changes by less
  than 1e-4 for gamma 2, 3, 4 and 8. If `two_phase` is larger (gamma 2 and 4),
  its value is returned instead. `two_phase` is the exact supremum for gamma 2
  and 3 (docs/results/several_rounds_proofs.md), and the grid value for gamma 3
  is 1.3e-8 above it.

  Args:
    gamma: draft length.
    points: number of intervals of the grid of s. The grid of u has twice as
      many.
  """
  s = jnp.linspace(0, 1, points + 1)
  u = jnp.linspace(0, 1, 2 * points + 1)

  def improve(value, lam):
    # gain[i, j, k]: payoff of the move from s_i, u_k to s_j plus later value.
    up = jnp.minimum(1, s[:, None] / jnp.maximum(s, 1e-9))  # u' / u
    new_u = up[..., None] * u
    after = jax.vmap(lambda row, at: jnp.interp(at.reshape(-1), u, row),
                     (0, 1))(value, new_u)
    after = after.reshape(len(s), len(s), len(u)).swapaxes(0, 1)
    gain = s[:, None] * (1 - lam * new_u) + after
    below = s[None, :] <= s[:, None]
    best = jnp.max(jnp.where(below[..., None], gain, -jnp.inf), axis=1)

    def split(best, high):
      # Probability of s_high in a distribution on s_low and s_high with mean s.
      weight = (s[:, None] - s) / jnp.maximum(s[high] - s, 1e-9)
      both = (1 - weight[..., None]) * gain + (
          weight[..., None] * gain[:, high, None])
      allowed = below & (s[:, None] < s[high])
      both = jnp.max(jnp.where(allowed[..., None], both, -jnp.inf), axis=1)
      return jnp.maximum(best, both), None

    return jax.lax.scan(split, best, jnp.arange(1, len(s)))[0]

  @jax.jit
  def game(lam):
    value = jnp.zeros((len(s), len(u)))
    value = jax.lax.fori_loop(0, gamma, lambda _, v: improve(v, lam), value)
    return 1 - lam + value[-1, -1]

  with jax.enable_x64(True):
    found = scipy.optimize.brentq(lambda lam: float(game(lam)), 1.0,
                                  1.0 + gamma, xtol=1e-7)
  return max(found, two_phase(gamma))


def ratio_bound(gamma: int) -> float:
  """Returns B(gamma), an upper bound on the ratio over all models.

  B(gamma) is the maximum of (1 + gamma x) / (1 + x + ... + x^gamma) over x in
  [0, 1]. It is 2 / sqrt(3) for gamma = 2, which is the supremum of the ratio.
  For large gamma it is about (gamma + 2) / 4. The proof is in
  docs/results/several_rounds_proofs.md.
  """
  powers = np.arange(gamma + 1)
  # A linear function divided by a convex one has a single local maximum.
  found = scipy.optimize.minimize_scalar(
      lambda x: -(1 + gamma * x) / (x**powers).sum(), bounds=(0, 1),
      method="bounded", options=dict(xatol=1e-10))
  return -float(found.fun)


def constant(points: int, cutoff: float, columns: int = 80) -> float:
  """Returns an approximation of lim sup (largest ratio) / gamma.

  For large gamma, the ratio exceeds c gamma for some models if
  E[lim s] > c (1 + sum of E[t]). Let U(s, m) be the supremum over all models of
  E[lim s - sum of later m], where m = c t. Then U(1, c) = c determines c, and

    U(s, m) = sup over r of E[U(min(1, s r), m min(1, r)) - m min(1, r)],
    U(s, 0) = s,  E[r] <= 1.

  Policy iteration computes U on a grid of s and m / s. The moves are those of
  `supremum`: to one point below s, or to two points around s.

  The result is not a bound. A finer grid of s allows smaller steps and
  increases the result. A smaller cutoff decreases it, because m below the
  cutoff costs nothing.

  Args:
    points: number of intervals of the grid of s.
    cutoff: smallest positive value of m / s. Smaller values count as 0.
    columns: number of positive values of m / s, a geometric sequence up to 1/4.
      c is at most 1/4, because `ratio_bound` / gamma has this limit.
  """
  s = np.linspace(0, 1, points + 1)
  v = np.concatenate([[0], np.geomspace(cutoff, 0.25, columns)])  # m / s
  # Move from s_i, v_k to s_j: the new v is between v[right - 1] and v[right].
  new_v = v * np.minimum(1, s[:, None] / np.maximum(s, 1e-12))[..., None]
  right = np.clip(np.searchsorted(v, new_v), 1, columns)
  part = np.where(right == 1, new_v >= cutoff,
                  (new_v - v[right - 1]) / (v[right] - v[right - 1]))
  cost = new_v * s[:, None]
  i, k = np.arange(points + 1)[:, None], np.arange(columns + 1)
  states = np.arange((points + 1) * (columns + 1)).reshape(points + 1, -1)
  known = (i == 0) | (k == 0)  # where U(s, m) = s

  def best_moves(value):
    """Returns `(low, high, weight)`: s moves to s_high with this probability.
    """
    to = value[i, right - 1] * (1 - part) + value[i, right] * part - cost
    to_low = np.where((i.T <= i)[..., None], to, -np.inf)
    best, low = to_low.max(1), to_low.argmax(1)
    high, weight = low.copy(), np.zeros(low.shape)
    for j in range(2, points + 1):
      share = (s[1:j, None] - s[:j]) / (s[j] - s[:j])  # [i, low], mean s_i
      both = to_low[1:j, :j] * (1 - share[..., None]) + (
          to[1:j, j, None] * share[..., None])
      lowest = both.argmax(1)
      largest = np.take_along_axis(both, lowest[:, None], 1)[:, 0]
      better = largest > best[1:j]
      for array, new in ((best, largest), (low, lowest), (high, j),
                         (weight, np.take_along_axis(share, lowest, 1))):
        array[1:j] = np.where(better, new, array[1:j])
    return low, high, weight

  def evaluate(low, high, weight):
    """Returns U if the moves are fixed, by a sparse linear system."""
    moves, total = 0, np.where(known, s[:, None], 0)
    for j, share in ((low, 1 - weight), (high, weight)):
      share = np.where(known, 0, share)
      total = total - share * cost[i, j, k]
      for shift, chance in ((-1, 1 - part[i, j, k]), (0, part[i, j, k])):
        to = states[j, right[i, j, k] + shift]
        moves = moves + scipy.sparse.csr_matrix(
            ((share * chance).reshape(-1),
             (states.reshape(-1), to.reshape(-1))),
            shape=(states.size, states.size))
    return scipy.sparse.linalg.spsolve(
        (scipy.sparse.identity(states.size) - moves).tocsc(),
        total.reshape(-1)).reshape(states.shape)

  value, change = np.where(known, s[:, None], 0), 1.0
  while change > 1e-9:
    before, value = value, evaluate(*best_moves(value))
    change = np.abs(value - before).max()
  return float(np.interp(0, v - value[-1], v))


def table() -> list[dict]:
  """Prints and returns the ratios of explicit pairs up to gamma 4,096."""
  print("\nGrowth of the largest ratio: an explicit pair, the simple pair, "
        "and the bound B(gamma):")
  print(f"{'gamma':>6s} {'explicit':>9s} {'/ gamma':>8s} {'two-phase':>9s} "
        f"{'bound':>9s}")
  rows = []
  for gamma in GAMMAS:
    row = dict(gamma=gamma, ratio=walk(gamma), two_phase=two_phase(gamma),
               bound=ratio_bound(gamma))
    rows.append(row)
    print(f"{gamma:6d} {row['ratio']:9.3f} {row['ratio'] / gamma:8.4f} "
          f"{row['two_phase']:9.3f} {row['bound']:9.3f}", flush=True)
  return rows


def constants() -> list[dict]:
  """Prints and returns approximations of lim sup (largest ratio) / gamma."""
  print("\nlim sup of (largest ratio) / gamma, approximated on grids (not a "
        "bound):")
  print(f"{'step of s':>9s} {'cutoff':>7s} {'constant':>8s}")
  rows = []
  for points, cutoff in GRIDS:
    row = dict(points=points, cutoff=cutoff, constant=constant(points, cutoff))
    rows.append(row)
    print(f"{f'1/{points}':>9s} {cutoff:7.0e} {row['constant']:8.4f}",
          flush=True)
  return rows


def plot(rows: list[dict[str, Any]], suprema: dict[int, float],
         path: pathlib.Path) -> None:
  """Plots ratios of explicit pairs, suprema and the bound by gamma.

  Args:
    rows: result of `table`.
    suprema: results of `supremum` by gamma.
    path: path of the figure.
  """
  figure, [[axes]] = style.panels()
  gammas = sorted({*suprema, *(row["gamma"] for row in rows)})
  curves = (
      ("bound B(gamma)", {g: ratio_bound(g) for g in gammas}),
      ("supremum (grid)", suprema),
      ("explicit pairs", {row["gamma"]: row["ratio"] for row in rows}),
      ("simple pairs", {row["gamma"]: row["two_phase"] for row in rows}))
  for (label, curve), look in zip(curves, style.looks(len(curves))):
    axes.plot(sorted(curve), [curve[g] for g in sorted(curve)], markersize=4,
              label=label, **look)
  axes.set(xlabel="draft length gamma", ylabel="block over token")
  axes.set_yscale("log", base=2)
  axes.yaxis.set_major_formatter("{x:g}")
  style.tried(axes, gammas)
  axes.tick_params(axis="x", rotation=60)
  style.save(figure, path, "The largest ratio of tokens in one round grows "
             "linearly in gamma")
