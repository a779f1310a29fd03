"""Simulate a training before it begins: apply the policy at every step that can matter.

Counts are arithmetic over `StepCounts`; only steps with an event are visited. A metric is not known beforehand, so an
evaluation that may save for one is only noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainer_cli.policy.rules import CheckpointKind, Decision, RetentionRules, Saved, SaveFacts, SaveRules
from trainer_cli.policy.stopping import Limits, Occasion, Stop
from trainer_cli.steps import Interval, Progress, StepCounts, find_first_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The settings of a simulation, besides the step counts."""

    limits: Limits
    save: SaveRules = field(default_factory=SaveRules)
    retention: RetentionRules = field(default_factory=RetentionRules)
    eval_intervals: Sequence[Interval] = ()
    log_interval: Interval | None = None
    """The interval at which a training metric that `keep_best` names is measured; None: evaluations measure it."""
    eval_at_start: bool = False
    evaluates: bool = True
    """Whether there is something to evaluate."""
    pending_evaluation: bool = False
    """Whether the last attempt stopped before an evaluation that was due."""
    enabled: bool = True
    """Whether checkpoints are saved."""
    loaded: bool = False
    saved: Sequence[Saved] = ()
    """Valid checkpoints on the disk at the start."""
    last_saved_step: int | None = None
    stop_request: Stop | None = None
    """An end that was requested before the first step."""

    def run(
        self,
        step_counts: StepCounts,
        *,
        name: Callable[[Progress], str] = lambda at: f"step{at.step}",
        size: Callable[[int], int] = lambda step: 0,
        sizes: Mapping[str, int] | None = None,
        most_saves: int | None = None,
    ) -> Timeline:
        """Go from event to event up to the end, as the training will, or until there are more saves than `most_saves`.

        Args:
            name: counts at a step -> the name of a checkpoint of this step.
            size: step -> bytes of a checkpoint of this step.
            sizes: name -> bytes, of the checkpoints on the disk at the start.
        """
        return _Run(
            _drop_unknown_rules(self, step_counts), step_counts, name, size, dict(sizes or {}), most_saves
        ).simulate()


