"""What loggers of one file of lines have in common: they append, and drop the lines of later steps on a resume."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path

from trainer_cli.checkpoint.storage.url_path import local_path
from trainer_cli.loggers.base import Logger, RunFacts, in_run_dir
from trainer_cli.loggers.files import AppendedFile, keep_spans, sync_folder


class FileLogger(Logger):
    """Appends to the file at `path`, which is relative to the run directory; `log` is the subclass's."""

    def __init__(self, path: str) -> None:
        self.path = str(local_path(path, f"{type(self).__name__}.path"))
        self._file: AppendedFile | None = None

    @abstractmethod
    def spans_up_to(self, path: Path, step: int) -> Iterator[tuple[int, int]]:
        """The parts (first byte, end) of the file that belong to this step or earlier ones."""

    def rewind(self, run_dir: Path, step: int) -> None:
        path = in_run_dir(self.path, run_dir)
        if path.exists():
            keep_spans(path, self.spans_up_to(path, step))

    def start(self, facts: RunFacts) -> None:
        path = in_run_dir(self.path, facts.run_dir)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = AppendedFile(path)
        sync_folder(path.parent)

    def flush(self, durable: bool = False) -> None:
        if durable and self._file is not None:
            self._file.sync()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
