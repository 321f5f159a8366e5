"""The offline evaluation of drafters: statistics, traces, faults, arena."""

import itertools
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts import last_line
from scripts import ROOT
from scripts import run_all

import specjax as sj
from specjax import methods

sys.path.append(str(ROOT / "experiments"))

from lib import common  # noqa: E402
from lib import drafters  # noqa: E402
from lib.configurations import decoders  # noqa: E402
from lib.prompts import reading  # noqa: E402
from lib.reports import drafter_evaluation  # noqa: E402
from lib.rollouts import judging  # noqa: E402
from lib.rollouts import statistics  # noqa: E402
from lib.rollouts import traces  # noqa: E402


def test_statistics_equal_those_of_the_recorded_drafts():
  # Broken: a weight, an entropy or a recall belongs to another position.
  gamma, vocab_size = 3, 20
  model = sj.testing.MarkovModel(vocab_size=vocab_size)
  observed = statistics.statistics(vocab_size)
  decoder = sj.Decoder(
      target=model, verifier=sj.verifiers.Token(),
      drafter=sj.drafters.draft_model(model=model, gamma=gamma),
      observers=tuple(observed.values()))
  params = {name: model.init(jax.random.key(i), scale=2.0)
            for i, name in enumerate(("target", "drafter"))}
  state = decoder.prefill(params, [[1], [2]], jax.random.key(2), limits=60)
  _, stats, trace = decoder.decode(params, state, 4, traced=True)
  found = dict(zip(observed, np.moveaxis(np.asarray(stats.survival), 2, 0)[1:]))
  q = np.asarray(trace.draft.probs, np.float64)
  p = np.asarray(trace.target_probs, np.float64)
  tokens = np.asarray(trace.draft.tokens)
  for place in np.ndindex(tokens.shape[:2]):
    reach = 1.0
    for i in range(1, gamma + 1):
      before, draft, token = p[*place, i - 1], q[*place, i], tokens[*place, i]
      entropy = -(before * np.log(before)).sum()
      overlap = np.minimum(before, draft).sum()
      expected = {"drafted": 1, "overlap": overlap}
      for k in (1, 4, 16):
        expected[f"recall {k}"] = before[np.argsort(-draft)[:k]].sum()
      for low, high in zip(statistics.BINS, statistics.BINS[1:]):
        inside = low <= entropy < high
        expected[f"drafted {low:g}"] = inside
        expected[f"overlap {low:g}"] = inside * overlap
      assert set(expected) == set(found)
      for name, value in expected.items():
        assert found[name][*place, i] == pytest.approx(
            reach * value, abs=1e-5), (name, i)
      reach *= min(1.0, before[token] / draft[token])


@pytest.mark.parametrize("rule", [sj.verifiers.Token(), sj.verifiers.Block()])
def test_shorter_drafts_begin_within_a_long_draft(rule):
  # Broken: a short draft begins at another node, or its weight is that of
  # another rule.
  vocab_size = 5
  draws = jax.random.split(jax.random.key(0), 3)
  q, p = (jax.nn.softmax(2 * jax.random.normal(key, (size, vocab_size)))
          for key, size in zip(draws, (8, 9)))
  tokens = jax.random.randint(draws[2], (8,), 0, vocab_size)
  draft = sj.Draft.chain(jnp.zeros((), jnp.int32), tokens, q)
  _, found = statistics.Shorter(rule, 2).figures(draft, p, None, None, None)
  reach = sj.verifiers.Token().survival(draft, p)
  expected = sum(reach[i] * rule.survival(
      sj.Draft.chain(draft.tokens[i], tokens[i:i + 2], q[i:i + 2]),
      p[i:i + 3]) for i in (0, 3, 6))
  np.testing.assert_allclose(found[:3], expected, rtol=1e-6)
  assert not found[3:].any()
  if rule == sj.verifiers.Token():  # short and long drafts emit as many tokens
    assert found.sum() == pytest.approx(float(reach.sum()), rel=1e-6)
  # Of a draft that ends after 3 tokens, no second short draft is left.
  ended = sj.Draft.chain(draft.tokens[0], tokens, q.at[3:].set(0))
  _, found = statistics.Shorter(rule, 2).figures(ended, p, None, None, None)
  np.testing.assert_allclose(found[:3], rule.survival(sj.Draft.chain(
      draft.tokens[0], tokens[:2], q[:2]), p[:3]), rtol=1e-6)


