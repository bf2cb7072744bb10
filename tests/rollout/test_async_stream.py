"""Asynchronous rollouts: what may be stale and by how much; without staleness they are the synchronous ones."""

from dataclasses import replace

import numpy as np
import pytest
import runs
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from test_turns import sampler_of, tiny

from jzero import config, train
from jzero.distributed import interrupt
from jzero.rollout.async_stream import RolloutStream, admission_capacity

pytestmark = pytest.mark.usefixtures("quick_compilation")

# -- admission --------------------------------------------------------------------------------------------------------


@examples(max_examples=200, deadline=None)
@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 9), st.data())
def test_no_group_is_too_old_and_none_waits_forever(eta, prompts, most, data):
    """Groups end in any order, between any two steps; some are refused; the process is killed and resumes."""
    rollout = {
        "max_staleness": eta,
        "num_prompts": prompts,
        "max_running_groups": most,
        "group_size": 2,
        "max_turns": 1,
        "num_slots": 4,
    }
    settings = tiny(rollout=rollout)
    stream = RolloutStream(sampler_of()[1], settings)
    seen: list[int] = []
    for version in range(data.draw(st.integers(1, 6), "steps")):
        if data.draw(st.booleans(), "killed"):
            data_of = stream.to_bytes()
            stream = RolloutStream(sampler_of()[1], settings)
            stream.restore(data_of)
        looks = 0
        while not stream.has_enough(version):
            stream.admit(version)
            running = [group for group in stream.groups if not group.is_finished]
            assert running, "nothing runs, and the step has not enough"
            assert len(running) <= (most or (eta + 1) * prompts)
            assert len(stream.groups) + stream.num_trained <= (eta + version + 1) * prompts
            for group in running:
                fate = data.draw(st.sampled_from(["goes on", "over", "over", "refused"]), "fate")
                if looks > 20 or fate == "over":  # every group ends at last
                    for sequence in group.sequences:
                        sequence.is_finished = True
                elif fate == "refused":
                    stream.groups.remove(group)
            looks += 1
        before = [group.problem_number for group in stream.groups if group.is_finished]
        late = [group.problem_number for group in stream.groups if group.version <= version - eta]
        taken = [group for group in stream.groups if group.is_finished][:prompts]
        assert (
            len(stream.take_rollouts(version)) == 2 * prompts
        )  # asserts that none is older than eta
        numbers = [group.problem_number for group in taken]
        assert numbers == before[:prompts] and set(late) <= set(numbers)
        seen += numbers
    assert len(seen) == len(set(seen))


def test_capacity_is_the_papers():
    """floor((N - 1) / B) <= i + eta for the N-th trajectory at version i: eq. 3, counted one by one."""
    for eta, version, batch in np.ndindex(4, 5, 4):
        batch += 1
        admitted = 0
        while admitted // batch <= version + eta:  # the next one is number N = admitted + 1
            admitted += 1
        assert admission_capacity(eta, version, batch, 10**6, 0, 0) == admitted
        assert admission_capacity(eta, version, batch, 10**6, 3, 2) == admitted - 5
    assert admission_capacity(2, 0, 8, 5, 0, 4) == 1


# -- whole runs -------------------------------------------------------------------------------------------------------


def asynchronous(eta: int = 1, **sections) -> config.Config:
    """One turn of up to 8 tokens: episodes differ in length."""
    rollout = {
        "max_turns": 1,
        "max_new_tokens": 8,
        "max_staleness": eta,
        "num_slots": 8,
    } | sections.pop("rollout", {})
    warm = {"steps": 5, "tries": 1.0} | sections.pop("warm_start", {})
    task = {"reward": config.RewardConfig(functions=("accuracy", "length"))}
    eval = {"every": 0, "problems": 0}
    return tiny(rollout=rollout, warm_start=warm, task=task, eval=eval, **sections)


def rows(workdir) -> list[dict]:
    return runs.rows(workdir / "metrics.jsonl")


def weights(workdir) -> bytes:
    path = max(workdir.glob("export-*/model.safetensors"))
    return path.read_bytes()


