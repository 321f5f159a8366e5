"""Properties of drafts that drafters declare and rules require."""

from specjax.interfaces.drafter import Drafter

CAPABILITIES = {
    "chain": "every draft is one chain: node i + 1 is below node i, what hangs "
             "beside it is padding, and every row of `probs` is the law of its "
             "token given those before it",
    "iid": "the children of a node are independent draws from one law",
    "conditional": "every row of `probs` is the law of its token given what "
                   "came before it, as `Draft` asks",
    "autoregressive": "q depends on the context alone, not on where the draft "
                      "began; whether a row is padding may depend on its "
                      "position, not on the tokens before it",
    "deterministic": "every row of `probs` is one-hot or padding, so that its "
                     "token tells the whole law",
    "full": "no node is padding, so that nobody need look how much was "
            "drafted",
}


def capabilities(drafter: Drafter) -> frozenset[str]:
  """Which of `CAPABILITIES` a drafter declares.

  Raises:
    ValueError: one of them is declared as something else than True or False.
  """
  for name in CAPABILITIES:
    value = getattr(drafter, name, False)
    if not isinstance(value, bool):
      raise ValueError(f"{type(drafter).__name__}.{name} is {value!r}; it must "
                       "be True or False")
  return frozenset(name for name in CAPABILITIES
                   if getattr(drafter, name, False))
