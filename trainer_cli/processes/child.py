"""Start this program as a child process, and end with the parent.

The stdin of a child is a pipe whose other end only the parent holds. When the parent ends for any reason, the pipe
closes, and a child that called `stop_with_parent` stops as at a SIGTERM: it saves and exits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import trainer_cli


class FrozenJob(NamedTuple):
    """A fit in a process of its own: its name, its config as `Composed.freeze` returns it, and the overrides of it."""

    key: str
    frozen: str
    overrides: Sequence[str] = ()
    processes: int = 1
    """The number of processes that train."""
    submitted: Path | None = None
    """A kept source, which is trained with whatever is edited meanwhile; None: that of the project."""
    metric: str | None = None
    """A metric that must be reported: without it the fit is refused before its first step."""
    until: str | None = None
    """The length at which it pauses."""


def own_command(arguments: Sequence[str]) -> list[str]:
    """The command that starts this program with these arguments."""
    # -P: like the installed script, import nothing from the current folder unless this package is in it.
    # Otherwise a file of the user could hide a module.
    root = Path(trainer_cli.__file__).parents[1]
    alone = [] if root == Path.cwd() else ["-P"]
    return [sys.executable, *alone, "-m", "trainer_cli", *arguments]


def stop_with_parent() -> None:
    """Stop this process as at a SIGTERM when its stdin ends. Nothing else can read stdin afterwards."""
    # stdin becomes /dev/null, so that neither the user's code nor a debugger reads from the pipe.
    watched = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    main = threading.main_thread().ident
    assert main is not None

    def watch() -> None:
        """Wait until the parent has closed its end of the pipe."""
        with contextlib.suppress(OSError):
            while os.read(watched, 1):
                pass
        # The main thread gets the signal, which interrupts a blocking call in it.
        signal.pthread_kill(main, signal.SIGTERM)

    # A daemon: it blocks in a read that nothing ends when the training is done.
    threading.Thread(target=watch, name="stop-with-parent", daemon=True).start()
