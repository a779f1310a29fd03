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
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trainer_cli.addons.exact.replay_plan import ReplayPlan, bytes_of_config, find_changes, plan_replay, read_config
from trainer_cli.addons.exact.replay_records import RecordComparison, RecordDifference
from trainer_cli.catalog import Catalog
from trainer_cli.components import SAVER, SECTIONS
from trainer_cli.config import Composed, diff, from_yaml
from trainer_cli.environment import versions
from trainer_cli.errors import CheckpointError, NotFiniteError, TrainError, UserError
from trainer_cli.files import locked_file
from trainer_cli.loads import WHOLE
from trainer_cli.origin import EvaluatedOrigin, naming_project, other_source, use_kept_source
from trainer_cli.parallel import ALONE, ProcessGroup
from trainer_cli.running import fork_path, import_torch, kept_settings, showing_import
from trainer_cli.runs import Run, RunDir
from trainer_cli.schema import SYSTEM, TrainConfig
from trainer_cli.selection import StoredCheckpoint
from trainer_cli.steps import Duration, Unit
from trainer_cli.storage import DOWNLOADS, open_storage
from trainer_cli.terminal import format_count

if TYPE_CHECKING:
    from trainer_cli.trainer import Callback

log = logging.getLogger(__name__)

NAME = "replay"
"""Name of the logger that compares the records."""
_COMPUTING = ("trainer-cli", "torch", "numpy")
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
            return f"not equal: {'; '.join([*lines, *self.plan.doubts])}"
        if not self.records and not self.states:
            nothing = "nothing to compare: no record and no kept checkpoint is among these steps"
            return "; ".join([nothing, *self.plan.doubts])
        states = f", and {format_count(len(self.states), 'kept checkpoint')}" if self.states else ""
        return f"verified: equal at {self.records} of {format_count(self.records, 'record')}{states}"


def compose_replay(
    plan: ReplayPlan, overrides: Sequence[str] = (), *, config_dir: Path | None = None, config_name: str = "config"
) -> Composed:
    """The config that made the steps, with overrides on top. Classes are imported from the source that made them."""
    use_kept_source(RunDir(plan.run), plan.attempt, overrides, config_dir)
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
    with showing_import():
        import_torch()
    config = _config_of_replay(composed.config)
    fit = partial(_fit, composed=composed, config=config, group=group, config_dir=config_dir)
    environment = group.on_main(
        lambda: [f"the run had {fact}" for fact in _find_other_environment(plan, config, group)]
    )
    if environment and group.is_main:
        log.warning("%s: the comparison shows whether its numbers are the same", ", ".join(environment))
    doubts = group.on_main(lambda: [*_find_changes(plan, composed), *environment, *plan.doubts] if keep else [])
    if doubts and not group.on_main(lambda: _has_proof(plan, config, min(keep))):
        # Equal records after a return to a checkpoint show nothing of the steps before it.
        later = group.on_main(lambda: None if plan.went_back else _plan_proof(plan, config))
        if later is None:
            raise _refuse_to_keep(plan, doubts)
        if group.is_main:
            log.warning(
                "%s: replays up to step %d first, where the run recorded what shows whether step %d is its own",
                "; ".join(doubts), later.last, plan.last,
            )  # fmt: skip
        proof = fit(later if group.is_main else replace(later, records=()))
        if not proof.equal:
            return proof
        if not proof.records and not proof.states:
            raise _refuse_to_keep(plan, doubts)
        doubts = []
    replayed = fit(plan, keep=keep, needs_proof=bool(doubts), callbacks=callbacks or {})
    # A checkpoint that was to be compared may have been removed meanwhile.
    if doubts and replayed.equal and not all(step in replayed.kept for step in keep if step > plan.start_step):
        raise _refuse_to_keep(plan, doubts)
    return replayed


def _refuse_to_keep(plan: ReplayPlan, doubts: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"step {plan.last} of {plan.run} is not kept: {'; '.join(doubts)}; and no record or checkpoint of the run "
        "shows whether its numbers are those of the run",
        cure="Use the source, the versions and the config of the run.",
    )


def _has_proof(plan: ReplayPlan, config: TrainConfig, step: int) -> bool:
    """Whether a record or a kept checkpoint is among the steps of a replay up to one of them."""
    return bool(_compare_records(plan, config).steps(step)) or any(kept <= step for kept in plan.kept)


def _plan_proof(plan: ReplayPlan, config: TrainConfig) -> ReplayPlan | None:
    """The plan up to the first record or kept checkpoint after the last step; None without any that can be reached."""
    kept = [entry.step for entry, _ in Run.open(plan.run).entries]
    try:
        last = min(step for step in [*kept, *_compare_records(plan, config).steps()] if step > plan.last)
        return plan_replay(plan.run, last, first=plan.start_step + 1)
    except (ValueError, UserError, CheckpointError):
        return None


def _compare_records(plan: ReplayPlan, config: TrainConfig) -> RecordComparison:
    # The records of a checkpoint that is loaded are the run's own.
    after = plan.start_step if plan.start is not None else -1
    return RecordComparison(plan.records, after=after, without=not_comparable(config))


