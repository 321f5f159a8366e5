"""What scripts read and say: prompts of every kind, chats, models by name."""

import dataclasses
import json
import os
import sys
import types
from typing import NamedTuple

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts import imported
from scripts import ROOT
from tiny_llama import write_llama

import specjax as sj
from specjax import methods
from specjax import strategies
from specjax import testing
from specjax.methods.stop_rules import Confidence
from specjax.methods.stop_rules import Entropy
from specjax.methods.stop_rules import Threshold
from specjax.utils.fingerprints import fingerprint

sys.path.append(str(ROOT / "experiments"))

from lib import common  # noqa: E402
from lib import drafters  # noqa: E402
from lib import flags as shared  # noqa: E402
from lib import models  # noqa: E402
from lib.configurations import stops  # noqa: E402
from lib.prompts import conversation  # noqa: E402
from lib.prompts import reading as prompts  # noqa: E402
from lib.prompts import streaming  # noqa: E402


class _Words:
  """A tokenizer of words that come after `bos`, with a chat template."""

  chat_template = "as below"

  def __init__(self, bos=None):
    self.bos, self._words = bos, ["<s>"]

  def encode(self, text, bos=True, special=False):
    del special
    self._words += [w for w in text.split() if w not in self._words]
    ids = [self._words.index(word) for word in text.split()]
    return [self.bos, *ids] if bos and self.bos is not None else ids

  def decode(self, ids):
    return " ".join(self._words[i] for i in ids)

  def chat(self, messages, add_generation_prompt=True):
    assert add_generation_prompt
    return self.encode(" ".join(
        f"<{m['role']}> {m['content']}" for m in messages) + " <assistant>")


def _bundled():
  return sj.data.Tokenizer.load(
      sj.zoo.tokenizer_path())


def _message(content, role="user"):
  return {"role": role, "content": content}


@pytest.mark.parametrize("bos,want", [(None, [5, 6, 7]), (0, [0, 6, 7])])
def test_last_tokens(bos, want):
  # Broken: a text loses the token that begins every text, or, where there is
  # none, keeps its first word as if it were one.
  tokenizer = _Words(bos)
  ids = [4, 5, 6, 7] if bos is None else [0, 4, 5, 6, 7]
  assert prompts.last_tokens(tokenizer, ids, 3) == want
  assert prompts.last_tokens(tokenizer, ids, 1) == (
      [7] if bos is None else [0])
  assert prompts.last_tokens(tokenizer, ids, 9) == ids
  assert prompts.last_tokens(tokenizer, ids, 0) == []


def test_a_message_is_cut_between_characters():
  # Broken: a cut message begins with the second half of a character.
  tokenizer = _bundled()
  text = "naïve — 語" * 20
  cuts = [prompts.user(tokenizer, text, n)["content"] for n in range(1, 30)]
  assert len(set(cuts)) > 5
  assert all(text.endswith(cut) for cut in cuts)


def _read(tokenizer, items, **options):
  return prompts.read(tokenizer, items, **{**dict(
      field="prompt", count=4, tokens=8, seed=1), **options})


def test_prompts_of_every_kind(tmp_path, capsys):
  # Broken: a study measures beforehand with the prompts that it then reports
  # on, or reads another prompt, order or number than it says.
  tokenizer = _Words()
  path = tmp_path / "mine.txt"
  path.write_text("\n\n".join(f"number {i} of them" for i in range(7)))
  read = _read(tokenizer, [str(path)], extra=3)
  texts = [tokenizer.decode(ids) for ids in read.all]
  others = [tokenizer.decode(ids) for ids in read.extra]
  assert len(texts) == 4 and len(others) == 2  # two of seven may be spared
  assert len({*texts, *others}) == 6 and texts == sorted(texts)
  assert _read(tokenizer, [str(path)], extra=3) == read

  both = _read(tokenizer, ["code", str(path)], count=2, tokens=3, chat=True)
  assert "2 of 2 messages of mine lost their" in capsys.readouterr().err
  assert list(both.sets) == ["code", "mine"] and len(both.all) == 4
  for ids in both.all:  # as a message, its template on top
    assert tokenizer.decode(ids[:1]) == "<user>"
    assert tokenizer.decode(ids[-1:]) == "<assistant>"
  assert both.longest <= 5 and both.source["chat"]
  assert set(both.source["sets"]) == {"code", "mine"}


