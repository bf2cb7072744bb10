"""ENOSPC at random moments of saving: no checkpoint is lost, and the error is one line.

The disk is a small tmpfs in a mount namespace of its own, on which a ballast leaves a random number
of free bytes. The test is skipped where the system allows no such namespace.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MOMENTS = 30

SCRIPT = """
import json, os, random, shutil, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jzero.errors import UserError
from jzero.run.checkpoint import Checkpoints
from jzero.types import State

root, moments = Path(sys.argv[1]), int(sys.argv[2])

def state_of(step):
    keys = jax.random.split(jax.random.key(step), 4)
    params = {str(i): jax.random.normal(key, (40_000,)) for i, key in enumerate(keys)}
    return State(params, {"mu": params}, jnp.int32(step))

def is_whole(checkpoints, step):
    state, host = checkpoints.restore(step, state_of(step))
    same = jax.tree.map(np.array_equal, state, state_of(step))
    return host == {"step": step} and all(jax.tree.leaves(same))

rng = random.Random(0)
results = []
for moment in range(moments):
    workdir = root / str(moment)
    keep = 1 + moment % 2
    first = Checkpoints(workdir, keep)
    first.save(1, state_of(1), {"step": 1}, wait=True)
    first.close()
    free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
    # A checkpoint takes about 1.3 MB, so every moment of writing it is hit.
    left = rng.randrange(0, 1_150_000)
    ballast = root / "ballast"
    ballast.write_bytes(bytes(max(0, free - left)))
    message = ""
    second = None
    try:
        second = Checkpoints(workdir, keep)
        second.save(2, state_of(2), {"step": 2}, wait=bool(moment % 3))
        second.close()
    except UserError as error:
        message = str(error)
    ballast.unlink()
    third = Checkpoints(workdir, keep)
    steps = third.steps()
    kept = all(is_whole(third, step) for step in steps)
    if steps[-1:] == [1]:
        third.save(2, state_of(2), {"step": 2}, wait=True)
        kept = kept and is_whole(third, 2)
    third.close()
    results.append({"left": left, "message": message, "steps": steps, "kept": kept})
    shutil.rmtree(workdir, ignore_errors=True)  # threads of the failed save may still write
print(json.dumps(results), flush=True)
os._exit(0)
"""


def in_small_disk(directory: Path, command: list[str]) -> list[str]:
    """Returns a command that mounts 8 MB on `directory`, for itself only, and runs `command`."""
    mount = f'mount -t tmpfs -o size=8m tmpfs {directory} && exec "$@"'
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", *command]


def allows_small_disks(directory: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(in_small_disk(directory, ["true"]), capture_output=True).returncode == 0


def test_a_disk_that_fills_while_saving_costs_no_checkpoint(tmp_path: Path) -> None:
    if not allows_small_disks(tmp_path):
        pytest.skip("this system mounts no file system for a user")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(MOMENTS)]

    done = subprocess.run(in_small_disk(tmp_path, command), capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) == MOMENTS
    for result in results:
        assert result["kept"] and result["steps"], result
        assert result["steps"][-1] == 2 or "cannot be written: No space left" in result["message"]
        assert "\n" not in result["message"]
    assert sum(result["steps"] == [1] for result in results) >= MOMENTS // 2, results
