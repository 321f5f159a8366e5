"""Rules and drafters of a file or a package, in the scripts."""

import dataclasses
import itertools
import sys
import textwrap
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts import imported
from scripts import last_line
from scripts import ROOT
from scripts import run_all

sys.path.append(str(ROOT / "experiments"))

from lib import common  # noqa: E402
from lib import drafters  # noqa: E402
from lib import extensions  # noqa: E402
from lib.figures import style  # noqa: E402
from lib.rollouts import resumable  # noqa: E402
from lib.rollouts import statistics  # noqa: E402
from lib.rollouts import timing  # noqa: E402

import specjax as sj  # noqa: E402
from specjax import methods  # noqa: E402
from specjax import testing  # noqa: E402
from specjax.methods import heads as heads_family  # noqa: E402
from specjax.strategies import Strategy  # noqa: E402
from specjax.utils import entry_points  # noqa: E402

_CODE = """
import dataclasses
import jax.numpy as jnp
import specjax as sj
from specjax.strategies import Strategy

@dataclasses.dataclass(frozen=True)
class Damped(sj.Verifier):
  share: float = 0.5

  def law(self, draft, target_probs):
    law = sj.verifiers.Token().law(draft, target_probs)
    return sj.Law(stop=law.stop * self.share + (1 - self.share) * (
        jnp.arange(len(law.stop)) == 0), next_token=law.next_token)

class Plain(Damped):
  requires = ("iid",)

damped = Damped(0.25)
number = 3
factory = lambda: Damped(0.75)

class NoLaw(sj.Verifier):
  def law(self, draft):
    return None

class Raises(sj.Verifier):
  def law(self, draft, target_probs):
    return draft.nothing

class Shapeless(sj.Verifier):
  def law(self, draft, target_probs):
    return sj.Law(stop=jnp.zeros(7), next_token=target_probs)

@dataclasses.dataclass(frozen=True)
class Incomplete(Damped):
  def __init__(self, share):
    pass

@dataclasses.dataclass(frozen=True, kw_only=True)
class Flat(sj.interfaces.Drafter):
  vocab_size: int
  gamma: int
  num_uniforms = 0
  provides = ("chain", "iid", "conditional", "autoregressive")

  def propose(self, params, uniforms, state):
    root = jnp.take_along_axis(
        state.tokens, state.lengths[:, None] - 1, axis=1)
    tokens = jnp.tile(root, (1, self.gamma))
    probs = jnp.eye(self.vocab_size)[tokens]
    return sj.Draft(
        tokens=jnp.concatenate([root, tokens], 1),
        parents=jnp.tile(jnp.arange(-1, self.gamma), (len(root), 1)),
        probs=jnp.pad(probs, ((0, 0), (1, 0), (0, 0)))), None

def flat(target, gamma):
  return Strategy(Flat(vocab_size=target.model.vocab_size, gamma=gamma),
                  sj.verifiers.Block()), None

def no_params(target):
  return flat(target, 2)[0]

def fails(target, gamma):
  return 1 // 0

def other(target, length):
  return None

def unfit(target, gamma):
  (drafter, _), params = flat(target, gamma)
  return Strategy(Rejected(gamma=2), sj.verifiers.Block()), params

@dataclasses.dataclass(frozen=True, kw_only=True)
class Rejected(Flat):
  vocab_size: int = 5
  provides = ()

class Nameless(sj.interfaces.Drafter):
  gamma = 2

def nameless(target):
  return Strategy(Nameless(), sj.verifiers.Token()), None
"""


@pytest.fixture
def code(tmp_path, monkeypatch):
  """The directory with mine.py, which is the working directory."""
  (tmp_path / "mine.py").write_text(_CODE)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(extensions, "_OWN", {})
  return tmp_path


def _rule(value):
  [(name, rule)] = common.verifiers("--verifier", [value]).items()
  return name, rule


