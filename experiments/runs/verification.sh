#!/usr/bin/env bash
# README's table: block and greedy block over token verification, on all
# 48 prompts. Further flags are passed on.
set -euo pipefail
cd "$(dirname "$0")/../.."
python experiments/verification_study.py --error=0 "$@"
