"""Which parameters are frozen: for the whole run, or until a duration has passed.

A frozen parameter has no gradient, so its optimizer leaves it and its state alone. What is frozen until later is in
the optimizer from the beginning, and what is frozen at a step follows from the counts of the run alone: a checkpoint
holds nothing of it, and a resume freezes the same parameters. What hooks change is in `trained_parameters`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from trainer_cli.errors import ConfigError
from trainer_cli.patterns import check_pattern, matches, no_match_error
from trainer_cli.state import clean_name
from trainer_cli.steps import Duration, Interval, Unit
from trainer_cli.terminal import format_count

if TYPE_CHECKING:
    from trainer_cli.steps import Progress
    from trainer_cli.trainer import Trainer, TrainingLoop

log = logging.getLogger(__name__)

KEY = "freeze"
_MARK = "_frozen_by_a_trainer"
"""Attribute of a parameter that `freeze` has frozen, and not the user."""

Patterns = Sequence[str] | Mapping[str, int | str | None]
"""Patterns of parameter names, or such patterns -> how long their parameters are frozen (None: the whole run)."""


@dataclass(slots=True)
class _Rule:
    """A pattern whose parameters are frozen until a duration has passed."""

    pattern: str
    duration: Duration
    names: frozenset[str]
    norms: tuple[nn.Module, ...]
    """Norms whose running statistics are frozen until then."""
    interval: Interval | None = None


def _scheduled_patterns(patterns: Patterns | None) -> dict[str, Duration]:
    """Pattern -> duration, for the patterns whose parameters are frozen for a part of the run."""
    if not isinstance(patterns, Mapping):
        return {}
    return {pattern: Duration.parse(value) for pattern, value in patterns.items() if value is not None}


def _learn_interval(pattern: str, duration: Duration, loop: TrainingLoop) -> Interval:
    """The interval at whose end the parameters of a pattern begin to be trained.

    Raises:
        ConfigError: the duration is a time, after which a resumed run may be at another step.
    """
    interval = loop.interval(str(duration))
    assert interval is not None
    if interval.duration.unit is Unit.SECOND:
        raise ConfigError(
            f"{KEY}: '{pattern}' is frozen for {duration} of a run whose length is a time",
            location=KEY,
            hint="Give it in steps, epochs, samples or tokens.",
        )
    return interval


class Freezing:
    """Freezes parameters of a model.

    Args:
        model: before a strategy replaces its parameters by shards.
        patterns: parameters without a duration are frozen now; `update` freezes and unfreezes the others.

    Raises:
        ConfigError: a pattern matches no parameter that is trained otherwise, or no parameter is left to train.
    """

    def __init__(self, model: nn.Module, patterns: Patterns | None) -> None:
        scheduled = _scheduled_patterns(patterns)
        always = [pattern for pattern in patterns or () if pattern not in scheduled]
        self._norms = freeze_parameters(model, always)
        self._kept: set[nn.Module] = set()
        """Norms that would be in training mode if they were not frozen."""
        self.is_permanent = bool(always)
        """Whether parameters are frozen for the whole run."""
        _unfreeze_earlier(model, scheduled)
        self._rules = [self._make_rule(model, pattern, duration) for pattern, duration in scheduled.items()]
        _warn_of_earlier_freeze(model, always)
        self._scheduled = frozenset(name for rule in self._rules for name in rule.names)
        self.scheduled = frozenset(map(clean_name, self._scheduled))
        """The clean names of the parameters that are frozen for a part of the run."""
        self._frozen: frozenset[str] | None = frozenset()
        """The scheduled parameters that `update` has frozen; None: the strategy may have others."""

    @staticmethod
    def ends(patterns: Patterns | None, loop: TrainingLoop) -> Iterator[tuple[str, Duration, int | None]]:
        """For each pattern that is frozen for a part of the run: the pattern, its duration, and the step after which it
        is trained, None if that is unknown.

        Raises:
            ConfigError: a duration is a time.
        """
        for pattern, duration in _scheduled_patterns(patterns).items():
            yield pattern, duration, _learn_interval(pattern, duration, loop).end

    def _make_rule(self, model: nn.Module, pattern: str, duration: Duration) -> _Rule:
        """The rule of a pattern; raise ConfigError if it matches no trained parameter."""
        check_pattern(pattern, KEY)
        # A parameter that the model itself does not train has no optimizer, so it could not be unfrozen.
        trained = {name: parameter for name, parameter in _all_parameters(model).items() if parameter.requires_grad}
        matching = {parameter for name, parameter in trained.items() if matches(name, pattern)}
        if not matching:
            raise no_match_error(pattern, list(trained), KEY, "trained parameter")
        names = frozenset(name for name, parameter in trained.items() if parameter in matching)
        return _Rule(pattern, duration, names, tuple(_matching_norms(model, [pattern])))

    def check_optimizers(self, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        """Raise ConfigError if an optimizer has no parameter to train while the scheduled ones are frozen."""
        if not self._rules:
            return
        parameters = _all_parameters(model)
        frozen = {parameters[name] for name in self._scheduled}
        for name, optimizer in optimizers.items():
            members = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            if not any(parameter.requires_grad for parameter in members - frozen):
                first_rule = min(self._rules, key=lambda rule: rule.duration.value)
                raise ConfigError(
                    f"{KEY}: no parameter is left to train for {name}, before '{first_rule.pattern}' is unfrozen",
                    location=KEY,
                    hint="Leave out some parameters that are trained from the beginning.",
                )

    def learn_lengths(self, loop: TrainingLoop) -> None:
        """Set the intervals by the lengths of the training.

        Raises:
            ConfigError: a duration is a time.
        """
        for rule in self._rules:
            rule.interval = _learn_interval(rule.pattern, rule.duration, loop)

    def next_step(self, progress: Progress) -> Iterable[int]:
        """For each pattern that is frozen: the earliest step after which it may have to be unfrozen."""
        for rule in self._pending(progress):
            assert rule.interval is not None
            yield progress.step + 1 if rule.interval.end is None else rule.interval.end

    def update(self, trainer: Trainer) -> None:
        """Freeze what is frozen at the present step, and unfreeze the rest.

        Called before an evaluation, not after it, so that a resume which begins with the evaluation has the same
        parameters frozen.
        """
        if not self._rules:
            return
        pending = list(self._pending(trainer.progress))
        frozen = frozenset(name for rule in pending for name in rule.names)
        if frozen == self._frozen:
            return
        frozen_before = self._frozen or frozenset()
        parameters = _all_parameters(trainer.model)
        # Only those that change: a hook may have set `requires_grad` of others since.
        for name in self._scheduled if self._frozen is None else frozen ^ frozen_before:
            _set_frozen(parameters[name], frozen=name in frozen)
        for norm in self._kept:
            norm.train()
        self.keep_norms(trainer.progress)
        for rule in self._rules:
            if rule in pending and not rule.names <= frozen_before:
                log.info("'%s' is frozen for %s", rule.pattern, rule.duration)
            elif rule not in pending and rule.names & frozen_before:
                log.info("'%s' is trained after step %d", rule.pattern, trainer.progress.step)
        self._frozen = frozen
        trainer.strategy.on_trained_changed(trainer.model)

    @property
    def frozen(self) -> frozenset[str]:
        """The clean names of the scheduled parameters that are frozen now."""
        return frozenset(map(clean_name, self._frozen or ()))

    @property
    def undecided(self) -> frozenset[str]:
        """The clean names of the scheduled parameters that the next `update` sets."""
        return self.scheduled if self._frozen is None else frozenset()

    def release(self) -> None:
        """Let the next `update` set all scheduled parameters, because a checkpoint was loaded."""
        self._frozen = None

    @contextmanager
    def applied(self, trainer: Trainer) -> Iterator[None]:
        """Freeze inside the block what is frozen now; before a fit has learned the lengths, all that is scheduled.

        Afterwards the parameters and the modes of the norms are as before. Collective.
        """
        progress, parameters = trainer.progress, _all_parameters(trainer.model)
        rules = [rule for rule in self._rules if rule.interval is None or not rule.interval.reached(progress)]
        trained = [parameters[name] for rule in rules for name in sorted(rule.names) if parameters[name].requires_grad]
        modes = [(norm, norm.training) for rule in rules for norm in rule.norms]
        frozen, self._frozen = self._frozen, None
        try:
            for parameter in trained:
                parameter.requires_grad_(False)
            for norm, _ in modes:
                norm.eval()
            if trained:
                trainer.strategy.on_trained_changed(trainer.model)
            yield
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)
            for norm, is_training in modes:
                norm.train(is_training)
        # Not after an error, which other ranks may not have: the next `update` tells the strategy.
        if trained:
            trainer.strategy.on_trained_changed(trainer.model)
        self._frozen = frozen

    def keep_norms(self, progress: Progress) -> None:
        """Put norms into evaluation mode whose statistics are frozen: in training mode they would be updated."""
        norms = (*self._norms, *(norm for rule in self._pending(progress) for norm in rule.norms))
        self._kept = {norm for norm in norms if norm.training}
        for norm in self._kept:
            norm.eval()

    def _pending(self, progress: Progress) -> Iterable[_Rule]:
        """The rules whose parameters are still frozen."""
        return (rule for rule in self._rules if rule.interval is not None and not rule.interval.reached(progress))


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Set `requires_grad` to False for the parameters whose names match a glob, or a regular expression after `re:`.

    Returns the norms whose `running_mean` matches too. They belong in evaluation mode, where the statistics stay.

    Raises:
        ConfigError: a pattern matches no parameter, or all are frozen.
    """
    parameters = _all_parameters(model)
    for pattern in patterns:
        check_pattern(pattern, KEY)
        matching = [parameter for name, parameter in parameters.items() if matches(name, pattern)]
        if not matching:
            raise no_match_error(pattern, list(parameters), KEY)
        for parameter in matching:
            # A parameter that the user has frozen is not marked as frozen by a trainer.
            if parameter.requires_grad:
                _set_frozen(parameter, frozen=True)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(f"{KEY}: no parameter is left to train", location=KEY)
    norms = _matching_norms(model, patterns)
    # In training mode a norm updates its statistics even if its weights are frozen.
    for norm in norms:
        norm.eval()
    return norms


