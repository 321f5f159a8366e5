"""A record says what decoding said, and survives being cut short."""

import dataclasses
import functools
import os
import shutil
import types

import jax
import numpy as np
import pytest

import specjax as sj
from specjax import analysis
from specjax import testing
from specjax.analysis import recording
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
      target=pair.target, verifier=verifier, drafter=sj.drafters.LanguageModel(
          model=pair.drafter, gamma=4), **kwargs), pair.params


def _close(got, want):
  """Equal but for the rounding that compilers are free to do."""
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


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
  found = replayed.estimate(clusters=range(len(_PROMPTS)))
  assert found.value == replayed.block_efficiency
  assert found.clusters == len(_PROMPTS)
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
  """Says that q depends on more than the context."""

  autoregressive = False


def _markov(gamma=3, verifier=None):
  """Arguments of `record`: a pair that compiles in a moment."""
  model = testing.MarkovModel(_VOCAB)
  target = model.init(jax.random.key(0), 2.0)
  return {
      "decoder": sj.Decoder(target=model, eos=0,
                            verifier=verifier or sj.verifiers.Block(),
                            drafter=_Hindsight(model=model, gamma=gamma)),
      "params": {"target": target,
                 "drafter": target + model.init(jax.random.key(1))},
      "prompts": [[3], [1, 4], [1, 5, 2, 2], [6], [3]],
      "key": jax.random.key(5), "max_new_tokens": 20, "progress": False}


