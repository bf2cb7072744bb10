"""Sizes of the differences between policy versions: `python benchmarks/jobs_snapshots.py RUN`.

RUN is the workdir of a run with rollout.placement=jobs. Prints the bytes of a version as a full
snapshot, and as the XOR with the version before: as it is, and by byte planes, compressed by zlib
at levels 1 and 6 and, if the package is installed, by zstd. Medians over the versions in the store.
--dtype bfloat16 rounds the weights of a run in fp32, as a run with model.dtype=bfloat16 publishes.
"""

import argparse
import importlib.util
import itertools
import json
import statistics
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jzero.jobs.snapshots import DTYPES, FOLDER, Reader, Tensors, bytes_of, version_of
from jzero.jobs.store import open_store
from jzero.jobs.stream import RUN, read_run
from jzero.jobs.weights import SEPARATOR
from jzero.model import qwen

FORMS = ("full, by planes", "XOR", "XOR, by planes")


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


@dataclass
class Measured:
    """The bytes of the versions in one form and compression, and the seconds of compressing."""

    sizes: list[int] = field(default_factory=list)
    seconds: float = 0.0


def measure(versions: Iterable[Tensors]) -> None:
    """Prints a row for each form and compression."""
    rows: dict[tuple[str, str], Measured] = {}
    size, num_versions, num_equal, num_values = 0, 0, 0, 0
    # One pair at a time: all versions of a model do not fit into memory.
    for previous, current in itertools.pairwise(versions):
        num_versions += 1
        size = sum(tensor.nbytes for tensor in current.values())
        for key, tensor in current.items():
            difference = bytes_of(tensor) ^ bytes_of(previous[key])
            num_equal += int((~difference.reshape(-1, tensor.itemsize).any(1)).sum())
            num_values += tensor.size
        for form, (name, compress) in itertools.product(FORMS, compressors().items()):
            row = rows.setdefault((form, name), Measured())
            start, total = time.perf_counter(), 0
            for key, tensor in current.items():
                data = bytes_of(tensor)
                if form.startswith("XOR"):
                    data = data ^ bytes_of(previous[key])
                raw = planes(data, tensor.itemsize) if form.endswith("planes") else data.tobytes()
                total += len(compress(raw))
            row.sizes.append(total)
            row.seconds += time.perf_counter() - start
    print(
        f"{num_versions} differences of {size:,} bytes; {num_equal / num_values:.1%} of the ",
        end="",
    )
    print("numbers do not change in a step")
    print("| form | compression | bytes | share | seconds |")
    print("|---|---|---|---|---|")
    for (form, name), row in rows.items():
        middle = statistics.median(row.sizes)
        seconds = row.seconds / num_versions
        print(f"| {form} | {name} | {middle:,.0f} | {middle / size:.1%} | {seconds:.1f} |")


def in_type(tensors: Tensors, dtype: str) -> Tensors:
    """Returns the tensors that a run with this model.dtype would publish for the same weights."""
    if not dtype:
        return tensors
    rounded = {}
    for name, tensor in tensors.items():
        stays_fp32 = not qwen.FP32_PARAMETERS.isdisjoint(name.split(SEPARATOR))
        rounded[name] = tensor if stays_fp32 else tensor.astype(DTYPES[dtype])
    return rounded


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--dtype", default="", choices=["", *DTYPES], help="rounds the weights")
    parser.add_argument("--last", type=int, default=0, help="only so many versions (0: all)")
    options = parser.parse_args()
    settings = json.loads((options.run / "config.json").read_text(encoding="utf-8"))
    store = open_store(settings["rollout"]["placement"]["store"])
    run, _ = read_run(store.read(RUN), store.address)
    reader = Reader(store, run)
    numbers = sorted({v for v in map(version_of, store.names(FOLDER)) if v is not None})
    measure(
        in_type(reader.load(number, reader.manifest(number).identity), options.dtype)
        for number in numbers[-options.last :]
    )


if __name__ == "__main__":
    main()
