"""TensorBoard event files, written by torch's SummaryWriter and continued across resumes."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_cli.loggers.base import Logger, Record, RunFacts, in_run_dir
from trainer_cli.loggers.files import naming, replace, sync, sync_folder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_FRAME_BYTES = 16
"""Bytes of length and checksums around each record."""
_NAME = re.compile(r"(events\.out\.tfevents\.)(\d+)(\..*)")


class TensorBoardLogger(Logger):
    """Writes scalars to a folder of event files, a new file for each attempt.

    A resume drops later steps from the files of earlier attempts, and starts its own with an event that makes a
    running TensorBoard drop them too. Both happen at the first record, since importing tensorboard would delay the
    first step.
    """

    def __init__(self, folder: str = "tensorboard") -> None:
        self.folder = folder
        self._folder: Path | None = None
        self._file = Path(folder)
        self._writer: SummaryWriter | None = None
        self._first_step = 0

    @property
    def writer(self) -> SummaryWriter:
        """torch's writer of this attempt, for text, images, histograms and hparams; made at its first use.

        A callback reaches it as `trainer.loggers["tensorboard"].writer`, between `start` and `close`. Give each
        `add_…` call the step: TensorBoard drops by it what a resumed run writes again.
        """
        if self._writer is None:
            if self._folder is None:
                raise RuntimeError("TensorBoardLogger.writer can be used only between start() and close()")
            self._writer = self._opened(self._folder)
        return self._writer

    def rewind(self, run_dir: Path, step: int) -> None:
        self._first_step = step + 1

    def start(self, facts: RunFacts) -> None:
        self._folder = in_run_dir(self.folder, facts.run_dir)

    def log(self, record: Record) -> None:
        if self._folder is None:
            return
        writer = self.writer
        with self._writing():
            for tag, value in record.metrics.items():
                writer.add_scalar(tag, value, record.step, record.time)
            writer.flush()

    def flush(self, durable: bool = False) -> None:
        if (writer := self._writer) is None:
            return
        with self._writing():
            writer.flush()
            if durable:
                with open(self._file, "rb") as file:
                    sync(file.fileno())

    def close(self) -> None:
        writer, self._writer, self._folder = self._writer, None, None
        if writer is not None:
            with self._writing():
                writer.close()

    def _opened(self, folder: Path) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        _print_no_traceback()
        folder.mkdir(parents=True, exist_ok=True)
        _move_back(folder, int(time.time()))
        with naming(folder):
            for path in _event_files(folder):
                _cut_back(path, self._first_step)
            writer = SummaryWriter(str(folder), purge_step=self._first_step)
            writer.flush()
        self._file = _event_files(folder)[-1]
        sync_folder(folder)
        return writer

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Put the file's name into an OSError, and drop the writer, which would raise the same error at `close`."""
        try:
            with naming(self._file):
                yield
        except OSError:
            self._writer = self._folder = None
            raise


def _event_files(folder: Path) -> list[Path]:
    """In TensorBoard's reading order."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def _move_back(folder: Path, now: int) -> None:
    """Rename files so that one made `now` (unix seconds) sorts last: the clock may have been set back, or the last
    attempt have begun in this second. The order of the files stays, also after a crash. A TensorBoard that runs
    meanwhile must then be restarted, because it reads no file that sorts before the one it has read."""
    files = _event_files(folder)
    for number, path in enumerate(files, now - len(files)):
        if (parts := _NAME.fullmatch(path.name)) and int(parts[2]) > number:
            path.rename(folder / f"{parts[1]}{number:010d}{parts[3]}")


def _cut_back(path: Path, first_step: int) -> None:
    """Drop the events of `first_step` and later from a file, and a torn last one."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    def kept() -> Iterator[bytes]:
        for record in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(record)
            if event.step < first_step or event.HasField("file_version"):
                yield record

    def framed(record: bytes) -> bytes:
        buffer = BytesIO()
        RecordWriter(buffer).write(record)
        return buffer.getvalue()

    # The checksums of a frame are slow to compute; most files hold no later step.
    if sum(len(record) + _FRAME_BYTES for record in kept()) < path.stat().st_size:
        replace(path, map(framed, kept()))


@cache
def _print_no_traceback() -> None:
    """Keep the threads of tensorboard from printing an OSError, which the next call of the writer raises."""
    print_traceback = threading.excepthook

    def excepthook(args: threading.ExceptHookArgs) -> None:
        if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard.")):
            print_traceback(args)

    threading.excepthook = excepthook
