"""`python -m jzero.generate`: the same rows however often it is killed, from engine or server.

The server is a stand-in in a thread of the test. It speaks the OpenAI API over HTTP, and its answer
is a function of the prompt and the seed, as that of a real server with seeds is.
"""

import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Never

import datasets
import jax
import pytest
import reference
from runs import ROOT, Hub, Stand, finish, rows, wait_for

from jzero import config, generate
from jzero.model.base_model import read_base_model
from jzero.problems import problem_sets
from jzero.run.export_model import export_model
from jzero.tasks import math_problems
from jzero.workers.pool import Pool

PROBLEMS = 22
N = 2  # responses to a problem
CHUNK = 3  # problems
CHUNK_ROWS = CHUNK * N
ENGINE = (
    "model.dtype=float32 rollout.max_prompt_tokens=16 rollout.max_new_tokens=24 "
    "rollout.num_slots=8 rollout.page_size=8 task.template=no"
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model`, as a run exports it, and `data.jsonl`, a set of problems."""
    directory = tmp_path_factory.mktemp("inputs")
    arch = config.tiny_arch(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    base = read_base_model(config.ModelConfig(arch=arch))
    rollout = config.RolloutConfig(max_prompt_tokens=16, max_new_tokens=24)
    export_model(directory / "model", base, rollout, reference.random_params(base.model), "float32")
    problems = [{"problem": f"{i}+{i}=", "answer": str(2 * i)} for i in range(PROBLEMS)]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    return directory


def arguments(inputs: Path, out: Path, settings: str, *more: str) -> list[str]:
    """Returns the arguments of a command that answers the problems of `inputs`."""
    settings = f"{settings} rollout.num_prompts={CHUNK} task.grade_workers=1"
    return [
        f"--model={inputs / 'model'}",
        f"--data={inputs / 'data.jsonl'}",
        f"--out={out}",
        f"--n={N}",
        *more,
        *(f"--config.{setting}" for setting in settings.split()),
    ]


def launch(environment: dict[str, str], *argv: str) -> subprocess.Popen:
    """Starts the command as a process."""
    return subprocess.Popen(
        [sys.executable, "-m", "jzero.generate", *argv],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def call(monkeypatch, *argv: str) -> None:
    """Runs the command in this process, which has its devices already."""
    monkeypatch.setattr("jzero.cli.start_jax", list)
    monkeypatch.setattr(sys, "argv", ["generate", *argv])
    generate.main()


def test_a_command_killed_repeatedly_equals_one_that_was_not(
    environment: dict[str, str], inputs, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    _, printed = finish(launch(environment, *arguments(inputs, whole, ENGINE)))
    assert f"{PROBLEMS} of {PROBLEMS} problems, " in printed and "tokens/s" in printed
    expected = rows(whole)
    assert len(expected) == PROBLEMS * N
    assert len({(row["id"], row["sample"]) for row in expected}) == PROBLEMS * N
    # The noise differs between samples and between chunks.
    assert len({row["completion"] for row in expected}) > PROBLEMS

    for attempt in range(2):
        process = launch(environment, *arguments(inputs, out, ENGINE))
        wait_for(process, out, min(len(rows(out)) + CHUNK_ROWS, (PROBLEMS - 1) * N))
        time.sleep(random.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert whole.read_bytes().startswith(out.read_bytes())
        if attempt == 0:
            # As if it had died while it wrote a chunk: some complete lines, and a torn one.
            out.write_bytes(whole.read_bytes()[: out.stat().st_size + 500])

    complete = len(rows(out)) // CHUNK_ROWS * CHUNK
    _, printed = finish(launch(environment, *arguments(inputs, out, ENGINE)))
    progress = re.findall(f"[0-9]+ of {PROBLEMS} problems", printed)
    first = f"{min(complete + CHUNK, PROBLEMS)} of {PROBLEMS} problems"
    assert progress[0] == first or complete == PROBLEMS
    assert out.read_bytes() == whole.read_bytes()


# -- A server --------------------------------------------------------------------------------------


class Server(Stand):
    """Answers requests of the OpenAI API.

    The first requests get the statuses `failures`, the last entry first; status 0 answers later
    than the client waits. Once `broken_from` requests have succeeded all others fail. With
    `body_instead` every answer is that text.
    """

    request_queue_size = 64

    def __init__(
        self,
        failures: tuple[int, ...] = (),
        broken_from: int = 10**9,
        body_instead: str | None = None,
        broken_status: int = 401,
    ) -> None:
        super().__init__(Handler)
        self.broken_status = broken_status
        self.failures = list(failures)
        self.broken_from = broken_from
        self.body_instead = body_instead
        self.lock = threading.Lock()
        self.open_requests = 0
        self.most_open_requests = 0
        self.served = 0
        self.requests: list[tuple[str, dict]] = []  # path and body

    def handle_error(self, request, client_address) -> None:
        pass  # the client has given up on a late answer

    def begin(self, path: str, body: dict) -> int:
        """Counts a request; returns the status of its answer."""
        with self.lock:
            self.requests.append((path, body))
            self.open_requests += 1
            self.most_open_requests = max(self.most_open_requests, self.open_requests)
            if self.failures:
                return self.failures.pop()
            self.served += 1
            return 200 if self.served <= self.broken_from else self.broken_status

    def end(self) -> None:
        with self.lock:
            self.open_requests -= 1


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        status = self.server.begin(self.path, body)
        time.sleep(6.0 if status == 0 else 0.02)
        self.server.end()
        if self.server.body_instead is not None:
            data = self.server.body_instead.encode()
        elif status in (0, 200):
            data = json.dumps(completion(body)).encode()
        else:
            data = json.dumps({"error": {"message": "not now"}}).encode()
        self.send_response(status or 200)
        self.send_header("content-length", str(len(data)))
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(data)


def completion(request: dict) -> dict:
    """Returns the answer to a request: text or a message that depends on the seed."""
    text = f"it is \\boxed{{{request['seed'] % 5 * 2}}}"
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "stop_reason": (request.get("stop") or [None])[0],
    }
    if "messages" in request:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    return {
        "id": "x",
        "object": "x",
        "created": 0,
        "model": request["model"],
        "choices": [choice],
        "usage": {"prompt_tokens": 1, "completion_tokens": 7, "total_tokens": 8},
    }


def url(server: Server) -> str:
    return f"--base-url=http://127.0.0.1:{server.server_port}/v1"


def test_a_server_that_fails_at_first_gives_the_same_rows(
    inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing, steady = tmp_path / "failing.jsonl", tmp_path / "steady.jsonl"
    settings = "rollout.num_slots=4 task.template=no"
    failures = (429, 500, 0, 503, 408)

    with Server(failures) as server:
        call(monkeypatch, *arguments(inputs, failing, settings, url(server), "--timeout=2"))
        # A request that hangs is still open when the client has given up on it.
        assert 2 <= server.most_open_requests <= 4 + failures.count(0)
        assert len(server.requests) == PROBLEMS * N + len(failures)
        path, request = server.requests[0]
        assert path == "/v1/completions"
        assert request["max_tokens"] == 3000
        assert request["model"] == str(inputs / "model")
        assert len({request["seed"] for _, request in server.requests}) == PROBLEMS * N
    with Server() as server:
        call(monkeypatch, *arguments(inputs, steady, settings, url(server)))
        assert 2 <= server.most_open_requests <= 4

    assert failing.read_bytes() == steady.read_bytes()
    written = rows(steady)
    assert len(written) == PROBLEMS * N
    assert {row["tokens"] for row in written} == {7}
    for row in written:
        is_right = f"{{{json.loads(row['gold'])['answer']}}}" in row["completion"]
        assert row["correct"] == is_right == (row["score"] == 1.0)
    assert any(row["correct"] for row in written)
    assert not all(row["correct"] for row in written)


def test_greedy_responses_come_without_temperature(
    inputs: Path, tmp_path: Path, monkeypatch
) -> None:
    argv = ["--greedy", "--n=1"]
    with Server() as server:
        to_server = arguments(inputs, tmp_path / "greedy.jsonl", "", url(server))
        call(monkeypatch, *to_server, *argv)
        sampled = arguments(inputs, tmp_path / "sampled.jsonl", "", url(server))
        call(monkeypatch, *sampled, "--n=1")
        with pytest.raises(SystemExit):  # the rows of the file are no greedy ones
            call(monkeypatch, *to_server, "--n=1")
    temperatures = [body.get("temperature") for _, body in server.requests]
    assert temperatures == [0.0] * PROBLEMS + [None] * PROBLEMS


def test_greedy_responses_do_not_depend_on_the_seed(
    environment: dict[str, str], inputs: Path, tmp_path: Path
) -> None:
    outs = [tmp_path / f"{seed}.jsonl" for seed in (1, 2)]
    for seed, out in enumerate(outs, start=1):
        settings = f"{ENGINE} train.seed={seed}"
        finish(launch(environment, *arguments(inputs, out, settings, "--greedy"), "--n=1"))
    first, second = ({row["prompt"]: row["completion"] for row in rows(out)} for out in outs)
    assert len(first) == PROBLEMS
    assert first == second


def test_a_server_that_breaks_is_one_line_and_the_same_command_goes_on(
    inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, steady = tmp_path / "out.jsonl", tmp_path / "steady.jsonl"
    two_chunks = 2 * CHUNK_ROWS
    with Server(broken_from=two_chunks) as server, pytest.raises(SystemExit):
        call(monkeypatch, *arguments(inputs, out, "task.template=r1", url(server)))
    error = capsys.readouterr().err
    assert error.startswith("error: --base-url http") and error.count("\n") == 1
    assert "not now" in error
    # Requests that were in flight when the server broke may be asked again.
    written = len(rows(out))
    assert 0 < written <= two_chunks

    for path, left in ((out, PROBLEMS * N - written), (steady, PROBLEMS * N)):
        with Server() as server:
            call(monkeypatch, *arguments(inputs, path, "task.template=r1", url(server)))
            assert server.served == left
    assert out.read_bytes() == steady.read_bytes()
    # The stop string of the template, which the server removes, is in the text again.
    assert all(row["completion"].endswith("</answer>") for row in rows(out))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("<html>It works!</html>", "not valid JSON: Expecting value at character 0"),
        ('{"choices": []}', "choices: List should have at least 1 item"),
        ('{"object": "list"}', "choices: Field required"),
        ('{"choices": [{"text": 7}]}', "choices.0.text: Input should be a valid string"),
        ('{"choices": [{}]}', "choices.0.text: Field required"),
        ('{"choices": [{"text": "x"}], "usage": {"completion_tokens": -1}}', "greater than or"),
    ],
)
def test_an_answer_of_another_kind_is_one_line(
    body,
    reason,
    inputs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Server(body_instead=body) as server, pytest.raises(SystemExit) as stop:
        call(monkeypatch, *arguments(inputs, tmp_path / "out.jsonl", "", url(server)))
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("error: --base-url http") and error.count("\n") == 1
    assert reason in error and "the same command continues from here" in error


@pytest.mark.parametrize("mistake", [TypeError, AttributeError, LookupError])
def test_a_mistake_of_ours_is_not_blamed_on_the_server(
    mistake, inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def step(*_: object, **__: object) -> Never:
        raise mistake("a fault of jzero")

    monkeypatch.setattr(Pool, "step", step)
    with Server() as server, pytest.raises(mistake, match="a fault of jzero"):
        call(monkeypatch, *arguments(inputs, tmp_path / "out.jsonl", "", url(server)))


def test_rows_load_as_a_dataset_for_sft(
    inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        "reasoning_content",
        "error",
        "model_name",
        # Those of the data set:
        "problem",
        "answer",
    }
    paths = {"no": "/v1/completions", "chat": "/v1/chat/completions"}
    for template, path in paths.items():
        out = tmp_path / f"{template}.jsonl"
        with Server() as server:
            call(monkeypatch, *arguments(inputs, out, f"task.template={template}", url(server)))
            assert {path for path, _ in server.requests} == {path}
        loaded = datasets.load_dataset(
            "json", data_files=str(out), cache_dir=str(tmp_path / "cache"), split="train"
        )
        assert len(loaded) == PROBLEMS * N and set(loaded.column_names) == columns
        row = loaded[0]
        gold = json.loads(row["gold"])
        assert gold.keys() == {"answer", "question"}
        if template == "chat":
            assert [message["role"] for message in row["prompt"]] == ["system", "user"]
            assert [message["role"] for message in row["completion"]] == ["assistant"]
        else:
            assert row["prompt"] == gold["question"]
            assert row["completion"].startswith("it is ")


def test_another_command_does_not_append(
    inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    with Server() as server:
        call(monkeypatch, *arguments(inputs, out, "task.template=no", url(server)))
        before = out.read_bytes()
        for settings, flag, change in (
            ("task.template=no", "--n=3", "n: 2 -> 3"),
            ("task.template=qwen_math", "--n=2", 'config.task.template: "no" -> "qwen_math"'),
            ("task.template=no train.seed=1", "--n=2", "config.train.seed: 0 -> 1"),
            ("task.template=no", "--limit=4", "problems: "),
            ("task.template=no", "--model=other", "config.model.path: "),
        ):
            with pytest.raises(SystemExit):
                call(monkeypatch, *arguments(inputs, out, settings, url(server), flag))
            assert change in capsys.readouterr().err
            assert out.read_bytes() == before


# In these commands {tmp} is the test's own folder, which holds data.jsonl and nothing else.
MISTAKES = {
    "--out x.jsonl": "the following arguments are required: --model",
    "--model {tmp}/no --out x.jsonl --data data.jsonl": "no such directory: {tmp}/no",
    "--model m --out x.jsonl --data nope.jsonl": "data nope.jsonl cannot be loaded",
    "--model m --out data.jsonl --data data.jsonl": (
        "--out data.jsonl exists, and not from this command"
    ),
    "--model m --out x.jsonl --data data.jsonl --n 0 --base-url http://x": (
        "--n=0 must be at least 1"
    ),
    "--model m --out x.jsonl --data data.jsonl --n 2 --greedy": (
        "--n=2: all greedy responses to a problem are the same"
    ),
    "--model m --out x.jsonl --data data.jsonl --config.rollout.max_turns=2": (
        "rollout.max_turns=2"
    ),
    "--model m --out x.jsonl --base-url http://x --config.task.name=countdown": (
        "task.template='qwen_math' is not"
    ),
    (
        "--model m --out x.jsonl --base-url http://x --config.task.name=countdown "
        "--config.task.template=plain"
    ): "task.name=countdown makes problems without end: give their number with --limit",
    "--model m --out x.jsonl --data data.jsonl --base-url http://x:port/v1": (
        "--base-url=http://x:port/v1 is not a server address: use http://HOST:PORT"
    ),
    "--model m --adapter a --out x.jsonl --data data.jsonl --base-url http://x": (
        "--adapter a is for jzero's own engine: remove it, and give the name that the server"
    ),
    "--model m --out x.jsonl --data data.jsonl --base-url localhost:8000": (
        "--base-url=localhost:8000 is not a server address"
    ),
    "--model m --out x.jsonl --data data.jsonl --config.task.template=x": (
        "task.template='x' is not one of"
    ),
    "--model m --out x.jsonl --data data.jsonl --config.rollout.num_slots=-1": (
        "rollout.num_slots=-1 must be at least 0"
    ),
    "--model m --out x.jsonl --data data.jsonl --chunk=3": "--chunk=3: unknown flag",
    "--model m --out x.jsonl --data data.jsonl --retries=-1 --base-url http://x": (
        "--retries=-1 must be at least 0"
    ),
    "--model m --out x.jsonl --data data.jsonl --split=validation": (
        "data data.jsonl has the splits train: validation is not among them"
    ),
    "--model m --out x.jsonl --data data.jsonl --push-to-hub=me": (
        "--push-to-hub me: give USER/NAME of a data set"
    ),
    "--model m --out x.jsonl --data data.jsonl --force": (
        "--private and --force are about the push: give --push-to-hub, too"
    ),
    "--model m --out x.jsonl --no-gold --config.task.name=countdown --config.task.template=r1": (
        "--split and --no-gold are for sets of questions"
    ),
    "--model m --out x.jsonl --data data.jsonl --no-gold --config.task.reward.functions=format": (
        "--no-gold grades nothing: leave task.reward.functions as it is"
    ),
    "--model m --out x.jsonl --data data.jsonl --model-name n": (
        "--model-name and --retry-errors are about servers: give --base-url, too"
    ),
    "--model m --out x.jsonl --data data.jsonl --base-url http://x,http://x": (
        "--base-url http://x,http://x names a server twice"
    ),
    "--model m --out x.jsonl --data data.jsonl --base-url http://x,y": (
        "--base-url=y is not a server address"
    ),
    "--model m --out x.jsonl --data data.jsonl --base-url http://x --timeout 0": (
        "--timeout=0 must be from 0 to 86400 seconds"
    ),
    "--model m --out x.jsonl --data data.jsonl --base-url http://x --max-refused -1": (
        "--max-refused=-1 must be at least 0"
    ),
    "--out x.jsonl --data data.jsonl --model-name n": (
        "the following arguments are required: --model"
    ),
    "--model m --out no/x.jsonl --data data.jsonl --n two": (
        "argument --n: invalid int value: 'two'"
    ),
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_line(
    command,
    inputs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "data.jsonl").write_bytes((inputs / "data.jsonl").read_bytes())
    monkeypatch.chdir(tmp_path)
    # These remember the data.jsonl of another folder.
    problem_sets.load.cache_clear()
    math_problems._load_sets.cache_clear()

    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, *command.replace("{tmp}", str(tmp_path)).split())

    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("error: ") and error.count("\n") == 1
    assert MISTAKES[command].replace("{tmp}", str(tmp_path)) in error
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def test_procedural_problems_need_a_limit_and_no_data(
    inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "x.jsonl"
    settings = "task.name=countdown task.template=plain"
    with Server() as server:
        flags = (url(server), "--data=", "--limit=4")
        call(monkeypatch, *arguments(inputs, out, settings, *flags))
    assert [row["id"] for row in rows(out)[::N]] == [f"countdown/train/{i}" for i in range(4)]


# Problems without answers, splits, retries


def write_splits(folder: Path, **splits: list[dict]) -> str:
    """Writes a data set of splits as `save_to_disk` does; returns its directory."""
    tables = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    datasets.DatasetDict(tables).save_to_disk(folder / "set")
    return str(folder / "set")


def questions(name: str, count: int, **more: str) -> list[dict]:
    return [{"problem": f"{name} {i}?", **more} for i in range(count)]


def test_problems_without_answers_are_answered_in_their_order_and_not_graded(
    inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_splits(tmp_path, train=questions("train", 4), train_hard=questions("hard", 3))
    prompt = tmp_path / "prompt.jinja"
    prompt.write_text("Think about {{ question }} \\boxed{}")
    settings = f"task.template=chat:{prompt}"

    with Server() as server:
        flags = (url(server), f"--data={data}", "--no-gold", "--split=train_hard")
        call(monkeypatch, *arguments(inputs, tmp_path / "out.jsonl", settings, *flags))

    written = rows(tmp_path / "out.jsonl")
    asked = [row["prompt"][0]["content"] for row in written[::N]]
    assert asked == [f"Think about hard {i}? \\boxed{{}}" for i in range(3)]
    assert [row["id"] for row in written[::N]] == [f"math/train_hard/{i}" for i in range(3)]
    assert len(written) == 3 * N
    for row in written:
        assert (row["score"], row["correct"], row["reason"]) == (None, None, "not graded")
        assert row["completion"][0]["content"].startswith("it is ")


def test_a_split_with_answers_is_graded(
    inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = questions("test", 3, answer="4")
    data = write_splits(tmp_path, train=questions("train", 2, answer="2"), test=test)

    with Server() as server:
        flags = (url(server), f"--data={data}", "--split=test", "--limit=2")
        out = tmp_path / "out.jsonl"
        call(monkeypatch, *arguments(inputs, out, "task.template=no", *flags))

    written = rows(out)
    assert [row["prompt"] for row in written[::N]] == ["test 0?", "test 1?"]
    for row in written:
        assert row["correct"] == ("{4}" in row["completion"])


def test_the_engine_answers_without_gold_in_grouped_rows(
    inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_compilation: None
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"problem": "1+1=", "id": "u1", "answer": "2"}\n')
    out = tmp_path / "out.jsonl"
    call(monkeypatch, *arguments(inputs, out, ENGINE, f"--data={data}", "--no-gold", "--group"))
    [row] = rows(out)
    assert row["reason"] == ["not graded"] * N
    assert len(row["completions"]) == N and row["error"] == [None] * N
    assert (row["id"], row["source_id"], row["answer"]) == ("math/train/0", "u1", "2")
    assert json.loads(row["gold"]) == {"answer": "2", "question": "1+1="}
    assert row["model_name"] == "model"


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize(("retries", "requests"), [(0, 1), (2, 3)])
def test_a_request_is_repeated_as_often_as_asked(
    retries: int,
    requests: int,
    inputs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = "task.template=no rollout.num_slots=1"
    with Server(failures=(500,) * 99) as server, pytest.raises(SystemExit):
        flags = (url(server), f"--retries={retries}", "--limit=1", "--n=1")
        call(monkeypatch, *arguments(inputs, tmp_path / "out.jsonl", settings, *flags))
    assert len(server.requests) == requests
    assert f"(a request is repeated --retries={retries} times)" in capsys.readouterr().err


# The hub


@pytest.fixture
def dataset_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A stand-in for the hub, which this process then talks to."""
    with Hub("datasets") as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        yield hub


def generate_three(inputs, out: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    """Generates responses to three problems, which a server of the test's own gives."""
    with Server() as server:
        command = arguments(inputs, out, "task.template=no", url(server), "--limit=3", *flags)
        call(monkeypatch, *command)


def test_the_complete_file_is_pushed_only_when_asked(
    inputs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    dataset_hub: Hub,
) -> None:
    out = tmp_path / "out.jsonl"
    push = "--push-to-hub=me/tiny"

    generate_three(inputs, out, monkeypatch)
    assert not dataset_hub.branches

    generate_three(inputs, out, monkeypatch, push, "--private")
    pushed = dataset_hub.branches["main"]
    assert pushed["train.jsonl"] == out.read_bytes()
    card = pushed["README.md"].decode()
    assert f"{N} responses of model to every problem of data.jsonl, graded" in card
    assert str(tmp_path) not in card
    assert "commit/1111" in capsys.readouterr().out

    with pytest.raises(SystemExit):
        generate_three(inputs, out, monkeypatch, push)
    error = capsys.readouterr().err
    assert "--push-to-hub me/tiny has README.md and train.jsonl already" in error
    assert error.count("\n") == 1

    pushed["train.jsonl"] = b"old"
    generate_three(inputs, out, monkeypatch, push, "--force")
    assert dataset_hub.branches["main"]["train.jsonl"] == out.read_bytes()


def test_a_push_without_the_right_token_is_one_line_and_keeps_the_file(
    inputs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    dataset_hub: Hub,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    out = tmp_path / "out.jsonl"
    with pytest.raises(SystemExit):
        generate_three(inputs, out, monkeypatch, "--push-to-hub=me/tiny")
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: --push-to-hub me/tiny: ")
    assert "Traceback" not in error
    assert "The file is complete: the same command pushes it again" in error
    assert len(rows(out)) == 3 * N
    assert not dataset_hub.branches


def test_help_needs_no_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, "--help")
    assert stop.value.code == 0 and "--base-url" in capsys.readouterr().out
    assert jax.device_count() == 8
