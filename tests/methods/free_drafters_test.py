"""Drafts that need no training: n-grams, references, recycled tokens."""

import bisect
import dataclasses
import inspect
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import strategies
from specjax import testing
from specjax.drafters import NGram
from specjax.drafters import Recycling
from specjax.drafters import Reference

_V, _GAMMA = 3, 5  # few tokens, so that n-grams come again by chance
_PREFERENCES = ("latest", "first")


def _state(texts, scratch, **context):
  """Rows of committed text with other tokens in the slots after it."""
  tokens = np.array(scratch)
  for row, text in zip(tokens, texts):
    row[:len(text)] = text
  lengths = jnp.array([len(text) for text in texts], jnp.int32)
  return types.SimpleNamespace(
      tokens=jnp.asarray(tokens), lengths=lengths, drafter=None,
      context={name: jnp.asarray(x) for name, x in context.items()})


def _drafted(drafter, state):
  """Returns the drafted tokens of every row, up to the first padding."""
  drafter = drafter.bind(testing.MarkovModel(_V), sj.LogitsTransform())
  draft, _ = drafter.propose({}, None, state)
  tokens, probs = (np.asarray(x)[:, 1:] for x in (draft.tokens, draft.probs))
  assert ((0 <= tokens) & (tokens < _V)).all()
  real = probs.sum(-1)
  assert np.isin(real, (0, 1)).all() and (np.diff(real, axis=1) <= 0).all()
  drawn = np.take_along_axis(probs, tokens[..., None], axis=2)[..., 0]
  np.testing.assert_array_equal(drawn, real)
  return [row[:int(count)].tolist()
          for row, count in zip(tokens, real.sum(1))]


def _places(text, last, longest, least):
  """Returns the ends of the longest match in a text, and its length."""
  for n in range(min(longest, len(last)), least - 1, -1):
    ends = [e for e in range(n - 1, len(text) - 1)
            if list(text[e - n + 1:e + 1]) == list(last[-n:])]
    if ends:
      return ends, n
  return [], 0


def _looked_up(text, longest, least, prefer):
  """The draft of a row's own text, token by token, and the match's length."""
  ends, n = _places(text, text, longest, least)
  if not ends:
    return [], 0
  at, grown = ends[-1 if prefer == "latest" else 0], list(text)
  for _ in range(_GAMMA):
    at += 1
    grown.append(grown[at])
  return grown[len(text):], n


def _rows(rng, count=48, columns=40):
  """Texts of all lengths, and slots full of tokens."""
  return ([rng.integers(_V, size=n).tolist()
           for n in rng.integers(1, columns + 1, size=count)],
          rng.integers(_V, size=(count, columns + _GAMMA)).astype(np.int32))


@pytest.mark.parametrize("prefer", _PREFERENCES)
@pytest.mark.parametrize("longest,least", [(3, 1), (4, 2), (1, 1), (6, 6)])
def test_ngrams_of_the_row(longest, least, prefer):
  # Broken: a shorter match is taken for the longest, one runs over the start of
  # a row, what follows it is off by one, or slots after the text are read:
  # they hold tokens that would match.
  texts, scratch = _rows(np.random.default_rng(0))
  drafter = NGram(gamma=_GAMMA, max_ngram=longest, min_ngram=least,
                  prefer=prefer)
  want = [_looked_up(text, longest, least, prefer)[0] for text in texts]
  assert _drafted(drafter, _state(texts, scratch)) == want
  assert [] in want or longest == 1
  assert _drafted(drafter, _state(texts, (scratch + 1) % _V)) == want


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_a_repeated_pattern_is_drafted_to_the_end(period):
  # Broken: the draft ends where the text does, as soon as it begins to repeat
  # itself; a loop then costs a round for each turn.
  loop = ([0, 1, 2, 0, 0, 2, 2] if period > 3 else [0, 1, 2])[:period]
  text = loop * 3
  want = (loop * _GAMMA)[:_GAMMA]
  scratch = np.zeros((1, 40), np.int32)
  assert _drafted(NGram(gamma=_GAMMA), _state([text], scratch)) == [want]


def test_rows_without_a_match_draft_nothing():
  # Broken: a row that never said this before drafts token 0, or its scratch.
  texts = [[0], [1, 2], [2, 1, 0], [0, 1, 1]]
  scratch = np.tile(np.array([1, 2, 0, 1, 0, 2], np.int32), (4, 2))
  assert _drafted(NGram(gamma=_GAMMA), _state(texts, scratch)) == [
      [], [], [], [1] * _GAMMA]
  assert _drafted(NGram(gamma=_GAMMA, min_ngram=2), _state(texts, scratch)
                  ) == [[]] * 4


