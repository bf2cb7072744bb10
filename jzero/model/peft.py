"""Adapters as directories that `peft`, vLLM and SGLang load, read and written without torch.

    settings = peft.read_settings(directory, config)      # rank, alpha, targets
    adapter = peft.load(directory, config, settings)      # {"layers": {"q": {"a", "b"}, ...}}
    peft.save(out, config, settings, adapter, base="Qwen/Qwen3-4B", dtype="float32")

A directory holds adapter_config.json and adapter_model.safetensors. The weight of a linear layer
with the name `model.layers.0.mlp.up_proj.weight` in the base model has two tensors there, with
PEFT's names:

    base_model.model.model.layers.0.mlp.up_proj.lora_A.weight  [R, inputs]
    base_model.model.model.layers.0.mlp.up_proj.lora_B.weight  [outputs, R]

The ranks and alphas of modules may differ (`rank_pattern`, `alpha_pattern`). Our adapter has one
rank and one scale: factors of a smaller rank are padded with zeros, which stay zero in training,
and B is multiplied by the quotient of the scales.

The names and shapes come from the family's table of tensors. Every expert is a separate module
here, `model.layers.0.mlp.experts.0.up_proj`, even if the checkpoint fuses the experts: `peft` fuses
them when it loads the adapter. A directory is validated completely before anything is allocated,
and settings that jzero would compute differently from `peft` are refused.
"""

import itertools
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

from jzero.config import AdapterConfig
from jzero.errors import UserError, shown
from jzero.files import JsonObject, write_atomic
from jzero.hosts import collectives, processes
from jzero.model import adapters, hub
from jzero.model.architecture import Params, QwenConfig
from jzero.model.directory import file_in, read_json
from jzero.model.families import family_of
from jzero.model.hub import is_on_hub
from jzero.model.huggingface.headers import HeaderEntry, check_type, name_some, read_header
from jzero.model.huggingface.names import EMBEDDING, PREFIXES, model_tensors
from jzero.model.huggingface.reading import (
    have_equal_values,
    open_files,
    read_parameter,
)
from jzero.model.huggingface.schema import Entry, has_kind, wrong_values
from jzero.model.huggingface.tensors import Tensor, checkpoint_tensors, flatten, unflatten
from jzero.model.huggingface.writing import check_dtype, new_directory, write_tensors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"  # written by old versions of PEFT
FILES = (CONFIG, WEIGHTS)

PREFIX = "base_model.model."  # all names start with the attributes of PEFT models
SUFFIX = ".weight"
ALL_LINEAR = "all-linear"  # PEFT's name for all linear layers except the head

# The entries of adapter_config.json that jzero reads.
ENTRIES = {
    "peft_type": Entry("text", is_required=True),
    "r": Entry("whole number", is_required=True, lowest=1, highest=2**16),
    "lora_alpha": Entry("number", is_required=True, lowest=1e-9, highest=1e9),
    "task_type": Entry("text"),
    "use_rslora": Entry("true or false"),
}
PATTERNS = ("rank_pattern", "alpha_pattern")
# Entries without influence on the adapter's output. Dropout is used in training only.
WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
}
# All other entries have to be absent, null, false or empty, or have one of these values. Other
# initializers of PEFT also change the base model, and the adapter's files do not hold that change.
HARMLESS = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal"),
}

Item = TypeVar("Item")


# -- names -----------------------------------------------------------------------------------------


def module_tensors(config: QwenConfig) -> dict[str, list[Tensor]]:
    """Returns the tensors of every parameter, with separate tensors for every expert."""
    family = family_of(config.model_type)
    table = {**family.tensors, **family.other_tensors}
    first_layer_and_expert = 0, 0
    names = {
        stored.name.format(*first_layer_and_expert)
        for stored in table.values()
        if stored.layout == "expert"
    }
    return checkpoint_tensors(config, names)


