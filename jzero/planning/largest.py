"""Finds the largest known model that trains on a topology, by arithmetic: `jzero.plan --largest`.

Each cell of the table combines a training method (a line of METHODS) with a response length. The
batch is the smallest possible: one row with one response on each device, and as many slots as fit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jzero.blueprint import with_needed_slots
from jzero.config import Config, Together
from jzero.errors import UserError
from jzero.files import JsonObject
from jzero.model import qwen
from jzero.planning.chips import CHIPS, GIB, DescribedDevice
from jzero.planning.fitting import Fit, setting_flags, shrink
from jzero.planning.models import KNOWN_MODELS
from jzero.planning.planned_run import PlannedRun
from jzero.planning.remedies import FEWER_SLOTS, SPLIT_LAYERS

RESPONSE_TOKENS = (1024, 8192)
GPU_SHARE = 0.95  # of a GPU's memory, as with XLA_PYTHON_CLIENT_MEM_FRACTION=.95


def train_everything(settings: Config) -> Config:
    """Full fine-tuning."""
    return settings


def train_an_adapter(settings: Config) -> Config:
    """An adapter of rank 32 on every linear layer of the frozen model."""
    adapter = replace(settings.model.adapter, rank=32, targets=())
    return replace(settings, model=replace(settings.model, adapter=adapter, base="native"))


def train_an_adapter_on_int8(settings: Config) -> Config:
    """An adapter of rank 32 on a base with int8 linear layers."""
    settings = train_an_adapter(settings)
    return replace(settings, model=replace(settings.model, base="int8"))


# Training method -> function that applies it to the settings. The columns of the table.
METHODS: dict[str, Callable[[Config], Config]] = {
    "full": train_everything,
    "LoRA, rank 32": train_an_adapter,
    "LoRA 32, int8 base": train_an_adapter_on_int8,
}


@dataclass(frozen=True)
class Largest:
    """The largest model of one cell; `model` is "" if none fits."""

    method: str
    response_tokens: int
    model: str = ""
    needed_bytes: float = 0.0  # of a device
    flags: tuple[str, ...] = ()  # the settings with which it fits, besides the recipe's


def largest_models(
    settings: Config,
    devices: Sequence[DescribedDevice],
    available: float,
) -> list[Largest]:
    """Returns the largest known model for each method and response length."""
    cells = []
    for method, change in METHODS.items():
        for response_tokens in RESPONSE_TOKENS:
            changed = smallest_batch(change(settings), len(devices), response_tokens)
            cell = Largest(method, response_tokens)
            # The largest come first, so that the first one that fits is the answer.
            for hub_id in models_by_size():
                if verdict := fit_model(changed, hub_id, devices, available):
                    found = verdict.settings
                    needed = with_needed_slots(found.rollout, found.eval, found.sft is not None)
                    flags = setting_flags(settings, replace(found, rollout=needed))
                    cell = replace(
                        cell, model=hub_id, needed_bytes=verdict.needed, flags=tuple(flags)
                    )
                    break
            cells.append(cell)
    return cells


def models_by_size() -> list[str]:
    """Returns the hub ids of the known models, largest first, with one model for each size."""
    # Of several models with the same number of parameters, only the first is tried.
    sizes: dict[int, str] = {}
    for hub_id, model in KNOWN_MODELS.items():
        # The arithmetic does not count the pages that decoding gathers for sliding windows.
        if not model.sliding_window:
            sizes.setdefault(qwen.num_params(model), hub_id)
    return [sizes[size] for size in sorted(sizes, reverse=True)]


def smallest_batch(settings: Config, num_devices: int, response_tokens: int) -> Config:
    """Returns the settings with one row of one response on each device, and sharded weights.

    With context parallelism, the devices of one context group share one row. For fine-tuning, the
    row is sft.pack_length, and the responses belong to the evaluation suites.
    """
    asynchronous = Together(settings.rollout.max_staleness, settings.rollout.max_running_groups)
    rollout = replace(
        settings.rollout,
        max_new_tokens=response_tokens,
        max_turns=1,
        max_episode_tokens=0,
        placement=asynchronous,
    )
    row = rollout.max_prompt_tokens + response_tokens
    train = replace(
        settings.train,
        pack="longest",
        packs_per_row=1,
        microbatch_tokens=num_devices // settings.mesh.context * row,
    )
    sft = settings.sft and replace(settings.sft, pack_length=row)
    # Full sharding needs the least memory for weights and optimizer.
    mesh = replace(settings.mesh, data=1, fsdp=-1, tensor=1)
    return replace(settings, rollout=rollout, train=train, sft=sft, mesh=mesh)


def fit_model(
    settings: Config,
    hub_id: str,
    devices: Sequence[DescribedDevice],
    available: float,
) -> Fit[PlannedRun] | None:
    """Returns how the model fits, with as many slots as possible; None if it does not fit.

    Tensor parallelism is raised only if the model does not fit otherwise.
    """
    # Most models do not fit even with one slot on each device.
    least = with_one_slot(settings, hub_id, devices, available)
    if least is None or not least.fits:
        return None
    rollout = replace(settings.rollout, num_pages=0)
    all_slots = replace(least.settings, rollout=rollout)
    most = shrink(all_slots, devices, available, [FEWER_SLOTS])
    return most if most.fits else least


def with_one_slot(
    settings: Config,
    hub_id: str,
    devices: Sequence[DescribedDevice],
    available: float,
) -> Fit[PlannedRun] | None:
    """Returns how the model fits with one slot on each device, and with split layers if needed.

    None if the settings are invalid for it.
    """
    rollout = replace(settings.rollout, num_slots=len(devices), num_pages=0)
    model = replace(settings.model, path=hub_id)
    try:
        changed = replace(settings, model=model, rollout=rollout)
        return shrink(changed, devices, available, [SPLIT_LAYERS])
    except UserError:  # for example, heads that the mesh cannot split
        return None


def memory_of(device: DescribedDevice) -> float:
    """Returns the bytes of a device that a program may use."""
    share = 1.0 if device.platform == "tpu" else GPU_SHARE
    return share * CHIPS[device.device_kind].hbm_bytes


def format_largest(
    cells: Sequence[Largest],
    topology: str,
    devices: Sequence[DescribedDevice],
    available: float,
) -> str:
    """Returns a table with a row for each method, followed by the settings of each cell."""
    methods = list(dict.fromkeys(cell.method for cell in cells))
    by_place = {(cell.method, cell.response_tokens): cell for cell in cells}
    lines = [
        f"largest known model that trains on {topology}: {len(devices)} x "
        f"{devices[0].device_kind}, {available / GIB:.2f} GiB each, by arithmetic",
        f"{'response tokens':<18}" + "".join(f"{count:<31}" for count in RESPONSE_TOKENS).rstrip(),
    ]
    for method in methods:
        shown = [describe_cell(by_place[method, count]) for count in RESPONSE_TOKENS]
        lines.append(f"{method:<18}" + "".join(f"{text:<31}" for text in shown).rstrip())
    lines.append("")
    for cell in cells:
        if cell.model:
            lines.append(f"{cell.method}, {cell.response_tokens}: {' '.join(cell.flags)}")
    return "\n".join(lines).rstrip()


def describe_cell(cell: Largest) -> str:
    if not cell.model:
        return "none"
    return f"{cell.model.split('/')[1]} ({cell.needed_bytes / GIB:.1f} GiB)"


def as_json(cells: Sequence[Largest], topology: str, available: float) -> JsonObject:
    return {
        "topology": topology,
        "available_bytes": available,
        "largest": [vars(cell) | {"flags": list(cell.flags)} for cell in cells],
    }
