"""Low-rank adapters on a frozen base model: their parameters, and the model with an adapter.

LoRA (Hu et al. 2021, arXiv:2106.09685): y = W x + (alpha / R) B (A x) on linear layers, where W is
frozen and A and B are trained. B starts at 0, so an untrained adapter changes nothing.

    adapters.check(model, settings)                            # UserError if settings are invalid
    adapter = adapters.init(model, settings, key)              # {"layers": {"q": {"a", "b"}, ...}}
    params = adapters.join(base, adapter, settings.scale)      # parameters for `qwen.forward`
    merged = adapters.merge(model, base, adapter, settings.scale)  # plain fp32 parameters, once

A is [L, *inputs, R] and B is [L, R, *outputs], where W is [L, *inputs, *outputs]. Every expert has
a separate adapter: then W is [L, X, inputs, outputs], A [L, X, inputs, R] and B [L, X, R, outputs].
Only the family's table of tensors (`families.py`) defines which parameters are weights of linear
layers, and how many of their axes are inputs.

The output layer may have an adapter as well, if the targets name it: {"layers": ..., "lm_head":
{"a": f32[E, R], "b": f32[R, V]}}. It changes the logits only: if the model ties its embedding to
the output layer, the embedding stays unchanged (`output_adapter.py`).

The adapter of a critic also contains the critic's head: {"layers": ..., "value": f32[E]}. All
parameters of the head are trained, because the base has none.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jzero.config import AdapterConfig
from jzero.errors import UserError
from jzero.model import output_adapter, qwen
from jzero.model.architecture import Params, QwenConfig
from jzero.model.families import family_of
from jzero.model.linear import AdaptedWeight, FrozenWeight, LinearWeight
from jzero.model.output_adapter import OutputAdapter
from jzero.model.quantized import QuantizedWeight, dequantize, is_quantized

ALL = "all"  # target name of all linear layers
HEAD = "value"  # the critic's head
OUTPUT = output_adapter.TARGET  # the output layer


class Target(NamedTuple):
    """The weight of a linear layer that may have an adapter: [*stacked, *inputs, *outputs]."""

    stacked: tuple[int, ...]  # [L], the layers that have this weight; [L, X] for experts
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    stacked_axes: tuple[str, ...]  # logical names, see `sharding.mesh.RULES`
    input_axes: tuple[str, ...]
    output_axes: tuple[str, ...]

    @property
    def highest_rank(self) -> int:
        """The largest possible rank of the weight: a higher rank of the adapter adds nothing."""
        return min(math.prod(self.inputs), math.prod(self.outputs))

    @property
    def is_of_experts(self) -> bool:
        return len(self.stacked) > 1


# -- which weights have an adapter -----------------------------------------------------------------

# Layouts of `StoredTensor` for weights of linear layers -> number of leading axes before the
# inputs: the axis of the layers, and the axis of the experts.
LINEAR_LAYOUTS: Mapping[str, int] = {"linear": 1, "expert": 2, "experts": 2}


def linear_layers(config: QwenConfig) -> dict[str, Target]:
    """Returns the weights that may have an adapter, in the order of the family's table."""
    weights = qwen.abstract(config)["layers"]
    axes = qwen.logical_axes(config)["layers"]
    layers = {}
    for leaf, stored in family_of(config.model_type).tensors.items():
        name = leaf.removeprefix("layers.")
        # The table may name more parameters than the family has.
        is_linear = stored.layout in LINEAR_LAYOUTS and stored.is_adaptable
        if leaf.startswith("layers.") and name in weights and is_linear:
            shape, names = weights[name].shape, axes[name]
            first_input = LINEAR_LAYOUTS[stored.layout]
            first_output = first_input + stored.inputs
            layers[name] = Target(
                stacked=shape[:first_input],
                inputs=shape[first_input:first_output],
                outputs=shape[first_output:],
                stacked_axes=names[:first_input],
                input_axes=names[first_input:first_output],
                output_axes=names[first_output:],
            )
    return layers


