"""`train plan`: what a `fit` would do now, without training or writing anything.

compose and check the config; examine the run directory as `fit` does, but change nothing in it
build the data, for its length; the loop computes intervals and limits from it
build model and optimizer without values, for the size of a checkpoint
simulate the policy from the step at which the run would start
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.auto_values import BATCH_SIZE, stand_ins
from trainer_cli.catalog import Catalog, Entry
from trainer_cli.components import SAVER, import_from, import_target
from trainer_cli.config import Composed
from trainer_cli.errors import UserError
from trainer_cli.goodput import ProbedTimes
from trainer_cli.layout import Naming
from trainer_cli.loads import find_left_out
from trainer_cli.messages import to_console
from trainer_cli.metric_names import TRAIN_PREFIX
from trainer_cli.parallel import imitate_group
from trainer_cli.policy import RetentionRules, Saved, SaveRules, Simulation, Stop, Timeline
from trainer_cli.running.failures import BestInterval, find_best_interval
from trainer_cli.running.start import Done, Start, refuse_no_optimizer, start_existing, start_new
from trainer_cli.running.torch_import import import_torch
from trainer_cli.runs import RunDir
from trainer_cli.schema import CheckpointConfig, Compression, Newer
from trainer_cli.steps import GLOBAL_BATCH_SIZE, Progress, RunStatus, StepCounts
from trainer_cli.storage import DOWNLOADS

if TYPE_CHECKING:
    from trainer_cli.running.build import Builder, Data
    from trainer_cli.running.checkpoint_size import CheckpointSize
    from trainer_cli.trainer import TrainingLoop

log = logging.getLogger(__name__)

_LOGGING_HOOKS = ("on_validate_end", "on_after_evaluation", "run_validation", "logged_metrics")


@dataclass(frozen=True, slots=True)
class StartPoint:
    """The progress at which the training starts, and the run's checkpoints on the disk at that time."""

    progress: Progress
    path: Path | None = None
    """The checkpoint to load: its whole state or only its weights."""
    saved: tuple[Saved, ...] = ()
    sizes: dict[str, int] | None = None
    last_saved_step: int | None = None
    pending_evaluation: bool = False
    newer: tuple[str, ...] = ()
    """Checkpoints that are newer than the one named by `resume`, and are removed."""


@dataclass(frozen=True, slots=True)
class Unfreezing:
    """Parameters that are frozen for a part of the run."""

    pattern: str
    duration: str
    step: int | None
    """The step after which they are trained; None if it is unknown before the training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a `fit` would do."""

    run_dir: Path
    start: Start | Done
    start_point: StartPoint
    step_counts: StepCounts
    timeline: Timeline
    size: CheckpointSize
    copies: str | None = None
    """The folder to which checkpoints are copied, and which of them."""
    at_most: tuple[int, int] | None = None
    """Largest number and size in bytes of the checkpoints if a metric decides which to save; None if it does not."""
    estimates: tuple[str, ...] = ()
    """What is estimated from the given times and counts."""
    left_out: tuple[str, ...] = ()
    """States that the checkpoints will lack."""
    unknown: tuple[str, ...] = ()
    """What is unknown before the training."""
    unfreezes: tuple[Unfreezing, ...] = ()
    """Parameters that are trained later."""
    best_interval: BestInterval | None = None
    """The best interval of saves for the given time between failures."""
    probed: ProbedTimes | None = None
    """What some steps took."""

    @property
    def duration_s(self) -> float | None:
        """How long the run will take, by the steps that were probed; None without any, or without a known end."""
        times, line = self.probed, self.timeline
        if times is None or line.end is None:
            return None
        steps = line.end.step - self.start_point.progress.step
        evaluations_s, saves_s = len(line.evaluations) * times.evaluation_s, len(line.saves) * times.save_s
        return times.start_s + steps * (self.step_counts.step_time_s or times.step_s) + evaluations_s + saves_s


