"""What the documents show runs as it stands there."""

import doctest
import pathlib
import re

import pytest

import specjax.constraints.automaton
import specjax.decoder
import specjax.exact.certificate
import specjax.models.contrastive
import specjax.models.sublayers
import specjax.sampling
import specjax.serving
import specjax.types

_ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("module", [
    specjax.constraints.automaton, specjax.decoder, specjax.exact.certificate,
    specjax.models.contrastive, specjax.models.sublayers, specjax.sampling,
    specjax.serving, specjax.types],
                         ids=lambda module: module.__name__)
def test_examples_of_docstrings(module):
  # Broken: the first thing that a reader pastes does not work.
  found = doctest.testmod(module)
  assert found.attempted and not found.failed


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
