"""Bad input fails early, in one line that says what to do."""

import dataclasses
import functools
import json
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import testing
from specjax.models import checkpoint

_VOCAB = 6


@dataclasses.dataclass(frozen=True)
class _NeverRuns(testing.MarkovModel):
  """A model that must not be reached: errors come before compilation."""

  def __call__(self, *args, **kwargs):
    raise AssertionError("the input was not checked before tracing")


def _decoder(model=None, gamma=2, drafter=None, **kwargs):
  model = model or _NeverRuns(_VOCAB, context_length=20)
  return sj.Decoder(**{**dict(
      target=model, verifier=sj.verifiers.Block(),
      drafter=drafter or sj.drafters.draft_model(model=model, gamma=gamma)),
      **kwargs})


def _raises_one_line(call, *words, error=ValueError):
  """`call` fails with one line that holds every word: value, limit and fix."""
  with pytest.raises(error) as caught:
    call()
  message = str(caught.value)
  assert "\n" not in message
  for word in words:
    assert str(word) in message, f"{word!r} is missing in: {message}"


@pytest.mark.parametrize("setting,value,words", [
    ("temperature", -0.5, ["-0.5", "at least 0"]),
    ("temperature", float("nan"), ["nan", "at least 0"]),
    ("temperature", float("inf"), ["inf"]),
    ("temperature", 1e38, ["1e+38", "at most 1e+30"]),
    ("top_k", -3, ["-3", "at least 0"]),
    ("top_k", 2.5, ["2.5", "whole"]),
    ("top_p", 0.0, ["0.0", "(0, 1]"]),
    ("top_p", 1.5, ["1.5", "(0, 1]"]),
    ("top_p", float("nan"), ["nan", "(0, 1]"]),
    ("min_p", -0.1, ["-0.1", "[0, 1]"]),
    ("min_p", 2.0, ["2.0", "[0, 1]"]),
    ("banned", (3, -1), ["-1", "at least 0"]),
    ("banned", (1.5,), ["1.5", "whole"]),
    ("top_k", 2.0, ["2.0", "whole"]),
    ("top_p", None, ["None", "a number"]),
    ("temperature", "0.8", ["'0.8'", "a number"]),
    ("banned", 3, ["3", "a tuple"]),
    ("constraints", sj.constraints.NoRepeatNGram(size=2), ["a tuple"])])
def test_transform_settings(setting, value, words):
  # Broken: a typing error is sampled from instead of reported.
  _raises_one_line(lambda: sj.LogitsTransform(**{setting: value}), setting,
                   *words)


def test_decoder_settings():
  # Broken: parts that do not fit fail inside the compiler, or not at all.
  _raises_one_line(
      lambda: _decoder(transform=sj.LogitsTransform(banned=(2, _VOCAB))),
      "banned", _VOCAB)
  _raises_one_line(
      lambda: _decoder(transform=sj.LogitsTransform(banned=range(_VOCAB))),
      "banned", _VOCAB, "at least one")
  _raises_one_line(lambda: _decoder(eos=_VOCAB), "eos", _VOCAB)
  for eos in ("</s>", b"\1", {1: 2}, [[1], [2]], (1, None), 1.0):
    _raises_one_line(lambda eos=eos: _decoder(eos=eos), "eos", "a token id")
  _raises_one_line(lambda: _decoder(gamma=-1), "gamma", -1, "at least 0")
  _raises_one_line(lambda: _decoder(gamma=1.5), "gamma", 1.5, "whole")
  other = testing.MarkovModel(_VOCAB + 1)
  _raises_one_line(
      lambda: _decoder(drafter=sj.drafters.draft_model(model=other, gamma=2)),
      _VOCAB, _VOCAB + 1, "same vocabulary", "tokenizer")


class _Record(NamedTuple):
  """A model with its parameters, as a zoo has it."""

  model: Any
  params: Any


