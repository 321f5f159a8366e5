"""Tables of text cells as Markdown and as LaTeX.

A table is a list of rows `{column: text}` with the same columns in all rows.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from specjax import analysis

Table = Sequence[Mapping[str, str]]

_NOTHING = ("", "-")  # cells of unmeasured values
_ESCAPED = {**{x: rf"\{x}" for x in "&%$#_{}"}, "\\": r"\textbackslash{}",
            "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
            "<": r"\textless{}", ">": r"\textgreater{}"}


def shown(row: Mapping[str, Any], name: str, form: str) -> str:
  """Returns an estimate with its interval as text, or "-" if it is missing.

  Args:
    row: row of a CSV file.
    name: column of the estimate, see `analysis.Estimate.columns`.
    form: format of its numbers.
  """
  if row.get(name) is None:
    return "-"
  return format(
      analysis.Estimate.of_columns(row, name), form).rpartition(" ")[0]


def without_empty(table: Table) -> Table:
  """Returns a table without the columns that have no value in any row."""
  names = [name for name in table[0]
           if any(row[name] not in _NOTHING for row in table)]
  return [{name: row[name] for name in names} for row in table]


def markdown(table: Table) -> str:
  """Returns a table as Markdown."""
  lines = [list(table[0]), ["---"] * len(table[0]), *(
      list(row.values()) for row in table)]
  return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def latex(table: Table, caption: str) -> str:
  """Returns a table as LaTeX, which needs the package booktabs.

  A table of more than seven columns is as wide as the page ("table*").

  >>> print(latex([{"rule": "top_2", "gain": "+5%"}], "Gain"), end="")
  \\begin{table}
    \\caption{Gain}
    \\centering
    \\begin{tabular}{ll}
      \\toprule
      rule & gain \\\\
      \\midrule
      top\\_2 & +5\\% \\\\
      \\bottomrule
    \\end{tabular}
  \\end{table}
  """
  line = lambda cells: f"    {' & '.join(map(_escaped, cells))} \\\\\n"
  place = "table*" if len(table[0]) > 7 else "table"
  return (f"\\begin{{{place}}}\n  \\caption{{{_escaped(caption)}}}\n"
          f"  \\centering\n  \\begin{{tabular}}{{{'l' * len(table[0])}}}\n"
          f"    \\toprule\n{line(table[0])}    \\midrule\n"
          + "".join(line(row.values()) for row in table)
          + "    \\bottomrule\n  \\end{tabular}\n" + f"\\end{{{place}}}\n")


def _escaped(text: str) -> str:
  return "".join(_ESCAPED.get(x, x) for x in text)
