"""`python -m jzero.plan --config configs/countdown.py:qwen2.5-3b --topology v5e:2x4 [--config.section.field=value ...]`

Compiles every program of a run for devices that need not be there, with the run's own code, and says what fits: HBM a
device by part, the total of every phase, FLOPs and bytes, and a roofline of the step. Nothing is downloaded. Exits 1,
with what to change, if a phase does not fit.

Topologies: v5e:2x4 v5e:4x4 ... v5e:16x16, v6e:2x4 ..., v5p:2x2x1 v5p:2x2x2 ..., tpu7x:2x2x1 ... (of libtpu), and the
GPUs of one host, a100:8 h100:8 h200:8 (of jax-cuda12-plugin)."""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import time
from bisect import bisect_left
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from tqdm import tqdm

from jzero import algorithms, cli, config, main
from jzero.distributed.mesh import decode_mesh, make_mesh, train_mesh
from jzero.distributed.publish import decoder_shardings, gather_program
from jzero.errors import UserError
from jzero.files import fill_template, write_atomic
from jzero.model import huggingface, qwen, tokenizer
from jzero.rollout.abstract_calls import abstract_calls
from jzero.rollout.engine import Engine
from jzero.rollout.prefill import PREFILL_TOKENS, prefill_shape, prefill_shapes
from jzero.rollout.sampler import per_host_settings
from jzero.training.trainer import Trainer, abstract_batches, make_trainer, needs_old_logps

GIB = 2**30


# Of a device: bytes of HBM, bf16 FLOPs and bytes of HBM a second; of TPUs what the compiler leaves, of half a TPU7x
Chip = namedtuple("Chip", "hbm flops bandwidth")
DATA = json.loads(Path(__file__).with_name("chips.json").read_text())
CHIPS = {kind: Chip(**values) for kind, values in DATA["chips"].items()}
TPUS = {"v5e": 2, "v6e": 2, "v5p": 3, "tpu7x": 3}  # dimensions of a slice
HOSTS = {
    "TPU v5 lite": "v5e:2x2",
    "TPU v6 lite": "v6e:2x2",
    "TPU v5": "v5p:2x2x1",
    "TPU7x": "tpu7x:2x2x1",
}
ONE_HOST = {
    "1x1": (1, 1, 1),
    "2x4": (2, 4, 1),
}  # two-dimensional slices that are not hosts of 2x2 chips


def devices(topology: str) -> list[Any]:
    """Compile-only devices."""
    family, _, shape = topology.partition(":")
    if family in DATA["gpus"] and shape.isdigit():
        return cuda(family, int(shape))
    sizes = re.fullmatch(r"\d+(x\d+)+", shape)
    if family not in TPUS or not sizes or shape.count("x") + 1 != TPUS[family]:
        raise UserError(
            f"--topology={topology!r} is not known: v5e:2x4 (also 1x1 2x2 4x4 4x8 8x8 8x16 16x16), v6e:2x4 (as v5e), "
            f"v5p:2x2x2 (also 2x2x1 2x2x4 ...), tpu7x:2x2x1, {', '.join(f'{name}:8' for name in DATA['gpus'])}"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("compiling for TPUs needs libtpu: pip install 'jzero[tpu]'")
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # another process that compiles holds libtpu's lock
    } | os.environ
    bounds = {"chips_per_host_bounds": ONE_HOST[shape]} if shape in ONE_HOST else {}
    try:
        return list(topologies.get_topology_desc(topology, "tpu", **bounds).devices)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"--topology={topology}: {error}") from error


def cuda(family: str, count: int) -> list[Any]:
    """GPUs of one host, as XLA describes them."""
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise UserError(
            f"compiling for {family} needs CUDA's compiler: pip install 'jzero[cuda12]'"
        )
    gpu = DATA["gpus"][family]
    chip = CHIPS[gpu["kind"]]
    target = Path(__file__).with_name("gpu_target.txt").read_text()
    target = target.format(**gpu, memory_bandwidth=chip.bandwidth, device_memory_size=chip.hbm)
    slice = topologies.get_topology_desc("", "cuda", target_config=target, topology=f"1x1x{count}")
    return list(slice.devices)


