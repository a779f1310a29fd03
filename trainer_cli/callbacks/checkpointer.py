"""CheckpointerCallback: decides by the policy when to save, and calls the checkpointer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from trainer_cli.callbacks.save_budget import SaveBudget
from trainer_cli.callbacks.state_saver import RunIdentity, StateSaver
from trainer_cli.catalog import Catalog, Check, Entry, newest_of_all, verify_and_decode
from trainer_cli.checkpoint import GroupVerifier, WriterThread
from trainer_cli.errors import NotDurableError, SaveError, UserError
from trainer_cli.files import as_path, is_url
from trainer_cli.goodput import Activity
from trainer_cli.parallel import is_of_peer
from trainer_cli.policy import CheckpointKind, Decision, Occasion, RetentionRules, SaveFacts, SaveRules
from trainer_cli.schema import CheckpointConfig, Newer
from trainer_cli.signatures import build_section, takes_fields_of
from trainer_cli.tensor_files import verify
from trainer_cli.trainer import Callback

if TYPE_CHECKING:
    from torch import nn

    from trainer_cli.trainer import Trainer, TrainingLoop

log = logging.getLogger(__name__)

_DELETING_S = 60.0
"""How long the end of a training waits for the deletion of removed checkpoints."""
_ORDINARY = (Occasion.pre_train, Occasion.step)
"""Occasions after which the training continues, so that a save may be written in the background."""


@takes_fields_of(CheckpointConfig)
class CheckpointerCallback(Callback):
    """Saves at intervals, at fixed steps, at the end and on a stop; keeps and removes by rule.

    During the training a save copies the state between two steps, and a thread writes the copy, one at a time. It
    counts as made when it is copied, so that no rule saves twice. Older checkpoints are removed once it is committed;
    its outcome is reported at the end of the next step. The save at an end is synchronous.

    With several ranks, rank 0 decides; the others follow, each writing its part.

    Args:
        folder: where checkpoints are kept, each in its own directory; None: the folder in `config`, else `checkpoints`.
        config: all settings; alternatively, pass fields of `CheckpointConfig` by name, such as `save_interval=100`.
        identity: the run that the checkpoints belong to. By default a new run, or the run that has
            saved in `folder`.
        thread: writes checkpoints in the background and deletes removed ones; by default a new thread.
    """

    _in_schema = True

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        config: CheckpointConfig | None = None,
        identity: RunIdentity | None = None,
        thread: WriterThread | None = None,
        **fields: Any,
    ) -> None:
        settings = build_section(CheckpointConfig, type(self).__name__, config, fields)
        if folder is None:
            folder = settings.folder or "checkpoints"
        # Made again with its folder, because a URL and `latest_link` are refused together.
        self.settings = replace(settings, folder=str(folder) if is_url(folder) else None)
        for key, value in (("folder", folder), ("copy_to.folder", settings.copy_to.folder)):
            if "{run_name}" in str(value):
                raise UserError(f"CheckpointerCallback.{key} is '{value}'", cure="In Python, write the run's name.")
        self.folder = as_path(folder)
        self.identity = identity or RunIdentity(run_id=self._find_run_id() or uuid4().hex)
        # Also where saves are synchronous: removed checkpoints are deleted by it.
        thread = thread or WriterThread("checkpoint-writer")
        self.saver = StateSaver(self.folder, self.settings, self.identity, thread, keeps_settings=identity is None)
        self.storage, self.checkpointer, self.copies = self.saver.storage, self.saver.checkpointer, self.saver.copies
        self.retention = self.saver.retention
        self._in_flight_requested = False
        """Whether the save in flight was requested by the user; if it fails, it is requested again."""
        self._failed_step: int | None = None
        self._ephemeral_holds: set[str] = set()
        """Names by which saves at `ephemeral_save_interval` are held back."""
        self._budget = SaveBudget()
        self._rules: SaveRules | None = None
        self._check_intervals_later: Callable[[], None] | None = None
        """Set until the first step if it alone shows how many tokens a step has."""
        self._last_saved_step: int | None = None
        self._failures = 0
        self._has_begun = False
        """Whether steps are made."""

    def hold_ephemeral(self, name: str) -> None:
        """Hold saves by `ephemeral_save_interval` back until this name is released."""
        self._ephemeral_holds.add(name)

    def release_ephemeral(self, name: str) -> None:
        """Release a hold, if there is one."""
        self._ephemeral_holds.discard(name)

    @property
    def checkpoint_pending(self) -> bool:
        """Whether a save is in flight: copied, and not yet reported as written or failed."""
        return self.saver.in_flight is not None

    def wanted_metrics(self) -> dict[str, str]:
        """The metric of `keep_best`, if it is set."""
        best = self.settings.keep_best
        return {} if best.metric is None else {"keep_best.metric": best.metric}

    def setup(self, trainer: Trainer) -> None:
        """Save the state of this trainer from now on."""
        self.saver.join(trainer)

    @property
    def tolerates_errors(self) -> bool:
        """Whether a disk that cannot be written does not end the training."""
        return self.settings.tolerates_errors

    def newest(self, *, first: bool = True, limit: int | None = None) -> Path | None:
        """The newest intact checkpoint of this run, copies included, every byte verified; newer damaged ones are
        quarantined. With several ranks rank 0 alone calls it, while a `GroupVerifier` follows on the others.

        Args:
            first: False: None if there was never one after step 0.
            limit: none of a later step.

        Raises:
            CheckpointError: there are some, and none is intact.
        """
        catalogs = self._catalogs()
        if not first and not any(catalog.holds_steps(self.identity.run_id) for catalog in catalogs):
            if self.retention.own():
                log.warning("the training begins anew: %s holds no checkpoint after step 0", self.folder)
            return None
        group = self.checkpointer.group
        digests: Check = verify if group.world_size == 1 else GroupVerifier(group).verify
        check = partial(verify_and_decode, digests=digests)
        newest = newest_of_all(catalogs, self.identity.run_id, limit=limit, check=check)
        if newest is None:
            return None
        catalog, entry = newest
        return catalog.folder / entry.name

    def _catalogs(self) -> list[Catalog]:
        """The folder of checkpoints, and the folder of their copies if there is one, as far as they can be read."""
        saved = self.retention.catalog
        return [saved] if self.copies is None else self.copies.reachable(saved, self.identity.run_id)

    def newest_finite(self) -> Path | None:
        """The newest valid checkpoint of this run whose weights are finite, by its manifest."""
        self.drain(_DELETING_S)
        newest = self.retention.catalog.newest_valid(self.identity.run_id)
        return None if newest is None else self.folder / newest.name

    def go_back(self, trainer: Trainer) -> Path | None:
        """The newest intact checkpoint, as `newest`, after the save in flight; the training continues from it.
        Collective.

        Those that a stop has saved are passed over and removed, if there are others: the training goes back as it would
        have without the stop.
        """
        group = trainer.strategy.group
        with group.leading(self.saver) as leads:
            if leads:
                self._await_save(trainer)

        def find() -> Path | None:
            limit = max((facts.step for facts in self.retention.facts(None) if not facts.of_stop), default=None)
            path = self.newest(limit=limit)
            if path is not None and limit is not None:
                # Their steps are made anew, and may be saved anew.
                self.retention.leave_branch(limit, Newer.trash)
            return path

        path = group.on_main(find, GroupVerifier(group))
        self._failed_step = None
        self._last_saved_step = _step_of(self.retention.newest())
        return path

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        """Check before the first step that the state can be saved, and make the folder ready. Collective."""
        self._failed_step, self._failures, self._has_begun = None, 0, False
        self._rules = SaveRules.of(self.settings, loop.checkpoint_interval)
        self.retention.rules = replace(
            RetentionRules.of(self.settings, loop.checkpoint_interval),
            rolls_back=any(callback.rolls_back for callback in trainer.callbacks.values()),
        )
        if not self.settings.enabled:
            return
        self._check_intervals(trainer, loop, train_loader)
        if (warning := self.settings.describe_unlimited()) is not None:
            log.warning("%s", warning)
        group = trainer.strategy.group
        # On all ranks before the first step: an error on one of them would leave the others waiting in the save.
        with group.checking("in a trial of the first save"):
            self.saver.check()
        with group.leading() as leads:
            if leads:
                self._open_folder(trainer)

    def _check_intervals(self, trainer: Trainer, loop: TrainingLoop, train_loader: Any) -> None:
        """Refuse an ephemeral interval that is never due, and warn if the run is too short for it.

        Where durations are in tokens, it is called again after the first step, which shows how many a step has.
        """
        assert self._rules is not None
        progress = trainer.progress
        step_tokens = progress.tokens / progress.step if progress.step and progress.tokens else None
        counts = loop.step_counts(train_loader, progress, step_tokens=step_tokens)
        warning = self._rules.check_ephemeral(loop.limits.max_duration, counts)
        has_interval = self._rules.ephemeral_save_interval is not None
        needs_first_step = progress.step == 0 and has_interval and loop.counts_tokens
        self._check_intervals_later = None
        if needs_first_step:
            self._check_intervals_later = partial(self._check_intervals, trainer, loop, train_loader)
        elif warning is not None:
            log.warning("%s", warning)

    def on_train_start(
        self, trainer: Trainer, model: nn.Module, train_loader: Any, loop: TrainingLoop, loop_idx: int
    ) -> None:
        """Note that the training has begun: before, a failed fit has no new state to save."""
        self._has_begun = True

    def _open_folder(self, trainer: Trainer) -> None:
        """Make the folder ready for the saves of this training: remove leftovers, and checkpoints of a branch that the
        training has left. Called by rank 0.

        Raises:
            UserError: checkpoints of this run would stay that the training does not continue from.
        """
        # First, because it raises where checkpoint.name names an unknown variable.
        self.saver.path()
        self.storage.sweep()
        run_id = self.identity.run_id
        # False for a further fit of the same trainer, which continues from its own state.
        is_start = trainer.progress.step == 0 or trainer.loaded_from is not None
        begins_anew = is_start and not self._resumes_from_folder(trainer)
        if begins_anew and not any(catalog.holds_steps(run_id) for catalog in self._catalogs()):
            self.retention.begin_anew()
        newest = self.retention.newest()
        if newest is not None and not self._resumes_from_folder(trainer):
            raise UserError(
                f"{self.folder} holds checkpoints of this run (the newest is step {newest.step}), but this "
                "training does not continue from them, and they would not be replaced",
                cure="Leave ckpt_path out to continue from the newest, or save into another folder.",
            )
        if newest is not None:
            # An attempt that was killed may have missed the fsync after its last rename: do it before any removal.
            self.retention.fsync_names(newest.name)
        # Before any save: newer checkpoints of a branch that was left would be resumed in its place.
        self.retention.leave_branch(trainer.progress.step, self.settings.newer)
        self._last_saved_step = _step_of(self.retention.newest(trainer.progress.step))
        # Before any removal: it holds those that a killed attempt had not copied yet.
        if self.copies is not None:
            self.copies.on_failure = trainer.interrupt
            self.copies.start(self.retention, trainer.progress.step, self.settings.newer)
        self.retention.retire(self._last_saved_step)

    def next_step(self, trainer: Trainer) -> int | None:
        """The earliest step after this one at which a rule may ask for a save, or something is to be prepared."""
        if not self.settings.enabled or self._rules is None:
            return None
        if self.save_requested or self._check_intervals_later is not None:
            return trainer.progress.step + 1
        step = self._rules.next_step(trainer.progress)
        # A save in flight interrupts the steps once it is written.
        if self._rules.budget is not None and self.saver.in_flight is None:
            step = self._budget.next_step(self._rules.budget, trainer.progress, step)
        if step is not None and self._needs_copies:
            # The state is complete after the first step.
            return trainer.progress.step + 1
        return step

    def on_save_opportunity(self, trainer: Trainer, occasion: Occasion) -> None:
        """Let rank 0 save, if a rule asks for it; the other ranks follow its calls."""
        if self.settings.enabled and self._rules is not None:
            with self._budget.measure(), trainer.strategy.group.leading(self.saver) as leads:
                if leads:
                    self._offer(trainer, occasion)

    def _offer(self, trainer: Trainer, occasion: Occasion) -> None:
        """Report a save in flight that has ended, then save the step, complete its checkpoint, or do nothing."""
        assert self._rules is not None
        if self._check_intervals_later is not None and trainer.progress.step > 0:
            self._check_intervals_later()
        if self.copies is not None:
            self.copies.raise_failure()
        with self._tolerating_save_errors():
            self._poll(trainer, wait=self._depends_on_save_in_flight(trainer, occasion))
        decision = self._why_save(trainer, occasion)
        if decision is not None and self.saver.in_flight is not None:
            # One save at a time; and its outcome may change what the rules want.
            self._await_save(trainer)
            decision = self._why_save(trainer, occasion)
        finished = trainer.stop_reason if occasion is Occasion.final else None
        step, continues = trainer.progress.step, occasion in _ORDINARY
        if self.saver.in_flight is not None and self.saver.in_flight.metadata.step == step:
            # This step is being saved: a request for it counts as done, unless the save fails.
            self._in_flight_requested |= self.save_requested
            self.save_requested = False
        elif self._last_saved_step == step:
            with self._tolerating_save_errors(is_last=not continues):
                self._amend(self._facts_of_step(trainer, occasion), finished)
        elif decision is not None and continues and self.saver.in_background:
            # Skip this save while an earlier one has not ended, which `_await_save` has reported.
            if self.saver.in_flight is None:
                with self._tolerating_save_errors():
                    self._save_in_background(trainer, decision)
        elif decision is not None:
            with self._tolerating_save_errors(is_last=not continues):
                self.save(trainer, decision, finished=finished)
        elif self._needs_copies and occasion is Occasion.step and self._rules.next_step(trainer.progress):
            self.saver.prepare()

    @property
    def _needs_copies(self) -> bool:
        """Whether memory for copies is still to be reserved."""
        return self.saver.in_background and not self.saver.prepared

    @property
    def _newest_step(self) -> int | None:
        """The last saved step. A save in flight counts, so that no step is saved twice."""
        return self._last_saved_step if self.saver.in_flight is None else self.saver.in_flight.metadata.step

    def _depends_on_save_in_flight(self, trainer: Trainer, occasion: Occasion) -> bool:
        """Whether a decision depends on the outcome of the save in flight. It is then waited for, so that no decision
        depends on the speed of the disk."""
        save, metrics = self.saver.in_flight, trainer.metric_logger.last
        if save is None:
            return False
        if occasion not in _ORDINARY:
            return True
        if save.metadata.step == trainer.progress.step:
            # The same step again: only an evaluation since then matters.
            return not _same_metrics(save.metadata.metrics, metrics)
        # Whether this step is the best depends on whether the save in flight counts.
        best = None if self._rules is None else self._rules.keep_best
        return best is not None and best.metric in metrics

    def _why_save(self, trainer: Trainer, occasion: Occasion) -> Decision | None:
        """Why a rule asks to save this step; None: no rule does, or the step was saved, or its save has failed."""
        assert self._rules is not None
        step = trainer.progress.step
        has_failed = step == self._failed_step and occasion is Occasion.step
        if step == self._newest_step or has_failed:
            return None
        return self._rules.why_save(self._facts_of_step(trainer, occasion))

    def _facts_of_step(self, trainer: Trainer, occasion: Occasion) -> SaveFacts:
        """The facts about the present step by which the rules decide."""
        assert self._rules is not None
        metrics = dict(trainer.metric_logger.last)
        best = self._rules.keep_best
        # The rule of the best alone needs the earlier checkpoints, which may be thousands.
        needs_saved = best is not None and best.metric in metrics
        return SaveFacts(
            trainer.progress,
            occasion,
            self._newest_step,
            loaded=trainer.loaded_from is not None,
            save_requested=self.save_requested and occasion is not Occasion.pre_train,
            on_hold=bool(self._ephemeral_holds),
            writing=self.saver.in_flight is not None,
            cost=self._budget.cost(),
            metrics=metrics,
            saved=self.retention.facts(self._last_saved_step) if needs_saved else (),
        )

    def on_fit_end(self, trainer: Trainer, loop: TrainingLoop) -> None:
        """Wait for the save in flight, uploads and copies, and remove what may go. Collective."""
        with trainer.metric_logger.time.during(Activity.saving), trainer.strategy.group.leading(self.saver) as leads:
            if leads:
                self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        """The part of `on_fit_end` that rank 0 leads."""
        self._await_save(trainer)
        if self.settings.enabled and self._rules is not None:
            with self._tolerating_save_errors(is_last=True):
                self.retention.finish_uploads()
                self.retention.retire(self._newest_step)
            if self.copies is not None:
                self.copies.finish(self.retention)
                self.retention.retire(self._newest_step)

    def on_fit_exception(self, trainer: Trainer, exception: BaseException) -> None:
        """Save the present state outside the checkpoints: it is not the end of a step, so no resume may load it."""
        if not trainer.strategy.group.is_main:
            return
        if isinstance(exception, KeyboardInterrupt):
            self.saver.checkpointer.interrupt()
            self.storage.abandon_uploads()
            if self.copies is not None:
                self.copies.abandon()
        if trainer.strategy.world_size > 1:
            # The other ranks may be elsewhere, or gone: a save in flight is not committed.
            self.saver.in_flight = None
        try:
            self._poll(trainer, wait=True)
        except SaveError as error:
            log.error("%s", error)
        is_explained = isinstance(exception, SaveError | UserError) or is_of_peer(exception)
        if not isinstance(exception, Exception) or is_explained:
            return
        # Before the first step the state is that of a checkpoint, or of a new training.
        has_new_state = self._has_begun and trainer.progress.step != self._newest_step
        if self.settings.enabled and has_new_state:
            self.saver.save_after(exception)

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until the save in flight is written; its outcome is reported at the end of the step."""
        self.saver.drain(timeout_s)

    def finalize(self) -> None:
        """End the threads that write, delete and copy; warn of what they have not finished."""
        if not self.saver.close(_DELETING_S):
            log.warning("removed checkpoints in %s are still being deleted; the next start continues", self.folder)
        if self.copies is not None and not self.copies.close(_DELETING_S):
            log.warning("a copy in %s is not finished; the next start copies it again", self.copies.folder)

    def save(self, trainer: Trainer, decision: Decision, *, finished: str | None = None) -> Path:
        """Save this step, durably, and remove what may go now. Returns the checkpoint's path.

        Raises:
            NotDurableError: the checkpoint is there, but a power cut may take it away.
            SaveError: nothing was committed. In both cases older checkpoints are intact.
        """
        self._poll(trainer, wait=True)
        self._budget.begin_save(trainer.progress)
        step, path = trainer.progress.step, self.saver.path()
        # Before the save: records that the manifest promises must be on the disk first.
        metadata = self.saver.metadata(decision, finished)
        try:
            self.saver.save(path, metadata, in_background=False)
        except SaveError as error:
            self._on_failed(step, error)
            raise
        # Only now: a request whose save failed is made at the next step.
        self.save_requested = False
        self._on_saved(trainer, step, path)
        return path

    def save_now(self, trainer: Trainer) -> Path:
        """Save this step outside of a fit, as a regular checkpoint of the run, unless it has one. Collective."""
        if self._rules is None:
            raise UserError(
                "before its first fit a run has no position in its data, so its checkpoint could not be resumed",
                cure="Give save_checkpoint a path, or fit first.",
            )
        with trainer.strategy.group.leading(self.saver) as leads:
            if leads:
                self.save(trainer, Decision(CheckpointKind.regular, "saved by hand"))
        return self.saver.path()

    def _save_in_background(self, trainer: Trainer, decision: Decision) -> None:
        """Copy this step and submit it to the writer thread; `_poll` reports the outcome."""
        self._budget.begin_save(trainer.progress)
        step, path = trainer.progress.step, self.saver.path()
        try:
            self.saver.save(path, self.saver.metadata(decision), in_background=True)
        except SaveError as error:
            self._on_failed(step, error)
            raise
        self._in_flight_requested, self.save_requested = self.save_requested, False

    def _poll(self, trainer: Trainer, *, wait: bool) -> None:
        """Report the outcome of the save in flight, if it has ended, or once it has.

        Raises:
            NotDurableError: the checkpoint is there, but a power cut may take it away. It counts as saved, and nothing
                is removed for it.
            SaveError: it has failed, and does not count as saved; or it does not end, and is still in flight.
        """
        in_flight = self.saver.in_flight
        try:
            ended_save = self.saver.finish(wait=wait)
        except SaveError as failure:
            assert in_flight is not None
            has_ended = self.saver.in_flight is None
            if has_ended:
                self.save_requested |= self._in_flight_requested
                self._on_failed(in_flight.metadata.step, failure)
            raise
        if ended_save is not None:
            self._on_saved(trainer, ended_save.metadata.step, ended_save.path)

    def _await_save(self, trainer: Trainer) -> None:
        """Report the outcome of the save in flight once it has ended; a failure is treated as `on_save_error` says."""
        with self._tolerating_save_errors():
            self._poll(trainer, wait=True)

    def _on_saved(self, trainer: Trainer, step: int, path: Path) -> None:
        """Count a step as saved, and call `on_after_save_checkpoint`."""
        self._last_saved_step, self._failures = step, 0
        trainer.hooks.call("on_after_save_checkpoint", trainer, path)

    def _on_failed(self, step: int, failure: SaveError) -> None:
        """A failed step is not saved again by an interval; one that exists but is not durable counts as saved."""
        self._budget.fail_save()
        if isinstance(failure, NotDurableError):
            self._last_saved_step, self.save_requested = step, False
        else:
            self._failed_step = step

    def kept(self) -> dict[str, str]:
        """Each checkpoint of this run on the disk now, and why it is kept."""
        return self.retention.kept(self._newest_step) if self._rules is not None else {}

    @contextmanager
    def _tolerating_save_errors(self, *, is_last: bool = False) -> Iterator[None]:
        """A failed save within ends the training or is logged, as `on_save_error` says.

        A failure of the last save always ends the training with an error, since no later save follows.
        """
        try:
            yield
        except SaveError as error:
            self._failures += 1
            limit = self.settings.max_save_errors
            is_tolerated = self.tolerates_errors and not is_last and self._failures <= limit
            if not is_tolerated:
                raise
            log.error("%s Training continues (failure %d; %d in a row are tolerated).", error, self._failures, limit)
            log.debug("the save failed", exc_info=error)

    def _amend(self, facts: SaveFacts, finished: str | None) -> None:
        """Complete the manifest of a step that was saved before its evaluation, which a stop had put off.

        Args:
            facts: of this step, after the evaluation.
            finished: the reason for which the run is finished; None: it is not.

        Raises:
            NotDurableError: a power cut may take the checkpoint away.
            SaveError: the manifest is as it was.
        """
        if facts.occasion is not Occasion.pre_train:
            self.save_requested = False
        remembered = next((entry for entry in self.retention.own() if entry.step == facts.now.step), None)
        # Read again: the manifest is replaced, so that it must be the one on the disk.
        entry = None if remembered is None else self.retention.catalog.entry(remembered.name)
        if entry is None or entry.manifest is None or not entry.valid or self._rules is None:
            return
        self.retention.fsync_names(entry.name)
        manifest = entry.manifest
        # Before a new attempt's first step the rules apply as at the end of the step that it resumes.
        occasion = Occasion.step if facts.occasion is Occasion.pre_train else facts.occasion
        decision = self._rules.why_save(replace(facts, last_saved_step=None, occasion=occasion))
        metrics = {**manifest.metrics, **facts.metrics}
        is_complete = _same_metrics(metrics, manifest.metrics) and finished in (None, manifest.finished)
        if is_complete:
            return
        if decision is not None and manifest.kind is CheckpointKind.ephemeral:
            manifest = replace(manifest, kind=decision.kind, reason=decision.reason)
        self.retention.complete(entry, replace(manifest, metrics=metrics, finished=finished or manifest.finished))
        if self.copies is not None:
            self.copies.on_amended(entry.name)
        self.retention.retire(self._last_saved_step)

    def _resumes_from_folder(self, trainer: Trainer) -> bool:
        """Whether the training resumes a checkpoint of the folder, or a copy of one, with all its state."""
        source = trainer.loaded_from
        folders = [self.folder] if self.copies is None else [self.folder, self.copies.folder]
        is_in_folder = source is not None and source.absolute().parent in [folder.absolute() for folder in folders]
        return trainer.resumed and is_in_folder

    def _find_run_id(self) -> str | None:
        """The run that has saved the newest checkpoint in the folder, or in the folder of copies."""
        for folder in (self.folder, self.settings.copy_to.folder):
            newest = None if folder is None else Catalog.of(as_path(folder)).newest_valid()
            if newest is not None and newest.manifest is not None:
                return newest.manifest.run_id
        return None


def _step_of(entry: Entry | None) -> int | None:
    """The step of a checkpoint; None for None."""
    return None if entry is None else entry.step


def _same_metrics(first: Mapping[str, float], second: Mapping[str, float]) -> bool:
    """Whether two records have equal metrics; NaN equals NaN here."""
    return first.keys() == second.keys() and all(
        value == second[name] or (math.isnan(value) and math.isnan(second[name])) for name, value in first.items()
    )
