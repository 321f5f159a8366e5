"""Verification of installed packages, as samplers of `exact.audit_sampler`.

Every function imports its package and returns a sampler that calls the
package's own function. It raises `ImportError` if the package is missing.
"""

import os

import numpy as np


def transformers_token():
  """`_speculative_sampling` of transformers, for one draft."""
  import torch
  from transformers.generation import utils
  torch.manual_seed(0)
  torch.set_num_threads(1)  # the tensors are tiny

  def sampler(tokens, q, p, _):
    log = lambda rows: torch.as_tensor(np.array(rows))[None].log()
    emitted, _ = utils._speculative_sampling(
        torch.as_tensor(np.array(tokens), dtype=torch.int64)[None], log(q),
        len(tokens), log(p))
    return emitted[0].tolist()

  return sampler


def keras_hub():
  """`SpeculativeSampler` of keras_hub with random acceptance, for a batch.

  Its drafter is a function that returns the logarithm of q. The sampler drafts
  the likeliest token of q. The rows of the batch are independent calls.
  """
  os.environ.setdefault("KERAS_BACKEND", "jax")
  import jax
  import keras
  import keras_hub
  rule = keras_hub.samplers.SpeculativeSampler(
      base_sampler=keras_hub.samplers.RandomSampler(seed=0), seed=0)

  @jax.jit
  @jax.vmap
  def verify(log_q, log_p, seed):
    rule.num_speculative_tokens = len(log_q)
    with keras.StatelessScope([(rule.seed_generator.state, seed)]):
      return rule(
          next=None, prompt=jax.numpy.full((1, len(log_p)), -1), index=0,
          stop_token_ids=range(log_p.shape[1]),  # one round
          draft_next=lambda prompt, cache, i: (log_q[i][None], None, cache),
          verify_next=lambda prompt, cache, i, k: (log_p[None], cache))[0]

  def sampler(tokens, q, p, rng):
    seeds = rng.integers(2**31, size=(len(q), 2), dtype="uint32")
    with np.errstate(divide="ignore"):
      return np.asarray(verify(np.log(q), np.log(p), seeds))

  return sampler


def _economize():
  from economize.decoding import config
  from economize.decoding import protocols
  from economize.decoding import selectors
  from economize.decoding import verifiers
  import torch
  rule = verifiers.RejectionVerifier(config.DecodeConfig())
  selector = selectors.TopPSampler(seed=0)
  tensor = lambda x: torch.as_tensor(np.array(x))

  def draft(tokens, q, parents=None):
    tokens = tensor(tokens).long()
    return protocols.Draft(
        tokens, [tokens.shape[1]] * len(tokens), probs=tensor(q),
        parents=None if parents is None else
        tensor(parents[1:]).long().expand(tokens.shape) - 1)

  return rule, selector, draft, tensor


def economize_token():
  """`RejectionVerifier.verify_batch` of economize, for a batch of chains."""
  rule, selector, draft, tensor = _economize()

  def sampler(tokens, q, p, _):
    accepted, following = rule.verify_batch(
        tensor(p).float().log(), draft(tokens, q), selector, None, ())
    return [[*row[:count], token, *[-1] * (len(row) - count)]
            for row, count, token in zip(
                tokens.tolist(), accepted.tolist(), following.tolist())]

  return sampler


def economize_tree():
  """`RejectionVerifier.verify_tree` of economize, for a batch of trees."""
  rule, selector, draft, tensor = _economize()

  def sampler(tokens, q, p, _, parents):
    paths, following = rule.verify_tree(
        tensor(p).float().log(), draft(tokens, q, parents), selector)
    rows = [[*row[path], token] for row, path, token in zip(
        tokens, paths, following)]
    return [[*row, *[-1] * (p.shape[1] - len(row))] for row in rows]

  return sampler