def device_bytes(tree: Any) -> float:
    """Of abstract arrays; what is not one takes nothing."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.ShapeDtypeStruct)]
    return float(sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays))


def measure(program: tuple[Any, tuple], topology: str, cache: Path | None) -> dict[str, Any]:
    """Compile, or remember: seconds and bytes of HBM. JAX's own cache cannot be read without a device."""
    lowered = program[0].lower(*program[1])
    packages = ("jax", "libtpu" if topology.partition(":")[0] in TPUS else "jax-cuda12-plugin")
    versions = [importlib.metadata.version(name) for name in packages]
    kind = (
        jax.tree.leaves(program[1])[0].sharding.mesh.devices.flat[0].device_kind
    )  # the program says how many
    key = hashlib.sha256("\n".join([kind, *versions, lowered.as_text()]).encode()).hexdigest()
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
        sizes = re.findall(r"(?:[Uu]sed |\()([\d.]+)([KMG])", str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or not sizes:
            raise
        needed, given = (
            max(float(size) * 1024 ** "_KMG".index(unit) for size, unit in sizes),
            device_bytes(program[1]),
        )
        found = {"argument_bytes": given, "temp_bytes": needed - given, "peak_bytes": needed}
        found["error"] = str(error).split("\n")[0]
    found["compile_s"] = round(time.perf_counter() - start, 2)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(found))
    return found


KNOWN: dict[str, dict] = json.loads(
    Path(__file__).with_name("known.json").read_text()
)  # hub id: as QwenConfig has it
STATE = ("weights", "optimizer", "reference", "critic weights", "critic optimizer")  # always there
PHASES = {  # phase: its programs, and what else is there
    "publish": (("publish",), ()),
    "rollout": (("prefill", "insert", "generate"), ("decoder weights", "KV pool", "prefixes")),
    "score": (("score", "critic-score"), ("batches",)),
    "update": (("update", "critic-update"), ("batches",)),
}


@dataclass
class Plan:
    """A run on its devices, before anything is compiled."""

    trainer: Trainer
    engine: Engine  # of one host
    hosts: int
    programs: dict[str, tuple[Any, tuple]]  # jitted, abstract arguments
    parts: dict[str, float]  # bytes on a device
    scores: int  # passes before the first optimizer step

    @property
    def chip(self) -> Chip:
        return CHIPS[self.trainer.policy.mesh.devices.flat[0].device_kind]


def named(name: str) -> str:
    """The hub id of "qwen2.5-3b", "Qwen2.5-3B" or "Qwen/Qwen2.5-3B"."""
    ids = {key: hub for hub in KNOWN for key in (hub.lower(), hub.split("/")[1].lower())}
    if name.lower() not in ids:
        raise UserError(
            f"no known model {name!r}; there are {', '.join(hub.split('/')[1] for hub in KNOWN)}"
        )
    return ids[name.lower()]


def architecture(path: str) -> qwen.QwenConfig:
    """Of a local directory, or of a hub id above; nothing is downloaded."""
    if Path(path).expanduser().is_dir():
        return huggingface.load_config(Path(path).expanduser())[0]
    return qwen.QwenConfig(**KNOWN[named(path)])


