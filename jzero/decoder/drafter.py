"""The host's side of drafts: what it sends to the slots.

`draft_program.py` finds and checks drafts on the device. The host sends the tokens of a sequence
when it begins in a slot, and the references of rollout.draft=group and history with every call in
which they have changed.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Int32

from jzero.decoder.draft_program import DraftInputs, compile_remember
from jzero.decoder.drafts import SEPARATOR, Drafting, DraftState
from jzero.decoder.program_settings import ProgramSettings
from jzero.hosts import collectives
from jzero.numerics.sizes import power_of_two


class Beginning(NamedTuple):
    """A sequence that begins in a slot."""

    shard: int
    slot: int  # within the shard
    tokens: Int32[np.ndarray, " tokens"]  # so far; the device may have one more


class Drafter:
    """Sends texts to the slots of an engine.

    Attributes:
        costs: the time of a pass with drafts of each length, in passes without; empty: not
            measured yet.
        pays: whether drafts can pay at these costs.
    """

    def __init__(
        self,
        drafting: Drafting,
        settings: ProgramSettings,
        mesh: Mesh,
        longest: int,
        cost: float,
    ) -> None:
        """longest: tokens of the longest sequence. cost: rollout.draft.cost."""
        self.drafting = drafting
        self.mesh = mesh
        self.longest = longest
        # Without a measurement, costs grow with the number of tokens.
        self.costs = (
            [1 + (cost - 1) * n / drafting.tokens for n in drafting.lengths] if cost else []
        )
        self.num_shards = mesh.shape["slots"]
        self.num_slots = settings.slots_per_shard * self.num_shards
        self.slots_per_shard = settings.slots_per_shard
        self.hidden_shape = self.num_slots, settings.model.hidden_size
        self.dtype = settings.dtype
        self.remember_program = compile_remember(settings, mesh)
        self.references: np.ndarray | None = None  # the ones on the devices
        self.references_on_devices: jax.Array | None = None

    @property
    def pays(self) -> bool:
        # A draft saves at most as many passes as it has tokens.
        if not self.costs:
            return True
        pairs = zip(self.costs, self.drafting.lengths, strict=True)
        return any(cost - 1 < length for cost, length in pairs)

    def abstract_state(self) -> DraftState[jax.ShapeDtypeStruct]:
        """Returns shapes and shardings of the texts of the slots."""
        shape = self.num_shards, 2, self.drafting.match
        outcomes = self._abstract(shape, jnp.float32)
        if self.drafting.by_head:
            return DraftState(None, outcomes, self._abstract(self.hidden_shape, self.dtype))
        width = self.drafting.reach + self.longest
        return DraftState(self._abstract((self.num_slots, width), jnp.int32), outcomes)

    def abstract_inputs(self) -> DraftInputs[jax.ShapeDtypeStruct]:
        """Returns shapes and shardings of the inputs of a call."""
        shape = self.num_shards, len(self.drafting.lengths)
        costs = self._abstract(shape, jnp.float32)
        if not self.drafting.reach:
            return DraftInputs(costs, None)
        shape = self.num_slots, self.drafting.reach
        return DraftInputs(costs, self._abstract(shape, jnp.int32))

    def remember(
        self,
        state: DraftState[jax.Array],
        beginnings: Sequence[Beginning],
    ) -> DraftState[jax.Array]:
        """Returns the state with the tokens of sequences that begin. Donates `state`."""
        if state.texts is None or not beginnings:
            return state
        by_shard: list[list[Beginning]] = [[] for _ in range(self.num_shards)]
        for beginning in beginnings:
            by_shard[beginning.shard].append(beginning)
        # Padding names no slot.
        count = power_of_two(max(map(len, by_shard)))
        slots = np.full((self.num_shards, count), self.slots_per_shard, np.int32)
        tokens = np.zeros((self.num_shards, count, self.longest), np.int32)
        for shard, items in enumerate(by_shard):
            for i, item in enumerate(items):
                slots[shard, i] = item.slot
                tokens[shard, i, : len(item.tokens)] = item.tokens
        texts = self.remember_program(
            state.texts, self._on_devices(slots), self._on_devices(tokens)
        )
        return state._replace(texts=texts)

    def inputs(self, references: dict[int, Int32[np.ndarray, " tokens"]]) -> DraftInputs[jax.Array]:
        """Returns the inputs of a call, with the references of slots; see `joined`."""
        return self.inputs_at(self.costs or [0.0] * len(self.drafting.lengths), references)

    def inputs_at(
        self,
        costs_of_lengths: Sequence[float],
        references: dict[int, Int32[np.ndarray, " tokens"]],
    ) -> DraftInputs[jax.Array]:
        """Returns `inputs` with other costs."""
        by_shard = np.tile(np.array(costs_of_lengths, np.float32), (self.num_shards, 1))
        costs = self._on_devices(by_shard)
        if not self.drafting.reach:
            return DraftInputs(costs, None)
        rows = np.full((self.num_slots, self.drafting.reach), SEPARATOR, np.int32)
        for slot, tokens in references.items():
            rows[slot, : len(tokens)] = tokens
        if self.references is None or not np.array_equal(rows, self.references):
            self.references = rows
            self.references_on_devices = self._on_devices(rows)
        return DraftInputs(costs, self.references_on_devices)

    def _abstract(self, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        """Returns a shape whose first axis is split over the shards."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, P("slots")))

    def _on_devices(self, array: np.ndarray) -> jax.Array:
        """Splits the first axis over the shards."""
        return collectives.put(array, NamedSharding(self.mesh, P("slots")))


def joined(
    texts: Iterable[Int32[np.ndarray, " tokens"]],
    reach: int,
) -> Int32[np.ndarray, " tokens"]:
    """Returns texts with a separator after each: the last `reach` tokens of all."""
    end = np.array([SEPARATOR], np.int32)
    parts = [part for text in texts if len(text) for part in (text, end)]
    if not parts:
        return np.zeros(0, np.int32)
    return np.concatenate(parts).astype(np.int32)[-reach:]
