"""The learning curves of a training run as a figure."""

from collections.abc import Sequence
import pathlib
import sys

from specjax import processes
from specjax.training import metrics

_FILE = "curves.png"


def draw(directory: pathlib.Path, measures: Sequence[str], loss: str) -> None:
  """Writes `curves.png` from the `metrics.csv` of a run.

  The panels are losses, held-out measures, and learning rate and gradient norm.
  Without matplotlib a line on stderr names the package.

  Args:
    directory: the run's directory.
    measures: names of held-out metrics for the second panel.
    loss: a description of the loss, the title of the first panel.
  """
  if not processes.is_first():
    return
  try:
    from lib import style  # pylint: disable=g-import-not-at-top
    figure, [axes] = style.panels(1, 3)
  except ImportError:
    print(f"{_FILE} needs the package matplotlib: pip install "
          "'specjax[experiments]'", file=sys.stderr)
    return
  panels = [(loss or "loss", ["mean_loss", "held_out_loss"]),
            ("held-out text", measures),
            ("optimiser", ["learning_rate", "gradient_norm"])]
  names = [name for _, panel in panels for name in panel]
  colors = dict(zip(names, style.shades(len(names))))
  for panel, (title, curves) in zip(axes, panels):
    for name in curves:
      found = metrics.read(directory, name)
      if found:
        panel.plot(*zip(*found), color=colors[name], label=name,
                   marker="." if len(found) < 20 else None)
    panel.set_title(title, fontsize=10)
    panel.set_xlabel("step")
  axes[2].set_yscale("log")
  style.save(figure, directory / _FILE)
