"""With model.exact a batch of many adapters has the bits of each adapter alone.

Programs are compiled with optimizations, as in runs: model.exact does not hold without them.
"""

import numpy as np
import pytest
import test_adapter_bank as bank_tests

from jzero.decoder.adapter_bank import can_hold
from jzero.errors import UserError


def test_a_bank_of_an_int8_base_is_not_exact() -> None:
    engine = bank_tests.engine_in("float32", is_exact=True)
    base = bank_tests.base_of(engine, True)
    with pytest.raises(UserError, match="several adapters of an int8 base have other bits"):
        bank_tests.full_bank(engine, base)
    assert not can_hold(engine.model, base, exact=True)
    assert can_hold(engine.model, base, exact=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_batches_have_the_bits_of_each_adapter_alone(dtype) -> None:
    engine = bank_tests.engine_in(dtype, is_exact=True)
    base = bank_tests.base_of(engine, False)
    bank, held = bank_tests.full_bank(engine, base)

    together = bank_tests.complete(engine, bank.params, held)

    for name, answers in together.items():
        expected = bank_tests.alone(engine, base, name)
        assert answers.keys() == expected.keys()
        for key, sequence in answers.items():
            assert sequence.new_tokens == expected[key].new_tokens, name
            np.testing.assert_array_equal(sequence.new_logps, expected[key].new_logps)
