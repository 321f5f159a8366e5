"""Contents of datastores, and drafts from them."""

import collections
import functools
import json
import re
import sys
import tracemalloc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts import imported
from scripts import ROOT

import specjax as sj
from specjax import testing
from specjax.data import corpora
from specjax.data import datastores
from specjax.drafters import Retrieval
from specjax.methods.model_free import _matches

sys.path.append(str(ROOT / "experiments"))

from lib import common  # noqa: E402

_V = 3
_TOKENS = testing.ListTokenizer((b"a", b"b", b"c"))


@functools.cache
def _documents(seed=0):
  rng = np.random.default_rng(seed)
  return [tuple(rng.integers(_V, size=n).tolist()) for n in (1, 60, 2, 35, 90)]


@functools.cache
def _store(depth=6):
  return datastores.index(_documents(), _V, depth)


def _following(pattern):
  """Returns the tokens after every match, up to the document's end."""
  size = len(pattern)
  return [d[i + size:] for d in _documents() for i in range(len(d) - size + 1)
          if d[i:i + size] == pattern]


@pytest.mark.parametrize("vocab_size, depth", [
    (3, 1), (3, 6), (3, 30), (2**16 - 1, 7), (2**16, 30), (2**31 - 1, 5)])
def test_suffixes_are_sorted(vocab_size, depth):
  # Broken: a suffix is left out, or a search goes past it. Small vocabularies
  # are sorted at once, large ones by doubling.
  scale = (vocab_size - 1) // 2
  documents = [[token * scale for token in d] for d in _documents()]
  store = datastores.index([*documents[:2], [], *documents[2:]], vocab_size,
                           depth)
  text = [token for d in documents for token in (*d, vocab_size)]
  assert store.tokens.tolist() == text
  starts = [i for i, token in enumerate(text) if token < vocab_size]
  assert sorted(store.suffixes.tolist()) == starts

  def prefix(start):  # what comes after a separator does not matter
    end = text.index(vocab_size, start)
    return text[start:min(end + 1, start + depth)]

  assert [prefix(i) for i in store.suffixes.tolist()] == sorted(
      map(prefix, starts))


