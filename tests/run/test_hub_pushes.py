"""Pushes of a run to the hub: what arrives, and that no failure of the hub stops a run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from runs import ROOT, Hub, finish, launch, read_jsonl, timeless, wait_for

from jzero.config import Checkpoint, Config, End, EveryCheckpoint, HubConfig, TrainConfig, validate
from jzero.errors import UserError
from jzero.run import hub_pushes
from jzero.run.hub_ledger import Ledger, Push
from jzero.run.hub_pushes import HubPushes, check_token, push_line
from jzero.run.resume import go_back

SETTINGS = EveryCheckpoint(repo="me/tiny", retries=2)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Returns a hub that processes which the test starts push to."""
    with Hub() as hub:
        for name, value in hub.environment().items():
            monkeypatch.setenv(name, value)
        yield hub
        hub.is_stalled = False


def make_push(workdir: Path, step: int, is_temporary: bool = True) -> Push:
    """Returns a push of an export that holds its step."""
    directory = workdir / f"export-{step}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.safetensors").write_text(f"weights of step {step}")
    return Push(step, f"main-step-{step}", directory, is_temporary)


def note_pushed(workdir: Path, step: int) -> None:
    """Notes a push after which a kill came before its command."""
    push = make_push(workdir, step)
    ledger = Ledger(workdir)
    ledger.queue(push)
    ledger.note(push, "claimed")
    ledger.note(push, "pushed", address="x")


def open_pushes(
    workdir: Path, settings: EveryCheckpoint = SETTINGS, resume_step: int | None = None
) -> closing[HubPushes]:
    return closing(HubPushes(settings, workdir, resume_step, first_pause=0.01))


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def events(workdir: Path, step: int) -> list[str]:
    return [row["event"] for row in read_jsonl(workdir / "hub.jsonl") if row["step"] == step]


# -- What arrives ----------------------------------------------------------------------------------


def test_a_checkpoint_becomes_a_branch_of_a_private_model(hub: Hub, tmp_path: Path) -> None:
    temporary, kept = make_push(tmp_path, 4), make_push(tmp_path, 8, is_temporary=False)

    with open_pushes(tmp_path) as pushes:
        pushes.add(temporary)
        pushes.add(kept)
        assert pushes.wait(60)
        pushes.add(temporary)  # as a step does that is repeated after a kill
        assert pushes.wait(60)
        summary = pushes.summary()

    assert hub.is_private
    assert hub.commits == ["main-step-4", "main-step-8"]
    assert hub.branches["main-step-4"] == {"model.safetensors": b"weights of step 4"}
    assert hub.branches["main"] == {}
    assert not temporary.directory.exists()
    assert kept.directory.exists()
    assert events(tmp_path, 4) == ["queued", "claimed", "pushed"]
    assert summary["pushed"] == [4, 8]
    assert push_line(summary) == "hub: pushed 2 models to me/tiny"
    assert (
        push_line(summary | {"pushed": summary["pushed"][:1]}) == "hub: pushed 1 model to me/tiny"
    )


def test_a_public_model_is_created_only_if_told(hub: Hub, tmp_path: Path) -> None:
    with open_pushes(tmp_path, replace(SETTINGS, private=False)) as pushes:
        pushes.add(make_push(tmp_path, 4))
        assert pushes.wait(60)

    assert hub.is_private is False
    assert "main-step-4" in hub.branches


