"""`train fit`, from the composed config to the exit code.

    compose and check the config
    an existing run: lock it, compare the configs, choose the checkpoint; return if the run is finished
    (torch is imported while that checkpoint is verified, which also reads it into memory)
    find what is `auto` in the config, unless the run has found it before
    import the targets and check their arguments
    build data, then model and optimizer
    a new run: make and lock its directory only now
    train; write into summary.json how it ended, also after an error

A run that has a checkpoint after step 0 never starts from step 0 by itself.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.auto_values import AutoDecision, auto_keys
from trainer_cli.catalog import Entry
from trainer_cli.checkpoint import GroupVerifier
from trainer_cli.components import import_from
from trainer_cli.config import Composed
from trainer_cli.environment import environment, versions
from trainer_cli.errors import ExitCode, NotFiniteError, without_secrets
from trainer_cli.files import is_url, read_rows
from trainer_cli.fit_parts import FIND_AUTO, OBSERVE_FIT
from trainer_cli.loads import LoadOptions
from trainer_cli.loggers import JsonlLogger
from trainer_cli.messages import SILENT, to_console, to_file
from trainer_cli.origin import DataAndSource, compare_forked, compare_resumed, keep_source
from trainer_cli.parallel import ALONE, ProcessGroup, check_same, check_same_file, is_of_peer, noted_activity, noting
from trainer_cli.ranks import job_of
from trainer_cli.running.disk_failures import explain_disk_failure
from trainer_cli.running.ending import describe_best, print_already_finished, print_outcome
from trainer_cli.running.repeated_steps import find_differing_end, repeats_steps
from trainer_cli.running.resume import keep_records, note_gone_checkpoints, stored_config
from trainer_cli.running.risen_loss import find_risen_loss, read_losses
from trainer_cli.running.same_run import describe_same_run
from trainer_cli.running.start import (
    Done,
    Start,
    describe_fork,
    options_of,
    refuse_no_optimizer,
    start_existing,
    start_new,
)
from trainer_cli.running.torch_import import import_torch
from trainer_cli.running.trigger_files import TriggerFiles
from trainer_cli.runs import BestSettings, Outcome, RunDir, write_json
from trainer_cli.schema import ANEW, RESUME_WORDS
from trainer_cli.signals import StopSignals
from trainer_cli.source_view import find_project
from trainer_cli.steps import Progress, RunStatus
from trainer_cli.storage import DOWNLOADS, open_storage
from trainer_cli.terminal import LOADING_TORCH, clear_status, show_status
from trainer_cli.user_key import sign

if TYPE_CHECKING:
    from trainer_cli.running.build import Data
    from trainer_cli.trainer import FitResult, Trainer

log = logging.getLogger(__name__)

_SCHEDULING = "while the checkpoints were planned"


def fit(
    composed: Composed, *, allow_pickle: bool = False, group: ProcessGroup = ALONE, suggests_replay: bool = True
) -> int:
    """Train or resume, and return the exit code, the same on every rank.

    Rank 0 locks the run, chooses the checkpoint, logs, writes the run's files, and broadcasts its decisions.

    Args:
        allow_pickle: load pickles in a checkpoint of another program that `ckpt=` names; they may run any code.
        group: the processes that train together, all of which call this with rank 0's config.
        suggests_replay: whether the error of a failed step ends with the commands that look at it.
    """
    began = time.monotonic()
    refuse_no_optimizer(composed)
    config = composed.config
    run = RunDir(config.run_dir)
    import_from(composed.project_root)
    signals = StopSignals(quiet=not group.is_main)
    with composed.placing(), ExitStack() as stack:
        if group.world_size > 1:
            # All ranks stop together, after the first step.
            stack.enter_context(signals)
        to_console(config.logging.level if group.is_main else SILENT)
        DOWNLOADS.configure(config.load)
        with noting("while the checkpoint was chosen"):
            with group.leading(GroupVerifier(group)) as leads:
                start = _begin(run, composed, stack, group) if leads else None
            start = group.broadcast(start)
        assert start is not None
        if isinstance(start, Done):
            if group.is_main:
                print_already_finished(run, start)
            return ExitCode.DONE
        # An error on one rank is raised on all, so that none waits in a collective.
        # This comes before they are made: what is `auto` is found with objects of its own.
        composed, decisions = _find_auto(composed, start, group)
        with group.checking("while data and model were made"):
            config_text = stored_config(composed, start.run_id)
            trainer, data, origin = _build_trainer(composed, start, group, config_text)
            trainer.metric_logger.time.count_from(began)
        if group.world_size == 1:
            # Before this attempt is on the disk. Until here a signal ends the process at once, see `exit_early`:
            # data and model may take minutes, and there is nothing to save.
            stack.enter_context(signals)
        _warn_of_world_size(start.entry, group)
        with noting("while the run directory was opened"):
            # This comes before a run directory is created: a rank with other data must leave nothing behind.
            if group.world_size > 1:
                origin.check_same(group, data.loaders)
            with group.leading() as leads:
                fork = start.fork(composed) if leads else None
                if leads:
                    _check_hard_stop(start, trainer, data)
                    _compare_origin(composed, start, fork, data, origin)
                    # The run begins only now: until here an error leaves no directory of a new run and no attempt.
                    _begin_attempt(composed, start, fork, trainer, data, origin, decisions, stack, config_text)
            fork = group.broadcast(fork)
            if group.world_size > 1:
                _check_ranks(composed, start, group, config_text)
        # Rank 0 has train.log already, see `_begin_attempt`.
        if config.logging.rank_files and not group.is_main:
            # A machine may have a run directory of its own, see `_check_ranks`.
            run.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(to_file(run.path / f"train.rank{group.rank}.log"))
        # Killed between its final checkpoint and its summary: fit writes the summary and trains nothing.
        if start.finished is not None:
            trainer.stop(start.finished)
        _accept_requests(run, trainer, signals, stack)
        path = start.path or fork
        load = (
            options_of(start.entry, start.folder, config.load)
            if start.entry is not None
            else config.load.options(allow_pickle=allow_pickle)
        )
        step_errors = _suggesting_replay(run, trainer) if suggests_replay else nullcontext()
        if group.is_main:
            return _train(composed, start, trainer, data, path, load, step_errors)
        return _train_other_rank(start, trainer, data, path, load, step_errors)


def _find_auto(composed: Composed, start: Start, group: ProcessGroup) -> tuple[Composed, dict[str, AutoDecision]]:
    """Replace each `auto` of the config: by the value that the run has found before, or else by one found now.

    Returns:
        The config, and for each key whose value was found now the value and how it was measured.
    """
    for key, value in start.stored_values.items():
        log.info("%s=%s, as in earlier attempts of the run", key, value)
    composed = composed.with_values(start.stored_values)
    keys = auto_keys(composed.config)
    return FIND_AUTO.need(f"{keys[0]}=auto", keys[0])(composed, start, group) if keys else (composed, {})


def _accept_requests(run: RunDir, trainer: Trainer, signals: StopSignals, stack: ExitStack) -> None:
    """From here on, let signals and trigger files request a stop, a save or an evaluation at the end of a step."""
    # Earlier signals are delivered now.
    signals.listen(lambda reason: trainer.stop(reason, finished=False), partial(_describe_stop, trainer))
    if trainer.strategy.group.is_main:
        actions: dict[str, Callable[[], None]] = {
            "save": trainer.ask_for_save,
            "evaluate": trainer.ask_for_evaluation,
            "stop": partial(trainer.stop, "requested by a file", finished=False),
        }
        # On rank 0 alone: what a file asks for is agreed on by all at the end of a step.
        stack.enter_context(TriggerFiles(run.path, actions))


def _describe_stop(trainer: Trainer) -> str:
    """What a stop that is requested now waits for."""
    # Imported here, because it imports torch.
    from trainer_cli.trainer import Interruption

    activity = trainer.metric_logger.activity
    if activity == Interruption.evaluating or trainer.sanity_checking:
        return "stopping after this validation batch, and a resume makes the evaluation again"
    return f"stopping after this {'save' if activity == Interruption.saving else 'step'}"


def _check_ranks(composed: Composed, start: Start, group: ProcessGroup, config_text: str) -> None:
    """Check that all ranks see the run directory, and have the same versions and config.

    With checkpoints in an object store each machine may have a run directory of its own; rank 0's has the run's files.
    """
    if group.machines == 1 or not is_url(composed.config.checkpoint.folder or ""):
        check_same_file(group, start.run.summary_file)
    check_same(group, versions(("trainer-cli", "torch")))
    # Only a warning: each machine may have a folder of its own.
    configs = group.gather(config_text)
    if differing := [rank for rank, config in enumerate(configs) if config != configs[0]]:
        log.warning("environment variables in the config have other values than on rank 0 on ranks %s", differing)


def _begin(run: RunDir, composed: Composed, stack: ExitStack, group: ProcessGroup) -> Start | Done:
    """Lock a run that exists, and choose the checkpoint to resume."""
    if not run.exists_as_run():
        return start_new(run, composed, meanwhile=import_torch, group=group)
    if composed.config.resume == ANEW:
        return start_existing(run, composed)
    # It is locked before anything is read: another process may be writing checkpoints.
    lock = stack.enter_context(run.lock())
    stack.enter_context(to_file(run.log_file))
    # A store may take long to list its objects.
    show_status("looking for a checkpoint …")
    start = start_existing(run, composed, meanwhile=_import_beside_reading, group=group)
    if not isinstance(start, Done):
        _log_start(start)
        lock.name_holder()
    return start


def _import_beside_reading() -> None:
    """Import torch while another thread reads the checkpoint, which may take longer."""
    show_status(LOADING_TORCH)
    import_torch()
    show_status("reading the checkpoint …")


def _begin_attempt(
    composed: Composed,
    start: Start,
    fork: Path | None,
    trainer: Trainer,
    data: Data,
    origin: DataAndSource,
    decisions: Mapping[str, AutoDecision],
    stack: ExitStack,
    config_text: str,
) -> None:
    """Create the directory of a new run, and record the config and the new attempt."""
    config, run = composed.config, start.run
    sources = composed.tree.collect_sources(composed.raw)
    sources |= {key: f"auto: {decision.reason}" for key, decision in decisions.items()}
    sources |= {key: source for key, source in run.read_provenance().items() if key in start.stored_values}
    facts = _describe_environment(composed, trainer)
    differs_until = None if start.is_new else find_differing_end(composed, start, trainer, data.train, facts)
    if start.is_new:
        if config.checkpoint.enabled and config.checkpoint.folder is not None:
            # The store is checked before the directory is made: one without the bucket or permission must leave none.
            open_storage(config.checkpoint.folder, cache=run.checkpoints_folder, run_id=start.run_id).check_writable()
        # The earlier run is moved only now: until here an error leaves it where it is.
        moved_to = run.move_to_trash() if config.resume == ANEW and run.exists_as_run() else None
        stack.enter_context(
            run.create(
                config_text,
                composed.overrides,
                {"run_id": start.run_id, **facts},
                places=sources,
                with_checkpoints=start.entry is not None,
            )
        )
        stack.enter_context(to_file(run.log_file))
        if moved_to is not None:
            log.info("moved the earlier run to %s", RunDir.describe_moved(moved_to))
        if start.attempt > 1:
            # Its directory was lost.
            _log_start(start)
    elif start.entry is None:
        note_gone_checkpoints(run, start.folder)
    elif trainer.device.type == "cpu" and (manifest := start.entry.manifest) is not None:
        # Of the attempt that made it: a later one may have ended before it saved.
        _warn_of_threads(start.entry, run.environment_of(manifest.attempt), facts)
    start_step = start.entry.step if start.entry is not None else 0
    job = job_of(os.environ, os.getppid())
    attempt = run.begin_attempt(
        name=config.name or "default",
        start_step=start_step,
        now=time.time(),
        environment=facts,
        resume=None if config.resume in RESUME_WORDS else config.resume,
        differs_until=differs_until,
        forked_from=describe_fork(fork, counts_on=config.load.options().resumes),
        job=job,
        config_mac=job and sign([config_text, composed.overrides]),
        source=(source := keep_source(run, composed, config_text, origin, facts, begins=start_step == 0)),
    )
    if start.is_new and source is not None and (sentence := describe_same_run(run, source, composed.raw)) is not None:
        log.info("%s", sentence)
    if start_step == 0:
        keep_records(run, attempt, begins_anew=start.entry is None)
    trainer.recording.set_repeats(repeats_steps(run.attempts, start_step))
    if not start.is_new:
        # Entered before the write, so that it also undoes a partial one.
        stack.enter_context(_restore_config_if_nothing_loaded(start, trainer))
        # After the summary says `running`: with a longer config the run must not be read as finished.
        run.write_config(config_text, composed.overrides, sources)
    _write_decisions(run, decisions)


def _write_decisions(run: RunDir, decisions: Mapping[str, AutoDecision]) -> None:
    """Log the decisions, and write what was measured into the run directory."""
    for key, decision in decisions.items():
        log.info("%s=%s: %s", key, decision.value, decision.reason)
    if decisions:
        write_json(run.decisions_file, {key: asdict(decision) for key, decision in decisions.items()})


@contextmanager
def _restore_config_if_nothing_loaded(start: Start, trainer: Trainer) -> Iterator[None]:
    """Restore the run's config if the checkpoint could not be loaded under the changed one."""
    before = start.run.config_files()
    try:
        yield
    except BaseException:
        if start.entry is not None and not trainer.resumed:
            start.run.restore_config(before)
        raise


