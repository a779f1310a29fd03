"""The parts of add-ons that fits ask for, with what plans and starts them: sweeps, processes, observers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from trainer_cli.errors import UserError
from trainer_cli.parts import AddOnPart

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from trainer_cli.auto_values import AutoDecision
    from trainer_cli.config import Composed
    from trainer_cli.goodput import ProbedTimes
    from trainer_cli.parallel import ProcessGroup
    from trainer_cli.running import Start
    from trainer_cli.runs import RunDir
    from trainer_cli.schema import TrainConfig
    from trainer_cli.trainer import Callback


class AtEnd(Protocol):
    """Acts when a fit has ended, with its config, the error that ended it, and whether it has recorded an attempt."""

    def __call__(self, config: TrainConfig, error: BaseException | None, *, has_begun: bool) -> None: ...


AT_END: AddOnPart[AtEnd] = AddOnPart("fit.at_end")
"""Does something at the end of a fit, in its first process, unless a second Ctrl-C has ended it. For `train fit` and
the jobs of a sweep."""


class FitInChildren(Protocol):
    def __call__(self, config: TrainConfig, again: Sequence[str], *, supervised: bool) -> int: ...


FIT_IN_CHILDREN: AddOnPart[FitInChildren] = AddOnPart("fit.in_children")
"""Fits in child processes: restarted ones, or ranks. For `restarts.max` and `parallel.processes_per_node`."""


class JobLimits(NamedTuple):
    """How many jobs run at a time, and where: the values of `--jobs`, `--devices` and `--jobs-per-device`."""

    at_once: int | None = None
    """None: one, or all under Slurm, or as many as the devices that were asked for take."""
    devices: str | None = None
    per_device: int | None = None

    @classmethod
    def read(cls, args: Namespace) -> JobLimits:
        """The values among the arguments of a command.

        Raises:
            UserError: a number is less than 1.
        """
        for flag, value in (("--jobs", args.jobs), ("--jobs-per-device", args.jobs_per_device)):
            if value is not None and value < 1:
                raise UserError(f"{flag} is {value}, but it must be at least 1")
        return cls(args.jobs, args.devices, args.jobs_per_device)


NO_LIMITS = JobLimits()


class RunSweep(Protocol):
    def __call__(
        self,
        arguments: Sequence[str],
        *,
        config_dir: Path | None = None,
        config_name: str = "config",
        limits: JobLimits = NO_LIMITS,
        submit: Sequence[str] = (),
    ) -> int: ...


RUN_SWEEP: AddOnPart[RunSweep] = AddOnPart("fit.sweep")
"""Runs the jobs of a sweep. For `train fit -m`."""


class PlannedJob(Protocol):
    """A job of a sweep, and the overrides of its config."""

    @property
    def key(self) -> str: ...

    @property
    def overrides(self) -> Sequence[str]: ...


class PlanJobs(Protocol):
    def __call__(
        self, arguments: Sequence[str], *, config_dir: Path | None = None, config_name: str = "config"
    ) -> Sequence[PlannedJob]: ...


PLAN_JOBS: AddOnPart[PlanJobs] = AddOnPart("plan.sweep")
"""Composes and checks the jobs of a sweep. For `train plan -m`."""


class FindAuto(Protocol):
    def __call__(
        self, composed: Composed, start: Start, group: ProcessGroup
    ) -> tuple[Composed, dict[str, AutoDecision]]: ...


PROBE: AddOnPart[Callable[..., ProbedTimes]] = AddOnPart("plan.probe")
"""Times some steps of a composed config. For `train plan --probe`."""
RUN_JOBS: AddOnPart[Callable[..., str | None]] = AddOnPart("jobs.run")
"""Runs jobs that another add-on has made (`FrozenJob` of `processes`). Returns the signal that stopped them."""
OBSERVE_FIT: AddOnPart[Callable[[TrainConfig, RunDir], Mapping[str, Callback]]] = AddOnPart("observe.fit")
"""Makes callbacks that watch a fit, from its config and run directory."""
FIND_AUTO: AddOnPart[FindAuto] = AddOnPart("fit.find_auto")
"""Finds the values of a config that are `auto`. For a fit."""
LAUNCH_RANKS: AddOnPart[Callable[[Sequence[str], int], int]] = AddOnPart("process.launch_ranks")
"""Runs `train` with these arguments in so many ranks of this machine. Needed to replay a run of more processes."""
SERVE_FORKS: AddOnPart[Callable[[Sequence[str]], tuple[int, int]]] = AddOnPart("process.serve_forks")
"""Makes this process a server of forks. Returns in each the descriptor of its report, and the server's process number.
For `python -m trainer_cli`."""
