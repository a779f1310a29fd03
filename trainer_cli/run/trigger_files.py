"""Wishes by file: `touch RUN/save`, `RUN/evaluate` or `RUN/stop`, seen within a second and then removed."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
_LEAVE_S = 5.0


class Wishes:
    """While entered, looks for the files and calls the function of each. Files from before are ignored."""

    def __init__(self, run: Path, grant: Mapping[str, Callable[[], None]], *, every_s: float = LOOK_EVERY_S) -> None:
        self._files = {name: run / name for name in grant}
        self._grant = grant
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trigger_files", daemon=True)

    def __enter__(self) -> Wishes:
        for name in self._taken():
            log.warning("removed the file %s, which was there before the start", self._files[name])
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(_LEAVE_S)

    def _watch(self) -> None:
        while not self._over.wait(self._every_s):
            for name in self._taken():
                log.info("%s was asked for by a file", name)
                self._grant[name]()

    def _taken(self) -> list[str]:
        """The requests whose files were found; the files are deleted, so that each counts once."""
        taken = []
        for name, file in self._files.items():
            try:
                os.unlink(file)
            except OSError:
                # Not there, or not to be removed: then it would be granted again and again.
                continue
            taken.append(name)
        return taken
