"""Signals that stop a training.

Before an attempt is on the disk a signal stops at once, later at the end of a step or validation batch. This module is
imported before all else, so it imports next to nothing.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
from collections.abc import Callable, Iterable
from functools import cache
from types import FrameType, TracebackType

STOPPING = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGHUP", "SIGINT")
    if hasattr(signal, name)
)
"""SIGHUP is sent when the terminal is closed or an SSH connection is lost; SIGUSR2 by some schedulers, SIGXCPU by the
kernel at a limit of CPU time."""
_REPORTED_WAIT_S = 5.0
_AGAIN_S = 0.01
"""Wait before a KeyboardInterrupt is raised again."""
_STOPPED_EARLY = 75
"""`ExitCode.STOPPED_EARLY`; a literal, because this module must be importable at once."""


def exit_early() -> None:
    """Exit with 75 at the first signal until `StopSignals` takes over: there is nothing to save yet."""
    for number in stopping():
        signal.signal(number, _exit_now)


def keep_exit_code() -> None:
    """Ignore the signals from here on. The interpreter restores the default action, which kills the process, before it
    takes its modules apart: a second SIGTERM would replace the exit code."""
    for number in stopping():
        signal.signal(number, signal.SIG_IGN)


def stopping() -> list[signal.Signals]:
    """The signals that stop this process. Under `nohup` SIGHUP is ignored, and stays so."""
    return [number for number in STOPPING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


class SignalHandlers:
    """While entered, a function handles signals; then each has the handler again that it had before.

    The function is called for each signal. Python calls a handler once where one comes again before the interpreter
    has run it, as during a long operation; a pipe then has a byte of each.

    Args:
        numbers: of the signals; None: those that stop this process.
    """

    def __init__(
        self, handler: Callable[[int, FrameType | None], object], numbers: Iterable[signal.Signals] | None = None
    ) -> None:
        self._handler, self._numbers = handler, numbers
        self._before: dict[signal.Signals, signal._HANDLER] = {}
        self._pipe: tuple[int, int] | None = None
        self._received: list[int] = []
        self._handled: list[int] = []

    def __enter__(self) -> SignalHandlers:
        before = signal.set_wakeup_fd(-1)
        if before == -1:
            self._pipe = os.pipe()
            for end in self._pipe:
                os.set_blocking(end, False)
            signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            _counting.append(self)
            _stop_counting_in_forks()
        else:
            # The pipe is that of an event loop, or of an outer block.
            signal.set_wakeup_fd(before)
        for number in stopping() if self._numbers is None else self._numbers:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self in _counting:
            _counting.remove(self)
        self._stop_counting()

    def _stop_counting(self) -> None:
        """Close the pipe in which the signals are counted, and put back what was in its place."""
        pipe, self._pipe = self._pipe, None
        if pipe is None:
            return
        if (current := signal.set_wakeup_fd(-1)) != pipe[1]:
            signal.set_wakeup_fd(current)
        for end in pipe:
            os.close(end)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Call the handler once for each signal; Python calls this once for signals in quick succession."""
        if self._pipe is not None:
            try:  # noqa: SIM105 `contextlib` would be an import more at the start.
                self._received += os.read(self._pipe[0], 65536)
            except BlockingIOError:
                pass  # The byte is not there yet.
        # At least once: another thread may have received the signal, and not have written its byte yet.
        for _ in range(max(1, self._received.count(number) - self._handled.count(number))):
            self._handled.append(number)
            self._handler(number, frame)


_counting: list[SignalHandlers] = []
"""Those that hold a pipe: at most one, as a process has one descriptor for signals."""


@cache
def _stop_counting_in_forks() -> None:
    """Count a signal to the process group once, and not again for each forked child."""

    def stop() -> None:
        while _counting:
            _counting.pop()._stop_counting()

    os.register_at_fork(after_in_child=stop)


def _exit_now(number: int, frame: FrameType | None) -> None:
    """Handle a signal before the training begins: say so, and exit."""
    # It raises no exception: a module that is being imported might catch it.
    text = f"{_name(number)}: stopped before the training began\n"
    if os.isatty(2) and os.environ.get("TERM") != "dumb":
        # In place of what this line shows: the status, and the ^C of the terminal.
        _say(0, f"\r\x1b[K{text}")
    else:
        _say(number, text)
    os._exit(_STOPPED_EARLY)


def _say(number: int, text: str) -> None:
    """Write a message to stderr."""
    # It writes to the descriptor, because the interrupted code may hold the lock of the stream.
    try:
        if os.isatty(2):
            text = _broken(text, _count_columns())
            if number == signal.SIGINT:
                text = f"\n{text}"  # A terminal shows ^C where its cursor is.
        os.write(2, text.encode())
    except OSError:
        pass  # The terminal is closed.


