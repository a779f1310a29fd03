"""Choose how a trainer shows its metrics."""

from __future__ import annotations

import sys

from trainer_cli.loggers.base import Logger
from trainer_cli.terminal import is_terminal


def make_display(style: str) -> Logger | None:
    """The logger that shows metrics on the terminal or in the notebook; None if neither shall show any.

    Args:
        style: as in `Logging.console`; `auto` shows nothing where stderr is neither a terminal nor a notebook's.
    """
    # Not above: most trainings write to a file, and load none of this.
    if style == "auto" and in_notebook():
        from trainer_cli.loggers.notebook import NotebookLogger

        return NotebookLogger()
    if style == "off" or (style == "auto" and not is_terminal(sys.stderr)):
        return None
    from trainer_cli.loggers.console import ConsoleLogger

    return ConsoleLogger()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, such as those of Jupyter, Colab and VS Code."""
    # Neither is imported here: a process that has not imported ipykernel is no kernel.
    if "ipykernel" not in sys.modules or (ipython := sys.modules.get("IPython")) is None:
        return False
    return hasattr(ipython.get_ipython(), "kernel")
