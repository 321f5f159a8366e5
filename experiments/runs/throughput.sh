#!/usr/bin/env bash
# Compares continuous with static batching: 200 requests at batch sizes 1, 4 and
# 16, with and without drafts. Every output is compared with the output of its
# request alone. Run no other program meanwhile. Further flags are passed to
# throughput_study.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
python experiments/throughput_study.py "$@"
