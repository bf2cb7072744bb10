"""A decoder layer with experts (MoE) instead of one MLP, as in the "-A3B" models of Qwen3.

A router gives every token a probability of each of X experts. The token goes to the k most probable
experts, and their outputs are summed with the probabilities as weights (Shazeer et al. 2017,
arXiv:1701.06538, without its noise and without a capacity limit for the tokens of an expert).

    carry = experts.start(config, arrays, is_token, placement)    # once, before the first layer
    hidden, carry = qwen.forward(config, params, tokens, positions, attend, carry, ...)
    carry.load                                                    # i32[L, X]

Programs call `run_model.run_model`, which does this.

The `carry` that passes through all layers tells them which tokens are padding and which devices
share the experts. Without it every token counts, and one device has all experts.

The carry can also record the experts of every token, its routes, and it can prescribe them for
router replay: with rollout.routing_replay the trainer sends tokens to the experts that the sampler
chose (Ma et al. 2025, arXiv:2510.11370). The probabilities always come from the trainer's router.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree

from jzero.hosts.platform import platform_of
from jzero.model.architecture import QwenConfig
from jzero.model.arithmetic import PLAIN, Arithmetic
from jzero.model.expert_arithmetic import ExpertMlps
from jzero.model.grouped_products import product_of_platform
from jzero.model.layers import NORMAL, DenseLayer, ForwardPass, parameter

# Routes are stored for every token of a rollout; 16 bits hold all expert numbers and the -1 of
# router replay.
ROUTES_DTYPE = jnp.int16  # type of expert numbers in routes


@dataclass(frozen=True)
class Placement:
    """Which devices share the tokens and the experts of a layer.

    product  a key of `grouped_products.PRODUCTS`.
    tensor   number of devices that share the experts; an expert is never split. All of these
             devices have all tokens.
    rows     mesh axes that split the tokens.
    mesh     the mesh of these axes; None inside a shard_map, which has the mesh already.
    """

    product: str
    tensor: int = 1
    rows: tuple[str, ...] = ()
    mesh: Mesh | None = None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["attention", "is_token", "load", "routes", "replayed"],
    meta_fields=["placement"],
)
@dataclass(frozen=True)
class ExpertCarry:
    """The carry that passes through the layers of a model with experts."""

    attention: PyTree  # the carry of the attention
    is_token: Bool[Array, " N"]  # False where a token is padding, which goes to no expert
    load: Int[Array, "L X"]  # tokens per expert in the layers so far
    placement: Placement
    # The experts of every token in the layers so far; None: not recorded.
    routes: Int[Array, "L N k"] | None = None
    # Router replay: the experts prescribed for every token, or -1 where the router chooses. None:
    # the router always chooses.
    replayed: Int[Array, "L N k"] | None = None


def start(
    config: QwenConfig,
    attention: PyTree,
    is_token: Bool[Array, "*batch"],
    placement: Placement,
    replayed: Int[Array, "*batch Lk"] | None = None,
    remembers_routes: bool = False,
) -> ExpertCarry:
    """Returns the carry before the first layer. attention: the carry of the attention.

    replayed: the routes of every token, as `routes_of` returns them.
    """
    L, k = config.num_hidden_layers, config.num_experts_per_tok
    load = jnp.zeros((L, config.num_experts), jnp.int32)
    carry = ExpertCarry(attention, is_token.ravel(), load, placement)
    if remembers_routes:
        carry = replace(carry, routes=jnp.zeros((L, is_token.size, k), ROUTES_DTYPE))
    if replayed is not None:
        # The layer comes first, because each layer reads and writes its slice.
        by_layer = replayed.reshape(is_token.size, L, k).swapaxes(0, 1)
        carry = replace(carry, replayed=by_layer)
    return carry


def routes_of(carry: ExpertCarry) -> Int[Array, "N Lk"] | None:
    """Returns the experts of every token, layer by layer, or None if they are not recorded."""
    if carry.routes is None:
        return None
    return carry.routes.swapaxes(0, 1).reshape(len(carry.is_token), -1)


def training_placement(mesh: Mesh) -> Placement:
    """Returns the placement on a training mesh."""
    product = product_of_platform(platform_of(mesh))
    # If only rows are split, the entire program is inside a shard_map (`training.learner`).
    num_slices = mesh.shape.get("slices", 1)
    if num_slices * mesh.shape["data"] == mesh.size:
        return Placement(product)
    rows = tuple(axis for axis in mesh.axis_names if axis not in ("slices", "tensor"))
    return Placement(product, mesh.shape["tensor"], rows, mesh)


def decoding_placement(mesh: Mesh) -> Placement:
    """Returns the placement on one shard of a decoding mesh (slots, tensor)."""
    product = product_of_platform(platform_of(mesh))
    return Placement(product, mesh.shape["tensor"])


class ExpertWeights(NamedTuple):
    """The weights of one layer's experts. The MLP weights may be int8 or have adapters."""

    router: Array  # [E, X]
    mlps: ExpertMlps


