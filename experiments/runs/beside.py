"""What rounds and passes take beside those of another checkout, in one process.

  git worktree add --detach /tmp/before d40d328
  python experiments/runs/beside.py /tmp/before

Processes of one and the same program differ by a third on shared machines, by
where their memory lies and what else runs. Here both versions of the package
are loaded into one process, take turns call by call, and each pair of calls
gives one ratio, here over there. Every figure is made anew some times, with
arrays that lie elsewhere; the table has medians of all pairs, and the least and
the largest median of a time that it was made. Run it while nothing else runs.
"""

import importlib
import pathlib
import statistics
import sys

_HERE = pathlib.Path(__file__).parents[2]
sys.path.append(str(_HERE / "experiments"))
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from lib.timing import passes  # noqa: E402
from lib.timing import Timed  # noqa: E402

MADE, PAIRS, STEPS = 5, 15, 16
USED = 64


def package(root):
  """The `specjax` of a checkout, which no other import finds."""
  for name in [n for n in sys.modules if n.split(".")[0] == "specjax"]:
    del sys.modules[name]
  sys.path.insert(0, str(root))
  try:
    found = importlib.import_module("specjax")
  finally:
    sys.path.remove(str(root))
  if pathlib.Path(root).resolve() not in pathlib.Path(found.__file__).parents:
    raise ValueError(f"{root} holds no package specjax; give a checkout's root")
  return found


def one_pass(sj, pair, tokens, batch=1, used=USED, capacity=256):
  """Repeated passes of the target over a chain, of which nothing is kept."""
  del sj
  params = jax.tree.map(jnp.copy, pair.target.params)
  return passes(pair.target.model, params, capacity, used, tokens, batch, STEPS)


def rounds(sj, pair, verifier, gamma, batch=1, used=USED, capacity=256):
  """Whole rounds with `small`, or without drafts where gamma is 0."""
  small = pair.drafters["small"]
  drafter = sj.drafters.Empty()
  if gamma:
    drafter = sj.drafters.LanguageModel(model=small.model, gamma=gamma)
  decoder = sj.Decoder(target=pair.target.model, drafter=drafter,
                       verifier=getattr(sj.verifiers, verifier)())
  params = jax.tree.map(jnp.copy, {
      "target": pair.target.params, "drafter": small.params if gamma else {}})
  state = decoder.prefill(
      params, [jnp.ones((used,), jnp.int32)] * batch, jax.random.key(0),
      limits=capacity - gamma - 1, capacity=capacity)

  def run(params, state):
    new, _ = decoder.decode(params, state, STEPS)
    cache = new.target_cache.rollback(state.target_cache.lengths)
    return new.replace(lengths=state.lengths, target_cache=cache,
                       done=state.done)

  return Timed(run, params, state, STEPS)


FIGURES = {
    **{f"pass of {n} tokens": (one_pass, n) for n in (1, 5, 9, 17)},
    **{f"pass of {n} tokens, 8 rows": (one_pass, n, 8) for n in (1, 5, 17)},
    "pass of 5 tokens, 8 rows, 600 of 4096 slots": (
        one_pass, 5, 8, 600, 4096),
    "round without drafts": (rounds, "Token", 0),
    **{f"round of {g} tokens, {name}": (rounds, name, g)
       for name in ("Token", "Block") for g in (4, 8)},
    "round without drafts, 8 rows": (rounds, "Token", 0, 8),
    "round of 4 tokens, Block, 8 rows": (rounds, "Block", 4, 8),
}


def main(there):
  before, now = package(there), package(_HERE)
  pairs = [(sj, sj.zoo.load()) for sj in (before, now)]
  print(f"jax {jax.__version__}; ms there and here, here over there "
        "(least to most of the times made)")
  for name, (make, *arguments) in FIGURES.items():
    found, times = [], ([], [])
    for i in range(MADE):
      order = (0, 1) if i % 2 else (1, 0)
      timed = {k: make(*pairs[k], *arguments) for k in order}
      one = [[timed[k]() for k in order] for _ in range(PAIRS)]
      rows = [row if order == (0, 1) else row[::-1] for row in one]
      found.append([b / a for a, b in rows])
      for mine, column in zip(times, zip(*rows)):
        mine.extend(column)
      del timed
    medians = [statistics.median(one) for one in found]
    ms = [1e3 * statistics.median(mine) for mine in times]
    print(f"{name:45s} {ms[0]:8.3f} {ms[1]:8.3f} "
          f"{statistics.median(sum(found, [])):7.3f} "
          f"({min(medians):.3f} to {max(medians):.3f})", flush=True)


if __name__ == "__main__":
  if len(sys.argv) != 2:
    sys.exit("usage: beside.py CHECKOUT")
  main(sys.argv[1])