@pytest.mark.parametrize("items,options,words", [
    ([], {}, ["--prompts", "leave it out"]),
    (["code", ""], {}, ["--prompts", "empty entry"]),
    (["code", "code"], {}, ["two sets named 'code'"]),
    (["one.txt"], {}, ["one.txt holds 1 prompt;", "at least 2"]),
    (["two.txt"], {"extra": 1}, ["two.txt holds 2 prompts;", "one more"]),
    (["code"], {"chat": True}, ["--chat", "template"])])
def test_prompts_that_are_refused(tmp_path, monkeypatch, items, options, words):
  # Broken: a study runs on no prompts, or fails without saying which and why.
  monkeypatch.chdir(tmp_path)
  (tmp_path / "one.txt").write_text("alone")
  (tmp_path / "two.txt").write_text("one\n\ntwo")
  tokenizer = _Words()
  tokenizer.chat_template = None
  with pytest.raises(ValueError) as caught:
    _read(tokenizer, items, **options)
  for word in words:
    assert word in str(caught.value)


def test_a_prompt_that_leaves_no_room():
  # Broken: the compiler runs for minutes before the length is looked at.
  prompts.check_room(100, 28, 128)
  with pytest.raises(ValueError, match=(
      "100 tokens.*--max_new_tokens=29.*of the drafter, 128")):
    prompts.check_room(100, 29, 128, "drafter")


def test_a_conversation_that_is_too_long():
  # Broken: a chat that outgrows the context ends, or forgets what was said last
  # or what the system said.
  tokenizer = _Words()
  messages = [_message("be brief", "system"), _message("one two"),
              _message("three", "assistant"), _message("four five six")]

  def fit(room, keep):
    ids, read = conversation.fitting(tokenizer, messages, room, keep)
    assert tokenizer.chat(read) == ids  # what is lost is lost for good
    return tokenizer.decode(ids)

  whole = ("<system> be brief <user> one two <assistant> three "
           "<user> four five six <assistant>")
  assert fit(13, False) == fit(13, True) == whole
  with pytest.raises(ValueError, match="13 tokens.*room for 12.*--keep_last"):
    fit(12, False)
  assert fit(12, True) == fit(8, True) == (
      "<system> be brief <user> four five six <assistant>")
  assert fit(7, True) == "<system> be brief <user> five six <assistant>"
  with pytest.raises(ValueError, match="room for 5 .*template alone"):
    fit(5, True)
  assert conversation.cut(tokenizer, [1, 2, 3], 2, True) == [2, 3]
  with pytest.raises(ValueError, match="3 tokens.*room for 2.*--keep_last"):
    conversation.cut(tokenizer, [1, 2, 3], 2, False)


class _Stdin:
  """Lines, and Ctrl-C where there is None."""

  def __init__(self, *lines, terminal=True):
    self._lines = list(lines)
    self.isatty = lambda: terminal

  def readline(self):
    line = self._lines.pop(0) if self._lines else ""
    if line is None:
      raise KeyboardInterrupt
    return line


class _Printer:
  text = ""


class _Writer:
  """Says how many tokens it was given; Ctrl-C comes in its first answer."""

  decoder = types.SimpleNamespace(
      num_nodes=3, drafter=types.SimpleNamespace(target_calls=2))

  def __init__(self):
    self.numbers, self.capacities = [], []

  def start(self, ids, new_tokens, number, capacity):
    self.numbers.append(number)
    self.capacities.append(capacity)
    return ids

  def write(self, state, printer, answer):
    printer.text = f"heard {len(state)}"
    if len(self.capacities) == 1:
      raise KeyboardInterrupt
    answer.tokens += [1, 2]


def _talk(monkeypatch, stdin, writer=None, **options):
  """What is kept of a chat, after every answer."""
  monkeypatch.setattr(sys, "stdin", stdin)
  kept = []
  try:
    conversation.chat(
        writer or _Writer(), _Words(), _Printer, **dict(
            room=20, new_tokens=4, keep_last=False, context="the drafter's",
            first=None, system=None, keep=kept.append) | options)
  except KeyboardInterrupt:
    kept.append("stopped")
  return kept


