"""Sends every hostile value to every field of every body and file format that jzero reads.

    pytest tests/attacks/test_values_fields.py                     # a seeded sample
    pytest tests/attacks/test_values_fields.py --all-tries         # every value in every field

The fields are those of valid documents, which the code itself writes where it can: a new field is
attacked without a new test. A reader may use the value or refuse it in one line: with a UserError,
or with a status of 4xx. A traceback, a 5xx, a NaN that is used as a number, or a read without an
end breaks a try.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jinja2
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from starlette.exceptions import HTTPException

from jzero import config, grade
from jzero import filter as filter_command
from jzero.audits import log
from jzero.config import AdapterConfig, ModelConfig
from jzero.errors import UserError
from jzero.files import parse_json
from jzero.model import chat_template, peft, tokenizer
from jzero.model.base_model import read_base_model
from jzero.model.huggingface import headers
from jzero.problems import problem_sets
from jzero.rollout import multiple_choice
from jzero.run import buckets, history, kv_pool, workdir
from jzero.run.record import RunRecord
from jzero.serving.limits import Limits
from jzero.serving.requests import CompletionRequest, RequestReader
from jzero.types import JsonValue
from jzero.watching.runs import WatchedRun, Watcher
from jzero.workers.pool import Pool
from tests.attacks.conftest import Tries
from tests.hostile_values import Mutation, hostile_files, mutations, sampled, to_json
from tests.servers import load_alone, save_model

SAMPLED = 100  # tries per document without --all-tries


@pytest.fixture
def chosen(request: pytest.FixtureRequest) -> Callable[[Iterator[Mutation]], list[Mutation]]:
    """Returns a function that takes the tries of this session out of all mutations."""
    if request.config.getoption("--all-tries"):
        return list
    return lambda tries: sampled(tries, SAMPLED)


Chosen = Callable[[Iterator[Mutation]], list[Mutation]]


@contextmanager
def one_line_allowed() -> Iterator[None]:
    """Lets a UserError pass that is one short printable line."""
    try:
        yield
    except UserError as error:
        assert str(error).isprintable(), repr(str(error))
        assert len(str(error)) < 1000, f"{len(str(error))} characters"


# -- The settings of a run -------------------------------------------------------------------------


def test_the_settings_of_a_run(chosen: Chosen, tries: Tries) -> None:
    for mutation in chosen(mutations(WATCHED["config.json"])):
        with tries.attempt("config.json", str(mutation)), one_line_allowed():
            settings = config.from_json(to_json(mutation.document), "runs/a/config.json")
            for value in config.flatten(json.loads(config.to_json(settings))).values():
                assert not isinstance(value, float) or math.isfinite(value)


# -- watch and report ------------------------------------------------------------------------------

METRICS_ROW: JsonValue = {
    "step": 3,
    "reward/mean": 0.5,
    "time/step": 1.0,
    "time/sample": 0.5,
    "rollout/tokens": 100,
    "rollout/slot_utilization": 0.1,
    "rollout/length": 10.0,
    "update/padding": 0.9,
    "update/left_out": 0.0,
    "policy/entropy": 0.1,
    "compile/seconds": 0.5,
}
SAMPLE_ROW: JsonValue = {
    "step": 3,
    "id": "p",
    "sample": 0,
    "group": 0,
    "prompt": "q",
    "response": "r",
    "gold": {"answer": 5},
    "score": 1.0,
    "correct": True,
    "failed": False,
    "reason": "correct",
    "finish": "stop",
    "tokens": 3,
    "advantage": 0.5,
    "rewards": {"accuracy": 1.0, "length": 0.5},
    "token_texts": ["a", "b"],
    "logps": [-0.5, -0.25],
    "ages": [0, 0],
    "token_advantages": [0.5, 0.5],
}
SUMMARY: JsonValue = {
    "steps": 5,
    "seconds": 10.0,
    "seconds_by_phase": {"sample": 5.0},
    "peak_rss_bytes": 1 << 30,
    "eval_all": {"before": {"eval/accuracy": 0.5}, "after": {"eval/accuracy": 0.75}},
    "export": None,
    "remarks": [],
}
VERSIONS: JsonValue = {"jzero": "1", "jax": "2", "device": "cpu"}
WATCHED: dict[str, JsonValue] = {
    "metrics.jsonl": METRICS_ROW,
    "samples.jsonl": SAMPLE_ROW,
    "samples.1.jsonl": SAMPLE_ROW,
    "summary.json": SUMMARY,
    "versions.json": VERSIONS,
    "config.json": json.loads(config.to_json(config.Config())),
}


def write_run(workdir: Path) -> None:
    """Writes the files of a healthy run."""
    workdir.mkdir(parents=True, exist_ok=True)
    assert isinstance(METRICS_ROW, dict)
    assert isinstance(SAMPLE_ROW, dict)
    for name, document in WATCHED.items():
        if not name.endswith(".jsonl"):
            (workdir / name).write_text(json.dumps(document))
    for name, row in (("metrics.jsonl", METRICS_ROW), ("samples.jsonl", SAMPLE_ROW)):
        rows = [json.dumps(row | {"step": step}) + "\n" for step in (1, 2)]
        (workdir / name).write_text("".join(rows))


def follow(workdir: Path, *, describes: bool = False) -> WatchedRun:
    """Reads a run as the page does. Raises if the page would get anything that is not JSON."""
    run = WatchedRun(workdir)
    if describes:  # takes a hundredth of a second
        run.describe()
    run.refresh()
    run.rollouts.index_some(math.inf)
    replies = [
        run.state()[1],
        [block.to_json() for block in run.rollouts.blocks],
        run.rollouts.rows(range(5)),
        run.rollouts.rows([10**30, -(10**30), 2**63]),
        run.rollouts.search("a"),
    ]
    json.dumps(replies, allow_nan=False)
    return run


@pytest.mark.parametrize("filename", WATCHED)
def test_a_watched_run(filename: str, tmp_path: Path, chosen: Chosen, tries: Tries) -> None:
    workdir = tmp_path / "run"
    write_run(workdir)
    healthy = (workdir / filename).read_text() if (workdir / filename).exists() else ""
    assert isinstance(METRICS_ROW, dict)
    last = json.dumps(METRICS_ROW | {"step": 500}) + "\n"
    for mutation in chosen(mutations(WATCHED[filename])):
        with tries.attempt("watch", f"{filename}: {mutation}"):
            text = to_json(mutation.document) + "\n"
            is_log = filename.endswith(".jsonl")
            (workdir / filename).write_text(healthy + text if is_log else text)
            run = follow(workdir, describes=filename == "config.json")
            # The run is followed after the hostile line.
            with (workdir / "metrics.jsonl").open("a") as file:
                file.write(last)
            run.refresh()
            assert "curves" in run.state()[1]
            if filename == "metrics.jsonl":
                is_ahead = run.metrics.steps[-1] > 500
                assert is_ahead or run.metrics.steps[-1] == 500
                (workdir / filename).write_text(healthy)
            else:
                assert run.metrics.steps[-1] == 500
    assert json.loads(last)["step"] == 500


@pytest.mark.parametrize("filename", WATCHED)
def test_a_watched_run_with_a_hostile_file(filename: str, tmp_path: Path, tries: Tries) -> None:
    for name, path in hostile_files(tmp_path, filename):
        with tries.attempt("watch", f"{filename} is {name}"):
            workdir = path.parent
            path.rename(workdir / "kept")
            write_run(workdir)
            (workdir / filename).unlink(missing_ok=True)
            (workdir / "kept").rename(path)
            healthy = tmp_path / "healthy"
            write_run(healthy)
            watcher = Watcher([workdir, healthy])
            watcher.stop()
            state = watcher.state("")
            assert state["runs"][1]["axes"], "the run beside it is shown"
            follow(workdir, describes=True)
            for file in workdir.iterdir():
                if file != path:
                    file.unlink()


# -- Data sets -------------------------------------------------------------------------------------

DATA_ROW: JsonValue = {
    "problem": "1 + 1?",
    "answer": "2",
    "answers": ["2", "two"],
    "level": 3,
    "nested": {"gold": 2.5},
    "messages": [{"role": "user", "content": "1 + 1?"}],
}


def read_data(path: Path) -> None:
    """Reads a file of problems as the task of mathematics does, with all its columns."""
    dataset = problem_sets.load_split(str(path), "train")
    for row in problem_sets.read_rows(
        dataset, "", "", str(path), prompt_column="", with_readable_columns=True
    ):
        assert isinstance(row.question, str)
        json.dumps(row.answer, allow_nan=False)
        row.question.encode()


def test_a_row_of_a_data_set(tmp_path: Path, chosen: Chosen, tries: Tries) -> None:
    valid = json.dumps(DATA_ROW) + "\n"
    for number, mutation in enumerate(chosen(mutations(DATA_ROW))):
        # `load` keeps what it has read of a path.
        path = tmp_path / f"{number}.jsonl"
        with tries.attempt("data", f"row: {mutation}"), one_line_allowed():
            path.write_text(valid + to_json(mutation.document) + "\n")
            read_data(path)
        path.unlink()


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "arrow"])
def test_a_hostile_data_file(suffix: str, tmp_path: Path, tries: Tries) -> None:
    for name, path in hostile_files(tmp_path, f"data.{suffix}"):
        # 64 MiB of one row are within the limits of a data set.
        if suffix.startswith("json") and name == "a line of 64 MiB":
            continue
        with tries.attempt("data", f"{suffix}: {name}"), one_line_allowed():
            read_data(path)


def write_repeated(path: Path, num_rows: int, length: int) -> None:
    """Writes a small Parquet file with many equal rows."""
    indices = pyarrow.array([0] * num_rows, pyarrow.int8())
    column = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["q" * length]))
    table = pyarrow.table({"problem": column, "answer": column})
    # Without the schema, readers build the texts.
    pyarrow.parquet.write_table(table, path, compression="zstd", store_schema=False)


@pytest.mark.parametrize(("num_rows", "length"), [(2_000_000, 10), (900_000, 100_000), (1, 10)])
def test_a_small_file_with_many_rows(
    num_rows: int, length: int, tmp_path: Path, tries: Tries
) -> None:
    path = tmp_path / "bomb.parquet"
    write_repeated(path, num_rows, length)
    with tries.attempt("data", f"parquet: {num_rows} rows of {length} characters"):
        if num_rows == 1:
            assert len(problem_sets.load_split(str(path), "train")) == 1
        else:
            with pytest.raises(UserError, match="rows and .* bytes or more"):
                problem_sets.load_split(str(path), "train")


# -- Logs ------------------------------------------------------------------------------------------

AUDIT_ROW: JsonValue = {
    "prompt_ids": [1, 2],
    "response_ids": [3, 4],
    "logprobs": [-0.5, -0.25],
    "temperature": 1.0,
    "top_p": 0.9,
    "top_k": 5,
    "version": "v1",
}
RATES_ROW: JsonValue = {"id": "mine/0", "accuracy": 0.5, "problem": "1 + 1?"}
GRADE_ROW: JsonValue = {
    "id": 1,
    "task": "gsm8k",
    "gold": "2",
    "prediction": "so it is 2",
    "prompt": "1 + 1?",
    "template": "boxed",
    "mode": "response",
}
QUESTION: JsonValue = {"question": "1 + 1?", "choices": ["1", "2"], "answer": 1}


def read_audit_log(path: Path) -> None:
    for response in log.read_log(path, 112, log.Sampling()):
        assert response.logps is None or np.isfinite(response.logps).all()
        assert math.isfinite(response.sampling.temperature)


def read_rates(path: Path) -> None:
    for row, rate in filter_command.read_rates(str(path)).items():
        assert row >= 0
        assert 0 <= rate <= 1


def read_graded(path: Path) -> None:
    pool = Recorder()
    for place, line in grade.numbered_lines(path):
        grade.submit(pool, place, line, ["fast"])


class Recorder(Pool):
    """A pool that keeps requests instead of grading them."""

    def __init__(self) -> None:
        self.requests: list[object] = []

    def step(self, key: object, request: object) -> None:
        self.requests.append(request)


LOGS: dict[str, tuple[JsonValue, Callable[[Path], object]]] = {
    "audit": (AUDIT_ROW, read_audit_log),
    "filter --rates": (RATES_ROW, read_rates),
    "grade": (GRADE_ROW, read_graded),
    "multiple choice": (QUESTION, multiple_choice.read_questions),
}


@pytest.mark.parametrize("surface", LOGS)
def test_a_row_of_a_log(surface: str, tmp_path: Path, chosen: Chosen, tries: Tries) -> None:
    row, read = LOGS[surface]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    read(path)
    for mutation in chosen(mutations(row)):
        with tries.attempt(surface, str(mutation)), one_line_allowed():
            path.write_text(to_json(mutation.document) + "\n")
            read(path)


@pytest.mark.parametrize("surface", LOGS)
def test_a_hostile_log(surface: str, tmp_path: Path, tries: Tries) -> None:
    for name, path in hostile_files(tmp_path, "rows.jsonl"):
        with tries.attempt(surface, name), one_line_allowed(), suppress(FileNotFoundError):
            LOGS[surface][1](path)


# -- The records of a run --------------------------------------------------------------------------

HISTORY: JsonValue = {
    "stages": [
        {
            "kind": "rl",
            "name": "math",
            "steps": 5,
            "start": "Qwen/Qwen2.5-0.5B",
            "data": ["openai/gsm8k"],
            "task": "math",
            "template": "boxed",
            "algorithm": "grpo",
            "warm_start_steps": 0,
            "teachers": ["a"],
            "settings": {"train.steps": "5"},
        }
    ]
}
MANIFEST: JsonValue = {"number": "1", "files": [["metrics.jsonl", [10, 20]]]}
RECORDS: dict[str, tuple[str, JsonValue, Callable[[Path], object]]] = {
    "training_history.json": ("training_history.json", HISTORY, history.read_history),
    "kv_pool": (kv_pool.NAME, {kv_pool.PAGES: 10}, kv_pool.read_pages),
    "bucket manifest": (buckets.STATE, MANIFEST, buckets.read_state),
    "workdir": (
        "config.json",
        WATCHED["config.json"],
        lambda folder: workdir.claim_workdir(folder, config.to_json(config.Config())),
    ),
    "rows of metrics": (
        "metrics.jsonl",
        METRICS_ROW,
        lambda folder: workdir.check_history(folder, 1000),
    ),
}


@pytest.mark.parametrize("surface", RECORDS)
def test_a_record_of_a_run(surface: str, tmp_path: Path, chosen: Chosen, tries: Tries) -> None:
    filename, document, read = RECORDS[surface]
    for mutation in chosen(mutations(document)):
        with tries.attempt("records", f"{surface}: {mutation}"), one_line_allowed():
            (tmp_path / filename).write_text(to_json(mutation.document) + "\n")
            read(tmp_path)


@pytest.mark.parametrize("surface", RECORDS)
def test_a_hostile_record_of_a_run(surface: str, tmp_path: Path, tries: Tries) -> None:
    filename, _, read = RECORDS[surface]
    for name, path in hostile_files(tmp_path, filename):
        with tries.attempt("records", f"{surface}: {name}"), one_line_allowed():
            read(path.parent)


RECORD = RunRecord(
    5,
    {"before": {"eval/accuracy": 0.5}},
    10.0,
    {"sample": 5.0},
    ["AAAA"],
    {"name": "base", "sha256": "0" * 64},
).to_json()


def test_the_record_in_a_checkpoint(chosen: Chosen, tries: Tries) -> None:
    assert RunRecord.from_json(RECORD).to_json() == RECORD
    for mutation in chosen(mutations(RECORD)):
        with tries.attempt("records", f"checkpoint: {mutation}"):
            try:
                values = parse_json(to_json(mutation.document), Path("record.json"))
                record = RunRecord.from_json(values)
                assert math.isfinite(record.seconds)
                assert type(record.step) is int
                assert all(map(math.isfinite, record.seconds_by_phase.values()))
            except ValueError as error:  # the callers name the checkpoint
                assert str(error).isprintable(), repr(str(error))


# -- Models and adapters ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer that has a chat template."""
    return Path(save_model(tmp_path_factory.mktemp("attacked") / "model"))


