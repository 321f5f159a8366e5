"""What methods are called and how they are drawn: once, for every study.

A method has one name in all tables and one colour in all figures. What is no
method, such as a training run, is drawn in a shade of another palette.
"""

from collections.abc import Sequence
import pathlib
import textwrap
from typing import Any

import numpy as np

MOST = 8  # curves that a panel can hold and be read

_APART = 3.0  # points between curves of equal x
_LEGEND = 2.4  # inches beside the panels
# {name in flags and files: (name in tables, colour)}.
_METHODS = {
    "token": ("token", "#1f77b4"),
    "block": ("block", "#ff7f0e"),
    "greedy_block": ("greedy block", "#2ca02c"),
    "chain_token": ("chain, token", "#1f77b4"),
    "chain_block": ("chain, block", "#ff7f0e"),
    "specinfer": ("i.i.d., recursive (SpecInfer)", "#9467bd"),
    "iid_traversal": ("i.i.d., traversal", "#ff9896"),
    "k_seq": ("i.i.d., K-SEQ", "#8c564b"),
    "without_replacement": ("without replacement, recursive", "#e377c2"),
    "traversal": ("without replacement, traversal", "#d62728"),
    "hybrid": ("hybrid, recursive", "#17becf"),
    "top_k": ("top-k, target walk", "#7f7f7f"),
    "typical": ("typical (LOSSY)", "#bcbd22"),
    "top_2": ("top 2 (LOSSY)", "#393b79"),
    "autoregressive": ("autoregressive", "#000000"),
    "dynamic_program": ("dynamic program's choice", "#000000"),
}

# Rules on trees, where a table says elsewhere how the tree was drawn.
_RULES = {"recursive": "recursive", "target_walk": "target walk",
          "traversal": "traversal", "k_seq": "K-SEQ"}


def rule(name: str) -> str:
  """What tables call a verifier, whatever it judges."""
  return _RULES.get(name) or label(name)


def label(method: str) -> str:
  """What tables and legends call a method."""
  return _METHODS[method][0]


def color(method: str) -> str:
  """The colour of a method in every figure."""
  return _METHODS[method][1]


def shades(count: int):
  """Colours of things that are no methods, dark to light."""
  import matplotlib  # pylint: disable=g-import-not-at-top
  return matplotlib.colormaps["viridis"]([
      0.9 * i / max(count - 1, 1) for i in range(count)])


def panels(rows: int = 1, columns: int = 1, *, width: float = 4.0,
           height: float = 3.2, **kwargs: Any):
  """A figure and its panels.

  Args:
    rows: of panels.
    columns: of panels.
    width: of a panel, in inches.
    height: of a panel, in inches.
    **kwargs: of `pyplot.subplots`.

  Returns:
    `(figure, axes [rows, columns])`.
  """
  import matplotlib  # pylint: disable=g-import-not-at-top
  matplotlib.use("Agg")
  import matplotlib.pyplot as plt  # pylint: disable=g-import-not-at-top
  return plt.subplots(
      rows, columns, squeeze=False, layout="constrained",
      figsize=(width * columns + _LEGEND, height * rows + 0.3), **kwargs)


def tried(axes: Any, values: Sequence[float]) -> None:
  """Marks the values that were tried, each twice the one before or so.

  The limits are half a step outside of them, so that one value alone is in the
  middle.
  """
  values = sorted(set(values))
  axes.set_xscale("log", base=2)
  axes.set_xlim(values[0] / 2**0.5, values[-1] * 2**0.5)
  axes.set_xticks(values, [f"{v:g}" for v in values])
  axes.minorticks_off()


def apart(curve: Any, place: int, count: int) -> None:
  """Moves a curve sideways, so that curves of equal x do not hide each other.

  The distance is in points on paper. It is the same for every range of x, and
  with a single x the curves stay beside each other.

  Args:
    curve: what `plot` or `errorbar` returned.
    place: number of the curve, from 0.
    count: curves of the panel.
  """
  from matplotlib import transforms  # pylint: disable=g-import-not-at-top
  parts = curve if isinstance(curve, list) else curve.get_children()
  for part in parts:  # later than it was drawn: axes fit plain data alone
    part.set_transform(transforms.offset_copy(
        part.get_transform(), part.figure,
        x=_APART * (place - (count - 1) / 2), units="points"))


def errors(rows: list[dict[str, Any]], name: str):
  """Returns the error bars `[2, rows]` of an `analysis.Estimate` in tables.

  Columns without an interval, such as a median, have no error bars.
  """
  if f"{name}_low" not in rows[0]:
    return None
  found = np.array([[r[name], r[f"{name}_low"], r[f"{name}_high"]]
                    for r in rows], np.float64)
  return np.stack([found[:, 0] - found[:, 1], found[:, 2] - found[:, 0]])


def save(figure: Any, path: pathlib.Path, title: str | None = None) -> None:
  """Writes a figure; one legend for all its panels stands beside them."""
  import matplotlib.pyplot as plt  # pylint: disable=g-import-not-at-top
  found = {}
  for axes in figure.axes:
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    for handle, name in zip(*axes.get_legend_handles_labels()):
      found.setdefault(name, handle)
  figure.legend(found.values(), found.keys(), loc="outside right upper",
                fontsize=8)
  if title:
    room = figure.get_figwidth() - _LEGEND
    figure.suptitle(textwrap.fill(title, int(13 * room)), fontsize=10, x=0.01,
                    horizontalalignment="left")
  figure.savefig(path, dpi=110)
  plt.close(figure)