def test_ctrl_c_stops_an_answer_and_not_the_chat(monkeypatch, capsys):
  # Broken: the program dies with the answer, or the chat forgets its messages,
  # keeps one that had no answer, or reads on after /quit.
  writer = _Writer()
  kept = _talk(monkeypatch, _Stdin(
      "\n", None, "and two\n", "far " * 20 + "\n", "/quit\n", "no\n"),
      writer, first="one")
  first = "user: one\nassistant: heard 3\n"
  assert kept == [first, first + "user: and two\nassistant: heard 9\n"]
  printed = capsys.readouterr()
  assert "2 tokens in 0 rounds" in printed.err
  assert "error: the conversation has 33 tokens" in printed.err
  assert writer.capacities == [1024, 1024]  # one program for both
  assert len(set(writer.numbers)) == 2  # each with draws of its own


def test_where_nobody_types(monkeypatch, capsys):
  # Broken: Ctrl-C does not end a chat that reads a file, or what was answered
  # by then is lost.
  pipe = lambda *lines: _Stdin(*lines, terminal=False)
  assert _talk(monkeypatch, pipe("one\n", "two\n")) == [
      "user: one\nassistant: heard 3\n", "stopped"]
  assert _talk(monkeypatch, pipe(None, "one\n")) == ["stopped"]
  # Nothing was said, so that a file of an earlier chat stays.
  assert _talk(monkeypatch, pipe()) == []
  assert capsys.readouterr().out == ""
  assert _talk(monkeypatch, _Stdin()) == []  # Ctrl-D
  assert capsys.readouterr().out == "> \n"


def test_a_chat_that_is_full(monkeypatch, capsys):
  # Broken: a chat that has outgrown the context can only be ended, or renders
  # in every turn what it lost long ago; an empty system message is left out.
  lines = ("a b c d\n", "e f g h\n", "/reset\n", "i j\n")
  kept = _talk(monkeypatch, _Stdin(*lines), room=10, system="")
  assert "room for 10" in (said := capsys.readouterr().err)
  assert "/reset begins a new one" in said
  assert kept[-1] == (
      "system: \nuser: a b c d\nassistant: heard 7\n"
      "user: i j\nassistant: heard 5\n")
  rendered = []
  chat = _Words.chat
  monkeypatch.setattr(_Words, "chat", lambda self, messages: (
      rendered.append(len(messages)), chat(self, messages))[1])
  kept = _talk(monkeypatch, _Stdin(*("a b c d\n",) * 4), room=10,
               keep_last=True)
  assert kept[-1].count("user: a b c d") == 4  # lost to the model alone
  assert max(rendered) == 3


def test_ctrl_c_keeps_what_was_written(tmp_path, capsys):
  # Broken: a text that is stopped is lost, or one that never began replaces the
  # file of another.
  path = tmp_path / "text"
  path.write_text("old")
  writer = _Writer()
  writer.start = lambda ids, new_tokens: ids
  with imported("generate.py") as generate:
    flags.FLAGS(["generate.py", f"--output={path}", "--chat"])
    for tokens, want in (([], "old"), ([5], "hello")):

      def stopped(state, printer, answer, tokens=tokens):
        printer.text, answer.tokens = "hello", tokens
        raise KeyboardInterrupt

      writer.write = stopped
      with pytest.raises(KeyboardInterrupt):
        generate._continue(writer, [1, 2], _Printer())
      assert path.read_text() == want
  # The drafter has two target calls per round.
  assert "1 tokens in 0 rounds: 0.50 per target call" in capsys.readouterr().err


def _found(tokens, vocab_size=5, eos=None):
  tokenizer = tokens and types.SimpleNamespace(tokens=tokens, eos=3)
  return models.Pretrained(
      model=sj.testing.MarkovModel(vocab_size), params=None,
      tokenizer=tokenizer,
      generation=eos and types.SimpleNamespace(eos=eos))


def test_the_ends_of_a_text():
  # Broken: an answer goes on after its end, for the model has another one than
  # its tokenizer, or several.
  of = lambda found: models.ends(found, found.tokenizer)
  assert of(_found("a")) == (3,)
  assert of(_found("a", eos=(4, 3))) == (4, 3)
  assert of(_found("a", eos=(4,))) == (4, 3)
  nothing = _found("a")
  nothing.tokenizer.eos = None
  assert of(nothing) is None


