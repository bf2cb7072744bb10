"""The frozen base of an adapter: the model's parameters, for training and for sampling.

The base is never updated, so it has no fp32 master weights and no optimizer state, and its dtype is
model.dtype. It has the layout of the decoder's weights (`sharding.publish`): if the meshes of
trainer and decoder split it in the same way, the decoder reads the trainer's arrays.

With model.base=int8 the weights of linear layers are int8 (`model.quantized`). They are quantized
on the host, one parameter at a time, so that loading never puts the unquantized model on a device.
Weights are cast to model.dtype before they are quantized: a resumed run reads them in this dtype,
and must compute the same integers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jzero.hosts import collectives
from jzero.model import adapters, huggingface, qwen
from jzero.model.architecture import kept_dtype
from jzero.model.quantized import QuantizedWeight, quantize
from jzero.sharding.publish import abstract_decoder_weights


def abstract_base(
    model: qwen.QwenConfig,
    mesh: Mesh,
    dtype: DTypeLike,
    has_int8_base: bool = False,
) -> qwen.Params:
    """Returns the shapes, types and shardings of a base on the training mesh."""
    # Without the value head, policy and critic of one shape have the same base.
    without_head = replace(model, value_head=False)
    precision = "int8" if has_int8_base else "native"
    return abstract_decoder_weights(without_head, mesh, dtype, precision)


def freeze(
    params: qwen.Params,
    model: qwen.QwenConfig,
    mesh: Mesh,
    dtype: DTypeLike,
    has_int8_base: bool = False,
) -> qwen.Params:
    """Returns `params` as a base on the training mesh.

    `params` is consumed: an array is freed after its conversion, or becomes a part of the base if
    it needs no conversion. Every host must call this function.
    """
    if has_int8_base:
        return put_quantized(fetch_each(params, dtype), model, mesh, dtype)

    def convert(leaf: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        # An array that already has the base's shape, dtype and sharding is used as it is.
        is_same_type = leaf.shape == like.shape and leaf.dtype == like.dtype
        if is_same_type and leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim):
            return leaf

        def reshape_and_cast(leaf: jax.Array) -> jax.Array:
            return leaf.reshape(like.shape).astype(like.dtype)

        converted = jax.jit(reshape_and_cast, out_shardings=like.sharding)(leaf)
        # Freed at once: model and base need not fit into memory together.
        leaf.delete()
        return converted

    return jax.tree.map(convert, params, abstract_base(model, mesh, dtype))


def fetch_each(params: qwen.Params, dtype: DTypeLike) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name and the values of every parameter in `dtype`, and frees the parameter."""
    for name, leaf in huggingface.flatten(params).items():
        stored_dtype = kept_dtype(name, jnp.dtype(dtype).name)
        host = collectives.fetch_global(leaf).astype(jnp.dtype(stored_dtype))  # a copy in any case
        leaf.delete()
        yield name, host


def put_quantized(
    params: Iterable[tuple[str, np.ndarray]],
    model: qwen.QwenConfig,
    mesh: Mesh,
    dtype: DTypeLike,
) -> qwen.Params:
    """Returns an int8 base on the training mesh from an iterator over parameters.

    params: the name ("layers.q") and the values on the host, in `dtype`, of every parameter.
    """
    places = huggingface.flatten(abstract_base(model, mesh, dtype, has_int8_base=True))
    linear_layers = adapters.linear_layers(model)
    base = {}
    for name, host in params:
        # Linear layers are int8. Other parameters keep their dtype.
        like = places[name]
        if isinstance(like, QuantizedWeight):
            target = linear_layers[name.removeprefix("layers.")]
            host = host.reshape(like.values.shape)
            quantized = quantize(host, len(target.inputs), len(target.stacked))
            base[name] = jax.tree.map(put_like, quantized, like)
        else:
            base[name] = put_like(host.reshape(like.shape), like)
    return huggingface.unflatten(base)


def put_like(host: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
    assert host.shape == like.shape and host.dtype == like.dtype, f"{host.shape=} {like=}"
    return collectives.put_global(host, like.sharding)