@pytest.mark.parametrize("prefer", _PREFERENCES)
@pytest.mark.parametrize("own_text", [False, True])
def test_references(prefer, own_text):
  # Broken: a match or a copy goes from one reference text into the next, a
  # filler is drafted, or the row's own text wins over a longer match.
  rng = np.random.default_rng(1)
  texts, scratch = _rows(rng)
  given = [[rng.integers(_V, size=rng.integers(1, 9)).tolist()
            for _ in range(rng.integers(4))] for _ in texts]
  longest, least = 3, 2

  def expected(text, references):
    found = [(reference, *_places(reference, text, longest, least))
             for reference in references]
    most = max((n for *_, n in found), default=0)
    own, size = _looked_up(text, longest, least, "latest")
    if own_text and size > most:
      return own
    copies = [reference[e + 1:e + 1 + _GAMMA] for reference, ends, n in found
              for e in ends if n == most]
    return copies[-1 if prefer == "latest" else 0] if copies else []

  state = _state(texts, scratch,
                 reference=sj.drafters.reference_texts(given))
  drafter = Reference(gamma=_GAMMA, max_ngram=longest, min_ngram=least,
                      prefer=prefer, own_text=own_text)
  want = list(map(expected, texts, given))
  assert [] in want and any(len(row) not in (0, _GAMMA) for row in want)
  assert _drafted(drafter, state) == want


def test_ids_that_are_no_tokens_end_a_reference():
  # Broken: references of another tokenizer make drafts of ids that the target
  # does not have.
  state = _state([[0]], np.zeros((1, 8), np.int32),
                 reference=np.array([[0, 1, _V, 2, -1]], np.int32))
  assert _drafted(Reference(gamma=_GAMMA), state) == [[1]]


def test_references_of_16_bits_for_a_large_vocabulary():
  # Broken: V is beyond what their type holds, and nothing is ever drafted.
  state = _state([[0]], np.zeros((1, 8), np.int32),
                 reference=np.array([[0, 7, 2, -1]], np.int16))
  drafter = Reference(gamma=2, vocab_size=49152)
  assert drafter._copied(state)[0].tolist() == [[7, 2]]


def test_reference_texts_of_one_width():
  # Broken: rows that are inserted later do not fit to those that are there.
  texts = [[[5, 6], [7]], []]
  found = sj.drafters.reference_texts(texts, columns=6)
  assert found.tolist() == [[5, 6, -1, 7, -1, -1], [-1] * 6]
  assert sj.drafters.reference_texts(texts).shape == (2, 128)


def test_what_is_declared_of_copies():
  # Broken: a rule for autoregressive drafts takes them at gamma 1, though the
  # tokens before decide whether there is a draft.
  for drafter in (NGram(gamma=1), Reference(gamma=1), NGram(gamma=3)):
    assert "conditional" in drafter.provides
    assert "autoregressive" not in drafter.provides


def _prefill(drafter, own=(), **kwargs):
  """The state after one prompt, of a table that never tires."""
  decoder = sj.Decoder(target=testing.MarkovModel(_V), drafter=drafter,
                       verifier=sj.verifiers.TargetWalk())
  return decoder.prefill({"target": jnp.zeros((_V, _V)), "drafter": own},
                         [[0, 1]], jax.random.key(0), limits=5, **kwargs)


# Recycling against a simulation.


_TREE = (-1, 0, 0, 1, 1, 2, 3, 3)
_SIZE, _ROUNDS = 6, 12
_PROMPTS = ([1, 3, 0, 3, 1, 4], [5], [2, 2, 2, 1, 2, 0], [0, 5])
_LIMITS = (40, 33, 9, 40)  # the third is done early


def _first_table(prompt, start):
  """Returns the table with the prompt's pairs in front."""
  table = [list(row) for row in start]
  for token, after in zip(prompt, prompt[1:]):
    row = table[token]
    row.remove(after) if after in row else row.pop()
    row.insert(0, after)
  return np.array(table)


def _tree_of(table, root):
  """Tokens of `_TREE`; `_SIZE` where nothing is known."""
  tokens, children = [root], [0] * len(_TREE)
  for parent in _TREE[1:]:
    above = tokens[parent]
    tokens.append(int(table[above][children[parent]]) if above < _SIZE
                  else _SIZE)
    children[parent] += 1
  return tokens


def _recycled(table, tokens, laws, path):
  """The table after a round, entry by entry."""
  new = table.copy()
  on_path = sorted(set(path))
  others = [i for i in range(len(tokens)) if i not in on_path]
  for node in (*others, *on_path):  # what is written last stays
    if tokens[node] < _SIZE:
      new[tokens[node]] = np.argsort(-laws[node], kind="stable")[:2]
  return new


