"""Requests by files, `RUN/save`, `RUN/evaluate` and `RUN/stop`: noticed within a second, and then deleted."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
_JOIN_TIMEOUT_S = 5.0


class TriggerFiles:
    """While entered, watches for the files and calls the action of each. Older files are deleted and ignored."""

    def __init__(
        self, run: Path, actions: Mapping[str, Callable[[], None]], *, interval_s: float = POLL_INTERVAL_S
    ) -> None:
        self._files = {name: run / name for name in actions}
        self._actions = actions
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trigger_files", daemon=True)

    def __enter__(self) -> TriggerFiles:
        for name in self._take_requests():
            log.warning("removed the file %s, which was there before the start", self._files[name])
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        # With a limit: a network filesystem that hangs must not keep the training from ending.
        self._thread.join(_JOIN_TIMEOUT_S)

    def _watch(self) -> None:
        """Look for the files again and again, in the thread, until the training has ended."""
        while not self._stopped.wait(self._interval_s):
            for name in self._take_requests():
                log.info("%s was requested by a file", name)
                self._actions[name]()

    def _take_requests(self) -> list[str]:
        """The names of the files that exist; they are deleted, so that each request counts once."""
        requests = []
        for name, file in self._files.items():
            # Not tested for existence first: only the process that deletes a file takes the request.
            try:
                os.unlink(file)
            except OSError:
                # Absent; or it cannot be deleted, and would count at every poll.
                continue
            requests.append(name)
        return requests
