"""Methods whose drafts are a chain of a small language model."""

from specjax import verifiers
from specjax.methods import stop_rules
from specjax.methods.draft_models.language_model import LanguageModel
from specjax.methods.draft_models.online import Online
from specjax.methods.model_free.empty import Empty
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import STOP
from specjax.methods.strategy import Strategy
from specjax.types import ModelFn
from specjax.types import Verifier


def autoregressive() -> Strategy:
  """Decoding with the target alone, a token a pass.

  >>> autoregressive().drafter.num_nodes  # the root alone
  1
  """
  return Strategy(Empty(), verifiers.Token())


def speculative_sampling(model: ModelFn, gamma: int) -> Strategy:
  """A chain of a small model's tokens, each accepted or rejected in turn.

  Leviathan et al. 2022 (arXiv:2211.17192, Algorithm 1) and Chen et al. 2023
  (arXiv:2302.01318, Algorithm 2).

  >>> from specjax import testing
  >>> speculative_sampling(testing.MarkovModel(7), gamma=4).verifier
  Token()

  Args:
    model: the small language model, over the target's vocabulary.
    gamma: drafted tokens of a round; 0 drafts nothing.
  """
  return Strategy(LanguageModel(model=model, gamma=gamma),
                  verifiers.Token())


def block_verification(model: ModelFn, gamma: int) -> Strategy:
  """The same chain, judged as a whole: never fewer tokens on average.

  Sun et al. 2024 (arXiv:2403.10444, Algorithm 2).

  >>> from specjax import testing
  >>> block_verification(testing.MarkovModel(7), gamma=4).verifier
  Block()

  Args:
    model: the small language model, over the target's vocabulary.
    gamma: drafted tokens of a round.
  """
  return speculative_sampling(model, gamma)._replace(verifier=BLOCK)


def early_stopping(model: ModelFn, gamma: int,
                   stop: stop_rules.StopRule = STOP,
                   verifier: Verifier = BLOCK) -> Strategy:
  """The same chain, ended early where a rule expects a rejection.

  Draft & Verify (Zhang et al. 2023, arXiv:2309.08168) by default; the others
  are in `methods.stop_rules`.

  >>> from specjax import testing
  >>> rule = stop_rules.Confidence(threshold=0.4)
  >>> drafter, _ = early_stopping(testing.MarkovModel(7), gamma=4, stop=rule)
  >>> drafter.stop.threshold, drafter.autoregressive
  (0.4, False)

  Args:
    model: the small language model, over the target's vocabulary.
    gamma: drafted tokens of a round, at most.
    stop: the rule.
    verifier: a rule for chains whose drafter need not be autoregressive.
  """
  return Strategy(LanguageModel(model=model, gamma=gamma, stop=stop),
                  verifier)


def greedy_block_verification(model: ModelFn, gamma: int) -> Strategy:
  """The same chain, judged by the rule that accepts most in a single round.

  Sun et al. 2024 (arXiv:2403.10444, Algorithms 4 to 6). What it gains in a
  round it can lose in the next ones, whose target it modifies.

  >>> from specjax import testing
  >>> greedy_block_verification(testing.MarkovModel(7), gamma=4).verifier
  GreedyBlock()

  Args:
    model: the small language model, over the target's vocabulary.
    gamma: drafted tokens of a round.
  """
  return speculative_sampling(model, gamma)._replace(
      verifier=verifiers.GreedyBlock())


def online(model: ModelFn, gamma: int, learning_rate: float = 1e-3,
           positions: str = "path", verifier: Verifier = BLOCK) -> Strategy:
  """A chain of a model that learns from the target's laws as it drafts.

  Online speculative decoding (Liu et al. 2023, arXiv:2310.07177), of a
  correction of the model's logits for each row.

  >>> from specjax import testing
  >>> model = testing.tiny_pair(7).drafter
  >>> online(model, gamma=4, positions="rejected").drafter.learning_rate
  0.001

  Args:
    model: the small language model, over the target's vocabulary.
    gamma: drafted tokens of a round.
    learning_rate: of Adam.
    positions: where it learns, see `drafters.Online`.
    verifier: a rule for chains whose drafter need not be autoregressive.
  """
  return Strategy(Online(
      model=model, gamma=gamma, learning_rate=learning_rate,
      positions=positions), verifier)
