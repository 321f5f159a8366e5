"""Rejects a misspelt flag before jax is imported, which takes seconds.

A script declares its flags after it has imported jax. So the names are read
from the source code: of all scripts and libraries that declare flags. A flag of
another script is rejected later, by absl.
"""

import difflib
import importlib.util
import pathlib
import re
import sys

from absl import app  # noqa: F401  # defines flags of all absl programs
from absl import flags
from absl import logging  # noqa: F401

_EXPERIMENTS = pathlib.Path(__file__).resolve().parents[1]
_OF_LIBRARIES = "help", "experimental_orbax"  # prefixes of other flags
_DECLARED = re.compile(r'\b(?:DEFINE_\w+|Option|directory)\(\s*"(\w+)"')


def known() -> set[str]:
  """Returns the names of all flags that any script declares."""
  # This finds the package without importing it.
  [package] = importlib.util.find_spec("specjax").submodule_search_locations
  sources = [*_EXPERIMENTS.glob("*.py"), *_EXPERIMENTS.glob("lib/**/*.py"),
             *pathlib.Path(package).glob("methods/**/*.py")]
  return {*flags.FLAGS, *(name for path in sources for name in
                          _DECLARED.findall(path.read_text("utf-8")))}


def check(arguments: list[str]) -> None:
  """Ends the program if no script declares a flag of the command line.

  Args:
    arguments: command line without the name of the program.
  """
  if any(arg.lstrip("-").startswith("undefok") for arg in arguments):
    return
  names, before = known(), ""
  for arg in arguments:
    # This argument may be the value of a flag without "=".
    may_be_value = before.startswith("-") and "=" not in before
    before = arg
    if not arg.startswith("-") and may_be_value:
      continue
    if not arg.startswith("-") or arg == "--":
      return
    name = arg.lstrip("-").partition("=")[0]
    if not (may_be_value or name in names or name.startswith(_OF_LIBRARIES)
            or name.removeprefix("no") in names):
      sys.exit("error: " + str(flags.UnrecognizedFlagError(
          name, suggestions=difflib.get_close_matches(
              name, names, cutoff=0.75))) + "; see --help")
