"""Several hosts: shares of work, gathered values, and runs of two processes that are killed."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from runs import finish, launch, launch_hosts, rows, timeless, wait_for

from jzero import cli
from jzero.decoder.serialization import rollouts_from_bytes, rollouts_to_bytes
from jzero.errors import UserError
from jzero.hosts import collectives, interrupt, peers, processes
from jzero.model.huggingface.headers import stored_tensors
from jzero.run.lock import lock_directory
from jzero.sharding.mesh import make_mesh, train_mesh

Environment = dict[str, str]

# -- one process -----------------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(1, 9))
def test_shares_are_neighbors_and_even(count: int, num_processes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax.process_count", lambda: num_processes)
        shares = []
        for index in range(num_processes):
            patch.setattr("jax.process_index", lambda index=index: index)
            shares.append(range(count)[collectives.local_share(count)])
    assert [i for share in shares for i in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_rollouts_cross_hosts_as_they_are() -> None:
    rollouts = reference.random_rollouts(3, 3, 2)
    parts = [
        rollouts_to_bytes(rollouts[:2]),
        rollouts_to_bytes([]),
        rollouts_to_bytes(rollouts[2:]),
    ]
    for got, want in zip(rollouts_from_bytes(parts), rollouts, strict=True):
        for name, value in vars(want).items():
            if name == "tokens":
                assert got.tokens.to_dict().keys() == value.to_dict().keys()
                for track, values in value.to_dict().items():
                    np.testing.assert_array_equal(got.tokens[track], values, strict=True)
                continue
            is_array = isinstance(value, np.ndarray)
            np.testing.assert_array_equal(getattr(got, name), value, strict=is_array)


def test_alone_everything_is_immediate(tmp_path: Path) -> None:
    assert collectives.gather_json({"a": [1]}) == [{"a": [1]}]
    assert collectives.sum_over_hosts({"a": 2}) == {"a": 2}
    assert collectives.local_share(3) == slice(0, 3)
    interrupt.raise_if_any_host_stopped()
    with pytest.raises(interrupt.Interrupted, match="enough"):
        interrupt.raise_if_any_host_stopped("enough")


def test_copies_are_made_where_implicit_transfers_are_forbidden() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("data"))
    numbers = np.arange(16)

    with jax.transfer_guard("disallow"):
        arrays = {name: collectives.put_global(numbers, split) for name in ("a", "b")}
        collectives.start_fetch(arrays)
        fetched = [collectives.fetch_global(x) for x in arrays.values()]

    np.testing.assert_array_equal(fetched, [numbers, numbers])


def test_a_workdir_that_hosts_do_not_share_is_refused(tmp_path: Path) -> None:
    processes.write_once(tmp_path / "new/file", "x")
    collectives.check_shared(tmp_path / "new/file")
    with pytest.raises(ValueError, match="not the same directory on every host"):
        collectives.check_shared(tmp_path / "other")


@pytest.mark.parametrize("name", ["join_seconds", "silence_seconds"])
@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e9, float("nan")])
def test_seconds_to_wait_have_bounds(name: str, seconds: float) -> None:
    with pytest.raises(UserError, match=f"--{name}=.*between 0 and"):
        processes.join_processes("localhost:1", 2, 0, **{name: seconds})


@pytest.mark.parametrize("arguments", [("localhost:1", None, None), (None, 2, 0), (None, None, 1)])
def test_joining_needs_all_arguments(arguments: tuple[str | None, int | None, int | None]) -> None:
    with pytest.raises(ValueError, match="together"):
        processes.join_processes(*arguments)


@dataclass(frozen=True)
class FakeDevice:
    """What a mesh looks at of a device."""

    id: int
    process_index: int
    platform: str = "cpu"


def test_a_mesh_keeps_tensor_inside_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ids that alternate between two hosts.
    devices = [FakeDevice(i, process_index=i % 2) for i in range(8)]
    with pytest.raises(ValueError, match="mesh.tensor=8 must divide the 4 devices of a host"):
        train_mesh(1, 1, 8, devices)

    def make_plain_mesh(devices: list, sizes: dict[str, int]) -> SimpleNamespace:
        return SimpleNamespace(devices=devices, shape=sizes)

    monkeypatch.setattr("jzero.sharding.mesh.make_mesh", make_plain_mesh)
    mesh = train_mesh(1, -1, 2, devices)
    assert [device.process_index for device in mesh.devices] == [0] * 4 + [1] * 4
    assert make_mesh(jax.devices(), {"data": 8}).size == 8


def test_programs_are_kept_in_the_workdir_unless_told_otherwise(tmp_path: Path) -> None:
    name = "jax_compilation_cache_dir"
    before = jax.config.values[name]
    try:
        for configured, expected in (
            (None, str(tmp_path / "programs")),
            (str(cli.shared_programs()), str(tmp_path / "programs")),
            ("/elsewhere", "/elsewhere"),
        ):
            jax.config.update(name, configured)
            cli.keep_compiled_programs(tmp_path / "programs")
            assert jax.config.values[name] == expected
    finally:
        jax.config.update(name, before)


# -- runs of two processes -------------------------------------------------------------------------

NUM_STEPS = 8

# Several updates of different rewards, and both kinds of evaluation over a number of problems that
# the number of hosts does not divide.
CHANGES = [
    f"--config.train.steps={NUM_STEPS}",
    "--config.train.checkpoint_every=1",
    "--config.eval.problems=5",
    "--config.eval.every=4",
    "--config.rollout.num_prompts=5",
    "--config.mesh.data=2",
    "--config.mesh.fsdp=-1",
    "--config.task.reward.functions=('accuracy', 'length')",
    "--config.warm_start.steps=20",
    "--config.warm_start.lr=5e-3",
    # Rounding to 16 bits now and then makes a large difference of a small one.
    "--config.rollout.kv_dtype=float32",
    "--config.train.microbatch_tokens=640",
    "--config.train.export_merged=True",  # of runs with an adapter, too
    # As many as a group has, so that both run the same programs.
    "--config.eval.samples=4",
]

# The relative difference by which sums over devices in another order may differ, by kind of metric.
NEAR = {"policy": 1e-3, "optimizer": 1e-3, "critic": 1e-3}


def launch_two(
    environment: Environment,
    workdir: Path,
    *changes: str,
    devices: int = 2,
    second_changes: Sequence[str] = (),
) -> list[subprocess.Popen]:
    """Starts two processes on one run; `second_changes` are further arguments of process 1."""
    return launch_hosts(
        environment, workdir, *CHANGES, *changes, devices=devices, last_changes=second_changes
    )


def stop_second_process(environment: Environment, workdir: Path, *changes: str) -> None:
    """Runs until the second step and sends SIGTERM to process 1 alone: both stop after a step."""
    log = workdir / "metrics.jsonl"
    first, second = launch_two(environment, workdir, *changes)
    wait_for(first, log, 2)
    second.send_signal(signal.SIGTERM)
    first_output, _ = finish(first)
    second_output, second_errors = finish(second)
    assert "SIGTERM on host 1: stopped after step" in first_output
    assert "saving a checkpoint" in second_errors
    assert "SIGTERM on host 1: stopped after step" in second_errors
    assert "step" not in second_output
    assert 2 <= len(rows(log)) < NUM_STEPS


def kill_process(environment: Environment, workdir: Path, index: int, *changes: str) -> None:
    """Resumes for two steps and kills a process: the other ends at once, and says what to do."""
    log = workdir / "metrics.jsonl"
    num_done = len(rows(log))
    both = launch_two(environment, workdir, *changes)
    wait_for(both[0], log, num_done + 2)
    both[index].kill()
    start = time.monotonic()
    _, errors = both[1 - index].communicate(timeout=120)
    assert both[1 - index].returncode == 1
    assert time.monotonic() - start < 30
    (error,) = errors_of(errors)
    assert f"host {index} of 2 (" in error
    assert f"pid {both[index].pid}) is gone" in error
    assert peers.RESUME_ADVICE in error
    both[index].communicate()


# Adapters on two hosts are also those of the test below whose hosts go on together.
@pytest.mark.parametrize(
    ("trained", "killed"),
    [
        pytest.param({}, 0, id="all parameters"),
        pytest.param({"adapter.rank": 2}, 1, id="adapter"),
        pytest.param({"adapter.rank": 2, "base": "int8"}, 0, id="adapter on 8 bits"),
    ],
)
def test_two_processes_are_one_of_as_many_devices_also_when_stopped_and_killed(
    environment: Environment, tmp_path: Path, trained: dict[str, int | str], killed: int
) -> None:
    """2 x 2 devices, stopped, killed and resumed, are 1 x 4 devices in one go.

    The same holds of an adapter on the frozen model that the warm start made. `trained` are
    settings of the section `model`, and `killed` is the process that gets the signal 9.
    """
    changes = [f"--config.model.{name}={value}" for name, value in trained.items()]
    stop_second_process(environment, tmp_path / "two", *changes)
    kill_process(environment, tmp_path / "two", killed, *changes)
    for process in launch_two(environment, tmp_path / "two", *changes):
        finish(process)
    alone = environment | {"JAX_NUM_CPU_DEVICES": "4"}
    finish(launch(alone, tmp_path / "one", *CHANGES, *changes))

    got_rows, want_rows = (timeless(tmp_path / name / "metrics.jsonl") for name in ("two", "one"))
    assert len(got_rows) == len(want_rows) == NUM_STEPS
    assert any(row["optimizer/grad_norm"] > 0 for row in want_rows)
    for got, want in zip(got_rows, want_rows, strict=True):
        assert got.keys() == want.keys()
        for name in want.keys() - {"rollout/slot_utilization"}:  # hosts wait for each other
            if name.startswith("policy/mismatch_"):  # which digits differ is chance
                continue
            # Rollouts are the same tokens; sums over devices differ in the last digits, and the
            # mismatch consists of those.
            near = 0.1 if name == "policy/mismatch" else NEAR.get(name.split("/")[0], 1e-9)
            assert got[name] == pytest.approx(want[name], rel=near, abs=1e-6), (want["step"], name)
    got_samples, want_samples = (rows(tmp_path / name / "samples.jsonl") for name in ("two", "one"))
    assert len(got_samples) == len(want_samples) > 0
    for got, want in zip(got_samples, want_samples, strict=True):
        # The last digits of a log-prob are chance, too.
        assert got.pop("logps") == pytest.approx(want.pop("logps"), abs=2e-3)
        assert got == want
    got_export, want_export = (
        stored_tensors(tmp_path / name / f"export-{NUM_STEPS}").by_name for name in ("two", "one")
    )
    assert got_export.keys() == want_export.keys()


def test_one_pass_of_two_processes_has_every_row_once_also_when_resumed(
    environment: Environment, tmp_path: Path
) -> None:
    num_rows, num_prompts, group_size = 7, 2, 4
    data = tmp_path / "data"
    data.mkdir()
    for split, first in (("train", 1), ("test", 8)):
        lines = [
            json.dumps({"numbers": [number, 9], "target": number + 9})
            for number in range(first, first + num_rows)
        ]
        (data / f"{split}.jsonl").write_text("\n".join(lines))
    changes = [
        f"--config.task.data={data}",
        f"--config.rollout.num_prompts={num_prompts}",
        "--config.train.prompt_epochs=1",
        "--config.train.steps=0",
        f"--config.train.logged_rollouts={num_prompts * group_size}",
        "--config.eval.problems=0",
        "--config.eval.every=0",
    ]
    workdir = tmp_path / "run"
    both = launch_two(environment, workdir, *changes)
    wait_for(both[0], workdir / "metrics.jsonl", 2)
    both[1].send_signal(signal.SIGTERM)
    for process in both:
        finish(process)
    num_before = len(rows(workdir / "metrics.jsonl"))
    for process in launch_two(environment, workdir, *changes):
        finish(process)

    steps = [row["step"] for row in rows(workdir / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4] and 2 <= num_before < 4
    samples = rows(workdir / "samples.jsonl")
    prompts = [
        list(dict.fromkeys(sample["prompt"] for sample in samples if sample["step"] == step))
        for step in steps
    ]
    order = [prompt for of_step in prompts for prompt in of_step]
    # The last step is completed by a row of the next pass.
    assert len(set(order)) == num_rows and len(order) <= num_rows + 1
    assert [len(of_step) for of_step in prompts[:3]] == [num_prompts] * 3
    assert len(set(order[: 3 * num_prompts])) == 3 * num_prompts


def errors_of(stderr: str) -> list[str]:
    """Returns the lines that tell the user of an error, and checks that there is nothing else.

    Beside them there are only warnings of libraries about the machine.
    """
    assert "Traceback" not in stderr and "stack trace" not in stderr
    return [line for line in stderr.splitlines() if line.startswith("error: ")]


def test_hosts_that_were_started_differently_are_refused(
    environment: Environment, tmp_path: Path
) -> None:
    both = launch_two(environment, tmp_path, second_changes=["--config.train.steps=9"])
    for process in both:
        _, errors = finish(process, code=2)
        (error,) = errors_of(errors)
        assert f"train.steps is {NUM_STEPS} on host 0 and 9 on host 1" in error


def test_a_host_that_is_alone_says_so_and_ends(environment: Environment, tmp_path: Path) -> None:
    """The other one was killed before it joined, or was never started."""
    first, second = launch_two(environment, tmp_path, "--join_seconds=3")
    second.kill()
    second.communicate()
    _, errors = finish(first, code=2)
    (error,) = errors_of(errors)
    assert "process 1 of 2 did not join at localhost:" in error
    assert "within 3 s" in error
    assert sum(line.startswith("waiting for process 1 of 2") for line in errors.splitlines()) == 1


def test_a_second_run_in_the_workdir_is_refused_on_all_hosts(
    environment: Environment, tmp_path: Path
) -> None:
    with lock_directory(tmp_path, "--workdir"):
        both = launch_two(environment, tmp_path)
        outputs = [process.communicate(timeout=240)[1] for process in both]
    assert [process.returncode for process in both] == [2, 1]
    for stderr in outputs:
        (error,) = errors_of(stderr)
        assert f"--workdir {tmp_path} is in use by another process" in error
        assert f'"pid": {os.getpid()}' in error
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_mistake_on_one_host_ends_the_other_with_its_reason(
    environment: Environment, tmp_path: Path
) -> None:
    both = launch_two(environment, tmp_path, second_changes=["--config.train.nothing=9"])
    first_errors, second_errors = (process.communicate(timeout=120)[1] for process in both)
    assert [process.returncode for process in both] == [1, 2]
    (second_error,) = errors_of(second_errors)
    assert "there is no setting train.nothing" in second_error
    (first_error,) = errors_of(first_errors)
    assert first_error == second_error.replace("error: ", "error: host 1 of 2 ended: ")


def test_a_signal_before_the_steps_ends_both_hosts(
    environment: Environment, tmp_path: Path
) -> None:
    """Host 1 learns why host 0 ends, instead of waiting for it."""
    first, second = launch_two(environment, tmp_path)
    first_out = first.stdout
    assert first_out is not None
    while "workdir" not in first_out.readline():
        assert first.poll() is None
    first.send_signal(signal.SIGTERM)
    (stdout, first_errors), (_, second_errors) = (
        process.communicate(timeout=120) for process in (first, second)
    )
    assert first.returncode == second.returncode
    if first.returncode == 0:
        # This process got no processor for seconds, and the signal came when there was a state.
        for output in (stdout, second_errors):
            assert "SIGTERM on host 0: stopped after step" in output
        return
    assert first.returncode == 1
    for stderr in (first_errors, second_errors):
        (error,) = errors_of(stderr)
        assert "SIGTERM on host 0 of 2" in error


# `python -m jzero.main` that prints a checksum of the weights with which this host decodes a step.
PRINT_CHECKSUMS = """
import zlib
import jax
import numpy as np
from jzero import main
from jzero.loops import rl

