"""Stop rules of the flag --stop."""

import dataclasses

from absl import flags

from specjax import drafters
from specjax import interfaces
from specjax.methods import stop_rules
from specjax.strategies import Strategy

_RULES = {
    "confidence": stop_rules.Confidence, "adaptive": stop_rules.Adaptive,
    "entropy": stop_rules.Entropy, "threshold": stop_rules.Threshold,
}

# `--help` lists --stop under the script, not under this file.
flags.disclaim_key_flags()


def flag():
  """Defines --stop, the rule that ends a chain early."""
  return flags.DEFINE_string(
      "stop", None, "Rule that ends a draft before --gamma tokens, as "
      "RULE or RULE:THRESHOLD with a threshold in [0, 1]. confidence: stop if "
      "the drafter's probability of its token is below the threshold. "
      "adaptive: the same, with a threshold that adapts to the acceptance rate "
      "(Draft & Verify). entropy: stop if the drafter's entropy is high "
      "(AdaEDL). threshold: stop if the drafter's confidence head predicts a "
      "rejection. Default: no rule")


def check_temperature(value: str | None, temperature: float | None) -> None:
  """Rejects a stop rule that never ends a draft at the temperature.

  Args:
    value: value of --stop, or None.
    temperature: sampling temperature. None means one above 0.
  """
  if value is not None and not named(value).has_params and temperature == 0:
    raise ValueError(f"--stop={value} has no effect at --temperature=0, where "
                     "every drafted token has probability 1; set a higher "
                     "temperature, or --stop=threshold with heads that have a "
                     "confidence head")


def named(value: str) -> stop_rules.StopRule:
  """Returns the stop rule that a value of --stop specifies.

  Raises:
    ValueError: the rule does not exist, or its threshold is out of range.
  """
  name, colon, threshold = value.partition(":")
  if name not in _RULES:
    raise ValueError(f"--stop is {value}; give one of {', '.join(_RULES)}, "
                     "optionally with a threshold, such as confidence:0.4")
  try:
    options = {"threshold": float(threshold)} if colon else {}
  except ValueError:
    raise ValueError(f"--stop is {value}; {threshold!r} is not a number: give "
                     "a threshold in [0, 1], such as confidence:0.4") from None
  return _RULES[name](**options)


def can_stop(drafter: interfaces.Drafter) -> bool:
  """Returns whether a drafter supports stop rules."""
  return isinstance(getattr(drafter, "shape", None), drafters.Chain)


def stopped(strategy: Strategy, value: str | None, name: str) -> Strategy:
  """Returns the strategy with a stop rule.

  Args:
    strategy: strategy of a drafter that supports stop rules.
    value: value of --stop. None returns the strategy unchanged.
    name: name of the drafter, for error messages.

  Raises:
    ValueError: the drafter lacks the confidence head of this rule.
  """
  if value is None:
    return strategy
  rule, drafter = named(value), strategy.drafter
  if rule.has_params and not drafter.network.has_confidence:
    raise ValueError(f"--stop={value} requires a confidence head, and "
                     f"--drafter={name} has none; set confidence, adaptive or "
                     "entropy, or block-parallel heads with a confidence head")
  return strategy._replace(drafter=dataclasses.replace(
      drafter, shape=dataclasses.replace(drafter.shape, stop=rule)))
