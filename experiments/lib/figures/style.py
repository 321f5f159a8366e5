"""Names and looks of methods, and layout of figures, in all studies.

A method has one name in all tables, and one colour, marker and dash pattern in
all figures. Other curves, such as training runs, have `looks`. Curves are
distinguishable in grey, because neighbours differ in marker and dashes.

--figure_style=paper makes figures for one column of a paper: 3.3 inches wide,
panels below each other, a legend above each panel, no title, and 300 dpi.
"""

from collections.abc import Sequence
import pathlib
import textwrap
from typing import Any

from absl import flags
import numpy as np

from specjax.utils import processes

MOST = 8  # maximum number of curves in a readable panel

_APART = 3.0  # sideways shift between curves with equal x, in points
_LEGEND = 2.4  # width of the legend in inches
_COLUMN = 3.3  # width of a paper's column in inches
_LINE = 0.13  # height in inches of a line of a legend in a paper
_SMALL = 3.0  # panels below this width in inches stay side by side in a paper
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#000000",
           "#56b4e9", "#8c564b")
_MARKERS = "os^DvP<X"
_DASHES = "-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1))
# Name of each method in tables, and its colour, marker and dashes in figures,
# by the method's name in flags and files.
_METHODS = {
    "token": ("token", "#0072b2", "o", "-"),
    "block": ("block", "#d55e00", "s", "--"),
    "greedy_block": ("greedy block", "#009e73", "^", "-."),
    "coupled": ("coupled", "#a6761d", "<", (0, (3, 1, 1, 1))),
    "chain_token": ("chain, token", "#0072b2", "o", "-"),
    "chain_block": ("chain, block", "#d55e00", "s", "--"),
    "specinfer": ("i.i.d., recursive (SpecInfer)", "#cc79a7", "v", ":"),
    "iid_traversal": ("i.i.d., traversal", "#aa3377", "P", "-."),
    "k_seq": ("i.i.d., K-SEQ", "#8c564b", "X", (0, (5, 1))),
    "without_replacement": ("without replacement, recursive", "#56b4e9", "<",
                            ":"),
    "traversal": ("without replacement, traversal", "#117733", "D", "-"),
    "hybrid": ("hybrid, recursive", "#e69f00", ">", "--"),
    "top_k": ("top-k, target walk", "#7f7f7f", "h", "-."),
    "typical": ("typical (LOSSY)", "#999933", "p", ":"),
    "top_2": ("top 2 (LOSSY)", "#332288", "d", (0, (5, 1))),
    "autoregressive": ("autoregressive", "#000000", "None", "-"),
    "dynamic_program": ("dynamic program's choice", "#000000", "*", "None"),
}

_SHIPPED = len(_METHODS)
# Colours of rules and methods that are not part of specjax, in their order.
_OTHERS = ("#005f60", "#ff00aa", "#6b4c00", "#7a7aff", "#00b050")

# Names of the rules on trees, for tables that name the tree in another column.
_RULES = {"recursive": "recursive", "target_walk": "target walk",
          "traversal": "traversal", "k_seq": "K-SEQ"}


def rule(name: str) -> str:
  """Returns the name of a verifier in tables, without the kind of draft."""
  return _RULES.get(name) or label(name)


def label(method: str) -> str:
  """Returns the name of a method in tables and legends.

  The name of a method that is not part of specjax is `method`.
  """
  return _METHODS[method][0] if method in _METHODS else method


def color(method: str) -> str:
  """Returns the colour of a method in all figures of a script."""
  return look(method)["color"]


def look(method: str) -> dict[str, Any]:
  """Returns arguments of `Axes.plot`: colour, marker and dashes of a method."""
  if method not in _METHODS:
    number = len(_METHODS) - _SHIPPED
    _METHODS[method] = (method, *(
        kinds[number % len(kinds)] for kinds in (_OTHERS, _MARKERS, _DASHES)))
  return dict(zip(("color", "marker", "linestyle"), _METHODS[method][1:]))


