"""The files of a program in the sandbox: its sealed input, and the pipes for its output.

Runs inside of the sandbox, and imports only the standard library.
"""

import fcntl
import os
import select
from collections.abc import Sequence

_CHUNK = 1 << 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def sealed_file(content: bytes) -> int:
    """Returns the descriptor of an in-memory file that can be read and never changed."""
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def give_files(ends: Sequence[int]) -> None:
    """Makes `ends` the descriptors 0, 1, 2, ... of this process, and closes all others."""
    # Moves all ends to high numbers first, because an end may occupy the target number of another.
    high = [fcntl.fcntl(end, fcntl.F_DUPFD, 100) for end in ends]
    for place, end in enumerate(high):
        os.dup2(end, place, inheritable=True)
    os.closerange(len(ends), 1 << 16)


class Output:
    """The output of a program to its pipes, up to a common limit."""

    def __init__(self, pipes: Sequence[int], limit: int) -> None:
        self._parts: dict[int, list[bytes]] = {pipe: [] for pipe in pipes}
        self._left = limit
        self.open = set(pipes)
        for pipe in pipes:
            os.set_blocking(pipe, False)

    @property
    def is_full(self) -> bool:
        return self._left < 0

    def read(self, pipe: int) -> None:
        """Reads once from a pipe."""
        try:
            part = os.read(pipe, _CHUNK)
        except BlockingIOError:
            return
        if not part:
            self.open.discard(pipe)
            return
        self._left -= len(part)
        # Output beyond the limit is dropped.
        if not self.is_full:
            self._parts[pipe].append(part)

    def read_rest(self) -> None:
        """Reads the remaining output of a program that has ended."""
        for pipe in list(self.open):
            while pipe in self.open and not self.is_full and select.select([pipe], [], [], 0)[0]:
                self.read(pipe)

    def text(self, pipe: int) -> str:
        return b"".join(self._parts[pipe]).decode("utf-8", "replace")
