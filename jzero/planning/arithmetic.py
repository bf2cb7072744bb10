"""Estimates the device memory of every phase of a run by arithmetic; nothing is compiled.

    run = build(settings, described_devices("v5e:2x4"))    # the run's own shapes and shardings
    phases = bytes_of_phases(run)    # phase -> component -> bytes on a device

Arrays that stay on a device between programs are counted exactly: weights, optimizer state, KV
cache pages, packed batches. The temporaries of a program (gradients, casts, activations saved for
the backward pass, a chunk of logits, the work of one layer) are formulas over the same shapes. The
formulas are meant to lie a little above XLA's allocation, and tests compare them with compiled
programs. docs/scale.md has the errors.

A component is one term of a sum. A feature that needs memory (an adapter, a quantized base) adds
one term.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jzero.config import ModelConfig
from jzero.decoder.engine import Engine
from jzero.decoder.prefill import prefill_shapes
from jzero.hosts.platform import platform_of
from jzero.model import adapters
from jzero.model.qwen import QwenConfig
from jzero.planning.compiling import device_bytes
from jzero.planning.hybrids import delta_work_bytes, mean_mixer_numbers
from jzero.planning.memory import parts_on_device
from jzero.planning.planned_run import (
    PlannedRun,
    PlannedTeacher,
    prefix_bytes,
    prefix_bytes_per_token,
)
from jzero.sharding.mesh import context_shards, row_shards, weight_shards
from jzero.sharding.publish import abstract_decoder_weights
from jzero.sharding.side_by_side import weight_layout
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
        # Prefills and decode steps alternate, so the larger of the two counts.
        phases["rollout"] = parts_on_device(run, "rollout") | {
            "work of sampling": sampling_work_bytes(run.engine, policy)
        }
    if run.num_scoring_passes:
        # Policy, critic and teacher score one after the other, so the largest counts.
        work = [_score_bytes(run, learner, state) for learner, state in learners]
        if run.teacher is not None:
            work.append(_teacher_bytes(run.teacher, policy, learners[0][1]))
        phases["score"] = parts_on_device(run, "score") | {"work of scoring": max(work)}
    # Policy and critic are updated one after the other, too.
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


def is_on_gpu(mesh: Mesh) -> bool:
    """Returns whether XLA holds the outputs of products in fp32 where it adds others to them."""
    return platform_of(mesh) == "gpu"


# -- publish ---------------------------------------------------------------------------------------


def _publish_bytes(run: PlannedRun, policy: Learner, state: State) -> float:
    """Returns the bytes that `publish` needs besides the weights that it reads and writes."""
    model = run.engine.model
    tensor = run.mesh.shape["tensor"]
    # The program copies the embedding table. On several devices, each one also holds a cast of its
    # own shards, from which the others gather.
    if policy.adapter.rank and run.mesh.size == tensor:
        return 0.0  # the decoder reads the trainer's base, without a copy
    table = model.vocab_size * model.hidden_size * run.engine.dtype.itemsize / tensor
    if weight_shards(run.mesh) * tensor == 1:
        return table
    return table + _cast_bytes(policy, state)


# -- rollout ---------------------------------------------------------------------------------------


def sampling_bytes(compute: ModelConfig, engine: Engine) -> float:
    """Returns the bytes on a device of a decoder without training, excluding its KV cache."""
    model = engine.model
    layout = weight_layout(model, compute, engine.mesh)
    rollout = engine.settings
    precision = rollout.weights if rollout.quantizes_weights else compute.base
    weights = abstract_decoder_weights(model, engine.mesh, engine.dtype, precision, layout)
    work = max(_prefill_bytes(engine), _decode_bytes(engine))
    return device_bytes(weights) + prefix_bytes(engine) + work


def sampling_work_bytes(engine: Engine, policy: Learner) -> float:
    """Returns the temporary bytes of sampling with the weights of a learner."""
    return max(_prefill_bytes(engine), _decode_bytes(engine)) + _dequantized_bytes(policy)


def _prefill_bytes(engine: Engine) -> float:
    """Returns the peak bytes of a prefill: its keys and values, one layer, and the first logits."""
    model, tensor = engine.model, engine.mesh.shape["tensor"]
    # XLA holds the keys and values of all layers three times: the carry of the scan over layers,
    # the carry with the new layer, and the result. One of the three is not split by heads.
    local = prefix_bytes_per_token(engine)
    unsplit = local * tensor if engine.program_settings.kv_axis else local
    sizes = []
    for rows, width in prefill_shapes(engine):
        tokens = rows * width
        layer = tokens * _values_per_token(model, tensor) * _product_itemsize(engine)
        # Each member of a group samples its first token from these logits.
        logits = rows * engine.settings.group_size * _num_logits(engine) * FP32
        sizes.append(tokens * (2 * local + unsplit) + layer + logits)
    return max(*sizes, _chunk_bytes(engine))


def _chunk_bytes(engine: Engine) -> float:
    """Returns the bytes of prefilling one chunk of a long sequence (chunked prefill)."""
    # The longest sequence fits into one prefill, so prefills are not chunked.
    if engine.longest_prefill() == engine.max_sequence_tokens:
        return 0.0
    # The chunk attends to the keys and values before it, in one layer at a time.
    model, tensor = engine.model, engine.mesh.shape["tensor"]
    layer = engine.chunk_width * _values_per_token(model, tensor) * _product_itemsize(engine)
    attended = engine.max_sequence_tokens * 4 * model.num_key_value_heads * model.head_dim
    return layer + attended * engine.dtype.itemsize


def _product_itemsize(engine: Engine) -> int:
    """Returns the bytes of a value that a product of a prefill has computed."""
    return FP32 if is_on_gpu(engine.mesh) else engine.dtype.itemsize


def _decode_bytes(engine: Engine) -> float:
    """Returns the temporary bytes of a decode step: the logits of all slots, and one layer."""
    layer = _values_per_token(engine.model, engine.mesh.shape["tensor"]) * engine.dtype.itemsize
    return engine.slots_per_shard * (2 * _num_logits(engine) * FP32 + layer)


def _num_logits(engine: Engine) -> float:
    """Returns how many logits of one slot a device holds at a time."""
    settings = engine.program_settings
    part = settings.vocabulary_parts[0]
    split = settings.tensor if settings.logits_axis else 1
    return (part.stop - part.start) / split


# -- score and update ------------------------------------------------------------------------------


def _update_components(run: PlannedRun, learner: Learner, state: State) -> dict[str, float]:
    """Returns the bytes at the peak of an optimizer step, besides the state and the batches.

    The accumulated gradient and the layers cast to the compute dtype (before the scan over layers)
    are there throughout. The peak is in the backward pass: either at the logits, where it starts,
    or in the layers, where the gradient of the microbatch grows.
    """
    # Gradients are accumulated in fp32, whatever the compute dtype.
    gradient = _trained_parameters(learner, state) * FP32
    row_tokens = list(_row_tokens(run))
    always = {
        "gradients": gradient,
        "weights in the type of computation": _cast_bytes(learner, state),
        "activations": max(_activation_bytes(learner, tokens) for tokens in row_tokens),
    }
    logits = always | {"logits": max(_logits_bytes(learner, tokens) for tokens in row_tokens)}
    # Within the layers, the gradient of the microbatch exists next to the accumulated gradient.
    layers = always | {
        "gradients": gradient + _microbatch_gradient_bytes(learner, state),
        "work of a layer": max(_layer_gradient_bytes(learner, state, n) for n in row_tokens),
        "gradient of the embedding": max(_embedding_bytes(learner, n) for n in row_tokens),
    }
    return max(layers, logits, key=_total)


def adapter_update_bytes(learner: Learner, tokens: int) -> float:
    """Returns the temporary bytes of a gradient of an adapter, for a microbatch of `tokens`.

    tokens: of one device. The accumulated gradient is a result, next to that of the microbatch.
    """
    assert learner.adapter.rank, "only an adapter is trained"
    state = learner.abstract_state()
    gradient = _trained_parameters(learner, state) * FP32
    layers = 2 * gradient + _layer_gradient_bytes(learner, state, tokens)
    logits = gradient + _logits_bytes(learner, tokens)
    return gradient + _activation_bytes(learner, tokens) + max(layers, logits)


def _score_bytes(run: PlannedRun, learner: Learner, state: State) -> float:
    """Returns the bytes of a scoring pass: a forward pass that saves no activations."""
    work = [
        _layer_work(learner, state, tokens) + _logits_bytes(learner, tokens)
        for tokens in _row_tokens(run)
    ]
    return _cast_bytes(learner, state) + max(work)


def _teacher_bytes(teacher: PlannedTeacher, policy: Learner, state: State) -> float:
    """Returns the bytes of scoring with a teacher: its work, and its own rows if it has any.

    `state` is the policy's state.
    """
    learner = teacher.learner
    weights = replace(state, params=teacher.weights)
    work = []
    for layout, rows, _ in zip(*teacher.shapes, strict=True):
        tokens = tokens_of_device(learner.mesh, rows, layout)
        work.append(_layer_work(learner, weights, tokens) + _logits_bytes(learner, tokens))
    # A policy that is its own teacher has fp32 weights, which are cast.
    cast = _cast_bytes(policy, state) if learner is policy else 0.0
    return cast + max(work) + device_bytes(teacher.own_rows)


def _row_tokens(run: PlannedRun) -> Iterator[int]:
    """Yields the tokens of a microbatch on one device, for each layout."""
    for rows, layout in zip(run.trainer.rows, run.trainer.layouts, strict=True):
        yield tokens_of_device(run.mesh, rows, layout)


def tokens_of_device(mesh: Mesh, rows: int, layout: RowLayout) -> int:
    """Returns the tokens of a microbatch of `rows` on one device."""
    # Rows are split over row shards, and the tokens of a row over the context axis.
    return rows // row_shards(mesh) * math.ceil(layout.tokens / context_shards(mesh))


def _trained_parameters(learner: Learner, state: State) -> float:
    """Returns the number of trained parameters on one device, from the bytes of Adam's moments."""
    # Adam has two moments for each trained parameter.
    moments = (learner.settings.mu_dtype, learner.settings.nu_dtype)
    return device_bytes(state.opt_state) / sum(jnp.dtype(dtype).itemsize for dtype in moments)


