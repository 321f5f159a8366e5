"""Autoregressive decoding as a strategy whose drafter proposes no tokens."""

from specjax import verifiers
from specjax.decoding.rounds_by_length import Empty
from specjax.methods.strategy import Strategy


def autoregressive() -> Strategy:
  """Returns the strategy that decodes one token per pass of the target.

  Its drafts consist of the root, the last committed token.

  >>> autoregressive().drafter.num_nodes  # the root alone
  1
  """
  return Strategy(Empty(), verifiers.Token())
