"""Signals that stop a training: immediately before it begins, later at the end of a step or validation batch.

Requests by file: `touch RUN/save`, `RUN/evaluate` or `RUN/stop`, read within a second and then deleted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType

STOPPING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT") if hasattr(signal, name))
"""SIGHUP is sent when the terminal is closed or a connection by ssh is lost."""
_STOPPED_EARLY = 75
"""`ExitCode.STOPPED_EARLY`, without what its module imports."""


def exit_early() -> None:
    """Exit with 75 at the first of the signals, until `StopSignals` takes over: there is nothing to save yet."""
    for number in stopping():
        signal.signal(number, _exit_now)


def stopping() -> list[signal.Signals]:
    """The signals that stop this process. Under `nohup` SIGHUP is ignored, and stays so."""
    return [number for number in STOPPING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def _exit_now(number: int, frame: FrameType | None) -> None:
    # Not by an exception: a module that is being imported might catch it.
    _say(number, f"{_name(number)}: stopped; the same command again resumes\n")
    os._exit(_STOPPED_EARLY)


def _say(number: int, text: str) -> None:
    """Write to the descriptor: a handler must not wait for a stream that the interrupted code has locked."""
    with contextlib.suppress(OSError):
        if number == signal.SIGINT and os.isatty(2):
            text = f"\n{text}"  # A terminal shows ^C where its cursor is.
        os.write(2, text.encode())


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class StopSignals:
    """While entered, SIGTERM, SIGUSR1, SIGHUP and the first Ctrl-C are noted; a second Ctrl-C raises KeyboardInterrupt.

    A signal before `listen` is kept for it. `promise` is the line written to stderr at the first one, unless `quiet`.
    """

    def __init__(self, promise: str = "stopping after this step", *, quiet: bool = False) -> None:
        self.stop_request: str | None = None
        self._quiet = quiet
        self._promise = promise
        self._ctrl_c = False
        self._listener: Callable[[str], None] | None = None
        self._before: dict[int, object] = {}

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the reason of the first stop request, now if there has been one."""
        self._listener = listener
        if self.stop_request is not None:
            listener(self.stop_request)

    def __enter__(self) -> StopSignals:
        for number in stopping():
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._ctrl_c:
                raise KeyboardInterrupt
            self._ctrl_c = True
        if self.stop_request is not None:
            return
        self.stop_request = _name(number)
        if not self._quiet:
            _say(number, f"{self.stop_request}: {self._promise}; Ctrl-C again stops at once\n")
        if self._listener is not None:
            self._listener(self.stop_request)


log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
_JOIN_TIMEOUT_S = 5.0


class TriggerFiles:
    """While entered, looks for the files and calls the function of each. Files from before are ignored."""

    def __init__(
        self, run: Path, actions: Mapping[str, Callable[[], None]], *, interval_s: float = POLL_INTERVAL_S
    ) -> None:
        self._files = {name: run / name for name in actions}
        self._actions = actions
        self._interval_s = interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trigger_files", daemon=True)

    def __enter__(self) -> TriggerFiles:
        for name in self._taken():
            log.warning("removed the file %s, which was there before the start", self._files[name])
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _watch(self) -> None:
        while not self._over.wait(self._interval_s):
            for name in self._taken():
                log.info("%s was requested by a file", name)
                self._actions[name]()

    def _taken(self) -> list[str]:
        """The requests whose files were found; the files are deleted, so that each counts once."""
        taken = []
        for name, file in self._files.items():
            try:
                os.unlink(file)
            except OSError:
                # Absent, or cannot be deleted: then it would count again and again.
                continue
            taken.append(name)
        return taken
