"""`Strategy`, a pair of a drafter and a verifier, and default rules."""

from typing import Any
from typing import NamedTuple

from specjax import verifiers
from specjax.decoding.decoder import Decoder
from specjax.interfaces import Drafter
from specjax.interfaces import Model
from specjax.interfaces import Verifier
from specjax.methods import stop_rules

TOKEN, BLOCK = verifiers.Token(), verifiers.Block()
TRAVERSAL = verifiers.Traversal()
STOP = stop_rules.Adaptive()


class Strategy(NamedTuple):
  """Pair of a drafter and the verifier of its drafts."""

  drafter: Drafter
  verifier: Verifier

  def decoder(self, target: Model, **options: Any) -> Decoder:
    """Returns a decoder with this drafter and verifier.

    Args:
      target: target model. Its parameters are arguments of decoding calls.
      **options: other attributes of `Decoder`, such as `transform` and `eos`.
    """
    return Decoder(target=target, drafter=self.drafter, verifier=self.verifier,
                   **options)


def with_default_rule(drafter: Drafter, verifier: Verifier | None = None
                      ) -> Strategy:
  """Returns a strategy with a verifier; None means the drafter's default rule.
  """
  if verifier is None and "deterministic" in drafter.provides:
    verifier = verifiers.TargetWalk()
  return Strategy(drafter, verifier or (
      BLOCK if "chain" in drafter.provides else TRAVERSAL))
