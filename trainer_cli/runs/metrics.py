"""Which value of a metric is best, by the config of a run.

`BestSettings.rule` decides which checkpoint or run is best, for `RUN@best`, `train ckpt ls`, the tables of
`train validate` and of sweeps, and the report: by `checkpoint.keep_best` of the run, else by the validation metric of
EarlyStopping or ReduceLROnPlateau, else by a validation loss; unasked never by a test set. Of equal values the newer is
best.
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
    """Metrics of EarlyStopping and ReduceLROnPlateau, in this order, each with its mode."""
    at_the_end: tuple[str, ...] = ()
    """Validation sets that are evaluated only at the end."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> BestSettings:
        """What a run's config, also as written, says about which checkpoint is best."""
        scheduler = _section(config, "scheduler")
        nodes = {f"callbacks.{name}": node for name, node in _section(config, "callbacks").items()}
        nodes |= {"scheduler": scheduler} | {f"scheduler.{name}": node for name, node in scheduler.items()}
        watched = [
            (metric, _text(config, f"{key}.mode", node.get("mode")))
            for key, node in nodes.items()
            if isinstance(node, Mapping) and _SEEKS_BEST.fullmatch(str(node.get("_target_")))
            if (metric := _text(config, f"{key}.metric", node.get("metric"))) is not None
        ]
        loaders = _section(_section(config, "loop"), "eval_loaders")
        keep_best = _section(_section(config, "checkpoint"), "keep_best")
        return cls(
            _text(config, "checkpoint.keep_best.metric", keep_best.get("metric")),
            _text(config, "checkpoint.keep_best.mode", keep_best.get("mode")),
            tuple(watched),
            tuple(str(name) for name in loaders if _section(loaders, name).get("interval", "") is None),
        )

    @classmethod
    def common(cls, all_settings: Iterable[BestSettings]) -> BestSettings:
        """The settings that all runs have in common; each is that of an empty config where they differ."""
        settings = list(all_settings)
        metric, mode = _shared([(each.metric, each.mode) for each in settings], (None, None))
        return cls(
            metric,
            mode,
            _shared([each.watched for each in settings], ()),
            _shared([each.at_the_end for each in settings], ()),
        )

    def mode_of(self, metric: str) -> Mode | None:
        """Whether the smallest or the largest value of a metric is best: by the mode of `keep_best` if that names it,
        as for retention, or of what watches it; else the usual one of its name; None if that is unknown."""
        modes = [self.mode] if metric == self.metric else [mode for name, mode in self.watched if name == metric]
        stated = (Mode(mode) for mode in modes if mode in (Mode.min, Mode.max))
        return next(stated, None) or find_usual_mode(metric)

    def decisive(self, metrics: Container[str]) -> BestRule | None:
        """The rule of the first of these metrics that `keep_best`, EarlyStopping or ReduceLROnPlateau names."""
        if self.metric is not None and self.metric in metrics:
            return BestRule(self.metric, self.mode_of(self.metric) or Mode.min)
        for name, _ in self.watched:
            mode = self.mode_of(name)
            if name in metrics and mode is not None and is_validation_metric(name) and self.may_decide(name):
                return BestRule(name, mode)
        return None

    def may_decide(self, metric: str) -> bool:
        """Whether a metric may decide unasked: not one of a test set, by the name of the set or its interval, which is
        for the checkpoint that was chosen."""
        name = metric.rpartition("/")[0]
        return not _TEST.search(name) and name not in self.at_the_end

    def rule(self, metrics: Iterable[str]) -> BestRule | None:
        """The rule that decides which checkpoint or run is best; None without a rule and without a validation loss.

        Args:
            metrics: names of the measured metrics. If none that the config names is among them, a validation loss
                decides: of the set of a metric that the run watches, else of `val`, else of the first one that is no
                test set.
        """
        names = set(metrics)
        if (rule := self.decisive(names)) is not None:
            return rule
        losses = [name for name in names if name.endswith("/loss") and is_validation_metric(name)]
        watched = {metric.rpartition("/")[0] for metric in (self.metric or "", *(name for name, _ in self.watched))}
        candidates = sorted(
            filter(self.may_decide, losses),
            key=lambda name: (name.removesuffix("/loss") not in watched, name != "val/loss", name),
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
        """Index of the best row and the rule that ranks the rows; both None if no row has a finite value of its
        metric."""
        measured = [row.named_metrics for row in rows]
        rule = self.rule(name for metrics in measured for name in metrics)
        if rule is None:
            return None, None
        ranked = [
            # Of equal values the newest, by the negated step.
            (rule.loss(metrics), -row.step, index)
            for index, (row, metrics) in enumerate(zip(rows, measured, strict=True))
            if rule.value(metrics) is not None
        ]
        return (min(ranked)[2], rule) if ranked else (None, None)


_TEST = re.compile(r"(?<![a-z])test|Test")
_SEEKS_BEST = re.compile(r"trainer_cli\.(.+\.)?EarlyStopping|torch\.optim\.lr_scheduler\.ReduceLROnPlateau")
"""Targets whose `metric` and `mode` say which value is best; `mode` of ThresholdStopper is the direction of a limit."""


def _section(config: Mapping[Any, Any], key: Any) -> Mapping[Any, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _text(config: Mapping[str, Any], key: str, value: Any) -> str | None:
    """The value of a key, interpolations resolved; None if it is no string or cannot be resolved."""
    if not isinstance(value, str):
        return None
    try:
        return resolve_value(config, key) if "${" in value else str(value)
    except ValueError:
        return None


def _shared(values: Iterable[_Setting], default: _Setting) -> _Setting:
    different = set(values)
    return different.pop() if len(different) == 1 else default
