"""Moved from jzero.evaluate."""

from dataclasses import asdict, replace
from typing import Any

from flax.serialization import msgpack_restore, msgpack_serialize

from jzero.rollout.sequence import Sequence
from jzero.types import Grade, Problem, Rollout, Turn


def rollouts_to_bytes(rollouts: list[Rollout]) -> bytes:
    """For other hosts; values are arrays or plain JSON's."""
    return msgpack_serialize(
        [asdict(replace(rollout, turns=list(rollout.turns))) for rollout in rollouts]
    )


def rollouts_from_bytes(parts: list[bytes]) -> list[Rollout]:
    """What every host gave, in order."""
    rollouts = from_plain(Rollout, [row for part in parts for row in msgpack_restore(part)])
    return [replace(rollout, turns=tuple(rollout.turns)) for rollout in rollouts]


DATACLASS_FIELDS = {
    "problem": Problem,
    "grade": Grade,
    "turns": Turn,
    "sequences": Sequence,
}  # fields that are dataclasses


def from_plain(kind: type, of: Any) -> Any:
    """A dataclass, or a list of them, of what `asdict` made of it."""
    if isinstance(of, list):
        return [from_plain(kind, each) for each in of]
    return of and kind(
        **{
            name: from_plain(DATACLASS_FIELDS[name], x) if name in DATACLASS_FIELDS else x
            for name, x in of.items()
        }
    )
