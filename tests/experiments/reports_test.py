"""What tables and figures of studies claim, and how they look."""

import subprocess
import sys

import numpy as np
import pytest
from scripts import environment
from scripts import imported
from scripts import ROOT
from scripts import run

sys.path.append(str(ROOT / "experiments"))
from lib import common  # noqa: E402
from lib import flag_names  # noqa: E402
from lib import flags as shared  # noqa: E402
from lib.figures import curves  # noqa: E402
from lib.figures import style  # noqa: E402
from lib.reports import advice  # noqa: E402
from lib.reports import arena_report  # noqa: E402
from lib.reports import growth  # noqa: E402
from lib.reports import tables  # noqa: E402
from lib.reports import text_rounds  # noqa: E402
from lib.reports import verification_report  # noqa: E402


@pytest.fixture
def paper():
  """--figure_style=paper."""
  flags = shared.flags.FLAGS
  shared.figure_style()
  flags.figure_style = "paper"
  yield
  delattr(flags, "figure_style")


@pytest.fixture
def drawn(monkeypatch):
  """Figures that a test saves, by name."""
  found, save = {}, style.save

  def saved(figure, path, *title):
    found[path.name] = figure
    save(figure, path, *title)

  monkeypatch.setattr(style, "save", saved)
  return found


def test_a_figure_of_a_paper_fits_a_column(paper, tmp_path):
  # Broken: a figure of 9 inches with a title, whose legend is cut off.
  del paper
  import matplotlib.image  # pylint: disable=g-import-not-at-top
  for rows, columns in ((1, 1), (1, 2), (2, 3)):
    figure, grid = style.panels(rows, columns)
    assert grid.shape == (rows, columns)
    for axes in grid.flat:
      axes.plot([1, 2], [1, 2], label="without replacement, traversal")
      axes.set(title="temperature 1", ylabel="tokens")
    style.save(figure, tmp_path / "x.png", "A title")
    assert figure.get_figwidth() == 3.3 and not figure.get_suptitle()
    image = matplotlib.image.imread(tmp_path / "x.png")
    assert image.shape[1] == 3.3 * 300
    assert (image[:, [0, -1], :3] == 1).all()  # nothing is cut off
    for axes in grid.flat:
      legend = axes.get_legend()
      assert legend.get_title().get_text() == (
          "temperature 1" if grid.size > 1 else "")
      assert not axes.get_title()
  assert (tmp_path / "x.pdf").stat().st_size > 1000


def test_curves_differ_in_grey():
  # Broken: two curves of a figure differ only in their colour.
  for looks in (style.looks(16), [style.look(name) for name in (
      "chain_token", "chain_block", "specinfer", "iid_traversal", "k_seq",
      "without_replacement", "traversal", "hybrid", "top_k")]):
    assert len({(x["marker"], x["linestyle"]) for x in looks}) == len(looks)
  assert len({x["color"] for x in style.looks(8)}) == 8


def test_learning_curves_begin_at_step_0(drawn, tmp_path):
  # Broken: the value before training is missing, and with it the gain.
  (tmp_path / "metrics.csv").write_text(
      "step,name,value\n5,bits_per_byte,2.0\n9,bits_per_byte,1.5\n")
  curves.draw(tmp_path, ["bits_per_byte"], "loss", {"bits_per_byte": 8.0})
  [line] = [line for axes in drawn["curves.png"].axes for line in axes.lines]
  assert line.get_xydata().tolist() == [[0, 8], [5, 2], [9, 1.5]]


def test_the_growth_of_the_ratio_is_that_of_the_ratio(drawn, tmp_path):
  # Broken: the figure shows the ratio divided by gamma.
  growth.plot([{"gamma": 16, "ratio": 2.0, "two_phase": 1.5}], {2: 1.15},
              tmp_path / "x.png")
  values = {line.get_label(): line.get_ydata().tolist()
            for line in drawn["x.png"].axes[0].lines}
  assert values["explicit pairs"] == [2] and values["simple pairs"] == [1.5]
  assert values["bound B(gamma)"][1] == pytest.approx(4.5156, abs=1e-4)


def _verification_row(verifier, prompts="all", **columns):
  estimate = lambda name, x: {name: x, f"{name}_low": x, f"{name}_high": x}
  return {"prompts": prompts, "drafter": "small", "temperature": 1.0,
          "gamma": 4, "verifier": verifier, "clusters": 9,
          **estimate("paired_block_efficiency", 2.0), **estimate("gain", 0.1),
          **columns}


def test_a_table_has_no_empty_columns(drawn, tmp_path, capsys):
  # Broken: --noown_rollouts gives no tokens per target call, and columns of
  # "-"; or a figure puts a rule first that is best in first rounds only.
  rules = ("token", "block", "greedy_block")
  rows = [_verification_row(rule, name)
          for name in ("all", "code") for rule in rules]
  for caption, table in verification_report.captioned(rows).items():
    assert not {"", "-"} & {cell for row in table for cell in row.values()}
    assert "same drafts: tokens of block" in table[0]
    assert "same drafts, first round: gain of greedy block" in table[0]
    if caption.startswith("By prompt set"):
      assert [row["prompts"] for row in table] == ["code", "all"]
  verification_report.draw(tmp_path, rows)
  for name, labels in (("tokens", ["token", "block"]), ("gain", ["block"])):
    axes = drawn[f"verification_{name}.png"].axes[0]
    assert axes.get_legend_handles_labels()[1] == labels
  verification_report.print_table(rows[:3])
  assert "autoregressive" not in capsys.readouterr().out
  assert verification_report.conclusion(rows[:3]) == (
      "block, small, temperature 1, gamma 4: +10.0% [+10.0%, +10.0%] tokens "
      "per target call over token verification, on the same drafts\n")
  own = [_verification_row(rule, block_efficiency=2.0, block_efficiency_low=1.9,
                           block_efficiency_high=2.1) for rule in rules]
  [table, *_] = verification_report.captioned(own).values()
  assert table[0]["own rollouts: tokens of block"] == "2.00 [1.90, 2.10]"


