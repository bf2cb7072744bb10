"""The memory of the devices in a run: metrics of every step, and an end to runs that leak.

    watch = MemoryWatch(config.memory, planned_bytes)
    for step in ...:
        ...
        values |= watch.step_metrics()   # memory/live_gib, memory/peak_gib, memory/planned_gib
        watch.growth                     # "" or what has grown, once it has grown for too long

The bytes are those of the arrays that JAX knows, on the device of this host that holds the most.
Reading them takes no time of the device.
"""

from collections import Counter, defaultdict

import jax

from jzero.config import MemoryConfig
from jzero.training.offload import device_memory

GIB = 2**30
STEADY_STEP = 2  # of a process: its first steps compile, and make what stays
SLACK = 16 * 2**20  # bytes that are no leak, however small the model

# (shape and type of an array, such as "float32[8,128]") -> bytes on one device
BytesByKind = Counter[str]


def live_bytes() -> tuple[BytesByKind, Counter[str]]:
    """Returns the bytes of the live arrays on the fullest local device by kind, and their number.

    A kind is a type with a shape, such as "float32[8,128]".
    """
    sizes: dict[int, BytesByKind] = defaultdict(Counter)
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    for array in jax.live_arrays():
        if array.is_deleted() or not is_in_device_memory(array):
            continue
        kind = f"{array.dtype}{list(array.shape)}".replace(" ", "")
        shard = array.sharding.shard_shape(array.shape)
        size = array.dtype.itemsize
        for length in shard:
            size *= length
        for device in array.sharding.addressable_devices:
            sizes[device.id][kind] += size
            counts[device.id][kind] += 1
    if not sizes:
        return Counter(), Counter()
    fullest = max(sizes, key=lambda device: sizes[device].total())
    return sizes[fullest], counts[fullest]


def is_in_device_memory(array: jax.Array) -> bool:
    """Returns whether an array takes room on its devices, and not in the memory of their hosts."""
    return array.sharding.memory_kind in (None, device_memory(array))


class Growth:
    """Decides whether bytes grow steadily.

    They do if they have been more than `share` (and SLACK) above those of the second step for
    `steps` steps in a row, and more in each of these steps than in the step before. Memory that is
    taken once and kept is no leak, and neither is memory that comes and goes.
    """

    def __init__(self, share: float, steps: int) -> None:
        self.share = share
        self.steps = steps
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
        if self.baseline is None or not self.share:
            return False
        bound = self.baseline + max(self.share * self.baseline, SLACK)
        self._in_a_row = self._in_a_row + 1 if is_more and size > bound else 0
        return self._in_a_row >= self.steps


class MemoryWatch:
    """Measures the memory after every step of a process.

    Attributes:
        growth: what has grown, once the bytes have grown steadily; "" before that.
    """

    def __init__(self, settings: MemoryConfig, planned_bytes: float | None) -> None:
        """`planned_bytes` is what the planner counted for a device, None where it did not."""
        self.growth = ""
        self._planned = planned_bytes
        self._rule = Growth(settings.max_growth, settings.growth_steps)
        self._counts: Counter[str] = Counter()  # arrays of each kind after the second step
        self._peak = 0.0

    def step_metrics(self) -> dict[str, float]:
        """Returns the memory metrics after a step, in GiB of a device."""
        sizes, counts = live_bytes()
        live = float(sizes.total())
        had_baseline = self._rule.baseline is not None
        grows = self._rule.add(live)
        if self._rule.baseline is not None and not had_baseline:
            self._counts = counts
        if grows:
            self.growth = self._describe(live, sizes, counts)

        self._peak = max(self._peak, live, peak_bytes_in_use())
        values = {"memory/live_gib": live / GIB, "memory/peak_gib": self._peak / GIB}
        if self._planned is not None:
            values["memory/planned_gib"] = self._planned / GIB
        return values

    def _describe(self, live: float, sizes: BytesByKind, counts: Counter[str]) -> str:
        """Returns how much the arrays have grown, and which kinds have become more."""
        more = counts - self._counts
        gained = {kind: sizes[kind] / counts[kind] * number for kind, number in more.items()}
        largest = sorted(gained, key=gained.__getitem__, reverse=True)[:3]
        kinds = ", ".join(f"{more[kind]} more {kind}" for kind in largest)
        baseline = self._rule.baseline or 0.0
        return (
            f"the arrays on a device have grown in {self._rule.steps} steps in a row, from "
            f"{baseline / GIB:.3f} GiB after the second step to {live / GIB:.3f} GiB: {kinds}"
        )


def peak_bytes_in_use() -> float:
    """Returns the most bytes that were in use on a local device, 0 where it keeps no record."""
    peaks = [
        (device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()
    ]
    return float(max(peaks))
