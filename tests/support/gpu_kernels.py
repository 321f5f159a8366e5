"""Runs the kernels of `specjax.gpu` on a CPU."""

import contextlib
import functools
from unittest import mock

import jax
from jax.experimental import pallas as pl

from specjax import gpu


@contextlib.contextmanager
def interpreted():
  """Selects the GPU kernels and interprets them.

  Programs that were traced outside of this context select other kernels, so
  they are forgotten.
  """
  same = lambda *arrays: len({x.dtype for x in arrays}) == 1
  run = functools.partial(pl.pallas_call, interpret=True)
  jax.clear_caches()
  with mock.patch.object(pl, "pallas_call", run), (
      mock.patch.object(gpu, "in_use", same)):
    yield
  jax.clear_caches()
