"""Rate and time left of a training, from a few readings of its counts; pauses for evaluations and saves set apart."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from trainer_cli.loggers.base import Now, Pauses

_WINDOW_S = 60.0
"""The rate is that of the last minute, or of the last two steps if they took longer."""


@dataclass(frozen=True, slots=True)
class _Mark:
    time: float
    train_s: float
    step: int
    samples: int


class Pace:
    """How fast a training goes, and how long it will still take.

    Args:
        start_step: the step that this process began at.
    """

    def __init__(self, start_step: int) -> None:
        self._start_step = start_step
        self._marks: deque[_Mark] = deque()

    def begin(self, now: Now, time: float) -> None:
        """Take this moment as the first, instead of the end of the first step: that one may be slow."""
        self._marks.append(_Mark(time, time, now.step, now.samples))

    def read(self, now: Now, time: float) -> None:
        """Note the counts of a moment; only steps that were made since the last call count."""
        if now.step == (self._marks[-1].step if self._marks else self._start_step):
            return
        paused = sum(pause.seconds for pause in now.pauses)
        self._marks.append(_Mark(time, time - paused, now.step, now.samples))
        while len(self._marks) > 2 and self._marks[1].time < time - _WINDOW_S:
            self._marks.popleft()

    @property
    def begun(self) -> bool:
        """Whether a step of this process is done."""
        return bool(self._marks)

    @property
    def steps_per_s(self) -> float | None:
        """Optimizer steps per second of training; None before the second reading."""
        return self._per_s(self._marks[-1].step - self._marks[0].step) if self._marks else None

    @property
    def shown(self) -> str:
        """Samples, or steps if samples are not counted, per second of training; empty before the second reading."""
        samples = self._per_s(self._marks[-1].samples - self._marks[0].samples) if self._marks else None
        if samples:
            return f"{rate(samples)} samples/s"
        return f"{rate(self.steps_per_s)} steps/s" if self.steps_per_s else ""

    def left_s(self, now: Now, total_steps: int, time: float) -> float | None:
        """Seconds until the last step, with the evaluations and saves to come; None if that is not known yet."""
        rate = self.steps_per_s
        if not rate:
            return None
        last = self._marks[-1]
        left = (total_steps - last.step) / rate
        left += sum(_pauses_left(pause, self._start_step, total_steps) for pause in now.pauses)
        return left if now.activity else max(left - (time - last.time), 0.0)

    def _per_s(self, count: int) -> float | None:
        seconds = self._marks[-1].train_s - self._marks[0].train_s
        return count / seconds if seconds > 0 else None


def _pauses_left(pause: Pauses, start_step: int, total_steps: int) -> float:
    """Seconds of the pauses to come, if they come as often as before and take as long."""
    made = pause.last_step - start_step
    if not pause.count or made <= 0:
        return 0.0
    return (total_steps - pause.last_step) * pause.count // made * pause.seconds / pause.count


def rate(value: float) -> str:
    """A number per second, with two digits or more."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def clock(seconds: float) -> str:
    """Minutes and seconds as `2:05`, or hours, minutes and seconds as `1:02:05`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
