"""The entries of config.json about rotary position embeddings, which exist in three forms.

transformers 5 writes `rope_parameters`, which contain the base and the kind of scaling. Version 4
writes `rope_theta` at the top level, and the kind of scaling below `rope_scaling`, as `rope_type`
or, in old files, as `type`. A file with several forms is read only if all of them agree.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any, NamedTuple

from jzero.errors import shown
from jzero.model.rope import SCALINGS, RopeScaling

HuggingFaceConfig = Mapping[str, Any]  # the parsed config.json of a checkpoint

DEFAULT_ROPE_THETA = 10000.0  # the default of transformers
PLACES = ("rope_scaling", "rope_parameters")  # transformers reads the first non-empty one
KNOWN_ENTRIES = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}  # of every kind
# Entries that transformers does not read. DeepSeek-R1-0528-Qwen3-8B has the amplitude of another
# program.
IGNORED_ENTRIES = {"yarn": {"attn_factor"}}
ORIGINAL = "original_max_position_embeddings"  # the context before the scaling


class Rope(NamedTuple):
    """The settings of rotary position embeddings in a config.json."""

    kind: str  # "default", or a kind of scaling such as "yarn"
    theta: float  # the base of the frequencies
    scaling: RopeScaling | None = None  # also None if the kind is unknown or lacks an entry


def read_rope(hf_config: HuggingFaceConfig) -> Rope:
    """Returns how `transformers` 5 reads a config.json that has no `rope_refusals`."""
    return rope_of(hf_config, read_entries(hf_config))


def read_entries(hf_config: HuggingFaceConfig) -> Mapping[str, Any]:
    """Returns the object of a config.json from which `transformers` 5 reads the RoPE."""
    return next((hf_config[place] for place in PLACES if hf_config.get(place)), {})


def write_rope(theta: float, scaling: RopeScaling | None) -> dict[str, dict[str, Any]]:
    """Returns the entries of config.json that `transformers` 4 and 5 both read as this RoPE."""
    if scaling is None:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    values = {name: value for name, value in asdict(scaling).items() if value is not None}
    entries = {"rope_type": scaling.kind, **values}
    return {"rope_parameters": {**entries, "rope_theta": theta}, "rope_scaling": entries}


def rope_of(hf_config: HuggingFaceConfig, rope: Mapping[str, Any]) -> Rope:
    """Returns how `transformers` reads `rope`, the object at one of the two PLACES."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = float(rope.get("rope_theta") or hf_config.get("rope_theta") or DEFAULT_ROPE_THETA)
    if kind not in SCALINGS or missing_entries(hf_config, rope, kind):
        return Rope(kind, theta)
    # The original context may be at the top level; all other entries are in `rope`.
    values: dict[str, Any] = {}
    for field in fields(SCALINGS[kind]):
        value = rope.get(field.name)
        if field.name == ORIGINAL:
            values[ORIGINAL] = original_context(hf_config, rope)
        elif value is not None:
            values[field.name] = value if isinstance(value, bool) else float(value)
    return Rope(kind, theta, SCALINGS[kind](**values))


def original_context(hf_config: HuggingFaceConfig, rope: Mapping[str, Any]) -> int | None:
    """Returns the context length before the scaling, from the same places as `transformers`."""
    places = (hf_config.get(ORIGINAL), rope.get(ORIGINAL), hf_config.get("max_position_embeddings"))
    return next((value for value in places if value is not None), None)


def missing_entries(hf_config: HuggingFaceConfig, rope: Mapping[str, Any], kind: str) -> list[str]:
    """Returns the names of the required entries that a scaling of this kind lacks."""
    needed = [field.name for field in fields(SCALINGS[kind]) if field.default is MISSING]
    values = {**rope, ORIGINAL: original_context(hf_config, rope)}
    return [name for name in needed if values.get(name) is None]


def rope_refusals(hf_config: HuggingFaceConfig) -> Iterator[str]:
    """Yields a phrase for unknown kinds of RoPE, and for entries that contradict each other."""
    filled = [place for place in PLACES if hf_config.get(place)]
    ropes = {place: rope_of(hf_config, hf_config[place]) for place in filled}
    # Both places may be filled, as jzero's exports do for transformers 4 and 5, if they agree.
    if len(set(ropes.values())) > 1:
        yield "rope_scaling and rope_parameters differ: remove the wrong one"

    for place, rope in ropes.items():
        entries = hf_config[place]
        if rope.kind == "default" or rope.kind in SCALINGS:
            yield from entry_refusals(hf_config, place, rope)
        else:
            kinds = ", ".join(("default", *SCALINGS))
            yield f"{place} with rope_type={shown(rope.kind)}: only {kinds} are implemented"
        if entries.get("type", rope.kind) != rope.kind:
            yield f"{place} has a type and another rope_type: remove the wrong one"
        if hf_config.get("rope_theta") not in (None, rope.theta):
            yield f"rope_theta at the top and another one in {place}: remove the wrong one"

    # Hybrids do rotate a part of each head; `hybrid_config` removes the entry before this check.
    for entries in (hf_config, *(hf_config[place] for place in filled)):
        if entries.get("partial_rotary_factor") not in (None, 1):
            factor = shown(entries["partial_rotary_factor"])
            yield f"partial_rotary_factor={factor}: only whole heads are rotated here"


def entry_refusals(hf_config: HuggingFaceConfig, place: str, rope: Rope) -> Iterator[str]:
    """Yields a phrase for entries that a kind of RoPE lacks, does not use or cannot have."""
    entries = hf_config[place]
    used = KNOWN_ENTRIES | IGNORED_ENTRIES.get(rope.kind, set())
    if rope.kind in SCALINGS:
        used |= {field.name for field in fields(SCALINGS[rope.kind])}
        if missing := missing_entries(hf_config, entries, rope.kind):
            yield f"{place} with rope_type={rope.kind} lacks {', '.join(missing)}"
        if entries.get(ORIGINAL) not in (None, original_context(hf_config, entries)):
            yield f"{ORIGINAL} at the top and another one in {place}: remove the wrong one"
    if unknown := sorted(entries.keys() - used):
        yield f"{place} with {shown(unknown[0])}, which rope_type={rope.kind} does not use"
    if rope.scaling is not None:
        yield from (f"{place}: {mistake}" for mistake in rope.scaling.mistakes(rope.theta))


def ignored_entries(hf_config: HuggingFaceConfig) -> Iterator[str]:
    """Yields the entries of a valid config.json that have no effect in `transformers` either."""
    for place in PLACES:
        entries = hf_config.get(place) or {}
        kind = rope_of(hf_config, entries).kind
        for name in sorted(entries.keys() & IGNORED_ENTRIES.get(kind, set())):
            yield f"{place}.{name}={shown(entries[name])}"