def test_a_drafter_of_other_tokens(monkeypatch):
  # Broken: two tokenizers of equal size pass in silence, and the draft is
  # noise; or two models that pad one vocabulary differently fail without words.
  def check(drafter, target):
    if drafter.tokens != target.tokens:
      raise ValueError("the tokens differ")

  monkeypatch.setattr(models.tokenizers, "check_same_tokens", check)
  target = _found("a")
  for drafter in (_found("a"), _found(None)):
    models.check_tokens(target, drafter, "mine")
  for drafter, words in ((_found("b"), "mine.*the tokens differ.*across vocab"),
                         (_found("a", 6), "mine.*6 tokens.*5.*across vocab")):
    with pytest.raises(ValueError, match=words):
      models.check_tokens(target, drafter, "mine")


def test_how_a_chain_is_drafted(tmp_path, capsys):
  # Broken: a drafter of another vocabulary is taken for one of the same, or the
  # flag that chooses how it drafts does nothing.
  found = lambda tokenizer, size: models.Pretrained(
      sj.testing.MarkovModel(size), None, tokenizer, None)
  target = found(sj.data.Tokenizer.load(write_llama(tmp_path / "model")), 330)
  same, other = found(None, 330), found(_bundled(), 4096)
  drafter = lambda member, *how: drafters._chain(
      target, member, "mine", 3, *how)[0].drafter
  assert isinstance(drafter(same).network, sj.drafters.LanguageModel)
  assert "mine has no tokenizer; its 330" in capsys.readouterr().err
  assert isinstance(drafter(other), sj.drafters.TokenIntersection)
  assert "mine has 4,096 tokens" in capsys.readouterr().err
  assert isinstance(drafter(other, "strings"), sj.drafters.StringMatch)
  with pytest.raises(ValueError, match="mine does not.*331.*330.*tokenizer"):
    drafter(found(None, 331))
  with pytest.raises(ValueError, match="mine does not fit the target"):
    drafter(other, "auto", True)


def test_a_drafter_with_a_smaller_head(tmp_path, monkeypatch, capsys):
  # Broken: --draft_vocabulary keeps tokens that texts do not have, forgets the
  # end of a text, or the drafter is refused as one of other tokens.
  (tmp_path / "texts.txt").write_text("import os\n" * 9 + "import sys\n")
  _, loaded, tokenizer = drafters.load("bundled", ["tiny"], drafters.Options(
      draft_vocabulary=4, vocabulary_data=str(tmp_path / "texts.txt")))
  found = loaded["tiny"]
  drafter = found.member
  said = capsys.readouterr().err  # all tokens but one of the thirty
  assert "4 of its 4,096 tokens, which are 96.7%" in said
  ids = set(drafter.params["ids"].tolist())
  assert {tokenizer.eos, *tokenizer.encode("import os\n", bos=False)} <= ids
  assert found.strategy.drafter.network.model is drafter.model
  assert found.params["drafter"] is drafter.params
  with pytest.raises(ValueError, match="5000 and tiny has 4096 tokens"):
    models.narrowed(drafter, tokenizer, "tiny", 5000)
  whole = models.load_model("tiny")
  monkeypatch.setattr(models, "ends", lambda *_: (3, 4))
  with pytest.raises(ValueError, match="--draft_vocabulary is 1 and tiny has 2"
                                       " end-of-text tokens"):
    models.narrowed(whole, tokenizer, "tiny", 1)


def test_tokens_are_counted_in_what_nothing_is_measured_with(
    tmp_path, monkeypatch, capsys):
  # Broken: a head is fitted to the texts that its gain is measured on.
  for i in range(40):
    (tmp_path / f"{i}.txt").write_text(f"def f{i}(x): return x + {i}\n")
  documents = models.corpora.read_documents(str(tmp_path))
  training, held_out = models.corpora.split(documents)
  tiny = models.load_model("tiny")
  read = []

  def encode(text, bos):
    read.append(text)
    return [5]

  member = dataclasses.replace(
      tiny, tokenizer=types.SimpleNamespace(encode=encode, eos=0))
  models.narrowed(member, tiny.tokenizer, "tiny", 4, str(tmp_path))
  assert set(read) == {document.text for document in training}
  assert held_out


