"""Figure of the learning curves of a training run."""

from collections.abc import Sequence
import pathlib
import sys

from specjax.training import metrics
from specjax.utils import processes

_FILE = "curves.png"


def draw(directory: pathlib.Path, measures: Sequence[str], loss: str) -> None:
  """Writes `curves.png` from the `metrics.csv` of a run.

  The panels are losses, held-out measures of all heads together, held-out
  measures of each head, and learning rate and gradient norm. Without matplotlib
  a message on stderr names the package, and nothing is written.

  Args:
    directory: the run's directory.
    measures: names of held-out metrics; metrics of one head contain a slash.
    loss: description of the loss, used as the title of the first panel.
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
  # Neighbouring shades are similar, so every second name comes first.
  colors = dict(zip([*names[::2], *names[1::2]], style.shades(len(names))))
  for panel, (title, curves) in zip(axes, panels.items()):
    for name in curves:
      found = metrics.read(directory, name)
      if found:
        panel.plot(*zip(*found), color=colors[name], label=name,
                   marker="." if len(found) < 20 else None)
    panel.set_title(title, fontsize=10)
    panel.set_xlabel("step")
  axes[-1].set_yscale("log")
  style.save(figure, directory / _FILE)


def _panels(measures: Sequence[str], loss: str) -> dict[str, list[str]]:
  """Returns the metrics of every panel by its title, without empty panels."""
  panels = {
      loss or "loss": ["mean_loss", "held_out_loss"],
      "held-out text": [x for x in measures if "/" not in x],
      "held-out accuracy by head": [x for x in measures if "/" in x],
      "optimiser": ["learning_rate", "gradient_norm"]}
  return {title: names for title, names in panels.items() if names}
