"""Chooses the sizes that a config leaves at 0: the largest that fit, up to what a step has.

    config = with_sizes(config, workdir)      # before the memory check

train.microbatch_tokens and rollout.num_slots are chosen here, rollout.num_pages by
`planning.kv_pool` when the decoder is built. A resumed run keeps the sizes in its config.json,
because sums over other microbatches differ in the last bits. `jzero train` chooses with the same
functions (`jzero.sizing.choices`), and so does `jzero plan --table`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import jax

from jzero.config import Config, flatten
from jzero.decoder.engine import Engine
from jzero.files import parse_json, read_text
from jzero.hosts import collectives
from jzero.planning.chips import DescribedDevice
from jzero.planning.fitting import (
    attached_bytes,
    attached_devices,
    cpu_bytes,
    is_cpu,
    reason_not_planned,
    room_for_arrays,
    shrink,
    without_adapter_path,
)
from jzero.planning.planned_run import PlannedRun, build
from jzero.planning.remedies import (
    FEWER_SLOTS,
    SMALLER_MICROBATCHES,
    Remedy,
    engine_slots,
)
from jzero.sharding.mesh import num_decoders
from jzero.types import JsonValue

# More tokens in a microbatch, or slots, of a device gain no speed: its products are already large.
MOST_TOKENS = 32_768
MOST_SLOTS = 256
# Of all CPU devices together, which share the memory of a machine. XLA keeps freed memory there,
# which the planner does not count, so these sizes are smaller than those that fit by its count.
MOST_TOKENS_OF_CPUS = 1_024
MOST_SLOTS_OF_CPUS = 16


def with_sizes(config: Config, workdir: Path | None = None) -> Config:
    """Returns the config with sizes for the attached devices, in place of those that are 0.

    workdir: of a run that may be resumed.
    Raises UserError if the settings do not fit together.
    """
    if config.train.microbatch_tokens and config.rollout.num_slots:
        return config
    if workdir is not None:
        config = _with_recorded_sizes(config, workdir)
    if config.train.microbatch_tokens and config.rollout.num_slots:
        return config
    available = attached_bytes(config.memory)
    if available is None and jax.default_backend() == "cpu":
        # Every host of a run needs the same sizes.
        available = min(collectives.gather_json(cpu_bytes()))
    if reason_not_planned(config):
        return config  # every row of a step, and a slot for every sequence
    return choose_sizes(config, attached_devices(), available)


def with_sizes_of(config: Config, directory: Path | None) -> Config:
    """Returns the config with sizes for the model in `directory`, in place of those that are 0.

    For a model that `with_sizes` could not plan, because it was not downloaded yet.
    """
    if (config.train.microbatch_tokens and config.rollout.num_slots) or directory is None:
        return config
    model = replace(config.model, path=str(directory))
    sized = with_sizes(replace(config, model=model))
    return _with(config, sized.train.microbatch_tokens, sized.rollout.num_slots)


def sizes_line(config: Config, engine: Engine | None) -> str:
    """Returns the line with the sizes of a run. `jzero plan --machine here` prints it, too.

    engine: this host's decoder; None for a run that samples nothing.
    """
    sizes = {"train.microbatch_tokens": config.train.microbatch_tokens}
    if engine is not None:
        number = num_decoders(engine.mesh)
        sizes["rollout.num_slots"] = engine.max_concurrent_decodes * number
        sizes["rollout.num_pages"] = (engine.pages_per_shard - 1) * engine.num_shards * number
    return "sizes: " + " ".join(f"{name}={size}" for name, size in sizes.items() if size)


def _with_recorded_sizes(config: Config, workdir: Path) -> Config:
    """Returns the config with the sizes of the run in `workdir` in place of those that are 0."""
    recorded = recorded_settings(workdir)
    tokens = config.train.microbatch_tokens or _recorded(recorded, "train.microbatch_tokens")
    slots = config.rollout.num_slots or _recorded(recorded, "rollout.num_slots")
    return _with(config, tokens, slots)


def recorded_settings(workdir: Path) -> dict[str, JsonValue]:
    """Returns the settings of the run in `workdir` by name; {} if there is no run yet."""
    path = workdir / "config.json"
    if not path.exists():
        return {}
    # Not `from_json`: an earlier version may have written the file.
    return flatten(parse_json(read_text(path), path))


def _recorded(settings: Mapping[str, object], name: str) -> int:
    """Returns the number of a setting of config.json; 0 if it has none."""
    value = settings.get(name, 0)
    return value if isinstance(value, int) else 0


def most_tokens(devices: Sequence[DescribedDevice]) -> int:
    """Returns the tokens that a microbatch has at most on all devices, if a row has fewer."""
    return MOST_TOKENS_OF_CPUS if is_cpu(devices) else MOST_TOKENS * len(devices)


def most_slots(devices: Sequence[DescribedDevice]) -> int:
    """Returns the sequences that all devices decode at the same time at most."""
    return MOST_SLOTS_OF_CPUS if is_cpu(devices) else MOST_SLOTS * len(devices)


def hold_a_row(
    config: Config,
    devices: Sequence[DescribedDevice],
) -> tuple[Config, str]:
    """Returns the config with microbatches of at least one row on each device, and a sentence.

    A recipe is made for a number of devices, and a plan may be for more. The sentence is "" if the
    config stays as it is.
    """
    tokens = config.train.microbatch_tokens
    if not tokens:
        return config, ""
    slots = config.rollout.num_slots
    least = build(without_adapter_path(_with(config, 0, slots)), devices).row_tokens
    if tokens >= least:
        return config, ""
    sentence = (
        f"train.microbatch_tokens={tokens} holds less than one row on each of {len(devices)} "
        f"devices: planned with {least}; run with --config.train.microbatch_tokens={least}"
    )
    return _with(config, least, slots), sentence


def choose_sizes(
    config: Config,
    devices: Sequence[DescribedDevice],
    available: float | None,
) -> Config:
    """Returns the config with the largest sizes that fit, in place of those that are 0.

    available: the bytes of a device; None if they are unknown, which gives the smallest sizes. If
    nothing fits, the sizes are the smallest as well, and the memory check refuses the run.
    """
    planned = without_adapter_path(config)
    run = build(planned, devices)
    if config.train.microbatch_tokens and config.rollout.num_slots:
        return config
    if available is not None:
        available = room_for_arrays(run, available)
    least = run.row_tokens
    tokens = config.train.microbatch_tokens
    if not tokens:
        # A multiple of one row on each device, and no more than the rows of a step.
        tokens = max(least, min(run.microbatch_tokens, most_tokens(devices) // least * least))
    slots = config.rollout.num_slots
    if not slots:
        # At least one on each device.
        most = max(most_slots(devices), len(devices))
        slots = min(engine_slots(run), most) if run.sampling is not None else 1
    chosen = _with(config, tokens, slots)
    if available is None:
        return _with(
            config,
            config.train.microbatch_tokens or least,
            config.rollout.num_slots or min(slots, len(devices)),
        )

    # Only sizes that the config left open may shrink. The KV cache has pages for all slots here; a
    # cache that is a little too large is made smaller by `kv_pool`, without fewer slots.
    open_sizes: list[Remedy[PlannedRun]] = []
    if not config.train.microbatch_tokens:
        open_sizes.append(SMALLER_MICROBATCHES)
    if not config.rollout.num_slots:
        open_sizes.append(FEWER_SLOTS)
    fitting = shrink(without_adapter_path(chosen), devices, available, open_sizes).settings
    return _with(config, fitting.train.microbatch_tokens, fitting.rollout.num_slots)


def _with(config: Config, tokens: int, slots: int) -> Config:
    train = replace(config.train, microbatch_tokens=tokens)
    return replace(config, train=train, rollout=replace(config.rollout, num_slots=slots))
