#!/usr/bin/env bash
# docs/results/costs.md, while nothing else runs: both pairs, and the
# bundled pair in a process of its own.
set -euo pipefail
cd "$(dirname "$0")/../.."
python experiments/benchmark.py "$@"
python experiments/benchmark.py --models=bundled \
  --output_dir=results/benchmark/bundled "$@"