def _log_start(start: Start) -> None:
    """Log the changes of the config and the checkpoint to resume."""
    for change in start.changes:
        log.info("config changed: %s", change)
    if start.entry is None:
        log.info("starting %s at step 0 (%s)", start.run.path, start.reason)
        return
    log.info("resuming at step %d from %s (%s)", start.entry.step, start.entry.name, start.reason)
    if str(start.run.read_summary().get("reason")).startswith(NotFiniteError.__name__):
        risen = find_risen_loss(read_losses(read_rows(start.run.metrics_file)), start.entry.step)
        if risen is not None:
            log.warning("%s: its weights may be ruined; resume=anew begins the run anew", risen)


def _warn_of_world_size(entry: Entry | None, group: ProcessGroup) -> None:
    """Warn that a resume with another number of processes, or another `tensor_size`, is not bit-identical."""
    if entry is None or entry.manifest is None:
        return
    before, now = ((sizes.world_size, sizes.tensor_size) for sizes in (entry.manifest, group))
    if before != now:
        texts = [f"{size}{f' with tensor_size={tensor}' if tensor > 1 else ''}" for size, tensor in (before, now)]
        log.warning(
            "%s was made by %s processes, and this is %s: samples come in the same order, but sums of floating-point "
            "numbers and the random numbers of each process differ, so the results will not be the same bit for bit",
            entry.name,
            *texts,
        )


