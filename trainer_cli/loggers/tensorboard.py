"""TensorBoard event files, written by torch's SummaryWriter and continued across resumes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.files import as_path, naming, sync
from trainer_cli.loggers.base import Logger, Record, RunFacts, Table, in_run_dir
from trainer_cli.loggers.marks import LogEnd, Mark

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(Logger):
    """Writes scalars, texts, images, histograms and tables to a folder of event files, a new file for each attempt; the
    config as text, and hyperparameters for the tab HPARAMS.

    A resume drops later steps from the files of earlier attempts, and starts its own with an event that makes a
    running TensorBoard drop them too. Both happen at the first record, since importing tensorboard would delay the
    first step.
    """

    writes = ("folder",)

    def __init__(self, folder: str = "tensorboard") -> None:
        self.folder = str(as_path(folder, "TensorBoardLogger.folder", local=True))
        self._folder: Path | None = None
        self._file = Path(folder)
        self._writer: SummaryWriter | None = None
        self._facts = RunFacts()
        self._first_step: int | None = None
        """The step from which a new writer drops events of the files; None: it drops none."""
        self._next_step = 0
        """The step after the last record."""
        self._is_broken = False
        """Whether a flush by the thread that saves has failed."""
        self._was_opened = False
        self._is_of_fit = False
        """Whether records follow a rewind, so that their steps rise."""
        self._loaded_state: Mapping[str, Any] = {}
        """The state of a loaded checkpoint, until the rewind to it."""
        self._marked: Mapping[str, Any] = {}
        """The state of the checkpoint that was rewound to."""
        self._earlier_marks: Mapping[str, Any] = {}
        """States of the marks of earlier attempts' files, by name."""
        self._described: Mapping[str, str] = {}
        """Digests of what describes the run in the files, by tag."""
        self._end: LogEnd | None = None
        """The end of this attempt's file; None if it is not known which steps are in it."""

    @property
    def writer(self) -> SummaryWriter:
        """torch's SummaryWriter of this attempt, created at its first use, for data that a record cannot hold.

        A callback reaches it as `trainer.loggers["tensorboard"].writer`, between `start` and `close`. Give each
        `add_…` call the step: TensorBoard drops by it what a resumed run writes again.
        """
        if self._folder is None:
            raise RuntimeError("TensorBoardLogger.writer can be used only between start() and close()")
        writer = self._open_writer(self._folder)
        # What a callback writes may be of any step, so no mark can be set before it.
        self._end = None
        return writer

    def state_dict(self) -> dict[str, Any]:
        """The marks of all event files, and digests of what describes the run."""
        end = self._end
        if end is None or end.before_newest.size_bytes == 0:
            # Nothing of this attempt can be marked yet; what was marked before still is.
            return dict(self._marked)
        try:
            mark = end.before_newest.state_dict(self._file)
        except OSError:
            return dict(self._marked)
        return {"files": {**self._earlier_marks, self._file.name: mark}, "described": dict(self._described)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded_state = state

    def rewind_shared(self, step: int) -> None:
        """Drop the events after the resumed step; a new training (-1) drops none, since other runs share the folder."""
        if step >= 0:
            self.rewind(Path(), step)

    def rewind(self, run_dir: Path, step: int) -> None:
        """Remember the step: later events are dropped when the writer is opened."""
        self._first_step = self._next_step = step + 1
        self._is_of_fit = True
        self._marked, self._loaded_state, self._end = self._loaded_state, {}, None

    def start(self, facts: RunFacts) -> None:
        self._facts = facts
        self._folder = in_run_dir(self.folder, facts.run_dir)

    def log(self, record: Record) -> None:
        """Add the metrics, texts, tables, images and histograms of a record, and flush them."""
        if self._folder is None:
            return
        if self._is_broken:
            self._drop_writer(self._next_step)
        writer, step, walltime = self._open_writer(self._folder), record.step, record.time
        with self._writing(step):
            for tag, value in record.metrics.items():
                writer.add_scalar(tag, value, step, walltime)
            for tag, text in record.texts.items():
                writer.add_text(tag, text, step, walltime)
            for tag, table in record.tables.items():
                writer.add_text(tag, _markdown(table), step, walltime)
            for tag, image in record.images.items():
                writer.add_image(tag, image, step, walltime, dataformats="HWC")
            for tag, values in record.histograms.items():
                if values.size:
                    writer.add_histogram(tag, values, step, walltime=walltime)
            # After each record, so that a failed write is known to be of this record, which is then logged again.
            writer.flush()
            if self._end is not None:
                self._end.add(self._file.stat().st_size - self._end.end.size_bytes, step, {})

    def flush(self, durable: bool = False) -> None:
        """Flush the writer; if `durable`, sync the file, which another thread may call."""
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
                sync(self._file)
        except OSError:
            self._is_broken = True
            raise

    def close(self) -> None:
        """Write what is buffered, and close the file."""
        # Set to None first, so that a second call does not raise the error of the first again.
        writer, self._writer, self._folder, self._end = self._writer, None, None, None
        self._is_of_fit = False
        if writer is not None and not self._is_broken:
            with self._writing():
                writer.close()

    def _open_writer(self, folder: Path) -> SummaryWriter:
        """The writer of this attempt. The first call drops later events from the files of earlier attempts, and starts
        a new file with what describes the run, if the earlier ones do not.

        Raises:
            OSError: no new file is left then.
        """
        if self._writer is not None:
            return self._writer
        from torch.utils.tensorboard import SummaryWriter

        from trainer_cli.loggers import tensorboard_files as tb

        _print_no_traceback()
        # With parents only once: a run directory that was moved away must not be made again.
        folder.mkdir(parents=not self._was_opened, exist_ok=True)
        self._was_opened = True
        # Before the new file is created, which must sort last.
        renamed = tb.move_back(folder, int(time.time()))
        facts, first_step = self._facts, self._first_step
        description = tb.described(facts)
        described = tb.description_digests(description)
        with naming(folder):
            earlier = tb.event_files(folder)
            is_current: dict[str, bool] = {}
            ends: dict[str, LogEnd] = {}
            if first_step is None:
                # For records outside of a fit, whose files describe the run already.
                is_current = dict.fromkeys(description if earlier else (), True)
                purge_step = None
            else:
                kept_events = tb.Kept.of(first_step, facts.start_step)
                marks = tb.FolderMarks.parse(self._marked, renamed)
                if not marks.fit(folder, kept_events):
                    marks = tb.FolderMarks({}, {})
                other_hparams = marks.has_other_hparams(described)
                for path in earlier:
                    if facts.run_dir is None and path.name not in marks.files:
                        # It may be of another training. What it holds of steps made again is hidden by `purge_step`.
                        continue
                    if path.name == max(marks.files, default=None):
                        # The newest marked file decides, not the ends of earlier ones.
                        is_current = {tag: marks.described.get(tag) == digest for tag, digest in described.items()}
                    ends[path.name] = LogEnd(marks.files.get(path.name, Mark()))
                    is_current |= tb.cut_back(
                        path, kept_events, description, ends[path.name], other_hparams=other_hparams
                    )
                purge_step = kept_events.others_before
            try:
                writer = SummaryWriter(str(folder), purge_step=purge_step)
                for tag, summary in description.items():
                    if not is_current.get(tag) and writer.file_writer is not None:
                        writer.file_writer.add_summary(summary, facts.start_step)
                writer.flush()
                # The folder, too: a power failure may lose a new file although its content is synced.
                sync(folder)
            except OSError:
                # On a full disk each retry would leave another file.
                for path in tb.event_files(folder):
                    if path not in earlier:
                        path.unlink(missing_ok=True)
                raise
            self._file = tb.event_files(folder)[-1]
            if purge_step is not None:
                marked = {name: end.before_newest for name, end in ends.items() if end.before_newest.size_bytes}
                self._earlier_marks = {name: mark.state_dict(folder / name) for name, mark in marked.items()}
                self._described, self._end = described, LogEnd()
                self._end.add(self._file.stat().st_size, max(facts.start_step, purge_step), {})
        # A later writer, of records outside of a fit, drops nothing.
        self._first_step = None
        self._writer = writer
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
        """Forget the writer. In a fit the next one drops the events of `step` and later ones."""
        self._writer, self._is_broken, self._end = None, False, None
        self._first_step = step if self._is_of_fit else None


def _markdown(table: Table) -> str:
    """A table as Markdown; a bar inside a cell is escaped."""
    rows = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '&#124;') for cell in row)} |" for row in rows)


@cache
def _print_no_traceback() -> None:
    """Suppress tracebacks of OSErrors in threads of tensorboard: the next call of the writer raises the error."""
    print_traceback = threading.excepthook

    def excepthook(args: threading.ExceptHookArgs) -> None:
        """Print a traceback, but not for an error of the disk in a thread of TensorBoard."""
        if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard.")):
            print_traceback(args)

    threading.excepthook = excepthook
