"""Asynchronous rollouts: what may be stale, and by how much; without staleness nothing changes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import runs
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tiny import make_untrained_sampler, stream_of, tiny_settings

from jzero import config, setup
from jzero.hosts import interrupt
from jzero.loops import rl
from jzero.model import tokenizer
from jzero.rollout.async_stream import admission_capacity
from jzero.rollout.sampler import Sampler
from jzero.workers.pool import Pool

pytestmark = pytest.mark.usefixtures("quick_runs")

# -- admission -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    """Returns a sampler for streams that decode nothing."""
    return make_untrained_sampler(tiny_settings())


@hypothesis_settings(max_examples=200, deadline=None)
@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 9), st.data())
def test_no_group_is_too_old_and_none_waits_forever(
    sampler: Sampler, max_staleness: int, num_prompts: int, max_running: int, data: st.DataObject
) -> None:
    """Groups end in any order, between any two steps; some are lost; the process is killed."""
    settings = tiny_settings(
        rollout={
            "placement": config.Together(max_staleness, max_running),
            "num_prompts": num_prompts,
            "group_size": 2,
            "max_turns": 1,
            "num_slots": 4,
        }
    )
    stream = stream_of(sampler, settings)
    seen: list[int] = []
    for version in range(data.draw(st.integers(1, 6), "steps")):
        if data.draw(st.booleans(), "killed"):
            saved = stream.to_bytes()
            stream = stream_of(sampler, settings)
            stream.restore(saved)

        num_looks = 0
        while not stream.has_enough(version):
            stream.admit(version)
            running = [group for group in stream.groups if not group.is_finished]
            assert running, "nothing runs, and the step has not enough"
            assert len(running) <= (max_running or (max_staleness + 1) * num_prompts)
            num_groups = len(stream.groups) + stream.num_trained
            assert num_groups <= (max_staleness + version + 1) * num_prompts
            for group in running:
                fates = ["goes on", "finishes", "finishes", "is lost"]
                fate = data.draw(st.sampled_from(fates), "fate")
                if num_looks > 20 or fate == "finishes":  # every group finishes at last
                    for sequence in group.sequences:
                        sequence.is_finished = True
                elif fate == "is lost":
                    stream.groups.remove(group)
            num_looks += 1

        finished = [group.problem_number for group in stream.groups if group.is_finished]
        too_old_next = {
            group.problem_number
            for group in stream.groups
            if group.version <= version - max_staleness
        }
        rollouts = stream.take_rollouts(version)  # asserts that no group is older than allowed
        assert len(rollouts) == 2 * num_prompts
        taken = finished[:num_prompts]
        assert too_old_next <= set(taken)
        left = [group.problem_number for group in stream.groups if group.is_finished]
        assert left == finished[num_prompts:]
        seen += taken
    assert len(seen) == len(set(seen))


def test_capacity_is_the_papers() -> None:
    """floor((N - 1) / B) <= i + eta for the N-th trajectory at version i: eq. 3, one by one."""
    for max_staleness, version, i in np.ndindex(4, 5, 4):
        groups_per_step = i + 1
        num_admitted = 0
        while num_admitted // groups_per_step <= version + max_staleness:  # of N = num_admitted + 1
            num_admitted += 1
        rule = (max_staleness, version, groups_per_step, 10**6)
        assert admission_capacity(*rule, 0, 0) == num_admitted
        assert admission_capacity(*rule, 3, 2) == num_admitted - 5
    assert admission_capacity(2, 0, 8, 5, 0, 4) == 1


def test_admission_tokenizes_each_prompt_once(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a later step nor a resumed run tokenizes the prompt of a carried group again."""
    texts: list[str] = []
    encode = tokenizer.encode

    def record(tok: tokenizer.PreTrainedTokenizerFast, text: str) -> list[int]:
        texts.append(text)
        return encode(tok, text)

    monkeypatch.setattr(tokenizer, "encode", record)
    settings = tiny_settings(rollout={"placement.max_staleness": 2, "max_turns": 1})
    stream = stream_of(sampler, settings)
    for version in range(2):
        stream.admit(version)
    resumed = stream_of(sampler, settings)
    resumed.restore(stream.to_bytes())
    resumed.admit(1)

    assert len(texts) == len(resumed.groups) == stream.num_drawn


# -- whole runs ------------------------------------------------------------------------------------


def asynchronous(
    max_staleness: int = 1,
    warm_start_steps: int = 5,
    num_decoding: int = 0,
    **sections: dict[str, object],
) -> config.Config:
    """Returns settings of a run with one turn of up to 8 tokens: episodes differ in length.

    num_decoding: number of devices that only decode. 0: all do both.
    """
    placement = config.Together(max_staleness)
    if num_decoding:
        placement = config.Apart(max_staleness, devices=num_decoding)
    settings = tiny_settings(
        rollout={
            "max_turns": 1,
            "max_new_tokens": 8,
            "placement": placement,
            "num_slots": 8,
        },
        warm_start={"steps": warm_start_steps or 1, "tries": 1.0},
        task={"reward": config.RewardConfig(functions=("accuracy", "length"))},
        eval={"every": 0, "problems": 0},
        **sections,
    )
    if not warm_start_steps:
        settings.warm_start = None
    return settings


def rows_of(workdir: Path) -> list[dict]:
    """Returns the metrics of a run, a row for each step."""
    return runs.rows(workdir / "metrics.jsonl")


def timeless_rows_of(workdir: Path) -> list[dict]:
    """Returns the metrics of a run without times."""
    return runs.timeless(workdir / "metrics.jsonl")


