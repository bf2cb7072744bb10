"""Checkpoints: round trips, which are kept, damage and kills; and the guard of a workdir."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jzero import config
from jzero.errors import UserError
from jzero.run.checkpoint import Checkpoints
from jzero.run.record import RunRecord
from jzero.run.workdir import MAY_CHANGE, claim_workdir
from jzero.types import Params, State

ROOT = Path(__file__).resolve().parents[2]
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def make_mesh(data: int, fsdp: int) -> Mesh:
    return jax.make_mesh((data, fsdp), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def map_leaves(function: Callable[[Any], Any], state: State) -> State:
    """Returns a state of what `function` makes of every array of `state`."""
    parts = (state.params, state.opt_state, state.step)
    params, opt_state, step = jax.tree.map(function, parts)
    return State(params, opt_state, step)


def leaves_of(state: State) -> list[jax.Array]:
    return jax.tree.leaves((state.params, state.opt_state, state.step))


def initial_state(mesh: Mesh, rows: int = 64) -> State:
    """Returns a state whose matrices are sharded over "fsdp", and all else is replicated."""
    params = {
        "embed": jax.random.normal(jax.random.key(0), (rows, 16)),
        "layer": {
            "kernel": jax.random.normal(jax.random.key(1), (16, 8)),
            "bias": jnp.zeros(8, jnp.bfloat16),
        },
    }

    def put(x: jax.Array) -> jax.Array:
        spec = PartitionSpec("fsdp") if x.ndim == 2 else PartitionSpec()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return map_leaves(put, State(params, OPTIMIZER.init(params), jnp.int32(0)))


@jax.jit
def update(
    params: Params, opt_state: optax.OptState, step: jax.Array
) -> tuple[Params, optax.OptState, jax.Array]:
    """Makes an optimizer step with a gradient that is a function of the parameters and the step."""

    def gradient(x: jax.Array) -> jax.Array:
        return jnp.sin(x * (step + 1)).astype(x.dtype)

    gradients = jax.tree.map(gradient, params)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, step + 1


def advance(state: State, steps: int) -> State:
    for _ in range(steps):
        state = State(*update(state.params, state.opt_state, state.step))
    return state


def shapes_of(state: State) -> State:
    """Returns the shapes, dtypes and shardings of a state, as a run gives them to restore."""

    def shape_of(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    return map_leaves(shape_of, state)


def assert_same_bits(a: State, b: State) -> None:
    assert jax.tree.structure(a.params) == jax.tree.structure(b.params)
    assert jax.tree.structure(a.opt_state) == jax.tree.structure(b.opt_state)
    for x, y in zip(leaves_of(a), leaves_of(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@contextmanager
def opened(workdir: Path, keep: int = 2) -> Iterator[Checkpoints]:
    """Opens the checkpoints of a workdir as a process does; waits for its writes at the end."""
    checkpoints = Checkpoints(workdir, keep)
    try:
        yield checkpoints
    finally:
        checkpoints.close()


def restored_state(workdir: Path, step: int, state_like: State) -> State:
    """Returns what a new process reads."""
    with opened(workdir) as checkpoints:
        state, _ = checkpoints.restore(step, shapes_of(state_like))
    return state


# Round trips


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State, dict[str, Any]]:
    """Returns a workdir, and the state and the host's values that are saved there at step 3."""
    workdir = tmp_path_factory.mktemp("saved")
    state = advance(initial_state(make_mesh(2, 4)), 3)
    host = {"step": 3, "note": "é", "nested": [1, 2.5, None]}
    with opened(workdir) as checkpoints:
        checkpoints.save(3, state, host, wait=True)
    return workdir, state, host


