"""Charts of what a run took of its machine, from `system.jsonl`: processor, memory, disk and GPUs, over time."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainer_cli.runs import RunRecord, Series

MACHINE = "machine/"
"""Begins the name of such a curve; the rest is the key in the file."""
_CHARTS = (
    (re.compile(r"gpu\d+_percent"), "GPU use, %"),
    (re.compile(r"gpu\d+_memory_bytes"), "GPU memory, GiB"),
    (re.compile(r"gpu\d+_power_w"), "GPU power, W"),
    (re.compile(r"gpu\d+_temperature_c"), "GPU temperature, °C"),
    (re.compile(r".*cpu_percent"), "processor, % (of the process: of one core)"),
    (re.compile(r".*memory.*_bytes"), "memory, GiB"),
    (re.compile(r".*_bytes_per_s"), "disk, MB a second"),
    (re.compile(r".*_bytes"), "free disk space, GiB"),
)
_GIB = 2.0**30
_MB = 1e6


def machine_charts(records: Sequence[RunRecord]) -> dict[str, list[str]]:
    """The titles of the charts, each with the names of its curves. A key of no known kind has a chart of its own."""
    charts: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for record in records for key in record.machine.metrics):
        title = next((title for pattern, title in _CHARTS if pattern.fullmatch(key)), key)
        charts.setdefault(title, []).append(f"{MACHINE}{key}")
    return charts


def machine_series(record: RunRecord, name: str) -> Series | None:
    """The values of a curve in the unit of its chart; None if the run has none."""
    key = name.removeprefix(MACHINE)
    series = record.machine.metrics.get(key)
    if series is None:
        return None
    unit = _MB if key.endswith("_bytes_per_s") else _GIB if key.endswith("_bytes") else 1.0
    return Series(series.rows, series.values / unit)
