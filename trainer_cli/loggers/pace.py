"""Position, rate and remaining time of a training, for displays."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from trainer_cli.loggers.base import Now, Pauses, RunFacts
from trainer_cli.terminal import format_rate

_WINDOW_S = 60.0
"""The rate is measured over the last minute, at first over half of the time, since a run starts slowly; or over the
last two steps if they took longer."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """The progress at a time; `train_s` is the time without pauses. Both in seconds."""

    time: float
    train_s: float
    step: int
    samples: int


class Pace:
    """Rate and remaining time of a training, without the pauses for evaluations and saves.

    Args:
        start_step: the first step of this process.
    """

    def __init__(self, start_step: int) -> None:
        self._start_step = start_step
        self._marks: deque[_Mark] = deque()
        self._first_s = 0.0
        """The time of the first reading."""

    def begin(self, now: Now, time: float) -> None:
        """Measure from this progress and time on, instead of from the end of the first step."""
        self._first_s = time
        self._marks.append(_Mark(time, time, now.step, now.samples))

    def read(self, now: Now, time: float) -> None:
        """Record the progress at a time in seconds, if a step has ended since the last call."""
        if now.step == (self._marks[-1].step if self._marks else self._start_step):
            return
        if not self._marks:
            self._first_s = time
        paused = sum(pause.seconds for pause in now.pauses)
        self._marks.append(_Mark(time, time - paused, now.step, now.samples))
        # Two marks stay, because a rate needs a difference, however long a step takes.
        window_s = min(_WINDOW_S, (time - self._first_s) / 2)
        while len(self._marks) > 2 and self._marks[1].time < time - window_s:
            self._marks.popleft()

    @property
    def begun(self) -> bool:
        """Whether a step of this process has ended."""
        return bool(self._marks)

    @property
    def steps_per_s(self) -> float | None:
        """Optimizer steps per second of training; None before the second reading."""
        return self._per_s(self._marks[-1].step - self._marks[0].step) if self._marks else None

    @property
    def rate(self) -> tuple[float, str]:
        """Samples per second and `samples`, or `steps` if samples are not counted; 0 before two readings."""
        samples = self._per_s(self._marks[-1].samples - self._marks[0].samples) if self._marks else None
        return (samples, "samples") if samples else (self.steps_per_s or 0.0, "steps")

    @property
    def shown(self) -> str:
        """The rate as text, such as `1,234 samples/s`; empty before two readings."""
        number, unit = self.rate
        return f"{format_rate(number)} {unit}/s" if number else ""

    def end_s(self, now: Now, total_steps: int | None, time: float) -> tuple[float, bool] | None:
        """Seconds until this process ends, and whether `max_time` ends it before the run is complete; None: unknown."""
        if total_steps is None and now.share:
            # As if the remaining steps were as large, in the unit of max_duration, as those until now.
            total_steps = round(now.step / now.share)
        eta_s = None if total_steps is None else self.eta_s(now, total_steps, time)
        time_left_s = now.time_left_s
        if time_left_s is not None and (eta_s is None or time_left_s < eta_s):
            return time_left_s, True
        return None if eta_s is None else (eta_s, False)

    def eta_s(self, now: Now, total_steps: int, time: float) -> float | None:
        """Seconds until the last step, including future evaluations and saves; None if it is unknown."""
        rate = self.steps_per_s
        if not rate:
            return None
        last_mark = self._marks[-1]
        remaining_s = (total_steps - last_mark.step) / rate
        remaining_s += sum(_future_pauses_s(pause, self._start_step, total_steps) for pause in now.pauses)
        # During an evaluation or a save no step progresses, so the time since the last step is not subtracted.
        return remaining_s if now.activity else max(remaining_s - (time - last_mark.time), 0.0)

    def _per_s(self, count: int) -> float | None:
        """A count since the first mark, per second of training; None if no time has passed."""
        seconds = self._marks[-1].train_s - self._marks[0].train_s
        return count / seconds if seconds > 0 else None


def _future_pauses_s(pause: Pauses, start_step: int, total_steps: int) -> float:
    """Seconds of future pauses, if they are as frequent and as long as before."""
    steps = pause.last_step - start_step
    if not pause.count or steps <= 0:
        return 0.0
    return (total_steps - pause.last_step) * pause.count // steps * pause.seconds / pause.count


def position(step: int, facts: RunFacts) -> str:
    """`step 1,234/10,000`."""
    return f"step {step:,}" if facts.total_steps is None else f"step {step:,}/{facts.total_steps:,}"
