"""`python -m jzero.plan --config configs/countdown.py:qwen2.5-3b --topology v5e:2x4 [--config.section.field=value ...]`

Compiles every program of a run for devices that need not be there, with the run's own code, and says what fits: HBM a
device by part, the total of every phase, FLOPs and bytes, and a roofline of the step. Nothing is downloaded. Exits 1,
with what to change, if a phase does not fit.

Topologies: v5e:2x4 v5e:4x4 ... v5e:16x16, v6e:2x4 ..., v5p:2x2x1 v5p:2x2x2 ..., tpu7x:2x2x1 ... (libtpu; of one host,
v5e:1x1 and up), and a100:8 h100:8 h200:8 (jax-cuda12-plugin), the GPUs of one host."""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from tqdm import tqdm

from jzero import algorithms, cli, config, learn, main, metrics, sharding, tokenizer
from jzero.model import known, qwen
from jzero.rollout import sample
from jzero.rollout.engine import Engine

GIB = 2**30


class Chip(NamedTuple):
    """What one device has. TPU: the HBM that the compiler leaves to a program."""

    hbm: float  # bytes
    flops: float  # bf16 a second
    bandwidth: float  # bytes of HBM a second


CHIPS = {
    "TPU v5 lite": Chip(15.75 * GIB, 197e12, 819e9),
    "TPU v6 lite": Chip(31.25 * GIB, 918e12, 1640e9),
    "TPU v5": Chip(95.74 * GIB, 459e12, 2765e9),
    "TPU7x": Chip(94.75 * GIB, 1153e12, 3690e9),  # half a chip
    "NVIDIA A100-SXM4-80GB": Chip(85100068864, 312e12, 2039e9),
    "NVIDIA H100 80GB HBM3": Chip(84942979072, 989e12, 3352e9),
    "NVIDIA H200 141GB HBM3e": Chip(151397597184, 989e12, 4800e9),
}
TPUS = {"v5e": 2, "v6e": 2, "v5p": 3, "tpu7x": 3}  # dimensions of a slice
ONE_HOST = {"1x1": (1, 1, 1), "2x4": (2, 4, 1)}  # two-dimensional slices that are not hosts of 2x2 chips
GPUS = {  # device kind; multiprocessors, their fp32 units, shared memory of a block and of one, L2, GHz, capability
    "a100": ("NVIDIA A100-SXM4-80GB", 108, 64, 166912, 167936, 41943040, 1.41, 8),
    "h100": ("NVIDIA H100 80GB HBM3", 132, 128, 232448, 233472, 52428800, 1.98, 9),
    "h200": ("NVIDIA H200 141GB HBM3e", 132, 128, 232448, 233472, 52428800, 1.98, 9),
}
STATE = ("weights", "optimizer", "reference", "critic weights", "critic optimizer")  # always there
PHASES = {  # phase: what else is there
    "publish": (),
    "rollout": ("decoder weights", "KV pool", "prefixes"),
    "score": ("batches",),
    "update": ("batches",),
}
PROGRAMS = {  # program: its phase, and the parts that are its arguments
    "publish": ("publish", ("weights",)),
    "prefill": ("rollout", ("decoder weights",)),
    "insert": ("rollout", ("KV pool", "prefixes")),
    "generate": ("rollout", ("decoder weights", "KV pool")),
    "score": ("score", ("weights", "batches")),
    "update": ("update", ("weights", "optimizer", "batches")),
    "critic-score": ("score", ("critic weights", "batches")),
    "critic-update": ("update", ("critic weights", "critic optimizer", "batches")),
}


# -- devices -----------------------------------------------------------------------------------------------------------


