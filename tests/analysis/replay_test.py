"""Records contain the rounds of decoding, and survive an interruption."""

import dataclasses
import functools
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import analysis
from specjax import testing
from specjax.utils import files

_PROMPTS = [[1], [2, 3, 4, 5, 6, 7, 8], [9, 10]]
_NEW_TOKENS = 40
_KEY = jax.random.key(11)


@functools.cache
def _pair():
  return testing.tiny_pair(16, seed=3)


def _decoder(verifier, **kwargs):
  pair = _pair()
  return sj.Decoder(
      target=pair.target, verifier=verifier, drafter=sj.drafters.draft_model(
          model=pair.drafter, gamma=4), **kwargs), pair.params


def _close(got, want):
  """Equal but for the rounding that compilers are free to do."""
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", [
    sj.verifiers.Token(), sj.verifiers.Block(), sj.verifiers.GreedyBlock()],
    ids=lambda v: type(v).__name__)
def test_the_acting_verifier_is_replayed_as_it_ran(verifier, tmp_path):
  # Broken: offline figures are not those of decoding, or the state of a rule
  # that remembers is lost between rounds.
  decoder, params = _decoder(verifier)
  record = analysis.record(decoder, params, _PROMPTS, _KEY, tmp_path,
                           max_new_tokens=_NEW_TOKENS, progress=False)
  replayed = analysis.evaluate(record, verifier)
  online = analysis.online(record)
  # More rounds than one call judges, so that the state crosses a border.
  assert max(len(x) for x in online.expected) > 16
  _close(replayed.expected, online.expected)
  _close(replayed.survival, online.survival)
  rounds = sum(len(x) for x in online.expected)
  assert replayed.block_efficiency == pytest.approx(
      1 + sum(x.sum() for x in online.expected) / rounds, rel=1e-6)
  estimate = replayed.estimate(clusters=range(len(_PROMPTS)))
  assert estimate.value == replayed.block_efficiency
  assert estimate.clusters == len(_PROMPTS)
  if isinstance(verifier, sj.verifiers.Token):
    # For token verification E[tau | draft] is the sum of the survival.
    assert replayed.mean_survival.sum() == pytest.approx(
        replayed.block_efficiency, rel=1e-6)
  if isinstance(verifier, sj.verifiers.GreedyBlock):
    # Judged afresh it accepts more: the test above would see a lost state.
    other = dataclasses.replace(record, manifest={
        **record.manifest, "verifier": "another"})
    afresh = analysis.evaluate(other, verifier)
    assert afresh.block_efficiency > replayed.block_efficiency + 0.01


@dataclasses.dataclass(frozen=True)
class _LawOnly(sj.Verifier):
  """A researcher's rule: one method and nothing else."""

  def law(self, draft, target_probs):
    return sj.verifiers.Block().law(draft, target_probs)


@pytest.mark.slow
def test_other_verifiers_are_judged_as_observers_are(tmp_path):
  # Broken: a rule is judged on other drafts offline than online.
  observers = (sj.verifiers.Block(), sj.verifiers.GreedyBlock(),
               sj.verifiers.Typical(), _LawOnly())
  decoder, params = _decoder(sj.verifiers.Token(), observers=observers)
  record = analysis.record(decoder, params, _PROMPTS, _KEY, tmp_path,
                           max_new_tokens=_NEW_TOKENS, progress=False)
  want = []
  for i, prompt in enumerate(_PROMPTS):
    state = decoder.prefill(params, [prompt], _KEY, request_ids=[i],
                            limits=len(prompt) + _NEW_TOKENS)
    _, stats = decoder.decode(params, state, rounds=_NEW_TOKENS)
    active = np.asarray(stats.active[:, 0])
    want.append(jax.tree.map(lambda x, a=active: np.asarray(x)[a, 0], stats))
  for i, verifier in enumerate((decoder.verifier, *observers)):
    replayed = analysis.evaluate(record, verifier)
    _close(replayed.expected, [stats.expected[:, i] for stats in want])
    _close(replayed.survival, [stats.survival[:, i] for stats in want])


_VOCAB = 7


class _Hindsight(sj.drafters.LanguageModel):
  """A network whose q depends on more than the context."""

  context_only = False