def _contents(path):
  return {file.name: file.read_bytes() for file in path.iterdir()
          if file.name != ".lock"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """A record that was never interrupted."""
  path = tmp_path_factory.mktemp("whole")
  analysis.record(path=path, **_markov())
  return path


def test_a_record_holds_the_text(whole):
  # Broken: rounds are lost or counted twice, or an end goes unnoticed.
  arguments = _markov()
  generation = arguments["decoder"].generate(
      *(arguments[name] for name in ("params", "prompts", "key")),
      max_new_tokens=20)
  record = analysis.Record.open(whole)
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


def test_a_killed_recording_is_completed(whole, tmp_path, monkeypatch):
  # Broken: hours of recording are lost, or differ after an interruption.
  replace, calls = os.replace, []

  def killed(*args):
    calls.append(args)
    if len(calls) == 4:  # the manifest, two prompts, and not the third
      raise KeyboardInterrupt
    replace(*args)

  with monkeypatch.context() as patch:
    patch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
      analysis.record(path=tmp_path, **_markov())
  assert set(_contents(tmp_path)) == {
      "record.json", "prompt_000000.npz", "prompt_000001.npz"}
  with pytest.raises(ValueError, match="holds 2 of 5 prompts; call"):
    analysis.Record.open(tmp_path)
  analysis.record(path=tmp_path, **_markov())
  assert _contents(tmp_path) == _contents(whole)


def test_damaged_files_are_recorded_again(whole, tmp_path, capsys):
  # Broken: a file that a full disk has cut is evaluated, or all are redone.
  path = shutil.copytree(whole, tmp_path / "record")
  files = [path / f"prompt_{i:06d}.npz" for i in range(5)]
  times = [file.stat().st_mtime_ns for file in files]
  data = files[0].read_bytes()
  files[0].write_bytes(data[:len(data) // 2] + data[len(data) // 2 + 64:])
  files[1].unlink()
  files[2].write_bytes(files[2].read_bytes()[:-100])
  data = files[3].read_bytes()
  one_bit = data.index(np.load(files[3])["probs"].tobytes()) + 100
  files[3].write_bytes(
      data[:one_bit] + bytes([data[one_bit] ^ 1]) + data[one_bit + 1:])
  with pytest.raises(ValueError, match="holds 1 of 5 prompts"):
    analysis.Record.open(path)
  record = analysis.record(path=path, **{**_markov(), "progress": True})
  assert _contents(path) == _contents(whole)
  assert files[4].stat().st_mtime_ns == times[4]
  assert "recording 4 of 5 prompts" in capsys.readouterr().err
  assert len(analysis.evaluate(record, sj.verifiers.Token()).expected) == 5
  # A file may be whole and still lack a round.
  arrays = dict(np.load(files[0]))
  np.savez(files[0], **{**arrays, "emitted": arrays["emitted"][:-1]})
  with pytest.raises(ValueError, match="holds 4 of 5 prompts"):
    analysis.Record.open(path)


def _disturbed(params):
  return jax.tree.map(lambda x: x.at[0, 0].add(1e-3), params)


@pytest.mark.parametrize("change,words", [
    (dict(max_new_tokens=21), ["max_new_tokens is 20 there and 21 here"]),
    (dict(key=jax.random.key(6)), ["key is [0, 5] there and [0, 6] here"]),
    (dict(prompts=[[3], [1, 4], [1, 5, 2, 3], [6], [3]]), ["prompts is"]),
    (dict(params=_disturbed(_markov()["params"])), ["params is"]),
    (dict(decoder=_markov(gamma=2)["decoder"]),
     ["gamma=3, transform=None", "gamma=2, transform=None"]),
    (dict(decoder=_markov(verifier=sj.verifiers.Token())["decoder"]),
     ["verifier is Block() there and Token() here"])])
def test_other_arguments_are_refused(whole, change, words):
  # Broken: one record mixes the rounds of two experiments.
  before = _contents(whole)
  with pytest.raises(ValueError) as caught:
    analysis.record(path=whole, **{**_markov(), **change})
  message = str(caught.value)
  assert "\n" not in message and "choose another path" in message
  for word in words:
    assert word in message
  assert _contents(whole) == before


def test_a_verifier_that_the_drafter_does_not_fit_is_refused(whole):
  # Broken: figures of a rule that is not exact there look like any others.
  record = analysis.Record.open(whole)
  with pytest.raises(ValueError, match="GreedyBlock .* autoregressive"):
    analysis.evaluate(record, sj.verifiers.GreedyBlock())


def test_nothing_is_begun_that_cannot_end(tmp_path, monkeypatch):
  # Broken: the last prompt's error comes up after hours, or the disk fills.
  path = tmp_path / "record"
  arguments = _markov()
  too_long = [*arguments["prompts"], [1] * 240]
  for change, words in (({"prompts": too_long}, "row 5 .* 260"),
                        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
                        ({"prompts": [[_VOCAB]]}, f"token id {_VOCAB}")):
    with pytest.raises(ValueError, match=words):
      analysis.record(path=path, **{**arguments, **change})
  assert not path.exists()
  with pytest.raises(ValueError, match="record.json is missing"):
    analysis.Record.open(path)
  monkeypatch.setattr(recording.shutil, "disk_usage",
                      lambda _: types.SimpleNamespace(free=1000))
  with pytest.raises(ValueError, match="the other 4 prompts need about"):
    analysis.record(path=path, **arguments)
  (path / "record.json").unlink()
  with pytest.raises(ValueError, match="no record.json"):
    analysis.record(path=path, **arguments)
  (path / "record.json").write_text("{}")
  with pytest.raises(ValueError, match="describes no record"):
    analysis.record(path=path, **arguments)


@pytest.mark.parametrize("manifest,words", [
    ("[]", "holds a JSON list"), ('{"format": 2}', "num_prompts is None"),
    ('{"format": 2, "num_prompts": "4"}', "num_prompts is '4'")])
def test_a_manifest_of_another_form_is_refused(tmp_path, manifest, words):
  # Broken: a KeyError that names neither the file nor what to do.
  (tmp_path / "record.json").write_text(manifest)
  with pytest.raises(ValueError, match=f"record.json .*{words}") as e:
    analysis.Record.open(tmp_path)
  assert "\n" not in str(e.value)


def test_two_recordings_do_not_share_a_directory(tmp_path):
  # Broken: both decode the same prompts, into each other's files.
  with files.locked(tmp_path, "recording"):
    with pytest.raises(ValueError, match=f"at work in {tmp_path}"):
      analysis.record(path=tmp_path, **_markov())
