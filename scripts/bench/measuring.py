"""Measure one table in a process of its own, so that none inherits another's memory or imports."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path

from settings import Settings
from table import Table
from timing import last_words

LIMIT_S = 1200.0
"""Seconds after which a table has failed, and its processes are killed."""


class TableFailed(Exception):
    """A table could not be measured; the text says why."""


def measured(name: str, settings: Settings, limit_s: float = LIMIT_S) -> list[Table]:
    """The tables that a name stands for.

    Raises:
        TableFailed: an error in the process, no row at all, or a row without a figure.
    """
    # A folder of its own: what one table leaves there, another would find.
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=settings.folder, ignore_cleanup_errors=True) as folder:
        text = replace(settings, folder=folder).to_text()
        command = [sys.executable, str(Path(__file__).parent), "--child", name, "--settings", text]
        # A session of its own, so that what a contender leaves behind is killed too.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise TableFailed(f"not done within {limit_s:g} s") from None
        finally:
            _kill_session(process)
    try:
        answer = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise TableFailed(f"its process ended with {process.returncode} and no result") from None
    if isinstance(answer, dict):
        raise TableFailed(answer["failed"])
    tables = [Table.from_json(plain) for plain in answer]
    check(tables)
    return tables


def check(tables: list[Table]) -> None:
    """Raises:
    TableFailed: a table has no rows, or a row no figure.
    """
    for table in tables:
        if not table.rows:
            raise TableFailed(f"{table.name} has no rows")
        for row in table.rows:
            # Every row has the first column; others may be of some rows only.
            if not row.samples.get(table.columns[0].name) or not all(row.samples.values()):
                raise TableFailed(f"{table.name}, {row.name}: a figure is missing")


def answer_as_child(module: str, settings: Settings) -> int:
    """Measure in this process, and print the tables as one line of JSON, or why there are none."""
    try:
        tables = importlib.import_module(module).measure(settings)
        print(json.dumps([table.to_json() for table in tables]))
        return 0
    except SystemExit as error:
        reason = str(error)
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
    print(json.dumps({"failed": last_words(reason)}))
    return 1


def _kill_session(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()
