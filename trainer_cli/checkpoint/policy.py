"""When to save and what may go: pure functions over plain facts, which return reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from trainer_cli.config.schema import Removal
from trainer_cli.trainer.duration import Duration
from trainer_cli.trainer.progress import Progress
from trainer_cli.trainer.timetable import Cadence


class Kind(StrEnum):
    """Whether a checkpoint is meant to stay, or only guards the time until the next one."""

    permanent = "permanent"
    ephemeral = "ephemeral"


class Occasion(StrEnum):
    """What is happening when the question is asked. It is asked once a step, with the strongest that fits."""

    pre_train = "pre_train"
    step = "step"
    final = "final"
    stop = "stop"
    last_stop = "last_stop"
    """A stop when all steps are made and only the last evaluation is owed."""


@dataclass(frozen=True, slots=True)
class SaveRules:
    """The config's rules of saving, with cadences that know the length of an epoch."""

    save_interval: Cadence | None = None
    ephemeral_save_interval: Cadence | None = None
    ephemeral_cooldown: Duration | None = None
    fixed_steps: frozenset[int] = frozenset()
    pre_train: bool | None = None
    save_final: bool = True
    save_on_stop: bool = True


@dataclass(frozen=True, slots=True)
class Decision:
    """Save, as what, and why."""

    kind: Kind
    reason: str


def why_save(
    rules: SaveRules, now: Progress, last_saved_step: int | None, *, moment: Occasion, loaded: bool = False
) -> Decision | None:
    """The first rule's decision, or None. A step already saved is never saved twice.

    `loaded` says that this run began from a checkpoint, weights alone included.
    """
    if last_saved_step == now.step:
        return None
    if now.step in rules.fixed_steps:
        return Decision(Kind.permanent, f"fixed step {now.step}")
    if moment is Occasion.pre_train:
        wanted = not loaded if rules.pre_train is None else rules.pre_train
        return Decision(Kind.permanent, "before the first step") if wanted else None
    if rules.save_interval is not None and rules.save_interval.due(now):
        return Decision(Kind.permanent, str(rules.save_interval))
    if moment in (Occasion.final, Occasion.last_stop) and rules.save_final:
        return Decision(Kind.permanent, "end of training")
    if moment in (Occasion.stop, Occasion.last_stop) and rules.save_on_stop:
        return Decision(Kind.ephemeral, "training was stopped")
    often = rules.ephemeral_save_interval
    if often is not None and often.due(now) and not _cooling_down(rules, now.step, last_saved_step):
        return Decision(Kind.ephemeral, f"{often}, ephemeral")
    return None


def next_save_step(rules: SaveRules, now: Progress) -> int | None:
    """The earliest step after `now` at which a rule may ask for a save; None where none ever will."""
    steps = [step for step in rules.fixed_steps if step > now.step]
    cadences = (rules.save_interval, rules.ephemeral_save_interval)
    steps += [cadence.next_step(now) for cadence in cadences if cadence is not None]
    return min(steps, default=None)


def _cooling_down(rules: SaveRules, step: int, last_saved_step: int | None) -> bool:
    cooldown = rules.ephemeral_cooldown.steps(None) if rules.ephemeral_cooldown is not None else None
    return cooldown is not None and last_saved_step is not None and step - last_saved_step < cooldown


@dataclass(frozen=True, slots=True)
class Saved:
    """What retention needs to know of one checkpoint on disk."""

    name: str
    step: int
    kind: Kind
    finished: bool = False
    pinned: bool = False
    valid: bool = True


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """The config's rules of removal."""

    remove: Removal = Removal.ephemeral_only
    max_checkpoints: int | None = None
    fixed_steps: frozenset[int] = frozenset()
    save_interval: Cadence | None = None


def why_keep(saved: Sequence[Saved], rules: RetentionRules) -> dict[str, str]:
    """The reason why each valid checkpoint stays; those not named may go. Newest first.

    Invalid and partial ones are in neither list: they are not counted, and not removed by retention.
    """
    return {one.name: reason for one, reason in _judged(saved, rules) if reason is not None}


def why_remove(saved: Sequence[Saved], rules: RetentionRules) -> dict[str, str]:
    """The reason why each valid checkpoint goes, oldest first: all that `why_keep` does not name."""
    judged = _judged(saved, rules)
    return {one.name: _fault(one, rules, judged[0][0]) for one, reason in reversed(judged) if reason is None}


def _judged(saved: Sequence[Saved], rules: RetentionRules) -> list[tuple[Saved, str | None]]:
    valid = sorted((one for one in saved if one.valid), key=lambda one: (one.step, one.name), reverse=True)
    permanents = [one.name for one in valid if one.kind is Kind.permanent]
    counted = frozenset(permanents[: rules.max_checkpoints])
    return [(one, _merit(one, rules, newest=one is valid[0], counted=one.name in counted)) for one in valid]


def _merit(one: Saved, rules: RetentionRules, *, newest: bool, counted: bool) -> str | None:
    """Why this one stays, or None. `counted`: it is among the `max_checkpoints` newest permanents."""
    if rules.remove is Removal.never:
        return "nothing is removed"
    if one.pinned:
        return "pinned"
    if one.step in rules.fixed_steps:
        return "fixed step"
    if newest:
        return "final" if one.finished else "newest"
    if one.kind is Kind.ephemeral:
        return None
    if rules.remove is Removal.ephemeral_only:
        if rules.max_checkpoints is None:
            return "permanent"
        return _among(rules.max_checkpoints) if counted else None
    if one.step == 0:
        return "step 0"
    if rules.save_interval is not None and (named := _names(rules.save_interval, one.step)):
        return named
    return _among(rules.max_checkpoints) if rules.max_checkpoints is not None and counted else None


def _names(cadence: Cadence, step: int) -> str | None:
    """Where steps cannot tell (tokens, time), what the rule may have named stays."""
    if cadence.steps is None:
        return f"perhaps {cadence}"
    return str(cadence) if cadence.due(Progress(step=step)) else None


def _among(count: int) -> str:
    return "newest permanent" if count == 1 else f"among the {count} newest permanent"


def _fault(one: Saved, rules: RetentionRules, newest: Saved) -> str:
    if one.kind is Kind.ephemeral:
        return f"ephemeral, and {newest.name} is newer"
    if rules.remove is Removal.all_non_permanent:
        return "no permanent rule names it"
    return f"beyond the {rules.max_checkpoints} newest permanent"
