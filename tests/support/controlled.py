"""Controllers of made-up costs, and decoders that have one."""

import functools

import jax
import numpy as np

import specjax as sj
from specjax import testing

V = 7
LENGTHS, SECONDS = (0, 2, 4, 8), (1.0, 1.3, 1.6, 2.2)
MODEL = testing.MarkovModel(V, context_length=1024)


def controller(**options):
  return sj.decoding.Controller(**{
      **dict(lengths=LENGTHS, seconds=SECONDS, risk=0.02, credit=1.0),
      **options})


@functools.cache
def decoder(gamma=2, **options):
  return sj.Decoder(
      target=MODEL, drafter=testing.OracleDrafter(gamma=gamma),
      verifier=sj.verifiers.Token(), controller=controller(**options),
      transform=sj.LogitsTransform(temperature=0))


@functools.cache
def greedy():
  """A table, a prompt of one token, and its greedy text `[T]`."""
  table, text = MODEL.init(jax.random.key(0)), [3]
  for _ in range(400):
    text.append(int(np.argmax(table[text[-1]])))
  return table, np.array(text, np.int32)


@functools.cache
def pair():
  return testing.tiny_pair(V, noise=0)
