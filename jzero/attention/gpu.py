"""Attention on NVIDIA GPUs: cuDNN for packed rows, and JAX's Triton kernel for paged decoding.

See `backend.py` for the interface. The Triton kernel computes in bfloat16: it rounds queries,
weights and its output, by at most 1.2e-2 of their values in our tests.
"""

import warnings
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jzero.attention import xla
from jzero.attention.backend import Window
from jzero.attention.pools import one_row_per_head
from jzero.errors import UserError
from jzero.numerics.sizes import divide_up, power_of_two
from jzero.types import RowLayout

# JAX 0.11 deprecates this kernel and offers no successor.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

pool_rows = one_row_per_head
COMPUTE_TOKENS = 64  # tokens that a Triton program reads at a time
NUM_WARPS = 4  # of a program
ENOUGH_PROGRAMS = 512  # four for each of the processors of an H200
SHORTEST_SPLIT = 512  # tokens


def packed(
    q: Float[Array, "B N H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    segments: Int[Array, "B T"],
    layout: RowLayout,
    window: Window | None = None,
    implementation: Literal["xla", "cudnn"] = "cudnn",
    width: int = 0,
    soft_cap: float = 0.0,
) -> Float[Array, "B N H D"]:
    """Computes packed attention by cuDNN with an explicit mask.

    cuDNN's causal mask does not support segments. cuDNN requires 16-bit types and a head size that
    is a multiple of 8 and at most 128; XLA computes other inputs, and models with sliding windows
    or bounded scores.
    width: not used.
    implementation: tests run the same call by XLA, because cuDNN has no CPU path.
    """

    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        q_segments: jax.Array,
        k_segments: jax.Array,
        window: xla.RowWindow | None = None,
    ) -> jax.Array:
        assert window is None, "XLA computes windows"
        N = q.shape[1]
        prefix = k.shape[1] - N
        # cuDNN differentiates only even lengths: an odd prefix is padded by one token in front, an
        # odd slot by one token at its end.
        front, end = prefix % 2, N % 2

        def even(x: jax.Array, front: int = front) -> jax.Array:
            return jnp.pad(x, [(0, 0), (front, end)] + [(0, 0)] * (x.ndim - 2))

        mask = xla.visible(even(q_segments, 0), even(k_segments), prefix + front)[:, None]
        out = jax.nn.dot_product_attention(
            even(q, 0), even(k), even(v), mask=mask, implementation=implementation
        )
        return out[:, :N]

    if window is not None or soft_cap:
        return xla.packed(q, k, v, segments, layout, window, soft_cap=soft_cap)
    D = q.shape[-1]
    fits_cudnn = q.dtype in (jnp.bfloat16, jnp.float16) and D % 8 == 0 and D <= 128
    if implementation == "cudnn" and not fits_cudnn:
        return xla.packed(q, k, v, segments, layout)
    return xla.packed(q, k, v, segments, layout, attend=attend)


def paged(
    q: Float[Array, "S H D"],
    k_pool: Shaped[Array, "K pages page D"],
    v_pool: Shaped[Array, "K pages page D"],
    table: Int[Array, "S max_pages"],
    lengths: Int[Array, " S"],
    shared: Int[Array, " blocks"],
    kv_heads: int,
    window: Int[Array, ""] | None = None,
    interpret: bool = False,
    width: int = 0,
    soft_cap: float = 0.0,
) -> Float[Array, "S H D"]:
    """Computes the attention of decoding; every slot reads all of its pages, shared or not.

    Layers with a window of `width` tokens read its pages without the kernel. See `backend.Paged`.
    """

    def kernel(q: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
        return paged_by_kernel(q, k_pool, v_pool, table, lengths, interpret, soft_cap)

    return xla.paged_with_windows(
        kernel, q, k_pool, v_pool, table, lengths, kv_heads, window, width, soft_cap
    )


def paged_by_kernel(
    q: Float[Array, "S H D"],
    k_pool: Shaped[Array, "K pages page D"],
    v_pool: Shaped[Array, "K pages page D"],
    table: Int[Array, "S max_pages"],
    lengths: Int[Array, " S"],
    interpret: bool,
    soft_cap: float = 0.0,
) -> Float[Array, "S H D"]:
    """Computes the attention of decoding to all tokens.

    Raises UserError for shapes that the kernel does not support.
    """
    page_size, D = k_pool.shape[2:]
    if not is_power_of_two(page_size) or not is_power_of_two(D) or D < 16:
        raise UserError(
            f"rollout.page_size={page_size}, head_dim={D}: the GPU's paged attention needs powers "
            "of two, and a head_dim of at least 16; set model.attention=xla"
        )
    pages_per_block = max(1, COMPUTE_TOKENS // page_size)
    splits = num_splits(q.shape[0] * len(k_pool), table.shape[1] * page_size)
    # Every split must have a whole number of blocks.
    missing_pages = -table.shape[1] % (splits * pages_per_block)
    out = paged_attention(
        (q.astype(jnp.float32) * D**-0.5).astype(k_pool.dtype),  # the kernel does not scale
        k_pool,
        v_pool,
        jnp.pad(table, ((0, 0), (0, missing_pages))),
        lengths.astype(jnp.int32),
        pages_per_compute_block=pages_per_block,
        k_splits=splits,
        num_warps=NUM_WARPS,
        interpret=interpret,
        attn_logits_soft_cap=soft_cap or None,
    )
    return out.astype(jnp.float32)


def num_splits(programs: int, longest: int) -> int:
    """Returns how many programs share the pages of one sequence and KV head.

    programs: sequences times KV heads. longest: tokens that a sequence may have. On an H200 one
    program is fastest where there are enough of them, or where sequences are short; 64 sequences of
    4,096 tokens take 0.74 of the time with 4 (lab/gpu.md).
    """
    wanted = power_of_two(divide_up(ENOUGH_PROGRAMS, programs))
    return min(wanted, power_of_two(divide_up(longest, 2 * SHORTEST_SPLIT)))


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