def test_sorting_takes_the_memory_that_it_says():
  # Broken: a corpus that should fit does not: all buffers of a sort are kept.
  size = 200_000
  document = np.random.default_rng(0).integers(2**15, size=size, dtype=np.int32)
  document[size // 2:] = document[:size // 2]  # so that it sorts again
  tracemalloc.start()
  datastores.index([document], 2**15)
  most = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert 20 * size < most < 40 * size


def _rows(count=64):
  """Ragged rows; half of them end as some document goes on."""
  rng, rows = np.random.default_rng(1), []
  for i in range(count):
    row = rng.integers(_V, size=rng.integers(1, 12)).tolist()
    if i % 2:
      document = _documents()[(1, 3, 4)[i % 3]]
      start = rng.integers(len(document) - 8)
      row = row[:2] + list(document[start:start + rng.integers(1, 8)])
    rows.append(row)
  return rows, jnp.asarray([row + [0] * (16 - len(row)) for row in rows]), (
      jnp.array([len(row) for row in rows]))


def test_search_finds_what_is_there():
  # Broken: a bound of the binary search is off by one; a match crosses the end
  # of a document; an id that the datastore's tokenizer has not is found.
  rows, tokens, lengths = _rows()
  store, sizes = _store(), (1, 2, 3, 4, 6)
  search = jax.jit(lambda tokens: _matches.find(store, tokens, lengths, sizes))
  first, found = map(np.asarray, search(tokens))
  for row, at, count in zip(rows, first, found):
    for m, size in enumerate(sizes):
      pattern = tuple(row[-size:])
      want = len(_following(pattern)) if len(row) >= size else 0
      assert count[m] == want
      starts = store.suffixes[at[m]:at[m] + count[m]]
      assert all(tuple(store.tokens[i:i + size]) == pattern for i in starts)
  assert (found[:, -1] > 0).sum() > 5 and (found[:, -1] == 0).sum() > 5
  # 3 is the separator, 4 an id of a model with a larger vocabulary.
  for unknown in (3, 4):
    last = jnp.arange(tokens.shape[1]) == lengths[:, None] - 1
    assert not search(jnp.where(last, unknown, tokens))[1].any()


@pytest.mark.parametrize("count", [4, 64])
def test_matches_are_spread_over_the_range(count):
  # Broken: only the first part of a range is counted, or a draft goes on into
  # the next document.
  store, pattern = _store(), (1, 2)
  row = jnp.asarray([pattern]), jnp.array([2])

  @jax.jit
  def spread(store):
    first, found = _matches.find(store, *row, (2,))
    return found, *_matches.spread(
        store, first, found, jnp.array([2]), count, size=4)

  found, following, alive = map(np.asarray, spread(store))
  want = sorted((*f, *[9] * 4)[:4] for f in _following(pattern))
  want = [[-1 if token == 9 else token for token in f] for f in want]
  assert found[0, 0] == len(want) and any(-1 in f for f in want)
  assert alive.sum() == min(count, len(want))
  got = following[0, 0][alive[0, 0]].tolist()
  if count >= len(want):
    assert sorted(got) == sorted(want)
  else:  # evenly: the shares of the next token are right within a step
    share = lambda all: np.array([sum(f[0] == t for f in all) / len(all)
                                  for t in range(_V)])
    assert np.abs(share(got) - share(want)).max() <= 1 / count


def _propose(drafter, rows, tokens, lengths, store=None, seed=0):
  bound = drafter.bind(testing.MarkovModel(_V),
                       sj.LogitsTransform(temperature=None))

  @jax.jit
  def propose(store, tokens, lengths, uniforms):
    state = types.SimpleNamespace(
        tokens=tokens, lengths=lengths, temperature=jnp.ones(len(rows)))
    return bound.propose({"drafter": store}, uniforms, state)[0]

  uniforms = jax.random.uniform(jax.random.key(seed),
                             (len(rows), bound.num_uniforms))
  return jax.tree.map(np.asarray, propose(
      store or _store(), tokens, lengths, uniforms))


def _longest(row, sizes=range(6, 1, -1)):
  """Returns the tokens after the longest suffix in the datastore."""
  for size in sizes:
    found = _following(tuple(row[-size:])) if len(row) >= size else []
    if found:
      return found
  return []


def test_a_tree_is_of_the_most_frequent_prefixes():
  # Broken: a prefix is missing that is more frequent than one of the tree's, or
  # a node hangs below another parent.
  rows, tokens, lengths = _rows()
  nodes, gamma = 12, 4
  draft = _propose(Retrieval(gamma=gamma, nodes=nodes, max_match=6), rows,
                   tokens, lengths)
  sizes = []
  for row, drafted, parents, probs in zip(
      rows, draft.tokens, draft.parents, draft.probs):
    counts = collections.Counter(
        f[:k] for f in _longest(row) for k in range(1, gamma + 1)
        if len(f) >= k)
    real = probs[1:].sum(-1) > 0
    paths = {0: ()}
    for i in np.flatnonzero(real) + 1:
      assert parents[i] < i
      paths[i] = (*paths[parents[i]], int(drafted[i]))
      np.testing.assert_array_equal(probs[i], np.eye(_V)[drafted[i]])
    del paths[0]
    assert len(set(paths.values())) == len(paths)
    assert len(paths) == min(nodes - 1, len(counts))
    best = sorted(counts.values(), reverse=True)[:nodes - 1]
    assert [counts[path] for path in paths.values()] == best
    assert (parents[1:][~real] == 0).all() and parents[0] == -1
    sizes.append(len(paths))
  assert min(sizes) == 0 and max(sizes) == nodes - 1


@pytest.mark.parametrize("proposal", ["deterministic", "sampled"])
def test_a_chain_follows_the_counts(proposal):
  # Broken: a deterministic chain leaves the most frequent path, a drawn one has
  # another law than it says; or either goes on where its document ends.
  rows, tokens, lengths = _rows()
  draft = _propose(Retrieval(gamma=5, proposal=proposal, max_match=6), rows,
                   tokens, lengths)
  ended = 0
  for row, drafted, probs in zip(rows, draft.tokens[:, 1:], draft.probs[:, 1:]):
    alive = _longest(row)
    for k in range(5):
      alive = [f for f in alive if len(f) > k]
      if not alive:
        assert not probs[k:].any()
        ended += k > 0
        break
      counts = np.bincount([f[k] for f in alive], minlength=_V)
      if proposal == "deterministic":
        assert counts[drafted[k]] == counts.max()
        np.testing.assert_array_equal(probs[k], np.eye(_V)[drafted[k]])
      else:
        np.testing.assert_allclose(probs[k], counts / counts.sum(), atol=1e-6)
      alive = [f for f in alive if f[k] == drafted[k]]
  assert ended  # at the end of a document


def test_a_file_is_what_was_written(tmp_path):
  # Broken: an opened datastore differs from the built one, or its arrays are
  # read and not mapped.
  store, path = _store(), tmp_path / "abc.store"
  header = datastores.save(path, store, _TOKENS)
  assert path.stat().st_size == header["bytes"]
  found = datastores.load(path, _TOKENS)
  assert (found.vocab_size, found.depth) == (_V, 6)
  for name in ("tokens", "suffixes"):
    assert isinstance(getattr(found, name), np.memmap)
    np.testing.assert_array_equal(getattr(found, name), getattr(store, name))


def test_what_is_no_datastore_of_the_tokenizer_is_refused(tmp_path):
  # Broken: drafts come from a file that is cut off, or are tokens of another
  # vocabulary; a user reads a traceback.
  path = tmp_path / "abc.store"
  header = datastores.save(path, _store(), _TOKENS)
  whole = path.read_bytes()
  other = testing.ListTokenizer((b"a", b"c", b"b"))
  magic = whole[:whole.index(b"{")]

  def changed(**fields):
    text = magic + json.dumps({**header, **fields}).encode()
    return text.ljust(4096) + whole[4096:]

  for data, tokenizer, words in (
      (whole[:-1], _TOKENS, f"has {len(whole) - 1:,} bytes.*truncated.*build"),
      (whole + b"x", _TOKENS, "truncated, or was changed"),
      (whole[:100], _TOKENS, "broken header; build it again"),
      (b"", _TOKENS, "not a datastore of this"),
      (b"{}", _TOKENS, "not a datastore of this"),
      *((changed(**fields), _TOKENS, "broken header; build it again")
        for fields in (
            dict(tokens="many"), dict(depth=100), dict(depth="x"),
            dict(depth=0), dict(vocab_size=2), dict(vocab_size=4),
            dict(tokens=float(header["tokens"])), dict(suffixes=-1),
            dict(suffixes=True))),
      (magic + b"{}", _TOKENS, "broken header"),
      (whole, other, r"another tokenizer \(3 tokens, \S+ \w+\) than.*target"),
      (None, _TOKENS, "is not a file; give a datastore")):
    path.unlink()
    if data is not None:
      path.write_bytes(data)
    with pytest.raises(ValueError, match=words) as e:
      datastores.load(path, tokenizer)
    assert str(path) in str(e.value) and "\n" not in str(e.value)
    path.touch()
  with pytest.raises(ValueError, match="3 token ids, but the tokenizer"):
    datastores.save(path, _store(), testing.ListTokenizer((b"a",) * 4))


def test_build_datastore(tmp_path, capsys):
  # Broken: the script's datastore does not serve its own tokenizer, or holds
  # what scripts measure with.
  texts = {f"{i}.txt": f"def f{i}(x): return x + {i}\n" for i in range(60)}
  (tmp_path / "texts").mkdir()
  for name, text in texts.items():
    (tmp_path / "texts" / name).write_text(text)
  path = tmp_path / "texts.store"
  with imported("build_datastore.py") as script:
    documents = corpora.read_documents(str(tmp_path / "texts"))
    held_out = {d.name for d in corpora.split(documents)[1]}
    tokenizer = sj.data.Tokenizer.load(sj.zoo.tokenizer_path().parent)
    for part, names in (("training", texts.keys() - held_out),
                        ("all", texts.keys())):
      with pytest.raises(SystemExit) as e:
        common.run(script.main, [
            "build_datastore.py", f"--data={tmp_path / 'texts'}",
            f"--part={part}", f"--output={path}", "--depth=5"])
      assert not e.value.code
      found = json.loads(capsys.readouterr().out.splitlines()[-1])
      store = datastores.load(found["datastore"], tokenizer)
      assert (found["documents"], store.depth) == (len(names), 5)
      ends = np.flatnonzero(store.tokens == store.vocab_size)
      parts = np.split(store.tokens, ends + 1)[:-1]
      assert {tokenizer.decode(part[:-1]) for part in parts} == {
          texts[name] for name in names}
    assert 0 < len(held_out) < len(texts)
    with pytest.raises(SystemExit) as e:
      common.run(script.main, [
          "build_datastore.py", f"--data={tmp_path / 'texts' / '1.txt'}",
          f"--output={path}", "--part=training"])
    assert re.search("one document.*set --part=all", e.value.code)