def _line(text):
  """The line of _CODE, as of mine.py, that begins with a text."""
  return next(i for i, line in enumerate(_CODE.splitlines(), 1)
              if line.strip().startswith(text))


def test_rules_of_a_file(code):
  # Broken: a rule of one's own cannot be named, or another one is loaded.
  assert _rule("mine.py:Damped")[1].share == 0.5
  assert _rule("mine.py:damped") == ("mine.py:damped", _rule(
      "mine.py:Damped")[1].__class__(0.25))
  assert _rule("mine.py:factory")[1].share == 0.75
  assert _rule(f"{code}/mine.py:Damped")[0] == "mine.py:Damped"
  both = common.verifiers("--verifier", ["token", "mine.py:Damped", "token"])
  assert list(both) == ["token", "mine.py:Damped"]
  (code / "copy").mkdir()
  (code / "copy/mine.py").write_text(_CODE)
  with pytest.raises(ValueError, match="two rules with the name mine.py:Damp"):
    common.verifiers("--verifier", ["mine.py:Damped", "copy/mine.py:Damped"])


@pytest.mark.parametrize("value,words", [
    ("mine.py:NoLaw", ["class NoLaw", "law(draft, target_probs)"]),
    ("mine.py:Raises", ["return draft.nothing", "AttributeError"]),
    ("mine.py:Shapeless", ["class Shapeless", "[N]"]),
    ("mine.py:Incomplete", ["class Incomplete", "cannot be called", "share"]),
    ("mine.py:number", ["number", "type int", "specjax.Verifier"]),
    ("mine.py:flat", ["def flat", "target", "gamma"]),
    ("mine.py:Missing", ["import", "'Missing'", "Damped"]),
    ("none.py:Damped", ["import", "does not exist", "FILE.py:NAME"]),
    ("nothing", ["import", "'nothing'", "token", "FILE.py:NAME"])])
def test_rules_that_are_refused(value, words, code):
  # Broken: a mistake in the file is a traceback, without flag, file or line.
  at, *words = words
  with pytest.raises(ValueError) as caught:
    _rule(value)
  text = str(caught.value)
  assert text.startswith("--verifier") and "\n" not in text
  assert at == "import" or f"mine.py line {_line(at)}" in text, text
  assert all(word in text for word in (value, *words)), text


@pytest.mark.parametrize("source,words", [
    ("a = (\n", ["line 1", "not Python"]),
    ("\nimport nowhere\n", ["line 2", "ModuleNotFoundError"]),
    ("\n\nraise SystemExit(3)\n", ["line 3", "SystemExit"])])
def test_files_that_cannot_be_imported(source, words, code):
  (code / "mine.py").write_text(source)
  with pytest.raises(ValueError) as caught:
    _rule("mine.py:Damped")
  for word in ("--verifier=mine.py:Damped", "mine.py", *words):
    assert word in str(caught.value)


def _target(size=5):
  pair = testing.tiny_pair(size)
  return types.SimpleNamespace(model=pair.target, params=pair.params["target"],
                               tokenizer=None)


def test_drafters_of_a_file(code):
  """The function receives the settings that it names, and no others."""
  asked = []
  (drafter, rule), params = extensions.drafter(
      "mine.py:flat", _target(), lambda name: asked.append(name) or 3)
  assert (drafter.gamma, drafter.vocab_size, params) == (3, 5, None)
  assert asked == ["gamma"] and rule == sj.verifiers.Block()


@pytest.mark.parametrize("value,words", [
    ("mine.py:no_params", ["def no_params", "Strategy", "(strategy, params)"]),
    ("mine.py:fails", ["return 1 // 0", "ZeroDivisionError"]),
    ("mine.py:other", ["def other", "(target, length)", "(target, gamma)"]),
    ("mine.py:unfit", ["def unfit", "Block", "Rejected", "chain"]),
    ("mine.py:nameless", ["def nameless", "Nameless", "frozen dataclass"]),
    ("mine.py:Flat", ["class Flat", "the class Flat", "(target, gamma)"]),
    ("mine.py:missing", ["import", "'missing'", "flat"])])
