"""What a training logs: means over the steps since the last log, learning rates, gradient norms and the rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from trainer_cli.errors import UserError
from trainer_cli.metric_names import TRAIN_PREFIX
from trainer_cli.optim import ONLY
from trainer_cli.outputs import WeightedMeans
from trainer_cli.patterns import did_you_mean
from trainer_cli.schema import SchedulerInterval
from trainer_cli.steps import Interval
from trainer_cli.trainer.finite import LossCheck

if TYPE_CHECKING:
    from torch import device

    from trainer_cli.trainer.trainer import Trainer


_RATE = f"{TRAIN_PREFIX}samples_per_s"
"""In a record, it shows that the training metrics of this step are logged."""


class TrainingLog:
    """Collects the training metrics from one log to the next."""

    def __init__(self) -> None:
        self.expected: dict[str, str] = {}
        """Setting -> training metric that it needs; empty once the first batch has reported them."""
        self.is_due = True
        """Whether the last log was due by `log_interval`, and not made only because the run ended."""
        self.reset()

    def reset(self) -> None:
        """Reset the state of an earlier training."""
        self._means: WeightedMeans | None = None
        self._loss_check = LossCheck()

    def prepare(self, device: device, *, only_finite: bool) -> None:
        """Make the means, unless an earlier fit has made them; `only_finite` leaves out losses that are not finite."""
        if self._means is None:
            self._means = WeightedMeans(device, only_finite=only_finite)

    @property
    def means(self) -> WeightedMeans:
        """The means since the last log, after `prepare`."""
        assert self._means is not None
        return self._means

    def request_loss(self) -> float | None:
        """The mean loss since the last log as it was a moment ago, for displays; from any thread."""
        return None if self._means is None else self._means.live_loss.request()

    def state_dict(self) -> dict[str, Any] | None:
        """The means since the last log; None before `prepare`."""
        return None if self._means is None else self._means.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load the means. A fit prepares before it loads; what is loaded outside of one is reset by the next."""
        if self._means is not None and state is not None:
            self._means.load_state_dict(state)

    @property
    def returned_metrics(self) -> Iterable[Any]:
        """The metrics with a state of their own that the model has returned in the training."""
        return () if self._means is None else self._means.gathering.values()

    def expect_metrics(self, expected: Mapping[str, str], log_interval: Interval | None) -> None:
        """Refuse settings whose training metric is not logged; with the first batch, those that it does not report.

        Args:
            expected: setting -> `train/NAME`.

        Raises:
            UserError: no metric of the training is logged.
        """
        self.expected = dict(expected)
        if expected and log_interval is None:
            setting, metric = next(iter(expected.items()))
            raise UserError(
                f"{setting} is '{metric}', but loop.log_interval is null, so that it is only known at the end",
                cure="Set loop.log_interval: the metric is the mean over the steps since the log before.",
            )

    def check_expected(self, trainer: Trainer) -> None:
        """Check the expected metrics with the first batch, before its step is made. Collective.

        Raises:
            UserError: a training metric that a setting needs is not reported.
        """
        # A metric may be reported on one rank only, and all ranks must raise together.
        names_by_rank = trainer.strategy.group.gather(self.means.names)
        reported = {f"{TRAIN_PREFIX}{name}" for names in names_by_rank for name in names} | _added_metrics(trainer)
        for setting, metric in self.expected.items():
            if metric not in reported:
                listing = f"Reported are {', '.join(sorted(reported))}."
                raise UserError(
                    f"{setting} is '{metric}', which the run does not report",
                    cure=did_you_mean(metric, reported).strip() or listing,
                )
        self.expected = {}

    def has_means(self, trainer: Trainer) -> bool:
        """Whether some rank has trained on a batch since the last log, which was of an earlier step. Collective."""
        if _RATE in trainer.metric_logger.record:
            return False
        has_means = self._means is not None and not self._means.empty
        return has_means if trainer.agreement is None else trainer.agreement.total(has_means) > 0

    def write(self, trainer: Trainer, *, is_due: bool) -> None:
        """Log the means since the last log, and step the schedules that follow them. Collective.

        Args:
            is_due: False for a log that is made only because the run ends. A longer run does not have it: the means go
                on, so that its next log is of the same steps, and schedules and patience do not count it.

        Raises:
            NotFiniteError: the loss is not finite for the second time in a row.
        """
        means = self.means.means(trainer.strategy.group)
        metrics = {f"{TRAIN_PREFIX}{name}": value for name, value in means.items()}
        # Before the reset, which forgets it; raised after the record was logged, which then shows the loss.
        finite = self.means.loss_is_finite
        self.is_due = is_due
        if is_due:
            self.means.reset()
        norms, used_groups = trainer.step.grad_norms(), trainer.step.settings_used()
        for name, optimizer in trainer.optimizers.items():
            suffix = "" if name == ONLY else f"/{name}"
            # The groups as the last step used them: schedules have changed the optimizer's since.
            groups = used_groups.get(name, optimizer.param_groups)
            # Some optimizers compute their own rates.
            if groups and groups[0].get("lr") is not None:
                metrics[f"{TRAIN_PREFIX}lr{suffix}"] = float(groups[0]["lr"])
            if name in norms:
                metrics[f"{TRAIN_PREFIX}grad_norm{suffix}"] = float(norms[name])
        if trainer.scaler is not None:
            metrics.update({f"{TRAIN_PREFIX}{name}": value for name, value in trainer.scaler.metrics().items()})
        metrics[_RATE] = trainer.metric_logger.samples_per_second(trainer.progress.samples)
        trainer.metric_logger.add(metrics)
        trainer.hooks.call("on_log", trainer, metrics)
        if is_due and trainer.schedulers.has(SchedulerInterval.log):
            # Rates and norms of ranks may differ in the last digits, and no decision may differ between ranks.
            rank_0_metrics = trainer.strategy.group.broadcast(metrics)
            trainer.schedulers.step(trainer, SchedulerInterval.log, rank_0_metrics)
        self._loss_check.check(trainer, finite=finite)


def _added_metrics(trainer: Trainer) -> set[str]:
    """The training metrics that are logged besides those of the model."""
    names = {"samples_per_s", *(() if trainer.scaler is None else trainer.scaler.metrics())}
    clips = trainer.precision.clip_norm is not None
    for name in trainer.optimizers:
        suffix = "" if name == ONLY else f"/{name}"
        names |= {f"lr{suffix}"} | ({f"grad_norm{suffix}"} if clips else set())
    return {f"{TRAIN_PREFIX}{name}" for name in names}
