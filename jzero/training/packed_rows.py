"""How the packed rows of training mix their tokens: no cache, because every row is complete."""

from dataclasses import dataclass

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jzero.attention.backend import Packed, given
from jzero.model.architecture import QwenConfig
from jzero.model.arithmetic import Recurrence
from jzero.model.delta_net import DeltaInputs, recur_packed
from jzero.model.layers import window_in_rows
from jzero.sharding import context
from jzero.types import RowLayout


@dataclass(frozen=True)
class PackedRows:
    """A `run_model.Cache` without arrays.

    attention     of complete rows.
    segments      the number of each token's sequence in its row, 0 for padding.
    positions     of each token in its sequence.
    context_mesh  the mesh, if devices share the tokens of a row (context parallelism); else None.
    """

    model: QwenConfig
    attention: Packed
    recurrence: Recurrence
    segments: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    layout: RowLayout
    context_mesh: Mesh | None
    arrays: None = None
    # q and k arrive with RoPE: kernels that apply it themselves exist only for decoding.
    rotates: bool = False

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        layer: jax.Array,
        arrays: None,
    ) -> tuple[jax.Array, None]:
        """Attends to the tokens of each sequence and to the prefix of its row."""
        window = given(window_in_rows(self.model, layer, self.positions))
        return self.attention(q, k, v, self.segments, self.layout, *window), arrays

    def recur(self, inputs: DeltaInputs, layer: jax.Array, arrays: None) -> tuple[jax.Array, None]:
        """Computes each sequence from the state after the prefix of its row."""
        if self.context_mesh is not None:
            mesh = self.context_mesh
            out = context.recur_over_all_tokens(inputs, self.segments, self.layout, mesh)
            return out, arrays
        return recur_packed(inputs, self.segments, self.layout, self.recurrence.rows), arrays
