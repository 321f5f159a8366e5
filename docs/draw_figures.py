"""Draws the figures of the concepts and of the findings into docs/figures/.

  python docs/draw_figures.py

The figures of the findings are drawn from committed CSVs.
"""

import pathlib

import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.patches as patches  # noqa: E402
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import tables  # noqa: E402

import specjax as sj  # noqa: E402

_FIGURES = pathlib.Path(__file__).parent / "figures"
_BLUE, _ORANGE, _GREEN, _RED, _GREY = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#7f7f7f")
_STYLE = {"font.size": 9, "svg.hashsalt": "specjax", "pdf.fonttype": 42,
          "axes.spines.top": False, "axes.spines.right": False,
          "figure.constrained_layout.use": True}


def _save(figure, name):
  for kind, metadata in (("svg", {"Date": None}),
                         ("pdf", {"CreationDate": None})):
    figure.savefig(_FIGURES / f"{name}.{kind}", metadata=metadata)
  plt.close(figure)


def _box(axes, x, y, text, color, width=0.8, filled=True):
  axes.add_patch(patches.FancyBboxPatch(
      (x - width / 2, y - 0.2), width, 0.4, boxstyle="round,pad=0.02",
      facecolor=color if filled else "white", edgecolor=color, alpha=0.9))
  axes.text(x, y, text, ha="center", va="center",
            color="white" if filled else color)


def _arrow(axes, start, end, text="", **kwargs):
  axes.annotate("", end, start, arrowprops={
      "arrowstyle": "->", "color": "black", "shrinkA": 3, "shrinkB": 3,
      **kwargs})
  if text:
    axes.text((start[0] + end[0]) / 2 + 0.08, (start[1] + end[1]) / 2, text,
              va="center")


def draw_round():
  """Draws one round on a chain of four draft tokens."""
  figure, axes = plt.subplots(figsize=(6.4, 3.0))
  axes.set(xlim=(-2.1, 5.6), ylim=(-0.4, 3.5))
  axes.axis("off")
  for y, text in ((3.1, "sequence"), (2.2, "1. drafter"), (1.3, "2. target"),
                  (0.4, "3. verifier")):
    axes.text(-2.0, y, text, va="center", weight="bold")
  tokens = ["a", "tree", "in", "the"]
  _box(axes, 0, 3.1, "root: plant", _GREY, 1.15)
  for i, token in enumerate(tokens):
    x = i + 1.2
    _box(axes, x, 2.2, token, _BLUE)
    _arrow(axes, ((0.4, 2.9) if i == 0 else (x - 0.6, 2.2)), (x - 0.4, 2.2))
  for i in range(5):
    _box(axes, i + 0.2, 1.3, f"p{i}", _ORANGE, 0.6)
  axes.text(5.0, 1.3, "one target call", va="center", color=_ORANGE)
  for i, (token, accepted) in enumerate(zip(tokens, [1, 1, 0, 0])):
    _box(axes, i + 1.2, 0.4, token, _GREEN if accepted else _RED,
         filled=bool(accepted))
  axes.text(1.7, -0.12, "accepted", ha="center", color=_GREEN)
  axes.text(3.7, -0.12, "rejected", ha="center", color=_RED)
  _box(axes, 5.2, 0.4, "on", "black", 0.6)
  axes.text(5.2, -0.12, "next token", ha="center")
  _save(figure, "round")


