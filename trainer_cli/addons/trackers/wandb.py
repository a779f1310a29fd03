"""Weights & Biases: all attempts of a run are one run of the service. Needs the extra `wandb`."""

from __future__ import annotations

import logging
import os
from typing import Any

from trainer_cli.addons.trackers.media import convert_media
from trainer_cli.addons.trackers.service_id import read_id, save_id
from trainer_cli.loggers import Logger, Record, RunFacts, import_extra
from trainer_cli.steps import RunStatus

log = logging.getLogger(__name__)

STEP = "step"
"""The metric that charts have as x axis. The steps of W&B itself cannot go back, as a resume does."""
_LONGEST_NAME = 128
_FINISH_TIMEOUT_S = "60"
"""Time for the upload at the end of a run."""
_EXIT_CODES = {RunStatus.finished: 0, RunStatus.stopped: 75, RunStatus.failed: 1, RunStatus.interrupted: 255}
"""W&B itself gives 255 for a Ctrl-C, and shows the run as killed."""


class WandbLogger(Logger):
    """Sends metrics, texts, images, histograms and tables to W&B.

    Its run's id is kept in `wandb.json` of the run directory, so that a resume continues that run. Records of steps
    after the resumed checkpoint are not sent again if the resume is exact; offline they are, as the service is not
    asked.

    A run that is stopped to be resumed is `preempted` there.

    Args:
        project, entity, group, tags: see `wandb.init`.
        mode: `online`, `offline` (files in the run directory, for `wandb sync`) or `disabled`; None: as WANDB_MODE
            says.
    """

    needs_package = "wandb"
    is_remote = True

    def __init__(
        self,
        project: str = "trainer-cli",
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        mode: str | None = None,
    ) -> None:
        self.project, self.entity, self.group, self.tags, self.mode = project, entity, group, tags, mode
        self._run: Any = None
        self._wandb: Any = None
        self._start_step = self._exit_code = 0

    def start(self, facts: RunFacts) -> None:
        """Continue the run of an earlier attempt by its id, or begin one."""
        # Without a limit a run whose server is gone would never end. `wandb sync` sends the rest.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", _FINISH_TIMEOUT_S)
        self._start_step, self._exit_code = facts.start_step, 0
        self._wandb = wandb = import_extra("wandb", "wandb")
        file = None if facts.run_dir is None else facts.run_dir / "wandb.json"
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            group=self.group,
            tags=self.tags,
            mode=self.mode,
            name=shorten_name(facts.title),
            id=read_id(file),
            # Not "must": the first attempt may have ended before the service had the run.
            resume="allow",
            dir=None if facts.run_dir is None else str(facts.run_dir),
            config=dict(facts.hparams),
        )
        # After the start, so that no id of a run that was never created is saved.
        save_id(file, self._run.id)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, record: Record) -> None:
        """Send all values of a record together; the step is one of them."""
        if self._run is None:
            return
        wandb, values = self._wandb, {STEP: record.step, "epoch": record.epoch, **record.metrics}
        for name, text in record.texts.items():
            values[name] = wandb.Html(f"<pre>{_escaped(text)}</pre>", inject=False)
        values.update(convert_media(record, wandb))
        newest = self._run.summary.get(STEP)
        self._run.log(values)
        # An evaluation of an older checkpoint, after a fit: `last_step` must still give the newest step.
        if record.step < self._start_step:
            self._run.summary[STEP] = newest

    def last_step(self) -> int | None:
        """The newest step that the service has, -1 if it has none; None if it cannot be asked."""
        if self._run.offline or self._run.disabled:
            return None
        # The last values of a continued run, which its server has stored.
        step = self._run.summary.get(STEP)
        if isinstance(step, int | float):
            return int(step)
        # A run with records has a last value, unless its owner has changed it.
        return None if self._run.starting_step else -1

    def note_end(self, status: RunStatus) -> None:
        """Note the exit code for `close`; a run that was stopped to be resumed is marked as preempted."""
        self._exit_code = _EXIT_CODES[status]
        if status is RunStatus.stopped and self._run is not None:
            # With an exit code other than 0 the run is `preempted`: neither finished nor failed.
            self._run.mark_preempting()

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=self._exit_code)


def shorten_name(name: str) -> str:
    """The name, without its middle if it is longer than W&B allows."""
    half = _LONGEST_NAME // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[:half]}…{name[1 - half :]}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
