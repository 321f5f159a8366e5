"""Cost of verifying on a target with experts.

A pass over few tokens is bound by the bytes that it reads. A dense model reads
the same weights for every number of tokens. A model with experts reads the
union of the experts that the tokens choose, so every drafted token adds to the
cost of the pass, accepted or not. `pass_bytes` counts the weights of a pass for
a number of distinct experts. This number is measured (`distinct_experts`), or
expected if tokens choose independently (`expected_experts`).
"""

from typing import Any

import chex
import jax
import numpy as np
from numpy.typing import ArrayLike


def router_frequencies(routes: ArrayLike, count: int) -> np.ndarray:
  """Returns the share of tokens that choose each expert, `[..., E]`.

  Args:
    routes: `[..., T, k]` experts of T tokens, such as a row of
      `models.Transformer.routes`.
    count: number E of experts.

  Example:
    >>> print(router_frequencies([[0, 1], [0, 2]], count=4))
    [1.  0.5 0.5 0. ]
  """
  routes = np.asarray(routes)
  chosen = (routes[..., None] == np.arange(count)).any(-2)
  return chosen.mean(-2)


def distinct_experts(routes: ArrayLike) -> np.ndarray:
  """Returns the number `[...]` of distinct experts that N tokens choose.

  Args:
    routes: `[..., N, k]` experts of the N tokens of a pass, see
      `models.Transformer.routes`.

  Example:
    >>> print(distinct_experts([[[0, 1], [0, 2]], [[3, 1], [1, 3]]]))
    [3 2]
  """
  routes = np.asarray(routes)
  ids = np.sort(routes.reshape(*routes.shape[:-2], -1), axis=-1)
  return 1 + (np.diff(ids, axis=-1) > 0).sum(-1)


def expected_experts(frequencies: ArrayLike, tokens: int) -> np.ndarray:
  """Returns the expected number `[...]` of distinct experts of N tokens.

  The sum over experts of 1 - (1 - f)^N, if tokens choose independently. Tokens
  of one text choose similar experts, so the real number is usually smaller.

  Args:
    frequencies: `[..., E]` result of `router_frequencies`, or k / E for each
      expert of a router that is balanced perfectly.
    tokens: number N of tokens of the pass, over all rows.

  Example: Qwen3-30B-A3B chooses 8 of 128 experts.
    >>> [round(float(expected_experts([8 / 128] * 128, n))) for n in (1, 2, 8)]
    [8, 16, 52]
  """
  unused = (1 - np.asarray(frequencies, np.float64)) ** tokens
  return np.sum(1 - unused, axis=-1)


def pass_bytes(params: chex.ArrayTree, distinct: ArrayLike = 0.0) -> float:
  """Returns the number of bytes of the weights that one pass reads.

  The cache is not included. An embedding that is not also the LM head is not
  included, because only the rows of a few tokens are read. `pass_bytes` divided
  by a bandwidth is an entry of `pass_seconds` in `trees.best_tree`, which then
  chooses smaller trees for a target with experts.

  Args:
    params: parameters of a `models.Transformer`, arrays or shapes.
    distinct: number of distinct experts of the pass, the same in all layers or
      one number for each layer with experts.

  Example:
    >>> expert = lambda *shape: jax.ShapeDtypeStruct((4, *shape), np.float16)
    >>> pass_bytes({"mlp_0": {"router": np.ones((8, 4), np.float16),
    ...                       "expert_gate_up": expert(8, 6),
    ...                       "expert_down": expert(3, 8)}}, distinct=2)
    352.0
  """
  total, mean = 0.0, float(np.mean(distinct))

  def add(path: Any, x: jax.Array) -> None:
    nonlocal total
    name = path[-1].key if hasattr(path[-1], "key") else ""
    if name == "embedding" and "head" in params:
      return
    share = mean / x.shape[0] if str(name).startswith("expert_") else 1
    total += share * x.size * np.dtype(x.dtype).itemsize

  jax.tree_util.tree_map_with_path(add, params)
  return total