def draw_enumeration():
  """Draws the enumeration of token verification, V = 2 and gamma = 1."""
  p, q = np.array([0.7, 0.3]), np.array([0.4, 0.6])
  figure, axes = plt.subplots(figsize=(6.4, 3.0))
  axes.set(xlim=(-0.4, 7.4), ylim=(-0.3, 3.4))
  axes.axis("off")
  _box(axes, 0.2, 1.7, "root", _GREY, 0.8)
  total = np.zeros(2)
  for x, (y, name) in enumerate(zip((2.6, 0.8), "ab")):
    draft = sj.Draft.chain(jnp.array(0), jnp.array([x]), jnp.asarray(q)[None])
    law = sj.verifiers.Token().law(draft, jnp.stack([jnp.asarray(p)] * 2))
    stop, after = np.asarray(law.stop), np.asarray(law.next_token)
    _arrow(axes, (0.6, 1.7), (1.5, y))
    axes.text(0.55, (1.7 + y) / 2 + (0.2 if x == 0 else -0.25),
              f"q = {q[x]:.1f}")
    _box(axes, 2.0, y, f"draft {name}", _BLUE, 1.0)
    for shift, probability, color, text in (
        (0.35, stop[1], _GREEN, f"accept: first token is {name}"),
        (-0.35, stop[0], _RED, "reject: first token from residual "
         f"({after[0][0]:.2f}, {after[0][1]:.2f})")):
      _arrow(axes, (2.5, y), (3.3, y + shift), color=color)
      axes.text(3.35, y + shift, f"{probability:.2f}  {text}", va="center",
                color=color)
    total += q[x] * (stop[1] * np.eye(2)[x] + stop[0] * after[0])
  axes.text(0.0, -0.15, "sum over drafts and outcomes: "
            f"({total[0]:.2f}, {total[1]:.2f}) = p, so the rule is lossless "
            "on this pair", weight="bold")
  _save(figure, "enumeration")


def draw_tree():
  """Draws a draft tree and its mask."""
  parents = [-1, 0, 0, 1, 1, 2, 3]
  depths = [0]
  for parent in parents[1:]:
    depths.append(depths[parent] + 1)
  x = [2.0, 1.0, 3.0, 0.4, 1.6, 3.0, 0.4]
  mask = np.eye(len(parents), dtype=bool)
  for node, parent in enumerate(parents):
    if parent >= 0:
      mask[node] |= mask[parent]
  figure, (left, right) = plt.subplots(1, 2, figsize=(6.4, 3.0))
  left.axis("off")
  left.set(title="draft tree, node numbers", xlim=(-0.2, 3.6), ylim=(-3.4, 0.4))
  for node, parent in enumerate(parents):
    if parent >= 0:
      left.plot([x[parent], x[node]], [-depths[parent], -depths[node]],
                color=_GREY, zorder=1)
    left.scatter(x[node], -depths[node], s=330, zorder=2,
                 color=_GREY if node == 0 else _BLUE)
    left.text(x[node], -depths[node], str(node), ha="center", va="center",
              color="white")
  right.imshow(mask, cmap=matplotlib.colors.ListedColormap(["white", _BLUE]))
  right.set(title="mask: row attends to column", xlabel="node", ylabel="node",
            xticks=range(len(parents)), yticks=range(len(parents)))
  right.set_xticks(np.arange(len(parents)) - 0.5, minor=True)
  right.set_yticks(np.arange(len(parents)) - 0.5, minor=True)
  right.grid(which="minor", color="lightgrey")
  right.tick_params(which="minor", length=0)
  for side in ("top", "right"):
    right.spines[side].set_visible(True)
  _save(figure, "tree")


def _rows(name, **where):
  return [row for row in tables.read(name)
          if all(row[key] == value for key, value in where.items())]


def _bars(axes, rows, column, names, colors, scale=1):
  """Draws one horizontal bar with its interval for each row."""
  for i, (row, color) in enumerate(zip(rows, colors)):
    center, low, high = (scale * float(row[column + end])
                         for end in ("", "_low", "_high"))
    axes.barh(-i, center, color=color, height=0.7)
    axes.errorbar(center, -i, xerr=[[center - low], [high - center]],
                  color="black", capsize=2)
  axes.set_yticks([-i for i in range(len(rows))], names)


def draw_sampled_trees():
  """Draws sampled and deterministic trees, at temperature 1."""
  wanted = [("medusa, top-k tree", "target_walk"),
            ("medusa, sampled tree", "traversal"),
            ("eagle3, dynamic tree", "target_walk"),
            ("eagle3, sampled tree", "traversal"),
            ("parallel, best-first tree", "target_walk"),
            ("parallel, sampled tree", "traversal")]
  rows = [_rows("self_drafting/features.csv", temperature="1.0",
                drafter=drafter, verifier=verifier)[0]
          for drafter, verifier in wanted]
  figure, axes = plt.subplots(figsize=(6.4, 2.6))
  _bars(axes, rows, "block_efficiency", [name for name, _ in wanted],
        [_GREY, _ORANGE] * 3)
  axes.set(xlabel="tokens per target call, temperature 1 (95 % interval)")
  _save(figure, "sampled_trees")


