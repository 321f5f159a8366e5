"""Flags for the options of all training methods.

Each `Option` of a `specjax.methods.Method` defines one flag. `Options.check`
rejects a flag if the chosen method does not have this option.
"""

from typing import Any

from absl import flags

from lib import flags as shared
from specjax import methods

# `--help` lists a flag under the script that defines it, not under this file.
flags.disclaim_key_flags()


class Options:
  """Flags for the options of the objectives or for those of the heads."""

  def __init__(self, field: str) -> None:
    """Defines the flags.

    Args:
      field: "options" for the objectives, "head_options" for the heads.
    """
    self._field = field
    options = dict.fromkeys(
        option for method in methods.available()
        for option in getattr(method, field))
    self.flags = {option.name: _flag(option) for option in options}

  def check(self, method: methods.Method) -> None:
    """Raises `ValueError` if a flag is set that the method does not have."""
    taken = {option.name for option in getattr(method, self._field)}
    shared.reject_unread((name for name in self.flags if name not in taken),
                         f"--method={method.name}")

  def values(self, method: methods.Method, own_text: bool) -> dict[str, Any]:
    """Returns `{name: value}` of the options of a method.

    Args:
      method: training method.
      own_text: True if the target generates the training text. Options whose
        value is None get this value.
    """
    values = {option.name: self.flags[option.name].value
              for option in getattr(method, self._field)}
    return {name: own_text if value is None else value
            for name, value in values.items()}


def _flag(option: methods.Option) -> flags.FlagHolder:
  """Defines the flag for an `Option`."""
  kinds = {bool: flags.DEFINE_bool, type(None): flags.DEFINE_bool,
           int: lambda *x: flags.DEFINE_integer(*x, 1),
           str: flags.DEFINE_string,
           float: lambda *x: flags.DEFINE_float(*x, 0.0)}
  if option.choices:
    return flags.DEFINE_enum(
        option.name, option.default, option.choices, option.help)
  return kinds[type(option.default)](option.name, option.default, option.help)
