"""Checkpoints of the training state.

`<workdir>/checkpoints/<step>/` is an Orbax checkpoint with three items, so that a reader can load
only the items it needs:

  params     the parameter tree
  optimizer  {"opt_state": ..., "step": i32[]} and, if the algorithm has a critic,
             {"critic": {"params": ..., "opt_state": ..., "step": i32[]}}. Without Adam's moments
             (train.save) no "opt_state" is there
  host       JSON: {"step": the step,
                    "host": the record of the run,
                    "host_crc": the CRC-32 of the record,
                    "leaves": {name of an array: [shape, dtype, sum of its bits]}}

A step directory appears under its name only when it is complete. A kill leaves a directory
`*.orbax-checkpoint-tmp*`, which the next run removes. A directory that is a copy of another step,
or a link to one, is rejected, because the checkpoint also contains its step.
"""

import json
import logging
import os
import shutil
import sys
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from jax import lax

from jzero.errors import UserError, reason_of, shown
from jzero.files import JsonObject, is_full_disk, naming_full_disk, no_room, parse_json, read_bytes
from jzero.training.offload import on_device
from jzero.types import JsonValue, Params, State

# The items of a checkpoint: a nested dict with leaves that are arrays, or their shapes and dtypes.
Items = Mapping[str, Any]

UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a checkpoint that is being written
LONGEST_REASON = 200  # characters of a library's error that are quoted


class _FullDiskFilter(logging.Filter):
    """Drops full-disk errors from the log of Orbax, which both logs and raises them.

    After such an error its threads also log that the unfinished checkpoint is not there.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return error is None or not (is_full_disk(error) or UNFINISHED in str(error))


_FULL_DISK_FILTER = _FullDiskFilter()


def _hide_closed_loops(unraisable: "sys.UnraisableHookArgs") -> None:
    """Replaces `sys.unraisablehook`, and shows all errors except one.

    When a part of a checkpoint cannot be written, Orbax closes its event loop and raises the error.
    TensorStore's threads then fail to report the other parts to the closed loop.
    """
    error = unraisable.exc_value
    if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
        sys.__unraisablehook__(unraisable)


class Checkpoints:
    """The checkpoints of a workdir.

    The run that writes them passes `keep`, the number of checkpoints to retain (0: all of them). A
    reader that runs at the same time passes None: it creates and removes nothing.

    `has_moments` says whether new checkpoints hold Adam's moments (train.save=full).
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        keep: int | None,
        *,
        has_moments: bool = True,
    ) -> None:
        self._has_moments = has_moments
        self.path = Path(workdir).absolute() / "checkpoints"
        logging.getLogger("absl").addFilter(_FULL_DISK_FILTER)  # a second call has no effect
        if sys.unraisablehook is sys.__unraisablehook__:
            sys.unraisablehook = _hide_closed_loops
        # A reader must not create the directory.
        options = ocp.CheckpointManagerOptions(max_to_keep=keep or None, create=keep is not None)
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise UserError(f"{self.path} is not a directory: remove it, or use another workdir")
        if keep is not None and jax.process_index() == 0:
            # Incomplete checkpoints of a run that was killed during a save.
            for leftover in self.path.glob("*.orbax-checkpoint-tmp*"):
                remove(leftover)
        try:
            self._manager = ocp.CheckpointManager(self.path, options=options)
        except Exception as error:  # Orbax raises many types on damaged files
            if is_full_disk(error):
                raise no_room(self.path, None, error) from error
            # If a metadata file is damaged, `parse_json` raises an error that names the file.
            for metadata in sorted(self.path.glob("[0-9]*/_CHECKPOINT_METADATA")):
                parse_json(read_bytes(metadata), metadata)
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

        `state` may be donated after this call. A step that is already saved is not written again,
        because the same step of a run has the same state.
        """
        if step not in self._manager.all_steps():
            # Offloaded arrays must be on the device: no program reads host memory, and the bit sums
            # are a program.
            items = _to_items(on_device(state, is_donated=False), self._has_moments)
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
            needed = sum(leaf.nbytes for leaf in jax.tree.leaves(items))
            with naming_full_disk(self.path / str(step), needed):
                self._manager.save(step, args=ocp.args.Composite(**arguments))
        if wait:
            with naming_full_disk(self.path / str(step)):
                self._manager.wait_until_finished()

    def restore(self, step: int, state_like: State) -> tuple[State, JsonObject]:
        """Reads a state bit for bit, and the `host` record that `save` was given.

        `state_like` holds arrays or shape structs. The leaves of the state get their shapes, dtypes
        and shardings. If the checkpoint has no moments of Adam, they are zeros. Raises UserError if
        the checkpoint is damaged or has other arrays.
        """
        has_moments = not jax.tree.leaves(state_like.opt_state) or self.has_moments(step)
        items, host = self.read_items(step, _to_items(state_like, has_moments))

        def to_state(item: Items, params: Params, like: State) -> State:
            opt_state = item["opt_state"] if has_moments else _zeros(like.opt_state)
            return State(params, opt_state, item["step"])

        optimizer = items["optimizer"]
        state = to_state(optimizer, items["params"], state_like)
        if state_like.critic is not None:
            critic = optimizer["critic"]
            state = replace(state, critic=to_state(critic, critic["params"], state_like.critic))
        return state, host

    def has_moments(self, step: int) -> bool:
        """Returns whether the checkpoint of `step` holds Adam's moments."""
        _, leaves = self._read_host(step)
        names = [name for name in leaves if name.startswith("optimizer/")]
        return any("opt_state" in name for name in names)

    def read_items(self, step: int, items_like: Items) -> tuple[Items, JsonObject]:
        """Reads the items that `items_like` names, bit for bit, and the checkpoint's `host` record.

        Every array is compared with the shape, dtype and bit sum stored in the checkpoint.
        """
        host, leaves = self._read_host(step)
        written = {}
        for name, fingerprint in leaves.items():
            if name.split("/")[0] in items_like:
                written[name] = fingerprint
        # Checked before the restore, so that the error names the array.
        self._check_same_arrays(step, written, _shapes(items_like))

        # Leaves without a sharding go to the first device of this host.
        first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        arguments = {
            name: ocp.args.StandardRestore(item, fallback_sharding=first_device)
            for name, item in items_like.items()
        }
        restored = self._read(step, **arguments)
        items = {name: restored[name] for name in items_like}

        # The bit sums detect damage that the restore did not report.
        fingerprints = _fingerprints(items)
        changed = [name for name in written if fingerprints[name] != written[name]]
        if changed:
            raise self.damaged(step, f"{changed[0]} is not what was saved")
        return items, host

    def close(self) -> None:
        """Waits for a running save. Raises UserError if the disk is full."""
        with naming_full_disk(self.path):
            self._manager.close()

    def _check_same_arrays(
        self,
        step: int,
        written: dict[str, list[JsonValue]],
        wanted: dict[str, list[JsonValue]],
    ) -> None:
        """Raises UserError unless the checkpoint has the arrays that this config needs."""
        for name in sorted(written.keys() | wanted.keys()):
            stored = written[name][:2] if name in written else None  # without the sum of bits
            expected = wanted.get(name)
            if stored != expected:
                raise UserError(
                    f"checkpoint {self.path / str(step)} holds {name} = {stored}, "
                    f"this config needs {expected}: resume with the config it was saved with, "
                    "or use another workdir"
                )

    def _read_host(self, step: int) -> tuple[JsonObject, dict[str, list[JsonValue]]]:
        """Returns the record and the fingerprints of the checkpoint of `step`, after validation."""
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
        # Checkpoints of earlier versions have no CRC, and store the step only in the record.
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
        """Returns the error for a checkpoint that cannot be read, with advice for the user."""
        earlier_steps = [other for other in self._manager.all_steps() if other < step]
        if earlier_steps:
            remedy = f"resume from step {max(earlier_steps)}"
        else:
            remedy = "start over"
        # TensorStore's messages have many lines; the first line gives the cause.
        lines = str(reason).split(". See full")[0].splitlines() or [repr(reason)]
        return UserError(
            f"checkpoint {self.path / str(step)} cannot be read "
            f"({lines[0][:LONGEST_REASON]}): delete that directory to {remedy}"
        )


