"""Sphinx extension: API pages from `__all__`, notebooks and links.

Nothing is listed by hand. A module of specjax is public if it is in
`specjax.__all__`, and a name is public if it is in the `__all__` of its
module. The build fails if a public name is on no API page.
"""

import importlib
import inspect
import itertools
import os
import pathlib
import re
import shutil
import types

import chex
import docutils.core
import jax
import numpy as np
from sphinx.util import logging
from sphinx.util.typing import stringify_annotation

import specjax

_DOCS = pathlib.Path(__file__).parent
_ROOT = _DOCS.parent
_LOG = logging.getLogger(__name__)
_SOURCES = os.environ.get("SPECJAX_SOURCES")  # URL of the repository's root
_MORE = ("sampling", "training")  # public, but not in `specjax.__all__`
# Names of unions that autodoc would write out, by their written form.
_ALIASES = {
    stringify_annotation(alias, "smart"): alias_name
    for alias_name, alias in (
        ("ArrayTree", chex.ArrayTree), ("ArrayLike", np.typing.ArrayLike),
        ("ArrayLike", jax.typing.ArrayLike),
        ("DTypeLike", jax.typing.DTypeLike))}
_TARGETS = {}  # documented names by their names in texts
_CODE = re.compile(r"(?<![`:\w\\])`([A-Za-z_][\w.]*)`(?![`_])")


def public_modules():
  """Yields `(name, module)` of specjax and of its public modules."""
  yield "specjax", specjax
  for name in [*specjax.__all__, *_MORE]:
    if name not in _MORE and not isinstance(
        getattr(specjax, name), types.ModuleType):
      continue
    module = (importlib.import_module(f"specjax.{name}") if name in _MORE
              else getattr(specjax, name))
    yield f"specjax.{name}", module


def public_names(module):
  """Returns the sorted public names of a module that are not modules."""
  names = getattr(module, "__all__", None)
  if names is None:
    names = [name for name, value in vars(module).items()
             if not name.startswith("_")
             and getattr(value, "__module__", None) == module.__name__]
  return sorted(name for name in names if not name.startswith("__")
                and not isinstance(getattr(module, name), types.ModuleType))


def _directive(value):
  if inspect.isclass(value):
    return "autoclass"
  return "autofunction" if callable(value) else "autodata"


def _page(name, module, documented):
  """Returns the page of a module in reStructuredText."""
  lines = [":tocdepth: 2", "", name, "=" * len(name), "",
           f".. automodule:: {name}", "", ""]
  for public in public_names(module):
    value = getattr(module, public)
    key = id(value) if callable(value) else f"{name}.{public}"
    if key in documented:
      lines += [f"- ``{public}``: see :py:obj:`{documented[key]}`.", ""]
      continue
    documented[key] = f"{name}.{public}"
    kind = _directive(value)
    lines += [f".. {kind}:: {name}.{public}"]
    if kind == "autoclass":
      lines += ["   :members:", "   :member-order: bysource"]
    lines += [""]
  return "\n".join(lines)


def _write(path, text):
  """Writes a changed file. Unchanged files keep a second build incremental."""
  path.parent.mkdir(exist_ok=True)
  if not path.exists() or path.read_text("utf-8") != text:
    path.write_text(text, "utf-8")


def _generate(app):
  """Writes `docs/api/` and copies the notebooks to `docs/notebooks/`."""
  documented = {}
  modules = dict(public_modules())
  for name, module in modules.items():
    _write(_DOCS / "api" / f"{name}.rst", _page(name, module, documented))
  _TARGETS.update(_link_targets(modules, documented))
  _write(_DOCS / "api" / "index.rst", "\n".join([
      "API", "===", "", ".. toctree::", "   :maxdepth: 1", "",
      *(f"   {name}" for name in modules), ""]))
  (_DOCS / "notebooks").mkdir(exist_ok=True)
  for path in (_ROOT / "notebooks").glob("*.ipynb"):
    copy = _DOCS / "notebooks" / path.name
    if not copy.exists() or copy.read_bytes() != path.read_bytes():
      shutil.copyfile(path, copy)


def _link_targets(modules, documented):
  """Returns `{name in a text: documented name}` of the public names.

  Texts write `sj.exact.certify`, `exact.certify` or, if the name is a class,
  `Decoder`. A short name of several public objects is not a key.
  """
  targets = {}
  for module_name, module in modules.items():
    for public in public_names(module):
      value = getattr(module, public)
      key = id(value) if callable(value) else f"{module_name}.{public}"
      name = f"{module_name}.{public}"
      short = name.removeprefix("specjax.")
      texts = [name, f"sj.{short}", *([short] if "." in short else []),
               *([public] if public[0].isupper() else [])]
      for text in texts:
        targets.setdefault(text, set()).add(documented[key])
  return {text: names.pop() for text, names in targets.items()
          if len(names) == 1}


