"""`jzero train` on a tiny model, and the commands and functions that read its run."""

import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import tiny
from runs import ROOT, read_jsonl

import jzero
from jzero import api, chat, cli, compare, serve
from jzero.commands import evaluate
from jzero.config import Apart, Config, WarmStart
from jzero.errors import UserError
from jzero.run.finished import find_model
from jzero.sizing import command
from jzero.sizing import flags as train_flags
from jzero.sizing.flags import Wishes
from jzero.sizing.recipe import FILE
from jzero.workers.pool import Pool

REWARD = '''
def digits(response, gold, task):
    """The share of digits, so that the rewards of a group differ."""
    return sum(char.isdigit() for char in response) / (1 + len(response))
'''
SMALL = [
    "--config.rollout.max_new_tokens=8",
    "--config.rollout.num_prompts=2",
    "--config.rollout.group_size=2",
    "--config.train.steps=2",
    "--config.eval.problems=2",
]


def jzero_command(environment: dict[str, str], directory: Path, *arguments: str) -> str:
    """Runs `jzero ARGUMENTS` in a directory; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "jzero", *arguments],
        cwd=directory,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def trained(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> SimpleNamespace:
    """Returns the directory, the flags and the output of a run by `jzero train`."""
    directory = tmp_path_factory.mktemp("door")
    tiny.save_byte_model(directory / "model")
    tiny.save_sums(directory / "sums.jsonl")
    (directory / "my.py").write_text(REWARD)
    flags = ["--model", "model", "--data", "sums.jsonl", "--reward", "my.py:digits"]
    flags += ["--workdir", "run", *SMALL]
    out = jzero_command(environment, directory, "train", *flags)
    return SimpleNamespace(directory=directory, flags=flags, out=out, run=directory / "run")


def test_the_choices_are_printed_and_the_run_ends_with_an_export(trained) -> None:
    words = " ".join(trained.out.split())
    table = trained.out.partition("more choices with their reasons")[0]
    assert all(len(line) <= 80 for line in table.splitlines())
    assert "rollout.max_prompt_tokens" in words
    assert "more choices with their reasons" in words
    assert "99 % of prompts have at most" in words
    # Memory is printed once, by the run: its need, with the hours by estimate.
    assert words.count("GiB free memory") == 1 and "GiB of memory" not in words
    assert re.search(r"this run needs .* GB disk, about (a minute|\d+ minutes) by estimate", words)
    summary = json.loads((trained.run / "summary.json").read_text())
    assert summary["steps"] == 2
    held_out = read_jsonl(trained.run / "held_out.jsonl")
    assert len(held_out) == 2
    samples = read_jsonl(trained.run / "samples.jsonl")
    assert any(sample["score"] > 0 for sample in samples)
    questions = {row["question"] for row in held_out}
    assert not any(sample["prompt"][-1]["content"] in questions for sample in samples)


def test_the_recipe_is_the_same_run(trained, environment: dict[str, str]) -> None:
    program = ["-m", "jzero.main", "--config", str(trained.run / FILE), "--workdir", "again"]
    subprocess.run(
        [sys.executable, *program],
        cwd=trained.directory,
        env=environment | {"PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
    )

    for file in ("config.json", "samples.jsonl"):
        ours = (trained.run / file).read_text()
        assert (trained.directory / "again" / file).read_text() == ours


def test_the_same_command_continues_with_the_recipe(trained, environment: dict[str, str]) -> None:
    shutil.copytree(trained.run, trained.directory / "longer")
    flags = [*trained.flags, "--workdir", "longer", "--config.train.steps=3"]

    out = jzero_command(environment, trained.directory, "train", *flags)

    assert "continues with longer/recipe.py" in out
    assert len(read_jsonl(trained.directory / "longer" / "metrics.jsonl")) == 3


ENVIRONMENT = """
class Hot:
    def reset(self, row, seed):
        return f"{seed % 9}: hot or cold?"

    def step(self, response):
        return "again", sum(char.isdigit() for char in response) / (1 + len(response)), False
