"""The complete decoder model of every family in `families.py`, from Qwen2 to the Qwen3.5 hybrids.

Flax NNX modules hold the structure: the parameters, their logical axes and their initial values.
Functions over values do the computation.

    params = qwen.init(config, jax.random.key(0))
    hidden, carry = qwen.forward(config, params, tokens, positions, attend, dtype=jnp.bfloat16)
    logits = qwen.head(config, params, hidden, jnp.bfloat16)

`config` describes the model (`QwenConfig`), `params` is a plain nested dict of arrays (`Params`),
and `attend` is the attention function of the caller: packed rows, dense prefill or paged decoding.
The module of a layer comes from the family's entry in `families.py`. `logprobs.py` turns hidden
states into log-probabilities. See `architecture.py` for the dimension letters.
"""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree, Shaped

from jzero.attention.xla import ATTENTION_OUTPUT, soft_capped
from jzero.model import mtp, output_adapter
from jzero.model.architecture import FP32_PARAMETERS, Params, QwenConfig
from jzero.model.arithmetic import PLAIN, Arithmetic, Multiply
from jzero.model.delta_net import DeltaInputs, Recur
from jzero.model.families import Layer, family_of
from jzero.model.layers import (
    NORMAL,
    Attend,
    ForwardPass,
    local_rotary,
    parameter,
    rotary,
    unrolls_layers,
)
from jzero.model.linear import (
    GROUPED_PRODUCT,
    LINEAR_OUTPUT,
    LOW_RANK_PRODUCT,
    Dropout,
    RowAdapters,
    choose_adapters,
    with_dropout,
)
from jzero.model.output_adapter import AnyOutputAdapter, OutputAdapter
from jzero.model.quantized import QuantizedWeight, is_quantized
from jzero.model.softmax import SOFTMAX_STATISTICS
from jzero.model.traced_once import traced_once
from jzero.numerics.products import linear_product

__all__ = [
    "REMAT",
    "Attend",
    "Params",
    "QwenConfig",
    "abstract",
    "cast",
    "forward",
    "head",
    "init",
    "logical_axes",
    "num_params",
]


# -- parameters ------------------------------------------------------------------------------------


class Qwen(nnx.Module):
    """The tree of all parameters. `forward` computes with it; the module itself is not called.

    Every parameter draws its initial values with a separate key, by its position; all layers
    together have the second position. Appending a parameter does not change the values of the
    others.
    """

    def __init__(self, config: QwenConfig, rngs: nnx.Rngs) -> None:
        V, E = config.vocab_size, config.hidden_size
        family = family_of(config.model_type)
        make_layer = family.layer

        # Every leaf below `layers` leads with an axis [L], which `forward` scans.
        @partial(nnx.vmap, transform_metadata={nnx.PARTITION_NAME: None})
        def stack(rngs: nnx.Rngs) -> Layer:
            assert make_layer is not None
            return make_layer(config, rngs)

        self.embed = parameter(rngs, (V, E), ("vocab", "embed"), NORMAL)
        if family.stack is None:
            self.layers = stack(rngs.split(config.num_hidden_layers))
        else:
            self.layers = family.stack.layers(config, nnx.Rngs(params=rngs.params()))
        self.norm = parameter(rngs, (E,), ("norm",), family.norm_initializer)
        if config.value_head:
            # The initializer of the value head in OpenRLHF.
            as_openrlhf = initializers.normal(1 / (E + 1))
            self.value = parameter(rngs, (E,), ("embed",), as_openrlhf)
        elif not config.tie_word_embeddings:
            self.lm_head = parameter(rngs, (E, V), ("embed", "vocab"), NORMAL)
        if config.mtp:
            self.mtp = mtp.DraftHead(config, rngs)


def init(config: QwenConfig, key: jax.Array) -> Params:
    """Returns random fp32 parameters.

    The initializers are the ones of Hugging Face: weights normal(0.02), norms 1 and biases 0.
    """
    model = Qwen(config, nnx.Rngs(params=key))
    return nnx.to_pure_dict(nnx.state(model))


@traced_once
def abstract(config: QwenConfig) -> Params:
    """Returns the tree of `init` with a ShapeDtypeStruct at every leaf. Allocates nothing."""
    return jax.eval_shape(lambda: init(config, jax.random.key(0)))


