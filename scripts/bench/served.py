"""How fast `train serve` opens and answers with a hundred runs and a million records."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from settings import Settings
from table import Column, Row, Table
from timing import Skipped, environment, processor_s

_CONFIG = "name: run{number}\nseed: {number}\noptimizer:\n  lr: {lr}\ncheckpoint:\n  folder: null\n"


def measure(settings: Settings) -> list[Table]:
    """One table: a row for each request that the page makes."""
    if sys.platform != "linux":
        raise Skipped("the processor time of another process is read from /proc")
    runs, records = settings.pick(smoke=(2, 20), quick=(20, 10_000), whole=(100, 10_000))
    samples: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        for number in range(runs):
            _write_run(Path(folder) / f"runs/run{number}", number, records)
        for _ in range(settings.rounds_or(1, 3)):
            for name, figures in _answers(folder, runs, records).items():
                for column, value in figures.items():
                    samples.setdefault(name, {}).setdefault(column, []).append(value)
    columns = [Column("time", "s", 3, resolution=0.02, ratio=False)]
    columns.append(Column("processor", "s", 2, resolution=0.02, ratio=False))
    rows = [Row(name, figures) for name, figures in samples.items()]
    note = (
        "From the start of the command to the table of all runs in the first row; then one request after the other, "
        "once all records are read. Goals: 2 s, and 0.2 s for an answer."
    )
    sizes = {"runs": runs, "records of each": records}
    return [Table("serve", "`train serve`", rows[0].name, columns, rows, sizes, {}, [note])]


def _answers(folder: str, runs: int, records: int) -> dict[str, dict[str, float]]:
    """Seconds, and processor seconds of the server, of each request of the page."""
    figures: dict[str, dict[str, float]] = {}
    began = time.monotonic()
    with _server(folder) as (process, address):

        def get(path: str) -> str:
            with urllib.request.urlopen(address + path, timeout=300) as answer:
                text: str = answer.read().decode()
            return text

        get("")
        get("page.js")
        overview = json.loads(get("api/runs"))
        figures["start and table of the runs"] = {
            "time": time.monotonic() - began,
            "processor": processor_s(process.pid),
        }
        numbers = ",".join(overview["runs"])
        assert len(overview["runs"]) == runs
        requests: dict[str, tuple[str, Callable[[Any], bool]]] = {
            "all records read": (f"api/page?runs={numbers}", lambda page: len(page["runs"]) == runs),
            "table of the runs": ("api/runs", lambda table: len(table["runs"]) == runs),
            "page of a run": ("api/page?runs=0", lambda page: len(page["runs"]) == 1),
            "curve of a run": ("api/curves?runs=0&name=train/loss", lambda curves: len(curves) == 1),
            "page of all runs": (f"api/page?runs={numbers}", lambda page: len(page["runs"]) == runs),
            "curves of all runs": (
                f"api/curves?runs={numbers}&name=train/loss",
                lambda curves: len(curves) == runs and len(curves[0]["step"]) >= min(records, 100),
            ),
            "the same again": (f"api/curves?runs={numbers}&name=train/loss", lambda curves: len(curves) == runs),
        }
        for name, (path, is_right) in requests.items():
            processor, began = processor_s(process.pid), time.monotonic()
            text = get(path)
            figures[name] = {
                "time": time.monotonic() - began,
                "processor": processor_s(process.pid) - processor,
            }
            assert is_right(json.loads(text)), name
    return figures


@contextmanager
def _server(folder: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = (sys.executable, "-m", "trainer_cli", "serve", "runs")
    process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().removeprefix("runs: ").strip()
    finally:
        process.kill()
        process.communicate()


def _write_run(path: Path, number: int, records: int) -> None:
    """A finished run with a record for each of its steps."""
    from trainer_cli.runs.run_dir import Outcome, RunDir
    from trainer_cli.steps import RunStatus

    run = RunDir(path)
    config = _CONFIG.format(number=number, lr=0.1 if number % 2 else 0.01)
    with run.create(config, [], {"run_id": f"run{number}"}):
        run.begin_attempt(name=path.name, start_step=0, now=1.7e9, environment={})
        lines = []
        for step in range(1, records + 1):
            loss = 1 / math.sqrt(step + number)
            lines.append(
                f'{{"step":{step},"epoch":{step / 100},"time":{1.7e9 + step},"train/loss":{loss:.6g},'
                f'"train/lr":{0.1 / step:.6g},"val/loss":{2 * loss:.6g}}}\n'
            )
        (path / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
        outcome = Outcome(status=RunStatus.finished, reason="enough", step=records, wall_time_s=float(records))
        run.end_attempt(outcome, now=1.7e9 + records)
