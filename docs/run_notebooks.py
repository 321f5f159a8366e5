"""Executes the notebooks and stores their outputs.

  python docs/run_notebooks.py [notebooks/01_quickstart.ipynb ...]

Without arguments, all notebooks of the directory `notebooks/` are executed, on
the CPU. The metadata of a notebook contains the hash of the code that gave its
outputs, so that a test finds outputs of other code.
"""

import hashlib
import os
import pathlib
import sys

import nbclient
import nbformat

_ROOT = pathlib.Path(__file__).parents[1]


def code_hash(notebook):
  """Returns the hash of the code cells."""
  code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
  return hashlib.sha256("\0".join(code).encode()).hexdigest()


def execute(notebook):
  """Executes a notebook in place, with the outputs that readers need."""
  for cell in notebook.cells:
    cell.metadata = {}
  # The kernel inherits the environment.
  os.environ |= {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
  nbclient.NotebookClient(
      notebook, timeout=600, kernel_name="python3", record_timing=False,
      coalesce_streams=True,
      resources={"metadata": {"path": _ROOT / "notebooks"}}).execute()
  for cell in notebook.cells:
    if cell.cell_type == "code":
      # Standard error contains warnings and progress bars.
      cell.outputs = [output for output in cell.outputs
                      if output.get("name") != "stderr"]
  del notebook.metadata["language_info"]["version"]
  notebook.metadata["code_sha256"] = code_hash(notebook)


if __name__ == "__main__":
  for path in (map(pathlib.Path, sys.argv[1:]) if sys.argv[1:] else
               sorted((_ROOT / "notebooks").glob("*.ipynb"))):
    stored = nbformat.read(path, as_version=4)
    execute(stored)
    nbformat.write(stored, path)
    print(f"wrote {path}")
