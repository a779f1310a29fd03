"""Print `summary.json` of the run when its `train fit --json` ends."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from trainer_cli.runs import RunDir
from trainer_cli.schema import TrainConfig
from trainer_cli.terminal import print_json


class SummaryAtEnd:
    """Context manager around a fit: meanwhile stdout goes to stderr, also that of its processes; then it prints the
    summary.

    Nothing is printed if the fit was refused before it opened the run, or in a rank other than the main one.
    """

    def __init__(self) -> None:
        self._run: RunDir | None = None
        self._attempts = 0

    def expect(self, config: TrainConfig) -> None:
        """Take the run directory from the config, before anything is written there."""
        self._run = RunDir(config.run_dir)
        self._attempts = len(self._run.attempts)

    def __enter__(self) -> SummaryAtEnd:
        sys.stdout.flush()
        # The file descriptor, not sys.stdout: processes of the fit inherit it.
        self._stdout = os.dup(1)
        os.dup2(2, 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stdout.flush()
        os.dup2(self._stdout, 1)
        os.close(self._stdout)
        # A run that is finished already has no new attempt, and no error either.
        if self._run is not None and (error is None or len(self._run.attempts) > self._attempts):
            print_json(self._run.read_summary())
