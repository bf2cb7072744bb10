"""The arithmetic of a model: how a program multiplies, sums and normalizes.

    PLAIN   the operations that the compiler does best
    EXACT   `model.exact`: the bits of a token do not depend on the other tokens of a program

A program chooses one of them with `choose` when it is built, and hands it to `run_model.run_model`.
`choose` also adapts EXACT to the devices: the number of row shards, the products of a TPU. Layers
receive it in `layers.ForwardPass` and compute with its functions, so none of them asks for the
mode. Attention is chosen separately (`attention.choose`).
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, PyTree, Shaped

from jzero.attention.exact import sum_by_halves
from jzero.hosts.platform import platform_of
from jzero.model.delta_net import DeltaState, recur_chunks, recur_few, recur_step
from jzero.model.exact import (
    ROW_TILE,
    exact_rms_norm,
    pad_rows,
    product_of_any_rows,
    rounded,
    separate_slots,
    single_output,
    tiled_product,
)
from jzero.model.exact_delta_net import recur_rows, recur_slots
from jzero.model.expert_arithmetic import EXACT_EXPERTS, PLAIN_EXPERTS, ExpertArithmetic
from jzero.model.linear import BankedFactors, linear, plus_changes, plus_separate_changes
from jzero.model.softmax import (
    exact_logps,
    exact_logps_of_many,
    plain_logps,
    plain_logps_of_many,
)

# On a TPU the default product of a row depends on the number of rows; this algorithm's does not.
TPU_PRODUCTS = "BF16_BF16_F32"

Multiply = Callable[[PyTree, PyTree], jax.Array]  # (hidden states, weight) -> logits


class Recurrence(NamedTuple):
    """The functions of a gated delta net (`delta_net.py`)."""

    rows: Callable[..., tuple[jax.Array, DeltaState]]  # packed rows and prompts, as `recur_chunks`
    slots: Callable[..., tuple[jax.Array, DeltaState]]  # one token of every slot, as `recur_step`
    drafts: Callable[..., tuple[jax.Array, DeltaState]]  # a few of every slot, as `recur_few`


class BankedLogits(NamedTuple):
    """How the logits of a row get the change by its adapter in a bank (`output_adapter`)."""

    prepare: Callable[..., PyTree]  # (groups of the bank, inputs) -> factors
    add: Callable[..., jax.Array]  # (logits [N, V], x [N, inputs], rows, factors) -> logits


class TokenRows(NamedTuple):
    """How tokens [B, T] pass through the layers: attention and delta nets see them as [B, T]."""

    enter: Callable[[jax.Array], jax.Array]  # [B, T, ...] -> the rows of the layers
    leave: Callable[[jax.Array], jax.Array]  # the rows of the layers -> [B, T, ...]


@dataclass(frozen=True)
class Arithmetic:
    """The operations of a forward pass.

    product        (x [N, inputs], weight) -> [N, outputs]; weights as in `linear.linear`.
    single_output  the same for a weight [inputs, 1].
    head           (multiply, hidden [*batch, E], weight) -> [*batch, V]: calls `multiply` with
                   hidden states and the weight of the head. `hidden` may also be a tree that
                   begins with them and has arrays [*batch].
    banked_logits  the output layer with adapters of a bank.
    sum            the sum over the last axis.
    norm           (x [*batch, width], scale [width], eps): see `rms_norm`.
    unfused        keeps the compiler from fusing a product into the sum that follows.
    unfolded       keeps the compiler from computing with a constant at compile time.
    logps          (logits, tokens, temperature, place, look_up): see `softmax.plain_logps`.
    logps_of_many  (logits, tokens): see `softmax.plain_logps_of_many`.
    recurrence     the gated delta nets.
    experts        the router and the experts of MoE layers.
    rows           (B, T) -> how tokens pass through the layers.
    precision      a value of `jax.default_matmul_precision`; "": the platform's default.
    is_exact       whether the bits of a token do not depend on the other tokens.
    rotates_by_product  computes RoPE in the way that is fast on TPUs.
    """

    product: Callable[..., jax.Array]
    single_output: Callable[..., jax.Array]
    head: Callable[[Multiply, PyTree, PyTree], jax.Array]
    banked_logits: BankedLogits
    sum: Callable[[jax.Array], jax.Array]
    norm: Callable[[jax.Array, jax.Array, float], jax.Array]
    unfused: Callable[[jax.Array], jax.Array]
    unfolded: Callable[[jax.Array], jax.Array]
    logps: Callable[..., tuple[jax.Array, jax.Array]]
    logps_of_many: Callable[[jax.Array, jax.Array], jax.Array]
    recurrence: Recurrence
    experts: ExpertArithmetic
    rows: Callable[[int, int], TokenRows]
    precision: str = ""
    is_exact: bool = False
    rotates_by_product: bool = False

    def products(self) -> AbstractContextManager[object]:
        """Returns the context manager in which products have to be traced."""
        if not self.precision:
            return contextlib.nullcontext()
        return jax.default_matmul_precision(self.precision)

    @property
    def compiler_options(self) -> dict[str, bool | str]:
        """The XLA options that a program with this arithmetic is compiled with."""
        # By default XLA may leave out a rounding to bf16 and back where it finds one. Whether it
        # finds one depends on the program: for example, a CPU sends bf16 values to another device
        # as fp32.
        return {"xla_allow_excess_precision": False} if self.is_exact else {}


# -- plain -----------------------------------------------------------------------------------------


def rms_norm(
    x: Float[Array, "*batch width"],
    scale: Float[Array, " width"],
    eps: float,
) -> Float[Array, "*batch width"]:
    """Divides x by its root mean square over the last axis and multiplies by `scale`, in fp32."""
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    normed = x32 * lax.rsqrt(mean_square + eps)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def unchanged(x: jax.Array) -> jax.Array:
    """Returns `x`."""
    return x


def apply(multiply: Multiply, x: PyTree, weight: PyTree) -> jax.Array:
    """Multiplies all rows at once."""
    return multiply(x, weight)


def unchanged_groups(groups: Sequence[BankedFactors], inputs: int) -> Sequence[BankedFactors]:
    """Returns the groups of a bank."""
    return groups


def separate_rows(batch: int, time: int) -> TokenRows:
    """Leaves tokens in their rows."""
    return TokenRows(unchanged, unchanged)


def one_row(multiple: int, batch: int, time: int) -> TokenRows:
    """Puts all tokens in one row, padded to a multiple of `multiple`."""

    def enter(x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "1 padded *rest"]:
        return pad_rows(multiple, x.reshape(batch * time, *x.shape[2:]))[None]

    def leave(x: Shaped[Array, "1 padded *rest"]) -> Shaped[Array, "B T *rest"]:
        return x[0, : batch * time].reshape(batch, time, *x.shape[2:])

    return TokenRows(enter, leave)


PLAIN = Arithmetic(
    product=linear,
    single_output=linear,
    head=apply,
    banked_logits=BankedLogits(unchanged_groups, plus_changes),
    sum=partial(jnp.sum, axis=-1),
    norm=rms_norm,
    unfused=unchanged,
    unfolded=unchanged,
    logps=plain_logps,
    logps_of_many=plain_logps_of_many,
    recurrence=Recurrence(recur_chunks, recur_step, recur_few),
    experts=PLAIN_EXPERTS,
    rows=separate_rows,
)


# XLA multiplies a single row by a weight number by number on a TPU, three times as long as several
# rows take (lab/cycles.md). So a single row has company there.
FEW_ROWS = 8


def padded_if_lone(batch: int, time: int) -> TokenRows:
    """Pads a single token to FEW_ROWS, and leaves more tokens in their rows."""
    if batch * time > 1:
        return separate_rows(batch, time)
    rows = one_row(FEW_ROWS, batch, time)

    # Behind the barriers XLA cannot leave out the rows that are cut off later.
    def enter(x: Shaped[Array, "1 1 *rest"]) -> Shaped[Array, "1 padded *rest"]:
        return lax.optimization_barrier(rows.enter(x))

    def leave(x: Shaped[Array, "1 padded *rest"]) -> Shaped[Array, "1 1 *rest"]:
        return rows.leave(lax.optimization_barrier(x))

    return TokenRows(enter, leave)


def head_of_several_rows(
    multiply: Multiply, hidden: PyTree, weight: PyTree
) -> Float[Array, "*batch V"]:
    """Multiplies all rows at once, and at least FEW_ROWS."""
    batch = jax.tree.leaves(hidden)[0].shape[:-1]
    if math.prod(batch) > 1:
        return multiply(hidden, weight)
    rows = padded_if_lone(1, 1)

    def enter(x: Shaped[Array, "..."]) -> Shaped[Array, "padded ..."]:
        return rows.enter(x.reshape(1, 1, *x.shape[len(batch) :]))[0]

    logits = multiply(jax.tree.map(enter, hidden), weight)
    return rows.leave(logits[None]).reshape(*batch, -1)


PLAIN_ON_TPU = replace(PLAIN, head=head_of_several_rows, rows=padded_if_lone)


# -- exact -----------------------------------------------------------------------------------------


def exact_with(shards: int = 1, precision: str = "") -> Arithmetic:
    """Returns the arithmetic of `model.exact`.

    shards: devices that XLA splits the rows over; each has complete tiles of rows of a product.
    """
    return Arithmetic(
        product=partial(tiled_product, shards),
        single_output=single_output,
        head=partial(product_of_any_rows, shards),
        banked_logits=BankedLogits(separate_slots, plus_separate_changes),
        sum=sum_by_halves,
        norm=exact_rms_norm,
        unfused=rounded,
        # A prompt's positions are constants. XLA would constant-fold their angles, with another
        # cosine than in programs where positions are data.
        unfolded=lax.optimization_barrier,
        logps=exact_logps,
        logps_of_many=exact_logps_of_many,
        # A row has the bits of its tokens one by one, whatever the number of tokens is.
        recurrence=Recurrence(recur_rows, recur_slots, recur_rows),
        experts=EXACT_EXPERTS,
        # The rows of every shard are complete tiles of the products.
        rows=partial(one_row, shards * ROW_TILE),
        precision=precision,
        is_exact=True,
    )


EXACT = exact_with()


def choose(is_exact: bool, mesh: Mesh, shards: int = 1) -> Arithmetic:
    """Returns the arithmetic of a program on the devices of `mesh`.

    shards: number of devices that XLA splits the rows over; 1 inside a shard_map over rows.
    """
    if not is_exact:
        return PLAIN_ON_TPU if is_tpu(mesh) else PLAIN
    # Only TPUs need another algorithm than the default.
    return exact_with(shards, TPU_PRODUCTS if is_tpu(mesh) else "")


def choose_for_training(is_exact: bool, mesh: Mesh, shards: int = 1) -> Arithmetic:
    """Returns `choose`, with the RoPE that is fast for long rows on TPUs."""
    arithmetic = choose(is_exact, mesh, shards)
    return replace(arithmetic, rotates_by_product=is_tpu(mesh) and not is_exact)


def is_tpu(mesh: Mesh) -> bool:
    """Returns whether the devices of `mesh` are TPUs."""
    return platform_of(mesh) == "tpu"
