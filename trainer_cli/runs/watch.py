"""Yield checkpoints as they are committed, until the run that saves them ends."""

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
"""Seconds between two listings of the disk or the store."""
_ENDS = (RunStatus.finished, RunStatus.failed, RunStatus.interrupted)


def watched(
    patterns: Sequence[str], wait: Callable[[float], object], stopped: Callable[[], bool] = lambda: False
) -> Iterator[Selection]:
    """Yield the checkpoints that the patterns name, then new ones as they appear, each once.

    It ends when every run that saves them has ended and all its checkpoints were yielded. A run that was stopped early
    or killed may be resumed, so it has not ended. Partial checkpoints are examined again later.

    Args:
        wait: sleeps for a number of seconds.
        stopped: whether to end at the next listing.
    """
    seen: set[Path] = set()
    has_logged = False
    while not stopped():
        # Before the listing: a checkpoint that is saved in between is then found in the next round.
        ended = _ended(patterns, seen)
        try:
            selection = select(patterns)
        except CheckpointError as error:
            if ended:
                raise
            if not has_logged:
                has_logged = True
                log.info("waiting: %s", error.what.rstrip(":\n"))
            selection = Selection([], {}, {})
        new = [path for path in selection.paths if path not in seen]
        damaged = {path: problem for path, problem in selection.damaged.items() if path not in seen}
        seen.update(new, damaged)
        if new or damaged:
            yield Selection(new, {}, damaged)
        elif ended:
            return
        else:
            wait(POLL_S)


def _ended(patterns: Sequence[str], seen: set[Path]) -> bool:
    """Whether every run that may save matching checkpoints has ended."""
    folders = {path.parent for path in seen}
    folders |= {folder for folder in map(_folder, patterns) if folder is not None}
    return bool(folders) and all(map(_is_complete, folders))


def _folder(pattern: str) -> Path | None:
    """The folder of a run's checkpoints that a pattern looks into; None if it does not exist."""
    path = as_path(re.split(r"[*?\[{@]", pattern, maxsplit=1)[0])
    for folder in (path, path.parent, path / "checkpoints"):
        if not is_url(folder) and run_holding(folder) is not None:
            return folder
    return None


def _is_complete(folder: Path) -> bool:
    """Whether the run that saves into a folder has ended."""
    if not is_url(folder) and (run := run_holding(folder)) is not None:
        # Not its lock: that of a run which was stopped or killed, and may be resumed, is free too.
        return RunDir(run).read_summary().get("status") in _ENDS
    entries = catalog_of(folder).entries()
    return any(entry.manifest is not None and entry.manifest.finished is not None for entry in entries)
