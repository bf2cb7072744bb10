"""Commands with a model that end at a bad moment: signals, a full disk, a read-only folder.

A command ends by the signal, with "stopped" or with one line, and without a traceback. Files under
their final names are complete, and the same command succeeds afterwards.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tiny
from runs import ROOT
from safetensors.numpy import load_file

from tests.attacks.conftest import Tries

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LONGEST_SECONDS = 180
SMALL_RUN = (
    "--config.rollout.max_new_tokens=8",
    "--config.rollout.num_prompts=2",
    "--config.rollout.group_size=2",
    "--config.train.steps=2",
    "--config.train.checkpoint_every=1",
    "--config.eval.problems=2",
)
SMALL_SFT = (
    "--config.model.arch.num_hidden_layers=1",
    "--config.model.arch.hidden_size=32",
    "--config.model.arch.intermediate_size=64",
    "--config.model.arch.head_dim=16",
    "--config.model.arch.num_attention_heads=2",
    "--config.model.arch.num_key_value_heads=1",
    "--config.sft.batch_size=8",
    "--config.sft.pack_length=128",
    "--config.train.microbatch_tokens=256",
    "--config.train.checkpoint_every=2",
    "--config.eval.every=3",
    "--config.eval.problems=4",
    "--config.sft.data=countdown",
    "--config.warm_start.steps=6",
    "--config.warm_start.batch_size=8",
)
REWARD = """
def digits(response, gold, task):
    return sum(char.isdigit() for char in response) / (1 + len(response))
"""
# The arguments of each command; it writes below the folder "out".
COMMANDS = {
    "train": "jzero train --model model --data sums.jsonl --reward my.py:digits --workdir out/run",
    "sft": f"jzero.main --config={ROOT}/configs/sft.py:tiny --workdir=out/run",
    "evaluate": "jzero evaluate run --out out/evaluation",
    "generate": "jzero generate --model model --data sums.jsonl --n 2 --out out/rows.jsonl "
    "--config.rollout.max_new_tokens=8 --config.task.grade_workers=1",
    "compare": "jzero compare model run --out out/comparison",
    "export": "jzero export --workdir run --out out/export",
    "audit": "jzero audit log.jsonl --model model --json out/audit.json",
    "serve": "jzero serve run --port 0",
    "tinker": "jzero tinker --model model --store out/store --port 0",
}
FURTHER = {"train": SMALL_RUN, "sft": SMALL_SFT}
SERVERS = {"serve", "tinker"}
OF_A_RUN = {"evaluate", "compare", "export", "serve"}
WRITERS = [name for name in COMMANDS if name != "serve"]
FILE_BYTES = (0, 3000, 50_000)  # most of one file, on a disk that is full

Start = Callable[..., subprocess.Popen[str]]


def arguments(name: str) -> list[str]:
    return [sys.executable, "-m", *COMMANDS[name].split(), *FURTHER.get(name, ())]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a set of problems, a reward and a log."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny.save_byte_model(folder / "model")
    tiny.save_sums(folder / "sums.jsonl", 6)
    (folder / "my.py").write_text(REWARD)
    row = {"prompt_ids": [40, 41, 42], "response_ids": list(range(50, 70))}
    (folder / "log.jsonl").write_text((json.dumps(row) + "\n") * 4)
    return folder


@pytest.fixture(scope="module")
def finished(inputs: Path, environment: dict[str, str]) -> Path:
    """The folder of `inputs`, which also has a finished run."""
    command = [*arguments("train"), "--workdir", "run"]
    done = subprocess.run(
        command,
        cwd=inputs,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return inputs


@pytest.fixture
def start(request: pytest.FixtureRequest, tmp_path: Path, environment: dict[str, str]) -> Start:
    """Returns a function that starts a command in an own folder with the inputs."""
    is_copied = False

    def started(name: str, before: Sequence[str] = ()) -> subprocess.Popen[str]:
        nonlocal is_copied
        if not is_copied:
            kind = "finished" if name in OF_A_RUN else "inputs"
            shutil.copytree(request.getfixturevalue(kind), tmp_path, dirs_exist_ok=True)
            is_copied = True
        (tmp_path / "out").mkdir(exist_ok=True)
        return subprocess.Popen(
            [*before, *arguments(name)],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return started


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Returns the exit status and what a process has written. It is killed if it does not end."""
    try:
        out, errors = process.communicate(timeout=LONGEST_SECONDS)
    finally:
        process.kill()
    return process.returncode, out + errors


