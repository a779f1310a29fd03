"""Hold checkpoints against removal by the run that saves them, from the listing until they are read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from trainer_cli.checkpoint.foreign.kind import kind_of
from trainer_cli.checkpoint.integrity import catalog_of
from trainer_cli.checkpoint.storage.url_path import is_url
from trainer_cli.errors import CheckpointError
from trainer_cli.run.select import Selection, select

_MOST = 256
"""Checkpoints held at a time: each takes a file descriptor. The others may be removed before they are read."""
_TRIES = 5
_PAUSE_S = 0.05


class Holds:
    """Shared locks on checkpoints of local folders. A run removes a checkpoint once it is released."""

    def __init__(self) -> None:
        self._locks: dict[Path, ExitStack] = {}

    def __enter__(self) -> Holds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for path in list(self._locks):
            self.release(path)

    def take(self, path: Path) -> bool:
        """Hold a checkpoint; False if it was removed. Those of stores and of other programs are not held."""
        if path in self._locks or len(self._locks) >= _MOST or is_url(path) or kind_of(path) is not None:
            return True
        with ExitStack() as stack:
            try:
                stack.enter_context(catalog_of(path.parent).storage.reading(path.name))
            except FileNotFoundError:
                return False
            self._locks[path] = stack.pop_all()
        return True

    def release(self, path: Path) -> None:
        """Let go of a checkpoint, if it is held."""
        if (stack := self._locks.pop(path, None)) is not None:
            stack.close()


def select_held(patterns: Sequence[str], holds: Holds) -> tuple[Selection, list[Path]]:
    """What `select` finds, held; and what was removed before it could be held. Where a run removed all of it
    meanwhile, it looks again, a few times.

    Raises:
        CheckpointError: as of `select`; or each was removed.
    """
    for attempt in range(_TRIES):
        try:
            selection = select(patterns)
        except CheckpointError:
            if attempt == _TRIES - 1:
                raise
        else:
            removed = [path for path in selection.paths if not holds.take(path)]
            left = [path for path in selection.paths if path not in removed]
            if left or selection.damaged:
                return Selection(left, selection.skipped, selection.damaged), removed
        time.sleep(_PAUSE_S)
    raise CheckpointError(
        f"ckpt={', '.join(patterns)}: each checkpoint was removed before it was read", cure="Give the command again."
    )
