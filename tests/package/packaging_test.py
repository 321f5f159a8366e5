"""What is installed is what is imported."""

import ast
import pathlib
import re
import sys

_ROOT = pathlib.Path(__file__).parents[2]
_PACKAGES = {"orbax": "orbax-checkpoint"}  # imported under another name
# Their absence is told to the user.
_OPTIONAL = {"datasets", "gguf", "huggingface_hub", "jinja2", "tensorboardX",
             "transformers", "wandb"}


def _imported(tree):
  """The packages that a module imports, but for those of Python itself."""
  for node in ast.walk(tree):
    names = ([alias.name for alias in node.names]
             if isinstance(node, ast.Import) else
             [node.module] if isinstance(node, ast.ImportFrom) else [])
    for name in names:
      if name.partition(".")[0] not in sys.stdlib_module_names:
        yield name.partition(".")[0]


def test_what_the_library_imports_is_required():
  # Broken: `pip install specjax` gives a library that cannot be imported.
  setup = ast.parse((_ROOT / "setup.py").read_text())
  [required] = [ast.literal_eval(node.value) for node in ast.walk(setup)
                if isinstance(node, ast.keyword)
                and node.arg == "install_requires"]
  required = {re.split("[<>=]", name)[0] for name in required}
  imported = {name for path in (_ROOT / "specjax").rglob("*.py")
              for name in _imported(ast.parse(path.read_text()))}
  missing = {_PACKAGES.get(name, name) for name in
             imported - {"specjax"} - _OPTIONAL} - required
  assert not missing
