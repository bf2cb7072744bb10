"""`python -m jzero.pack_lengths WORKDIR [--count 3] [--steps 50]`: chooses train.pack_lengths.

Training packs the responses of a prompt into rows of a few fixed shapes. What the responses do not
fill is padding, and is computed for nothing. This command reads the lengths of the responses that a
run has logged, of its last --steps steps, and prints the --count lengths of packs with which their
rows have the fewest tokens. The first of them holds any response, as it must.

The table compares these lengths with those of the run and with halves. The last line are the flags
for another run. The run itself resumes only with the lengths that it has.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jzero import cli, config
from jzero.config import Config
from jzero.errors import UserError
from jzero.files import read_jsonl
from jzero.training.packing import best_layout, layouts_of_lengths, tokens_of_rows
from jzero.training.trainer import row_layouts
from jzero.types import RowLayout

STEP = 64  # tokens; lengths that are chosen are multiples of it, but for the first

Lengths = Sequence[int]


def tokens_of_groups(groups: Sequence[Lengths], layouts: Sequence[RowLayout]) -> int:
    """Returns the tokens of the rows of all groups, each in the layout that takes the fewest."""
    total = 0
    for lengths in groups:
        best, slots = best_layout(lengths, layouts)
        total += tokens_of_rows(len(slots), layouts[best])
    return total


def choose(groups: Sequence[Lengths], most: int, count: int, prompt: int, packs: int) -> Lengths:
    """Returns up to `count` lengths of packs, the longest first, which is `most`.

    They are taken one by one, each time the one that saves the most tokens. Then each of them is
    looked at again beside the others, until none can be bettered.

    Args:
        groups: the lengths of the responses to each prompt.
        prompt: rollout.max_prompt_tokens.
        packs: train.packs_per_row.
    """
    tried: dict[tuple[int, ...], int] = {}

    def cost(lengths: Lengths) -> int:
        key = tuple(sorted({most, *lengths}, reverse=True))
        if key not in tried:
            tried[key] = tokens_of_groups(groups, layouts_of_lengths(prompt, key, packs))
        return tried[key]

    candidates = range(STEP, most, STEP)
    chosen: list[int] = []
    for _ in range(min(count - 1, len(candidates))):
        best = min(candidates, key=lambda length: cost([*chosen, length]))
        if cost([*chosen, best]) == cost(chosen):
            break
        chosen.append(best)
    is_better = True
    while is_better:
        is_better = False
        for place in range(len(chosen)):
            others = chosen[:place] + chosen[place + 1 :]
            best = min(candidates, key=lambda length: cost([*others, length]))
            if cost([*others, best]) < cost(chosen):
                chosen[place] = best
                is_better = True
    return sorted({most, *chosen}, reverse=True)


def groups_of_run(workdir: Path, steps: int) -> list[list[int]]:
    """Returns the lengths of the logged responses of the last steps, by prompt.

    Raises UserError if the directory is not that of a run, or the run has logged nothing.
    """
    path = workdir / "samples.jsonl"
    if not path.exists():
        raise UserError(f"{workdir} has no samples.jsonl: give the --workdir of a run")
    rows = read_jsonl(path)
    if not rows:
        raise UserError(f"{path} is empty: the run has logged no rollouts (train.logged_rollouts)")
    first_step = max(row["step"] for row in rows) - steps
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for row in rows:
        if row["step"] > first_step:
            groups[row["step"], row["id"]].append(max(1, row["tokens"]))
    return list(groups.values())


def report(settings: Config, groups: Sequence[Lengths], count: int) -> str:
    """Returns the table, and the flags of what was chosen."""
    prompt, packs = settings.rollout.max_prompt_tokens, settings.train.packs_per_row
    most = settings.rollout.longest_continuation
    chosen = choose(groups, most, count, prompt, packs)
    halves = replace(settings.train, pack_lengths=(), pack_length=0, pack_buckets=count)
    responses = sum(map(sum, groups))
    lines = [
        f"{sum(map(len, groups)):,} responses to {len(groups):,} prompts, {responses:,} tokens",
        "",
        "| packs | lengths | tokens of rows | filled by responses |",
        "| --- | --- | --- | --- |",
    ]
    for name, layouts in (
        ("of the run", row_layouts(settings.train, settings.rollout, prompt)),
        ("halves", row_layouts(halves, settings.rollout, prompt)),
        ("chosen", layouts_of_lengths(prompt, chosen, packs)),
    ):
        tokens = tokens_of_groups(groups, layouts)
        slots = " ".join(str(layout.slot) for layout in layouts)
        lines.append(f"| {name} | {slots} | {tokens:,} | {responses / tokens:.0%} |")
    flag = ",".join(map(str, chosen))
    return "\n".join(
        [*lines, "", f"--config.train.pack_lengths={flag} --config.train.pack_length=0"]
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workdir", type=Path, metavar="WORKDIR", help="the --workdir of a run")
    parser.add_argument("--count", type=int, default=3, help="lengths to choose (default: 3)")
    parser.add_argument("--steps", type=int, default=50, help="last steps to read (default: 50)")
    options = parser.parse_args(arguments)
    if options.count < 1 or options.steps < 1:
        parser.error("--count and --steps must be at least 1")
    return options


if __name__ == "__main__":
    with cli.user_errors():
        OPTIONS = parse(sys.argv[1:])
        GROUPS = groups_of_run(OPTIONS.workdir, OPTIONS.steps)
        PATH = OPTIONS.workdir / "config.json"
        SETTINGS = config.from_json(PATH.read_text(encoding="utf-8"), str(PATH))
        print(report(SETTINGS, GROUPS, OPTIONS.count))
