"""The command `python -m jzero.tinker`: its flags and mistakes, a restart, and the SDK."""

import json
import signal
import subprocess
from pathlib import Path

import pytest
from tinker_client import Client, process
from tinker_sdk import sdk_pythons

from benchmarks.tinker.scripted_loop import datum
from jzero.errors import UserError
from jzero.tinker import __main__ as command
from jzero.tinker.sessions import Keys

HERE = Path(__file__).parent
DATA = [datum([72, 101, 108, 108, 111, 32, 119])]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--adapters=0"], "--adapters=0: give 1 or more"),
        (["--context=1"], "--context=1"),
        (["--config.model.adapter.rank=4"], "clients choose the shape"),
        (["--config.model.adapter.dropout=0.1"], "the Tinker API has no dropout"),
        (["--config.rollout.max_turns=2"], "clients write the turns"),
    ],
)
def test_mistakes_are_one_line(model, flags, reason) -> None:
    with pytest.raises(UserError, match=reason):
        command.parse([f"--model={model}", *flags])


def test_only_this_machine_is_served_without_keys() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        command.check_host(host, Keys({}))
    for host in ("0.0.0.0", "::", "10.0.0.1", "host"):
        with pytest.raises(UserError, match="give --keys"):
            command.check_host(host, Keys({}))
        command.check_host(host, Keys({"tml-a": "a"}))


def test_a_killed_server_resumes_from_its_store(model, tmp_path) -> None:
    with process(model, tmp_path) as (server, url):
        client = Client(url).begin()
        client.train(DATA)
        promise = client.command("save_weights", path="a")
        path = client.done(promise)["path"]
        expected = [client.train(DATA)[0].tobytes() for _ in range(2)]
        client.command("save_weights", path="b")
        server.send_signal(signal.SIGKILL)
    with process(model, tmp_path) as (_, url):
        client = Client(url)
        assert client.post("get_info", model_id="x:train:0").status_code == 404
        client.session = client.post("create_session").json()["session_id"]
        promise = client.post(
            "load_weights", session_id=client.session, model_seq_id=0, path=path, optimizer=True
        )
        client.model = client.done(promise)["model_id"]
        assert [client.train(DATA)[0].tobytes() for _ in range(2)] == expected


def test_the_sdk_makes_its_tour(model, tmp_path) -> None:
    """Every interpreter of the environment variable drives the server with its SDK."""
    pythons = sdk_pythons()
    with process(model, tmp_path) as (_, url):
        for python in pythons:
            tour = subprocess.run(
                [python, HERE / "sdk_tour.py", url],
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            assert tour.returncode == 0, tour.stdout + tour.stderr
            facts = json.loads(tour.stdout.splitlines()[-1])
            assert facts.pop("version")
            assert all(facts.values()), facts
