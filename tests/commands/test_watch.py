"""The live page: following files, an index of rollouts, a server that only its user reads."""

import contextlib
import http.client
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import httpx
import pytest
from runs import started

from jzero.errors import UserError
from jzero.run.metrics_writer import MetricsWriter
from jzero.run.record import EVALUATIONS_FILE
from jzero.watching import rollouts
from jzero.watching.lines import LineFile
from jzero.watching.metric_table import MAX_POINTS, MetricTable
from jzero.watching.rollouts import RolloutIndex, shorten
from jzero.watching.runs import WatchedRun, Watcher, find_runs
from jzero.watching.server import page_server

ROOT = Path(__file__).resolve().parents[2]


def write_run(workdir: Path, steps: int, samples: int = 2) -> Path:
    """Writes the files of a run that is still going on."""
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_text('{"train": {"steps": 100}}')
    writer = MetricsWriter(workdir, None)
    for step in range(1, steps + 1):
        add_step(writer, step, samples)
    writer.close()
    return workdir


def add_step(writer: MetricsWriter, step: int, samples: int = 2) -> None:
    rows = [
        {"id": f"p/{step % 3}", "sample": i, "prompt": f"ask {step}", "response": f"say {step} {i}"}
        | {"gold": 1, "score": float(i), "advantage": i - 0.5, "tokens": 10 * i, "group": 0}
        | {"reason": "correct" if i else "wrong value", "correct": bool(i), "finish": "stop"}
        for i in range(samples)
    ]
    writer.write_samples(step, rows)
    writer.write(step, {"reward/mean": step / 100, "rollout/tokens": 10, "time/step": 36})


@contextlib.contextmanager
def served(*workdirs: Path) -> Iterator[str]:
    """Serves the page of runs; yields its address."""
    watcher = Watcher(workdirs)
    with page_server("127.0.0.1", 0, watcher) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"{server.url}/"
        server.shutdown()
    watcher.stop()


# -- Files that change -----------------------------------------------------------------------------


def test_lines_of_a_growing_file_are_complete_lines(tmp_path: Path) -> None:
    path = tmp_path / "file"
    lines = LineFile(path)
    assert not lines.poll() and len(lines) == 0
    path.write_bytes(b"one\ntw")
    assert lines.poll() and lines.read(0, 9) == [b"one\n"]
    with path.open("ab") as file:
        file.write(b"o\n\nfour\r x\n")
    assert lines.poll() and lines.read(1, 4) == [b"two\n", b"\n", b"four\r x\n"]
    assert not lines.poll()
    assert lines.generation == 0


def test_a_copy_that_is_replaced_by_a_longer_one_is_read_on(tmp_path: Path) -> None:
    path, new = tmp_path / "file", tmp_path / "new"
    lines = LineFile(path)
    path.write_bytes(b"one\n")
    lines.poll()
    new.write_bytes(b"one\ntwo\n")
    new.replace(path)  # as rsync does
    assert lines.poll() and lines.generation == 0 and len(lines) == 2


@pytest.mark.parametrize("content", [b"on", b"uno\ndue\n", b"", b"one\n"])
def test_a_shorter_or_other_file_is_read_again(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    lines = LineFile(path)
    path.write_bytes(b"one\ntwo\n")
    lines.poll()
    path.write_bytes(content)
    assert lines.poll() and lines.generation == 1
    assert lines.read(0, 9) == [line + b"\n" for line in content.split(b"\n")[:-1]]


def test_metrics_of_a_resumed_run_and_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    table = MetricTable(path, {})
    path.write_text('{"step": 1, "a": 1}\nnonsense\n[1]\n{"step": 2, "a": 2, "b": 5}\n{"step": 3')
    table.poll(lambda step: [])
    assert table.curves() == {"a": [[1, 1, 1, 1, 1], [2, 2, 2, 2, 2]], "b": [[2, 2, 5, 5, 5]]}
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 7, "t": true, "s": "x"}\n')
    table.poll(lambda step: [])
    assert table.curves() == {"a": [[1, 1, 1, 1, 1], [2, 2, 7, 7, 7]]}


