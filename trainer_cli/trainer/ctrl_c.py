"""The first Ctrl-C in Python ends a fit after its step, which is saved; a second one interrupts at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

CTRL_C = "Ctrl-C in the script"
"""The reason of the stop, another than that of a signal to `train`."""


class CtrlC:
    """While entered, the first SIGINT calls a function; the next ones raise KeyboardInterrupt, as Python does.

    Only in the main thread, and only where Python's own handler is installed: another handler, such as that of
    `train fit`, stays.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self.came = False
        self._stop = stop
        self._installed = False

    def __enter__(self) -> CtrlC:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._installed = True
        return self

    def __exit__(self, *error: object) -> None:
        # Also what was not used; a handler that was installed meanwhile stays.
        if self._installed and signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handle the first Ctrl-C: ask for a stop after this step. The next one interrupts."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.came = True
        # To the descriptor, because the interrupted code may hold the lock of the stream.
        os.write(2, b"\nCtrl-C: stopping after this step, with a save; Ctrl-C again stops at once\n")
        self._stop()