@dataclass(frozen=True, slots=True)
class Save:
    """One checkpoint that will be saved."""

    name: str
    step: int
    kind: CheckpointKind
    reason: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RemovedCheckpoint:
    """One checkpoint that will be removed, and at which step."""

    name: str
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that is on the disk at a time: while a checkpoint is saved and those it replaces are not yet removed."""

    step: int
    count: int
    size_bytes: int


@dataclass(slots=True)
class Timeline:
    """The simulated events up to the end; `end` is None if that is unknown."""

    end: Progress | None = None
    stop: Stop | None = None
    evaluations: list[int] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    removals: list[RemovedCheckpoint] = field(default_factory=list)
    may_save: list[int] = field(default_factory=list)
    """Evaluations, or logs of a training metric, that save only if they are among the best."""
    kept: dict[str, str] = field(default_factory=dict)
    """The checkpoints on the disk at the end, and why. Newest first."""
    completed: dict[str, Save] = field(default_factory=dict)
    """Earlier checkpoints whose manifest is completed after an evaluation, by name, as they are then."""
    peak: Peak | None = None
    cut: bool = False
    """Whether there are more saves than `most_saves`: nothing is computed after them."""


def _drop_unknown_rules(setting: Simulation, step_counts: StepCounts) -> Simulation:
    """The setting without rules whose steps are unknown beforehand, except `max_duration`."""

    def if_known(interval: Interval | None) -> Interval | None:
        return interval if interval is not None and step_counts.knows(interval) else None

    return replace(
        setting,
        limits=replace(
            setting.limits,
            hard_stop=if_known(setting.limits.hard_stop),
            max_time_s=setting.limits.max_time_s if step_counts.step_time_s is not None else None,
        ),
        eval_intervals=[interval for interval in setting.eval_intervals if step_counts.knows(interval)],
        log_interval=if_known(setting.log_interval),
        save=replace(
            setting.save,
            save_interval=if_known(setting.save.save_interval),
            ephemeral_save_interval=if_known(setting.save.ephemeral_save_interval),
            budget=None,
        ),
        retention=replace(
            setting.retention, keep_by_age=setting.retention.keep_by_age if step_counts.step_time_s is not None else ()
        ),
    )


class _Run:
    """The training loop without the training: decides at each step with an event what the loop would do."""

    def __init__(
        self,
        setting: Simulation,
        step_counts: StepCounts,
        name: Callable[[Progress], str],
        size: Callable[[int], int],
        sizes: dict[str, int],
        most_saves: int | None,
    ) -> None:
        self.most_saves = most_saves
        self.setting, self.step_counts, self.name, self.size = setting, step_counts, name, size
        self.on_disk = {saved.name: sizes.get(saved.name, 0) for saved in setting.saved}
        # A running total: a sum at each event would be quadratic in the number of saves.
        self.bytes_on_disk = sum(self.on_disk.values())
        self.undecided = sorted(setting.saved, key=lambda saved: (saved.step, saved.name))
        self.settled: list[Saved] = []
        self.last_saved = setting.last_saved_step
        self.result = Timeline()

    def simulate(self) -> Timeline:
        """Visit each step with an event; what happens at them."""
        start, result, setting = self.step_counts.start, self.result, self.setting
        if setting.enabled:
            self._note_peak(start.step, 0, 0)
            self._apply_retention(start.step)
        pending = setting.pending_evaluation and setting.evaluates
        at_start = setting.eval_at_start and start.step == 0 and start.evaluated_step != 0 and setting.evaluates
        evaluated = pending or at_start
        if evaluated:
            result.evaluations.append(start.step)
        self._decide_save(start, Occasion.pre_train, None, evaluated)
        # The evaluation and the save at the start, above, come also where no end is known.
        end = self._find_end()
        if end is None:
            return self._finish_timeline()
        result.end, result.stop = self.step_counts.at(end), self._find_stop(end)
        assert result.stop is not None
        if end == start.step:
            self._decide_save(start, Occasion.at(result.stop), result.stop, False)
            return self._finish_timeline()
        for step, due, logs in self._find_events(end):
            self._visit_step(step, due, logs, result.stop if step == end else None)
            if self.most_saves is not None and len(result.saves) > self.most_saves:
                result.cut = True
                return result
        return self._finish_timeline()

    def _visit_step(self, step: int, due: bool, logs: bool, stop: Stop | None) -> None:
        """Evaluate and save at a step after the first.

        Args:
            due: whether an evaluation is due.
            logs: whether a metric that saves is logged.
            stop: why the training stops here; None if it goes on.
        """
        is_last = stop is not None and stop.is_end
        # A process that is out of time leaves the evaluation to the next attempt.
        evaluated = self.setting.evaluates and (is_last or (due and (stop is None or stop.finished)))
        if evaluated:
            self.result.evaluations.append(step)
        occasion = Occasion.at(stop)
        measured = evaluated if self.setting.log_interval is None else logs or is_last
        self._decide_save(self.step_counts.at(step), occasion, stop, evaluated, measured)

    def _find_events(self, end: int) -> Iterator[tuple[int, bool, bool]]:
        """(step, whether an evaluation is due, whether a metric that saves is logged) of each step with an event."""
        start = self.step_counts.start.step
        save = self.setting.save
        fixed = sorted(step for step in save.fixed_steps if step > start) if self.setting.enabled else []
        intervals: list[Interval | None] = [*self.setting.eval_intervals]
        evaluating, logging = range(len(intervals)), len(intervals)
        intervals.append(self.setting.log_interval if self.setting.enabled else None)
        if self.setting.enabled:
            intervals += [save.save_interval, save.ephemeral_save_interval]
        coming = [None if interval is None else self.step_counts.next_due(interval, start) for interval in intervals]
        while True:
            steps = [step for step in (*coming, *fixed[:1]) if step is not None]
            step = min(steps, default=end)
            if step >= end:
                yield end, any(coming[index] == end for index in evaluating), coming[logging] == end
                return
            yield step, any(coming[index] == step for index in evaluating), coming[logging] == step
            if fixed and fixed[0] == step:
                fixed.pop(0)
            for index, interval in enumerate(intervals):
                if interval is not None and coming[index] == step:
                    coming[index] = self.step_counts.next_due(interval, step)

    def _find_end(self) -> int | None:
        """The step at which the training stops; None if it is unknown."""
        limits = self.setting.limits
        ends = limits.hard_stop, limits.max_time_s, self.setting.stop_request
        # Without any known end, the search for one would not stop before the largest step.
        if not self.step_counts.knows(limits.max_duration) and all(end is None for end in ends):
            return None
        return find_first_step(lambda step: self._find_stop(step) is not None, self.step_counts.start.step)

    def _find_stop(self, step: int) -> Stop | None:
        """Why the training stops at a step, or None."""
        return self.setting.limits.why_stop(
            self.step_counts.at(step),
            process_s=self.step_counts.process_s(step),
            stop_request=self.setting.stop_request,
        )

    def _decide_save(
        self, now: Progress, occasion: Occasion, stop: Stop | None, evaluated: bool, measured: bool | None = None
    ) -> None:
        """Decide on a save, as `CheckpointerCallback.on_save_opportunity` does."""
        if not self.setting.enabled:
            return
        finished = stop.reason if stop is not None and occasion is Occasion.final else None
        facts = SaveFacts(now, occasion, self.last_saved, loaded=self.setting.loaded)
        if self.last_saved == now.step:
            self._complete_saved(facts, finished, evaluated)
            return
        decision = self.setting.save.why_save(facts)
        if decision is not None:
            self._save(now, decision, finished)
        measured = evaluated and self.setting.log_interval is None if measured is None else measured
        if measured and self.setting.save.keep_best is not None and decision is None:
            self.result.may_save.append(now.step)

    def _save(self, now: Progress, decision: Decision, finished: str | None) -> None:
        """Note a save, and what it removes; `finished` is the reason if it is the last one of the training."""
        save = Save(self.name(now), now.step, decision.kind, decision.reason, self.size(now.step))
        self.result.saves.append(save)
        # The peak is before the removals: those need a newer checkpoint that is committed.
        self._note_peak(now.step, 1, save.size_bytes)
        self.on_disk[save.name] = save.size_bytes
        self.bytes_on_disk += save.size_bytes
        self.undecided.append(Saved(save.name, now.step, save.kind, finished=finished is not None, progress=now))
        self.last_saved = now.step
        self._apply_retention(now.step)

    def _complete_saved(self, facts: SaveFacts, finished: str | None, evaluated: bool) -> None:
        """Complete the checkpoint of a step that was saved before its evaluation, or before it was known to be the
        last: it may become regular, or final."""
        step = facts.now.step
        index = next((index for index, saved in enumerate(self.undecided) if saved.step == step), None)
        if index is None or not (evaluated or (finished is not None and not self.undecided[index].finished)):
            return
        saved = self.undecided[index]
        # The checkpoint of this step exists, so the rule for a run without one does not apply.
        occasion = Occasion.step if facts.occasion is Occasion.pre_train else facts.occasion
        decision = self.setting.save.why_save(replace(facts, last_saved_step=None, occasion=occasion))
        if decision is not None and saved.kind is CheckpointKind.ephemeral:
            saved = replace(saved, kind=decision.kind)
            size_bytes = self.on_disk[saved.name]
            self.result.completed[saved.name] = Save(saved.name, step, decision.kind, decision.reason, size_bytes)
        self.undecided[index] = replace(saved, finished=saved.finished or finished is not None)
        self._apply_retention(step)

    def _apply_retention(self, step: int) -> None:
        """Note the checkpoints that are removed at a step."""
        for name, reason in self.setting.retention.why_remove(self.undecided).items():
            self.result.removals.append(RemovedCheckpoint(name, step, reason))
            self.bytes_on_disk -= self.on_disk.pop(name)
        # Those that no later save can remove are put aside, so that each step examines few.
        settled, self.undecided = self.setting.retention.split_settled(
            [saved for saved in self.undecided if saved.name in self.on_disk]
        )
        self.settled += settled

    def _note_peak(self, step: int, count: int, size_bytes: int) -> None:
        """Note what is on the disk if it is the most so far; `count` checkpoints of `size_bytes` are being saved."""
        count, size_bytes = len(self.on_disk) + count, self.bytes_on_disk + size_bytes
        peak = self.result.peak
        if count and (peak is None or (size_bytes, count) > (peak.size_bytes, peak.count)):
            self.result.peak = Peak(step, count, size_bytes)

    def _finish_timeline(self) -> Timeline:
        """The result, with the checkpoints that are left."""
        if self.setting.enabled:
            self.result.kept = self.setting.retention.why_keep([*self.settled, *self.undecided])
        return self.result
