"""Methods whose drafter is a part of the target's own layers."""

from specjax.methods import stop_rules
from specjax.methods.draft_models.language_model import LanguageModel
from specjax.methods.self_speculation.early_exit import EarlyExit
from specjax.methods.self_speculation.skipping import Swift
from specjax.methods.strategy import BLOCK
from specjax.methods.strategy import STOP
from specjax.methods.strategy import Strategy
from specjax.models.shortened import Shortened
from specjax.models.sublayers import Sublayers
from specjax.models.transformer import Transformer
from specjax.types import Verifier


def early_exit(exit: int, gamma: int, stop: stop_rules.StopRule | None = None,
               verifier: Verifier = BLOCK) -> Strategy:
  """A chain of the target's own first layers, which verifying does not repeat.

  LayerSkip, Elhoushi et al. 2024 (arXiv:2404.16710, section 3.3). It pays with
  a target that was trained for it, as `train_lm.py --exit_scale` does.

  >>> drafter, _ = early_exit(exit=2, gamma=4)
  >>> drafter.exit, drafter.num_nodes, drafter.autoregressive
  (2, 5, True)

  Args:
    exit: layers that draft.
    gamma: drafted tokens of a round, at most.
    stop: a rule that ends a chain, or None.
    verifier: a rule for chains; with a stop rule one whose drafter need not be
      autoregressive.
  """
  return Strategy(EarlyExit(exit=exit, gamma=gamma, stop=stop),
                  verifier)


def draft_and_verify(target: Transformer, sublayers: Sublayers, gamma: int,
                     stop: stop_rules.StopRule | None = STOP,
                     verifier: Verifier = BLOCK) -> Strategy:
  """A chain of the target without some of its attentions and MLPs.

  Zhang et al. 2023 (arXiv:2309.08168). What to leave out is searched by
  `skip_search`; `params["drafter"]` are the target's parameters.

  >>> from specjax import models, testing
  >>> target = testing.tiny_pair(7, layers=3).target
  >>> left = models.Sublayers.without(3, attention=[1])
  >>> draft_and_verify(target, left, gamma=4).drafter.model.sublayers.attention
  (0, 2)

  Args:
    target: the whole model.
    sublayers: what is left of it.
    gamma: drafted tokens of a round, at most.
    stop: a rule that ends a chain; None: all have gamma tokens.
    verifier: as in `early_exit`.
  """
  model = Shortened(target, sublayers)
  return Strategy(LanguageModel(model=model, gamma=gamma, stop=stop),
                  verifier)


def swift(gamma: int, count: int, window: int = 48, tries: int = 64,
          verifier: Verifier = BLOCK) -> Strategy:
  """The target without some attentions and MLPs, searched while it decodes.

  SWIFT, Xia et al. 2024 (arXiv:2410.06916), but for its trees and its stop
  rule; sets are scored by accepted length, see `drafters.Swift`. What is left
  out is computed and multiplied by 0, so that it says what could be saved.

  >>> swift(gamma=4, count=2).drafter.autoregressive
  False

  Args:
    gamma: drafted tokens of a round.
    count: attentions and MLPs that are left out.
    window: tokens between two tries.
    tries: sets that are tried.
    verifier: a rule for chains.
  """
  return Strategy(Swift(
      gamma=gamma, count=count, window=window, tries=tries), verifier)
