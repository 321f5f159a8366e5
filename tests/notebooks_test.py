"""The notebooks run from top to bottom."""

import pathlib

import nbclient
import nbformat
import pytest
import scripts

_NOTEBOOKS = sorted(
    (pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
  """A notebook that stops halfway is the first thing a newcomer sees."""
  notebook = nbformat.read(path, as_version=4)
  nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3",
                          resources={"metadata": {"path": path.parent}}
                          ).execute(env=scripts.environment())


def test_there_are_notebooks():
  """An empty list would let the test above pass without running."""
  assert _NOTEBOOKS
