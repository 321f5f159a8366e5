"""Builds a datastore, a text index from which retrieval drafters copy tokens.

  python experiments/build_datastore.py --target=smollm2 --output=code.store
  python experiments/build_datastore.py --data=notes/ --part=all \\
    --output=notes.store

The datastore contains token ids of the target's tokenizer, so it works only
with targets that have this tokenizer. The studies take their prompts from
held-out documents of --data. With --part=training these documents are not
indexed.

To decode with it, give the file to the flag --datastore of another script, or
in Python:

  store = datastores.load("code.store", tokenizer)
  params = {"target": ..., "drafter": jax.device_put(store)}

These are the parameters of decoders that `strategies.rest` and
`strategies.suffix_decoding` create.
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

_DATA = shared.data("Text to index")
_FIELD = shared.field()
_TARGET = flags.DEFINE_string(
    "target", "bundled", "Target model or its tokenizer file. Only the "
    "tokenizer is read: bundled, a file tokenizer.json, "
    f"{shared.PUBLISHED}")
_PART = flags.DEFINE_enum(
    "part", "training", ["training", "all"], "Documents of --data to index: "
    "training (all except the held-out documents, from which the studies take "
    "their prompts) or all")
_DEPTH = flags.DEFINE_integer(
    "depth", datastores.DEPTH, "Maximum number of last tokens of the sequence "
    "that a drafter can look up in the datastore. The suffixes of the text are "
    "sorted by this many tokens", 1, datastores.DEEPEST)
_OUTPUT = shared.output_file(
    "output", "File to which the datastore is written, such as "
    "results/mine.store", required=True)

_BATCH = 256  # documents per tokenizer call, which limits its memory


def _tokenizer() -> Tokenizer:
  if _TARGET.value == "bundled":
    return Tokenizer.load(sj.zoo.tokenizer_path())
  return models.load_tokenizer(_TARGET.value)


def _documents(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
  """Returns the token ids of each text, without the separator token."""
  found = []
  for start in range(0, len(texts), _BATCH):
    stream = tokenizer.encode_stream(texts[start:start + _BATCH])
    starts = np.flatnonzero(stream == stream[0])
    found += [part[1:] for part in np.split(stream, starts[1:])]
  return found


def main() -> None:
  """Reads and tokenises the text, and writes the sorted suffixes."""
  path = common.output_file("--output", _OUTPUT.value)
  tokenizer = _tokenizer()
  progress.say("reading the text")
  documents = corpora.read_documents(_DATA.value, _FIELD.value)
  if _PART.value == "training":
    if len(documents) == 1:
      raise ValueError(f"--data={_DATA.value} has one document, and "
                       "--part=training needs two, because some are held out; "
                       "set --part=all")
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
