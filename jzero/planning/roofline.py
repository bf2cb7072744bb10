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
from jzero.types import RowLayout

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

    An embedding that is not the head as well is a table: looking a row up takes no FLOPs. Of the
    experts, those that one token goes to count.
    """
    table = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    idle_experts = model.num_experts - model.num_experts_per_tok
    expert = 3 * model.hidden_size * model.moe_intermediate_size
    idle = model.num_hidden_layers * idle_experts * expert
    return 2 * (qwen.num_params(model) - table - idle)


def attention_flops_per_pair(model: QwenConfig) -> int:
    """Returns the FLOPs of one query with one key and value, in all layers of a forward pass."""
    return 4 * len(model.attention_layers) * model.num_attention_heads * model.head_dim


def roofline(run: PlannedRun) -> dict[str, PhaseCost]:
    """Returns the cost of every phase of a step whose responses are all as long as they may be.

    That is the worst case: all rows are of the first layout, the longest. `update_by_layout` says
    what the update takes with shorter responses. A step of fine-tuning has one phase, and examples
    that fill their rows.
    """
    settings = run.trainer.config
    if settings.sft.data:
        return {"update": _fine_tuning_cost(run)}
    rollout, engine = settings.rollout, run.engine
    prompt, response = rollout.max_prompt_tokens, rollout.longest_continuation
    num_rollouts = rollout.num_prompts * rollout.group_size
    num_prompt_tokens = rollout.num_prompts * prompt
    matmul = matmul_flops_per_token(engine.model)

    # Bytes, of one device. Every program reads the weights once a call.
    decoder_weights = run.parts["decoder weights"]
    num_prefills = -(-num_prompt_tokens // PREFILL_TOKENS)
    num_rounds = -(-num_rollouts // (engine.max_concurrent_decodes * run.num_hosts))
    num_decode_steps = response * num_rounds
    cache = engine.slots_per_shard * (prompt + response / 2) * kv_bytes_per_token(engine)
    num_calls = run.trainer.microbatches[0] * settings.train.minibatches

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
    """Returns the cost of the update for each layout, if all rows of the step are of that layout.

    One program has all layouts (train.pack_buckets), and every group goes to the layout in which it
    takes the fewest tokens. A step whose responses differ in length lies between the costs of two
    layouts, weighted by its rows of each. The keys are the tokens of a row, from the longest
    layout, which is the worst case, to the shortest. Fine-tuning has one layout.
    """
    if run.trainer.config.sft.data:
        return {run.trainer.layouts[0].tokens: _fine_tuning_cost(run)}
    return {
        layout.tokens: _update_cost(run, number)
        for number, layout in enumerate(run.trainer.layouts)
    }


def _update_cost(run: PlannedRun, number: int) -> PhaseCost:
    """Returns the cost of the update if every response just fills a slot of layout `number`."""
    settings = run.trainer.config
    train = settings.train
    recomputed = RECOMPUTATION if settings.model.remat == "full" else 0
    num_passes = (FORWARD_AND_BACKWARD + recomputed) * train.epochs
    num_models = 2 if run.trainer.critic else 1
    flops = num_models * num_passes * _forward_flops(run, run.trainer.layouts[number])

    # Bytes, of one device. Every microbatch reads the weights in each pass, and adds up the
    # gradient.
    weights = run.parts["weights"]
    state = weights + run.parts["optimizer"]
    num_calls = run.trainer.microbatches[number] * train.minibatches
    gradient_bytes = num_calls * (3 * weights + num_passes * run.parts["decoder weights"])
    moved = num_models * train.epochs * (2 * state * train.minibatches + gradient_bytes)
    return _cost(run.chip, flops / run.mesh.size, float(moved))


def _forward_flops(run: PlannedRun, layout: RowLayout) -> float:
    """Returns the FLOPs of a forward pass over a step whose responses fill slots of the layout.

    They are those of all devices, without padding. A prompt that rows share counts once for its
    group. In rows without a shared prefix a slot has a prompt of its own, and a slot that is
    shorter than the longest prompt has a shorter prompt and one token of a response.
    """
    rollout, model = run.trainer.config.rollout, run.engine.model
    num_rollouts = rollout.num_prompts * rollout.group_size
    prompt, longest = rollout.max_prompt_tokens, rollout.longest_continuation
    if layout.prefix:
        response = min(layout.slot, longest)
        num_prompts = rollout.num_prompts
    else:
        prompt = min(prompt, layout.slot - 1)
        response = min(layout.slot - prompt, longest)
        num_prompts = num_rollouts
    prompt_flops = num_prompts * _response_flops(model, 0, prompt)
    return num_rollouts * _response_flops(model, prompt, response) + prompt_flops


def _response_flops(model: QwenConfig, prompt: int, response: int) -> float:
    """Returns the FLOPs of a forward pass over `response` tokens that follow `prompt` tokens.

    A token attends to all tokens before it: to the prompt, and to half of the response on average.
    """
    pairs = attention_flops_per_pair(model) * (prompt + response / 2)
    return response * (matmul_flops_per_token(model) + pairs)


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