def plan(
    composed: Composed,
    *,
    step_time_s: float | None = None,
    step_tokens: float | None = None,
    between_failures_s: float | None = None,
    probe: Callable[[Composed], ProbedTimes] | None = None,
) -> Plan:
    """Plan what a `fit` with this config would do now. Nothing is written, locked or trained.

    Args:
        step_time_s, step_tokens: expected duration and tokens of one optimizer step, for intervals in these units.
        between_failures_s: mean time between failures, for which the best interval of saves is computed.
        probe: times some steps, if the run is to be trained.

    Raises:
        TrainError: `fit` would refuse the config before its first step.
    """
    refuse_no_optimizer(composed)
    import_from(composed.project_root)
    to_console(composed.config.logging.level)
    DOWNLOADS.configure(composed.config.load)
    with composed.placing():
        run = RunDir(composed.config.run_dir)
        start = (
            start_existing(run, composed, read_only=True)
            if run.exists_as_run()
            else start_new(run, composed, read_only=True)
        )
        if isinstance(start, Done):
            if probe is not None:
                log.info("nothing is probed, since nothing would be trained")
            return _plan_nothing(run, start, step_time_s, between_failures_s)
        return _plan_training(composed, start, step_time_s, step_tokens, between_failures_s, probe)


def _plan_nothing(run: RunDir, done: Done, step_time_s: float | None, between_failures_s: float | None) -> Plan:
    """The plan for a run that has finished."""
    progress = Progress(step=done.step)
    from trainer_cli.running.checkpoint_size import CheckpointSize

    return Plan(
        run_dir=run.path,
        start=done,
        start_point=StartPoint(progress),
        step_counts=StepCounts(start=progress),
        timeline=Timeline(),
        size=CheckpointSize(),
        best_interval=_require_best_interval(run, None, between_failures_s, step_time_s, in_background=False),
    )


def _plan_training(
    composed: Composed,
    start: Start,
    step_time_s: float | None,
    step_tokens: float | None,
    between_failures_s: float | None,
    probe: Callable[[Composed], ProbedTimes] | None,
) -> Plan:
    """The plan for a run that will train: build what it needs, and simulate it."""
    import_torch()
    from trainer_cli.callbacks import saves_in_background
    from trainer_cli.running.build import Builder

    composed = composed.with_values(start.stored_values)
    if (probed := None if probe is None else probe(composed)) is not None:
        step_time_s = step_time_s or probed.step_s
    undecided = stand_ins(composed.config)
    composed = composed.with_values(undecided)
    config = composed.config
    folder = start.run.folder_for(config.checkpoint.folder)
    # Targets are checked before the data is built, which may take minutes.
    composed.check_targets()
    start_point = start_point_of(start, start.fork(composed), folder, composed)
    # No process is started: sizes and lengths depend on the number of ranks alone.
    group = imitate_group(config.parallel.processes_per_node or 1, config.parallel.tensor_size)
    builder = Builder(config, composed.trust, group)
    data = builder.data()
    loop = builder.loop()
    # With a global batch size an epoch has the same steps whatever the batch size.
    knows_length = BATCH_SIZE not in undecided or config.data.get(GLOBAL_BATCH_SIZE) is not None
    train_loader = data.train if knows_length else _UnknownLength()
    loop.learn_lengths(train_loader, start_point.progress)
    loop.check_hard_stop(start_point.progress)
    loop.start_at(train_loader, start_point.progress)
    kinds = _import_callback_classes(composed)
    checkpoint = config.checkpoint.overridden_by(config.callbacks.get(SAVER))
    in_background = saves_in_background(checkpoint.save_async)
    step_counts = loop.step_counts(train_loader, start_point.progress, step_time_s=step_time_s, step_tokens=step_tokens)
    callbacks = any(_overrides(kind, "run_validation") for kind in kinds.values())
    setting = simulation_of(loop, checkpoint, start, start_point, evaluated=data.val, callbacks=callbacks)
    if setting.enabled and (warning := setting.save.check_ephemeral(loop.limits.max_duration, step_counts)):
        log.warning("%s", warning)
    _warn_of_short_patience(builder, kinds, loop, data)
    # The size of a checkpoint depends on the progress at the end, whose numbers have more digits.
    end = setting.run(step_counts, most_saves=0).end or start_point.progress
    size = _measure_checkpoints(checkpoint, composed, builder, data, end, kinds)
    name = _make_namer(composed, checkpoint, group.world_size)
    # It is simulated again, now with sizes and names, which retention needs.
    timeline = setting.run(step_counts, name=name, size=size.at, sizes=start_point.sizes)
    return Plan(
        run_dir=start.run.path,
        start=start,
        start_point=start_point,
        step_counts=step_counts,
        timeline=timeline,
        size=size,
        copies=_describe_copies(checkpoint),
        at_most=_bound_checkpoints(setting, timeline, size),
        estimates=(*_describe_estimates(setting, step_counts), *_describe_format(checkpoint)),
        left_out=find_left_out(checkpoint.leave_out, kinds),
        unfreezes=tuple(_list_unfreezes(config.freeze, loop)),
        unknown=(
            *(f"{key} (auto): its value is found before the first step" for key in undecided),
            *_describe_unknown(setting, step_counts, kinds, size, start.run, knows_length=knows_length),
        ),
        best_interval=_require_best_interval(
            start.run, size.trained, between_failures_s, step_time_s, in_background=in_background
        ),
        probed=probed,
    )


