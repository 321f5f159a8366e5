#!/usr/bin/env bash
# docs/results/paper.md: the Bernoulli example, the linear programs and the extremal pairs.
set -euo pipefail
cd "$(dirname "$0")/../.."
python experiments/optimality.py "$@"