def looks(count: int) -> list[dict[str, Any]]:
  """Returns arguments of `Axes.plot` for curves other than methods."""
  return [{"color": _COLORS[i % MOST], "marker": _MARKERS[i % MOST],
           "linestyle": _DASHES[(i + i // MOST) % len(_DASHES)]}
          for i in range(count)]


def line(axes: Any, x: Sequence[float], y: Sequence[float], **kwargs: Any
         ) -> None:
  """Plots a curve, without markers if many of them would hide it."""
  axes.plot(x, y, markersize=4, **kwargs | (
      {} if len(x) < 20 else {"marker": None}))


def is_paper() -> bool:
  """Returns True with --figure_style=paper."""
  return "figure_style" in flags.FLAGS and (
      flags.FLAGS["figure_style"].value == "paper")


def panels(rows: int = 1, columns: int = 1, *, width: float = 4.0,
           height: float = 3.2, **kwargs: Any):
  """Creates a figure with a grid of panels.

  Args:
    rows: number of rows of panels.
    columns: number of columns of panels.
    width: width of a panel in inches, on a screen. In a paper, panels are below
      each other if they are wide and at most four. Otherwise two are side by
      side.
    height: height of a panel in inches, on a screen.
    **kwargs: keyword arguments of `pyplot.subplots`.

  Returns:
    `(figure, axes [rows, columns])`.
  """
  import matplotlib  # pylint: disable=g-import-not-at-top
  matplotlib.use("Agg")
  import matplotlib.pyplot as plt  # pylint: disable=g-import-not-at-top
  if not is_paper():
    return plt.subplots(
        rows, columns, squeeze=False, layout="constrained",
        figsize=(width * columns + _LEGEND, height * rows + 0.3), **kwargs)
  plt.rcParams.update({"font.size": 7, "lines.linewidth": 1,
                       "lines.markersize": 4, "pdf.fonttype": 42})
  count = rows * columns
  side = 2 if count > 1 and (width < _SMALL or count > 4) else 1
  lines = -(-count // side)
  figure, axes = plt.subplots(  # every panel has tick labels on its x-axis
      lines, side, squeeze=False, layout="constrained",
      figsize=(_COLUMN, 0.7 * height * lines), **kwargs | {"sharex": False})
  for unused in axes.flat[count:]:
    unused.set_visible(False)
  return figure, axes.reshape(-1)[:count].reshape(rows, columns)


def whole(axes: Any) -> None:
  """Puts ticks of the x-axis at whole numbers, such as draft positions."""
  axes.xaxis.get_major_locator().set_params(integer=True)


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
  """Writes a figure as PNG, and as PDF with the same name.

  On a screen, all panels share one legend on their right. In a paper, every
  panel has a legend above it, whose heading is the title of the panel, and
  `title` is left out. If there are several processes, only the first one
  writes.
  """
  import matplotlib.pyplot as plt  # pylint: disable=g-import-not-at-top
  shown = [axes for axes in figure.axes if axes.get_visible()]
  legends = []  # {label: handle} of every panel
  for axes in shown:
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    legends.append(dict(zip(*reversed(axes.get_legend_handles_labels()))))
  if is_paper():
    grid = shown[0].get_subplotspec().get_gridspec()
    legends = [{textwrap.fill(label, 44 // grid.ncols): handle
                for label, handle in legend.items()} for legend in legends]
    for axes, legend in zip(shown, legends):
      _complete(axes, shown, legend)
    lines = max(sum(1 + label.count("\n") for label in legend)
                for legend in legends)
    figure.set_figheight(
        figure.get_figheight() + _LINE * grid.nrows * lines)
  else:
    found = {label: handle for legend in reversed(legends)
             for label, handle in legend.items()}
    names = list(dict.fromkeys(x for legend in legends for x in legend))
    figure.legend([found[name] for name in names], names,
                  loc="outside right upper", fontsize=8)
    if title:
      room = figure.get_figwidth() - _LEGEND
      figure.suptitle(textwrap.fill(title, int(13 * room)), fontsize=10, x=0.01,
                      horizontalalignment="left")
  if processes.is_first():
    figure.savefig(path, dpi=300 if is_paper() else 110)
    figure.savefig(path.with_suffix(".pdf"), metadata={"CreationDate": None})
  plt.close(figure)


def _complete(axes: Any, panels: Sequence[Any], legend: dict[str, Any]) -> None:
  """Adds missing axis labels and the legend to a panel of a paper's figure."""
  from matplotlib import ticker  # pylint: disable=g-import-not-at-top
  # On a screen, only the outer panels of a grid have axis labels.
  label = lambda get: next(filter(None, map(get, (axes, *panels))), "")
  axes.set_xlabel(label(lambda x: x.get_xlabel()))
  axes.tick_params(labelsize=7)
  if isinstance(axes.xaxis.get_major_locator(), ticker.MaxNLocator):
    axes.locator_params(axis="x", nbins=4)  # for narrow panels
  axes.set_ylabel(label(lambda x: x.get_ylabel())
                  if axes.get_subplotspec().is_first_col() else "")
  heading = axes.get_title() if len(panels) > 1 else None
  axes.set_title("")
  if legend:
    axes.legend(
        legend.values(), legend.keys(), title=heading, loc="lower right",
        bbox_to_anchor=(1, 1), fontsize=7, title_fontsize=7, alignment="left",
        frameon=False, borderaxespad=0.2, labelspacing=0.2)
