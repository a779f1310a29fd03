"""One save by several ranks: what they do together, and what each does alone.

    main thread      begin ── training continues ────────── finish
    writer thread          └─ write: this rank's files ─┘

`begin` opens one hidden folder for all, `finish` gathers what they wrote and commits. If one rank fails, the save fails
on every rank, and there is no manifest. A rank that dies leaves the hidden folder, which the next start removes.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer_cli.checkpoint.disk_errors import check_room, disk_error
from trainer_cli.checkpoint.save import CheckpointWriter, RankFiles, SaveJob, as_failure, commit, is_saved, write
from trainer_cli.dtensor import is_dtensor
from trainer_cli.errors import NoSpaceError, NotDurableError, SaveError, UserError
from trainer_cli.files import is_url
from trainer_cli.format import ShardedFormat, decode, encode, lay_out
from trainer_cli.layout import PartTable, Shard
from trainer_cli.manifest import FileEntry, new_digest
from trainer_cli.parallel import PeerError
from trainer_cli.schema import DigestAlgorithm
from trainer_cli.tensor_files import bytes_of

if TYPE_CHECKING:
    from trainer_cli.parallel import ProcessGroup
    from trainer_cli.storage import StagedFolder

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class GroupSave(SaveJob):
    """The save of one step by several ranks, each of which makes one. Its `finish` commits."""

    group: ProcessGroup
    writer: CheckpointWriter

    def __post_init__(self) -> None:
        group = self.group
        self.metadata = replace(self.metadata, world_size=group.world_size, tensor_size=group.tensor_size)
        self.where = self.storage.location(self.name)
        if group.machines > 1:
            self.storage.separate(group.rank)
        self._stack = ExitStack()
        """Of rank 0: removes the hidden folder unless it was published."""
        self._folder: StagedFolder | None = None
        self._hidden_name = ""
        self._rank_files: RankFiles | None = None
        self._finite = True
        self._checksums: dict[str, int] = {}
        self._failure: BaseException | None = None

    @property
    def waits_for_commit(self) -> bool:
        return not self.is_there

    def begin(self) -> None:
        """Stage this rank's state, and agree on the hidden folder, or on that nothing is to be written. Collective.

        Raises:
            SaveError: on every rank, if one of them failed; that one raises its own error.
            PeerError: on the others, if that is a UserError, such as a state that cannot be saved.
        """
        error: Exception | None = None
        try:
            # First, since they may have collectives of callbacks.
            self._checksums = self.caller.checksums()
            self.snapshot = self.stage()
            if self.group.is_main:
                self.is_there = is_saved(self.storage, self.name, self.metadata, overwrite=self.overwrite)
                if not self.is_there:
                    staged = self.storage.writing(self.name, digest=self.writer.digest, replace=self.overwrite)
                    self._folder = self._stack.enter_context(staged)
        except Exception as exception:
            error = exception
        hidden_name = "" if self._folder is None else self._folder.hidden_name
        error = self._name_checkpoint(error)
        size_bytes = 0 if self.snapshot is None else self.snapshot.layout.least_bytes
        # Also a rank that has failed takes part: the others would wait for it.
        reports = self.group.gather_on_main((_failure_of(error), size_bytes))
        first_failure = _first_failure([failure for failure, _ in reports])
        if self.group.is_main and first_failure is None and not self.is_there:
            try:
                total_bytes = sum(size_bytes for _, size_bytes in reports)
                # What is sent to an object store is written to each machine's own disk first; any other root is
                # shared by all machines.
                if is_url(self.where):
                    total_bytes //= self.group.machines
                check_room(self.storage, self.where, total_bytes, self.metadata.files, self.group.world_size)
            except SaveError as short:
                error = short
                first_failure = _first_failure([_failure_of(error)])
        self._hidden_name, self.is_there, first_failure = self.group.broadcast(
            (hidden_name, self.is_there, first_failure)
        )
        self._raise_failure(first_failure, error)
        if self.is_there and self.group.is_main:
            self.storage.fsync_names()
            log.info("%s already exists, and is not written again", self.where)
            self.caller.on_committed(self)

    def write(self) -> None:
        """Write this rank's files, digested and fsynced. A failure is reported by `finish`, on every rank."""
        if self.is_there:
            return
        assert self.snapshot is not None
        try:
            folder = self._folder or self.storage.joining(self._hidden_name, digest=self.writer.digest)
            # The small files of the run are the same on all ranks: rank 0 writes them once.
            self._rank_files = write(folder, self.snapshot, self.metadata.files if self.group.is_main else {})
            self._finite = self.snapshot.is_finite()
        except BaseException as error:  # Raised by `finish`: no collective runs in the thread that writes.
            self._failure = error

    def finish(self) -> None:
        """Commit what all ranks have written. Collective; call it after every rank's `write` has ended.

        Raises:
            NotDurableError: the checkpoint is there, but a power cut may take it away.
            SaveError: on every rank, if one of them failed; nothing was committed.
        """
        if self.is_there:
            return
        error = self._name_checkpoint(self._failure)
        # A writer that hangs is given up by the waiting main thread, and the others must hear of it.
        if error is None and self._rank_files is None:
            error = SaveError("it was not written in time", where=self.where)
        own_report = None if self._rank_files is None or error is not None else self._report(self._rank_files)
        # To rank 0 alone: the reports of all ranks together grow with ranks times tensors.
        reports = self.group.gather_on_main((own_report, _failure_of(error)))
        first_failure = _first_failure([failure for _, failure in reports])
        if self.group.is_main:
            if first_failure is None:
                try:
                    ranks = [report for report, _ in reports if report is not None]
                    self._check_replicas([report.checksums for report in ranks])
                    self._commit(read_reports(ranks), finite=all(report.finite for report in ranks))
                except Exception as raised:
                    error = self._name_checkpoint(raised)
                    first_failure = _first_failure([_failure_of(error)])
            self._stack.close()
        # The others must not continue before it is known whether the checkpoint exists.
        self._raise_failure(self.group.broadcast(first_failure), error)
        if self.group.is_main:
            self.caller.on_committed(self)

    def _report(self, files: RankFiles) -> RankReport:
        """What this rank wrote, for rank 0."""
        checksums = array("q", self._checksums.values()).tobytes()
        return RankReport.of(files, self._finite)._replace(checksums=checksums)

    def _check_replicas(self, checksums: list[bytes]) -> None:
        """Check that every rank has the same parameters as rank 0.

        Args:
            checksums: of each rank, as in `RankReport`.

        Raises:
            UserError: a rank has others; with the first parameter that differs.
        """
        for rank, rank_checksums in enumerate(checksums):
            if rank_checksums == checksums[0]:
                continue
            by_parameter = zip(self._checksums, array("q", checksums[0]), array("q", rank_checksums), strict=True)
            name = next(name for name, expected, actual in by_parameter if actual != expected)
            raise UserError(
                f"{name} differs between ranks 0 and {rank} at step {self.metadata.step}, so {self.name} is not saved",
                where="parallel",
                cure="Likely causes: torch.utils.checkpoint with use_reentrant=True around a module that is used twice "
                "(set use_reentrant=False), or code that changes weights on one rank alone.",
            )

    def _commit(self, ranks: list[RankFiles], *, finite: bool) -> None:
        """Commit the files of all ranks, as rank 0.

        Args:
            finite: whether the trained tensors of every rank are finite.

        Raises:
            SaveError: the parts of the ranks do not make every tensor whole.
        """
        assert self._folder is not None
        assert self.snapshot is not None
        # Before the manifest: a checkpoint with a hole in a tensor must never become valid.
        aliases: dict[str, str] = {}
        for rank in ranks:
            for table in rank.aliases.values():
                aliases |= table
        parts = PartTable.joined(rank.parts for rank in ranks)
        problem = parts.why_uncovered(decode(self.snapshot.layout.text).wanted, aliases)
        if problem is not None:
            raise SaveError(f"the ranks have different states: {problem}", where=self.where)
        self.caller.before_commit()
        hook = self.writer.commit_hook
        if hook is not None:
            hook.pre_commit(self.where)
        finite = finite and self.metadata.finite
        if not finite:
            log.warning(
                "the weights of step %d are not finite: %s will not be used to resume", self.metadata.step, self.name
            )
        commit(self._folder, ranks, replace(self.metadata, finite=finite), name=self.name, format=self.format)
        if hook is not None:
            hook.post_commit(self.where)

    def _name_checkpoint(self, error: BaseException | None) -> Exception | None:
        """An error of the disk as a SaveError that names the checkpoint; another exception as it is."""
        if error is None:
            return None
        if not isinstance(error, OSError):
            return as_failure(error, self.metadata.step, self.where)
        size_bytes = None if self.snapshot is None else self.snapshot.layout.total_bytes
        return disk_error(error, self.where, size_bytes, self.storage)

    def _raise_failure(self, first_failure: tuple[int, _Failure] | None, error: BaseException | None) -> None:
        """Raise the error of this rank, or without one that of the first rank that has failed.

        Args:
            first_failure: the first rank that has failed, and its failure; None: no rank has.
            error: the error of this rank.
        """
        if first_failure is None:
            return
        self._stack.close()
        if error is not None:
            raise error
        rank, failure = first_failure
        if failure.exit_code is not None:
            # It ends that rank, whatever checkpoint.on_save_error says.
            raise PeerError(f"rank {rank} failed: {failure.text}", failure.exit_code)
        raise _KINDS[failure.kind](f"rank {rank}: {failure.text}")


