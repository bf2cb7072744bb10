"""The lines of a file that another process appends to, found by their offsets.

A file is read only from where the last reading ended. It may be a copy that a program such as rsync
replaces, it may end within a line, and a resumed run may shorten it.
"""

import os
import zlib
from array import array
from pathlib import Path

import numpy as np

from jzero.errors import UserError
from jzero.files import open_file

CHUNK = 4 * 2**20  # bytes that are read at once
MAX_LINE = 32 * 2**20  # bytes; a longer line is not read
LONGEST_LINE = 8 * MAX_LINE  # bytes; the lines after a longer one are not found
MAX_LINES = 20_000_000  # later lines are not read, as their offsets would fill the memory
CHECKED = 4096  # bytes before the end that identify a file whose inode or size has changed


class LineFile:
    """Finds the complete lines of a growing file, and reads some of them.

    A last line without its newline is not complete. `generation` changes when the file was
    replaced by a file that does not begin with the same lines, so that all lines have to be read
    again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self._starts = array("Q")  # offset of each complete line
        self._end = 0  # offset after the last complete line
        self._scanned = 0  # offset after the last byte that was searched for a newline
        self._seen: tuple[int, int, int] | None = None  # inode, size and time at the last poll
        self._checksum = 0  # of the last CHECKED bytes before `_end`

    def __len__(self) -> int:
        return len(self._starts)

    def poll(self) -> bool:
        """Finds the lines that were appended; returns whether there are any, or fewer lines."""
        try:
            with open_file(self.path) as file:
                stat = os.fstat(file.fileno())
                seen = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
                # Most polls end here, without reading anything.
                if seen == self._seen:
                    return False
                has_reset = False
                # A copy by rsync has a new inode and the same beginning, so the inode does not tell
                # whether lines have changed. A checksum of the last known bytes does, and costs one
                # small read.
                if stat.st_size < self._end or self._tail_checksum(file.fileno()) != self._checksum:
                    has_reset = self._reset()
                before = len(self)
                self._find_lines(file.fileno())
                self._checksum = self._tail_checksum(file.fileno())
                self._seen = seen
                return has_reset or len(self) > before
        except (OSError, UserError):
            # Not there yet, being replaced, or a pipe or a device.
            return self._reset() if len(self) else False

    def _reset(self) -> bool:
        self.generation += 1
        self._starts, self._end, self._scanned = array("Q"), 0, 0
        self._seen, self._checksum = None, 0
        return True

    def _tail_checksum(self, descriptor: int) -> int:
        begin = max(0, self._end - CHECKED)
        return zlib.crc32(os.pread(descriptor, self._end - begin, begin)) if self._end else 0

    def _find_lines(self, descriptor: int) -> None:
        # An incomplete line may be long: no byte of it is searched twice.
        position = max(self._end, self._scanned)
        while len(self) < MAX_LINES and position - self._end <= LONGEST_LINE:
            chunk = os.pread(descriptor, CHUNK, position)
            if not chunk:
                break
            # NumPy, because a samples.jsonl may have gigabytes.
            newlines = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))
            if len(newlines):
                ends = newlines.astype(np.uint64) + np.uint64(position + 1)
                # A line starts where the line before it ends.
                starts = np.concatenate([np.array([self._end], np.uint64), ends[:-1]])
                self._starts.frombytes(starts.tobytes())
                self._end = int(ends[-1])
            position += len(chunk)
        self._scanned = position

    def read(self, first: int, last: int) -> list[bytes]:
        """Returns the lines `first` to `last` - 1, without those that do not exist.

        A line of more than MAX_LINE bytes is b"", and so is a line of a file that is gone.
        """
        last = min(last, len(self))
        lines: list[bytes] = []
        try:
            with open_file(self.path) as file:
                for number in range(first, last):
                    start = self._starts[number]
                    end = self._starts[number + 1] if number + 1 < len(self) else self._end
                    is_short = end - start <= MAX_LINE
                    lines.append(os.pread(file.fileno(), end - start, start) if is_short else b"")
        except (OSError, UserError):
            lines += [b""] * (last - first - len(lines))
        return lines