def weights_of(workdir: Path) -> bytes:
    """Returns the weights that a run exported last."""
    return max(workdir.glob("export-*/model.safetensors")).read_bytes()


def test_without_staleness_it_is_the_synchronous_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, weights and metrics."""
    settings = asynchronous(0, train={"steps": 3})
    rl.train(settings, tmp_path / "synchronous")
    build = rl.build

    def build_with_stream(resolved: setup.ResolvedRun, pool: Pool, workdir: Path) -> setup.Run:
        run = build(resolved, pool, workdir)
        return replace(run, stream=stream_of(run.sampler, settings))

    monkeypatch.setattr(rl, "build", build_with_stream)
    rl.train(settings, tmp_path / "stream")

    got = timeless_rows_of(tmp_path / "stream")
    for row in got:
        assert row.pop("async/staleness_0") == 1.0
        assert row.pop("async/staleness") == 0.0
        assert row.pop("async/carried_tokens") == row.pop("async/ready_groups") == 0
        assert row.pop("async/wasted_tokens") >= 0
    assert got == timeless_rows_of(tmp_path / "synchronous")
    assert weights_of(tmp_path / "stream") == weights_of(tmp_path / "synchronous")


def train_with_carried_rollouts(workdir: Path, num_steps: int) -> None:
    """Trains a run whose tokens may be two versions old, or goes on with it."""
    settings = asynchronous(2, train={"steps": num_steps, "logged_rollouts": 16})
    rl.train(settings, workdir)


@pytest.fixture(scope="module")
def carried_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the workdir of a run that nothing interrupts: see `trained_once`."""
    return tmp_path_factory.mktemp("carried") / "whole"


def trained_once(workdir: Path) -> Path:
    """Trains a run of 6 steps in a directory that has none yet.

    A fixture of the module would be set up before `quick_runs`, which is set up for each test.
    """
    if not workdir.exists():
        train_with_carried_rollouts(workdir, 6)
    return workdir


def test_rollouts_carry_over(carried_run: Path) -> None:
    """Tokens are up to max_staleness versions old."""
    whole = timeless_rows_of(trained_once(carried_run))
    assert len(whole) == 6
    assert sum(row["async/carried_tokens"] for row in whole) > 0
    assert sum(row["async/staleness_1"] + row["async/staleness_2"] for row in whole) > 0
    for row in whole:
        shares = [row[f"async/staleness_{versions}"] for versions in range(3)]
        assert sum(shares) == pytest.approx(1)
        assert row["policy/correction"] > 0  # decoupled PPO


def test_a_run_that_was_stopped_between_steps_ends_in_the_same_numbers(
    carried_run: Path, tmp_path: Path
) -> None:
    whole = trained_once(carried_run)

    train_with_carried_rollouts(tmp_path, 2)
    train_with_carried_rollouts(tmp_path, 6)

    assert timeless_rows_of(tmp_path) == timeless_rows_of(whole)
    assert weights_of(tmp_path) == weights_of(whole)


def test_a_signal_while_episodes_decode_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had been decoded of the step is decoded again: the same numbers."""
    settings = asynchronous(train={"steps": 6, "checkpoint_every": 6})
    rl.train(settings, tmp_path / "whole")
    checks_after_three_steps = []

    def stop_at_the_third_check(self: interrupt.StopSignal) -> None:
        if len(rows_of(tmp_path / "stopped")) >= 3:
            checks_after_three_steps.append(1)
        if len(checks_after_three_steps) == 3:
            raise interrupt.Interrupted("SIGINT")

    with monkeypatch.context() as patch:
        patch.setattr(interrupt.StopSignal, "raise_if_stopped_here", stop_at_the_third_check)
        rl.train(settings, tmp_path / "stopped")
    assert 3 <= len(rows_of(tmp_path / "stopped")) < 6
    rl.train(settings, tmp_path / "stopped")

    assert timeless_rows_of(tmp_path / "stopped") == timeless_rows_of(tmp_path / "whole")
    assert weights_of(tmp_path / "stopped") == weights_of(tmp_path / "whole")


def test_sampler_and_trainer_agree_without_learning(tmp_path: Path) -> None:
    """With a learning rate of 0 all versions are one policy: its log-probs are the trainer's."""
    mismatch = {}
    for max_staleness in (0, 2):
        settings = asynchronous(
            max_staleness, optimizer={"lr": 0.0}, train={"steps": 6, "checkpoint_every": 9}
        )
        rl.train(settings, tmp_path / str(max_staleness))
        rows = rows_of(tmp_path / str(max_staleness))
        mismatch[max_staleness] = [row["policy/mismatch"] for row in rows]

    assert max(mismatch[2]) < 2 * max(mismatch[0]) < 1e-3
    assert max(mismatch[2][3:]) < 2 * max(mismatch[2][:3])
    assert max(row["async/staleness"] for row in rows) > 0.3


def test_other_devices_decode_meanwhile(tmp_path: Path) -> None:
    """The split placement: a run, stopped and resumed; nothing is older than max_staleness."""
    for num_steps in (3, 6):
        settings = asynchronous(
            warm_start_steps=0,
            num_decoding=2,
            mesh={"fsdp": 2},
            optimizer={"lr": 1e-5},
            train={"steps": num_steps, "logged_rollouts": 16},
        )
        rl.train(settings, tmp_path)

    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert row["async/staleness_0"] + row["async/staleness_1"] == pytest.approx(1)
    assert sum(row["async/staleness_1"] for row in rows) > 0
    # A step whose groups all have equal scores trains on no token.
    mismatches = [row["policy/mismatch"] for row in rows if "policy/mismatch" in row]
    assert mismatches and max(mismatches) < 1e-3
