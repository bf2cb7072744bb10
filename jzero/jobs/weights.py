"""A model's parameters as the tensors of a snapshot, and back: the weights of a sampler.

A snapshot has the parameters in the type that the decoder computes in, so that a sampler decodes
with the bits that the trainer's own decoder would have. With an adapter only the adapter is in it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax.typing import DTypeLike

from jzero.jobs.checks import WeightsId
from jzero.jobs.prefetch import Prefetch
from jzero.jobs.requests import ANY_VERSION
from jzero.jobs.snapshots import Reader, SnapshotError, Tensors
from jzero.model import adapters, qwen

SEPARATOR = "/"


def to_tensors(params: qwen.Params, dtype: DTypeLike) -> Tensors:
    """Returns the tensors of a full model, or of the adapter in joined parameters."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(adapters.trained_part(params))
    tensors = {}
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator=SEPARATOR)
        # One tensor at a time: all of them would be a second copy of the model on the devices.
        narrowed = leaf.astype(qwen.dtype_of(path, dtype))
        tensors[name] = np.asarray(jax.device_get(narrowed))
    return tensors


def to_params(tensors: Tensors, shardings: qwen.Params) -> qwen.Params:
    """Returns the parameters on the devices. `shardings` is a tree like the parameters.

    Raises SnapshotError if the tensors belong to a different model.
    """
    places, structure = jax.tree_util.tree_flatten_with_path(shardings)
    names = [jax.tree_util.keystr(path, simple=True, separator=SEPARATOR) for path, _ in places]
    if set(names) != set(tensors):
        different = sorted(set(names) ^ set(tensors))
        raise SnapshotError(f"the snapshot has a different model: {', '.join(different[:3])}")
    leaves = []
    for name, (_, place) in zip(names, places, strict=True):
        leaves.append(jax.device_put(tensors[name], place))
    return jax.tree.unflatten(structure, leaves)


@dataclass
class Weights:
    """The weights of a run's versions on this machine's devices."""

    reader: Reader
    publish: Callable[[qwen.Params], qwen.Params]  # to the decoder's layout
    shardings: qwen.Params  # of the tensors in a snapshot
    base: qwen.Params | None  # under an adapter
    scale: float  # of the adapter
    takes_newest: bool = False  # reads the newest version ahead, instead of the next one
    _version: int = ANY_VERSION
    _identity: str = ""
    _params: qwen.Params | None = None

    def __post_init__(self) -> None:
        self._prefetch = Prefetch(self.reader, self.takes_newest)

    @property
    def params(self) -> qwen.Params:
        """The decoder's weights of the version that was loaded last."""
        assert self._params is not None
        return self._params

    def load(self, version: int, identity: str) -> qwen.Params:
        """Returns the decoder's weights of a version.

        Raises SnapshotError unless the store has the snapshot with this identity.
        """
        if self._params is None or identity != self._identity:
            self._prefetch.stop()
            # Before the new weights are read, the old ones are freed.
            self._params = None
            params = to_params(self.reader.load(version, identity), self.shardings)
            # A snapshot of an adapter has only its matrices.
            if self.base is not None:
                params = adapters.join(self.base, params, self.scale)
            self._params = self.publish(params)
            self._identity = identity
        self._version = version
        return self._params

    def prefetch(self) -> None:
        """Reads a newer version into host memory in the background, once it is published."""
        self._prefetch.start(self._version + 1)

    def newer(self) -> WeightsId | None:
        """Returns the version that was read ahead, if it is newer than the loaded one."""
        found = self._prefetch.loaded
        return found if found is not None and found[0] > self._version else None