def devices(topology: str) -> list[Any]:
    """Compile-only devices, in the order of a run's: by host, then id."""
    family, _, shape = topology.partition(":")
    if family in GPUS and shape.isdigit():
        return cuda(family, int(shape))
    sizes = re.fullmatch(r"\d+(x\d+)+", shape)
    if family not in TPUS or not sizes or shape.count("x") + 1 != TPUS[family]:
        raise ValueError(
            f"--topology={topology!r} is not known: v5e:2x4 (also 1x1 2x2 4x4 4x8 8x8 8x16 16x16), v6e:2x4 (as v5e), "
            f"v5p:2x2x2 (also 2x2x1 2x2x4 ...), tpu7x:2x2x1, {', '.join(f'{name}:8' for name in GPUS)}"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("compiling for TPUs needs libtpu: pip install 'jzero[tpu]'")
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # another process that compiles holds libtpu's lock
    }.items():
        os.environ.setdefault(name, value)
    bounds = {"chips_per_host_bounds": ONE_HOST[shape]} if shape in ONE_HOST else {}
    try:
        found = topologies.get_topology_desc(topology, "tpu", **bounds).devices
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"--topology={topology}: {error}") from error
    return sorted(found, key=lambda device: (device.process_index, device.id))


def cuda(family: str, count: int) -> list[Any]:
    """GPUs of one host, as XLA describes them."""
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda12") is None:
        raise ValueError(f"compiling for {family} needs CUDA's compiler: pip install 'jzero[cuda12]'")
    kind, cores, units, block, core, cache, clock, capability = GPUS[family]
    description = f"""gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 threads_per_core_limit: 2048
      shared_memory_per_core: {core} shared_memory_per_block_optin: {block} core_count: {cores} fpus_per_core: {units}
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
      registers_per_core_limit: 65536 registers_per_block_limit: 65536 clock_rate_ghz: {clock} l2_cache_size: {cache}
      memory_bandwidth: {int(CHIPS[kind].bandwidth)} device_memory_size: {int(CHIPS[kind].hbm)}
      cuda_compute_capability {{ major: {capability} }} }}
      platform_name: "CUDA" device_description_str: "{kind}" """
    shape = {"target_config": description, "topology": f"1x1x{count}"}
    return list(topologies.get_topology_desc("", "cuda", **shape).devices)


# -- programs and their memory -----------------------------------------------------------------------------------------


@dataclass
class Plan:
    """A run on its devices, before anything is compiled."""

    config: config.Config
    model: qwen.QwenConfig
    trainer: learn.Trainer
    engine: Engine  # of one host
    hosts: int
    programs: dict[str, tuple[Any, tuple]]  # jitted, abstract arguments
    parts: dict[str, float]  # bytes on a device

    @property
    def chip(self) -> Chip:
        return CHIPS[self.trainer.policy.mesh.devices.flat[0].device_kind]