def test_parts_in_the_wrong_place():
  # Broken: a record, a class or one rule for a tuple fails in the middle of a
  # program, by a name that the user never wrote.
  model = _NeverRuns(_VOCAB, context_length=20)
  record = _Record(model, None)
  draft = sj.drafters.draft_model
  for change, words in (
      (dict(target=record), ["target is a _Record", "`.model`"]),
      (dict(target=testing.MarkovModel), ["class MarkovModel"]),
      (dict(target=None), ["target is a NoneType", "Model"]),
      (dict(drafter=record), ["drafter is a _Record", "draft_model"]),
      (dict(drafter=model), ["drafter is a _NeverRuns", "draft_model"]),
      (dict(observers=sj.verifiers.Token()), ["observers is a Token", "(Tok"]),
      (dict(observers=(sj.verifiers.Token,)), ["the class Token", "Token()"]),
      (dict(verifier=sj.verifiers.Block), ["the class Block", "Block()"]),
      (dict(transform={"temperature": 1.0}), ["transform is a dict",
                                              "LogitsTransform"]),
      (dict(transform=None), ["transform is a NoneType"]),
      (dict(transform=sj.LogitsTransform), ["the class LogitsTransform"]),
      (dict(controller=sj.decoding.Controller), ["the class Controller"]),
      (dict(drafter=draft(model=model, gamma=5000)), ["5000", 20, "gamma"]),
      (dict(drafter=sj.drafters.NGram(gamma=20, vocab_size=_VOCAB)),
       ["NGram drafts 20", 20])):
    _raises_one_line(lambda change=change: _decoder(**{
        "model": model, **change}), *words)


@pytest.mark.slow
def test_states_that_cannot_go_on():
  # Broken: a notebook cell that runs twice fails in the compiler; a state of
  # another drafter is read as if it were this one's.
  decoder, params = _healthy()
  prefill = lambda decoder: decoder.prefill(
      params, [[1], [2, 3]], jax.random.key(0), limits=9)
  state = prefill(decoder)
  new, stats = decoder.decode(params, state, rounds=1)
  donated = ["donated", "prefill again"]
  _raises_one_line(lambda: decoder.decode(params, state, 1), *donated)
  _raises_one_line(lambda: decoder.decode(
      params, state, 1, traced=True), *donated)
  _raises_one_line(lambda: decoder.decode_until(params, state), *donated)
  _raises_one_line(lambda: decoder.decode_round(params, state), *donated)
  _raises_one_line(lambda: decoder.grow(params, state, 256), *donated)
  _raises_one_line(lambda: decoder.insert(new, [0, 1], state), *donated)
  _raises_one_line(lambda: decoder.decode(params, (new, stats), 1),
                   "state is a tuple", "(state, stats)")
  other = _decoder(_healthy()[0].target, drafter=sj.drafters.NGram(
      gamma=2, vocab_size=_VOCAB))
  for made, used in ((other, decoder), (decoder, other)):
    _raises_one_line(
        lambda made=made, used=used: used.decode_until(params, prefill(made)),
        "NGram", "LanguageModel with Chain", "prefill with this decoder")
  assert (decoder.decode_until(params, new)[0].lengths == 9).all()


def test_a_draft_model_that_is_none():
  # Broken: an AttributeError, when a decoder is made.
  record = _Record(_NeverRuns(_VOCAB, context_length=20), None)
  _raises_one_line(lambda: sj.drafters.draft_model(record, gamma=2),
                   "LanguageModel.model is a _Record", "`.model`")
  _raises_one_line(lambda: sj.drafters.draft_model(testing.MarkovModel, 2),
                   "LanguageModel.model is the class")


