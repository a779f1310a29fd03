"""What of a run cannot be read, and why: one rule for `train report`, `train serve`, `train top` and `train tail`.

A run is listed, with a sentence for each file that is damaged or refused, and what remains of it is drawn. A last line
without its newline is no damage: a killed process leaves one, and a running one is about to complete it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer_cli.errors import TrainError
from trainer_cli.loggers import MEDIA_FILE
from trainer_cli.runs.run_dir import RunDir, read_json
from trainer_cli.terminal import format_count


def explain(error: OSError | TrainError, folder: Path) -> str:
    """Why a file or folder cannot be read, in one line that names it as seen from the run's directory."""
    if not isinstance(error, OSError) or error.filename is None:
        return str(error)
    name = os.path.relpath(error.filename, folder)
    return f"{'its directory' if name == '.' else name} cannot be read: {error.strerror}"


@contextmanager
def collecting(problems: list[str], folder: Path) -> Iterator[None]:
    """Context manager that adds to `problems` why the block cannot read a file, instead of raising an error."""
    try:
        yield
    except (OSError, TrainError) as error:
        problems.append(explain(error, folder))


def unread_lines(file: Path, count: int) -> list[str]:
    """A sentence about lines that hold no record, as a list; empty if `count` is 0."""
    return [f"{format_count(count, 'line')} of {file.name} cannot be read"] if count else []


def damaged_files(run: RunDir) -> Iterator[str]:
    """A sentence for each file of a run that exists, but cannot be read or is damaged as a whole."""
    for file in (run.config_file, run.environment_file, run.summary_file, run.provenance_file, run.path / MEDIA_FILE):
        try:
            file.open("rb").close()
        except FileNotFoundError:
            continue
        except OSError as error:
            yield explain(error, run.path)
            continue
        content = run.values or None if file == run.config_file else read_json(file)
        if content is None and file.suffix != ".jsonl":
            yield f"{file.name} is damaged"
        # `read_summary` leaves out values of a kind that this program does not write.
        elif file == run.summary_file and (count := _count_values(content) - _count_values(run.read_summary())):
            yield f"{format_count(count, 'value')} of {file.name} cannot be read"


def _count_values(content: Any) -> int:
    """The number of values in nested mappings and lists, which count too."""
    items = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return 1 + sum(map(_count_values, items))
