# shellcheck shell=bash
# Sourced by the other scripts. It reads the settings and the options, and defines how a command is run
# on this machine and on the workers.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(dirname "$HERE")
# shellcheck source=settings.env
. "${SETTINGS:-$HERE/settings.env}"
export DRY_RUN=${DRY_RUN:-}
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/jzero
REMOTE="bash .jzero/checkout/tpu_scripts/remote.sh"
WHERE=("--project=$PROJECT" "--zone=$ZONE")
REST=()

die() {
  echo "error: $*" >&2
  exit 1
}

# parse "yes worker=" "$@": --yes sets yes=1, --worker 3 or --worker=3 sets worker=3; what follows -- becomes REST.
parse() {
  local allowed=" $1 " name
  shift
  while (($#)); do
    name=${1#--}
    case $1 in
      -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0" && exit ;;
      --dry-run) DRY_RUN=1 ;;
      --) REST=("${@:2}") && return ;;
      --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" && continue ;;
      *) case "$1 in $allowed" in
        --*" $name= "*)
          (($# > 1)) || die "$1 needs a value"
          printf -v "$name" %s "$2" && shift
          ;;
        --*" $name "*) printf -v "$name" 1 ;;
        *) die "unknown argument $1, see $(basename "$0") --help" ;;
      esac ;;
    esac
    shift
  done
}