def test_models_of_one_name():
  # Broken: two models of the hub share a row, or a directory is to be renamed
  # where there is none.
  with pytest.raises(ValueError, match="a/x and b/x.* 'x'"):
    drafters.load("bundled", ["a/x", "b/x"])


def test_a_tokenizer_is_read_without_weights(tmp_path, monkeypatch):
  # Broken: the weights of a large model are read for its tokenizer alone.
  monkeypatch.setattr(sj.models, "load_pretrained", None)
  monkeypatch.setattr(
      sj.models, "load_tokenizer",
      lambda name: None if name == "a/none" else _bundled())
  assert models.load_tokenizer("a/model").same_tokens(_bundled())
  with pytest.raises(ValueError, match="a/none has no tokenizer"):
    models.load_tokenizer("a/none")


@pytest.mark.parametrize("name", ["", "bundle", "a/b/c", "/a", "./b"])
def test_a_slip_in_the_name_of_a_model(monkeypatch, tmp_path, name):
  # Broken: a slip is looked for on the hub, and times out.
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match=f"target {name!r}.*among bundled, or "):
    models.load_target(name)


def test_prompts_that_resemble_each_other_are_one_cluster(tmp_path):
  # Broken: the code and the docstrings of a module, one prompt twice, or two
  # tasks about one text count as two observations.
  tokenizer = _Words()
  read = _read(tokenizer, ["code", "docstrings"], count=40, extra=8, tokens=99)
  names = [read.source["sets"][name]["documents"][:40] for name in read.sets]
  assert set(names[0]) & set(names[1])
  assert set(read.clusters) <= {*names[0], *names[1]}
  for i, row in enumerate(read.sets["code"]):
    assert read.cluster(fingerprint(row)) == names[0][i]
  (tmp_path / "a.txt").write_text("one\n\ntwo\n\none")
  (tmp_path / "b.txt").write_text("two\n\nthree")
  given = _read(tokenizer, [str(tmp_path / x) for x in ("a.txt", "b.txt")])
  assert len(given.all) == 5 and len(set(given.clusters)) == 3
  shipped = _read(tokenizer, ["summarise", "questions", "rename"], count=12,
                  tokens=500)
  assert len(set(shipped.clusters)) == 12 + 12
  # A few prompts are all measured, and none is spared where none must be.
  few = _read(tokenizer, [str(tmp_path / "a.txt")], extra=9, needs_extra=False)
  assert len(few.all) == 3 and not few.extra


def test_compared_texts_must_be_the_same():
  # Broken: at temperature 0 the speeds of two different texts are compared.
  tokenizer = _Words()
  a, b = (tokenizer.encode(text) for text in ("one two three", "one too three"))
  streaming._check_same(a, a, tokenizer)
  with pytest.raises(ValueError, match="token 1 on, 'two three' .*'too three'"):
    streaming._check_same(a, b, tokenizer)
  with pytest.raises(ValueError, match="token 2 on, '' .*'three'"):
    streaming._check_same(a[:2], a, tokenizer)


def _sentence_piece():
  path = ROOT / "tests" / "golden" / "tokenizers" / "sentencepiece.json"
  return sj.data.Tokenizer.from_gguf(json.loads(path.read_text())["metadata"])


def _printed(tokenizer, ids):
  printer = streaming.Printer(tokenizer, False)
  printer.prompt(ids[:1])
  printer.round(ids[1:], 1)
  return printer.text


@pytest.mark.parametrize("make", [_bundled, _sentence_piece])
def test_what_is_printed_is_what_the_tokens_say(make, capsys):
  # Broken: the text on the screen is not the answer: it begins with a space of
  # the vocabulary's own, shows special tokens or lacks a character.
  tokenizer = make()
  for text in (" two  spaces\n", "\na\u00ef\u6f22\U0001f600 the end", "a"):
    ids = tokenizer.encode(text)
    assert _printed(tokenizer, [*ids, tokenizer.eos]) == text
    assert capsys.readouterr().out == text
  half = tokenizer.encode("\U0001f600", bos=False)[:-1]
  assert "\ufffd" not in _printed(tokenizer, half)  # it may be completed


