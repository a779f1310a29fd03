"""Evaluate the model on one loader, and decide which validation loaders are evaluated when."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer_cli.batches import sample_count, to_device
from trainer_cli.data import PaddingBatch
from trainer_cli.errors import ConfigError, UserError, second_to
from trainer_cli.loggers import loader_of
from trainer_cli.metric_names import is_no_mean
from trainer_cli.outputs import GatheredMetric, WeightedMeans, is_metric, modes_kept, read_evaluation
from trainer_cli.patterns import check_name, did_you_mean
from trainer_cli.schema import LoopConfig
from trainer_cli.signatures import checks_argument_names
from trainer_cli.steps import Interval, Progress
from trainer_cli.terminal import format_first
from trainer_cli.trainer.prefetch import close_at_the_end
from trainer_cli.values import check_whole

if TYPE_CHECKING:
    from trainer_cli.parallel import ProcessGroup
    from trainer_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)


_NO_DATA = "There is no validation data: give some, or name a training metric, such as train/loss."


class EvaluationSchedule:
    """The intervals and loops of a training's evaluations, from the settings `loop.eval_…`.

    All loaders are evaluated at `eval_interval`, except those that have an interval in `eval_loaders`.
    """

    def __init__(self, settings: LoopConfig) -> None:
        self._settings = settings
        self.validation: ValidationLoop = ValidationLoop(settings.eval_steps)
        """Evaluates the loaders that have no settings in `eval_loaders`."""
        self._loops: dict[str, ValidationLoop] = {
            str(name): ValidationLoop(options.get("steps", settings.eval_steps), hook=options.get("hook", "validate"))
            for name, options in settings.eval_loaders.items()
        }
        self.present = Due({})
        """The present evaluation."""
        self.expected: dict[str, str] = {}
        """Setting -> the metric that a callback must log after the first evaluation."""
        self.buffers_named = False
        """Whether the log has named buffers of the model that were restored after an evaluation."""
        self.means_named = False
        """Whether the log has named metrics that are means over batches, see `warn_of_means`."""
        self.interval: Interval | None = None
        self._intervals: dict[str, Interval | None] = {}

    def learn(self, interval: Callable[[Any], Interval | None]) -> None:
        """Make the intervals, for epochs of a known length."""
        self.interval = interval(self._settings.eval_interval)
        self._intervals = {
            str(name): interval(options["interval"])
            for name, options in self._settings.eval_loaders.items()
            if "interval" in options
        }

    def of(self, name: str) -> ValidationLoop:
        """The loop that evaluates the loader with this name."""
        return self._loops.get(name, self.validation)

    def hooks(self) -> set[str]:
        """The base names of the hooks that the loops call."""
        return {loop.hook for loop in (self.validation, *self._loops.values())}

    def check(self, loaders: Iterable[str]) -> None:
        """Check that every loader with settings in `eval_loaders` exists.

        Raises:
            UserError: it does not; with the nearest name.
        """
        for name in self._loops:
            check_name("validation loader", name, loaders, "loop.eval_loaders")

    def warn_of_means(self, metrics: Iterable[str]) -> None:
        """Warn, once, of metrics that are means over batches, but by their names something else over a whole set."""
        names = [name for name in metrics if is_no_mean(name)]
        if names and not self.means_named:
            self.means_named = True
            log.warning(
                "%s: the mean of the values of the batches, which the model returns, and not the value over the whole "
                "set. The callback trainer_cli.Metrics computes that: `train docs own-model`",
                format_first(names, 4),
            )

    def check_expected(self, metrics: Mapping[str, float], due: Due) -> None:
        """Check the expected metrics with those of an evaluation, once.

        Raises:
            UserError: one is not reported.
        """
        # A copy of the items, because the loop removes some.
        for setting, metric in [*self.expected.items()]:
            # A metric of a loader that was not evaluated here may still be reported later.
            is_decided = metric in metrics or due.is_all or loader_of(metric, due.loaders) in due.loaders
            if is_decided:
                del self.expected[setting]
                if metric not in metrics:
                    raise unreported(setting, metric, metrics)

    def intervals(self, loaders: Iterable[str], *, callbacks: bool) -> list[Interval]:
        """The intervals at which loaders with these names are evaluated, or callbacks evaluate if there are any."""
        names = list(loaders)
        uses_shared = callbacks or not names or any(name not in self._intervals for name in names)
        intervals = [self.interval if uses_shared else None, *(self._intervals.get(name) for name in names)]
        # Each once: several loaders may have the same.
        return list(dict.fromkeys(interval for interval in intervals if interval is not None))

    def interval_of(self, metric: str, loaders: Iterable[str]) -> Interval | None:
        """The interval at which the loader of a metric is evaluated; that of callbacks for one of no loader."""
        return self._intervals.get(loader_of(metric, loaders), self.interval)

    def due(self, now: Progress, loaders: Mapping[str, Any]) -> Due | None:
        """What is due at the step just made; None if nothing is."""
        is_shared_due = self.interval is not None and self.interval.due(now)
        names = {name for name, interval in self._intervals.items() if interval is not None and interval.due(now)}
        if not is_shared_due and not names:
            return None
        if is_shared_due:
            names |= {name for name in loaders if name not in self._intervals}
        due_loaders = {name: loader for name, loader in loaders.items() if name in names}
        return Due(due_loaders, callbacks=is_shared_due, is_all=len(due_loaders) == len(loaders))

    def owed(self, now: Progress, loaders: Mapping[str, Any], *, is_last: bool) -> Due:
        """What an earlier attempt had to evaluate at this step, but did not.

        If no interval makes an evaluation due here, it had been requested, and is of all loaders.

        Args:
            is_last: the evaluation was due at the end of the run.
        """
        due = self.due(now, loaders)
        return last_due(loaders, due) if is_last else due or Due(loaders)


def unreported(setting: str, metric: str, reported: Iterable[str]) -> UserError:
    """The error for a setting that names a metric which is not reported."""
    names = sorted(reported)
    listing = f"Reported are {', '.join(names[:12])}." if names else _NO_DATA
    return UserError(
        f"{setting} is '{metric}', which no validation loader or callback reports",
        cure=did_you_mean(metric, names).strip() or listing,
    )


def last_due(loaders: Mapping[str, Any], by_interval: Due | None) -> Due:
    """The evaluation on all loaders at the end of a run.

    Args:
        by_interval: the part of it that is due by an interval, too; None: no part is.
    """
    return Due(loaders, by_interval=by_interval or Due({}, callbacks=False, is_all=False))


_END = object()


class EvaluationInterruptedError(Exception):
    """A stop was requested while an evaluation ran; the next attempt makes the evaluation."""


@contextmanager
def exceptions_reported(trainer: Trainer) -> Iterator[None]:
    """Call `on_validate_exception` for an exception in the block, except for a requested stop."""
    try:
        yield
    # A stop is no failure: the next attempt makes the evaluation.
    except EvaluationInterruptedError:
        raise
    except BaseException as error:
        with second_to(error):
            trainer.hooks.call_all("on_validate_exception", trainer, error)
        raise


@dataclass(frozen=True, slots=True)
class Due:
    """What one evaluation is made on."""

    loaders: Mapping[str, Any]
    callbacks: bool = True
    """Whether callbacks make their evaluations, too."""
    is_all: bool = True
    """Whether these are all loaders."""
    by_interval: Due | None = None
    """What of it is due by an interval, if it is made because the run ends; None: all of it."""

    @property
    def regular(self) -> Due:
        """What of it a longer training evaluates here, too."""
        return self if self.by_interval is None else self.by_interval

    def counts(self, metric: str) -> bool:
        """Whether schedules and patience count a metric of it: only if the metric is due by an interval.

        A longer training has no evaluation at this end, and must make the same decisions.
        """
        if self.by_interval is None:
            return True
        loader = loader_of(metric, self.loaders)
        is_of_callback = loader not in self.loaders
        return loader in self.by_interval.loaders or (is_of_callback and self.by_interval.callbacks)

    def remaining(self, loaders: Mapping[str, Any]) -> Due:
        """The evaluation on the loaders that this one leaves out."""
        return Due({name: loader for name, loader in loaders.items() if name not in self.loaders}, is_all=False)


class ValidationLoop:
    """Evaluates the model on one loader, or on its first `eval_steps` batches: weighted means of loss and metrics.

    `hook` is the base name of its hooks: `ValidationLoop(hook="x")` calls `on_x_start`, `on_x_batch_end` and so
    on. Model mode, random state and gradients are as before when it returns.
    """

    @checks_argument_names("ValidationLoop")
    def __init__(self, eval_steps: int | None = None, hook: str = "validate") -> None:
        if eval_steps is not None:
            check_whole("eval_steps", eval_steps, 1)
        if not isinstance(hook, str) or not hook.isidentifier():
            raise ConfigError(f"hook is {hook!r}, but it must be a name", location="hook")
        self.eval_steps, self.hook = eval_steps, hook
        self.metrics: dict[str, float] = {}
        self._returned: dict[str, Any] = {}
        """The metrics with a state of their own that the model returned in the last evaluation."""
        self.counts = True
        """Whether the present batch counts; False for a padding batch, which only keeps collectives in step."""
        self.name, self.batch_idx = "", 0
        """The loader that is evaluated, and its batch, for displays."""

    def run(self, trainer: Trainer, loader: Any, name: str) -> dict[str, float]:
        """Means over the loader (or its first `eval_steps` batches), weighted by the batches' weights.

        Raises:
            EvaluationInterruptedError: a stop was requested before the last batch; the next attempt evaluates again.
            UserError: the loader gave no batch.
        """
        hooks, model, base = trainer.hooks, trainer.model, self.hook
        with modes_kept(model), ExitStack() as stack, torch.no_grad():
            hooks.call("on_enter_validate", trainer, stack, loader, self)
            model.eval()
            stack.enter_context(trainer.strategy.evaluation(model))
            hooks.call(f"on_{base}_start", trainer, model, loader, self)
            self.metrics = self._evaluate_batches(trainer, model, loader, name)
            hooks.call_all(f"on_{base}_end", trainer, model, self)
        return self.metrics

    def _compute_returned(self, metrics: Mapping[str, Any], group: ProcessGroup) -> dict[str, float]:
        """Compute the metrics that the model returned, over all batches, and reset them."""
        values: dict[str, float | Tensor] = {}
        for name, metric in metrics.items():
            gathered = GatheredMetric(name, metric)
            gathered.check(group)
            values |= gathered.compute(group)
            metric.reset()
        # All metrics first, then all values: each float waits for the device.
        return {name: float(value) for name, value in values.items()}

    def _reset_metrics(self, trainer: Trainer, model: nn.Module) -> None:
        """Reset the model's metrics, which hold batches of the training, and of an interrupted evaluation.

        Those that are not submodules of the model are known once it has returned them.
        """
        returned = (*trainer.loop.training_log.returned_metrics, *self._returned.values())
        for metric in (*filter(is_metric, model.modules()), *returned):
            GatheredMetric("", metric).reset(trainer.strategy.group)

    def _evaluate_batches(self, trainer: Trainer, model: nn.Module, loader: Any, name: str) -> dict[str, float]:
        """Call the model with each batch, between the hooks of a batch; returns and raises what `run` does."""
        hooks, base, device = trainer.hooks, self.hook, trainer.device
        forward, meter = trainer.step.forward, WeightedMeans(device)
        trainer.step.bind_model(trainer)
        batch_start, batch_end = hooks[f"on_{base}_batch_start"], hooks[f"on_{base}_batch_end"]
        step_start, step_end = hooks[f"on_{base}_step_start"], hooks[f"on_{base}_step_end"]
        batch_idx, counts = -1, True
        self._reset_metrics(trainer, model)
        self._returned = meter.gathering
        self.name, self.batch_idx = name, 0
        # Always epoch 0: every evaluation sees the same batches.
        batches = loader.iterate(0)
        padded = batches if trainer.agreement is None else _pad_batches(trainer, batches)
        try:
            for batch_idx, batch in enumerate(padded):
                if type(batch) is PaddingBatch:
                    counts, batch = False, batch.batch
                self.counts = counts
                # Not for a request to finish: a finished run has a whole evaluation.
                if trainer.stop_request is not None and not trainer.stop_request.finished:
                    raise EvaluationInterruptedError
                self.batch_idx = batch_idx
                batch = to_device(batch, device) if device.type != "cpu" else batch
                for call in batch_start:
                    call(trainer, model, batch, batch_idx)
                for call in step_start:
                    call(trainer, model, batch)
                raw = forward(batch)
                loss, outputs = read_evaluation(raw)
                if counts:
                    size = 0 if "weight" in outputs else sample_count(batch, loader.batch_samples)
                    meter.add(loss, outputs, trainer.step.weigh(outputs, size))
                    trainer.sample_check.check(loader, name, batch, size, outputs)
                elif any(map(is_metric, outputs.values())):
                    raise UserError(
                        "the model returns metrics that count for themselves, and this process has fewer validation "
                        "batches than another one: they would count its last batch twice",
                        cure="Compute them by the callback Metrics.",
                    )
                for call in step_end:
                    call(trainer, model, raw, batch)
                for call in batch_end:
                    call(trainer, model, raw, batch, batch_idx)
                if batch_idx + 1 == self.eval_steps:
                    break
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close_at_the_end(close)
        if batch_idx < 0:
            raise UserError(f"the validation loader '{name}' gave no batch")
        group = trainer.strategy.group
        means = meter.means(group)
        # Of one batch the mean is the value itself.
        if batch_idx > 0:
            trainer.loop.evaluations.warn_of_means(f"{name}/{metric}" for metric in means)
        means = {**means, **self._compute_returned(meter.gathering, group)}
        is_read_by_callback = batch_end or step_end or hooks["on_after_forward"]
        if not means and not is_read_by_callback:
            raise UserError(
                f"the evaluation on '{name}' reports nothing: the model returned {type(raw).__name__} without a loss "
                "or a metric, and no callback reads it",
                cure="Return one of them from the model's forward, or add a callback such as Metrics.",
            )
        return means


def _pad_batches(trainer: Trainer, batches: Iterable[Any]) -> Iterator[Any]:
    """This rank's batches, with padding until every rank is at its end. Stop requests are shared at each batch.

    Forwards of a sharded model are collective, so every rank must make as many as the rank with the most batches.
    """
    agreement, iterator = trainer.agreement, iter(batches)
    assert agreement is not None
    batch: Any = None
    while True:
        next_batch = next(iterator, _END)
        # The number of ranks that have a batch; at 0 all are at their end.
        agreement.start(0 if next_batch is _END else 1)
        if not agreement.finish():
            return
        if agreement.interrupt:
            trainer.requests.accept_interrupt()
            trainer.requests.share(0.0)
        if next_batch is not _END:
            batch = next_batch
        elif batch is None:
            raise UserError("a validation loader has batches on some ranks, but none on this one")
        elif type(batch) is not PaddingBatch:
            batch = PaddingBatch(batch)
        yield batch
