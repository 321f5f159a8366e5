#!/usr/bin/env bash
# Batches that stay full against such as wait, while nothing else runs: 200
# requests at batch 1, 4 and 16, every text compared with the one decoded alone,
# and what drafts are worth while requests arrive. Further flags are passed on.
set -euo pipefail
cd "$(dirname "$0")/../.."
python experiments/throughput_study.py "$@"
