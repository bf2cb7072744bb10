"""Estimates the time of a step at the peak rates of its devices (a roofline), counted by hand.

XLA's own cost analysis cannot be used, because it counts the body of a loop once. Interconnect time
is not counted.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from jzero.decoder.prefill import PREFILL_TOKENS
from jzero.model import qwen
from jzero.model.qwen import QwenConfig
from jzero.planning.chips import Chip
from jzero.planning.planned_run import PlannedRun, kv_bytes_per_token
from jzero.types import RowLayout

FORWARD_AND_BACKWARD = 3  # in forward passes: a backward pass costs two
RECOMPUTATION = 1  # one more forward pass with model.remat=full


@dataclass(frozen=True)
class PhaseCost:
    """The work of one phase of a step on one device."""

    flops: float
    bytes: float  # read from and written to HBM
    seconds: float  # at the peak of FLOPs or of bandwidth, whichever takes longer


def matmul_flops_per_token(model: QwenConfig) -> int:
    """Returns the FLOPs of all matrix products for one token in a forward pass: 2 per parameter.

    An embedding that is not tied to the head counts as 0, because a lookup takes no FLOPs. Only the
    experts that one token is routed to count.
    """
    table = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    idle_experts = model.num_experts - model.num_experts_per_tok
    expert = 3 * model.hidden_size * model.moe_intermediate_size
    idle = model.num_hidden_layers * idle_experts * expert
    return 2 * (qwen.num_params(model) - table - idle)


def attention_flops_per_pair(model: QwenConfig) -> int:
    """Returns the FLOPs of one query with one key and value, in all layers of a forward pass."""
    # A product with the key and one with the value, each of 2 * head_dim FLOPs for every head.
    return 4 * len(model.attention_layers) * model.num_attention_heads * model.head_dim


def roofline(run: PlannedRun, chip: Chip | None = None) -> dict[str, PhaseCost]:
    """Returns the cost of every phase of a step with responses of maximum length.

    chip: the limits of a device; None: as the table of chips has them.

    This is the worst case: all rows have the first layout, the longest. `update_by_layout` returns
    the cost of the update for shorter responses. A fine-tuning step has one phase, and its examples
    fill their rows.
    """
    if chip is not None:
        run = replace(run, given_chip=chip)
    sizes = run.workload
    if sizes.is_fine_tuning:
        return {"update": _fine_tuning_cost(run)}
    engine = run.engine
    prompt, response = sizes.prompt_tokens, sizes.response_tokens
    num_rollouts = sizes.num_prompts * sizes.group_size
    num_prompt_tokens = sizes.num_prompts * prompt
    matmul = matmul_flops_per_token(engine.model)

    # Bytes on one device. Each call of a program reads the weights once.
    decoder_weights = run.parts["decoder weights"]
    num_prefills = -(-num_prompt_tokens // PREFILL_TOKENS)
    # Rollouts beyond the slots of all hosts are decoded in further rounds.
    num_rounds = -(-num_rollouts // (engine.max_concurrent_decodes * run.num_decoders))
    num_decode_steps = response * num_rounds
    # On average over a response, half of it is in the KV cache.
    cache = engine.slots_per_shard * (prompt + response / 2) * kv_bytes_per_token(engine)
    num_calls = run.trainer.microbatches[0] * run.trainer.updates.minibatches

    flops_and_bytes = {
        "prefill": (num_prompt_tokens * matmul, decoder_weights * num_prefills),
        "decode": (
            num_rollouts * _response_flops(engine.model, prompt, response),
            num_decode_steps * (decoder_weights + cache),
        ),
        "score": (
            run.num_scoring_passes * _forward_flops(run, run.trainer.layouts[0]),
            run.num_scoring_passes * num_calls * decoder_weights,
        ),
    }
    costs = {
        name: _cost(run.chip, flops / run.mesh.size, float(moved))
        for name, (flops, moved) in flops_and_bytes.items()
    }
    return costs | {"update": _update_cost(run, 0)}


def update_by_layout(run: PlannedRun) -> dict[int, PhaseCost]:
    """Returns the cost of the update for each layout, if all rows of the step have that layout.

    One program covers all layouts (train.pack), and each group goes to the layout in which it takes
    the fewest tokens. A step with responses of mixed lengths lies between the costs of two layouts,
    weighted by its rows of each. The keys are the tokens of a row, from the longest layout (the
    worst case) to the shortest. Fine-tuning has one layout.
    """
    if run.workload.is_fine_tuning:
        return {run.trainer.layouts[0].tokens: _fine_tuning_cost(run)}
    return {
        layout.tokens: _update_cost(run, number)
        for number, layout in enumerate(run.trainer.layouts)
    }


def _update_cost(run: PlannedRun, number: int) -> PhaseCost:
    """Returns the cost of the update if every response exactly fills a slot of layout `number`."""
    updates = run.trainer.updates
    recomputed = RECOMPUTATION if run.trainer.policy.compute.remat == "full" else 0
    num_passes = (FORWARD_AND_BACKWARD + recomputed) * updates.epochs
    # A critic has the cost of a second policy.
    num_models = 2 if run.trainer.critic else 1
    flops = num_models * num_passes * _forward_flops(run, run.trainer.layouts[number])

    # Bytes on one device. Each microbatch reads the weights in every pass, and accumulates the
    # gradient.
    weights = run.parts["weights"]
    state = weights + run.parts["optimizer"]
    num_calls = run.trainer.microbatches[number] * updates.minibatches
    gradient_bytes = num_calls * (3 * weights + num_passes * run.parts["decoder weights"])
    # An optimizer step reads and writes weights and moments once: 2 * state.
    moved = num_models * updates.epochs * (2 * state * updates.minibatches + gradient_bytes)
    return _cost(run.chip, flops / run.mesh.size, float(moved))


def _forward_flops(run: PlannedRun, layout: RowLayout) -> float:
    """Returns the FLOPs of a forward pass over a step whose responses fill slots of the layout.

    The FLOPs are summed over all devices, without padding. With prefix sharing, a prompt counts
    once for its group. Without it, each slot has its own prompt, and a slot that is shorter than
    the longest prompt has a shorter prompt and one response token.
    """
    sizes, model = run.workload, run.engine.model
    num_rollouts = sizes.num_prompts * sizes.group_size
    prompt, longest = sizes.prompt_tokens, sizes.response_tokens
    if layout.prefix:
        # With prefix sharing, a slot holds only a response.
        response = min(layout.slot, longest)
        num_prompts = sizes.num_prompts
    else:
        # Without prefix sharing, a slot holds a prompt and its response.
        prompt = min(prompt, layout.slot - 1)
        response = min(layout.slot - prompt, longest)
        num_prompts = num_rollouts
    # A prompt is a sequence that follows no tokens.
    prompt_flops = num_prompts * _response_flops(model, 0, prompt)
    return num_rollouts * _response_flops(model, prompt, response) + prompt_flops


def _response_flops(model: QwenConfig, prompt: int, response: int) -> float:
    """Returns the FLOPs of a forward pass over `response` tokens that follow `prompt` tokens."""
    # Causal: a token attends to the prompt, and to half of the response on average.
    pairs = attention_flops_per_pair(model) * (prompt + response / 2)
    return response * (matmul_flops_per_token(model) + pairs)


def _fine_tuning_cost(run: PlannedRun) -> PhaseCost:
    """Returns the cost of an optimizer step on examples that fill their rows."""
    [layout], policy = run.trainer.layouts, run.trainer.policy
    model = policy.model
    num_tokens = run.workload.num_examples * layout.tokens
    pairs = attention_flops_per_pair(model) * layout.tokens / 2
    recomputed = RECOMPUTATION if policy.compute.remat == "full" else 0
    num_passes = FORWARD_AND_BACKWARD + recomputed
    flops = num_passes * num_tokens * (matmul_flops_per_token(model) + pairs)

    # Each microbatch reads the weights in every pass, and accumulates the gradient.
    weights = run.parts["weights"]
    itemsize = jnp.dtype(policy.compute.dtype).itemsize
    # fsdp gathers all weights for a pass, so a device reads the full model, not its shard.
    gathered = qwen.num_params(model) * itemsize / run.mesh.shape["tensor"]
    num_calls = -(-run.workload.num_examples // run.trainer.rows[0])
    moved = 2 * (weights + run.parts["optimizer"]) + num_calls * (
        3 * weights + num_passes * gathered
    )
    return _cost(run.chip, flops / run.mesh.size, float(moved))


def _cost(chip: Chip, flops: float, moved: float) -> PhaseCost:
    return PhaseCost(flops, moved, seconds=max(flops / chip.flops, moved / chip.bandwidth))
