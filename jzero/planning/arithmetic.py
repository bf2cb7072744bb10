"""The memory of every phase of a run, by arithmetic alone: nothing is compiled or downloaded.

    run = build(settings, described("v5e:2x4"))     # the run's own shapes and shardings
    phases = bytes_of_phases(run)                   # phase -> component -> bytes on a device

What lies on a device between programs is exact: weights, optimizer state, pages of keys and
values, packed batches. What a program takes while it runs is a formula of the same shapes:
gradients, casts, activations that the backward pass keeps, a chunk of logits, the work of a layer.
The formulas are meant to be a little above what XLA takes, and tests compare them with compiled
programs. docs/scaling.md has the errors.

A component is one term of a sum: what a run adds (an adapter, a quantized base) is one term more.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jzero.distributed.mesh import context_shards, row_shards, weight_shards
from jzero.model import adapters
from jzero.model.qwen import QwenConfig
from jzero.planning.compiling import device_bytes
from jzero.planning.hybrids import delta_work_bytes, mean_mixer_numbers
from jzero.planning.memory import parts_on_device
from jzero.planning.planned_run import PlannedRun, PlannedTeacher, prefix_bytes_per_token
from jzero.rollout.engine import Engine
from jzero.rollout.prefill import prefill_shapes
from jzero.training.learner import Learner
from jzero.types import RowLayout, State

FP32 = 4  # bytes

# phase -> component -> bytes on a device
PhaseBytes = dict[str, dict[str, float]]


def bytes_of_phases(run: PlannedRun) -> PhaseBytes:
    """Returns the bytes on one device at the peak of every phase of the run, by component."""
    # Tracing a model takes a tenth of a second: every learner describes its state only once.
    policy, critic = run.trainer.policy, run.trainer.critic
    learners = [(policy, policy.abstract_state())]
    if critic is not None:
        learners.append((critic, critic.abstract_state()))

    phases: PhaseBytes = {}
    if run.sampling is not None:
        phases["publish"] = parts_on_device(run, "publish") | {
            "decoder weights": run.parts["decoder weights"],
            "copies of publish": _publish_bytes(run, *learners[0]),
        }
        phases["rollout"] = parts_on_device(run, "rollout") | {
            "work of sampling": max(_prefill_bytes(run.engine), _decode_bytes(run.engine))
            + _dequantized_bytes(policy)
        }
    if run.num_scoring_passes:
        work = [_score_bytes(run, learner, state) for learner, state in learners]
        if run.teacher is not None:
            work.append(_teacher_bytes(run.teacher, policy, learners[0][1]))
        phases["score"] = parts_on_device(run, "score") | {"work of scoring": max(work)}
    updates = [_update_components(run, learner, state) for learner, state in learners]
    phases["update"] = parts_on_device(run, "update") | max(updates, key=_total)
    return phases


def totals(phases: PhaseBytes) -> dict[str, float]:
    """Returns the bytes on one device at the peak of every phase."""
    return {name: _total(components) for name, components in phases.items()}


def needed_bytes(run: PlannedRun) -> float:
    """Returns the bytes on one device at the peak of the run."""
    return max(totals(bytes_of_phases(run)).values())


def _total(components: dict[str, float]) -> float:
    return sum(components.values())


# -- publish ---------------------------------------------------------------------------------------


def _publish_bytes(run: PlannedRun, policy: Learner, state: State) -> float:
    """Returns what `publish` adds to the weights that it reads and writes.

    It copies the table of the vocabulary. Several devices hold a cast of their own shards as well,
    from which they gather.
    """
    model = run.engine.model
    tensor = run.mesh.shape["tensor"]
    if policy.adapter.rank and run.mesh.size == tensor:
        return 0.0  # the decoder reads the trainer's own base
    table = model.vocab_size * model.hidden_size * run.engine.dtype.itemsize / tensor
    if weight_shards(run.mesh) * tensor == 1:
        return table
    return table + _cast_bytes(policy, state)


# -- rollout ---------------------------------------------------------------------------------------


def _prefill_bytes(engine: Engine) -> float:
    """Returns the most that a prefill takes: its keys and values, one layer, the first logits."""
    model, tensor = engine.model, engine.mesh.shape["tensor"]
    itemsize = engine.dtype.itemsize
    # XLA holds the keys and values of all layers three times: those that the scan over layers
    # carries, those with the new layer, and the result. One of them is whole, not split by heads.
    local = prefix_bytes_per_token(engine)
    whole = local * tensor if engine.program_settings.kv_axis else local
    sizes = []
    for rows, width in prefill_shapes(engine):
        tokens = rows * width
        layer = tokens * _layer_numbers(model, tensor) * itemsize
        logits = rows * engine.settings.group_size * _logits_numbers(engine) * FP32
        sizes.append(tokens * (2 * local + whole) + layer + logits)
    return max(*sizes, _chunk_bytes(engine))


def _chunk_bytes(engine: Engine) -> float:
    """Returns what a chunk of a long sequence takes: its own tokens, and those before it.

    In one layer at a time attention reads the keys and values before the chunk.
    """
    if engine.longest_prefill == engine.max_sequence_tokens:
        return 0.0
    model, tensor = engine.model, engine.mesh.shape["tensor"]
    layer = engine.chunk_width * _layer_numbers(model, tensor)
    attended = engine.max_sequence_tokens * 4 * model.num_key_value_heads * model.head_dim
    return (layer + attended) * engine.dtype.itemsize


def _decode_bytes(engine: Engine) -> float:
    """Returns what decoding takes beside weights and pages: logits of all slots, and one layer."""
    layer = _layer_numbers(engine.model, engine.mesh.shape["tensor"]) * engine.dtype.itemsize
    return engine.slots_per_shard * (2 * _logits_numbers(engine) * FP32 + layer)


def _logits_numbers(engine: Engine) -> float:
    """Returns how many logits of one slot exist on a device at a time."""
    settings = engine.program_settings
    part = settings.vocabulary_parts[0]
    split = settings.tensor if settings.logits_axis else 1
    return (part.stop - part.start) / split


# -- score and update ------------------------------------------------------------------------------


def _update_components(run: PlannedRun, learner: Learner, state: State) -> dict[str, float]:
    """Returns what one optimizer step takes beside the state and the batches, at its peak.

    The summed gradient is there all the time, and so are the layers in the type of the computation,
    which are cast before the scan. The peak is in the backward pass: at the logits, where it
    begins, or in the layers, where the gradient of the microbatch grows.
    """
    gradient = _trained_parameters(learner, state) * FP32
    row_tokens = list(_row_tokens(run))
    always = {
        "gradients": gradient,
        "weights in the type of computation": _cast_bytes(learner, state),
        "activations": max(_kept_bytes(learner, tokens) for tokens in row_tokens),
    }
    logits = always | {"logits": max(_logits_bytes(learner, tokens) for tokens in row_tokens)}
    layers = always | {
        "gradients": 2 * gradient,
        "work of a layer": max(_layer_work(learner, state, tokens) for tokens in row_tokens),
        "gradient of the embedding": max(_embedding_bytes(learner, n) for n in row_tokens),
    }
    return max(layers, logits, key=_total)


def _score_bytes(run: PlannedRun, learner: Learner, state: State) -> float:
    """Returns what scoring takes: a forward pass, which keeps nothing."""
    work = [
        _layer_work(learner, state, tokens) + _logits_bytes(learner, tokens)
        for tokens in _row_tokens(run)
    ]
    return _cast_bytes(learner, state) + max(work)


def _teacher_bytes(teacher: PlannedTeacher, policy: Learner, state: State) -> float:
    """Returns what scoring with a teacher takes: its work, and rows of its own where it has some.

    The policy as its own teacher has fp32 weights, which are cast. `state` is the policy's.
    """
    learner = teacher.learner
    weights = replace(state, params=teacher.weights)
    work = []
    for layout, rows, _ in zip(*teacher.shapes, strict=True):
        tokens = tokens_of_device(learner.mesh, rows, layout)
        work.append(_layer_work(learner, weights, tokens) + _logits_bytes(learner, tokens))
    cast = _cast_bytes(policy, state) if learner is policy else 0.0
    return cast + max(work) + device_bytes(teacher.own_rows)


def _row_tokens(run: PlannedRun) -> Iterator[int]:
    """Yields the tokens of a microbatch on one device, for every layout."""
    for rows, layout in zip(run.trainer.rows, run.trainer.layouts, strict=True):
        yield tokens_of_device(run.mesh, rows, layout)


def tokens_of_device(mesh: Mesh, rows: int, layout: RowLayout) -> int:
    """Returns the tokens of a microbatch of `rows` on one device."""
    return rows // row_shards(mesh) * math.ceil(layout.tokens / context_shards(mesh))


def _trained_parameters(learner: Learner, state: State) -> float:
    """Returns the parameters of one device that are trained: those that Adam has moments of."""
    return device_bytes(state.opt_state) / (FP32 + jnp.dtype(learner.settings.mu_dtype).itemsize)


def _cast_bytes(learner: Learner, state: State) -> float:
    """Returns the bytes on a device of the fp32 weights in the type of the computation."""
    itemsize = jnp.dtype(learner.compute.dtype).itemsize
    if itemsize == FP32:
        return 0.0
    masters = [leaf for leaf in jax.tree.leaves(state.params) if leaf.dtype == jnp.float32]
    return device_bytes(masters) * itemsize / FP32


def _embedding_bytes(learner: Learner, tokens: int) -> float:
    """Returns the bytes of what the embedding's gradient is made of, where fsdp splits it.

    Every device gathers the gradients of all tokens. Where rows are split over data as well, it
    adds them up for the whole table.
    """
    model, mesh = learner.model, learner.mesh
    if weight_shards(mesh) == 1 or learner.adapter.rank:
        return 0.0
    itemsize = jnp.dtype(learner.compute.dtype).itemsize
    gathered = weight_shards(mesh) * tokens * model.hidden_size * itemsize
    if mesh.shape["data"] == 1 or mesh.shape["tensor"] > 1:
        return gathered
    return gathered + model.vocab_size * model.hidden_size * FP32


def _kept_bytes(learner: Learner, tokens: int) -> float:
    """Returns the bytes of what the backward pass keeps of all layers, by model.remat."""
    model, tensor = learner.model, learner.mesh.shape["tensor"]
    heads = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim / tensor
    if model.delta_net is not None:
        heads = mean_mixer_numbers(model)
    mlp = model.mlp_width_of_a_token / tensor
    inputs = model.hidden_size
    if model.num_experts:  # every device that shares the experts has rows for all of them
        mlp *= tensor
    products = heads + 2 * mlp + (2 + model.num_experts_per_tok) * model.hidden_size
    # Norms, rotated heads, the attention's output and the gate's product, some of them in fp32.
    others = 8 * model.hidden_size + 3 * heads + 3 * mlp
    kept = {"full": inputs, "dots": inputs + products, "none": inputs + products + others}
    itemsize = jnp.dtype(learner.compute.dtype).itemsize
    # The product of every input with the adapter's first factor is kept in any case.
    numbers = kept[learner.compute.remat] + learner.adapter.rank * _adapted_products(learner)
    return model.num_hidden_layers * tokens * numbers * itemsize


def _adapted_products(learner: Learner) -> int:
    """Returns the products with an adapter's first factor that a layer computes for a token."""
    if not learner.adapter.rank:
        return 0
    targets = adapters.targets(learner.model, learner.adapter).values()
    num_chosen = learner.model.num_experts_per_tok
    return sum(num_chosen if target.is_of_experts else 1 for target in targets)


