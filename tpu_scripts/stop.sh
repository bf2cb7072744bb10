#!/usr/bin/env bash
# Stops the run: sends SIGTERM on every worker and waits until the checkpoint is saved. After
# STOP_SECONDS it kills the run.
#
#   tpu_scripts/stop.sh [--dry-run]

. "$(dirname "$0")/common.sh"
parse "" "$@"
need_tpu
remote "$REMOTE stop $(quote "$STOP_SECONDS")"