@traced_once
def logical_axes(config: QwenConfig) -> Params:
    """Returns the tree of `init` with a tuple of logical axis names at every leaf."""
    model = nnx.eval_shape(lambda: Qwen(config, nnx.Rngs(0)))
    state = nnx.state(model)

    def axes_of(leaf: nnx.Param) -> tuple[str, ...]:
        return leaf.get_metadata()["axes"]

    axes = nnx.to_pure_dict(jax.tree.map(axes_of, state, is_leaf=is_parameter))
    axes["layers"] = {name: ("layers", *layer_axes) for name, layer_axes in axes["layers"].items()}
    return axes


def is_parameter(value: object) -> bool:
    return isinstance(value, nnx.Param)


def abstract_layer(config: QwenConfig) -> Layer:
    """Returns the module of one layer, with shapes instead of arrays."""
    make_layer = family_of(config.model_type).layer
    assert make_layer is not None, f"the layers of {config.model_type} are of several kinds"
    return nnx.eval_shape(lambda: make_layer(config, nnx.Rngs(0)))


@traced_once
def layer_graph(config: QwenConfig) -> nnx.GraphDef:
    """Returns the structure of one layer's module, into which `forward` merges the parameters."""
    return nnx.graphdef(abstract_layer(config))


@traced_once
def side_by_side(config: QwenConfig) -> tuple[tuple[str, ...], ...]:
    """Returns the groups of weights that a layer passes to `linear.products` (fused QKV).

    A hybrid has none.
    """
    if family_of(config.model_type).layer is None:
        return ()
    return getattr(abstract_layer(config), "SIDE_BY_SIDE", ())


def num_params(config: QwenConfig) -> int:
    """Returns the number of the model's parameters."""
    leaves = jax.tree.leaves(abstract(config))
    return sum(leaf.size for leaf in leaves)


def cast(tree: Params, dtype: DTypeLike) -> Params:
    """Converts every leaf to `dtype`, except 8-bit weights and their scales.

    The parameters of FP32_PARAMETERS are never narrower than fp32.
    """

    def convert(path: tuple, leaf: jax.Array | QuantizedWeight) -> jax.Array | QuantizedWeight:
        if isinstance(leaf, QuantizedWeight):
            return leaf
        return leaf.astype(dtype_of(path, dtype))

    return jax.tree_util.tree_map_with_path(convert, tree, is_leaf=is_quantized)


def dtype_of(path: tuple, dtype: DTypeLike) -> DTypeLike:
    """Returns the type that `cast` gives to the leaf at a JAX tree path."""
    names = {key.key for key in path if isinstance(key, jax.tree_util.DictKey)}
    return dtype if names.isdisjoint(FP32_PARAMETERS) else jnp.promote_types(dtype, jnp.float32)


# -- recomputation in the backward pass ------------------------------------------------------------

NARROW = (LOW_RANK_PRODUCT, SOFTMAX_STATISTICS, ATTENTION_OUTPUT)  # kept by every setting

# prevent_cse=False: a scan already keeps XLA from merging the recomputation with the forward pass,
# and the barriers that JAX would add cost time.


def keep_everything(function: Callable) -> Callable:
    """Recomputes nothing in the backward pass."""
    return function


def keep_products(function: Callable) -> Callable:
    """Keeps the results of plain matrix products, and recomputes everything else.

    For a weight with an adapter, x A and the rounded sum are kept, but not the fp32 terms of the
    sum.
    """
    policies = jax.checkpoint_policies
    policy = policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable,
        policies.save_only_these_names(*NARROW, LINEAR_OUTPUT, GROUPED_PRODUCT),
    )
    return jax.checkpoint(function, prevent_cse=False, policy=policy)


def keep_nothing(function: Callable) -> Callable:
    """Keeps the inputs and the narrow values (`NARROW`), and recomputes everything else."""
    policy = jax.checkpoint_policies.save_only_these_names(*NARROW)
    return jax.checkpoint(function, prevent_cse=False, policy=policy)


# On CPUs "dots" is faster than "full". On TPUs it is slower by XLA's estimate, because of the
# copies into and out of the stacks of saved outputs (lab/log.md, 2026-11-23).
REMAT: Mapping[str, Callable[[Callable], Callable]] = {  # the values of model.remat
    "none": keep_everything,
    "dots": keep_products,
    "full": keep_nothing,
}