def build(settings: config.Config, devices: list[Any]) -> Plan:
    """As `train.build`, of known architectures instead of checkpoints."""
    config.validate(settings)
    path, needed = settings.model.path, algorithms.needs_critic(settings.algorithm)
    model = known.architecture(path) if path else None
    if model is None:
        words = len(tokenizer.load(settings.model.tokenizer))
        model = qwen.QwenConfig(vocab_size=words, **vars(settings.model.arch))
    critic = (known.architecture(settings.critic.path) if settings.critic.path else model) if needed else None
    mesh = sharding.train_mesh(settings.mesh.data, settings.mesh.fsdp, settings.mesh.tensor, devices)
    decode = sharding.decode_mesh(mesh)
    hosts = mesh.size // decode.size
    share = lambda count: -(-count // hosts)
    rollout = replace(settings.rollout, slots=share(settings.rollout.slots), pages=share(settings.rollout.pages))
    engine = Engine(model, rollout, decode, (0, 1), settings.model.dtype)  # any two ids stop
    trainer = learn.make_trainer(settings, model, critic, mesh)
    batches, state = learn.abstract_batches(trainer), trainer.policy.abstract_state()
    weights = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, engine.dtype, sharding=place),
        state.params,
        sharding.param_shardings(model, decode),
    )
    programs = {"publish": (sharding.gather_program(model, mesh, engine.dtype), (state.params,))}
    prefills = sample.prefills(engine)
    programs |= engine.programs(weights, prefills)
    learned = trainer.policy.programs(batches, trainer.layouts)
    scores = settings.algorithm.old == "trainer" and settings.train.minibatches * settings.train.epochs > 1
    if not (scores or algorithms.needs_reference(settings.algorithm)):
        del learned["score"]  # which nothing asks for
    groups, longest = -(-engine.shard_slots // rollout.group), sample.prefill_width(engine, rollout.max_prompt)
    parts = {
        "weights": device_bytes(state.params),
        "optimizer": device_bytes(state.opt_state),
        "decoder weights": device_bytes(weights),
        "KV pool": device_bytes(engine.abstract_state()),
        "prefixes": groups * longest * kv_bytes(model, engine),
        "batches": device_bytes([args[1] for _, args in learned.values()][-1]) * settings.train.minibatches,
    }
    if algorithms.needs_reference(settings.algorithm):
        parts["reference"] = parts["weights"]
    if trainer.critic:
        learned |= {f"critic-{k}": v for k, v in trainer.critic.programs(batches, trainer.layouts).items()}
        state = trainer.critic.abstract_state()
        parts |= {"critic weights": device_bytes(state.params), "critic optimizer": device_bytes(state.opt_state)}
    return Plan(settings, model, trainer, engine, hosts, programs | learned, parts)


def device_bytes(tree: Any) -> float:
    return float(sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)))


def kv_bytes(model: qwen.QwenConfig, engine: Engine) -> float:
    """Of one token, on a device."""
    heads = model.num_key_value_heads / (engine.mesh.shape["tensor"] if engine.kv_axis else 1)
    return 2 * model.num_hidden_layers * heads * model.head_dim * engine.storage.itemsize


def measure(program: tuple[Any, tuple], topology: str, cache: Path | None) -> dict[str, Any]:
    """Compile, or remember: seconds and bytes of HBM. JAX's own cache cannot be read without a device."""
    lowered = program[0].lower(*program[1])
    packages = ("jax", "libtpu" if topology.partition(":")[0] in TPUS else "jax-cuda12-plugin")
    versions = [importlib.metadata.version(name) for name in packages]
    key = hashlib.sha256("\n".join([topology, *versions, lowered.as_text()]).encode()).hexdigest()
    file = cache / f"{key}.json" if cache else None
    if file and file.exists():
        return json.loads(file.read_text())
    start = time.perf_counter()
    try:
        memory = lowered.compile().memory_analysis()
        found = {
            "argument_bytes": memory.argument_size_in_bytes,
            "temp_bytes": memory.temp_size_in_bytes,
            "peak_bytes": memory.peak_memory_in_bytes,
        }
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        units = {"K": 2**10, "M": 2**20, "G": 2**30}
        sizes = re.findall(r"(?:[Uu]sed |\()([\d.]+)([KMG])", str(error)) or [("0", "G")]
        needed = max(float(size) * units[unit] for size, unit in sizes)
        found = {"argument_bytes": 0, "temp_bytes": needed, "peak_bytes": needed, "error": str(error).split("\n")[0]}
    found["compile_s"] = round(time.perf_counter() - start, 2)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        metrics.write_atomic(file, json.dumps(found))
    return found


