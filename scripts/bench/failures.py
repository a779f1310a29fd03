"""A training of 3,000 steps that is killed as often as those of TorchPass' comparison, beside an undisturbed one."""

from __future__ import annotations

from functools import partial
from statistics import median

from killed import after_each_kill, attempts
from settings import Settings
from table import Column, Row, Table
from timing import interleaved

BASE = "undisturbed, a save every 100 steps"
ROWS = {"restarts.max, a save every 100 steps": 100, "restarts.max, a save every 5 steps": 5}
PUBLISHED = {"live migration": 405, "restart": 818, "torchft": 930}
"""Minutes for 3,000 steps on 64 H200, a failure each 2,700 to 4,500 s, saves every 100 steps (clockwork.io)."""
STEP_S = PUBLISHED["live migration"] * 60 / 3000
"""A step there."""
GAP = round(3600 / STEP_S)
"""Steps from failure to failure there, on average."""


def measure(settings: Settings) -> list[Table]:
    """One table."""
    steps, gap, sleep_ms = settings.pick(smoke=(12, 7, 0), quick=(600, GAP, 5), whole=(3000, GAP, 8))
    kills = list(range(gap, steps, gap))
    measures = {BASE: partial(_run, settings, steps, 100, [], sleep_ms)}
    disturbed = settings.pick(smoke=list(ROWS)[1:], quick=list(ROWS), whole=list(ROWS))
    measures |= {name: partial(_run, settings, steps, ROWS[name], kills, sleep_ms) for name in disturbed}
    samples, skipped = interleaved(measures, settings.rounds_or(1, 1), warm=0, needed=list(measures))
    rows = [Row(name, found) for name, found in samples.items()]
    columns = [
        Column("time", "s", 1, resolution=0.5),
        Column("a failure", "s", 2, resolution=0.1, ratio=False),
        Column("repeated", "steps", 0, ratio=False),
    ]
    there = []
    for name in disturbed:
        lost_s, repeated = median(samples[name]["a failure"]), median(samples[name]["repeated"])
        ratio = 1 + len(kills) * (lost_s + repeated / len(kills) * STEP_S) / (steps * STEP_S)
        there.append(f"{name.partition(', ')[2]}: {ratio:.3f}")
    notes = [
        f"{steps:,} steps that wait {sleep_ms} ms each, killed by SIGKILL after every {gap}: {len(kills)} times. From "
        "the first step to the end. `a failure`: from a kill to the first new step; `repeated`: steps trained again, "
        "in all. That is the rate of failures of TorchPass' comparison, where saves are made every 100 steps: live "
        f"migration 1.0, restarts {PUBLISHED['restart'] / PUBLISHED['live migration']:.1f}, torchft "
        f"{PUBLISHED['torchft'] / PUBLISHED['live migration']:.1f} of undisturbed. A step there takes {STEP_S:.1f} s: "
        f"with such steps, and as many seconds a failure as here, the ratios would be {', '.join(there)}; starting a "
        "training on 64 GPUs takes longer than here."
    ]
    settled = {"steps": steps, "kills": kills, "sleep_ms": sleep_ms}
    title = f"{steps:,} steps with failures"
    return [Table("failures", title, BASE, columns, rows, settled, skipped, notes)]


def _run(settings: Settings, steps: int, every: int, kills: list[int], sleep_ms: int) -> dict[str, float]:
    overrides = [
        f"loop.max_duration={steps}", "checkpoint.save_interval=null", f"checkpoint.ephemeral_save_interval={every}",
        *(["restarts.max=3", "restarts.backoff=null"] if kills else []),
    ]  # fmt: skip
    stamps = attempts(settings.scratch, overrides, kills=kills, env={"BENCH_SLEEP_MS": str(sleep_ms)})
    began = next(stamp.at for stamp in stamps if stamp.what == "stepped")
    found = {"time": next(stamp.at for stamp in stamps if stamp.what == "ended") - began}
    if kills:
        gaps = after_each_kill(stamps)
        first = [next(stamp for stamp in gap if stamp.what == "stepped").at - gap[0].at for gap in gaps]
        found["a failure"] = sum(first) / len(first)
        loaded = [next(stamp for stamp in gap if stamp.what == "loaded").step for gap in gaps]
        found["repeated"] = float(sum(gap[0].step - step for gap, step in zip(gaps, loaded, strict=True)))
    return found