def read_model(path: Path) -> None:
    """Reads what a run reads of a model directory before its weights."""
    base = read_base_model(ModelConfig(path=str(path)))
    tok = base.tokenizer
    tokenizer.encode(tok, "1+1")
    if tok.chat_template:
        chat_template.render(tok, [{"role": "user", "content": "hello"}])


MODEL_FILES = ("config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json")


@pytest.mark.parametrize("filename", MODEL_FILES)
def test_a_file_of_a_model(filename: str, model: Path, chosen: Chosen, tries: Tries) -> None:
    path = model / filename
    if not path.exists():
        path.write_text('{"eos_token_id": [0], "bos_token_id": 1, "temperature": 0.5}')
    valid = path.read_text()
    for mutation in chosen(mutations(json.loads(valid))):
        with tries.attempt("models", f"{filename}: {mutation}"), one_line_allowed():
            path.write_text(to_json(mutation.document))
            read_model(model)
    path.write_text(valid)
    read_model(model)


HOSTILE_TEMPLATES = {
    "nested loops": "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) * 2 }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(90) }}",
    "a long text": "{{ 'x' }}" * 100_000,
    "a repeated text": "{{ 'a' * 10**13 }}",
    "a long integer": "{{ 10**5000 }}",
    "internals": "{{ ''.__class__.__mro__ }}",
    "an exception": "{{ raise_exception('\x1b[2J' * 1000) }}",
    "no template": "{% for %}",
}