"""


def test_a_machine_that_is_not_attached(trained, environment: dict[str, str]) -> None:
    flags = ["--model", "model", "--data", "sums.jsonl", "--workdir", "rented", "--machine"]

    out = jzero_command(environment, trained.directory, "train", *flags, "v5e-8")

    assert "8 TPU v5 lite, 15.8 GiB each" in out
    assert "GiB of memory of each device, about" in " ".join(out.split())
    words = " ".join(out.split())
    assert re.search(r"and about (a minute|[\d.]+ (hours|minutes)) by estimate", words)
    assert (trained.directory / "rented" / FILE).exists()
    assert not (trained.directory / "rented" / "metrics.jsonl").exists()
    plan = ["plan", "--config", str(trained.directory / "rented" / FILE), "--machine", "v5e-8"]
    assert jzero_command(environment, trained.directory, *plan).splitlines()[-1] == "fits"


def test_an_environment_is_trained_in(trained, environment: dict[str, str]) -> None:
    (trained.directory / "hot.py").write_text(ENVIRONMENT)
    flags = ["--model", "model", "--environment", "hot.py:Hot", "--workdir", "hot", *SMALL]

    out = jzero_command(environment, trained.directory, "train", *flags)

    assert "episodes without end" in out
    samples = read_jsonl(trained.directory / "hot" / "samples.jsonl")
    assert any(sample["score"] > 0 for sample in samples)
    again = [*flags, "--config.train.steps=3"]
    assert "continues with hot/recipe.py" in jzero_command(
        environment, trained.directory, "train", *again
    )


def test_a_workdir_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    request = train_flags.Request(Wishes("none", "none"), None, frozenset(), lambda config: config)
    with pytest.raises(UserError, match="is not a directory that can be written to"):
        command.prepare(request, tmp_path / "file" / "run")


def test_problems_or_an_environment_are_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "start_jax", list)
    with pytest.raises(SystemExit):
        train_flags.parse(["--model=m"])
    assert "--data FILE, or --environment FILE.py:Class" in capsys.readouterr().err


@pytest.mark.usefixtures("quick_runs")
def test_serve_takes_the_run(trained, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in ([str(trained.run)], ["--model", str(trained.run)]):
        options, settings = serve.parse(arguments)
        assert options.model == str(trained.run)
        assert settings.model.path == str(trained.run / "export-2")
        assert settings.rollout.max_new_tokens == 8
        assert settings.model.dtype == "float32"
        assert not settings.rollout.keep_stop
    with pytest.raises(SystemExit):
        serve.parse([])
    with pytest.raises(SystemExit):
        serve.parse(["a", "--model", "b"])


def test_a_workdir_of_other_data_is_refused(trained, environment: dict[str, str]) -> None:
    shutil.copy(trained.directory / "sums.jsonl", trained.directory / "other.jsonl")
    done = subprocess.run(
        [sys.executable, "-m", "jzero", "train", *trained.flags, "--data", "other.jsonl"],
        cwd=trained.directory,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "other.jsonl: run/recipe.py is a run with" in done.stderr


@pytest.mark.usefixtures("quick_runs")
def test_evaluate_takes_the_held_out_problems_of_the_run(trained, tmp_path: Path) -> None:
    results = jzero.evaluate(trained.run, out=tmp_path / "out")

    assert results["held-out"]["problems"] == 2
    greedy = read_jsonl(tmp_path / "out" / "held-out-greedy.jsonl")
    theirs = read_jsonl(trained.run / "evaluations" / "after" / "problems-greedy.jsonl")
    assert [row["id"] for row in greedy] == [row["id"] for row in theirs]
    assert [row["samples"] for row in greedy] == [row["samples"] for row in theirs]


@pytest.mark.usefixtures("quick_runs")
def test_compare_pairs_both_models_on_the_same_problems(
    trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = str(trained.directory / "model")
    command = compare.parse([base, str(trained.run), "--out", str(tmp_path / "out")])

    text = compare.compare(command)

    assert "of 2 problems" in text
    assert "no difference is shown: " in text  # of two problems
    report = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert report["sets"]["held-out-greedy"]["problems"] == 2
    assert len(read_jsonl(tmp_path / "out" / "base" / "held-out-greedy.jsonl")) == 2


@pytest.mark.usefixtures("quick_runs")
def test_chat_streams_the_answer_of_the_decoder(trained) -> None:
    settings, _, system_prompt = chat.parse([str(trained.run)])
    with Pool(0) as pool:
        sampler, params = evaluate.load(settings, pool)
        talking = chat.Chat(sampler, params, 0.0, 0, system_prompt, [])
        pieces: list[str] = []
        answer = talking.answer("What is 1 + 3?", pieces.append)
        target = io.StringIO()
        again = chat.Chat(sampler, params, 0.0, 0, system_prompt, [])
        lines = io.StringIO("What is 1 + 3?\n/new\nWhat is 1 + 3?\n/quit\nnever\n")
        chat.talk(again, lines, target, is_terminal=False)

    assert system_prompt == ""  # the run has a reward of its own
    assert "".join(pieces) == answer
    assert len(pieces) > 1
    assert target.getvalue() == f"{answer}\n{answer}\n"


def test_a_run_in_a_notebook_is_shown_in_a_line() -> None:
    run = api.Run(Path("run"), Path("run/recipe.py"), None, {"config": {"name": "x" * 5000}})
    assert len(repr(run)) < 200


class Echo:
    """A conversation whose model repeats the message."""

    is_chat = True
    system_prompt = ""

    def answer(self, text: str, write: Callable[[str], None]) -> None:
        write(text)


def test_words_with_a_slash_are_commands_and_not_messages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = io.StringIO("/help\n/hlep\n/usr/bin has what?\n/quit\n")
    target = io.StringIO()

    chat.talk(cast(chat.Chat, Echo()), lines, target, is_terminal=False)

    assert target.getvalue() == "/usr/bin has what?\n"
    told = capsys.readouterr().err.splitlines()
    assert told == [chat.COMMANDS, f"there is no command /hlep: {chat.COMMANDS}"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["chat", "run"], [".*"]),
        (
            ["evaluate", "run", "--out", "out-evaluate"],
            ["suite .*", "held-out +2 .*", "held-out greedy: score .*", ".*my.py.digits.*", ".*"],
        ),
        (
            ["compare", "model", "run", "--show=0", "--out", "out-compare"],
            ["held-out-.*", "  no difference.*", "held-out-.*: score .*", "gained: .*", "lost: .*"],
        ),
    ],
)
def test_a_pipe_gets_answers_only(
    trained, environment: dict[str, str], arguments: list[str], expected: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jzero", *arguments],
        cwd=trained.directory,
        env=environment | {"PYTHONPATH": str(ROOT)},
        input="What is 1 + 3?\n",
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert "KV cache" in done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    if arguments[0] == "chat":  # one answer, of a model that may write line breaks
        assert "KV cache" not in done.stdout and "system prompt" not in done.stdout
        return
    assert len(lines) == len(expected)
    assert all(re.match(form, line) for form, line in zip(expected, lines, strict=True))


@pytest.mark.usefixtures("quick_runs")
def test_a_conversation_that_is_too_long_loses_its_oldest_messages(trained) -> None:
    settings, _, _ = chat.parse([str(trained.run), "--config.rollout.max_prompt_tokens=96"])
    with Pool(0) as pool:
        sampler, params = evaluate.load(settings, pool)
        talking = chat.Chat(sampler, params, 0.0, 0, "", [])
        for _ in range(4):
            talking.answer("x" * 30, lambda piece: None)
        kept = len(talking.messages)
        with pytest.raises(UserError, match="rollout.max_prompt_tokens=96: raise it"):
            talking.answer("x" * 100, lambda piece: None)

    assert 2 <= kept < 8
    # A refused message leaves the conversation as it is.
    assert len(talking.messages) == kept
    assert talking.messages[0]["role"] == "user"


def test_a_run_without_an_export_is_refused(trained, tmp_path: Path) -> None:
    shutil.copy(trained.run / "config.json", tmp_path)
    with pytest.raises(UserError, match="is a run without an exported model: let it finish"):
        find_model(str(tmp_path))


@pytest.mark.usefixtures("quick_runs")
def test_python_trains_with_rows_and_a_function(trained, tmp_path: Path) -> None:
    rows = read_jsonl(trained.directory / "sums.jsonl")
    settings = {flag[9:].split("=")[0]: int(flag.split("=")[1]) for flag in SMALL}
    settings["rollout.num_prompts"] = 8  # a row for each of the eight devices of the tests

    run = jzero.train(
        model=trained.directory / "model",
        data=rows,
        reward=length_reward,
        lora=True,
        workdir=tmp_path / "run",
        settings=settings,
    )

    assert run.model == tmp_path / "run" / "export-2"
    assert run.recipe.exists()
    scores = [sample["score"] for sample in read_jsonl(tmp_path / "run" / "samples.jsonl")]
    assert all(0 < score <= 1 for score in scores)


def length_reward(response: str, gold: object, task: object) -> float:
    return 1 / (1 + len(response))


def test_python_sets_parts_and_their_arguments() -> None:
    values = {
        "rollout.placement.devices": 2,
        "rollout.placement": "apart",
        "warm_start.lr": 0.5,
        "optimizer.b1": 0,
    }
    settings = api.with_values(Config(), values)
    assert settings.rollout.placement == Apart(devices=2)
    assert settings.warm_start == WarmStart(lr=0.5)
    assert type(settings.optimizer.b1) is float
    with pytest.raises(UserError, match="warm_start.lr=fast must be a number"):
        api.with_values(Config(), {"warm_start.lr": "fast"})


def test_python_refuses_mistakes_with_user_errors(trained, tmp_path: Path) -> None:
    model = trained.directory / "model"
    with pytest.raises(
        UserError, match="there is no setting train.stepz; did you mean train.steps"
    ):
        jzero.train(model, [{"question": "x"}], workdir=tmp_path, settings={"train.stepz": 1})
    with pytest.raises(UserError, match="train.steps="):
        jzero.train(
            model,
            trained.directory / "sums.jsonl",
            workdir=tmp_path,
            settings={"train.steps": "two"},
        )
    with pytest.raises(UserError, match="data has no rows"):
        jzero.train(model, [], workdir=tmp_path)
    with pytest.raises(UserError, match="give suite="):
        jzero.evaluate(model)


def test_the_price_of_the_machine_is_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "start_jax", list)  # this process has started it
    request = train_flags.parse(["--model=m", "--data=d", "--price=4.2"])

    assert request.apply(Config()).train.price == 4.2
    assert "train.price" in request.given
