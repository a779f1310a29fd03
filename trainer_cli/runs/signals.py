"""Requests from outside: signals that stop a training, and the files `RUN/save`, `RUN/evaluate` and `RUN/stop`.

Before the training begins a signal stops at once, later at the end of a step or validation batch. Files are noticed
within a second and then deleted.
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
"""SIGHUP is sent when the terminal is closed or an SSH connection is lost."""
_STOPPED_EARLY = 75
"""`ExitCode.STOPPED_EARLY`; a literal, because this module must be importable at once."""


def exit_early() -> None:
    """Exit with 75 at the first signal until `StopSignals` takes over: there is nothing to save yet."""
    for number in stopping():
        signal.signal(number, _exit_now)


def stopping() -> list[signal.Signals]:
    """The signals that stop this process. Under `nohup` SIGHUP is ignored, and stays so."""
    return [number for number in STOPPING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def _exit_now(number: int, frame: FrameType | None) -> None:
    # Not an exception: a module that is being imported might catch it.
    _say(number, f"{_name(number)}: stopped; the same command again resumes\n")
    os._exit(_STOPPED_EARLY)


def _say(number: int, text: str) -> None:
    """Write a message to stderr."""
    # To the descriptor, because the interrupted code may hold the lock of the stream.
    with contextlib.suppress(OSError):
        if number == signal.SIGINT and os.isatty(2):
            text = f"\n{text}"  # A terminal shows ^C where its cursor is.
        os.write(2, text.encode())


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class StopSignals:
    """While entered, records SIGTERM, SIGUSR1, SIGHUP and the first Ctrl-C; a second Ctrl-C raises KeyboardInterrupt.

    A signal before `listen` is kept for it.

    Args:
        promise: what will happen, written to stderr at the first signal unless `quiet`.
    """

    def __init__(self, promise: str = "stopping after this step", *, quiet: bool = False) -> None:
        self.stop_request: str | None = None
        self._quiet = quiet
        self._promise = promise
        self._ctrl_c = False
        self._listener: Callable[[str], None] | None = None
        self._before: dict[int, object] = {}

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the reason of the first stop request, at once if it has come already."""
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
        self._thread.join(_JOIN_TIMEOUT_S)

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval_s):
            for name in self._take_requests():
                log.info("%s was requested by a file", name)
                self._actions[name]()

    def _take_requests(self) -> list[str]:
        """The names of the files that exist; they are deleted, so that each request counts once."""
        requests = []
        for name, file in self._files.items():
            try:
                os.unlink(file)
            except OSError:
                # Absent, or it cannot be deleted: then it would count at every poll.
                continue
            requests.append(name)
        return requests
