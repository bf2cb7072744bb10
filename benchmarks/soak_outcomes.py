"""What the parts of soak.py report: one outcome for every attack, and the table of them."""

from dataclasses import dataclass

MEBIBYTE = 1 << 20
HEADINGS = ["attack", "times", "memory before, MiB", "after", "/health worst, s", "verdict"]


@dataclass(frozen=True)
class Outcome:
    """What one attack did, once. None stands for what a part does not measure."""

    attack: str
    memory_before: int | None = None  # bytes
    memory_after: int | None = None  # bytes
    health_seconds: float | None = None  # the longest wait for /health
    failure: str = ""  # what went wrong


def in_mebibytes(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / MEBIBYTE:,.0f}"


def row(outcomes: list[Outcome]) -> list[str]:
    """Returns the cells of one attack, which may have been repeated."""
    waits = [item.health_seconds for item in outcomes if item.health_seconds is not None]
    failures = list(dict.fromkeys(item.failure for item in outcomes if item.failure))
    return [
        outcomes[0].attack,
        str(len(outcomes)),
        in_mebibytes(outcomes[0].memory_before),
        in_mebibytes(outcomes[-1].memory_after),
        f"{max(waits):.2f}" if waits else "",
        "FAILED: " + "; ".join(failures) if failures else "held",
    ]


def rows(outcomes: list[Outcome]) -> list[list[str]]:
    """Returns the cells of every attack, in the order in which they first came."""
    by_attack: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_attack.setdefault(outcome.attack, []).append(outcome)
    return [row(repeated) for repeated in by_attack.values()]
