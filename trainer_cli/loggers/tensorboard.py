"""TensorBoard event files, continued across resumes without doubled or lost steps."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from trainer_cli.loggers.base import Logger, Record, RunFacts, in_run_dir
from trainer_cli.loggers.events import first_event, framed, scalars_event, spans_up_to, start_event
from trainer_cli.loggers.files import AppendedFile, keep_spans, sync_folder

_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\..*")


class TensorBoardLogger(Logger):
    """Writes scalars to a folder of event files, a new file for each attempt.

    A resume cuts the older files back on the disk; a TensorBoard that is running and has read further is told
    by the new file's first event where the run goes on, and forgets later points itself.
    """

    def __init__(self, folder: str = "tensorboard") -> None:
        self.folder = folder
        self._file: AppendedFile | None = None
        self._first_step = 0

    def rewind(self, run_dir: Path, step: int) -> None:
        self._first_step = step + 1
        for path in _event_files(in_run_dir(self.folder, run_dir)):
            keep_spans(path, _events_up_to(path, step))

    def start(self, facts: RunFacts) -> None:
        folder = in_run_dir(self.folder, facts.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = AppendedFile(_next_file(folder, facts.start_time), new=True)
        # The pair of events that makes a running TensorBoard drop what it read of these steps before.
        for event in (first_event(facts.start_time), start_event(facts.start_time, self._first_step)):
            self._file.append(framed(event))
        sync_folder(folder)

    def log(self, record: Record) -> None:
        if self._file is not None:
            self._file.append(framed(scalars_event(record.time, record.step, record.metrics)))

    def flush(self, durable: bool = False) -> None:
        if durable and self._file is not None:
            self._file.sync()

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
    with open(path, "rb") as file:
        yield from spans_up_to(file, step)
