"""Counts the instructions of the TPU's decode kernel, as its compiler writes them down.

XLA estimates nothing for Pallas kernels, so `cycles.py` counts here. A TPU's core issues one bundle
of instructions in a cycle. libtpu writes the bundles of every operation to files if it is asked to
before it starts, and marks how deep in loops each bundle is. How often a loop turns is data, which
the work of a call says.

    with written_bundles() as directory:
        compile a program
        kernel = loops_of(final_bundles(directory, "decode_attention"))
    bundles = count(kernel, sizes, work)

Code under a condition counts as always run, so that what a slot does with its last block is counted
for every block. The cycles in which a core waits for a product or for memory are not counted.
"""

import math
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from jzero.attention.tpu_decode import Sizes


@dataclass
class Loop:
    """A loop of a compiled kernel, or the whole kernel."""

    bundles: int = 0  # of one turn, without those of the loops inside
    inner: list["Loop"] = field(default_factory=list)


@dataclass(frozen=True)
class Work:
    """What one call of the kernel does, on one device."""

    slots: int
    tokens: int  # of every slot, with the new one
    prompt: int  # the first tokens of every slot, which samples of one prompt have in common
    cores: int  # of a device


@contextmanager
def written_bundles() -> Iterator[Path]:
    """Asks libtpu to write the bundles of what it compiles to a directory.

    The directory is there while the context is open. libtpu reads its flags once, so it must not be
    loaded before.
    """
    with tempfile.TemporaryDirectory() as directory:
        flags = [
            os.environ.get("LIBTPU_INIT_ARGS", ""),
            f"--xla_jf_dump_to={directory}",
            "--xla_jf_dump_llo_text=true",
            "--xla_jf_dump_llo_pass_label_regex=final_bundles",
        ]
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(flags)
        yield Path(directory)


def final_bundles(directory: Path, operation: str) -> str:
    """Returns the text of the bundles of an operation; of several, those of the last one.

    Raises FileNotFoundError if libtpu has written none.
    """
    files = [
        path
        for path in sorted(directory.glob(f"*-{operation}*final_bundles.txt"))
        if "schedule-analysis" not in path.name
    ]
    if not files:
        raise FileNotFoundError(f"libtpu has written no bundles of {operation} to {directory}")
    return files[-1].read_text()


def loops_of(text: str) -> Loop:
    """Returns the loops of a kernel from the text of its bundles.

    A line is an address, two letters if something begins there (LB: the body of a loop), one > for
    each loop around, and the bundle in braces. Empty bundles have no >, and are as deep as the
    bundle before them.
    """
    kernel = Loop()
    around = [kernel]  # the kernel, and the loops around the bundle
    for line in text.splitlines():
        bundle = re.match(r"\s*(?:0x[0-9a-f]+|0)\s+(\w\w)?\s*:\s+(>*) *\{(\})?", line)
        if bundle is None:
            continue
        is_body = bundle[1] == "LB"
        depth = len(bundle[2])
        is_empty = bundle[3] is not None and depth == 0
        if is_body:
            del around[depth:]
            loop = Loop()
            around[-1].inner.append(loop)
            around.append(loop)
        elif not is_empty:
            del around[depth + 1 :]
        around[-1].bundles += 1
    return kernel


def count(kernel: Loop, sizes: Sizes, work: Work) -> int:
    """Returns the bundles that a core issues in one call of the kernel.

    The loops are those of `tpu_decode.kernel`: the pages that are read first, and the neighbors.
    Neighbors have a loop over the blocks that they share, if they read together, and one over the
    slots. A loop over blocks has loops over pages, which are started and waited for. Where a core
    computes several parts of the slots, all of this is in a loop over the parts. The pages that are
    read first are counted as all others are.
    """
    num_parts = math.ceil(work.slots / sizes.slots)
    has_loop = len(kernel.inner) == 1
    part = kernel.inner[0] if has_loop else kernel
    num_neighbors = sizes.slots // sizes.neighbors
    if num_neighbors == 1:  # a loop of one turn is none
        neighbors = Loop(0, part.inner[1:])
    else:
        _, neighbors = part.inner
    is_together = sizes.neighbors > 1
    num_shared = work.prompt // sizes.page_size if is_together else 0
    num_own = math.ceil(work.tokens / sizes.page_size) - num_shared

    def of_blocks(loop: Loop, num_pages: int) -> int:
        num_blocks = math.ceil(num_pages / sizes.block_pages)
        of_a_page = sum(inner.bundles for inner in loop.inner)
        return num_blocks * loop.bundles + num_pages * of_a_page

    of_neighbors = neighbors.bundles
    if is_together:
        shared, slots = neighbors.inner
        [own] = slots.inner
        of_neighbors += of_blocks(shared, num_shared)
        of_neighbors += sizes.neighbors * (slots.bundles + of_blocks(own, num_own))
    else:
        [own] = neighbors.inner
        of_neighbors += of_blocks(own, num_own)

    of_part = part.bundles + num_neighbors * of_neighbors
    of_call = kernel.bundles if has_loop else 0
    return of_call + math.ceil(num_parts / work.cores) * of_part


def bytes_read(sizes: Sizes, work: Work, bytes_of_token: float) -> float:
    """Returns the bytes of keys and values that one call reads, of one layer.

    bytes_of_token: of the keys and values of one token in one layer.
    """
    shared = work.prompt // sizes.page_size * sizes.page_size if sizes.neighbors > 1 else 0
    own = work.slots * (work.tokens - shared)
    return bytes_of_token * (own + work.slots // sizes.neighbors * shared)