def test_drafters_that_are_refused(value, words, code):
  # Broken: as above.
  at, *words = words
  with pytest.raises(ValueError) as caught:
    extensions.check_drafter(value)
    extensions.drafter(value, _target(), lambda name: 2)
  text = str(caught.value)
  assert text.startswith(f"--drafter={value}") and "\n" not in text
  assert at == "import" or f"mine.py line {_line(at)}" in text, text
  assert all(word in text for word in words), text


def test_an_error_while_decoding_names_the_line(code):
  # Broken: what own code raises in the decoding loop is a page of traceback.
  rule = _rule("mine.py:Damped")[1]

  def main():
    rule.law(None, None)  # as the loop would, with other arguments

  with pytest.raises(SystemExit) as caught:
    common.run(main, ["script"])
  assert caught.value.code.startswith(
      "error: --verifier=mine.py:Damped: mine.py line "
      f"{_line('law = sj.verifiers.Token()')} raised AttributeError")


def test_results_are_those_of_the_text_of_the_file(code):
  # Broken: the table of a rule that was changed is that of the rule before.
  of = lambda *rules: resumable.fingerprint((), [*rules], "settings")
  rule = _rule("mine.py:Damped")[1]
  first, again = of(rule), of(_rule("mine.py:Damped")[1])
  shorter = of(statistics.Shorter(rule, 2))
  (code / "mine.py").write_text(_CODE.replace("* self.share +", "* 0.1 +"))
  changed = _rule("mine.py:Damped")[1]
  assert first == again != of(changed)
  assert shorter != of(statistics.Shorter(changed, 2))
  assert extensions.sources([sj.verifiers.Token(), 3, None, "text"]) == []
  assert repr(_rule("mine.py:NoLaw".replace("NoLaw", "Plain"))[1]) == (
      "Plain(share=0.5)")


def test_a_rule_without_fields_has_the_same_repr_in_every_process():
  # Broken: the record of a rule that is no dataclass is never found again.
  class Own(sj.Verifier):
    pass

  assert repr(Own()) == "Own()"
  assert repr(sj.verifiers.TopK(k=2)) == "TopK(k=2, minimum=0)"


def test_the_first_tokens_are_a_shorter_draft(code):
  # Broken: a short draft of a rule that reads the whole draft has the value of
  # the long one.
  class Last(sj.verifiers.Token):
    def law(self, draft, target_probs):
      law = super().law(draft, target_probs)
      share = draft.probs[-1].max()
      first = jnp.arange(len(law.stop)) == 0
      return sj.Law(stop=law.stop * share + (1 - share) * first,
                    next_token=law.next_token)

    survival = sj.Verifier.survival

  keys = jax.random.split(jax.random.key(1), 2)
  q, p = (jax.nn.softmax(jax.random.normal(key, (n, 4)))
          for key, n in zip(keys, (5, 6)))
  tokens = jnp.array([1, 3, 0, 2, 1])
  draft = sj.Draft.chain(jnp.int32(0), tokens, q)
  short = sj.Draft.chain(jnp.int32(0), tokens[:2], q[:2])
  rule, depths = Last(), jnp.arange(6)
  expected, survival = statistics.Subtree(rule, (0, 1, 2)).figures(
      draft, p, None, None, depths)
  right = rule.figures(short, p[:3], None, rule.evaluate(short, p[:3]),
                       depths[:3])
  assert expected == right[0]
  np.testing.assert_array_equal(survival, [*right[1], 0, 0, 0])
  assert expected != rule.figures(
      draft, p, None, rule.evaluate(draft, p), depths)[1][1:3].sum()


