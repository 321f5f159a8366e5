"""Writes the tables and numbers of the documents from the committed results.

  python docs/tables.py

A table is between `<!-- table: ... -->` and `<!-- /table -->`, a number between
`<!-- value: ... -->` and `<!-- /value -->`. The comment names a file in
experiments/results/: a CSV, a Markdown table that a script printed, or
`file.json#a/b` for the list or dictionary at `b` in `a`. The columns of JSON
rows are paths (`c/0`); the rows of a dictionary have the column `key`. Options
follow as `key="..."`:

  where: `column=value` pairs; `a|b` allows several values and their order.
  rows: columns of the CSV that name a row, as `column` or `column:title`.
  columns: column of the CSV whose values become columns, as `column:{} nodes`.
  cells: numbers to show, as `column:format` or `column:format:title`. An
    interval is added if the CSV has `column_low` and `column_high` and the
    format does not end in `!`.
  sort: column of the CSV by which rows are sorted, largest first.
  turn: any text; rows and columns of the table change places.
"""

import csv
import json
import pathlib
import re
import shlex
import sys

_ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(_ROOT / "experiments"))

from lib.figures import style  # noqa: E402

_RESULTS = _ROOT / "experiments/results"
_TABLE = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- /table -->)", re.DOTALL)
_VALUE = re.compile(r"(<!-- value: ([^>]*?) -->)[^<]*(<!-- /value -->)")
_NAMES = {"method": style.label, "verifier": style.rule, "over": style.rule,
          "key": style.rule}
_WORDS = {
    "jensen_shannon": "Jensen-Shannon", "total_variation": "total variation",
    "forward_kl": "forward KL", "lk_alpha": "LK (alpha)",
    "random": "134M + 19M", "bundled": "bundled pair",
    "mt_bench": "MT-bench", "gsm8k": "GSM8K", "humaneval": "HumanEval",
    "gpt_prompts": "GPT prompts", "webquestions": "WebQuestions",
    "piqa": "PIQA",
}


def documents():
  """Returns the paths of all documents that may have tables."""
  return [_ROOT / "README.md", *sorted(
      path for path in (_ROOT / "docs").rglob("*.md")
      if "_build" not in path.parts)]


def _flat(value, path=""):
  """Returns {path: number or text} of a JSON value."""
  if isinstance(value, list):
    value = dict(enumerate(value))
  if not isinstance(value, dict):
    return {path: str(value)}
  return {name: leaf for key, part in value.items() for name, leaf in
          _flat(part, f"{path}/{key}" if path else str(key)).items()}


def read(name):
  """Returns the rows of a file in experiments/results/."""
  name, _, path = name.partition("#")
  with open(_RESULTS / name, newline="", encoding="utf-8") as file:
    if name.endswith(".csv"):
      return list(csv.DictReader(file))
    if name.endswith(".md"):
      return _markdown_rows(file)
    value = json.load(file)
  for key in filter(None, path.split("/")):
    value = value[key]
  if isinstance(value, list):
    return [_flat(row) for row in value]
  return ([{"key": key, **_flat(row)} for key, row in value.items()]
          if path else [_flat(value)])


def _markdown_rows(file):
  """Returns the rows of the table in a Markdown file."""
  head, _, *rows = ([cell.strip() for cell in line.strip(" |\n").split("|")]
                    for line in file if line.startswith("|"))
  return [dict(zip(head, row, strict=True)) for row in rows]


def _options(spec):
  """Returns the file name and the options of a comment."""
  name, *parts = shlex.split(spec)
  return name, dict(part.split("=", 1) for part in parts)


def _selected(rows, where):
  """Returns the rows with the wanted values, in the order of the values."""
  for part in reversed(shlex.split(where)):
    column, values = part.split("=", 1)
    order = values.split("|")
    rows = sorted((row for row in rows if row[column] in order),
                  key=lambda row: order.index(row[column]))
  return rows


def _fields(text, count):
  """Splits `a:b:c, ...` into tuples, of which missing parts are empty."""
  for part in re.split(r",\s+", text):
    yield (part.split(":") + [""] * count)[:count]


def _word(column, text):
  """Returns the name of a value in tables."""
  name = _NAMES.get(column, lambda text: text)
  word = _WORDS[text] if text in _WORDS else name(text)
  return word.replace("|", "\\|")


def _number(row, column, form):
  """Returns one formatted number, with its interval if the CSV has one."""
  if row[column] == "":
    return ""
  bare = form.removesuffix("!")
  text = format(float(row[column]), bare)
  if bare == form and f"{column}_low" in row:
    low, high = (format(float(row[column + end]), bare)
                 for end in ("_low", "_high"))
    text += f" [{low}, {high}]"
  return text


def table(spec):
  """Returns the Markdown table of a comment."""
  name, options = _options(spec)
  rows = _selected(read(name), options.get("where", ""))
  names = list(_fields(options["rows"], 2))
  cells = list(_fields(options["cells"], 3)) if "cells" in options else []
  pivot, title = next(_fields(options.get("columns", ""), 2))

  def head(row, column, text):
    first = (title or "{}").format(_word(pivot, row[pivot])) if pivot else ""
    return ", ".join(filter(None, [first, text if pivot else text or column]))

  heads = dict.fromkeys(head(row, column, text) for row in rows
                        for column, _, text in cells)
  if "sort" in options:
    rows = sorted(rows, key=lambda row: -float(row[options["sort"]]))
  lines = {}
  for row in rows:
    key = tuple(_word(column, row[column]) for column, _ in names)
    lines.setdefault(key, {})
    for column, form, text in cells:
      lines[key][head(row, column, text)] = _number(row, column, form)
  table_rows = [
      [title or column for column, title in names] + list(heads),
      *([*key, *(line.get(head, "") for head in heads)]
        for key, line in lines.items())]
  if "turn" in options:
    table_rows = list(zip(*table_rows))
  table_rows.insert(1, ["---"] * len(table_rows[0]))
  return "".join(f"| {' | '.join(row)} |\n" for row in table_rows)


def value(spec):
  """Returns the number of a comment."""
  name, options = _options(spec)
  [row] = _selected(read(name), options.get("where", ""))
  [(column, form, _)] = _fields(options["cells"], 3)
  return _number(row, column, form)


def rendered(text):
  """Returns a document with its tables and numbers written again."""
  text = _TABLE.sub(lambda m: m[1] + table(m[2]) + m[3], text)
  return _VALUE.sub(lambda m: m[1] + value(m[2]) + m[3], text)


if __name__ == "__main__":
  for path in documents():
    before = path.read_text("utf-8")
    after = rendered(before)
    if after != before:
      path.write_text(after, "utf-8")
      print(f"wrote {path.relative_to(_ROOT)}")
