"""Reads the next policy version in the background, while a sampler decodes with the one before."""

import contextlib
import threading

from jzero.jobs.checks import WeightsId
from jzero.jobs.snapshots import Reader, SnapshotError

LOOKS = 10  # of the main thread for requests, in the time between two looks for a version


class Prefetch:
    """A thread that waits for one version, and reads it into the host memory of a reader.

    While the thread runs, nothing else may load versions with the reader.
    """

    def __init__(self, reader: Reader, takes_newest: bool = False) -> None:
        """`takes_newest`: reads the newest version, once it is not older than the wanted one."""
        self.reader = reader
        self.takes_newest = takes_newest
        # The version that the thread has read, and its identity; None before that.
        self.loaded: WeightsId | None = None
        self._thread: threading.Thread | None = None
        self._is_canceled = threading.Event()

    @property
    def is_running(self) -> bool:
        """Whether the thread waits for a version, or reads it."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, version: int) -> None:
        """Begins to wait for a version, unless a thread already waits for one."""
        if self._thread is not None:
            return
        self._is_canceled.clear()
        self.loaded = None
        # A daemon: a sampler that is told to end does not wait for a large snapshot.
        self._thread = threading.Thread(target=self._read, args=(version,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread: at once if it waits, after its version if it reads."""
        if self._thread is not None:
            self._is_canceled.set()
            self._thread.join()
            self._thread = None
            self.loaded = None

    def _read(self, version: int) -> None:
        """Waits for a version and reads it."""
        # The main thread uses the same store and the same files: if there is an error, it meets it
        # when it needs them, and reports it.
        with contextlib.suppress(Exception):
            found = self._wait_for(version)
            if found is not None:
                self.reader.load(*found)
                self.loaded = found

    def _wait_for(self, version: int) -> WeightsId | None:
        """Returns a version and its identity once it is published; None if the wait was ended."""
        while not self._is_canceled.is_set():
            found = self._find(version)
            if found is not None:
                return found
            # In a bucket every look is a paid request.
            self._is_canceled.wait(LOOKS * self.reader.store.poll_seconds)
        return None

    def _find(self, version: int) -> WeightsId | None:
        """Returns the version to read and its identity, or None before it is published."""
        if self.takes_newest:
            # Not the manifests: those from before a kill of the trainer may be of other weights.
            newest = self.reader.newest()
            return newest if newest is not None and newest[0] >= version else None
        try:
            return version, self.reader.manifest(version).identity
        except SnapshotError:
            return None
