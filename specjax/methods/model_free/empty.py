"""Autoregressive decoding: a drafter without drafts."""

from specjax import verifiers
from specjax.decoding.rounds_by_length import Empty
from specjax.methods.strategy import Strategy


def autoregressive() -> Strategy:
  """Decodes with the target alone, one token per pass.

  >>> autoregressive().drafter.num_nodes  # the root alone
  1
  """
  return Strategy(Empty(), verifiers.Token())
