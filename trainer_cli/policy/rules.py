"""The policy of checkpoints: when to save and what to remove, as pure functions that return reasons.

`SaveRules.why_save` decides on a save from `SaveFacts`, `RetentionRules.why_keep` and `why_remove` on removals from
the checkpoints on disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

from trainer_cli.errors import ConfigError
from trainer_cli.metric_names import Mode
from trainer_cli.policy.stopping import Occasion
from trainer_cli.schema import CheckpointConfig, Removal
from trainer_cli.steps import Duration, Interval, Progress, StepCounts

_EPHEMERAL = "checkpoint.ephemeral_save_interval"
_STOPPED, _PART_ENDED = "training was stopped", "end of a part of the training"
OF_STOPS = frozenset({_STOPPED, _PART_ENDED})
"""Reasons of saves that a training without the stop would not have made."""
_MAX_COMPARED = 1000
"""Steps of ephemeral saves that are compared with those of regular ones."""
ToInterval = Callable[[str, Any], Interval | None]
"""The interval of a setting, by its key and value; None for null. Raises where it needs an unknown epoch length."""


class CheckpointKind(StrEnum):
    """How long a checkpoint stays: by the rules of removal, only until the next save, or (replayed) always."""

    regular = "regular"
    ephemeral = "ephemeral"
    replayed = "replayed"
    """Computed later from an earlier checkpoint of the run. No rule of a run saves, counts or removes it."""

    @property
    def on_disk(self) -> str:
        """The word in manifests, which are read by all versions."""
        return "permanent" if self is CheckpointKind.regular else self.value


@dataclass(frozen=True, slots=True)
class Saved:
    """The facts about one valid checkpoint on disk."""

    name: str
    step: int
    kind: CheckpointKind
    finished: bool = False
    pinned: bool = False
    finite: bool = True
    """False: a resume would not choose it, so it replaces no other."""
    of_stop: bool = False
    """A training without the stop would not have it, so none goes back to it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Measured at exactly this step."""
    progress: Progress | None = None
    """The counts at this step; None if the manifest lacks them."""


@dataclass(frozen=True, slots=True)
class BestRule:
    """Keep the `count` best checkpoints by a metric that was measured at exactly their steps."""

    metric: str
    mode: Mode = Mode.min
    count: int = 1

    def ranked(self, saved: Sequence[Saved]) -> list[Saved]:
        """The best checkpoints, best first; never one whose metric or weights are NaN or infinite. Ties go to the
        newer."""
        measured = [
            checkpoint for checkpoint in saved if checkpoint.finite and self.value(checkpoint.metrics) is not None
        ]
        # The step is negated, so of equal values the newer one comes first.
        return sorted(measured, key=lambda checkpoint: (self.loss(checkpoint.metrics), -checkpoint.step))[: self.count]

    def why_enter(self, metrics: Mapping[str, float], saved: Sequence[Saved]) -> str | None:
        """The reason why a new measurement is among the best, or None."""
        value = self.value(metrics)
        if value is None:
            return None
        best = self.ranked(saved)
        # A tie enters: the newer of two equal checkpoints is kept.
        if len(best) == self.count and self.loss(metrics) > self.loss(best[-1].metrics):
            return None
        return f"{self.metric} {value:g} is {self.among}"

    @property
    def note(self) -> str:
        """The rule as a note below a table."""
        return f"{'largest' if self.mode is Mode.max else 'smallest'} {self.metric}, of equal ones the newest"

    @property
    def among(self) -> str:
        """End of the sentence why a checkpoint is one of the best."""
        return "the best" if self.count == 1 else f"among the {self.count} best"

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """The metric's value; None if it is missing, NaN or infinite."""
        value = metrics.get(self.metric)
        return value if value is not None and math.isfinite(value) else None

    def loss(self, metrics: Mapping[str, float]) -> float:
        """The metric with the sign turned so that smaller is better."""
        return metrics[self.metric] if self.mode is Mode.min else -metrics[self.metric]


@dataclass(frozen=True, slots=True)
class SaveCost:
    """What the newest save has cost."""

    stood_s: float
    """Seconds for which the training stood still for it."""
    since_s: float
    """Seconds since it began."""

    def wait_s(self, budget: float) -> float:
        """Seconds until the cost is at most this share of the time since the save began; negative if it is."""
        return self.stood_s / budget - self.since_s