def test_a_private_run_pushes_nothing_to_a_public_model(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.branches["main"] = {"precious": b"1"}
    hub.is_private = False

    with open_pushes(tmp_path) as pushes:
        pushes.add(make_push(tmp_path, 4))
        assert pushes.wait(60)
        summary = pushes.summary()

    assert hub.commits == []
    assert summary["failed"] == {"4": "me/tiny is public"}
    assert capsys.readouterr().out.count("me/tiny is public") == 1, "a refusal is tried once"


def test_a_branch_of_somebody_else_is_replaced_only_if_told(hub: Hub, tmp_path: Path) -> None:
    hub.branches |= {"main": {}, "main-step-4": {"model.safetensors": b"of another run"}}
    hub.is_private = True

    with open_pushes(tmp_path) as pushes:
        pushes.add(make_push(tmp_path, 4))
        assert pushes.wait(60)
        summary = pushes.summary()
    assert summary["failed"] == {"4": "the branch main-step-4 of me/tiny exists"}
    assert hub.branches["main-step-4"] == {"model.safetensors": b"of another run"}

    with open_pushes(tmp_path, replace(SETTINGS, overwrite=True), resume_step=4) as pushes:
        assert pushes.wait(60)
    assert hub.branches["main-step-4"] == {"model.safetensors": b"weights of step 4"}


# -- A hub that fails ------------------------------------------------------------------------------


def test_a_failure_is_one_line_and_is_tried_again(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.failures = 2  # the client ignores that creating the model fails

    with open_pushes(tmp_path) as pushes:
        pushes.add(make_push(tmp_path, 4))
        assert pushes.wait(60)

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("hub: step 4 is not pushed (attempt 1 of 3): ")
    assert lines[1] == "hub: pushed step 4 to me/tiny, main-step-4"


def test_a_push_that_failed_is_made_up_for_with_the_next_one(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.failures = 10**6
    with open_pushes(tmp_path, replace(SETTINGS, retries=0)) as pushes:
        pushes.add(make_push(tmp_path, 4))
        assert pushes.wait(60)
        assert list(pushes.summary()["failed"]) == ["4"]
        assert "step 4 failed" in push_line(pushes.summary())

        hub.failures = 0
        pushes.add(make_push(tmp_path, 8))
        assert pushes.wait(60)
        summary = pushes.summary()

    assert hub.commits == ["main-step-4", "main-step-8"]
    assert (summary["failed"], summary["pushed"]) == ({}, [4, 8])


def test_a_hub_that_answers_nothing_blocks_neither_a_step_nor_the_end(
    hub: Hub, tmp_path: Path
) -> None:
    hub.is_stalled = True
    start = time.monotonic()

    with open_pushes(tmp_path, SETTINGS) as pushes:
        for step in (4, 8, 12):
            pushes.add(make_push(tmp_path, step))
        assert time.monotonic() - start < 1, "a step waited for the hub"
        wait_until(lambda: hub.requests > 0)
        assert not pushes.wait(0.1)
        closing_time = time.monotonic()
    assert time.monotonic() - closing_time < 5, "the end of the run waited for the hub"


def test_an_attempt_ends_at_its_deadline(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.is_stalled = True

    with open_pushes(tmp_path, replace(SETTINGS, minutes=0.001, retries=0)) as pushes:
        pushes.add(make_push(tmp_path, 4))
        assert pushes.wait(30)

    assert "no answer within hub.push.minutes=0.001" in capsys.readouterr().out


def test_a_hub_that_is_down_does_not_fill_the_disk(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.is_stalled = True

    with open_pushes(tmp_path) as pushes:
        for step in range(1, 7):
            pushes.add(make_push(tmp_path, step))
            if step == 1:
                wait_until(lambda: hub.requests > 0)
        summary = pushes.summary()

    exports = sorted(path.name for path in tmp_path.glob("export-*"))
    assert exports == ["export-1", "export-5", "export-6"], "one is being pushed, two wait"
    assert summary["dropped"] == 3
    assert capsys.readouterr().out.count("because more than 2 exports wait") == 3


# -- Kills and resumed runs ------------------------------------------------------------------------

PUSH_AND_WAIT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_hub_pushes import SETTINGS, make_push, open_pushes
workdir = Path(sys.argv[1])
with open_pushes(workdir) as pushes:
    pushes.add(make_push(workdir, 4))
    pushes.wait(60)
"""


def children_of(pid: int) -> list[int]:
    """Returns the processes that a process has started, in any of its threads."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in path.read_text().split()]
    return found


def has_ended(pid: int) -> bool:
    """Returns whether a process has ended. One that nothing has waited for stays as a zombie."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return "\nState:\tZ" in status


def test_a_killed_push_is_made_up_for_and_leaves_no_process(hub: Hub, tmp_path: Path) -> None:
    hub.is_stalled = True
    command = [sys.executable, "-c", PUSH_AND_WAIT, str(tmp_path), str(Path(__file__).parent)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path})
    wait_until(lambda: hub.requests > 0)
    [child] = children_of(process.pid)

    process.kill()
    process.wait()

    wait_until(lambda: has_ended(child))
    assert hub.commits == []
    hub.is_stalled = False
    with open_pushes(tmp_path, resume_step=4) as pushes:
        assert pushes.wait(60)
    assert hub.branches["main-step-4"] == {"model.safetensors": b"weights of step 4"}


def test_a_branch_that_a_kill_left_empty_is_the_runs_own(hub: Hub, tmp_path: Path) -> None:
    # The process was killed after it had created the branch, and before the commit.
    push = make_push(tmp_path, 4)
    ledger = Ledger(tmp_path)
    ledger.queue(push)
    ledger.note(push, "claimed")
    hub.branches |= {"main": {}, "main-step-4": {}}
    hub.is_private = True

    with open_pushes(tmp_path, resume_step=4) as pushes:
        assert pushes.wait(60)

    assert hub.branches["main-step-4"] == {"model.safetensors": b"weights of step 4"}


def test_a_step_that_is_repeated_adds_its_push_itself(tmp_path: Path) -> None:
    Ledger(tmp_path).queue(make_push(tmp_path, 4))
    with (tmp_path / "hub.jsonl").open("a") as file:
        file.write('{"step": 8, "bra')  # a kill cut the line short

    with open_pushes(tmp_path, resume_step=0) as pushes:
        assert pushes.wait(5)

    assert events(tmp_path, 4) == ["queued"]
    assert events(tmp_path, 8) == []


def test_a_run_that_goes_back_pushes_the_later_steps_again(tmp_path: Path) -> None:
    for step in (4, 8):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
        note_pushed(tmp_path, step)

    go_back(tmp_path, TrainConfig(resume_from=Checkpoint(4, discard_later=True)))

    ledger = Ledger(tmp_path)
    assert ledger.pushed_steps() == [4]
    assert ledger.is_own_branch("main-step-8")


# -- The command after a push ----------------------------------------------------------------------


def test_the_command_gets_its_values_without_a_shell(tmp_path: Path) -> None:
    script = tmp_path / "evaluate.py"
    script.write_text("import sys; print(sys.argv[1:])")
    command = f"{sys.executable} {script} {{repo}} {{revision}} '{{step}};echo $HOME'"

    note_pushed(tmp_path, 4)

    with open_pushes(tmp_path, replace(SETTINGS, on_push=command), resume_step=4) as pushes:
        assert pushes.wait(60)
        summary = pushes.summary()

    log = (tmp_path / "hub/on_push-4.log").read_text()
    assert log == "['me/tiny', 'main-step-4', '4;echo $HOME']\n"
    assert summary["commands"] == {"ran": 1, "failed": 0}
    assert events(tmp_path, 4)[-2:] == ["started", "ended"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("false", "the command of step 4 ended with status 1: see "),
        ("sleep 60", "the command of step 4 took more than 0.005 minutes: see "),
    ],
)
def test_a_command_that_fails_or_hangs_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    settings = replace(SETTINGS, on_push=command)
    note_pushed(tmp_path, 4)

    hub_pushes = HubPushes(settings, tmp_path, resume_step=4, command_minutes=0.005)
    with closing(hub_pushes) as pushes:
        assert pushes.wait(30)
        assert pushes.summary()["commands"] == {"ran": 0, "failed": 1}

    [line] = capsys.readouterr().out.splitlines()
    assert message in line


def test_a_command_that_a_kill_interrupted_is_not_started_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    push = make_push(tmp_path, 4)
    ledger = Ledger(tmp_path)
    for event in ("pushed", "started"):
        ledger.note(push, event)
    ledger.queue(push)

    for _ in range(2):
        with open_pushes(tmp_path, replace(SETTINGS, on_push="false"), resume_step=4) as pushes:
            assert pushes.wait(30)

    assert capsys.readouterr().out.count("was interrupted, and is not run again") == 1
    assert not (tmp_path / "hub/on_push-4.log").exists()


# -- Settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hub_settings", "message"),
    [
        ({}, "hub.push=end needs the model that it pushes to: set hub.push.repo=USER/NAME"),
        ({"repo": "me/x", "revision": "a/b"}, "hub.push.revision=a/b is not a branch name"),
        ({"repo": "me/x", "on_push": "true {stop}"}, "has {stop}: only {repo}, "),
        ({"repo": "me/x", "on_push": "true {step!r}"}, "has {step}: only {repo}, "),
        ({"repo": "me/x", "on_push": "true 'a"}, "is not a command (No closing quo"),
        ({"repo": "me/x", "on_push": "true {"}, "is not a command ("),
        ({"repo": "me/x", "on_push": "nosuch 1"}, "there is no program nosuch"),
    ],
)
def test_a_mistake_is_found_before_the_run(hub_settings: dict, message: str) -> None:
    with pytest.raises(UserError) as error:
        validate(Config(hub=HubConfig(push=End(**hub_settings))))

    assert message in str(error.value)


def test_a_run_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_pushes.huggingface_hub, "get_token", lambda: None)

    check_token(None)
    with pytest.raises(UserError, match="hub.push=every_checkpoint needs a token of the hub"):
        check_token(SETTINGS)


# -- Whole runs ------------------------------------------------------------------------------------

PUSHED = (
    "--config.hub.push=every_checkpoint",
    "--config.hub.push.repo=me/tiny",
    "--config.hub.card.tags=mine",
    "--config.hub.card.language=en",
    "--config.hub.push.on_push=echo {repo} {revision} {step}",
    "--config.train.steps=6",
    "--config.train.checkpoint_every=2",
    "--config.eval.every=0",
)
MOST_SECONDS = 600


def test_a_killed_run_ends_with_the_same_branches_as_an_uninterrupted_one(
    environment: dict[str, str], tmp_path: Path
) -> None:
    with Hub() as hub:
        whole = tmp_path / "whole"
        finish(launch(environment | hub.environment(), whole, *PUSHED), seconds=MOST_SECONDS)
        expected, commits = hub.branches, hub.commits
    with Hub() as hub:
        killed = tmp_path / "killed"
        process = launch(environment | hub.environment(), killed, *PUSHED)
        wait_for(process, killed / "metrics.jsonl", 3)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        finish(launch(environment | hub.environment(), killed, *PUSHED), seconds=MOST_SECONDS)

        assert hub.branches.keys() == {"main", "main-step-2", "main-step-4"}
        for branch, files in hub.branches.items():
            for name in files.keys() | expected[branch].keys():
                # A card has the times of its own run in the curve.
                assert name == "README.md" or files[name] == expected[branch][name], name
        assert hub.commits == commits

    assert timeless(killed / "metrics.jsonl") == timeless(whole / "metrics.jsonl")
    summary = json.loads((killed / "summary.json").read_text())
    assert summary["hub"]["pushed"] == [2, 4, 6]
    assert summary["hub"]["failed"] == {}
    assert (killed / "hub/on_push-6.log").read_text() == "me/tiny main 6\n"
    assert [path.name for path in killed.glob("export-*")] == ["export-6"]
    card = ModelCard(hub.branches["main-step-4"]["README.md"].decode())
    assert card.data.language == ["en"]
    assert "mine" in card.data.tags
    assert "hub." not in card.text, "the card has no settings of the push"


def test_a_run_ends_as_usual_without_its_hub(environment: dict[str, str], tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    with Hub() as hub:
        hub.failures = 10**6
        process = launch(
            environment | hub.environment(),
            workdir,
            *PUSHED,
            "--config.hub.push.retries=0",
            "--config.train.steps=3",
        )
        out, _ = finish(process, seconds=MOST_SECONDS)

        assert "hub: pushed 0 models to me/tiny; step 2, 3 failed: the same command" in out
        assert (workdir / "export-3/config.json").exists()

        hub.failures = 0
        again = launch(environment | hub.environment(), workdir, *PUSHED, "--config.train.steps=3")
        finish(again, seconds=MOST_SECONDS)

        assert hub.branches.keys() == {"main", "main-step-2"}
        assert set(hub.commits) == {"main-step-2", "main"}
