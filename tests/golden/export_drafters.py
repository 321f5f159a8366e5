"""Writes recorded heads in speculators' format, for speculators' own loader.

  python tests/golden/export_drafters.py DIRECTORY
  python tests/golden/make_drafters.py --exported DIRECTORY

The second command needs speculators and torch, and not JAX. In the files whose
names end in "-mask" the mask is a trained vector, equal to the embedding of the
recorded mask token. speculators reads them only if they name no target, because
their embedding has one row more than the target's.
"""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from recorded import GOLDEN

import specjax as sj
from specjax.methods import export_drafter
from specjax.methods import load_drafter

CASES = ("eagle3_windows", "peagle_speculators", "dflash_windows_speculators",
         "dspark_windows_speculators")


def drafter(name, trained_mask=False):
  """`(heads, params, target, target's parameters)` of a recorded drafter."""
  recorded = np.load(GOLDEN / "drafters" / name / "expected.npz")
  target = sj.models.Transformer(sj.models.TransformerConfig(
      vocab_size=48, width=16, layers=12, heads=4, kv_heads=2, head_dim=8,
      mlp_width=24, context_length=64))
  given = jax.jit(target.init)(jax.random.key(0)) | {
      "embedding": recorded["embedding"],
      "head": recorded.get("head", recorded["embedding"]).T}
  heads, params = load_drafter(
      GOLDEN / "drafters" / name, target, given, dtype=jnp.float32)
  if trained_mask:
    params = params | {"mask": given["embedding"][heads.mask_token]}
    heads = dataclasses.replace(heads, mask_token=None)
  return heads, params, target, given


def main():
  root = pathlib.Path(sys.argv[1])
  for name in CASES:
    for trained_mask in (False, *[True] * name.startswith("d")):
      heads, params, target, given = drafter(name, trained_mask)
      verifier = None
      if not trained_mask:
        verifier = str(root / f"target of {name}")
        sj.models.export_pretrained(verifier, target, given)
      export_drafter(root / (name + "-mask" * trained_mask), heads, params,
                     target, given, layout="speculators", verifier=verifier)


if __name__ == "__main__":
  main()