def _markov(gamma=3, verifier=None):
  """Arguments of `record`: a pair that compiles in a moment."""
  model = testing.MarkovModel(_VOCAB)
  target = model.init(jax.random.key(0), 2.0)
  return {
      "decoder": sj.Decoder(target=model, eos=0,
                            verifier=verifier or sj.verifiers.Block(),
                            drafter=sj.drafters.NetworkDrafter(
                                network=_Hindsight(model=model),
                                shape=sj.drafters.Chain(gamma))),
      "params": {"target": target,
                 "drafter": target + model.init(jax.random.key(1))},
      "prompts": [[3], [1, 4], [1, 5, 2, 2], [6], [3]],
      "key": jax.random.key(5), "max_new_tokens": 20, "progress": False}


def _contents(path):
  return {file.name: file.read_bytes() for file in path.iterdir()
          if file.name != ".lock"}


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
  """A record that was never interrupted."""
  path = tmp_path_factory.mktemp("complete")
  analysis.record(path=path, **_markov())
  return path


def test_a_record_contains_the_generated_tokens(complete):
  # Broken: rounds are lost or counted twice, or continue after an end token.
  arguments = _markov()
  generation = arguments["decoder"].generate(
      *(arguments[name] for name in ("params", "prompts", "key")),
      max_new_tokens=20)
  record = analysis.Record.open(complete)
  assert len(record) == 5
  for i, rollout in enumerate(record):
    tokens = list(arguments["prompts"][i])
    trace = rollout.trace
    for r, emitted in enumerate(rollout.emitted):
      assert trace.draft.tokens[r, 0] == tokens[-1]
      accepted = trace.verdict.path[r, 1:trace.verdict.num_accepted[r] + 1]
      new = [*trace.draft.tokens[r, accepted], trace.verdict.next_token[r]]
      tokens += new[:emitted]
    assert tokens == generation.tokens[i].tolist()
    assert len(rollout.expected) == generation.stats.active[i]
  assert any(row[-1] == 0 for row in generation.tokens)


def test_a_killed_recording_is_read_and_completed(
    complete, tmp_path, monkeypatch):
  # Broken: hours of recording are lost, or differ after an interruption.
  replace, calls = os.replace, []

  def killed(*args):
    calls.append(args)
    if len(calls) == 4:  # the manifest and two prompts are written
      raise KeyboardInterrupt
    replace(*args)

  with monkeypatch.context() as patch:
    patch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
      analysis.record(path=tmp_path, **_markov())
  assert set(_contents(tmp_path)) == {
      "record.json", "prompt_000000.npz", "prompt_000001.npz"}
  record = analysis.Record.open(tmp_path)
  assert len(record) == 2 and not record.is_complete
  reference = analysis.Record.open(complete)
  assert reference.is_complete
  judge = lambda record: analysis.evaluate(record, sj.verifiers.Token())
  _close(judge(record).expected, judge(reference).expected[:2])
  time = (tmp_path / "prompt_000001.npz").stat().st_mtime_ns
  analysis.record(path=tmp_path, **_markov())
  assert _contents(tmp_path) == _contents(complete)
  assert (tmp_path / "prompt_000001.npz").stat().st_mtime_ns == time


def test_a_batch_records_what_single_prompts_do(complete, tmp_path):
  # Broken: a row draws by its slot, or has the rounds of its neighbours.
  (tmp_path / "prompt_000001.npz").write_bytes(
      (complete / "prompt_000001.npz").read_bytes())
  (tmp_path / "record.json").write_bytes(
      (complete / "record.json").read_bytes())
  batched = analysis.record(path=tmp_path, batch=3, **_markov())
  for got, want in zip(batched, analysis.Record.open(complete), strict=True):
    np.testing.assert_array_equal(got.emitted, want.emitted)
    np.testing.assert_array_equal(got.trace.draft.tokens,
                                  want.trace.draft.tokens)
    _close(got.expected, want.expected)
    _close(got.trace.target_probs, want.trace.target_probs)


def test_a_damaged_file_is_not_evaluated(complete, tmp_path):
  # Broken: a bit that the disk has changed changes a figure.
  path = shutil.copytree(complete, tmp_path / "record")
  file = path / "prompt_000003.npz"
  data = bytearray(file.read_bytes())
  data[bytes(data).index(np.load(file)["probs"].tobytes()) + 100] ^= 1
  file.write_bytes(data)
  with pytest.raises(ValueError, match="damaged"):
    analysis.evaluate(analysis.Record.open(path), sj.verifiers.Token())


def _disturbed(params):
  return jax.tree.map(lambda x: x.at[0, 0].add(1e-3), params)


