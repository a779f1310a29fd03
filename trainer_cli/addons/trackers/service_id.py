"""The id of a run at a service, kept in the run directory, so that every attempt continues the same run there."""

from __future__ import annotations

import json
from pathlib import Path

from trainer_cli.files import replace


def read_id(file: Path | None) -> str | None:
    """Read the id that an earlier attempt has saved; None without one."""
    try:
        content = json.loads(file.read_text()) if file is not None else {}
    # A truncated file has no id: a new run of the service is better than no training.
    except (FileNotFoundError, ValueError):
        return None
    return str(content["run_id"]) if isinstance(content, dict) and "run_id" in content else None


def save_id(file: Path | None, run_id: str) -> None:
    """Save the id durably."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace(file, [f"{json.dumps({'run_id': run_id})}\n".encode()])