collect = rl.collect_rollouts

def collect_and_print(sampler, stream, config, weights, step, *others):
    checksum = 0
    for leaf in jax.tree.leaves(weights):
        for shard in leaf.addressable_shards:
            checksum = zlib.crc32(np.asarray(shard.data).tobytes(), checksum)
    print("weights", step, checksum, flush=True)
    return collect(sampler, stream, config, weights, step, *others)

rl.collect_rollouts = collect_and_print
main.run()
"""


@pytest.mark.parametrize(
    ("num_steps", "rank"),
    [
        (6, 0),
        (6, 2),
        (200, 0),
    ],
)
def test_hosts_whose_episodes_differ_go_on_together(
    environment: Environment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_steps: int,
    rank: int,
) -> None:
    """Carried rollouts of two turns: each host decodes as many calls as its own rollouts take.

    Each host holds one half of the weights, and both decode every step with the same weights. With
    one device each, JAX may run a program in the thread that dispatches it, and collectives have to
    keep their order all the same. Without that, gloo ended the run in its warm start, with sizes
    that do not match. With an adapter of `rank` the same holds of the adapter and its base.
    """
    changes = {
        "model.adapter.rank": rank,
        "rollout.placement.max_staleness": 1,
        "rollout.max_turns": 2,
        "rollout.max_reply_tokens": 96,
        "train.steps": num_steps,
        "train.checkpoint_every": 50,
        "train.microbatch_tokens": 1280,
        "task.turn_reward": "score",
        "eval.every": 0,
        "eval.problems": 0,
        "mesh.data": 1,
        "mesh.fsdp": 2,
    }
    flags = [f"--config.{name}={value}" for name, value in changes.items()]
    monkeypatch.setattr("runs.PROGRAM", ["-c", PRINT_CHECKSUMS])

    outputs = []
    for process in launch_two(environment, tmp_path, *flags, devices=1):
        outputs.append(finish(process, seconds=1500)[0])

    checksums = [
        [line for line in output.splitlines() if line.startswith("weights")] for output in outputs
    ]
    assert checksums[0] == checksums[1]
    assert len(checksums[0]) == num_steps
    assert len({line.split()[2] for line in checksums[0]}) == num_steps
    metrics = rows(tmp_path / "metrics.jsonl")
    assert len(metrics) == num_steps
    assert sum(row["async/staleness_1"] for row in metrics) > 0
    for row in metrics:
        assert row["async/staleness_0"] + row["async/staleness_1"] == pytest.approx(1)
