"""What studies measure beforehand, up to where the first program is made."""

import shutil
import sys
import types

import numpy as np
import pytest
from safetensors.flax import load_file
from safetensors.flax import save_file
from scripts import imported
from scripts import ROOT

sys.path.append(str(ROOT / "experiments"))

from lib import common  # noqa: E402
from lib import models  # noqa: E402
from lib.figures import style  # noqa: E402
from lib.prompts import reading as prompts_lib  # noqa: E402
from lib.reports import growth  # noqa: E402
from lib.reports import self_drafting_report as report  # noqa: E402
from lib.reports import verification_cells as cells  # noqa: E402

import specjax as sj  # noqa: E402
from specjax import methods  # noqa: E402
from specjax import testing  # noqa: E402


def _error(study, *flags):
  """The line that a study ends with."""
  with pytest.raises(SystemExit) as caught:
    common.run(study.main, [study.__name__, *flags])
  return caught.value.code


@pytest.mark.parametrize("method", methods.METHODS, ids=lambda m: m.name)
def test_what_a_method_compares_has_a_name_and_a_colour(method):
  # Broken: a study of hours ends in a figure that cannot be drawn.
  target = testing.tiny_pair(16, layers=4).target
  heads = method.heads.for_target(
      target, 3, **{o.name: o.default for o in method.head_options})
  for draft, found in method.compared(
      heads, lambda: (-1, 0, 0, 1, 1, 3)).items():
    for strategy in found:
      rule = common.VERIFIER_NAMES[strategy.verifier]
      shown = report._method({"drafter": f"heads, {draft}", "verifier": rule})
      assert style.label(shown) and style.rule(rule)
      assert style.color(shown).startswith("#")


class _Setting:
  """Of a study that measures nothing."""

  params = eos = batch = None

  def __init__(self, target, drafter, groups, *_):
    self.target, self.drafter, self.groups = target, drafter, groups

  def decoder(self, *_):
    pass


def test_trees_belong_to_the_prompts_they_were_measured_on(
    tmp_path, monkeypatch):
  # Broken: a study of other prompts takes the trees of the first one's.
  def plans(setting, temperatures, budgets, path):
    raise ValueError(path.name)

  for name in "ab":
    (tmp_path / f"{name}.txt").write_text(
        "\n\n".join(f"{name} = {i}" for i in range(6)))
  with imported("tree_study.py") as study:
    monkeypatch.setattr(study, "_Setting", _Setting)
    monkeypatch.setattr(study, "_plans", plans)
    first, again, other = (
        _error(study, f"--prompts={tmp_path / name}.txt", "--drafter=tiny",
               f"--output_dir={tmp_path / 'out'}") for name in "aab")
  assert first.startswith("error: plan-") and first == again != other


def test_heads_that_were_trained_again_are_measured_again(
    tmp_path, monkeypatch):
  # Broken: the texts that other weights wrote are taken for theirs, or what
  # was found without transformers stays without when it is installed.
  def run(units, *_, **__):
    raise ValueError(units[0][0])

  (tmp_path / "mine.txt").write_text("a = 1\n\nimport os")
  heads = tmp_path / "heads"
  shutil.copytree(sj.zoo.heads_path("medusa"), heads)
  with imported("free_drafts_study.py") as study:
    monkeypatch.setattr(study.resumable, "run", run)
    monkeypatch.setattr(study.generation, "prepare_torch",
                        lambda: {"torch": "9.9"})
    fingerprint = lambda compared: _error(
        study, f"--drafter={heads}", f"--prompts={tmp_path / 'mine.txt'}",
        "--max_new_tokens=8", f"--transformers={compared}",
        f"--output_dir={tmp_path / 'out'}")
    first, again, with_theirs = map(fingerprint, ("no", "no", "yes"))
    weights = load_file(heads / "heads.safetensors")
    save_file({name: -x for name, x in weights.items()},
              heads / "heads.safetensors")
    other = fingerprint("no")
  assert first == again and len({first, with_theirs, other}) == 3