def check_files(folder: Path) -> None:
    """Reads every complete file of a folder."""
    for path in folder.rglob("*"):
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            load_file(path)


def check_it_succeeds_now(name: str, start: Start, *, was_complete: bool = False) -> None:
    """Runs the same command again; a server has to announce its address.

    was_complete: an earlier one has written everything, so that it may refuse to replace that.
    """
    process = start(name)
    if name not in SERVERS:
        status, written = end(process)
        is_refused = was_complete and status == 2 and "Traceback" not in written
        # An audit with findings has status 1.
        assert is_refused or status == int(name == "audit"), (status, written[-2000:])
        return
    time.sleep(1)
    deadline = time.monotonic() + LONGEST_SECONDS
    written = ""
    assert process.stdout
    while "http://" not in written and time.monotonic() < deadline and process.poll() is None:
        written += process.stdout.readline()
    process.terminate()
    _, further = end(process)
    assert "http://" in written, written + further
    assert "Traceback" not in further


@pytest.mark.parametrize("name", ["train", "sft"])
def test_ctrl_c_during_the_import_of_a_library_ends_at_once(name: str, start: Start) -> None:
    process = start(name)
    maps = Path(f"/proc/{process.pid}/maps")
    deadline = time.monotonic() + LONGEST_SECONDS
    while "jaxlib" not in maps.read_text() and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)

    assert end(process) == (-signal.SIGINT, "")


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_signal_at_any_moment(
    name: str,
    number: signal.Signals,
    start: Start,
    tmp_path: Path,
    tries: Tries,
    request: pytest.FixtureRequest,
) -> None:
    chance = random.Random(f"{name} {number.name}")
    count = 4 if request.config.getoption("--all-tries") else 1
    was_complete = False
    for _ in range(count):
        seconds = chance.uniform(0.5, 12.0)
        with tries.attempt("ends", f"{name}: {number.name} after {seconds:.2f} s"):
            process = start(name)
            time.sleep(seconds)
            process.send_signal(number)
            status, written = end(process)
            # An audit with findings has status 1.
            complete = int(name == "audit")
            assert status in (-number, 128 + number, complete), (status, written[-3000:])
            assert "Traceback" not in written, written[-3000:]
            # The signal may come after the export, and before the end of the process.
            was_complete |= status == complete or (tmp_path / "out/export").exists()
            check_files(tmp_path / "out")
    with tries.attempt("ends", f"{name}: again after {number.name}"):
        check_it_succeeds_now(name, start, was_complete=was_complete)


@pytest.mark.parametrize("name", WRITERS)
def test_a_read_only_folder(name: str, start: Start, tmp_path: Path, tries: Tries) -> None:
    # Also a process of root then needs the permission to write.
    command = ["--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
    before = [shutil.which("setpriv") or "setpriv", *command]
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this process may not drop capabilities")
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o555)
    with tries.attempt("ends", f"{name}: a read-only folder"):
        status, written = end(start(name, before))
        assert "Traceback" not in written, written[-3000:]
        assert status == 2, (status, written[-3000:])
        assert written.splitlines()[-1].startswith("error: "), written[-3000:]
    (tmp_path / "out").chmod(0o755)
    with tries.attempt("ends", f"{name}: again after a read-only folder"):
        check_it_succeeds_now(name, start)


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in SERVERS])
def test_a_full_disk(
    name: str, start: Start, tmp_path: Path, tries: Tries, request: pytest.FixtureRequest
) -> None:
    if not shutil.which("prlimit"):
        pytest.skip("there is no prlimit")
    is_all = request.config.getoption("--all-tries")
    was_complete = False
    for num_bytes in FILE_BYTES if is_all else FILE_BYTES[:1]:
        before = [shutil.which("prlimit") or "prlimit", f"--fsize={num_bytes}"]
        with tries.attempt("ends", f"{name}: files of at most {num_bytes} bytes"):
            status, written = end(start(name, before))
            assert "Traceback" not in written, written[-3000:]
            assert status in (0, 2), (status, written[-3000:])
            was_complete |= status == 0
            assert status == 0 or "error: " in written, written[-3000:]
            check_files(tmp_path / "out")
    with tries.attempt("ends", f"{name}: again after a full disk"):
        check_it_succeeds_now(name, start, was_complete=was_complete)
