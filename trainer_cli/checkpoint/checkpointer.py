"""Checkpointers: save state trees as checkpoints, and load them, through format, storage and manifest.

    save:  tree -> format -> files in a hidden folder -> manifest, last -> folder fsynced -> renamed
    load:  manifest -> sizes -> format, digests on the way -> tree

A save commits a complete checkpoint or nothing; a load returns what was saved or raises.
"""

from __future__ import annotations

import inspect
import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer_cli.checkpoint.fill_state import MapLocation, compare, fill, move_tensors, new_values
from trainer_cli.checkpoint.find import checkpoint_at
from trainer_cli.checkpoint.foreign.torch_checkpointer import file_of_rank, read_rank
from trainer_cli.checkpoint.format.base import Format
from trainer_cli.checkpoint.format.dtensor import Targets, is_dtensor, local_of, targets_in
from trainer_cli.checkpoint.format.open import format_of_rank, new_format
from trainer_cli.checkpoint.format.sharded import RANKS, ShardedFormat, digest_parts, keys_of_each
from trainer_cli.checkpoint.format.tree import encode
from trainer_cli.checkpoint.format.verified_file import verify
from trainer_cli.checkpoint.group_save import GroupSave
from trainer_cli.checkpoint.reader import CheckpointReader as CheckpointReader
from trainer_cli.checkpoint.reader import Reader, errors_of_reading, read_valid_manifest
from trainer_cli.checkpoint.save import CheckpointMetadata as CheckpointMetadata
from trainer_cli.checkpoint.save import (
    CheckpointWriter,
    CommitHook,
    InFlightSave,
    SaveCaller,
    SaveJob,
    Writer,
    metadata_of,
)
from trainer_cli.checkpoint.snapshot import LiveStager, Snapshot, Stager
from trainer_cli.checkpoint.storage.base import ReadableFolder, Storage
from trainer_cli.checkpoint.storage.open import open_storage
from trainer_cli.core.checkpoint_config import DigestAlgorithm
from trainer_cli.core.manifest import Manifest
from trainer_cli.core.naming import is_plain
from trainer_cli.core.url_path import as_path
from trainer_cli.errors import CheckpointError, MissingStateError, UserError
from trainer_cli.parallel.process_group import ALONE, ProcessGroup, default_group, default_ranks

logger = logging.getLogger(__name__)
State = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
NO_CALLER = SaveCaller()


class LoadedState(dict[str, Any]):
    """A loaded tree. `missing` lists what was requested but is not in the checkpoint, as `a/b/c`."""

    def __init__(self, tree: Mapping[str, Any], missing: list[str] | None = None) -> None:
        super().__init__(tree)
        self.missing = missing or []


