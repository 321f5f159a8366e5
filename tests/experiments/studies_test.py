"""Scripts about trees, theorems and costs, from their flags to their files."""

import csv

import pytest
from scripts import last_line
from scripts import run
from scripts import run_all

pytestmark = pytest.mark.slow


def test_tree_study(tmp_path):
  """Every method has its row, and the tree that was chosen is reported."""
  (tmp_path / "mine.txt").write_text(
      "def a(x):\n\nimport os\n\nclass A:\n\nx = 1\n\n")
  study = last_line(*run_all("tree_study.py", [
      "--nodes=4", "--temperature=1", "--num_prompts=2",
      "--methods=chain_token,chain_block,traversal", "--max_new_tokens=16",
      "--drafter=tiny", "--prompts=mine.txt"], cwd=tmp_path))
  assert study["study"] == "trees"
  assert set(study["source"]["sets"]) == {"mine"}
  rows = {r["method"]: r for r in study["rows"]}
  assert len(rows) == len(study["rows"]) == 5
  assert rows["chain_token"]["over_best"] <= 0 == (
      rows["chain_block"]["over_best"])
  assert rows["traversal"]["over_best"] is None
  assert rows["traversal"]["over_bound"] <= 0
  assert rows["autoregressive"]["rounds"] == 16
  for row in rows.values():
    assert 16 / row["nodes"] <= row["rounds"] <= row["rounds_p90"] <= 16
    assert 1 <= row["tokens_per_pass"] <= row["nodes"]
    assert row["tokens_per_second"] > 0
    assert len(row["parents"]) == row["nodes"]
  assert {rows[name]["nodes"] for name in rows} <= {1, 4}
  assert (tmp_path / "results/trees/trees.csv").read_text().count("\n") == 6
  for name in ("tokens", "speed"):
    figure = tmp_path / f"results/trees/trees_{name}.png"
    assert figure.stat().st_size > 10_000


def test_trees_in_batches(tmp_path):
  # Broken: a row of a batch draws by its slot, or the mesh is ignored.
  flags = lambda *more: [
      "--nodes=3", "--temperature=1", "--num_prompts=3", "--prompts=code",
      "--methods=chain_block", "--max_new_tokens=8", "--drafter=tiny",
      "--timing=none", *more]
  rows_of = lambda name: list(csv.DictReader((tmp_path / name).open()))
  alone, together, no_devices, odd = run_all(
      "tree_study.py", flags("--batch=1", "--output_dir=alone"),
      flags("--batch=2", "--output_dir=together"),
      flags("--batch=128", "--mesh=data:64"),
      flags("--batch=3", "--mesh=data:2"), cwd=tmp_path)
  assert alone["code"] == together["code"] == 0
  [row], [other] = rows_of("alone/trees.csv"), rows_of("together/trees.csv")
  assert "speedup" not in row and row.keys() == other.keys()
  assert row["rounds"] == other["rounds"] and row["parents"] == other["parents"]
  assert float(row["tokens_per_pass"]) == pytest.approx(
      float(other["tokens_per_pass"]), abs=1e-5)
  assert "--mesh=data:64" in no_devices["code"]
  assert "--mesh=data:2" in odd["code"] and "3" in odd["code"]


def test_self_drafting_study(tmp_path):
  """Heads are compared with a language model; rules on the same drafts."""
  (tmp_path / "mine.txt").write_text("\n\n".join(
      f"def f{i}(x):\n  return {'x + ' * i}1" for i in range(8)))
  study = last_line(*run_all("self_drafting_study.py", [
      "--heads=medusa", "--nountrained",
      "--drafter=tiny", "--temperature=1", "--num_prompts=2", "--nodes=5",
      "--max_new_tokens=8", "--prompts=code,mine.txt"], cwd=tmp_path))
  assert study["study"] == "self_drafting"
  rows = {(r["drafter"], r["verifier"]): r for r in study["rows"]}
  assert len(rows) == len(study["rows"]) == 12
  for row in rows.values():
    assert 1 <= row["block_efficiency"] <= row["nodes"]
    assert row["speedup"] > 0 and row["added_parameters"] > 1e5
  assert not rows["medusa, top-k tree", "typical"]["lossless"]
  assert rows["medusa, sampled tree", "traversal"]["training_tokens"] > 0
  assert {(p["verifier"], p["over"]) for p in study["paired"]} == {
      ("block", "token"), ("traversal", "recursive"), ("traversal", "k_seq")}
  first, *_, last = study["accuracy"]["medusa"]
  assert first[0] > last[0] > 0.01  # a head knows less the further it looks
  assert (tmp_path / "results/self_drafting/self_drafting.csv").exists()
  for name in ("tokens", "speed", "positions", "training"):
    figure = tmp_path / f"results/self_drafting/self_drafting_{name}.png"
    assert figure.stat().st_size > 10_000