def modules(config: QwenConfig) -> dict[str, list[str]]:
    """Returns the base's names of each linear layer: {"q": ["model.layers.0...", ...], ...}."""
    return {
        name: [tensor.name.removesuffix(SUFFIX) for tensor in tensors]
        for name, tensors in weight_tensors(config).items()
    }


def adapted_modules(config: QwenConfig, settings: AdapterConfig) -> list[str]:
    """Returns the base's names of all modules that have an adapter."""
    names = modules(config)
    return flatten_lists(names[name] for name in adapters.targets(config, settings))


def weight_tensors(config: QwenConfig) -> dict[str, list[Tensor]]:
    """Returns the tensors of every weight that may have an adapter, by target."""
    tensors = module_tensors(config)
    weights = {name: tensors[f"layers.{name}"] for name in adapters.linear_layers(config)}
    if adapters.OUTPUT in adapters.adaptable(config):
        # The module exists in every model. If it is tied to the embedding, PEFT adds the adapter to
        # the module only.
        stored = family_of(config.model_type).tensors[adapters.OUTPUT]
        shape = config.hidden_size, config.vocab_size
        output = Tensor(stored.name, None, shape, (shape[1], shape[0]), is_linear=True)
        weights[adapters.OUTPUT] = [output]
    return weights


def adapter_tensors(
    config: QwenConfig,
    settings: AdapterConfig,
    ranks: Mapping[str, int] | None = None,
) -> dict[str, list[Tensor]]:
    """Returns the tensors of every factor ("layers.q.a", "layers.q.b", ..., "lm_head.a", ...).

    A factor has one tensor per layer, or one per expert of each layer.
    ranks: of every module, if they differ.
    """
    weights = weight_tensors(config)
    tensors: dict[str, list[Tensor]] = {}
    for name, target in adapters.targets(config, settings).items():
        a, b = [], []
        for weight in weights[name]:
            module = weight.name.removesuffix(SUFFIX)
            rank = ranks[module] if ranks else settings.rank
            # Like the weight of the base, both factors are weights of a torch Linear.
            num_outputs, num_inputs = weight.stored_shape
            a.append(
                Tensor(
                    name=f"{PREFIX}{module}.lora_A{SUFFIX}",
                    layer=weight.layer,
                    expert=weight.expert,
                    shape=(*target.inputs, rank),
                    stored_shape=(rank, num_inputs),
                    is_linear=True,
                )
            )
            b.append(
                Tensor(
                    name=f"{PREFIX}{module}.lora_B{SUFFIX}",
                    layer=weight.layer,
                    expert=weight.expert,
                    shape=(rank, *target.outputs),
                    stored_shape=(num_outputs, rank),
                    is_linear=True,
                )
            )
        leaf = name if name == adapters.OUTPUT else f"layers.{name}"
        tensors[f"{leaf}.a"] = a
        tensors[f"{leaf}.b"] = b
    return tensors


# -- writing ---------------------------------------------------------------------------------------


def save(
    path: str | Path,
    config: QwenConfig,
    settings: AdapterConfig,
    adapter: Params,
    *,
    base: str,
    dtype: str,
) -> None:
    """Writes an adapter to the directory `path`, which appears when it is complete.

    Every host calls this function; the first host writes.
    base: hub id or directory of the base model, where `peft` looks for it.
    dtype: type of the tensors, a key of `huggingface.DTYPES`.
    Raises UserError if `dtype` is unknown or `path` exists and is not an empty directory.
    """
    check_dtype(dtype)
    with new_directory(path) as directory:
        # `fetch_global` is a collective, so every host has to fetch every factor.
        fetched = jax.tree.map(collectives.fetch_global, adapter)
        if processes.is_first_process():
            write(directory, config, settings, fetched, base=base, dtype=dtype)


