#!/usr/bin/env bash
# Follows the log of one worker until the run ends. Ctrl-C ends the watching, not the run.
#
#   tpu_scripts/watch.sh [--worker 0] [--dry-run]

. "$(dirname "$0")/common.sh"
worker=0
parse "worker=" "$@"
need_tpu
WORKER=$worker remote "$REMOTE watch"
[[ $DRY_RUN ]] || say_delete
