"""The entries of config.json on rotary position embeddings, which have had three places by now.

transformers 5 writes `rope_parameters`, with the base and the kind of scaling in it. Version 4
writes `rope_theta` at the top, and the kind of scaling below `rope_scaling`, as `rope_type` or, in
old files, as `type`. A file that has several of them is read only if all of them mean the same.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jzero.errors import shown

HuggingFaceConfig = Mapping[str, Any]  # the parsed config.json of a checkpoint

DEFAULT_ROPE_THETA = 10000.0  # of transformers, where config.json names none
PLACES = ("rope_scaling", "rope_parameters")  # transformers takes the first that is not empty
KNOWN_ENTRIES = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}


class Rope(NamedTuple):
    """What a config.json says about rotary position embeddings."""

    kind: str  # "default", or a kind of scaling such as "yarn"
    theta: float  # the base of the frequencies


def rope_theta(hf_config: HuggingFaceConfig) -> float:
    """Returns the base of the frequencies, as `transformers` 5 finds it."""
    for place in PLACES:
        if hf_config.get(place):
            return rope_of(hf_config, hf_config[place]).theta
    return rope_of(hf_config, {}).theta


def rope_of(hf_config: HuggingFaceConfig, rope: Mapping[str, Any]) -> Rope:
    """Returns what `transformers` makes of one of the two places."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.get("rope_theta") or hf_config.get("rope_theta") or DEFAULT_ROPE_THETA
    return Rope(kind, float(theta))


def rope_refusals(hf_config: HuggingFaceConfig) -> Iterator[str]:
    """Yields a phrase for everything but plain RoPE, and for entries that contradict each other."""
    filled = [place for place in PLACES if hf_config.get(place)]
    found = {place: rope_of(hf_config, hf_config[place]) for place in filled}
    if len(set(found.values())) > 1:
        yield "rope_scaling and rope_parameters differ: remove the one that is not meant"

    for place, rope in found.items():
        entries = hf_config[place]
        if rope.kind != "default":
            yield f"{place} with rope_type={shown(rope.kind)}: only default is implemented"
        if entries.get("type", rope.kind) != rope.kind:
            yield f"{place} has a type and another rope_type: remove the one that is not meant"
        unknown = sorted(entries.keys() - KNOWN_ENTRIES)
        if rope.kind == "default" and unknown:
            yield f"{place} with {shown(unknown[0])}, which rope_type=default does not use"
        if hf_config.get("rope_theta") not in (None, rope.theta):
            yield f"rope_theta at the top and another one in {place}: remove the one not meant"

    for entries in (hf_config, *(hf_config[place] for place in filled)):
        if entries.get("partial_rotary_factor") not in (None, 1):
            factor = shown(entries["partial_rotary_factor"])
            yield f"partial_rotary_factor={factor}: only whole heads are rotated here"
