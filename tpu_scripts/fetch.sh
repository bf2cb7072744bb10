#!/usr/bin/env bash
# Copies the results of the run on worker 0 to this machine: metrics, samples, evaluations, exports and
# the log, in the directory --out (default: runs/NAME). It works while the run is active, and can be
# repeated. --checkpoints also copies the checkpoints, which are several times as large as the model.
#
#   tpu_scripts/fetch.sh [--out DIR] [--checkpoints] [--dry-run]

. "$(dirname "$0")/common.sh"
out=runs/$NAME checkpoints=''
parse "out= checkpoints" "$@"
need_tpu
export WORKER=0
remote "$REMOTE pack ${checkpoints:-0}"
file=$CACHE/$NAME.results.tar.gz
run mkdir -p "$CACHE" "$out"
run gcloud compute tpus tpu-vm scp "$NAME:.jzero/results.tar.gz" "$file" "${WHERE[@]}" --quiet --worker=0
run tar -xzf "$file" -C "$out"
run rm -f "$file"
[[ $DRY_RUN ]] || echo "$out: python -m jzero.report $out"