def _matching_norms(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """The norms whose `running_mean` matches a pattern."""
    return [
        module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "running_mean", None), torch.Tensor)
        and any(matches(f"{name}.running_mean".lstrip("."), pattern) for pattern in patterns)
    ]


def _set_frozen(parameter: nn.Parameter, *, frozen: bool) -> None:
    """Set whether a parameter is trained, and mark that a rule of freezing has set it."""
    parameter.requires_grad_(not frozen)
    setattr(parameter, _MARK, frozen)


def _unfreeze_earlier(model: nn.Module, patterns: Iterable[str]) -> None:
    """Unfreeze the parameters that match, and that an earlier trainer of the same model has frozen."""
    for name, parameter in _all_parameters(model).items():
        if getattr(parameter, _MARK, False) and any(matches(name, pattern) for pattern in patterns):
            _set_frozen(parameter, frozen=False)


def _warn_of_earlier_freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Warn of parameters that an earlier trainer of the same model has frozen, and that match none of the patterns."""
    names = [
        name
        for name, parameter in _all_parameters(model).items()
        if not parameter.requires_grad
        and getattr(parameter, _MARK, False)
        and not any(matches(name, pattern) for pattern in patterns)
    ]
    if names:
        log.warning(
            "%s, such as %s, not trained: `freeze` of an earlier trainer has frozen them. Call requires_grad_(True) to "
            "train them",
            format_count(len(names), "parameter"),
            names[0],
        )


def _all_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model by every name that they have."""
    # Duplicates too: a pattern may match either name of a shared parameter.
    return dict(model.named_parameters(remove_duplicate=False))