def _microbatch_gradient_bytes(learner: Learner, state: State) -> float:
    """Returns the bytes on a device of the gradient of one microbatch."""
    gradient = _trained_parameters(learner, state) * FP32
    if weight_shards(learner.mesh) > 1 or learner.adapter.rank:
        return gradient
    # A device with all weights of the layers has their gradient in the type of computation. The
    # plans that this was compared with are in lab/memory.md.
    itemsize = jnp.dtype(learner.compute.dtype).itemsize
    return gradient - device_bytes(state.params["layers"]) * (1 - itemsize / FP32)


def _cast_bytes(learner: Learner, state: State) -> float:
    """Returns the bytes on a device of the fp32 weights cast to the compute dtype."""
    itemsize = jnp.dtype(learner.compute.dtype).itemsize
    if itemsize == FP32:
        return 0.0
    masters = [leaf for leaf in jax.tree.leaves(state.params) if leaf.dtype == jnp.float32]
    return device_bytes(masters) * itemsize / FP32


def _embedding_bytes(learner: Learner, tokens: int) -> float:
    """Returns the bytes that the embedding's gradient needs where fsdp splits the table."""
    model, mesh = learner.model, learner.mesh
    if weight_shards(mesh) == 1 or learner.adapter.rank:
        return 0.0
    itemsize = jnp.dtype(learner.compute.dtype).itemsize
    # Every device gathers the gradients of all tokens. If rows are also split over "data", the
    # device sums them into a gradient of the full table.
    gathered = weight_shards(mesh) * tokens * model.hidden_size * itemsize
    if mesh.shape["data"] == 1 or mesh.shape["tensor"] > 1:
        return gathered
    return gathered + model.vocab_size * model.hidden_size * FP32


