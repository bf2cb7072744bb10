#!/usr/bin/env bash
# Copies the last commit of this checkout to every worker and installs it there, with uv, a Python and JAX for TPUs.
# Can be run again at any time but while a run is on.
#
#   tpu_scripts/setup.sh [--dry-run]

. "$(dirname "$0")/common.sh"
parse "" "$@"
need_tpu
install_jzero tpu
