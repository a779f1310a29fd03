"""The time of one process, divided among activities."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from trainer_cli.goodput import Activity


class TimeAccount:
    """The seconds of one process by activity, and the seconds of kept training over the whole run.

    It begins with `Activity.start`.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(Activity, 0.0)
        self._activity = Activity.start
        self._since = time.monotonic()
        self.data_s = 0.0
        """Seconds of waiting for batches; taken out of `training`."""
        self._kept_before_s, self._training_before_s = 0.0, 0.0
        """Training that was kept when the present state was loaded, and that this process had done then."""

    def count_from(self, began: float) -> None:
        """Count the time since `began`, a value of `time.monotonic`, as part of the start."""
        self._seconds[Activity.start] = time.monotonic() - began
        self._since = time.monotonic()

    def enter(self, activity: Activity) -> Activity:
        """Begin an activity, and return the one that ends by it."""
        now, previous = time.monotonic(), self._activity
        self._seconds[previous] += now - self._since
        self._activity, self._since = activity, now
        return previous

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Count the time inside the block for an activity."""
        previous = self.enter(activity)
        try:
            yield
        finally:
            self.enter(previous)

    def seconds(self) -> dict[str, float]:
        """Seconds of this process until now, by activity."""
        self.enter(self._activity)
        training_s = self._seconds[Activity.training] - self.data_s
        seconds = {**self._seconds, Activity.training: training_s, Activity.data: self.data_s}
        return {str(activity): round(max(0.0, amount), 3) for activity, amount in seconds.items()}

    def kept_s(self) -> float:
        """Seconds of training over all attempts that have led to the present state."""
        training_s = self.seconds()[Activity.training]
        return round(self._kept_before_s + training_s - self._training_before_s, 3)

    def go_on_from(self, kept_s: float) -> None:
        """A state was loaded that `kept_s` seconds of training have led to."""
        self._kept_before_s, self._training_before_s = kept_s, self.seconds()[Activity.training]