def _activation_bytes(learner: Learner, tokens: int) -> float:
    """Returns the bytes of the activations that model.remat saves for the backward pass."""
    model, tensor = learner.model, learner.mesh.shape["tensor"]
    heads = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim / tensor
    if model.delta_net is not None:
        # A layer of a hybrid has either attention or a gated delta net.
        heads = mean_mixer_numbers(model)
    mlp = model.mlp_width_of_a_token / tensor
    inputs = model.hidden_size
    if model.num_experts:  # every device along "tensor" has the rows of all experts
        mlp *= tensor
    products = heads + 2 * mlp + (2 + model.num_experts_per_tok) * model.hidden_size
    # Norms, rotated heads, the attention output and the gated product, some of them in fp32.
    others = 8 * model.hidden_size + 3 * heads + 3 * mlp
    saved = {"full": inputs, "dots": inputs + products, "none": inputs + products + others}
    itemsize = jnp.dtype(learner.compute.dtype).itemsize
    # The product of each input with the adapter's first factor is saved under every setting.
    numbers = saved[learner.compute.remat] + learner.adapter.rank * _adapted_products(learner)
    return model.num_hidden_layers * tokens * numbers * itemsize


def _adapted_products(learner: Learner) -> int:
    """Returns how many products with an adapter's first factor a layer computes per token."""
    if not learner.adapter.rank:
        return 0
    targets = [
        target
        for name, target in adapters.targets(learner.model, learner.adapter).items()
        if name != adapters.OUTPUT  # outside of the layers
    ]
    num_chosen = learner.model.num_experts_per_tok
    return sum(num_chosen if target.is_of_experts else 1 for target in targets)


