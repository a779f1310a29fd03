"""Which value of a metric is best, by the config of a run.

`BestSettings.rule` decides which checkpoint or run is best, for `RUN@best`, `train ckpt ls`, the tables of
`train validate` and of sweeps, and the report: by `checkpoint.keep_best` of the run, else by the validation metric of
its sweep, EarlyStopping or ReduceLROnPlateau, else by a validation loss; unasked never by a test set. Of equal values
the newer is best.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from trainer_cli.loggers import MetricRange, is_validation_metric
from trainer_cli.metric_names import Mode, find_usual_mode
from trainer_cli.policy import BestRule
from trainer_cli.runs.stored_values import resolve_value
from trainer_cli.runs.validation_rows import ValidationRow

_Setting = TypeVar("_Setting")


class BestSettings(NamedTuple):
    """What the config of a run says about which checkpoint is best."""

    metric: str | None = None
    mode: str | None = None
    """`checkpoint.keep_best.metric` and its mode."""
    watched: tuple[tuple[str, str | None], ...] = ()
    """Metrics of the sweep, of EarlyStopping and of ReduceLROnPlateau, in this order, each with its mode."""
    at_the_end: tuple[str, ...] = ()
    """Validation sets that are evaluated only at the end."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> BestSettings:
        """The settings of a run's config, whose interpolations may be unresolved."""
        scheduler = _section(config, "scheduler")
        nodes = {f"callbacks.{name}": node for name, node in _section(config, "callbacks").items()}
        nodes |= {"scheduler": scheduler} | {f"scheduler.{name}": node for name, node in scheduler.items()}
        watched: list[tuple[str, str | None]] = []
        for key, node in nodes.items():
            if isinstance(node, Mapping) and _TARGETS_WITH_MODE.fullmatch(str(node.get("_target_"))):
                metric = _read_string(config, f"{key}.metric", node.get("metric"))
                if metric is not None:
                    watched.append((metric, _read_string(config, f"{key}.mode", node.get("mode"))))
        sweep = _section(config, "sweep")
        if (metric := _read_string(config, "sweep.metric", sweep.get("metric"))) is not None:
            watched.insert(0, (metric, None))
        loaders = _section(_section(config, "loop"), "eval_loaders")
        keep_best = _section(_section(config, "checkpoint"), "keep_best")
        return cls(
            _read_string(config, "checkpoint.keep_best.metric", keep_best.get("metric")),
            _read_string(config, "checkpoint.keep_best.mode", keep_best.get("mode")),
            tuple(watched),
            tuple(str(name) for name in loaders if _section(loaders, name).get("interval", "") is None),
        )

    @classmethod
    def common(cls, all_settings: Iterable[BestSettings]) -> BestSettings:
        """The settings that all runs have in common; one that differs between them is that of an empty config."""
        runs = list(all_settings)
        metric, mode = _common_value([(run.metric, run.mode) for run in runs], (None, None))
        return cls(
            metric,
            mode,
            _common_value([run.watched for run in runs], ()),
            _common_value([run.at_the_end for run in runs], ()),
        )

    def mode_of(self, metric: str) -> Mode | None:
        """Whether the smallest or the largest value of a metric is best; None if that is unknown.

        It is the mode of `keep_best` if that names the metric, as for retention, else that of a callback or schedule
        that watches it, else the usual one for its name.
        """
        modes = [self.mode] if metric == self.metric else [mode for name, mode in self.watched if name == metric]
        stated = (Mode(mode) for mode in modes if mode in (Mode.min, Mode.max))
        return next(stated, None) or find_usual_mode(metric)

    def decisive(self, metrics: Container[str]) -> BestRule | None:
        """The rule of the first of these metrics that `keep_best`, EarlyStopping or ReduceLROnPlateau names."""
        if self.metric is not None and self.metric in metrics:
            return BestRule(self.metric, self.mode_of(self.metric) or Mode.min)
        for name, _ in self.watched:
            mode = self.mode_of(name)
            may_rank = is_validation_metric(name) and self.may_decide(name)
            if name in metrics and mode is not None and may_rank:
                return BestRule(name, mode)
        return None

    def may_decide(self, metric: str) -> bool:
        """Whether a metric may decide which checkpoint is best without being named: not if it is of a test set.

        A test set is recognised by its name, or because it is evaluated only at the end.
        """
        name = metric.rpartition("/")[0]
        return not _TEST_SET.search(name) and name not in self.at_the_end

    def rule(self, metrics: Iterable[str]) -> BestRule | None:
        """The rule that decides which checkpoint or run is best; None without a rule and without a validation loss.

        Args:
            metrics: names of the measured metrics. If the config names none of them, a validation loss decides: of the
                set of a metric that the run watches, else of `val`, else of the first one that is no test set.
        """
        names = set(metrics)
        if (rule := self.decisive(names)) is not None:
            return rule
        losses = [name for name in names if name.endswith("/loss") and is_validation_metric(name)]
        watched_metrics = [self.metric or "", *(name for name, _ in self.watched)]
        watched_sets = {metric.rpartition("/")[0] for metric in watched_metrics}
        candidates = sorted(
            filter(self.may_decide, losses),
            key=lambda name: (name.removesuffix("/loss") not in watched_sets, name != "val/loss", name),
        )
        return BestRule(candidates[0]) if candidates else None

    def modes(self, metrics: Iterable[str]) -> dict[str, str]:
        """The mode, `min` or `max`, of each validation metric whose mode is known."""
        names = filter(is_validation_metric, metrics)
        return {name: mode.value for name in names if (mode := self.mode_of(name)) is not None}

    def summarize(self, ranges: Mapping[str, MetricRange]) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
        """Best and newest value of each validation metric, as `summary.json` holds them.

        A best value has its step and its mode; a metric of unknown mode has none. A newest value may be NaN or
        infinite.
        """
        best: dict[str, dict[str, Any]] = {}
        for name, mode in self.modes(ranges).items():
            least, least_step, most, most_step, _ = ranges[name]
            value, step = (least, least_step) if mode == "min" else (most, most_step)
            if value is not None:
                best[name] = {"value": value, "step": step, "mode": mode}
        return best, {name: values.last for name, values in ranges.items()}

    def best_row(self, rows: Sequence[ValidationRow]) -> tuple[int | None, BestRule | None]:
        """Index of the best row, and the rule that ranks the rows; both None if no row has a finite value of its
        metric."""
        metrics_of_rows = [row.named_metrics for row in rows]
        rule = self.rule(name for metrics in metrics_of_rows for name in metrics)
        if rule is None:
            return None, None
        ranks = []
        for index, metrics in enumerate(metrics_of_rows):
            if rule.value(metrics) is not None:
                # The step is negated, so of equal values the newest is first.
                ranks.append((rule.loss(metrics), -rows[index].step, index))
        return (min(ranks)[2], rule) if ranks else (None, None)


_TEST_SET = re.compile(r"(?<![a-z])test|Test")
_TARGETS_WITH_MODE = re.compile(r"trainer_cli\.(.+\.)?EarlyStopping|torch\.optim\.lr_scheduler\.ReduceLROnPlateau")
"""Targets whose `metric` and `mode` say which value is best; `mode` of ThresholdStopper is the direction of a limit."""


def _section(config: Mapping[Any, Any], key: Any) -> Mapping[Any, Any]:
    """The mapping at a key; empty if there is none."""
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _read_string(config: Mapping[str, Any], key: str, value: Any) -> str | None:
    """The value of a key, interpolations resolved; None if it is no string or cannot be resolved."""
    if not isinstance(value, str):
        return None
    try:
        return resolve_value(config, key) if "${" in value else str(value)
    except ValueError:
        return None


def _common_value(values: Iterable[_Setting], default: _Setting) -> _Setting:
    """The value if all are equal, else the default."""
    different = set(values)
    return different.pop() if len(different) == 1 else default
