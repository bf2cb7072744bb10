"""The entries of config.json on rotary position embeddings, which have had three places by now.

transformers 5 writes `rope_parameters`, with the base and the kind of scaling in it. Version 4
writes `rope_theta` at the top, and the kind of scaling below `rope_scaling`, as `rope_type` or, in
old files, as `type`. A file that has several of them is read only if all of them mean the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any, NamedTuple

from jzero.errors import shown
from jzero.model.rope import SCALINGS, RopeScaling

HuggingFaceConfig = Mapping[str, Any]  # the parsed config.json of a checkpoint

DEFAULT_ROPE_THETA = 10000.0  # of transformers, where config.json names none
PLACES = ("rope_scaling", "rope_parameters")  # transformers takes the first that is not empty
KNOWN_ENTRIES = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}  # of every kind
ORIGINAL = "original_max_position_embeddings"  # the context that a model was first trained with


class Rope(NamedTuple):
    """What a config.json says about rotary position embeddings."""

    kind: str  # "default", or a kind of scaling such as "yarn"
    theta: float  # the base of the frequencies
    scaling: RopeScaling | None = None  # None too where the kind is unknown or lacks an entry


def read_rope(hf_config: HuggingFaceConfig) -> Rope:
    """Returns what `transformers` 5 makes of a config.json without `rope_refusals`."""
    for place in PLACES:
        if hf_config.get(place):
            return rope_of(hf_config, hf_config[place])
    return rope_of(hf_config, {})


def written_rope(theta: float, scaling: RopeScaling | None) -> dict[str, dict[str, Any]]:
    """Returns the entries of a config.json that `transformers` 4 and 5 read as this RoPE."""
    if scaling is None:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    values = {name: value for name, value in asdict(scaling).items() if value is not None}
    entries = {"rope_type": scaling.kind, **values}
    return {"rope_parameters": {**entries, "rope_theta": theta}, "rope_scaling": entries}


def rope_of(hf_config: HuggingFaceConfig, rope: Mapping[str, Any]) -> Rope:
    """Returns what `transformers` makes of one of the two places."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = float(rope.get("rope_theta") or hf_config.get("rope_theta") or DEFAULT_ROPE_THETA)
    if kind not in SCALINGS or missing_entries(hf_config, rope, kind):
        return Rope(kind, theta)
    values: dict[str, Any] = {ORIGINAL: original_context(hf_config, rope)}
    for field in fields(SCALINGS[kind]):
        value = rope.get(field.name)
        if field.name != ORIGINAL and value is not None:
            values[field.name] = value if isinstance(value, bool) else float(value)
    return Rope(kind, theta, SCALINGS[kind](**values))


def original_context(hf_config: HuggingFaceConfig, rope: Mapping[str, Any]) -> int | None:
    """Returns the context that a scaled model was first trained with, as `transformers` does."""
    places = (hf_config.get(ORIGINAL), rope.get(ORIGINAL), hf_config.get("max_position_embeddings"))
    return next((value for value in places if value is not None), None)


def missing_entries(hf_config: HuggingFaceConfig, rope: Mapping[str, Any], kind: str) -> list[str]:
    """Returns the names of the entries without which a scaling of this kind cannot be computed."""
    needed = [field.name for field in fields(SCALINGS[kind]) if field.default is MISSING]
    found = {**rope, ORIGINAL: original_context(hf_config, rope)}
    return [name for name in needed if found.get(name) is None]


def rope_refusals(hf_config: HuggingFaceConfig) -> Iterator[str]:
    """Yields a phrase for unknown kinds of RoPE, and for entries that contradict each other."""
    filled = [place for place in PLACES if hf_config.get(place)]
    found = {place: rope_of(hf_config, hf_config[place]) for place in filled}
    if len(set(found.values())) > 1:
        yield "rope_scaling and rope_parameters differ: remove the one that is not meant"

    for place, rope in found.items():
        entries = hf_config[place]
        if rope.kind == "default" or rope.kind in SCALINGS:
            yield from entry_refusals(hf_config, place, rope)
        else:
            kinds = ", ".join(("default", *SCALINGS))
            yield f"{place} with rope_type={shown(rope.kind)}: only {kinds} are implemented"
        if entries.get("type", rope.kind) != rope.kind:
            yield f"{place} has a type and another rope_type: remove the one that is not meant"
        if hf_config.get("rope_theta") not in (None, rope.theta):
            yield f"rope_theta at the top and another one in {place}: remove the one not meant"

    for entries in (hf_config, *(hf_config[place] for place in filled)):
        if entries.get("partial_rotary_factor") not in (None, 1):
            factor = shown(entries["partial_rotary_factor"])
            yield f"partial_rotary_factor={factor}: only whole heads are rotated here"


def entry_refusals(hf_config: HuggingFaceConfig, place: str, rope: Rope) -> Iterator[str]:
    """Yields a phrase for entries that a kind of RoPE lacks, does not use or cannot have."""
    entries = hf_config[place]
    used = set(KNOWN_ENTRIES)
    if rope.kind in SCALINGS:
        used |= {field.name for field in fields(SCALINGS[rope.kind])}
        if missing := missing_entries(hf_config, entries, rope.kind):
            yield f"{place} with rope_type={rope.kind} lacks {', '.join(missing)}"
        if entries.get(ORIGINAL) not in (None, original_context(hf_config, entries)):
            yield f"{ORIGINAL} at the top and another one in {place}: remove the one not meant"
    if unknown := sorted(entries.keys() - used):
        yield f"{place} with {shown(unknown[0])}, which rope_type={rope.kind} does not use"
    if rope.scaling is not None:
        yield from (f"{place}: {mistake}" for mistake in rope.scaling.mistakes(rope.theta))
