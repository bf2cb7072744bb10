"""CPU runs do not load libtpu, have devices that suit the model, and a TPU is still found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import Mesh

from jzero import cli
from jzero.hosts import platform
from jzero.hosts.platform import VARIABLES, may_have_tpu, platform_of
from jzero.planning.chips import DescribedDevice

START = "from jzero import cli; cli.start_jax([]); import jax; print(jax.devices()[0].platform)"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.skipif(
    may_have_tpu(Path("/")) or platform.has_plugins(), reason="the machine has an accelerator"
)
def test_a_cpu_run_prints_nothing_of_libtpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}

    command = [sys.executable, "-c", START]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    assert (run.returncode, run.stdout, run.stderr) == (0, "cpu\n", "")


CPU_DEVICES = """
import sys
from jzero import cli
cli.start_jax([])
from jzero.planning.fitting import set_cpu_devices
set_cpu_devices(sys.argv[1])
import jax
print(jax.device_count())
"""


def number_of_cpu_devices(model: Path, **variables: str) -> int:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""} | variables
    command = [sys.executable, "-c", CPU_DEVICES, str(model)]
    return int(subprocess.check_output(command, env=environment, text=True, timeout=300))


@pytest.mark.parametrize(
    ("layers", "variables", "expected"),
    [
        (1, {}, platform.default_cpu_devices()),
        (64, {}, 1),
        (64, {"JAX_NUM_CPU_DEVICES": "3"}, 3),
    ],
)
def test_a_large_model_has_one_cpu_device(
    layers: int, variables: dict[str, str], expected: int, tmp_path: Path
) -> None:
    model = {
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": layers,  # of 1.05M parameters
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(model))

    assert number_of_cpu_devices(tmp_path, **variables) == expected


def test_a_model_that_is_not_there_is_reported_later(tmp_path: Path) -> None:
    missing = number_of_cpu_devices(tmp_path / "missing", HF_HUB_OFFLINE="1")

    assert missing == platform.default_cpu_devices()


PROGRAMS = """
from jzero import cli
cli.start_jax([])
import jax
jax.jit(lambda x: x + 1)(1.0)
print(jax.config.values["jax_compilation_cache_dir"])
"""


def test_commands_share_the_compiled_programs_of_a_user(tmp_path: Path) -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-c", PROGRAMS]

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )

    assert run().stdout.startswith(str(tmp_path / "jzero/programs"))
    given = str(tmp_path / "given")
    assert run(JAX_COMPILATION_CACHE_DIR=given).stdout.strip() == given
    # A home that cannot be written to costs nothing but the cache.
    (tmp_path / "file").touch()
    without = run(XDG_CACHE_HOME=str(tmp_path / "file"))
    assert (without.stdout, without.stderr) == ("None\n", "")


def pci_device(root: Path, vendor: str, device: str) -> None:
    directory = root / "sys/bus/pci/devices" / f"{vendor}-{device}"
    directory.mkdir(parents=True)
    (directory / "vendor").write_text(f"{vendor}\n")
    (directory / "device").write_text(f"{device}\n")


def test_a_machine_without_an_accelerator_has_no_tpu(tmp_path: Path) -> None:
    pci_device(tmp_path, "0x1ae0", "0x0042")  # the network of a Google Cloud machine
    pci_device(tmp_path, "0x8086", "0x0063")

    assert not may_have_tpu(tmp_path)


@pytest.mark.parametrize("path", ["dev/accel0", "dev/accel/0", "dev/vfio/0"])
def test_a_tpu_is_found_by_its_device_file(path: str, tmp_path: Path) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).touch()

    assert may_have_tpu(tmp_path)


def test_a_tpu_is_found_on_the_pci_bus(tmp_path: Path) -> None:
    pci_device(tmp_path, "0x1ae0", "0x0063")  # a v5e

    assert may_have_tpu(tmp_path)


@pytest.mark.parametrize("name", VARIABLES)
def test_a_tpu_is_found_by_the_variables_that_describe_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "v5litepod-8")

    assert may_have_tpu(tmp_path)


@pytest.mark.parametrize(
    ("name", "expected"), [("tpu", "tpu"), ("gpu", "gpu"), ("cuda", "gpu"), ("cpu", "cpu")]
)
def test_described_gpus_are_gpus(name: str, expected: str) -> None:
    """A program that is planned is the one that runs: JAX's described GPUs are called "cuda"."""
    mesh = Mesh(np.array([DescribedDevice(0, 0, name, "NVIDIA H100 80GB HBM3")]), "slots")
    assert platform_of(mesh) == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_a_process_on_one_core_has_one_cpu_device() -> None:
    """The number of devices follows the cores of the process, not those of the machine."""
    core = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, {{{core}}})\n"
        "from jzero.hosts.platform import default_cpu_devices\n"
        "print(default_cpu_devices())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.stdout == "1\n", done.stderr


BUSY = (
    "Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process with pid "
    "4711. Not attempting to load libtpu.so in this process."
)
LEFT_OVER = (
    'ABORTED: Internal error when accessing libtpu multi-process lockfile. Run "$ sudo rm '
    '/tmp/libtpu_lockfile".'
)


@pytest.mark.parametrize(
    ("message", "start"),
    [
        (BUSY, "the TPU is in use by another process, pid 4711: stop it first"),
        (LEFT_OVER, "the TPU is in use by another process: stop it first"),
    ],
)
def test_a_tpu_that_another_process_has_ends_with_one_line(
    message: str, start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, cli.user_errors():
        raise RuntimeError(message)

    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {start}")
    assert len(err.splitlines()) == 1
    assert err.rstrip().endswith("remove /tmp/libtpu_lockfile")


def test_other_errors_of_devices_keep_their_traceback() -> None:
    with pytest.raises(RuntimeError, match="no such backend"), cli.user_errors():
        raise RuntimeError("no such backend")
