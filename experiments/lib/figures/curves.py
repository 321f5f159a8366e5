"""Figure of the learning curves of a training run."""

from collections.abc import Mapping
from collections.abc import Sequence
import pathlib
import sys

from specjax.training import metrics
from specjax.utils import processes

_FILE = "curves.png"


def draw(directory: pathlib.Path, measures: Sequence[str], loss: str,
         before: Mapping[str, float]) -> None:
  """Writes `curves.png` from the `metrics.csv` of a run.

  The panels show the losses, the held-out metrics of all heads together, the
  held-out metrics of each head, and the learning rate with the gradient norm.
  If matplotlib is missing, prints a message on stderr and writes nothing.

  Args:
    directory: directory of the run.
    measures: names of held-out metrics. The name of a metric of a single head
      contains a slash.
    loss: description of the loss, the title of the first panel.
    before: values of held-out metrics at step 0, by name. metrics.csv has no
      row of this step.
  """
  if not processes.is_first():
    return
  panels = _panels(measures, loss)
  try:
    from lib.figures import style  # pylint: disable=g-import-not-at-top
    figure, [axes] = style.panels(1, len(panels), width=3.2)
  except ImportError:
    print(f"{_FILE} needs the package matplotlib: pip install "
          "'specjax[experiments]'", file=sys.stderr)
    return
  names = [name for curves in panels.values() for name in curves]
  looks = dict(zip(names, style.looks(len(names))))
  for panel, (title, curves) in zip(axes, panels.items()):
    for name in curves:
      found = [*((0, x) for x in (before.get(name),) if x is not None),
               *metrics.read(directory, name)]
      if found:
        style.line(panel, *zip(*found), label=name, **looks[name])
    panel.set_title(title, fontsize=10)
    panel.set_xlabel("step")
  axes[-1].set_yscale("log")
  style.save(figure, directory / _FILE)


def _panels(measures: Sequence[str], loss: str) -> dict[str, list[str]]:
  """Returns the metrics of every non-empty panel, by the panel's title."""
  panels = {
      loss or "loss": ["mean_loss", "held_out_loss"],
      "held-out text": [x for x in measures if "/" not in x],
      "held-out accuracy by head": [x for x in measures if "/" in x],
      "optimiser": ["learning_rate", "gradient_norm"]}
  return {title: names for title, names in panels.items() if names}
