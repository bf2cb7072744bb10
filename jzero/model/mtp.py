"""Qwen3.5's head for multi-token prediction (MTP), the source of drafts of rollout.draft=mtp.

The head predicts the token after the next one. At position t it reads the model's hidden state h_t,
after the final norm, and the next token x_{t+1}:

    u_t = fc [norm(embedding of x_{t+1}) | norm(h_t)]
    m_t = norm(layer(u_t))          one layer with gated attention and an MLP, as in `hybrid.py`
    logits of x_{t+2} = m_t times the model's own output matrix

With m_t in the place of h_{t+1}, and its own prediction in the place of x_{t+2}, the head predicts
one more token, and so on. Embedding and output matrix are the model's. The attention of the head
sees the pairs (h_s, x_{s+1}) of the positions s <= t, whose keys and values are in a layer of their
own in the KV cache, after the layers of the model (`attention_layer`).

A model has the head if `QwenConfig.mtp` is set (`with_head`). The parameters are below "mtp", with
the names of a layer and without an axis of layers. Source: DeepSeek-V3 (arXiv:2412.19437, section
2.2); the order of [embedding | hidden state] and the norms are those of Qwen3-Next's checkpoints.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from jzero.config import drafts
from jzero.errors import UserError
from jzero.model import hybrid
from jzero.model.architecture import Params, QwenConfig
from jzero.model.arithmetic import PLAIN, Arithmetic
from jzero.model.hybrid_config import NUM_MTP_LAYERS
from jzero.model.layers import (
    NORMAL,
    ZEROS,
    Attend,
    ForwardPass,
    parameter,
    rotary,
    zero_centered_norm,
)
from jzero.model.rope_entries import HuggingFaceConfig

NAME = "mtp"  # of the head among the parameters, and the prefix of its tensors
OWN_EMBEDDING = "mtp_use_dedicated_embeddings"  # in config.json
ADVICE = "choose rollout.draft=ngram, for example"


class DraftHead(nnx.Module):
    """The parameters of the head. `forward` computes with them."""

    def __init__(self, config: QwenConfig, rngs: nnx.Rngs) -> None:
        E, D, F = config.hidden_size, config.head_dim, config.intermediate_size
        H, K = config.num_attention_heads, config.num_key_value_heads
        new = partial(parameter, rngs)
        self.embedding_norm = new((E,), ("norm",), ZEROS)
        self.hidden_norm = new((E,), ("norm",), ZEROS)
        self.fc = new((2 * E, E), ("embed", "norm"), NORMAL)  # [embedding | hidden state]
        self.attn_norm = new((E,), ("norm",), ZEROS)
        self.q = new((E, H, 2 * D), ("embed", "heads", "head_dim"), NORMAL)  # [query | gate]
        self.k = new((E, K, D), ("embed", "kv_heads", "head_dim"), NORMAL)
        self.v = new((E, K, D), ("embed", "kv_heads", "head_dim"), NORMAL)
        self.o = new((H, D, E), ("heads", "head_dim", "embed"), NORMAL)
        self.q_norm = new((D,), ("norm",), ZEROS)
        self.k_norm = new((D,), ("norm",), ZEROS)
        self.mlp_norm = new((E,), ("norm",), ZEROS)
        self.gate = new((E, F), ("embed", "mlp"), NORMAL)
        self.up = new((E, F), ("embed", "mlp"), NORMAL)
        self.down = new((F, E), ("mlp", "embed"), NORMAL)
        self.norm = new((E,), ("norm",), ZEROS)


def with_head(
    model: QwenConfig,
    draft: drafts.Draft | None,
    hf_config: HuggingFaceConfig | None = None,
) -> QwenConfig:
    """Returns the model with the head if `draft` needs it.

    hf_config: of the checkpoint that has the head; None for a new model, whose head is new, too.

    Raises UserError if the model cannot have the head, or the checkpoint has none.
    """
    if not isinstance(draft, drafts.Mtp):
        return model
    if model.delta_net is None:
        raise UserError(
            f"rollout.draft=mtp: model_type={model.model_type} has no head for multi-token "
            f"prediction, only Qwen3.5 has one: {ADVICE}"
        )
    if model.num_experts:
        raise UserError(
            f"rollout.draft=mtp: the head of {model.model_type} has experts, which is not "
            f"implemented: {ADVICE}"
        )
    if hf_config is not None:
        check_checkpoint(hf_config)
    return replace(model, mtp=True)


def check_checkpoint(hf_config: HuggingFaceConfig) -> None:
    """Raises UserError unless a checkpoint has a head as this file computes it."""
    text = hf_config.get("text_config")
    entries = {**hf_config, **text} if isinstance(text, Mapping) else hf_config
    layers = entries.get(NUM_MTP_LAYERS)
    if not layers:
        raise UserError(
            f"rollout.draft=mtp: config.json has no {NUM_MTP_LAYERS}, so the checkpoint has no "
            f"head for multi-token prediction: {ADVICE}"
        )
    if layers != 1:
        raise UserError(
            f"rollout.draft=mtp: {NUM_MTP_LAYERS}={layers} is not implemented, only 1 is: {ADVICE}"
        )
    if entries.get(OWN_EMBEDDING):
        raise UserError(
            f"rollout.draft=mtp: {OWN_EMBEDDING}=true is not implemented, the head has the "
            f"embedding of the model: {ADVICE}"
        )


def attention_layer(config: QwenConfig) -> Int[Array, ""]:
    """Returns the number of the head's attention among the layers with attention."""
    assert config.mtp
    return jnp.int32(len(config.attention_layers))


