"""What decode.py, update.py and lengths.py share: architectures, peaks, medians, a table."""

import argparse
import statistics
import time
from collections.abc import Callable

import jax

from jzero import cli
from jzero.model import qwen
from jzero.planning.chips import CHIPS, Chip
from jzero.planning.models import architecture
from jzero.run.environment import versions


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="Qwen2.5-0.5B",
        help="a model that jzero.plan knows, or a directory with a config.json",
    )
    parser.add_argument(
        "--repeat", type=int, default=3, help="measured runs, of which the median counts"
    )
    parser.add_argument("--dtype", default="bfloat16", help="of the computation")
    parser.add_argument("--tensor", type=int, default=1, help="devices that share a model")
    return parser


def start(
    parser: argparse.ArgumentParser,
) -> tuple[argparse.Namespace, qwen.QwenConfig, Chip | None]:
    """Returns the arguments, the model's architecture, and a device's peaks if they are known."""
    args = parser.parse_args()
    with cli.user_errors():
        model = architecture(args.model)
    cli.start_jax([])
    return args, model, chip_of(jax.devices()[0].device_kind)


def chip_of(device_kind: str) -> Chip | None:
    """Returns the peaks of a device; drivers write more or less of a name ("NVIDIA H200")."""
    for name, chip in CHIPS.items():
        if name.startswith(device_kind) or device_kind.startswith(name):
            return chip
    return None


def median_seconds(run: Callable[[], object], repeat: int) -> float:
    """Returns the median of `repeat` runs, after one that compiles."""
    times = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def share(rate: float, peak: float | None) -> str:
    return f"{100 * rate / peak:.1f} %" if peak else "unknown"


def table(headings: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table below a line that says when and with what it was measured."""
    found = versions()
    names = ("jzero", "jax", "python", "device")
    measured_with = ", ".join(f"{name} {found[name]}" for name in names)
    lines = [f"{time.strftime('%Y-%m-%d')}, {measured_with}", ""]
    for cells in [headings, ["---"] * len(headings), *rows]:
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
