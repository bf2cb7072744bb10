"""The KV cache has the pages that there is room for, and says how many and why."""

from dataclasses import replace
from pathlib import Path

import jax
import pytest
import reference
from tiny import blueprint_on

from jzero import setup
from jzero.blueprint import Blueprint
from jzero.config import Config, RolloutConfig
from jzero.decoder.engine import Engine
from jzero.errors import UserError
from jzero.model.base_model import read_base_model
from jzero.planning import fitting, host_memory, kv_pool
from jzero.planning.chips import GIB, described_devices
from jzero.planning.fitting import fitting_pages
from jzero.planning.planned_run import kv_bytes_per_token
from jzero.run import kv_pool as record
from jzero.sharding.mesh import train_mesh
from jzero.workers.pool import Pool


def settings_of(**rollout: object) -> Config:
    """Returns a run with 8 slots of 40 tokens, which are 5 pages."""
    lengths = {"max_prompt_tokens": 16, "max_new_tokens": 24, "num_slots": 8, "page_size": 8}
    return reference.settings(rollout=lengths | rollout, train={"microbatch_tokens": 512})


def engine_of(settings: Config, shards: int = 1) -> Engine:
    return blueprint_of(settings, shards).decoder


def blueprint_of(settings: Config, shards: int = 1) -> Blueprint[None]:
    mesh = train_mesh(shards, 1, 1, jax.devices()[:shards])
    return blueprint_on(settings, read_base_model(settings.model), mesh)


def sized_in_run(settings: Config, engine: Engine) -> RolloutConfig:
    """Returns the rollout settings of a training run with the pages that fit."""
    room = kv_pool.room_in_run(settings.memory, engine, lambda: fitting_pages(settings))
    return kv_pool.size_pool(settings.rollout, engine, room)


def page_bytes(engine: Engine) -> float:
    return kv_bytes_per_token(engine) * engine.settings.page_size


def free_pages(monkeypatch: pytest.MonkeyPatch, engine: Engine, pages: float) -> None:
    """Lets the machine have free memory for so many pages of each shard, and for the scratch one.

    The test process has 8 CPU devices, which share the memory.
    """
    free = (pages + 1) * page_bytes(engine) * len(jax.local_devices()) / kv_pool.CPU_SHARE
    monkeypatch.setattr(host_memory, "free_bytes", lambda: free)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_cache_that_fits_has_every_slot_at_full_length(shards, capsys) -> None:
    settings = settings_of()
    engine = engine_of(settings, shards)
    sized = sized_in_run(settings, engine)
    assert sized.num_pages == 8 * 5
    again = engine_of(replace(settings, rollout=sized), shards)
    assert again.pages_per_shard == engine.pages_per_shard
    printed = capsys.readouterr().out
    assert "320 tokens, all 8 slots at 40 tokens\n" in printed


@pytest.mark.parametrize("shards", [1, 2])
def test_a_cache_has_the_pages_that_a_share_of_the_free_memory_holds(
    shards, monkeypatch, capsys
) -> None:
    settings = settings_of()
    engine = engine_of(settings, shards)
    free_pages(monkeypatch, engine, 13.5)
    sized = kv_pool.size_pool(
        settings.rollout,
        engine,
        kv_pool.room_of_decoder(settings.memory, engine, settings.model),
    )
    assert sized.num_pages == 13 * shards
    assert engine_of(replace(settings, rollout=sized), shards).pages_per_shard == 13 + 1
    printed = capsys.readouterr().out
    assert (
        f"{13 * 8 * shards} tokens, {2 * shards} of 8 slots at 40 tokens (0.125 of the" in printed
    )
    assert "rollout.num_pages sets it)" in printed


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(("longest", "pages"), [(17, 3), (40, 5), (0, 5)])
def test_a_cache_is_no_larger_than_known_prompts_need(shards, longest, pages, capsys) -> None:
    settings = settings_of()
    engine = engine_of(settings, shards)
    room = kv_pool.room_of_decoder(settings.memory, engine, settings.model)
    sized = kv_pool.size_pool(settings.rollout, engine, room, longest=longest)

    assert sized.num_pages == 8 * pages
    printed = capsys.readouterr().out
    assert f"all 8 slots at {longest or 40} tokens" in printed
    assert ("the longest that there are" in printed) == (longest > 0)