def test_bytes_that_are_no_character(capsys):
  # Broken: half a character in mid-text ends the program with a traceback, in
  # vocabularies that have tokens for bytes.
  tokenizer = _sentence_piece()
  ids = [tokenizer.backend.token_to_id(piece)
         for piece in ("\u2581the", "<0x0A>", "<0xF0>", "<0x9F>", "\u2581the")]
  assert _printed(tokenizer, ids) == "the\n\ufffd the"


class _State(NamedTuple):
  tokens: jax.Array
  lengths: jax.Array
  done: jax.Array


class _Recorder:
  """A decoder that notes how large its programs are."""

  num_nodes = 3
  transform = types.SimpleNamespace(temperature=1)

  def __init__(self):
    self.slots = []

  def prefill(self, params, prompts, key, *, limits, request_ids, capacity,
              placement=None):
    del params, key, request_ids, placement
    self.slots.append(max(limits + self.num_nodes, capacity))
    return _State(jnp.zeros((1, self.slots[-1]), jnp.int32),
                  jnp.array([limits]), jnp.array([True]))

  def decode_until(self, params, state):
    del params
    return state, None


def test_compared_runs_compile_nothing(monkeypatch):
  # Broken: the first timed run compiles, for the warm-up had a smaller program.
  monkeypatch.setattr(sj.decoding, "raise_if_not_finite", lambda stats: None)
  decoder = _Recorder()
  writer = streaming.Writer(decoder, None, 0)
  said = streaming.compare((writer, writer), [1, 2], 90, _Words())
  assert "times as fast" in said
  assert len(decoder.slots) == 8 and set(decoder.slots) == {95}


def test_the_warm_up_is_awaited(monkeypatch):
  # Broken: the clock of an answer starts while the warm-up still computes.
  done = []
  decoder = types.SimpleNamespace(decode=lambda *_, rounds: "warm")
  monkeypatch.setattr(jax, "block_until_ready", done.append)
  state = _State(jnp.zeros((1, 4), jnp.int32), jnp.array([4]),
                 jnp.array([True]))
  printer = types.SimpleNamespace(end=lambda: None)
  streaming.Writer(decoder, None, 0).write(state, printer, streaming.Answer())
  assert done == ["warm"]


def test_rounds_that_nobody_reads_are_not_counted(monkeypatch):
  # Broken: behind `| head` an answer has half a token a round.
  stats = types.SimpleNamespace(
      active=np.array([[True], [True]]), emitted=np.array([[1], [3]]),
      accepted=np.array([[0], [2]]))
  read = []

  def printed(tokens, drafted):
    if read:
      raise BrokenPipeError
    read.extend(tokens)

  state = _State(jnp.zeros((1, 9), jnp.int32), jnp.array([4]),
                 jnp.array([False]))
  monkeypatch.setattr(sj.decoding, "raise_if_not_finite", lambda stats: None)
  decoder = types.SimpleNamespace(decode=lambda *_, rounds: (state, stats))
  answer = streaming.Answer()
  with pytest.raises(BrokenPipeError):
    streaming.Writer(decoder, None, 0).write(
        state, types.SimpleNamespace(round=printed), answer)
  assert str(answer).startswith(
      "1 tokens in 1 rounds: 1.00 per target call, 0 %")
  assert len(answer.tokens) == len(read) == 1 and answer.seconds > 0


def test_an_output_that_is_no_file(tmp_path, monkeypatch):
  # Broken: a pipe, a device or a link is replaced by a file, or that nothing
  # can be written is found out when all is decoded.
  of = lambda path: common.output_file("--output", str(path))
  (tmp_path / "there").touch()
  (tmp_path / "link").symlink_to("there")
  assert of(tmp_path / "link") == of(tmp_path / "there")
  assert of(tmp_path / "new") == (tmp_path / "new").resolve()
  os.mkfifo(tmp_path / "pipe")
  for path, words in (
      ("", "'', which is a directory"), (tmp_path, "which is a directory"),
      (tmp_path / "no/file", "does not exist"),
      ("/dev/null", "not a regular file"),
      (tmp_path / "pipe", "not a regular file.*would be replaced")):
    with pytest.raises(ValueError, match=f"^--output is .*{words}"):
      of(path)
  def refuse(**_):
    raise PermissionError(13, "Permission denied")

  monkeypatch.setattr(common.tempfile, "TemporaryFile", refuse)
  with pytest.raises(ValueError, match="is not writable"):
    of(tmp_path / "new")


