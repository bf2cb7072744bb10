"""The notice before a spot machine is taken away, from a metadata server of the test."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import Metadata, finish, launch, rows, wait_for

from jzero.errors import UserError
from jzero.hosts import interrupt, preemption


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    monkeypatch.setattr(preemption, "POLL_SECONDS", 0.01)
    with Metadata() as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server.host)
        yield server


def wait_until_stopped(stop: interrupt.StopSignal) -> None:
    deadline = time.monotonic() + 30
    while not stop.reason:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == preemption.THREAD_NAME]


def wait_until_nobody_watches() -> None:
    for thread in watchers():
        thread.join(30)
    assert not watchers()


def test_a_notice_stops_the_run_as_a_signal_does(
    metadata: Metadata, capsys: pytest.CaptureFixture[str]
) -> None:
    with interrupt.StopSignal("gce") as stop:
        while len(metadata.requests) < 3:
            time.sleep(0.005)
        stop.raise_if_stopped_here()  # FALSE is no notice

        metadata.answer = "TRUE"
        wait_until_stopped(stop)

        for check in (stop.raise_if_stopped_here, stop.raise_if_stopped_anywhere):
            with pytest.raises(interrupt.Interrupted, match="preemption notice"):
                check()
    wait_until_nobody_watches()
    assert set(metadata.requests) == {("/computeMetadata/v1/instance/preempted", "Google")}
    assert capsys.readouterr().err.count("preemption notice: saving a checkpoint") == 1


def test_a_signal_after_a_notice_is_the_first_signal(metadata: Metadata) -> None:
    """The machine's shutdown sends SIGTERM while the checkpoint is being saved."""
    metadata.answer = "TRUE"
    with interrupt.StopSignal("gce") as stop:
        wait_until_stopped(stop)

        signal.raise_signal(signal.SIGTERM)  # raises nothing

        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_a_server_that_fails_for_a_while_is_asked_again(metadata: Metadata) -> None:
    with interrupt.StopSignal("gce") as stop:
        metadata.answer = None
        num_requests = len(metadata.requests)
        while len(metadata.requests) < num_requests + 3:
            time.sleep(0.005)
        stop.raise_if_stopped_here()
        metadata.answer = "TRUE"
        wait_until_stopped(stop)


def test_gce_without_a_metadata_server_is_refused(metadata: Metadata) -> None:
    metadata.answer = None
    with pytest.raises(UserError, match="train.preemption_notice=gce.*503.*none"):
        interrupt.StopSignal("gce").__enter__()
    assert not watchers()


@pytest.mark.parametrize(
    ("setting", "is_on_gce", "is_asked"),
    [("none", True, False), ("auto", True, True), ("auto", False, False), ("gce", False, True)],
)
def test_who_is_asked(
    metadata: Metadata,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    setting: str,
    is_on_gce: bool,
    is_asked: bool,
) -> None:
    product = tmp_path / "product_name"
    product.write_text("Google Compute Engine\n" if is_on_gce else "Standard PC\n")
    monkeypatch.setattr(preemption, "PRODUCT_NAME", product)

    with interrupt.StopSignal(setting):
        assert bool(metadata.requests) == is_asked
        assert bool(watchers()) == is_asked
    wait_until_nobody_watches()


def test_no_file_of_the_machines_name_is_no_gce(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preemption, "PRODUCT_NAME", tmp_path / "none")
    assert not preemption.is_on_gce()


def test_auto_says_so_where_the_server_does_not_answer(
    metadata: Metadata,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(preemption, "PRODUCT_NAME", tmp_path / "product_name")
    preemption.PRODUCT_NAME.write_text("Google Compute Engine\n")
    metadata.answer = None

    with interrupt.StopSignal("auto"):
        assert not watchers()

    assert "no preemption notices" in capsys.readouterr().err


def test_a_run_saves_and_ends_at_a_notice_and_goes_on(
    environment: dict[str, str], tmp_path: Path
) -> None:
    with Metadata() as metadata:
        environment = environment | {"GCE_METADATA_HOST": metadata.host}
        arguments = ["--config.train.preemption_notice=gce", "--unfinished_status=75"]
        workdir = tmp_path / "run"
        # More steps than are computed before the server is asked again.
        process = launch(environment, workdir, *arguments, "--config.train.steps=10000")
        wait_for(process, workdir / "metrics.jsonl", 2)
        metadata.answer = "TRUE"
        out, _ = finish(process, code=75)
        assert "preemption notice: stopped after step" in out
        num_steps = len(rows(workdir / "metrics.jsonl"))

        metadata.answer = "FALSE"
        few = f"--config.train.steps={num_steps + 2}"
        out, _ = finish(launch(environment, workdir, *arguments, few))
        assert f"resumed {workdir} at step {num_steps}" in out