def write(
    directory: Path,
    config: QwenConfig,
    settings: AdapterConfig,
    adapter: Params,
    *,
    base: str,
    dtype: str,
) -> None:
    """Writes the files of an adapter, as arrays of NumPy, into an existing directory.

    See `save`. Only one host calls this function.
    """
    stored_dtype = check_dtype(dtype)
    assert not config.value_head, "PEFT has no tensor for the head of a critic"
    leaves = flatten(adapter)
    stored = {}
    for leaf, layers in adapter_tensors(config, settings).items():
        host = leaves[leaf].astype(stored_dtype)
        for tensor in layers:
            stored[tensor.name] = tensor.to_stored(tensor.of(host))
    write_tensors(directory / WEIGHTS, stored)
    text = json.dumps(config_json(config, settings, base), indent=2) + "\n"
    write_atomic(directory / CONFIG, text)


def config_json(config: QwenConfig, settings: AdapterConfig, base: str) -> JsonObject:
    """Returns the adapter_config.json of an adapter, as a dict."""
    target_modules = module_endings(config, adapters.targets(config, settings))
    alpha = settings.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,  # readers expect an integer
        "lora_dropout": settings.dropout,
        "target_modules": target_modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "init_lora_weights": True,
        "inference_mode": True,
    }


def module_endings(config: QwenConfig, targets: Collection[str]) -> list[str]:
    """Returns the shortest unambiguous endings of the targets' module names, for target_modules.

    For most layers PEFT and vLLM need only the last part of the name, such as q_proj. A longer
    ending is needed if a layer without an adapter ends alike: with adapters on the shared MLP but
    not on the experts, the ending is shared_expert.up_proj.
    """
    names = modules(config)
    # Endings that would also match a module without an adapter.
    others: set[str] = set()
    for name in names.keys() - set(targets):
        others = others.union(*map(endings, names[name]))
    chosen = {}  # an ordered set
    for name in targets:
        for module in names[name]:
            shortest_first = sorted(endings(module), key=len)
            shortest = next(ending for ending in shortest_first if ending not in others)
            chosen[shortest] = None
    return list(chosen)


# -- reading ---------------------------------------------------------------------------------------


def resolve(path: str | Path) -> Path:
    """Returns a local directory: `path` itself, or the local copy of the hub id `path`."""
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if not is_on_hub(str(path)):
        raise UserError(f"no such directory: {path}: give one that holds {CONFIG} and {WEIGHTS}")
    try:
        return hub.download(str(path), FILES)
    except OSError as error:
        raise UserError(
            f"no such directory, and the hub is unreachable or has no such adapter: {path} "
            f"({error}). Download the adapter where there is a network and give its directory"
        ) from error


def with_path(settings: AdapterConfig, config: QwenConfig) -> AdapterConfig:
    """Returns `settings` with rank, alpha and targets of the adapter at `settings.path`.

    Raises UserError if `settings` has a different value for one of them.
    """
    # A setting that still has its default counts as not set.
    stored = read_settings(resolve(settings.path), config)
    default = AdapterConfig()
    wrong = []
    if settings.rank not in (default.rank, stored.rank):
        wrong.append(f"rank={stored.rank}")
    if settings.alpha not in (default.alpha, stored.alpha):
        wrong.append(f"alpha={stored.alpha:g}")
    if settings.targets and {*adapters.targets(config, settings)} != {*stored.targets}:
        wrong.append(f"targets={','.join(stored.targets)}")
    if wrong:
        raise UserError(
            f"model.adapter.path={settings.path} has {' and '.join(wrong)}, and the settings say "
            "otherwise: remove model.adapter.rank, alpha and targets"
        )
    return replace(settings, rank=stored.rank, alpha=stored.alpha, targets=stored.targets)