def test_recycling_is_what_the_paper_says():
  # Broken: a node drafts another rank or another parent's successor, a node of
  # the pass is left out or padding is learnt from, an early write of two
  # stays, or a finished row goes on learning.
  pair = testing.tiny_pair(_SIZE, seed=2)
  decoder = sj.Decoder(target=pair.target, drafter=Recycling(parents=_TREE),
                       verifier=sj.verifiers.TargetWalk())
  params = {"target": pair.params["target"]}
  state = decoder.prefill(params, _PROMPTS, jax.random.key(0), limits=_LIMITS)
  tables = np.asarray(state.drafter)
  state, stats, traces = decoder.decode(
      params, state, rounds=_ROUNDS, traced=True)
  traces, emitted = jax.tree.map(np.asarray, (traces, stats.emitted))
  texts, seen = np.asarray(state.tokens), {"padding": 0, "twice": 0}
  for row, prompt in enumerate(_PROMPTS):
    table = _first_table(prompt, np.full((_SIZE, 2), _SIZE))
    np.testing.assert_array_equal(tables[row], table)
    length = len(prompt)
    for step in range(_ROUNDS):
      if emitted[step, row] == 0:
        break
      want = _tree_of(table, int(texts[row, length - 1]))
      known = np.array(want) < _SIZE
      np.testing.assert_array_equal(
          traces.draft.tokens[step, row], np.where(known, want, 0))
      np.testing.assert_array_equal(
          traces.draft.probs[step, row].sum(-1)[1:], known[1:])
      taken = int(traces.verdict.num_accepted[step, row])
      table = _recycled(table, want, traces.target_probs[step, row],
                        traces.verdict.path[step, row, :taken + 1].tolist())
      length += emitted[step, row]
      seen["padding"] += (~known).any()
      seen["twice"] += len(set(want) - {_SIZE}) < known.sum()
    np.testing.assert_array_equal(np.asarray(state.drafter)[row], table)
  assert min(seen.values()) > 0 and emitted[-1, 2] == 0
  assert np.asarray(stats.accepted).sum() > _ROUNDS


def test_a_table_goes_from_text_to_text():
  # Broken: successors of one sequence are lost, or rows share their tables.
  table = np.array([[1, 2], [2, 0], [_V, _V]], np.int32)
  drafter = Recycling(parents=(-1, 0, 0, 1), from_prompt=False)
  found = _prefill(drafter, table).drafter
  np.testing.assert_array_equal(found, table[None])
  # Broken too: a successor -1 is followed by those of the table's last token.
  other = np.where(table == _V, [-1, _V + 9], table)
  found = _prefill(drafter, other).drafter
  np.testing.assert_array_equal(found, table[None])
  found = _prefill(Recycling(parents=(-1, 0, 0, 1)), table + 0).drafter
  np.testing.assert_array_equal(found[0], table)  # 1 after 0 is known already
  state = _state([[0], [2], [1]], np.zeros((3, 8), np.int32))
  state.drafter = jnp.stack([table, table, jnp.full_like(table, _V)])
  assert _drafted(drafter, state) == [[1, 2, 2], [], []]


# Tokens of a round on text that repeats itself.


@dataclasses.dataclass(frozen=True)
class _Dictated(sj.interfaces.Model):
  """A model that writes `params`, a text, whatever it reads."""

  vocab_size: int
  context_length: int = 8192

  def init_cache(self, params, batch, capacity):
    return testing.LengthCache(lengths=jnp.zeros((batch,), jnp.int32))

  def __call__(self, params, tokens, depths=None, ancestors=None, cache=None):
    after = params[cache.lengths[:, None] + depths + 1]
    logits = 40 * jax.nn.one_hot(after, self.vocab_size)
    return sj.types.ModelOutput(
        logits=logits, hidden=logits[..., :1], cache=cache)


def _tokens_a_round(strategy, prompt, answer, size, **kwargs):
  text = np.array([*prompt, *answer, *[0] * 64], np.int32)
  decoder = strategy.decoder(_Dictated(size))
  got = decoder.generate({"target": jnp.asarray(text)}, [prompt],
                         jax.random.key(0), max_new_tokens=len(answer),
                         temperature=0, **kwargs)
  assert got.tokens[0].tolist() == [*prompt, *answer]
  return len(answer) / int(got.stats.active[0])


def test_a_file_with_one_name_changed():
  # Broken: the drafter loses its place in the text that it copies, and edits,
  # which it is for, gain little. The target writes what it is told.
  tokenizer = sj.data.Tokenizer.load(
      sj.zoo.tokenizer_path())
  code = inspect.getsource(bisect)
  prompt = tokenizer.encode(code)
  answer = tokenizer.encode(re.sub(r"\blo\b", "left", code), bos=False)
  size = tokenizer.vocab_size
  own = _tokens_a_round(
      strategies.prompt_lookup(16), prompt, answer, size)
  assert own > 5
  text = sj.drafters.reference_texts([[tokenizer.encode(code, bos=False)]])
  given = _tokens_a_round(
      strategies.llma(16), prompt[:8], answer, size,
      context={"reference": text})
  assert given > 5
