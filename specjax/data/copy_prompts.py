"""Prompts with answers that copy much of the prompt, written for specjax.

Twelve prompts rename a variable in a function, twelve summarise a short text
and quote its key sentence, and twelve ask a question about a text and request a
quote. The answers are easy to draft, because they are mostly copies. The code
and the texts are in `copy_prompts.json`.
"""

import json
import pathlib

_DATA = json.loads(
    pathlib.Path(__file__).with_suffix(".json").read_text("utf-8"))

RENAME = tuple(
    "Rename the variable `{}` to `{}` in this code and change nothing else:"
    "\n\n```python\n{}```".format(x["old"], x["new"], "\n".join(x["code"]))
    for x in _DATA["renames"])
SUMMARISE = tuple(
    "Summarise this text in one sentence, and then quote its key sentence "
    f"word for word:\n\n{x['text']}" for x in _DATA["texts"])
QUESTIONS = tuple(
    "Read this text and answer the question below it in one sentence. Then "
    "quote word for word all sentences of the text that say so, and those "
    f"beside them.\n\n{x['text']}\n\n{x['question']}"
    for x in _DATA["texts"])
PROMPTS = RENAME + SUMMARISE