@pytest.mark.parametrize("name", HOSTILE_TEMPLATES)
def test_a_chat_template(
    name: str, model: Path, tries: Tries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "TEMPLATE_SECONDS", 0.5)
    tok = tokenizer.load(str(model))
    tok.chat_template = HOSTILE_TEMPLATES[name]
    begin = time.monotonic()
    with tries.attempt("models", f"chat template: {name}"), one_line_allowed():
        chat_template.render(tok, [{"role": "user", "content": "hello"}])
    assert time.monotonic() - begin < 5


def test_a_tokenizer_whose_expression_backtracks(model: Path, tries: Tries) -> None:
    path = model / "tokenizer.json"
    valid = path.read_text()
    fields = json.loads(valid)
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+(?<=b)$"}, "behavior": "Isolated"}
    fields["pre_tokenizer"] = pattern | {"invert": False}
    path.write_text(json.dumps(fields))
    try:
        with tries.attempt("models", "expression"), one_line_allowed():
            tokenizer.encode(tokenizer.load(str(model)), "a" * 100 + "c")
    finally:
        path.write_text(valid)


def test_an_adapter(model: Path, tmp_path: Path, chosen: Chosen, tries: Tries) -> None:
    arch = read_base_model(ModelConfig(path=str(model))).model
    valid = peft.config_json(arch, AdapterConfig(rank=2), "base")
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(valid))
    peft.read_settings(tmp_path, arch)
    for mutation in chosen(mutations(valid)):
        with tries.attempt("adapters", str(mutation)), one_line_allowed():
            path.write_text(to_json(mutation.document))
            settings = peft.read_settings(tmp_path, arch)
            assert math.isfinite(settings.alpha)
    path.unlink()
    for name, hostile in hostile_files(tmp_path, "adapter_config.json"):
        with tries.attempt("adapters", name), one_line_allowed():
            peft.read_settings(hostile.parent, arch)


