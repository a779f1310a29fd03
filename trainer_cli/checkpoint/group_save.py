"""One save by several ranks: what they do together, and what each does alone.

    main thread      begin ── training goes on ──────────── finish
    writer thread          └─ write: this rank's files ─┘

`begin` opens one hidden folder for all, `finish` gathers what they wrote and commits. If one rank fails, the save fails
on every rank, and there is no manifest. A rank that dies leaves the hidden folder, which the next start removes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer_cli.checkpoint.format.sharded import why_uncovered
from trainer_cli.checkpoint.format.tree import decode
from trainer_cli.checkpoint.save import CheckpointWriter, RankFiles, as_failure, commit, disk_error, is_saved, write
from trainer_cli.core.manifest import FileEntry
from trainer_cli.core.shards import Shard
from trainer_cli.errors import NotDurableError, SaveError, UserError
from trainer_cli.parallel.rendezvous import PeerError

if TYPE_CHECKING:
    from trainer_cli.checkpoint.save import CheckpointMetadata
    from trainer_cli.checkpoint.snapshot import Snapshot
    from trainer_cli.checkpoint.storage.base import Storage
    from trainer_cli.checkpoint.storage.folder import StagedFolder
    from trainer_cli.parallel.process_group import ProcessGroup

log = logging.getLogger(__name__)


class GroupSave:
    """The save of one step. Every rank makes one and calls `begin`, then `write` if that says so, then `finish`.

    Args:
        format: the name of the format, for the manifest.
        overwrite: as of `Checkpointer.save`.
        after_write: called by every rank, in the thread that writes, when its files are written or could not be.
        before_commit: called by rank 0 when all files are there; an OSError fails the save.
        after_commit: called by rank 0 after the commit; it raises nothing.
    """

    def __init__(
        self,
        group: ProcessGroup,
        storage: Storage,
        name: str,
        metadata: CheckpointMetadata,
        writer: CheckpointWriter,
        *,
        format: str,
        overwrite: bool,
        after_write: Callable[[], object],
        before_commit: Callable[[], object],
        after_commit: Callable[[], object],
    ) -> None:
        self.group, self.storage, self.name = group, storage, name
        self.metadata = replace(metadata, world_size=group.world_size, tensor_size=group.tensor_size)
        self.where = storage.location(name)
        self._writer, self._format, self._overwrite = writer, format, overwrite
        self._after_write, self._before_commit, self._after_commit = after_write, before_commit, after_commit
        self._stack = ExitStack()
        """Of rank 0: removes the hidden folder unless it was published."""
        self._folder: StagedFolder | None = None
        self._place = ""
        self._snapshot: Snapshot | None = None
        self._own: RankFiles | None = None
        self._finite = True
        self._failure: BaseException | None = None

    def begin(self, stage: Callable[[], Snapshot]) -> bool:
        """Stage this rank's state, and agree on the hidden folder. False: an intact checkpoint is there already.
        Collective.

        Raises:
            SaveError: on every rank, if one of them failed; that one raises its own error.
            PeerError: on the others, if that is a UserError, such as a state that cannot be saved.
        """
        error: Exception | None = None
        there = False
        try:
            # First, since it may have collectives of callbacks.
            self._snapshot = stage()
            if self.group.is_main:
                there = is_saved(self.storage, self.name, self.metadata, overwrite=self._overwrite)
                if not there:
                    staged = self.storage.writing(self.name, digest=self._writer.digest, replace=self._overwrite)
                    self._folder = self._stack.enter_context(staged)
        except Exception as raised:
            error = raised
        place = "" if self._folder is None else self._folder.hidden_name
        error = self._named(error)
        reports = self.group.gather((place, there, _said(error)))
        self._place, there = reports[0][:2]
        self._raise_failures([said for *_, said in reports], error)
        if there and self.group.is_main:
            self.storage.fsync_names()
            log.info("%s is there already, and is not written again", self.where)
            self._after_commit()
        return not there

    def write(self) -> None:
        """Write this rank's files, digested and fsynced. A failure is reported by `finish`, on every rank."""
        assert self._snapshot is not None
        try:
            folder = self._folder or self.storage.joining(self._place, digest=self._writer.digest)
            self._own = write(folder, self._snapshot, self.metadata.files if self.group.is_main else {})
            self._finite = self._snapshot.is_finite()
        except BaseException as error:  # Raised by `finish`.
            self._failure = error
        self._after_write()

    def finish(self) -> None:
        """Commit what all ranks have written. Collective: every rank's `write` is done, or is said to have failed.

        Raises:
            NotDurableError: the checkpoint is there, but a power cut may take it away.
            SaveError: on every rank, if one of them failed; nothing was committed.
        """
        failure = self._named(self._failure)
        if failure is None and self._own is None:
            failure = SaveError("it was not written in time", where=self.where)
        own = None if self._own is None or failure is not None else _plain(self._own, finite=self._finite)
        reports = self.group.gather((own, _said(failure)))
        self._raise_failures([said for _, said in reports], failure)
        error: Exception | None = None
        if self.group.is_main:
            try:
                written = [one for one, _ in reports if one is not None]
                self._commit(list(map(_files, written)), finite=all(one["finite"] for one in written))
            except Exception as raised:
                error = self._named(raised)
            self._stack.close()
        said = self.group.broadcast(_said(error))
        self._raise_failures([said], error)
        if self.group.is_main:
            self._after_commit()

    def _commit(self, ranks: list[RankFiles], *, finite: bool) -> None:
        assert self._folder is not None
        assert self._snapshot is not None
        problem = why_uncovered(
            decode(self._snapshot.layout.text).wanted,
            {file: parts for rank in ranks for file, parts in rank.shards.items()},
            {alias: name for rank in ranks for table in rank.aliases.values() for alias, name in table.items()},
        )
        if problem is not None:
            raise SaveError(f"the ranks have different states: {problem}", where=self.where)
        self._before_commit()
        hook = self._writer.commit_hook
        if hook is not None:
            hook.pre_commit(self.where)
        if not (finite := finite and self.metadata.finite):
            log.warning("the weights of step %d are not finite: no resume takes %s", self.metadata.step, self.name)
        commit(self._folder, ranks, replace(self.metadata, finite=finite), name=self.name, format=self._format)
        if hook is not None:
            hook.post_commit(self.where)

    def _named(self, error: BaseException | None) -> Any:
        """An error of the disk as a SaveError that names the checkpoint; another exception as it is."""
        if error is not None and not isinstance(error, OSError):
            return as_failure(error, self.metadata.step, self.where)
        if error is None:
            return None
        size_bytes = None if self._snapshot is None else self._snapshot.layout.total_bytes
        return disk_error(error, self.where, size_bytes, self.storage)

    def _raise_failures(self, said: list[_Failure | None], own: BaseException | None) -> None:
        """Raise what this rank has, or else what the first rank that failed says."""
        failed = [(rank, one) for rank, one in enumerate(said) if one is not None]
        if not failed:
            return
        self._stack.close()
        if own is not None:
            raise own
        rank, first = failed[0]
        if first.exit_code is not None:
            # It ends that rank, whatever checkpoint.on_save_error says.
            raise PeerError(f"rank {rank} failed: {first.text}", first.exit_code)
        raise (NotDurableError if first.is_there else SaveError)(f"rank {rank}: {first.text}")


