"""The whole decoder model as functions over values: Qwen2, Qwen2.5 and the dense models of Qwen3.

    params = qwen.init(config, jax.random.key(0))
    hidden, carry = qwen.forward(config, params, tokens, positions, attend, dtype=jnp.bfloat16)
    logits = qwen.head(config, params, hidden, jnp.bfloat16)

`config` says which model (`QwenConfig`), `params` is a plain nested dict of arrays (`Params`), and
`attend` is the attention, which the caller brings along: packed rows, dense prefill or paged
decoding. The layer comes from the family's entry in `families.py`. `logprobs.py` turns hidden
states into log-probabilities. See `architecture.py` for the dimension letters.
"""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax.nn import initializers
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from jzero.model.architecture import Parameter, Params, QwenConfig
from jzero.model.families import family_of
from jzero.model.layers import NORMAL, ONES, Attend, rms_norm, rotary

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


def outer_parameters(config: QwenConfig) -> dict[str, Parameter]:
    """Returns the parameters outside of the layers, in the order in which they are drawn."""
    V, E = config.vocab_size, config.hidden_size
    parameters = {
        "embed": Parameter((V, E), ("vocab", "embed"), NORMAL),
        "norm": Parameter((E,), ("norm",), ONES),
    }
    if config.value_head:
        as_openrlhf = initializers.normal(1 / (E + 1))
        parameters["value"] = Parameter((E,), ("embed",), as_openrlhf)
    elif not config.tie_word_embeddings:
        parameters["lm_head"] = Parameter((E, V), ("embed", "vocab"), NORMAL)
    return parameters


def init(config: QwenConfig, key: jax.Array) -> Params:
    """Returns random fp32 parameters, drawn as Hugging Face does: normal(0.02), norms 1, biases 0.

    Every parameter has a key of its own, by its place in the tables; the layers together have the
    second place. A new parameter at the end of a table changes no other parameter's values.
    """
    outer = outer_parameters(config)
    first, *rest = outer
    keys = {name: jax.random.fold_in(key, i) for i, name in enumerate([first, "layers", *rest])}
    layer_keys = jax.random.split(keys["layers"], config.num_hidden_layers)
    layer = family_of(config.model_type).parameters(config)

    def draw_layer(key: jax.Array) -> Params:
        return {
            name: draw(parameter, jax.random.fold_in(key, i))
            for i, (name, parameter) in enumerate(layer.items())
        }

    params: Params = {name: draw(parameter, keys[name]) for name, parameter in outer.items()}
    return params | {"layers": jax.vmap(draw_layer)(layer_keys)}


def draw(parameter: Parameter, key: jax.Array) -> jax.Array:
    """Returns a parameter's first values in fp32."""
    return parameter.initializer(key, parameter.shape, jnp.float32)


def abstract(config: QwenConfig) -> Params:
    """Returns the tree of `init` with a ShapeDtypeStruct at every leaf. Allocates nothing."""
    return jax.eval_shape(partial(init, config), jax.random.key(0))


def logical_axes(config: QwenConfig) -> Params:
    """Returns the tree of `init` with a tuple of logical axis names at every leaf."""
    outer = outer_parameters(config)
    layer = family_of(config.model_type).parameters(config)
    axes: Params = {name: parameter.axes for name, parameter in outer.items()}
    axes["layers"] = {name: ("layers", *parameter.axes) for name, parameter in layer.items()}
    return axes


def num_params(config: QwenConfig) -> int:
    """Returns the number of the model's parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract(config)))


def cast(tree: Params, dtype: DTypeLike) -> Params:
    """Converts every leaf to `dtype`."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


# -- recomputation in the backward pass ------------------------------------------------------------
# prevent_cse=False: a scan already keeps XLA from merging the recomputation with the forward pass,
# and the barriers that JAX would add cost time.


def keep_everything(function: Callable) -> Callable:
    """Recomputes nothing in the backward pass."""
    return function


def keep_products(function: Callable) -> Callable:
    """Keeps the results of plain matrix products, and recomputes everything else."""
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(function, prevent_cse=False, policy=policy)


def keep_nothing(function: Callable) -> Callable:
    """Keeps the inputs alone, and recomputes everything."""
    return jax.checkpoint(function, prevent_cse=False)


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
) -> tuple[Float[Array, "B T E"], PyTree]:
    """Computes the hidden states after the final norm.

    tokens, positions: the input ids, and each token's position in its own sequence.
    attend, carry: attention, and what it reads and changes from layer to layer (`layers.Attend`).
    dtype: the type of activations and weights; norms, angles and softmax are in fp32.
    remat: a key of REMAT, which says what the backward pass of a layer recomputes.
    Returns the hidden states, and `carry` as the last layer's attention left it.
    """
    rope = rotary(config, positions)
    dense = family_of(config.model_type).layer

    def step(state: tuple, scanned: tuple) -> tuple[tuple, None]:
        x, carry = state
        index, weights = scanned
        return dense(config, weights, x, rope, attend, index, carry), None

    # The cast happens once and before the scan, so that a sharded stack is gathered in `dtype`.
    layers = cast(params["layers"], dtype)
    x = params["embed"][tokens.ravel()].astype(dtype)
    indices = jnp.arange(config.num_hidden_layers, dtype=jnp.int32)
    (x, carry), _ = jax.lax.scan(REMAT[remat](step), (x, carry), (indices, layers))
    x = rms_norm(x, params["norm"].astype(dtype), config.rms_norm_eps)
    return x.reshape(*tokens.shape, -1), carry


EVERY_WORD = slice(None)


def head(
    config: QwenConfig,
    params: Params,
    hidden: Float[Array, "*batch E"],
    dtype: DTypeLike,
    part: slice = EVERY_WORD,
) -> Float[Array, "*batch words"]:
    """Computes fp32 logits of a part of the vocabulary.

    The inputs of the product are in `dtype`; it accumulates in fp32.
    """
    if config.tie_word_embeddings:
        letters, weight = "...e,ve->...v", params["embed"][part]
    else:
        letters, weight = "...e,ev->...v", params["lm_head"][:, part]
    return jnp.einsum(
        letters, hidden.astype(dtype), weight.astype(dtype), preferred_element_type=jnp.float32
    )
