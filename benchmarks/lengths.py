"""Measures what a token costs in an update and in decoding, by the length of sequences.

    python benchmarks/lengths.py --model DIR [--lengths 1024 2048 4096 8192]

An update has --tokens tokens at every length, so that longer sequences are fewer, one of them in a
row. Decoding has --slots sequences, which decode their last --new tokens; the prompts before were
prefilled. Weights are random.

For every length the script prints microseconds a token of the update and milliseconds a step of
decoding. Beside them is by how much they have grown since the first length, and by how much the
work that the definition needs has grown: FLOPs of a token for the update, where attention meets
half of a sequence on average, and bytes of weights, keys and values for decoding. A cost that grows
by more than that has a term which grows faster than attention does, or reads what it need not.
"""

import argparse
from typing import NamedTuple

import decode
import measure
import update

from jzero.model.qwen import QwenConfig

HEADINGS = [
    "tokens of a sequence",
    "update, us a token",
    "grown by",
    "FLOPs grown by",
    "decoding, ms a step",
    "grown by",
    "bytes grown by",
]


class Cost(NamedTuple):
    """What one length costs: measured, and what the definition needs."""

    seconds: float  # of a token of the update, or of a step of decoding
    work: float  # FLOPs of a token, or bytes of a step


def cost_of_update(args: argparse.Namespace, model: QwenConfig, length: int) -> Cost:
    """Times one optimizer step over sequences of this length."""
    num_sequences = max(args.tokens // length, 1)
    shape = argparse.Namespace(
        **vars(args) | {"sequences": num_sequences, "prompt": 16, "new": length - 16, "rows": 1}
    )
    seconds = measure.median_seconds(update.optimizer_step(shape, model), args.repeat)
    num_tokens = num_sequences * length
    flops = update.update_flops(model, num_sequences, length)
    return Cost(seconds / num_tokens, flops / num_tokens)


def cost_of_decoding(args: argparse.Namespace, model: QwenConfig, length: int) -> Cost:
    """Times the steps that decode the last --new tokens of sequences of this length."""
    shape = argparse.Namespace(**vars(args) | {"prompt": length - args.new})
    measured = decode.measure_decoding(shape, model, args.slots)
    return Cost(measured.seconds_of_step, decode.bytes_of_step(measured))


def table_row(length: int, costs: list[Cost], first: list[Cost]) -> list[str]:
    """Returns a row of the table; `first` are the costs of the first length."""
    cells = [f"{length:,}"]
    for cost, start, unit in zip(costs, first, (1e6, 1e3), strict=True):
        cells += [
            f"{unit * cost.seconds:.2f}",
            f"{cost.seconds / start.seconds:.2f}",
            f"{cost.work / start.work:.2f}",
        ]
    return cells


def main() -> None:
    parser = measure.make_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of an update")
    parser.add_argument("--slots", type=int, default=8, help="sequences that decode at once")
    parser.add_argument("--new", type=int, default=128, help="tokens that are decoded")
    parser.add_argument("--remat", default="full", choices=("none", "dots", "full"))
    args, model, _ = measure.start(parser)
    if min(args.lengths) <= args.new:
        parser.error(f"--lengths: a sequence has to be longer than --new={args.new} tokens")

    costs = []
    for length in args.lengths:
        costs.append([cost_of_update(args, model, length), cost_of_decoding(args, model, length)])
    rows = [
        table_row(length, of_length, costs[0])
        for length, of_length in zip(args.lengths, costs, strict=True)
    ]
    print(f"{args.tokens:,} tokens an update, {args.slots} sequences decode, {args.dtype}")
    print(measure.table(HEADINGS, rows))


if __name__ == "__main__":
    main()
