"""Checkpoints of the training state.

`<workdir>/checkpoints/<step>/` is an Orbax checkpoint of three items, so that a reader can take
only what it needs:

  params     the parameter tree
  optimizer  {"opt_state": ..., "step": i32[]} and, where the algorithm has a critic,
             {"critic": {"params": ..., "opt_state": ..., "step": i32[]}}
  host       JSON: {"step": the step,
                    "host": the record of the run,
                    "host_crc": the CRC-32 of the record,
                    "leaves": {name of an array: [shape, dtype, sum of its bits]}}

A step directory appears under its name only when it is complete. A kill leaves a directory
`*.orbax-checkpoint-tmp*`, which the next run removes. A directory that is a copy of another step,
or a link to one, is refused: the step is written inside, too.
"""

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax import lax

from jzero.errors import UserError, reason_of, shown
from jzero.files import JsonObject, parse_json
from jzero.training.offload import on_device
from jzero.types import JsonValue, State

# The items of a checkpoint: a nested dict with arrays as leaves, or with their shapes and dtypes.
Items = Mapping[str, Any]

LONGEST_REASON = 200  # characters of a library's error that are quoted


class Checkpoints:
    """The checkpoints of a workdir.

    The run that writes them gives `keep`, the number of checkpoints that stay (0: all of them). A
    reader beside a run gives None: it creates and removes nothing.
    """

    def __init__(self, workdir: str | os.PathLike[str], keep: int | None) -> None:
        self.path = Path(workdir).absolute() / "checkpoints"
        options = ocp.CheckpointManagerOptions(max_to_keep=keep or None, create=keep is not None)
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise UserError(f"{self.path} is not a directory: remove it, or use another workdir")
        if keep is not None and jax.process_index() == 0:
            # Of a run that was killed while it saved.
            for leftover in self.path.glob("*.orbax-checkpoint-tmp*"):
                remove(leftover)
        try:
            self._manager = ocp.CheckpointManager(self.path, options=options)
        except Exception as error:  # Orbax raises many types on damaged files
            for metadata in sorted(self.path.glob("[0-9]*/_CHECKPOINT_METADATA")):
                parse_json(metadata.read_text(encoding="utf-8", errors="replace"), metadata)
            raise UserError(
                f"{self.path} cannot be opened ({reason_of(error)}): restore that directory, or "
                "use another workdir"
            ) from error

    def latest(self) -> int | None:
        """Returns the step of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints, the oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: State, host: JsonObject, *, wait: bool = False) -> None:
        """Starts to write a checkpoint; with `wait`, returns when it is complete.

        `state` may be donated once this returns. A step that is already saved is not written again,
        because the same step of a run has the same state.
        """
        if step not in self._manager.all_steps():
            # No program reads the host's memory, and the sums of bits are one.
            items = _to_items(on_device(state, is_donated=False))
            arguments: dict[str, ocp.args.CheckpointArgs] = {
                name: ocp.args.StandardSave(item) for name, item in items.items()
            }
            host_item = {
                "step": step,
                "host": host,
                "host_crc": _crc(host),
                "leaves": _fingerprints(items),
            }
            arguments["host"] = ocp.args.JsonSave(host_item)
            self._manager.save(step, args=ocp.args.Composite(**arguments))
        if wait:
            self._manager.wait_until_finished()

    def restore(self, step: int, state_like: State) -> tuple[State, JsonObject]:
        """Reads a state, bit for bit, and the `host` that `save` was given.

        `state_like` holds arrays or shape structs: the leaves of the state get their shapes, dtypes
        and shardings. Raises UserError if the checkpoint is damaged or has other arrays.
        """
        items, host = self.read_items(step, _to_items(state_like))
        critic = items["optimizer"].get("critic")
        state = State(
            params=items["params"],
            opt_state=items["optimizer"]["opt_state"],
            step=items["optimizer"]["step"],
            critic=State(**critic) if critic else None,
        )
        return state, host

    def read_items(self, step: int, items_like: Items) -> tuple[Items, JsonObject]:
        """Reads the items that `items_like` names, bit for bit, and the `host` of the checkpoint.

        Every array is compared with the shape, dtype and sum of bits that were written beside it.
        """
        host, leaves = self._read_host(step)
        written = {}
        for name, fingerprint in leaves.items():
            if name.split("/")[0] in items_like:
                written[name] = fingerprint
        self._check_same_arrays(step, written, _shapes(items_like))

        # Leaves without a sharding go to the first device of this host.
        first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        arguments = {
            name: ocp.args.StandardRestore(item, fallback_sharding=first_device)
            for name, item in items_like.items()
        }
        restored = self._read(step, **arguments)
        items = {name: restored[name] for name in items_like}

        fingerprints = _fingerprints(items)
        changed = [name for name in written if fingerprints[name] != written[name]]
        if changed:
            raise self.damaged(step, f"{changed[0]} is not what was saved")
        return items, host

    def close(self) -> None:
        """Waits for a checkpoint that is being written."""
        self._manager.close()

    def _check_same_arrays(
        self, step: int, written: dict[str, list[JsonValue]], wanted: dict[str, list[JsonValue]]
    ) -> None:
        """Raises UserError unless the checkpoint has the arrays that this config needs."""
        for name in sorted(written.keys() | wanted.keys()):
            found = written[name][:2] if name in written else None  # without the sum of bits
            expected = wanted.get(name)
            if found != expected:
                raise UserError(
                    f"checkpoint {self.path / str(step)} holds {name} = {found}, "
                    f"this config wants {expected}: resume with the config it was saved with, "
                    "or use another workdir"
                )

    def _read_host(self, step: int) -> tuple[JsonObject, dict[str, list[JsonValue]]]:
        """Returns the record and the fingerprints of a checkpoint, which must be that of `step`."""
        item = self._read(step, host=ocp.args.JsonRestore())["host"]
        if not isinstance(item, dict) or not item.keys() >= {"host", "leaves"}:
            raise self.damaged(step, f"host/metadata holds {shown(item)}")
        host, leaves = item["host"], item["leaves"]
        if not isinstance(host, dict) or not isinstance(leaves, dict):
            raise self.damaged(step, f"host/metadata holds {shown(item)}")
        for name, fingerprint in leaves.items():
            if not isinstance(fingerprint, list) or len(fingerprint) != 3:
                raise self.damaged(
                    step, f"host/metadata has {shown(fingerprint)} for {shown(name)}"
                )
        # Checkpoints of earlier versions have no CRC, and name their step in the record alone.
        if item.get("host_crc", _crc(host)) != _crc(host):
            raise self.damaged(step, "the record of the run is not what was saved")
        written_step = item.get("step", host.get("step"))
        if written_step != step:
            raise self.damaged(step, f"it is of step {shown(written_step)}, a copy or a link")
        return host, leaves

    def _read(self, step: int, **arguments: ocp.args.CheckpointArgs) -> Items:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**arguments))
        except Exception as error:  # Orbax and TensorStore raise many types on damaged files
            raise self.damaged(step, error) from error

    def damaged(self, step: int, reason: object) -> UserError:
        """Returns the error of a checkpoint that cannot be read, with what the user can do."""
        earlier_steps = [other for other in self._manager.all_steps() if other < step]
        if earlier_steps:
            remedy = f"resume from step {max(earlier_steps)}"
        else:
            remedy = "start over"
        # TensorStore's messages have many lines; the first one says what is wrong.
        lines = str(reason).split(". See full")[0].splitlines() or [repr(reason)]
        return UserError(
            f"checkpoint {self.path / str(step)} cannot be read "
            f"({lines[0][:LONGEST_REASON]}): delete that directory to {remedy}"
        )


def remove(path: Path) -> None:
    """Removes a directory and all that is in it, a file, or a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _crc(host: JsonObject) -> int:
    """Returns the CRC-32 of a record, which is the same before and after it was JSON."""
    as_read = json.loads(json.dumps(host))
    return zlib.crc32(json.dumps(as_read, sort_keys=True).encode())


