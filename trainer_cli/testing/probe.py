"""One process of a resume check: its plan, and the run of it, in an interpreter that forks such processes."""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from trainer_cli.errors import ExitCode, TrainError


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


ERROR = "train: error: "


def main(path: str) -> int:
    """Run the plan in a file, and return the exit code of the fit."""
    from trainer_cli.config.compose import from_yaml
    from trainer_cli.run.fit import fit

    plan = Plan.read(path)
    try:
        composed = from_yaml(plan.config, trusted=True, config_dir=plan.config_dir)
        with ExitStack() as stack:
            if plan.calls is not None:
                from trainer_cli.testing.calls import recorded

                stack.enter_context(recorded(plan.calls, composed.project_root))
            return fit(composed)
    except TrainError as error:
        print(f"{ERROR}{error}", file=sys.stderr)
        return int(error.exit_code)
    except Exception:
        traceback.print_exc()
        return int(ExitCode.FAILED)


def serve() -> None:
    """Import everything, then fork a process for each line of JSON, and print its exit code.

    No thread may run and no tensor be computed here, so that the children can fork safely.
    """
    import torch._dynamo  # noqa: F401  the first optimizer imports it

    import trainer_cli.config.compose
    import trainer_cli.run.build
    import trainer_cli.run.fit
    import trainer_cli.testing.recorder  # noqa: F401

    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            code = int(ExitCode.FAILED)
            try:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                file = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(file, 1)
                os.dup2(file, 2)
                os.chdir(asked["cwd"])
                code = main(asked["plan"])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
