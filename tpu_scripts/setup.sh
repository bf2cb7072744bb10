#!/usr/bin/env bash
# Copies the last commit of this checkout to every worker and installs it there, with uv, a Python and
# JAX for TPUs. The script can be repeated at any time, except while a run is active.
#
#   tpu_scripts/setup.sh [--dry-run]

. "$(dirname "$0")/common.sh"
parse "" "$@"
need_tpu
install_jzero tpu
