"""Rules and drafters that are not part of specjax.

A value of --verifier or --drafter may be FILE.py:NAME, an object in a Python
file, or a name that an installed package declares (`utils.entry_points`):

  rule     subclass of `specjax.Verifier`, an instance, or a function without
           arguments that returns an instance
  drafter  function `(target)`, `(target, gamma)` or `(target, gamma, nodes)`
           that returns `(strategy, params)`. `target` is the loaded target with
           the attributes `model`, `params` and `tokenizer`, `gamma` and `nodes`
           are the flags. `params` become the parameters `params["drafter"]`

All errors name the flag, the file and the line. Stored results depend on the
text of the file, so that they are measured again after a change
(`sources`).
"""

import ast
from collections.abc import Callable
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import os
import pathlib
import sys
import traceback
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

import specjax as sj
from specjax import interfaces
from specjax.interfaces import binding
from specjax.models import Pretrained
from specjax.strategies import Strategy
from specjax.utils import entry_points
from specjax.utils import fields

FORM = "FILE.py:NAME"
_SETTINGS = ("gamma", "nodes")  # optional parameters of a drafter's function
# Files and package directories of own code, each with the flag that named it.
_OWN: dict[str, str] = {}


@dataclasses.dataclass(frozen=True)
class _Named:
  """Object of a flag. `place` describes the flag and the object's line."""

  value: Any
  place: str


def group(flag: str) -> str:
  """Returns the entry-point group of a flag, such as "--drafter"."""
  return "specjax.drafters" if flag == "--drafter" else "specjax.verifiers"


def is_own(flag: str, value: str) -> bool:
  """Returns True if a value names an object that is not part of specjax."""
  return ".py:" in value or value in entry_points.names(group(flag))


def verifier(flag: str, value: str) -> sj.Verifier:
  """Returns the rule that a flag names.

  Args:
    flag: name of the flag, such as "--verifier".
    value: value for which `is_own` is True.

  Raises:
    ValueError: the object does not exist, raises an exception, or is not a
      rule. `law` is traced once, so a rule whose `law` raises is also an error.
  """
  named = _load(flag, value)
  rule = named.value
  wanted = ("it must be a subclass of specjax.Verifier, an instance, or a "
            "function without arguments that returns an instance")
  if not isinstance(rule, sj.Verifier):
    if not callable(rule):
      raise ValueError(f"{named.place} is {_kind(rule)}; {wanted}")
    try:
      rule = _called(named, rule)
    except ValueError as e:
      raise ValueError(f"{e}; {wanted}") from None
    if not isinstance(rule, sj.Verifier):
      raise ValueError(f"{named.place} returned {_kind(rule)}; {wanted}")
  try:
    interfaces.check_verifier(rule)
    fields.check_hashable("verifier", rule)
    _check_repr(rule)
    jax.eval_shape(lambda: _evaluated(rule))
  except Exception as e:
    raise ValueError(f"{named.place}: {_reason(e)}") from None
  return rule


def check_drafter(value: str) -> None:
  """Raises `ValueError` if a value of --drafter names no suitable function."""
  _parameters(_load("--drafter", value))


def drafter(value: str, target: Pretrained, read: Callable[[str], Any]
            ) -> tuple[Strategy, Any]:
  """Returns the strategy and the parameters of a drafter.

  Args:
    value: value of --drafter for which `is_own` is True.
    target: loaded target.
    read: function from "gamma" or "nodes" to the value of the flag.

  Raises:
    ValueError: the function does not exist, raises an exception, or returns
      something else.
  """
  named = _load("--drafter", value)
  settings = {name: read(name) for name in _parameters(named)
              if name in _SETTINGS}
  found = _called(named, named.value, target, **settings)
  wanted = ("it must return (strategy, params), a specjax.strategies.Strategy "
            "and the drafter's parameters")
  if isinstance(found, Strategy) or not (
      isinstance(found, tuple) and len(found) == 2
      and isinstance(found[0], Strategy)):
    shown = (", ".join(map(_kind, found)) if type(found) is tuple
             else _kind(found))
    raise ValueError(f"{named.place} returned {shown}; {wanted}")
  strategy, params = found
  try:
    binding.check_drafter(strategy.drafter)
    _check_repr(strategy.drafter)
    interfaces.check_pair(strategy.verifier, strategy.drafter)
    strategy.decoder(target.model)
  except Exception as e:
    raise ValueError(f"{named.place}: {_reason(e)}") from None
  return strategy, params