def test_drafts_are_timed(code):
  # Broken: a drafter without a model has no time, so its study cannot be timed.
  pair = testing.tiny_pair(5)
  (drafter, rule), params = extensions.drafter(
      "mine.py:flat", _target(), lambda name: 3)
  decoder = sj.Decoder(target=pair.target, drafter=drafter, verifier=rule)
  timed = timing.drafts(decoder, {**pair.params, "drafter": params}, [1, 2], 20)
  assert timed() > 0


def _loaded(strategy, target=None):
  target = target or _target()
  return drafters.Loaded("own", strategy, {}, target.model, target, None)


def test_the_shapes_that_a_drafter_has_in_the_tree_study(code):
  # Broken: a tree is drafted by a drafter of chains, a rule is evaluated on
  # drafts that it cannot verify, or the drafts are those of another drafter.
  (flat, _), _ = extensions.drafter("mine.py:flat", _target(), lambda name: 3)
  model = testing.tiny_pair(5).drafter
  network = sj.drafters.draft_model(model=model, gamma=3)
  rules = {"Iid": _rule("mine.py:Plain")[1]}
  with imported("tree_study.py") as study:
    parse = lambda *given: study.flags.FLAGS(["tree_study.py", *given])
    parse()
    chains = study._groups(_loaded(Strategy(flat, None)), rules)
    trees = study._groups(_loaded(Strategy(network, None)), rules)
    parse("--methods=traversal")
    with pytest.raises(ValueError, match="traversal.*NetworkDrafter.*own is"):
      study._groups(_loaded(Strategy(flat, None)), {})
    with pytest.raises(ValueError, match="--verifier.* Iid.*iid"):
      study._groups(_loaded(Strategy(network, None)), rules)
    with pytest.raises(ValueError, match="own drafts trees of its own shape"):
      study._groups(_loaded(sj.strategies.token_recycling()), {})
  assert [list(group.methods) for group in chains] == [
      ["chain_token", "chain_block", "chain_Iid"]]
  assert chains[0].methods["chain_block"]((-1, 0, 1)).drafter == (
      dataclasses.replace(flat, gamma=2))
  assert [group.kind for group in trees] == [
      "chain", "iid", "without_replacement", "hybrid", "top_k"]
  assert [[name for name in group.methods if "Iid" in name]
          for group in trees] == [["chain_Iid"], ["iid_Iid"], [], [], []]
  drafted = trees[1].methods["iid_Iid"]((-1, 0, 0))
  assert drafted.drafter.network == network.network
  assert drafted.drafter.shape.parents == (-1, 0, 0)


def test_draft_lengths_need_drafts_that_begin_alike(code):
  # Broken: a short draft is taken for the first tokens of a long one, although
  # the drafter would draft others.
  with imported("verification_study.py") as study:
    copies = _loaded(sj.strategies.prompt_lookup(4))
    study._check_lengths(copies, [4])
    with pytest.raises(ValueError, match="own .*'autoregressive'.*--gamma"):
      study._check_lengths(copies, [2, 4])
    with pytest.raises(ValueError, match="own has no chains"):
      study._check_lengths(_loaded(sj.strategies.token_recycling()), [4])


@pytest.fixture
def package(code, monkeypatch):
  """An installed package that declares the code of mine.py."""
  (code / "mine_package.py").write_text(_CODE + textwrap.dedent("""
      from specjax import methods
      toy = dataclasses.replace(methods.by_name("medusa"), name="toy")
      """))
  information = code / "mine_package-1.0.dist-info"
  information.mkdir()
  (information / "METADATA").write_text(
      "Metadata-Version: 2.1\nName: mine-package\nVersion: 1.0\n")
  (information / "entry_points.txt").write_text(textwrap.dedent("""\
      [specjax.verifiers]
      damped = mine_package:damped
      broken = mine_package:nothing
      [specjax.drafters]
      flat = mine_package:flat
      [specjax.methods]
      toy = mine_package:toy
      lost = nowhere:method
      """))
  monkeypatch.syspath_prepend(str(code))
  caches = entry_points._declared, methods._installed
  for cache in caches:
    cache.cache_clear()
  yield code
  for cache in caches:
    cache.cache_clear()
  sys.modules.pop("mine_package", None)


