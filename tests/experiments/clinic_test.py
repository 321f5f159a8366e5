import dataclasses

import numpy as np
import pytest
from scripts import imported
from scripts import last_line
from scripts import run
from scripts import run_all

from specjax import exact
from specjax import verifiers


def test_cases_of_the_clinic():
  # Broken: a case has another verdict, or a defect is not the described one.
  with imported("clinic.py") as clinic:
    cases = {case.name: case for case in clinic.CASES}
    assert len(cases) == len(clinic.CASES)
    assert sum(case.exact for case in clinic.CASES) >= 16
    assert sum(not case.exact for case in clinic.CASES) >= 10
    for name in ("vllm_token", "dcut_argmax", "dcut_sampled", "keras_hub",
                 "filter_order", "batch_max_q", "dcut_two_rows"):
      assert clinic.examine(cases[name])[1] == cases[name].exact, name
    # The argmax of q with the softmax as q, by hand.
    pair = exact.iid_pair([.5, .3, .2], [.6, .2, .2], depth=2)
    found = exact.enumerate_trees(
        verifiers.Token(), pair, (-1, 0), cases["gemma4_assistant"].scheme)
    assert found.total_variation == pytest.approx(1 / 3, abs=1e-9)


def test_installed_packages(monkeypatch, capsys):
  # Broken: a missing package ends the run, or is not named.
  def missing():
    raise ImportError("No module named 'pytest_of_mars'")

  with imported("clinic.py") as clinic:
    case = clinic.INSTALLED[0]
    here, away = (dataclasses.replace(case, name=name, sampler=sampler)
                  for name, sampler in (("here", lambda: clinic._token),
                                        ("away", missing)))
    monkeypatch.setattr(clinic, "INSTALLED", (
        dataclasses.replace(here, source="numpy: f"), away))
    [found] = clinic._installed()
    assert found.source == f"numpy {np.__version__}: f"
    assert "away is left out: No module" in capsys.readouterr().err
    monkeypatch.setattr(clinic, "INSTALLED", (away,))
    with pytest.raises(ValueError, match="install one"):
      clinic._installed()


def test_flags_of_the_clinic(tmp_path):
  # Broken: a wrong name has no clear error, or a case is not explained.
  shown, refused = run_all("clinic.py", ["--case=dcut_sampled"],
                           ["--case=doctor"], cwd=tmp_path)
  assert "NOT LOSSLESS" in shown["stdout"] and "rank by" in shown["stdout"]
  assert "--case contains 'doctor'" in refused["code"]


@pytest.mark.slow
def test_clinic(tmp_path):
  study = last_line(run("clinic.py", cwd=tmp_path))
  assert study["study"] == "clinic" and len(study["rows"]) >= 26