@pytest.mark.parametrize("change,words", [
    (dict(max_new_tokens=21), ["max_new_tokens", "20", "21"]),
    (dict(key=jax.random.key(6)), ["key", "[0, 5]", "[0, 6]"]),
    (dict(prompts=[[3], [1, 4], [1, 5, 2, 3], [6], [3]]), ["prompts"]),
    (dict(params=_disturbed(_markov()["params"])), ["params"]),
    (dict(decoder=_markov(gamma=2)["decoder"]), ["gamma=3", "gamma=2"]),
    (dict(decoder=_markov(verifier=sj.verifiers.Token())["decoder"]),
     ["verifier", "Block()", "Token()"])])
def test_other_arguments_are_refused(complete, change, words):
  # Broken: one record mixes the rounds of two experiments.
  before = _contents(complete)
  with pytest.raises(files.OtherRunError) as error:
    analysis.record(path=complete, **{**_markov(), **change})
  assert all(word in str(error.value) for word in words)
  assert _contents(complete) == before


def test_a_verifier_that_the_drafter_does_not_fit_is_refused(complete):
  # Broken: a rule that is not exact for this drafter is evaluated silently.
  record = analysis.Record.open(complete)
  with pytest.raises(ValueError, match="GreedyBlock .* autoregressive"):
    analysis.evaluate(record, sj.verifiers.GreedyBlock())


@pytest.mark.parametrize("change,word", [
    ({"prompts": [*_markov()["prompts"], [1] * 240]}, "260"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"batch": 0}, "batch is 0"),
    ({"prompts": [[_VOCAB]]}, f"token id {_VOCAB}")])
def test_bad_arguments_are_refused_before_decoding(tmp_path, change, word):
  # Broken: an error in the last prompt is raised after hours.
  path = tmp_path / "record"
  with pytest.raises(ValueError, match=word):
    analysis.record(path=path, **{**_markov(), **change})
  assert not path.exists()


def test_directories_of_another_kind_are_refused(complete, tmp_path):
  # Broken: two recordings, or a recording and other files, are mixed.
  with pytest.raises(ValueError, match=str(tmp_path)):
    analysis.Record.open(tmp_path)
  with files.locked(tmp_path, "recording"):
    with pytest.raises(ValueError, match=str(tmp_path)):
      analysis.record(path=tmp_path, **_markov())
  path = shutil.copytree(complete, tmp_path / "record")
  (path / "record.json").unlink()
  with pytest.raises(ValueError, match="record.json"):
    analysis.record(path=path, **_markov())
  (path / "record.json").write_text("[]")
  with pytest.raises(ValueError, match="record.json"):
    analysis.Record.open(path)
  with pytest.raises(ValueError, match="is a file"):
    analysis.record(path=path / "prompt_000000.npz", **_markov())


@pytest.mark.slow
def test_a_budget_cuts_the_recorded_drafts(tmp_path):
  # Broken: rows or rounds of a batch are mixed up, or a cut draft is evaluated
  # with the tokens after its cut.
  decoder, params = _decoder(sj.verifiers.Token())
  record = analysis.record(decoder, params, _PROMPTS, _KEY, tmp_path,
                           max_new_tokens=_NEW_TOKENS, progress=False)
  token, plain = sj.verifiers.Token(), analysis.online(record)
  # The last prompt does not fill a batch of two.
  rounds = min(len(x) for x in plain.expected[:2])
  by_first = lambda probs, tokens: jnp.stack(
      [tokens[1, 0] % 3, 4 - tokens[0, 0] % 3])
  found = analysis.evaluate_budget(record, token, by_first, 2)
  assert [len(x) for x in found.expected] == [rounds] * 2
  first = [r.trace.draft.tokens[:rounds, 1] for r in record]
  for row, lengths in enumerate((first[1] % 3, 4 - first[0] % 3)):
    assert len(set(lengths.tolist())) > 1
    # A cut changes no probability of acceptance before it.
    sums = np.cumsum(plain.survival[row][:rounds], axis=1) - 1
    np.testing.assert_allclose(
        found.expected[row], sums[np.arange(rounds), lengths], atol=1e-5)
  for rule, rows, words in ((sj.verifiers.GreedyBlock(), 2, "has a state"),
                            (token, 4, "rows is 4")):
    with pytest.raises(ValueError, match=words):
      analysis.evaluate_budget(record, rule, by_first, rows)
