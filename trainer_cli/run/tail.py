"""The last log lines and metrics of a run, merged by time, and what is added to them."""

from __future__ import annotations

import contextlib
import heapq
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from trainer_cli.errors import one_line
from trainer_cli.run.growing_file import GrowingFile
from trainer_cli.run.run_dir import RunDir

_TIME_LETTERS = len("2026-01-31 12:00:00,000")
_AT_A_RESUME = 1000
"""Records to read again when a resume has cut them back: more than are made between two looks."""
_HIDDEN = ("step", "epoch", "time")


class _Line(NamedTuple):
    time: float
    """Unix seconds."""
    text: str


class Tail:
    """Follows `train.log` and `metrics.jsonl` of a run."""

    def __init__(self, run: Path, most: int) -> None:
        self._most: int | None = most
        self._log = GrowingFile(RunDir(run).log_file, most)
        self._metrics = GrowingFile(RunDir(run).metrics_file, max(most, _AT_A_RESUME))
        self._log_time = self._metrics_time = 0.0

    def read(self) -> list[str]:
        """The last `most` lines at the first call, then those that were added since the last call.

        A resume drops the records after its checkpoint and makes them again; those then are returned again.

        Raises:
            OSError: a file cannot be read.
        """
        lines = [one.text for one in heapq.merge(self._log_lines(), self._records(), key=lambda one: one.time)]
        most, self._most = self._most, None
        return lines if most is None else lines[max(0, len(lines) - most) :]

    def _log_lines(self) -> Iterator[_Line]:
        for line in self._log.read().lines:
            text = line.decode(errors="replace")
            # A line without a time belongs to the message above it, such as a traceback.
            with contextlib.suppress(ValueError):
                self._log_time = datetime.strptime(text[:_TIME_LETTERS], "%Y-%m-%d %H:%M:%S,%f").timestamp()
            yield _Line(self._log_time, one_line(text))

    def _records(self) -> Iterator[_Line]:
        new = self._metrics.read()
        shown = self._metrics_time
        for line in new.lines:
            try:
                record = json.loads(line)
                at, step = float(record["time"]), int(record["step"])
                values = {name: float(value) for name, value in record.items() if name not in _HIDDEN}
            except (ValueError, TypeError, KeyError, AttributeError):
                continue  # Cut off by a power failure, or not written by this package.
            if new.restarted and at <= shown:
                continue
            self._metrics_time = at
            day = datetime.fromtimestamp(at).isoformat(" ", "milliseconds").replace(".", ",")
            words = [f"step {step:,}", *(f"{name} {value:.4g}" for name, value in values.items())]
            yield _Line(at, f"{day} METRICS {'  '.join(words)}")