class Checkpointer:
    """Saves state trees to paths and loads them. With several ranks, every rank calls every method.

    `SyncCheckpointer` and `AsyncCheckpointer` differ in which thread writes.

    Args:
        format: how a state becomes files, or the name of such a format.
        storage: the storage of a folder of checkpoints; by default that of its scheme.
        digest: the digest of every file.
        stager: makes what is written of a state.
        writer, reader: write and read checkpoints in a storage.
        commit_hook: is called around each commit.
        group: the ranks that save together, each its part. By default those of torch's default group, if one is
            initialised at the first save; what differs between them, each saves for itself. `ALONE`: this one alone.
    """

    def __init__(
        self,
        *,
        format: Format | str = "tensors",
        storage: Callable[[Path], Storage] | None = None,
        digest: DigestAlgorithm = DigestAlgorithm.xxh3_128,
        stager: Stager | None = None,
        writer: Writer | None = None,
        reader: Reader | None = None,
        commit_hook: CommitHook | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        self.format = new_format(format) if isinstance(format, str) else format
        self.stager = stager or LiveStager()
        self.writer = writer or CheckpointWriter(digest=digest, commit_hook=commit_hook)
        self.reader = reader or CheckpointReader(self.format)
        run_id = uuid.uuid4().hex[:12]
        self._new_storage = storage or partial(open_storage, run_id=run_id)
        self._storages: dict[Path, Storage] = {}
        self.group: ProcessGroup = ALONE
        self._sharded: ShardedFormat | None = None
        self._joined = self._compares_ranks = False
        if group is not None:
            self.join(group)

    def storage(self, root: str | Path) -> Storage:
        """The storage of a folder of checkpoints, made once."""
        root = as_path(root).absolute()
        if root not in self._storages:
            self._storages[root] = self._new_storage(root)
        return self._storages[root]

    def save(
        self,
        state_dict: State,
        path: str | Path,
        *,
        metadata: CheckpointMetadata | None = None,
        overwrite: bool = True,
        **kwargs: Any,
    ) -> InFlightSave | None:
        """Save a tree as the checkpoint at `path`.

        Args:
            state_dict: the tree, or a function that makes it; if that fails on one rank, no rank waits for it.
            overwrite: True: a checkpoint that exists is replaced; it stays until the new one is committed. False: one
                that exists is refused, except an intact one of the same run and step, which is left as it is.
            kwargs: further arguments of the parts that save.

        None if the checkpoint is committed when this returns; else its futures, staged and written.

        Raises:
            NotDurableError: the checkpoint is there, but a power cut may take it away.
            SaveError: nothing was committed. In both cases older checkpoints are intact.
        """
        raise NotImplementedError

    def locate(self, path: str | Path) -> Path:
        """The checkpoint that a path to load names, as of `checkpoint_at`."""
        return checkpoint_at(path, self.storage)

    def load(
        self,
        path: str | Path,
        state_dict: MutableMapping[str, Any] | None = None,
        default_map_location: MapLocation = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> LoadedState:
        """Load the checkpoint at `path`: all of it, or into `state_dict` only the keys that it names.

        Of a folder of torch's own Checkpointer each rank loads its `checkpoint_{rank}.pt`, which has no digests.

        Tensors in `state_dict` are filled in place, other values replaced; names that the checkpoint lacks
        are listed in the result's `missing`, or refused if `strict`. Damage, and what does not fit, is refused before
        anything is touched.

        Args:
            default_map_location: where new tensors go: a device, its name, or a mapping or function as `torch.load`
                takes them. A checkpoint holds no devices: all its tensors are at "cpu". None: they stay there.
            kwargs: further arguments of the part that reads.

        Raises:
            NoCheckpointError: there is no checkpoint; it is a FileNotFoundError too.
            MissingStateError: the checkpoint lacks a name, and `strict`; it is a RuntimeError too.
            CheckpointError: it is damaged, or does not fit `state_dict`. The other two are such errors too.
        """
        path = self.locate(path)
        (arguments,) = arguments_of_parts("load", kwargs, reader=self.reader.read)
        if state_dict is not None and (targets := targets_in(state_dict)) is not None:
            arguments["targets"] = targets
        tree = self._read_as_rank(path, None if state_dict is None else list(state_dict), arguments)
        if state_dict is None:
            return LoadedState(move_tensors(tree, default_map_location))
        missing, faults = compare(state_dict, tree, "")
        where = str(path.absolute())
        if faults:
            raise CheckpointError(f"the checkpoint does not fit: {'; '.join(faults[:20])}", where=where)
        if missing:
            listed = ", ".join(missing[:20]) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
            if strict:
                raise MissingStateError(f"the checkpoint lacks {listed}", where=where)
            logger.warning("%s lacks %s", where, listed)
        fill(state_dict, tree, move_tensors(new_values(state_dict, tree), default_map_location))
        return LoadedState(state_dict, missing)

    def _read_as_rank(
        self, path: str | Path, only: Collection[str] | None, arguments: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Read what this rank saved; without a group given, as a rank of torch's default group."""
        ranks = default_ranks()
        if (file := file_of_rank(Path(path), ranks.rank)) is not None:
            return read_rank(file, only)
        if not self._joined and ranks.world_size > 1 and isinstance(self.reader, CheckpointReader):
            self.reader.sharded = ShardedFormat(ranks.rank, ranks.world_size)
        storage, name = self._split(path)
        with self._reading(storage, name) as (folder, manifest):
            tree = self.reader.read(folder, manifest, only=only, **arguments)
        if not tree.get(RANKS, True):
            del tree[RANKS]  # One process saved it.
        return tree

    def join(self, group: ProcessGroup) -> None:
        """Save with the other ranks of a group from now on, each its part of the state, and read this rank's part.

        Raises:
            UserError: format or writer are for one process.
        """
        self._joined, self._compares_ranks = True, False
        if group.world_size == 1:
            return
        sharded = ShardedFormat(group.rank, group.world_size, group.tensor_size)
        if (rank_format := format_of_rank(self.format, sharded)) is None:
            raise UserError(
                f"checkpoint.format={self.format.name} saves the state of one process, and this training has "
                f"{group.world_size}",
                cure="Use checkpoint.format=tensors or archive; train ckpt export writes the others.",
            )
        if not isinstance(self.writer, CheckpointWriter):
            raise UserError(f"{type(self.writer).__name__} cannot write what several processes save together")
        self.group, self.format, self._sharded = group, rank_format, sharded
        if isinstance(self.reader, CheckpointReader):
            self.reader.sharded = sharded

    def read(
        self, path: str | Path, only: Collection[str] | None = None, *, targets: Targets | None = None
    ) -> dict[str, Any]:
        """The checkpoint at `path`, or those of these top-level keys that it has.

        Args:
            targets: as of `Reader.read`.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged.
        """
        storage, name = self._split(self.locate(path))
        # A reader of a user's own need not know `targets`.
        arguments = {} if targets is None else {"targets": targets}
        with self._reading(storage, name) as (folder, manifest):
            return self.reader.read(folder, manifest, only=only, **arguments)

    def _new_job(
        self,
        state: State,
        path: str | Path,
        metadata: CheckpointMetadata | None,
        *,
        overwrite: bool,
        trained: Iterable[torch.Tensor],
        caller: SaveCaller,
        further: Mapping[str, Any],
    ) -> SaveJob:
        """The save of a state as the checkpoint at `path`, not yet begun."""
        stage_arguments, arguments = arguments_of_parts(
            "save", further, stager=self.stager.stage, writer=self.writer.write
        )
        self._join_default_group()
        storage, name = self._split(path)

        def stage() -> Snapshot:
            tree = self._compare_ranks(state) if self._compares_ranks else state
            tree = tree() if callable(tree) else tree
            return self.stager.stage(self.format, tree, list(map(local_of, trained)), **stage_arguments)

        facts: dict[str, Any] = {
            "path": as_path(path),
            "storage": storage,
            "metadata": metadata or metadata_of(name),
            "stage": stage,
            "writer": self.writer,
            "format": self.format.name,
            "overwrite": overwrite,
            "caller": caller,
        }
        if self.group.world_size > 1:
            return GroupSave(**facts, group=self.group)
        return SaveJob(**facts, arguments=arguments)

    def _join_default_group(self) -> None:
        """Save with torch's default group if no group was given. Collective."""
        if not self._joined:
            self.join(group := default_group())
            self._compares_ranks = group.world_size > 1

    def _compare_ranks(self, state: State) -> Mapping[str, Any]:
        """Have each rank save for itself what differs among them; the state. Collective."""
        assert self._sharded is not None
        error: Exception | None = None
        digests: dict[str, str] | None = None
        try:
            state = state() if callable(state) else state
            digests = digest_parts(state)
        except Exception as raised:
            error = raised
        reports = self.group.gather(digests)
        if error is not None:
            raise error
        assert not callable(state)
        # Where a rank has failed, the save fails on all of them.
        self._sharded.per_rank = keys_of_each([report for report in reports if report is not None])
        for key in self._sharded.per_rank:
            if key in state and any(map(is_dtensor, encode({key: state[key]})[1].values())):
                raise UserError(
                    f"the ranks have different values under {key!r}, which also holds tensors that they share",
                    cure="Give what differs a top-level key of its own.",
                )
        return state

    def manifest(self, path: str | Path) -> Manifest:
        """The manifest of the checkpoint at `path`, all of whose files exist with the right sizes.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged.
        """
        with self._reading(*self._split(self.locate(path))) as (_, manifest):
            return manifest

    def progress(self, path: str | Path) -> Mapping[str, int | float] | None:
        """The progress of the checkpoint at `path`, without loading its state; None if that is unknown."""
        return self.manifest(path).progress

    def average(self, path: str | Path) -> str | None:
        """Name of the callback whose average was evaluated in place of the weights of the checkpoint at `path`."""
        return self.manifest(path).average

    def left_out(self, path: str | Path) -> tuple[str, ...]:
        """States of the training that the checkpoint at `path` lacks by `checkpoint.leave_out`."""
        return self.manifest(path).left_out

    def metrics(self, path: str | Path) -> Mapping[str, float]:
        """What was measured at the step of the checkpoint at `path`; empty if that is unknown."""
        return self.manifest(path).metrics

    def verify(self, path: str | Path) -> Manifest:
        """Read every file of the checkpoint at `path` and compare its digest; its manifest.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged.
        """
        with self._reading(*self._split(self.locate(path))) as (folder, manifest):
            verify(folder, manifest)
            return manifest

    def close(self, timeout_s: float | None = None) -> None:
        """Finish saves in flight, waiting at most so long, and release resources. None: a limit by the state's size."""
        self.stager.close()
        self._storages.clear()

    def _split(self, path: str | Path) -> tuple[Storage, str]:
        """The storage of the folder that a checkpoint is in, and its name there."""
        path = as_path(path).absolute()
        if not is_plain(path.name):
            raise CheckpointError(f"{path.name!r} cannot be the name of a checkpoint", where=str(path))
        return self.storage(path.parent), path.name

    @contextmanager
    def _reading(self, storage: Storage, name: str) -> Iterator[tuple[ReadableFolder, Manifest]]:
        """Hold a checkpoint against removal while it is read."""
        with errors_of_reading(storage, name), storage.reading(name) as folder:
            yield folder, read_valid_manifest(storage, name)


class SyncCheckpointer(Checkpointer):
    """Saves synchronously: once `save` returns, the checkpoint survives a power cut."""

    def save(
        self,
        state_dict: State,
        path: str | Path,
        *,
        metadata: CheckpointMetadata | None = None,
        overwrite: bool = True,
        trained: Iterable[torch.Tensor] = (),
        caller: SaveCaller = NO_CALLER,
        **kwargs: Any,
    ) -> None:
        """See `Checkpointer.save`; `trained` is an argument of `Stager.stage`, `caller` is called around the commit."""
        job = self._new_job(
            state_dict, path, metadata, overwrite=overwrite, trained=trained, caller=caller, further=kwargs
        )
        job.begin()
        job.write()
        job.finish()


def make_sync_checkpointer(
    *,
    format: Format | str = "tensors",
    storage: Callable[[Path], Storage] | None = None,
    digest: DigestAlgorithm | str = DigestAlgorithm.xxh3_128,
    commit_hook: CommitHook | None = None,
    group: ProcessGroup | None = None,
) -> SyncCheckpointer:
    """A checkpointer for use without a Trainer; `group` as of `Checkpointer`."""
    return SyncCheckpointer(
        format=format, storage=storage, digest=DigestAlgorithm(digest), commit_hook=commit_hook, group=group
    )


def arguments_of_parts(
    method: str, kwargs: Mapping[str, Any], **parts: Callable[..., object]
) -> tuple[dict[str, Any], ...]:
    """The further arguments of a method that each of these methods of its parts takes.

    Raises:
        TypeError: none of them takes one.
    """
    if not kwargs:
        return tuple({} for _ in parts)
    arguments = []
    for function in parts.values():
        parameters = inspect.signature(function).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        arguments.append({name: value for name, value in kwargs.items() if takes_any or name in parameters})
    if unknown := [name for name in kwargs if not any(name in accepted for accepted in arguments)]:
        message = f"{method}() got an unexpected argument {unknown[0]!r}"
        raise TypeError(f"{message}, which is none of its {' and '.join(parts)}")
    return tuple(arguments)
