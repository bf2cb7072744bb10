"""The record of the tokens of a sequence: their ids, and everything else that is known of each.

    decode step -> Tokens of a running sequence -> Tokens of a Rollout -> rows of a Batch

`TRACKS` declares what is recorded: one line a track. All code between the decode step and the loss
moves the record as a whole, so only code that computes or reads a track names it. docs/extend.md
adds a track.

Grader processes import this module and must start quickly, so it imports no JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    import jax

# Optional tracks that a run records, each with the shape of one token's value.
TrackShapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]

# Values of consecutive tokens, by track: [tokens, *shape of one value].
TrackValues: TypeAlias = Mapping[str, ArrayLike]

# (logits f32[slots, V], temperature f32[slots], sampled ids i32[slots]) -> [slots, *shape]. The
# logits are the model's, before temperature and filters.
Measure: TypeAlias = "Callable[[jax.Array, jax.Array, jax.Array], jax.Array]"


@dataclass(frozen=True)
class Track:
    """One thing that is known of every token, and how it is recorded."""

    dtype: type[np.generic]
    # The value of a token that was not sampled: of the prompt, or of an environment's reply.
    blank: float
    # The names of the sizes of one value (`track_sizes` of jzero.model.architecture computes them).
    # A run in which a size is 0 does not record the track.
    sizes: tuple[str, ...] = ()
    # Whether the value belongs to the input that predicts the token. The model reads prompts and
    # replies too, so their tokens have values as well; the first token has none.
    is_of_input: bool = False
    # Computes the value on the device when a token is sampled. None: jzero's programs do.
    measure: Measure | None = None


TRACKS: dict[str, Track] = {
    # Every record has these four tracks.
    "ids": Track(np.int32, blank=0),
    "sampled": Track(np.bool_, blank=False),  # whether the policy chose the token
    # Log-probability under the sampler at the sampling temperature (at 1 if it is 0), over the full
    # vocabulary, or over `kept` where that is recorded.
    "logps": Track(np.float32, blank=0),
    "versions": Track(np.int32, blank=-1),  # of the policy that sampled the token
    # The tracks below are optional, and packed into `Batch.tracks` for the update.
    # [K] the token ids that the sampler's filters (such as top-k) kept, padded with -1.
    "kept": Track(np.int32, blank=-1, sizes=("kept",)),
    # [L * k] MoE routes: the experts, in all L layers, that the input was sent to.
    "routes": Track(np.int16, blank=-1, sizes=("routes",), is_of_input=True),
}
BASIC_TRACKS = ("ids", "sampled", "logps", "versions")


def recorded_tracks(sizes: Mapping[str, int]) -> TrackShapes:
    """Returns the optional tracks that a run records. `sizes` has the sizes that tracks name."""
    optional = {name: track for name, track in TRACKS.items() if name not in BASIC_TRACKS}
    shapes = {name: tuple(sizes[size] for size in track.sizes) for name, track in optional.items()}
    return tuple((name, shape) for name, shape in shapes.items() if all(shape))


class Tokens:
    """The tokens of one sequence: a struct of arrays [T, ...], one for each recorded track.

    Every track covers the whole sequence: the prompt, the responses and the replies. A track that
    is recorded later than the first token is blank before that.

    `append`, `fill` and `cut` change the record in place, as a running sequence grows. Arrays of a
    track share its memory; the other methods return a new record.
    """

    __slots__ = ("_buffers", "_length")

    def __init__(self, ids: ArrayLike = (), **tracks: ArrayLike) -> None:
        """Makes a record of `ids`; tracks that are not given are blank."""
        self._length = 0
        # Buffers are longer than the record, so that appending to it is amortized.
        self._buffers: dict[str, np.ndarray] = {}
        for name in BASIC_TRACKS:
            self._buffers[name] = np.empty(0, TRACKS[name].dtype)
        self.append(ids, **tracks)

    def __len__(self) -> int:
        """Returns the number of tokens T."""
        return self._length

    def __repr__(self) -> str:
        """Returns the number of tokens and the names of the tracks."""
        return f"Tokens({self._length} tokens: {', '.join(self._buffers)})"

    @property
    def ids(self) -> np.ndarray:
        """i32[T] token ids."""
        return self["ids"]

    @property
    def sampled(self) -> np.ndarray:
        """bool[T] whether the policy chose the token."""
        return self["sampled"]

    @property
    def logps(self) -> np.ndarray:
        """f32[T] log-probability under the sampler; 0 where the token was not sampled."""
        return self["logps"]

    @property
    def versions(self) -> np.ndarray:
        """i32[T] version of the policy that sampled the token; -1 elsewhere."""
        return self["versions"]

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns the values [T, ...] of a recorded track."""
        return self._buffers[name][: self._length]

    def get(self, name: str) -> np.ndarray | None:
        """Returns the values [T, ...] of a track, or None if it is not recorded."""
        return self[name] if name in self._buffers else None

    def to_dict(self) -> dict[str, np.ndarray]:
        """Returns the values of all recorded tracks: `Tokens(**values)` is the same record."""
        return {name: self[name] for name in self._buffers}

    # -- in place ----------------------------------------------------------------------------------

    def append(self, ids: ArrayLike, **tracks: ArrayLike) -> None:
        """Appends tokens. A value without the axis of tokens holds for all of them.

        Tracks that are not given are blank for these tokens.
        """
        values = {"ids": ids, **tracks}
        start, end = self._length, self._length + len(np.asarray(ids))
        for name, rows in values.items():
            self._add_track(name, rows)
        for name in self._buffers:
            buffer = self._grown(name, end)
            buffer[start:end] = values.get(name, TRACKS[name].blank)
        # Another thread may read the record meanwhile: the length comes last.
        self._length = end

    def fill(self, start: int, tracks: TrackValues) -> None:
        """Writes values of the tokens from `start` on where these are still blank."""
        for name, rows in tracks.items():
            self._add_track(name, rows)
            values = np.asarray(rows)
            target = self[name][start : start + len(values)]
            is_blank = (target == TRACKS[name].blank).all(axis=tuple(range(1, target.ndim)))
            target[is_blank] = values[: len(target)][is_blank]

    def cut(self, length: int) -> None:
        """Drops all tokens after the first `length`."""
        assert length <= self._length, f"{length=} {self._length=}"
        self._length = length

    # -- as a value --------------------------------------------------------------------------------

    def first(self, length: int) -> Tokens:
        """Returns the record of the first `length` tokens."""
        return self.part(0, length)

    def part(self, start: int, end: int) -> Tokens:
        """Returns the record of the tokens start..end."""
        return Tokens(**{name: values[start:end] for name, values in self.to_dict().items()})

    def replaced(self, **tracks: ArrayLike) -> Tokens:
        """Returns a record with other values of some tracks."""
        return Tokens(**(self.to_dict() | tracks))

    def without(self, *names: str) -> Tokens:
        """Returns a record without some optional tracks."""
        return Tokens(**{name: self[name] for name in self._buffers if name not in names})

    @staticmethod
    def concatenate(parts: Iterable[Tokens]) -> Tokens:
        """Returns the record of all tokens of `parts`, in order."""
        joined = Tokens()
        for part in parts:
            joined.append(**part.to_dict())
        return joined

    def _add_track(self, name: str, rows: ArrayLike) -> None:
        """Adds a track that was not recorded before, blank so far."""
        if name not in self._buffers:
            track = TRACKS[name]
            shape = (self._length, *np.shape(rows)[1:])
            self._buffers[name] = np.full(shape, track.blank, track.dtype)

    def _grown(self, name: str, length: int) -> np.ndarray:
        """Returns the buffer of a track, with room for `length` tokens."""
        buffer = self._buffers[name]
        if len(buffer) < length:
            # The first tokens, of a prompt or of a complete sequence, take exactly their size.
            capacity = max(length, 2 * len(buffer))
            grown = np.empty((capacity, *buffer.shape[1:]), buffer.dtype)
            grown[: self._length] = buffer[: self._length]
            self._buffers[name] = buffer = grown
        return buffer
