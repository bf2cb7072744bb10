"""Counts are bounded by the memory of the host, before anything is allocated."""

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from configs import countdown
from jzero import config
from jzero.config import Config
from jzero.decoder.sequence import make_groups
from jzero.errors import UserError
from jzero.planning import host_memory
from jzero.planning.chips import GIB
from jzero.rollout.sampler import to_rollout
from jzero.types import Problem

HOST = 64.0 * GIB


def changed(**sections: dict[str, object]) -> Config:
    """Returns the tiny recipe with other values: changed(rollout={"group_size": 10**6})."""
    settings = countdown.get_config("tiny")
    for name, values in sections.items():
        for field, value in values.items():
            config.put_value(settings, f"{name}.{field}", value)
    return settings


@pytest.mark.parametrize(
    ("sections", "name"),
    [
        ({"rollout": {"num_prompts": 10**9}}, "rollout.num_prompts=1000000000"),
        ({"rollout": {"group_size": 10**9}}, "rollout.group_size=1000000000"),
        (
            {"rollout": {"placement.max_staleness": 10**9}},
            "rollout.placement.max_staleness=1000000000",
        ),
        (
            {"rollout": {"placement": "together(max_staleness=1,max_running_groups=1000000000)"}},
            "max_running_groups=1000000000",
        ),
        ({"rollout": {"num_slots": 10**9}}, "rollout.num_slots=1000000000"),
        ({"rollout": {"num_pages": 2**31 - 1}}, "rollout.num_pages=2147483647"),
        ({"rollout": {"decode_steps": 10**9}}, "rollout.decode_steps=1000000000"),
        ({"rollout": {"max_new_tokens": 10**9}}, "rollout.max_new_tokens=1000000000"),
        ({"warm_start": {"batch_size": 10**9}}, "warm_start.batch_size=1000000000"),
        ({"eval": {"problems": 10**9}}, "eval.problems=1000000000"),
        ({"eval": {"samples": 10**9}}, "eval.samples=1000000000"),
        ({"sft": {"data": "countdown", "batch_size": 10**9}}, "sft.batch_size=1000000000"),
    ],
)
def test_a_count_that_the_host_cannot_hold_is_refused_by_name(sections, name) -> None:
    settings = changed(**sections)
    parts = host_memory.parts_of_run(settings)

    with pytest.raises(UserError) as refused:
        host_memory.check_host_memory(settings, parts, HOST)

    message = str(refused.value)
    assert name in message.split(":")[0]
    assert "GiB of the host's memory, and it has 64.0 GiB: " in message
    anyway = replace(settings, memory=config.MemoryConfig(check=False))
    host_memory.check_host_memory(anyway, parts, HOST)


def test_the_bound_that_a_message_names_is_one_that_fits() -> None:
    settings = changed(rollout={"num_prompts": 10**8})
    with pytest.raises(UserError) as refused:
        host_memory.check_host_memory(settings, host_memory.parts_of_run(settings), HOST)
    message = str(refused.value)
    bound = int(message.split("set rollout.num_prompts to at most ")[1].split(";")[0])
    assert bound > 10**4

    fitting = changed(rollout={"num_prompts": bound})
    host_memory.check_host_memory(fitting, host_memory.parts_of_run(fitting), HOST)


def test_the_recipes_of_the_package_fit_a_host_of_64_gib() -> None:
    for preset in ("tiny", "qwen2.5-3b", "qwen2.5-7b"):
        settings = countdown.get_config(preset)
        host_memory.check_host_memory(settings, host_memory.parts_of_run(settings), HOST)


def test_a_rollout_takes_about_as_much_as_is_counted_for_it() -> None:
    """Measured while the sequence and the rollout made from it are both there."""
    # The buffers have just grown: they have almost twice the room that the tokens need.
    call, number, tokens = 16, 50, 1600
    problem = Problem("id", "task", "prompt", "gold")
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    groups = make_groups([np.zeros(8, np.int32)] * number, 1, tokens)
    rng = np.random.default_rng(0)
    for [sequence] in groups:
        for _ in range(tokens // call):
            ids = rng.integers(1000, 100_000, call)
            sequence.tokens.append(ids, sampled=True, logps=rng.random(call), versions=0)
    rollouts = [to_rollout(problem, sequence) for [sequence] in groups]
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    bytes_of_tokens = host_memory.BUFFER_FACTOR * tokens * host_memory.TOKEN_BYTES
    counted = number * (host_memory.ROLLOUT_BYTES + bytes_of_tokens)
    assert len(rollouts) == number
    assert 0.75 * counted < after - before < counted


def test_the_memory_of_this_machine_is_known() -> None:
    total, free = host_memory.total_bytes(), host_memory.free_bytes()
    assert 2**28 < free <= total < 2**60


@pytest.mark.parametrize("limited", ["", "pod", "pod/container"])
def test_the_limit_of_every_group_around_the_process_applies(
    limited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "sys/fs/cgroup"
    (root / "pod/container").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/container\n")
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 99000000000 kB\n")
    (root / limited / "memory.max").write_text("1000000\n")
    (root / limited / "memory.current").write_text("400000\n")
    monkeypatch.setattr(host_memory, "Path", lambda path: tmp_path / path.lstrip("/"))

    assert host_memory.total_bytes() == 1e6
    assert host_memory.free_bytes() == 6e5
