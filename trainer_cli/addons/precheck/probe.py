"""`train plan --probe`: train some steps in a process of its own, in a temporary folder, and time them.

The process is an ordinary fit, with the callback `StepTimer`. All that is not a usual step, an evaluation or a save, as
imports, data and compilation before the first step, counts as start.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.commands import add_config_dir
from trainer_cli.config import Composed
from trainer_cli.errors import ExitCode, UserError
from trainer_cli.goodput import Activity, ProbedTimes
from trainer_cli.memory import peak_resident_bytes
from trainer_cli.processes import fit_in_processes, own_command
from trainer_cli.ranks import drop_ranks
from trainer_cli.scratch import scratch_folder
from trainer_cli.terminal import show_status
from trainer_cli.trainer import Callback

if TYPE_CHECKING:
    from trainer_cli.trainer import Trainer

_SECONDS = 8.0
"""Time for steps; evaluations and saves do not count."""
_STRETCH_S = 0.25
_LEAST = 6
"""Number of stretches, each of at least one step and `_STRETCH_S`."""
_WARM_UP = 2
"""Stretches that are no usual ones: compilation, workers that start, caches that fill."""
EXAMPLES = ""


class StepTimer(Callback):
    """Times stretches of steps, asks for an evaluation and a save in between, then stops the training."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        self._marks: list[tuple[int, float]] = [(0, 0.0)]
        """Step, and seconds of computing and of waiting for data, at the end of each stretch."""
        self._ended = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if time.monotonic() < self._ended + _STRETCH_S or trainer.progress.step == self._marks[-1][0]:
            return
        self._marks.append(_mark(trainer))
        if len(self._marks) == _LEAST // 2:
            trainer.ask_for_evaluation()
            trainer.ask_for_save()
        elif len(self._marks) > _LEAST and self._marks[-1][1] > _SECONDS:
            trainer.stop("it was measured", finished=False)
        self._ended = time.monotonic()

    def on_fit_end(self, trainer: Trainer, *_: Any) -> None:
        import torch

        marks = self._marks
        # Of a short run every step counts; its last one may have ended a stretch.
        if len(marks) <= _LEAST and trainer.progress.step > marks[-1][0]:
            marks = [*marks, _mark(trainer)]
        device_bytes = torch.cuda.max_memory_reserved(trainer.device) if trainer.device.type == "cuda" else None
        pauses = [(pauses.count, pauses.seconds) for pauses in trainer.metric_logger.pauses]
        if trainer.strategy.group.is_main:
            measured = trainer.progress.step, marks, *pauses, peak_resident_bytes(), device_bytes
            self._file.write_text(json.dumps(measured), "utf-8")


def _mark(trainer: Trainer) -> tuple[int, float]:
    seconds = trainer.metric_logger.time.seconds()
    return trainer.progress.step, seconds[Activity.training] + seconds[Activity.data]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file with the config, and the folder of the user's configs."""
    parser.add_argument("file", help=argparse.SUPPRESS)
    add_config_dir(parser)


def run(args: argparse.Namespace) -> int:
    """Fit with the config in the file."""
    return fit_in_processes(
        lambda: Composed.thaw(Path(args.file), (), config_dir=args.config_dir),
        args.as_child,
        supervised=args.supervised,
    )


def probe(composed: Composed, config_dir: Path | None) -> ProbedTimes:
    """Measure steps, an evaluation and a save of an experiment.

    Raises:
        UserError: the training has failed, and its message is printed; or it made no step.
    """
    show_status("measuring some steps …")
    with scratch_folder("train-probe-") as folder:
        file, measured = folder / "config.yaml", folder / "measured.json"
        timer = {"_target_": f"{__name__}.StepTimer", "file": str(measured)}
        changes = {
            "run_dir": str(folder),
            "resume": "auto",
            "ckpt": None,
            "loggers": {},
            "callbacks": {**(composed.raw["callbacks"] or {}), "step_timer": timer},
            "checkpoint.folder": None,
            "checkpoint.copy_to": {},
            "logging.console": "off",
        }
        file.write_text(composed.with_values(changes).freeze("run"), "utf-8")
        flags = [] if config_dir is None else ["--config-dir", str(config_dir)]
        command, began = own_command(["_probe", str(file), *flags]), time.monotonic()
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=drop_ranks(os.environ)
        )
        wall_s = time.monotonic() - began
        if done.returncode not in (ExitCode.DONE, ExitCode.STOPPED_EARLY) or not measured.exists():
            print(done.stderr, file=sys.stderr, end="")
            raise UserError("--probe: the training failed, for the reason above")
        steps, *times = json.loads(measured.read_text("utf-8"))
        if not steps:
            raise UserError("--probe: the training ended before its first step, and nothing could be measured")
        return summarise(wall_s, steps, *times)


def summarise(
    wall_s: float,
    steps: int,
    marks: list[tuple[int, float]],
    evaluations: tuple[int, float],
    saves: tuple[int, float],
    *memory: Any,
) -> ProbedTimes:
    """What was measured by a process that took `wall_s` seconds: see `StepTimer`; pauses are a count and seconds."""
    usual = marks[_WARM_UP if len(marks) > _LEAST else 0 :]
    stretches = [(end_s - begin_s) / (end - begin) for (begin, begin_s), (end, end_s) in itertools.pairwise(usual)]
    step_s = (usual[-1][1] - usual[0][1]) / (usual[-1][0] - usual[0][0])
    return ProbedTimes(
        steps,
        step_s,
        statistics.stdev(stretches) / step_s if len(stretches) > 1 else None,
        evaluations[1] / max(1, evaluations[0]),
        saves[1] / max(1, saves[0]),
        max(0.0, wall_s - steps * step_s - evaluations[1] - saves[1]),
        *memory,
    )
