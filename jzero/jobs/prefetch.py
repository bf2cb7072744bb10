"""Reads the next policy version in the background, while a sampler decodes with the one before."""

import contextlib
import threading

from jzero.jobs.snapshots import Reader, SnapshotError

LOOKS = 10  # of the main thread for requests, in the time between two looks for a version


class Prefetch:
    """A thread that waits for one version, and reads it into the host memory of a reader.

    While the thread runs, nothing else may load versions with the reader.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
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
        # A daemon: a sampler that is told to end does not wait for a large snapshot.
        self._thread = threading.Thread(target=self._read, args=(version,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread: at once if it waits, after its version if it reads."""
        if self._thread is not None:
            self._is_canceled.set()
            self._thread.join()
            self._thread = None

    def _read(self, version: int) -> None:
        """Waits for a version and reads it."""
        # The main thread uses the same store and the same files: if there is an error, it meets it
        # when it needs them, and reports it.
        with contextlib.suppress(Exception):
            identity = self._wait_for(version)
            if identity is not None:
                self.reader.load(version, identity)

    def _wait_for(self, version: int) -> str | None:
        """Returns the identity of a version once it is published; None if the wait was ended."""
        while not self._is_canceled.is_set():
            try:
                return self.reader.manifest(version).identity
            except SnapshotError:
                # In a bucket every look is a paid request.
                self._is_canceled.wait(LOOKS * self.reader.store.poll_seconds)
        return None
