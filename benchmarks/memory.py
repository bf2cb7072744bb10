"""Prints what each phase of a step takes of a device's memory, for models and slices of one's own.

    python benchmarks/memory.py --models Qwen3.5-4B Qwen3-4B --topologies v5e:2x4 v6e:2x4
    python benchmarks/memory.py --models Qwen3-30B-A3B --topologies v6e:4x4 --methods lora int8
    python benchmarks/memory.py --models Qwen2.5-7B --topologies v5p:2x2x2 --context 4

The figures are the planner's arithmetic, in GiB: nothing is compiled or downloaded. The run is that
of `jzero.plan --largest`: one row of one response of --tokens on each device, as many slots as fit,
weights split over all devices. Where the run does not fit, the figures are those with one slot on
each device, and with layers split over as many devices as takes the least.
"""

import argparse
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from jzero.config import Config
from jzero.planning.chips import GIB, described_devices
from jzero.planning.fitting import Fit
from jzero.planning.largest import (
    fit_model,
    memory_of,
    smallest_batch,
    train_an_adapter,
    train_an_adapter_on_int8,
    train_everything,
    with_one_slot,
)
from jzero.planning.models import hub_id_of
from jzero.planning.planned_run import PlannedRun


def with_offloaded_moments(settings: Config) -> Config:
    """Trains the whole model, with Adam's moments on the hosts outside of updates."""
    return replace(settings, optimizer=replace(settings.optimizer, offload=True))


METHODS: dict[str, Callable[[Config], Config]] = {
    "full": train_everything,
    "lora": train_an_adapter,
    "int8": train_an_adapter_on_int8,
    "offload": with_offloaded_moments,
}
RECIPE = Path(__file__).resolve().parents[1] / "configs/countdown.py"
PHASES = ("publish", "rollout", "update")


def with_rank(settings: Config, rank: int) -> Config:
    """Returns the settings with another rank of the adapter, if there is one."""
    if not settings.model.adapter.rank:
        return settings
    adapter = replace(settings.model.adapter, rank=rank)
    return replace(settings, model=replace(settings.model, adapter=adapter))


def verdict_of(settings: Config, model: str, topology: str, tokens: int) -> Fit[PlannedRun] | None:
    """Returns how the model fits, or what it takes with one slot on each device where it does not.

    None if it cannot be split over the devices.
    """
    devices = described_devices(topology)
    hub_id, available = hub_id_of(model), memory_of(devices[0])
    settings = smallest_batch(settings, len(devices), tokens)
    found = fit_model(settings, hub_id, devices, available)
    return found or with_one_slot(settings, hub_id, devices, available)


def row_of(recipe: Config, model: str, topology: str, method: str, rank: int, tokens: int) -> str:
    settings = with_rank(METHODS[method](recipe), rank)
    verdict = verdict_of(settings, model, topology, tokens)
    has_rank = settings.model.adapter.rank > 0
    name = f"{method}, rank {rank}" if has_rank else method
    if settings.optimizer.offload:
        name = "full, offload"
    cells = [model, topology, name, f"{tokens:,}"]
    if verdict is None:
        return f"| {' | '.join([*cells, 'cannot be split'])} |"
    cells += [f"{verdict.phases[phase] / GIB:.1f}" for phase in PHASES]
    sizes = verdict.run.mesh.shape
    cells += [
        f"{verdict.available / GIB:.1f}",
        "yes" if verdict.fits else "no",
        str(verdict.run.engine.settings.num_slots * verdict.run.num_decoders),
        f"{sizes['fsdp']} x {sizes.get('context', 1)} x {sizes['tensor']}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", required=True, help="as jzero.plan --model")
    parser.add_argument("--topologies", nargs="+", required=True)
    parser.add_argument("--methods", nargs="+", default=["full", "lora"], choices=METHODS)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 8192])
    parser.add_argument("--context", type=int, default=1, help="devices that share a row")
    args = parser.parse_args()

    recipe = runpy.run_path(str(RECIPE))["get_config"]("qwen2.5-3b")
    recipe = replace(recipe, mesh=replace(recipe.mesh, context=args.context))
    headings = ("model", "slice", "trained", "tokens", *PHASES, "of", "fits", "slots")
    print(f"| {' | '.join([*headings, 'fsdp x context x tensor'])} |")
    print("|---" * (len(headings) + 1) + "|")
    for model in args.models:
        for topology in args.topologies:
            for method in args.methods:
                for tokens in args.tokens:
                    print(row_of(recipe, model, topology, method, args.rank, tokens), flush=True)


if __name__ == "__main__":
    main()
