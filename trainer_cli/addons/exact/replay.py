"""Make steps of a run again, and compare all that was recorded of them: every step of a run is a checkpoint.

    plan = plan_replay(run, 437)                        from which checkpoint, how many steps, how long
    composed = compose_replay(plan)                     the run's own config, with overrides
    replayed = replay(plan, composed, keep=[437])       RUN/replayed/step437, if no record differs

A resume is bit-exact, so the state after a step that was never saved is computed from the checkpoint before it. The
replay trains with the run's own loop, data and callbacks, and evaluates where the run did. It writes nothing into the
run but `RUN/replayed`: its loggers are replaced by one that compares each record with `metrics.jsonl`, and the
callback that saves by `ReplaySaver`.
"""

from __future__ import annotations

import logging
import platform
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.addons.exact.replay_plan import ReplayPlan, bytes_of_config, find_step, plan_replay
from trainer_cli.addons.exact.replay_records import RecordComparison, RecordDifference
from trainer_cli.catalog import Catalog
from trainer_cli.components import SAVER, SECTIONS
from trainer_cli.config import Composed, diff, from_yaml
from trainer_cli.environment import versions
from trainer_cli.errors import CheckpointError, NotFiniteError, TrainError, UserError
from trainer_cli.files import locked_file
from trainer_cli.keys import WITHOUT_EFFECT
from trainer_cli.loads import WHOLE
from trainer_cli.origin import EvaluatedOrigin, naming_project, other_source
from trainer_cli.parallel import ALONE, ProcessGroup
from trainer_cli.running import fork_path, import_torch, kept_settings, showing_import
from trainer_cli.runs import Run, RunDir
from trainer_cli.schema import SYSTEM, TrainConfig
from trainer_cli.selection import StoredCheckpoint
from trainer_cli.steps import Duration, Unit
from trainer_cli.storage import DOWNLOADS, open_storage
from trainer_cli.terminal import format_count

if TYPE_CHECKING:
    from trainer_cli.addons.exact.replay_saver import ReplaySaver
    from trainer_cli.checkpoint import Checkpointer
    from trainer_cli.running import Data
    from trainer_cli.trainer import Callback, Trainer

__all__ = ["ReplayPlan", "Replayed", "compose_replay", "find_step", "plan_replay", "replay"]

log = logging.getLogger(__name__)

NAME = "replay"
"""Name of the logger that compares the records."""
_COMPUTING = ("python", "trainer-cli", "torch", "numpy")
"""Versions that may change numbers."""
_REPLAYED_SECTIONS = tuple(section for section in SECTIONS if section != "loggers")


@dataclass(frozen=True, slots=True)
class Replayed:
    """The outcome of a replay."""

    plan: ReplayPlan
    records: int
    """Number of the run's records that it passed."""
    differences: Sequence[RecordDifference]
    """The first difference of each record that differs."""
    states: Mapping[int, str | None]
    """Step of each kept checkpoint that it passed -> the first part of its state that differs; None: all is equal."""
    kept: Mapping[int, Path]
    """Step -> the checkpoint that was written into `RUN/replayed`."""
    doubts: Sequence[str] = ()
    """What is not as in the run, if for that reason a state was not kept: nothing shows that it is that of the run."""

    @property
    def equal(self) -> bool:
        """Whether no record and no kept checkpoint differs."""
        return not self.differences and not any(self.states.values())

    def __str__(self) -> str:
        differing = [
            f"step {step}: {name} differs from the kept checkpoint" for step, name in self.states.items() if name
        ]
        lines = [*map(str, self.differences[:1]), *differing[:1]]
        if lines:
            return f"not equal: {'; '.join(lines)}"
        if not self.records and not self.states:
            return "nothing to compare: no record and no kept checkpoint is among these steps"
        states = f", and {format_count(len(self.states), 'kept checkpoint')}" if self.states else ""
        return f"verified: equal at {self.records} of {format_count(self.records, 'record')}{states}"


