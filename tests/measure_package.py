"""Measures how easily a reader finds the way through the package.

    python tests/measure_package.py [--trace] [CHECKOUT ...]

prints a Markdown table with one column per checkout (default: this one). All
measures but those of `--trace` parse files and import nothing. `--trace` also
decodes with a tiny model, by the Python that runs this script.
"""

import argparse
import ast
import os
import pathlib
import re
import subprocess
import sys

# Methods, and the pattern of their names in code and prose.
_METHODS = {"Kangaroo": "kangaroo", "K-SEQ": "k-?seq", "Streaming": "streaming",
            "Recycling": "recycling"}
# Decodes once to import and to load, and looks at the second, uncompiled run.
_TRACED = '''
import pathlib, sys
import jax
import specjax as sj
from specjax import testing
root = str(pathlib.Path(sj.__file__).parent)
pair = testing.tiny_pair()
strategy = sj.strategies.block_verification(pair.drafter, gamma=3)
decoder = (strategy.decoder(pair.target) if hasattr(strategy, "decoder")
           else sj.Decoder(target=pair.target, **strategy._asdict()))
params = pair.params if isinstance(pair.params, dict) else vars(pair.params)
state = lambda: decoder.prefill(params, [[1, 2]], jax.random.key(0), limits=9)
decoder.decode_until(params, state())
jax.clear_caches()
files, frames, fresh = set(), [], state()
def visit(frame, event, _):
  code = frame.f_code
  if event != "call" or not code.co_filename.startswith(root):
    return
  callers = []
  while frame := frame.f_back:
    name = frame.f_code.co_filename.removeprefix(root + "/")
    callers += [name] * (name != frame.f_code.co_filename)
  if any(name.startswith("models") for name in callers):
    return
  name = code.co_filename[len(root) + 1:]
  if not name.startswith("models"):
    files.add(name)
  elif code.co_qualname == "Transformer.__call__":
    frames.append(len(callers))
sys.setprofile(visit)
decoder.decode_until(params, fresh)
sys.setprofile(None)
print(len(files), min(frames))
'''


def module_name(root, path):
  """Returns the dotted name of a file below `root`."""
  parts = path.relative_to(root).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_names(node):
  """Yields the dotted names that are imported, except for types alone."""
  if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
    return
  if isinstance(node, ast.ImportFrom) and node.module:
    for alias in node.names:
      yield f"{node.module}.{alias.name}"
  if isinstance(node, ast.Import):
    for alias in node.names:
      yield alias.name
  for child in ast.iter_child_nodes(node):
    yield from _imported_names(child)


def _declares(node):
  """True if a class declares `autoregressive`, also in its `provides`."""
  return any(
      _members(ast.Module([x], [])) & {"autoregressive", "provides"}
      and re.search("autoregressive['=(]", ast.unparse(x)) for x in node.body)


def import_graph(root):
  """Returns `{module: modules that it imports}` of the package in `root`."""
  files = {module_name(root, path): path
           for path in (root / "specjax").rglob("*.py")}
  graph = {}
  for name, path in files.items():
    imported = _imported_names(ast.parse(path.read_text("utf-8")))
    graph[name] = {
        dotted if dotted in files else dotted.rpartition(".")[0]
        for dotted in imported if dotted.startswith("specjax.")} - {name}
  return graph


def closure(graph, *modules, parents=True):
  """Returns the modules that importing `modules` runs, except `specjax`."""
  reached, left = set(), [*modules]
  while left:
    name = left.pop()
    if name not in reached and name != "specjax":
      reached.add(name)
      left += [*graph[name], *[name.rpartition(".")[0]] * parents]
  return reached


def on_a_cycle(graph):
  """Returns the modules that import themselves through others."""
  return [name for name, imported in graph.items()
          if name in closure(graph, *imported, parents=False)]


def complexity(function):
  """Returns the cyclomatic complexity of a function, with its inner ones.

  Boolean operators and comprehensions count as branches; ruff's C901 leaves
  them out.
  """
  branches = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler,
              ast.match_case)
  return 1 + sum(
      len(node.values) - 1 if isinstance(node, ast.BoolOp) else
      1 + len(node.ifs) if isinstance(node, ast.comprehension) else
      isinstance(node, branches) for node in ast.walk(function))


def _nodes(trees, *kinds):
  """Yields all nodes of some kinds."""
  for tree in trees:
    yield from (x for x in ast.walk(tree) if isinstance(x, kinds))


