"""Responses to a set: the same rows however often it was killed, of the engine or of a server that fails at first."""

import json
import random
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import datasets
import jax
import pytest
import reference
from runs import ROOT, Stand, finish, rows, wait_for

from jzero import config, generate
from jzero.run.base_model import read_base_model
from jzero.run.export_model import export_model
from jzero.tasks import math_problems, problem_sets

PROBLEMS, N, CHUNK = 22, 2, 3
ENGINE = "model.dtype=float32 rollout.max_prompt_tokens=16 rollout.max_new_tokens=24 rollout.num_slots=8 rollout.page_size=8 task.template=no"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A model, as a run exports it, and a set of problems."""
    directory = tmp_path_factory.mktemp("inputs")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    arch = config.ArchitectureConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    base = read_base_model(config.ModelConfig(arch=arch))
    rollout = config.RolloutConfig(max_prompt_tokens=16, max_new_tokens=24)
    export_model(directory / "model", base, rollout, reference.random_params(base.model), "float32")
    problems = [{"problem": f"{i}+{i}=", "answer": str(2 * i)} for i in range(PROBLEMS)]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    return directory


def arguments(inputs: Path, out: Path, settings: str, *more: str) -> list[str]:
    files = [
        f"--model={inputs / 'model'}",
        f"--data={inputs / 'data.jsonl'}",
        f"--out={out}",
        f"--n={N}",
    ]
    return [
        *files,
        *more,
        *(f"--config.{each}" for each in f"{settings} rollout.num_prompts={CHUNK}".split()),
    ]


def launch(environment, *given: str) -> subprocess.Popen:
    command, pipe = [sys.executable, "-m", "jzero.generate", *given], subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def call(monkeypatch, *given: str) -> None:
    monkeypatch.setattr("jzero.cli.start_jax", list)
    monkeypatch.setattr(sys, "argv", ["generate", *given])
    generate.main()


def test_killed_five_times_equals_one_that_was_not(environment, inputs, tmp_path):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    said, _ = finish(launch(environment, *arguments(inputs, whole, ENGINE)))
    assert f"{PROBLEMS} of {PROBLEMS} problems, " in said and "tokens/s" in said
    wanted = rows(whole)
    assert (
        len(wanted) == PROBLEMS * N
        and len({(row["id"], row["sample"]) for row in wanted}) == PROBLEMS * N
    )
    assert (
        len({row["completion"] for row in wanted}) > PROBLEMS
    )  # noise differs between chunks and samples
    for i in range(5):
        process = launch(environment, *arguments(inputs, out, ENGINE))
        wait_for(process, out, min(len(rows(out)) + CHUNK * N, (PROBLEMS - 1) * N))
        time.sleep(random.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert whole.read_bytes().startswith(out.read_bytes())
        if i == 2:  # as if it had died while it wrote a chunk: some whole lines, and a torn one
            out.write_bytes(whole.read_bytes()[: out.stat().st_size + 500])
    done = len(rows(out)) // (CHUNK * N) * CHUNK
    said, _ = finish(launch(environment, *arguments(inputs, out, ENGINE)))
    first = f"{min(done + CHUNK, PROBLEMS)} of {PROBLEMS} problems"
    assert said.split(",")[0].endswith(first) or done == PROBLEMS
    assert out.read_bytes() == whole.read_bytes()


class Server(Stand):
    """Speaks the OpenAI API; the answer is a function of the prompt and the seed. The first answers are failures."""

    request_queue_size = 64

    def __init__(self, failures: list[int], broken_from: int = 10**9):
        super().__init__(Handler)
        self.failures, self.broken_from, self.lock = failures, broken_from, threading.Lock()
        self.now = self.most = self.served = 0
        self.asked: list[tuple[str, dict]] = []

    def handle_error(self, request, client_address):
        pass  # the client has gone: it ran out of time


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_):
        pass

    def do_POST(self):
        asked, server = (
            json.loads(self.rfile.read(int(self.headers["content-length"]))),
            self.server,
        )
        with server.lock:
            server.asked.append((self.path, asked))
            server.now += 1
            server.most = max(server.most, server.now)
            status = server.failures.pop() if server.failures else 200
            server.served += status == 200
            status = 400 if server.served > server.broken_from else status
        time.sleep(2.0 if status == 0 else 0.02)  # 0: longer than the client waits
        with server.lock:
            server.now -= 1
        text = f"it is \\boxed{{{asked['seed'] % 5 * 2}}}"
        said = (
            {"message": {"role": "assistant", "content": text}}
            if "messages" in asked
            else {"text": text}
        )
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "stop_reason": (asked.get("stop") or [None])[0],
            **said,
        }
        body = {
            "id": "x",
            "object": "x",
            "created": 0,
            "model": asked["model"],
            "choices": [choice],
        }
        body = body | {"usage": {"prompt_tokens": 1, "completion_tokens": 7, "total_tokens": 8}}
        data = json.dumps(
            body if status in (0, 200) else {"error": {"message": "not now"}}
        ).encode()
        self.send_response(status or 200)
        self.send_header("content-length", str(len(data)))
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(data)


def url(server: Server) -> str:
    return f"--base-url=http://127.0.0.1:{server.server_port}/v1"


def test_a_server_that_fails_at_first(inputs, tmp_path, monkeypatch):
    pytest.importorskip("openai")
    failing, steady, settings = (
        tmp_path / "failing.jsonl",
        tmp_path / "steady.jsonl",
        "rollout.num_slots=4 task.template=no",
    )
    failures = [429, 500, 0, 503, 429, 408, 0]
    with Server(list(failures)) as server:
        call(monkeypatch, *arguments(inputs, failing, settings, url(server), "--timeout=0.5"))
        assert (
            2 <= server.most <= 4 + failures.count(0)
        )  # the client has given up on those that hang
        assert len(server.asked) == PROBLEMS * N + len(failures)
        path, asked = server.asked[0]
        assert (
            path == "/v1/completions"
            and asked["max_tokens"] == 3000
            and asked["model"] == str(inputs / "model")
        )
        assert len({asked["seed"] for _, asked in server.asked}) == PROBLEMS * N
    with Server([]) as server:
        call(monkeypatch, *arguments(inputs, steady, settings, url(server)))
        assert 2 <= server.most <= 4
    assert failing.read_bytes() == steady.read_bytes()
    read = rows(steady)
    assert len(read) == PROBLEMS * N and {row["tokens"] for row in read} == {7}
    for row in read:
        right = f"{{{json.loads(row['gold'])['answer']}}}" in row["completion"]
        assert row["correct"] == right == (row["score"] == 1.0)
    assert any(row["correct"] for row in read) and not all(row["correct"] for row in read)


def test_a_server_that_breaks_is_one_line_and_the_same_command_goes_on(
    inputs, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("openai")
    out, steady = tmp_path / "out.jsonl", tmp_path / "steady.jsonl"
    with Server([], broken_from=13) as server, pytest.raises(SystemExit):
        call(monkeypatch, *arguments(inputs, out, "task.template=r1", url(server)))
    err = capsys.readouterr().err
    assert err.startswith("error: --base-url http") and "not now" in err and err.count("\n") == 1
    assert len(rows(out)) == 2 * CHUNK * N
    for path in (out, steady):
        with Server([]) as server:
            call(monkeypatch, *arguments(inputs, path, "task.template=r1", url(server)))
            assert server.served == PROBLEMS * N - (2 * CHUNK * N if path == out else 0)
    assert out.read_bytes() == steady.read_bytes()
    assert all(
        row["completion"].endswith("</answer>") for row in rows(out)
    )  # the template's stop, which the server cut


def test_rows_load_as_a_dataset_for_sft(inputs, tmp_path, monkeypatch):
    pytest.importorskip("openai")
    columns = {
        "id",
        "sample",
        "prompt",
        "completion",
        "gold",
        "tokens",
        "finish",
        "score",
        "correct",
        "reason",
    }
    for template in ("no", "chat"):
        out = tmp_path / f"{template}.jsonl"
        with Server([]) as server:
            call(monkeypatch, *arguments(inputs, out, f"task.template={template}", url(server)))
            assert {path for path, _ in server.asked} == {
                "/v1/chat/completions" if template == "chat" else "/v1/completions"
            }
        loaded = datasets.load_dataset(
            "json", data_files=str(out), cache_dir=str(tmp_path / "cache"), split="train"
        )
        assert len(loaded) == PROBLEMS * N and set(loaded.column_names) == columns
        row = loaded[0]
        assert json.loads(row["gold"]).keys() == {"answer", "question"}
        if template == "chat":
            assert [message["role"] for message in row["prompt"]] == ["system", "user"]
            assert [message["role"] for message in row["completion"]] == ["assistant"]
        else:
            assert row["prompt"] == json.loads(row["gold"])["question"] and row[
                "completion"
            ].startswith("it is ")


def test_another_command_does_not_append(inputs, tmp_path, monkeypatch, capsys):
    pytest.importorskip("openai")
    out = tmp_path / "out.jsonl"
    with Server([]) as server:
        call(monkeypatch, *arguments(inputs, out, "task.template=no", url(server)))
        before = out.read_bytes()
        for settings, more, change in (
            ("task.template=no", "--n=3", "n: 2 -> 3"),
            ("task.template=qwen_math", "--n=2", 'config.task.template: "no" -> "qwen_math"'),
            ("task.template=no train.seed=1", "--n=2", "config.train.seed: 0 -> 1"),
            ("task.template=no", "--limit=4", "problems: "),
            ("task.template=no", "--model=other", "config.model.path: "),
        ):
            with pytest.raises(SystemExit):
                call(monkeypatch, *arguments(inputs, out, settings, url(server), more))
            assert change in capsys.readouterr().err and out.read_bytes() == before


@pytest.mark.parametrize(
    "command, message",
    [
        ("--out x.jsonl", "the following arguments are required: --model"),
        ("--model /nope --out x.jsonl --data data.jsonl", "no such directory: /nope"),
        ("--model /nope --out x.jsonl --data nope.jsonl", "data nope.jsonl cannot be loaded"),
        (
            "--model /nope --out data.jsonl --data data.jsonl",
            "--out data.jsonl exists, and not from this command",
        ),
        (
            "--model m --out x.jsonl --data data.jsonl --n 0 --base-url http://x",
            "--n=0 and 22 problems must be 1 or more",
        ),
        (
            "--model m --out x.jsonl --base-url http://x --config.task.name=countdown",
            "task.template='qwen_math' is not",
        ),
        (
            "--model m --out x.jsonl --data data.jsonl --config.task.template=x",
            "task.template='x' is not one of",
        ),
        (
            "--model m --out x.jsonl --data data.jsonl --config.rollout.num_slots=0",
            "rollout.num_slots=0 must be at least 1",
        ),
        (
            "--model m --out x.jsonl --data data.jsonl --chunk=3",
            "Unknown command line flag 'chunk'",
        ),
        (
            "--model m --out no/x.jsonl --data data.jsonl --n two",
            "argument --n: invalid int value: 'two'",
        ),
    ],
)
def test_a_mistake_is_one_line(command, message, inputs, tmp_path, monkeypatch, capsys):
    (tmp_path / "data.jsonl").write_bytes((inputs / "data.jsonl").read_bytes())
    monkeypatch.chdir(tmp_path)
    problem_sets.load.cache_clear()  # of a data.jsonl in another directory
    math_problems._load_sets.cache_clear()
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, *command.split())
    err = capsys.readouterr().err
    assert (
        stop.value.code == 2
        and err.startswith("error: ")
        and err.count("\n") == 1
        and message in err
    )
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def test_procedural_problems_and_help(inputs, tmp_path, monkeypatch, capsys):
    pytest.importorskip("openai")
    settings = "task.name=countdown task.template=plain"
    with Server([]) as server:
        call(
            monkeypatch,
            *arguments(inputs, tmp_path / "x.jsonl", settings, url(server), "--data=", "--limit=4"),
        )
    assert [row["id"] for row in rows(tmp_path / "x.jsonl")[::N]] == [
        f"countdown/train/{i}" for i in range(4)
    ]
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, "--help")
    assert stop.value.code == 0 and "--base-url" in capsys.readouterr().out
    assert jax.device_count() == 8