class Experts(NamedTuple):
    """The experts that one device computes: some or all experts of a layer."""

    mlps: ExpertMlps
    first: jax.Array | int  # number of the device's first expert among all experts
    number: int


class Routing(NamedTuple):
    """How a router chooses the experts of a token."""

    num_chosen: int
    renormalize: bool  # divides the weights of a token's experts by their sum


def routing_of(config: QwenConfig) -> Routing:
    return Routing(config.num_experts_per_tok, config.norm_topk_prob)


def mixer_carry(carry: PyTree) -> PyTree:
    """Returns the part of the carry that belongs to attention or to another token mixer."""
    return carry.attention if isinstance(carry, ExpertCarry) else carry


def with_mixer_carry(carry: PyTree, mixer_part: PyTree) -> PyTree:
    """Returns the carry with the mixer's part replaced."""
    return replace(carry, attention=mixer_part) if isinstance(carry, ExpertCarry) else mixer_part


class ExpertLayer(DenseLayer):
    """A decoder layer of Qwen3 with experts, each a gated MLP, instead of one MLP."""

    SIDE_BY_SIDE = (("q", "k", "v"),)

    def __init__(self, config: QwenConfig, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs, attention_bias=False, query_key_norm=True)
        self.routing = routing_of(config)

    def make_mlp(self, config: QwenConfig, rngs: nnx.Rngs) -> None:
        """Creates the parameters of the router and the experts."""
        E, X, F = config.hidden_size, config.num_experts, config.moe_intermediate_size
        inner, outer = ("experts", "embed", "expert_mlp"), ("experts", "expert_mlp", "embed")
        self.router = parameter(rngs, (E, X), ("embed", "router"), NORMAL)
        self.experts_gate = parameter(rngs, (X, E, F), inner, NORMAL)
        self.experts_up = parameter(rngs, (X, E, F), inner, NORMAL)
        self.experts_down = parameter(rngs, (X, F, E), outer, NORMAL)

    def __call__(
        self,
        x: Float[Array, "N E"],
        forward_pass: ForwardPass,
        layer: Int[Array, ""],
        carry: PyTree,
    ) -> tuple[Float[Array, "N E"], PyTree]:
        """Returns the hidden states after the layer, and the `carry`."""
        arithmetic = forward_pass.arithmetic
        x, attention = self.with_attention(x, forward_pass, layer, mixer_carry(carry))
        h = arithmetic.norm(x, self.mlp_norm.get_value(), self.norm_eps)
        mlps = ExpertMlps(
            gate=self.experts_gate.get_value(),
            up=self.experts_up.get_value(),
            down=self.experts_down.get_value(),
        )
        weights = ExpertWeights(self.router.get_value(), mlps)
        carry = with_mixer_carry(carry, attention)
        out, carry = mix(h, weights, self.routing, layer, carry, arithmetic)
        return x + out, carry


def mix(
    h: Float[Array, "N E"],
    weights: ExpertWeights,
    routing: Routing,
    layer: Int[Array, ""],
    carry: PyTree,
    arithmetic: Arithmetic,
) -> tuple[Float[Array, "N E"], PyTree]:
    """Returns the weighted sum of every token's experts, and the carry with the layer's load.

    layer: the number of the layer among all layers with experts.
    """
    if not isinstance(carry, ExpertCarry):
        # Without a carry, all tokens count and one device has all experts.
        placement = Placement(product_of_platform(jax.default_backend()))
        is_token = jnp.ones(len(h), bool)
        out, _, _ = mixture(h, is_token, weights, routing, placement, arithmetic)
        return out, carry
    replayed = None if carry.replayed is None else carry.replayed[layer]
    out, load, chosen = mixture(
        h, carry.is_token, weights, routing, carry.placement, arithmetic, replayed
    )
    all_loads = lax.dynamic_update_index_in_dim(carry.load, load, layer, 0)
    carry = replace(carry, load=all_loads)
    if carry.routes is not None:
        layer_routes = chosen.astype(ROUTES_DTYPE)
        routes = lax.dynamic_update_index_in_dim(carry.routes, layer_routes, layer, 0)
        carry = replace(carry, routes=routes)
    return out, carry