def component_lookups(trees):
  """Returns the members that `getattr` and `hasattr` look for by name."""
  calls = (x for x in _nodes(trees, ast.Call) if isinstance(x.func, ast.Name))
  return [x.args[1].value for x in calls if x.func.id in ("getattr", "hasattr")
          and isinstance(x.args[1], ast.Constant)
          and not x.args[1].value.startswith("__")]


def _functions(node, private=False):
  """Yields functions and methods, and whether a user does not call them."""
  for child in ast.iter_child_nodes(node):
    name = getattr(child, "name", "") or ""
    hidden = private or name.startswith("_") and not name.endswith("__")
    if isinstance(child, ast.ClassDef):
      yield from _functions(child, hidden)
    elif isinstance(child, ast.FunctionDef):
      yield child, hidden


def _arguments(function):
  """Returns the annotations of all arguments but `self` and `cls`."""
  a = function.args
  every = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
  return [x.annotation for x in every if x and x.arg not in ("self", "cls")]


def _members(node):
  """Returns the names of the attributes and methods that a class defines."""
  return {name for x in node.body for name in (
      [x.name] if isinstance(x, ast.FunctionDef) else
      [x.target.id] if isinstance(x, ast.AnnAssign) else
      [y.id for t in x.targets for y in ast.walk(t) if isinstance(y, ast.Name)]
      if isinstance(x, ast.Assign) else [])}


def _share(part, of):
  return f"{100 * part / of:.1f} %" if of else "-"


def _annotations(trees, private=None):
  """Returns the annotations, or `None`, of arguments, of one kind of functions.
  """
  return [annotation for tree in trees for function, hidden in _functions(tree)
          if private in (None, hidden) for annotation in _arguments(function)]


def _share_annotated(trees, private=None):
  annotations = _annotations(trees, private)
  return _share(sum(x is not None for x in annotations), len(annotations))


def _share_of_any(trees):
  annotations = [ast.unparse(x) for x in _annotations(trees) if x]
  return _share(sum(re.search(r"\bAny\b", x) is not None for x in annotations),
                len(annotations))


def _validation_lines(trees):
  """Returns the number of lines of conditions that only raise."""
  return sum(
      node.end_lineno - node.lineno + 1 for node in _nodes(trees, ast.If)
      if not node.orelse and all(isinstance(x, ast.Raise) for x in node.body))


def drafter_loaders(trees):
  """Returns the public functions from a drafter's name to the drafter.

  An argument is the name of a drafter, or names, and the result contains a
  strategy, candidates, heads or draft models. A function that changes a given
  drafter, and has its name for messages, is not one.
  """
  names = ("name", "names", "drafters")
  found = []
  for tree in trees:
    for node in tree.body:
      if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
        taken = {x.arg: ast.unparse(x.annotation) for x in (
            *node.args.args, *node.args.kwonlyargs) if x.annotation}
        named = any(re.search(r"\bstr\b", taken.get(x, "")) for x in names)
        changes = re.search("Strategy|Loaded", " ".join(taken.values()))
        if named and not changes and node.returns and re.search(
            r"Strategy|Loaded|Candidate|SelfDrafter|TrainedHeads|"
            r"\[str, Pretrained", ast.unparse(node.returns)):
          found.append(node.name)
  return found


