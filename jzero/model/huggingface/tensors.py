"""Maps the tensors of a checkpoint to parameters, and converts their shapes.

A checkpoint has one tensor per layer; our parameters stack the layers on a leading axis [L]. A
Linear weight of torch is [outputs, inputs]; ours is [*inputs, *outputs] with separate axes for the
heads. The names and layouts come from the family's table in `families.py`.
"""

import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from flax import traverse_util

from jzero.model.architecture import Params, QwenConfig
from jzero.model.families import MTP_PREFIX, Family, StoredTensor, family_of
from jzero.model.qwen import abstract


def flatten(params: Params) -> dict[str, Any]:
    """Turns nested parameters into {"embed": leaf, "layers.q": leaf, ...}."""
    return traverse_util.flatten_dict(params, sep=".")


def unflatten(leaves: dict[str, Any]) -> Params:
    """Turns {"embed": leaf, "layers.q": leaf, ...} into nested parameters."""
    return traverse_util.unflatten_dict(leaves, sep=".")


class Tensor(NamedTuple):
    """One tensor of a checkpoint, or the part of it that belongs to one of our parameters."""

    name: str
    layer: int | None  # index in our stacked parameter; None outside of the layers
    shape: tuple[int, ...]  # in our parameters, without [L]
    stored_shape: tuple[int, ...]  # in the checkpoint
    is_linear: bool  # the checkpoint holds it as [outputs, inputs]
    expert: int | None = None  # index on the second axis; None if the tensor is not of one expert
    # The outputs that belong to our parameter in a tensor [experts, outputs, inputs]; None for all
    # other tensors.
    outputs: slice | None = None

    @property
    def is_stored_as_ours(self) -> bool:
        """Whether rows of the tensor are rows of our parameter."""
        return self.shape == self.stored_shape and not self.is_linear and self.outputs is None

    def of(self, parameter: np.ndarray) -> np.ndarray:
        """Returns the part of our complete parameter that is in this tensor."""
        if self.layer is None:
            return parameter
        # Expert weights have a second stacked axis.
        part = parameter[self.layer]
        return part if self.expert is None else part[self.expert]

    def to_ours(self, stored: np.ndarray) -> np.ndarray:
        """Converts a checkpoint's tensor to the shape of our parameter."""
        if self.outputs is not None:
            return stored[:, self.outputs].swapaxes(1, 2)
        return (stored.T if self.is_linear else stored).reshape(self.shape)

    def to_stored(self, ours: np.ndarray) -> np.ndarray:
        """Converts one layer of our parameter to the shape of the checkpoint's tensor.

        If the tensor also has outputs of other parameters, the result is only the slice `outputs`.
        """
        if self.outputs is not None:
            stored = ours.swapaxes(1, 2)
        elif self.is_linear:
            outputs, inputs = self.stored_shape
            stored = ours.reshape(inputs, outputs).T
        else:
            stored = ours.reshape(self.stored_shape)
        return np.ascontiguousarray(stored)


def checkpoint_tensors(
    config: QwenConfig,
    names_of_checkpoint: Collection[str] = (),
) -> dict[str, list[Tensor]]:
    """Returns the tensors of every parameter ("embed", "layers.q", ...).

    A parameter has one tensor, one per layer, or one per expert, ordered by layer. Parameters may
    share a tensor; the parameter with the first values in the tensor comes first here.
    names_of_checkpoint: the names in a checkpoint, for families with two forms of checkpoints.
    """
    family = family_of(config.model_type)
    table = {**family.tensors, **other_tensors(family, names_of_checkpoint)}
    tensors = {}
    for leaf, array in flatten(abstract(config)).items():
        stored = table[leaf]
        # `names` fills the "{}" of the tensor's name, `places` is the index in our stacked array.
        # They differ in a hybrid, where only some layers have the parameter.
        if stored.layout == "expert":
            num_layers, num_experts, *shape = array.shape
            places = list(itertools.product(range(num_layers), range(num_experts)))
            names = places
        elif leaf.startswith("layers."):
            num_layers, *shape = array.shape
            numbers = list(range(num_layers))  # layer numbers in the checkpoint
            if family.stack is not None:
                numbers = list(family.stack.layer_numbers(config, leaf.removeprefix("layers.")))
            names = [(number,) for number in numbers]
            places = [(place, None) for place in range(num_layers)]
        else:
            names, places, shape = [()], [(None, None)], array.shape
        shape = tuple(shape)
        stored_shape = shape_in_checkpoint(stored, shape)
        is_linear = stored.layout in ("linear", "router", "expert")
        tensors[leaf] = [
            Tensor(
                stored.name.format(*name),
                layer,
                shape,
                stored_shape,
                is_linear,
                expert,
                outputs_of(stored, shape),
            )
            for name, (layer, expert) in zip(names, places, strict=True)
        ]
    return tensors


def other_tensors(
    family: Family,
    names_of_checkpoint: Collection[str],
) -> Mapping[str, StoredTensor]:
    """Returns `Family.other_tensors` if the checkpoint has them, else an empty table."""
    # One name is enough to recognize the form of a checkpoint.
    for stored in family.other_tensors.values():
        first_layer_and_expert = 0, 0
        if stored.name.format(*first_layer_and_expert) in names_of_checkpoint:
            return family.other_tensors
    return {}


def outputs_of(stored: StoredTensor, shape: tuple[int, ...]) -> slice | None:
    """Returns the outputs that belong to a parameter of our `shape` in a tensor of all experts."""
    if stored.layout != "experts":
        return None
    # The gate and up projections of fused experts are concatenated along the outputs.
    width, (number, _) = shape[-1], stored.part
    return slice(number * width, (number + 1) * width)


def is_skipped(config: QwenConfig, name: str) -> bool:
    """Returns whether a tensor belongs to a part of the checkpoint that jzero does not compute.

    Such tensors are not read, and an export copies them from the original checkpoint.
    """
    if config.mtp and name.startswith(MTP_PREFIX):
        return False
    return name.startswith(family_of(config.model_type).skipped)


def shape_in_checkpoint(stored: StoredTensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the checkpoint's shape of a parameter with our `shape`."""
    if stored.layout == "same":
        return shape
    if stored.layout == "flat":
        return (math.prod(shape),)
    if stored.layout == "experts":
        experts, inputs, outputs = shape
        _, count = stored.part
        return experts, count * outputs, inputs
    return math.prod(shape[stored.inputs :]), math.prod(shape[: stored.inputs])
