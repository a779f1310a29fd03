"""`checkpoints.jsonl`: a line for each save and each removal, so that a reason outlives its checkpoint.

    {"time": unix seconds, "event": "saved", "name": …, "step": …, "kind": …, "reason": …, "time_s": {…}, "kept_s": …}
    {"time": unix seconds, "event": "removed", "name": …, "reason": …}

`time_s` has the seconds of the attempt so far by activity, and `kept_s` those of training over all attempts
(`goodput.py`); they account for an attempt that is killed.

Nothing that saves, loads or removes reads it; a start asks it only whether checkpoints are missing that the run has
saved. A line that cannot be written is reported once.
After a crash the line of the last commit or removal may be missing.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainer_cli.bounds import is_amount, is_text
from trainer_cli.files import AppendedFile
from trainer_cli.goodput import Seconds, read_seconds
from trainer_cli.policy import CheckpointKind

log = logging.getLogger(__name__)

Row = Mapping[str, Any]
"""A line of the file, see `files/json_lines.py`."""

SAVED, REMOVED = "saved", "removed"
_KINDS = {kind.on_disk: kind.value for kind in CheckpointKind}
"""Older lines have the words of manifests."""


class Spent(NamedTuple):
    """What a run had spent when a checkpoint was saved."""

    time_s: Seconds
    """Seconds of the attempt, by activity."""
    kept_s: float
    """Seconds of training that have led to the checkpoint, over all attempts."""

    @staticmethod
    def noted(rows: Iterable[Row], since: float) -> list[tuple[float, int, Spent]]:
        """Unix time, step and what was spent, of each save at unix time `since` or later that records it."""
        saves: list[tuple[float, int, Spent]] = []
        for event in _events(rows):
            time_s, kept_s = read_seconds(event.get("time_s")), event.get("kept_s", -1)
            is_save = event["event"] == SAVED and event["time"] >= since
            if is_save and time_s is not None and is_amount(kept_s):
                saves.append((event["time"], event["step"], Spent(time_s, float(kept_s))))
        return saves


@dataclass(slots=True)
class Life:
    """A checkpoint from its save to its removal. None or empty: not recorded."""

    name: str
    step: int | None = None
    kind: str = ""
    reason: str = ""
    """Why it was saved."""
    saved_at: float | None = None
    """Unix seconds."""
    removed_at: float | None = None
    removed_reason: str | None = None
    """None: its removal is not recorded."""

    @staticmethod
    def read_all(rows: Iterable[Row]) -> list[Life]:
        """The checkpoints in the order of their saves; one that was removed and saved again is there twice."""
        lives: list[Life] = []
        on_disk: dict[str, Life] = {}
        for event in _events(rows):
            change, name, reason, time = event["event"], event["name"], event["reason"], event["time"]
            life = on_disk.get(name)
            if life is None:
                life = on_disk[name] = Life(name)
                lives.append(life)
            if change == SAVED:
                kind = str(event.get("kind", ""))
                life.step, life.kind, life.reason = event["step"], _KINDS.get(kind, kind), reason
                life.saved_at = time if life.saved_at is None else life.saved_at
            else:
                life.removed_at, life.removed_reason = time, reason
                del on_disk[name]
        return lives


class CheckpointHistory:
    """Appends to the file of a run. Without a file it does nothing."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._failed = False

    def saved(self, name: str, step: int, kind: str, reason: str, spent: Spent | None = None) -> None:
        """Record a commit, or that a committed checkpoint has another kind and reason now."""
        times = {} if spent is None else {"time_s": spent.time_s, "kept_s": spent.kept_s}
        self._append({"event": SAVED, "name": name, "step": step, "kind": kind, "reason": reason, **times})

    def removed(self, name: str, reason: str) -> None:
        """Record a removal."""
        self._append({"event": REMOVED, "name": name, "reason": reason})

    def _append(self, facts: dict[str, Any]) -> None:
        """Append a line with the time. The first error is reported, and none is raised."""
        if self._file is None:
            return
        line = f"{json.dumps({'time': round(time.time(), 3), **facts}, ensure_ascii=False)}\n"
        try:
            with closing(AppendedFile(self._file)) as file:
                # On a line of its own: an incomplete line before it is lost, but not this one.
                file.append(b"\n" * _is_torn(self._file) + line.encode(errors="replace"))
                file.sync()
        except OSError as error:
            if not self._failed:
                self._failed = True
                log.warning("%s could not be written: %s. The run continues without it.", self._file, error.strerror)


def _is_torn(path: Path) -> bool:
    """Whether a power cut left the last line without its end."""
    with open(path, "rb") as file:
        if file.seek(0, 2) == 0:
            return False
        file.seek(-1, 2)
        return file.read() != b"\n"


def _events(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows that have all keys of an event; others were not written by this package."""
    for row in rows:
        has_texts = all(is_text(row.get(key)) for key in ("event", "name", "reason"))
        if "time" in row and has_texts and (row["event"] != SAVED or "step" in row):
            yield row