def _warn_of_threads(entry: Entry, before: Mapping[str, object], facts: Mapping[str, object]) -> None:
    """Warn that a resume of as many processes with another number of threads is not bit-identical."""
    threads, now = before.get("threads"), facts["threads"]
    if isinstance(threads, int) and threads != now and before.get("processes") == facts["processes"]:
        log.warning(
            "%s was made with threads: %d, and this is %s: sums of floating-point numbers differ, so the results will "
            "not be the same bit for bit; OMP_NUM_THREADS=%d before the command keeps the number",
            entry.name,
            threads,
            now,
            threads,
        )


def _check_hard_stop(start: Start, trainer: Trainer, data: Data) -> None:
    """Refuse a `hard_stop` before the step that is resumed, as the fit would, while the run is as it was."""
    manifest = None if start.entry is None else start.entry.manifest
    progress = None if manifest is None else Progress.of(manifest.progress or {})
    if progress is not None and trainer.loop.settings.hard_stop is not None:
        trainer.loop.learn_lengths(data.train, progress)
        trainer.loop.check_hard_stop(progress)


def _compare_origin(composed: Composed, start: Start, fork: Path | None, data: Data, origin: DataAndSource) -> None:
    """Compare samples and source with those of the checkpoint that is loaded."""
    entry = start.entry
    if entry is not None and entry.manifest is not None:
        compare_resumed(composed, start.folder / entry.name, entry.manifest, start.changes, data.loaders, origin)
    elif fork is not None:
        compare_forked(composed, fork, origin)


