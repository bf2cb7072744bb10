"""Measures device memory in a run: metrics for every step, and detection of memory leaks.

    watch = MemoryWatch(planned_bytes)
    for step in ...:
        ...
        values |= watch.step_metrics()   # memory/live_gib, memory/peak_gib, memory/planned_gib
        watch.growth                     # "", or a description once memory has grown for too long

The bytes are counted over JAX's live arrays, on the device of this host that holds the most.
Reading them takes no device time.
"""

import ctypes
import functools
import sys
from collections import Counter, defaultdict

import jax

from jzero.clock import COMPILATION_ENDS
from jzero.training.offload import device_memory

GIB = 2**30
STEADY_STEP = 2  # of a process: the first steps compile and allocate the permanent arrays
# A run stops with a checkpoint once its arrays exceed those of STEADY_STEP by MAX_GROWTH and have
# grown in each of GROWTH_STEPS steps. Later it would run out of memory without a checkpoint.
MAX_GROWTH = 0.2
GROWTH_STEPS = 5
LONG_COMPILATION_SECONDS = 1.0
SLACK = 16 * 2**20  # bytes of growth that never count as a leak, however small the model

# (shape and type of an array, such as "float32[8,128]") -> bytes on one device
BytesByKind = Counter[str]


def return_freed_memory() -> None:
    """Returns memory that this process has freed to the system, on CPUs under Linux.

    XLA:CPU allocates temporaries with malloc, and its compiler frees hundreds of MiB. The allocator
    of glibc would keep all of it for later.
    """
    if sys.platform != "linux" or jax.default_backend() != "cpu":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have no such call
    if trim is not None:
        trim(0)


@functools.cache
def return_memory_of_compilations() -> None:
    """Returns freed memory to the system after every long compilation of this process.

    Otherwise a program would run on top of the memory that its compilation has freed.
    """

    def listen(event: str, duration_secs: float, **details: str | int) -> None:
        if event == COMPILATION_ENDS and duration_secs >= LONG_COMPILATION_SECONDS:
            return_freed_memory()

    # Cached, because JAX keeps listeners forever.
    jax.monitoring.register_event_duration_secs_listener(listen)


def live_bytes() -> tuple[BytesByKind, Counter[str]]:
    """Returns the bytes of the live arrays on the fullest local device by kind, and their number.

    A kind is a type with a shape, such as "float32[8,128]". Arrays that share a buffer, such as the
    frozen model that the decoder reads too, count once.
    """
    # Device id -> kind -> bytes, and the same for the numbers of arrays.
    sizes: dict[int, BytesByKind] = defaultdict(Counter)
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    seen: set[tuple[int, int]] = set()  # devices and addresses of buffers
    for array in jax.live_arrays():
        # Donated arrays are deleted, and offloaded arrays are in host memory.
        if array.is_deleted() or not is_in_device_memory(array):
            continue
        kind = f"{array.dtype}{list(array.shape)}".replace(" ", "")
        for shard in array.addressable_shards:
            buffer = (shard.device.id, buffer_address(shard.data))
            if buffer in seen:
                continue
            seen.add(buffer)
            sizes[shard.device.id][kind] += shard.data.nbytes
            counts[shard.device.id][kind] += 1
    if not sizes:
        return Counter(), Counter()
    fullest = max(sizes, key=lambda device: sizes[device].total())
    return sizes[fullest], counts[fullest]


def buffer_address(shard: jax.Array) -> int:
    """Returns the address of the buffer of an array on one device."""
    try:
        return shard.unsafe_buffer_pointer()
    except (NotImplementedError, jax.errors.JaxRuntimeError):
        # A backend without addresses: every array counts.
        return -id(shard)


def is_in_device_memory(array: jax.Array) -> bool:
    """Returns whether an array is stored on its devices, and not in host memory."""
    return array.sharding.memory_kind in (None, device_memory(array))


class Growth:
    """Decides whether memory grows steadily.

    Memory grows steadily if, for GROWTH_STEPS steps in a row, it has been more than MAX_GROWTH (and
    SLACK) above its value after the second step, and above its value after the previous step.
    Neither a single lasting allocation nor memory that comes and goes counts as a leak.
    """

    def __init__(self) -> None:
        self.baseline: float | None = None  # bytes after the second step
        self._num_steps = 0
        self._before = 0.0
        self._in_a_row = 0

    def add(self, size: float) -> bool:
        """Takes the bytes after another step, and returns whether they grow steadily."""
        self._num_steps += 1
        if self._num_steps == STEADY_STEP:
            self.baseline = size
        is_more = size > self._before
        self._before = size
        if self.baseline is None:
            return False
        bound = self.baseline + max(MAX_GROWTH * self.baseline, SLACK)
        self._in_a_row = self._in_a_row + 1 if is_more and size > bound else 0
        return self._in_a_row >= GROWTH_STEPS


class MemoryWatch:
    """Measures the memory after every step of a process.

    Attributes:
        growth: a description of the growth, once memory has grown steadily; "" before.
    """

    def __init__(self, planned_bytes: float | None) -> None:
        """`planned_bytes` is the planner's estimate for a device; None without an estimate."""
        self.growth = ""
        self._planned = planned_bytes
        self._rule = Growth()
        self._counts: Counter[str] = Counter()  # arrays of each kind after the second step
        self._peak = 0.0

    def step_metrics(self) -> dict[str, float]:
        """Returns the memory metrics after a step, in GiB on a device."""
        sizes, counts = live_bytes()
        live = float(sizes.total())
        had_baseline = self._rule.baseline is not None
        grows = self._rule.add(live)
        if self._rule.baseline is not None and not had_baseline:
            self._counts = counts
        if grows:
            self.growth = self._describe(live, sizes, counts)

        # Where devices record no peak, the live arrays after a step are a lower bound.
        self._peak = max(self._peak, live, peak_bytes_in_use())
        values = {"memory/live_gib": live / GIB, "memory/peak_gib": self._peak / GIB}
        if self._planned is not None:
            values["memory/planned_gib"] = self._planned / GIB
        return values

    def _describe(self, live: float, sizes: BytesByKind, counts: Counter[str]) -> str:
        """Returns a description of the growth, with the kinds of arrays that have become more."""
        added = counts - self._counts
        gained = {kind: sizes[kind] / counts[kind] * number for kind, number in added.items()}
        largest = sorted(gained, key=gained.__getitem__, reverse=True)[:3]
        kinds = ", ".join(f"{added[kind]} more {kind}" for kind in largest)
        baseline = self._rule.baseline or 0.0
        return (
            f"the arrays on a device have grown in {GROWTH_STEPS} steps in a row, from "
            f"{baseline / GIB:.3f} GiB after the second step to {live / GIB:.3f} GiB: {kinds}"
        )


def peak_bytes_in_use() -> float:
    """Returns the peak bytes in use over the local devices; 0 if the devices do not record them."""
    peaks = [
        (device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()
    ]
    return float(max(peaks))
