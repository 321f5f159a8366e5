"""Writes two disjoint training sets for `online_study.py`: code and prose.

  python experiments/runs/online_texts.py DIRECTORY

`code.jsonl` contains the modules of the running Python's standard library
without comments and docstrings. `prose.txt` contains the help topics of this
Python. The sets are disjoint, so a drafter trained on code has not seen the
prose.
"""

import ast
import io
import json
import pathlib
import pydoc_data.topics
import sys
import tokenize

from specjax.data import corpora


def without_prose(source: str) -> str:
  """Returns a module without comments, docstrings and empty lines.

  Raises:
    SyntaxError, ValueError: the running Python cannot parse the source.
    tokenize.TokenError: the source ends within a statement.
  """
  lines = source.split("\n")  # str.splitlines splits at form feeds
  for node in ast.walk(ast.parse(source)):
    match getattr(node, "body", None):
      case [ast.Expr(value=ast.Constant(value=str())) as first, *_]:
        for i in range(first.lineno - 1, first.end_lineno):
          lines[i] = ""
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    if token.type == tokenize.COMMENT:
      row, column = token.start
      lines[row - 1] = lines[row - 1][:column].rstrip()
  return "".join(line + "\n" for line in lines if line.strip())


def main(directory: str):
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  count = 0
  with open(directory / "code.jsonl", "w", encoding="utf-8") as f:
    for document in corpora.stdlib_documents(include_tests=False):
      try:
        text = without_prose(document.text)
      except (SyntaxError, ValueError, tokenize.TokenError):
        continue
      if document.name != "pydoc_data/topics.py" and text.strip():
        f.write(json.dumps({"text": text}) + "\n")
        count += 1
  topics = sorted(pydoc_data.topics.topics.items())
  (directory / "prose.txt").write_text(
      "\n".join(text for _, text in topics), "utf-8")
  print(f"{count} modules, {len(topics)} topics", file=sys.stderr)


if __name__ == "__main__":
  main(*sys.argv[1:])