def test_boost_drafters(tmp_path):
  """The second drafter proposes what the first does not."""
  flags = ["--drafter=tiny", "--rows=32", "--held_out_rows=8", "--gamma=2",
           "--prompt_tokens=16", "--continuation=16", "--output_dir=out",
           "--data=mine.txt", "--evaluate_every=0", "--learning_rate=0.01"]
  (tmp_path / "mine.txt").write_text("\n\n".join(
      f"def f{i}(x, y):\n  return x + {i} * y" for i in range(400)))
  done, refused = run_all("boost_drafters.py", ["--steps=20", *flags],
                          ["--window=5", *flags], cwd=tmp_path)
  study = last_line(done)
  assert study["study"] == "boost_drafters"
  first, both = study["coverage"]
  assert first == study["top_k_coverage"][0] and both > first
  assert set(study["tokens_per_pass"]) == {"0", "1"}
  # Its proposals differ from those that it was told to leave to the first.
  greedy = study["tokens_per_pass"]["0"]
  assert greedy["boosted"] > greedy["first_alone"] >= 1
  assert "--window is 5 and does not divide --continuation=16" in (
      refused["code"])


def test_optimality(tmp_path):
  """The theorems hold, and the ascent comes near the supremum 2 / sqrt(3)."""
  study = last_line(run(
      "optimality.py", "--largest=3", "--seeds=1", "--gamma=2",
      "--steps=300", "--starts=2", "--round_pairs=14", cwd=tmp_path,
      optimised=True))
  assert study["study"] == "optimality" and study["pairs"] == 12
  assert study["bernoulli"]["greedy_block"] == pytest.approx(
      [21 / 9, 40 / 9, 59 / 9, 78 / 9], abs=1e-12)
  for gap in ("max_lp_gap", "max_prefix_gap", "max_full_information_gap",
              "max_transport_gap", "max_certificate_gap"):
    assert abs(study[gap]) <= 1e-9
  assert study["ordered"]
  tokens = {(row["gamma"], row["rounds"]): row for row in study["two_rounds"]}
  assert tokens[3, 2]["patient"][1] - tokens[3, 2]["block"][1] == 1 / 8
  assert study["round_pairs"] == 14 and study["lp_gap"] <= 1e-7
  assert min(study["value_margin"], study["text_margin"]) >= -1e-12
  for row in study["draft_lengths"]:
    assert row["best"] == min(x for k, x in row.items() if k != "token_cost")
  best = {(r["vocab"], r["models"]): r for r in study["extremal"]}
  assert len(best) == 6
  assert best[2, "i.i.d."]["ratio"] == pytest.approx(1.0774, abs=1e-3)
  assert best[2, "context"]["ratio"] == pytest.approx(2 / 3**0.5, abs=1e-3)
  assert best[2, "context"]["supremum"] == pytest.approx(2 / 3**0.5, abs=1e-3)
  assert (tmp_path / "results/optimality/optimality.csv").exists()
  # Linear growth: the ratio over gamma is nearly constant.
  *_, early, late = [row["ratio"] / row["gamma"] for row in study["growth"]]
  assert 0.06 < late < early < 0.07
  for name in ("rounds", "pairs", "two_rounds", "extremal", "growth"):
    figure = tmp_path / f"results/optimality/optimality_{name}.png"
    assert figure.stat().st_size > 10_000


def test_benchmark(tmp_path):
  """Every ratio that docs/results/costs.md quotes is there."""
  study = last_line(*run_all("benchmark.py", [
      "--models=bundled", "--pairs=3", "--made=1",
      "--nodes=8", "--sum_megabytes=1"], cwd=tmp_path))
  assert study["study"] == "benchmark"
  ratios = dict(study["ratios"])
  assert set(ratios.pop("pass_cost")) == {"5", "9", "17"}
  assert 0 < ratios.pop("training") < 2
  laws = ratios.pop("tree_law")
  assert {"Traversal 1", "KSeq 8"} <= set(laws) and len(laws) == 8
  assert all(value > 0 for value in laws.values())
  assert set(ratios) == {"bandwidth", "round_overhead", "allocation",
                         "block_over_token", "autoregressive_loop"}
  assert all(value > 0 for value in ratios.values())


