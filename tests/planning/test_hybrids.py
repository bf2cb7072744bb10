"""Plans of hybrids: what a sequence takes, and which layers have keys and values."""

import jax
import numpy as np
import pytest

from jzero.model import delta_net, qwen
from jzero.planning.hybrids import bytes_of_sequence
from jzero.planning.models import architecture
from jzero.planning.roofline import attention_flops_per_pair


@pytest.mark.parametrize("num_tokens", [1024, 8192, 32768])
def test_a_long_sequence_of_a_hybrid_takes_less_than_one_of_attention_alone(num_tokens):
    hybrid = architecture("Qwen/Qwen3.5-4B")
    dense = architecture("Qwen/Qwen3-4B")

    ours, theirs = bytes_of_sequence(hybrid, num_tokens), bytes_of_sequence(dense, num_tokens)

    assert ours.keys_and_values == num_tokens * 32 * 1024
    assert theirs.keys_and_values == num_tokens * 144 * 1024
    assert theirs.state == 0
    assert ours.total < theirs.total


def test_the_state_is_what_the_decoder_keeps():
    model = architecture("Qwen/Qwen3.5-4B")
    state = jax.eval_shape(
        lambda: delta_net.empty_state(model.delta_net, len(model.delta_layers), 1)
    )

    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))

    assert bytes_of_sequence(model, 0).state == kept
    assert np.isclose(kept, 50e6, rtol=0.1)


def test_only_attention_layers_have_pairs_of_tokens():
    model = architecture("Qwen/Qwen3.5-9B")

    assert attention_flops_per_pair(model) == 4 * 8 * 16 * 256
    assert qwen.num_params(model) > 8e9
