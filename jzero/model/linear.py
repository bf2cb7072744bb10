"""The product of activations with a weight: the one place where a layer multiplies by a weight.

    out = linear(x, layer.q.get_value())       # [N, inputs] -> [N, outputs]

A weight is an array [*inputs, *outputs], or an `AdaptedWeight`: a frozen array with a low-rank
adapter beside it (LoRA, Hu et al. 2021, arXiv:2106.09685, eq. 3). Layers do not know which of the
two they have. A new kind of weight is one more case of `linear`.
"""

from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

# Names of values that the backward pass keeps; `qwen.REMAT` says which setting keeps which.
LOW_RANK_PRODUCT = "low rank product"  # x A [N, R]: narrow, so that keeping it is almost free
ADAPTED_OUTPUT = "adapted output"  # [N, outputs]


@partial(jax.tree_util.register_dataclass, data_fields=["weight", "a", "b"], meta_fields=["scale"])
@dataclass(frozen=True)
class AdaptedWeight:
    """A frozen weight W with an adapter: stands for W + scale * A B, which is never computed.

    In the stack of all layers every array leads with an axis [L].
    """

    weight: Float[Array, "..."]  # [*inputs, *outputs], or [inputs, outputs]
    a: Float[Array, "... R"]  # [*inputs, R]
    b: Float[Array, "R ..."]  # [R, *outputs]
    scale: float  # alpha / R

    def merged(self) -> Float[Array, "L ..."]:
        """Returns W + scale * A B of the stack of all layers, in fp32 and in the shape of W.

        NumPy arrays are merged by NumPy.
        """
        layers, rank = self.b.shape[:2]
        a = self.a.reshape(layers, -1, rank)
        b = self.b.reshape(layers, rank, -1)
        if isinstance(a, np.ndarray):
            change = np.matmul(a, b)
        else:  # by default a TPU would multiply in bf16
            change = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
        return self.weight.astype(np.float32) + self.scale * change.reshape(self.weight.shape)


LinearWeight: TypeAlias = Array | AdaptedWeight


def linear(x: Float[Array, "N inputs"], weight: LinearWeight) -> Float[Array, "N outputs"]:
    """Multiplies x by a weight [*inputs, *outputs] or by one with an adapter."""
    if isinstance(weight, AdaptedWeight):
        inputs = x.shape[1]
        rank = weight.b.shape[0]
        out = adapted_product(
            x,
            weight.weight.reshape(inputs, -1),
            weight.a.reshape(inputs, rank),
            weight.b.reshape(rank, -1),
            weight.scale,
        )
        return checkpoint_name(out, ADAPTED_OUTPUT)
    return jnp.einsum("ni,io->no", x, weight.reshape(x.shape[1], -1))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def adapted_product(
    x: Float[Array, "N inputs"],
    weight: Float[Array, "inputs outputs"],
    a: Float[Array, "inputs R"],
    b: Float[Array, "R outputs"],
    scale: float,
) -> Float[Array, "N outputs"]:
    """Computes x W + scale * (x A) B.

    Factors are in the type of x. Products accumulate in fp32, and the sum is rounded once: had x W
    been rounded to bf16 before, a change of less than half a unit of its last bit would be lost.
    """
    out, _ = adapted_forward(x, weight, a, b, scale)
    return out


def adapted_forward(
    x: Float[Array, "N inputs"],
    weight: Float[Array, "inputs outputs"],
    a: Float[Array, "inputs R"],
    b: Float[Array, "R outputs"],
    scale: float,
) -> tuple[Float[Array, "N outputs"], tuple[jax.Array, ...]]:
    """Returns the product, and what the backward pass reads."""
    low_rank = checkpoint_name(product_in_fp32("ni,ir->nr", x, a).astype(x.dtype), LOW_RANK_PRODUCT)
    change = scale * product_in_fp32("nr,ro->no", low_rank, b)
    out = (product_in_fp32("ni,io->no", x, weight) + change).astype(x.dtype)
    return out, (x, weight, a, b, low_rank)


def adapted_backward(
    scale: float, kept: tuple[jax.Array, ...], gradient: Float[Array, "N outputs"]
) -> tuple[jax.Array, ...]:
    """Returns the gradients of x, W, A and B.

    JAX's own derivative would multiply fp32 by bf16, which an accelerator does in fp32. Nobody asks
    for the gradient of a frozen W, and XLA removes what nobody asks for.
    """
    x, weight, a, b, low_rank = kept
    dtype = x.dtype
    to_low_rank = (scale * product_in_fp32("no,ro->nr", gradient, b)).astype(dtype)
    through_adapter = product_in_fp32("nr,ir->ni", to_low_rank, a)
    through_weight = product_in_fp32("no,io->ni", gradient, weight)
    return (
        (through_weight + through_adapter).astype(dtype),
        product_in_fp32("ni,no->io", x, gradient).astype(weight.dtype),
        product_in_fp32("ni,nr->ir", x, to_low_rank).astype(a.dtype),
        (scale * product_in_fp32("nr,no->ro", low_rank, gradient)).astype(b.dtype),
    )


adapted_product.defvjp(adapted_forward, adapted_backward)


def product_in_fp32(letters: str, first: jax.Array, second: jax.Array) -> jax.Array:
    """Multiplies two matrices of one type; the sum and the result are in fp32."""
    return jnp.einsum(letters, first, second, preferred_element_type=jnp.float32)
