"""Checkpoints as they are committed, until the run that saves them ends."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from trainer_cli.checkpoint.catalog import catalog_of
from trainer_cli.core.url_path import as_path, is_url
from trainer_cli.errors import CheckpointError
from trainer_cli.runs.run_dir import RunDir, RunStatus
from trainer_cli.runs.select import Selection, run_holding, select

log = logging.getLogger(__name__)

POLL_S = 2.0
"""Pause between two looks at the disk or the store."""
_ENDS = (RunStatus.finished, RunStatus.failed, RunStatus.interrupted)


def watched(
    patterns: Sequence[str], wait: Callable[[float], object], stopped: Callable[[], bool] = lambda: False
) -> Iterator[Selection]:
    """What the patterns name now, then what is new whenever something is; each checkpoint once.

    It ends once every run that saves them has ended, and all that it saved was named; one that was stopped early or
    killed has not. Partial checkpoints are looked at again later.

    Args:
        wait: sleeps so many seconds.
        stopped: whether to end at the next look.
    """
    seen: set[Path] = set()
    waiting = False
    while not stopped():
        # Before the look: what is saved last must be seen.
        ended = _ended(patterns, seen)
        try:
            found = select(patterns)
        except CheckpointError as error:
            if ended:
                raise
            if not waiting:
                waiting = True
                log.info("waiting: %s", error.what.rstrip(":\n"))
            found = Selection([], {}, {})
        new = [path for path in found.paths if path not in seen]
        damaged = {path: problem for path, problem in found.damaged.items() if path not in seen}
        seen.update(new, damaged)
        if new or damaged:
            yield Selection(new, {}, damaged)
        elif ended:
            return
        else:
            wait(POLL_S)


def _ended(patterns: Sequence[str], seen: set[Path]) -> bool:
    """Whether no run goes on that may save what the patterns name."""
    folders = {path.parent for path in seen} | {folder for one in patterns if (folder := _folder(one)) is not None}
    return bool(folders) and all(map(_is_complete, folders))


def _folder(pattern: str) -> Path | None:
    """The folder of checkpoints that a pattern looks into, if it is there."""
    path = as_path(re.split(r"[*?\[{@]", pattern, maxsplit=1)[0])
    for folder in (path, path.parent, path / "checkpoints"):
        if not is_url(folder) and run_holding(folder) is not None:
            return folder
    return None


def _is_complete(folder: Path) -> bool:
    if not is_url(folder) and (holder := run_holding(folder)) is not None:
        # One that was stopped or killed is resumed, so its lock says nothing.
        return RunDir(holder).read_summary().get("status") in _ENDS
    entries = catalog_of(folder).entries()
    return any(entry.manifest is not None and entry.manifest.finished is not None for entry in entries)