def test_without_staleness_it_is_the_synchronous_run(tmp_path, quick_runs, monkeypatch):
    """Bit for bit, weights and metrics."""
    settings = asynchronous(eta=0, train={"steps": 3})
    train.train(settings, tmp_path / "synchronous")
    build = train.build

    def with_stream(config, pool):
        run = build(config, pool)
        return replace(run, stream=RolloutStream(run.sampler, config))

    monkeypatch.setattr(train, "build", with_stream)
    train.train(settings, tmp_path / "stream")
    want, got = (
        runs.timeless(tmp_path / name / "metrics.jsonl") for name in ("synchronous", "stream")
    )
    assert all(
        row.pop("async/staleness_0") == 1.0 and row.pop("async/staleness") == 0.0 for row in got
    )
    assert all(row.pop("async/carried_tokens") == row.pop("async/ready_groups") == 0 for row in got)
    assert all(row.pop("async/wasted_tokens") >= 0 for row in got)
    assert got == want and weights(tmp_path / "stream") == weights(tmp_path / "synchronous")


def test_rollouts_carry_over(tmp_path, quick_runs):
    """Up to eta versions, token by token; and a run that was stopped ends in the numbers of one that was not."""
    settings = lambda steps: asynchronous(eta=2, train={"steps": steps, "logged_rollouts": 16})
    train.train(settings(6), tmp_path / "whole")
    for steps in (2, 6):
        train.train(settings(steps), tmp_path / "resumed")
    whole, resumed = (
        runs.timeless(tmp_path / name / "metrics.jsonl") for name in ("whole", "resumed")
    )
    assert (
        whole == resumed
        and len(whole) == 6
        and weights(tmp_path / "whole") == weights(tmp_path / "resumed")
    )
    assert sum(row["async/carried_tokens"] for row in whole) > 0
    assert sum(row["async/staleness_1"] + row["async/staleness_2"] for row in whole) > 0
    assert all(
        sum(row[f"async/staleness_{lag}"] for lag in range(3)) == pytest.approx(1) for row in whole
    )
    assert all(row["policy/correction"] > 0 for row in whole)  # decoupled PPO


def test_a_signal_while_episodes_decode_changes_nothing(tmp_path, quick_runs, monkeypatch):
    """What had been decoded of the step is decoded again: the same numbers."""
    settings = asynchronous(train={"steps": 6, "checkpoint_every": 6})
    train.train(settings, tmp_path / "whole")
    ended = []  # after three steps

    def raise_if_stopped_here(self) -> None:
        if len(rows(tmp_path / "stopped")) >= 3:
            ended.append(1)
        if len(ended) == 3:
            raise interrupt.Interrupted("SIGINT")

    with monkeypatch.context() as patch:
        patch.setattr(interrupt.StopSignal, "raise_if_stopped_here", raise_if_stopped_here)
        train.train(settings, tmp_path / "stopped")
    assert 3 <= len(rows(tmp_path / "stopped")) < 6
    train.train(settings, tmp_path / "stopped")
    whole, stopped = (
        runs.timeless(tmp_path / name / "metrics.jsonl") for name in ("whole", "stopped")
    )
    assert whole == stopped and weights(tmp_path / "whole") == weights(tmp_path / "stopped")


def test_sampler_and_trainer_agree_without_learning(tmp_path, quick_runs):
    """lr = 0: what carries over is of the same policy, and its log-probs are the trainer's."""
    flat = lambda eta: asynchronous(
        eta, optimizer={"lr": 0.0}, train={"steps": 6, "checkpoint_every": 9}
    )
    for eta in (0, 2):
        train.train(flat(eta), tmp_path / str(eta))
    fresh, stale = ([row["policy/mismatch"] for row in rows(tmp_path / str(eta))] for eta in (0, 2))
    assert max(stale) < 2 * max(fresh) < 1e-3 and max(stale[3:]) < 2 * max(stale[:3])
    assert max(row["async/staleness"] for row in rows(tmp_path / "2")) > 0.3


def test_other_devices_decode_meanwhile(tmp_path, quick_runs):
    """The split placement: a run, stopped and resumed; nothing older than eta."""
    changes = {"mesh": {"decode_devices": 2, "fsdp": 2}, "optimizer": {"lr": 1e-5}}
    settings = lambda steps: asynchronous(train={"steps": steps, "logged_rollouts": 16}, **changes)
    for steps in (3, 6):
        train.train(settings(steps), tmp_path)
    every = rows(tmp_path)
    assert [row["step"] for row in every] == [1, 2, 3, 4, 5, 6]
    assert all(
        row["async/staleness_0"] + row["async/staleness_1"] == pytest.approx(1) for row in every
    )
    assert (
        sum(row["async/staleness_1"] for row in every) > 0
        and max(row["policy/mismatch"] for row in every) < 1e-3
    )
