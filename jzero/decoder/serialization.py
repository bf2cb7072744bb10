"""Rollouts and carried sequences as bytes: for other hosts and for checkpoints.

The bytes are MessagePack of plain values and arrays (flax.serialization), never pickle: a
checkpoint or a message cannot run code when it is read.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar, cast

import numpy as np
from flax.serialization import msgpack_restore, msgpack_serialize

from jzero.decoder.sequence import EpisodeGroup, Sequence
from jzero.tokens import BASIC_TRACKS, TRACKS, Tokens
from jzero.types import Grade, Problem, Rollout, Turn

T = TypeVar("T")


# The fields of each serialized record that hold a record, or a list of records.
DATACLASS_FIELDS: dict[type, dict[str, type]] = {
    Problem: {},
    Grade: {},
    Turn: {"grade": Grade},
    Rollout: {"problem": Problem, "tokens": Tokens, "turns": Turn, "grade": Grade},
    Sequence: {"tokens": Tokens, "turns": Turn},
    EpisodeGroup: {"sequences": Sequence},
    Tokens: {},
}


def rollouts_to_bytes(rollouts: list[Rollout]) -> bytes:
    """Writes rollouts. Their problems must hold plain JSON values."""
    return msgpack_serialize(to_plain(rollouts))


def rollouts_from_bytes(parts: SequenceOf[bytes]) -> list[Rollout]:
    """Reads the rollouts of several hosts, in the hosts' order."""
    rollouts: list[Rollout] = []
    for part in parts:
        for rollout in restore_all(Rollout, msgpack_restore(part)):
            rollouts.append(with_tuples(rollout))
    return rollouts


def with_tuples(rollout: Rollout) -> Rollout:
    """Returns a rollout with tuples, which MessagePack returned as lists."""
    turns, starts = tuple(rollout.turns), tuple(rollout.branch_starts)
    return replace(rollout, turns=turns, branch_starts=starts)


def to_plain(value: object) -> object:
    """Returns records as dicts, and tuples, which MessagePack lacks, as lists."""
    if isinstance(value, Tokens):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, dict):
        return {name: to_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def restore_all(kind: type[T], rows: object) -> list[T]:
    """Returns one `kind` for each row of fields, the inverse of `to_plain`.

    Raises ValueError or TypeError if the rows are not those of `kind`.
    """
    if not isinstance(rows, list):
        raise ValueError(f"the records of {kind.__name__} are not a list")
    return [cast(T, _restore(kind, row)) for row in rows]


def _restore(kind: type, value: object) -> object:
    """Rebuilds a dataclass, a list of dataclasses, or None from plain values."""
    if value is None:
        return None
    if isinstance(value, list):
        return [_restore(kind, item) for item in value]
    if not isinstance(value, dict):
        raise ValueError(f"the fields of {kind.__name__} are not an object")
    if kind is Tokens:
        return _restore_tokens(value)
    nested = DATACLASS_FIELDS[kind]
    values = {
        name: _restore(nested[name], item) if name in nested else item
        for name, item in value.items()
    }
    return kind(**values)


def _restore_tokens(tracks: dict[object, object]) -> Tokens:
    """Returns a record of tracks, which are arrays of their types with a value for each token.

    `Tokens` would convert other types, and repeat the only value of a track for all tokens.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, values in tracks.items():
        if name not in TRACKS or not isinstance(values, np.ndarray) or not values.ndim:
            raise ValueError("a track is not an array")
        if values.dtype != TRACKS[str(name)].dtype:
            raise ValueError(f"the track {name} has the type {values.dtype}")
        arrays[str(name)] = values
    missing = set(BASIC_TRACKS) - arrays.keys()
    if missing:
        raise ValueError(f"the tracks {', '.join(sorted(missing))} are missing")
    if len({len(values) for values in arrays.values()}) != 1:
        raise ValueError("the tracks do not have one value for each token")
    return Tokens(**arrays)
