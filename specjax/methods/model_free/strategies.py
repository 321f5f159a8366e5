"""Methods whose drafts are copied from texts, with no model at all."""

from collections.abc import Sequence

from specjax import verifiers
from specjax.methods.model_free.ngram import NGram
from specjax.methods.model_free.ngram import Reference
from specjax.methods.model_free.recycling import Recycling
from specjax.methods.model_free.retrieval import Retrieval
from specjax.methods.model_free.suffix import Suffix
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import Strategy
from specjax.methods.strategy import TOKEN
from specjax.methods.strategy import TRAVERSAL
from specjax.types import Verifier


def prompt_lookup(gamma: int, max_ngram: int = 3, min_ngram: int = 2,
                  verifier: Verifier = TOKEN) -> Strategy:
  """A copy of what followed the last tokens earlier in the row.

  Saxena 2023 (https://github.com/apoorvumang/prompt-lookup-decoding), called
  n-gram speculation elsewhere. There the first match is copied, up to the
  text's end; here the latest one, and over again where the text ends. It needs
  no parameters.

  >>> import jax
  >>> import specjax as sj
  >>> target = sj.testing.MarkovModel(4)
  >>> table = 50 * jax.numpy.roll(jax.numpy.eye(4), 1, axis=1)  # 0, 1, 2, 3, 0
  >>> decoder = prompt_lookup(gamma=7).decoder(target)
  >>> text = decoder.generate({"target": table}, [[0, 1, 2, 3, 0, 1]],
  ...                         jax.random.key(0), max_new_tokens=16)
  >>> text.tokens[0].tolist()[-5:], int(text.stats.active[0])  # rounds
  ([1, 2, 3, 0, 1], 2)

  Args:
    gamma: tokens that are copied.
    max_ngram: last tokens that are looked for, at most.
    min_ngram: and at least. A copy after a single token that agrees seldom
      pays for its verification.
    verifier: a rule for chains; all accept the same of such drafts.
  """
  return Strategy(NGram(
      gamma=gamma, max_ngram=max_ngram, min_ngram=min_ngram), verifier)


def llma(gamma: int, max_ngram: int = 3, own_text: bool = False,
         verifier: Verifier = TOKEN) -> Strategy:
  """A copy out of texts that come with the prompt, such as retrieved ones.

  Yang et al. 2023 (arXiv:2304.04487): `prefill` and `generate` take the texts
  as `context={"reference": reference_texts(...)}`.

  >>> from specjax.drafters import reference_texts
  >>> reference_texts([[[5, 6, 7], [5, 8]], []])[:, :7].tolist()
  [[5, 6, 7, -1, 5, 8, -1], [-1, -1, -1, -1, -1, -1, -1]]
  >>> llma(gamma=8).drafter.num_nodes
  9

  Args:
    gamma: tokens that are copied.
    max_ngram: last tokens that are looked for, at most.
    own_text: whether the row's own text is searched as well.
    verifier: a rule for chains; all accept the same of such drafts.
  """
  return Strategy(Reference(
      gamma=gamma, max_ngram=max_ngram, own_text=own_text), verifier)


def token_recycling(parents: Sequence[int] | None = None) -> Strategy:
  """A tree of what the target found likely after the same tokens before.

  Luo et al. 2024 (arXiv:2408.08696). It needs no parameters.

  >>> from specjax import trees
  >>> token_recycling(trees.full_tree((2, 2))).drafter.num_nodes
  7
  >>> token_recycling().verifier
  TargetWalk()

  Args:
    parents: N entries, the tree with its root; default:
      `drafters.recycling_tree()`.
  """
  parents = None if parents is None else tuple(parents)
  return Strategy(
      Recycling(parents=parents), verifiers.TargetWalk())


def suffix_decoding(gamma: int, proposal: str = "deterministic",
                    verifier: Verifier | None = None,
                    parents: Sequence[int] | None = None) -> Strategy:
  """What followed the last tokens where they stood before, by its counts.

  SuffixDecoding, Oliaro et al. 2024 (arXiv:2411.04975). Drawing from the counts
  is not in the paper: of deterministic drafts all rules accept as much, of
  drawn chains block verification accepts most, and of drawn trees traversal.

  >>> suffix_decoding(gamma=8).drafter.num_uniforms  # deterministic
  0
  >>> suffix_decoding(gamma=8, proposal="sampled").drafter.num_uniforms
  16

  Args:
    gamma: drafted tokens of a round, at most.
    proposal: "deterministic" or "sampled".
    verifier: the rule; default: block for chains, traversal for trees.
    parents: of a tree to draw, for "sampled"; None: a chain.
  """
  if verifier is None:
    verifier = BLOCK if parents is None else TRAVERSAL
  return Strategy(Suffix(
      gamma=gamma, proposal=proposal,
      parents=None if parents is None else tuple(parents)), verifier)


def rest(nodes: int = 64, gamma: int = 10, max_match: int = 16) -> Strategy:
  """What follows the last tokens in a corpus, as a tree of frequent prefixes.

  REST, He et al. 2023 (arXiv:2311.08252). `params["drafter"]` is a datastore,
  see `experiments/build_datastore.py`. Of the places where the tokens stand 64
  are counted, evenly out of all; the published code counts up to 5000.

  >>> rest().drafter.num_nodes, rest().verifier
  (64, TargetWalk())

  Args:
    nodes: N, the root included.
    gamma: tokens of the longest path.
    max_match: last tokens that are looked for, at most the datastore's depth.
  """
  return Strategy(
      Retrieval(nodes=nodes, gamma=gamma, max_match=max_match),
      verifiers.TargetWalk())