def read_settings(path: str | Path, config: QwenConfig) -> AdapterConfig:
    """Returns the rank, the alpha and the targets of the adapter in the directory `path`.

    Raises UserError if adapter_config.json is missing, has an unknown entry, or describes anything
    other than plain LoRA on linear layers of the model.
    """
    directory = Path(path)
    file = file_in(directory, CONFIG)
    if file is None:
        raise UserError(f"no {CONFIG} in {path}: it is not the directory of a PEFT adapter")
    entries = read_json(file)
    wrong = [f"lacks {name}" for name in missing(entries)]
    wrong += wrong_values(entries, ENTRIES)
    if wrong:
        raise UserError(f"{file}: {'; '.join(wrong)}: fix the file or save the adapter again")
    reasons = list(refusals(entries))
    if reasons:
        raise UserError(f"{file} has settings that are not implemented: {'; '.join(reasons)}")

    target_modules = entries.get("target_modules")
    if isinstance(target_modules, str) and target_modules != ALL_LINEAR:
        # Matching a regular expression of an untrusted file may take forever. The tensors' names
        # have the same information.
        targets = targets_of_tensors(directory, config)
    else:
        targets = read_targets(file, target_modules, config)
    settings = AdapterConfig(rank=entries["r"], alpha=float(entries["lora_alpha"]), targets=targets)
    if entries.get("rank_pattern"):
        settings = replace(settings, rank=max(read_ranks(directory, config, settings).values()))
    if entries.get("use_rslora"):
        # Its scale is alpha / sqrt(rank), and ours alpha / rank.
        settings = replace(settings, alpha=settings.alpha * math.sqrt(settings.rank))
    for name, target in adapters.targets(config, settings).items():
        if settings.rank > target.highest_rank:
            raise UserError(
                f"{file}: r={settings.rank} is above {target.highest_rank}, the rank of the "
                f"weight {name} itself: the adapter was trained on a different base model"
            )
    return settings


def read_ranks(directory: Path, config: QwenConfig, settings: AdapterConfig) -> dict[str, int]:
    """Returns the rank of every module, which is an axis of its tensor.

    Raises UserError if a rank is neither `r` nor in `rank_pattern`.
    """
    entries = read_json(directory / CONFIG)
    stored = read_stored(directory, config)
    allowed = {entries["r"], *entries["rank_pattern"].values()}
    ranks = {}
    for module in adapted_modules(config, settings):
        entry = stored.get(f"{PREFIX}{module}.lora_A{SUFFIX}")
        # `check_tensors` reports an absent tensor.
        rank = entry.shape[0] if entry is not None and entry.shape else entries["r"]
        if rank not in allowed:
            raise UserError(
                f"{directory / WEIGHTS}: {module} has rank {rank}, and r and rank_pattern of "
                f"{CONFIG} are {', '.join(map(str, sorted(allowed)))}: the two files belong to "
                "different adapters"
            )
        ranks[module] = rank
    return ranks


def read_scales(
    directory: Path, config: QwenConfig, settings: AdapterConfig, ranks: Mapping[str, int] | None
) -> dict[str, float]:
    """Returns the scale of every module divided by `settings.scale`; empty if all are 1."""
    entries = read_json(directory / CONFIG)
    alphas = entries.get("alpha_pattern") or {}
    if not alphas and not ranks:
        return {}
    scales = {}
    for module in adapted_modules(config, settings):
        # As in PEFT, the first ending counts.
        pattern = next((key for key in alphas if key in endings(module)), None)
        alpha = alphas[pattern] if pattern is not None else entries["lora_alpha"]
        rank = ranks[module] if ranks else settings.rank
        divisor = math.sqrt(rank) if entries.get("use_rslora") else rank
        scales[module] = alpha / divisor / settings.scale
    return {} if set(scales.values()) == {1.0} else scales


def targets_of_tensors(directory: Path, config: QwenConfig) -> tuple[str, ...]:
    """Returns our names of the linear layers that have tensors in the file of the weights.

    Raises UserError if a kind of layer has them in some layers only.
    """
    stored = read_stored(directory, config)
    names = modules(config)
    chosen = {
        name: [module for module in layer_modules if f"{PREFIX}{module}.lora_A{SUFFIX}" in stored]
        for name, layer_modules in names.items()
    }
    targets = targets_on_all_layers(f"{directory / WEIGHTS}", chosen, names)
    if not targets:
        raise UserError(
            f"{directory / WEIGHTS} has no tensor of a linear layer of {config.model_type}: the "
            "adapter was trained on a different base model"
        )
    return targets


