"""`python benchmarks/update.py --model Qwen2.5-3B [--sequences 64]`: trained tokens a second, random weights.

One GRPO optimizer step over sequences of exactly --prompt and --new random tokens, as runs make it. FLOPs are those of
the model, forward and twice that backward, causal attention by half: what remat computes again does not count (MFU)."""

import jax
import measure
import numpy as np

from jzero import algorithms
from jzero.config import Config, MeshConfig, ModelConfig, RolloutConfig, TrainConfig
from jzero.distributed.mesh import train_mesh
from jzero.model import qwen
from jzero.training.packing import TrainingSequence, pack
from jzero.training.step import Minibatch
from jzero.training.trainer import make_trainer


def update_flops(model: qwen.QwenConfig, sequences: int, length: int) -> float:
    table = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    pairs = 4 * model.num_hidden_layers * model.num_attention_heads * model.head_dim * length / 2
    return 3 * sequences * length * (2 * (qwen.num_params(model) - table) + pairs)


def step(given, model: qwen.QwenConfig):
    """A function that makes one optimizer step."""
    length = given.prompt + given.new
    mesh = train_mesh(1, -1, given.tensor)
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    settings = Config(
        model=ModelConfig(dtype=given.dtype, remat=given.remat),
        rollout=RolloutConfig(
            num_prompts=given.sequences // 8,
            group_size=8,
            max_prompt_tokens=given.prompt,
            max_new_tokens=given.new,
        ),
        algorithm=algorithms.grpo(),
        train=TrainConfig(
            microbatch_tokens=given.rows * rows * length, pack_buckets=1, packs_per_row=0
        ),
        mesh=MeshConfig(1, -1, given.tensor),
    )
    trainer = make_trainer(settings, model, None, mesh)
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, model.vocab_size, (given.sequences, length)).astype(np.int32)
    weights = np.where(
        np.arange(length) < given.prompt, 0, 1 / (given.sequences * given.new)
    ).astype(np.float32)
    items = [
        TrainingSequence(each, given.prompt, weights, np.zeros(length, np.float32))
        for each in tokens
    ]
    packed = pack([items], trainer.layouts, trainer.rows, trainer.microbatches)
    part = Minibatch(list(range(len(items))), packed, *trainer.policy.put(packed))
    part.set_values(
        trainer.policy,
        "advantages",
        [np.full(length, x, np.float32) for x in draw.normal(size=len(items))],
    )
    kept = [trainer.policy.start(trainer.policy.init_params(0))]

    def run():
        state, stats = trainer.policy.update(
            kept.pop(), part.batches, part.counts, trainer.layouts, 1e-6
        )
        kept.append(state)
        return stats

    return run


def main() -> None:
    parser = measure.make_parser(__doc__)
    parser.add_argument(
        "--sequences", type=int, default=64, help="of an optimizer step, a multiple of 8"
    )
    parser.add_argument("--rows", type=int, default=4, help="sequences a device in a microbatch")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--new", type=int, default=1024, help="tokens")
    parser.add_argument("--tensor", type=int, default=1, help="devices that share a layer")
    parser.add_argument("--remat", default="full", choices=("none", "dots", "full"))
    given, model, chip = measure.start(parser)
    if given.sequences % 8:
        parser.error(f"--sequences={given.sequences} must be a multiple of 8")
    length = given.prompt + given.new
    spent = measure.median_seconds(step(given, model), given.repeat)
    rate = update_flops(model, given.sequences, length) / spent / jax.device_count()
    numbers = f"{given.sequences * length / spent:,.0f}", f"{spent:.2f}", f"{rate / 1e12:.2f}"
    of_peak = measure.share(rate, chip and chip.flops)
    row = [given.model.rpartition("/")[2], str(given.sequences), given.remat, *numbers, of_peak]
    head = ["model", "sequences", "remat", "tokens/s", "s a step", "TFLOP/s a device", "MFU"]
    print(
        f"{given.prompt} prompt tokens, {given.new} new, {given.dtype}\n{measure.table(head, [row])}"
    )


if __name__ == "__main__":
    main()
