"""Reduction of a vocabulary to its most frequent tokens."""

import json
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
import tokenizers

from specjax.data.tokenizers import Tokenizer


def reduced(tokenizer: Tokenizer, counts: ArrayLike, size: int) -> Tokenizer:
  """Returns a tokenizer with the most frequent tokens and new ids.

  The result contains all special tokens and all tokens that no merge forms (the
  bytes of a byte-level vocabulary). The most frequent other tokens follow, with
  all tokens that their merges need. The order of ids is preserved.

  Args:
    tokenizer: tokenizer with byte-pair encoding.
    counts: `[V]`, number of occurrences of each token in a corpus.
    size: largest number of tokens in the result.

  Raises:
    ValueError: the tokenizer does not use byte-pair encoding, or `size` is less
      than the number of required tokens.
  """
  spec = json.loads(tokenizer.backend.to_str())
  if spec["model"]["type"] != "BPE":
    raise ValueError(f"the tokenizer is of kind {spec['model']['type']}; only "
                     "byte-pair encoding (BPE) can be reduced")
  vocab = spec["model"]["vocab"]
  merges = [merge if isinstance(merge, list) else merge.split(" ", 1)
            for merge in spec["model"]["merges"]]
  # The two tokens that form each merged token. If several merges form the same
  # token, only the first one is used.
  parts = {}
  for left, right in merges:
    parts.setdefault(left + right, (left, right))
  added = {token["content"]: token["id"] for token in spec["added_tokens"]}
  required = added.keys() | {token for token in vocab if token not in parts}
  counts = np.asarray(counts)
  kept = _most_frequent(
      sorted(vocab, key=lambda token: -counts[vocab[token]]), parts, required,
      size)
  old = vocab | added
  new = {token: i for i, token in enumerate(sorted(kept, key=old.get))}
  vocab = {token: i for token, i in new.items() if token in vocab}
  spec["model"] |= {"vocab": vocab, "merges": [
      merge for merge in merges if {*merge, "".join(merge)} <= vocab.keys()]}
  for token in spec["added_tokens"]:
    token["id"] = new[token["content"]]
  _renumber(spec.get("post_processor"), new)
  again = lambda token: None if token is None else (
      new[tokenizer.backend.id_to_token(token)])
  return Tokenizer(
      tokenizers.Tokenizer.from_str(json.dumps(spec)),
      bos=again(tokenizer.bos), eos=again(tokenizer.eos),
      adds_bos=tokenizer.adds_bos, chat_template=tokenizer.chat_template,
      names=tokenizer.names)


def _most_frequent(tokens, parts, required, size):
  """Returns up to `size` tokens: the required and the most frequent ones.

  Args:
    tokens: all tokens, the most frequent first.
    parts: pair of tokens whose merge forms a token, by that token.
    required: tokens that must be in the result.
    size: largest size of the result. The result may be smaller, because a token
      is left out if the tokens that its merges need do not fit.

  Raises:
    ValueError: there are more than `size` required tokens.
  """
  if size < len(required):
    raise ValueError(f"size is {size}, but {len(required)} tokens are required "
                     "(special tokens, and tokens that no merge forms): give "
                     "at least this size")
  kept = set(required)
  for token in tokens:
    needed, open_ = set(), [token]  # tokens that the merges of `token` need
    while open_:
      part = open_.pop()
      if part not in kept and part not in needed:
        needed.add(part)
        open_ += parts.get(part, ())
    if len(kept) + len(needed) <= size:
      kept |= needed
  return kept


def _renumber(node: Any, new) -> None:
  """Replaces ids of special tokens in a post-processor, in place.

  Args:
    node: part of the post-processor's JSON.
    new: new id of every remaining token.
  """
  if isinstance(node, list):
    for child in node:
      _renumber(child, new)
  elif isinstance(node, dict):
    if "ids" in node and "tokens" in node:
      node["ids"] = [new[token] for token in node["tokens"]]
    for child in node.values():
      _renumber(child, new)
