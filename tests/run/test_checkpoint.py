import dataclasses
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jzero import config, types
from jzero.run.checkpoint import Checkpoints
from jzero.run.workdir import MAY_CHANGE, claim_workdir

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def make_mesh(*shape):
    return jax.make_mesh(shape, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def init(mesh, rows=64) -> types.State:
    """Matrices sharded, vectors replicated, the optimizer state as its parameter."""
    params = {
        "embed": jax.random.normal(jax.random.key(0), (rows, 16)),
        "layer": {
            "kernel": jax.random.normal(jax.random.key(1), (16, 8)),
            "bias": jnp.zeros(8, jnp.bfloat16),
        },
    }
    params = jax.tree.map(lambda x: jax.device_put(x, sharding(mesh, x)), params)
    opt_state = jax.tree.map(lambda x: jax.device_put(x, sharding(mesh, x)), OPTIMIZER.init(params))
    return types.State(
        params, opt_state, jax.device_put(jnp.int32(0), NamedSharding(mesh, PartitionSpec()))
    )


def sharding(mesh, leaf):
    return NamedSharding(mesh, PartitionSpec("fsdp") if leaf.ndim == 2 else PartitionSpec())


@jax.jit
def update(params, opt_state, step):
    grads = jax.tree.map(lambda x: jnp.sin(x * (step + 1)).astype(x.dtype), params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, step + 1


def advance(state, steps):
    for _ in range(steps):
        state = types.State(*update(state.params, state.opt_state, state.step))
    return state


def leaves(state):
    return jax.tree.leaves((state.params, state.opt_state, state.step))


def assert_same_bits(a, b):
    assert jax.tree.structure((a.params, a.opt_state)) == jax.tree.structure(
        (b.params, b.opt_state)
    )
    for x, y in zip(leaves(a), leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def structs(state):
    struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return types.State(*jax.tree.map(struct, (state.params, state.opt_state, state.step)))


def test_round_trip_onto_another_mesh_bit_for_bit(tmp_path):
    state = advance(init(make_mesh(2, 4)), 3)
    host = {"step": 3, "note": "é", "nested": [1, 2.5, None]}
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(3, state, host, wait=True)
    checkpoints.close()
    for mesh in (make_mesh(2, 4), make_mesh(8, 1), make_mesh(1, 8)):
        like = init(mesh)
        checkpoints = Checkpoints(tmp_path, 2)
        restored, read = checkpoints.restore(3, structs(like))
        assert read == host
        assert_same_bits(restored, state)
        for x, y in zip(leaves(restored), leaves(like), strict=True):
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        checkpoints.close()


def test_resumed_run_equals_uninterrupted(tmp_path):
    whole = advance(init(make_mesh(2, 4)), 6)
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(3, advance(init(make_mesh(2, 4)), 3), {})
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path, 2)
    restored, _ = checkpoints.restore(3, init(make_mesh(2, 4)))
    assert_same_bits(advance(restored, 3), whole)
    checkpoints.close()


def test_state_may_be_donated_while_it_is_written(tmp_path):
    state = init(make_mesh(1, 8), rows=1 << 18)
    copy = types.State(
        *jax.tree.map(lambda x: x.copy(), (state.params, state.opt_state, state.step))
    )
    donating = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(1, state, {})
    jax.block_until_ready(donating((state.params, state.opt_state, state.step)))
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path, 1)
    assert_same_bits(checkpoints.restore(1, structs(copy))[0], copy)
    checkpoints.close()


@pytest.mark.parametrize(("keep", "kept"), [(2, [3, 4]), (0, [1, 2, 3, 4])])
def test_keep(tmp_path, keep, kept):
    checkpoints = Checkpoints(tmp_path, keep)
    assert checkpoints.latest() is None
    state = init(make_mesh(2, 4))
    for step in (1, 2, 3, 4):
        checkpoints.save(step, state, {})
    checkpoints.save(4, state, {}, wait=True)  # again: nothing to do
    assert checkpoints.latest() == 4
    checkpoints.close()
    assert (
        sorted(
            int(path.name) for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()
        )
        == kept
    )


def truncate(path: Path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def empty(path: Path):
    path = path.resolve()
    shutil.rmtree(path)
    path.mkdir()


DAMAGES = {  # name -> (file pattern below the step, what happens to the largest file it matches)
    "params cut": ("params/ocdbt.process_0/d/*", truncate),
    "params flipped": ("params/ocdbt.process_0/d/*", flip),
    "params gone": ("params/ocdbt.process_0/d/*", Path.unlink),
    "optimizer cut": ("optimizer/ocdbt.process_0/d/*", truncate),
    "manifest cut": ("params/manifest.ocdbt", truncate),
    "structure cut": ("params/_METADATA", truncate),
    "host cut": ("host/metadata", truncate),
    "host gone": ("host/metadata", Path.unlink),
    "all gone": ("../2", empty),
}


# TensorStore's other reads end after Orbax has closed their event loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_one_clear_line(tmp_path, damage):
    pattern, harm = DAMAGES[damage]
    # Small arrays live in the index, which Orbax writes twice; these have files of their own.
    state = advance(init(make_mesh(2, 4), rows=1 << 14), 1)
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(1, state, {})
    checkpoints.save(2, advance(state, 1), {})
    checkpoints.close()
    step = tmp_path / "checkpoints/2"
    harm(max(step.glob(pattern), key=lambda path: path.stat().st_size))
    checkpoints = Checkpoints(tmp_path, 2)
    assert checkpoints.latest() == 2  # no silent fall back
    with pytest.raises(ValueError, match="delete that directory to resume from step 1") as caught:
        checkpoints.restore(2, structs(state))
    assert str(step) in str(caught.value) and "\n" not in str(caught.value)
    checkpoints.close()
    shutil.rmtree(step)  # what the message says
    checkpoints = Checkpoints(tmp_path, 2)
    assert checkpoints.latest() == 1
    assert_same_bits(checkpoints.restore(1, structs(state))[0], state)
    checkpoints.close()
    gc.collect()  # here, where it is expected


def test_state_of_another_shape_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(1, init(make_mesh(2, 4)), {}, wait=True)
    with pytest.raises(
        ValueError, match=r"holds .*embed = \[\[64, 16\], 'float32'\].* wants \[\[128, 16\]"
    ):
        checkpoints.restore(1, structs(init(make_mesh(2, 4), rows=128)))
    checkpoints.close()


KILLED = """
import sys
import jax, jax.numpy as jnp
from jzero import types
from jzero.run.checkpoint import Checkpoints

checkpoints = Checkpoints(sys.argv[1], 2)
for step in (1, 2):
    noise = jax.random.normal(jax.random.key(step), (1 << 24,))
    checkpoints.save(step, types.State({"w": noise}, {"m": -noise}, jnp.int32(step)), {"step": step}, wait=step == 1)
checkpoints.close()
"""


def test_kill_during_a_save_leaves_the_previous_step(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], env=environment)
    folder = tmp_path / "checkpoints"
    while not (folder / "1").exists() or not list(folder.glob("2*/*")):
        assert process.poll() is None, "ended before it was killed"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [path.name for path in folder.glob("2*")] == ["2.orbax-checkpoint-tmp"]
    checkpoints = Checkpoints(tmp_path, 2)
    assert not list(folder.glob("2*"))
    assert checkpoints.latest() == 1
    noise = jax.random.normal(jax.random.key(1), (1 << 24,))
    state = types.State({"w": noise}, {"m": -noise}, jnp.int32(1))
    restored, host = checkpoints.restore(1, structs(state))
    assert_same_bits(restored, state)
    assert host == {"step": 1}
    checkpoints.save(2, state, {}, wait=True)
    assert checkpoints.latest() == 2
    checkpoints.close()


def test_workdir_is_tied_to_its_config(tmp_path):
    first = json.dumps(
        {"train": {"steps": 10, "seed": 0}, "eval": {"every": 0}, "rollout": {"stop": []}}
    )
    workdir = tmp_path / "new/run"
    claim_workdir(workdir, first)
    path = workdir / "config.json"
    assert path.read_text() == first
    written = path.stat().st_mtime_ns
    claim_workdir(workdir, first)
    assert path.stat().st_mtime_ns == written

    longer = first.replace('"steps": 10', '"steps": 20').replace('"every": 0', '"every": 5')
    claim_workdir(workdir, longer)
    assert path.read_text() == longer

    other = json.loads(longer)
    other["train"] = {"steps": 30, "seed": 1, "lr": 0.5}
    other["rollout"]["stop"] = ["</answer>"]
    with pytest.raises(ValueError) as caught:
        claim_workdir(workdir, json.dumps(other))
    message = str(caught.value)
    for part in (
        str(path),
        "train.seed: 0 -> 1",
        "train.lr: (absent) -> 0.5",
        'rollout.stop: [] -> ["</answer>"]',
    ):
        assert part in message
    assert "another --workdir" in message and "train.steps" not in message
    assert path.read_text() == longer
    assert [file.name for file in workdir.iterdir()] == ["config.json"]


def test_what_may_change_exists():
    for name in MAY_CHANGE:
        part = config.Config
        for field in name.split("."):
            types_ = {f.name: f.type for f in dataclasses.fields(part)}
            assert field in types_, name
            part = types_[field]
