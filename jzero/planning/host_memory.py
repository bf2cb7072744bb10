"""Estimates the memory that a config makes a host use, and compares it with the machine's memory.

    check_host_memory(config, parts_of_run(config))    # raises UserError for too large counts

Problems, rollouts and packed rows live on the host before they reach a device, so a count that is
too large would fill the host's memory without a message. The bytes per object are the sizes of
jzero's records, and every response counts at its maximum length. Nothing is allocated here. Device
memory is checked separately, by `fitting.check_memory`.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jzero.config import (
    Config,
    EvalConfig,
    RolloutConfig,
    Setting,
    Sft,
    TaskConfig,
    TrainConfig,
    WarmStart,
    list_settings,
    num_kept,
)
from jzero.errors import UserError
from jzero.planning.chips import GIB
from jzero.training.packing import INTEGER_FIELDS, num_rows
from jzero.training.trainer import row_layouts

# The settings that determine the length of a rollout.
LENGTHS = (
    "rollout.max_prompt_tokens",
    "rollout.max_new_tokens",
    "rollout.max_turns",
    "rollout.max_reply_tokens",
    "rollout.max_episode_tokens",
)

MIB = 2**20
KIB = 2**10

GRADER_BYTES = 32 * MIB  # private memory of a grader process
PROBLEM_BYTES = 2 * KIB  # per problem with its prompt, as text and as tokens
ROLLOUT_BYTES = 4 * KIB  # per rollout without tokens: the sequence, its turns, grades and texts
TOKEN_BYTES = 13  # per token of a rollout: the tracks that every record has
BUFFER_FACTOR = 2  # the buffers of `Tokens` grow by this factor
SLOT_BYTES = 2 * KIB
PAGE_BYTES = 48  # per page: its id in lists, and its reference count
FLOAT_FIELDS = 8  # maximum of a packed batch
FIELD_BYTES = 4


# -- the machine -----------------------------------------------------------------------------------


def total_bytes() -> float:
    """Returns the memory of this machine, or of the container that this process is in."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return float(min([physical, *_container_limits()]))


def free_bytes() -> float:
    """Returns the memory that this process can use now without evicting other memory."""
    total = total_bytes()
    free = [total / 2]  # a guess for systems without /proc/meminfo
    if sys.platform == "linux":
        free = [_meminfo("MemAvailable", total)]
    for folder in _container_folders():
        limit, used = _read_number(folder / "memory.max"), _read_number(folder / "memory.current")
        if limit is not None and used is not None:
            free.append(max(0.0, limit - used))
    return min(free)


def _meminfo(name: str, otherwise: float) -> float:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return float(line.split()[1]) * KIB
    return otherwise


