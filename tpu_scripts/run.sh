#!/usr/bin/env bash
# Starts python -m jzero.main on every worker. The run goes on when the connection ends. The script
# refuses to start while a run is active, and a run that does not fit the TPU by the plan. The same command resumes a run
# that was stopped.
#
#   tpu_scripts/run.sh [--dry-run] [-- --config configs/countdown.py:qwen2.5-3b --config.train.save=no_optimizer ...]
#   FILES="sums.jsonl my.py" tpu_scripts/run.sh -- train --model Qwen/Qwen2.5-3B --data files/sums.jsonl \
#     --reward files/my.py:f

. "$(dirname "$0")/common.sh"
parse "" "$@"
need_tpu
need WORKDIR
check_plan
start_run
