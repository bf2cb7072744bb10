#!/usr/bin/env bash
# Runs on a worker, from the checkout that the other scripts copied there.
#
#   remote.sh setup EXTRA COMMAND PACKAGES...
#                                     COMMAND, then uv, a Python, jzero[EXTRA] and PACKAGES in ~/.jzero/venv
#   remote.sh idle                    fails where a run is on
#   remote.sh start WORKDIR ARGS...   python -m jzero.main, or jzero train, in the background
#   remote.sh status                  none, running, finished, stopped, interrupted or failed
#   remote.sh watch                   the log, until the run ends
#   remote.sh stop SECONDS            SIGTERM, and SIGKILL after SECONDS
#   remote.sh bench ARGS...           benchmarks/step.py with ~/.jzero/workload
#   remote.sh pack CHECKPOINTS        the files of the run's workdir in ~/.jzero/results.tar.gz
#   remote.sh view PORT               the page of jzero.watch on 127.0.0.1
#
# ~/.jzero holds checkout/, files/ (the user's, checkout/files is a link to it), venv/, lock (held while a run is active), and of the last run: log, pid,
# workdir, code (its exit status) and stopped.

set -euo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd)
python=$HOME/.jzero/venv/bin/python
if [[ ${1:---help} == --help ]]; then sed -n '2,/^$/s/^# \{0,1\}//p' "$0" && exit; fi
cd "$HOME/.jzero"

die() {
  echo "error: $*" >&2
  exit 1
}
busy() { ! flock -n lock true; }
# The directory of the run: for gs://bucket/run the one in which the run works (jzero/run/buckets.py).
directory() {
  local workdir
  workdir=$(cat workdir)
  if [[ $workdir == *://* ]]; then
    local name=${workdir#*://}
    name=${name%/}
    workdir=${XDG_CACHE_HOME:-$HOME/.cache}/jzero/workdirs/${workdir%%://*}/${name//\//+}
  fi
  echo "$workdir"
}
idle() {
  ! busy || die "a run is on already, in $(cat workdir): stop it first"
  [[ -x $python ]] || die "jzero is not installed: setup first"
}

setup() {
  local extra=$1 command=${2:-}
  if [[ $command ]]; then bash -c "$command" || die "exit status $? of MOUNT: $command"; fi
  export PATH=$HOME/.local/bin:$PATH
  command -v uv >/dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
  [[ -x $python ]] || uv venv --python 3.11 "$HOME/.jzero/venv"
  uv pip install -q --python "$python" -c "$checkout/constraints.txt" -e "${checkout}[$extra]" "${@:3}"
  # Fails where JAX does not see the accelerator. All the workers of a slice do this together.
  JAX_PLATFORMS=${extra%%[0-9]*} timeout 300 "$python" -c 'import jax; print(jax.__version__, jax.local_devices())'
}

start() {
  idle
  if [[ -d files ]]; then ln -sfn "$HOME/.jzero/files" "$checkout/files"; fi
  rm -f pid code stopped
  setsid flock -w 5 -o lock bash "$checkout/tpu_scripts/remote.sh" supervise "$@" </dev/null >/dev/null 2>&1 &
  for _ in {1..100}; do if [[ -s pid ]]; then break; else sleep 0.1; fi; done
  [[ -s pid ]] || die "the run did not start, see ~/.jzero/log"
  echo "started on $(hostname)"
}

supervise() {
  local workdir=$1 code=0
  [[ $workdir == /* || $workdir == *://* ]] || workdir=$HOME/$workdir
  exec >>log 2>&1
  local module=(jzero.main) arguments=("${@:2}")
  if [[ ${2:-} == train ]]; then module=(jzero train) arguments=("${@:3}"); fi
  echo "== $(date) python -m ${module[*]} --workdir $workdir ${arguments[*]}"
  echo "$workdir" >workdir
  # shellcheck source=/dev/null
  if [[ -e secrets.env ]]; then . ./secrets.env; fi
  (cd "$checkout" && exec "$python" -u -m "${module[@]}" --workdir "$workdir" ${arguments[@]+"${arguments[@]}"}) &
  echo $! >pid
  wait $! || code=$?
  echo $code >code
  echo "== $(date) exit status $code"
}

status() {
  local code=lost
  [[ ! -s code ]] || code=$(cat code)
  if busy; then
    echo running
  elif [[ ! -s pid ]]; then
    echo none
  elif [[ $code == 0 ]] && grep -q '^ "export": "' "$(directory)/summary.json" 2>/dev/null; then
    echo finished # a run that SIGTERM ended exits with 0 too, without an export
  elif [[ -e stopped ]]; then
    echo stopped
  elif [[ $code == 0 ]]; then
    echo interrupted
  else
    echo "failed ($code)"
  fi
}

watch() {
  [[ -e log ]] || die "no run was started here"
  if busy; then tail -n 100 -F --pid="$(cat pid)" log && flock -w 5 lock true; else tail -n 100 log; fi
  echo "== $(status)"
}

stop() {
  if ! busy; then echo "no run is on: $(status)" && return; fi
  touch stopped
  kill -TERM "$(cat pid)" || true
  if ! flock -w "$1" lock true; then
    echo "not stopped after $1 s: killed" >&2
    kill -KILL "$(cat pid)" || true
    flock -w 60 lock true
  fi
  tail -n 3 log
}

pack() {
  local leave_out=(--exclude=./programs --exclude=./lock "--exclude=*.orbax-checkpoint-tmp*")
  [[ -s workdir && -d $(directory) ]] || die "no run was started here"
  [[ $1 == 1 ]] || leave_out+=(--exclude=./checkpoints)
  cp log "$(directory)/log.txt"
  # Status 1: a file has grown while it was read. What was complete before is in the archive.
  tar -czf results.tar.gz "${leave_out[@]}" -C "$(directory)" . || (($? == 1))
}

view() {
  [[ -s workdir ]] || die "no run was started here"
  JAX_PLATFORMS=cpu exec "$python" -m jzero.watch "$(directory)" --port "$1"
}

bench() {
  idle
  cd "$checkout"
  flock -n ~/.jzero/lock "$python" benchmarks/step.py --workload ~/.jzero/workload "$@" | tee ~/.jzero/bench.json
}

"$@"
