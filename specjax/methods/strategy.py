"""The pair that a strategy is, and the rules that methods share."""

from typing import NamedTuple

from specjax import verifiers
from specjax.methods import stop_rules
from specjax.types import Drafter
from specjax.types import Verifier

TOKEN, BLOCK = verifiers.Token(), verifiers.Block()
TRAVERSAL = verifiers.Traversal()
STOP = stop_rules.Adaptive()


class Strategy(NamedTuple):
  """A drafter and the verifier that judges its drafts."""

  drafter: Drafter
  verifier: Verifier