def _layer_work(learner: Learner, state: State, tokens: int) -> float:
    """Returns what the forward and backward pass of one layer takes.

    Where fsdp splits the weights, a layer's weights are gathered, and its gradient is whole before
    it is summed over the devices.
    """
    model, mesh = learner.model, learner.mesh
    itemsize = jnp.dtype(learner.compute.dtype).itemsize
    activations = tokens * _layer_numbers(model, mesh.shape["tensor"]) * itemsize
    activations += _dequantized_bytes(learner) + delta_work_bytes(model, tokens)
    shards = weight_shards(mesh)
    if shards == 1:
        return activations
    if learner.adapter.rank:  # a frozen weight has no gradient
        layers = device_bytes(learner.abstract_base()["layers"])
        return activations + layers * shards / model.num_hidden_layers
    num_weights = device_bytes(state.params["layers"]) / FP32 * shards
    return activations + 2 * itemsize * num_weights / model.num_hidden_layers


def _dequantized_bytes(learner: Learner) -> float:
    """Returns the bytes of a layer's weights in the type of the computation, if they are in 8 bits.

    XLA converts the integers of a weight before it multiplies by them, and the weights of a layer
    need not follow each other.
    """
    if not (learner.adapter.rank and learner.compute.is_base_quantized):
        return 0.0
    layers = adapters.linear_layers(learner.model).values()
    weights = sum(math.prod(layer.stacked[1:] + layer.inputs + layer.outputs) for layer in layers)
    itemsize = jnp.dtype(learner.compute.dtype).itemsize
    return weights * itemsize / learner.mesh.shape["tensor"]