def _fit(
    plan: ReplayPlan,
    *,
    composed: Composed,
    config: TrainConfig,
    group: ProcessGroup,
    config_dir: Path | None,
    keep: Collection[int] = (),
    needs_proof: bool = False,
    callbacks: Mapping[str, Callback] = MappingProxyType({}),
) -> Replayed:
    """Make the steps of a plan, and compare them. The arguments are as in `replay` and `ReplaySaver`."""
    from trainer_cli.addons.exact.replay_saver import ReplaySaver
    from trainer_cli.checkpoint import Checkpointer
    from trainer_cli.format import new_format
    from trainer_cli.running import Builder, make_identity

    run = RunDir(plan.run)
    DOWNLOADS.configure(config.load)
    _use_threads(run.environment_of(plan.attempt).get("threads"))
    comparison = _compare_records(plan, config)
    with ExitStack() as stack:
        with naming_project(plan.run, config_dir):
            composed.check_targets(_REPLAYED_SECTIONS)
        if group.is_main:
            stack.enter_context(_hold(run, plan, keeps=bool(keep)))
        with group.checking("while data and model were made"), naming_project(plan.run, config_dir):
            group.divide_layers(config.parallel.tensor_size)
            builder = Builder(config, composed.trust, group)
            data = builder.data()
            origin = EvaluatedOrigin(composed, data.loaders)
            if group.is_main and plan.reference is not None:
                origin.compare(plan.reference, plan.run)
            identity = make_identity(
                composed.config, bytes_of_config(plan.config), origin.now, run_id=plan.run_id, attempt=plan.attempt
            )
            checkpointer = Checkpointer(
                format=new_format(config.checkpoint.format, config.checkpoint.compression),
                # Not with the run's own cache of an object store: nothing is written there.
                storage=partial(open_storage, run_id=plan.run_id),
                digest=config.checkpoint.digest,
            )
            saver = ReplaySaver(plan, run, checkpointer, identity, comparison, keep=keep, needs_proof=needs_proof)
            trainer = builder.trainer(
                data,
                identity=identity,
                run_dir=run.replayed_folder,
                hparams=composed.hparams,
                saver=saver,
                loggers={NAME: comparison} if group.is_main else {},
                observers=callbacks,
            )
        path, load = plan.start, WHOLE
        if path is None:
            path, load = group.on_main(lambda: fork_path(composed)), config.load.options()
        try:
            result = trainer.fit(
                data.train, data.val, path, load=load, keep_settings=_list_changed_settings(plan, composed)
            )
        except NotFiniteError as error:
            # After the last step it is how the run ended, too: its records are compared. But no state was kept.
            if keep or trainer.progress.step < plan.last:
                # For a fit it states how to continue the run.
                words = f"{shlex.quote(str(plan.run))} {trainer.progress.step}"
                error.cure = f"`train data {words} --show` shows the samples of its last step."
                raise
        if (step := trainer.progress.step) < plan.last:
            raise TrainError(f"the replay of {plan.run} ended at step {step}, before step {plan.last}: {result.reason}")
        records, differences = len(comparison.steps(plan.last)), list(comparison.differences(plan.last))
        # Rank 0 alone has the records.
        return group.broadcast(Replayed(plan, records, differences, saver.states, saver.kept))


def _config_of_replay(config: TrainConfig) -> TrainConfig:
    """The config without what writes, notifies or ends a process by the clock."""
    callbacks = {name: node for name, node in config.callbacks.items() if name not in (SAVER, SYSTEM)}
    return replace(config, loggers={}, callbacks=callbacks, loop=replace(config.loop, max_time=None))


def not_comparable(config: TrainConfig) -> list[str]:
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
def _hold(run: RunDir, plan: ReplayPlan, *, keeps: bool) -> Iterator[None]:
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


def _list_changed_settings(plan: ReplayPlan, composed: Composed) -> tuple[str, ...]:
    """Optimizer settings that have changed since the checkpoint to begin with."""
    source, _ = ("", "") if plan.start is None else StoredCheckpoint(plan.start).read_config()
    return kept_settings(diff(read_config(source).raw, composed.raw)) if source else ()


def _find_changes(plan: ReplayPlan, composed: Composed) -> Iterator[str]:
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
    yield from map(str, find_changes(plan.config, composed))


def _find_other_environment(plan: ReplayPlan, config: TrainConfig, group: ProcessGroup) -> Iterator[str]:
    """What this process has in another version or number than the attempt that made the steps."""
    from trainer_cli.trainer import pick_device

    environment = RunDir(plan.run).environment_of(plan.attempt)
    recorded = {**environment, **(environment.get("versions") or {})}
    now = {name: version for name, version in versions().items() if name in _COMPUTING}
    now |= {"python": platform.python_version(), "device": str(pick_device(config.device))}
    for name, value in {**now, "processes": group.world_size}.items():
        if recorded.get(name) not in (None, value):
            yield f"{name} {recorded[name]} (here {value})"
