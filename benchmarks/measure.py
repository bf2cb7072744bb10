"""What decode.py and update.py share: a model without its weights, the device's peaks, medians, a table."""

import argparse
import statistics
import time
from collections.abc import Callable

import jax

from jzero import cli, plan
from jzero.model import qwen
from jzero.run.environment import versions


def parser(doc: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--model", default="Qwen2.5-0.5B", help="of jzero.plan, or a directory with a config.json"
    )
    made.add_argument(
        "--repeat", type=int, default=3, help="measured runs, of which the median counts"
    )
    made.add_argument("--dtype", default="bfloat16", help="of the computation")
    return made


def start(
    made: argparse.ArgumentParser,
) -> tuple[argparse.Namespace, qwen.QwenConfig, plan.Chip | None]:
    """Arguments, the model's shape, and what one device can do, where that is known."""
    given = made.parse_args()
    with cli.user_errors():
        model = plan.architecture(given.model)
    cli.start_jax([])
    kind = jax.devices()[0].device_kind
    known = [
        chip for name, chip in plan.CHIPS.items() if name.startswith(kind) or kind.startswith(name)
    ]
    return given, model, known[0] if known else None


def seconds(run: Callable[[], object], repeat: int) -> float:
    """Median of `repeat` runs, after one that compiles."""
    times = []
    for _ in range(repeat + 1):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def share(rate: float, peak: float | None) -> str:
    return f"{100 * rate / peak:.1f} %" if peak else "unknown"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown, below what ran."""
    found = versions()
    ran = ", ".join(f"{name} {found[name]}" for name in ("jzero", "jax", "python", "device"))
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        [f"{time.strftime('%Y-%m-%d')}, {ran}", "", *(f"| {' | '.join(line)} |" for line in lines)]
    )