def test_passes_are_timed_over_the_cache_that_is_decoded(tmp_path, monkeypatch):
  # Broken: a study of short prompts, or of messages, which have a template
  # around them, reports the passes of another length.
  def passes(model, params, capacity, used, nodes):
    raise ValueError(f"{used} of {capacity} slots")

  (tmp_path / "mine.txt").write_text("a = 1\n\nimport os")
  with imported("verification_study.py") as study:
    monkeypatch.setattr(study.timing, "passes", passes)
    monkeypatch.setattr(study.resumable, "run",
                        lambda *_, beside, **__: beside[0]())
    found = _error(study, f"--prompts={tmp_path / 'mine.txt'}", "--gamma=3",
                   "--max_new_tokens=16", "--drafter=tiny",
                   f"--output_dir={tmp_path / 'out'}")
  tokenizer = models.load_tokenizer(sj.zoo.tokenizer_path())
  longest = max(len(tokenizer.encode(text)) for text in ("a = 1", "import os"))
  assert found == f"error: {longest + 8} of {longest + 20} slots"


def test_a_study_says_of_which_vocabulary_its_drafters_are(monkeypatch):
  # Broken: results of a smaller head are taken for those of the whole one, or
  # texts that nothing is counted in pass in silence.
  said = []
  study_of = types.SimpleNamespace(
      rows=lambda *_: [], half_width=lambda _: None, prompt_rows=lambda: [],
      baseline_speed=lambda: 1.0)
  with imported("verification_study.py") as study:
    for name in ("print_table", "write"):
      monkeypatch.setattr(study.report, name, lambda *_: None)
    monkeypatch.setattr(study.common, "finish",
                        lambda *args: said.append(args[-1]))
    for given in ([], ["--draft_vocabulary=9", "--vocabulary_data=mine.txt"]):
      study.flags.FLAGS(["verification_study.py", *given])
      study._report(study_of, {}, {}, {}, "out")
      study.flags.FLAGS.unparse_flags()
    monkeypatch.setattr(study.drafters_lib, "load", None)  # or it decodes
    assert "--vocabulary_data=mine.txt requires" in _error(
        study, "--vocabulary_data=mine.txt")
  assert [found["draft_vocabulary"] for found in said] == [
      None, {"size": 9, "data": "mine.txt"}]


def _unit(number, name, digest):
  return "print", 1.0, 0, name, number, digest


def test_intervals_of_a_study_are_over_clusters():
  # Broken: two excerpts of one module, or two seeds of a prompt, count as two.
  rng = np.random.default_rng(0)
  rules = common.verifiers("--verifier", ["token", "block"])
  units = [_unit(i, name, f"{name}{i}") for i in range(6)
           for name in ("code", "docstrings")]
  units += [("print", 1.0, 1, *unit[3:]) for unit in units]
  run = lambda: {"rounds": 9, "expected": [9 * rng.uniform()], "survival": [
      [9, *(9 * rng.uniform(size=2))] for _ in range(3)], "seconds": 1.0,
                 "tokens": 20}
  names = [cells.BASELINE, cells.shared_key("d"),
           *(cells.key("d", 2, rule) for rule in ("token", "block"))]
  runs = {unit: {name: run() for name in names} for unit in units}
  rows = {}
  for words, cluster_of in (("prompts", lambda x: x),
                            ("modules", lambda x: x[-1])):
    study = cells.Study(
        runs, ["d"], [2], rules, {
            "verify": {2: 1.0}, "draft": {"d": 0.1}}, cluster_of)
    rows[words] = study.rows()[1]
    assert study.half_width("block") == pytest.approx(
        (rows[words]["gain_high"] - rows[words]["gain_low"]) / 2)
    for row, again in zip(study.rows(), cells.recomputed(
        study.rows(), study.prompt_rows()), strict=True):
      assert again == pytest.approx(row)
  assert rows["prompts"]["clusters"] == rows["prompts"]["num_prompts"] == 12
  assert rows["modules"]["clusters"] == 6
  assert rows["modules"]["gain"] == pytest.approx(rows["prompts"]["gain"])
  shared = [[run[cells.shared_key("d")]["survival"][1 + law]
             for run in runs.values()] for law in (0, 1)]
  token, block = (np.array(x)[:, 1:].sum() / (9 * 24) for x in shared)
  assert rows["modules"]["gain"] == pytest.approx((1 + block) / (1 + token) - 1)
  few = cells.Study({unit: runs[unit] for unit in units[:4]}, ["d"], [2],
                    rules)
  assert few.half_width("block") is None
  # Broken: prompts without own rollouts count as observations of them.
  own, shared = (cells.Study(some, ["d"], [2], rules).rows()[1] for some in (
      {unit: runs[unit] for unit in units[:8]}, runs))
  some = cells.Study({
      unit: found if unit in units[:8] else {names[1]: found[names[1]]}
      for unit, found in runs.items()}, ["d"], [2], rules)
  for name, value in some.rows()[1].items():
    is_own = name.startswith(("own_", "block_", "rounds", "slow_"))
    assert value == (own if is_own else shared).get(name, value), name
  assert some.baseline_speed() == 20
  assert some.rows()[1]["own_clusters"] == own["clusters"]