def compose_replay(
    plan: ReplayPlan, overrides: Sequence[str] = (), *, config_dir: Path | None = None, config_name: str = "config"
) -> Composed:
    """The config that made the steps, with overrides on top."""
    with naming_project(plan.run, config_dir):
        return from_yaml(
            plan.config, overrides, config_dir=config_dir, config_name=config_name, sections=_REPLAYED_SECTIONS
        )


def replay(
    plan: ReplayPlan,
    composed: Composed,
    *,
    keep: Collection[int] = (),
    callbacks: Mapping[str, Callback] | None = None,
    group: ProcessGroup = ALONE,
    config_dir: Path | None = None,
) -> Replayed:
    """Make the steps of a plan.

    Args:
        composed: of `compose_replay`.
        keep: steps whose state is written into `RUN/replayed`, unless a record up to it differs.
            Where source, versions, device or config are not those of the run, a record or a kept checkpoint has to show
            that its numbers are. If the first is later than the last step, the steps up to it are made before.
        callbacks: further callbacks by name, which look at the steps. They are called after the run's own, and must
            change nothing.
        group: the processes that train together, all of which call this with rank 0's plan and config.
        config_dir: as in `compose_replay`.

    Raises:
        TrainError: the steps cannot be made here.
        CheckpointError: nothing shows whether a state to keep is that of the run.
    """
    replayed = _Replay(plan, composed, keep, callbacks or {}, group, config_dir).run()
    if not replayed.doubts:
        return replayed
    doubts = "; ".join(replayed.doubts)
    later = group.on_main(lambda: _plan_evidence(plan, composed.config))
    if later is not None:
        if group.is_main:
            log.warning(
                "%s: replays up to step %d first, where the run recorded what shows whether step %d is its own",
                doubts, later.last, plan.last,
            )  # fmt: skip
        later = later if group.is_main else replace(later, records=())
        shown = _Replay(later, composed, (), {}, group, config_dir).run()
        if not shown.equal:
            return shown
        if shown.records or shown.states:
            return _Replay(plan, composed, keep, callbacks or {}, group, config_dir, is_shown=True).run()
    raise CheckpointError(
        f"step {plan.last} of {plan.run} is not kept: {doubts}; and no record or checkpoint of the run shows whether "
        "its numbers are those of the run",
        cure="Use the source, the versions and the config of the run.",
    )


def _plan_evidence(plan: ReplayPlan, config: TrainConfig) -> ReplayPlan | None:
    """The plan up to the first record or kept checkpoint after the last step; None without any that can be reached."""
    kept = [entry.step for entry, _ in Run.open(plan.run).entries if entry.step > plan.last]
    recorded = RecordComparison(plan.records, after=plan.last, without=_not_comparable(config)).steps()
    try:
        return plan_replay(plan.run, min([*kept, *recorded]), first=plan.start_step + 1)
    except (ValueError, UserError, CheckpointError):
        return None


