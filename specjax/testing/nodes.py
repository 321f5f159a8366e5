"""Draft tokens of a record, and statistical checks of them.

q is the distribution of a draft token in `Draft.probs`.
"""

import numpy as np

from specjax.testing import evidence

# Eleven tests share a total false-alarm probability of 1e-6: of draft tokens
# and of generated tokens, sums and chances (`check_chances`) of two records; of
# the draft tokens of a third record, both; and of the joint distribution.
LEVEL = 1e-6 / 11
SAME = 1e-3  # tolerance for equal distributions in float32
_FARTHEST = 8  # largest distance of compared nodes of a draft
# Distances of compared rounds. The decoding loop draws the uniforms of 32
# rounds at once.
_ROUNDS_BACK = (1, 2, 3, 4, 5, 8, 16, 32)
# A token is deterministic if the largest entry of its q is at least this value.
# Deterministic tokens are left out of the sums.
_CERTAIN = 1 - 1e-9


class Nodes:
  """Flat list of the n draft tokens (nodes of drafts) of a record."""

  def __init__(self, found):
    self.found, there = found, found.drafted
    self.index = numbered(there)
    self.call, self.round, self.row, self.node = self.where = np.nonzero(there)
    self.tokens = found.tokens[there]
    self.laws = normalised(found.probs[there])
    self.parent = found.parents[there]
    self.parents_law = normalised(found.target_probs[
        self.call, self.round, self.row, self.parent])
    self.sibling = self._sibling()

  def _sibling(self):
    """Returns the last earlier sibling `[n]` of each node, or -1."""
    parents = np.where(self.found.drafted, self.found.parents, -2)
    last = np.full(parents.shape, -1)
    for node in range(2, parents.shape[-1]):
      for other in range(1, node):
        same = parents[..., other] == parents[..., node]
        last[..., node] = np.where(same, other, last[..., node])
    return last[self.where]

  def _at(self, nodes):
    """Returns the position in this list of one other node per draft, `[n]`.

    `nodes [n]` are the indices of these nodes in the drafts of the n tokens.
    The result is -1 for the root and for padding.
    """
    return np.where(nodes > 0, self.index[
        self.call, self.round, self.row, np.maximum(nodes, 0)], -1)

  def check_possible(self, name):
    """Raises an error if draft tokens have probability 0 or almost 0 under q.
    """
    bad = (self.tokens < 0) | (self.tokens >= self.laws.shape[1])
    if bad.any():
      raise AssertionError(
          f"{name}: drafted token {self.tokens[bad][0]} in row "
          f"{self.row[bad][0]} is out of range, and its row of q is not 0")
    check_chances(f"{name}: a token was drafted", self.tokens, self.laws,
                   self.row)

  def check_siblings(self, name):
    """Raises an error if siblings have different q.

    This check is for drafters that provide "iid".
    """
    before = self._at(self.sibling)
    differ = np.abs(self.laws - self.laws[before]).max(1) * (before >= 0)
    if differ.max() > SAME:
      i = differ.argmax()
      raise AssertionError(
          f"{name} provides `iid`, and the row of q of node "
          f"{self.node[i]} in row {self.row[i]} differs from its sibling's by "
          f"{differ[i]:.3g}")

  def check_contexts(self, name, alike):
    """Raises an error if q differs after equal sequences of tokens.

    This check is for drafters that provide "autoregressive". If `alike` is
    True, nodes of rows with the same temperature are compared. If it is False,
    only nodes of the same row are compared.
    """
    found, requests = self.found, self.found.requests
    some = np.random.default_rng(0).integers(
        2**63, size=found.texts.shape[2] + found.tokens.shape[3],
        dtype=np.uint64) | np.uint64(1)
    # Hash of all tokens up to each position, and up to each node of a draft.
    texts = found.texts.astype(np.uint64) + np.uint64(1)
    upto = np.cumsum(texts * some[:texts.shape[2]], axis=-1, dtype=np.uint64)
    lengths = requests.lengths + np.cumsum(found.emitted, 1) - found.emitted
    calls, rows = np.ogrid[:texts.shape[0], :texts.shape[1]]
    hashes = np.zeros(found.tokens.shape, np.uint64)
    depths = np.zeros(found.tokens.shape, np.int64)
    hashes[..., 0] = upto[calls[:, None], rows[None], lengths - 1]
    for node in range(1, found.tokens.shape[-1]):
      above = np.maximum(found.parents[..., node:node + 1], 0)
      depth = np.take_along_axis(depths, above, -1)[..., 0] + 1
      depths[..., node] = depth
      token = found.tokens[..., node].astype(np.uint64) + np.uint64(1)
      hashes[..., node] = np.take_along_axis(hashes, above, -1)[..., 0] + (
          token * some[lengths + depth - 1])
    context = hashes[self.call, self.round, self.row, self.parent]
    same = requests.temperature[self.row] if alike else self.row
    order = np.lexsort((context, same))
    first = np.append(True, (np.diff(context[order]) != 0)
                      | (np.diff(same[order]) != 0))
    leader = order[np.maximum.accumulate(np.where(
        first, np.arange(len(order)), 0))]
    differ = np.abs(self.laws[order] - self.laws[leader]).max(1)
    if differ.max() > SAME:
      i = order[differ.argmax()]
      raise AssertionError(
          f"{name} provides `autoregressive`, and its q after the same "
          f"text differs by {differ.max():.3g} in row {self.row[i]}, round "
          f"{self.round[i]}, node {self.node[i]}")

  def deviation(self, crossed):
    """Returns the largest deviation of a sum over draft tokens.

    Each sum is over one group of nodes. The summands are values of one function
    of a token, or of a token and a partner (`evidence.largest`). If `crossed`
    is True, there are also sums over combinations of two groups.
    """
    found, requests = self.found, self.found.requests
    emitted = (np.cumsum(found.emitted, 1) - found.emitted)[self.where[:3]]
    length = requests.lengths[self.row] + emitted
    parent_token = found.tokens[
        self.call, self.round, self.row, self.parent] % 8
    sibling_token = np.where(self.sibling > 0, found.tokens[
        self.call, self.round, self.row, np.maximum(self.sibling, 0)] % 8, -1)
    above = self._at(self.parent)
    grandparent = np.where(above >= 0, parent_token[above], -1)
    left = found.left[self.where[:3]]
    groups = {
        "node {}": np.minimum(self.node, 15),
        **row_groups(requests, self.row),
        "{} tokens emitted before the round": np.minimum(emitted, 9),
        "a full acceptance in the round before": once(self._full(1)),
        "a parent of {} mod 8": parent_token,
        # The groups below are combined only with the groups above (`crossed`).
        "depth {}": self._depth,
        "depth 2 or more": once(self._depth >= 2),
        "a full acceptance two rounds before": once(self._full(2)),
        "4 or more tokens emitted before the round": once(emitted >= 4),
        "an eos above it in the draft": once(self._below_end()),
        "round {}": self.round,
        "round 8 x {} or up to 7 more": self.round // 8,
        "round 7 or later, from 0": once(self.round >= 7),
        "round 24 or later, from 0": once(self.round >= 24),
        "{} active rows": np.minimum(left, 8),
        "10 x {} active rows or up to 9 more": left // 10,
        "at most 2 active rows": once(left <= 2),
        "a limit of one token ({})": (
            found.new[self.call, self.row] == 1).astype(int),
        **prompt_groups(requests.lengths[self.row]),
        "a sibling of {} mod 8 before it": sibling_token,
        "a grandparent of {} mod 8": grandparent,
        "{} / 8 or more as the largest entry of q": (
            8 * self.laws.max(1)).astype(int),
        "{} eos ids in the request": (requests.eos >= 0).sum(1)[self.row],
        "8 x {} tokens or up to 7 more before the round": length // 8,
        "{} mod 16 tokens before the round": length % 16,
    }
    partners = {
        "its parent": above,
        "its last sibling": self._at(self.sibling),
        **self._in_earlier_rounds(),
        **lags(self.index, self.where, row_axis=2),
    }
    open_ = self.laws.max(1) < _CERTAIN
    single = evidence.functions(self.tokens, self.laws, self.parents_law,
                                requests.eos[self.row], "q")
    double = evidence.pairs(
        self.tokens, self.laws, partners, self._others_of_the_draft())
    return evidence.largest(
        single.taken(open_), double.taken(open_),
        {name: values[open_] for name, values in groups.items()},
        crossed=10 if crossed else 0)

  def _in_earlier_rounds(self):
    """Returns partners in earlier rounds: the same node, or the same position.

    A partner is another draft token that may use the same random numbers.
    """
    found = {}
    for back in _ROUNDS_BACK:
      if back >= self.found.active.shape[1]:
        break
      when = "in the round before" if back == 1 else f"{back} rounds before"
      found[f"the same node {when}"] = np.where(
          self.round >= back, self.index[
              self.call, self.round - back, self.row, self.node], -1)
    # In a chain, node n of this round and node n + emitted of the previous
    # round have the same position in the sequence. A drafter with keys derived
    # from positions would reuse the key of a rejected token.
    before = self.call, np.maximum(self.round - 1, 0), self.row
    node = self.node + self.found.emitted[before]
    size = self.index.shape[-1]
    found["the same position in the round before"] = np.where(
        (self.round > 0) & (node < size),
        self.index[*before, np.minimum(node, size - 1)], -1)
    return found

  def _others_of_the_draft(self):
    """Returns partners in the same draft, except parent and last sibling.

    There is one entry for each distance of the node indices.
    """
    found = {}
    for back in range(1, min(self.found.tokens.shape[-1] - 1, _FARTHEST + 1)):
      other = self.node - back
      known = (other == self.parent) | (other == self.sibling)
      partner = np.where(known, -1, self._at(other))
      if (partner >= 0).any():
        found[f"the node {back} before it"] = partner
    return found

  def _full(self, back):
    """Returns a mask `[n]`: the row accepted a full draft `back` rounds ago.

    This method also stores the depths of all nodes in `_depth`.
    """
    depths = np.zeros(self.found.tokens.shape, np.int64)
    for node in range(1, depths.shape[-1]):
      depths[..., node] = 1 + np.take_along_axis(depths, np.maximum(
          self.found.parents[..., node:node + 1], 0), -1)[..., 0]
    self._depth = depths[self.where]
    deepest = (depths * self.found.drafted).max(-1)
    full = (deepest > 0) & (self.found.accepted >= deepest)
    return (self.round >= back) & full[
        self.call, self.round - back, self.row]

  def _below_end(self):
    """Returns a mask `[n]` of nodes with an eos among their draft ancestors."""
    found = self.found
    is_end = (found.tokens[..., None] == found.requests.eos[:, None]).any(-1)
    for node in range(1, is_end.shape[-1]):
      above = np.maximum(found.parents[..., node:node + 1], 0)
      inner = (above > 0) & np.take_along_axis(is_end, above, -1)
      is_end[..., node] |= inner[..., 0]
    return (self.parent > 0) & is_end[
        self.call, self.round, self.row, self.parent]