_KINDS = {kind.__name__: kind for kind in (NotDurableError, NoSpaceError, SaveError)}
"""The types of failures of a save that its callers distinguish, the most general last."""


class _Failure(NamedTuple):
    """An error for other ranks."""

    text: str
    kind: str
    """Name of the exception to raise for a failed save, a key of `_KINDS`."""
    exit_code: int | None
    """Of a UserError; None for a failed save."""


def _failure_of(error: BaseException | None) -> _Failure | None:
    """An error as plain values for other ranks."""
    if error is None:
        return None
    text = str(error) if isinstance(error, SaveError) else f"{type(error).__name__}: {error}"
    exit_code = int(error.exit_code) if isinstance(error, UserError) else None
    # An error of another type is a failed save, too.
    kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), SaveError.__name__)
    return _Failure(text, kind, exit_code)


def _first_failure(failures: list[_Failure | None]) -> tuple[int, _Failure] | None:
    """The first rank that failed, and its failure."""
    return next(((rank, failure) for rank, failure in enumerate(failures) if failure is not None), None)


class RankReport(NamedTuple):
    """What a rank wrote, as plain values for rank 0."""

    files: dict[str, tuple[int, str]]
    aliases: dict[str, dict[str, str]]
    parts: dict[str, list[tuple[str, bytes]]]
    """File -> its parts, each with the names of the tensors as JSON."""
    finite: bool
    checksums: bytes = b""
    """The values of `SaveCaller.checksums`, 64 bits each."""

    @classmethod
    def of(cls, files: RankFiles, finite: bool) -> RankReport:
        """The report about these files."""
        return cls(
            {name: (entry.size_bytes, entry.digest) for name, entry in files.files.items()},
            {file: dict(table) for file, table in files.aliases.items()},
            {
                # Names as one value: a thousand ranks send equal ones, which rank 0 then reads once.
                file: [(str(shard), json.dumps(names).encode("ascii")) for shard, names in groups.items()]
                for file, groups in files.parts.groups.items()
            },
            finite,
        )


