"""End the error of a failed step with what to do: how to resume the run, and the commands that look at the step."""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.callbacks import CheckpointerCallback
from trainer_cli.data import LOADING
from trainer_cli.errors import LOST, NotFiniteError, TrainError
from trainer_cli.files import read_rows
from trainer_cli.layout import SWEEP_FOLDER
from trainer_cli.parts import FAILED_EVALUATION, FAILED_STEP
from trainer_cli.running.risen_loss import find_risen_loss, is_before_rise, read_losses
from trainer_cli.runs import RunDir
from trainer_cli.state import are_finite
from trainer_cli.terminal import format_count
from trainer_cli.trainer import Callback, Interruption

if TYPE_CHECKING:
    from trainer_cli.trainer import Trainer

log = logging.getLogger(__name__)

_EVALUATING = f"while {Interruption.evaluating} "
"""Begins the note of an exception of an evaluation."""
_SMALLER_RATE = "optimizer.lr=… 'resume_allow=[optimizer.lr]'"
_OTHER_DATA = " ('resume_allow=[data]' where a key of data is changed for it)"
_OTHER_JOBS = "optimizer.lr is swept: replace this value by a smaller one, which is another job."


def advise_resume(error: NotFiniteError, run: Path, trainer: Trainer) -> None:
    """Add to the error of values that are not finite how to go on: after a loss that has risen not from there."""
    try:
        saver = trainer.checkpoint if isinstance(trainer.checkpoint, CheckpointerCallback) else None
        entries = [] if saver is None else [entry for entry in saver.retention.own() if entry.resumable]
        text = describe_resume(run, [entry.step for entry in entries], is_in_data=bool(error.rows))
    except (TrainError, OSError) as problem:
        # The run's error must not be replaced by one of its files.
        log.debug("the checkpoints were not looked up: %s", problem)
        return
    error.cure = f"{error.cure} {text}" if error.cure else text


def describe_resume(run: Path, steps: Sequence[int], *, is_in_data: bool = False) -> str:
    """How to go on with a run whose loss or weights are not finite.

    Args:
        steps: of the checkpoints with finite weights, oldest first; the last one is that of the next resume.
        is_in_data: whether the values of the batch were not finite.
    """
    if is_in_data:
        return f"Mend the sample; the same command then resumes the run{_OTHER_DATA}."
    if run.parent.name == SWEEP_FOLDER and any(pair.startswith("optimizer.lr=") for pair in run.name.split(",")):
        return _OTHER_JOBS
    if not steps:
        return "Start another run (name=OTHER), with a smaller optimizer.lr."
    losses = read_losses(read_rows(RunDir(run).metrics_file))
    risen = find_risen_loss(losses, steps[-1])
    if risen is None:
        return (
            f"The same command resumes it: change the cause, which may be a sample{_OTHER_DATA}, or a learning rate "
            f"that is too large: {_SMALLER_RATE}."
        )
    text = f"But {risen}, so its weights may be ruined: begin the run anew with optimizer.lr=… resume=anew"
    before = [step for step in steps if is_before_rise(losses, step)]
    if before:
        selector = shlex.quote(f"{run}@step{before[-1]}")
        text += f", or go back to before the rise with resume={selector} checkpoint.newer=trash {_SMALLER_RATE}"
    return f"{text}."


