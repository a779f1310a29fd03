"""Have add-ons act at the end of a fit."""

from __future__ import annotations

from trainer_cli.files import FileIdentity
from trainer_cli.fit_parts import AT_END
from trainer_cli.runs import RunDir
from trainer_cli.schema import TrainConfig


class FitEnd:
    """Surrounds a fit, in its first process. At the end, when the lock of the run is free, each `AT_END` acts."""

    def __init__(self) -> None:
        self._config: TrainConfig | None = None

    def expect(self, config: TrainConfig) -> None:
        """Take the config, before anything is written into the run directory."""
        self._config, self._before = config, _look(config)

    def __enter__(self) -> FitEnd:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._config is not None and not isinstance(error, KeyboardInterrupt):
            has_begun = _look(self._config) != self._before
            # Messages come before the report, which may take long.
            for act in reversed([*AT_END.each()]):
                act(self._config, error, has_begun=has_begun)


def _look(config: TrainConfig) -> FileIdentity | None:
    """The summary of a run, which each attempt writes at its beginning."""
    return FileIdentity.at(RunDir(config.run_dir).summary_file)