def _import_callback_classes(composed: Composed) -> dict[str, Any]:
    """What the callbacks of the config are made by, by name; nothing is made."""
    return {
        name: import_target(str(node["_target_"]), f"callbacks.{name}._target_", composed.trust)
        for name, node in composed.config.callbacks.items()
        if node is not None
    }


def _warn_of_short_patience(builder: Builder, kinds: dict[str, Any], loop: TrainingLoop, data: Data) -> None:
    """Warn of early stopping that may end the run before its metric is measured often enough."""
    from trainer_cli.callbacks import EarlyStopping

    for name, kind in kinds.items():
        if isinstance(kind, type) and issubclass(kind, EarlyStopping):
            stopping = builder.make(builder.config.callbacks[name], f"callbacks.{name}")
            if (warning := stopping.why_short(loop, data.val)) is not None:
                log.warning("%s", warning)


def _measure_checkpoints(
    checkpoint: CheckpointConfig,
    composed: Composed,
    builder: Builder,
    data: Data,
    end: Progress,
    kinds: dict[str, Any],
) -> CheckpointSize:
    """The sizes of the checkpoints of a run that ends at `end`.

    Raises:
        UserError: a setting names a metric of no validation loader, unless a callback of the user may log it.
    """
    from trainer_cli.format import new_format
    from trainer_cli.running.checkpoint_size import LOG_MARKS_BYTES, checkpoint_size

    best = checkpoint.keep_best.metric
    needed = {"checkpoint.keep_best.metric": best} if best and checkpoint.enabled else {}
    return checkpoint_size(
        builder,
        data,
        end,
        new_format(checkpoint.format, checkpoint.compression),
        beside=len(composed.to_yaml().encode()),
        log_marks=LOG_MARKS_BYTES,
        leave_out=checkpoint.leave_out,
        metrics=None if any(map(_may_log, kinds.values())) else needed,
    )


class _UnknownLength:
    """Stands for a train loader whose batch size is still to be found."""


def _require_best_interval(
    run: RunDir,
    size_bytes: int | None,
    between_failures_s: float | None,
    step_time_s: float | None,
    *,
    in_background: bool,
) -> BestInterval | None:
    """See `find_best_interval`; None if no time between failures is given.

    Raises:
        UserError: what a save takes is not known.
    """
    if between_failures_s is None:
        return None
    best = find_best_interval(run, size_bytes, between_failures_s, step_time_s, in_background=in_background)
    if best is None:
        raise UserError(
            f"{run.path} has not measured two saves in one start, and what a save takes cannot be estimated",
            where="--between-failures",
            cure="Train until two checkpoints are saved, then plan again.",
        )
    return best


def simulation_of(
    loop: TrainingLoop,
    checkpoint: CheckpointConfig,
    start: Start,
    start_point: StartPoint,
    *,
    evaluated: Iterable[str],
    callbacks: bool,
) -> Simulation:
    """The settings of the simulation, for a loop that knows its lengths.

    Args:
        evaluated: names of the validation loaders.
        callbacks: whether a callback runs evaluations itself.
    """
    names = list(evaluated)
    loop.evaluations.check(names)
    return Simulation(
        limits=loop.limits,
        save=SaveRules.of(checkpoint, loop.checkpoint_interval),
        retention=RetentionRules.of(checkpoint, loop.checkpoint_interval),
        eval_intervals=loop.evaluations.intervals(names, callbacks=callbacks),
        log_interval=loop.log_interval if str(checkpoint.keep_best.metric).startswith(TRAIN_PREFIX) else None,
        eval_at_start=loop.settings.eval_at_start,
        evaluates=bool(names) or callbacks,
        pending_evaluation=start_point.pending_evaluation,
        enabled=checkpoint.enabled,
        loaded=start_point.path is not None,
        saved=start_point.saved,
        last_saved_step=start_point.last_saved_step,
        stop_request=None if start.finished is None else Stop(start.finished, finished=True),
    )


