"""Sizes of the differences between policy versions: `python benchmarks/jobs_snapshots.py RUN`.

RUN is the workdir of a run with rollout.placement=jobs. Prints the bytes of a version as a full
snapshot, and as the XOR with the version before: as it is, and by byte planes, compressed by zlib
at levels 1 and 6 and, if the package is installed, by zstd. Medians over the versions in the store.
--dtype bfloat16 rounds the weights of a run in fp32, as a run with model.dtype=bfloat16 publishes.

    python benchmarks/jobs_snapshots.py RUN --every 5

prints a row for each version instead: the bytes of the difference as jzero stores it, the processor
seconds of making and of undoing it, and the same of every fifth version as a full snapshot.
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

from jzero.jobs.snapshots import (
    DTYPES,
    FOLDER,
    Reader,
    Tensors,
    bytes_of,
    decode,
    encode,
    version_of,
)
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
        num_equal += count_equal(previous, current)
        num_values += sum(tensor.size for tensor in current.values())
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


def count_equal(previous: Tensors, current: Tensors) -> int:
    """Returns how many numbers have the same bytes in two versions."""
    num_equal = 0
    for key, tensor in current.items():
        difference = bytes_of(tensor) ^ bytes_of(previous[key])
        num_equal += int((~difference.reshape(-1, tensor.itemsize).any(1)).sum())
    return num_equal


@dataclass(frozen=True)
class Stored:
    """A version as jzero stores it, with the processor seconds of making it and of reading it."""

    bytes: int
    encode: float
    decode: float


def store(current: Tensors, previous: Tensors | None) -> Stored:
    """Encodes and decodes a version: as a full snapshot, or as the difference to `previous`."""
    size, encode_seconds, decode_seconds = 0, 0.0, 0.0
    for key, tensor in current.items():
        base = None if previous is None else previous[key]
        start = time.process_time()
        data = encode(tensor, base)
        encoded = time.process_time()
        decode(data, str(tensor.dtype), tensor.shape, base)
        size += len(data)
        encode_seconds += encoded - start
        decode_seconds += time.process_time() - encoded
    return Stored(size, encode_seconds, decode_seconds)


def measure_each(numbers: list[int], versions: Iterable[Tensors], every: int) -> None:
    """Prints a row for each version after the first, and the medians of the columns."""
    print("| version | numbers that change | difference, MB | encode s | decode s ", end="")
    print("| full, MB | encode s | decode s | full / difference |")
    print("|---" * 9 + "|")
    differences: list[Stored] = []
    shares: list[float] = []
    pairs = itertools.pairwise(versions)
    for number, (previous, current) in zip(numbers[1:], pairs, strict=True):
        num_values = sum(tensor.size for tensor in current.values())
        shares.append(1 - count_equal(previous, current) / num_values)
        difference = store(current, previous)
        differences.append(difference)
        cells = [str(number), f"{shares[-1]:.2%}", *stored_cells(difference)]
        if number % every == 0:
            full = store(current, None)
            cells += [*stored_cells(full), f"{full.bytes / difference.bytes:.1f}"]
        else:
            cells += [""] * 4
        print(f"| {' | '.join(cells)} |", flush=True)
    middle = Stored(
        round(statistics.median(stored.bytes for stored in differences)),
        statistics.median(stored.encode for stored in differences),
        statistics.median(stored.decode for stored in differences),
    )
    cells = ["median", f"{statistics.median(shares):.2%}", *stored_cells(middle), *[""] * 4]
    print(f"| {' | '.join(cells)} |")


def stored_cells(stored: Stored) -> list[str]:
    """Returns the cells of a version: MB, and seconds of encoding and of decoding."""
    return [f"{stored.bytes / 1e6:.2f}", f"{stored.encode:.2f}", f"{stored.decode:.2f}"]


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
    parser.add_argument(
        "--every", type=int, default=0, help="a row for each version; full ones every so many"
    )
    options = parser.parse_args()
    settings = json.loads((options.run / "config.json").read_text(encoding="utf-8"))
    store = open_store(settings["rollout"]["placement"]["store"])
    run, _ = read_run(store.read(RUN), store.address)
    reader = Reader(store, run)
    numbers = sorted({v for v in map(version_of, store.names(FOLDER)) if v is not None})
    numbers = numbers[-options.last :]
    versions = (
        in_type(reader.load(number, reader.manifest(number).identity), options.dtype)
        for number in numbers
    )
    if options.every:
        measure_each(numbers, versions, options.every)
    else:
        measure(versions)


if __name__ == "__main__":
    main()
