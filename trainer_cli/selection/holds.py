"""Hold checkpoints, so that no run removes them while they are read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from trainer_cli.catalog import Catalog, ForeignKind
from trainer_cli.errors import CheckpointError
from trainer_cli.files import is_url
from trainer_cli.selection.patterns import Selection, select

_MAX_HOLDS = 256
"""Checkpoints held at a time: each takes a file descriptor. The others may be removed before they are read."""
_TRIES = 5
_PAUSE_S = 0.05


class Holds:
    """Shared locks on checkpoints of local folders. A run removes a checkpoint only once it is released."""

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
        is_full = len(self._locks) >= _MAX_HOLDS
        if path in self._locks or is_full or is_url(path) or ForeignKind.of(path) is not None:
            return True
        with ExitStack() as stack:
            try:
                stack.enter_context(Catalog.of(path.parent).storage.reading(path.name))
            except FileNotFoundError:
                return False
            # Moved out of the `with`, which would release it here.
            self._locks[path] = stack.pop_all()
        return True

    def select(self, patterns: Sequence[str]) -> tuple[Selection, list[Path]]:
        """Select checkpoints and hold them; also return those that were removed before they could be held.

        If a run removed all of them meanwhile, the patterns are expanded again, a few times.

        Raises:
            CheckpointError: see `select`; or every match was removed.
        """
        for attempt in range(_TRIES):
            try:
                selection = select(patterns)
            except CheckpointError:
                if attempt == _TRIES - 1:
                    raise
            else:
                # They are listed, then held: what was removed in between is noticed here, and not during an evaluation.
                removed = [path for path in selection.paths if not self.take(path)]
                paths = [path for path in selection.paths if path not in removed]
                if paths or selection.damaged:
                    return Selection(paths, selection.skipped, selection.damaged), removed
            time.sleep(_PAUSE_S)
        raise CheckpointError(
            f"ckpt={', '.join(patterns)}: each checkpoint was removed before it was read", cure="Run the command again."
        )

    def release(self, path: Path) -> None:
        """Release a checkpoint, if it is held."""
        if (stack := self._locks.pop(path, None)) is not None:
            stack.close()
