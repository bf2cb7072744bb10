"""The frozen base under an adapter: the model's parameters as training and sampling both read them.

Nothing ever updates the base, so it has neither fp32 master weights nor an optimizer, and it is in
the type of the computation. It lies as the decoder's weights do (`distributed.publish`): where the
meshes of trainer and decoder split it alike, the decoder reads the trainer's own arrays.
"""

from dataclasses import replace

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jzero.distributed.publish import abstract_decoder_weights
from jzero.model import qwen


def abstract_base(model: qwen.QwenConfig, mesh: Mesh, dtype: DTypeLike) -> qwen.Params:
    """Returns the shapes, types and shardings of a base on the training mesh.

    A critic of the same shape has the same base: the base has no value head.
    """
    return abstract_decoder_weights(replace(model, value_head=False), mesh, dtype)


def freeze(
    params: qwen.Params, model: qwen.QwenConfig, mesh: Mesh, dtype: DTypeLike
) -> qwen.Params:
    """Returns `params` as a base on the training mesh.

    `params` are consumed: each of their arrays is freed once it is converted, or becomes the base's
    if there is nothing to convert.
    """

    def convert(leaf: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        is_same_type = leaf.shape == like.shape and leaf.dtype == like.dtype
        if is_same_type and leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim):
            return leaf

        def reshape_and_cast(leaf: jax.Array) -> jax.Array:
            return leaf.reshape(like.shape).astype(like.dtype)

        converted = jax.jit(reshape_and_cast, out_shardings=like.sharding)(leaf)
        leaf.delete()
        return converted

    return jax.tree.map(convert, params, abstract_base(model, mesh, dtype))