@dataclass(frozen=True, slots=True)
class _Replay:
    """The fields are as in `replay`."""

    plan: ReplayPlan
    composed: Composed
    keep: Collection[int]
    callbacks: Mapping[str, Callback]
    group: ProcessGroup
    config_dir: Path | None
    is_shown: bool = False
    """Whether records or checkpoints after the last step have shown that source and config change no number."""

    def run(self) -> Replayed:
        """Make the steps, and compare them; none, if nothing up to those to keep can show that they are the run's."""
        with showing_import():
            import_torch()
        plan, composed, group = self.plan, self.composed, self.group
        run, config = RunDir(plan.run), _config_of_replay(composed.config)
        DOWNLOADS.configure(config.load)
        environment = run.environment_of(plan.attempt)
        _use_threads(environment.get("threads"))
        with naming_project(plan.run, self.config_dir):
            composed.check_targets(_REPLAYED_SECTIONS)
        # The records of a checkpoint that is loaded are the run's own.
        after = plan.start_step if plan.start is not None else -1
        comparison = RecordComparison(plan.records, after=after, without=_not_comparable(config))
        with ExitStack() as stack:
            if group.is_main:
                stack.enter_context(_held(run, plan, keeps=bool(self.keep)))
            with (
                group.checking("while data and model were made"),
                naming_project(plan.run, self.config_dir),
            ):
                data, saver, trainer = self._build(run, config, comparison)
            other_environment = [f"the run had {fact}" for fact in _other_environment(environment, trainer)]
            if other_environment and group.is_main:
                log.warning("%s: the comparison shows whether its numbers are the same", ", ".join(other_environment))
            if self.keep and not self.is_shown:
                saver.doubts = [*_changes(plan, composed), *other_environment]
                if saver.doubts and not group.on_main(lambda: saver.can_show(min(self.keep))):
                    return Replayed(plan, 0, (), {}, {}, saver.doubts)
            path, load = plan.start, WHOLE
            if path is None:
                path, load = group.on_main(lambda: fork_path(composed)), config.load.options()
            try:
                result = trainer.fit(
                    data.train, data.val, path, load=load, keep_settings=_changed_settings(plan, composed)
                )
            except NotFiniteError as error:
                # For a fit it states how to continue the run.
                words = f"{shlex.quote(str(plan.run))} {trainer.progress.step}"
                error.cure = f"`train data {words} --show` shows the samples of its last step."
                raise
            if result.step < plan.last:
                raise TrainError(
                    f"the replay of {plan.run} ended at step {result.step}, before step {plan.last}: {result.reason}"
                )
            return self._conclude(saver, comparison)

    def _build(
        self, run: RunDir, config: TrainConfig, comparison: RecordComparison
    ) -> tuple[Data, ReplaySaver, Trainer]:
        """Build what trains."""
        from trainer_cli.addons.exact.replay_saver import ReplaySaver as NewSaver
        from trainer_cli.running import Builder as NewBuilder, make_identity

        plan, composed, group = self.plan, self.composed, self.group
        group.divide_layers(config.parallel.tensor_size)
        builder = NewBuilder(config, composed.trust, group)
        data = builder.data()
        origin = EvaluatedOrigin(composed, data.loaders)
        if group.is_main and plan.reference is not None:
            origin.compare(plan.reference, plan.run)
        identity = make_identity(
            composed.config, bytes_of_config(plan.config), origin.now, run_id=plan.run_id, attempt=plan.attempt
        )
        saver = NewSaver(
            plan,
            _new_checkpointer(plan, config),
            identity,
            comparison,
            folder=run.stored_checkpoints(),
            replayed=run.replayed_folder,
            keep=self.keep,
        )
        trainer = builder.trainer(
            data,
            identity=identity,
            run_dir=run.replayed_folder,
            hparams=composed.hparams,
            saver=saver,
            loggers={NAME: comparison} if group.is_main else {},
            observers=self.callbacks,
        )
        return data, saver, trainer

    def _conclude(self, saver: ReplaySaver, comparison: RecordComparison) -> Replayed:
        last, start_step = self.plan.last, self.plan.start_step
        outcome = Replayed(
            self.plan, len(comparison.steps(last)), list(comparison.differences(last)), saver.states, saver.kept
        )
        # Rank 0 alone has the records.
        outcome = self.group.broadcast(outcome)
        # A checkpoint that was to be compared may have been removed meanwhile.
        is_kept = all(step in saver.kept for step in self.keep if step > start_step)
        return replace(outcome, doubts=() if is_kept or not outcome.equal else saver.doubts)


def _config_of_replay(config: TrainConfig) -> TrainConfig:
    """The config without what writes, notifies or ends a process by the clock."""
    callbacks = {name: node for name, node in config.callbacks.items() if name not in (SAVER, SYSTEM)}
    return replace(config, loggers={}, callbacks=callbacks, loop=replace(config.loop, max_time=None))


def _not_comparable(config: TrainConfig) -> list[str]:
    """Globs of metrics that are logged at steps which the clock chose."""
    loop = config.loop
    intervals = {"train/*": loop.log_interval, "*/*": loop.eval_interval}
    return [
        pattern
        for pattern, interval in intervals.items()
        if interval is not None and Duration.parse(interval).unit is Unit.SECOND
    ]