def adaptable(config: QwenConfig) -> dict[str, Target]:
    """Returns all weights that may have an adapter: the linear layers, and then the output layer.

    A critic has no output layer.
    """
    layers = linear_layers(config)
    if config.value_head:
        return layers
    output = Target(
        stacked=(),
        inputs=(config.hidden_size,),
        outputs=(config.vocab_size,),
        stacked_axes=(),
        input_axes=("embed",),
        output_axes=("vocab",),
    )
    return layers | {OUTPUT: output}


def targets(config: QwenConfig, adapter: AdapterConfig) -> dict[str, Target]:
    """Returns the weights that have an adapter. Raises UserError for a name that does not exist.

    A critic with the settings of a policy leaves out the output layer.
    """
    layers = linear_layers(config)
    # A flag may be repeated for every name, or given once with all names: q,v.
    text = ",".join(adapter.targets) or ALL
    # As with PEFT's all-linear, the output layer has an adapter only if it is named.
    names = [name for name in text.split(",") if name != OUTPUT]
    if names == [ALL]:
        names = [*layers]
    unknown = [name for name in names if name not in layers]
    if unknown:
        raise UserError(
            f"model.adapter.targets={text}: {config.model_type} has no linear "
            f"layer {unknown[0]}; it has {', '.join(layers)}, and {ALL} stands for all of "
            f"them; {OUTPUT} is the output layer"
        )
    if OUTPUT in text.split(","):
        names.append(OUTPUT)
    # Names are kept in the table's order, not in the order of the flag.
    return {name: target for name, target in adaptable(config).items() if name in names}


def map_linear(
    config: QwenConfig,
    params: Params,
    convert: Callable[[Any, Target], QuantizedWeight],
) -> Params:
    """Returns `params` with every weight of a linear layer converted.

    convert: (leaf of `params`, axes of the weight) -> converted weight. The leaf may have any type.
    """
    layers = dict(params["layers"])
    for name, target in linear_layers(config).items():
        layers[name] = convert(layers[name], target)
    return params | {"layers": layers}


def check(config: QwenConfig, adapter: AdapterConfig) -> None:
    """Raises UserError if the adapter does not fit the model.

    For example, a target is unknown, the rank is too high, or a target cannot have dropout.
    """
    if not adapter.rank:
        return
    for name, target in targets(config, adapter).items():
        # PEFT has no dropout on adapters of experts either.
        if adapter.dropout and (target.is_of_experts or name == OUTPUT):
            layer = "output layer" if name == OUTPUT else "experts"
            raise UserError(
                f"model.adapter.dropout={adapter.dropout}: the adapter of the {layer} ({name}) has "
                f"no dropout: remove {name} from model.adapter.targets, or set "
                "model.adapter.dropout=0"
            )
        if adapter.rank > target.highest_rank:
            raise UserError(
                f"model.adapter.rank={adapter.rank} is above {target.highest_rank}, the rank of "
                f"the weight {name} itself: set it to at most {target.highest_rank}, or to 0 to "
                "train the whole model"
            )


# -- parameters ------------------------------------------------------------------------------------


def init(config: QwenConfig, adapter: AdapterConfig, key: jax.Array) -> Params:
    """Returns a new adapter in fp32, with a head for a critic. B is 0.

    A is uniform between -1/sqrt(inputs) and 1/sqrt(inputs), as PEFT's Kaiming uniform with
    a = sqrt(5).
    """
    # The key of an A depends on its position among all linear layers, so the choice of targets does
    # not change any values.
    chosen = targets(config, adapter)
    rank = adapter.rank
    factors = {}
    for place, name in enumerate(adaptable(config)):
        if name in chosen:
            target = chosen[name]
            # Kaiming's bound is sqrt(6 / ((1 + a^2) inputs)), and a^2 is 5.
            bound = 1 / math.sqrt(math.prod(target.inputs))
            factors[name] = {
                "a": jax.random.uniform(
                    jax.random.fold_in(key, place),
                    (*target.stacked, *target.inputs, rank),
                    jnp.float32,
                    -bound,
                    bound,
                ),
                "b": jnp.zeros((*target.stacked, rank, *target.outputs), jnp.float32),
            }
    # The head of a critic is trained completely, because the base has none.
    head = {HEAD: qwen.init(config, key)[HEAD]} if config.value_head else {}
    return tree_of(factors) | head


