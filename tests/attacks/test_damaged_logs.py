"""Logs that another program wrote, or that are damaged: replay, filter --rates and audit."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile_values import hostile_files, mutations, sampled, to_json
from lying_samplers import receiving_stream, whole_lies

from jzero import replay
from jzero.audits.log import Sampling
from jzero.audits.log import read_log as read_audited
from jzero.errors import UserError
from jzero.filter import read_rates
from jzero.jobs.requests import Request, Result
from jzero.jobs.stream import read_log, request_file, result_file

MOST = 400  # mutations of one document


def refused_or(read: Callable[[], object]) -> None:
    """Calls a reader, which may refuse the file in one line."""
    try:
        read()
    except UserError as error:
        assert "\n" not in str(error) and "\x1b" not in str(error)


def write_run(workdir: Path, request: Request, result: Result) -> dict:
    """Writes the files of a run with one logged request. Returns the line of its log."""
    row = {
        "step": 1,
        "request": request.id,
        "version": 0,
        "snapshot": result.snapshot,
        "later_weights": [],
        "continued_tokens": 0,
        "seed": [0, 1],
        "sampler": "s",
        "digest": result.digest,
    }
    result_file(workdir, request.id).parent.mkdir(exist_ok=True, parents=True)
    request_file(workdir, request.id).write_bytes(request.to_json())
    result_file(workdir, request.id).write_bytes(result.to_bytes())
    (workdir / "jobs.jsonl").write_text(json.dumps(row) + "\n")
    return row


def test_the_log_of_a_replay(tmp_path: Path, tries) -> None:
    with receiving_stream(tmp_path) as trainer:
        request, result = trainer.request, trainer.honest()
        older = trainer.honest(trainer.older)
    workdir = tmp_path / "logged"
    row = write_run(workdir, request, result)
    assert len(replay.read_requests(workdir, None, 0)) == 1
    for mutation in sampled(mutations(row), MOST):
        (workdir / "jobs.jsonl").write_text(to_json(mutation.document) + "\n")
        with tries.attempt("replay: jobs.jsonl", str(mutation)):
            refused_or(lambda: replay.read_requests(workdir, None, 0))
    write_run(workdir, request, result)
    document = json.loads(request.to_json())
    for mutation in sampled(mutations(document), MOST):
        request_file(workdir, request.id).write_text(to_json(mutation.document))
        with tries.attempt("replay: the request", str(mutation)):
            refused_or(lambda: replay.read_requests(workdir, None, 0))
    write_run(workdir, request, result)
    for name, lie in whole_lies(result, older).items():
        try:
            result_file(workdir, request.id).write_bytes(lie.to_bytes())
        except (OverflowError, UnicodeEncodeError):
            continue
        with tries.attempt("replay: the result", name):
            refused_or(lambda: read_and_compare(workdir))


def read_and_compare(workdir: Path) -> None:
    """Does what a replay does with a logged result, beside one that was sampled again."""
    [logged] = replay.read_requests(workdir, None, 0)
    for rollout in logged.result.rollouts:
        replay.difference(rollout, logged.result.rollouts[0])
    assert isinstance(logged.result.digest, str)


@pytest.mark.parametrize(
    "row",
    [
        {"request": "x"},
        {"step": 1},
        {"step": 1, "request": 5, "version": 0},
        {"step": 1, "request": "9" * 5000, "version": 0},
        {"step": 1, "request": "../../x", "version": 0},
    ],
)
def test_a_line_of_another_program_is_named(tmp_path: Path, row: dict) -> None:
    (tmp_path / "jobs.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match="line 1 is damaged"):
        read_log(tmp_path)


def test_rates(tmp_path: Path, tries) -> None:
    path = tmp_path / "rates.jsonl"
    document = {"id": "mine/17", "accuracy": 0.5, "samples": [{"score": 1.0}]}
    path.write_text(json.dumps(document) + "\n")
    assert read_rates(str(path)) == {17: 0.5}
    for mutation in mutations(document):
        path.write_text(to_json(mutation.document) + "\n")
        with tries.attempt("filter --rates", str(mutation)):
            refused_or(lambda: read_rates(str(path)))
    for name, file in hostile_files(tmp_path, "rates.jsonl"):
        with tries.attempt("filter --rates", name):
            refused_or(lambda file=file: read_rates(str(file)))


@pytest.mark.parametrize("kind", ["jobs.jsonl", "audit"])
def test_files_that_are_no_logs(tmp_path: Path, tries, kind: str) -> None:
    for name, file in hostile_files(tmp_path, "jobs.jsonl"):
        with tries.attempt(f"logs: {kind}", name):
            if kind == "audit":
                refused_or(lambda file=file: read_audited(file, 100, Sampling(1.0, 0, 1.0)))
            else:
                refused_or(lambda file=file: read_log(file.parent))
