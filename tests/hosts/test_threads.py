"""jzero in a thread that is not the main one, as in Gradio, Streamlit and Ray."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

from jzero import cli, main
from jzero.hosts import interrupt, peers


def in_thread(function: Callable[[], object]) -> object:
    """Returns what a function returns, or raises what it raises, in another thread."""
    results: list[object] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def stop_signal() -> None:
    with interrupt.StopSignal():
        pass


@pytest.mark.parametrize("handle", [cli.end_quietly_at_ctrl_c, peers.end_on_signals, stop_signal])
def test_signals_stay_as_they_are_outside_of_the_main_thread(handle: Callable[[], None]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    in_thread(handle)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.usefixtures("quick_runs")
def test_a_run_trains_outside_of_the_main_thread(tmp_path: Path) -> None:
    settings = tiny.tiny_settings(train={"steps": 1}, eval={"problems": 0}, warm_start={"steps": 1})

    summary = in_thread(lambda: main.start(settings, tmp_path))

    assert isinstance(summary, dict) and summary["export"]
