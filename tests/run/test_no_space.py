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

COMMON = """
import json, os, random, sys
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
"""

# A checkpoint takes about 1.2 MB, so a random moment of writing it is hit.
SAVE = """
rng = random.Random(0)
for moment in range(moments):
    workdir, keep = root / str(moment), 1 + moment % 2
    first = Checkpoints(workdir, keep)
    first.save(1, state_of(1), {"step": 1}, wait=True)
    first.close()
    free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
    with (root / "ballast").open("wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, free - rng.randrange(1, 1_150_000))
    message = ""
    try:
        second = Checkpoints(workdir, keep)
        second.save(2, state_of(2), {"step": 2}, wait=bool(moment % 3))
        second.close()
    except UserError as error:
        message = str(error)
    (root / "ballast").unlink()
    (root / f"{moment}.txt").write_text(message)
os._exit(0)  # as a run ends after this error
"""

# The same command again, in another process.
CHECK = """
def is_whole(checkpoints, step):
    state, host = checkpoints.restore(step, state_of(step))
    same = jax.tree.map(np.array_equal, state, state_of(step))
    return host == {"step": step} and all(jax.tree.leaves(same))

results = []
for moment in range(moments):
    resumed = Checkpoints(root / str(moment), 1 + moment % 2)
    steps = resumed.steps()
    kept = all(is_whole(resumed, step) for step in steps)
    resumed.save(2, state_of(2), {"step": 2}, wait=True)
    kept = kept and is_whole(resumed, 2)
    resumed.close()
    message = (root / f"{moment}.txt").read_text()
    results.append({"message": message, "steps": steps, "kept": kept})
print(json.dumps(results), flush=True)
"""


def in_small_disk(directory: Path, command: str, *arguments: str) -> list[str]:
    """Returns a command that mounts a disk on `directory`, for itself only, and runs `command`."""
    mount = f"mount -t tmpfs -o size=160m tmpfs {directory} && {command}"
    shell = ["sh", "-c", mount, "sh", *arguments]
    return ["unshare", "--user", "--map-root-user", "--mount", *shell]


def allows_small_disks(directory: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(in_small_disk(directory, "true"), capture_output=True).returncode == 0


def test_a_disk_that_fills_while_saving_costs_no_checkpoint(tmp_path: Path) -> None:
    if not allows_small_disks(tmp_path):
        pytest.skip("this system mounts no file system for a user")
    arguments = [sys.executable, COMMON + SAVE, COMMON + CHECK, str(tmp_path), str(MOMENTS)]
    command = '"$1" -c "$2" "$4" "$5" && "$1" -c "$3" "$4" "$5"'

    done = subprocess.run(
        in_small_disk(tmp_path, command, *arguments), capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) == MOMENTS
    for result in results:
        assert result["kept"] and result["steps"], result
        assert result["steps"][-1] == 2 or "cannot be written: No space left" in result["message"]
        assert "\n" not in result["message"]
    assert sum(result["steps"] == [1] for result in results) >= MOMENTS // 2, results
