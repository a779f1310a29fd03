"""The checkpoints of one run in a folder: remove what the policy does not keep, and complete a manifest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from trainer_cli.catalog import Catalog, CheckpointHistory, Entry
from trainer_cli.checkpoint import disk_error
from trainer_cli.errors import NO_SPACE, NoSpaceError, NotDurableError, SaveError, UserError, as_clause, disk_cure
from trainer_cli.loggers import SAVES
from trainer_cli.manifest import Manifest
from trainer_cli.policy import RetentionRules, Saved
from trainer_cli.schema import Newer
from trainer_cli.storage import Storage

log = logging.getLogger(__name__)


class Retention:
    """Applies the rules of one run to its folder of checkpoints."""

    def __init__(self, folder: Path, storage: Storage, run_id: str, history: CheckpointHistory | None = None) -> None:
        self.folder, self.storage, self.run_id = folder, storage, run_id
        # With a history the folder is the run's own, where the name of a checkpoint is enough for the log.
        self._display_name = storage.location if history is None else str
        self._history = history or CheckpointHistory(None)
        self.catalog = Catalog(storage)
        self.rules = RetentionRules()
        self.held: Callable[[], Collection[str]] = tuple
        """Returns the names of checkpoints that are removed at a later time."""
        self._failed_removals: set[str] = set()
        """Names of checkpoints that could not be removed, which was logged."""

    def own(self) -> list[Entry]:
        """This run's checkpoints, oldest first, as in `Catalog.remembered`: some may be damaged or pinned now."""
        return self.catalog.valid(self.run_id, self.catalog.remembered())

    def newest(self, step: int | None = None) -> Entry | None:
        """This run's newest valid checkpoint, at most of this step, as it is on the disk now."""
        entries = self.catalog.newest_first(self.run_id)
        return next((entry for entry in entries if entry.valid and (step is None or entry.step <= step)), None)

    def facts(self, newest: int | None) -> list[Saved]:
        """The facts about this run's checkpoints for the policy.

        Args:
            newest: the step that was saved or resumed last. A newer checkpoint could not be read, so it must not count
                when others are removed.
        """
        return self._apply_policy(newest)[0]

    def _apply_policy(self, newest: int | None) -> tuple[list[Saved], dict[str, str]]:
        """The facts about this run's checkpoints, and the reason to remove each of those that may go.

        Names come from the disk, the facts of most checkpoints from memory. Facts that the answer depends on are read
        again, until it depends on none that has changed: of what would be removed, and of what would stay in its place.
        """
        while True:
            saved = self._facts_of(self.catalog.remembered(), newest)
            removable, deciding = self.rules.plan_removal(saved)
            if not self.catalog.look_again(deciding):
                return saved, removable

    def _facts_of(self, entries: Iterable[Entry], newest: int | None) -> list[Saved]:
        """The facts about those of the entries that are valid checkpoints of this run, up to step `newest`."""
        # One pass and no calls: there may be thousands.
        return [
            facts
            for entry in entries
            if (facts := entry.facts) is not None
            and entry.manifest is not None
            and entry.manifest.run_id == self.run_id
            and (newest is None or entry.step <= newest)
        ]

    def kept(self, newest: int | None) -> dict[str, str]:
        """Each checkpoint of this run on the disk now, and why it is kept."""
        return self.rules.why_keep(self._facts_of(self.catalog.entries(), newest))

    def retire(self, newest: int | None) -> None:
        """Remove what the policy does not keep. A failure is logged once, and tried again each time."""
        # A listing of thousands takes as long as a small save.
        if self.rules.keeps_all:
            return
        try:
            _, removable = self._apply_policy(newest)
        except OSError as error:
            log.warning("could not see which checkpoints may go: %s; it will be tried again", as_clause(error))
            return
        held = self.held()
        # Oldest first, as `plan_removal` lists them: a kill midway leaves the newest.
        for name, reason in removable.items():
            if name in held:
                continue
            try:
                removed = self.storage.remove(name)
            except OSError as error:
                if name not in self._failed_removals:
                    self._failed_removals.add(name)
                    log.warning("could not remove checkpoint %s: %s; it will be tried again", name, as_clause(error))
                continue
            if removed:
                self._failed_removals.discard(name)
                SAVES.info("removed %s (%s)", self._display_name(name), reason)
                self._history.removed(name, reason)
        self._finish_removals(removable)

    def _finish_removals(self, removable: Mapping[str, str]) -> None:
        """Remove the folders whose manifest was removed before the rest of a removal failed."""
        for name in self._failed_removals - removable.keys():
            with suppress(OSError):
                if self.storage.clear(name):
                    SAVES.info("removed %s (its removal had failed)", self._display_name(name))
                    self._history.removed(name, "its removal had failed")
                self._failed_removals.discard(name)

    def fsync_names(self, name: str) -> None:
        """fsync the folder, so that the names of all checkpoints in it are durable.

        Raises:
            NotDurableError: they may not be; it names this checkpoint.
        """
        try:
            self.storage.fsync_names()
        except OSError as error:
            raise disk_error(error, self.folder / name) from error

    def complete(self, entry: Entry, manifest: Manifest) -> None:
        """Replace the manifest of a checkpoint by one with more facts.

        Raises:
            SaveError: it could not be replaced, and is as it was.
        """
        assert entry.manifest is not None
        try:
            self.storage.amend(entry.name, manifest.to_bytes())
        except OSError as error:
            raise (NoSpaceError if error.errno in NO_SPACE else SaveError)(
                f"the checkpoint could not be completed: {error.strerror or error}",
                where=str(self.folder / entry.name),
                cure=f"It is intact as it was. {disk_cure(error)}",
            ) from error
        SAVES.info("completed step %d (its evaluation has ended)", entry.step)
        if manifest.kind is not entry.manifest.kind:
            self._history.saved(entry.name, entry.step, manifest.kind.value, manifest.reason)

    def finish_uploads(self) -> None:
        """Wait until all checkpoints are in the store.

        Raises:
            NotDurableError: the store does not answer; the checkpoints are on the local disk.
        """
        waiting = self.storage.finish_uploads()
        if waiting:
            raise NotDurableError(
                f"{', '.join(waiting)} could not be sent to {self.folder}",
                where=str(self.folder),
                cure="Run the same command again to send what is still on this machine.",
            )

    def leave_branch(self, step: int, newer: Newer) -> None:
        """The training resumes an older step: refuse if there are newer checkpoints, or remove or quarantine them, so
        that no later resume chooses them. One that cannot be read is kept.

        Raises:
            UserError: there are newer ones, and `newer` forbids to remove them, or one is pinned or being read.
        """
        newest_first = takewhile(lambda entry: entry.step > step, self.catalog.newest_first(self.run_id))
        newer_entries = [entry for entry in newest_first if self.catalog.is_intact(entry)][::-1]
        if not newer_entries:
            return
        names = ", ".join(entry.name for entry in newer_entries)
        if newer is not Newer.trash:
            raise UserError(
                f"this goes back to step {step}, but {self.folder} holds newer checkpoints: {names}",
                where="checkpoint.newer",
                cure="To remove them, add checkpoint.newer=trash.",
            )
        if pinned := [entry.name for entry in newer_entries if entry.pinned]:
            raise UserError(
                f"this goes back to step {step}, but newer checkpoints are pinned: {', '.join(pinned)}",
                where="checkpoint.newer",
                cure="Unpin them, or copy them to another folder.",
            )
        # Newest first: after a kill midway those that remain are still one branch.
        self._drop(reversed(newer_entries), f"the run went back to step {step}")
        log.warning("went back to step %d: removed %s", step, names)

    def begin_anew(self) -> None:
        """Remove the checkpoint of step 0 that a first try has left, whose weights may be those of another model. A
        pinned one is kept."""
        entries = [entry for entry in self.own() if entry.step == 0 and not self.catalog.is_pinned(entry.name)]
        self._drop(entries, "the run began anew, and no step was made from it")

    def _drop(self, entries: Iterable[Entry], reason: str) -> None:
        """Remove checkpoints that no later resume may choose.

        Raises:
            UserError: one is being read.
        """
        for entry in entries:
            if self.rules.keeps_all:
                # Nothing is deleted then; under its hidden name no resume chooses it.
                self.storage.quarantine(entry.name, reason)
            elif not self.storage.remove(entry.name):
                # What a killed attempt had not sent to the store is being sent now.
                self.storage.finish_uploads()
                if not self.storage.remove(entry.name):
                    raise UserError(f"{entry.name} is being read, so it cannot be removed now", cure="Try again later.")
            self._history.removed(entry.name, reason)