class _Failure(NamedTuple):
    """An error for other ranks."""

    text: str
    is_there: bool
    """Whether the checkpoint is there all the same."""
    exit_code: int | None
    """Of a UserError; None for a failed save."""


def _said(error: BaseException | None) -> _Failure | None:
    if error is None:
        return None
    text = str(error) if isinstance(error, SaveError) else f"{type(error).__name__}: {error}"
    exit_code = int(error.exit_code) if isinstance(error, UserError) else None
    return _Failure(text, isinstance(error, NotDurableError), exit_code)


def _plain(files: RankFiles, *, finite: bool) -> dict[str, Any]:
    """What a rank wrote, as plain values for the others."""
    return {
        "files": {name: (entry.size_bytes, entry.digest) for name, entry in files.files.items()},
        "aliases": {file: dict(table) for file, table in files.aliases.items()},
        "shards": {file: {name: str(part) for name, part in parts.items()} for file, parts in files.shards.items()},
        "finite": finite,
    }


def _files(plain: dict[str, Any]) -> RankFiles:
    return RankFiles(
        {name: FileEntry(*entry) for name, entry in plain["files"].items()},
        plain["aliases"],
        {file: {name: Shard.parse(part) for name, part in parts.items()} for file, parts in plain["shards"].items()},
    )