def test_a_pilot_chooses_how_many_prompts_are_decoded(capsys):
  # Broken: prompts of the pilot's documents are reported on, fewer clusters
  # are decoded than are needed, or a user's few prompts are none at all.
  sets = {"a": [[i] for i in range(4)], "b": [[i] for i in range(2, 9)]}
  read = prompts_lib.Prompts(sets, [[0], [20], [21]], {}, {})
  asked = []
  study = types.SimpleNamespace(clusters_needed=lambda rule, half: (
      asked.append(half), 5)[1])
  with imported("verification_study.py") as script:
    script.flags.FLAGS(["verification_study.py", "--error=2"])
    turns = script._turns(5, read)
    needed = script._needed(read, lambda rows: asked.append(rows),
                            lambda runs: study)
    none = script._needed(read._replace(extra=[]), None, None)
    script.flags.FLAGS.unparse_flags()
  assert turns == {"a": [[0], [1], [2]], "b": [[2], [3], [4]]}
  assert needed == 5 and asked == [[[20], [21]], 0.02]
  assert none is None and "all prompts are decoded" in capsys.readouterr().err


def test_curves_of_equal_x_are_a_fixed_distance_apart(tmp_path):
  # Broken: the distance grows with the range of x, and with one draft length
  # one rule is at the left edge and another at the right; or no curve is seen.
  places = []
  for values in ([8], [2, 4, 8, 16, 64]):
    figure, [[axes]] = style.panels()
    style.tried(axes, values)
    curves = [axes.errorbar(values, [70.0] * len(values), 9.0)
              for _ in range(3)]
    for i, curve in enumerate(curves):
      style.apart(curve, i, 3)
    lines = [curve.lines[0] for curve in curves]
    style.save(figure, tmp_path / "x.png")
    low, high = axes.get_ylim()
    assert low < 61 and 79 < high < 99
    [bars] = curves[0].lines[2]
    assert bars.get_transform() == lines[0].get_transform()
    middle = axes.transData.transform((values[0], 1))[0]
    points = 72 / figure.dpi
    places.append([points * (line.get_transform().transform(
        (values[0], 1))[0] - middle) for line in lines])
    edges = axes.transData.transform([(x, 1) for x in axes.get_xlim()])[:, 0]
    assert min(abs(edges - middle)) * points > 20
  np.testing.assert_allclose(places[0], places[1], atol=1e-6)
  assert places[0] == sorted(places[0]) and places[0][1] == pytest.approx(0)
  assert 1 < places[0][2] - places[0][1] < 10


@pytest.mark.parametrize("sign", [1, -1])
def test_what_came_back_is_reported_whatever_was_lost(sign):
  # Broken: a share of a noisy loss is left out where that loss is below 0, so
  # those that are reported are chosen by their noise.
  rng = np.random.default_rng(0)
  code, first, last = rng.normal(size=(3, 8)) + [[9], [9 - 4 * sign], [7]]
  windows = {(0, 0): code, (1, 0): first, (1, 1): last}
  with imported("online_study.py") as study:
    found = study._summary(windows, windows)
  assert (found["lost"] > 0) == (sign > 0) and found["clusters"] == 8
  assert found["recovered"] == pytest.approx(
      (last - first).mean() / (code - first).mean())
  assert found["recovered_low"] < found["recovered"] < found["recovered_high"]
  assert found["over_fixed"] == 0


def test_a_topic_without_the_other(monkeypatch):
  # Broken: a drafter that is to know code alone has read prose, or other code.
  monkeypatch.syspath_prepend(ROOT / "experiments" / "runs")
  code = ('"""A module."""\n\nX = "# here"  # why\n\n\ndef f():\n  """Does\n\n'
          '  it."""\n  # Note.\n  return {\n      1: "two",  # two\n  }\n')
  with imported("online_texts.py") as texts:
    assert texts.without_prose(code) == (
        'X = "# here"\ndef f():\n  return {\n      1: "two",\n  }\n')
    # Broken: what comes after a form feed is cut at the wrong lines.
    paged = "X = 1\n\f\ndef f():\n  'Does it.'\n  return 'a\x85'  # Note.\n"
    assert texts.without_prose(paged) == (
        "X = 1\ndef f():\n  return 'a\x85'\n")


