"""The id of a run at a service, kept in the run directory so that every attempt continues the same one."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from trainer_cli.errors import UserError
from trainer_cli.loggers.files import replace


def saved_id(file: Path | None) -> str | None:
    """The id that an earlier attempt has written; None without one."""
    try:
        found = json.loads(file.read_text()) if file is not None else {}
    except (FileNotFoundError, ValueError):
        return None
    return str(found["run_id"]) if isinstance(found, dict) and "run_id" in found else None


def save_id(file: Path | None, run_id: str) -> None:
    """Write the id, durably."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace(file, [f"{json.dumps({'run_id': run_id})}\n".encode()])


def imported(module: str, extra: str) -> Any:
    """A module of an extra.

    Raises:
        UserError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"this needs the package {module.partition('.')[0]}, which is not installed",
            cure=f'Install it: pip install "trainer-cli[{extra}]".',
        ) from error
