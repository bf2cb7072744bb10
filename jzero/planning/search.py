"""Searches for the largest microbatch and the largest KV cache that fit a plan's devices."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from jzero import config, terminal
from jzero.planning.chips import GIB
from jzero.planning.compiling import Measurement, Program
from jzero.planning.memory import phase_totals, row_tokens
from jzero.planning.planned_run import PlannedRun, build, pages_that_fit

Measure = Callable[[Program], Measurement]


def search(settings: config.Config, run: PlannedRun, measure: Measure) -> dict[str, int]:
    """Returns the largest train.microbatch_tokens and rollout.num_pages that fit; 0 if none fits.

    `run` is the plan of `settings`, and `measure` compiles a program for its devices. A run that
    samples nothing has no pages.
    """
    largest = {"train.microbatch_tokens": _largest_microbatch(settings, run, measure)}
    if run.sampling is not None:
        largest["rollout.num_pages"] = _largest_pool(settings, run, measure)
    return largest


def _largest_microbatch(settings: config.Config, run: PlannedRun, measure: Measure) -> int:
    """Bisects over microbatches from one row per device to the batch of a full step."""
    trainer = run.trainer
    # A microbatch consists of one or more rows per device.
    unit = row_tokens(run)
    # A microbatch never needs to be larger than the batch of a step.
    step_tokens = trainer.microbatches[0] * trainer.rows[0] * trainer.layouts[0].tokens

    def is_too_large(num_rows: int) -> bool:
        train = replace(settings.train, microbatch_tokens=num_rows * unit)
        changed = replace(settings, train=train)
        change = f"train.microbatch_tokens={num_rows * unit}"
        return not _fits(run, changed, "update", change, measure)

    terminal.say(
        "search: every try of train.microbatch_tokens compiles the update, which takes minutes"
    )
    # The memory grows with the microbatch, so a bisection finds the first size that is too large.
    candidates = range(1, step_tokens // unit + 1)
    return unit * bisect_left(candidates, True, key=is_too_large)


def _largest_pool(settings: config.Config, run: PlannedRun, measure: Measure) -> int:
    """Returns the largest rollout.num_pages with which sampling fits; 0 if none does."""
    engine = run.engine
    num_shards = engine.num_shards * run.num_decoders
    generate = measure(run.programs["generate"])
    free = run.chip.hbm_bytes - phase_totals(run, {"generate": generate})["rollout"]

    # The memory of the pages gives a first guess, which is lowered until it compiles and fits.
    # Pages for all slots are enough.
    enough = engine.slots_per_shard * engine.pages_per_slot
    pages = min(pages_that_fit(engine, run.parts["KV pool"] + free), enough)
    while pages >= engine.pages_per_slot:
        num_pages = pages * num_shards
        changed = replace(settings, rollout=replace(settings.rollout, num_pages=num_pages))
        if _fits(run, changed, "generate", f"rollout.num_pages={num_pages}", measure):
            return num_pages
        pages = pages * 15 // 16
    return 0


def _fits(
    run: PlannedRun,
    changed: config.Config,
    program: str,
    change: str,
    measure: Measure,
) -> bool:
    """Compiles one program with changed settings, and returns whether its phase fits."""
    changed_run = build(changed, run.devices)
    totals = phase_totals(changed_run, {program: measure(changed_run.programs[program])})
    total = max(totals.values())
    terminal.say(f"search: {change}: {program} {total / GIB:.2f} GiB")
    return total <= run.chip.hbm_bytes
