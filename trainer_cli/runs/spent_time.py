"""Where the time of a run went, from its files (`goodput.py` has the terms)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer_cli.catalog import Spent
from trainer_cli.environment import unix
from trainer_cli.files import read_last_row, read_rows
from trainer_cli.goodput import Activity, Seconds, complete_killed, read_seconds, sum_attempts

if TYPE_CHECKING:
    from trainer_cli.runs.run_dir import RunDir


def seconds_of(attempt: Mapping[str, Any]) -> Seconds:
    """The seconds of an attempt by activity; if an earlier version recorded it, all count as training."""
    seconds = read_seconds(attempt.get("time_s"))
    return {Activity.training: float(attempt.get("wall_time_s") or 0.0)} if seconds is None else seconds


def seconds_of_killed(run: RunDir, attempt: Mapping[str, Any]) -> dict[str, float]:
    """The seconds of a killed attempt until its last record or save, by activity.

    What its newest save has not noted counts as training. Call it before the next attempt writes a record.
    """
    started = unix(attempt.get("started"))
    if started is None:
        return {}
    saves = Spent.noted(read_rows(run.history_file), started)
    # Not by the times of the files, which may be copies, nor by all lines of the history: removals by hand come later.
    ends = [time for time, _, _ in saves[-1:]]
    if isinstance(recorded := read_last_row(run.metrics_file).get("time"), int | float):
        ends.append(float(recorded))
    return complete_killed(saves[-1][2].time_s if saves else {}, max(ends, default=started) - started)


def sum_until(earlier: Sequence[Mapping[str, Any]], spent: Spent, lasted_s: float = 0.0) -> dict[str, float]:
    """The seconds of a run by activity, until a save of its last attempt, or that attempt's end.

    Args:
        earlier: the attempts before that.
        lasted_s: seconds of the last attempt, if it is known to have ended.
    """
    return sum_attempts([*map(seconds_of, earlier), complete_killed(spent.time_s, lasted_s)], spent.kept_s)