def totals(plan: Plan, measured: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Bytes on a device at the peak of every phase: what its programs use, and what stays beside them."""
    phases: dict[str, float] = {}
    for name, found in measured.items():
        phase, own = PROGRAMS[name.split()[0]]
        beside = [plan.parts.get(part, 0) for part in (*STATE, *PHASES[phase]) if part not in own]
        phases[phase] = max(phases.get(phase, 0), found["peak_bytes"] + sum(beside))
    return phases


def roofline(plan: Plan) -> dict[str, dict[str, float]]:
    """FLOPs and HBM bytes a device, and seconds at its peak of the larger, of a step whose responses are all as long as
    they may be. Matmuls and attention; XLA's own count takes the body of a loop once. Interconnect is not counted."""
    model, rollout, train, n = plan.model, plan.config.rollout, plan.config.train, plan.trainer.policy.mesh.size
    tied = model.tie_word_embeddings
    matmuls = qwen.num_params(model) - (0 if tied else model.vocab_size * model.hidden_size)
    pairs = 4 * model.num_hidden_layers * model.num_attention_heads * model.head_dim  # FLOPs of a query and a key
    prompt, new, count = rollout.max_prompt, rollout.max_new, rollout.prompts * rollout.group
    copies = rollout.prompts if train.row_slots else count  # of prompts in the batch
    tokens = count * new + copies * prompt
    seen = count * new * (prompt + new / 2) + copies * prompt**2 / 2
    forward = 2 * matmuls * tokens + pairs * seen
    passes = 4 if plan.config.model.remat == "full" else 3  # forward and twice backward
    weights, calls = plan.parts["decoder weights"], sum(plan.trainer.microbatches[:1]) * train.minibatches
    steps = new * -(-count // (plan.engine.max_concurrent_decodes * plan.hosts))
    kv = plan.engine.shard_slots * (prompt + new / 2) * kv_bytes(model, plan.engine)
    state = plan.parts["weights"] + plan.parts["optimizer"]
    critic = 2 if plan.trainer.critic else 1
    optimizer = 2 * state * train.minibatches  # read and written
    gradient = 3 * plan.parts["weights"] * calls  # of a microbatch written, added to the sum
    phases = {
        "prefill": (2 * matmuls * rollout.prompts * prompt, weights * len(sample.prefills(plan.engine))),
        "decode": (2 * matmuls * count * new + pairs * count * new * (prompt + new / 2), steps * (weights + kv)),
        "score": (forward * sum("score" in name for name in plan.programs), calls * weights),
        "update": (critic * passes * forward * train.epochs, critic * train.epochs * (optimizer + gradient)),
    }
    out = {}
    for name, (flops, moved) in phases.items():
        seconds = max(flops / n / plan.chip.flops, moved / plan.chip.bandwidth)
        out[name] = {"flops": flops / n, "bytes": float(moved), "seconds": seconds}
    return out


def suggest(plan: Plan, phases: dict[str, float], measured: dict[str, dict[str, Any]]) -> list[str]:
    """What to change where a phase does not fit, with the bytes a device that it saves where they are known."""
    settings, hbm, parts, mesh = plan.config, plan.chip.hbm, plan.parts, plan.trainer.policy.mesh
    over = {name: total - hbm for name, total in phases.items() if total > hbm}
    gib = lambda x: f"saves {x / GIB:.2f} GiB"
    out = []
    if not over:
        return out
    engine = plan.engine
    if "rollout" in over:
        fewer = engine.shard_pages - 1 - ceil(over["rollout"] / parts["KV pool"] * engine.shard_pages)
        if fewer >= engine.per_slot:
            out.append(f"rollout.pages={fewer * engine.shards * plan.hosts}: {gib(over['rollout'])}")
        if plan.config.rollout.slots > engine.shards * plan.hosts and not settings.rollout.pages:
            out.append(f"rollout.slots={settings.rollout.slots // 2}: {gib(parts['KV pool'] / 2)}")
    tensor = mesh.shape["tensor"] * 2
    if {"rollout", "publish"} & set(over) and plan.model.num_key_value_heads % tensor == 0 and mesh.size % tensor == 0:
        out.append(f"mesh.tensor={tensor}: {gib(parts['decoder weights'] / 2)} of the decoder's weights")
    if {"score", "update"} & set(over):
        if settings.model.remat != "full":
            out.append("model.remat=full: keeps the inputs of the layers alone")
        least = max(layout.tokens for layout in plan.trainer.layouts) * mesh.shape["data"] * mesh.shape["fsdp"]
        if settings.train.tokens // least > 1:
            activations = max(0.0, measured["update"]["temp_bytes"] - 2 * parts["weights"])
            fewer = settings.train.tokens // least // 2 * least
            out.append(f"train.tokens={fewer}: about {gib(activations * (1 - fewer / settings.train.tokens))}")
        elif settings.train.row_slots > 1:
            half = settings.train.row_slots // 2
            out.append(f"train.row_slots={half}: shorter rows, so that train.tokens can be about {least // 2}")
    if mesh.shape["data"] > 1:
        saved = (parts["weights"] + parts["optimizer"]) * (1 - 1 / mesh.shape["data"])
        out.append(f"mesh.data=1 mesh.fsdp=-1: {gib(saved)} of weights and optimizer")
    state = sum(parts.get(name, 0) for name in STATE)
    return [*out, f"twice the devices: {gib(state / 2)} of the trainer's state"]


# -- search ------------------------------------------------------------------------------------------------------------


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest 1 <= n <= most that fits, to an eighth; 0: none. Doubles, then bisects."""
    low, high = 0, most + 1
    while high - low > max(1, low // 8):
        middle = min(2 * low or 1, most) if high > most else (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def search(plan: Plan, compile: Callable[[Plan, str], dict[str, Any]]) -> dict[str, int]:
    """The largest train.tokens and rollout.pages that fit."""
    chip, all_devices = plan.chip, list(plan.trainer.policy.mesh.devices.flat)
    mesh, layouts = plan.trainer.policy.mesh, plan.trainer.layouts
    unit = max(layout.tokens for layout in layouts) * mesh.shape["data"] * mesh.shape["fsdp"]
    most = plan.config.rollout.prompts * plan.config.rollout.group * plan.config.rollout.max_new // unit

    def changed(**sections: Any) -> Plan:
        new = {name: replace(getattr(plan.config, name), **values) for name, values in sections.items()}
        return build(replace(plan.config, **new), all_devices)

    def fits(other: Plan, name: str) -> bool:
        found = compile(other, name)
        total = max(totals(other, {name: found}).values())
        tqdm.write(f"  {name}: {total / GIB:.2f} GiB in all, {'fits' if total <= chip.hbm else 'does not fit'}")
        return total <= chip.hbm

    def tokens(n: int) -> bool:
        tqdm.write(f"train.tokens={n * unit}")
        return fits(changed(train={"tokens": n * unit}), "update")

    def pages(n: int) -> bool:
        tqdm.write(f"rollout.pages={n * shards}")
        return fits(changed(rollout={"pages": n * shards}), "generate")

    shards, engine = plan.engine.shards * plan.hosts, plan.engine
    found = {"train.tokens": largest(tokens, max(1, most)) * unit}
    # The pool is linear in its pages: one compile, and perhaps some lower guesses.
    page = plan.engine.settings.page * kv_bytes(plan.model, engine)
    free = chip.hbm - totals(plan, {"generate": compile(plan, "generate")})["rollout"]
    n = min(engine.shard_pages - 1 + int(free // page), engine.shard_slots * engine.per_slot)
    while n >= engine.per_slot and not pages(n):
        n = n * 15 // 16
    return found | {"rollout.pages": n * shards if n >= engine.per_slot else 0}


# -- the command -------------------------------------------------------------------------------------------------------


def run(settings: config.Config, topology: str, cache: Path | None, searching: bool = False) -> dict[str, Any]:
    """Everything that the table and --json say."""
    plan = build(settings, devices(topology))
    mesh = plan.trainer.policy.mesh
    measured: dict[str, dict[str, Any]] = {}
    for name in (bar := tqdm(plan.programs, desc="compile", unit="program")):
        bar.set_postfix_str(name)
        found = measure(plan.programs[name], topology, cache)
        pool = name.split()[0] in ("insert", "generate")
        measured[name] = found | {"kv_bytes": plan.parts["KV pool"] if pool else 0.0}
    phases, estimate = totals(plan, measured), roofline(plan)
    report = {
        "config": settings.name,
        "model": settings.model.path,
        "topology": topology,
        "device_kind": mesh.devices.flat[0].device_kind,
        "devices": mesh.size,
        "hosts": plan.hosts,
        "mesh": dict(mesh.shape),
        "hbm_bytes": plan.chip.hbm,
        "fits": all(total <= plan.chip.hbm for total in phases.values()),
        "parts": plan.parts,
        "phases": phases,
        "programs": measured,
        "roofline": estimate,
        "step_s": sum(phase["seconds"] for phase in estimate.values()),
        "suggestions": suggest(plan, phases, measured),
    }
    if searching:
        report["search"] = search(plan, lambda plan, name: measure(plan.programs[name], topology, cache))
    return report


def table(report: dict[str, Any]) -> str:
    gib = lambda x: f"{x / GIB:10.3f}"
    axes = " x ".join(f"{name} {size}" for name, size in report["mesh"].items())
    lines = [
        f"{report['config']} on {report['topology']}: {report['devices']} x {report['device_kind']} ({axes}), "
        f"{report['hosts']} hosts, {report['hbm_bytes'] / GIB:.2f} GiB each",
        f"\n{'part':<20}{'GiB':>10}",
        *(f"{name:<20}{gib(size)}" for name, size in report["parts"].items()),
        f"\n{'program':<20}{'arguments':>10}{'temp':>10}{'peak':>10}{'compile s':>11}",
    ]
    for name, found in report["programs"].items():
        sizes = "".join(gib(found[key]) for key in ("argument_bytes", "temp_bytes", "peak_bytes"))
        lines.append(f"{name:<20}{sizes}{found['compile_s']:>11.1f}  {found.get('error', '')[:120]}".rstrip())
    lines.append(f"\n{'phase':<20}{'GiB':>10}{'of HBM':>10}")
    for name, total in report["phases"].items():
        over = "" if total <= report["hbm_bytes"] else "  DOES NOT FIT"
        lines.append(f"{name:<20}{gib(total)}{100 * total / report['hbm_bytes']:>9.0f}%{over}")
    lines.append(f"\n{'roofline, a device':<20}{'TFLOP':>10}{'GB moved':>10}{'seconds':>10}")
    for name, each in report["roofline"].items():
        lines.append(f"{name:<20}{each['flops'] / 1e12:>10.1f}{each['bytes'] / 1e9:>10.1f}{each['seconds']:>10.2f}")
    lines.append(f"{'step':<40}{report['step_s']:>10.2f}\n")
    lines += [f"largest that fits: {name}={value}" for name, value in report.get("search", {}).items()]
    lines.append("fits" if report["fits"] else "does not fit; try")
    return "\n".join([*lines, *(f"  --config.{line}" for line in report["suggestions"])])


def parse(arguments: list[str]) -> tuple[config.Config, Any]:
    parser = cli.parser("jzero.plan", __doc__)
    parser.add_argument("--topology", required=True, help="devices to compile for, as above")
    parser.add_argument("--model", help=f"instead of the recipe's: {', '.join(id.split('/')[1] for id in known.KNOWN)}")
    parser.add_argument("--search", action="store_true", help="find the largest train.tokens and rollout.pages")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON, too")
    parser.add_argument("--no-cache", action="store_true", help="compile again what ~/.cache/jzero/plan remembers")
    given, rest = parser.parse_known_args(arguments)
    settings = main.parse(["jzero.plan", *rest])
    if given.model:
        settings.model.path = known.named(given.model)
    return settings, given


def command() -> None:
    jax.config.update("jax_platforms", "cpu")
    with cli.mistakes():
        settings, given = parse(sys.argv[1:])
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        report = run(settings, given.topology, None if given.no_cache else home / "jzero" / "plan", given.search)
        if given.json:
            metrics.write_atomic(given.json, json.dumps(report, indent=1))
    print(table(report))
    sys.exit(0 if report["fits"] else 1)


if __name__ == "__main__":
    command()
