#!/usr/bin/env bash
# Tables of docs/results/paper.md: the Bernoulli example, the linear programs
# and the extremal pairs of models.
set -euo pipefail
cd "$(dirname "$0")/../.."
python experiments/optimality.py "$@"