def test_a_table_as_latex():
  # Broken: LaTeX takes a name with "_", "%" or "&" for a command.
  text = tables.latex([{"a_b": r"5 % & #1 \x {y}~^$<"}], "C_1")
  assert r"5 \% \& \#1 \textbackslash{}x \{y\}\textasciitilde{}" in text
  assert r"\textasciicircum{}\$\textless{} \\" in text
  assert r"\caption{C\_1}" in text and text.count("rule") == 3


def test_tokens_per_target_call_count_all_calls():
  # Broken: a drafter with two target calls per round is first in the arena, or
  # advice takes half of its speed for its speed.
  row = lambda draft, calls, tokens: {
      "prompts": "all", "temperature": 1.0, "draft": draft, "verifier": "token",
      "gamma": 2, "nodes": None, "clusters": 3, "target_calls": calls,
      "block_efficiency": tokens, "block_efficiency_low": None,
      "block_efficiency_high": None}
  rows = [row("two", 2, 1.15), row("one", 1, 1.3)]
  [table] = arena_report.captioned(rows).values()
  assert [line["draft"] for line in table] == ["one", "two"]
  assert table[1]["gamma 2"] == "1.15 (no interval)" and table[1]["n"] == "3"

  class Costs:
    rounds = None

    def seconds(self, *_):
      return 1.0, 2.0

  two, one = advice.predict(rows, Costs(), [4], [64])
  assert two["speedup"] == pytest.approx(2 * 1.15 / 2)
  assert two["tokens_per_second"] == pytest.approx(4 * 2 * 1.15 / 2)
  assert one["speedup"] == pytest.approx(1.3 / 2)


def test_the_median_of_speeds_has_an_interval():
  # Broken: an interval of few prompts, one beyond the values, or one that
  # prompts of one document make narrow.
  values = np.arange(1.0, 42)
  found = text_rounds.median(values, range(41))
  assert found.value == 21 and 13 <= found.low < 21 < found.high <= 29
  shared_documents = text_rounds.median(np.repeat(values, 3), np.repeat(
      values, 3))
  assert shared_documents[:3] == found[:3]
  few = text_rounds.median(values[:5], range(5))
  assert few.value == 3 and np.isnan([few.low, few.high]).all()


def test_a_study_does_not_replace_another(tmp_path):
  # Broken: tables of other settings are replaced without a word, or a killed
  # study, one with more prompts or one of a paper's figures is refused.
  with imported("verification_study.py") as study:
    flags = study.flags.FLAGS
    parse = lambda *more: (flags.unparse_flags(), flags([
        "x", "--gamma=2,4", *more]))
    claim = lambda: common.claim(tmp_path, "verification")
    parse("--error=1")
    claim()
    parse("--error=2")  # the first study has no results yet
    claim()
    (tmp_path / "verification.json").write_text("{}")
    extended = ["--error=2"]
    for more in ([], ["--figure_style=paper", "--output_dir=elsewhere"],
                 ["--temperature=0,1"], ["--num_prompts=99"]):
      extended += more
      parse(*extended)
      claim()
    for more, names in ((["--error=3"], ["--error=2.0", "--error=3.0"]),
                        (["--gamma=4"], ["--gamma=2,4", "--gamma=4 "]),
                        (["--temperature=1"], ["--temperature=0,1"]),
                        (["--num_prompts=9"], ["--num_prompts=9 "]),
                        (["--noown_rollouts"],
                         ["--own_rollouts", "--noown_rollouts"])):
      parse(*extended, *more)
      with pytest.raises(ValueError, match="choose another --output_dir") as e:
        claim()
      assert all(name in str(e.value) + " " for name in names), e.value
      assert "\n" not in str(e.value)
    flags.unparse_flags()


def test_flags_are_known_before_they_are_declared():
  # Broken: a flag is refused because its name is not found in the sources.
  for path in (ROOT / "experiments").glob("[!_]*.py"):
    with imported(path.name):
      flag_names.check([f"--{name}=1" for name in shared.flags.FLAGS])


def test_help_is_no_failure(tmp_path):
  # Broken: a shell script with `set -e` ends, or a misspelt flag takes seconds.
  found = run("redraw.py", "--help", cwd=tmp_path)
  assert found.returncode == 0 and "--figure_style" in found.stdout
  found = run("train_lm.py", "--no_such_flag", cwd=tmp_path)
  assert found.returncode == 1 and found.stderr == (
      "error: Unknown command line flag 'no_such_flag'; see --help\n")
  subprocess.run([sys.executable, "-c", (
      "import sys; import lib.flag_names; assert 'jax' not in sys.modules")],
                 cwd=ROOT / "experiments", env=environment(), check=True)


@pytest.mark.parametrize("arguments,name", [
    (["--gama=3"], "gama"), (["--chat", "--gamma", "4", "--tempature=1"],
                             "tempature"),
    (["--nochatt"], "nochatt"), (["-sead=1"], "sead")])
def test_a_misspelt_flag_needs_no_jax(arguments, name):
  with pytest.raises(SystemExit, match=f"error: Unknown .* '{name}'"):
    flag_names.check(arguments)


def test_known_flags_and_values_pass():
  # Broken: a value that begins with dashes is taken for a flag.
  flag_names.check(["--prompt", "--gama", "--nochat", "--seed=1", "--helpfull"])
  flag_names.check(["--undefok=gama", "--gama=1"])
