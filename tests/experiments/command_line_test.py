"""What scripts say on the command line: progress, and errors in one line."""

import io
import re
import signal
import subprocess
import sys
import types

from absl import flags
import jax
import pytest
from scripts import environment
from scripts import imported
from scripts import ROOT
from scripts import run_all
from scripts import start
from tiny_llama import write_llama

import specjax as sj
from specjax.data import corpora
from specjax.data import prompt_sets
from specjax.data import prompts as prompts_lib
from specjax.data import Tokenizer
from specjax.models import gguf
from specjax.models import safetensors_files
from specjax.training import metrics
from specjax.utils import files
from specjax.utils import processes

sys.path.append(str(ROOT / "experiments"))

from lib import common  # noqa: E402
from lib import drafters  # noqa: E402
from lib import models  # noqa: E402
from lib.figures import style  # noqa: E402, F401
from lib.prompts import reading as prompts  # noqa: E402
from lib.prompts import streaming  # noqa: E402

_SCRIPTS = sorted(path.name for path in (ROOT / "experiments").glob("*.py")
                  if path.name != "__init__.py")


def _ended(main, *arguments):
  """The code with which `common.run` ends a script."""
  with pytest.raises(SystemExit) as e:
    common.run(main, ["script", *arguments])
  return e.value.code


def test_imports_are_reported_and_end_by_ctrl_c(tmp_path):
  # Broken: a script is silent for the seconds that jax takes to import, or
  # Ctrl-C during these seconds prints a traceback.
  (tmp_path / "jax").mkdir()
  (tmp_path / "jax/__init__.py").write_text("import time\ntime.sleep(1000)\n")
  env = {**environment(), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
  # A shell script ignores SIGINT in programs that it starts with &. Programs
  # that these start would ignore it too.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  begun = {name: subprocess.Popen(
      [sys.executable, ROOT / "experiments" / name], env=env, text=True,
      stderr=subprocess.PIPE) for name in _SCRIPTS}
  signal.signal(signal.SIGINT, before)
  for name, process in begun.items():
    assert process.stderr.readline() == "importing jax and specjax ...\n", name
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == "\nstopped by Ctrl-C\n", name
    assert process.returncode == 128 + signal.SIGINT, name


@pytest.mark.slow
def test_a_script_as_a_module_and_help_that_nobody_reads(tmp_path):
  # Broken: ModuleNotFoundError for `lib`, or a traceback by `--help | head`.
  read = start("generate.py", "--help", cwd=tmp_path)
  read.stdout.close()
  module = subprocess.run(
      [sys.executable, "-m", "experiments.generate", "--drafter=meduza"],
      cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=300)
  assert "error: no drafter 'meduza'" in module.stderr.splitlines()[-1]
  assert read.stderr.read().replace("importing jax and specjax ...\n", "") == ""


