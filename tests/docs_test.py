"""What the documents show runs as it stands there."""

import ast
import doctest
import importlib
import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_FILES = sorted(_ROOT.glob("specjax/**/*.py"))
_TOP = [*_ROOT.glob("specjax/[!_]*.py"),
        *(path.parent for path in _ROOT.glob("specjax/*/__init__.py"))]


def _with_examples():
  """Modules that show examples; strategies_test.py runs those of its own."""
  for path in _FILES:
    name = ".".join(path.relative_to(_ROOT).with_suffix("").parts)
    if re.search("^ +>>> ", path.read_text("utf-8"), re.MULTILINE) and (
        not name.startswith("specjax.strategies")):
      yield name.removesuffix(".__init__")


@pytest.mark.parametrize("name", [*_with_examples()])
def test_examples_of_docstrings(name):
  # Broken: the first thing that a reader pastes does not work.
  found = doctest.testmod(importlib.import_module(name))
  assert found.attempted and not found.failed


def _house():
  """README's list of the files of specjax/."""
  text = (_ROOT / "README.md").read_text("utf-8")
  return text[text.index("\nspecjax/\n"):text.index("\nexperiments/  ")]


def _places():
  """{file or package at the top of specjax/: its place in README's list}."""
  house, found = _house(), {}
  for path in _TOP:
    entry = (rf"\b{path.name}\b" if path.suffix else rf"\n  {path.name}/")
    match = re.search(entry, house)
    assert match, f"README's house lacks {path.name}"
    found[path.stem] = match.start()
  return found


def test_the_house_is_as_readme_says():
  # Broken: a newcomer looks for a file in vain, or for who may import what.
  house, places = _house(), _places()
  for package in ("drafters", "verifiers"):
    for path in _ROOT.glob(f"specjax/{package}/[!_]*.py"):
      assert re.search(rf"\b{path.name}\b", house), path
  for path in _FILES:
    own = path.relative_to(_ROOT / "specjax").parts[0].removesuffix(".py")
    for name in _imported(ast.parse(path.read_text("utf-8"))):
      if own in places and name in places:
        assert places[name] <= places[own], f"{path} imports {name}"


def _imported(node):
  """Names at the top of specjax/ that are imported, but not for types alone."""
  if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
    return
  if isinstance(node, ast.ImportFrom) and node.module:
    for alias in node.names:
      first, *rest = f"{node.module}.{alias.name}".split(".")
      if first == "specjax":
        yield rest[0]
  for child in ast.iter_child_nodes(node):
    yield from _imported(child)


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "README.md"])
def test_python_of_documents(name, capsys):
  # Broken: as above. The blocks of a document run one after the other.
  text = (_ROOT / name).read_text("utf-8")
  blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
  assert blocks
  names = {"__name__": "pasted"}
  for block in blocks:
    exec(compile(block, name, "exec"), names)
  shown = capsys.readouterr().out
  if name == "README.md":  # the certificate that it shows is what comes out
    certificate = re.search(r"```\n(lossless\n.*?)```", text, re.DOTALL)
    assert shown.startswith(certificate[1])
