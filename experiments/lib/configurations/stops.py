"""Stop rules of the flag --stop."""

import dataclasses

from absl import flags

from lib.configurations import compositions
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


def check_flags(value: str | None, drafter: str, temperature: float) -> None:
  """Rejects a stop rule that has no effect.

  The check needs no model, so scripts call it before they load one.

  Args:
    value: value of --stop, or None.
    drafter: name of the drafter.
    temperature: sampling temperature.

  Raises:
    ValueError: the rule does not exist, or cannot end any draft.
  """
  if value is None:
    return
  rule = named(value)
  if drafter == "none" or drafter in compositions.FREE:
    raise ValueError(f"--stop={value} does not support --drafter={drafter}; "
                     "leave --stop out, or set a draft model or heads that "
                     "draft chains, such as small")
  if not rule.has_params and temperature == 0:
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


def stopped(strategy: Strategy, value: str | None, name: str) -> Strategy:
  """Returns the strategy with a stop rule.

  Args:
    strategy: strategy of the drafter.
    value: value of --stop. None returns the strategy unchanged.
    name: name of the drafter, for error messages.

  Raises:
    ValueError: the drafter does not support stop rules, or lacks the
      confidence head of this rule.
  """
  if value is None:
    return strategy
  rule, drafter = named(value), strategy.drafter
  shape = getattr(drafter, "shape", None)
  stops = drafter if shape is None else shape
  if "stop" not in {field.name for field in dataclasses.fields(stops)}:
    raise ValueError(f"--stop={value} does not support --drafter={name} with "
                     "this --verifier; leave --stop out, or set a drafter of "
                     "chains, such as small, or eagle3 with --verifier=block")
  network = getattr(drafter, "network", None)
  if rule.has_params and not getattr(network, "has_confidence", False):
    raise ValueError(f"--stop={value} requires a confidence head, and "
                     f"--drafter={name} has none; set confidence, adaptive or "
                     "entropy, or block-parallel heads with a confidence head")
  stops = dataclasses.replace(stops, stop=rule)
  return strategy._replace(drafter=stops if shape is None else
                           dataclasses.replace(drafter, shape=stops))
