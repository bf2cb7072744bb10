"""Ctrl-C and SIGTERM in a run of one process. Several processes are in test_hosts.py."""

import os
import signal
import subprocess
import sys

import pytest

from jzero.hosts import interrupt


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


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


HEAD = """
import atexit, os, signal, time
from jzero import cli

signal.signal(signal.SIGINT, signal.default_int_handler)  # a test in the background ignores it

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""


def test_ctrl_c_ends_a_command_with_a_word() -> None:
    done = run_script(f"{HEAD}\nwith cli.user_errors():\n    interrupt()")

    assert (done.returncode, done.stderr) == (130, "stopped\n")


def test_ctrl_c_while_a_command_exits_ends_it_without_a_traceback() -> None:
    """Exit handlers of libraries that a signal interrupts would print one."""
    done = run_script(f"{HEAD}\natexit.register(interrupt)\ncli.start_jax([])")

    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