@pytest.mark.parametrize("mesh_shape", [(2, 4), (8, 1), (1, 8)], ids=str)
def test_a_state_is_restored_onto_another_mesh_bit_for_bit(
    saved: tuple[Path, State, dict[str, Any]], mesh_shape: tuple[int, int]
) -> None:
    workdir, state, host = saved
    state_like = initial_state(make_mesh(*mesh_shape))

    with opened(workdir) as checkpoints:
        restored, restored_host = checkpoints.restore(3, shapes_of(state_like))

    assert restored_host == host
    assert_same_bits(restored, state)
    for x, y in zip(leaves_of(restored), leaves_of(state_like), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    mesh = make_mesh(2, 4)
    uninterrupted = advance(initial_state(mesh), 6)
    with opened(tmp_path) as checkpoints:
        checkpoints.save(3, advance(initial_state(mesh), 3), {})

    with opened(tmp_path) as checkpoints:
        # Arrays say as well as shapes what is wanted.
        restored, _ = checkpoints.restore(3, initial_state(mesh))

    assert_same_bits(advance(restored, 3), uninterrupted)


def test_a_state_may_be_donated_while_it_is_written(tmp_path: Path) -> None:
    # The state is so large that it is still being written when its memory is overwritten.
    state = initial_state(make_mesh(1, 8), rows=1 << 18)
    copy = map_leaves(jnp.copy, state)

    def overwritten(tree: Any) -> Any:
        return jax.tree.map(lambda x: x * 0 - 1, tree)

    overwrite = jax.jit(overwritten, donate_argnums=0)
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        jax.block_until_ready(overwrite((state.params, state.opt_state, state.step)))

    assert_same_bits(restored_state(tmp_path, 1, copy), copy)


@pytest.mark.parametrize(("keep", "kept_steps"), [(2, [3, 4]), (0, [1, 2, 3, 4])])
def test_the_newest_checkpoints_are_kept(tmp_path: Path, keep: int, kept_steps: list[int]) -> None:
    state = initial_state(make_mesh(2, 4))
    with opened(tmp_path, keep) as checkpoints:
        assert checkpoints.latest() is None

        for step in (1, 2, 3, 4):
            checkpoints.save(step, state, {})
        checkpoints.save(4, state, {}, wait=True)  # does nothing: the step is saved

        assert checkpoints.latest() == 4
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert sorted(int(name) for name in names if name.isdigit()) == kept_steps


# Damage


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def empty(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


def largest(step: Path, pattern: str) -> Path:
    """Returns the largest file that matches a pattern below the directory of a step."""
    return max(step.glob(pattern), key=lambda path: path.stat().st_size)


ARRAYS_OF_PARAMS = "params/ocdbt.process_0/d/*"
ARRAYS_OF_OPTIMIZER = "optimizer/ocdbt.process_0/d/*"


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """Returns a workdir with the steps 1 and 2, and the state of step 1. Tests damage copies."""
    workdir = tmp_path_factory.mktemp("two_steps")
    # Small arrays live in the index, which Orbax writes twice; these have files of their own.
    state = advance(initial_state(make_mesh(2, 4), rows=1 << 14), 1)
    with opened(workdir) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.save(2, advance(state, 1), {})
    return workdir, state


# TensorStore's other reads end after Orbax has closed their event loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        pytest.param(ARRAYS_OF_PARAMS, truncate, id="params cut"),
        pytest.param(ARRAYS_OF_PARAMS, flip_a_byte, id="params flipped"),
        pytest.param(ARRAYS_OF_PARAMS, Path.unlink, id="params gone"),
        pytest.param(ARRAYS_OF_OPTIMIZER, truncate, id="optimizer cut"),
        pytest.param("params/manifest.ocdbt", truncate, id="manifest cut"),
        pytest.param("params/_METADATA", truncate, id="structure cut"),
        pytest.param("host/metadata", truncate, id="host cut"),
        pytest.param("host/metadata", Path.unlink, id="host gone"),
        pytest.param(None, empty, id="all gone"),
    ],
)
def test_a_damaged_checkpoint_is_one_clear_line(
    two_steps: tuple[Path, State],
    tmp_path: Path,
    pattern: str | None,
    damage: Callable[[Path], None],
) -> None:
    saved_workdir, state = two_steps
    workdir = tmp_path / "run"
    shutil.copytree(saved_workdir, workdir)
    step = workdir / "checkpoints/2"
    damage(largest(step, pattern) if pattern else step)

    with opened(workdir) as checkpoints:
        assert checkpoints.latest() == 2, "fell back to an older step without a word"
        message = "delete that directory to resume from step 1"
        with pytest.raises(ValueError, match=message) as caught:
            checkpoints.restore(2, shapes_of(state))

    assert str(step) in str(caught.value)
    assert "\n" not in str(caught.value)
    # The advice of the message helps.
    shutil.rmtree(step)
    with opened(workdir) as checkpoints:
        assert checkpoints.latest() == 1
    assert_same_bits(restored_state(workdir, 1, state), state)
    gc.collect()  # reports what TensorStore left open here, where the warning is ignored


def copy_of_step_1(folder: Path) -> None:
    shutil.rmtree(folder / "2")
    shutil.copytree(folder / "1", folder / "2")


def link_to_step_1(folder: Path) -> None:
    shutil.rmtree(folder / "2")
    (folder / "2").symlink_to("1")