def start_point_of(
    start: Start, fork: Path | None, folder: Path, composed: Composed, saved: Sequence[Entry] | None = None
) -> StartPoint:
    """The start point of a training that saves in `folder`.

    Args:
        saved: the run's valid checkpoints in `folder`, by step; None: they are all looked at.
    """
    path = start.path or fork
    whole = start.entry is not None or (fork is not None and composed.config.load.options().resumes)
    entry, source = start.entry, start.run.catalog(start.folder)
    if entry is None and fork is not None:
        source = Catalog.of(fork.parent)
        entry = source.entry(fork.name)
    progress = _progress(entry) if whole and entry is not None else Progress()
    catalog = start.run.catalog(folder)
    if start.entry is None:
        # A run that begins anew removes its checkpoint of step 0.
        saved = ()
    elif saved is None:
        saved = catalog.valid(start.run_id)
    before = [kept for kept in saved if kept.step <= progress.step]
    newer = [kept for kept in saved if kept.step > progress.step and catalog.is_intact(kept)]
    return StartPoint(
        progress,
        path,
        tuple(kept.facts for kept in before if kept.facts is not None),
        {kept.name: kept.size_bytes for kept in before},
        max((kept.step for kept in before), default=None),
        path is not None and whole and entry is not None and has_pending_evaluation(source, entry),
        tuple(kept.name for kept in newer) if composed.config.checkpoint.newer is Newer.trash else (),
    )


def _progress(entry: Entry) -> Progress:
    assert entry.manifest is not None
    return Progress.of(entry.manifest.progress) or Progress(step=entry.step, epoch=entry.manifest.epoch)


def has_pending_evaluation(catalog: Catalog, entry: Entry) -> bool:
    """Whether the attempt that saved a checkpoint was stopped before an evaluation that was due."""
    # Imported here: it imports torch, and errors of a config are reported without waiting for that.
    from trainer_cli.format import new_format

    if (manifest := entry.manifest) is None:
        return False
    with catalog.storage.reading(entry.name) as folder:
        loop = new_format(manifest.format, where=entry.name).read_values(folder, manifest, ["loop"]).get("loop")
    return isinstance(loop, dict) and loop.get("owed_record") is not None


def _list_unfreezes(patterns: Any, loop: TrainingLoop) -> Iterator[Unfreezing]:
    """The parameters that `freeze` freezes for a part of the run."""
    from trainer_cli.optim import Freezing

    for pattern, duration, end in Freezing.ends(patterns, loop):
        yield Unfreezing(pattern, str(duration), end)


def _overrides(kind: Any, hook: str) -> bool:
    from trainer_cli.trainer import Callback

    return getattr(kind, hook, None) is not getattr(Callback, hook)


def _may_log(kind: Any) -> bool:
    """Whether callbacks of a class of the user may log metrics of an evaluation."""
    return not kind.__module__.startswith("trainer_cli.") and any(_overrides(kind, hook) for hook in _LOGGING_HOOKS)


def _make_namer(composed: Composed, checkpoint: CheckpointConfig, world_size: int) -> Callable[[Progress], str]:
    """A function from counts to the name of a checkpoint."""
    naming, run_name = Naming(checkpoint.name, checkpoint.suffix), composed.config.name or "default"

    def name(progress: Progress) -> str:
        return naming.name({**progress.state_dict(), "run_name": run_name, "world_size": world_size})

    return name


def _bound_checkpoints(setting: Simulation, timeline: Timeline, size: CheckpointSize) -> tuple[int, int] | None:
    """Largest number and size in bytes of the checkpoints, if every evaluation is among the best, and there is always
    an automatic one."""
    best, automatic = setting.save.keep_best, int(setting.save.budget is not None)
    if not setting.enabled or not (automatic or (best is not None and timeline.may_save)):
        return None
    count, size_bytes = (timeline.peak.count, timeline.peak.size_bytes) if timeline.peak is not None else (0, 0)
    may_save = len(timeline.may_save)
    more = 0
    if best is not None and may_save:
        # One more than the best, because retention runs after the next one is committed.
        more = may_save if setting.retention.keeps_all else min(may_save, best.count) + 1
    more += automatic
    return count + more, size_bytes + more * size.at(1)


def _describe_copies(checkpoint: CheckpointConfig) -> str | None:
    """Where checkpoints are copied, and which; None if none is."""
    folder, every = checkpoint.copy_to.folder, checkpoint.copy_to.every
    if folder is None or not checkpoint.enabled:
        return None
    return f"{folder}: {'each checkpoint' if every == 1 else f'one checkpoint of {every}, and the last'}"


