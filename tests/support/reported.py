"""Run directories for reports, made of files alone: no training, no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer_cli.catalog.history import CheckpointHistory
from trainer_cli.manifest import Manifest
from trainer_cli.policy.rules import CheckpointKind
from trainer_cli.runs.run_dir import Outcome, RunDir
from trainer_cli.steps.run_status import RunStatus
from trainer_cli.strict_json import strict_json

BEGAN = 1_700_000_000.0
HOSTILE = "<img src=x onerror=boom()></script><script>boom()</script>%{y} $x$"


def make_run(
    path: Path,
    *,
    lr: float = 0.1,
    steps: int = 100,
    every: int = 10,
    status: RunStatus | None = RunStatus.finished,
    metrics: Mapping[str, Callable[[int], float]] | None = None,
) -> RunDir:
    """A run with a record every step, an evaluation every tenth, a save every so many steps, and two attempts.

    Args:
        status: how it ended; None: it is as if killed.
        metrics: further ones, each a function of the step.
    """
    run = RunDir(path)
    config = f"name: {path.name}\noptimizer: {{lr: {lr}}}\nmodel: {{hidden: [8], note: null}}\n"
    places = {"optimizer.lr": "command line", "model.hidden": "configs/model/mlp.yaml:3"}
    facts = {
        "run_id": re.sub(r"\W", "-", path.name)[-32:],
        "host": "here",
        "versions": {"torch": "2.10"},
        "device": "cpu",
    }
    run.create(config, [f"optimizer.lr={lr}"], facts, places=places).release()
    run.begin_attempt(name=path.name, start_step=0, now=BEGAN, environment=facts)
    half = steps // 2
    run.end_attempt(outcome(RunStatus.stopped, half, "SIGTERM"), now=BEGAN + half)
    again = {**facts, "device": "cuda:0"}
    run.begin_attempt(name=path.name, start_step=half, now=BEGAN + 1000 + half, environment=again)
    run.record_total_steps(steps)
    write_metrics(run, (record(step, half, lr, metrics or {}) for step in range(1, steps + 1)))
    for step in range(every, steps + 1, every):
        save(run, step, CheckpointKind.regular if step % (2 * every) == 0 else CheckpointKind.ephemeral)
    if status is not None:
        run.end_attempt(outcome(status, steps, "max_duration reached"), now=BEGAN + 1000 + steps)
    return run


def record(step: int, half: int, lr: float, more: Mapping[str, Any]) -> dict[str, Any]:
    """The second attempt begins a thousand seconds after the first one ended."""
    found = {"step": step, "epoch": step / 10, "time": BEGAN + step + (1000 if step > half else 0)}
    found |= {"train/loss": lr + 1 / step, "train/lr": lr, "train/grad_norm": 1.0, "train/samples_per_s": 64.0}
    if step % 10 == 0:
        found |= {"val/loss": lr + 2 / step, "val/accuracy": 1 - 1 / step}
    return {**found, **{name: value(step) for name, value in more.items()}}


def write_metrics(run: RunDir, records: Iterable[Mapping[str, Any]]) -> None:
    run.metrics_file.write_text("".join(f"{strict_json(one)}\n" for one in records))


def save(run: RunDir, step: int, kind: CheckpointKind) -> None:
    """A permanent checkpoint stays on the disk; an ephemeral one goes with the next save."""
    history = CheckpointHistory(run.history_file)
    history.saved(f"step{step}", step, kind.value, f"every {step} steps")
    if kind is CheckpointKind.ephemeral:
        history.removed(f"step{step}", f"ephemeral, and step{step + 10} is newer")
        return
    folder = run.checkpoints_folder / f"step{step}"
    folder.mkdir(parents=True)
    manifest = Manifest(run_id=run.run_id, attempt=1, step=step, epoch=0, kind=kind, reason=f"every {step} steps")
    (folder / "manifest.json").write_bytes(manifest.to_bytes())


def outcome(status: RunStatus, step: int, reason: str) -> Outcome:
    kept = [{"name": "step100", "why": "final"}]
    return Outcome(status=status, reason=reason, step=step, wall_time_s=float(step), checkpoints=kept)


def validate(folder: Path, checkpoints: Mapping[str, tuple[int, float]]) -> None:
    """What `train validate` writes: checkpoint -> step and loss."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {"checkpoint": name, "step": step, "loader": "val", "time": BEGAN, "val/loss": loss}
        for name, (step, loss) in checkpoints.items()
    ]
    with open(folder / "validation.jsonl", "a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)


def make_sweep(folder: Path, rates: Iterable[float]) -> Path:
    """A sweep over the learning rate, and a job that has not begun."""
    lines = ["KEY,optimizer.lr,status,step,reason,run_dir"]
    for lr in rates:
        run = make_run(folder / f"optimizer.lr={lr}", lr=lr, steps=20)
        lines.append(f"optimizer.lr={lr},{lr},finished,20,,{run.path}")
    lines.append(f"optimizer.lr=9.0,9.0,not begun,,,{folder / 'optimizer.lr=9.0'}")
    (folder / "sweep.csv").write_text("\n".join(lines) + "\n")
    return folder
