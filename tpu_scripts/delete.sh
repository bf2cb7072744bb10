#!/usr/bin/env bash
# Deletes the TPU, its request and its disks, after asking. Files on a mount stay.
#
#   tpu_scripts/delete.sh [--yes] [--dry-run]

. "$(dirname "$0")/common.sh"
yes=
parse "yes" "$@"
need_tpu
if [[ -z $yes$DRY_RUN ]]; then
  read -r -p "Delete $NAME ($ACCELERATOR_TYPE in $ZONE of $PROJECT) and its disks? [y/N] " answer || answer=
  [[ $answer == [yY]* ]] || die "nothing deleted: answer y, or give --yes"
fi
run gcloud compute tpus queued-resources delete "$NAME" "${WHERE[@]}" --force --quiet
