"""Adds up the HBM of every phase of a step, and suggests changes where a phase does not fit."""

from collections.abc import Mapping
from dataclasses import dataclass

from jzero.planning.chips import GIB
from jzero.planning.compiling import Measurement
from jzero.planning.planned_run import PlannedRun, pages_that_fit, pool_bytes

# JAX's default share of a GPU's memory, without XLA_PYTHON_CLIENT_MEM_FRACTION.
DEFAULT_GPU_SHARE = 0.75


@dataclass(frozen=True)
class Phase:
    """A part of a step: the programs that run in it, and its parts in addition to STATE."""

    programs: tuple[str, ...]
    parts: tuple[str, ...] = ()


# The parts that are on a device in every phase. The exception is in `parts_on_device`.
STATE = (
    "weights",
    "optimizer",
    "frozen base",
    "reference",
    "teacher",
    "critic weights",
    "critic optimizer",
)
PHASES = {
    "publish": Phase(("publish",)),
    "rollout": Phase(
        ("prefill", "insert", "extend", "generate", "engine-score"),
        ("decoder weights", "KV pool", "prefixes"),
    ),
    "score": Phase(("score", "critic-score", "teacher-score"), ("batches",)),
    "update": Phase(("update", "critic-update"), ("batches",)),
}


def parts_on_device(run: PlannedRun, phase: str) -> dict[str, float]:
    """Returns the bytes of each part that is on a device throughout a phase."""
    # With optimizer.offload, Adam's moments are on the device only during updates.
    offloaded = []
    if run.trainer.policy.settings.offload:
        offloaded += ["optimizer", "critic optimizer"]
    parts = (*STATE, *PHASES[phase].parts)
    return {
        part: run.parts[part]
        for part in parts
        if part in run.parts and (phase == "update" or part not in offloaded)
    }


def phase_totals(run: PlannedRun, measured: Mapping[str, Measurement]) -> dict[str, float]:
    """Returns the bytes on a device at the peak of every phase that has a measured program.

    A phase needs its parts, plus the largest amount that one of its programs adds to its arguments.
    """
    totals = {}
    for phase_name, phase in PHASES.items():
        added = []
        for program, measurement in measured.items():
            # A program is named by its phase and its shape: "prefill 8x256".
            if program.split()[0] in phase.programs:
                # The arguments are counted among the parts, which also hold arrays that this
                # program does not take.
                added.append(measurement.peak_bytes - measurement.argument_bytes)
        if added:
            totals[phase_name] = max(added) + sum(parts_on_device(run, phase_name).values())
    return totals


def suggestions(
    run: PlannedRun,
    totals: Mapping[str, float],
    measured: Mapping[str, Measurement],
) -> list[str]:
    """Returns the changes that would help where a phase does not fit.

    Each line is a flag, with the bytes that it saves on a device if they are known.
    """
    over = {
        name: total - run.chip.hbm_bytes
        for name, total in totals.items()
        if total > run.chip.hbm_bytes
    }
    lines = []
    if "rollout" in over:
        lines += _for_rollout(run, over["rollout"])
    # The decoder weights are on the device in these two phases.
    if "rollout" in over or "publish" in over:
        lines += _for_decoder_weights(run)
    # Offloaded moments are on the host in every phase except updates.
    can_offload = not (run.trainer.policy.settings.offload or run.workload.is_fine_tuning)
    if over.keys() - {"update"} and can_offload:
        lines.append(_saving("optimizer.offload=True", run.parts["optimizer"]))
    if "score" in over or "update" in over:
        lines += _for_update(run, measured)
    if over:
        lines += _for_state(run)
    # Even a run that fits the GPU may not fit JAX's default share of its memory.
    is_gpu = run.devices[0].platform != "tpu"
    if is_gpu and max(totals.values()) > DEFAULT_GPU_SHARE * run.chip.hbm_bytes:
        lines.append(
            "XLA_PYTHON_CLIENT_MEM_FRACTION=.95 in the run's environment: "
            "else JAX takes 75 % of a GPU"
        )
    return lines


def _saving(change: str, saved_bytes: float) -> str:
    return f"--config.{change}: saves {saved_bytes / GIB:.2f} GiB"


def _for_rollout(run: PlannedRun, excess: float) -> list[str]:
    engine, pool = run.engine, run.parts["KV pool"]
    num_shards = engine.num_shards * run.num_decoders
    lines = []
    # One page of every shard absorbs the rounding.
    pages = pages_that_fit(engine, pool - excess) - 1
    if pages >= engine.pages_per_slot:
        saved = pool - pool_bytes(engine, pages)
        lines.append(_saving(f"rollout.num_pages={pages * num_shards}", saved))
    # Without rollout.num_pages, the pool's size is proportional to the slots.
    if engine.slots_per_shard > 1 and not run.workload.num_pages:
        lines.append(_saving(f"rollout.num_slots={run.workload.num_slots // 2}", pool / 2))
    return lines


def _for_decoder_weights(run: PlannedRun) -> list[str]:
    # "tensor" must divide the KV heads, and either the devices of a host or those of several hosts
    # that decode together.
    tensor = 2 * run.mesh.shape["tensor"]
    per_host = run.mesh.size // run.num_hosts
    if run.engine.model.num_key_value_heads % tensor:
        return []
    change = f"mesh.tensor={tensor}"
    if per_host % tensor:
        hosts = tensor // per_host
        if tensor % per_host or run.num_hosts % hosts:
            return []
        change += f" --config.rollout.hosts_per_decoder={hosts}"
    return [_saving(change, run.parts["decoder weights"] / 2)]


def _for_update(run: PlannedRun, measured: Mapping[str, Measurement]) -> list[str]:
    lines = []
    if run.trainer.policy.compute.remat != "full":
        lines.append(
            "--config.model.remat=full: saves only the inputs of layers for the backward pass"
        )
    least = run.row_tokens
    tokens = run.workload.microbatch_tokens
    fewer = tokens // least // 2 * least
    if fewer:
        # The gradient and its reduction take about twice the weights; the remaining temporaries
        # scale with the tokens.
        activations = max(0.0, measured["update"].temp_bytes - 2 * run.parts["weights"])
        saved = (1 - fewer / tokens) * activations
        lines.append(_saving(f"train.microbatch_tokens={fewer}", saved))
    elif run.workload.packs_per_row > 1:
        lines.append(
            f"--config.train.packs_per_row={run.workload.packs_per_row // 2}: shorter rows, "
            f"of which train.microbatch_tokens={least} may hold half as many tokens"
        )
    return lines


def _for_state(run: PlannedRun) -> list[str]:
    state = sum(run.parts.get(part, 0) for part in STATE)
    lines = []
    copies = run.mesh.shape["data"]
    if copies > 1:
        lines.append(_saving("mesh.data=1 --config.mesh.fsdp=-1", state * (1 - 1 / copies)))
    lines.append(
        f"--topology of twice the devices: saves {state / 2 / GIB:.2f} GiB of weights and optimizer"
    )
    return lines
