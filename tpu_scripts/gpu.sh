#!/usr/bin/env bash
# Sets up one machine with GPUs over ssh, and starts, follows and stops runs there. The machine is
# GPU_HOST of settings.env, or --host. It needs curl, flock and an NVIDIA driver.
#
#   tpu_scripts/gpu.sh setup   the last commit of this checkout, uv, a Python and JAX for GPU_EXTRA
#   tpu_scripts/gpu.sh run     starts python -m jzero.main with what follows --, or resumes it
#   tpu_scripts/gpu.sh watch   follows the log until the run ends
#   tpu_scripts/gpu.sh stop    saves a checkpoint and stops
#
# Each takes --host user@address and --dry-run.

. "$(dirname "$0")/common.sh"
(($#)) || set -- --help
command=$1 host=$GPU_HOST
[[ $command == -* ]] || shift
parse "host=" "$@"
GPU_HOST=$host NAME=gpu-$host
need GPU_HOST WORKDIR
remote() { run ssh "$GPU_HOST" "$1"; }
copy() { run scp -q "$1" "$GPU_HOST:$2"; }
case $command in
  setup) install_jzero "$GPU_EXTRA" ;;
  run) start_run ;;
  watch) remote "$REMOTE watch" ;;
  stop) remote "$REMOTE stop $(quote "$STOP_SECONDS")" ;;
  *) die "setup, run, watch or stop, not $command: gpu.sh --help" ;;
esac
