"""The time that a step takes at the peaks of its devices, counted by hand.

XLA's own count is of no use here: it counts the body of a loop once. What the interconnect takes is
not counted.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from jzero.model import qwen
from jzero.model.qwen import QwenConfig
from jzero.planning.chips import Chip
from jzero.planning.planned_run import PlannedRun, kv_bytes_per_token
from jzero.rollout.prefill import PREFILL_TOKENS

FORWARD_AND_BACKWARD = 3  # forward passes: a backward pass is two
RECOMPUTATION = 1  # one more, with model.remat=full


@dataclass(frozen=True)
class PhaseCost:
    """What one phase of a step does on one device."""

    flops: float
    bytes: float  # read from and written to HBM
    seconds: float  # at the peak of FLOPs or of bandwidth, whichever takes longer


def matmul_flops_per_token(model: QwenConfig) -> int:
    """Returns the FLOPs of all matrices for one token, 2 for a parameter, in a forward pass.

    An embedding that is not the head as well is a table: looking a row up takes no FLOPs.
    """
    table = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    return 2 * (qwen.num_params(model) - table)


def attention_flops_per_pair(model: QwenConfig) -> int:
    """Returns the FLOPs of one query with one key and value, in all layers of a forward pass."""
    return 4 * model.num_hidden_layers * model.num_attention_heads * model.head_dim


def roofline(run: PlannedRun) -> dict[str, PhaseCost]:
    """Returns the cost of every phase of a step whose responses are all as long as they may be.

    A step of fine-tuning has one phase, and examples that fill their rows.
    """
    settings = run.trainer.config
    if settings.sft.data:
        return {"update": _fine_tuning_cost(run)}
    rollout, train = settings.rollout, settings.train
    model, engine = run.engine.model, run.engine
    matmul = matmul_flops_per_token(model)
    pair = attention_flops_per_pair(model)

    # FLOPs, of all devices. A token attends to all tokens before it: half of them on average.
    prompt, response = rollout.max_prompt_tokens, rollout.longest_continuation
    num_rollouts = rollout.num_prompts * rollout.group_size
    prompts_in_batch = rollout.num_prompts if train.packs_per_row else num_rollouts
    response_flops = num_rollouts * response * (matmul + pair * (prompt + response / 2))
    prompt_flops = prompts_in_batch * prompt * (matmul + pair * prompt / 2)
    forward_flops = response_flops + prompt_flops
    recomputed = RECOMPUTATION if settings.model.remat == "full" else 0
    num_passes = (FORWARD_AND_BACKWARD + recomputed) * train.epochs
    num_models = 2 if run.trainer.critic else 1

    # Bytes, of one device. Every program reads the weights once a call.
    decoder_weights = run.parts["decoder weights"]
    state = run.parts["weights"] + run.parts["optimizer"]
    num_prompt_tokens = rollout.num_prompts * prompt
    num_prefills = -(-num_prompt_tokens // PREFILL_TOKENS)
    num_rounds = -(-num_rollouts // (engine.max_concurrent_decodes * run.num_hosts))
    num_decode_steps = response * num_rounds
    cache = engine.slots_per_shard * (prompt + response / 2) * kv_bytes_per_token(engine)
    num_calls = run.trainer.microbatches[0] * train.minibatches
    gradient_bytes = num_calls * (3 * run.parts["weights"] + num_passes * decoder_weights)
    update_bytes = 2 * state * train.minibatches + gradient_bytes

    flops_and_bytes = {
        "prefill": (num_prompt_tokens * matmul, decoder_weights * num_prefills),
        "decode": (response_flops, num_decode_steps * (decoder_weights + cache)),
        "score": (
            run.num_scoring_passes * forward_flops,
            run.num_scoring_passes * num_calls * decoder_weights,
        ),
        "update": (
            num_models * num_passes * forward_flops,
            num_models * train.epochs * update_bytes,
        ),
    }
    return {
        name: _cost(run.chip, flops / run.mesh.size, float(moved))
        for name, (flops, moved) in flops_and_bytes.items()
    }


def _fine_tuning_cost(run: PlannedRun) -> PhaseCost:
    """Returns the cost of an optimizer step on examples that are all as long as a row."""
    settings, [layout] = run.trainer.config, run.trainer.layouts
    model = run.trainer.policy.model
    num_tokens = settings.sft.batch_size * layout.tokens
    pairs = attention_flops_per_pair(model) * layout.tokens / 2
    recomputed = RECOMPUTATION if settings.model.remat == "full" else 0
    num_passes = FORWARD_AND_BACKWARD + recomputed
    flops = num_passes * num_tokens * (matmul_flops_per_token(model) + pairs)

    # Every microbatch reads the weights in each pass, and adds up the gradient.
    weights = run.parts["weights"]
    itemsize = jnp.dtype(settings.model.dtype).itemsize
    gathered = qwen.num_params(model) * itemsize / run.mesh.shape["tensor"]
    num_calls = -(-settings.sft.batch_size // run.trainer.rows[0])
    moved = 2 * (weights + run.parts["optimizer"]) + num_calls * (
        3 * weights + num_passes * gathered
    )
    return _cost(run.chip, flops / run.mesh.size, float(moved))


def _cost(chip: Chip, flops: float, moved: float) -> PhaseCost:
    return PhaseCost(flops, moved, seconds=max(flops / chip.flops, moved / chip.bandwidth))
