"""A model's parameters as the tensors of a snapshot, and back.

A snapshot has the parameters in the type that the decoder computes in, so that a sampler decodes
with the bits that the trainer's own decoder would have. With an adapter only the adapter is in it.
"""

import jax
import numpy as np
from jax.typing import DTypeLike

from jzero.jobs.snapshots import SnapshotError, Tensors
from jzero.model import adapters, qwen

SEPARATOR = "/"


def to_tensors(params: qwen.Params, dtype: DTypeLike) -> Tensors:
    """Returns the tensors of a full model, or of the adapter in joined parameters."""
    base, adapter = adapters.split(params)
    leaves, _ = jax.tree_util.tree_flatten_with_path(adapter if adapter["layers"] else base)
    tensors = {}
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator=SEPARATOR)
        # One tensor at a time: all of them would be a second copy of the model on the devices.
        narrowed = leaf.astype(qwen.dtype_of(path, dtype))
        tensors[name] = np.asarray(jax.device_get(narrowed))
    return tensors


def to_params(tensors: Tensors, shardings: qwen.Params) -> qwen.Params:
    """Returns the parameters on the devices. `shardings` is a tree like the parameters.

    Raises SnapshotError if the tensors are those of another model.
    """
    places, structure = jax.tree_util.tree_flatten_with_path(shardings)
    names = [jax.tree_util.keystr(path, simple=True, separator=SEPARATOR) for path, _ in places]
    if set(names) != set(tensors):
        different = sorted(set(names) ^ set(tensors))
        raise SnapshotError(f"the snapshot is of another model: {', '.join(different[:3])}")
    leaves = []
    for name, (_, place) in zip(names, places, strict=True):
        leaves.append(jax.device_put(tensors[name], place))
    return jax.tree.unflatten(structure, leaves)
