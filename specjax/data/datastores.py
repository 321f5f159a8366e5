"""Datastores: the tokens of a corpus and the sorted order of its suffixes.

REST (He et al. 2023, arXiv:2311.08252) looks up the last tokens of a sequence
in a corpus and proposes their continuations. A datastore consists of two
arrays. The first contains the tokens of the corpus, with a separator after
every document. The second contains the start positions of all suffixes, sorted
by the first `depth` tokens of the suffix. So all occurrences of a pattern of up
to `depth` tokens form one range of the second array. Two binary searches find
this range (`methods.model_free._matches`). Patterns contain no separator, so
matches never cross the end of a document. A continuation ends at the separator.

A file consists of a header of 4096 bytes (a line of text and a JSON object),
the tokens and the start positions, little-endian. Opening a file does not read
the arrays, because they are mapped into memory.

>>> import jax
>>> store = index([[1, 2, 3, 1, 2], [2, 3]], vocab_size=4)
>>> store.tokens.tolist()  # 4 ends a document
[1, 2, 3, 1, 2, 4, 2, 3, 4]
>>> store.suffixes.tolist()  # 1 2 3, 1 2, 2 3 1, 2 3, 2, 3 1, 3
[0, 3, 1, 6, 4, 2, 7]
>>> params = {"drafter": jax.device_put(store)}  # for Suffix or Retrieval
"""

from collections.abc import Iterable
from collections.abc import Sequence
import json
import os
import pathlib
from typing import Any

from flax import struct
import jax
import numpy as np

from specjax.data.vocabularies import ReadsText
from specjax.utils import fields
from specjax.utils import files
from specjax.utils.fingerprints import fingerprint

DEPTH = 16  # REST uses patterns of at most 16 tokens
DEEPEST = 30  # `_matches` packs one comparison sign per token into an int32
_MAGIC = b"specjax datastore 1\n"
_HEADER = 4096  # bytes of the header; the arrays after it are aligned to pages
_LARGEST = 2**31 - 2**16  # positions are int32
_SIZES = (("tokens", _LARGEST), ("suffixes", _LARGEST), ("depth", DEEPEST),
          ("vocab_size", 2**31 - 1), ("bytes", 2**63))  # header keys and maxima
_REBUILD = "build it again with experiments/build_datastore.py"


@struct.dataclass
class Datastore:
  """Searchable corpus, used as `params["drafter"]` of `drafters.Retrieval`.

  A datastore is part of the parameters and not of the decoding state, because
  all batch rows share it. Move its arrays to the device with
  `jax.device_put(store)`.

  Attributes:
    tokens: `[T]` uint16 or uint32, tokens of the documents. After each document
      follows the separator, a token with the id `vocab_size`.
    suffixes: `[S]` int32, start positions of all suffixes that do not begin
      with a separator, sorted by the first `depth` tokens of the suffix.
    vocab_size: vocabulary size of the tokenizer.
    depth: number of tokens by which suffixes are sorted. It is also the largest
      length of a pattern in a search.
  """

  tokens: jax.Array | np.ndarray
  suffixes: jax.Array | np.ndarray
  vocab_size: int = struct.field(pytree_node=False)
  depth: int = struct.field(pytree_node=False)