def draw_markov():
  """Draws the gain of block over token verification by drafter."""
  rows = sorted(_rows("self_drafting/features_gains.csv", verifier="block"),
                key=lambda row: -float(row["gain"]))
  figure, axes = plt.subplots(figsize=(6.4, 2.2))
  _bars(axes, rows, "gain", [row["drafter"] for row in rows],
        [_ORANGE if "parallel" in row["drafter"] else _GREY for row in rows],
        scale=100)
  axes.set(xlabel="gain of block over token on the same drafts, % "
           "(95 % interval)")
  _save(figure, "markov")


def draw_objectives():
  """Draws the gain of each distillation loss."""
  rows = sorted((row for row in _rows("distillation/distillation.csv")
                 if row["loss"] != "none"),
                key=lambda row: -float(row["block_gain"]))
  names = {"block": "accepted length, block", "token": "accepted length, token"}
  figure, axes = plt.subplots(figsize=(6.4, 2.4))
  _bars(axes, rows, "block_gain", [
      names.get(row["loss"], row["loss"].replace("_", " ")) for row in rows],
        [_ORANGE if row["loss"] in names else _GREY for row in rows], scale=100)
  axes.axvline(0, color="black", linewidth=0.8)
  axes.set(xlabel="gain in tokens per target call, % (95 % interval)")
  _save(figure, "objectives")


def draw_exits():
  """Draws the predicted speed of early exits after a short training."""
  figure, axes = plt.subplots(figsize=(6.4, 2.4))
  for name, label, color, marker in (
      ("plain", "200 plain steps", _GREY, "o"),
      ("layer_skip", "200 steps of LayerSkip", _ORANGE, "s")):
    rows = [row for row in _rows(f"skipping/{name}/skipping.csv")
            if row["part"].startswith("exit")]
    axes.plot([int(row["part"].split()[1]) for row in rows],
              [float(row["speed"]) for row in rows], color=color, marker=marker,
              label=label)
  axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
  axes.set(xlabel="layers of the exit (of 4)", ylabel="predicted speed-up",
           xticks=(1, 2, 3), ylim=(0.6, 1.1))
  axes.legend(frameon=False, loc="lower right")
  _save(figure, "exits")


def draw_hybrid():
  """Draws hybrid trees, chains and trees without replacement."""
  figure, axes = plt.subplots(figsize=(6.4, 2.6))
  for method, label, color, marker, style in (
      ("traversal", "without replacement, traversal", _RED, "o", "-"),
      ("hybrid", "hybrid, recursive", "#17becf", "s", "-"),
      ("chain_block", "chain, block", _ORANGE, "^", "--"),
      ("top_k", "top-k, target walk", _GREY, "v", "--")):
    rows = _rows("trees/trees.csv", method=method, temperature="1.0")
    rows.sort(key=lambda row: int(row["nodes"]))
    axes.plot([int(row["nodes"]) for row in rows],
              [float(row["tokens_per_pass"]) for row in rows], color=color,
              marker=marker, linestyle=style, label=label)
  axes.set(xscale="log", xlabel="nodes of the tree",
           ylabel="tokens per target call")
  axes.set_xticks([4, 8, 16, 32, 64], ["4", "8", "16", "32", "64"])
  axes.minorticks_off()
  axes.legend(frameon=False, loc="upper left", fontsize=8)
  _save(figure, "hybrid")


if __name__ == "__main__":
  with plt.rc_context(_STYLE):
    for draw in (draw_round, draw_enumeration, draw_tree, draw_sampled_trees,
                 draw_markov, draw_objectives, draw_exits, draw_hybrid):
      draw()
