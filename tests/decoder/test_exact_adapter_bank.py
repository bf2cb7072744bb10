"""With model.exact a batch of many adapters has the bits of each adapter alone.

Programs are compiled with optimizations, as in runs: model.exact does not hold without them.
"""

import numpy as np
import pytest
import test_adapter_bank as bank_tests


@pytest.mark.parametrize(
    ("dtype", "has_int8_base"),
    [
        ("float32", False),
        pytest.param("bfloat16", False, marks=pytest.mark.thorough),
        pytest.param("float32", True, marks=pytest.mark.thorough),
    ],
)
def test_exact_batches_have_the_bits_of_each_adapter_alone(dtype, has_int8_base) -> None:
    engine = bank_tests.engine_in(dtype, is_exact=True)
    base = bank_tests.base_of(engine, has_int8_base)
    bank, held = bank_tests.full_bank(engine, base)

    together = bank_tests.complete(engine, bank.params, held)

    for name, answers in together.items():
        expected = bank_tests.alone(engine, base, name)
        assert answers.keys() == expected.keys()
        for key, sequence in answers.items():
            assert sequence.new_tokens == expected[key].new_tokens, name
            np.testing.assert_array_equal(sequence.new_logps, expected[key].new_logps)
