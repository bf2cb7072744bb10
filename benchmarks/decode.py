"""Measures the tokens a second of decoding, with random weights.

    python benchmarks/decode.py --model Qwen2.5-3B [--slots 64 128 256]

Every slot holds a prompt of its own and decodes exactly --new tokens, through the scheduler that
runs use. The seconds are those of --new tokens less those of one decode call, so that prefills do
not count. The bytes are what every step must read, however it is read: the weights, and the keys
and values of all tokens before.

The script prints a Markdown table with one row for every number of slots: tokens a second of all
devices, milliseconds a step, and bytes a second of a device, also as a share of the device's memory
bandwidth where that is known.
"""

import argparse
from typing import NamedTuple

import jax
import measure
import numpy as np

from jzero.config import ModelConfig, RolloutConfig
from jzero.decoder.driver import Batch, Decoder, Phase
from jzero.decoder.engine import Engine
from jzero.decoder.sequence import make_groups
from jzero.model import qwen
from jzero.planning.chips import Chip
from jzero.planning.planned_run import kv_bytes_per_token
from jzero.sharding.mesh import decode_mesh, param_shardings, train_mesh
from jzero.sharding.publish import bytes_of_one_device, publisher
from jzero.sharding.side_by_side import weight_layout
from jzero.types import Params

HEADINGS = [
    "model",
    "sequences",
    "tokens/s",
    "ms a step",
    "GB/s a device",
    "of its bandwidth",
]


def make_engine(
    args: argparse.Namespace,
    model: qwen.QwenConfig,
    num_slots: int,
) -> tuple[Engine, Params]:
    """Returns an engine of `num_slots` slots, and random weights in its layout."""
    mesh = train_mesh(1, -1, args.tensor)
    settings = RolloutConfig(
        num_prompts=num_slots,
        group_size=1,
        max_prompt_tokens=args.prompt,
        max_new_tokens=args.new,
        num_slots=num_slots,
    )
    engine = Engine(model, settings, decode_mesh(mesh), (), args.dtype)

    def init(key: jax.Array) -> Params:
        return qwen.init(model, key)

    params = jax.jit(init, out_shardings=param_shardings(model, mesh))(jax.random.key(0))
    layout = weight_layout(model, ModelConfig(), engine.mesh)
    publish = publisher(model, mesh, engine.mesh, engine.dtype, layout=layout)
    return engine, publish(params)


class Decoding(NamedTuple):
    """What was measured with one number of slots."""

    engine: Engine
    params: Params
    seconds_of_step: float
    mean_context: float  # tokens of a sequence, on average over the steps


def measure_decoding(args: argparse.Namespace, model: qwen.QwenConfig, num_slots: int) -> Decoding:
    """Decodes args.new tokens behind prompts of args.prompt tokens, in `num_slots` slots."""
    engine, params = make_engine(args, model, num_slots)
    generator = np.random.default_rng(0)
    shape = (num_slots, args.prompt)
    prompts = list(generator.integers(0, model.vocab_size, shape).astype(np.int32))

    def decode(num_new: int) -> None:
        groups = make_groups(prompts, 1, num_new)
        Decoder(engine, lambda ids: "").run(Phase(params, (0, 0), group_size=1), Batch(groups))
        assert all(sequence.num_new == num_new for [sequence] in groups)

    one_call = engine.settings.decode_steps + 1  # the prefill samples the first token
    all_seconds = measure.median_seconds(lambda: decode(args.new), args.repeat)
    first_call_seconds = measure.median_seconds(lambda: decode(one_call), args.repeat)
    seconds = all_seconds - first_call_seconds

    mean_context = args.prompt + (args.new + one_call) / 2
    return Decoding(engine, params, seconds / (args.new - one_call), mean_context)


def bytes_of_step(measured: Decoding) -> float:
    """Returns what a step must read on a device: weights, and keys and values of all tokens."""
    engine = measured.engine
    num_tokens = engine.slots_per_shard * measured.mean_context
    return bytes_of_one_device(measured.params) + num_tokens * kv_bytes_per_token(engine)


def table_row(
    args: argparse.Namespace,
    model: qwen.QwenConfig,
    chip: Chip | None,
    num_slots: int,
) -> list[str]:
    """Decodes with `num_slots` slots, and returns a row of the table."""
    measured = measure_decoding(args, model, num_slots)
    seconds = measured.seconds_of_step
    rate = bytes_of_step(measured) / seconds
    return [
        args.model.rpartition("/")[2],
        str(num_slots),
        f"{num_slots / seconds:,.0f}",
        f"{1000 * seconds:.2f}",
        f"{rate / 1e9:,.0f}",
        measure.share(rate, chip.bandwidth if chip else None),
    ]


def main() -> None:
    parser = measure.make_parser(__doc__)
    parser.add_argument(
        "--slots", type=int, nargs="+", default=[64, 128, 256], help="sequences at once"
    )
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=512, help="tokens of a response")
    args, model, chip = measure.start(parser)
    rows = [table_row(args, model, chip, num_slots) for num_slots in args.slots]
    print(f"{args.prompt} prompt tokens, {args.new} new, {args.dtype}")
    print(measure.table(HEADINGS, rows))


if __name__ == "__main__":
    main()