_UNREAD = [
    (["--drafter=small", "--nodes=20"], "--nodes=20", "small"),
    (["--drafter=medusa", "--gamma=3"], "--gamma=3", "medusa"),
    (["--drafter=recycling", "--gamma=3"], "--gamma=3", "recycling"),
    (["--drafter=recycling", "--nodes=5"], "--nodes=5", "recycling"),
    (["--drafter=none", "--gamma=3"], "--gamma=3", "none"),
    (["--drafter=none", "--verifier=token"], "--verifier=token", "none"),
    (["--drafter=eagle3", "--verifier=block", "--nodes=9"], "--nodes=9",
     "eagle3 and --verifier=block"),
    (["--drafter=ngram", "--stop=entropy"], "--stop=entropy", "ngram"),
    (["--drafter=none", "--stop=entropy"], "--stop=entropy", "none"),
    (["--drafter=medusa", "--tail"], "--tail", "medusa"),
    (["--drafter=ngram|tiny", "--tail"], "--tail", "ngram.tiny"),
    (["--drafter=none", "--vocabulary=strings"], "--vocabulary=st", "none"),
    (["--drafter=pass", "--vocabulary=strings"], "--vocabulary=st", "pass"),
    (["--drafter=ngram+tiny", "--vocabulary=strings"], "--vocabulary=st",
     "ngram.tiny"),
    (["--drafter=pass", "--draft_vocabulary=9"], "--draft_vocab", "pass"),
    (["--drafter=ngram|suffix", "--draft_vocabulary=9"], "--draft_vocab",
     "ngram.suffix"),
    (["--drafter=ngram", "--datastore=a.store"], "--datastore=a", "ngram"),
    (["--drafter=medusa", "--quantize=int8"], "--quantize=int8", "medusa"),
    (["--drafter=ngram", "--draft_cache=int8"], "--draft_cache", "ngram")]


def test_a_flag_that_no_drafter_reads():
  # Broken: what is said of a draft of another form is passed over in silence.
  for given, flag, cause in _UNREAD:
    with imported("generate.py") as generate:
      flags.FLAGS(["generate.py", *given])
      with pytest.raises(ValueError, match=(
          f"^{flag}.* has no effect with --drafter={cause}; leave --")):
        generate._SPECULATION.loaded()


@pytest.mark.parametrize("given", [
    ["--drafter=small", "--gamma=3", "--stop=entropy", "--vocabulary=auto"],
    ["--drafter=medusa", "--nodes=9", "--verifier=target_walk"],
    ["--drafter=eagle3", "--gamma=2", "--verifier=block"],
    ["--drafter=ngram+tiny|small", "--tail", "--gamma=4", "--quantize=int8"],
    ["--drafter=itself", "--draft_cache=int8", "--quantize=int4",
     "--quantize_group=64"]])
def test_flags_that_a_drafter_reads(given):
  # Broken: a flag that changes the draft is refused.
  with imported("generate.py") as generate:
    flags.FLAGS(["generate.py", *given])
    shared.check_requirements()
    generate._SPECULATION.check()
    assert generate._SPECULATION.loaded().strategy.drafter.num_nodes > 1


