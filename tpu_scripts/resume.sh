#!/usr/bin/env bash
# Keeps a run going until it is finished. The script creates the TPU if there is none, or again after
# a preemption; it sets the TPU up, starts the run, watches it, and starts over if the run is
# interrupted. It takes the arguments of run.sh. Ctrl-C ends the watching, not the run. The run resumes
# from what WORKDIR holds, so WORKDIR has to be on a mount that outlives the TPU (see settings.env).
# With --delete a finished run is fetched, as fetch.sh does, and the TPU is deleted.
#
#   tpu_scripts/resume.sh [--dry-run] [--delete] [-- --config RECIPE:PRESET ...]

. "$(dirname "$0")/common.sh"
delete=
parse "delete" "$@"
need_tpu
need WORKDIR
[[ $MOUNT || $WORKDIR == /* ]] || echo "note: WORKDIR=$WORKDIR is on the TPU's own disk and goes with it" >&2
node=(gcloud compute tpus tpu-vm describe "$NAME" "${WHERE[@]}" "--format=value(state)")
status=(gcloud compute tpus tpu-vm ssh "$NAME" "${WHERE[@]}" --quiet --worker=all "--command=$REMOTE status")

# Prints the state of the TPU and of the run in one word.
condition() {
  local words
  words=$(state) || return 1
  case $words in
    ACTIVE) ;;
    SUSPENDED | FAILED) echo gone && return ;;
    SUSPENDING | DELETING) echo leaving && return ;;
    *) echo absent && return ;; # or in the queue: create.sh goes on waiting
  esac
  case $("${node[@]}") in PREEMPTED | TERMINATED | STOPPED) echo gone && return ;; esac
  words=$("${status[@]}") || words=
  case $words in # of all the workers
    *"failed (2)"*) echo refused ;;
    *failed*) echo crashed ;;
    *stopped*) echo stopped ;;
    *none* | *interrupted*) echo idle ;;
    *running*) echo running ;;
    *finished*) echo finished ;;
    *) echo bare ;;
  esac
}

# Runs the scripts of these names, one after the other.
launch() {
  local name
  for name; do
    case $name in
      delete) "$HERE/delete.sh" --yes ;;
      run | create) "$HERE/$name.sh" -- ${REST[@]+"${REST[@]}"} ;;
      *) "$HERE/$name.sh" ;;
    esac || return 1
  done
}

pause() { # NUMBER REASON
  local seconds=$((RETRY_SECONDS << ($1 - 1)))
  (($1 <= RETRIES)) || die "$2, $1 times: gave up"
  ((seconds <= 3600)) || seconds=3600
  echo "$2 ($1 of $RETRIES), again in $seconds s" >&2
  sleep "$seconds"
}

if [[ $DRY_RUN ]]; then
  echo "# where the TPU was preempted"
  launch delete
  echo "# where there is none"
  launch create setup run
  run "${node[@]}"
  run "${status[@]}"
  if [[ $delete ]]; then echo "# where the run is finished" && launch fetch delete; fi
  exit
fi
check_plan
export PLAN=0 # for the scripts that are called
last='' failures=0 crashes=0
while true; do
  now=$(condition) || now=unknown
  [[ $now == "$last" ]] || echo "$(date +%H:%M:%S) $NAME: $now"
  last=$now
  case $now in
    finished)
      if [[ $delete ]]; then launch fetch delete; else say_delete; fi
      exit
      ;;
    refused) die "the run refuses its arguments, see watch.sh" ;;
    stopped) die "stopped by stop.sh: run.sh starts it again" ;;
    running | leaving) sleep "$POLL_SECONDS" && continue ;;
    gone) todo=(delete create setup run) ;;
    absent) todo=(create setup run) ;;
    bare) todo=(setup run) ;;
    idle) todo=(stop setup run) ;;
    crashed) pause $((crashes += 1)) "the run failed, see watch.sh" && todo=(stop setup run) ;;
    unknown) todo=(false) ;;
  esac
  if STOP_SECONDS=60 launch "${todo[@]}"; then failures=0; else pause $((failures += 1)) "no run could be started"; fi
done