def _count_columns() -> int:
    """Width of the terminal; 80 where it is unknown."""
    try:
        # Some terminals, such as those of CI, report 0.
        return os.get_terminal_size(2).columns or 80
    except OSError:
        return 80


def _broken(text: str, width: int) -> str:
    """The text in lines that fit into `width` columns, broken between words."""
    # Not by `terminal.wrapped`: the interrupted code may be in the middle of that import.
    first, *words = text.split(" ")
    lines = [first]
    for word in words:
        if len(lines[-1]) + 1 + len(word.rstrip()) < width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"  {word}")
    return "\n".join(lines)


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class StopSignals:
    """While entered, records the signals of `STOPPING` and the first Ctrl-C; a second Ctrl-C raises KeyboardInterrupt.

    A signal before `listen` is kept for it. A stop that takes long is reported once, with the call that the main thread
    is in: a long step, or a disk that hangs. While a system call cannot be interrupted, nothing is reported: Python's
    handlers run in the main thread.

    Args:
        promise: what will happen, written to stderr at the first signal unless `quiet`.
        reported_wait_s: seconds from the first signal to the report, unless `quiet`.
    """

    def __init__(
        self,
        promise: str = "stopping after this step",
        *,
        quiet: bool = False,
        reported_wait_s: float = _REPORTED_WAIT_S,
    ) -> None:
        self.stop_request: str | None = None
        self._reported_wait_s = reported_wait_s
        # A lock that is held while this is entered: `threading` and its Event would be an import more at the start.
        self._entered = _thread.allocate_lock()
        self._main_thread = _thread.get_ident()
        self._quiet = quiet
        self._promise = promise
        self._ctrl_c = False
        self._listener: Callable[[str], None] | None = None
        self._describe: Callable[[], str] | None = None
        self._handlers = SignalHandlers(self._note)

    def listen(self, listener: Callable[[str], None], describe: Callable[[], str] | None = None) -> None:
        """Call `listener` with the reason of the first stop request, at once if it has come already.

        Args:
            describe: returns what will happen, in place of `promise`.
        """
        self._describe = describe
        # Set before the check: a signal in between reaches the listener by the handler, and twice does no harm.
        self._listener = listener
        if self.stop_request is not None:
            listener(self.stop_request)

    def __enter__(self) -> StopSignals:
        self._entered.acquire()
        self._handlers.__enter__()
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._interrupt_again
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.release()
        sys.unraisablehook = self._unraisable
        self._handlers.__exit__()

    def _interrupt_again(self, ignored: sys.UnraisableHookArgs) -> None:
        """Raise a KeyboardInterrupt again that came inside a `__del__` or another callback, where Python drops it."""
        if not issubclass(ignored.exc_type, KeyboardInterrupt) or not self._ctrl_c:
            self._unraisable(ignored)
            return
        # Another thread raises it: the main one has not left this hook, which would drop it too.
        _thread.start_new_thread(self._interrupt_soon, ())

    def _interrupt_soon(self) -> None:
        """Interrupt the main thread after `_AGAIN_S`, unless the block has ended by then."""
        if not self._entered.acquire(timeout=_AGAIN_S):
            _thread.interrupt_main()
        else:
            self._entered.release()

    def _report_wait(self) -> None:
        """Report a stop that takes long."""
        if self._entered.acquire(timeout=self._reported_wait_s):
            self._entered.release()
        else:
            call = _describe_call(sys._current_frames().get(self._main_thread))
            wait = f"{self.stop_request}: still waiting after {self._reported_wait_s:.0f} s{call}"
            _say(0, f"{wait}; {self._second_ctrl_c()} stops at once, and kill -9 loses no committed checkpoint\n")

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: note the request to stop, and say what follows; a second Ctrl-C stops at once."""
        if number == signal.SIGINT:
            # Only Ctrl-C is counted: a scheduler may send SIGTERM more than once.
            if self._ctrl_c:
                raise KeyboardInterrupt
            self._ctrl_c = True
        if self.stop_request is not None:
            return
        self.stop_request = _name(number)
        if not self._quiet:
            promise = self._promise if self._describe is None else self._describe()
            _say(number, f"{self.stop_request}: {promise}; {self._second_ctrl_c()} stops at once\n")
            # A threading.Thread needs at its start a lock that the interrupted code may hold.
            _thread.start_new_thread(self._report_wait, ())
        if self._listener is not None:
            self._listener(self.stop_request)

    def _second_ctrl_c(self) -> str:
        """What the user types for a second Ctrl-C."""
        return "Ctrl-C again" if self._ctrl_c else "Ctrl-C twice"


def _describe_call(frame: FrameType | None) -> str:
    """The innermost call of this package in a stack, as text that follows a message; empty without such a call."""
    package = os.path.dirname(__file__)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(package):
            return f" for {code.co_name} ({os.path.relpath(code.co_filename, package)}:{frame.f_lineno})"
        frame = frame.f_back
    return ""
