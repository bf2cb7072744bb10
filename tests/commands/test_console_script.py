"""The command `jzero`: its table, its help, and a wheel in an environment of its own."""

import os
import pkgutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from runs import ROOT

from jzero.__main__ import COMMANDS
from jzero.terminal import STATUS_OF_BROKEN_PIPE

EMPTY = {
    "PATH": "/usr/bin:/bin",
    "HF_HUB_OFFLINE": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0",
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `jzero ARGUMENTS` in the clone."""
    command = [sys.executable, "-m", "jzero", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_a_function(name: str) -> None:
    assert callable(pkgutil.resolve_name(COMMANDS[name].function))


def test_watch_loads_no_jax() -> None:
    probe = "import sys; import jzero.watch; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", probe], cwd=ROOT, check=True)


def test_help_lists_every_command_and_loads_no_jax() -> None:
    probe = (
        "import sys; sys.argv = ['jzero', '--help']; from jzero.__main__ import main; main(); "
        "assert 'jax' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert {line.split()[0] for line in done.stdout.splitlines() if line[:3].strip()} >= {"jzero"}
    assert all(f"  {name} " in done.stdout for name in COMMANDS)
    assert len(done.stdout.splitlines()) <= 24


@pytest.mark.parametrize("arguments", [["--help"], ["watch", "--help"]])
def test_a_reader_that_ends_early_sees_no_traceback(arguments: list[str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "jzero", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode in (0, STATUS_OF_BROKEN_PIPE)


def test_unknown_commands_are_one_line() -> None:
    done = run("trian")
    assert done.returncode == 2
    assert done.stderr == "error: jzero has no command trian; did you mean train?\n"


def test_unknown_recipes_are_listed() -> None:
    done = run("train", "gsm9k:tiny")
    assert done.returncode == 2
    assert done.stderr.startswith("error: no recipe gsm9k: give a file that exists, or one of ")
    assert "gsm8k" in done.stderr


def test_a_wheel_works_in_an_empty_directory(tmp_path: Path) -> None:
    # -- Build the wheel from a copy of the tracked files, so that the clone gets no build folder.
    source = tmp_path / "source"
    files = subprocess.run(
        ["git", "ls-files", "-z", "jzero", "configs", "pyproject.toml", "setup.py", "README.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, [*files, "LICENSE"]):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", str(tmp_path), str(source)], check=True)
    [wheel] = tmp_path.glob("jzero-*.whl")

    # -- Install it in a new environment, which borrows the packages of this one, but not its jzero.
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = environment / "lib" / version / "site-packages"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True)
    ours = Path(pytest.__file__).parents[1]
    (site / "borrowed.pth").write_text(f"{ours}\n")

    empty = tmp_path / "empty"
    empty.mkdir()

    def jzero(*arguments: str) -> str:
        python = environment / "bin" / "python"
        script = site / "bin" / "jzero"
        command = [str(python), str(script), *arguments]
        done = subprocess.run(command, cwd=empty, env=EMPTY, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    assert "train" in jzero("--help")
    assert "GSM8K" in jzero("train", "gsm8k:tiny", "--help")
    assert "rollout.stop" in jzero("train", "countdown:tiny", "--help", "rollout.stop")
    assert "Qwen" in jzero("plan", "--topology", "v5e:1x1", "--largest")
    # Two steps of a recipe of the wheel: it finds its own files, such as tokenizers.
    small = ["model.arch=tiny-qwen2(num_hidden_layers=1)", "train.steps=1", "warm_start.steps=1"]
    small += ["eval.problems=2", "rollout.num_prompts=2", "train.minibatches=1"]
    jzero("train", "countdown:tiny", "--workdir", "run", *(f"--config.{item}" for item in small))
    assert (empty / "run" / "summary.json").exists()
    assert "jzero" in jzero("report", "run") or (empty / "run" / "report.html").exists()
    assert {path.name for path in empty.iterdir()} == {"run"}
