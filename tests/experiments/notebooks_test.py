"""The notebooks run from top to bottom."""

import contextlib
import io
import pathlib
import sys
import types

import matplotlib.pyplot
import nbclient
import nbformat
import pytest
import scripts

pytestmark = pytest.mark.slow

_NOTEBOOKS = sorted(
    (pathlib.Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def _read(path):
  return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", _NOTEBOOKS[1:], ids=lambda path: path.stem)
def test_notebook_runs(path):
  """A notebook that stops halfway is the first thing a newcomer sees."""
  scripts.make_room()
  module = types.ModuleType(path.stem)
  with (pytest.MonkeyPatch.context() as patch, matplotlib.rc_context(),
        contextlib.redirect_stdout(io.StringIO())):
    patch.setitem(sys.modules, module.__name__, module)
    patch.chdir(path.parent)
    matplotlib.use("agg")
    for number, cell in enumerate(_read(path).cells):
      if cell.cell_type == "code":
        code = compile(cell.source, f"{path.name}[{number}]", "exec")
        exec(code, module.__dict__)
    matplotlib.pyplot.close("all")


def test_a_notebook_runs_in_jupyter():
  # Broken: a kernel that a reader starts lacks what the tests have.
  path = _NOTEBOOKS[0]
  nbclient.NotebookClient(_read(path), timeout=300, kernel_name="python3",
                          resources={"metadata": {"path": path.parent}}
                          ).execute(env=scripts.environment())