def mixture(
    h: Float[Array, "N E"],
    is_token: Bool[Array, " N"],
    weights: ExpertWeights,
    routing: Routing,
    placement: Placement,
    arithmetic: Arithmetic,
    replayed: Int[Array, "N k"] | None = None,
) -> tuple[Float[Array, "N E"], Int[Array, " X"], Int[Array, "N k"]]:
    """Returns the weighted sum of the experts of every token, the load, and the choice of experts.

    The load is the number of tokens per expert.
    replayed: the experts prescribed for every token, or -1 where the router chooses.
    """
    X, tensor, rows = weights.router.shape[1], placement.tensor, placement.rows
    is_split = tensor > 1 and X % tensor == 0  # the rule of `mesh.shardings_of` for the weights

    def on_device(
        h: jax.Array,
        is_token: jax.Array,
        replayed: jax.Array | None,
        router: jax.Array,
        mlps: ExpertMlps,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        probabilities, chosen = route(h, router, *routing, replayed, arithmetic)
        # Every device routes all of its tokens, and computes only its own experts.
        first = lax.axis_index("tensor") * (X // tensor) if is_split else 0
        local_experts = Experts(mlps, first, X // tensor if is_split else X)
        out = sum_of_experts(
            h, probabilities, chosen, is_token, local_experts, placement.product, arithmetic
        )
        # Padding counts as expert X, which `count` leaves out.
        load = count(jnp.where(is_token[:, None], chosen, X), X)
        # Each of the devices that share the experts has a partial sum of all its tokens.
        if is_split:
            out = lax.psum(out, "tensor")
        if rows:
            load = lax.psum(load, rows)
        return out, load, chosen

    # Nothing is split, or the caller is already inside a shard_map.
    if tensor == 1 and not rows:
        return on_device(h, is_token, replayed, *weights)
    split = P("tensor") if is_split else P()
    by_row = P(rows or None)
    # All axes of the mesh, also one of slices, which the specs do not name.
    axes = {*rows, "tensor"} if placement.mesh is None else set(placement.mesh.axis_names)
    return jax.shard_map(
        on_device,
        mesh=placement.mesh,
        in_specs=(by_row, by_row, by_row, P(), split),
        out_specs=(by_row, P(), by_row),
        axis_names=axes,
        check_vma=False,
    )(h, is_token, replayed, *weights)


def route(
    h: Float[Array, "N E"],
    router: Float[Array, "E X"],
    num_chosen: int,
    renormalize: bool,
    replayed: Int[Array, "N k"] | None = None,
    arithmetic: Arithmetic = PLAIN,
) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
    """Returns the weights of every token's experts, in fp32, and the numbers of these experts.

    renormalize: divides the weights of a token by their sum.
    replayed: the experts prescribed for every token; -1: the router's choice.
    """
    probabilities = arithmetic.experts.probabilities(h, router)
    weights, chosen = lax.top_k(probabilities, num_chosen)
    if replayed is not None:
        chosen = jnp.where(replayed >= 0, replayed, chosen)
        # Only the choice is replayed: the weights are probabilities of this router.
        weights = jnp.take_along_axis(probabilities, chosen, axis=1)
    if renormalize:
        weights = weights / arithmetic.sum(weights)[..., None]
    return weights, chosen


def sum_of_experts(
    h: Float[Array, "N E"],
    probabilities: Float[Array, "N k"],
    chosen: Int[Array, "N k"],
    is_token: Bool[Array, " N"],
    local_experts: Experts,
    product: str,
    arithmetic: Arithmetic,
) -> Float[Array, "N E"]:
    """Returns the weighted sum over the experts of every token that are on this device.

    product: a key of `grouped_products.PRODUCTS`.
    """
    N, k = chosen.shape
    num_experts = local_experts.number
    place = chosen - local_experts.first
    is_here = (place >= 0) & (place < num_experts) & is_token[:, None]
    group = jnp.where(is_here, place, num_experts).ravel()  # experts of other devices sort last

    # Sort the N * k (token, expert) pairs by expert, multiply each group of rows by the weights of
    # its expert, and undo the sort.
    order = jnp.argsort(group)
    # A scatter of the numbers inverts the permutation without a second sort.
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(N * k, dtype=order.dtype))
    sizes = count(group, num_experts)
    rows = permuted(jnp.repeat(h, k, axis=0), order, inverse)
    out = arithmetic.experts.mlps(product, rows, local_experts.mlps, sizes)
    by_token = permuted(out, inverse, order).reshape(N, k, -1)
    # The pairs of padding and of other devices add nothing here.
    probabilities = jnp.where(is_here, probabilities, 0)
    return arithmetic.experts.weighted_sum(by_token, probabilities).astype(h.dtype)


def count(numbers: Int[Array, "..."], length: int) -> Int[Array, " length"]:
    """Returns how often each number below `length` occurs."""
    return jnp.sum(numbers.ravel()[:, None] == jnp.arange(length), axis=0, dtype=jnp.int32)


@jax.custom_vjp
def permuted(
    rows: Float[Array, "M E"],
    order: Int[Array, " M"],
    inverse: Int[Array, " M"],
) -> Float[Array, "M E"]:
    """Returns rows[order]."""
    return rows[order]


def permuted_forward(
    rows: Float[Array, "M E"],
    order: Int[Array, " M"],
    inverse: Int[Array, " M"],
) -> tuple[Float[Array, "M E"], Int[Array, " M"]]:
    return rows[order], inverse


def permuted_backward(
    inverse: Int[Array, " M"],
    gradient: Float[Array, "M E"],
) -> tuple[Float[Array, "M E"], None, None]:
    # A gather by the inverse order. JAX's derivative would be a scatter-add, which also covers an
    # `order` with repetitions.
    return gradient[inverse], None, None


permuted.defvjp(permuted_forward, permuted_backward)
