"""TensorBoard event files, written by torch's SummaryWriter and continued across resumes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_cli.core.files import naming, sync, sync_folder
from trainer_cli.core.url_path import local_path
from trainer_cli.loggers.base import Logger, Record, RunFacts, Table, in_run_dir

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(Logger):
    """Writes scalars, texts, images, histograms and tables to a folder of event files, a new file for each attempt; the
    config as text, and hyperparameters for the tab HPARAMS.

    A resume drops later steps from the files of earlier attempts, and starts its own with an event that makes a
    running TensorBoard drop them too. Both happen at the first record, since importing tensorboard would delay the
    first step.
    """

    def __init__(self, folder: str = "tensorboard") -> None:
        self.folder = str(local_path(folder, "TensorBoardLogger.folder"))
        self._folder: Path | None = None
        self._file = Path(folder)
        self._writer: SummaryWriter | None = None
        self._facts = RunFacts()
        self._first_step = self._next_step = 0
        """The step from which a new writer drops events of the files, and the step after the last record."""
        self._is_broken = False

    @property
    def writer(self) -> SummaryWriter:
        """torch's SummaryWriter of this attempt, created at its first use, for data that a record cannot hold.

        A callback reaches it as `trainer.loggers["tensorboard"].writer`, between `start` and `close`. Give each
        `add_…` call the step: TensorBoard drops by it what a resumed run writes again.
        """
        if self._writer is None:
            if self._folder is None:
                raise RuntimeError("TensorBoardLogger.writer can be used only between start() and close()")
            self._writer = self._opened(self._folder)
        return self._writer

    def rewind(self, run_dir: Path, step: int) -> None:
        self._first_step = self._next_step = step + 1

    def start(self, facts: RunFacts) -> None:
        self._facts = facts
        self._folder = in_run_dir(self.folder, facts.run_dir)

    def log(self, record: Record) -> None:
        if self._folder is None:
            return
        if self._is_broken:
            self._drop_writer(self._next_step)
        writer, step, at = self.writer, record.step, record.time
        with self._writing(step):
            for tag, value in record.metrics.items():
                writer.add_scalar(tag, value, step, at)
            for tag, text in record.texts.items():
                writer.add_text(tag, text, step, at)
            for tag, table in record.tables.items():
                writer.add_text(tag, _markdown(table), step, at)
            for tag, image in record.images.items():
                writer.add_image(tag, image, step, at, dataformats="HWC")
            for tag, values in record.histograms.items():
                if values.size:
                    writer.add_histogram(tag, values, step, walltime=at)
            # After each record, so that a failed write is known to be of this record, which is then logged again.
            writer.flush()

    def flush(self, durable: bool = False) -> None:
        if (writer := self._writer) is None:
            return
        if not durable:
            with self._writing():
                writer.flush()
            return
        # Called by the thread that saves: only the thread that logs may replace the writer.
        try:
            with naming(self._file):
                writer.flush()
                with open(self._file, "rb") as file:
                    sync(file.fileno())
        except OSError:
            self._is_broken = True
            raise

    def close(self) -> None:
        # Taken away first, so that a second call does not raise the error of the first again.
        writer, self._writer, self._folder = self._writer, None, None
        if writer is not None and not self._is_broken:
            with self._writing():
                writer.close()

    def _opened(self, folder: Path) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        from trainer_cli.loggers.tensorboard_files import Kept, cut_back, described, event_files, move_back

        _print_no_traceback()
        folder.mkdir(parents=True, exist_ok=True)
        # Before the new file is created, which must sort last.
        move_back(folder, int(time.time()))
        facts = self._facts
        kept = Kept.of(self._first_step, facts.start_step)
        description = described(facts)
        with naming(folder):
            is_current: dict[str, bool] = {}
            earlier = event_files(folder)
            for path in earlier:
                is_current |= cut_back(path, kept, description)
            try:
                writer = SummaryWriter(str(folder), purge_step=kept.others_before)
                for tag, summary in description.items():
                    if not is_current.get(tag) and writer.file_writer is not None:
                        writer.file_writer.add_summary(summary, facts.start_step)
                writer.flush()
            except OSError:
                # On a full disk each retry would leave another file.
                for path in event_files(folder):
                    if path not in earlier:
                        path.unlink(missing_ok=True)
                raise
        self._file = event_files(folder)[-1]
        # Without it a power failure may lose the new file itself, though its content is synced.
        sync_folder(folder)
        return writer

    @contextmanager
    def _writing(self, step: int | None = None) -> Iterator[None]:
        """Add the name of the file to an OSError, and drop the writer, which would raise the same error again.

        The next writer drops the events of `step` and later ones from the files.
        """
        try:
            with naming(self._file):
                yield
        except OSError:
            self._drop_writer(self._next_step if step is None else step)
            raise
        if step is not None:
            self._next_step = step + 1

    def _drop_writer(self, step: int) -> None:
        self._writer, self._is_broken, self._first_step = None, False, step


def _markdown(table: Table) -> str:
    rows = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '&#124;') for cell in row)} |" for row in rows)


@cache
def _print_no_traceback() -> None:
    """Suppress tracebacks of OSErrors in threads of tensorboard: the next call of the writer raises the error."""
    print_traceback = threading.excepthook

    def excepthook(args: threading.ExceptHookArgs) -> None:
        if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard.")):
            print_traceback(args)

    threading.excepthook = excepthook
