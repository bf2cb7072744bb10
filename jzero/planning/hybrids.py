"""Estimates the memory that hybrids of attention and gated delta nets need in addition.

    sequence = bytes_of_sequence(model, num_tokens=8192)
    sequence.keys_and_values, sequence.state

A gated delta net keeps a state of constant size for every sequence; attention keeps keys and values
of every token. Compared with a model that has only attention, a hybrid needs more memory for a
short sequence, and less for a long one.
"""

from typing import NamedTuple

from jzero.model.architecture import QwenConfig
from jzero.model.delta_net import CHUNK

FP32_BYTES = 4
FP32_COPIES = 3  # copies of a layer's q, k and v: convolved, normalized, and their gradients


class SequenceBytes(NamedTuple):
    """The bytes that the decoder keeps for one sequence."""

    keys_and_values: int
    state: int

    @property
    def total(self) -> int:
        return self.keys_and_values + self.state


def bytes_of_sequence(model: QwenConfig, num_tokens: int, kv_bytes: int = 2) -> SequenceBytes:
    """Returns the bytes of a sequence of `num_tokens`, summed over the devices that share it.

    kv_bytes: bytes per element of a key or a value.
    """
    values_per_token = 2 * model.num_cached_layers * model.num_key_value_heads * model.head_dim
    state = 0
    if model.delta_net is not None:
        # The state is fp32 and does not grow with the sequence.
        state = len(model.delta_layers) * model.delta_net.state_numbers * FP32_BYTES
    return SequenceBytes(num_tokens * values_per_token * kv_bytes, state)


def mean_mixer_numbers(model: QwenConfig) -> float:
    """Returns how many values the mixer's products compute per token, as a mean over layers."""
    assert model.delta_net is not None
    # Attention has a gate as wide as its queries; a gated delta net has q, k, v and z.
    attention = 2 * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    sizes = model.delta_net
    delta = sizes.num_channels + sizes.num_value_heads * sizes.value_dim
    num_attention, num_delta = len(model.attention_layers), len(model.delta_layers)
    return (num_attention * attention + num_delta * delta) / model.num_hidden_layers


def delta_work_bytes(model: QwenConfig, num_tokens: int) -> float:
    """Returns the bytes for the backward pass of one gated delta net; 0 without a delta net."""
    if model.delta_net is None:
        return 0.0
    sizes = model.delta_net
    # The backward pass needs the states between the chunks, and fp32 copies of q, k and v of all
    # value heads.
    state = sizes.num_value_heads * sizes.key_dim * sizes.value_dim
    heads = sizes.num_value_heads * (2 * sizes.key_dim + sizes.value_dim)
    return FP32_BYTES * num_tokens * (state / CHUNK + FP32_COPIES * heads)
