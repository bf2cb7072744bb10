"""Tiny models of Qwen3.5: the entries of their config.json, and their forward pass over rows."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jzero.attention import xla
from jzero.model import delta_net, qwen
from jzero.model.architecture import QwenConfig
from jzero.types import RowLayout

TEXT_ENTRIES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "max_position_embeddings": 128,
}


def shaken(model: Any) -> Any:
    """Returns a model of transformers none of whose norms and gates is what it was made as."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "dt_bias" in name or "conv1d" in name:
                parameter += 0.3 * torch.randn_like(parameter)
            elif parameter.ndim >= 2:
                parameter *= 4
    return model


@partial(jax.jit, static_argnums=0)
def forward(config: QwenConfig, params: qwen.Params, tokens: jax.Array, segments: jax.Array):
    """Returns the logits of plain rows."""
    layout = RowLayout(0, 1, tokens.shape[1])

    def attend(q, k, v, layer, carry):
        return xla.packed(q, k, v, segments, layout), carry

    def recur(inputs, layer, carry):
        return delta_net.recur_packed(inputs, segments, layout), carry

    is_first = jnp.diff(segments, axis=1, prepend=-1) != 0
    columns = jnp.arange(tokens.shape[1])
    positions = columns - jax.lax.cummax(jnp.where(is_first, columns, 0), axis=1)
    hidden, _ = qwen.forward(
        config, params, tokens, positions, attend, dtype=jnp.float32, recur=recur
    )
    return qwen.head(config, params, hidden, jnp.float32)
