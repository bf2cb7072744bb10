#!/usr/bin/env bash
# Stops the run: SIGTERM on every worker, then waits for the checkpoint. After STOP_SECONDS it is killed.
#
#   tpu_scripts/stop.sh [--dry-run]

. "$(dirname "$0")/common.sh"
parse "" "$@"
need_tpu
remote "$REMOTE stop $(quote "$STOP_SECONDS")"