def test_what_could_not_be_measured_is_refused(tmp_path):
  # Broken: hours of training end in no numbers, a division by 0 or an empty
  # table, or a temperature that is written twice is decoded twice.
  with imported("optimality.py") as study:
    assert "at most 12" in _error(study, "--gamma=2,13")
  with imported("boost_drafters.py") as study:
    found = _error(study, "--continuation=9999", f"--output_dir={tmp_path}")
    assert "--continuation 9999" in found and "may be 512" in found
  with imported("distill.py") as study:
    study.flags.FLAGS(["distill", f"--output_dir={tmp_path}"])
    with pytest.raises(ValueError, match="no answer can be evaluated"):
      study._evaluation(None, _Unanswered(range(2)))
  assert common.numbers("--temperature", ["1", "1.0", "0.6"]) == [1.0, 0.6]


def test_pairs_whose_gain_grows_are_pairs_of_models():
  # Broken: the ratio of a recursion that no two models have. Here are the
  # tables of the models, with s of every context, and both rules on them.
  gamma, start, back = 7, 80, 360  # s = 0.2 and 0.9 in units of 1 / 400
  levels, p, q = [np.array([0])], [], []
  for depth in range(gamma + 1):
    s = levels[-1]
    step = max(1, round(400 * 0.6 / (depth + 8)**0.7)) if depth else 0
    step = np.minimum(step, np.minimum(s, 400 - s))
    if not depth:
      rows = [(start / 400, 1 - start / 400)], [(1, 0)]
      after = np.array([start, 0])
    else:
      moves = step > 0
      up = np.where(moves, 1 + step / np.maximum(s, 1), 2 * back / 400)
      up = np.where(s == 0, 0, up) / 2
      rows = (np.stack([up, 1 - up], 1),
              np.where(moves[:, None], 0.5, (1, 0)))
      after = np.stack([np.where(moves, s + step, np.where(s == 400, back, 0)),
                        np.where(moves, s - step, 0)], 1).reshape(-1)
    p.append(np.array(rows[0], float))
    q.append(np.array(rows[1], float))
    levels.append(after)
  pair = sj.exact.Pair(p, q)
  block, token = (sj.exact.expected_tokens(rule, pair, gamma, 1)[0]
                  for rule in (sj.verifiers.Block(), sj.verifiers.Token()))
  assert abs(block / token - growth.walk(gamma)) <= 1e-12


class _Unanswered(list):
  """Rows that end before their answers begin."""

  def rows(self, at):
    return {"weights": np.zeros((len(at), 4))}


@pytest.mark.slow
def test_what_flags_make_wrong_is_refused_before_the_target_writes(
    tmp_path, monkeypatch):
  # Broken: the target answers for hours, and then a flag is refused or the
  # directory holds a model of somebody else.
  def answered(*_):
    raise ValueError("it writes")

  texts, other = tmp_path / "texts", tmp_path / "other"
  texts.mkdir()
  for i in range(40):
    (texts / f"{i:02}.txt").write_text(f"a = {i}\n")
  other.mkdir()
  (other / "model.safetensors").write_bytes(b"")
  with imported("train_drafter.py") as script:
    monkeypatch.setattr(script.drafter_rows.Source, "check", lambda *_: None)
    monkeypatch.setattr(script.drafter_rows.Source, "answered", answered)
    run = lambda *flags, output_dir=tmp_path / "out": _error(
        script, "--target=bundled", f"--data=self:{texts}",
        "--self_chat", "--row_tokens=64", f"--output_dir={output_dir}", *flags)
    for flags, words in (  # a flag keeps its value from run to run
        (["--method=eagle1", "--narrow_head"], "--narrow_head requires"),
        (["--method=medusa", "--nonarrow_head", "--keep_features"],
         "--keep_features is set"),
        (["--nokeep_features", "--draft_vocabulary=100"], "LM head"),
        (["--method=eagle3", "--draft_vocabulary=1000000"], "between")):
      assert words in run(*flags)
      assert not (tmp_path / "out").exists()
    assert "model.safetensors" in run(
        "--draft_vocabulary=100", output_dir=other)
    assert run() == "error: it writes"
