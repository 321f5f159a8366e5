"""The import graph of the package: what a reader of one part has to read."""

import pathlib

import measure_package
import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_FILES = sorted((_ROOT / "specjax").rglob("*.py"))
# The names at the top of specjax/, from the lowest layer to the highest. A
# module imports from its own layer and from lower ones.
_LAYERS = (
    "version", "utils", "types", "trees", "gpu", "sampling", "interfaces",
    "attention", "caches", "verifiers", "decoding", "exact", "analysis",
    "constraints", "data", "models", "zoo", "training", "methods", "drafters",
    "strategies", "objectives", "testing")


_GRAPH = measure_package.import_graph(_ROOT)


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
    ("specjax.exact", 25), ("specjax.decoding.decoder", 40)])
def test_import_closure(module, most):
  # Broken: whoever checks the proof, or the loop, has to read a method.
  assert len(measure_package.closure(_GRAPH, module)) <= most


def test_no_cycle():
  # Broken: two modules can only be read together.
  assert not measure_package.on_a_cycle(_GRAPH)
