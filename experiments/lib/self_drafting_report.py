"""Tables and plot of self_drafting_study.py.

`rows` are the study's figures, `paired` its gains on shared drafts and
`sources` what was drafted with.
"""

import numpy as np

_SHOWN = 6  # positions of the table of acceptance, guesses of that of accuracy


def print_tables(rows, paired, sources):
  """Tokens a round, paired gains, and what the heads know."""
  width = max(len(r["drafter"]) for r in rows)
  print(f"{'T':>3s} {'drafter':{width}s} {'verifier':19s} "
        f"{'tokens a round':>15s} {'speed-up':>8s} {'draft/step':>10s} "
        f"{'added':>9s}  accepted to position 1, 2, ...")
  for r in rows:
    label = r["verifier"] + ("" if r["lossless"] else " (LOSSY)")
    print(f"{r['temperature']:3g} {r['drafter']:{width}s} {label:19s} "
          f"{r['block_efficiency']:7.3f} ± {r['stderr']:.3f} "
          f"{r['speedup']:7.2f}x {r['draft_over_step']:10.2f} "
          f"{r['added_parameters']:9,d}  "
          + " ".join(f"{x:.2f}" for x in r["survival"][:_SHOWN]))
  print("± is one standard error over prompts above, 95 % below")
  for p in paired:
    print(f"temperature {p['temperature']:g}, {p['drafter']}: {p['verifier']} "
          f"over {p['over']} on the same drafts {100 * p['gain']:+.1f} ± "
          f"{100 * p['interval']:.1f} %")
  print("\nhow often guess 1, 2, ... of a head is what the target writes, "
        "greedily")
  for source in sources:
    if source.training:
      print(f"{source.name}: {source.training['method']}, "
            f"{source.training['tokens'] / 1e6:.1f}M tokens in "
            f"{source.training['minutes']:.0f} minutes")
    if source.accuracy is not None:
      for k, row in enumerate(source.accuracy, 1):
        print(f"{source.name:20s} head {k}: "
              + " ".join(f"{x:.3f}" for x in row[:_SHOWN]))


def plot(rows, sources, path):
  """Tokens a round, acceptance by position and learning curves."""
  import matplotlib  # pylint: disable=g-import-not-at-top
  matplotlib.use("Agg")
  import matplotlib.pyplot as plt  # pylint: disable=g-import-not-at-top
  temperatures = list(dict.fromkeys(r["temperature"] for r in rows))
  columns = 2 + len(temperatures)
  figure, grid = plt.subplots(
      1, columns, figsize=(5 * columns, 2 + len(rows) / len(temperatures) / 3))
  for axes, temperature in zip(grid, temperatures):
    mine = [r for r in rows if r["temperature"] == temperature][::-1]
    axes.barh([f"{r['drafter']}\n{r['verifier']}"
               + ("" if r["lossless"] else " (LOSSY)") for r in mine],
              [r["block_efficiency"] for r in mine],
              xerr=[r["stderr"] for r in mine])
    axes.set(title=f"temperature {temperature:g}", xlabel="tokens a round",
             xlim=(1, None))
    axes.tick_params(axis="y", labelsize=6)
    axes.margins(y=0.01)
  for axes in grid[-2:]:
    axes.set_prop_cycle(color=plt.get_cmap("tab20").colors)
  trained = {draft for source in sources if not source.first_rule_only
             for draft in source.drafts}
  for r in rows:
    if (r["temperature"] == temperatures[0] and r["drafter"] in trained
        and r["survival"]):
      grid[-2].plot(range(1, len(r["survival"]) + 1), r["survival"],
                    marker="o", label=r["drafter"])
  grid[-2].set(title=f"accepted, temperature {temperatures[0]:g}",
               xlabel="position", ylim=(0, 1))
  for source in sources:
    if source.training:
      tokens, tokens_a_round = zip(*source.training["curve"])
      grid[-1].plot(np.array(tokens) / 1e6, tokens_a_round, marker="o",
                    label=source.name)
  grid[-1].set(title="training: likeliest chain on held-out rows",
               xlabel="million tokens", ylabel="tokens a round")
  for axes in grid[-2:]:
    axes.legend(fontsize=6)
  figure.tight_layout()
  figure.savefig(path, dpi=100)
