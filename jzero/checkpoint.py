"""Checkpoints of the training state, and the guard that keeps a workdir to one config.

`<workdir>/checkpoints/<step>/` is an Orbax checkpoint of three items, so that a reader takes only what it needs:
  params     the parameter tree
  optimizer  {"opt_state": ..., "step": i32[]} and, where there is one, {"critic": {"params", "opt_state", "step"}}
  host       JSON: {"host": the caller's dict, "leaves": {leaf: [shape, dtype, sum of its bits]}}
A step directory appears under its name only when it is complete; a kill leaves `*.orbax-checkpoint-tmp*`."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax import lax

from jzero import hosts, types

# What a resumed run may change of its config; anything else is another run.
MAY_CHANGE = ("train.steps", "train.checkpoint_every", "eval.every")


class Checkpoints:
    """The checkpoints of a workdir, of which the newest `keep` are kept (0: all)."""

    def __init__(self, workdir: str | os.PathLike, keep: int):
        self.path = Path(workdir).absolute() / "checkpoints"
        if jax.process_index() == 0:
            for leftover in self.path.glob("*.orbax-checkpoint-tmp*"):  # of a run killed while it saved
                shutil.rmtree(leftover)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep or None)
        self._manager = ocp.CheckpointManager(self.path, options=options)

    def latest(self) -> int | None:
        """The newest complete checkpoint."""
        return self._manager.latest_step()

    def oldest(self) -> int:
        """The oldest one that is kept; 0 without any."""
        return min(self._manager.all_steps(), default=0)

    def save(self, step: int, state: types.State, host: dict[str, Any], *, wait: bool = False) -> None:
        """Starts writing; the state may be donated once this returns. `host` is plain JSON values."""
        if step not in self._manager.all_steps():  # the same step is the same state
            params, optimizer = _items(state)
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(params),
                    optimizer=ocp.args.StandardSave(optimizer),
                    host=ocp.args.JsonSave({"host": host, "leaves": _leaves(params, optimizer, sums=True)}),
                ),
            )
        if wait:
            self._manager.wait_until_finished()

    def restore(self, step: int, state_like: types.State) -> tuple[types.State, dict[str, Any]]:
        """The state bit for bit, with the shapes, dtypes and shardings of `state_like`'s leaves (arrays or structs)."""
        params, optimizer = jax.tree.map(_struct, _items(state_like))
        try:
            host = self._manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]
            written = host["leaves"]
        except Exception as error:
            raise ValueError(self._damaged(step, error)) from error
        _check_same_leaves(self.path / str(step), written, _leaves(params, optimizer, sums=False))
        arguments = ocp.args.Composite(
            params=ocp.args.StandardRestore(params), optimizer=ocp.args.StandardRestore(optimizer)
        )
        try:
            items = self._manager.restore(step, args=arguments)
        except Exception as error:
            raise ValueError(self._damaged(step, error)) from error
        read = _leaves(items["params"], items["optimizer"], sums=True)
        if wrong := [name for name in written if read[name] != written[name]]:
            raise ValueError(self._damaged(step, f"{wrong[0]} is not what was saved"))
        optimizer = items["optimizer"]
        critic = types.State(**optimizer["critic"]) if "critic" in optimizer else None
        return types.State(items["params"], optimizer["opt_state"], optimizer["step"], critic), host["host"]

    def close(self) -> None:
        """Waits for the save in progress."""
        self._manager.close()

    def _damaged(self, step: int, why: Any) -> str:
        earlier = max((other for other in self._manager.all_steps() if other < step), default=None)
        then = "start over" if earlier is None else f"resume from step {earlier}"
        reason = (str(why).split(". See full")[0].splitlines() or [repr(why)])[0][:200]
        return f"checkpoint {self.path / str(step)} cannot be read ({reason}): delete that directory to {then}"


def _items(state: types.State) -> tuple[Any, Any]:
    optimizer = {"opt_state": state.opt_state, "step": state.step}
    if state.critic is not None:
        critic = state.critic
        optimizer["critic"] = {"params": critic.params, "opt_state": critic.opt_state, "step": critic.step}
    return state.params, optimizer


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _leaves(params: Any, optimizer: Any, *, sums: bool) -> dict[str, list]:
    """leaf -> [shape, dtype, and with `sums` the sum of its bits]."""
    tree = {"params": params, "optimizer": optimizer}
    leaves = [
        [jax.tree_util.keystr(path, simple=True, separator="/"), list(leaf.shape), str(leaf.dtype)]
        for path, leaf in jax.tree.leaves_with_path(tree)
    ]
    bits = (
        [[int(total)] for total in jax.device_get(_bit_sums(jax.tree.leaves(tree)))] if sums else [[] for _ in leaves]
    )
    return {name: [*rest, *total] for (name, *rest), total in zip(leaves, bits, strict=True)}


@jax.jit
def _bit_sums(leaves: list[jax.Array]) -> list[jax.Array]:
    """Σ bits mod 2^32 of each leaf: integers, so the same under every sharding."""

    def bit_sum(leaf: jax.Array) -> jax.Array:
        bits = lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}"))
        return jnp.sum(bits, dtype=jnp.uint32)

    return [bit_sum(leaf) for leaf in leaves]


def _check_same_leaves(path: Path, written: dict[str, list], wanted: dict[str, list]) -> None:
    for name in sorted(written.keys() | wanted.keys()):
        there = written[name][:2] if name in written else None
        here = wanted.get(name)
        if there != here:
            raise ValueError(
                f"checkpoint {path} holds {name} = {there}, this config wants {here}: resume with the config it was "
                "saved with, or use another workdir"
            )


def check_workdir(workdir: str | os.PathLike, config_json: str) -> None:
    """Ties a workdir to its first run's config, `config.json`; a resumed run may change `MAY_CHANGE` only."""
    path = Path(workdir) / "config.json"
    new = _flat(json.loads(config_json))
    if path.exists():
        old = _flat(json.loads(path.read_text(encoding="utf-8")))
        changes = [
            f"{name}: {old.get(name, '(absent)')} -> {new.get(name, '(absent)')}"
            for name in sorted(old.keys() | new.keys())
            if name not in MAY_CHANGE and old.get(name) != new.get(name)
        ]
        if changes:
            raise ValueError(
                f"{path} is of another run ({'; '.join(changes)}): use another --workdir, or the same config to resume"
            )
        if old == new:
            return
    hosts.write(path, config_json)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} -> {"a.b": "1"}: dotted names, values as JSON."""
    flat: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = json.dumps(value)
    return flat