def index(documents: Iterable[Sequence[int] | np.ndarray], vocab_size: int,
          depth: int = DEPTH) -> Datastore:
  """Sorts the suffixes of a corpus.

  Memory use is about 40 bytes per token, in addition to the documents.

  Args:
    documents: token ids of each document. Empty documents are skipped.
    vocab_size: vocabulary size of the tokenizer. All ids must be smaller.
    depth: number of tokens by which suffixes are sorted, 1 to 30.

  Returns:
    A `Datastore` of numpy arrays.

  Raises:
    ValueError: the corpus has no tokens or too many, a document is not a list
      of ids, or an id or the depth is out of range.
  """
  if not _is_size(depth, DEEPEST):
    raise ValueError(f"depth is {depth}; it must be a whole number from 1 to "
                     f"{DEEPEST}")
  dtype = np.dtype(_dtype(vocab_size))
  documents = [_checked(i, d, vocab_size) for i, d in enumerate(documents)]
  documents = [d for d in documents if d.size]
  if not documents:
    raise ValueError("the corpus has no tokens; give at least one document "
                     "that is not empty")
  size = sum(map(len, documents)) + len(documents)
  if size > _LARGEST:
    raise ValueError(f"the corpus has {size:,} tokens; a datastore has at most "
                     f"{_LARGEST:,}: leave documents out")
  tokens = np.full(size, vocab_size, dtype)
  ends = np.cumsum([len(d) + 1 for d in documents])
  for document, end in zip(documents, ends):
    tokens[end - 1 - len(document):end - 1] = document
  return Datastore(tokens=tokens,
                   suffixes=_sorted_suffixes(tokens, vocab_size, depth),
                   vocab_size=int(vocab_size), depth=int(depth))


def save(path: str | os.PathLike[str], store: Datastore,
         tokenizer: ReadsText) -> dict[str, Any]:
  """Writes a datastore atomically.

  Args:
    path: path of the file. An existing file is replaced.
    store: datastore from `index`.
    tokenizer: tokenizer of the datastore's tokens. The file contains its
      fingerprint.

  Returns:
    The header of the file.

  Raises:
    ValueError: the vocabulary sizes of tokenizer and datastore differ.
  """
  if tokenizer.vocab_size != store.vocab_size:
    raise ValueError(
        f"the datastore has {store.vocab_size} token ids, but the tokenizer "
        f"has {tokenizer.vocab_size}; give the tokenizer of the datastore's "
        "tokens")
  tokens = np.ascontiguousarray(store.tokens, _dtype(store.vocab_size))
  suffixes = np.ascontiguousarray(store.suffixes, "<i4")
  header = {
      "tokens": len(tokens), "suffixes": len(suffixes),
      "vocab_size": store.vocab_size, "depth": store.depth,
      "bytes": _HEADER + tokens.nbytes + suffixes.nbytes,
      "tokenizer": tokenizer_fingerprint(tokenizer)}
  text = _MAGIC + json.dumps(header).encode() + b"\n"
  with files.atomically(path) as f:
    f.write(text.ljust(_HEADER))
    f.write(tokens.data)
    f.write(suffixes.data)
  return header


def load(path: str | os.PathLike[str], tokenizer: ReadsText) -> Datastore:
  """Opens a datastore, whose arrays are mapped from the file.

  Args:
    path: file that `save` wrote.
    tokenizer: tokenizer of the target.

  Raises:
    ValueError: the file is missing, damaged or not a datastore, or its tokens
      are from another tokenizer.
  """
  path = pathlib.Path(path)
  header = _header(path)
  found = tokenizer_fingerprint(tokenizer)
  if header["tokenizer"] != found:
    raise ValueError(
        f"{path} was made with another tokenizer ({header['vocab_size']} "
        f"tokens, fingerprint {header['tokenizer']}) than the target's "
        f"({tokenizer.vocab_size} tokens, fingerprint {found}); give the "
        f"target of that tokenizer, or {_REBUILD}")
  if header["vocab_size"] != tokenizer.vocab_size:
    raise ValueError(f"{path} has a broken header; {_REBUILD}")
  tokens = np.memmap(path, _dtype(header["vocab_size"]), "r", _HEADER,
                     (header["tokens"],))
  suffixes = np.memmap(path, "<i4", "r", _HEADER + tokens.nbytes,
                       (header["suffixes"],))
  return Datastore(tokens=tokens, suffixes=suffixes,
                   vocab_size=header["vocab_size"], depth=header["depth"])


def tokenizer_fingerprint(tokenizer: ReadsText) -> str:
  """Returns a short hash of all tokens' bytes and of the special tokens."""
  texts = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
  special = getattr(tokenizer, "special_tokens", {})
  return fingerprint(
      np.frombuffer(b"".join(texts), np.uint8),
      np.array([len(text) for text in texts]), json.dumps(sorted(
          special.items())))


