"""Plan a sweep: compose and check the config of every job before anything is written."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer_cli.config import search_path
from trainer_cli.config.compose import Composed, compose, freeze, from_yaml
from trainer_cli.config.overrides import COMMAND_LINE
from trainer_cli.config.schema import CheckpointConfig, ParallelConfig
from trainer_cli.config.sweep import Job, jobs
from trainer_cli.errors import ConfigError, TrainError, UserError, raise_all
from trainer_cli.run.compose_fit import refuse_shipped_default
from trainer_cli.run.find_runs import refuse_nested
from trainer_cli.run.resume import changes_since, folder_of_checkpoints, holds_training, refuse_changes
from trainer_cli.run.run_dir import RunDir, RunStatus
from trainer_cli.run.start import refuse_no_optimizer
from trainer_cli.trainer.stopping import reopens


@dataclass(frozen=True, slots=True)
class Planned:
    """A job whose config has been checked, before anything of it is written."""

    job: Job
    run: RunDir
    base: Path
    """The directory that the run would have outside the sweep."""
    frozen: str
    reopened: bool
    """Whether a finished run trains further under a longer config."""
    level: str
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    folders: Mapping[str, str] = field(default_factory=dict)
    """Key -> folder in which it saves or copies checkpoints outside of its directory."""

    @property
    def done(self) -> bool:
        """Whether nothing is left to do, by what the run's directory says."""
        return not self.reopened and self.run.read_summary().get("status") == RunStatus.finished


def plan(
    arguments: Sequence[str], *, config_dir: Path | None = None, config_name: str = "config", cwd: Path | None = None
) -> list[Planned]:
    """All jobs in order, each composed and checked; nothing is written.

    Raises:
        ConfigError: every mistake of every job, with the values that it is about; or jobs that do not differ.
    """
    search = search_path.SearchPath.of(config_dir, config_name, cwd)

    def options(group: str) -> list[str] | None:
        return list(search_path.options(search.dirs, group)) if search_path.is_group(search.dirs, group) else None

    planned: list[Planned] = []
    mistakes: dict[str, list[tuple[Job, TrainError]]] = {}
    found = jobs(arguments, options)
    for job in found:
        try:
            composed = compose(job.overrides, config_dir=config_dir, config_name=config_name, cwd=cwd)
            planned.append(_planned(job, composed))
        except TrainError as error:
            mistakes.setdefault(str(error), []).append((job, error))
    for same in mistakes.values():
        if len(same) == len(found):
            raise same[0][1]
    raise_all([_of_jobs(same) for same in mistakes.values()])
    _refuse_equal(planned)
    _refuse_one_folder(planned)
    return planned


def folder_of(bases: Sequence[Path]) -> Path:
    """`BASE/sweep`; where the jobs have several bases, `COMMON/A,B/sweep`, from what differs between them."""
    different = sorted(set(bases))
    if len(different) == 1:
        return different[0] / "sweep"
    common = Path(os.path.commonpath(different))
    ends = [re.sub(r"[^A-Za-z0-9_.-]", "-", str(base.relative_to(common))) for base in different]
    name = ",".join(ends)
    if len(name) > 100:
        digest = hashlib.sha256("\n".join(map(str, different)).encode()).hexdigest()[:12]
        name = f"{name[:87]}-{digest}"
    return common / name / "sweep"


def _planned(job: Job, composed: Composed) -> Planned:
    refuse_shipped_default(composed)
    refuse_no_optimizer(composed)
    config = composed.config
    if config.resume not in ("auto", "must", "never"):
        raise UserError(
            f"resume={config.resume} is one run, and a sweep is many",
            where="resume",
            cure="Leave resume= out: the same command again resumes.",
        )
    for key in composed.of_the_moment:
        raise ConfigError(
            f"{key} holds ${{now:…}}, different at each start, so a sweep could not be resumed",
            source=composed.where(key),
            hint="Leave the time out: each job has a directory of its own.",
        )
    end = f"sweep/{job.key}"
    run = RunDir(Path(config.run_dir) / end)
    reopened = False
    if run.exists_as_run():
        stored = from_yaml(run.config_file, trusted=True, missing_ok=True)
        folder = folder_of_checkpoints(run, config.checkpoint, stored.config.checkpoint)
        if holds_training(run, folder, config.checkpoint):
            refuse_changes(changes_since(run, stored, composed), composed, run.path)
        reopened = reopens(stored.config.loop, config.loop)
    else:
        refuse_nested(run.path)
        composed.check_targets()
    frozen = freeze(composed, end)
    return Planned(
        job,
        run,
        Path(config.run_dir),
        frozen,
        reopened,
        config.logging.level,
        config.parallel,
        _folders(config.checkpoint),
    )


def _folders(checkpoint: CheckpointConfig) -> dict[str, str]:
    folders = {"checkpoint.folder": checkpoint.folder, "checkpoint.copy_to.folder": checkpoint.copy_to.folder}
    return {key: folder for key, folder in folders.items() if folder is not None and checkpoint.enabled}


def _of_jobs(same: Sequence[tuple[Job, TrainError]]) -> ConfigError:
    """One mistake, with the swept values of the first job that has it."""
    job, error = same[0]
    more = f" and {len(same) - 1} more" if len(same) > 1 else ""
    return ConfigError(f"{_reported(job)}{more}: {error}")


def _reported(job: Job) -> str:
    return " ".join(f"{key}={text}" for key, text in job.swept.items())


def _refuse_one_folder(planned: Sequence[Planned]) -> None:
    """Refuse jobs that save their checkpoints in one folder."""
    seen: dict[str, Job] = {}
    for one in planned:
        for key, folder in one.folders.items():
            other = seen.setdefault(folder, one.job)
            if other is not one.job:
                raise ConfigError(
                    f"{_reported(other)} and {_reported(one.job)} both save in {folder}",
                    location=key,
                    hint="Leave it out: each job of a sweep has a directory of its own; or put the swept key into it.",
                )


def _refuse_equal(planned: Sequence[Planned]) -> None:
    """Refuse jobs whose configs do not differ: the swept key does nothing, or is set again by another."""
    seen: dict[str, Job] = {}
    for one in planned:
        text = re.sub(r"(?m)^run_dir: .*\n", "", one.frozen, count=1)
        other = seen.setdefault(text, one.job)
        if other is not one.job:
            raise ConfigError(
                f"{_reported(other)} and {_reported(one.job)} give the same config",
                source=COMMAND_LINE,
                hint="Sweep a key that nothing else sets.",
            )
