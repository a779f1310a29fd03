"""One run of `train serve`: files are read again only after they have changed, and of its records only new lines."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any

from trainer_cli.commands.report_blocks import Block
from trainer_cli.commands.report_sections import metric_curve
from trainer_cli.core.files import identity_of
from trainer_cli.core.json_lines import GrowingFile
from trainer_cli.core.schema import LogLevel
from trainer_cli.loggers.media import MEDIA_FILE
from trainer_cli.runs.curves import GrowingColumns
from trainer_cli.runs.log_messages import MessageFilter
from trainer_cli.runs.record import (
    UNREADABLE,
    RunReader,
    RunRecord,
    RunView,
    read_config,
    read_notes,
    read_run,
    unreadable_run,
)
from trainer_cli.runs.run_dir import RunDir

_LOG_LINES = 200
_LOG_LINES_READ = 1000
"""More than are shown, because messages of the level debug are hidden; not all, because a log may be long."""
_RETRY_S = 10.0
"""A run of which something cannot be read is read again so often."""


class ServedRun:
    """One run; its record is kept until one of its files changes."""

    def __init__(self, number: int, reader: RunReader) -> None:
        self.number = number
        """Names the run in requests; it stays the same while the server runs."""
        self.run: RunDir = reader.run
        self._reader = reader
        self._columns = GrowingColumns(self.run.metrics_file)
        self._machine = GrowingColumns(self.run.system_file)
        self._seen: Any = None
        self._record: RunRecord | None = None
        self._curves: dict[tuple[str, str, int], str] = {}
        self._config: Mapping[str, str] = {}
        self._notes = ""
        self._described: Any = None
        self.unreadable: str | None = None
        """Why its directory cannot be listed."""

    def look(self, now: float) -> RunView | None:
        """Its state now; None if its directory is gone."""
        if self.unreadable is not None:
            return RunView(self.run.path, UNREADABLE, self.unreadable)
        return self._reader.look(now)

    @property
    def version(self) -> str:
        """Changes with its files."""
        return hashlib.blake2b(repr(self._signature()).encode(), digest_size=8).hexdigest()

    @property
    def config(self) -> Mapping[str, str]:
        """Its stored config: dotted key -> value."""
        self._read_description()
        return self._config

    @property
    def notes(self) -> str:
        """Its notes.md."""
        self._read_description()
        return self._notes

    def _read_description(self) -> None:
        seen = identity_of(self.run.config_file), identity_of(self.run.notes_file)
        if seen != self._described:
            self._config, self._notes = read_config(self.run.path), read_notes(self.run)
            self._described = seen

    @property
    def last_record(self) -> RunRecord | None:
        """What was read last, which may be older than the files; None before the first reading."""
        return self._record

    @property
    def summary(self) -> Mapping[str, Any]:
        """Its summary.json."""
        return self._reader.summary

    def record(self, now: float) -> RunRecord:
        """Everything that its files hold."""
        if self.unreadable is not None:
            return unreadable_run(self.run.path, self.unreadable)
        seen = self._signature()
        if self._record is None or seen != self._seen:
            record = read_run(self.run.path, now, self._columns, self._machine)
            self._record = record or unreadable_run(self.run.path, "its directory is gone")
            self._seen = seen
            self._curves.clear()
        return self._record

    def curve(self, record: RunRecord, name: str, axis: str, buckets: int) -> str | None:
        """A curve as JSON, over the steps and one more axis; None if the run has no such metric."""
        key = (name, axis, buckets)
        if key not in self._curves:
            block = metric_curve(self.number, record, name, buckets=buckets)
            if block is None:
                return None
            for fields in (block, block.get("mean", {})):
                for other in {"epoch", "time"} - {axis}:
                    fields.pop(other, None)
            self._curves[key] = to_json(block)
        return self._curves[key]

    def log(self) -> Block | None:
        """The last lines of its log, of the messages that `train tail` shows; None without any."""
        try:
            lines = GrowingFile(self.run.log_file, _LOG_LINES_READ).read().lines
        except OSError:
            return None
        messages = MessageFilter(shows_debug=self.config.get("logging.level") == LogLevel.debug)
        text = "\n".join([line.text for line in messages.shown(lines)][-_LOG_LINES:])
        return {"kind": "text", "title": "The end of train.log", "text": text, "end": True} if text else None

    def _signature(self) -> tuple[Any, ...]:
        run = self.run
        files = (
            run.metrics_file, run.system_file, run.path / MEDIA_FILE, run.summary_file, run.config_file,
            run.history_file, run.checkpoints_folder, run.validation_folder / "validation.jsonl", run.log_file,
            run.notes_file,
        )  # fmt: skip
        # What could not be read may be readable by now, with the same identity.
        has_problems = self._record is not None and bool(self._record.problems)
        period = int(time.time() / _RETRY_S) if has_problems else 0
        # The lock tells a killed run from a running one: both have the same files.
        return (*(identity_of(file) for file in files), run.is_locked(), period)


def to_json(value: Any) -> str:
    """Compact JSON; None stands for numbers that are not finite."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
