"""The callback that `train fit` adds: it watches for stalls, a lack of memory, a new best, and a kill before."""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer_cli.addons.watch.notify import Notifier, open_urls
from trainer_cli.files import read_last_row
from trainer_cli.runs import BestSettings, RunDir, read_json, write_json
from trainer_cli.schema import TrainConfig
from trainer_cli.steps import Duration, RunStatus
from trainer_cli.trainer import Callback, Trainer

log = logging.getLogger(__name__)

_BEST_INTERVAL_S = 600.0
"""Least time between two messages about a new best."""
_LONGEST_TICK_S = 5.0
_IN_COLLECTIVE = ("/torch/distributed/", "/trainer_cli/parallel/", "/torch/autograd/graph.py")
"""Parts of the names of files in which a rank waits for others; the last one runs a backward, in which it may."""
_LIBRARIES = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]), "<")


def observe_fit(config: TrainConfig, run: RunDir) -> Mapping[str, Callback]:
    """Make the callback of a fit.

    Raises:
        UserError: `notify.url` cannot be used: noticed here, not at the end.
    """
    if config.notify.url is not None:
        open_urls(config.notify.url)
    return {"watch": Watch(config, run)}


class Watch(Callback):
    """Changes nothing of a training, and has no state."""

    measures_only = True

    def __init__(self, config: TrainConfig, run: RunDir) -> None:
        self._config, self._run, self._notifier = config, run, Notifier(config)
        self._best: Mapping[str, float] = {}
        """The metrics of the best evaluation so far; empty: not read yet."""
        self._best_told_s = -_BEST_INTERVAL_S
        self._stopped = threading.Event()

    def on_enter_fit(self, trainer: Trainer, stack: ExitStack, *args: Any) -> None:
        """Begin to look for stalls, in a thread."""
        stack.callback(self._notifier.wait)
        if (stall := self._config.notify.stall) is not None:
            # A machine may have a run directory of its own.
            self._run.path.mkdir(parents=True, exist_ok=True)
            self._file_of(trainer.strategy.group.rank).unlink(missing_ok=True)
            arguments = trainer, float(Duration.parse(stall).value)
            thread = threading.Thread(target=self._watch, args=arguments, name="stalls", daemon=True)
            thread.start()
            # Called in reverse.
            stack.callback(thread.join, _LONGEST_TICK_S)
            stack.callback(self._stopped.set)

    def on_fit_start(self, trainer: Trainer, *args: Any) -> None:
        """Tell that the attempt before was killed; of a run that is restarted by itself, also that it failed."""
        for attempt in self._run.attempts[-2:-1] if trainer.strategy.group.is_main else ():
            status = attempt.get("status")
            if status == RunStatus.killed or (status == RunStatus.failed and self._config.restarts.max):
                # The records after the checkpoint are still there.
                last = read_last_row(self._run.metrics_file).get("step", 0)
                text = f"{status} after its record of step {last}, and resumed at step {trainer.progress.step}"
                self._notifier.tell("killed" if status == RunStatus.killed else "failure", text, **attempt)

    def logged_metrics(self) -> Iterable[str]:
        # It states that `on_after_evaluation` logs none.
        return ()

    def on_after_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Tell of a new best."""
        rule = BestSettings.of(asdict(self._config)).rule(metrics)
        if rule is None or rule.value(metrics) is None or not trainer.strategy.group.is_main:
            return
        best = self._run.read_summary().get("best_metrics") or {}
        self._best = self._best or {name: entry["value"] for name, entry in best.items()}
        if rule.value(self._best) is None or rule.loss(metrics) < rule.loss(self._best):
            self._best = metrics
            if time.monotonic() - self._best_told_s >= _BEST_INTERVAL_S:
                self._best_told_s, step = time.monotonic(), trainer.progress.step
                text = f"has a new best at step {step}: {rule.metric} {metrics[rule.metric]:.6g}"
                self._notifier.tell("best", text, step=step, metrics=metrics)

    def on_fit_exception(self, trainer: Trainer, exception: BaseException) -> None:
        """Add the largest tensors to an error of memory that is lacking."""
        # Imported here: few fits need it.
        from trainer_cli.addons.watch.memory_report import note_tensors

        note_tensors(exception, trainer, self._run.path)

    def _file_of(self, rank: int) -> Path:
        """Where a rank writes what it does in a stall."""
        return self._run.path / f"stalled.rank{rank}.json"

    def _watch(self, trainer: Trainer, stall_s: float) -> None:
        """Look again and again, in the thread, until the fit ends."""
        group, tick_s = trainer.strategy.group, min(stall_s / 10, _LONGEST_TICK_S)
        log_file = self._run.path / ("train.log" if group.is_main else f"train.rank{group.rank}.log")
        place, ticks = None, 0
        while not self._stopped.wait(tick_s):
            # By ticks, not by the clock, which goes on while the process is suspended.
            ticks += 1
            if (now := _read_place(trainer)) != place:
                place, ticks = now, 0
            elif ticks * tick_s >= stall_s > (ticks - 1) * tick_s:
                # A disk that is full may be what the step waits for, and must not end this thread.
                with suppress(OSError):
                    with open(log_file, "a", encoding="utf-8") as file:
                        faulthandler.dump_traceback(file)
                    write_json(self._file_of(group.rank), describe_main_thread())
                if group.is_main:
                    # The others notice it within a tick or two of this rank.
                    self._stopped.wait(3 * tick_s if group.world_size > 1 else 0)
                    missing = name_missing([read_json(self._file_of(rank)) for rank in range(group.world_size)])
                    text = f"no progress for {stall_s:g} s while {now[0]} after step {now[1]}: {missing}"
                    log.warning("%s; the stacks of all threads are in %s", text, log_file)
                    self._notifier.tell("stall", f"makes {text}", step=now[1])


def _read_place(trainer: Trainer) -> tuple[Any, ...]:
    """Where the training is: plain attributes that its loops set anyway."""
    progress, validation = trainer.progress, trainer.evaluating
    batch = None if validation is None else (validation.name, validation.batch_idx)
    return trainer.metric_logger.activity or "training", progress.step, progress.batch, batch


def describe_main_thread() -> dict[str, Any]:
    """The line of the user's code in which the main thread is, and whether it waits for other ranks."""
    stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])[::-1]
    line = next((line for line in stack if not line.filename.startswith(_LIBRARIES)), stack[0])
    waits = any(part in line.filename for line in stack[:8] for part in _IN_COLLECTIVE)
    return {"waits": waits, "where": f"{line.filename}:{line.lineno} in {line.name}"}


def name_missing(reports: Sequence[dict[str, Any] | None]) -> str:
    """The ranks for which others wait, by what each described; None: it has not answered. Of one rank, where it is."""
    if len(reports) == 1:
        return "its stack could not be written" if reports[0] is None else f"at {reports[0]['where']}"
    texts = [
        f"rank {rank} " + ("does not answer" if report is None else f"is at {report['where']}")
        for rank, report in enumerate(reports)
        if report is None or not report["waits"]
    ]
    return f"{', '.join(texts)}; {len(reports) - len(texts)} wait for other ranks"
