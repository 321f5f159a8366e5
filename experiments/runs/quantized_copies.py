"""Measures 8-bit and 4-bit copies of a model, and small caches, as drafters.

  python experiments/runs/quantized_copies.py [bundled|smollm2|...] [characters]

The text consists of held-out modules of the running Python. Columns: size,
relative error of the weights, bits per byte of text, and acceptance as a
drafter for the original model. At temperature 1, the acceptance of a token is
sum_x min(p, q). At temperature 0, it is 1 if p and q have the same argmax. Both
are means over positions.

Caches are measured with the original weights. The model reads the second half
of every window token by token, as a drafter does.
"""

from collections.abc import Callable
import math
import pathlib
import sys
from typing import Any

sys.path.append(str(pathlib.Path(__file__).parents[1]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from lib import models  # noqa: E402
import numpy as np  # noqa: E402

import specjax as sj  # noqa: E402
from specjax.data import corpora  # noqa: E402
from specjax.data import Tokenizer  # noqa: E402
from specjax.decoding import prefill  # noqa: E402
from specjax.models import quantization  # noqa: E402
from specjax.models import Transformer  # noqa: E402
from specjax.trees import topology  # noqa: E402

WINDOW, BATCH = 512, 4
COPIES = ((8, None), (8, 64), (4, None), (4, 64), (4, 32))
CACHES = (sj.caches.QuantizedKV(bits=8), sj.caches.QuantizedKV(bits=4),
          sj.caches.Streaming(sinks=4, window=28),
          sj.caches.Streaming(sinks=4, window=124))


def windows(tokenizer: Tokenizer, characters: int):
  """Returns `[n, WINDOW + 1]` tokens, and the number of bytes per token."""
  modules = corpora.stdlib_documents(only_held_out=True)
  text = "".join(x.text for x in modules)[:characters]
  tokens = np.asarray(tokenizer.encode(text, bos=False), np.int32)
  count = (len(tokens) - 1) // (WINDOW * BATCH) * BATCH
  at = np.arange(count)[:, None] * WINDOW + np.arange(WINDOW + 1)
  return tokens[at], len(text.encode()) / len(tokens)


def measures(p: jax.Array, q: jax.Array, following: jax.Array):
  """Compares the distributions q of a copy with p of the original model.

  Args:
    p: logits of the original model.
    q: logits of the copy.
    following: next token at each position.

  Returns:
    Four sums over positions: the negative log-likelihood of the text under q in
    nats, the acceptance sum_x min(p, q), the number of positions with the same
    argmax, and the number of positions.
  """
  p, q = (jax.nn.log_softmax(x) for x in (p, q))
  nats = -jnp.take_along_axis(q, following[..., None], -1)
  return jnp.array([nats.sum(), jnp.exp(jnp.minimum(p, q)).sum(),
                    (p.argmax(-1) == q.argmax(-1)).sum(), following.size])


def of_weights(model: Transformer):
  def one(params, copy, tokens):
    p, q = (model(x, tokens[:, :-1]).logits for x in (params, copy))
    return measures(p, q, tokens[:, 1:])
  return one


def of_cache(model: Transformer, cache: Any):
  """Returns a function that measures a cache on the second half of windows."""
  other = sj.models.Transformer(model.config, cache=cache)

  def one(params, copy, tokens):
    half = WINDOW // 2
    p = model(params, tokens[:, :-1]).logits[:, half:]
    # With constant lengths of 0, the compiler would evaluate the attention over
    # the empty cache at compile time. `empty_cache` computes the zeros from its
    # third argument, so this argument depends on the input.
    past = prefill.empty_cache(
        other, params, jnp.maximum(tokens[:, 0], WINDOW), WINDOW + 1)
    depths, causal = topology.causal(BATCH, half)
    past = other(copy, tokens[:, :half], depths, causal, past).cache.rollback(
        past.lengths + half)

    def step(past, token):
      out = other(copy, token[:, None], jnp.zeros((BATCH, 1), jnp.int32),
                  jnp.ones((BATCH, 1, 1), bool), past)
      return out.cache.rollback(past.lengths + 1), out.logits[:, 0]

    _, q = jax.lax.scan(step, past, tokens[:, half:-1].T)
    return measures(p, q.swapaxes(0, 1), tokens[:, half + 1:])
  return one


def row(name: str, one: Callable, params: Any, copy: Any, batches: np.ndarray,
        bytes_a_token: float, *more: str):
  one = jax.jit(one)
  total = sum(np.asarray(one(params, copy, batch), np.float64)
              for batch in batches)
  nats, accepted, same, count = total
  print(f"| {name} | {' | '.join(more)} | "
        f"{nats / count / math.log(2) / bytes_a_token:.4f} | "
        f"{accepted / count:.4f} | {same / count:.4f} |", flush=True)


def main(name: str = "bundled", characters: str = "100000"):
  found = models.load_model(name)
  model, params = found.model, found.params
  tokens, bytes_a_token = windows(found.tokenizer, int(characters))
  batches = tokens.reshape(-1, BATCH, WINDOW + 1)
  print(f"{name}: {len(tokens)} windows of {WINDOW} tokens", file=sys.stderr)
  print("| copy | MB | error | bits per byte | acceptance | same argmax |")
  print("|---|---|---|---|---|---|")
  size = lambda copy: f"{quantization.num_bytes(copy) / 1e6:.2f}"
  row("as it is", of_weights(model), params, params, batches, bytes_a_token,
      size(params), "0")
  for bits, group in COPIES:
    copy = sj.models.quantize(params, bits, group)
    row(f"int{bits}, {f'groups of {group}' if group else 'channels'}",
        of_weights(model), params, copy, batches, bytes_a_token, size(copy),
        f"{quantization.relative_error(params, copy):.4f}")
  for cache in (sj.caches.KVCache, *CACHES):
    other = sj.models.Transformer(model.config, cache=cache)
    form = other.init_cache(params, 1, WINDOW)
    row(f"cache {cache if cache is not sj.caches.KVCache else 'as it is'}",
        of_cache(model, cache), params, params, batches, bytes_a_token,
        f"{quantization.num_bytes((form.k, form.v)) / 1e6:.2f}", "-")


if __name__ == "__main__":
  main(*sys.argv[1:])