def remove(path: Path) -> None:
    """Removes a file, a link, or a directory with its contents."""
    # Removing a link must not remove its target.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _crc(host: JsonObject) -> int:
    """Returns the CRC-32 of a record. A round trip through JSON does not change it."""
    # A round trip normalizes the record: JSON has no tuples, for example.
    as_read = json.loads(json.dumps(host))
    return zlib.crc32(json.dumps(as_read, sort_keys=True).encode())


def _to_items(state: State, has_moments: bool) -> Items:
    optimizer = _optimizer_items(state, has_moments)
    if state.critic is not None:
        critic = _optimizer_items(state.critic, has_moments)
        optimizer["critic"] = {"params": state.critic.params, **critic}
    return {"params": state.params, "optimizer": optimizer}


def _optimizer_items(state: State, has_moments: bool) -> dict[str, object]:
    moments = {"opt_state": state.opt_state} if has_moments else {}
    return {"step": state.step, **moments}


def _zeros(opt_state: optax.OptState) -> optax.OptState:
    """Returns an optimizer state of zeros, which is how Adam starts (`optimizer.init`).

    The leaves of `opt_state` give the shapes, types and shardings.
    """

    def zeros_like(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        def zeros() -> jax.Array:
            return jnp.zeros(leaf.shape, leaf.dtype)

        # Compiled with its sharding: zeros made on one device would not fit there for a large
        # model.
        return jax.jit(zeros, out_shardings=leaf.sharding)()

    return jax.tree.map(zeros_like, opt_state)


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
    """Returns the sum of the bits of each leaf, read as unsigned integers, modulo 2^32."""

    # A sum of integers does not depend on the order, so it is the same under every sharding.
    def bit_sum(leaf: jax.Array) -> jax.Array:
        unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
        bits = lax.bitcast_convert_type(leaf, unsigned)
        return jnp.sum(bits, dtype=jnp.uint32)

    return [bit_sum(leaf) for leaf in leaves]