def _checked(number, document, vocab_size):
  """Returns a document as an array `[n]` of valid token ids."""
  try:
    found = np.asarray(document)
  except ValueError:  # numpy raises for nested lists of unequal lengths
    found = np.zeros((0, 0))
  if found.shape == (0,):
    return found
  if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
    raise ValueError(f"document {number} is not a list of integers; give the "
                     "token ids of each document")
  if found.min() < 0 or found.max() >= vocab_size:
    bad = found[(found < 0) | (found >= vocab_size)][0]
    raise ValueError(f"document {number} has token id {bad}; ids must be in "
                     f"[0, {vocab_size}): use the tokenizer whose size is "
                     "`vocab_size`")
  return found


def _is_size(value, most):
  """Returns True for an integer from 1 to `most`."""
  return fields.is_whole(value) and 1 <= value <= most


def _header(path):
  """Returns the header of a file and checks the file's length."""
  try:
    size = path.stat().st_size
    with open(path, "rb") as f:
      text = f.read(_HEADER)
  except (FileNotFoundError, IsADirectoryError):
    raise ValueError(f"{path} is not a file; give a datastore, or build one "
                     "with experiments/build_datastore.py") from None
  if not text.startswith(_MAGIC):
    raise ValueError(f"{path} is not a datastore of this version of specjax; "
                     f"{_REBUILD}")
  try:
    header = json.loads(text[len(_MAGIC):])
    if not (all(_is_size(header[name], limit) for name, limit in _SIZES)
            and header["suffixes"] < header["tokens"]):
      raise ValueError("a size is none")
    width = np.dtype(_dtype(header["vocab_size"])).itemsize
    wants = _HEADER + width * header["tokens"] + 4 * header["suffixes"]
    sizes = {size, wants, header["bytes"]}
    header["tokenizer"]  # raises a KeyError if it is missing
  except (ValueError, KeyError, TypeError):
    raise ValueError(f"{path} has a broken header; {_REBUILD}") from None
  if len(sizes) > 1:
    raise ValueError(f"{path} has {size:,} bytes, but {wants:,} by its header: "
                     f"it is truncated, or was changed; {_REBUILD}")
  return header


def _dtype(vocab_size):
  """Returns the dtype for ids from 0 to `vocab_size`, the separator."""
  return "<u2" if vocab_size < 2**16 else "<u4"


def _sorted_suffixes(tokens, separator, depth):
  """Returns `Datastore.suffixes`, by prefix doubling (Manber and Myers 1993).

  The first sort compares as many tokens as fit into 64 bits. Each further sort
  doubles the number, until it is at least `depth`. Sorting is stable, so the
  result is the same on every machine. Suffixes that are equal in all compared
  tokens keep the order of the corpus.
  """
  size, bits = len(tokens), int(separator).bit_length()
  reach = min(64 // bits, depth)
  padded = np.concatenate([tokens, np.full(reach, separator, tokens.dtype)])
  key = np.zeros(size, np.uint64)
  for j in range(reach):
    key <<= np.uint64(bits)
    key |= padded[j:j + size]
  del padded
  order = np.argsort(key, kind="stable")
  while reach < depth:
    rank = _ranks(key, order)
    if rank[order[-1]] == size - 1:
      break  # all suffixes have different ranks, so the order is complete
    key = rank << np.uint64(32)
    key[:size - reach] |= rank[reach:]
    del rank
    order = np.argsort(key, kind="stable")
    reach *= 2
  return order[tokens[order] != separator].astype("<i4")


def _ranks(key, order):
  """Returns `[T]` uint64, the number of distinct smaller keys for each key."""
  ordered = key[order]
  steps = np.zeros(len(key), np.uint64)
  steps[1:] = ordered[1:] != ordered[:-1]
  del ordered  # frees its memory before the next array of the corpus' size
  rank = np.empty_like(steps)
  rank[order] = np.cumsum(steps, out=steps)
  return rank