def read_reports(reports: list[RankReport]) -> list[RankFiles]:
    """What the ranks wrote, by their reports."""
    # Cached, because a thousand ranks send equal texts.
    parse_names = cache(lambda text: tuple(json.loads(text)))
    ranks = []
    for report in reports:
        files = {name: FileEntry(*entry) for name, entry in report.files.items()}
        parts = {
            file: {Shard.parse(shard): parse_names(names) for shard, names in groups}
            for file, groups in report.parts.items()
        }
        ranks.append(RankFiles(files, report.aliases, PartTable(parts)))
    return ranks


def compare_ranks(
    state: Mapping[str, Any] | Callable[[], Mapping[str, Any]], group: ProcessGroup, sharded: ShardedFormat
) -> Mapping[str, Any]:
    """Compare the top-level keys of the ranks' states, and have each rank save for itself those that differ. Returns
    this rank's state. Collective.

    Args:
        state: the state, or a function that makes it.

    Raises:
        UserError: a key that differs also holds tensors that are divided among the ranks.
    """
    error: Exception | None = None
    digests: dict[str, str] | None = None
    try:
        state = state() if callable(state) else state
        digests = digest_parts(state)
    except Exception as raised:
        error = raised
    reports = group.gather(digests)
    if error is not None:
        raise error
    assert not callable(state)
    # A rank that has failed reports None; its save fails on all ranks later.
    sharded.per_rank = find_differing_keys([report for report in reports if report is not None])
    for key in sharded.per_rank:
        if key in state and any(map(is_dtensor, encode({key: state[key]})[1].values())):
            raise UserError(
                f"the ranks have different values under {key!r}, which also holds tensors that they share",
                cure="Save what differs under a separate top-level key.",
            )
    return state


def digest_parts(state: Mapping[str, Any]) -> dict[str, str]:
    """Digest the values under each top-level key of a state, so that ranks can compare theirs.

    DTensors, of which each rank has a part, are left out.

    Raises:
        UnsavableState: a value cannot be saved; the message names its owner.
    """
    digests = {}
    for key, value in state.items():
        text, leaves = encode({key: value})
        digest = new_digest(DigestAlgorithm.xxh3_128)
        digest.update(text)
        for name, leaf in leaves.items():
            if not is_dtensor(leaf):
                lay_out(b"", {name: leaf})  # Refuses a tensor whose bytes cannot be read below.
                digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
                digest.update(bytes_of(leaf).data)
        digests[key] = digest.hexdigest()
    return digests


def find_differing_keys(digests: Sequence[Mapping[str, str]]) -> list[str]:
    """The top-level keys whose values differ among ranks, by the `digest_parts` of each."""
    keys = dict.fromkeys(key for rank_digests in digests for key in rank_digests)
    return [key for key in keys if len({rank_digests.get(key) for rank_digests in digests}) > 1]