def test_figures_need_matplotlib_before_anything_is_computed(monkeypatch):
  # Broken: a study of an hour ends in a traceback where matplotlib is missing.
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  line = _ended(lambda: pytest.fail("computed"))
  assert "matplotlib" in line and "pip install 'specjax[experiments]'" in line
  # A script without figures.
  monkeypatch.delitem(sys.modules, "lib.figures.style")
  assert not _ended(lambda: None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_says_so_and_has_the_code_of_its_signal(number, capsys):
  # Broken: whoever started it takes it for finished, or for broken.
  def stopped():
    raise processes.Stopped("stopped after step 3", number)

  assert _ended(stopped) == 128 + number
  assert capsys.readouterr().err == "stopped after step 3\n"


def test_every_figure_is_drawn_by_what_is_checked():
  # Broken: a script draws figures and does not notice early that it cannot.
  for path in (ROOT / "experiments").rglob("*.py"):
    if path.name != "style.py" and "common" not in path.name:
      assert "import matplotlib" not in path.read_text("utf-8"), path


_NEEDS = {  # by package: its extra, and what cannot do without it
    "gguf": ("published", lambda path: gguf.open_gguf(path)),
    "jinja2": ("published", lambda path: Tokenizer.from_gguf({
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": [],
        "tokenizer.chat_template": "a"})),
    "transformers": ("published", lambda path: Tokenizer.load(
        write_llama(path.parent / "llama"))),
    "datasets": ("datasets", lambda path: prompt_sets.load("gsm8k")),
    "tensorboardX": (
        "experiments", lambda path: metrics.MetricsLog(path.parent, 0))}


@pytest.mark.parametrize("package", _NEEDS)
def test_a_missing_package_names_its_extra(
    package, tmp_path, monkeypatch, capsys):
  # Broken: what is to be installed has to be guessed.
  monkeypatch.setitem(sys.modules, package, None)
  (tmp_path / "model.gguf").write_bytes(b"GGUF")
  extra, needs = _NEEDS[package]
  try:
    needs(tmp_path / "model.gguf")
    text = capsys.readouterr().err  # a run goes on without TensorBoard
  except ValueError as e:
    text = str(e)
  assert f"'specjax[{extra}]'" in text and "pip install " in text
  assert "\n" not in text.strip()


@pytest.mark.parametrize("error", [
    RuntimeError("Unable to initialize backend 'cuda': no GPU"),
    AssertionError()])
def test_a_platform_without_a_device(error, monkeypatch):
  # Broken: JAX_PLATFORMS=cuda without a GPU is a page of a traceback.
  def fail(*args):
    raise error

  monkeypatch.setattr(jax, "devices", fail)
  line = _ended(fail)
  assert line.startswith("error: JAX_PLATFORMS is ")
  assert "set JAX_PLATFORMS=cpu" in line and "\n" not in line
  monkeypatch.undo()
  with pytest.raises(type(error)):  # an error of another origin stays one
    common.run(fail, ["script"])


@pytest.mark.parametrize("error", [MemoryError(), jax.errors.JaxRuntimeError(
    "INTERNAL: Out of memory allocating 262144000000 bytes.")])
def test_too_little_memory_is_one_line(error):
  # Broken: a traceback that does not name the flags that need the memory.
  def fail():
    raise error

  line = _ended(fail)
  assert "memory" in line and "--batch" in line and "--mesh" in line
  assert "\n" not in line


@pytest.mark.parametrize("script,flag,example", [
    ("export.py", "output_dir", "results/mine"),
    ("train_lm.py", "output_dir", "results/mine"),
    ("distill.py", "output_dir", "results/mine"),
    ("boost_drafters.py", "output_dir", "results/mine"),
    ("train_drafter.py", "method", "pass"),
    ("build_datastore.py", "output", "results/mine.store")])
def test_a_missing_flag_is_explained(script, flag, example, tmp_path):
  # Broken: "must have a value other than None" does not say what to give.
  [found] = run_all(script, [], cwd=tmp_path)
  assert re.fullmatch(
      rf"error: --{flag} is required \(.+\); set it, such as --{flag}={example}"
      "; see --help", found["code"]), found


def test_the_first_difference_of_settings_is_named(tmp_path):
  # Broken: the user reads of hashes that differ, and not of the setting.
  path = tmp_path / "run.json"
  model, tokens = "Model(width=8)", "0123456789abcdef"
  files.claim(path, {"model": model, "tokens": tokens, "seed": 1, "rate": 2},
              "run")
  with pytest.raises(files.OtherRunError) as e:
    files.claim(path, {"model": "Model(width=9)", "tokens": tokens[::-1],
                       "seed": 3, "rate": 2}, "run")
  assert ("seed is 1 there and 3 here; model is Model(width=8) there and Model("
          "width=9) here (1 more differ): ") in str(e.value)
  assert e.value.directory == tmp_path


def test_the_directory_of_another_run_is_named_by_its_flag(tmp_path):
  # Broken: replay.py refuses a directory and does not say which flag names it.
  def refuse():
    raise files.OtherRunError(tmp_path, "record", "seed is 1 there and 2 here")

  with imported("replay.py") as replay:
    assert _ended(refuse, f"--record={tmp_path}").endswith(
        "(--record names the directory)")
    flags.FLAGS.unparse_flags()
    assert _ended(refuse, f"--output_dir={tmp_path}").endswith(
        "(--output_dir names the directory)")
    assert replay._place() == str(tmp_path)  # 72 MB, where the user wants them
    flags.FLAGS.unparse_flags()


def test_a_record_that_is_not_there_names_its_flag(tmp_path):
  [found] = run_all("replay.py", ["--evaluate_only", "--output_dir=new"],
                    cwd=tmp_path)
  assert "--evaluate_only" in found["code"] and "--record" in found["code"]


_POINTER = ("version https://git-lfs.github.com/spec/v1\n"
            "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32\nsize 12345\n")


@pytest.mark.parametrize("name,read", [
    ("model.safetensors", safetensors_files.open_safetensors),
    ("heads.safetensors", safetensors_files.open_safetensors),
    ("model.gguf", gguf.open_gguf),
    ("tokenizer.json", sj.data.Tokenizer.load),
    ("config.json", lambda path: files.read_json(path, "again"))])
def test_a_git_lfs_pointer_is_named(name, read, tmp_path):
  # Broken: "truncated: download it again", which gives the same pointer again.
  (tmp_path / name).write_text(_POINTER)
  with pytest.raises(ValueError, match=f"{name} is a Git LFS pointer.*git lfs"):
    read(tmp_path / name)


@pytest.mark.parametrize("name", [
    "heads.json", "heads.safetensors", "training.json"])
@pytest.mark.parametrize("kept", [0, 30])
def test_truncated_heads_are_named(name, kept, tmp_path):
  # Broken: half a copy of heads is a traceback, or is not named.
  for path in sj.zoo.heads_path("medusa").iterdir():
    (tmp_path / path.name).write_bytes(path.read_bytes())
  (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:kept])
  with pytest.raises(ValueError, match=f"{name} .*again") as e:
    drafters.load("bundled", [str(tmp_path)])
  assert "\n" not in str(e.value)