def test_an_accepted_draft_counts_as_the_rounds_of_its_tokens():
  # Broken: copies of long passages have the values of their first rounds only,
  # or the end of a long draft counts as a rejection.
  accepted, rejected = (sj.Draft.chain(0, tokens, jnp.eye(2)[tokens])
                        for tokens in jnp.array([[1] * 8, [0] + [1] * 7]))
  p = jnp.tile(jnp.array([0.0, 1.0]), (9, 1))
  for gamma in 2, 4, 6, 7:
    shorter = statistics.Shorter(sj.verifiers.Token(), gamma)
    _, found = shorter.figures(accepted, p, None, None, None)
    # The draft and the next token are 9 tokens, in rounds of gamma + 1.
    np.testing.assert_allclose(found[:gamma + 1], 9 / (gamma + 1), rtol=1e-6)
    assert not found[gamma + 1:].any()
    _, found = shorter.figures(rejected, p, None, None, None)
    np.testing.assert_array_equal(found, [1] + [0] * 8)


def _markov_rounds(function, p, q, gamma):
  """Returns the mean of a function over all drafts, `[pairs, roots, ...]`.

  Args:
    function: function from a draft and the target's probabilities to an array.
    p: transition probabilities `[pairs, 2, 2]` of the targets.
    q: those of the drafters.
    gamma: draft length.
  """
  paths = np.array(list(itertools.product(range(2), repeat=gamma + 1)))
  probs = q[:, paths[:, :-1]]
  drafts = jax.vmap(jax.vmap(sj.Draft.chain), (None, None, 0))(
      paths[:, 0], paths[:, 1:], probs)
  found = jax.jit(jax.vmap(jax.vmap(function)))(drafts, p[:, paths])
  weights = q[:, paths[:, :-1], paths[:, 1:]].prod(-1)
  sums = weights[..., None] * found
  return sums.reshape(len(p), 2, len(paths) // 2, -1).sum(2)


def _markov_rollouts(rule, p, q, gamma):
  """Returns the exact block efficiency, and the distribution of the roots."""
  def outcome(draft, p):
    law = rule.law(draft, p)
    return jnp.append(law.stop @ law.next_token,
                      1 + law.stop @ jnp.arange(gamma + 1))

  found = _markov_rounds(outcome, p, q, gamma)
  moves = found[..., :2] / found[..., :2].sum(-1, keepdims=True)
  roots = np.linalg.matrix_power(moves, 9999)[:, 0]
  return (roots * found[..., 2]).sum(-1), roots


@pytest.mark.slow
@pytest.mark.parametrize("rule", [sj.verifiers.Token(), sj.verifiers.Block()])
def test_values_of_shorter_drafts_are_those_of_own_rollouts(rule):
  # Broken: a short draft that the end of the long draft cuts is a whole round.
  random, pairs = np.random.default_rng(6), []
  for _ in range(15):
    scale = np.full(2, random.choice([0.5, 1, 2]))
    p, mix = random.dirichlet(scale, 2), random.choice([0, 0.5, 0.8])
    pairs.append((p, mix * p + (1 - mix) * random.dirichlet(scale, 2)))
  p, q = np.moveaxis(pairs, 1, 0)
  _, roots = _markov_rollouts(sj.verifiers.Token(), p, q, 8)
  for gamma in 3, 4, 6:
    shorter = statistics.Shorter(rule, gamma)
    found = _markov_rounds(
        lambda draft, p, shorter=shorter: shorter.figures(
            draft, p, None, None, None)[1], p, q, 8)
    found = (roots[..., None] * found).sum(1)
    exact, _ = _markov_rollouts(rule, p, q, gamma)
    np.testing.assert_allclose(found.sum(1) / found[:, 0], exact, rtol=0.01)


@pytest.mark.parametrize("rule", [
    sj.verifiers.Traversal(), sj.verifiers.Recursive()])
def test_a_smaller_tree_is_a_part_of_the_drafted_tree(rule):
  # Broken: a node of the small tree gets the probabilities of another node.
  accuracies = [[0.6, 0.2, 0.1], [0.5, 0.2, 0.1], [0.4, 0.2, 0.1]]
  large, small = (sj.trees.medusa_tree(accuracies, n) for n in (12, 7))
  nodes = statistics.part(large, small)
  assert nodes != tuple(range(7)) and len(nodes) == 7
  vocab_size = 5
  draws = jax.random.split(jax.random.key(0), 3)
  q, p = (jax.nn.softmax(2 * jax.random.normal(key, (size, vocab_size)))
          for key, size in zip(draws, (11, 12)))
  tokens = jax.random.randint(draws[2], (11,), 0, vocab_size)
  draft = sj.Draft.tree(jnp.zeros((), jnp.int32), large, tokens, q)
  depths = jnp.array(sj.trees.depths(large))
  found, survival = statistics.Subtree(rule, nodes).figures(
      draft, p, None, None, depths)
  index = jnp.array(nodes)
  part = sj.Draft.tree(
      draft.tokens[0], small, tokens[index[1:] - 1], q[index[1:] - 1])
  expected = rule.evaluate(part, p[index]).stop @ depths[index]
  assert found == pytest.approx(float(expected), rel=1e-6)
  assert survival.shape == (12,)
  assert survival[1:].sum() == pytest.approx(float(expected), rel=1e-6)


def test_rows_have_the_results_of_their_size():
  # Broken: a smaller tree or a shorter chain has the value of the drafted one.
  runs = {("f", 1.0, 0, "code", i, f"digest {i}"): {
      "chain": {"rounds": 2, "survival": [
          [2, 1, 1], [2, 1.5, 0.5], [3, 1.5, 0]], "expected": []},
      "tree": {"rounds": 2, "survival": [], "expected": [0, 3, 1]}}
          for i in range(2)}
  rows = drafter_evaluation.Results(
      runs=runs, gammas=[1, 2], temperatures=[1.0], cluster_of=str,
      rules={"chain": ["token"], "tree": ["traversal"]},
      observed={"chain": ["token", "token, size 1"],
                "tree": ["traversal", "traversal, size 3"]},
      sizes={"tree": [3, 6]}, target_calls={"chain": 2, "tree": 1}).rows()
  assert [(row["draft"], row["gamma"], row["nodes"], row["block_efficiency"])
          for row in rows] == [
              ("chain", 1, None, 0.75), ("chain", 2, None, 1),
              ("tree", None, 3, 1.5), ("tree", None, 6, 2.5)]
  [chain, tree] = drafter_evaluation.wide(rows)
  assert (chain["gamma 1"][:4], chain["gamma 2"][:4], chain["6 nodes"]) == (
      "0.75", "1.00", "")
  assert (tree["3 nodes"][:4], tree["6 nodes"][:4]) == ("1.50", "2.50")


def test_the_oracle_length_ends_where_no_token_is_accepted():
  # Broken: positions after one whose tokens are all rejected have a share of
  # drafts of 0 / 0, and not 0.
  runs = {("f", 1.0, 0, "code", 0, "digest"): {"chain": {
      "rounds": 2, "expected": [], "survival": [
          [2, 1, 0, 0], [2, 2, 1, 0], [0, 1, 0, 0], [0, 1.5, 0.5, 0]]}}}
  with np.errstate(all="raise"):
    [row] = drafter_evaluation.Results(
        runs=runs, gammas=[3], temperatures=[1.0], cluster_of=str,
        rules={"chain": []}, sizes={}, target_calls={"chain": 1},
        observed={"chain": ["drafted", "overlap", "recall 1"]}).oracle()
  assert row["length"] == 1 + 0.75 + 0.75 * 0.5


def _rules(names):
  return common.verifiers("--verifier", names.split(","))


def test_runs_of_another_order_of_rules_are_not_read():
  # Broken: a run lists its results by position, so those of two rules change
  # places.
  model = sj.testing.MarkovModel(vocab_size=5)
  read = reading.Prompts({"code": [[1]]}, [], {}, {})
  candidate = judging.Candidate(
      (sj.strategies.Strategy(sj.drafters.draft_model(model=model, gamma=2),
                              sj.verifiers.Token()),),
      {"target": (), "drafter": ()}, model, restarts=True)
  prints = {judging.Judge(
      target=types.SimpleNamespace(model=model, params=()), rules=rules,
      candidates={"chain": candidate}, gammas=[2], read=read, eos=None,
      new_tokens=4, batch=decoders.Batch(size=1), seed=0).fingerprint()
            for rules in map(_rules, ("token,block", "block,token"))}
  assert len(prints) == 2


def test_few_heads_have_a_tree_of_their_largest_size():
  """Two heads of two ranks have at most 1 + 2 + 4 nodes."""
  own = drafters.TrainedHeads(
      methods.MedusaHeads(width=8, vocab_size=7, heads=2), None,
      {"accuracy": [[0.5, 0.7]] * 3})
  found = judging.sampled_tree(drafters.Loaded(
      "medusa", None, {}, None, None, None, own, compared=methods.of(
          own.heads).compared(own.heads, lambda: own.tree(100))), [4, 100])
  assert found.drafter.num_nodes == 7
  assert found.smaller == ((0, 1, 2, 3),)


def _trace(tmp_path, *sequences):
  path = tmp_path / "trace.jsonl"
  path.write_text("\n".join(json.dumps(
      {"prompt": prompt, "completion": completion})
                            for prompt, completion in sequences))
  return traces.read(str(path))


def test_a_trace_is_written_again_and_its_copies_are_accepted(tmp_path):
  """Every round accepts the copied tokens, up to the first that differs."""
  # The completions copy 6 tokens of the prompt; then 9 ends the copy.
  known = [([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], [3, 4, 5, 6, 7, 8, 9]),
           ([1, 2, 3, 4, 5, 1, 2], [9, 9])]
  trace = _trace(tmp_path, *known)
  decoder = sj.strategies.prompt_lookup(gamma=6).decoder(
      trace.model, eos=(trace.model.end,),
          transform=sj.LogitsTransform(temperature=0))
  [prompts] = trace.prompts.sets.values()
  text = decoder.generate(
      {"target": trace.params}, prompts, jax.random.key(0),
      max_new_tokens=trace.longest)
  for m, (prompt, completion) in enumerate(known):
    assert list(text.tokens[m][1:]) == [*prompt, *completion, trace.model.end]
  # The first round accepts all 6 copies and emits 9. The second has no copy of
  # (8, 9). In the other row nothing of (3, 4, 5) is accepted.
  assert text.stats.active[0] == 2


@pytest.mark.parametrize("line,problem", [
    ('{"prompt": [1]}', "line 2"), ('{"prompt": [1], "completion": []}',
                                    "line 2"), ("[1, 2]", "line 2")])
def test_a_bad_trace_is_one_line(line, problem, tmp_path):
  path = tmp_path / "trace.jsonl"
  path.write_text('{"prompt": [1], "completion": [2]}\n' + line)
  with pytest.raises(ValueError, match=problem) as e:
    traces.read(str(path))
  assert "--trace" in str(e.value) and "\n" not in str(e.value)


@pytest.mark.slow
def test_the_script_reports_and_resumes(tmp_path):
  """The block efficiency is the decoder's; the report and files are there."""
  # Each position is reached by enough drafts.
  flags = ["--drafter=tiny", "--prompts=code", "--num_prompts=8", "--gamma=1,3",
           "--temperature=1", "--max_new_tokens=24", "--prompt_tokens=24",
           "--batch=4", "--output_dir=out"]
  first, again, refused, recycling = run_all(
      "evaluate_drafter.py", flags, flags,
      ["--drafter=small", "--trace=missing.jsonl"],
      ["--drafter=recycling", "--trace=missing.jsonl"], cwd=tmp_path)
  result = last_line(first)
  assert last_line(again)["rows"] == result["rows"]
  assert "8 of 8 prompts are in" in again["stderr"]
  [longest] = [row for row in result["rows"]
               if row["verifier"] == "token" and row["gamma"] == 3]
  positions = result["positions"]
  # Accepted tokens: the sum over positions of reaching and being accepted.
  assert longest["block_efficiency"] == pytest.approx(1 + sum(
      row["reached"] * row["accepted"] for row in positions), rel=0.2)
  assert [row["reached"] for row in positions][0] == 1
  for name in ("report.md", "evaluation.csv", "positions.csv",
               "evaluation.png", "evaluation.pdf"):
    assert (tmp_path / "out" / name).stat().st_size > 100
  assert "--trace=missing.jsonl requires a drafter without a model" in (
      refused["code"])
  assert "--drafter is recycling, which drafts" in recycling["code"]


@pytest.mark.slow
def test_the_arena_adds_a_drafter(tmp_path):
  """--add decodes only the new drafter, and other rows stay the same."""
  flags = ["--drafter=tiny", "--prompts=code", "--num_prompts=2", "--gamma=1,2",
           "--temperature=1", "--max_new_tokens=8", "--prompt_tokens=16",
           "--nodes=6", "--output_dir=out"]
  [first] = run_all("arena.py", flags, cwd=tmp_path)
  old = last_line(first)["rows"]  # read before the next run replaces them
  second, refused = run_all(
      "arena.py", [*flags, "--add=ngram"], [*flags, "--add=tiny"], cwd=tmp_path)
  new = last_line(second)["rows"]
  assert new[:len(old)] == old
  assert {row["draft"] for row in new[len(old):]} == {"ngram"}
  assert {(row["draft"], row["verifier"]) for row in old} == {
      ("tiny, chain", "token"), ("tiny, chain", "block"),
      ("tiny, sampled tree", "traversal"), ("tiny, sampled tree", "recursive"),
      ("tiny, top-k tree", "target_walk")}
  assert {(row["gamma"], row["nodes"]) for row in old} == {
      (1, None), (2, None), (None, 6)}
  for name in "arena.md", "arena.csv", "arena.png", "arena.pdf":
    assert (tmp_path / "out" / name).stat().st_size > 100
  assert "the same label" in refused["code"]
