"""How fast the CPU of this machine computes: measured by short programs, for an estimate of hours.

    cpu_chip(2)     the limits of one of two CPU devices of this machine

Other programs on the machine make the measurement slower, as they make the run.
"""

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jzero.planning.chips import Chip

SIDE = 1024  # of the matrices of a product, whose 2 GFLOPs take a tenth of a second at most
COPIED_BYTES = 1 << 26
REPEATS = 3


def cpu_chip(num_devices: int) -> Chip:
    """Returns the limits of each of the CPU devices of this machine, which share its cores."""
    flops, bandwidth = _rates()
    return Chip(hbm_bytes=0, flops=flops / num_devices, bandwidth=bandwidth / num_devices)


@functools.cache
def _rates() -> tuple[float, float]:
    """Returns the fp32 FLOPs and the copied bytes a second of all cores."""
    device = jax.local_devices(backend="cpu")[0]
    matrix = jax.device_put(np.ones((SIDE, SIDE), np.float32), device)
    product = jax.jit(jnp.dot)
    product(matrix, matrix).block_until_ready()  # compiles
    flops = 2 * SIDE**3 / _shortest(lambda: product(matrix, matrix).block_until_ready())
    source = np.ones(COPIED_BYTES // 8, np.float64)
    target = np.empty_like(source)
    # A copy reads and writes every byte.
    copied = 2 * COPIED_BYTES / _shortest(lambda: np.copyto(target, source))
    return flops, copied


def _shortest(function: Callable[[], object]) -> float:
    """Returns the seconds of the fastest of REPEATS calls."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
