"""The largest known model that trains on a topology, by arithmetic: `jzero.plan --largest`.

Every cell of the table is a method of training (a line of METHODS) with a length of responses. The
batch is as small as a run can have it: one row with one response on each device, and as many slots
as fit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from jzero.config import Config
from jzero.errors import UserError
from jzero.files import JsonObject
from jzero.model import qwen
from jzero.planning.chips import CHIPS, GIB, DescribedDevice
from jzero.planning.fitting import Fit, fit, setting_flags, split_layers
from jzero.planning.models import KNOWN_MODELS

RESPONSE_TOKENS = (1024, 8192)
GPU_SHARE = 0.95  # of a GPU's memory: XLA_PYTHON_CLIENT_MEM_FRACTION=.95


def train_everything(settings: Config) -> Config:
    """Full fine-tuning."""
    return settings


def train_an_adapter(settings: Config) -> Config:
    """An adapter of rank 32 on every linear layer of the frozen model."""
    adapter = replace(settings.model.adapter, rank=32, targets=())
    return replace(settings, model=replace(settings.model, adapter=adapter, base="native"))


def train_an_adapter_on_int8(settings: Config) -> Config:
    """The same on a base whose linear layers are in 8 bits."""
    settings = train_an_adapter(settings)
    return replace(settings, model=replace(settings.model, base="int8"))


# How to train -> what that changes in the settings. The columns of the table.
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
    flags: tuple[str, ...] = ()  # the settings with which it fits, beside those of the recipe


def largest_models(
    settings: Config, devices: Sequence[DescribedDevice], available: float
) -> list[Largest]:
    """Returns the largest known model of every method and length of responses."""
    found = []
    for method, change in METHODS.items():
        for response_tokens in RESPONSE_TOKENS:
            changed = smallest_batch(change(settings), len(devices), response_tokens)
            cell = Largest(method, response_tokens)
            for hub_id in models_by_size():
                if verdict := fit_model(changed, hub_id, devices, available):
                    flags = setting_flags(settings, verdict.run.trainer.config)
                    cell = replace(
                        cell, model=hub_id, needed_bytes=verdict.needed, flags=tuple(flags)
                    )
                    break
            found.append(cell)
    return found


def models_by_size() -> list[str]:
    """Returns the hub ids of the known models, largest first; of equally large ones the first."""
    sizes: dict[int, str] = {}
    for hub_id, model in KNOWN_MODELS.items():
        sizes.setdefault(qwen.num_params(model), hub_id)
    return [sizes[size] for size in sorted(sizes, reverse=True)]


def smallest_batch(settings: Config, num_devices: int, response_tokens: int) -> Config:
    """Returns the settings with one row of one response on each device, and split weights.

    Devices that share rows (mesh.context) have one row together.

    Fine-tuning has rows of its own, `sft.pack_length`; the responses are those of its suites.
    """
    rollout = replace(
        settings.rollout, max_new_tokens=response_tokens, max_turns=1, max_episode_tokens=0
    )
    row = rollout.max_prompt_tokens + response_tokens
    train = replace(
        settings.train,
        pack_length=0,
        pack_lengths=(),
        pack_buckets=1,
        packs_per_row=1,
        microbatch_tokens=num_devices // settings.mesh.context * row,
    )
    sft = replace(settings.sft, pack_length=row) if settings.sft.data else settings.sft
    mesh = replace(settings.mesh, data=1, fsdp=-1, tensor=1, decode_devices=0)
    return replace(settings, rollout=rollout, train=train, sft=sft, mesh=mesh)


def fit_model(
    settings: Config, hub_id: str, devices: Sequence[DescribedDevice], available: float
) -> Fit | None:
    """Returns how the model fits, with as many slots as possible; None if it does not.

    Layers are split over more devices where it does not fit otherwise.
    """
    for changed, verdict in with_one_slot(settings, hub_id, devices, available):
        if verdict.fits:
            return most_slots(changed, settings.rollout.num_slots, verdict, devices)
    return None


def with_one_slot(
    settings: Config, hub_id: str, devices: Sequence[DescribedDevice], available: float
) -> Iterator[tuple[Config, Fit]]:
    """Yields how the model fits with one slot on each device: most do not fit even then.

    Layers are split over ever more devices, with the settings that say so.
    """
    changed: Config | None = replace(settings, model=replace(settings.model, path=hub_id))
    while changed is not None:
        verdict = fit_slots(changed, len(devices), devices, available)
        if verdict is None:
            return
        yield changed, verdict
        changed = split_layers(changed, verdict.run)


def most_slots(
    settings: Config, wanted: int, least: Fit, devices: Sequence[DescribedDevice]
) -> Fit:
    """Returns how the model fits with `wanted` slots, or half of them, or a quarter, and so on."""
    num_slots = wanted
    while num_slots > len(devices):
        verdict = fit_slots(settings, num_slots, devices, least.available)
        if verdict is not None and verdict.fits:
            return verdict
        num_slots //= 2
    return least


def fit_slots(
    settings: Config, num_slots: int, devices: Sequence[DescribedDevice], available: float
) -> Fit | None:
    """Returns what a run with `num_slots` takes; None if its settings do not fit together."""
    rollout = replace(settings.rollout, num_slots=num_slots, num_pages=0)
    try:
        return fit(replace(settings, rollout=rollout), devices, available)
    except UserError:  # such as heads that the mesh cannot split
        return None


def memory_of(device: DescribedDevice) -> float:
    """Returns the bytes of a device that a program may take."""
    share = 1.0 if device.platform == "tpu" else GPU_SHARE
    return share * CHIPS[device.device_kind].hbm_bytes


def format_largest(
    cells: Sequence[Largest], topology: str, devices: Sequence[DescribedDevice], available: float
) -> str:
    """Returns the table of the cells, a column for each method, and the settings of every cell."""
    methods = list(dict.fromkeys(cell.method for cell in cells))
    by_place = {(cell.method, cell.response_tokens): cell for cell in cells}
    lines = [
        f"largest known model that trains on {topology}: {len(devices)} x "
        f"{devices[0].device_kind}, {available / GIB:.2f} GiB each, by arithmetic",
        f"{'response tokens':<20}" + "".join(f"{method:<32}" for method in methods).rstrip(),
    ]
    for response_tokens in RESPONSE_TOKENS:
        shown = [describe_cell(by_place[method, response_tokens]) for method in methods]
        lines.append(f"{response_tokens:<20}" + "".join(f"{text:<32}" for text in shown).rstrip())
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
