"""The plan of one process of a resume check: its config, its trace, and where it is stopped."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path


class When(StrEnum):
    """The places at which a probe can be stopped."""

    mid_epoch = "mid_epoch"
    second_epoch = "second_epoch"
    """In the middle of an epoch that is not the first."""
    epoch_end = "epoch_end"
    evaluated = "evaluated"
    """After an evaluation, before its checkpoint."""
    at_once = "at_once"
    """Started, and stopped before it makes a step."""
    accumulating = "accumulating"
    """Killed after backward, before the optimizer step."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a process is stopped: at the first such place after `after` of its steps, at the latest at step `by`."""

    when: When
    after: int = 0
    by: int = 0
    twice: bool = False
    """After the restart it is stopped again at once, and restarted."""


def chains(steps: int) -> tuple[tuple[Stop, ...], ...]:
    """Independent runs with several stops each, which together cover every place."""
    asked = (
        Stop(When.mid_epoch, after=3, by=steps // 3),
        Stop(When.second_epoch, after=2, by=2 * steps // 3, twice=True),
    )
    killed = (
        Stop(When.accumulating, after=SAVED_STEP + 1, by=SAVED_STEP + 4),
        Stop(When.epoch_end, after=1, by=steps // 2),
        Stop(When.evaluated, after=2, by=steps - 1),
    )
    return asked, killed


SAVED_STEP = 1
"""The step of the checkpoint that a killed run resumes."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of one process, passed to it as a file."""

    config: Path
    """The whole config, composed once for all processes."""
    trace: Path
    config_dir: Path | None = None
    stop: Stop | None = None
    calls: Path | None = None
    """The file for calls of clocks and unseeded generators; None: they are not recorded."""

    def write(self, path: Path) -> None:
        """Put it into a file."""
        path.write_text(json.dumps(asdict(self), default=str), "utf-8")

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """Take it from a file."""
        found = json.loads(Path(path).read_text("utf-8"))
        paths = {key: None if found[key] is None else Path(found[key]) for key in ("config_dir", "calls")}
        stop = None if found["stop"] is None else Stop(**{**found["stop"], "when": When(found["stop"]["when"])})
        return cls(Path(found["config"]), Path(found["trace"]), stop=stop, **paths)