def _layer_gradient_bytes(learner: Learner, state: State, tokens: int) -> float:
    """Returns the temporary bytes of the backward pass of one layer, with its recomputation."""
    work = _layer_work(learner, state, tokens)
    if not learner.adapter.rank:
        return work
    # XLA computes the gradients of an adapter at the end of a layer, and holds what they multiply
    # until then. The numbers are fitted to the compiled programs in lab/memory.md. On GPUs, XLA
    # holds the outputs of products in fp32, and for a hybrid those of two layers at a time.
    model, tensor = learner.model, learner.mesh.shape["tensor"]
    itemsize = jnp.dtype(learner.compute.dtype).itemsize
    is_gpu = is_on_gpu(learner.mesh)
    mlp = 8 * model.mlp_width_of_a_token * (FP32 if is_gpu else itemsize)
    if not model.num_experts:  # every device along "tensor" has the rows of all experts
        mlp /= tensor
    layers = 2 if is_gpu and model.delta_net is not None else 1
    held = layers * tokens * (mlp + 7 * model.hidden_size * itemsize)
    return work + max(held - _activations_of_a_layer(learner, tokens), 0.0)


def _layer_work(learner: Learner, state: State, tokens: int) -> float:
    """Returns the temporary bytes of one layer, with its backward pass if all weights are trained.

    `_layer_gradient_bytes` adds what the backward pass of an adapter holds.
    """
    model, mesh = learner.model, learner.mesh
    activations = _activations_of_a_layer(learner, tokens)
    activations += _dequantized_bytes(learner) + delta_work_bytes(model, tokens)
    shards = weight_shards(mesh)
    if shards == 1:
        return activations
    # fsdp gathers the layer's weights, and its gradient is unsharded until it is summed over
    # devices.
    if learner.adapter.rank:  # a frozen weight has no gradient
        layers = device_bytes(learner.abstract_base()["layers"])
        return activations + layers * shards / model.num_hidden_layers
    # Both the gathered weights and their gradient have the compute dtype.
    itemsize = jnp.dtype(learner.compute.dtype).itemsize
    num_weights = device_bytes(state.params["layers"]) / FP32 * shards
    return activations + 2 * itemsize * num_weights / model.num_hidden_layers


def _activations_of_a_layer(learner: Learner, tokens: int) -> float:
    """Returns the bytes of the values of a layer's forward pass that exist at a time."""
    itemsize = jnp.dtype(learner.compute.dtype).itemsize
    return tokens * _values_per_token(learner.model, learner.mesh.shape["tensor"]) * itemsize


def _dequantized_bytes(learner: Learner) -> float:
    """Returns the bytes of a layer's weights as dequantized values; 0 without an int8 base."""
    if not (learner.adapter.rank and learner.compute.is_base_quantized):
        return 0.0
    # XLA converts the integers of a weight before the product, and may convert all weights of a
    # layer at the same time.
    layers = adapters.linear_layers(learner.model).values()
    weights = sum(math.prod(layer.stacked[1:] + layer.inputs + layer.outputs) for layer in layers)
    itemsize = jnp.dtype(learner.compute.dtype).itemsize
    return weights * itemsize / learner.mesh.shape["tensor"]


def _values_per_token(model: QwenConfig, tensor: int) -> float:
    """Returns how many values per token exist at a time in the forward pass of a layer."""
    heads = (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    if model.delta_net is not None:
        heads = max(heads, model.delta_net.num_channels)
    mlp = 2 * model.mlp_width_of_a_token
    # Sorted by expert, a token has one row per chosen expert, before and after the experts. Every
    # device along "tensor" has the rows of all experts.
    rows = 2 * model.num_experts_per_tok * model.hidden_size
    if model.num_experts:
        mlp *= tensor
    return 2 * model.hidden_size + rows + (2 * heads + mlp) / tensor


def _logits_bytes(learner: Learner, tokens: int) -> float:
    """Returns the bytes of a chunk of logits, of its gradient, and of the gradient of the head."""
    model, mesh = learner.model, learner.mesh
    # A critic has a value head and no logits.
    if model.value_head:
        return 0.0
    splits = weight_shards(mesh) * mesh.shape["tensor"]
    # The vocabulary is only split if its size divides evenly.
    columns = model.vocab_size / (splits if model.vocab_size % splits == 0 else 1)
    itemsize = jnp.dtype(learner.compute.dtype).itemsize
    chunk = min(learner.compute.logit_chunk, tokens)
    gradient_of_head = 0 if learner.adapter.rank else model.hidden_size * itemsize
    # A loop over chunks on GPUs has a third array of the size of a chunk.
    arrays = 3 if is_on_gpu(mesh) and tokens > chunk else 2
    return columns * (arrays * chunk * FP32 + gradient_of_head)
