#!/usr/bin/env bash
# Requests the TPU that settings.env describes and waits until it is ready. If the script is
# interrupted, the same command goes on waiting.
#
#   tpu_scripts/create.sh [--dry-run] [-- the arguments of run.sh, which are planned first]

. "$(dirname "$0")/common.sh"
parse "" "$@"
need_tpu
need ACCELERATOR_TYPE
case $ACCELERATOR_TYPE in
  v2-* | v3-* | v4-*) runtime=tpu-ubuntu2204-base ;;
  v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
  v5p-*) runtime=v2-alpha-tpuv5 ;;
  v6e-*) runtime=v2-alpha-tpuv6e ;;
  tpu7x*) die "ACCELERATOR_TYPE=$ACCELERATOR_TYPE: the Cloud TPU API, which these scripts use, has no TPU7x; use GKE and \
clusters/jobset-tpu.yaml, see docs/clusters.md" ;;
  *) need RUNTIME_VERSION ;;
esac
split "$CREATE_FLAGS"
create=(gcloud compute tpus queued-resources create "$NAME" "--node-id=$NAME" "${WHERE[@]}"
  "--accelerator-type=$ACCELERATOR_TYPE" "--runtime-version=${RUNTIME_VERSION:-$runtime}")
[[ $SPOT == 1 ]] && create+=(--spot)
create+=(${WORDS[@]+"${WORDS[@]}"})

if [[ $DRY_RUN ]]; then
  check_plan
  run "${create[@]}"
  run "${DESCRIBE[@]}"
  echo "# ... until it is ACTIVE, for $WAIT_MINUTES minutes at most"
  exit
fi
now=$(state)
if [[ $now == MISSING ]]; then
  check_plan
  run "${create[@]}"
fi
last='' said=0 SECONDS=0
while true; do
  now=$(state)
  if [[ $now != "$last" ]] || ((SECONDS - said >= 300)); then
    echo "$NAME: $now after $((SECONDS / 60)) of $WAIT_MINUTES minutes"
    last=$now said=$SECONDS
  fi
  case $now in
    ACTIVE) exit ;;
    MISSING | FAILED | SUSPEND* | DELETING) die "$NAME is $now: delete.sh removes it, resume.sh replaces it" ;;
  esac
  ((SECONDS < WAIT_MINUTES * 60)) ||
    die "$NAME is still $now after $WAIT_MINUTES minutes; it stays in the queue: create.sh waits on, delete.sh withdraws it"
  sleep "$POLL_SECONDS"
done
