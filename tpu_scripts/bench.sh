#!/usr/bin/env bash
# Runs benchmarks/step.py on worker 0 with a workload of this machine, and copies its JSON line back.
# This works for slices of one host only: the workers of a larger slice start together or not at all.
#
#   tpu_scripts/bench.sh --workload DIR [--out bench.json] [--dry-run] [-- --steps 20 --warmup 3]

. "$(dirname "$0")/common.sh"
workload='' out=bench.json
parse "workload= out=" "$@"
need_tpu
[[ $workload ]] || die "give --workload DIR: benchmarks/step.py says what it holds"
[[ $DRY_RUN || -d $workload ]] || die "$workload is not a directory"
export WORKER=0
remote "rm -rf .jzero/workload"
copy "$workload" .jzero/workload --recurse
remote "$REMOTE bench ${REST[*]+$(quote "${REST[@]}")}"
run gcloud compute tpus tpu-vm scp "$NAME:.jzero/bench.json" "$out" "${WHERE[@]}" --quiet --worker=0
