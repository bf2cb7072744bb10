"""Updates of a model with sliding windows: sharing prefixes, rows and devices changes nothing.

tests/model/test_gemma.py compares one sequence with transformers.
"""

from dataclasses import replace

import pytest
import reference
from test_context_parallelism import assert_same_step, gradient_on

from jzero.model.architecture import ATTENTION, SLIDING

pytestmark = pytest.mark.usefixtures("quick_compilation")

GEMMA = replace(
    reference.MODEL,
    model_type="gemma3_text",
    layer_types=(SLIDING, ATTENTION, SLIDING, SLIDING)[: reference.MODEL.num_hidden_layers],
    sliding_window=4,  # shorter than a prompt and than a response
    local_rope_theta=100.0,
    query_scale=7,
)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 2, 1, 2), (1, 1, 2, 2)], ids=str)
@pytest.mark.parametrize("packing", ["two slots", "own slot"])
def test_a_shared_prefix_is_in_the_window(packing: str, sizes: tuple[int, ...]) -> None:
    """In "plain" packing every sequence has its own prompt."""
    found = gradient_on(sizes, packing, GEMMA)

    assert_same_step(found, gradient_on((1, 1, 1), "plain", GEMMA))


def test_the_window_matters() -> None:
    """Or the comparisons above would compare nothing."""
    wide = replace(GEMMA, sliding_window=1000)

    (found, _), (expected, _) = (gradient_on((1, 1, 1), "plain", m) for m in (wide, GEMMA))

    assert reference.difference(found, expected) > 1e-3