def build(settings: config.Config, given: list[Any]) -> Plan:
    """As `setup.build`, of known architectures instead of checkpoints."""
    config.validate(settings)
    needed = algorithms.needs_critic(settings.algorithm)
    if settings.model.path:
        model = architecture(settings.model.path)
    else:
        words = len(tokenizer.load(settings.model.tokenizer))
        model = qwen.QwenConfig(vocab_size=words, **vars(settings.model.arch))
    critic = (
        (architecture(settings.critic.path) if settings.critic.path else model) if needed else None
    )
    mesh = train_mesh(settings.mesh.data, settings.mesh.fsdp, settings.mesh.tensor, given)
    decode = decode_mesh(mesh, mesh.devices.flat[0].process_index)
    hosts = mesh.size // decode.size
    if (
        hosts > 1
    ):  # XLA wants every device of a slice in a program whose devices talk to each other: a smaller slice
        decode = make_mesh(devices(HOSTS[given[0].device_kind]), dict(decode.shape))
    rollout = per_host_settings(settings.rollout, hosts)
    engine = Engine(
        model, rollout, decode, (0, 1), settings.model.dtype, settings.model.attention
    )  # any two ids stop
    trainer = make_trainer(settings, model, critic, mesh)
    batches, state = abstract_batches(trainer), trainer.policy.abstract_state()
    placed = lambda x, place: x.update(dtype=engine.dtype, sharding=place)
    publish = gather_program(model, mesh, engine.dtype)
    weights = jax.tree.map(
        placed, jax.eval_shape(publish, state.params), decoder_shardings(model, decode)
    )
    programs = {"publish": (publish, (state.params,))}
    programs |= abstract_calls(engine, weights, prefill_shapes(engine))
    learned = trainer.policy.programs(batches, trainer.layouts)
    old, reference = needs_old_logps(settings), algorithms.needs_reference(settings.algorithm)
    if not old and not reference:
        del learned["score"]
    groups, longest = (
        -(-engine.slots_per_shard // rollout.group_size),
        prefill_shape(engine, rollout.max_prompt_tokens)[0],
    )
    parts = {
        "weights": device_bytes(state.params),
        "optimizer": device_bytes(state.opt_state),
        "decoder weights": device_bytes(weights),
        "KV pool": device_bytes(engine.abstract_state()),
        "prefixes": groups * longest * kv_bytes(engine),
        "batches": device_bytes(learned["update"][1][1]) * settings.train.minibatches,
    }
    if reference:
        parts["reference"] = parts["weights"]
    if trainer.critic:
        learned |= {
            f"critic-{k}": v for k, v in trainer.critic.programs(batches, trainer.layouts).items()
        }
        state = trainer.critic.abstract_state()
        parts |= {
            "critic weights": device_bytes(state.params),
            "critic optimizer": device_bytes(state.opt_state),
        }
    return Plan(trainer, engine, hosts, programs | learned, parts, old + reference + needed)


def kv_bytes(engine: Engine) -> float:
    """Of one token, on a device."""
    state = engine.abstract_state()
    return device_bytes((state.k_pool, state.v_pool)) / (
        engine.pages_per_shard * engine.settings.page_size
    )


def totals(plan: Plan, measured: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Bytes on a device at the peak of every phase: what is there, and what its programs add to their arguments."""
    taken = {
        name: found["peak_bytes"] - found["argument_bytes"] for name, found in measured.items()
    }
    phases = {}
    for phase, (programs, also) in PHASES.items():
        if mine := [size for name, size in taken.items() if name.split()[0] in programs]:
            phases[phase] = max(mine) + sum(plan.parts.get(part, 0) for part in (*STATE, *also))
    return phases


def roofline(plan: Plan) -> dict[str, dict[str, float]]:
    """FLOPs and HBM bytes of a device, and the seconds that the larger takes at its peak, for a step whose responses
    are all as long as they may be. By hand: XLA counts the body of a loop once. Interconnect is not counted."""
    settings, model, mesh = plan.trainer.config, plan.engine.model, plan.trainer.policy.mesh
    rollout, train = settings.rollout, settings.train
    prompt, new, count = (
        rollout.max_prompt_tokens,
        rollout.longest_continuation,
        rollout.num_prompts * rollout.group_size,
    )
    embedding = (
        0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    )  # a table, then
    matmul = 2 * (qwen.num_params(model) - embedding)  # FLOPs of a token
    pair = (
        4 * model.num_hidden_layers * model.num_attention_heads * model.head_dim
    )  # and of a query and its key
    copies = rollout.num_prompts if train.packs_per_row else count  # of prompts in the batch
    answers = count * new * (matmul + pair * (prompt + new / 2))
    forward = answers + copies * prompt * (matmul + pair * prompt / 2)
    passes = (
        4 if settings.model.remat == "full" else 3
    ) * train.epochs  # backward is twice forward
    models = 2 if plan.trainer.critic else 1
    weights, state = plan.parts["decoder weights"], plan.parts["weights"] + plan.parts["optimizer"]
    steps = new * -(-count // (plan.engine.max_concurrent_decodes * plan.hosts))
    cache = plan.engine.slots_per_shard * (prompt + new / 2) * kv_bytes(plan.engine)
    calls = plan.trainer.microbatches[0] * train.minibatches
    learned = 2 * state * train.minibatches + calls * (3 * plan.parts["weights"] + passes * weights)
    phases = {
        "prefill": (
            rollout.num_prompts * prompt * matmul,
            weights * -(-rollout.num_prompts * prompt // PREFILL_TOKENS),
        ),
        "decode": (answers, steps * (weights + cache)),
        "score": (plan.scores * forward, plan.scores * calls * weights),
        "update": (models * passes * forward, models * train.epochs * learned),
    }
    each = {
        name: {"flops": flops / mesh.size, "bytes": float(moved)}
        for name, (flops, moved) in phases.items()
    }
    seconds = lambda x: max(x["flops"] / plan.chip.flops, x["bytes"] / plan.chip.bandwidth)
    return {name: x | {"seconds": seconds(x)} for name, x in each.items()}


def suggest(plan: Plan, phases: dict[str, float], measured: dict[str, dict[str, Any]]) -> list[str]:
    """What to change where a phase does not fit, with the bytes of a device that it saves where they are known."""
    settings, parts, engine, mesh = (
        plan.trainer.config,
        plan.parts,
        plan.engine,
        plan.trainer.policy.mesh,
    )
    over = {name: total - plan.chip.hbm for name, total in phases.items() if total > plan.chip.hbm}
    shards, tensor, out = engine.num_shards * plan.hosts, 2 * mesh.shape["tensor"], []
    add = lambda change, saved: out.append(f"--config.{change}: saves {saved / GIB:.2f} GiB")
    if "rollout" in over:
        pages = (
            engine.pages_per_shard
            - 2
            - int(over["rollout"] / parts["KV pool"] * engine.pages_per_shard)
        )
        if pages >= engine.pages_per_slot:
            add(
                f"rollout.num_pages={pages * shards}",
                (1 - (pages + 1) / engine.pages_per_shard) * parts["KV pool"],
            )
        if engine.slots_per_shard > 1 and not settings.rollout.num_pages:
            add(f"rollout.num_slots={settings.rollout.num_slots // 2}", parts["KV pool"] / 2)
    divides = not (
        plan.engine.model.num_key_value_heads % tensor or mesh.size // plan.hosts % tensor
    )
    if divides and over.keys() & {"rollout", "publish"}:
        add(f"mesh.tensor={tensor}", parts["decoder weights"] / 2)
    if over.keys() & {"score", "update"}:
        if settings.model.remat != "full":
            out.append(
                "--config.model.remat=full: the backward pass keeps the inputs of layers alone"
            )
        least = (
            plan.trainer.layouts[0].tokens * mesh.shape["data"] * mesh.shape["fsdp"]
        )  # the longest is first
        if fewer := settings.train.microbatch_tokens // least // 2 * least:
            activations = max(0.0, measured["update"]["temp_bytes"] - 2 * parts["weights"])
            add(
                f"train.microbatch_tokens={fewer}",
                (1 - fewer / settings.train.microbatch_tokens) * activations,
            )
        elif settings.train.packs_per_row > 1:
            shorter = f"shorter rows, of which train.microbatch_tokens={least} may hold half as many tokens"
            out.append(
                f"--config.train.packs_per_row={settings.train.packs_per_row // 2}: {shorter}"
            )
    state = sum(parts.get(name, 0) for name in STATE)
    if over and mesh.shape["data"] > 1:
        add("mesh.data=1 --config.mesh.fsdp=-1", state * (1 - 1 / mesh.shape["data"]))
    if over:
        out.append(
            f"--topology of twice the devices: saves {state / 2 / GIB:.2f} GiB of weights and optimizer"
        )
    if (
        plan.trainer.policy.mesh.devices.flat[0].platform != "tpu"
        and max(phases.values()) > 0.75 * plan.chip.hbm
    ):
        out.append(
            "XLA_PYTHON_CLIENT_MEM_FRACTION=.95 in the run's environment: else JAX takes 75 % of a GPU"
        )
    return out


def search(plan: Plan, measure: Callable[[tuple], dict[str, Any]]) -> dict[str, int]:
    """The largest train.microbatch_tokens and rollout.num_pages that fit. Of pages one guess, as memory is linear in them."""
    settings, mesh, engine = plan.trainer.config, plan.trainer.policy.mesh, plan.engine

    def fits(program: str, section: str, field: str, value: int) -> bool:
        changed = replace(getattr(settings, section), **{field: value})
        other = build(replace(settings, **{section: changed}), list(mesh.devices.flat))
        total = max(totals(other, {program: measure(other.programs[program])}).values())
        tqdm.write(f"search: {section}.{field}={value}: {program} {total / GIB:.2f} GiB")
        return total <= plan.chip.hbm

    unit = plan.trainer.layouts[0].tokens * mesh.shape["data"] * mesh.shape["fsdp"]
    most = (
        plan.trainer.microbatches[0] * plan.trainer.rows[0] * plan.trainer.layouts[0].tokens // unit
    )  # a whole step
    tqdm.write(
        "search: every try of train.microbatch_tokens compiles the update, which takes minutes"
    )
    tokens = unit * bisect_left(
        range(1, most + 1), True, key=lambda n: not fits("update", "train", "tokens", n * unit)
    )
    shards, page = engine.num_shards * plan.hosts, plan.parts["KV pool"] / engine.pages_per_shard
    free = plan.chip.hbm - totals(plan, {"generate": measure(plan.programs["generate"])})["rollout"]
    pages = min(
        engine.pages_per_shard - 1 + int(free // page),
        engine.slots_per_shard * engine.pages_per_slot,
    )
    while pages >= engine.pages_per_slot and not fits(
        "generate", "rollout", "pages", pages * shards
    ):
        pages = pages * 15 // 16
    return {
        "train.microbatch_tokens": tokens,
        "rollout.num_pages": pages * shards if pages >= engine.pages_per_slot else 0,
    }


def run(
    settings: config.Config, topology: str, cache: Path | None, searching: bool = False
) -> dict[str, Any]:
    """Everything that the table and --json say."""
    plan = build(settings, devices(topology))
    mesh = plan.trainer.policy.mesh
    measured: dict[str, dict[str, Any]] = {}
    for name, program in (bar := tqdm(plan.programs.items(), desc="compile", unit="program")):
        bar.set_postfix_str(name)
        pool = plan.parts["KV pool"] if name.startswith(("insert", "generate")) else 0.0
        measured[name] = measure(program, topology, cache) | {"kv_bytes": pool}
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
        report["search"] = search(plan, lambda program: measure(program, topology, cache))
    return report


def table(report: dict[str, Any]) -> str:
    return fill_template("plan.txt", **report, GIB=GIB)


def command() -> None:
    parser = cli.make_parser("jzero.plan", __doc__)
    parser.add_argument("--topology", required=True, help="devices to compile for, as above")
    parser.add_argument(
        "--model", help=f"instead of the recipe's: {', '.join(id.split('/')[1] for id in KNOWN)}"
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="find the largest train.microbatch_tokens and rollout.num_pages",
    )
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON, too")
    jax.config.update("jax_platforms", "cpu")
    with cli.user_errors():
        given, rest = parser.parse_known_args()
        settings, _ = main.parse(rest)
        if given.model:
            settings.model.path = named(given.model)
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jzero" / "plan"
        report = run(settings, given.topology, home, given.search)
        if given.json:
            write_atomic(given.json, json.dumps(report, indent=1))
    print(table(report))
    sys.exit(0 if report["fits"] else 1)


if __name__ == "__main__":
    command()
