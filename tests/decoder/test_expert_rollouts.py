"""Decoding with experts: as the trainer computes it, alone, in groups, and on several devices."""

import numpy as np
import pytest
from test_engine import TEMPERATURE, assert_same, base, complete, make, params_on, scored

pytestmark = pytest.mark.usefixtures("quick_compilation")

NAME = "qwen3_moe"
NAMES = [NAME, "hybrid_moe"]


@pytest.mark.parametrize("name", NAMES)
def test_sampled_log_probs_are_those_of_the_trainer(name: str) -> None:
    for sequence, _, logps in scored(make(name), base(name), TEMPERATURE):
        np.testing.assert_allclose(sequence.new_logps, logps, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "arrangement",
    [
        pytest.param({"num_slots": 3, "page_size": 4, "decode_steps": 5}, id="3 slots"),
        pytest.param({"shape": (2, 4), "decode_steps": 6}, id="2 shards x tensor 4"),
    ],
)
def test_neighbors_and_devices_change_nothing(arrangement: dict, name: str) -> None:
    """Idle slots and the padding of prompts go to no expert; devices share the experts."""
    engine = make(name, **arrangement)
    completions, _ = complete(engine)

    # As in test_slot_state.py: the state of a gated delta net keeps what was rounded.
    atol = 1e-5 if name == NAME else 2e-5
    assert_same(completions, base(name), atol)
    assert engine.program_settings.experts.tensor == engine.mesh.shape["tensor"]


def test_devices_hold_whole_experts() -> None:
    layers = params_on(make(NAME, shape=(2, 4), decode_steps=6))["layers"]

    assert {shard.data.shape for shard in layers["experts_gate"].addressable_shards} == {
        (2, 2, 64, 32)
    }
