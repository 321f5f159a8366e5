#!/usr/bin/env bash
# The README's table: gain of block and greedy block verification over token
# verification, on all 48 prompts. Further flags are passed to
# verification_study.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
python experiments/verification_study.py --error=0 "$@"
