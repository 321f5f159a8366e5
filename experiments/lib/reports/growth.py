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

No pair of models exceeds the ratio (1 + gamma) / 2. Both verifiers accept the
first token with the same probability d, and E[s] never increases. So the ratio
is at most (1 + gamma d) / (1 + d).
"""

import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize

from lib.figures import style

_POINTS = 400  # the grid of s in `walk` has the step 1 / _POINTS
GAMMAS = (16, 64, 256, 1024, 4096)


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
  """Returns the largest ratio over all models, to about three decimals.

  Consider the largest expected value of the total s - lambda t over all models.
  The supremum of the ratio is the largest lambda for which this value is
  positive. Dynamic programming computes the value on a grid of s and u = t / s,
  both in [0, 1]. A move replaces s by a random s' with mean at most s. The
  distribution of s' is one point below s, or two points around s. If s' < s, t
  changes by the same factor, so u is constant. If s' > s, t is constant.

  Values between grid points in u are interpolated, so the result is neither a
  lower nor an upper bound. Its error is proportional to the square of the grid
  width. If `two_phase` is larger, its value is returned instead.

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


def table() -> list[dict]:
  """Prints and returns the ratios of explicit pairs up to gamma 4,096."""
  print("\nGrowth of the largest ratio: an explicit pair, the simple pair, "
        "and the bound (1 + gamma) / 2:")
  print(f"{'gamma':>6s} {'explicit':>9s} {'/ gamma':>8s} {'two-phase':>9s} "
        f"{'bound':>8s}")
  rows = []
  for gamma in GAMMAS:
    row = dict(gamma=gamma, ratio=walk(gamma), two_phase=two_phase(gamma),
               bound=(1 + gamma) / 2)
    rows.append(row)
    print(f"{gamma:6d} {row['ratio']:9.3f} {row['ratio'] / gamma:8.4f} "
          f"{row['two_phase']:9.3f} {row['bound']:8.1f}", flush=True)
  return rows


def plot(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
  """Plots the ratios of the explicit and two-phase pairs, divided by gamma."""
  figure, [[axes]] = style.panels()
  gammas = [row["gamma"] for row in rows]
  for name, label, color in zip(("ratio", "two_phase"), (
      "explicit pairs", "simple pairs"), style.shades(2)):
    axes.plot(gammas, [row[name] / row["gamma"] for row in rows], marker="o",
              color=color, label=label)
  axes.set(xlabel="draft length gamma", ylabel="(block / token) / gamma",
           ylim=(0, None))
  style.tried(axes, gammas)
  style.save(figure, path, "The largest ratio of tokens in one round grows "
             "linearly in gamma")
