"""The jobs of a sweep, as its `sweep.csv` lists them."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from trainer_cli.runs import RunView

SWEEP_FILE = "sweep.csv"


class SweepJob(NamedTuple):
    """A row of a `sweep.csv`."""

    key: str
    swept: Mapping[str, str]
    run_dir: Path
    status: str
    reason: str
    step: str = ""


def read_jobs(folder: Path) -> dict[str, SweepJob]:
    """Real path of a run's directory -> its job, for all jobs of the sweep in a folder; empty if it holds no sweep.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with open(folder / SWEEP_FILE, encoding="utf-8", errors="replace", newline="") as file:
            rows = list(csv.DictReader(file))
    except FileNotFoundError:
        return {}
    jobs = {}
    for row in rows:
        cells = {str(name): str(cell or "") for name, cell in row.items()}
        names = list(cells)
        if names[:1] == ["KEY"] and cells.get("run_dir") and "status" in cells:
            swept = {name: cells[name] for name in names[1 : names.index("status")] if cells[name]}
            # `run_dir` is relative to the folder in which the sweep was started, which may be another one now.
            job_folder = folder / cells["KEY"]
            run_dir = job_folder if job_folder.is_dir() else Path(cells["run_dir"])
            reason, step = cells.get("reason", ""), cells.get("step", "")
            jobs[os.path.realpath(run_dir)] = SweepJob(cells["KEY"], swept, run_dir, cells["status"], reason, step)
    return jobs


def find_jobs(paths: Iterable[Path]) -> dict[str, SweepJob]:
    """Real path of a run's directory -> its job, for all jobs of the sweeps that the runs belong to."""
    jobs: dict[str, SweepJob] = {}
    for folder in dict.fromkeys(path.parent for path in paths):
        with suppress(OSError):
            jobs |= read_jobs(folder)
    return jobs


def show_paused(view: RunView, jobs: Mapping[str, SweepJob]) -> RunView:
    """The state of a run as its sweep sees it: paused, and why, instead of finished at a rung.

    Args:
        jobs: see `read_jobs`.
    """
    job = jobs.get(os.path.realpath(view.path))
    # It may have been trained on since, by the sweep or by hand.
    if job is None or job.status != RunView.PAUSED or job.step != str(view.step):
        return view
    return replace(view, state=RunView.PAUSED, reason=job.reason)
