"""Checkpoints of the training state, and the guard that keeps a workdir to one config.

`<workdir>/checkpoints/<step>/` is an Orbax checkpoint of three items, so that a reader takes only what it needs:
  params     the parameter tree
  optimizer  {"opt_state": ..., "step": i32[]} and, where there is one, {"critic": {"params", "opt_state", "step"}}
  host       JSON: {"host": the caller's dict, "leaves": {leaf: [shape, dtype, sum of its bits]}}
A step directory appears under its name only when it is complete; a kill leaves `*.orbax-checkpoint-tmp*`."""

import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax import lax

from jzero import types
from jzero.errors import UserError


class Checkpoints:
    """The checkpoints of a workdir, of which the newest `keep` are kept (0: all); None: for a reader beside the run."""

    def __init__(self, workdir: str | os.PathLike, keep: int | None):
        self.path = Path(workdir).absolute() / "checkpoints"
        if keep is not None and jax.process_index() == 0:
            for leftover in self.path.glob(
                "*.orbax-checkpoint-tmp*"
            ):  # of a run killed while it saved
                shutil.rmtree(leftover)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep or None, create=keep is not None)
        self._manager = ocp.CheckpointManager(self.path, options=options)

    def latest(self) -> int | None:
        """The newest complete checkpoint."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(
        self, step: int, state: types.State, host: dict[str, Any], *, wait: bool = False
    ) -> None:
        """Starts writing; the state may be donated once this returns. `host` is plain JSON values."""
        if step not in self._manager.all_steps():  # the same step is the same state
            items = _items(state)
            arguments: dict[str, Any] = {
                name: ocp.args.StandardSave(item) for name, item in items.items()
            }
            arguments["host"] = ocp.args.JsonSave({"host": host, "leaves": _summed(items)})
            self._manager.save(step, args=ocp.args.Composite(**arguments))
        if wait:
            self._manager.wait_until_finished()

    def restore(self, step: int, state_like: types.State) -> tuple[types.State, dict[str, Any]]:
        """The state bit for bit, with the shapes, dtypes and shardings of `state_like`'s leaves (arrays or structs)."""
        items, host = self.items(step, _items(state_like))
        critic = items["optimizer"].pop("critic", None)
        state = types.State(
            items["params"], **items["optimizer"], critic=critic and types.State(**critic)
        )
        return state, host

    def items(self, step: int, like: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Those of `like` bit for bit, and what `save` had as host."""
        host = self._read(step, host=ocp.args.JsonRestore())["host"]
        written = {
            name: leaf for name, leaf in host["leaves"].items() if name.split("/")[0] in like
        }
        wanted = _leaves(like)
        for name in sorted(written.keys() | wanted.keys()):
            there, here = written.get(name, [])[:2] or None, wanted.get(name)
            if there != here:
                raise UserError(
                    f"checkpoint {self.path / str(step)} holds {name} = {there}, this config wants {here}: resume with "
                    "the config it was saved with, or use another workdir"
                )
        place = jax.sharding.SingleDeviceSharding(
            jax.local_devices()[0]
        )  # of leaves without a sharding
        read = lambda item: ocp.args.StandardRestore(item, fallback_sharding=place)
        items = self._read(step, **{name: read(item) for name, item in like.items()})
        sums = _summed({name: items[name] for name in like})
        if wrong := [name for name in written if sums[name] != written[name]]:
            raise UserError(self._damaged(step, f"{wrong[0]} is not what was saved"))
        return items, host["host"]

    def _read(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            raise UserError(self._damaged(step, error)) from error

    def close(self) -> None:
        """Waits for the save in progress."""
        self._manager.close()

    def _damaged(self, step: int, why: Any) -> str:
        earlier = max((other for other in self._manager.all_steps() if other < step), default=None)
        then = "start over" if earlier is None else f"resume from step {earlier}"
        reason = (str(why).split(". See full")[0].splitlines() or [repr(why)])[0][:200]
        return f"checkpoint {self.path / str(step)} cannot be read ({reason}): delete that directory to {then}"


def _items(state: types.State) -> dict[str, Any]:
    optimizer = {"opt_state": state.opt_state, "step": state.step}
    if critic := state.critic:
        optimizer["critic"] = {
            "params": critic.params,
            "opt_state": critic.opt_state,
            "step": critic.step,
        }
    return {"params": state.params, "optimizer": optimizer}


def _leaves(items: dict[str, Any]) -> dict[str, list]:
    """leaf -> [shape, dtype]."""
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return {
        name(path): [list(leaf.shape), str(leaf.dtype)]
        for path, leaf in jax.tree.leaves_with_path(items)
    }


def _summed(items: dict[str, Any]) -> dict[str, list]:
    """leaf -> [shape, dtype, sum of its bits]."""
    sums = jax.device_get(_bit_sums(jax.tree.leaves(items)))
    return {
        name: [*leaf, int(total)]
        for (name, leaf), total in zip(_leaves(items).items(), sums, strict=True)
    }


@jax.jit
def _bit_sums(leaves: list[jax.Array]) -> list[jax.Array]:
    """Σ bits mod 2^32 of each leaf: integers, so the same under every sharding."""
    bits = lambda leaf: lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}"))
    return [jnp.sum(bits(leaf), dtype=jnp.uint32) for leaf in leaves]