def test_axes_add_up_tokens_and_hours(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", MAX_POINTS + 100)
    table = MetricTable(run / "metrics.jsonl", {})
    table.poll(lambda step: [])
    axes = table.axes()
    assert len(axes) == MAX_POINTS
    assert axes[0] == [1, 10, 0.01] and axes[-1] == pytest.approx([600, 6000, 6])


# -- Rollouts --------------------------------------------------------------------------------------


def test_the_index_begins_with_the_newest_rollouts_and_has_all(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 700)
    index = RolloutIndex(run)
    index.poll()
    index.index_some(60)
    assert index.is_done
    assert [block.start for block in index.blocks] == [900, 400, 0]
    steps = {block.start + i: step for block in index.blocks for i, step in enumerate(block.step)}
    assert [steps[line] for line in range(1400)] == [1 + line // 2 for line in range(1400)]
    assert [row["response"] for row in index.rows_of_step(350)] == ["say 350 0", "say 350 1"]
    assert index.rows_of_step(701) == []

    writer = MetricsWriter(run, 700)
    add_step(writer, 701)
    writer.close()
    index.poll()
    index.index_some(60)
    assert list(index.blocks[-1].step) == [701, 701]
    assert [index.texts.texts[i] for i in index.blocks[-1].reason] == ["wrong value", "correct"]


def test_a_rotated_file_is_read_with_the_older_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 4)
    index = RolloutIndex(run)
    index.poll()
    before = index.generation
    (run / "samples.jsonl").rename(run / "samples.1.jsonl")
    (run / "samples.jsonl").write_text('{"step": 5, "response": "new"}\n')
    index.poll()
    assert index.generation != before and len(index) == 9
    assert [row.get("response") for row in index.rows([7, 8])] == ["say 4 1", "new"]
    assert index.rows_of_step(4)[1]["response"] == "say 4 1"


def test_a_search_finds_text_in_any_case_and_form(tmp_path: Path) -> None:
    lines = [{"response": 'Größe "A"'}, {"response": "groesse"}, {"response": "B"}]
    with (tmp_path / "samples.jsonl").open("w") as file:
        for i, line in enumerate(lines):
            file.write(json.dumps({"step": i} | line, ensure_ascii=i == 0) + "\n")
    index = RolloutIndex(tmp_path)
    index.poll()
    assert index.search('ße "a"')["lines"] == [0]
    assert index.search("")["lines"] == [2, 1, 0]
    assert index.search("zebra") == {"lines": [], "searched": 3, "total": 3}


def test_rows_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = {"step": 1, "response": "x" * 10**7, "gold": [[[[[[[["deep"]]]]]]]], "logps": [0] * 10**5}
    nested = "[" * 10**5
    (tmp_path / "samples.jsonl").write_text(
        f'{json.dumps(big)}\n{{"step": 1, "a": {nested}\n' + '{"step": 2, "score": NaN}\n' * 50
    )
    index = RolloutIndex(tmp_path)
    index.poll()
    index.index_some(60)
    rows = index.rows(range(52))
    assert len(rows) == rollouts.MAX_ROWS
    assert "characters are left out here" in rows[0]["response"]
    assert len(json.dumps(rows)) < 100_000
    assert rows[1] == {"line": 1}
    assert rows[2]["score"] == "nan"
    monkeypatch.setattr("jzero.watching.lines.MAX_LINE", 1000)
    assert index.rows([0])[0]["note"] == "This rollout is too large to be shown."
    assert len(shorten("ab" * 10**6)) < rollouts.MAX_TEXT + 100


# -- The server ------------------------------------------------------------------------------------


def test_the_state_follows_the_files(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3)
    with served(run) as url:
        state = httpx.get(f"{url}state").json()
        assert state["runs"][0]["axes"][-1][0] == 3
        assert state["units"]["time/step"] == "seconds"
        for _ in range(100):  # until the kind of training is known
            reply = httpx.get(f"{url}state", params={"version": state["version"]}).json()
            if "runs" not in reply:
                break
            state = reply
            time.sleep(0.1)
        assert "runs" not in reply

        writer = MetricsWriter(run, 3)
        add_step(writer, 4)
        writer.close()
        for _ in range(100):
            reply = httpx.get(f"{url}state", params={"version": state["version"]}).json()
            if "runs" in reply:
                break
            time.sleep(0.1)
        assert reply["runs"][0]["axes"][-1][0] == 4
        query = {"run": 0, "generation": "", "cursor": 0, "texts": 0}
        index = httpx.get(f"{url}index", params=query).json()
        assert index["total"] == 8
        assert httpx.get(f"{url}rows?run=0&lines=7").json()[0]["response"] == "say 4 1"
        assert httpx.get(f"{url}search?run=0&text=SAY%204").json()["lines"] == [7, 6]


def test_a_run_that_goes_on_has_its_evaluations_so_far(tmp_path: Path) -> None:
    workdir = write_run(tmp_path / "run", 1)
    run = WatchedRun(workdir)
    run.refresh()
    version, state = run.state()
    assert "eval_all" not in state["summary"]
    assert state["training"] is None  # not known yet, unlike "" of another version of jzero

    (workdir / EVALUATIONS_FILE).write_text('{"before": {"eval/accuracy": 0.25}}')
    run.refresh()

    new_version, state = run.state()
    assert new_version != version
    assert state["summary"]["eval_all"] == {"before": {"eval/accuracy": 0.25}}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/../../etc/passwd", 404),
        ("/rows", 404),
        ("/rows?run=7&lines=1", 404),
        ("/rows?run=0&lines=x", 400),
        ("/rows?run=0&lines=-5,99999999999", 200),
        ("/index?run=0&generation=x&cursor=99&texts=-3", 200),
        ("/search?run=0&text=" + "%00" * 3000, 200),
        ("/state?version=" + "x" * 60_000, 200),
    ],
)
def test_wrong_requests_get_a_short_answer(tmp_path: Path, path: str, status: int) -> None:
    run = write_run(tmp_path / "run", 1)
    with served(run) as url:
        connection = http.client.HTTPConnection(httpx.URL(url).netloc.decode(), timeout=30)
        connection.request("GET", path)
        reply = connection.getresponse()
        assert reply.status == status
        assert len(reply.read()) < 100_000
        connection.request("POST", "/state", body="x")
        assert connection.getresponse().status == 405
        connection.close()
        assert httpx.get(url).status_code == 200