def test_an_encoding_that_lacks_a_character(monkeypatch):
  # Broken: a table with a plus-minus sign ends the study where the terminal
  # knows ASCII alone.
  written = io.BytesIO()
  monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
  assert not _ended(lambda: print("1.5 \u00b1 0.1"))
  assert written.getvalue() == b"1.5 ? 0.1\n"


@pytest.mark.parametrize("choice,variable,value,expected", [
    ("auto", "TERM", "xterm", True), ("auto", "TERM", "dumb", False),
    ("auto", "NO_COLOR", "1", False), ("auto", "NO_COLOR", "", True),
    ("always", "NO_COLOR", "1", True), ("never", "TERM", "xterm", False)])
def test_colours_are_off_where_they_are_not_wanted(
    choice, variable, value, expected, monkeypatch):
  # Broken: escape codes on a terminal that cannot show them.
  monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(isatty=lambda: True))
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.delenv("NO_COLOR", raising=False)
  monkeypatch.setenv(variable, value)
  assert streaming.is_colored(choice) == expected


def test_a_chat_that_is_refused_names_the_flag_in_use():
  # Broken: who started chat.py reads of --chat.
  tokenizer = types.SimpleNamespace(chat_template=None)
  for flag in ("--chat", "chat.py"):
    with pytest.raises(ValueError, match=f"^{flag} needs .* leave {flag} out"):
      prompts.check_chat(tokenizer, True, flag)


@pytest.mark.parametrize("script", [
    "generate.py", "chat.py", "throughput_study.py", "controller_study.py",
    "free_drafts_study.py", "arena.py"])
def test_all_drafters_are_named(script, tmp_path):
  # Broken: who mistypes "ngram" reads only of language models.
  [found] = run_all(script, ["--drafter=ngrm", "--target=bundled"],
                    cwd=tmp_path)
  listed = found["code"].split("choose among ")[1].split(", or give")[0]
  assert set(drafters.NAMES) <= set(listed.split(", "))


def test_stages_are_reported_before_they_begin(capsys, monkeypatch):
  # Broken: nothing is printed while models are read or programs compiled.
  monkeypatch.setattr(models, "read", lambda place, dtype: pytest.skip())
  said = lambda: capsys.readouterr().err
  for load in (lambda: drafters.load("bundled", ["tiny"]),
               lambda: models.load_model("bundled")):
    with pytest.raises(pytest.skip.Exception):
      load()
    assert said().startswith("loading bundled")
  decoder = types.SimpleNamespace(num_nodes=3, prefill=lambda *_, **__: None)
  writer = streaming.Writer(decoder, None, 0)
  for _ in range(2):  # the second uses what the first compiled
    writer.start([1, 2], 5)
  assert said() == "compiling for 10 tokens ...\n"


def test_a_corpus_gives_as_many_excerpts_as_it_holds(capsys, monkeypatch):
  # Broken: --num_prompts=100000 cuts and tokenises the same text for minutes.
  documents = [corpora.Document(f"{i}", "x = 1\n" * 20) for i in range(2)]
  assert len(prompts_lib.excerpts(documents, 10**9, 30)) == 8
  assert len(prompts_lib.excerpts(documents, 5, 30)) == 5
  monkeypatch.setattr(
      prompts.prompt_sets, "embedded",
      lambda name, count, characters, seed: (["a"] * min(count, 8), {}))
  tokenizer = types.SimpleNamespace(
      encode=lambda text: [1, 2], bos=None, chat_template=None)
  read = prompts.read(tokenizer, ["code"], field="", count=100_000, tokens=9,
                      seed=0, extra=3)
  assert (len(read.all), len(read.extra)) == (5, 3)
  assert capsys.readouterr().err == (
      "reading prompts ...\ncode has 5 prompts of this length, and "
      "--num_prompts is 100,000\n")


_COMMANDS = [*(ROOT / "experiments").glob("[!_]*.py"),
             *(ROOT / "experiments/runs").glob("*.sh")]


def test_commands_of_help_and_of_runs_have_known_flags():
  # Broken: a flag has a new name, and a command that reproduces a result has
  # the old one.
  count = 0
  for path in _COMMANDS:
    text = path.read_text("utf-8")
    text = text.replace("\\\\\n", " ").replace("\\\n", " ")
    for script, rest in re.findall(
        r"python experiments/(\w+\.py)([^\n|>]*)", text):
      with imported(script):
        known = set(flags.FLAGS)
        for name in re.findall(r"(?<!\S)'?--(\w+)", rest):
          count += 1
          assert {name, name.removeprefix("no")} & known, (path, script, name)
  assert count > 100
