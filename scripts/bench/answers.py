"""Seconds of the command's quick answers, beside an empty Python: the commands of cli.py as a table."""

from __future__ import annotations

import tempfile
from functools import partial

from cli import COMMANDS, EMPTY, EXPECTED, seconds
from settings import Settings
from table import Column, Row, Table
from timing import children_processor, interleaved


def measure(settings: Settings) -> list[Table]:
    """One table; what they may take on an idle laptop is in the notes."""
    with tempfile.TemporaryDirectory() as folder:

        def timed(command: tuple[str, ...], code: int) -> dict[str, float]:
            found: dict[str, float] = {}
            with children_processor(found, "processor"):
                found["time"] = seconds(command, code, folder)
            return found

        measures = {name: partial(timed, one, EXPECTED.get(name, 0)) for name, (one, _) in COMMANDS.items()}
        samples, skipped = interleaved(measures, settings.rounds_or(3, 10), warm=settings.warm, needed=list(COMMANDS))
    goals = ", ".join(f"{name} {goal} s" for name, (_, goal) in COMMANDS.items() if goal is not None)
    columns = [Column("time", "s", 3, resolution=0.02), Column("processor", "s", 3, resolution=0.02)]
    rows = [Row(name, found) for name, found in samples.items()]
    return [Table("cli", "Answers", EMPTY, columns, rows, {}, skipped, [f"Goals on an idle laptop: {goals}."])]