# need PROJECT ZONE: one line for the settings that are missing; need_tpu: those of the TPU, and gcloud.
need() {
  local name missing=()
  for name; do [[ ${!name:-} ]] || missing+=("$name"); done
  ((${#missing[@]} == 0)) || die "${missing[*]} not set: edit $HERE/settings.env, or set it in the environment"
}
need_tpu() {
  need PROJECT ZONE NAME
  [[ $DRY_RUN ]] || command -v gcloud >/dev/null || die "no gcloud: https://cloud.google.com/sdk/docs/install"
}

# Prints the words so that a shell reads the same words back.
quote() {
  local word space=
  for word; do
    case $word in
      '' | *[!A-Za-z0-9_./:=@%+,-]*) word="'$(printf %s "$word" | sed "s/'/'\\\\''/g")'" ;;
    esac
    printf '%s%s' "$space" "$word"
    space=' '
  done
}

# split "a 'b c'": the array WORDS of a and b c.
split() {
  local lines line
  WORDS=()
  [[ $1 =~ [^[:space:]] ]] || return 0
  lines=$(xargs -n 1 printf '%s\n' <<<"$1" 2>/dev/null) || die "a quote without its pair in: $1"
  while IFS= read -r line; do WORDS+=("$line"); done <<<"$lines"
}

# Runs a command, or prints it; its failure ends the script.
run() {
  if [[ $DRY_RUN ]]; then
    quote "$@" && echo
  else
    echo "+ $(quote "$@")" >&2
    "$@" || die "exit status $? of: $(quote "$@")"
  fi
}

# Runs a command line on the workers, and copies a file to or from them. gpu.sh defines its own two.
remote() { run gcloud compute tpus tpu-vm ssh "$NAME" "${WHERE[@]}" --quiet "--worker=${WORKER:-all}" "--command=$1"; }
copy() { run gcloud compute tpus tpu-vm scp "$1" "$NAME:$2" "${WHERE[@]}" --quiet "--worker=${WORKER:-all}" "${@:3}"; }

# Says that the TPU is still there, and how to end that.
say_delete() {
  echo "$NAME is not deleted, and is paid for: tpu_scripts/fetch.sh copies the results, then tpu_scripts/delete.sh deletes it"
}

# Prints the state of the queued resource, or MISSING if there is none.
DESCRIBE=(gcloud compute tpus queued-resources describe "$NAME" "${WHERE[@]}" "--format=value(state.state)")
state() {
  local answer
  if answer=$("${DESCRIBE[@]}" 2>&1); then
    echo "${answer##*$'\n'}"
  elif [[ $answer == *NOT_FOUND* ]]; then
    echo MISSING
  else
    die "$(quote "${DESCRIBE[@]}"): $answer"
  fi
}

# install_jzero EXTRA: copies the committed checkout to the workers and installs jzero[EXTRA] there.
install_jzero() {
  local file=$CACHE/$NAME.tar.gz packages=() busy="{ echo error: a run is on, stop it first >&2; exit 1; }"
  case ${WORKDIR:-} in gs://*) packages=(gcsfs) ;; s3://*) packages=(s3fs) ;; esac
  git -C "$ROOT" diff --quiet HEAD || echo "note: changes that are not committed are not copied" >&2
  run mkdir -p "$CACHE"
  run git -C "$ROOT" archive --format=tar.gz -o "$file" HEAD
  copy "$file" jzero.tar.gz
  remote "mkdir -p -m 700 .jzero && { flock -n .jzero/lock true || $busy; } && rm -rf .jzero/checkout && \
mkdir .jzero/checkout && tar -xzf jzero.tar.gz -C .jzero/checkout && $REMOTE setup $(quote "$1" "$MOUNT" ${packages[@]+"${packages[@]}"})"
}

# copy_files: copies the files and directories of FILES to files/ of every worker.
copy_files() {
  local file=$CACHE/$NAME.files.tar.gz path words=()
  split "$FILES"
  ((${#WORDS[@]})) || return 0
  for path in "${WORDS[@]}"; do
    [[ -e $path ]] || die "FILES: $path does not exist"
    words+=(-C "$(cd "$(dirname "$path")" && pwd)" "$(basename "$path")")
  done
  run mkdir -p "$CACHE"
  run tar -czf "$file" "${words[@]}"
  copy "$file" .jzero/files.tar.gz
  run rm -f "$file"
  remote "rm -rf .jzero/files && mkdir .jzero/files && tar -xzf .jzero/files.tar.gz -C .jzero/files"
}

# check_plan: ends the script if the run of REST, or else of RUN, does not fit the memory and the disk of ACCELERATOR_TYPE.
# Nothing is compiled or downloaded.
check_plan() {
  local words=(${REST[@]+"${REST[@]}"}) machine=$ACCELERATOR_TYPE plan answer status=0
  [[ $PLAN == 1 ]] || return 0
  if ((${#words[@]} == 0)); then split "$RUN" && words=(${WORDS[@]+"${WORDS[@]}"}); fi
  case $machine in
    v5litepod-* | v6e-*) ;;
    *) echo "note: jzero plan has no machine $machine, so the run is not planned" >&2 && return ;;
  esac
  if [[ ${words[0]-} == train ]]; then
    echo "note: the run is not planned; before you rent: jzero train ... --machine $machine --dry-run" >&2 && return
  fi
  # The size of a mount is not known here.
  if [[ $MOUNT ]]; then words+=(--config.memory.disk_gb=1000000); fi
  plan=(python3 -m jzero.plan --machine "$machine" ${words[@]+"${words[@]}"})
  if [[ $DRY_RUN ]]; then echo "# $(quote "${plan[@]}")" && return; fi
  if ! (cd "$ROOT" && python3 -c 'import jzero.plan') >/dev/null 2>&1; then
    echo "note: jzero is not installed on this machine, so the run is not planned" >&2 && return
  fi
  answer=$(cd "$ROOT" && "${plan[@]}" 2>&1) || status=$?
  ((status == 0)) || die "$answer
The run was planned before it starts: $(quote "${plan[@]}")
Change its arguments, or set PLAN=0 if the plan is wrong, for example because CREATE_FLAGS attaches a larger disk."
  echo "plan: ${answer##*$'\n\n'}"
}

# start_run: starts jzero.main with the arguments REST, or else RUN, on every worker that is idle. If the
# first argument is train, it starts jzero train with the others.
start_run() {
  local file=$CACHE/$NAME.secrets name secrets=
  if ((${#REST[@]} == 0)); then split "$RUN" && REST=(${WORDS[@]+"${WORDS[@]}"}); fi
  case " ${REST[*]-} " in *" -workdir"* | *" --workdir"*) die "set WORKDIR instead of giving --workdir" ;; esac
  remote "$REMOTE idle"
  copy_files
  for name in HF_TOKEN WANDB_API_KEY; do [[ -z ${!name:-} ]] || { export "${name?}" && secrets+=" $name"; }; done
  if [[ $secrets ]]; then # in a file: a command line is seen by every user of a machine
    [[ $DRY_RUN ]] || trap 'rm -f "$CACHE/$NAME.secrets"' EXIT
    run mkdir -p "$CACHE"
    run bash -c "rm -f $(quote "$file") && umask 077 && declare -p$secrets >$(quote "$file")"
    copy "$file" .jzero/secrets.env
    run rm -f "$file"
  fi
  remote "$REMOTE start $(quote "$WORKDIR" ${REST[@]+"${REST[@]}"})"
}