@pytest.mark.parametrize("replace", [copy_of_step_1, link_to_step_1])
def test_a_copy_of_another_step_is_refused(
    small_steps: tuple[Path, State], replace: Callable[[Path], None]
) -> None:
    workdir, state = small_steps
    replace(workdir / "checkpoints")

    with (
        opened(workdir) as checkpoints,
        pytest.raises(UserError, match="it is of step 1") as caught,
    ):
        checkpoints.restore(2, shapes_of(state))
    assert str(workdir / "checkpoints/2") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def small_steps(tmp_path: Path) -> tuple[Path, State]:
    """Returns a workdir with the steps 1 and 2, small ones, and the state of step 1."""
    mesh = make_mesh(1, 8)
    states = {step: State({"w": jnp.arange(8.0)}, {}, jnp.int32(step)) for step in (1, 2)}

    def put(x: jax.Array) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec()))

    with opened(tmp_path) as checkpoints:
        for step, state in states.items():
            checkpoints.save(step, map_leaves(put, state), RECORD | {"step": step})
    return tmp_path, map_leaves(put, states[1])


RECORD = {"step": 2, "eval": {"before": {"eval/accuracy": 0.5}}, "seconds": 1.0}


def change_host(workdir: Path, **changes: Any) -> None:
    """Changes the JSON of step 2 beside the arrays. None removes an entry."""
    file = workdir / "checkpoints/2/host/metadata"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: x for name, x in values.items() if x is not None}))


@pytest.mark.parametrize(
    "changes",
    [
        {"host": {}},
        {"host": RECORD | {"seconds": 2.0}},
        {"host": []},
        {"host": None},
        {"leaves": None},
        {"leaves": []},
        {"leaves": {"params/w": 3}},
        {"leaves": {"params/w": ["a", "b", "c"]}},
        {"leaves": {}},
        {"step": 1},
        {"step": "2"},
        {"step": None, "host_crc": None, "host": {}},
    ],
    ids=str,
)
def test_a_damaged_record_is_one_clear_line(
    small_steps: tuple[Path, State], changes: dict[str, Any]
) -> None:
    workdir, state = small_steps
    change_host(workdir, **changes)

    with opened(workdir) as checkpoints, pytest.raises(UserError) as caught:
        checkpoints.restore(2, shapes_of(state))
    assert str(workdir / "checkpoints/2") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_record_of_an_earlier_version_is_read(small_steps: tuple[Path, State]) -> None:
    workdir, state = small_steps
    change_host(workdir, step=None, host_crc=None)

    with opened(workdir) as checkpoints:
        _, record = checkpoints.restore(2, shapes_of(state))

    assert record == RECORD


@pytest.mark.parametrize("content", ["{}", "[]", "null", "[" * 100_000, ""], ids=len)
def test_a_host_that_is_no_record_is_one_clear_line(
    small_steps: tuple[Path, State], content: str
) -> None:
    workdir, state = small_steps
    (workdir / "checkpoints/2/host/metadata").write_text(content)

    with opened(workdir) as checkpoints, pytest.raises(UserError, match="delete that directory"):
        checkpoints.restore(2, shapes_of(state))


@pytest.mark.parametrize("content", ["[]", "[" * 100_000], ids=len)
def test_damaged_metadata_of_a_step_is_one_clear_line(tmp_path: Path, content: str) -> None:
    file = tmp_path / "checkpoints/2/_CHECKPOINT_METADATA"
    file.parent.mkdir(parents=True)
    file.write_text(content)

    with pytest.raises(UserError, match="is damaged") as caught:
        Checkpoints(tmp_path, 2)
    assert str(file) in str(caught.value)


def test_a_file_in_place_of_the_checkpoints_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")

    with pytest.raises(UserError, match="checkpoints is not a directory"):
        Checkpoints(tmp_path, 2)


def test_whatever_a_kill_left_behind_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (folder / "1.orbax-checkpoint-tmp/params").mkdir(parents=True)
    (folder / "2.orbax-checkpoint-tmp").write_text("")
    (folder / "3.orbax-checkpoint-tmp").symlink_to(tmp_path)

    with opened(tmp_path) as checkpoints:
        assert checkpoints.latest() is None
    assert tmp_path.is_dir()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "2"},
        {"eval": None},
        {"eval": {"before": 1}},
        {"seconds": []},
        {"seconds_by_phase": 1},
    ],
    ids=str,
)
def test_a_record_of_other_types_is_refused(changes: dict[str, Any]) -> None:
    whole = RunRecord(step=2, evaluations={"before": {"eval/accuracy": 0.5}}).to_json()
    assert RunRecord.from_json(whole).to_json() == whole

    with pytest.raises(ValueError, match="the record of the run( has|:) "):
        RunRecord.from_json(whole | changes)


