"""Sizes of the differences between policy versions: `python benchmarks/jobs_snapshots.py RUN`.

RUN is the workdir of a run with rollout.placement=jobs. Prints the bytes of a version as a full
snapshot, and as the XOR with the version before: as it is, and by byte planes, compressed by zlib
at levels 1 and 6 and, if the package is installed, by zstd. Medians over the versions in the store.
"""

import argparse
import importlib.util
import itertools
import json
import statistics
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jzero.jobs.snapshots import FOLDER, Reader, Tensors, bytes_of, version_of
from jzero.jobs.store import open_store
from jzero.jobs.stream import RUN, read_run


def planes(data: np.ndarray, itemsize: int) -> bytes:
    """Returns bytes with the first byte of every number first."""
    return np.ascontiguousarray(data.reshape(-1, itemsize).T).tobytes()


def compressors() -> dict[str, Callable[[bytes], bytes]]:
    """Returns the compressions to compare."""
    found: dict[str, Callable[[bytes], bytes]] = {
        "zlib 1": lambda data: zlib.compress(data, 1),
        "zlib 6": lambda data: zlib.compress(data, 6),
    }
    if importlib.util.find_spec("zstandard"):
        import zstandard

        found["zstd 3"] = zstandard.ZstdCompressor(3).compress
    return found


def measure(versions: list[Tensors]) -> None:
    """Prints a row for each form and compression."""
    size = sum(tensor.nbytes for tensor in versions[0].values())
    print(f"{len(versions)} versions of {size:,} bytes")
    print("| form | compression | share of the bytes | MB/s |")
    print("|---|---|---|---|")
    for form in ("full, by planes", "XOR", "XOR, by planes"):
        for name, compress in compressors().items():
            shares, start = [], time.perf_counter()
            for previous, current in itertools.pairwise(versions):
                total = 0
                for key, tensor in current.items():
                    data = bytes_of(tensor)
                    if form.startswith("XOR"):
                        data = data ^ bytes_of(previous[key])
                    is_shuffled = form.endswith("planes")
                    raw = planes(data, tensor.itemsize) if is_shuffled else data.tobytes()
                    total += len(compress(raw))
                shares.append(total / size)
            speed = size * len(shares) / (time.perf_counter() - start) / 1e6
            print(f"| {form} | {name} | {statistics.median(shares):.1%} | {speed:.0f} |")


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    options = parser.parse_args()
    settings = json.loads((options.run / "config.json").read_text(encoding="utf-8"))
    store = open_store(settings["rollout"]["placement"]["store"])
    run, _ = read_run(store.read(RUN), store.address)
    reader = Reader(store, run)
    numbers = sorted({v for v in map(version_of, store.names(FOLDER)) if v is not None})
    measure([reader.load(number, reader.manifest(number).identity) for number in numbers])


if __name__ == "__main__":
    main()
