"""The data that a compiled program sends between slices, over the data-center network.

    for collective in crossing(compiled.as_text(), devices_per_slice):
        print(collective.kind, collective.bytes, collective.is_repeated)

Read from the text of XLA's optimized program. Devices are numbered as in the program's mesh, slice
by slice. The compiler of TPUs compiles the program of one slice, with collectives among its
devices, and sends to other slices through the hosts.
"""

import math
import re
from dataclasses import dataclass

import numpy as np

COLLECTIVE = re.compile(
    r" = (?P<result>.+?) (?P<kind>all-gather|all-reduce|all-to-all|reduce-scatter|"
    r"collective-permute)(?:-start)?\("
)
# A transfer through the hosts of a slice: its array, and what the hosts do with it.
SEND = re.compile(
    r" = \((?P<array>\w+\[[\d,]*\]).* send\(.*is_host_transfer=true"
    r".*_xla_megascale_transfer_type=\"(?P<kind>\w+)\""
)
ARRAY = re.compile(r"\b[a-z]+(\d+)\w*\[([\d,]*)\]")  # such as bf16[8,128]
LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")
GRID = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
MESH = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\]"
    r"(?:, device_ids=\(\[(?P<sizes>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?\))? \{(?P<named>[^}]*)\}"
)


@dataclass(frozen=True)
class Collective:
    """A collective with devices of several slices."""

    kind: str  # such as all-reduce
    bytes: int  # of the result on each device, or of what it sends to the hosts
    is_repeated: bool  # in a loop, such as the one over microbatches


def crossing(program: str, devices_per_slice: int) -> list[Collective]:
    """Returns the collectives of an optimized program that have devices of several slices."""
    found = []
    is_in_entry = False
    for line in program.splitlines():
        # The other computations are bodies of loops and fusions, and fusions send nothing.
        if line and not line[0].isspace():
            is_in_entry = line.startswith("ENTRY")
        if send := SEND.search(line):
            kind = send["kind"].lower().replace("_", "-")
            found.append(Collective(kind, bytes_in(send["array"]), not is_in_entry))
            continue
        match = COLLECTIVE.search(line)
        if match is None:
            continue
        groups = groups_of(line)
        if any(len({device // devices_per_slice for device in group}) > 1 for group in groups):
            # The name of an operation in a loop has the loop.
            collective = Collective(match["kind"], bytes_in(match["result"]), "/while/" in line)
            found.append(collective)
    return found


def bytes_in(shapes: str) -> int:
    """Returns the bytes of the arrays in the type of a result."""
    total = 0
    for bits, dimensions in ARRAY.findall(shapes):
        sizes = [int(size) for size in dimensions.split(",") if size]
        total += math.prod(sizes) * int(bits) // 8
    return total


def groups_of(line: str) -> list[list[int]]:
    """Returns the groups of devices that exchange data, in any of the ways that XLA writes them."""
    if listed := LISTED.search(line):
        groups = re.findall(r"\{([\d,]+)\}", listed[1])
        return [numbers(group) for group in groups]
    if grid := GRID.search(line):
        count, members, sizes, order = grid.groups()
        devices = transposed(numbers(sizes), order)
        return devices.reshape(int(count), int(members)).tolist()
    mesh = MESH.search(line)
    assert mesh is not None, f"{line=}"
    sizes = [int(size) for size in re.findall(r"=(\d+)", mesh["axes"])]
    names = re.findall(r"'([^']+)'=", mesh["axes"])
    devices = np.arange(math.prod(sizes))
    if mesh["sizes"]:
        devices = transposed(numbers(mesh["sizes"]), mesh["order"])
    named = [names.index(name) for name in re.findall(r"'([^']+)'", mesh["named"])]
    others = [axis for axis in range(len(sizes)) if axis not in named]
    members = math.prod(sizes[axis] for axis in named)
    return devices.reshape(sizes).transpose(others + named).reshape(-1, members).tolist()


def numbers(text: str) -> list[int]:
    """Returns the numbers of a text such as 2,4."""
    return [int(number) for number in text.split(",")]


def transposed(sizes: list[int], order: str | None) -> np.ndarray:
    """Returns the devices in a grid of these sizes, with its axes in another order."""
    grid = np.arange(math.prod(sizes)).reshape(sizes)
    return grid.transpose(numbers(order)) if order else grid
