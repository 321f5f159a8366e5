"""Scripts check where they write, and what they read, before they compute."""

import pathlib
import sys

from absl import flags
import pytest
from scripts import imported
from scripts import ROOT
from scripts import run_all

import specjax as sj

sys.path.append(str(ROOT / "experiments"))

from lib import common  # noqa: E402

_SCRIPTS = sorted(path.name for path in (ROOT / "experiments").glob("*.py")
                  if path.name != "__init__.py")
_READS = ("redraw.py",)  # writes only where it has read


@pytest.mark.parametrize("script", _SCRIPTS)
def test_an_output_that_cannot_be_written(script, tmp_path, monkeypatch):
  # Broken: minutes of computation end in an error of the first file.
  monkeypatch.chdir(tmp_path)
  (tmp_path / "file").touch()
  with imported(script) as module:
    assert module.main
    own = [flags.FLAGS[name] for name in flags.FLAGS]
    written = [flag.name for flag in own if hasattr(flag, "written")]
    required = {
        flag.name: getattr(flag.parser, "enum_values", ["x"])[0] for flag in own
        if flag.value is None and any(
            "must have a value" in x.message for x in flag.validators)}
    assert bool(written) != (script in _READS)
    places = ["file/x", *["/proc/x"] * pathlib.Path("/proc").is_dir()]
    for name in written:
      kind = flags.FLAGS[name].written
      for place in (*places, *["/dev/null"] * (kind == "file")):
        flags.FLAGS.unparse_flags()
        given = {**required, name: place}
        with pytest.raises(SystemExit) as caught:
          common.run(lambda: pytest.fail("computed"), [
              script, *(f"--{key}={value}" for key, value in given.items())])
        line = caught.value.code
        assert line.startswith(f"error: --{name}") and place in line
        assert "\n" not in line and ".partial" not in line


def test_a_record_that_cannot_be_written(tmp_path):
  # Broken: replay.py decodes before it finds out.
  (tmp_path / "file").touch()
  [found] = run_all("replay.py", ["--record=file"], cwd=tmp_path)
  assert found["code"] == (
      "error: --record=file is not a directory; choose another one")


def test_nothing_is_left_where_an_output_could_be_written(tmp_path):
  # Broken: every wrong flag leaves empty directories.
  common.check_directory("--output_dir", str(tmp_path / "a/b/c"))
  assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_has_its_own_name(tmp_path):
  # Broken: the error names a temporary file that the user never gave.
  with pytest.raises(OSError) as caught:
    with sj.utils.files.atomically(tmp_path / "no/file"):
      pass
  assert caught.value.filename == str(tmp_path / "no/file")


def test_a_run_without_heads_yet(tmp_path):
  # Broken: it is called a model without configuration.
  (tmp_path / "run").mkdir()
  (tmp_path / "run/run.json").write_text("{}")
  [found] = run_all("generate.py", ["--drafter=run", "--prompt=a"],
                    cwd=tmp_path)
  assert found["code"].startswith(
      "error: --drafter=run contains a training run that has not written")


def test_a_number_that_is_none(tmp_path):
  [found] = run_all("train_lm.py", ["--steps=abc", "--output_dir=x"],
                    cwd=tmp_path)
  assert found["code"] == (
      "error: flag --steps=abc: 'abc' is not a whole number; see --help")


def test_a_hub_that_is_not_reached(tmp_path, monkeypatch):
  # Broken: the line does not say which of two models was not found.
  hub = pytest.importorskip("huggingface_hub")

  def fail(*_, **__):
    raise OSError("no\nnetwork")

  monkeypatch.setattr(hub, "snapshot_download", fail)
  target, drafter = run_all(
      "generate.py", ["--target=no/where", "--prompt=a"],
      ["--drafter=no/where", "--prompt=a"], cwd=tmp_path)
  for found, flag in ((target, "target"), (drafter, "drafter")):
    assert found["code"].startswith(f"error: --{flag}=no/where: ")
    assert "no network" in found["code"] and "\n" not in found["code"]