def normalised(laws):
  laws = laws.astype(np.float64)
  return laws / laws.sum(-1, keepdims=True)


def numbered(there):
  """Returns an array with the True entries of a mask numbered from 0.

  Other entries are -1.
  """
  found = np.full(there.shape, -1)
  found[there] = np.arange(there.sum())
  return found


def once(condition):
  """Returns the group of the draws that fulfil a condition."""
  return np.where(condition, 0, -1)


def prompt_groups(lengths):
  """Returns groups of draws by the lengths of their prompts, by name."""
  return {
      "a prompt of {} tokens": lengths,
      "a prompt of more than 32 tokens": once(lengths > 32),
      "a prompt of more than 64 tokens": once(lengths > 64),
      "a prompt of more than 128 tokens": once(lengths > 128),
  }


def row_groups(requests, row):
  """Returns groups of draws by properties of their request, by name."""
  temperature = requests.temperature[row]
  has_end = (requests.eos >= 0).any(1)[row]
  return {
      "a temperature of {} / 10": np.round(10 * temperature).astype(int),
      "a temperature below 1": once(temperature < 1),
      "a temperature of at most 0.5": once(temperature < 0.55),
      "a temperature above 1": once(temperature > 1.05),
      "an eos in the request ({})": has_end.astype(int),
      "rows of block {} of 64": row // 64,
  }


