"""The options of all training methods, each as one flag.

What a method may set is told by its record, see `specjax.training.methods`: a
flag is there for every `Option`, and one that the chosen method does not have
is refused.
"""

from typing import Any

from absl import flags

from specjax.training import methods

# `--help` lists a flag with the script that asked for it, not with this file.
flags.disclaim_key_flags()


class Options:
  """The flags of the options that one field of the records holds."""

  def __init__(self, field: str):
    """Defines the flags.

    Args:
      field: "options", those of the objectives, or "head_options".
    """
    self._field = field
    options = dict.fromkeys(
        option for method in methods.METHODS
        for option in getattr(method, field))
    self.flags = {option.name: _flag(option) for option in options}

  def check(self, method: methods.Method) -> None:
    """Raises a `ValueError` where one is given that only others have."""
    taken = {option.name for option in getattr(method, self._field)}
    for name, flag in self.flags.items():
      if name not in taken and flag.present:
        raise ValueError(
            f"--{name} is {flag.value!r} and --method={method.name} "
            "has no such setting; leave it out, or see --help for the methods "
            "that have it")

  def values(self, method: methods.Method, own_text: bool) -> dict[str, Any]:
    """`{name: value}` of a method's own.

    Args:
      method: of the run.
      own_text: whether the target wrote the text to train on, for options that
        follow it.
    """
    values = {option.name: self.flags[option.name].value
              for option in getattr(method, self._field)}
    return {name: own_text if value is None else value
            for name, value in values.items()}


def _flag(option):
  """The flag of a method's `Option`."""
  kinds = {bool: flags.DEFINE_bool, type(None): flags.DEFINE_bool,
           int: lambda *x: flags.DEFINE_integer(*x, 1),
           str: flags.DEFINE_string,
           float: lambda *x: flags.DEFINE_float(*x, 0.0)}
  if option.choices:
    return flags.DEFINE_enum(
        option.name, option.default, option.choices, option.help)
  return kinds[type(option.default)](option.name, option.default, option.help)
