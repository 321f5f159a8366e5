"""Two topics for `online_study.py`, and a text that knows only the first one.

  python experiments/runs/online_texts.py DIRECTORY

writes `code.jsonl`, the running Python's modules without their comments and
docstrings, and `prose.txt`, the topics of its `help`. A drafter that is trained
on the one has not read the other.
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
  """The module without comments, docstrings and the lines that they leave.

  Raises:
    SyntaxError, ValueError: it is no module of this Python.
    tokenize.TokenError: nor does it end where it should.
  """
  lines = source.split("\n")  # as Python counts them: not at a form feed
  for node in ast.walk(ast.parse(source)):
    body = getattr(node, "body", None)
    first = body[0] if isinstance(body, list) and body else None
    if (isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)):
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
