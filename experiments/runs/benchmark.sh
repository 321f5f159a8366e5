#!/usr/bin/env bash
# Measurements of docs/results/costs.md: both pairs of models in one process,
# then the bundled pair in a separate process. Run no other program meanwhile.
set -euo pipefail
cd "$(dirname "$0")/../.."
python experiments/benchmark.py "$@"
python experiments/benchmark.py --models=bundled \
  --output_dir=results/benchmark/bundled "$@"
