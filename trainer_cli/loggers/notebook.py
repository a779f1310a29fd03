"""Show metrics in a Jupyter notebook: a bar with step, rate and remaining time, and a table of the newest records."""

from __future__ import annotations

import html
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from trainer_cli.loggers.base import Logger, Record, RunFacts
from trainer_cli.loggers.pace import Pace, position
from trainer_cli.terminal import format_clock, html_metrics

log = logging.getLogger(__name__)

_DRAW_S = 0.5
_JOIN_S = 5.0
_MOST_ROWS = 20
_LOSS = "train/loss"


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, such as those of Jupyter, Colab and VS Code."""
    # Nothing is imported: a process that has not imported ipykernel is not a kernel.
    ipython = sys.modules.get("IPython")
    if "ipykernel" not in sys.modules or ipython is None:
        return False
    return hasattr(ipython.get_ipython(), "kernel")


def _display() -> Callable[[str], None]:
    """A function that shows HTML below the current cell, in place of what it has shown before."""
    from IPython.display import HTML, display  # type: ignore[import-not-found,unused-ignore]

    handle = display(HTML(""), display_id=True)
    return lambda text: handle.update(HTML(text))


class NotebookLogger(Logger):
    """Shows a bar, which a thread draws twice a second, and a table of the newest records of logs and evaluations.

    Args:
        show: shows HTML in place of the HTML before; None: below the current cell, and nothing outside of a notebook.
    """

    is_display = True

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        self._given_show = show
        self._show: Callable[[str], None] | None = None
        self._facts = RunFacts()
        self._pace = Pace(0)
        self._rows: deque[tuple[int, float, dict[str, float]]] = deque(maxlen=_MOST_ROWS)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, facts: RunFacts) -> None:
        """Start the thread that draws, if there is a notebook."""
        self._facts, self._pace, self._show = facts, Pace(facts.start_step), self._given_show
        self._rows.clear()
        if self._show is None:
            if not in_notebook():
                # No error: a notebook that was exported as a script shall train.
                log.warning("NotebookLogger shows nothing outside of a notebook: use ConsoleLogger")
                return
            self._show = _display()
        self._stopped = threading.Event()
        # A daemon: an error that skips `close` must not keep the kernel from ending.
        self._thread = threading.Thread(target=self._run, name="notebook-display", daemon=True)
        self._thread.start()

    def log(self, record: Record) -> None:
        """Add a record to the table. Of the metrics of the training it shows the loss alone."""
        metrics = {
            name: value for name, value in record.metrics.items() if name == _LOSS or not name.startswith("train/")
        }
        if not metrics:
            return
        if self._rows and self._rows[-1][0] == record.step:
            metrics = {**self._rows.pop()[2], **metrics}
        self._rows.append((record.step, record.epoch, metrics))

    def close(self) -> None:
        """End the thread, and draw once more."""
        show, self._show = self._show, None
        if show is None or self._thread is None:
            return
        self._stopped.set()
        self._thread.join(_JOIN_S)
        show(self.text(time.monotonic()))

    def _run(self) -> None:
        """Draw at intervals, as the thread."""
        while not self._stopped.wait(_DRAW_S):
            # Read once: `close` may set it to None meanwhile.
            if (show := self._show) is not None:
                show(self.text(time.monotonic()))

    def text(self, seconds: float) -> str:
        """The HTML at a moment, given in seconds of a monotonic clock."""
        progress, total = self._facts.now() if self._facts.now is not None else None, self._facts.total_steps
        # A copy in one call: the main thread may add a row meanwhile.
        rows = list(self._rows)
        words = []
        if progress is not None:
            self._pace.read(progress, seconds)
            eta_s = None if total is None else self._pace.eta_s(progress, total, seconds)
            eta = f"ETA {format_clock(eta_s)}" if eta_s is not None and not self._stopped.is_set() else ""
            words = [position(progress.step, self._facts), progress.activity, self._pace.shown, eta]
        line = html.escape("  ·  ".join(word for word in words if word))
        bar = "" if progress is None or not total else f'<progress value="{progress.step}" max="{total}"></progress> '
        cells = [((f"{step:,}", f"{epoch:.4g}"), metrics) for step, epoch, metrics in rows]
        return f"<div>{bar}{line}</div>{html_metrics(['step', 'epoch'], cells, digits=4) if cells else ''}"