@dataclass(frozen=True, slots=True)
class SaveFacts:
    """The facts that a decision to save depends on."""

    now: Progress
    """The counts at the step that may be saved."""
    occasion: Occasion = Occasion.step
    last_saved_step: int | None = None
    loaded: bool = False
    """This run began from a checkpoint, weights alone included."""
    save_requested: bool = False
    """A save was requested for this step."""
    on_hold: bool = False
    """A callback suspends ephemeral saves."""
    writing: bool = False
    """A save is in flight."""
    cost: SaveCost | None = None
    """Of the newest save of this process."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Measured at exactly this step."""
    saved: Sequence[Saved] = ()
    """The checkpoints on disk; needed if a metric decides."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Save with this kind, for this reason."""

    kind: CheckpointKind
    reason: str


@dataclass(frozen=True, slots=True)
class SaveRules:
    """The config's rules of saving, with intervals that know the length of an epoch."""

    save_interval: Interval | None = None
    ephemeral_save_interval: Interval | None = None
    budget: float | None = None
    """Share of the time that saves may take, if ephemeral ones are made as often as it allows."""
    ephemeral_cooldown: Duration | None = None
    fixed_steps: frozenset[int] = frozenset()
    pre_train: bool | None = None
    save_final: bool = True
    save_on_stop: bool = True
    keep_best: BestRule | None = None

    @classmethod
    def of(cls, settings: CheckpointConfig, interval: ToInterval) -> SaveRules:
        """The rules of a config."""
        cooldown = settings.ephemeral_cooldown
        often = None if settings.is_automatic else settings.ephemeral_save_interval
        return cls(
            save_interval=interval("save_interval", settings.save_interval),
            ephemeral_save_interval=interval("ephemeral_save_interval", often),
            budget=settings.budget if settings.is_automatic else None,
            ephemeral_cooldown=None if cooldown is None else Duration.parse(cooldown),
            fixed_steps=frozenset(settings.fixed_steps),
            pre_train=settings.pre_train_checkpoint,
            save_final=settings.save_final,
            save_on_stop=settings.save_on_stop,
            keep_best=_make_best_rule(settings),
        )

    def check_ephemeral(self, longest: Interval, counts: StepCounts) -> str | None:
        """Refuse ephemeral saves that are not more frequent than the regular ones, or each of which is one of them.

        Returns:
            A warning if the run is too short for one, such as a trial of few steps; else None.

        Args:
            longest: the length of the run.
            counts: of each step. Intervals in units that it does not know are compared only with those of the same
                unit.
        """
        often, seldom = self.ephemeral_save_interval, self.save_interval
        if often is None:
            return None
        # They are compared for a whole run: a resume must refuse no more than the attempts before it.
        counts, often, longest = replace(counts, start=Progress()), replace(often, offset=0), replace(longest, offset=0)
        step, end, length = counts.next_due(often, 0), counts.next_due(longest, 0), often.duration
        first = None if seldom is None else counts.next_due(seldom := replace(seldom, offset=0), 0)
        if seldom is not None and _is_longer(often, seldom, step, first, or_equal=True):
            raise CheckpointConfig.too_rare(length, seldom.duration)
        if _is_longer(often, longest, step, end, or_equal=False):
            return f"{_EPHEMERAL} ({length}) never comes due: the run ends before, after {longest.duration}"
        if seldom is None or step is None or first is None:
            return None
        for _ in range(_MAX_COMPARED):
            if step is None:
                break
            if not seldom.due(counts.at(step)):
                return None
            step = counts.next_due(often, step)
        raise ConfigError(
            f"{_EPHEMERAL} ({length}) never comes due: each of its steps is one of checkpoint.save_interval "
            f"({seldom.duration})",
            location=_EPHEMERAL,
            hint="Make it shorter, or set it to null.",
        )

    def why_save(self, facts: SaveFacts) -> Decision | None:
        """The decision of the first rule that asks for a save, or None. No step is saved twice."""
        now, occasion = facts.now, facts.occasion
        if facts.last_saved_step == now.step:
            return None
        # Regular reasons come first: a step that has both kinds is saved as regular.
        if now.step in self.fixed_steps:
            return Decision(CheckpointKind.regular, f"fixed step {now.step}")
        # A fixed step 0 is saved with any pre_train, so it is tested before.
        if occasion is Occasion.pre_train:
            is_due = not facts.loaded if self.pre_train is None else self.pre_train
            return Decision(CheckpointKind.regular, "before the first step") if is_due else None
        if self.save_interval is not None and self.save_interval.due(now):
            return Decision(CheckpointKind.regular, str(self.save_interval))
        if occasion in (Occasion.final, Occasion.last_stop) and self.save_final:
            return Decision(CheckpointKind.regular, "end of training")
        if facts.save_requested:
            return Decision(CheckpointKind.regular, "requested")
        if self.keep_best is not None and (merit := self.keep_best.why_enter(facts.metrics, facts.saved)):
            return Decision(CheckpointKind.ephemeral, merit)
        often = self.ephemeral_save_interval
        if often is not None and often.due(now) and not facts.on_hold and not self._cools_down(facts):
            return Decision(CheckpointKind.ephemeral, f"{often}, ephemeral")
        # After those that a training without the stop follows too.
        if occasion is Occasion.part and self.save_final:
            return Decision(CheckpointKind.ephemeral, _PART_ENDED)
        if occasion in (Occasion.stop, Occasion.last_stop) and self.save_on_stop:
            return Decision(CheckpointKind.ephemeral, _STOPPED)
        if self.budget is not None and not facts.writing and not facts.on_hold and not self._cools_down(facts):
            if facts.cost is None:
                return Decision(CheckpointKind.ephemeral, "auto, ephemeral")
            if facts.cost.wait_s(self.budget) <= 0:
                cost = f"the previous save took {facts.cost.stood_s:.2g} s of {facts.cost.since_s:.3g} s"
                return Decision(CheckpointKind.ephemeral, f"auto, ephemeral: {cost}")
        return None

    def next_step(self, now: Progress) -> int | None:
        """The earliest step after `now` at which a rule may ask for a save; None if none ever will."""
        steps = [step for step in self.fixed_steps if step > now.step]
        intervals = (self.save_interval, self.ephemeral_save_interval)
        steps += [interval.next_step(now) for interval in intervals if interval is not None]
        return min(steps, default=None)

    def _cools_down(self, facts: SaveFacts) -> bool:
        """Whether the last save is more recent than `ephemeral_cooldown` allows."""
        if self.ephemeral_cooldown is None or facts.last_saved_step is None:
            return False
        cooldown = self.ephemeral_cooldown.steps(None)
        return cooldown is not None and facts.now.step - facts.last_saved_step < cooldown


