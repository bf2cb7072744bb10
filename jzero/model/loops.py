"""How the loop over a model's layers is compiled."""

import jax


def writes_layers_out() -> bool:
    """Whether the loop over the layers is compiled as one piece of code for each layer.

    It is on the CPU devices of several processes. There XLA may begin a collective while a loop
    that stands before it, and has collectives in its body, still runs. One process does, another
    does not, and the run ends in "Received data size doesn't match expected size". Collectives
    outside of loops are begun in the order of the program.
    """
    return jax.process_count() > 1 and jax.default_backend() == "cpu"