def _list_rules(setting: Simulation) -> Iterator[tuple[str, Any]]:
    """(key, interval or None) of each setting whose steps are simulated."""
    yield "loop.max_duration", setting.limits.max_duration
    yield "loop.hard_stop", setting.limits.hard_stop
    for interval in setting.eval_intervals:
        yield "loop.eval_interval", interval
    yield "loop.log_interval", setting.log_interval
    if setting.enabled:
        yield "checkpoint.save_interval", setting.save.save_interval
        yield "checkpoint.ephemeral_save_interval", setting.save.ephemeral_save_interval
        yield "checkpoint.keep_every", setting.retention.keep_every


def _describe_estimates(setting: Simulation, step_counts: StepCounts) -> Iterator[str]:
    """What is estimated from the time and the tokens of a step."""
    texts = {
        "s": ("step_time_s", "a step of {:.3g} s"),
        "tok": ("step_tokens", "--step-tokens, {:g} tokens a step; the steps differ where samples do"),
    }
    for key, interval in _list_rules(setting):
        if interval is not None and interval.duration.unit in texts:
            field, text = texts[interval.duration.unit]
            if (value := getattr(step_counts, field)) is not None:
                yield f"{key} ({interval.duration}): estimated from {text.format(value)}"
    if setting.retention.keep_by_age and setting.enabled and step_counts.step_time_s is not None:
        yield f"checkpoint.keep_by_age: estimated from a step of {step_counts.step_time_s:.3g} s"
    if setting.limits.max_time_s is not None and step_counts.step_time_s is not None:
        limit = setting.limits.max_time_s
        yield f"loop.max_time ({limit:g}s): estimated from a step of {step_counts.step_time_s:.3g} s"


def _describe_format(checkpoint: CheckpointConfig) -> Iterator[str]:
    """In what the sizes are not exact because of the format."""
    if checkpoint.compression is not Compression.none:
        yield f"checkpoint.compression ({checkpoint.compression}): sizes are those before compression"
    if (uncounted := checkpoint.format.uncounted_bytes) is not None:
        yield f"checkpoint.format ({checkpoint.format}): sizes are those of the format tensors; {uncounted}"


def _describe_unknown(
    setting: Simulation,
    step_counts: StepCounts,
    kinds: dict[str, Any],
    size: CheckpointSize,
    run: RunDir,
    *,
    knows_length: bool,
) -> Iterator[str]:
    """What the plan leaves out, and how to make it known."""
    no_length = "the train loader has no length" if knows_length else "it depends on data.batch_size"
    cures = {"s": "give --probe or --step-time SECONDS", "tok": "give --step-tokens N"}
    for key, interval in _list_rules(setting):
        if interval is not None and not step_counts.knows(interval):
            cure = cures.get(interval.duration.unit, no_length)
            yield f"{key} ({interval.duration}): when it is reached is unknown, so it is left out; {cure}"
    if setting.retention.keep_by_age and setting.enabled and step_counts.step_time_s is None:
        yield f"checkpoint.keep_by_age: what it keeps is unknown, so it is left out; {cures['s']}"
    if setting.limits.max_time_s is not None and step_counts.step_time_s is None:
        yield f"loop.max_time ({setting.limits.max_time_s:g}s): left out; {cures['s']}"
    if setting.save.budget is not None and setting.enabled:
        share = f"{100 * setting.save.budget:g} % of the time"
        yield f"checkpoint.ephemeral_save_interval (auto): as often as the disk and {share} allow; not listed"
    if setting.save.keep_best is not None and setting.enabled:
        metric = setting.save.keep_best.metric
        yield f"checkpoint.keep_best: {metric} is measured during the run; an evaluation may save"
    for name, kind in kinds.items():
        package = str(getattr(kind, "__module__", "")).partition(".")[0]
        if name == SAVER:
            yield f"callbacks.{name}: a {kind.__name__} may decide differently"
        elif kind.__name__ == "EarlyStopping" and package == "trainer_cli":
            yield f"callbacks.{name}: may end the run earlier"
        elif package != "trainer_cli":
            yield f"callbacks.{name}: what it saves, asks for or stops is not counted"
    if size.note is not None:
        yield size.note
    if run.read_summary().get("status") == RunStatus.running:
        yield f"{run.path} is being trained, or was killed: this is the plan from its present state"
