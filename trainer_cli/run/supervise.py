"""`restarts.max`: start `train fit` in a process, and start it again from its checkpoint after a failure.

    this process:  start a child -> wait -> ask `verdict` -> pause -> start the next child …
    the child:     an ordinary `train fit`, which resumes; it ends when this process is gone

A signal is handed on to the child, which saves and exits with 75; during a pause it ends this process with 75.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from trainer_cli.checkpoint.integrity import catalog_of
from trainer_cli.checkpoint.storage.url_path import as_path
from trainer_cli.config.schema import TrainConfig, check_duration
from trainer_cli.errors import ExitCode
from trainer_cli.run.children import Child, own_command
from trainer_cli.run.run_dir import RunDir
from trainer_cli.trainer.duration import Unit
from trainer_cli.trainer.messages import to_console
from trainer_cli.trainer.restarts import Ended, verdict

log = logging.getLogger(__name__)


def supervise(config: TrainConfig, arguments: Sequence[str]) -> int:
    """Fit in processes of their own until one is done or cannot be mended; the last exit code.

    Args:
        arguments: of each process, after `train`.
    """
    to_console(config.logging.level)
    backoff = check_duration("restarts.backoff", config.restarts.backoff, units=(Unit.SECOND,))
    backoff_s = 0.0 if backoff is None else float(backoff.value)
    command = own_command(arguments)
    run, failures = RunDir(config.run_dir), 0
    folder = run.checkpoints_folder if config.checkpoint.folder is None else as_path(config.checkpoint.folder)
    with Child() as child:
        while True:
            before = _newest_step(folder)
            code = child.run(command)
            if child.stopped:
                return code if code >= 0 else int(ExitCode.STOPPED_EARLY)
            reason = str(run.attempts[-1].get("reason") or "") if run.attempts else ""
            found = verdict(
                Ended(code, reason, progressed=_newest_step(folder) > before),
                failures=failures,
                most=config.restarts.max,
                backoff_s=backoff_s,
            )
            failures = found.failures
            if found.pause_s is None:
                if code not in (ExitCode.DONE, ExitCode.STOPPED_EARLY):
                    log.error("not restarted: %s", found.why)
                return code if code >= 0 else int(ExitCode.FAILED)
            log.warning("the attempt failed (%s); restarting in %g s", found.why, found.pause_s)
            if child.pause(found.pause_s):
                return int(ExitCode.STOPPED_EARLY)


def _newest_step(folder: Path) -> int:
    """The step of the newest checkpoint that a resume may take; -1 without any."""
    return max((entry.step for entry in catalog_of(folder).entries() if entry.resumable), default=-1)
