"""The results of `train validate`: rows in validation.jsonl and validation.csv, TensorBoard events, a printed table."""

from __future__ import annotations

import csv
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from trainer_cli.files import AppendedFile, replace
from trainer_cli.loggers import Record, RunFacts, loader_of
from trainer_cli.runs import BestSettings, ValidationRow
from trainer_cli.strict_json import strict_json
from trainer_cli.terminal import left_out_of_table, line_width, table, wrapped

log = logging.getLogger(__name__)


class Results:
    """Collects the rows of an evaluation and writes them to a folder, which is created with the first row.

    If the folder cannot be written, a warning says so before any work, and the rows are only printed.
    """

    def __init__(
        self,
        folder: Path,
        show: Callable[[Results], None] | None = None,
        settings: BestSettings | None = None,
    ) -> None:
        self.folder, self.show, self.settings = folder, show or show_table, settings or BestSettings()
        self.rows: list[ValidationRow] = []
        self.is_written = True
        # The folder is opened before any evaluation: an hour of work must not end at a folder that cannot be written.
        if why := _why_unwritable(folder):
            self._give_up(why)

    def add(self, rows: Sequence[ValidationRow]) -> None:
        """Append rows to validation.jsonl and write validation.csv anew, at once: a later failure then loses no row."""
        self.rows += rows
        with self._giving_up():
            self._append(rows)
            self._write_csv()

    def finish(self) -> None:
        """Write events at each checkpoint's own step into a new folder, and show the results."""
        if not self.rows:
            return
        # Not with each row: TensorBoard hides steps that are not in order.
        with self._giving_up():
            self._write_events()
        self.show(self)

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Stop writing after an OSError; the rows are still printed."""
        try:
            yield
        except OSError as error:
            self._give_up(error.strerror or str(error))

    def _give_up(self, why: str) -> None:
        """Stop writing, with a warning that gives the reason."""
        if self.is_written:
            self.is_written = False
            log.warning(
                "results are printed and not written to %s: %s. validate.folder=FOLDER writes them elsewhere",
                self.folder, why,
            )  # fmt: skip

    def _append(self, rows: Sequence[ValidationRow]) -> None:
        """Append rows to validation.jsonl."""
        if not self.is_written:
            return
        # The folder is made only now: an evaluation without a result leaves no empty folder.
        self.folder.mkdir(parents=True, exist_ok=True)
        now = round(time.time(), 3)
        with closing(AppendedFile(self.folder / "validation.jsonl")) as file:
            for row in rows:
                facts = {"checkpoint": row.checkpoint, "step": row.step, "loader": row.loader}
                facts |= {"time": now} if row.average is None else {"average": row.average, "time": now}
                file.append(strict_json({**facts, **row.named_metrics}).encode() + b"\n")

    def _write_csv(self) -> None:
        """Write the newest row of each checkpoint and loader to validation.csv."""
        if not self.is_written:
            return
        # With the results of earlier evaluations in the folder.
        rows = ValidationRow.read_all(self.folder)
        names = _metric_names(rows)
        average = ["average"] if any(row.average for row in rows) else []
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["checkpoint", "step", "loader", *average, *names])
        for row in rows:
            facts = [row.checkpoint, row.step, row.loader, *(row.average or "" for _ in average)]
            writer.writerow([*facts, *(row.metrics.get(name, "") for name in names)])
        # Replaced as a whole: a new metric adds a column to every row.
        replace(self.folder / "validation.csv", [text.getvalue().encode()])

    def _write_events(self) -> None:
        """Write all rows as TensorBoard events into a new folder."""
        if not self.is_written:
            return
        from trainer_cli.loggers import TensorBoardLogger

        with ExitStack() as stack:
            events = TensorBoardLogger(str(_make_numbered_folder(self.folder / "tensorboard").relative_to(self.folder)))
            stack.callback(events.close)
            events.start(RunFacts(run_dir=self.folder))
            # TensorBoard expects rising steps within a file.
            for row in sorted(self.rows, key=lambda row: row.step):
                events.log(Record(step=row.step, epoch=0, time=time.time(), metrics=row.named_metrics))


def _why_unwritable(folder: Path) -> str | None:
    """Why a folder, which may not exist yet, cannot be written; None if only a write would show it."""
    existing = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/"))
    if not existing.is_dir():
        return f"{existing} is not a folder"
    for path in (existing, folder / "validation.jsonl", folder / "validation.csv"):
        if path.exists() and not os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
            return f"{path} is read-only"
    return None


def _make_numbered_folder(folder: Path) -> Path:
    """Create a new folder, named 1, 2 and so on.

    TensorBoard shows one folder as one run, and the first event of a later file in it hides steps of earlier files.
    """
    number = 1 + max((int(path.name) for path in folder.glob("[0-9]*") if path.name.isdecimal()), default=0)
    while True:
        try:
            (folder / str(number)).mkdir(parents=True)
            return folder / str(number)
        except FileExistsError:
            # Another evaluation of the run created it at the same time.
            number += 1


def show_table(results: Results) -> None:
    """Print a row for each checkpoint and loader; the best is marked."""
    rows = results.rows
    names = _metric_names(rows)
    best, rule = results.settings.best_row(rows)
    averages = {row.average for row in rows}
    weights = ["weights"] if averages != {None} else []
    # On a terminal, what is the same in all rows is printed once above them; for a program each line is complete.
    folders = {row.checkpoint.rpartition("/")[0] for row in rows} if sys.stdout.isatty() else set()
    folder = f"{folders.pop()}/" if len(folders) == 1 and folders != {""} else ""
    if folder:
        common_weights = f", {rows[0].weights}" if len(averages) == 1 and weights else ""
        print(wrapped(f"{folder}{common_weights}", line_width(sys.stdout)))
        weights = [] if common_weights else weights
    cells = []
    for index, row in enumerate(rows):
        numbers = [f"{row.metrics[name]:.4f}" if name in row.metrics else "" for name in names]
        facts = [row.checkpoint.removeprefix(folder), str(row.step), row.loader, *([row.weights] if weights else [])]
        cells.append(["*" if index == best else "", *facts, *numbers])
    header = ["", "checkpoint", "step", "loader", *weights, *names]
    # Each row stays on one line, if necessary with only the metric that decides which is best: the files have all.
    decisive = names[0]
    if rule is not None:
        decisive = rule.metric.removeprefix(f"{loader_of(rule.metric, (row.loader for row in rows))}/")
    left_out = [name for name in reversed(names) if name != decisive] if results.is_written else []
    print(table(header, cells, right=["step", *names], least_important=left_out, colours={"*": "green"}))
    if hidden := left_out_of_table(header, cells, left_out):
        print(wrapped(f"left out, as they do not fit: {', '.join(hidden)}", line_width(sys.stdout)))
    if rule is not None:
        print(f"* {rule.note}")
    if results.is_written:
        print(f"results: {results.folder}/validation.jsonl, validation.csv")


def _metric_names(rows: Sequence[ValidationRow]) -> list[str]:
    """The names of all metrics, in order of appearance."""
    return list(dict.fromkeys(key for row in rows for key in row.metrics))
