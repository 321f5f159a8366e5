"""The states of the target that a drafter reads, from its configuration."""

from collections.abc import Sequence

from specjax.methods._published import Found
from specjax.models.configuration_keys import Keys
from specjax.models.configuration_keys import whole_numbers

NAME_THEM = ("put their numbers into its config.json as "
             "eagle_aux_hidden_state_layer_ids, in which i is the state that "
             "layer i reads")
# Keys that list states of the target: (is it in a part, name, offset to the
# number of the layer whose input the state is).
_TAPS = ((True, "eagle_aux_hidden_state_layer_ids", 1),
         (True, "target_layer_ids", 1),
         (False, "eagle_aux_hidden_state_layer_ids", 0),
         (False, "aux_hidden_state_layer_ids", 0),
         (False, "target_layer_ids", 1))


def named_taps(found: Found, keys: Keys, inner: Keys, place: str
          ) -> tuple[int, ...] | None:
  """The states that a configuration names, in our numbers, or None.

  Projects number a state by the layer that returns it (SpecForge, SGLang,
  DeepSpec) or, one more, by the layer that reads it (vLLM, speculators). Some
  files repeat the same numbers in a second place.

  Args:
    found: the files.
    keys: the keys of the configuration.
    inner: the keys of a part of it.
    place: the key of the part.

  Raises:
    ValueError: two places name different states.
  """
  given = {}
  for within, name, shift in _TAPS:
    part = keys.mapping(place) if within else found.config
    for config in (keys, inner):
      config.ignore(name)
    label = f"{place}.{name}" if within else name
    ids = whole_numbers(keys.source, label, part.get(name))
    if ids:
      given[label] = ids, tuple(i + shift for i in ids)
  if not given:
    return None
  ids, taps = zip(*given.values())
  if len(set(ids)) > 1 and len(set(taps)) > 1:
    keys.agreed(dict(zip(given, ids)))
  return taps[0]


def check_taps(found: Found, taps: Sequence[int], normed: bool = False) -> None:
  """Refuses states that the target does not have, or has in another form."""
  layers = found.target.config.layers
  for tap in taps:
    if tap not in range(layers + 1):
      found.fail(f"reads the hidden state before layer {tap}; the target has "
                 f"{layers} layers")
    if normed and tap == layers:
      found.fail(f"reads the output of layer {layers - 1}, the target's last, "
                 "which transformers returns normed; specjax joins states "
                 "before the final norm: take another drafter")