def forward(
    config: QwenConfig,
    params: Params,
    hidden: Float[Array, "B T E"],
    next_tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attend: Attend,
    carry: PyTree = None,
    *,
    dtype: DTypeLike,
    arithmetic: Arithmetic = PLAIN,
) -> tuple[Float[Array, "B T E"], PyTree]:
    """Computes the hidden states from which the model's output matrix predicts the token after.

    hidden: the model's hidden states after the final norm, or what this function returned for the
        position before.
    next_tokens: the token after the token of each hidden state.
    positions: of the tokens of the hidden states.
    attend, carry, dtype, arithmetic: as in `qwen.forward`.
    """
    weights = jax.tree.map(lambda leaf: leaf.astype(dtype), params[NAME])
    rows, eps = arithmetic.rows(*next_tokens.shape), config.rms_norm_eps

    def attend_to_rows(
        q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, carry: PyTree
    ) -> tuple[jax.Array, PyTree]:
        out, carry = attend(rows.leave(q), rows.leave(k), rows.leave(v), layer, carry)
        return rows.enter(out), carry

    with arithmetic.products():
        tokens = rows.enter(next_tokens)
        rope = rotary(config, rows.enter(arithmetic.unfolded(positions)))
        rope = rope._replace(by_product=arithmetic.rotates_by_product)
        forward_pass = ForwardPass(rope, attend_to_rows, None, arithmetic, None)

        embedded = params["embed"][tokens.ravel()].astype(dtype)
        states = rows.enter(hidden).reshape(embedded.shape).astype(dtype)
        embedded = zero_centered_norm(arithmetic, embedded, weights["embedding_norm"], eps)
        states = zero_centered_norm(arithmetic, states, weights["hidden_norm"], eps)
        joined = jnp.concatenate([embedded, states], axis=-1)
        x = arithmetic.product(joined, weights["fc"])

        layer = attention_layer(config)
        x, carry = hybrid.add_attention(config, forward_pass, weights, x, layer, carry)
        x = hybrid.add_mlp(config, arithmetic, weights, x)
        x = zero_centered_norm(arithmetic, x, weights["norm"], eps)
        return rows.leave(x.reshape(*tokens.shape, -1)), carry