def test_controller_study(tmp_path):
  """The controller stands beside every fixed length, of which one is best."""
  (tmp_path / "mine.txt").write_text("def f(x):\n  return x\n\n" * 3)
  study = last_line(*run_all("controller_study.py", [
      "--drafter=noise", "--slots=2", "--gamma=2",
      "--batches=2", "--num_prompts=2", "--max_new_tokens=16",
      "--prompts=mine.txt"], cwd=tmp_path))
  assert study["study"] == "controller" and study["lengths"] == [2]
  rows = {row["length"]: row for row in study["rows"]}
  assert list(rows) == ["0", "2", "controller"]
  assert rows["0"]["speedup"] == 1 and rows["2"]["best"] in rows
  assert rows[rows["2"]["best"]]["over_best"] == 1
  assert all(row["tokens_per_second"] > 0 for row in rows.values())


def test_distillation_study(tmp_path):
  """Every loss stands beside the drafter as it was, of which it is a change."""
  (tmp_path / "mine").mkdir()
  for i in range(20):
    (tmp_path / f"mine/{i}.txt").write_text(f"def f{i}(x):\n  return x\n" * 9)
  study = last_line(*run_all("distillation_study.py", [
      "--data=mine", "--drafter=tiny",
      "--losses=adaspec,block", "--seeds=1", "--rows=8", "--steps=2",
      "--gamma=2", "--continuation=8",
      "--num_prompts=2", "--rounds=2"], cwd=tmp_path))
  assert study["study"] == "distillation" and study["tokens"] == 2 * 8 * 8
  rows = {row["loss"]: row for row in study["rows"]}
  assert list(rows) == ["none", "adaspec", "block"]
  assert rows["none"]["block_gain"] == 0 != rows["block"]["block_gain"]
  assert all(1 < row["token_tokens_per_round"] < 3 for row in rows.values())
  # The reference of AdaSPEC is a run of its own.
  assert (tmp_path / "results/distillation/forward_kl_0/run.json").exists()


def test_online_study(tmp_path):
  """What is learned goes from one request to the next, and nowhere else."""
  for name, line in (("code", "def f(x):\n  return x\n"), ("prose", "a b c ")):
    (tmp_path / name).mkdir()
    for i in range(20):
      (tmp_path / f"{name}/{i}.txt").write_text(f"{i} " + line * 9)
  given = [
      "--data=code", "--prose=prose", "--drafter=tiny", "--users=2",
      "--code_tokens=30", "--prose_tokens=60", "--window=20", "--rounds=8",
      "--prompt_tokens=8", "--gamma=2", "--rank=0"]
  first, more, other = run_all("online_study.py", given, [*given, "--seeds=2"],
                               [*given, "--positions=all"], cwd=tmp_path)
  study = last_line(more)
  for done in (first, more):  # a seed each, without and with learning
    assert done["stderr"].count("code: ") == 2
  assert "results of --positions=path" in other["code"]
  assert study["study"] == "online"
  found = {}
  for row in study["rows"]:
    found.setdefault(row["drafter"], []).append(row["accepted"])
  fixed, learning = found["tiny, fixed"], found["tiny, learning"]
  # The second request is where what the first one taught is of use.
  assert abs(fixed[0] - learning[0]) < 1 and fixed[1:] != learning[1:]
  assert len({text for texts in study["texts"].values() for text in texts}) == 4
  assert study["summaries"]["tiny, fixed"]["over_fixed"] in (0, None)
  assert (tmp_path / "results/online/online.png").stat().st_size > 10_000


def test_free_drafts_study(tmp_path):
  """Drafts of copies gain tokens, noise gains none, and all texts are one."""
  (tmp_path / "mine.txt").write_text("\n\n".join(
      f"def f{i}(x):\n  return x + {i}\n" * 6 for i in range(2)))
  study = last_line(*run_all("free_drafts_study.py", [
      "--drafter=ngram,noise|ngram", "--nocontroller",
      "--transformers=no", "--num_prompts=2", "--max_new_tokens=24",
      "--gamma=4", "--prompts=mine.txt"], cwd=tmp_path))
  assert study["study"] == "free_drafts" and study["different"] == 0
  rows = {row["drafter"]: row for row in study["rows"]}
  assert list(rows) == ["none", "ngram", "noise|ngram"]
  assert rows["none"]["tokens_per_round"] == 1 == rows["none"]["speedup"]
  assert rows["none"]["speedup_total"] == 1
  assert rows["ngram"]["decoding_speedup_total"] > 0
  assert rows["ngram"]["tokens_per_round"] >= 2
  assert rows["ngram"]["gain"] == 0 > rows["none"]["gain"] > -1
  assert rows["ngram"]["verifier"] == "token" and rows["ngram"]["speedup"] > 0
  # There is always noise, and so the n-grams have no turn.
  assert rows["noise|ngram"]["tokens_per_round"] < 1.2
  results = tmp_path / "results/free_drafts"
  assert (results / "free_drafts.csv").read_text().count("\n") == 4
  for name in ("tokens", "speedup"):
    assert (results / f"free_drafts_{name}.png").stat().st_size > 10_000
