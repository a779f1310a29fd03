"""Compare the records of a replay with those in `metrics.jsonl`, bit for bit but for what depends on the clock."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainer_cli.loggers import JsonlLogger, Logger, Record
from trainer_cli.patterns import matches

_CLOCKED = ("time", "*_per_s", "*/time/*", "*/throughput/*", "*/memory/*", "*seconds*")
_COUNTS = {"step", "epoch"}
"""Keys that every record has: alone they prove nothing."""


@dataclass(frozen=True, slots=True)
class RecordDifference:
    """The first value of a record that differs. `replayed` is None if the replay has no such key."""

    step: int
    key: str
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        replayed = "missing" if self.replayed is None else self.replayed
        return f"step {self.step}: {self.key} is {replayed}, and the run recorded {self.recorded}"


class RecordComparison(Logger):
    """The records of a run, and those of a replay, whose logger this is.

    Args:
        records: lines of `metrics.jsonl`.
        after: the step after which records are compared.
        without: further globs of keys that are not compared.
        replayed: lines that a replay has written.
    """

    def __init__(
        self,
        records: Iterable[Mapping[str, Any]],
        *,
        after: int,
        without: Iterable[str] = (),
        replayed: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self._after, self._without = after, tuple(without)
        self._recorded = group_by_step(records)
        self._replayed = group_by_step(replayed)

    def log(self, record: Record) -> None:
        if record.metrics or not record.has_media:
            # As `metrics.jsonl` would hold it. A step may have several, which count as one.
            self._replayed.setdefault(record.step, {}).update(json.loads(JsonlLogger.encode(record)))

    def steps(self, last: int | None = None) -> list[int]:
        """The steps, up to `last`, whose records hold something to compare."""
        return sorted(
            step
            for step, record in self._recorded.items()
            if step > self._after and (last is None or step <= last) and set(self._keys(record)) - _COUNTS
        )

    def differences(self, last: int, *, ended: bool = True) -> Iterator[RecordDifference]:
        """The first difference of each record that differs, by step.

        What the replay records besides is ignored: callbacks may have been added to it.

        Args:
            ended: False: more may be added to the replayed record of the last step.
        """
        for step in self.steps(last):
            recorded, replayed = self._recorded[step], self._replayed.get(step, {})
            for key in self._keys(recorded):
                if key not in replayed and step == last and not ended:
                    continue
                if recorded[key] != replayed.get(key):
                    yield RecordDifference(step, key, recorded[key], replayed.get(key))
                    break

    def _keys(self, record: Mapping[str, Any]) -> list[str]:
        return [key for key in record if not is_clocked(key) and not any(matches(key, glob) for glob in self._without)]


def is_clocked(name: str) -> bool:
    """Whether a value of a record or of a state differs from run to run: a time, a rate, memory."""
    return any(matches(name, glob) for glob in _CLOCKED)


def group_by_step(records: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The records by step; those of one step are one."""
    steps: dict[int, dict[str, Any]] = {}
    for record in records:
        if isinstance(step := record.get("step"), int):
            steps.setdefault(step, {}).update(record)
    return steps
