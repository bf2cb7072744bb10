"""The files of a program of the sandbox: its sealed input, and the pipes that it writes to.

Runs inside of the sandbox, and imports the standard library alone.
"""

import fcntl
import os
import select
from collections.abc import Sequence

_CHUNK = 1 << 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def sealed_file(content: bytes) -> int:
    """Returns a file in memory that can be read and never changed."""
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def give_files(ends: Sequence[int]) -> None:
    """Makes `ends` the descriptors 0 to RESULT of this process, and closes all others."""
    # First out of the way: an end may have the number of another one's place.
    high = [fcntl.fcntl(end, fcntl.F_DUPFD, 100) for end in ends]
    for place, end in enumerate(high):
        os.dup2(end, place, inheritable=True)
    os.closerange(len(ends), 1 << 16)


class Output:
    """What a program writes to its pipes, up to a limit for all of them together."""

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
        """Reads what a pipe has, once."""
        try:
            part = os.read(pipe, _CHUNK)
        except BlockingIOError:
            return
        if not part:
            self.open.discard(pipe)
            return
        self._left -= len(part)
        if not self.is_full:
            self._parts[pipe].append(part)

    def read_rest(self) -> None:
        """Reads what is left in the pipes of a program that has ended."""
        for pipe in list(self.open):
            while pipe in self.open and not self.is_full and select.select([pipe], [], [], 0)[0]:
                self.read(pipe)

    def text(self, pipe: int) -> str:
        return b"".join(self._parts[pipe]).decode("utf-8", "replace")