# -- the forward pass ------------------------------------------------------------------------------


def forward(
    config: QwenConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attend: Attend,
    carry: PyTree = None,
    *,
    dtype: DTypeLike,
    remat: str = "none",
    recur: Recur | None = None,
    arithmetic: Arithmetic = PLAIN,
    attention_rotates: bool = False,
    row_adapters: RowAdapters | None = None,
    dropout: Dropout | None = None,
) -> tuple[Float[Array, "B T E"], PyTree]:
    """Computes the hidden states after the final norm.

    Programs call `run_model.run_model`, which calls this function.

    tokens, positions: the input ids, and the position of each token in its sequence.
    attend, carry: attention, and the tree that it reads and changes from layer to layer
        (`layers.Attend`).
    dtype: the type of activations and weights; norms, angles and softmax are in fp32. 8-bit weights
        are not converted: `linear` multiplies by them.
    remat: a key of REMAT: which values the backward pass of a layer recomputes.
    recur: the function that computes the gated delta nets of a hybrid (`delta_net.Recur`), with the
        same carry.
    arithmetic: with exact arithmetic the bits of a token are independent of the other tokens, if
        those of `attend` are.
    attention_rotates: `attend` receives q and k before RoPE.
    row_adapters: the adapter of each of the B rows, if weights are banked (`linear.BankedWeight`).
    dropout: on the inputs of an adapter, with a key for each of the B rows.
    Returns the hidden states, and `carry` after the last layer.
    """
    rows = arithmetic.rows(*tokens.shape)

    # Only `attend` and `recur` see the tokens as [B, T].
    def attend_to_rows(
        q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, carry: PyTree
    ) -> tuple[jax.Array, PyTree]:
        out, carry = attend(rows.leave(q), rows.leave(k), rows.leave(v), layer, carry)
        return rows.enter(out), carry

    def recur_over_rows(
        inputs: DeltaInputs, layer: jax.Array, carry: PyTree
    ) -> tuple[jax.Array, PyTree]:
        assert recur is not None, "a hybrid needs `recur`"
        in_rows = inputs._replace(
            channels=rows.leave(inputs.channels),
            log_decay=rows.leave(inputs.log_decay),
            strength=rows.leave(inputs.strength),
        )
        out, carry = recur(in_rows, layer, carry)
        return rows.enter(out), carry

    with arithmetic.products():
        tokens = rows.enter(tokens)
        # The angles are the same in all layers, so they are computed once.
        row_positions = rows.enter(arithmetic.unfolded(positions))
        rope = rotary(config, row_positions)._replace(
            is_left_to_attention=attention_rotates, by_product=arithmetic.rotates_by_product
        )
        local_rope = local_rotary(config, row_positions)
        forward_pass = ForwardPass(rope, attend_to_rows, recur_over_rows, arithmetic, local_rope)
        # The cast happens once and before the loop, so that a sharded stack is gathered in `dtype`.
        layers = cast(params["layers"], dtype)
        if row_adapters is not None:

            def spread_over_tokens(column: Shaped[Array, " B"]) -> Shaped[Array, " N"]:
                by_token = jnp.broadcast_to(column[:, None], positions.shape)
                return rows.enter(by_token).ravel()

            layers = choose_adapters(layers, jax.tree.map(spread_over_tokens, row_adapters))
        if dropout is not None:
            layers = with_dropout(layers, dropout)
        x = params["embed"][tokens.ravel()].astype(dtype)
        family = family_of(config.model_type)
        if family.scales_embedding:
            # transformers rounds the factor to the type of the embedding.
            x = arithmetic.unfused(x * jnp.asarray(config.hidden_size**0.5, dtype))
        # A family with several kinds of layers has its own loop over them.
        loop = loop_over_layers if family.stack is None else family.stack.forward
        x, carry = loop(config, layers, x, forward_pass, carry, REMAT[remat])
        scale = jax.lax.convert_element_type(params["norm"], dtype)
        x = family.norm(arithmetic, x, scale, config.rms_norm_eps)
        return rows.leave(x.reshape(*tokens.shape, -1)), carry


