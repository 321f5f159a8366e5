"""Makes acceptance.csv: what three sets of heads accept on held-out rows.

The heads are the bundled Medusa heads, and the same with their weights moved a
tenth and a fifth of the way back to the initial ones, which makes them worse.
A line is a row of 384 tokens of the standard library (Python 3.12). Columns
for each set: accepted tokens along the row, greedy and sampled, over 379
positions; and over 16 rounds of greedy decoding after the row's first quarter.

  python tests/golden/make_acceptance.py   (ten minutes on two cores)
"""

import csv
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import specjax as sj
from specjax import methods
from specjax.data import corpora
from specjax.training import evaluation

sys.path.append(str(pathlib.Path(__file__).parents[2] / "experiments"))

from lib.training import drafter_report  # noqa: E402

_ROWS, _SIZE = 192, 384
_SHARES = (1.0, 0.9, 0.8)


def main():
  pair, method = sj.zoo.load(), methods.by_name("medusa")
  model = pair.target.model
  target = jax.tree.map(lambda x: x.astype(jnp.float32), pair.target.params)
  heads, trained = methods.load_heads(
      sj.zoo.heads_path("medusa"), model, jnp.float32)
  initial = heads.init(jax.random.key(0), target)
  _, held_out = corpora.split(corpora.read_documents("stdlib", "text"))
  tokens = pair.tokenizer.encode_stream([d.text for d in held_out])
  starts = np.linspace(0, len(tokens) - _SIZE, _ROWS).astype(int)
  rows = tokens[starts[:, None] + np.arange(_SIZE)].astype(np.int32)
  accuracy = evaluation.head_accuracy(method.measure(model, heads), rows)
  decoder = method.chain(heads).decoder(
      heads.attach(model, target, trained)[0],
      transform=sj.LogitsTransform(temperature=0))
  columns = {}
  for share in _SHARES:
    params = jax.tree.map(lambda a, b, s=share: a + s * (b - a), initial,
                          trained)
    by_row = accuracy({"target": target, "drafter": params},
                      by_row=True)["by_row"]
    columns[f"greedy_{share}"] = by_row["greedy_block_efficiency"]
    columns[f"sampled_{share}"] = by_row["sampled_block_efficiency"]
    attached = heads.attach(model, target, params)[1]
    state = decoder.prefill(attached, rows[:, :_SIZE // 4], jax.random.key(0),
                            limits=_SIZE)
    _, stats = decoder.decode(attached, state,
                              rounds=drafter_report.DECODED_ROUNDS)
    columns[f"decoded_{share}"] = np.asarray(stats.expected[..., 0]).sum(0)
  path = pathlib.Path(__file__).with_name("acceptance.csv")
  with open(path, "w", newline="") as f:
    writer = csv.writer(f)
    writer.writerow(columns)
    writer.writerows(zip(*(
        [f"{x:.5g}" for x in column] for column in columns.values())))


if __name__ == "__main__":
  main()
