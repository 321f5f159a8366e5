"""Builds a datastore, in which drafters look up what follows the last tokens.

  python experiments/build_datastore.py --target=smollm2 --output=code.store
  python experiments/build_datastore.py --data=notes/ --part=all \\
    --output=notes.store

It holds the tokens of the target's tokenizer and is good for that one alone.
What the scripts measure with is held out of it, unless --part=all. Then

  store = datastores.load("code.store", tokenizer)
  params = {"target": ..., "drafter": jax.device_put(store)}

serves `strategies.rest` and `strategies.suffix_decoding`.
"""

import json
import sys
import time

from absl import flags
from lib import common
from lib import flags as shared
from lib import models
from lib import progress
import numpy as np

import specjax as sj
from specjax.data import corpora
from specjax.data import datastores
from specjax.data import Tokenizer

_DATA = shared.data("what to look up in")
_FIELD = shared.field()
_TARGET = flags.DEFINE_string(
    "target", "bundled", "the model whose tokenizer splits the text: bundled, "
    f"a tokenizer.json, {shared.PUBLISHED}")
_PART = flags.DEFINE_enum(
    "part", "training", ["training", "all"], "documents to take; training: "
    "without those that are held out, with which scripts measure")
_DEPTH = flags.DEFINE_integer(
    "depth", datastores.DEPTH, "tokens by which suffixes are sorted, and the "
    "longest match", 1, datastores.DEEPEST)
_OUTPUT = flags.DEFINE_string("output", None, "file to write", required=True)

_BATCH = 256  # documents that are split at once: a tokenizer keeps much of each


def _tokenizer() -> Tokenizer:
  if _TARGET.value == "bundled":
    return Tokenizer.load(sj.zoo.tokenizer_path())
  return models.load_tokenizer(_TARGET.value)


def _documents(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
  """The tokens of each text; the stream has one more before each."""
  found = []
  for start in range(0, len(texts), _BATCH):
    stream = tokenizer.encode_stream(texts[start:start + _BATCH])
    starts = np.flatnonzero(stream == stream[0])
    found += [part[1:] for part in np.split(stream, starts[1:])]
  return found


def main() -> None:
  """Reads, splits, sorts, and writes."""
  path = common.output_file("--output", _OUTPUT.value)
  tokenizer = _tokenizer()
  progress.say("reading the text")
  documents = corpora.read_documents(_DATA.value, _FIELD.value)
  if _PART.value == "training":
    if len(documents) == 1:
      raise ValueError(f"--data={_DATA.value} has one document, of which no "
                       "part can be held out; take all of it with --part=all")
    documents, _ = corpora.split(documents)
  start = time.perf_counter()
  parts = _documents(tokenizer, [d.text for d in documents])
  split = time.perf_counter()
  size = sum(map(len, parts))
  print(f"{len(documents):,} documents, {size:,} tokens, split in "
        f"{split - start:.1f} s", file=sys.stderr)
  progress.say("sorting the suffixes")
  store = datastores.index(parts, tokenizer.vocab_size, _DEPTH.value)
  header = datastores.save(path, store, tokenizer)
  end = time.perf_counter()
  print(f"sorted and written in {end - split:.1f} s", file=sys.stderr)
  print(f"{size:,} tokens of {len(documents):,} documents in {path}, "
        f"{header['bytes'] / 1e6:.1f} MB")
  print(json.dumps({
      "datastore": str(path), "documents": len(documents), "tokens": size,
      "bytes": header["bytes"], "depth": header["depth"],
      "tokenizer": header["tokenizer"], "seconds": round(end - start, 2)}))


if __name__ == "__main__":
  common.run(main)