def _to_items(state: State) -> Items:
    optimizer = {"opt_state": state.opt_state, "step": state.step}
    if state.critic is not None:
        optimizer["critic"] = {
            "params": state.critic.params,
            "opt_state": state.critic.opt_state,
            "step": state.critic.step,
        }
    return {"params": state.params, "optimizer": optimizer}


def _shapes(items: Items) -> dict[str, list[JsonValue]]:
    """Returns {name of an array: [shape, dtype]}, in the order of the leaves."""
    shapes = {}
    for path, leaf in jax.tree.leaves_with_path(items):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        shapes[name] = [list(leaf.shape), str(leaf.dtype)]
    return shapes


def _fingerprints(items: Items) -> dict[str, list[JsonValue]]:
    """Returns {name of an array: [shape, dtype, sum of its bits]}."""
    sums = jax.device_get(_bit_sums(jax.tree.leaves(items)))
    shapes = _shapes(items)
    return {
        name: [*shape_and_dtype, int(bit_sum)]
        for (name, shape_and_dtype), bit_sum in zip(shapes.items(), sums, strict=True)
    }


@jax.jit
def _bit_sums(leaves: list[jax.Array]) -> list[jax.Array]:
    """Returns the sum of the bits of each leaf, read as unsigned integers, modulo 2^32.

    A sum of integers does not depend on the order, so it is the same under every sharding.
    """

    def bit_sum(leaf: jax.Array) -> jax.Array:
        unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
        bits = lax.bitcast_convert_type(leaf, unsigned)
        return jnp.sum(bits, dtype=jnp.uint32)

    return [bit_sum(leaf) for leaf in leaves]