def test_a_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    mesh = make_mesh(2, 4)
    larger = initial_state(mesh, rows=128)
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, initial_state(mesh), {}, wait=True)

        message = r"holds .*embed = \[\[64, 16\], 'float32'\].* needs \[\[128, 16\]"
        with pytest.raises(ValueError, match=message):
            checkpoints.restore(1, shapes_of(larger))


# Kills

NOISE_SHAPE = (1 << 24,)  # so large that the kill comes while it is being written
SAVES_TWO_STEPS = f"""
import sys
import jax, jax.numpy as jnp
from jzero.run.checkpoint import Checkpoints
from jzero.types import State

checkpoints = Checkpoints(sys.argv[1], 2)
for step in (1, 2):
    noise = jax.random.normal(jax.random.key(step), {NOISE_SHAPE})
    state = State({{"w": noise}}, {{"m": -noise}}, jnp.int32(step))
    checkpoints.save(step, state, {{"step": step}}, wait=step == 1)
checkpoints.close()
"""


def kill_while_it_saves_step_2(workdir: Path) -> None:
    """Starts a process that saves two steps, and kills it once it has begun to write the second."""
    folder = workdir / "checkpoints"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SAVES_TWO_STEPS, str(workdir)]
    process = subprocess.Popen(command, env=environment)
    while not (folder / "1").exists() or not list(folder.glob("2*/*")):
        assert process.poll() is None, "ended before it was killed"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_a_kill_during_a_save_leaves_the_previous_step(tmp_path: Path) -> None:
    kill_while_it_saves_step_2(tmp_path)

    folder = tmp_path / "checkpoints"
    assert [path.name for path in folder.glob("2*")] == ["2.orbax-checkpoint-tmp"]
    with opened(tmp_path) as checkpoints:
        assert not list(folder.glob("2*"))
        assert checkpoints.latest() == 1

        noise = jax.random.normal(jax.random.key(1), NOISE_SHAPE)
        state = State({"w": noise}, {"m": -noise}, jnp.int32(1))
        restored, host = checkpoints.restore(1, shapes_of(state))
        assert_same_bits(restored, state)
        assert host == {"step": 1}

        checkpoints.save(2, state, {}, wait=True)
        assert checkpoints.latest() == 2


# The guard of a workdir

CONFIG = {
    "train": {"steps": 10, "seed": 0},
    "eval": {"every": 0},
    "rollout": {"stop": []},
    "optimizer": {"lr": 1e-6},
}


def changed(settings: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    """Returns settings with other fields in some sections."""
    return settings | {name: settings[name] | fields for name, fields in sections.items()}


def test_the_same_config_is_written_once(tmp_path: Path) -> None:
    workdir = tmp_path / "new/run"
    text = json.dumps(CONFIG)

    claim_workdir(workdir, text)
    written = (workdir / "config.json").stat().st_mtime_ns
    claim_workdir(workdir, text)

    assert (workdir / "config.json").read_text() == text
    assert (workdir / "config.json").stat().st_mtime_ns == written


def test_settings_that_may_change_replace_the_config(tmp_path: Path) -> None:
    longer = json.dumps(changed(CONFIG, train={"steps": 20}, eval={"every": 5}))
    claim_workdir(tmp_path, json.dumps(CONFIG))

    claim_workdir(tmp_path, longer)

    assert (tmp_path / "config.json").read_text() == longer


def test_a_workdir_refuses_another_run(tmp_path: Path) -> None:
    other = changed(
        CONFIG,
        train={"steps": 30, "seed": 1},
        optimizer={"lr": 0.5},
        rollout={"stop": ["</answer>"]},
    )
    claim_workdir(tmp_path, json.dumps(CONFIG))

    with pytest.raises(ValueError, match="another --workdir") as caught:
        claim_workdir(tmp_path, json.dumps(other))

    message = str(caught.value)
    assert str(tmp_path / "config.json") in message
    assert "train.seed: 0 -> 1" in message
    assert "optimizer.lr: 1e-06 -> 0.5" in message
    assert 'rollout.stop: [] -> ["</answer>"]' in message
    assert "train.steps" not in message
    assert (tmp_path / "config.json").read_text() == json.dumps(CONFIG)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("name", MAY_CHANGE)
def test_a_setting_that_may_change_exists(name: str) -> None:
    assert name in config.known_names()