def _use_threads(threads: Any) -> None:
    """Compute with as many threads as the run: sums are made in another order by another number."""
    import torch

    if isinstance(threads, int) and threads > 0 and threads != torch.get_num_threads():
        torch.set_num_threads(threads)


@contextmanager
def _held(run: RunDir, plan: ReplayPlan, *, keeps: bool) -> Iterator[None]:
    """Hold off a training and the removal of the checkpoint to begin with; and other replays that write."""
    with ExitStack() as stack:
        if (lock := run.share()) is not None:
            stack.enter_context(lock)
        if plan.start is not None:
            try:
                stack.enter_context(Catalog.of(plan.start.parent).storage.reading(plan.start.name))
            except FileNotFoundError:
                raise CheckpointError(
                    f"{plan.start} was removed before it was read", cure="Run the command again."
                ) from None
        if keeps:
            run.replayed_folder.mkdir(exist_ok=True)
            # Waits: two replays of one step would write the same folder.
            stack.enter_context(locked_file(run.replayed_folder / ".lock"))
            open_storage(run.replayed_folder, run_id=plan.run_id).sweep()
        yield


def _new_checkpointer(plan: ReplayPlan, config: TrainConfig) -> Checkpointer:
    """A checkpointer that reads the run's checkpoints and writes replayed ones in the same format."""
    from trainer_cli.checkpoint import Checkpointer
    from trainer_cli.format import new_format

    settings = config.checkpoint
    return Checkpointer(
        format=new_format(settings.format, settings.compression),
        # Not with the run's own cache of an object store: nothing is written there.
        storage=partial(open_storage, run_id=plan.run_id),
        digest=settings.digest,
    )


def _changed_settings(plan: ReplayPlan, composed: Composed) -> tuple[str, ...]:
    """Optimizer settings that have changed since the checkpoint to begin with."""
    source, _ = ("", "") if plan.start is None else StoredCheckpoint(plan.start).read_config()
    return kept_settings(diff(from_yaml(source, trusted=True, missing_ok=True).raw, composed.raw)) if source else ()


def _changes(plan: ReplayPlan, composed: Composed) -> Iterator[str]:
    """What of the project's source and of the config is not as in the run, and may change numbers."""
    # A replayed state was kept because its source is that of the run, or because a record has shown it to be equal.
    manifests = [StoredCheckpoint(path).manifest for path in (plan.start, plan.reference) if path is not None]
    sources = [other_source(manifest.source, composed.project_root) for manifest in manifests if manifest is not None]
    if all(sources):
        for file, how in (sources[-1] if sources else {}).items():
            yield f"{file} {'has changed' if how == 'changed' else f'is {how}'}"
    attempts = [attempt.get("attempt") for attempt in RunDir(plan.run).attempts]
    if attempts and plan.attempt != attempts[-1] and plan.config == RunDir(plan.run).config_file:
        yield f"no checkpoint of attempt {plan.attempt} is left, so its config is taken to be that of the run"
    for change in diff(from_yaml(plan.config, trusted=True, missing_ok=True).raw, composed.raw):
        if change.path[0] not in WITHOUT_EFFECT:
            yield str(change)


def _other_environment(environment: Mapping[str, Any], trainer: Trainer) -> Iterator[str]:
    """What this process has in another version or number than the attempt that made the steps."""
    recorded = {**(environment.get("versions") or {}), "python": environment.get("python")}
    now = {**versions(), "python": platform.python_version()}
    yield from (
        f"{name} {recorded[name]} (here {now[name]})"
        for name in now
        if recorded.get(name) is not None and now[name] != recorded[name] and name in _COMPUTING
    )
    facts = {"device": str(trainer.device), "processes": trainer.strategy.world_size}
    yield from (
        f"{name} {environment[name]} (here {value})"
        for name, value in facts.items()
        if environment.get(name, value) != value
    )
