"""Drafters that are trained heads, untrained here and disturbed."""

import dataclasses
import functools

from contributed import Contributed
from contributed import disturbed
from contributed import HEADS
from contributed import pair
from contributed import part_of_target
from contributed import sharing
from contributed import VOCAB
from contributed import WIDTH
import jax
import jax.numpy as jnp
import newcomers
import numpy as np
import untrained

import specjax as sj
from specjax import methods
from specjax.drafters import Assistant
from specjax.drafters import FeatureLayer
from specjax.drafters import FeatureModules
from specjax.drafters import Hydra
from specjax.drafters import Kangaroo
from specjax.drafters import Medusa
from specjax.drafters import NetworkDrafter
from specjax.drafters import Parallel
from specjax.methods import stop_rules
from specjax.methods.features.eagle import layer_drafter

MEDUSA = methods.MedusaHeads(width=WIDTH, vocab_size=VOCAB, heads=HEADS)
BLOCKWISE = methods.BlockwiseHeads(
    width=WIDTH, vocab_size=VOCAB, heads=HEADS, hidden_width=8)
HYDRA = methods.HydraHeads(
    width=WIDTH, vocab_size=VOCAB, heads=HEADS, blocks=2)
EMBEDDINGS = methods.PaSSEmbeddings(count=HEADS, width=WIDTH)
UNO = dataclasses.replace(EMBEDDINGS, lookahead_rank=3)
EAGLE_1, EAGLE_3, MODULES = (
    kind.for_target(pair().target, 2, **options) for kind, options in (
        (methods.Eagle1Heads, {}), (methods.Eagle3Heads, {
            "taps": (0, 1, "final")}), (methods.MTPHeads, {})))
P_EAGLE = methods.PEagleHeads.for_target(
    pair().target, 3, layers=2, taps=(0, 1))
ACCEPTANCE = stop_rules.AcceptanceHead()
ADAPTER = methods.KangarooAdapter(width=WIDTH, vocab_size=VOCAB, exit=1)
PARALLEL = methods.ParallelHeads(
    width=WIDTH, vocab_size=VOCAB, layers=1, heads=2, kv_heads=1, head_dim=8,
    mlp_width=8, context_length=512, block_size=HEADS, taps=(0, 1),
    markov="plain", markov_rank=4, confidence="markov")

# The laws of a block of its own convention, whatever was drawn before.
DFLASH = {"markov": "none", "confidence": "none", "from_anchor": False,
          "block_size": HEADS + 1}
DFLASH_2 = DFLASH | {"markov": "selector", "candidates": 3, "conv_kernel": 2,
                     "conv_group": 8}
LILICORR = DFLASH | {"markov": "lilicorr", "candidates": 3, "markov_width": 8,
                     "lattice_mlp_width": 8}
DOMINO = {"markov": "gru", "confidence": "hidden", "markov_width": 5,
          "causal": (True,)}


def acceptance_head(key, target):
  """The parameters of a stop rule for the pair's drafter."""
  del target
  return ACCEPTANCE.init_params(key, pair().drafter.config.width)


def _of_one_state(network, shape, rule, controller):
  return Contributed(
      NetworkDrafter(network=network, shape=shape), rule, controller=controller,
      params={"target": pair().params["target"],
              "drafter": disturbed(network.heads)})


def independent(shape, rule, controller=None, heads=MEDUSA):
  return _of_one_state(Medusa(heads=heads), shape, rule, controller)


def hydra(shape, rule, controller=None):
  return _of_one_state(Hydra(heads=HYDRA), shape, rule, controller)


def reused(heads, shape):
  return NetworkDrafter(network=FeatureLayer(heads=heads), shape=shape)


def modules(heads, shape):
  return NetworkDrafter(network=FeatureModules(heads=heads), shape=shape)


def layer(kind, drafter, rule, count=3, drafts=None, controller=None,
          **options):
  heads = kind.for_target(pair().target, count, **options)
  target, params = heads.attach(
      pair().target, pair().params["target"], disturbed(heads))
  return Contributed(drafter(heads=heads, **(drafts or {})), rule, target,
                     params, controller=controller)


def p_eagle(shape, rule, **options):
  """P-EAGLE of two layers, the last of which has a window."""
  return layer(methods.PEagleHeads, layer_drafter, rule, layers=2,
               windows=(0, 4), taps=(0, 1), drafts=dict(shape=shape), **options)


def assistant(shape, rule, controller=None, **options):
  """An assistant of two layers, one of each kind."""
  target, given = sharing()
  own = methods.AssistantHeads.for_target(
      target, 3, layers=2, windows=(3, 0), width=8, mlp_width=8,
      **options)
  target, params = own.attach(
      target, given, untrained.disturbed(own, given, 0.4))
  return Contributed(NetworkDrafter(network=Assistant(heads=own), shape=shape),
                     rule, target, params, controller=controller)


def lookahead(rule, embeddings=EMBEDDINGS, **kwargs):
  model, params = embeddings.attach(
      pair().target, pair().params["target"], disturbed(embeddings))
  drafter = sj.strategies.pass_lookahead(embeddings, **kwargs).drafter
  return Contributed(drafter, rule, model, params)


def parallel(shape, rule, options, controller=None):
  heads = dataclasses.replace(PARALLEL, **options)
  model, params = heads.attach(
      pair().target, pair().params["target"], disturbed(heads))
  return Contributed(
      NetworkDrafter(network=Parallel(heads=heads), shape=shape), rule, model,
      params, controller=controller)


def kangaroo(shape, rule):
  return part_of_target(
      lambda _: NetworkDrafter(network=Kangaroo(adapter=ADAPTER), shape=shape),
      rule, functools.partial(jax.jit(ADAPTER.init), None))


def features(shape):
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  own = {"mix": draw(WIDTH, WIDTH) / 4, "embedding": draw(VOCAB, WIDTH),
         "head": draw(WIDTH, VOCAB)}
  return Contributed(
      NetworkDrafter(
          network=newcomers.Features(vocab_size=VOCAB), shape=shape),
      (sj.verifiers.TargetWalk if shape.deterministic
       else sj.verifiers.Traversal)(),
      params={**pair().params, "drafter": own})
