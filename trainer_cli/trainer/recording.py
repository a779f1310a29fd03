"""What anything that has the trainer may log for the current step: metrics, texts, images, histograms, tables."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from trainer_cli.loggers.base import Logger
from trainer_cli.trainer import media
from trainer_cli.trainer.metric_logger import MetricLogger

log = logging.getLogger(__name__)


class Recording:
    """The trainer's methods that log. Each adds to the record of the current step, in the scopes that hold."""

    metric_logger: MetricLogger
    fitting = False
    """Whether a fit is going on."""

    def __init__(self, loggers: Mapping[str, Logger]) -> None:
        self.loggers = loggers
        self.metric_logger = MetricLogger(loggers)
        self._scopes: list[str] = []
        self._warned = False

    def log_metrics(self, metrics: Mapping[str, float | Tensor] | None = None, **named: float | Tensor) -> None:
        """Add metrics to the record of the current step, from anywhere. Tensors on a device are read at the next log
        step, evaluation or save, so that no step waits for them. Inside a `name_scope` their names begin with it.

        What is logged before the first fit is in its first record. What is logged after a step's record, as
        in `on_fit_end`, is another record of that step; after a fit it is written at once. A finished run that is
        started again makes no step, and writes nothing again.
        """
        # What is logged in an evaluation outside of a fit is returned.
        if self.fitting and not self.loggers and not self._warned:
            self._warned = True
            log.warning("metrics are logged, but there is no logger that writes them: give the trainer `loggers`")
        self.metric_logger.add({self._scoped(name): value for name, value in {**(metrics or {}), **named}.items()})
        self._write_if_closed()

    def _write_if_closed(self) -> None:
        """Outside of a fit or an evaluation: write what was logged."""

    @contextmanager
    def name_scope(self, name: str) -> Iterator[str]:
        """Put `name/` before the names of what is logged inside the block, but where a name begins with it already. An
        evaluation of a loader runs in a scope of its name."""
        self._scopes.append(name)
        try:
            yield name
        finally:
            self._scopes.pop()

    @property
    def name_scope_path(self) -> str:
        """What names begin with now: each scope with a `/` behind it; empty outside of any."""
        return "".join(f"{scope}/" for scope in self._scopes)

    def log_text(self, name: str, text: str) -> None:
        """Add a text, which may be Markdown, to the record of the current step. Of one name and step the last counts,
        as of images and histograms."""
        self._add_medium(media.text_medium(self._scoped(name), text))

    def log_image(self, name: str, image: Any) -> None:
        """Add an image to the record of the current step: a tensor or array of shape (height, width) or
        (channels, height, width), with 1, 3 or 4 channels; floats from 0 to 1, or integers from 0 to 255. A tensor is
        copied to the host at once.

        Raises:
            UserError: it has another shape.
        """
        self._add_medium(media.image_medium(self._scoped(name), image))

    def log_histogram(self, name: str, values: Any) -> None:
        """Add the distribution of the finite ones of some values to the record of the current step. A tensor is
        copied to the host at once."""
        self._add_medium(media.histogram_medium(self._scoped(name), values))

    def log_table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Add a table of texts and numbers to the record of the current step.

        Raises:
            UserError: a row does not fit the columns.
        """
        self._add_medium(media.table_medium(self._scoped(name), columns, rows))

    def _add_medium(self, medium: media.Medium) -> None:
        self.metric_logger.add_medium(medium)
        self._write_if_closed()

    def _scoped(self, name: str) -> str:
        scope = self.name_scope_path
        return name if name.startswith(scope) else f"{scope}{name}"