def _parameters(named: _Named) -> tuple[str, ...]:
  """Returns the parameters of a drafter's function after the target."""
  wanted = ("it must be a function (target), (target, gamma) or (target, "
            "gamma, nodes) that returns (strategy, params)")
  if not callable(named.value) or isinstance(named.value, type):
    raise ValueError(f"{named.place} is {_kind(named.value)}; {wanted}")
  names = list(inspect.signature(named.value).parameters.values())
  required = [x.name for x in names[1:] if x.default is x.empty
              and x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
  if not names or not set(required) <= set(_SETTINGS):
    raise ValueError(
        f"{named.place} has the parameters "
        f"({', '.join(x.name for x in names)}); {wanted}")
  return tuple(x.name for x in names[1:])


def sources(settings: Any) -> list[str]:
  """Returns hashes of the files with the own code of rules and drafters.

  The list is empty if all of them are part of specjax. It contains the files of
  the classes, and not those of modules that they import.

  Args:
    settings: tree of rules, drafters, strategies and other values.
  """
  found = {}
  for leaf in jax.tree.leaves(settings, is_leaf=lambda x: x is None):
    for part in binding.contained(leaf):
      kind = part if inspect.isroutine(part) else type(part)
      module = sys.modules.get(getattr(kind, "__module__", None) or "")
      path = getattr(module, "__file__", None)
      if path is not None and _owner(path):
        found[path] = hashlib.sha256(pathlib.Path(path).read_bytes()
                                     ).hexdigest()[:16]
  return [found[path] for path in sorted(found)]


def explained(e: BaseException) -> str | None:
  """Returns a message for an exception that own code raised, or None.

  It names the flag, the file and the line of the innermost own function.
  """
  for frame in reversed(traceback.extract_tb(e.__traceback__)):
    flag = _owner(frame.filename)
    if flag is not None:
      return f"{flag}: {_at(frame)}{type(e).__name__}: {_text(e)}"
  return None


def _load(flag: str, value: str) -> _Named:
  """Returns the object of a flag's value."""
  shown = f"{flag}={value}"
  file, _, name = value.rpartition(":")
  if value in entry_points.names(group(flag)):
    try:
      found = entry_points.load(group(flag), value)
    except Exception as e:
      raise ValueError(
          f"{shown} is {entry_points.described(group(flag), value)}, which "
          f"cannot be imported: {_reason(e)}") from None
    name = getattr(found, "__module__", None) or type(found).__module__
    root = sys.modules[name.split(".")[0]]
    path = getattr(root, "__file__", None) or sys.modules[name].__file__
    _OWN[path.removesuffix(f"{os.sep}__init__.py")] = shown
    return _Named(found, f"{shown} "
                         f"({entry_points.described(group(flag), value)})")
  path = pathlib.Path(file).resolve()
  if not path.is_file():
    raise ValueError(f"{shown}: the file {file} does not exist; give {FORM}")
  text = path.read_bytes()
  _OWN[str(path)] = shown
  try:
    module = _module(path, text)
  except SyntaxError as e:
    raise ValueError(f"{shown}: {file} line {e.lineno} is not Python: {e.msg}"
                     ) from None
  except (Exception, SystemExit) as e:
    raise ValueError(f"{shown}: {_reason(e)}") from None
  if not hasattr(module, name):
    defined = [x.name for x in ast.parse(text).body
               if isinstance(x, ast.ClassDef | ast.FunctionDef)]
    raise ValueError(f"{shown}: {file} defines no {name!r}; give {FORM}, with "
                     f"one of its names: {', '.join(defined) or 'none'}")
  line = next((x.lineno for x in ast.walk(ast.parse(text)) if (
      getattr(x, "name", None) == name or getattr(x, "id", None) == name
      and isinstance(x.ctx, ast.Store))), 1)
  return _Named(getattr(module, name), f"{shown} ({file} line {line})")


@functools.cache
def _module(path: pathlib.Path, text: bytes) -> ModuleType:
  """Imports a file. A file with another text is imported again."""
  # The name differs from that of every package, which the file may import.
  name = f"own_{path.stem}_{hashlib.sha256(text).hexdigest()[:8]}"
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  if str(path.parent) not in sys.path:
    sys.path.append(str(path.parent))  # for modules beside the file
  sys.modules[name] = module  # dataclasses look up their module
  spec.loader.exec_module(module)
  return module


def _called(named: _Named, function: Callable, *args: Any, **kwargs: Any):
  try:
    return function(*args, **kwargs)
  except Exception as e:
    raise ValueError(f"{named.place} cannot be called: {_reason(e)}") from None


def _evaluated(rule: sj.Verifier) -> sj.Law:
  """Evaluates a rule on a chain of three tokens, to trace `law`."""
  gamma, size = 3, 5
  flat = jnp.full((gamma + 1, size), 1 / size)
  draft = sj.Draft.chain(jnp.int32(0), jnp.arange(gamma), flat[1:])
  return rule.evaluate(draft, flat)


def _check_repr(part: Any) -> None:
  """Rejects objects that `utils.fingerprints` cannot identify."""
  if " at 0x" in repr(part):
    raise ValueError(f"{type(part).__name__} has the repr {part!r}, which "
                     "differs between runs; make it a frozen dataclass with "
                     "plain values as fields")


def _owner(path: str) -> str | None:
  """Returns the flag that named the own code in a file, or None."""
  path = pathlib.Path(path)
  return next((_OWN[str(x)] for x in (path, *path.parents) if str(x) in _OWN),
              None)


def _reason(e: BaseException) -> str:
  """Returns the text of an exception, with the innermost own line."""
  frames = [frame for frame in traceback.extract_tb(e.__traceback__)
            if _owner(frame.filename)]
  kind = "" if isinstance(e, ValueError) and not frames else (
      f"{type(e).__name__}: ")
  return f"{_at(frames[-1]) if frames else ''}{kind}{_text(e)}"


def _at(frame: traceback.FrameSummary) -> str:
  return f"{os.path.relpath(frame.filename)} line {frame.lineno} raised "


def _text(e: BaseException) -> str:
  return " ".join(str(e).split())[:400]


def _kind(value: Any) -> str:
  return (f"the class {value.__name__}" if isinstance(value, type)
          else f"an object of type {type(value).__name__}")