def _build_trainer(
    composed: Composed, start: Start, group: ProcessGroup, config_text: str
) -> tuple[Trainer, Data, DataAndSource]:
    """Build the data and what trains on it, and describe samples and source, for the checkpoints."""
    import_torch()
    composed.check_targets()
    from trainer_cli.running.build import Builder, make_identity
    from trainer_cli.running.data_wait import DataWait
    from trainer_cli.running.failed_step import EvaluationCheck

    # Layers are divided before the data is built: ranks of one tensor-parallel group read the same samples.
    group.divide_layers(composed.config.parallel.tensor_size)
    builder = Builder(composed.config, composed.trust, group)
    if group.is_main:
        show_status("reading the data …")
    data = builder.data()
    origin = DataAndSource.of(data.loaders, composed.project_root)
    identity = make_identity(
        composed.config,
        config_text.encode(),
        origin,
        run_id=start.run_id,
        attempt=start.attempt,
        local_folder=start.run.checkpoints_folder,
        history_file=start.run.history_file,
    )
    if group.is_main:
        show_status("building the model …")
    notify = composed.config.notify
    observe = OBSERVE_FIT.need("notify", "notify") if notify.command or notify.url else OBSERVE_FIT.find()
    trainer = builder.trainer(
        data,
        identity=identity,
        run_dir=start.run.path,
        hparams=composed.hparams,
        observers={
            "evaluation_check": EvaluationCheck(start.run.path),
            "data_wait": DataWait(),
            **(observe(composed.config, start.run) if observe else {}),
        },
    )
    # With logging.level=error no message clears it.
    clear_status()
    return trainer, data, origin


