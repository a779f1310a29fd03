"""Refuse a fit that does not report a metric."""

from __future__ import annotations

from collections.abc import Mapping

from trainer_cli.trainer import Callback


class NeededMetric(Callback):
    """Wants a metric, so that a fit without it is refused before its first step. It has no other effect."""

    measures_only = True

    def __init__(self, metric: str) -> None:
        self.metric = metric

    def wanted_metrics(self) -> Mapping[str, str]:
        return {"metric": self.metric}