HEADER: JsonValue = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [8, 12]},
}


def test_a_safetensors_header(tmp_path: Path, chosen: Chosen, tries: Tries) -> None:
    path = tmp_path / "model.safetensors"
    for mutation in chosen(mutations(HEADER)):
        with tries.attempt("adapters", f"header: {mutation}"), one_line_allowed():
            header = to_json(mutation.document).encode()
            path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
            headers.read_header(path)
    for name, hostile in hostile_files(tmp_path, "model.safetensors"):
        with tries.attempt("adapters", f"safetensors: {name}"), one_line_allowed():
            headers.read_header(hostile)


# -- Requests of an OpenAI client ------------------------------------------------------------------

COMPLETION: JsonValue = {
    "model": "m",
    "prompt": "hello",
    "n": 2,
    "max_tokens": 4,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "stop": ["x"],
    "seed": 1,
    "logprobs": 2,
    "echo": True,
    "prompt_logprobs": 1,
    "return_token_ids": True,
    "stream": False,
    "frequency_penalty": 0,
    "user": "somebody",
}
CHAT: JsonValue = {
    "model": "m",
    "messages": [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi", "tool_calls": []},
        {"role": "user", "content": "again"},
    ],
    "n": 1,
    "max_completion_tokens": 4,
    "temperature": 1.0,
    "logprobs": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "adds",
                "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
            },
        }
    ],
    "tool_choice": "none",
    "parallel_tool_calls": True,
}


@pytest.fixture(scope="module")
def reader(model: Path) -> RequestReader:
    return load_alone(str(model)).new_reader(Limits())


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a_request_of_an_openai_client(
    kind: str, reader: RequestReader, chosen: Chosen, tries: Tries
) -> None:
    document = COMPLETION if kind == "completion" else CHAT
    assert isinstance(document, dict)
    fields = CompletionRequest.model_fields
    # A new field of the request is attacked with the others.
    others = {name: None for name in fields if name not in COMPLETION and name not in CHAT}
    reader.make_sequences(reader.read(to_json(document).encode(), kind == "chat"), kind == "chat")
    for mutation in chosen(mutations(document | others)):
        with tries.attempt("serve", f"{kind}: {mutation}"):
            try:
                request = reader.read(to_json(mutation.document).encode(), kind == "chat")
                for sequence in reader.make_sequences(request, kind == "chat"):
                    assert math.isfinite(sequence.temperature)
                    assert 0 <= sequence.request_id < 2**31
                    assert sequence.length_limit < 2**31
                reply = reader.reply_options(request, kind == "chat")
                assert reply.num_choices >= 1
            except (ValueError, HTTPException, jinja2.TemplateError):
                pass  # a status of 4xx
