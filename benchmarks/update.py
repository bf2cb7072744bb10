"""Measures the tokens a second of training, with random weights.

    python benchmarks/update.py --model Qwen2.5-3B [--sequences 64]

The script times one GRPO optimizer step over sequences of exactly --prompt and --new random tokens,
as runs make it. The FLOPs are those of the model (MFU): a forward pass and twice that backward,
causal attention by half. What remat computes again does not count.
"""

import argparse
from collections.abc import Callable

import jax
import measure
import numpy as np

from jzero import algorithms
from jzero.config import Config, MeshConfig, ModelConfig, RolloutConfig, TrainConfig
from jzero.model.qwen import QwenConfig
from jzero.planning.roofline import (
    FORWARD_AND_BACKWARD,
    attention_flops_per_pair,
    matmul_flops_per_token,
)
from jzero.sharding.mesh import train_mesh
from jzero.tokens import Tokens
from jzero.training.packing import TrainingSequence, pack
from jzero.training.step import Minibatch
from jzero.training.trainer import Trainer, make_trainer

GROUP_SIZE = 8
HEADINGS = [
    "model",
    "sequences",
    "remat",
    "tokens/s",
    "s a step",
    "TFLOP/s a device",
    "MFU",
]


def update_flops(model: QwenConfig, num_sequences: int, length: int) -> float:
    """Returns the FLOPs of an optimizer step, of all devices. A token attends to half of a row."""
    per_token = matmul_flops_per_token(model) + attention_flops_per_pair(model) * length / 2
    return FORWARD_AND_BACKWARD * num_sequences * length * per_token


def build_trainer(args: argparse.Namespace, model: QwenConfig) -> Trainer:
    mesh = train_mesh(1, -1, args.tensor)
    row_shards = mesh.shape["data"] * mesh.shape["fsdp"]
    row_tokens = args.prompt + args.new
    settings = Config(
        model=ModelConfig(dtype=args.dtype, remat=args.remat),
        rollout=RolloutConfig(
            num_prompts=args.sequences // GROUP_SIZE,
            group_size=GROUP_SIZE,
            max_prompt_tokens=args.prompt,
            max_new_tokens=args.new,
        ),
        algorithm=algorithms.grpo(),
        train=TrainConfig(
            microbatch_tokens=args.rows * row_shards * row_tokens, pack="longest", packs_per_row=0
        ),
        mesh=MeshConfig(1, -1, args.tensor),
    )
    return make_trainer(settings, model, None, mesh)


def random_minibatch(args: argparse.Namespace, vocab_size: int, trainer: Trainer) -> Minibatch:
    """Returns sequences of random tokens and advantages, on the devices."""
    length = args.prompt + args.new
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, vocab_size, (args.sequences, length)).astype(np.int32)
    is_prompt = np.arange(length) < args.prompt
    weights = np.where(is_prompt, 0, 1 / (args.sequences * args.new)).astype(np.float32)
    sequences = [TrainingSequence(Tokens(row), args.prompt, weights) for row in tokens]
    packed = pack([sequences], trainer.layouts, trainer.rows, trainer.microbatches)
    batches, counts = trainer.policy.put(packed)
    indices = list(range(len(sequences)))
    minibatch = Minibatch(indices, indices, packed, batches, counts)
    advantages = generator.normal(size=len(sequences))
    rows = [np.full(length, advantage, np.float32) for advantage in advantages]
    minibatch.set_values(trainer.policy, "advantages", rows)
    return minibatch


def optimizer_step(args: argparse.Namespace, model: QwenConfig) -> Callable[[], object]:
    """Returns a function that makes one optimizer step, and returns its statistics."""
    trainer = build_trainer(args, model)
    minibatch = random_minibatch(args, model.vocab_size, trainer)
    policy = trainer.policy
    state = policy.start(policy.init_params(0))

    def run() -> object:
        nonlocal state  # the update is given the old state's memory
        state, stats = policy.update(
            state, minibatch.batches, minibatch.counts, trainer.layouts, 1e-6
        )
        return stats

    return run


def main() -> None:
    parser = measure.make_parser(__doc__)
    parser.add_argument(
        "--sequences",
        type=int,
        default=64,
        help=f"sequences of an optimizer step, a multiple of {GROUP_SIZE}",
    )
    parser.add_argument("--rows", type=int, default=4, help="sequences a device in a microbatch")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=1024, help="tokens of a response")
    parser.add_argument("--remat", default="full", choices=("none", "dots", "full"))
    args, model, chip = measure.start(parser)
    if args.sequences % GROUP_SIZE:
        parser.error(f"--sequences={args.sequences} must be a multiple of {GROUP_SIZE}")

    length = args.prompt + args.new
    seconds = measure.median_seconds(optimizer_step(args, model), args.repeat)
    rate = update_flops(model, args.sequences, length) / seconds / jax.device_count()
    row = [
        args.model.rpartition("/")[2],
        str(args.sequences),
        args.remat,
        f"{args.sequences * length / seconds:,.0f}",
        f"{seconds:.2f}",
        f"{rate / 1e12:.2f}",
        measure.share(rate, chip.flops if chip else None),
    ]
    print(f"{args.prompt} prompt tokens, {args.new} new, {args.dtype}")
    print(measure.table(HEADINGS, [row]))


if __name__ == "__main__":
    main()