def missing(entries: JsonObject) -> list[str]:
    """Returns the required entries that are absent."""
    return [
        name for name, entry in ENTRIES.items() if entry.is_required and entries.get(name) is None
    ]


def refusals(entries: JsonObject) -> Iterator[str]:
    """Yields a phrase for every entry that changes the adapter's output and is not supported."""
    if entries["peft_type"] != "LORA":
        yield f"peft_type={shown(entries['peft_type'])}: only LORA is read"
    if entries.get("task_type") not in (None, "CAUSAL_LM"):
        yield f"task_type={shown(entries['task_type'])}: only CAUSAL_LM is read"
    # Unknown entries may change the output, so they are refused unless they are off.
    readable = {*ENTRIES, *WITHOUT_EFFECT, *PATTERNS, "target_modules"}
    for name in PATTERNS:
        yield from pattern_refusals(name, entries.get(name))
    for name, value in entries.items():
        if name in readable or is_off(value):
            continue
        if name == "modules_to_save":
            yield (
                f"modules_to_save={shown(value)}: complete weights next to an adapter are not "
                "read, merge the adapter into the model with PEFT"
            )
        elif name not in HARMLESS:
            yield f"{shown(name)}={shown(value)}"
        elif value not in HARMLESS[name]:
            yield f"{name}={shown(value)}: only {shown(HARMLESS[name][0])} is read"


def pattern_refusals(name: str, patterns: object) -> Iterator[str]:
    """Yields a phrase if `rank_pattern` or `alpha_pattern` has anything but names and numbers."""
    if is_off(patterns):
        return
    if not isinstance(patterns, dict):
        yield f"{name}={shown(patterns)}: must be an object of modules and numbers"
        return
    for module, number in patterns.items():
        is_rank = name == "rank_pattern"
        kind = "whole number" if is_rank else "number"
        if not has_kind(number, kind) or not 0 < number <= (2**16 if is_rank else 1e9):
            yield f"{name} with {shown(module)}={shown(number)}: must be a {kind} above 0"
        # The ranks are in the tensors, so patterns of ranks are never matched.
        elif not is_rank and not re.fullmatch(r"[\w.]+", module):
            yield f"{name} with {shown(module)}: only endings of names, such as q_proj, are read"


def is_off(value: object) -> bool:
    """Returns whether the value of an entry disables its feature."""
    return value is None or value is False or value == {} or value == []


def read_targets(file: Path, target_modules: object, config: QwenConfig) -> tuple[str, ...]:
    """Returns our names of the linear layers in `target_modules`, in the table's order."""
    names = modules(config)
    if target_modules == ALL_LINEAR:
        return tuple(adapters.linear_layers(config))
    if not has_kind(target_modules, "list of texts") or not target_modules:
        raise UserError(
            f"{file}: target_modules={shown(target_modules)} is neither a list of names of "
            f"modules nor {ALL_LINEAR}: list the modules, such as q_proj and v_proj"
        )
    assert isinstance(target_modules, list)
    requested = set(target_modules)
    chosen = {
        name: [module for module in layer_modules if endings(module) & requested]
        for name, layer_modules in names.items()
    }
    # Every name has to match some module, and a layer has to be matched in all of its modules or in
    # none, because our adapter of a layer type is one stacked array.
    matched_modules = flatten_lists(chosen.values())
    matched_endings = set[str]().union(*map(endings, matched_modules))
    if unknown := requested - matched_endings:
        last_parts = [layer_modules[0].rpartition(".")[2] for layer_modules in names.values()]
        raise UserError(
            f"{file}: target_modules has {name_some(unknown)}, which is not a linear layer of a "
            f"{config.model_type} layer; these are {', '.join(last_parts)}"
        )
    return targets_on_all_layers(f"{file}: target_modules", chosen, names)


