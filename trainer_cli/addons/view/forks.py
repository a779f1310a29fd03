"""Which runs began with a checkpoint of another run: a fork, by `ckpt=`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trainer_cli.bounds import is_count


class Fork(NamedTuple):
    """The checkpoint with which a run began."""

    parent: int
    """Index of the run that saved it."""
    step: int
    shift: int
    """Steps of the parent before step 0 of the fork; 0 if the fork counts the parent's steps on."""


def recorded_fork(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `describe_fork` has recorded in the summary of a run; empty for a run that is no fork."""
    # The last one: a run that was killed before its first save has loaded the checkpoint again.
    recorded = [attempt["forked_from"] for attempt in summary.get("attempts") or () if "forked_from" in attempt]
    return recorded[-1] if recorded else {}


def forks_among(summaries: Sequence[Mapping[str, Any]]) -> dict[int, Fork]:
    """Those of the runs with these summaries that are forks of another one of them."""
    index_of = {
        summary["run_id"]: index for index, summary in reversed([*enumerate(summaries)]) if summary.get("run_id")
    }
    forks = {}
    for index, summary in enumerate(summaries):
        fork = recorded_fork(summary)
        parent = index_of.get(str(fork.get("run_id")), index)
        if parent != index and is_count(fork.get("step")) and is_count(fork.get("shift")):
            forks[index] = Fork(parent, fork["step"], fork["shift"])
    return forks


def beside_parents(summaries: Sequence[Mapping[str, Any]]) -> list[int]:
    """The order of the runs in which each fork comes after its parent, and the others as they are."""
    forks = forks_among(summaries)
    children: dict[int, list[int]] = {}
    for run, fork in forks.items():
        children.setdefault(fork.parent, []).append(run)
    order: dict[int, None] = {}
    # Those that are no fork first: a circle, which no run can make, has none, and is appended as it is.
    roots = [run for run in range(len(summaries)) if run not in forks]
    # A stack: its last run is next, so that the children of a run follow it at once.
    stack = [*roots, *forks][::-1]
    while stack:
        if (run := stack.pop()) not in order:
            order[run] = None
            stack += children.get(run, [])[::-1]
    return list(order)