def abstract(config: QwenConfig, adapter: AdapterConfig) -> Params:
    """Returns the tree of `init` with a ShapeDtypeStruct at every leaf. Allocates nothing."""
    return jax.eval_shape(lambda: init(config, adapter, jax.random.key(0)))


def logical_axes(config: QwenConfig, adapter: AdapterConfig) -> Params:
    """Returns the tree of `init` with a tuple of logical axis names at every leaf.

    A is split like the inputs of W, and B like the outputs. The rank is not split.
    """
    factors = {
        name: {
            "a": (*target.stacked_axes, *target.input_axes, "rank"),
            "b": (*target.stacked_axes, "rank", *target.output_axes),
        }
        for name, target in targets(config, adapter).items()
    }
    head = {HEAD: qwen.logical_axes(config)[HEAD]} if config.value_head else {}
    return tree_of(factors) | head


def num_params(config: QwenConfig, adapter: AdapterConfig) -> int:
    """Returns the number of trained parameters."""
    leaves = jax.tree.leaves(abstract(config, adapter))
    return sum(leaf.size for leaf in leaves)


def factors_of(adapter: Params) -> Params:
    """Returns the factors of every target: {"q": {"a", "b"}, ..., "lm_head": {"a", "b"}}."""
    output = {OUTPUT: adapter[OUTPUT]} if OUTPUT in adapter else {}
    return adapter["layers"] | output


def tree_of(factors: Params) -> Params:
    """Undoes `factors_of`."""
    layers = {name: pair for name, pair in factors.items() if name != OUTPUT}
    output = {OUTPUT: factors[OUTPUT]} if OUTPUT in factors else {}
    return {"layers": layers} | output


# -- base and adapter combined ---------------------------------------------------------------------


def all_finite(tree: PyTree) -> jax.Array:
    """Returns bool[]: whether every value of a tree of arrays is finite, such as of an adapter."""
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    return jnp.stack(finite).all()


def not_finite_message(dtype: DTypeLike) -> str:
    """Returns why an adapter is refused that is not finite in `dtype`, in which it is computed."""
    name = jnp.dtype(dtype).name
    return (
        f"the adapter has values that are not finite in {name} (at most {jnp.finfo(dtype).max:.2e} "
        "in size): its training run has failed; use an earlier checkpoint"
    )


def join(base: Params, adapter: Params, scale: float) -> Params:
    """Returns the parameters for `qwen.forward`: every adapted weight is an `AdaptedWeight`.

    Copies nothing: the result shares the arrays of `base` and `adapter`. The leaves may also be
    other values, such as shardings.
    """
    layers = dict(base["layers"])
    for name, factors in adapter["layers"].items():
        layers[name] = AdaptedWeight(layers[name], factors["a"], factors["b"], scale)
    outside_of_layers = {}
    if OUTPUT in adapter:
        outside_of_layers[output_adapter.NAME] = OutputAdapter(**adapter[OUTPUT], scale=scale)
    if HEAD in adapter:
        outside_of_layers[HEAD] = adapter[HEAD]
    return base | outside_of_layers | {"layers": layers}


def full_params(base: Params, trained: Params, scale: float) -> Params:
    """Returns the parameters of the complete model: `trained` itself, or joined with a base."""
    return join(base, trained, scale) if base else trained