def loop_over_layers(
    config: QwenConfig,
    layers: Params | tuple[Params, ...],
    x: Float[Array, "N E"],
    forward_pass: ForwardPass,
    carry: PyTree,
    remat: Callable[[Callable], Callable],
) -> tuple[Float[Array, "N E"], PyTree]:
    """Computes all layers of a family whose layers are of one kind."""
    graph = layer_graph(config)
    if isinstance(layers, tuple):  # a decoder's layers may be apart: see sharding.side_by_side
        for index, weights in enumerate(layers):
            layer = nnx.merge(graph, weights)
            x, carry = layer(x, forward_pass, jnp.int32(index), carry)
        return x, carry

    def step(state: tuple, scanned: tuple) -> tuple[tuple, None]:
        x, carry = state
        index, weights = scanned
        layer = nnx.merge(graph, weights)
        return layer(x, forward_pass, index, carry), None

    indices = jnp.arange(config.num_hidden_layers, dtype=jnp.int32)
    (x, carry), _ = jax.lax.scan(
        remat(step), (x, carry), (indices, layers), unroll=unrolls_layers()
    )
    return x, carry


EVERY_WORD = slice(None)


def head(
    config: QwenConfig,
    params: Params,
    hidden: Float[Array, "*batch E"],
    dtype: DTypeLike,
    part: slice = EVERY_WORD,
    arithmetic: Arithmetic = PLAIN,
    row_adapters: RowAdapters | None = None,
) -> Float[Array, "*batch words"]:
    """Computes fp32 logits of a part of the vocabulary.

    The inputs of the product are in `dtype`; it accumulates in fp32. An adapter of the output layer
    is among `params` (`output_adapter.py`).

    row_adapters: the adapter of each row, the first axis of `hidden`, if the adapters are banked.
    """
    # The embedding is [V, E] and the head [E, V], so the part of the vocabulary is a slice of rows
    # or of columns.
    if config.tie_word_embeddings:
        weight_letters, weight = "ve", params["embed"][part]
    else:
        weight_letters, weight = "ev", params["lm_head"][:, part]
    hidden, weight = hidden.astype(dtype), weight.astype(dtype)

    def product(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        batch = "abcd"[: hidden.ndim - 1]
        return linear_product(f"{batch}e,{weight_letters}->{batch}v", hidden, weight)

    with arithmetic.products():
        adapter = params.get(output_adapter.NAME)
        if adapter is None:
            logits = arithmetic.head(product, hidden, weight)
        else:
            adapter = output_adapter.of_words(adapter, part, dtype)
            logits = adapted_logits(arithmetic, product, hidden, weight, adapter, row_adapters)
    if not config.final_logit_softcapping:
        return logits
    # What reads the logits subtracts from them, and the last operation of a soft cap is a product.
    return arithmetic.unfused(soft_capped(logits, config.final_logit_softcapping))


def adapted_logits(
    arithmetic: Arithmetic,
    multiply: Multiply,
    hidden: Float[Array, "*batch E"],
    weight: Array,
    adapter: AnyOutputAdapter,
    row_adapters: RowAdapters | None,
) -> Float[Array, "*batch words"]:
    """Returns multiply(hidden, weight) plus the output of an adapter, or of a bank's adapters."""
    if isinstance(adapter, OutputAdapter):

        def with_adapter(
            hidden: Float[Array, "*rows E"], weights: tuple[Array, OutputAdapter]
        ) -> Float[Array, "*rows words"]:
            weight, adapter = weights
            return multiply(hidden, weight) + adapter.change(hidden)

        return arithmetic.head(with_adapter, hidden, (weight, adapter))

    assert row_adapters is not None, "the program has not chosen the adapters of its rows"

    def with_own_adapter(
        tokens: tuple[Float[Array, "*rows E"], RowAdapters], weights: tuple[Array, PyTree]
    ) -> Float[Array, "*rows words"]:
        hidden, rows = tokens
        weight, factors = weights
        batch, width = hidden.shape[:-1], hidden.shape[-1]
        x = hidden.reshape(-1, width)
        by_row = jax.tree.map(jnp.ravel, rows)
        logits = arithmetic.banked_logits.add(multiply(x, weight), x, by_row, factors)
        return logits.reshape(*batch, -1)

    factors = arithmetic.banked_logits.prepare(adapter.groups, hidden.shape[-1])
    tokens = hidden, output_adapter.by_token(row_adapters, hidden.shape[:-1])
    return arithmetic.head(with_own_adapter, tokens, (weight, factors))
