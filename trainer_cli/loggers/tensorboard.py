"""TensorBoard event files, continued across resumes without doubled or lost steps."""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from trainer_cli.loggers.base import Logger, Record, RunFacts, in_run_dir
from trainer_cli.loggers.files import keep_spans, sync, sync_folder

if TYPE_CHECKING:
    from types import ModuleType

_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\..*")
_HEADER_BYTES, _FOOTER_BYTES = 12, 4


class TensorBoardLogger(Logger):
    """Writes scalars to a folder of event files, a new file for each attempt.

    A resume cuts the older files back on the disk; a TensorBoard that is running and has read further is told
    by the new file's first event where the run goes on, and forgets later points itself.
    """

    def __init__(self, folder: str = "tensorboard") -> None:
        self.folder = folder
        self._file: BinaryIO | None = None
        self._write: Any = None
        self._event: ModuleType | None = None
        self._summary: ModuleType | None = None
        self._first_step = 0

    def rewind(self, run_dir: Path, step: int) -> None:
        self._first_step = step + 1
        for path in _event_files(in_run_dir(self.folder, run_dir)):
            keep_spans(path, _events_up_to(path, step))

    def start(self, facts: RunFacts) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = in_run_dir(self.folder, facts.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._event, self._summary = event_pb2, summary_pb2
        self._file = open(_next_file(folder, facts.start_time), "xb")  # noqa: SIM115 - closed in close()
        self._write = RecordWriter(self._file).write
        # The pair of events that makes a running TensorBoard drop what it read of these steps before.
        began = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        for event in (
            event_pb2.Event(wall_time=facts.start_time, file_version="brain.Event:2"),
            event_pb2.Event(wall_time=facts.start_time, step=self._first_step, session_log=began),
        ):
            self._write(event.SerializeToString())
        self._file.flush()
        sync_folder(folder)

    def log(self, record: Record) -> None:
        if self._file is None or self._event is None or self._summary is None:
            return
        values = [self._summary.Summary.Value(tag=key, simple_value=value) for key, value in record.metrics.items()]
        event = self._event.Event(wall_time=record.time, step=record.step, summary=self._summary.Summary(value=values))
        self._write(event.SerializeToString())
        self._file.flush()

    def flush(self, durable: bool = False) -> None:
        if self._file is None:
            return
        self._file.flush()
        if durable:
            sync(self._file.fileno())

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _event_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def _next_file(folder: Path, now: float) -> Path:
    """A name that sorts after all others: TensorBoard reads the files in this order, once each."""
    newest = max((int(_NAME.fullmatch(path.name)[1]) for path in _event_files(folder)), default=-1)  # type: ignore[index]
    number = max(int(now), newest + 1)
    return folder / f"events.out.tfevents.{number:010d}.{socket.gethostname()}.{os.getpid()}.0"


def _events_up_to(path: Path, step: int) -> Iterator[tuple[int, int]]:
    """Where the whole, undamaged events not later than `step` lie; reading ends at the first torn one.

    The form of a record: length (8 bytes), its masked crc32c (4), the event, the event's masked crc32c (4).
    """
    from tensorboard.compat.proto import event_pb2
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    start = 0
    with open(path, "rb") as file:
        while len(header := file.read(_HEADER_BYTES)) == _HEADER_BYTES:
            length, length_crc = struct.unpack("<QI", header)
            if masked_crc32c(header[:8]) != length_crc:
                return
            content, footer = file.read(length), file.read(_FOOTER_BYTES)
            if len(content) < length or len(footer) < _FOOTER_BYTES:
                return
            stop = start + _HEADER_BYTES + length + _FOOTER_BYTES
            if masked_crc32c(content) == struct.unpack("<I", footer)[0]:
                event = event_pb2.Event.FromString(content)
                if event.file_version or event.step <= step:
                    yield start, stop
            start = stop