def split(params: Params) -> tuple[Params, Params]:
    """Undoes `join`: returns the base, and the adapter ({"layers": {}} without one)."""
    base = {name: leaf for name, leaf in params.items() if name != output_adapter.NAME}
    factors = {name: {"a": leaf.a, "b": leaf.b} for name, leaf in adapted(params).items()}

    def weight_of(leaf: jax.Array | AdaptedWeight) -> FrozenWeight:
        return leaf.weight if isinstance(leaf, AdaptedWeight) else leaf

    return jax.tree.map(weight_of, base, is_leaf=is_adapted), tree_of(factors)


def adapted(params: Params) -> dict[str, AdaptedWeight | OutputAdapter]:
    """Returns the weights with an adapter in joined parameters, by target."""
    weights = {name: leaf for name, leaf in params["layers"].items() if is_adapted(leaf)}
    if output_adapter.NAME in params:
        weights[OUTPUT] = params[output_adapter.NAME]
    return weights


def trained_part(params: Params) -> Params:
    """Returns the adapter in joined parameters, or the parameters themselves without one."""
    _, adapter = split(params)
    return adapter if factors_of(adapter) else params


def scale_of(params: Params) -> float:
    """Returns the scale of the adapter in joined parameters."""
    # All adapted weights of one adapter have the same alpha / R.
    [scale] = {leaf.scale for leaf in adapted(params).values()}
    return scale


def check_merge(config: QwenConfig, names: Collection[str]) -> None:
    """Raises UserError if an adapter on targets of these names cannot be merged into the model.

    If the model ties its embedding to the output layer, the merged weight would not be the
    embedding's any more.
    """
    if OUTPUT in names and config.tie_word_embeddings:
        raise UserError(
            f"the adapter is on {OUTPUT}, which this model ties to its embedding, so it cannot be "
            "merged into the model: export the adapter itself (jzero export --adapter; without "
            "train.export_merged and hub.push), or remove this target"
        )


def with_merged_output(config: QwenConfig, params: Params) -> Params:
    """Returns joined parameters in which lm_head itself has the adapter of the output layer.

    Such parameters can be merged, and not computed with. Raises UserError as `check_merge` does.
    """
    if output_adapter.NAME not in params:
        return params
    check_merge(config, [OUTPUT])
    merged = {name: leaf for name, leaf in params.items() if name != output_adapter.NAME}
    adapter = params[output_adapter.NAME]
    merged[OUTPUT] = AdaptedWeight(params[OUTPUT], adapter.a, adapter.b, adapter.scale)
    return merged


def merge(config: QwenConfig, base: Params, adapter: Params, scale: float) -> Params:
    """Returns the fp32 parameters W + scale * A B of the model without an adapter.

    An int8 W is dequantized first. Raises UserError as `with_merged_output` does.
    """
    joined = with_merged_output(config, join(base, adapter, scale))
    num_stacked = {name: len(target.stacked) for name, target in adaptable(config).items()}

    def merged(path: tuple, leaf: LinearWeight, like: jax.ShapeDtypeStruct) -> jax.Array:
        if isinstance(leaf, AdaptedWeight):
            return leaf.merged(num_stacked[path[-1].key]).reshape(like.shape)
        if isinstance(leaf, QuantizedWeight):
            return dequantize(leaf, jnp.float32).reshape(like.shape)
        return leaf.astype(jnp.float32).reshape(like.shape)

    def is_leaf(node: object) -> bool:
        return is_adapted(node) or is_quantized(node)

    like = qwen.abstract(config)
    # `like` has the shapes of the model's parameters, to which merged weights are reshaped.
    return jax.tree_util.tree_map_with_path(merged, joined, like, is_leaf=is_leaf)


def is_adapted(leaf: object) -> bool:
    """Returns whether a node of a tree of parameters is a weight with an adapter."""
    return isinstance(leaf, AdaptedWeight)
