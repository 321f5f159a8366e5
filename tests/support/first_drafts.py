"""First drafts after prompts, and the laws of a plain model along them.

A test of a drafter compares the two. Later drafts are compared with first ones
by `testing.assert_state_exact`, for every drafter in contribution_test.py.
"""

import jax
import numpy as np

import specjax as sj

_SLOTS = 48


def first_draft(decoder, params, prompts, **kwargs):
  """The draft of every row in the first round, in NumPy."""
  state = decoder.prefill(params, prompts, jax.random.key(1), **{
      "limits": _SLOTS, **kwargs})
  _, stats, traces = decoder.decode(params, state, 2, traced=True)
  sj.decoding.raise_if_not_finite(stats)
  return jax.tree.map(lambda x: np.asarray(x[0]), traces.draft)


def texts_by_path(prompts, draft):
  """The text up to every node, `[B, N, slots]`, and its length, `[B, N]`."""
  texts = np.zeros((*draft.tokens.shape, _SLOTS), np.int32)
  ends = np.zeros(draft.tokens.shape, int)
  for b, i in np.ndindex(draft.tokens.shape):
    above = draft.parents[b, i]
    if i == 0:
      texts[b, i, :len(prompts[b])], ends[b, i] = prompts[b], len(prompts[b])
      continue
    texts[b, i], ends[b, i] = texts[b, above], ends[b, above] + 1
    texts[b, i, ends[b, above]] = draft.tokens[b, i]
  return texts, ends


def laws_by_path(model, params, prompts, draft):
  """The model's law after every node, without a cache: `[B, N, V]`."""
  texts, ends = texts_by_path(prompts, draft)
  logits = jax.jit(model)(params, texts.reshape(-1, _SLOTS)).logits
  behind = logits[np.arange(ends.size), ends.reshape(-1) - 1]
  return np.asarray(jax.nn.softmax(behind)).reshape(*ends.shape, -1)
