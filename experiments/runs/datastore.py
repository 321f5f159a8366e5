"""Times opening a datastore, and a look-up in the datastore.

  python experiments/build_datastore.py --target=smollm2 --part=all \\
      --data=DIRECTORY --output=store       # prints the cost of building
  python experiments/runs/datastore.py store

The script compares the time of a look-up with that of a complete round of
SmolLM2-135M, with one row and drafts of 4 tokens. The prompt consists of random
tokens. This is the most expensive case. Nothing matches, so every match length
is tried. Run no other program at the same time.
"""

from collections.abc import Callable
import dataclasses
import pathlib
import statistics
import sys
import time

import jax
import numpy as np

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from lib import models  # noqa: E402

import specjax as sj  # noqa: E402
from specjax.data import datastores  # noqa: E402

ROUNDS, TIMES, PROMPT, GAMMA = 32, 9, 256, 4


def seconds(call: Callable):
  """Returns the median time of a call in seconds, without the first call."""
  found = []
  for _ in range(1 + TIMES):
    start = time.perf_counter()
    jax.block_until_ready(call())
    found.append(time.perf_counter() - start)
  return statistics.median(found[1:])


def main() -> None:
  if len(sys.argv) != 2:
    sys.exit(f"usage: python {sys.argv[0]} FILE, an output of "
             "build_datastore.py --target=smollm2")
  target, tokenizer = models.load_target("smollm2")
  try:
    opening = seconds(lambda: datastores.load(sys.argv[1], tokenizer).tokens[0])
    store = datastores.load(sys.argv[1], tokenizer)
  except ValueError as e:
    sys.exit(str(e))
  print(f"{store.tokens.size:,} tokens, opened in {1e3 * opening:.1f} ms")
  decoder = sj.Decoder(
      target=target.model, verifier=sj.verifiers.Block(),
      drafter=sj.drafters.Retrieval(gamma=GAMMA),
      transform=sj.LogitsTransform(temperature=1.0))
  params = {"target": target.params, "drafter": jax.device_put(store)}
  prompt = np.random.default_rng(0).integers(
      target.model.vocab_size, size=PROMPT)
  state = decoder.prefill(
      params, [prompt], jax.random.key(0),
      limits=PROMPT + ROUNDS * (GAMMA + 1))
  drafter = dataclasses.replace(
      decoder.drafter, vocab_size=target.model.vocab_size,
      transform=decoder.transform)
  propose = jax.jit(drafter.propose)
  uniforms = jax.random.uniform(jax.random.key(1), (1, drafter.num_uniforms))
  look_up = seconds(lambda: propose(params, uniforms, state))
  decode = lambda: decoder.decode(
      params, jax.tree.map(jax.numpy.copy, state), ROUNDS)[0].tokens
  whole = seconds(decode) / ROUNDS
  print(f"a look-up takes {1e3 * look_up:.2f} ms, a round with it "
        f"{1e3 * whole:.1f} ms: the share of the look-up is "
        f"{look_up / whole:.3f}")


if __name__ == "__main__":
  main()