def test_a_stop_rule_by_its_flag():
  # Broken: --stop is passed over, or its threshold is.
  small = strategies.block_verification(testing.MarkovModel(4), gamma=3)
  assert stops.stopped(small, None, "small") == small
  for value, rule in (("confidence:0.3", Confidence(threshold=0.3)),
                      ("entropy", Entropy())):
    got = stops.stopped(small, value, "small")
    assert got == strategies.early_stopping(
        testing.MarkovModel(4), gamma=3, stop=rule)
  assert stops.can_stop(small.drafter)
  assert not stops.can_stop(strategies.prompt_lookup(3).drafter)
  heads = methods.ParallelHeads(
      width=8, vocab_size=4, layers=1, heads=1, kv_heads=1, head_dim=8,
      mlp_width=8, context_length=64, block_size=3, taps=(1,),
      confidence="hidden")
  assert stops.stopped(
      strategies.parallel(heads), "threshold:0.6", "parallel"
  ) == strategies.parallel(heads, stop=Threshold(threshold=0.6))
  with pytest.raises(ValueError, match="a confidence head.*small has none"):
    stops.stopped(small, "threshold:0.5", "small")
  for value, temperature, message in (
      ("confidence:0.4", 0.0, "no effect at --temperature=0"),
      ("sometimes", 1.0, "--stop is sometimes; give one of")):
    with pytest.raises(ValueError, match=message):
      stops.check_temperature(value, temperature)
  for value, temperature in ((None, 0.0), ("threshold", 0.0), ("entropy", 0.5)):
    stops.check_temperature(value, temperature)


@pytest.mark.parametrize("given,words", [
    (["--compare", "--target=model"], "--compare has no .*--drafter=none"),
    (["--controller", "--drafter=none"], "--controller .*--drafter=none"),
    (["--compare", "--verifier=top_2", "--temperature=0"], "top_2 is lossy"),
    (["--compare", "--verifier=typical", "--temperature=0"], "is lossy; ch"),
    (["--measure"], "--measure requires --controller; set it"),
    (["--vocabulary_data=mine.txt"], "=mine.txt requires --draft_vocab"),
    (["--quantize_group=8"], "=8 requires --quantize or --quantize_target"),
    (["--split_drafter"], "--split_drafter requires --mesh"),
    (["--system=Be brief."], "--system=.* requires --chat"),
    (["--special", "--chat"], "--special has no effect with --chat"),
    (["--process_id=1"], "--process_id=1 requires --coordinator"),
    (["--coordinator=here:1"], "--coordinator=here:1 requires --prompt"),
    (["--drafter=tiny+ngram"], "put ngram first"),
    (["--stop=sure"], "is sure; give one of confidence, adaptive, entropy"),
    (["--stop=entropy:high"], "'high' is not a number"),
    (["--stop=adaptive:2"], "threshold is 2"),
    (["--stop=entropy", "--temperature=0"], "no effect at --temperature=0")])
def test_flags_that_do_not_go_together(given, words, monkeypatch):
  # Broken: a comparison of a thing with itself, or of texts that differ, fails
  # after minutes with other words, and a flag is passed over in silence.
  monkeypatch.setattr(models, "read", lambda *_: pytest.fail("is loaded"))
  with imported("generate.py") as generate:
    flags.FLAGS(["generate.py", *given])
    with pytest.raises(ValueError, match=words):
      shared.check_requirements()
      generate._check_flags()
      generate._SPECULATION.check()
      generate._SPECULATION.loaded()


def test_published_settings_are_used_unless_flags_replace_them(capsys):
  # Broken: a model is sampled otherwise than its makers say, or nobody can tell
  # with which settings.
  published = sj.models.GenerationDefaults(
      temperature=0.6, top_k=20, repetition_penalty=1.5, suppress_tokens=(3,))
  target = types.SimpleNamespace(generation=published)
  last = sj.constraints.OutputPenalty(frequency=0.5)
  with imported("generate.py") as generate:

    def found(target, *given):
      flags.FLAGS(["generate.py", "--target=mine", *given])
      result = generate._SPECULATION.transform(target, (last,))
      flags.FLAGS.unparse_flags()
      return result

    assert found(target) == sj.LogitsTransform(
        temperature=0.6, top_k=20, banned=(3,), constraints=(
            sj.constraints.Repetition(penalty=1.5), last))
    assert ("published settings of mine: temperature=0.6, top_k=20, "
            "repetition_penalty=1.5, suppress_tokens=(3,)"
            in capsys.readouterr().err)
    assert found(target, "--temperature=0", "--top_k=0", "--top_p=0.9",
                 "--repetition_penalty=1") == sj.LogitsTransform(
                     temperature=0, top_p=0.9, banned=(3,), constraints=(last,))
    assert found(types.SimpleNamespace(generation=None)) == sj.LogitsTransform(
        temperature=0.8, constraints=(last,))
