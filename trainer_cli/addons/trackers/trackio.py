"""Trackio: all attempts of a run are one run of the service. Needs the extra `trackio`."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Any
from uuid import uuid4

from trainer_cli.addons.trackers.media import convert_media
from trainer_cli.addons.trackers.service_id import read_id, save_id
from trainer_cli.loggers import Logger, Record, RunFacts, import_extra


class TrackioLogger(Logger):
    """Sends metrics, texts, images, histograms and tables to Trackio.

    Trackio finds a run by its name: that of the run here and six random digits. It is kept in `trackio.json` of the run
    directory, so that a resume continues that run. Records of steps after the resumed checkpoint are not sent again if
    the resume is exact.

    Args:
        project, group, space_id: see `trackio.init`. Without a space, everything is in the folder TRACKIO_DIR.
    """

    needs_package = "trackio"
    is_remote = True

    def __init__(self, project: str = "trainer-cli", group: str | None = None, space_id: str | None = None) -> None:
        self.project, self.group, self.space_id = project, group, space_id
        self._run: Any = None
        self._trackio: Any = None

    def start(self, facts: RunFacts) -> None:
        """Continue the run of an earlier attempt by its name, or begin one."""
        self._trackio = trackio = import_extra("trackio", "trackio")
        file = None if facts.run_dir is None else facts.run_dir / "trackio.json"
        name = read_id(file) or f"{facts.title}-{uuid4().hex[:6]}"
        # Trackio prints; stdout belongs to the output of the command.
        with redirect_stdout(sys.stderr):
            self._run = trackio.init(
                project=self.project,
                group=self.group,
                space_id=self.space_id,
                name=name,
                resume="allow",
                config=dict(facts.hparams),
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        # After the start, so that no id of a run that was never created is saved.
        save_id(file, name)

    def log(self, record: Record) -> None:
        """Send all values of a record together."""
        if self._run is None:
            return
        trackio, values = self._trackio, {"epoch": record.epoch, **record.metrics}
        values.update({name: trackio.Markdown(text) for name, text in record.texts.items()})
        values.update(convert_media(record, trackio))
        self._run.log(values, step=record.step)

    def last_step(self) -> int | None:
        """The newest step that the service has, -1 if it has none; None if unknown."""
        # Trackio has read it from the folder or the Space; no public name has it.
        following = getattr(self._run, "_next_step", None)
        # It begins with 0 also if a Space cannot be asked.
        if not isinstance(following, int) or (following == 0 and self.space_id is not None):
            return None
        return following - 1

    def close(self) -> None:
        if self._run is not None:
            self._run = None
            with redirect_stdout(sys.stderr):
                self._trackio.finish()
