"""Constraints on the output, from flags."""

from lib import progress
from specjax import constraints as constraints_lib
from specjax.data import Tokenizer
from specjax.utils import files


def check_flags(regex: str | None, schema: str | None):
  """Raises `ValueError` if both --regex and --json_schema are set."""
  if regex is not None and schema is not None:
    raise ValueError("--regex and --json_schema exclude each other, because "
                     "each constrains the complete output; leave one of the "
                     "two out")


def constraints(tokenizer: Tokenizer, vocab_size: int,
                ends: tuple[int, ...] | None, *, regex: str | None,
                schema: str | None, frequency: float, presence: float):
  """Returns the constraints that flags specify: automata, then penalties.

  Args:
    tokenizer: tokenizer of the target.
    vocab_size: vocabulary size V of the target.
    ends: end-of-text ids, or None.
    regex: regular expression of the output, or None.
    schema: path of a JSON schema of the output, or None.
    frequency: frequency penalty. 0 disables it.
    presence: presence penalty. 0 disables it.
  """
  found = []
  options = dict(vocab_size=vocab_size, banned=ends or ())
  if regex is not None or schema is not None:
    progress.say("building the automaton of the output")
  if regex is not None:
    found.append(constraints_lib.Automaton.from_regex(
        regex, tokenizer, **options))
  if schema is not None:
    found.append(constraints_lib.Automaton.from_json_schema(
        files.read_json(schema, "give a file with a JSON schema"), tokenizer,
        **options))
  if frequency or presence:
    found.append(constraints_lib.OutputPenalty(
        frequency=frequency, presence=presence))
  return tuple(found)