def _with_links(text, form):
  """Makes public names links, by `form` with the fields `text`, `target`."""

  def replace(match):
    owner, _, member = match[1].rpartition(".")
    target = _TARGETS.get(match[1]) or (
        owner in _TARGETS and f"{_TARGETS[owner]}.{member}")
    return form.format(text=match[1], target=target) if target else match[0]

  return _CODE.sub(replace, text)


def _link_sources(app, name, source):
  """Makes links to files outside of docs/ links to the repository.

  Without the URL of the repository, only the text of a link remains.
  """
  folder = (_DOCS / name).parent

  def replace(match):
    target = (folder / match[2]).resolve()
    if target.is_relative_to(_DOCS) or not target.is_relative_to(_ROOT):
      return match[0]
    if not _SOURCES:
      return match[1]
    return f"[{match[1]}]({_SOURCES}/{target.relative_to(_ROOT)})"

  source[0] = re.sub(
      r"(?<!!)\[([^\]\[]*)\]\((\.\./[^)#:]+)\)", replace, source[0])
  if name.startswith(("api/", "notebooks/")):
    return
  # Neither fenced code nor headings.
  parts = re.split(r"(^```.*?^```|^#.*?$)", source[0], flags=re.DOTALL | re.M)
  parts[::2] = [_with_links(part, "{{py:obj}}`{text} <{target}>`")
                for part in parts[::2]]
  source[0] = "".join(parts)
  if name == "index" and _SOURCES:  # an entry of the side bar
    source[0] = source[0].replace(
        "\napi/index\n", f"\napi/index\nSource code <{_SOURCES}>\n")


def _is_clean(lines):
  """Returns True if docutils reads these lines without a complaint."""
  text = re.sub(r":[\w:]+:`", "`", "\n".join(lines))  # Sphinx's own roles
  if text.startswith(".. "):  # a directive of napoleon
    return True
  document = docutils.core.publish_doctree(
      text, settings_overrides={"report_level": 5, "halt_level": 5})
  return not document.parse_messages + document.transform_messages


def _readable(block):
  """Returns a paragraph of a docstring in a form that docutils accepts.

  Docstrings are plain text first. A paragraph that is not reStructuredText has
  its symbols escaped or, if that does not help, is shown as it is.
  """
  escaped = [re.sub(r"([*|`])", r"\\\1", line) for line in block]
  if block[0].startswith(":"):  # a field of napoleon
    last = [" ".join(line.strip() for line in escaped), ""]
  else:
    last = ["::", "", *("  " + line for line in block), ""]
  if _is_clean(block):
    text = "\n".join(block)
    if text.startswith(">>>") or re.search("::$", text, re.M):  # code
      return block
    return _with_links(text, ":py:obj:`{text} <{target}>`").split("\n")
  return escaped if _is_clean(escaped) else last


def _process_docstring(app, what, name, value, options, lines):
  """Replaces paragraphs that are not reStructuredText."""
  starts = [0, *(i for i, (before, line) in enumerate(
      itertools.pairwise(lines), 1)
      if line.startswith(":") or not before and line[:1].strip())]
  blocks = [lines[i:j] for i, j in zip(starts, [*starts[1:], len(lines)])]
  lines[:] = [line for block in blocks if block for line in _readable(block)]


def _shorten_types(app, what, name, value, options, signature, returns):
  """Writes the names of unions in signatures, instead of their members."""
  for union, alias in _ALIASES.items():
    signature = signature and signature.replace(union, alias)
    returns = returns and returns.replace(union, alias)
  return signature, returns


def _check_coverage(app, env):
  """Fails the build if a public name has no entry on an API page."""
  objects = env.get_domain("py").objects
  documented = {}
  for module_name, module in public_modules():
    for name in public_names(module):
      documented.setdefault(id(getattr(module, name)), []).append(
          f"{module_name}.{name}")
  for names in documented.values():
    if not any(name in objects for name in names):
      _LOG.warning("no API page has %s", names[0])


def setup(app):
  app.connect("builder-inited", _generate)
  app.connect("autodoc-process-docstring", _process_docstring, priority=900)
  app.connect("autodoc-process-signature", _shorten_types)
  app.connect("source-read", _link_sources)
  app.connect("env-check-consistency", _check_coverage)
  return {"parallel_read_safe": True}
