"""What flags ask of a text, as constraints."""

from lib import progress
from specjax import constraints as constraints_lib
from specjax.data import Tokenizer
from specjax.utils import files


def check_flags(regex: str | None, schema: str | None):
  """Refuses two expressions for one output."""
  if regex is not None and schema is not None:
    raise ValueError("--regex and --json_schema both say what the whole output "
                     "is; leave one of the two out")


def constraints(tokenizer: Tokenizer, vocab_size: int,
                ends: tuple[int, ...] | None, *, regex: str | None,
                schema: str | None, repetition: float, frequency: float,
                presence: float):
  """The constraints of the flags, the hardest first.

  Args:
    tokenizer: the target's.
    vocab_size: the target's V.
    ends: token ids that end a row, or None.
    regex: an expression for the output, or None.
    schema: path of a JSON schema, or None.
    repetition: the repetition penalty; 1: none.
    frequency: the frequency penalty.
    presence: the presence penalty.
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
  if repetition != 1:
    found.append(constraints_lib.Repetition(penalty=repetition))
  if frequency or presence:
    found.append(constraints_lib.OutputPenalty(
        frequency=frequency, presence=presence))
  return tuple(found)