def _trace(root):
  """Returns the files and frames of one round, as text."""
  done = subprocess.run(
      [sys.executable, "-c", _TRACED], cwd=root, text=True,
      capture_output=True, env={
          **os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"})
  if done.returncode:
    sys.exit(f"{root} does not decode:\n{done.stderr[-2000:]}")
  return done.stdout.split()


def measure(root, trace=False):
  """Returns `{measure: value}` of a checkout."""
  texts = {path.relative_to(root).as_posix(): path.read_text("utf-8")
           for folder in ("specjax", "experiments", "tests")
           for path in sorted((root / folder).rglob("*.py"))}
  trees = {name: ast.parse(text) for name, text in texts.items()}
  below = lambda *folders: [
      tree for name, tree in trees.items() if name.startswith(folders)]
  lines = lambda folder: sum(text.count("\n") for name, text in texts.items()
                             if name.startswith(folder))
  library, scripts = below("specjax/"), below("experiments/")
  graph = import_graph(root)
  decoder = next(name for name in graph if name.endswith(".decoder"))
  methods = ("specjax/methods/" if below("specjax/methods/") else
             "specjax/drafters/")
  drafters = sum(any(function.name == "propose" and not private
                     for function, private in _functions(tree))
                 for tree in below(methods))
  classes = {x.name: _members(x) for x in _nodes(library, ast.ClassDef)}
  declaring = [_members(node) for node in _nodes(below(methods), ast.ClassDef)]
  table = {
      "files in the import closure of `specjax.exact`": len(
          closure(graph, "specjax.exact")),
      "files in the import closure of the decoder": len(
          closure(graph, decoder)),
      "modules on an import cycle": len(on_a_cycle(graph)),
      "modules at the package root": sum(
          name.count("/") == 1 for name in texts if name.startswith("specjax")),
      "packages below the root": sum(
          name.startswith("specjax/") and name.count("/") > 1
          and name.endswith("/__init__.py") for name in texts),
      "files of methods; without a public drafter": (
          f"{len(below(methods))}; {len(below(methods)) - drafters}"),
      "members of `Drafter`": len(classes["Drafter"]),
      "classes of methods with `propose`; that declare `autoregressive`": (
          f"{sum('propose' in x for x in declaring)}; "
          f"{sum(map(_declares, _nodes(below(methods), ast.ClassDef)))}")}
  for method, pattern in _METHODS.items():
    mention = [name for name, text in texts.items()
               if re.search(pattern, name + text, re.I)]
    inside = sum(name.startswith("specjax/") for name in mention)
    table[f"files that mention {method}: library, all"] = (
        f"{inside}, {len(mention)}")
  if trace:
    table["files in a round, without the network and its calls"], table[
        "frames of specjax when a round calls the network"] = _trace(root)
  lookups = component_lookups(
      tree for name, tree in trees.items() if name.startswith("specjax/")
      and not name.startswith(("specjax/interfaces", "specjax/contract")))
  public = next(node.value for node in trees["specjax/__init__.py"].body
                if isinstance(node, ast.Assign)
                and ast.unparse(node.targets[0]) == "__all__")
  hard = lambda trees: sum(
      complexity(node) > 10 for node in _nodes(trees, ast.FunctionDef))
  examples = lambda trees: sum(">>> " in (ast.get_docstring(x) or "") for x in (
      _nodes(trees, ast.Module, ast.ClassDef, ast.FunctionDef)))
  return table | {
      "`getattr` and `hasattr` outside interfaces; names": (
          f"{len(lookups)}; {len({*lookups})}"),
      "uses of `jax._src`": sum(
          text.count("jax._src") for name, text in texts.items()
          if name.startswith("specjax/")),
      "top-level names": len(ast.literal_eval(public)),
      "annotated arguments: public": _share_annotated(library, private=False),
      "annotated arguments: private": _share_annotated(library, private=True),
      "annotated arguments: experiments": _share_annotated(scripts),
      "annotations with `Any`": _share_of_any(library),
      "chex assertions": sum(
          ast.unparse(x).startswith("chex.assert_")
          for x in _nodes(library, ast.Attribute)),
      "docstrings with an example: verifiers, methods, all": (
          f"{examples(below('specjax/verifiers/'))}, "
          f"{examples(below(methods))}, {examples(library)}"),
      "functions of complexity above 10: library, experiments": (
          f"{hard(library)}, {hard(scripts)}"),
      "ways to load a drafter in experiments": len(drafter_loaders(scripts)),
      "lines that only validate": _share(
          _validation_lines(library), lines("specjax/")),
      "lines: specjax, experiments, tests": ", ".join(
          f"{lines(name):,}" for name in ("specjax", "experiments", "tests")),
      "lines of README": (root / "README.md").read_text("utf-8").count("\n")}


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("checkouts", nargs="*", metavar="CHECKOUT",
                      type=pathlib.Path)
  parser.add_argument("--trace", action="store_true",
                      help="also decode, to count the files of a round")
  arguments = parser.parse_args()
  roots = arguments.checkouts or [pathlib.Path(__file__).parents[1]]
  columns = [measure(root.resolve(), arguments.trace) for root in roots]
  print(f"| measure | {' | '.join(root.resolve().name for root in roots)} |")
  print("|---" * (1 + len(roots)) + "|")
  for row in columns[-1]:
    print(f"| {row} | {' | '.join(str(x[row]) for x in columns)} |")


if __name__ == "__main__":
  main()
