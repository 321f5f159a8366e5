"""What rules that make their law row by row share."""

from typing import Any

import jax

from specjax.types import Draft
from specjax.types import Law


class RuleByRows:
  """The base of rules that have `by_row`, see `specjax.interfaces`."""

  def law(self, draft: Draft, target_probs: jax.Array, state: Any = None
          ) -> Law:
    """The law of the outcome for one draft, with all of its rows."""
    return self.by_row(draft, target_probs, state).law()
