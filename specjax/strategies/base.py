"""The pair that a strategy is, and the rules that most methods share."""

from typing import NamedTuple

from specjax import verifiers
from specjax.types import Drafter
from specjax.types import Verifier

TOKEN, BLOCK = verifiers.Token(), verifiers.Block()
TRAVERSAL = verifiers.Traversal()


class Strategy(NamedTuple):
  """A drafter and the verifier that judges its drafts."""

  drafter: Drafter
  verifier: Verifier
