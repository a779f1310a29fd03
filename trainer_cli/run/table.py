"""Text tables by rich, as wide as the terminal, or as the longest cells if stdout is no terminal."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterable, Sequence

_UNBOUNDED = 100_000


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[str] = (), indent: str = "") -> str:
    """Plain text, a line for each row; columns named in `right` are flush right, empty ones are left out.

    No header is shown where all its names are empty.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, show_header=any(header), padding=(0, 2, 0, 0), pad_edge=False)
    shown = [column for column, _ in enumerate(header) if any(row[column] for row in rows)]
    for column in shown:
        justify = "right" if header[column] in right else "left"
        grid.add_column(Text(header[column]), justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        grid.add_row(*(Text(row[column]) for column in shown))
    width = shutil.get_terminal_size().columns - len(indent) if sys.stdout.isatty() else _UNBOUNDED
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(grid)
    return "\n".join(f"{indent}{line}".rstrip() for line in out.getvalue().splitlines())
