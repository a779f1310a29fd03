"""How long `train plan --probe` says that a run will take, beside how long it takes."""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

from settings import Settings
from table import Column, Row, Table
from timing import Measure, interleaved, run, seconds

TRAIN = (sys.executable, "-m", "trainer_cli")
ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def measure(settings: Settings) -> list[Table]:
    """One table: for each experiment a forecast, and whole processes that train as long."""
    measures: dict[str, Measure] = {}
    bases: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=settings.scratch) as folder:
        text = Path(folder) / "text.txt"
        text.write_text(" ".join(str(number**2) for number in range(20_000)), encoding="utf-8")
        for name, whole, words in (("digits_mlp", 2000, ()), ("char_gpt", 400, (f"data.path={text}",))):
            steps = settings.pick(smoke=5, quick=whole // 4, whole=whole)
            arguments = (name, f"loop.max_duration={steps}", "device=cpu", *words)
            real, forecast = f"train fit, {name}, {steps:,} steps", f"train plan --probe, {name}"
            bases |= {real: real, forecast: real}
            measures |= {
                real: partial(_fit, settings.scratch, arguments),
                forecast: partial(_forecast, arguments),
            }
        samples, skipped = interleaved(measures, settings.rounds_or(2, 4), warm=0, needed=list(measures))
    columns = [Column("duration", "s", 1)]
    rows = [Row(name, samples[name], base=bases[name]) for name in measures]
    notes = [
        "Whole processes, from their start to their end, and what the plan says beforehand. The probe itself takes a "
        "start, eight seconds of steps, an evaluation and a save."
    ]
    return [Table("probe", "Forecast of a duration", rows[0].name, columns, rows, {}, skipped, notes)]


def _fit(scratch: Path, arguments: tuple[str, ...]) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        return {"duration": seconds(lambda: run((*TRAIN, "fit", *arguments, "run_dir=run"), env=ENV, cwd=folder))}


def _forecast(arguments: tuple[str, ...]) -> dict[str, float]:
    plan = json.loads(run((*TRAIN, "plan", *arguments, "--probe", "--json"), env=ENV))
    return {"duration": plan["duration_s"]}