def test_names_of_an_installed_package(package, capsys):
  # Broken: the names are not accepted, or one broken package breaks all.
  name, rule = _rule("damped")
  assert (name, rule.share) == ("damped", 0.25)
  assert extensions.sources([rule])
  with pytest.raises(ValueError) as caught:
    _rule("broken")
  assert "--verifier=broken is mine_package:nothing of the package " in str(
      caught.value)
  with pytest.raises(ValueError, match="choose among token.*damped, broken"):
    _rule("dampd")
  (drafter, _), _ = extensions.drafter("flat", _target(), lambda name: 3)
  assert drafter.gamma == 3
  assert [m.name for m in methods.available()[len(methods.METHODS):]] == ["toy"]
  said = capsys.readouterr().err
  assert said.startswith("the method 'lost' (nowhere:method of the package m")
  assert said.count("\n") == 1
  assert methods.by_name("toy").heads is heads_family.medusa.MedusaHeads
  with imported("train_drafter.py") as script:
    assert "toy" in script._METHODS


def test_own_methods_have_a_colour(monkeypatch):
  # Broken: a study of hours ends in a figure that cannot be drawn.
  monkeypatch.setattr(style, "_METHODS", dict(style._METHODS))
  found = [style.color(f"mine.py:{name}") for name in "abc"]
  assert len(set(found)) == 3 and style.color("mine.py:a") == found[0]
  assert style.label("mine.py:a") == style.rule("mine.py:a") == "mine.py:a"


_FEW = ["--gamma=2,3", "--temperature=1", "--num_prompts=2", "--prompts=code",
        "--max_new_tokens=6", "--batch=2"]


@pytest.mark.slow
@pytest.mark.parametrize("rule,drafter", [
    ("mine.py:Damped", "mine.py:flat"), ("damped", "flat")])
def test_rows_and_figures(rule, drafter, package):
  """A rule and a drafter of a file and of a package are rows of all studies."""
  flags = [*_FEW, f"--verifier=token,{rule}", f"--drafter={drafter}"]
  keys = {}
  for script, more, figures in (
      ("verification_study.py", ["--noown_rollouts"],
       ["verification/verification_tokens", "verification/verification_gain"]),
      ("arena.py", [], ["arena/arena"]),
      ("evaluate_drafter.py", [], ["evaluation/evaluation"])):
    rows = last_line(*run_all(script, [*flags, *more], cwd=package))["rows"]
    keys[script] = {(row["verifier"], row["gamma"]) for row in rows}
    for figure, end in itertools.product(figures, (".png", ".pdf")):
      assert (package / "results" / (figure + end)).stat().st_size > 5000
  assert set(map(frozenset, keys.values())) == {frozenset(
      itertools.product(("token", rule), (2, 3)))}
  arena = (package / "results/arena/arena.md").read_text()
  assert f"| {drafter} | {rule} |" in arena
  study = last_line(*run_all("replay.py", [
      "--gamma=2", f"--acting={rule}", f"--drafter={drafter}",
      f"--verifier=token,{rule}", *_FEW[2:5]], cwd=package))
  rows = {row["verifier"]: row for row in study["rows"]}
  assert rows[rule]["online_block_efficiency"] == pytest.approx(
      rows[rule]["block_efficiency"], abs=1e-4)
  [text] = run_all("generate.py", [
      f"--verifier={rule}", f"--drafter={drafter}", "--max_new_tokens=6",
      "--prompt=a", "--gamma=2"], cwd=package)
  assert "6 tokens in" in text["stdout"]
  trees = last_line(*run_all("tree_study.py", [
      "--nodes=3", f"--verifier={rule}", f"--drafter={drafter}", *_FEW[1:],
      "--nobounds"], cwd=package))
  assert {row["method"] for row in trees["rows"]} == {
      "chain_token", "chain_block", f"chain_{rule}"}