def _container_folders() -> Iterator[Path]:
    """Yields the folders of the control groups (version 2) that this process is in."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    groups = [line[3:] for line in lines if line.startswith("0::")]
    for name in groups:
        folder = root / name.strip("/")
        # A limit of any parent group applies as well.
        yield folder
        yield from (parent for parent in folder.parents if parent.is_relative_to(root))


def _container_limits() -> list[float]:
    limits = [_read_number(folder / "memory.max") for folder in _container_folders()]
    # Version 1 of control groups shows the container's limit at a fixed path.
    version_1 = _read_number(Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    return [limit for limit in [*limits, version_1] if limit is not None]


def _read_number(path: Path) -> float | None:
    """Returns the number in a file; None if the file is missing or holds a word such as "max"."""
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


# -- the run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """The host memory that some counts require at the same time."""

    settings: tuple[str, ...]  # the counts, by name
    meaning: str  # "the rollouts of a step"
    bytes: float


def parts_of_run(config: Config) -> list[Part]:
    """Returns the host memory parts of a run of `jzero.main`."""
    if config.sft is not None:
        parts = [_sft_batch(config.sft)]
        if config.eval.suites:
            parts += [graders_part(config.task), *parts_of_engine(config.rollout)]
        return parts
    kept = num_kept(config.algorithm, config.rollout)
    parts = [
        graders_part(config.task),
        _rollouts(config.rollout, kept),
        _packed_rows(config.rollout, config.train),
        _evaluation(config.eval, config.rollout, kept),
        *parts_of_engine(config.rollout),
    ]
    if config.warm_start is not None:
        parts.append(_warm_start(config.warm_start, config.rollout.longest_episode))
    return parts


def parts_of_engine(rollout: RolloutConfig) -> list[Part]:
    """Returns the host memory of the decoder's tables of slots and pages."""
    pages_per_slot = -(-rollout.longest_episode // rollout.page_size)
    num_pages = rollout.num_pages or rollout.num_slots * pages_per_slot
    result = (8 + FIELD_BYTES) * rollout.decode_steps  # tokens, log-probs and forced tokens
    if rollout.draft is not None:
        result *= 1 + rollout.draft.tokens
    return [
        Part(
            ("rollout.num_slots", "rollout.decode_steps"),
            "the tables of the decoder's slots, and the results of a call",
            rollout.num_slots * (SLOT_BYTES + FIELD_BYTES * pages_per_slot + result),
        ),
        Part(
            ("rollout.num_pages" if rollout.num_pages else "rollout.num_slots",),
            "the tables of the decoder's pages",
            num_pages * PAGE_BYTES,
        ),
    ]


def rollouts_part(counts: dict[str, int], longest: int, meaning: str, kept: int = 0) -> Part:
    """Returns the memory of as many rollouts as the product of `counts`.

    longest: the maximum tokens of a rollout. kept: see `config.num_kept`.
    """
    number = 1
    for count in counts.values():
        number *= count
    token = TOKEN_BYTES
    # Ratios to the sampler need the tokens that its filters kept.
    token += FIELD_BYTES * kept
    bytes_of_tokens = BUFFER_FACTOR * longest * token
    return Part((*counts, *LENGTHS), meaning, number * (ROLLOUT_BYTES + bytes_of_tokens))


def graders_part(task: TaskConfig) -> Part:
    """Returns the memory of the grader processes."""
    workers = task.grade_workers
    return Part(("task.grade_workers",), "the grader processes", workers * GRADER_BYTES)


def _rollouts(rollout: RolloutConfig, kept: int) -> Part:
    counts = {"rollout.num_prompts": rollout.num_prompts, "rollout.group_size": rollout.group_size}
    if rollout.max_staleness and rollout.max_running_groups:
        counts = {
            "rollout.placement.max_running_groups": rollout.max_running_groups
            + rollout.num_prompts,
            "rollout.group_size": rollout.group_size,
        }
    elif rollout.max_staleness:
        # This many steps can be in an asynchronous stream at the same time.
        counts["rollout.placement.max_staleness"] = rollout.max_staleness + 2
    part = rollouts_part(counts, rollout.longest_episode, "the rollouts of a step", kept)
    return Part(part.settings, part.meaning, part.bytes + rollout.num_prompts * PROBLEM_BYTES)


def _packed_rows(rollout: RolloutConfig, train: TrainConfig) -> Part:
    """Returns the memory of the packed rows of a step, for the maximum number of packs."""
    # With train.sequence_per_turn, each turn of a rollout is a separate sequence.
    sequences = rollout.group_size * (rollout.max_turns if train.sequence_per_turn else 1)
    fields = len(INTEGER_FIELDS) + FLOAT_FIELDS
    # Rows of every layout count, although a group uses one: the sum is a bound for any mix of
    # lengths.
    tokens = sum(
        num_rows(sequences, layout) * layout.tokens
        for layout in row_layouts(train, rollout, rollout.max_prompt_tokens)
    )
    names = ("rollout.num_prompts", "rollout.group_size", "train.pack", *LENGTHS)
    return Part(
        (*names, "train.packs_per_row"),
        "the packed rows of a step",
        rollout.num_prompts * tokens * fields * FIELD_BYTES,
    )


def _evaluation(settings: EvalConfig, rollout: RolloutConfig, kept: int) -> Part:
    kinds = settings.samples + settings.greedy
    counts = {"eval.problems": settings.problems, "eval.samples": kinds}
    longest = settings.longest_episode(rollout)
    part = rollouts_part(counts, longest, "the responses of an evaluation", kept)
    return Part(
        (*part.settings, "eval.max_new_tokens"),
        part.meaning,
        part.bytes + settings.problems * PROBLEM_BYTES,
    )


def _warm_start(settings: WarmStart, longest: int) -> Part:
    size = settings.batch_size
    fields = len(INTEGER_FIELDS) + 1
    return Part(
        ("warm_start.batch_size", *LENGTHS),
        "the examples of a warm-start step",
        size * (PROBLEM_BYTES + longest * fields * FIELD_BYTES),
    )


def _sft_batch(settings: Sft) -> Part:
    size, longest = settings.batch_size, settings.pack_length
    fields = len(INTEGER_FIELDS) + 1
    return Part(
        ("sft.batch_size", "sft.pack_length"),
        "the rows of a step",
        size * (PROBLEM_BYTES + longest * fields * FIELD_BYTES),
    )


# -- the verdict -----------------------------------------------------------------------------------


def check_host_memory(config: Config, parts: Sequence[Part], total: float | None = None) -> None:
    """Raises UserError if `parts` need more memory than this machine has.

    The message names the counts of the largest part, and a bound for one of them.
    total: bytes of the machine; None: read from this machine.
    """
    if not config.memory.check:
        return
    total = total_bytes() if total is None else total
    needed = sum(part.bytes for part in parts)
    if needed <= total:
        return
    largest = max(parts, key=lambda part: part.bytes)
    settings = {item.name: item for item in list_settings(config)}

    def excess(item: Setting) -> float:
        return number_of(item.value) / max(1.0, number_of(item.default))

    counts = [settings[name] for name in largest.settings if name in settings]
    counts = [item for item in counts if is_number(item)]  # not the names of `train.pack`
    raised = [item for item in counts if number_of(item.value) > number_of(item.default)]
    # The count that exceeds its default by the largest factor is probably the mistake.
    suspect = max(counts, key=excess)
    # Lowering this count also shrinks the other parts that depend on it.
    shrinking = sum(part.bytes for part in parts if suspect.name in part.settings)
    # These parts are proportional to the count, so the largest count that fits follows from a
    # division.
    bound = int(number_of(suspect.value) * (total - (needed - shrinking)) / shrinking)
    advice = f"set {suspect.name} to at most {bound}" if bound >= 1 else f"lower {suspect.name}"
    flags = " ".join(f"{item.name}={item.value}" for item in raised or counts)
    raise UserError(
        f"{flags}: {largest.meaning} may take {largest.bytes / GIB:,.1f} GiB of the host's memory, "
        f"and it has {total / GIB:.1f} GiB: {advice}; "
        "--config.memory.check=False starts it nevertheless"
    )


def is_number(item: Setting) -> bool:
    """Returns whether the value of a setting is a number."""
    return isinstance(item.value, int | float)


def number_of(value: object) -> float:
    """Returns the value of a setting that is a number."""
    assert isinstance(value, int | float), f"{value=}"
    return float(value)
