"""Proofs that rules are lossless, and tests of samples against a distribution.
"""

from collections.abc import Callable
import functools
from typing import Any

import chex
import jax
import numpy as np
from numpy.typing import ArrayLike

from specjax import exact
from specjax.interfaces import Model
from specjax.interfaces import Verifier


def assert_lossless(verifier: Verifier, **kwargs: Any) -> exact.Certificate:
  """Raises `AssertionError` unless enumeration proves a rule lossless.

  Args:
    verifier: the rule.
    **kwargs: arguments of `exact.certify`.

  Returns:
    The certificate.

  Raises:
    AssertionError: the rule is not lossless. The message is the certificate.
  """
  certificate = exact.certify(verifier, **kwargs)
  if not certificate.lossless:
    raise AssertionError(f"{type(verifier).__name__} is {certificate}")
  return certificate


# Static models: equal models share their compiled program.
@functools.partial(jax.jit, static_argnums=0)
def _logits(model, params, texts):
  return model(params, texts).logits


def joint_law(model: Model, params: chex.ArrayTree, prompt: ArrayLike,
              horizon: int, transform: Callable[[jax.Array], jax.Array]
              ) -> np.ndarray:
  """Returns the joint distribution `[V**horizon]` of tokens after a prompt.

  Sequences are in lexicographic order. The passes have no cache, so that they
  share no code with the decoding loop.

  Args:
    model: the model.
    params: parameters of the model.
    prompt: token ids of the prompt.
    horizon: number of tokens after the prompt.
    transform: function from logits `[..., V]` to probabilities `[..., V]`.
  """
  size = model.vocab_size
  digits = np.indices((size,) * horizon).reshape(horizon, -1).T
  texts = np.concatenate(
      [np.tile(prompt, (len(digits), 1)), digits], axis=1).astype(np.int32)
  logits = _logits(model, params, texts)
  probs = np.asarray(transform(logits[:, len(prompt) - 1:-1]), np.float64)
  return np.take_along_axis(probs, digits[..., None], 2)[..., 0].prod(-1)


def chi_square(tokens: ArrayLike, law: np.ndarray, vocab_size: int) -> float:
  """Returns the p-value of a chi-square test of samples against `joint_law`.

  Args:
    tokens: `[n, horizon]` sampled sequences.
    law: `[V**horizon]` probabilities of all sequences. Sequences with an
      expected count below 10 are pooled.
    vocab_size: vocabulary size V.

  Raises:
    ValueError: the sample is too small for a test.
  """
  tokens = np.asarray(tokens)
  cells = tokens @ vocab_size ** np.arange(tokens.shape[1])[::-1]
  counts = np.bincount(cells, minlength=law.size)
  if counts[law == 0].any():
    return 0.0  # an outcome of probability 0
  expected = law / law.sum() * len(tokens)
  few = expected < 10
  counts, expected = (np.append(x[~few], x[few].sum())
                      for x in (counts, expected))
  kept = expected > 0
  if np.count_nonzero(law) == 1:
    return 1.0  # the only outcome
  if kept.sum() < 2:
    raise ValueError(f"{len(tokens)} sequences are too few to test a law of "
                     f"{np.count_nonzero(law)} outcomes; give more")
  statistic = ((counts - expected)[kept]**2 / expected[kept]).sum()
  # scipy.stats takes a second to import.
  import scipy.special  # pylint: disable=g-import-not-at-top
  return float(scipy.special.chdtrc(kept.sum() - 1, statistic))
