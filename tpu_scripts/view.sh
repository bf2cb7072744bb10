#!/usr/bin/env bash
# Shows the run of worker 0 as a live page: starts jzero.watch there, and a tunnel from --port of this
# machine. Only this machine can open the page. Ctrl-C ends both, and not the run.
#
#   tpu_scripts/view.sh [--port 8484] [--dry-run]

. "$(dirname "$0")/common.sh"
port=8484
parse "port=" "$@"
need_tpu
[[ $port =~ ^[0-9]+$ ]] || die "--port $port is not a number"
[[ $DRY_RUN ]] || echo "http://127.0.0.1:$port shows the run, until Ctrl-C"
run gcloud compute tpus tpu-vm ssh "$NAME" "${WHERE[@]}" --quiet --worker=0 "--command=$REMOTE view $port" -- -t -L "$port:127.0.0.1:$port"
