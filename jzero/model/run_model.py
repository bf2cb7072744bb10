"""The one way in which a program runs a model: prefill, decoding, scoring and training.

    outputs = run_model(model, params, inputs, cache, arithmetic, dtype=..., placement=...)
    outputs.hidden, outputs.cache.k, outputs.expert_load

A program chooses where keys, values and recurrent states are (`Cache`) and how numbers are computed
(`Arithmetic`):

    prefill    rollout.caches.PromptCache                        keys and values of whole prompts
    decoding   rollout.caches.PagedCache, FusedPagedCache        one token of every slot
    scoring    rollout.caches.ChunkCache                         a chunk of every sequence
    training   training.packed_rows.PackedRows                   no cache: rows are complete
"""

from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jzero.model import experts, qwen
from jzero.model.architecture import Params, QwenConfig
from jzero.model.arithmetic import Arithmetic
from jzero.model.delta_net import DeltaInputs
from jzero.model.linear import Dropout, RowAdapters

Arrays = TypeVar("Arrays")
"""The tree of arrays that the layers of a model read and change, such as keys and values."""


class Cache(Protocol[Arrays]):
    """The keys, values and recurrent states of a program, and how its tokens read them.

    arrays   the tree that passes from layer to layer; each layer receives and returns it.
    rotates  whether `attend` applies RoPE to q and k itself.
    attend   attention, see `layers.Attend`.
    recur    the gated delta nets, see `delta_net.Recur`. Models without them do not call it.
    """

    @property
    def arrays(self) -> Arrays: ...

    @property
    def rotates(self) -> bool: ...

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, arrays: Arrays, /
    ) -> tuple[jax.Array, Arrays]: ...

    def recur(
        self, inputs: DeltaInputs, layer: jax.Array, arrays: Arrays, /
    ) -> tuple[jax.Array, Arrays]: ...


class ModelInputs(NamedTuple):
    """The tokens of a program."""

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]  # of each token in its sequence
    is_token: Bool[Array, "B T"]  # false: padding, which goes to no expert
    # Router replay: the experts of every token, or -1 where the router chooses. None: it always
    # chooses.
    replayed_routes: Int[Array, "B T Lk"] | None = None
    adapters: RowAdapters | None = None  # of the B rows, in a program with an adapter bank
    dropout: Dropout | None = (
        None  # on the inputs of the adapter, with a key for each of the B rows
    )


class ModelOutputs(NamedTuple, Generic[Arrays]):
    """What a model returns. Dense models have no routing."""

    hidden: Float[Array, "B T E"]  # after the final norm
    cache: Arrays  # `Cache.arrays` after the last layer
    expert_load: Int[Array, "L X"] | None = None  # number of tokens per expert
    routes: Int[Array, "N Lk"] | None = None  # the experts of every token; None: not recorded


def run_model(
    model: QwenConfig,
    params: Params,
    inputs: ModelInputs,
    cache: Cache[Arrays],
    arithmetic: Arithmetic,
    *,
    dtype: DTypeLike,
    placement: experts.Placement,
    remat: str = "none",
    remembers_routes: bool = False,
) -> ModelOutputs[Arrays]:
    """Computes the hidden states of all tokens, and writes their keys and values to the cache.

    dtype, remat: as in `qwen.forward`.
    placement: which devices share the experts of a MoE model.
    remembers_routes: record the experts of every token.
    """
    forward = partial(
        qwen.forward,
        model,
        params,
        inputs.tokens,
        inputs.positions,
        cache.attend,
        dtype=dtype,
        remat=remat,
        recur=cache.recur,
        arithmetic=arithmetic,
        attention_rotates=cache.rotates,
        row_adapters=inputs.adapters,
        dropout=inputs.dropout,
    )
    if not model.num_experts:
        hidden, arrays = forward(cache.arrays)
        return ModelOutputs(hidden, arrays)

    # The layers of a MoE model also need to know which of their rows are tokens.
    rows = arithmetic.rows(*inputs.tokens.shape)
    is_token = rows.enter(inputs.is_token)
    replayed = inputs.replayed_routes
    carry = experts.start(model, cache.arrays, is_token, placement, replayed, remembers_routes)
    hidden, carry = forward(carry)
    return ModelOutputs(hidden, carry.attention, carry.load, experts.routes_of(carry))