def _is_longer(
    interval: Interval, other: Interval, first_step: int | None, other_first_step: int | None, *, or_equal: bool
) -> bool:
    """Whether an interval is longer than another one, as far as is known from them or from their first steps."""
    if interval.duration.unit is other.duration.unit:
        length, other_length = interval.duration.value, other.duration.value
    elif interval.steps is not None and other.steps is not None:
        length, other_length = interval.steps, other.steps
    else:
        return first_step is not None and other_first_step is not None and first_step > other_first_step
    return length > other_length or (or_equal and length == other_length)


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """The config's rules of what is removed, and when."""

    remove: Removal = Removal.ephemeral_only
    max_checkpoints: int | None = None
    keep_every: Interval | None = None
    keep_by_age: tuple[tuple[Duration, int], ...] = ()
    """(length, count): the newest regular checkpoint of each of the newest `count` spans of this length stays."""
    keep_best: BestRule | None = None
    fixed_steps: frozenset[int] = frozenset()
    save_interval: Interval | None = None
    rolls_back: bool = False
    """A callback may go back to the newest checkpoint that is not of a stop: it stays."""

    @classmethod
    def of(cls, settings: CheckpointConfig, interval: ToInterval) -> RetentionRules:
        """The rules of a config."""
        return cls(
            remove=settings.remove,
            max_checkpoints=settings.max_checkpoints,
            keep_every=interval("keep_every", settings.keep_every),
            keep_by_age=tuple((Duration.parse(length), count) for length, count in settings.keep_by_age.items()),
            keep_best=_make_best_rule(settings),
            fixed_steps=frozenset(settings.fixed_steps),
            save_interval=interval("save_interval", settings.save_interval),
        )

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is removed."""
        return self.remove is Removal.never

    def why_keep(self, saved: Sequence[Saved]) -> dict[str, str]:
        """The reason why each checkpoint stays; those not named may go. Newest first."""
        ordered = _newest_first(saved)
        ranked_names = self._rank_names(ordered)
        reasons = {checkpoint.name: self._why_stays(checkpoint, ranked_names) for checkpoint in ordered}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def why_remove(self, saved: Sequence[Saved]) -> dict[str, str]:
        """The reason why each checkpoint is removed, oldest first: all that `why_keep` does not name."""
        return self.plan_removal(saved)[0]

    def plan_removal(self, saved: Sequence[Saved]) -> tuple[dict[str, str], list[str]]:
        """Apply `why_remove`. Also returns the names of all checkpoints that decide the result: those to remove, and
        those that stay in their place or would be replaced by a better one."""
        ordered = _newest_first(saved)
        ranked_names = self._rank_names(ordered)
        may_go = ordered
        if self.remove is Removal.ephemeral_only and self.max_checkpoints is None:
            # Each regular one stays, and there may be thousands.
            may_go = [
                checkpoint
                for checkpoint in ordered
                if checkpoint.kind is CheckpointKind.ephemeral or not checkpoint.finite
            ]
        removable = {
            checkpoint.name: self._why_goes(checkpoint, ordered[0])
            for checkpoint in reversed(may_go)
            if self._why_stays(checkpoint, ranked_names) is None
        }
        counted = (*ranked_names.counted, *ranked_names.by_age) if removable else ()
        return removable, [*removable, *ranked_names.newest, *ranked_names.best, *counted]

    def split_settled(self, kept: Sequence[Saved]) -> tuple[list[Saved], list[Saved]]:
        """Divide checkpoints that stay now, the oldest first, into those that no later save can remove and that count
        for no other, the newest first, and the rest, the oldest first."""
        settled: list[Saved] = []
        undecided: list[Saved] = []
        newest, newest_finite, goes_back, regulars = True, True, self.rolls_back, 0
        # It goes from the newest on, because what counts as newest depends on those already seen.
        for checkpoint in reversed(kept):
            counted = checkpoint.finite and checkpoint.kind is CheckpointKind.regular
            regulars += counted
            in_max_checkpoints = counted and regulars <= (self.max_checkpoints or 0)
            measured = self.keep_best is not None and bool(checkpoint.metrics)
            # It counts for the spans of others, also where another rule keeps it.
            ages = counted and bool(self.keep_by_age)
            is_newest = newest or (checkpoint.finite and newest_finite)
            by_rule = checkpoint.finite and not checkpoint.of_stop
            matters = is_newest or (by_rule and goes_back) or in_max_checkpoints or measured or ages
            (undecided if matters else settled).append(checkpoint)
            newest, newest_finite, goes_back = False, newest_finite and not checkpoint.finite, goes_back and not by_rule
        return settled, undecided[::-1]

    def _rank_names(self, ordered: Sequence[Saved]) -> _RankedNames:
        """The names of those that stay because of their rank, of checkpoints that are ordered newest first."""
        finite = (checkpoint for checkpoint in ordered if checkpoint.finite)
        by_rule = (one for one in ordered if self.rolls_back and one.finite and not one.of_stop)
        newest = {checkpoint.name for checkpoint in (*ordered[:1], *islice(finite, 1), *islice(by_rule, 1))}
        regulars = [
            checkpoint for checkpoint in ordered if checkpoint.finite and checkpoint.kind is CheckpointKind.regular
        ]
        counted = frozenset(checkpoint.name for checkpoint in regulars[: self.max_checkpoints or 0])
        best = [] if self.keep_best is None else [checkpoint.name for checkpoint in self.keep_best.ranked(ordered)]
        return _RankedNames(newest, counted, best, _find_newest_of_spans(regulars, self.keep_by_age))

    def _why_stays(self, checkpoint: Saved, ranked_names: _RankedNames) -> str | None:
        """The strongest reason why a checkpoint stays, which is logged and shown; None if it may go."""
        if self.keeps_all:
            return "nothing is removed"
        if checkpoint.pinned:
            return "pinned"
        if checkpoint.step in self.fixed_steps:
            return "fixed step"
        if checkpoint.name in ranked_names.newest:
            return "final" if checkpoint.finished else "newest"
        if self.keep_best is not None and checkpoint.name in ranked_names.best:
            return f"{self.keep_best.metric} {checkpoint.metrics[self.keep_best.metric]:g} is {self.keep_best.among}"
        if checkpoint.kind is CheckpointKind.ephemeral or not checkpoint.finite:
            return None
        if self.keep_every is not None and (named := _describe_if_due(self.keep_every, checkpoint)):
            return f"kept {named}"
        if checkpoint.name in ranked_names.by_age:
            return ranked_names.by_age[checkpoint.name]
        if self.remove is Removal.ephemeral_only:
            if self.max_checkpoints is None:
                return "regular"
            return _describe_newest_rank(self.max_checkpoints) if checkpoint.name in ranked_names.counted else None
        # No interval is due at step 0, so it has a rule of its own.
        if checkpoint.step == 0:
            return "step 0"
        if self.save_interval is not None and (named := _describe_if_due(self.save_interval, checkpoint)):
            return named
        if self.max_checkpoints is not None and checkpoint.name in ranked_names.counted:
            return _describe_newest_rank(self.max_checkpoints)
        return None

    def _why_goes(self, checkpoint: Saved, newest: Saved) -> str:
        """The reason why a checkpoint goes for which `_why_stays` has none."""
        if not checkpoint.finite:
            return f"its weights are not finite, and {newest.name} is newer"
        if checkpoint.kind is CheckpointKind.ephemeral:
            return f"ephemeral, and {newest.name} is newer"
        if self.remove is Removal.all_without_rule:
            return "no rule names it"
        return f"beyond the {self.max_checkpoints} newest regular"


class _RankedNames(NamedTuple):
    """Names of checkpoints that stay because of their rank among all checkpoints."""

    newest: Collection[str]
    """The newest, what a resume would choose if that is not finite, and what a roll-back would go back to."""
    counted: Collection[str]
    """The `max_checkpoints` newest regulars; empty if that is None."""
    best: Collection[str]
    """The best by `keep_best`, best first."""
    by_age: Mapping[str, str]
    """Those that stay by `keep_by_age` -> the reasons."""


def _newest_first(saved: Sequence[Saved]) -> list[Saved]:
    # They are sorted by name as well, so two checkpoints of one step keep their order from call to call.
    return sorted(saved, key=attrgetter("step", "name"), reverse=True)


def _find_newest_of_spans(regulars: Sequence[Saved], spans: Sequence[tuple[Duration, int]]) -> dict[str, str]:
    """The reasons why regular checkpoints, newest first, stay by `keep_by_age`."""
    reasons: dict[str, str] = {}
    for length, count in spans:
        newest: dict[int, Saved] = {}
        for checkpoint in regulars:
            if checkpoint.progress is None:
                # In doubt it is kept: what is removed cannot be restored.
                reasons.setdefault(checkpoint.name, f"perhaps the newest of its {length}")
                continue
            span = math.floor(checkpoint.progress.seconds / float(length.value))
            if len(newest) < count:
                newest.setdefault(span, checkpoint)
        for checkpoint in newest.values():
            reasons.setdefault(checkpoint.name, f"newest of its {length}")
    return reasons


def _describe_if_due(interval: Interval, checkpoint: Saved) -> str | None:
    """The reason to keep a checkpoint at whose step an interval is due, or None."""
    # In doubt it is kept: what is removed cannot be restored.
    if checkpoint.progress is None and interval.steps is None:
        return f"perhaps {interval}"
    return str(interval) if interval.due(checkpoint.progress or Progress(step=checkpoint.step)) else None


def _describe_newest_rank(count: int) -> str:
    return "newest regular" if count == 1 else f"among the {count} newest regular"


def _make_best_rule(settings: CheckpointConfig) -> BestRule | None:
    best = settings.keep_best
    return None if best.metric is None else BestRule(best.metric, best.mode, best.count)
