"""Ctrl-C and SIGTERM in a run of one process. Several processes are in test_hosts.py."""

import os
import signal

import pytest

from jzero.distributed import interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_at_the_next_check_and_a_second_one_at_once(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    handler_before = signal.getsignal(number)
    with interrupt.StopSignal() as stop:
        stop.raise_if_stopped_here()
        stop.raise_if_stopped_anywhere()

        os.kill(os.getpid(), number)

        for check in (stop.raise_if_stopped_here, stop.raise_if_stopped_anywhere):
            with pytest.raises(interrupt.Interrupted, match=number.name):
                check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
            # Python handles the signal at the latest when this call returns.
            signal.pause()
    assert signal.getsignal(number) is handler_before
    assert capsys.readouterr().err == f"{number.name}: saving a checkpoint; again to stop at once\n"