def suggest_replay(error: Exception, run: Path, trainer: Trainer) -> None:
    """Add the commands that look at the failed steps to an error, if they can be replayed.

    They join the cure of a `NotFiniteError`, and are a note of an exception that is not of this package. Other errors
    are about no step.
    """
    try:
        # Processes of several machines are started by a launcher, whose command is unknown.
        if trainer.strategy.group.machines > 1:
            return
        steps = _failed_steps(error, run, trainer.progress.step, trainer.loop.failed_step)
        # A worker's notes are lines of the message.
        is_of_sample = LOADING in "\n".join([str(error), *getattr(error, "__notes__", ())])
        text = None if steps is None else _describe_steps(run, *steps, loads=not is_of_sample)
        if not isinstance(error, TrainError) and _EVALUATING in "\n".join(getattr(error, "__notes__", [])):
            text = None if is_of_sample else _describe_evaluation(run, trainer.progress.step)
    except (TrainError, OSError) as problem:
        # The run's error must not be replaced by one of its files.
        log.debug("the failed step was not looked up: %s", problem)
        return
    if text is None:
        return
    if isinstance(error, NotFiniteError):
        # The cause is looked for before the run is resumed.
        error.cure = f"{text} {error.cure}" if error.cure else text
    else:
        error.add_note(text)


def note_lost(error: BaseException, trainer: Trainer) -> None:
    """Add to an exception that is not of this package how many steps are made again, or are lost."""
    if isinstance(error, TrainError):
        return
    step, newest = trainer.progress.step, None
    if isinstance(trainer.checkpoint, CheckpointerCallback):
        try:
            newest = trainer.checkpoint.retention.newest()
        except OSError as problem:
            log.debug("the checkpoints could not be listed: %s", problem)
            return
    if step == 0:
        text = "nothing, as no step was made"
    elif newest is None or newest.step == 0:
        text = f"{format_count(step, 'step')}, as no checkpoint was saved after step 0"
    elif newest.step >= step:
        text = f"nothing, as {newest.name} is saved; the same command continues from it"
    else:
        text = f"{format_count(step - newest.step, 'step')} after {newest.name}; the same command continues from it"
    error.add_note(f"{LOST} {text}")


class EvaluationCheck(Callback):
    """Warns of each validation metric the first time that it is not finite, with the command that names the sample."""

    def __init__(self, run: Path) -> None:
        self._run, self._named = run, set[str]()

    def logged_metrics(self) -> Iterable[str]:
        # It states that `on_after_evaluation` logs none.
        return ()

    def on_after_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        new = {name: value for name, value in metrics.items() if name not in self._named and not math.isfinite(value)}
        self._named.update(new)
        group = trainer.strategy.group
        if not new or not group.is_main:
            return
        step, end = trainer.progress.step, ""
        try:
            if not are_finite(trainer.trained):
                # No sample of this set is to blame.
                end = ", as the weights are not finite"
            elif group.machines == 1 and (command := _describe_evaluation(self._run, step)) is not None:
                end = f": {command}"
        except (TrainError, OSError) as problem:
            log.debug("the evaluation was not looked up: %s", problem)
        values = ", ".join(f"{name} is {value}" for name, value in new.items())
        log.warning("%s at step %d%s", values, step, end)


def _describe_steps(run: Path, first: int, last: int, *, loads: bool) -> str | None:
    describe = FAILED_STEP.find()
    return None if describe is None else describe(run, first, last, loads=loads)


def _describe_evaluation(run: Path, step: int) -> str | None:
    describe = FAILED_EVALUATION.find()
    return None if describe is None else describe(run, step)


def _failed_steps(error: Exception, run: Path, step: int, failed_step: int | None) -> tuple[int, int] | None:
    """The first and the last of the steps in which an error may have begun; None if it is about no step.

    Args:
        step: the number of completed steps.
        failed_step: the step that was being made; None: the error came between two steps.
    """
    if isinstance(error, NotFiniteError):
        return _first_not_finite(read_rows(RunDir(run).metrics_file), step)
    if failed_step is None or isinstance(error, TrainError):
        return None
    return failed_step, failed_step


def _first_not_finite(records: list[dict[str, Any]], step: int) -> tuple[int, int]:
    """The steps after the last finite record, up to the first record that is not finite, or to `step`."""
    first, last = 1, step
    for at, loss in read_losses(records).items():
        if at > step:
            continue
        if not math.isfinite(loss):
            last = min(last, at)
        elif at < step:
            first, last = at + 1, step
    return first, last
