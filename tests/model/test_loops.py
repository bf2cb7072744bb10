"""How the loop over the layers is compiled."""

import jax
import jax.numpy as jnp
import pytest

from jzero.model import qwen

CONFIG = qwen.QwenConfig("qwen2", 40, 16, 24, 3, 2, 1, 8, True, 10000.0, 1e-6)


def unroll_of_the_layers() -> int:
    """Returns how many layers one piece of the loop over the layers computes."""
    tokens = jnp.zeros((1, 8), jnp.int32)

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, carry: object
    ) -> tuple[jax.Array, object]:
        return q, carry

    def forward(params: qwen.Params) -> jax.Array:
        hidden, _ = qwen.forward(CONFIG, params, tokens, tokens, attend, dtype=jnp.float32)
        return hidden

    jaxpr = jax.make_jaxpr(forward)(qwen.abstract(CONFIG))
    loops = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    assert len(loops) == 1
    return loops[0].params["unroll"]


@pytest.mark.parametrize(("processes", "unroll"), [(1, 1), (2, CONFIG.num_hidden_layers)])
def test_layers_are_written_out_on_cpus_of_several_processes(
    processes: int, unroll: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective behind a loop with collectives would not wait for the loop there."""
    monkeypatch.setattr(jax, "process_count", lambda: processes)

    assert unroll_of_the_layers() == unroll