def test_parameters_that_are_not_the_model_s():
  # Broken: KeyError: 'layers', from within a program.
  decoder, params = _healthy()
  prefill = lambda params: decoder.prefill(params, [[1]], jax.random.key(0))
  record = _Record(decoder.target, params["target"])
  _raises_one_line(lambda: prefill({**params, "target": record}),
                   "params['target'] is a _Record", "`.params`")
  _raises_one_line(lambda: prefill(record), "params is a _Record")
  lacking = dict(params["target"])
  path = sorted(lacking)[0]
  lacking.pop(path)
  for name in ("target", "drafter"):
    _raises_one_line(lambda name=name: prefill({**params, name: lacking}),
                     f"params['{name}'] has nothing at ['{path}']",
                     "Transformer")
  wide = testing.tiny_pair(_VOCAB, width=32).params["target"]
  _raises_one_line(lambda: prefill({**params, "drafter": wide}),
                   "params['drafter'] has an array of shape", 32, 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Blockwise(testing.OracleDrafter):
  provides = ("chain", "iid", "conditional", "deterministic")


@pytest.mark.parametrize("place", ["verifier", "observers"])
def test_unsound_pairs_of_verifier_and_drafter(place):
  # Broken: a rule runs with a drafter for which it is not lossless.
  rule = sj.verifiers.GreedyBlock()
  value = (rule,) if place == "observers" else rule
  _raises_one_line(
      lambda: _decoder(drafter=_Blockwise(gamma=2), **{place: value}),
      "GreedyBlock", "_Blockwise", "autoregressive", "another pair")


@pytest.mark.parametrize("prompts,words", [
    ([], ["no prompts"]),
    ([[1], []], ["prompt 1", "empty"]),
    ([[1], [2, _VOCAB]], ["prompt 1", _VOCAB, "tokenizer"]),
    ([[-1]], ["prompt 0", "-1"]),
    ([[1.0, 2.0]], ["prompt 0", "float", "whole"]),
    ([[[1, 2]]], ["prompt 0", "(1, 2)", "token ids"]),
    ([1, 2], ["prompt 0 is 1", "token ids"]),
    ("abc", ["prompt 0 is a", "token ids"]),
    (7, ["prompts is 7", "token ids"]),
    ([[1] * 16], ["21", "20", "shorten"])])  # 16 and 5 new: one too many
def test_prompts(prompts, words):
  # Broken: bad prompts are truncated, wrapped or clamped in silence.
  _raises_one_line(
      lambda: _decoder().generate(None, prompts, jax.random.key(0),
                                  max_new_tokens=5), *words)


def test_limits_and_keys():
  # Broken: rows are cut, or drawn by keys that depend on the batch.
  decoder, key = _decoder(), jax.random.key(0)
  prefill = lambda key=key, **kwargs: decoder.prefill(
      None, [[1, 2, 3]], key, **kwargs)
  for most in (21, 2**32 + 9, float("nan")):  # int32 would take 2**32 + 9 as 9
    _raises_one_line(lambda most=most: prefill(limits=most), most, 20,
                     "context length")
  _raises_one_line(lambda: prefill(limits=2), "prompt 0", 3, 2, "shorten")
  _raises_one_line(lambda: prefill(limits=7.5), "row 0", 7.5, "whole number")
  for wrong in ([9, 9], [[9]]):
    _raises_one_line(lambda wrong=wrong: prefill(limits=wrong),
                     f"shape {np.shape(wrong)}", "each of the 1 prompts")
  _raises_one_line(
      lambda: decoder.generate(None, [[1]], key, max_new_tokens=-1),
      "max_new_tokens", -1, "at least 0")
  _raises_one_line(
      lambda: decoder.generate(None, [[1]], key, max_new_tokens=[3, 4]),
      "max_new_tokens", [3, 4], "whole number")
  _raises_one_line(lambda: prefill(jax.random.key(0, impl="rbg")), "rbg",
                   "threefry2x32")
  _raises_one_line(lambda: prefill(jax.random.PRNGKey(0)), "jax.random.key")
  _raises_one_line(lambda: prefill(0), "jax.random.key")
  _raises_one_line(prefill, "params is a NoneType", "drafter")
  _raises_one_line(
      lambda: decoder.prefill({"embedding": 0}, [[1]], key), "embedding")


def test_a_drafter_whose_parameters_are_missing_is_named():
  # Broken: KeyError: 'drafter', from within a program.
  decoder, params = _healthy()
  lacking = {"target": params["target"]}
  prefill = lambda given: decoder.prefill(given, [[1]], jax.random.key(0))
  words = "no 'drafter'", "LanguageModel with Chain reads it", '"drafter": ...'
  _raises_one_line(lambda: prefill(lacking), *words)
  state = prefill(params)
  _raises_one_line(lambda: decoder.decode_until(lacking, state), *words)


@pytest.mark.parametrize("rule", [
    sj.verifiers.Token(), sj.verifiers.Block(), sj.verifiers.Traversal(),
    sj.verifiers.GreedyBlock(), sj.verifiers.KSeq()], ids=lambda r: str(r)[:9])
def test_a_law_in_few_bits_is_refused(rule):
  # Broken: a residual of a sixteenth counts as none in float16.
  law = jnp.array([[0.5, 0.25, 0.25]] * 2, jnp.float16)
  draft = sj.Draft.chain(root=0, tokens=jnp.array([1]), probs=law[:1])
  _raises_one_line(lambda: rule.evaluate(draft, law, None).next_token,
                   "float16", "float32")


def test_certify_settings():
  # Broken: a proof of nothing is reported as a proof.
  rule = sj.verifiers.Token()
  _raises_one_line(lambda: sj.exact.certify(rule, dtype="bfloat16"),
                   "bfloat16", "float32")
  _raises_one_line(lambda: sj.exact.certify(rule, gammas=()), "gammas")
  _raises_one_line(lambda: sj.exact.certify(rule, gammas=(0, 1)), "gammas",
                   "at least 1")
  trees = sj.verifiers.Recursive()
  _raises_one_line(lambda: sj.exact.certify(trees, schemes=()), "schemes is ()")
  _raises_one_line(
      lambda: sj.exact.certify(trees, drafting="product", schemes=("iid",)),
      "'iid'", "trees ()")
  for name, value in (
      ("gammas", 2), ("gammas", (2.0,)), ("vocab_sizes", ()),
      ("vocab_sizes", (1,)), ("rounds", 0), ("seeds", 0), ("kinds", ()),
      ("kinds", ("foo",)), ("kinds", "dense")):
    _raises_one_line(
        functools.partial(sj.exact.certify, rule, **{name: value}), name)


@functools.cache
def _pair():
  return testing.tiny_pair(_VOCAB)


@pytest.fixture(name="saved")
def _saved(tmp_path):
  pair = _pair()
  checkpoint.save_model(tmp_path, pair.target, pair.params["target"])
  return tmp_path


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_file_of_a_checkpoint(saved, name):
  # Broken: the reader of the error does not learn which file is missing.
  (saved / name).unlink()
  _raises_one_line(lambda: checkpoint.load_model(saved), saved, name,
                   "missing")


@pytest.mark.parametrize("name,words", [
    ("config.json", ["not a model configuration"]),
    ("model.safetensors", ["truncated"])])
@pytest.mark.parametrize("kept", [0, 40, -1])
def test_truncated_file_of_a_checkpoint(saved, name, words, kept):
  # Broken: half a download is loaded, or fails without a name.
  data = (saved / name).read_bytes()
  kept = len(data) - 3 if kept < 0 else kept
  (saved / name).write_bytes(data[:kept])
  _raises_one_line(lambda: checkpoint.load_model(saved), name, *words)


@pytest.mark.parametrize("change", [
    {"width": 18}, {"layers": 2}, {"tie_embeddings": True}, {"kv_heads": 2}])
def test_weights_of_another_configuration(saved, change):
  # Broken: weights are loaded into a model that they do not fit.
  config = json.loads((saved / "config.json").read_text())
  (saved / "config.json").write_text(json.dumps({**config, **change}))
  _raises_one_line(lambda: checkpoint.load_model(saved), "model.safetensors",
                   "config.json", "files of one model")


@pytest.mark.parametrize("change,words", [
    ({"heads": 3, "kv_heads": 2}, ["heads", 3, 2]),
    ({"head_dim": 5}, ["head_dim", 5, "even"]),
    ({"layers": 0}, ["layers", 0, "at least 1"]),
    ({"no_such_field": 1}, ["config.json", "no_such_field"])])
def test_impossible_configuration(saved, change, words):
  # Broken: a wrong size shows up as a shape error in the middle of a model.
  config = json.loads((saved / "config.json").read_text())
  (saved / "config.json").write_text(json.dumps({**config, **change}))
  _raises_one_line(lambda: checkpoint.load_model(saved), *words)


# Numbers that break down while decoding: rows stop, and the error names them.


@functools.cache
def _healthy():
  pair = _pair()
  decoder = _decoder(pair.target, drafter=sj.drafters.draft_model(
      model=pair.drafter, gamma=2), observers=(sj.verifiers.Token(),))
  return decoder, pair.params


def _poisoned(model, token):
  """Parameters in which one model's embedding of `token` is NaN."""
  params = jax.tree.map(lambda x: x, _healthy()[1])
  table = params[model]["embedding"]
  params[model]["embedding"] = table.at[token].set(jnp.nan)
  return params


@pytest.mark.parametrize("model", ["target", "drafter"])
def test_nan_weights_raise(model):
  # Broken: garbage is decoded from NaN.
  decoder, params = _healthy()
  params = {**params, model: jax.tree.map(
      lambda x: jnp.full_like(x, jnp.nan), params[model])}
  _raises_one_line(
      lambda: decoder.generate(params, [[1], [2, 3]], jax.random.key(0),
                               max_new_tokens=5),
      f"the {model}'s", "row 0", "weights", error=FloatingPointError)


@pytest.mark.parametrize("model", ["target", "drafter"])
def test_nan_stays_in_its_row(model):
  # Broken: one bad row spoils the batch, or its name is lost. Token 5 occurs
  # in row 1 alone, for the others must not draw it.
  healthy, _ = _healthy()
  decoder = dataclasses.replace(
      healthy, transform=sj.LogitsTransform(banned=(5,)))
  params, prompts = _poisoned(model, 5), [[1], [2, 5, 3], [4, 0]]
  generate = lambda params: decoder.generate(
      params, prompts, jax.random.key(0), max_new_tokens=5)
  _raises_one_line(lambda: generate(params), f"the {model}'s", "row 1",
                   error=FloatingPointError)

  state = decoder.prefill(params, prompts, jax.random.key(0), limits=9)
  state, stats = decoder.decode_until(params, state)
  ok = {"target": stats.finite, "drafter": stats.draft_finite}[model]
  np.testing.assert_array_equal(ok, [True, False, True])
  assert int(stats.emitted[1]) == 0  # nothing came from bad numbers
  for field in (stats.expected, stats.survival):
    assert np.isfinite(field).all()
  clean = decoder.prefill(_healthy()[1], prompts, jax.random.key(0), limits=9)
  clean, _ = decoder.decode_until(_healthy()[1], clean)
  for row in (0, 2):  # the neighbours never noticed
    np.testing.assert_array_equal(state.tokens[row, :9], clean.tokens[row, :9])


@dataclasses.dataclass(frozen=True)
class _Divides(sj.Verifier):
  """A rule of a user's own that divides by 0 where the text holds a token."""

  def law(self, draft, p):
    law = sj.verifiers.Token().law(draft, p)
    bad = jnp.where(draft.tokens[0] == 4, jnp.nan, 1)
    return law.replace(stop=law.stop * bad)


def test_a_law_that_is_not_finite_stops_its_row():
  # Broken: NaN in a rule's law accepts the whole draft, without a word.
  healthy, params = _healthy()
  decoder = _decoder(healthy.target, drafter=healthy.drafter,
                     verifier=_Divides(),
                     transform=sj.LogitsTransform(banned=(4,)))
  state = decoder.prefill(params, [[1], [2, 4], [3, 0]], jax.random.key(0),
                          limits=9)
  state, stats = decoder.decode_until(params, state)
  np.testing.assert_array_equal(stats.law_finite, [True, False, True])
  assert stats.finite.all() and stats.draft_finite.all()
  np.testing.assert_array_equal(state.lengths, [9, 2, 9])
  _raises_one_line(lambda: sj.decoding.raise_if_not_finite(stats),
                   "the verifier's laws", "row 1", "certify",
                   error=FloatingPointError)