def test_one_slot_has_pages_for_its_longest_sequence() -> None:
    settings = settings_of(num_slots=1)
    engine = engine_of(settings)
    room = kv_pool.room_of_decoder(settings.memory, engine, settings.model)

    assert kv_pool.size_pool(settings.rollout, engine, room, longest=17).num_pages == 5


def test_a_cache_holds_at_least_one_sequence(monkeypatch) -> None:
    settings = settings_of()
    engine = engine_of(settings)
    free_pages(monkeypatch, engine, 0)
    assert sized_in_run(settings, engine).num_pages == 5


def test_pages_that_are_asked_for_are_kept_or_refused(monkeypatch) -> None:
    settings = settings_of(num_pages=20)
    engine = engine_of(settings)
    free_pages(monkeypatch, engine, 3)
    assert sized_in_run(settings, engine).num_pages == 20

    total = 11 * page_bytes(engine) * len(jax.local_devices())
    monkeypatch.setattr(host_memory, "total_bytes", lambda: total)
    with pytest.raises(UserError, match=r"rollout\.num_pages=20 takes .* set it to at most 10, or"):
        sized_in_run(settings, engine)


def test_a_sequence_that_cannot_fit_is_refused(monkeypatch) -> None:
    settings = settings_of()
    engine = engine_of(settings)
    free_pages(monkeypatch, engine, 0)
    total = 4 * page_bytes(engine) * len(jax.local_devices())
    monkeypatch.setattr(host_memory, "total_bytes", lambda: total)
    with pytest.raises(
        UserError, match=r"rollout\.max_new_tokens=24: the KV cache of one sequence"
    ):
        sized_in_run(settings, engine)


def test_a_run_keeps_the_pages_that_it_began_with(monkeypatch, tmp_path: Path, capsys) -> None:
    settings = settings_of(num_slots=64)  # 8 on each of 8 devices
    free_pages(monkeypatch, engine_of(settings), 13)
    with Pool(0) as pool:
        first = setup.build(setup.resolve(settings), pool).sampler.engine
        record.write_pages(tmp_path, first.pages_per_shard - 1)
        monkeypatch.undo()
        resumed = setup.build(setup.resolve(settings, tmp_path), pool).sampler.engine
    assert first.pages_per_shard == resumed.pages_per_shard == 13 + 1
    assert "the size that the run began with" in capsys.readouterr().out

    (tmp_path / record.NAME).write_text('{"pages_per_shard": "many"}')
    with pytest.raises(UserError, match=r"kv_pool\.json has pages_per_shard=many: restore or"):
        record.read_pages(tmp_path)


def test_without_preemption_every_slot_has_its_pages() -> None:
    settings = settings_of()
    assert kv_pool.with_full_pool(blueprint_of(settings, 2)).sampling.rollout.num_pages == 40


def test_on_an_accelerator_the_cache_takes_what_the_plan_leaves() -> None:
    """A v5e chip has 15.8 GiB; less memory is given to the run here, in steps."""
    from configs import countdown

    settings = countdown.get_config("qwen3-4b-lora")
    devices = described_devices("v5e:1x1")
    whole = fitting.fit(settings, devices, 100 * GIB)
    pool = whole.run.parts["KV pool"]

    half = whole.phases["rollout"] - pool / 2
    assert all(size < half for phase, size in whole.phases.items() if phase != "rollout")
    shrunk = fitting.shrink_pool(settings, devices, half)

    assert shrunk.rollout.num_pages
    verdict = fitting.fit(shrunk, devices, half)
    assert verdict.fits
    assert verdict.run.parts["KV pool"] > 0.45 * pool
    assert fitting.shrink_pool(settings, devices, whole.needed) is settings
    tenth = whole.phases["rollout"] - 0.9 * pool
    assert fitting.shrink_pool(settings, devices, tenth) is settings