def targets_on_all_layers(
    source: str,
    chosen: Mapping[str, list[str]],
    names: Mapping[str, list[str]],
) -> tuple[str, ...]:
    """Returns the targets with chosen modules, which have to be all of their modules.

    source: where the chosen modules are named, for the message of the UserError.
    """
    for name, matched in chosen.items():
        if matched and len(matched) < len(names[name]):
            raise UserError(
                f"{source} has {name_some(set(matched))}, and not that module of the other layers: "
                "an adapter is on all layers here"
            )
    return tuple(name for name, matched in chosen.items() if matched)


def endings(module: str) -> set[str]:
    """Returns the names by which target_modules may refer to a module: every dotted suffix."""
    parts = module.split(".")
    return {".".join(parts[start:]) for start in range(len(parts))}


def flatten_lists(lists: Iterable[list[Item]]) -> list[Item]:
    """Returns the items of all lists, in their order."""
    return list(itertools.chain.from_iterable(lists))


def load(
    path: str | Path,
    config: QwenConfig,
    settings: AdapterConfig,
    sharding: Params | None = None,
    dtype: str = "float32",
    base: Path | None = None,
) -> Params:
    """Returns the factors of the adapter in the directory `path`, as `adapters.init` does.

    settings: the result of `read_settings`.
    base: directory of the base model, to compare with the copy of its output layer that PEFT saves
        next to an adapter of that layer. None: a file with such a copy is refused.
    sharding: a tree like the adapter with the sharding of every leaf; None: the default device.
    dtype: type of the factors.
    Raises UserError if the tensors do not match `settings` or are damaged, before anything is
    allocated, and if a tensor is not finite.
    """
    shardings = flatten(sharding) if sharding is not None else {}
    factors = {}
    for leaf, host in read_factors(Path(path), config, settings, dtype, base):
        if leaf in shardings:
            factors[leaf] = collectives.put_global(host, shardings[leaf])
        else:
            # The factor must not alias the host array, whose memory belongs to NumPy.
            factors[leaf] = jax.device_put(host, may_alias=False)
    # An adapter on the output layer only has no leaf in the layers.
    return {"layers": {}} | unflatten(factors)


def load_to_host(
    path: str | Path,
    config: QwenConfig,
    settings: AdapterConfig,
    dtype: str = "float32",
    base: Path | None = None,
) -> Params:
    """Returns the factors as `load` does, as arrays of NumPy."""
    return {"layers": {}} | unflatten(dict(read_factors(Path(path), config, settings, dtype, base)))


