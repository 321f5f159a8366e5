"""The recorded models of make.py, and what the tests know about them."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import load_pretrained
from specjax.models.architectures import ARCHITECTURES
from specjax.models.configuration_keys import Keys

GOLDEN = pathlib.Path(__file__).parent
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.npz"))


@functools.cache
def loaded(name):
  """A recorded model in float32, with its longest context."""
  return load_pretrained(
      GOLDEN / name, dtype=jnp.float32,
      context_length=64 if name == "phi3_long" else None)


def expected_of(name):
  """Its text `tokens`, the length of the `prompt`, and the `logits`."""
  return np.load(GOLDEN / name / "expected.npz")


def settings_of(name):
  """Its config.json."""
  return json.loads((GOLDEN / name / "config.json").read_text())


def config_of(settings, has_head=True):
  """The `TransformerConfig` of such settings."""
  architecture = ARCHITECTURES[settings["model_type"]]
  return architecture.config(
      Keys(settings, "it", architecture.defaults), has_head)


def params_equal(found, wanted, **tolerance):
  """Checks that two trees of parameters are the same, and as near."""
  assert jax.tree.structure(found) == jax.tree.structure(wanted)
  jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance),
               found, wanted)