@pytest.mark.parametrize("value", [{"a": float("inf")}, object()])
def test_a_state_that_is_no_json_gets_an_error_and_rows_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    run = write_run(tmp_path / "run", 1)
    monkeypatch.setattr(Watcher, "state", lambda self, version: value)
    with served(run) as url:
        assert httpx.get(f"{url}state").status_code == 500
        assert httpx.get(f"{url}rows?run=0&lines=0").status_code == 200


def test_a_browser_that_leaves_is_no_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", 1)
    with served(run) as url:
        address = httpx.URL(url)
        for _ in range(10):
            with socket.create_connection((address.host, address.port), timeout=30) as connection:
                connection.sendall(b"GET /state HTTP/1.1\r\nHost: localhost\r\n\r\n")
                # Closes without waiting for the reply, as a browser does.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert httpx.get(f"{url}state").status_code == 200
    assert capfd.readouterr().err == ""


def test_pages_of_other_names_read_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1)
    with served(run) as url:
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[bad"):
            assert httpx.get(f"{url}state", headers={"Host": host}).status_code == 403, host
        for host in ("localhost:9999", "127.0.0.1", "[::1]:80"):
            assert httpx.get(f"{url}state", headers={"Host": host}).status_code == 200, host
        headers = {"Sec-Fetch-Site": "cross-site"}
        assert httpx.get(f"{url}state", headers=headers).status_code == 403
        reply = httpx.get(url)
        assert reply.headers["X-Frame-Options"] == "DENY"
        assert "Access-Control-Allow-Origin" not in reply.headers
        assert "default-src 'none'" in reply.text and reply.text.isascii()
        assert reply.text != httpx.get(url).text  # the nonce


def test_folders_of_runs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "runs" / name, 1) for name in ("b", "a")]
    for age, run in enumerate(runs):
        os.utime(run / "metrics.jsonl", (age, age))
    assert find_runs([tmp_path / "runs", runs[0]], is_started=True) == runs
    with pytest.raises(UserError, match=r"has no metrics.jsonl: give the --workdir of a run"):
        find_runs([tmp_path], is_started=True)
    started = tmp_path / "started"
    started.mkdir()
    (started / "config.json").write_text("{}")
    assert find_runs([started], is_started=False) == [started]


def test_the_command_serves_without_jax_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 2)
    command = [sys.executable, "-X", "importtime", "-m", "jzero.watch", str(run), "--port", "0"]
    # A pipe would be full before the server listens.
    with (
        (tmp_path / "err").open("w") as err_file,
        started(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=err_file, text=True) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        url = line.split()[0]
        state = httpx.get(f"{url}state", timeout=60)
        assert state.json()["runs"][0]["name"] == str(run)
        process.send_signal(2)
        process.communicate(timeout=60)
    err = (tmp_path / "err").read_text()
    assert process.returncode == 0 and "stopped" in err.splitlines()
    assert "| jax\n" not in err

    port = "--port=1"
    taken = subprocess.run(
        [sys.executable, "-m", "jzero.watch", str(tmp_path / "none"), port],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (
        taken.returncode == 2 and taken.stderr.startswith("error: ") and "none has" in taken.stderr
    )
