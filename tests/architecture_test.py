"""The import graph of the package: what a reader of one part has to read."""

import ast
import pathlib

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_FILES = sorted((_ROOT / "specjax").rglob("*.py"))
# The names at the top of specjax/, from the lowest layer to the highest. A
# module imports from its own layer and from lower ones.
_LAYERS = (
    "version", "utils", "types", "trees", "sampling", "interfaces", "attention",
    "caches", "verifiers", "decoding", "exact", "analysis", "constraints",
    "data", "models", "zoo", "training", "methods", "drafters", "strategies",
    "objectives", "serving", "testing")


def _name(path):
  parts = path.relative_to(_ROOT).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(node):
  """Dotted names that are imported, except for types alone."""
  if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
    return
  if isinstance(node, ast.ImportFrom) and node.module:
    for alias in node.names:
      yield f"{node.module}.{alias.name}"
  for child in ast.iter_child_nodes(node):
    yield from _imported(child)


def _graph():
  """`{module: modules that it imports}`, without the packages above them."""
  names = {_name(path) for path in _FILES}
  graph = {}
  for path in _FILES:
    found = _imported(ast.parse(path.read_text("utf-8")))
    graph[_name(path)] = {
        dotted if dotted in names else dotted.rpartition(".")[0]
        for dotted in found if dotted.startswith("specjax.")} - {_name(path)}
  return graph


_GRAPH = _graph()


def _closure(module):
  """All modules that importing `module` executes, except `specjax` itself."""
  found, left = set(), [module]
  while left:
    name = left.pop()
    if name not in found and name != "specjax":
      found.add(name)
      left += [*_GRAPH[name], name.rpartition(".")[0]]
  return found


def test_no_module_imports_from_a_higher_layer():
  # Broken: a reader of a low layer has to read everything above it.
  layer = lambda name: _LAYERS.index(name.split(".")[1])
  for module, imported in _GRAPH.items():
    if module != "specjax":
      for name in imported:
        assert layer(name) <= layer(module), f"{module} imports {name}"


def test_the_root_is_small():
  # Broken: the package has no visible order.
  at_root = [path for path in _FILES if path.parent.name == "specjax"]
  assert len(at_root) <= 8


@pytest.mark.parametrize("module, most", [
    ("specjax.exact", 48), ("specjax.decoding.decoder", 36)])
def test_import_closure(module, most):
  # Broken: whoever checks the proof, or the loop, has to read a method.
  assert len(_closure(module)) <= most