def lags(index, where, row_axis):
  """Returns partners in other rows of a call and in the previous call.

  Args:
    index: result of `numbered` for the mask of drawn tokens.
    where: indices of each drawn token in `index`, one array `[n]` per axis.
    row_axis: axis of the rows in `index`.
  """
  partners = {}
  rows, row = index.shape[row_axis], where[row_axis]
  for lag in sorted({1, 6, rows // 2, min(128, rows - 1)}):
    at = (*where[:row_axis], row - lag, *where[row_axis + 1:])
    partners[f"what was drawn {lag} rows before"] = np.where(
        row >= lag, index[at], -1)
  at = where[0] - 1, *where[1:]
  partners["what was drawn in the call before"] = np.where(
      where[0] >= 1, index[at], -1)
  return partners


def check_chances(what, tokens, laws, rows):
  """Raises `AssertionError` if drawn tokens have too small probabilities.

  Args:
    what: beginning of the error message.
    tokens: `[n]` drawn tokens.
    laws: `[n, V]` distributions of these tokens.
    rows: `[n]` row of each token, for the error message.
  """
  chance = laws[np.arange(len(tokens)), tokens] * laws.shape[1]
  with np.errstate(divide="ignore"):
    mean = np.mean(1 / chance)  # its expectation is at most 1
  if mean > 1 / LEVEL:
    i = chance.argmin()
    raise AssertionError(
        f"{what} whose probability was {chance[i] / laws.shape[1]:.2g}: token "
        f"{tokens[i]} in row {rows[i]}")
