"""Interface of a configuration: one way to continue prompts in a study."""

import abc
from collections.abc import Hashable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

Request = tuple[Sequence[int], int, int]  # token ids, seed, request id
Run = dict[str, Any]  # measurements of one rollout, JSON-serialisable


class Configuration(abc.ABC):
  """Decoder or other generator that a study compares with others.

  Attributes:
    program: key of the compiled code. Configurations with equal keys share
      their compiled code.
  """

  program: Hashable

  @abc.abstractmethod
  def compile(self, prompt: Any) -> None:
    """Compiles all programs that a rollout of this prompt needs."""

  @abc.abstractmethod
  def decode(self, prompt: Any, seed: Any, request_id: int) -> Run:
    """Continues one prompt alone and returns measurements of the rollout."""

  def decode_rows(self, requests: Sequence[Request]
                  ) -> Iterator[tuple[int, Run]]:
    """Continues several prompts, by default one after the other.

    Args:
      requests: arguments of `decode` for each prompt.

    Yields:
      Index of a request and its measurements, in order of completion.
    """
    for index, request in enumerate(requests):
      yield index, self.decode(*request)
