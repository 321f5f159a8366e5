"""`Strategy`, a drafter with its verifier, and default verification rules."""

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
  """A drafter, and the verifier that decides which of its tokens are accepted.
  """

  drafter: Drafter
  verifier: Verifier

  def decoder(self, target: Model, **options: Any) -> Decoder:
    """Returns a decoder with this drafter and verifier.

    Args:
      target: target model; its parameters are passed when decoding.
      **options: other attributes of `Decoder`, such as `transform` and `eos`.
    """
    return Decoder(target=target, drafter=self.drafter, verifier=self.verifier,
                   **options)