def _describe_environment(composed: Composed, trainer: Trainer) -> dict[str, object]:
    """What the attempt runs with: versions, host and device, for `environment.json`."""
    import torch

    facts = environment(
        find_project(composed.project_root), [os.path.basename(sys.argv[0]), *sys.argv[1:]], now=time.time()
    )
    facts["device"] = str(trainer.device)
    facts["threads"] = torch.get_num_threads()
    facts["processes"] = trainer.strategy.world_size
    if trainer.device.type == "cuda":
        facts["device_name"] = torch.cuda.get_device_name(trainer.device)
    return facts


@contextmanager
def _suggesting_replay(run: RunDir, trainer: Trainer) -> Iterator[None]:
    """End the error of a failed step with the commands that look at it and with what is lost."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        from trainer_cli.running.failed_step import advise_resume, note_lost, suggest_replay

        if isinstance(error, NotFiniteError):
            advise_resume(error, run.path, trainer)
        if isinstance(error, Exception):
            suggest_replay(error, run.path, trainer)
        note_lost(error, trainer)
        raise


def _train(
    composed: Composed,
    start: Start,
    trainer: Trainer,
    data: Data,
    path: Path | None,
    load: LoadOptions,
    step_errors: AbstractContextManager[None],
) -> int:
    """Fit, and write into summary.json how it ended, even after an error.

    Args:
        step_errors: entered for the fit.
    """
    run = start.run
    # Imported here: it imports torch.
    from trainer_cli.state import find_evaluated_average

    began = time.monotonic()
    result: FitResult | None = None
    status, reason = RunStatus.failed, ""
    try:
        # An error on rank 0, such as a disk without space, is raised on all.
        with trainer.strategy.group.checking(_SCHEDULING):
            from trainer_cli.running.schedule import log_schedule

            log_schedule(start, trainer, data, composed, path)
        with step_errors:
            result = _fit(trainer, data, path, load, start)
        status = RunStatus.finished if result.finished else RunStatus.stopped
        reason = result.reason
    except KeyboardInterrupt:
        status, reason = RunStatus.interrupted, "second Ctrl-C"
        raise
    except BaseException as error:
        reason = without_secrets(f"{type(error).__name__}: {error}")
        # This is for train.log; commands/command_line.py prints the message in the terminal.
        log.debug("the run failed", exc_info=True)
        if (failure := explain_disk_failure(error, run.path, trainer)) is not None:
            if failure.exit_code is ExitCode.STOPPED_EARLY:
                status = RunStatus.stopped
            raise failure from error
        raise
    finally:
        wall_s = time.monotonic() - began
        outcome = None
        try:
            best, newest = _summarize_metrics(composed, run, trainer)
            samples = trainer.progress.samples - trainer.loading.start_samples
            outcome = Outcome(
                status=status,
                reason=reason,
                step=trainer.progress.step,
                wall_time_s=round(wall_s, 3),
                best_metrics=best,
                last_metrics=newest,
                ended_by=None if result is None else result.ended_by,
                average=find_evaluated_average(trainer.callbacks),
                throughput={"samples_per_s": round(samples / max(wall_s, 1e-9), 2)},
                checkpoints=_kept_checkpoints(trainer),
                time_s=trainer.metric_logger.time.seconds(),
                kept_s=trainer.metric_logger.time.kept_s(),
            )
            run.end_attempt(outcome, now=time.time())
        except OSError as error:
            # After an error the disk may be its cause, and that error has the cure.
            level = logging.DEBUG if result is None else logging.ERROR
            log.log(level, "%s could not be written: %s", run.summary_file, error)
    # It is printed after the write: what is printed last must be true on the disk.
    if outcome is not None:
        best_rows = describe_best(composed, trainer, outcome.best_metrics)
        print_outcome(run, outcome, result.metrics, best_rows, composed.naming_again, comes_again=result.comes_again)
    return ExitCode.DONE if result.finished else ExitCode.STOPPED_EARLY


def _train_other_rank(
    start: Start,
    trainer: Trainer,
    data: Data,
    path: Path | None,
    load: LoadOptions,
    step_errors: AbstractContextManager[None],
) -> int:
    """Fit on a rank other than 0, which writes no file of the run but its log; see `_train`."""
    try:
        with trainer.strategy.group.checking(_SCHEDULING):
            pass
        with step_errors:
            result = _fit(trainer, data, path, load, start)
    except BaseException:
        log.debug("the run failed", exc_info=True)
        raise
    return ExitCode.DONE if result.finished else ExitCode.STOPPED_EARLY


def _fit(trainer: Trainer, data: Data, path: Path | None, load: LoadOptions, start: Start) -> FitResult:
    """Fit. If another rank is lost, raise an error that names it and the call in which this rank waited."""
    try:
        return trainer.fit(data.train, data.val, path, load=load, keep_settings=start.keep_settings)
    except RuntimeError as error:
        if not is_of_peer(error):
            raise
        # For a call in which no activity was noted.
        default = "while the run was started" if trainer.stop_reason is None else "while the run ended"
        raise trainer.strategy.group.lost_error(noted_activity(error, default)) from error


def _summarize_metrics(
    composed: Composed, run: RunDir, trainer: Trainer
) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """The best and the newest values of the run's metrics; empty, with an error logged, if they cannot be read."""
    logged_ranges = (logger.metric_ranges(run.metrics_file) for logger in trainer.loggers.values())
    try:
        # The file is read only if another program has changed it, or the training failed before it was opened.
        ranges = next((ranges for ranges in logged_ranges if ranges is not None), None)
        ranges = JsonlLogger.read_ranges(run.metrics_file) if ranges is None else ranges
    except OSError as error:
        log.error("%s could not be read: %s", run.metrics_file, error.strerror)
        ranges = {}
    return BestSettings.of(asdict(composed.config)).summarize(ranges)


def _kept_checkpoints(trainer: Trainer) -> list[dict[str, str]]:
    """The checkpoints on the disk, and why each is kept."""
    try:
        reasons: Mapping[str, str] = getattr(trainer.checkpoint, "kept", dict)()
    except OSError as error:
        log.warning("cannot list the checkpoints: %s", error)
        return []
    return [{"name": name, "why": why} for name, why in reasons.items()]
