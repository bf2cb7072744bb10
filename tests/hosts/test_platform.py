"""CPU runs do not load libtpu, and a TPU is still found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jzero.hosts import platform
from jzero.hosts.platform import VARIABLES, may_have_tpu

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
