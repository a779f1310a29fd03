"""Choose how a trainer shows its metrics."""

from __future__ import annotations

import sys

from trainer_cli.loggers.base import Logger
from trainer_cli.terminal import is_terminal


def make_display(style: str) -> Logger | None:
    """The logger that shows metrics on the terminal or in the notebook; None if none is to be shown.

    Args:
        style: as in `Logging.console`; `auto` shows nothing where stderr is neither a terminal nor a notebook's.
    """
    # Imported where it is used: most trainings write to a file.
    if style == "auto" and "ipykernel" in sys.modules:
        from trainer_cli.loggers.notebook import NotebookLogger, in_notebook

        if in_notebook():
            return NotebookLogger()
    if style == "off" or (style == "auto" and not is_terminal(sys.stderr)):
        return None
    from trainer_cli.loggers.console import ConsoleLogger

    return ConsoleLogger()
