"""Names and colours of methods, and layout of figures, in all studies.

A method has one name in all tables and one colour in all figures. Other curves,
such as training runs, have shades of a separate palette.
"""

from collections.abc import Sequence
import pathlib
import textwrap
from typing import Any

import numpy as np

from specjax.utils import processes

MOST = 8  # maximum number of curves in a readable panel

_APART = 3.0  # sideways shift between curves with equal x, in points
_LEGEND = 2.4  # width of the legend in inches
# Name of each method in tables, and its colour, by its name in flags and files.
_METHODS = {
    "token": ("token", "#1f77b4"),
    "block": ("block", "#ff7f0e"),
    "greedy_block": ("greedy block", "#2ca02c"),
    "coupled": ("coupled", "#bcbd22"),
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

# Names of the rules on trees, for tables that name the tree in another column.
_RULES = {"recursive": "recursive", "target_walk": "target walk",
          "traversal": "traversal", "k_seq": "K-SEQ"}


def rule(name: str) -> str:
  """Returns the name of a verifier in tables, without the kind of draft."""
  return _RULES.get(name) or label(name)


def label(method: str) -> str:
  """Returns the name of a method in tables and legends."""
  return _METHODS[method][0]


def color(method: str) -> str:
  """Returns the colour of a method in all figures."""
  return _METHODS[method][1]


def shades(count: int):
  """Returns colours for curves other than methods, from dark to light."""
  import matplotlib  # pylint: disable=g-import-not-at-top
  return matplotlib.colormaps["viridis"]([
      0.9 * i / max(count - 1, 1) for i in range(count)])


def panels(rows: int = 1, columns: int = 1, *, width: float = 4.0,
           height: float = 3.2, **kwargs: Any):
  """Creates a figure with a grid of panels.

  Args:
    rows: number of rows of panels.
    columns: number of columns of panels.
    width: width of a panel in inches.
    height: height of a panel in inches.
    **kwargs: keyword arguments of `pyplot.subplots`.

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
  """Puts ticks at the measured values on a logarithmic x-axis.

  The axis extends beyond the values by a factor of sqrt(2) on both sides. So a
  single value is in the middle.
  """
  values = sorted(set(values))
  axes.set_xscale("log", base=2)
  axes.set_xlim(values[0] / 2**0.5, values[-1] * 2**0.5)
  axes.set_xticks(values, [f"{v:g}" for v in values])
  axes.minorticks_off()


def apart(curve: Any, place: int, count: int) -> None:
  """Shifts a curve sideways, so that curves with equal x do not overlap.

  The shift has a fixed size on paper, so it does not depend on the range of x.

  Args:
    curve: result of `plot` or `errorbar`.
    place: index of the curve in its panel, from 0.
    count: number of curves in the panel.
  """
  from matplotlib import transforms  # pylint: disable=g-import-not-at-top
  parts = curve if isinstance(curve, list) else curve.get_children()
  for part in parts:  # after plotting, so that axis limits ignore the shift
    part.set_transform(transforms.offset_copy(
        part.get_transform(), part.figure,
        x=_APART * (place - (count - 1) / 2), units="points"))


def errors(rows: list[dict[str, Any]], name: str):
  """Returns the error bars `[2, rows]` of a column, or None.

  Args:
    rows: rows of a table with `analysis.Estimate`s.
    name: name of the column. Columns without an interval, such as medians, have
      no error bars.
  """
  if f"{name}_low" not in rows[0]:
    return None
  found = np.array([[r[name], r[f"{name}_low"], r[f"{name}_high"]]
                    for r in rows], np.float64)
  return np.stack([found[:, 0] - found[:, 1], found[:, 2] - found[:, 0]])


def save(figure: Any, path: pathlib.Path, title: str | None = None) -> None:
  """Writes a figure with one legend for all panels, to the right of them.

  Also writes a PDF with the same name to the same directory. If there are
  several processes, only the first one writes.
  """
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
  if processes.is_first():
    figure.savefig(path, dpi=110)
    figure.savefig(path.with_suffix(".pdf"), metadata={"CreationDate": None})
  plt.close(figure)