def read_factors(
    directory: Path,
    config: QwenConfig,
    settings: AdapterConfig,
    dtype: str,
    base: Path | None,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the names and values of the factors, one at a time. See `load`."""
    ranks = None
    if read_json(directory / CONFIG).get("rank_pattern"):
        ranks = read_ranks(directory, config, settings)
    scales = read_scales(directory, config, settings, ranks)
    stored, tensors = read_headers(directory, config, settings, base, ranks)
    handles = open_files(stored)
    full_tensors = adapter_tensors(config, settings)
    for leaf, layers in tensors.items():
        if not ranks and not scales:
            yield leaf, read_parameter(stored, handles, layers, dtype)
            continue
        # One module at a time, because their shapes may differ.
        padded = []
        for tensor, full in zip(layers, full_tensors[leaf], strict=True):
            unstacked = tensor._replace(layer=None, expert=None)
            value = read_parameter(stored, handles, [unstacked], dtype)
            if leaf.endswith(".b"):
                module = tensor.name.removeprefix(PREFIX).rpartition(".lora_")[0]
                value = value * np.asarray(scales.get(module, 1.0), value.dtype)
            axes = zip(full.shape, value.shape, strict=True)
            padded.append(np.pad(value, [(0, wanted - size) for wanted, size in axes]))
        name = leaf.removeprefix("layers.").rpartition(".")[0]
        num_stacked = adapters.adaptable(config)[name].stacked
        yield leaf, np.stack(padded).reshape(*num_stacked, *full_tensors[leaf][0].shape)


def read_headers(
    directory: Path,
    config: QwenConfig,
    settings: AdapterConfig,
    base: Path | None,
    ranks: Mapping[str, int] | None = None,
) -> tuple[Mapping[str, HeaderEntry], dict[str, list[Tensor]]]:
    """Returns the headers of the adapter's tensors, which are checked, and what they hold."""
    stored = read_stored(directory, config)
    tensors = adapter_tensors(config, settings, ranks)
    file = directory / WEIGHTS
    if adapters.OUTPUT in adapters.targets(config, settings):
        stored = without_base_copy(file, stored, config, base)
    check_tensors(file, stored, tensors)
    return stored, tensors


def read_stored(directory: Path, config: QwenConfig) -> Mapping[str, HeaderEntry]:
    """Returns the headers of an adapter's tensors, with the base's names of the family's table."""
    file = file_in(directory, WEIGHTS)
    if file is None:
        is_pickled = file_in(directory, PICKLED) is not None
        advice = f"; {PICKLED} may run code and is not read" if is_pickled else ""
        raise UserError(
            f"no {WEIGHTS} in {directory}{advice}: save the adapter with a current PEFT"
        )
    # The header is enough to check all names, shapes and types before anything is read.
    stored = read_header(file)
    # Models with a vision tower have other module names than their checkpoints.
    wanted = family_of(config.model_type).tensors["embed"].name.removesuffix(EMBEDDING)
    for prefix in (wanted, *PREFIXES):
        start = f"{PREFIX}{prefix}layers."
        if any(name.startswith(start) for name in stored):
            return {
                name.replace(start, f"{PREFIX}{wanted}layers.", 1): entry
                for name, entry in stored.items()
            }
    return stored


def without_base_copy(
    file: Path, stored: Mapping[str, HeaderEntry], config: QwenConfig, base: Path | None
) -> Mapping[str, HeaderEntry]:
    """Returns `stored` without the copy of the base's output layer, if it is the base's.

    PEFT saves the copy with an adapter of the output layer, unless it is told not to, and replaces
    the weights of the base with it. Raises UserError if the copy is not known to be the base's.
    """
    output = weight_tensors(config)[adapters.OUTPUT][0]
    copy = f"{PREFIX}{output.name.removesuffix(SUFFIX)}.base_layer{SUFFIX}"
    if copy not in stored:
        return stored
    advice = "save the adapter with save_pretrained(..., save_embedding_layers=False)"
    if base is None:
        raise UserError(f"{file} holds a copy of the base's output layer, {copy}: {advice}")
    leaf = "embed" if config.tie_word_embeddings else adapters.OUTPUT
    [original] = checkpoint_tensors(config)[leaf]
    of_base = model_tensors(base, config)[original.name]
    entry = stored[copy]
    is_same = entry.shape == of_base.shape and have_equal_values(entry, of_base)
    if not is_same:
        raise UserError(
            f"{file}: {copy} is not {original.name} of the model in {base}: the adapter was "
            "trained on a different base model, or its embedding was changed"
        )
    return {name: entry for name, entry in stored.items() if name != copy}


def check_tensors(
    file: Path,
    stored: Mapping[str, HeaderEntry],
    tensors: Mapping[str, list[Tensor]],
) -> None:
    """Raises UserError unless the file holds exactly the tensors of the adapter."""
    expected = {tensor.name: tensor for tensor in flatten_lists(tensors.values())}
    absent = expected.keys() - stored.keys()
    if absent:
        raise UserError(f"{file} lacks {name_some(absent)}: {CONFIG} describes another adapter")
    unexpected = stored.keys() - expected.keys()
    if unexpected:
        raise UserError(
            f"{file} holds unexpected {name_some(unexpected)}: it was trained on a different base "
            f"model, or {CONFIG} describes another adapter"
        )
    for name, entry in sorted(stored.items()):
        expected_shape = expected[name].stored_shape
        if entry.shape != expected_shape:
            raise UserError(
                f"{file}: {name} is {entry.shape}, and {expected_shape} by {CONFIG} and the base: "
                f"the adapter was trained on a different base model, or {CONFIG} describes another "
                "adapter"
            )
        check_type(name, entry)