def _layer_numbers(model: QwenConfig, tensor: int) -> float:
    """Returns the numbers of one token that exist at a time in the forward pass of a layer."""
    heads = (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    if model.delta_net is not None:
        heads = max(heads, model.delta_net.num_channels)
    mlp = 2 * model.mlp_width_of_a_token
    # Sorted by expert, a token has a row for every one of its experts, before and after them. Every
    # device that shares the experts holds the rows of all.
    rows = 2 * model.num_experts_per_tok * model.hidden_size
    if model.num_experts:
        mlp *= tensor
    return 2 * model.hidden_size + rows + (2 * heads + mlp) / tensor


def _logits_bytes(learner: Learner, tokens: int) -> float:
    """Returns the bytes of a chunk of logits, of its gradient, and of the gradient of the head."""
    model, mesh = learner.model, learner.mesh
    if model.value_head:
        return 0.0
    splits = weight_shards(mesh) * mesh.shape["tensor"]
    columns = model.vocab_size / (splits if model.vocab_size % splits == 0 else 1)
    itemsize = jnp.dtype(learner.compute.dtype).itemsize
    chunk = min(learner.compute.logit_chunk, tokens)
    gradient_of_head = 0 if learner.adapter.rank else model.hidden_size * itemsize
    return columns * (2 * chunk * FP32 + gradient_of_head)
