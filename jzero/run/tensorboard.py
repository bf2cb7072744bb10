"""Event files for TensorBoard: scalars and texts."""

import time
from collections.abc import Mapping
from pathlib import Path

from jzero.files import naming_full_disk


class TensorBoard:
    """A file of scalars for TensorBoard.

    It uses tensorboardX's file format without its SummaryWriter: a full disk ends the
    SummaryWriter's thread, and the run would then wait for that thread forever.
    """

    def __init__(self, directory: Path, first_step: int) -> None:
        """Opens a file. TensorBoard hides earlier data of `directory` from `first_step` on."""
        # Not at the top: the imports take a second. The protobuf classes are created during the
        # import.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import (
            Event,  # pyright: ignore[reportAttributeAccessIssue]
            SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
        )
        from tensorboardX.summary import scalar, text

        self._make_event = Event
        self._make_scalar = scalar
        self._make_text = text
        self._directory = directory
        with naming_full_disk(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(directory / "events"))
            start = SessionLog(status=SessionLog.START)
            self._writer.write_event(
                Event(wall_time=time.time(), step=first_step, session_log=start)
            )
            self._writer.flush()

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Appends the scalars of a step. They survive a kill."""
        with naming_full_disk(self._directory):
            for name, number in numbers.items():
                self._write_event(step, self._make_scalar(name, number))
            self._writer.flush()

    def write_text(self, step: int, name: str, markdown: str) -> None:
        """Appends a text, which TensorBoard shows as Markdown."""
        with naming_full_disk(self._directory):
            self._write_event(step, self._make_text(name, markdown))
            self._writer.flush()

    def _write_event(self, step: int, summary: object) -> None:
        event = self._make_event(wall_time=time.time(), step=step, summary=summary)
        self._writer.write_event(event)

    def close(self) -> None:
        with naming_full_disk(self._directory):
            self._writer.close()
