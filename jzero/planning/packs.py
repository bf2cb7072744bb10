"""Chooses train.pack from the responses of a run: `python -m jzero.plan --packs WORKDIR`.

Training packs the responses of a prompt into rows of a few fixed shapes. What the responses do not
fill is padding, and is computed for nothing. The command reads the lengths of the responses that a
run has logged, of its last LAST_STEPS steps. It prints the tokens of their rows for the lengths of
packs that the run has, for train.pack=auto and longest, and for the best two and three lengths. A
run resumes only with the lengths that it has.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jzero import config
from jzero.errors import UserError
from jzero.files import read_jsonl, read_text
from jzero.training.packing import best_layout, layouts_of_lengths, tokens_of_rows
from jzero.training.trainer import row_layouts
from jzero.types import RowLayout

STEP = 64  # tokens; lengths that are chosen are multiples of it, but for the first
LAST_STEPS = 50  # of the run, whose responses count

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
        # A length that saves nothing would only compile another shape.
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


def logged_groups(workdir: Path) -> list[list[int]]:
    """Returns the lengths of the logged responses of the last steps of a run, by prompt.

    Raises UserError if the directory is not that of a run, or the run has logged nothing.
    """
    path = workdir / "samples.jsonl"
    if not path.exists():
        raise UserError(f"{workdir} has no samples.jsonl: give the --workdir of a run")
    rows = read_jsonl(path)
    if not rows:
        raise UserError(f"{path} is empty: the run has logged no rollouts (train.logged_rollouts)")
    first_step = max(row["step"] for row in rows) - LAST_STEPS
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for row in rows:
        if row["step"] > first_step:
            # An empty response still takes a place in a row.
            groups[row["step"], row["id"]].append(max(1, row["tokens"]))
    return list(groups.values())


def format_packs(workdir: Path) -> str:
    """Returns the table of the values of train.pack for the responses of a run."""
    path = workdir / "config.json"
    groups = logged_groups(workdir)
    settings = config.from_json(read_text(path), str(path))
    rollout = settings.rollout
    prompt, packs = rollout.max_prompt_tokens, settings.train.packs_per_row
    values = [settings.train.pack, "auto", "longest"]
    for count in (2, 3):
        chosen = choose(groups, rollout.longest_continuation, count, prompt, packs)
        values.append(",".join(map(str, chosen)))

    responses = sum(map(sum, groups))
    lines = [
        f"{sum(map(len, groups)):,} responses to {len(groups):,} prompts, {responses:,} tokens",
        "",
        "| train.pack | tokens of rows | filled by responses |",
        "| --- | --- | --- |",
    ]
    for value in dict.fromkeys(values):
        layouts = row_layouts(replace(settings.train, pack=value), rollout, prompt)
        tokens = tokens_of_groups(groups, layouts)
        lines.append(f"| {value} | {tokens:,} | {responses / tokens:.0%} |")
    return "\n".join(lines)
