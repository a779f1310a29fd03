"""Several ranks save and verify one checkpoint: all or none commit, and the answer is that of one process."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_disk import FaultyDisk
from states import same
from thread_ranks import ThreadGroup, on_ranks

from trainer_cli.catalog.catalog import Catalog
from trainer_cli.checkpoint import group_verify
from trainer_cli.checkpoint.checkpointer import (
    AsyncCheckpointer,
    CheckpointMetadata,
    SyncCheckpointer,
    make_sync_checkpointer,
)
from trainer_cli.checkpoint.group_verify import GroupVerifier, share_of
from trainer_cli.errors import NotDurableError, SaveError, UserError
from trainer_cli.format.sharded import SMALL_BYTES
from trainer_cli.manifest import FileEntry, Manifest
from trainer_cli.parallel.peer_errors import PeerError
from trainer_cli.policy.rules import CheckpointKind
from trainer_cli.storage.disk import Disk
from trainer_cli.storage.folder import LocalReadableFolder
from trainer_cli.storage.local import LocalStorage

LARGE = SMALL_BYTES // 4 + 1
FACTS = CheckpointMetadata(run_id="run", step=2, files={"config.yaml": b"seed: 1\n"})


def state(rank: int, step: int = 2) -> dict[str, Any]:
    return {
        "model": {"a": torch.full((LARGE,), 1.0), "b": torch.full((LARGE,), float(step))},
        "progress": {"step": step},
        "rng": torch.arange(rank, rank + 3),
    }


def disk_of(disks: dict[int, FaultyDisk] | None, group: ThreadGroup) -> Any:
    disk = (disks or {}).get(group.rank) or FaultyDisk()
    return lambda root: LocalStorage(root, disk=disk, run_id="run", attempt=1)


def save(
    root: Path,
    *,
    background: bool = False,
    format: str = "tensors",
    disks: dict[int, FaultyDisk] | None = None,
    deadly: bool = False,
) -> list[Any]:
    """Two ranks save step 2; what each rank raised, or None."""

    def act(group: ThreadGroup) -> None:
        if deadly and disks and group.rank in disks:
            group.is_dead = lambda: disks[group.rank].struck
        kind = AsyncCheckpointer if background else SyncCheckpointer
        checkpointer = kind(format=format, storage=disk_of(disks, group))
        checkpointer.join(group)
        live = state(group.rank)
        try:
            saving = checkpointer.save(live, root / "step2", metadata=FACTS, overwrite=False)
            live["model"]["a"].zero_()
            if saving is not None:
                saving.raise_failure()
        finally:
            checkpointer.close()

    return on_ranks(2, act)


def save_each(
    root: Path, tree: Callable[[int], Any], *, kind: type[SyncCheckpointer] = SyncCheckpointer, **settings: Any
) -> list[Any]:
    """Two ranks save what is made of their number; what each raised, or None."""

    def act(group: ThreadGroup) -> None:
        checkpointer = kind()
        checkpointer.join(group)
        try:
            checkpointer.save(tree(group.rank), root / "step2", **{k: v(group.rank) for k, v in settings.items()})
        finally:
            checkpointer.close()

    return on_ranks(2, act)


def save_alone(root: Path) -> None:
    make_sync_checkpointer().save(state(0, 1), root / "step1", metadata=CheckpointMetadata(run_id="run", step=1))


def steps(root: Path) -> list[int]:
    """The valid checkpoints, each of which is read."""
    found = [entry.step for entry in Catalog(LocalStorage(root)).entries() if entry.valid]
    for step in found:
        make_sync_checkpointer().verify(root / f"step{step}")
    return found


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("format", "files"),
    [
        (
            "tensors",
            ["rank0.json", "rank0.own.json", "rank0.safetensors", "rank1.own.json", "rank1.safetensors"],
        ),
        ("archive", ["rank0.tar", "rank1.tar"]),
    ],
)
def test_ranks_save_together_what_one_process_reads(
    memory_path: Path, background: bool, format: str, files: list[str]
) -> None:
    assert save(memory_path, background=background, format=format) == [None, None]
    loaded = make_sync_checkpointer().read(memory_path / "step2")
    assert same(loaded.pop("ranks"), [{"rng": state(rank)["rng"]} for rank in range(2)])
    assert same(loaded, state(0))
    manifest = make_sync_checkpointer().manifest(memory_path / "step2")
    assert (manifest.format, manifest.world_size) == (format, 2)
    assert sorted(manifest.files) == ["config.yaml", *files]
    with_tensors = [file for file in files if not file.endswith(".json")]
    assert {file: list(parts) for file, parts in manifest.shards.items()} == {
        with_tensors[0]: ["model/a"],
        with_tensors[1]: ["model/b"],
    }


def operations(root: Path, background: bool, format: str) -> list[FaultyDisk]:
    """What a save that succeeds asks of each rank's disk."""
    root.mkdir()
    disks = {0: FaultyDisk(), 1: FaultyDisk()}
    assert save(root, background=background, format=format, disks=disks) == [None, None]
    return [disks[0], disks[1]]


HOW = [(False, "tensors"), (True, "tensors"), (True, "archive")]


@pytest.mark.parametrize(("background", "format"), HOW)
def test_an_operation_that_fails_on_one_rank_fails_the_save_on_both(
    memory_path: Path, background: bool, format: str
) -> None:
    tried = 0
    for rank, counting in enumerate(operations(memory_path / "whole", background, format)):
        for at in range(1, len(counting.operations) + 1):
            root = memory_path / f"{rank}-{at}"
            root.mkdir()
            save_alone(root)
            disk = FaultyDisk(at, number=errno.ENOSPC)
            found = save(root, background=background, format=format, disks={rank: disk})
            if found == [None, None]:
                # Where the system may fail without harm: a hidden name that cannot be looked at.
                assert steps(root) == [1, 2], counting.operations[at - 1]
                continue
            tried += 1
            assert all(isinstance(one, SaveError) for one in found), counting.operations[at - 1]
            assert "No space left" in str(found[rank])
            assert str(found[1 - rank]).startswith(f"rank {rank}: ")
            durable = isinstance(found[0], NotDurableError)
            assert isinstance(found[1], NotDurableError) is durable
            assert steps(root) == ([1, 2] if durable else [1])
            assert [one.name for one in root.iterdir() if one.name.startswith(".")] == []
            assert save(root, background=background, format=format) == [None, None]
            assert steps(root) == [1, 2]
    assert tried > 10


@pytest.mark.parametrize(("background", "format"), HOW)
def test_a_rank_that_dies_in_any_operation_leaves_the_older_checkpoint(
    memory_path: Path, background: bool, format: str
) -> None:
    """From that operation on it does nothing more, also not on the disk, and the other waits in vain."""
    for rank, counting in enumerate(operations(memory_path / "whole", background, format)):
        for at in range(1, len(counting.operations) + 1):
            root = memory_path / f"{rank}-{at}"
            root.mkdir()
            save_alone(root)
            disk = FaultyDisk(at, persistent=True)
            found = save(root, background=background, format=format, disks={rank: disk}, deadly=True)
            assert any(isinstance(one, threading.BrokenBarrierError | SaveError) for one in found)
            assert steps(root) in ([1], [1, 2]), counting.operations[at - 1]
            LocalStorage(root, run_id="run", attempt=2).sweep()
            assert [one.name for one in root.iterdir() if one.name.startswith(".tmp")] == []
            assert save(root, format=format) == [None, None]
            assert steps(root) == [1, 2]


def test_a_step_that_is_there_is_not_written_again(memory_path: Path) -> None:
    assert save(memory_path) == [None, None]
    before = (memory_path / "step2/manifest.json").stat().st_mtime_ns
    assert save(memory_path) == [None, None]
    assert save(memory_path, background=True) == [None, None]
    assert (memory_path / "step2/manifest.json").stat().st_mtime_ns == before


def test_a_state_that_one_rank_cannot_save_is_refused_on_both(memory_path: Path) -> None:
    found = save_each(memory_path, lambda rank: {**state(rank), "data": {1, 2} if rank else []})
    assert isinstance(found[1], UserError)
    assert "data is a set" in str(found[1])
    assert isinstance(found[0], PeerError)
    assert "rank 1 failed: UnsavableState: data is a set" in str(found[0])
    assert found[0].exit_code == 2
    assert list(memory_path.iterdir()) == []


@pytest.mark.parametrize("kind", [SyncCheckpointer, AsyncCheckpointer])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_state_that_one_rank_cannot_make_fails_the_save_on_both_at_once(
    memory_path: Path, failing: int, kind: type[SyncCheckpointer]
) -> None:
    def make(rank: int) -> dict[str, Any]:
        if rank == failing:
            raise ZeroDivisionError("the callback's own")
        return state(rank)

    found = save_each(memory_path, lambda rank: partial(make, rank), kind=kind)
    assert isinstance(found[failing], ZeroDivisionError)
    assert isinstance(found[1 - failing], SaveError)
    assert str(found[1 - failing]) == f"rank {failing}: ZeroDivisionError: the callback's own."
    assert list(memory_path.iterdir()) == []


def test_states_that_differ_between_the_ranks_are_not_committed(memory_path: Path) -> None:
    one, both = {"a": torch.ones(LARGE)}, {"a": torch.ones(LARGE), "b": torch.ones(LARGE + 1)}
    found = save_each(memory_path, lambda rank: {"model": one if rank else both})
    assert all(isinstance(one, SaveError) for one in found)
    assert "the ranks have different states: no rank has written model/a" in str(found[0])
    assert list(memory_path.iterdir()) == []


def test_weights_that_are_not_finite_on_one_rank_are_not_finite(memory_path: Path) -> None:
    trained = ([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, torch.nan])])
    assert save_each(memory_path, state, trained=trained.__getitem__) == [None, None]
    assert not make_sync_checkpointer().manifest(memory_path / "step2").finite


@pytest.mark.parametrize("rank", [0, 1])
def test_what_ends_the_thread_that_writes_on_one_rank_fails_the_save_on_both(memory_path: Path, rank: int) -> None:
    class Ends(FaultyDisk):
        def write(self, fd: int, data: memoryview, offset: int) -> int:
            raise SystemExit(3)

    found = save(memory_path, background=True, disks={rank: Ends()})
    for error in found:
        assert isinstance(error, SaveError)
        assert "step 2 could not be saved: the writer thread was ended by SystemExit: 3" in str(error)
    assert steps(memory_path) == []


# A checkpoint that several ranks verify, each some of its files: the answer is that of one process.


FILES = {"a": 100, "b": 60, "c": 50, "d": 10, "e": 0}


def manifest_of(sizes: dict[str, int]) -> Manifest:
    files = {name: FileEntry(size, "xxh3_128:0") for name, size in sizes.items()}
    return Manifest(run_id="r", attempt=1, step=1, epoch=0, kind=CheckpointKind.regular, reason="by hand", files=files)


@pytest.fixture
def root(memory_path: Path) -> Path:
    """A checkpoint that two ranks wrote."""

    def act(group: ThreadGroup) -> None:
        checkpointer = SyncCheckpointer()
        checkpointer.join(group)
        model = {name: torch.full((40_000,), float(number)) for number, name in enumerate("abcd")}
        checkpointer.save(
            {"model": model, "rng": group.rank}, memory_path / "step2", metadata=CheckpointMetadata(step=2)
        )

    assert on_ranks(2, act) == [None, None]
    return memory_path


def answer(root: Path, world_size: int = 2) -> str | Exception | None:
    """What rank 0 says of the checkpoint, while the other ranks help."""

    def act(group: ThreadGroup) -> str | None:
        verifier, storage = GroupVerifier(group), LocalStorage(root)

        def examine() -> str | None:
            return Catalog(storage).why_damaged(Catalog(storage).entries()[0], verifier.verify)

        return group.on_main(examine, verifier)

    return on_ranks(world_size, act)[0]


@pytest.mark.parametrize(
    ("world_size", "shares"),
    [
        (1, [["a", "b", "c", "d", "e"]]),
        (2, [["a", "d", "e"], ["b", "c"]]),
        (3, [["a"], ["b", "e"], ["c", "d"]]),
        (6, [["a"], ["b"], ["c"], ["d"], ["e"], []]),
    ],
)
def test_ranks_read_about_as_many_bytes_and_each_file_once(world_size: int, shares: list[list[str]]) -> None:
    found = [share_of(manifest_of(FILES), rank, world_size) for rank in range(world_size)]
    assert sorted(file for share in found for file in share) == sorted(FILES)
    assert [sum(FILES[file] for file in share) for share in found] == [
        sum(FILES[file] for file in share) for share in shares
    ]
    assert found == shares


def test_whoever_finds_the_damage_rank_0_says_what_one_process_would(root: Path) -> None:
    (entry,) = Catalog(LocalStorage(root)).entries()
    assert entry.manifest is not None
    assert answer(root) is None
    readers = set()
    for file in entry.manifest.files:
        path = root / "step2" / file
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        readers |= {rank for rank in range(2) if file in share_of(entry.manifest, rank, 2)}
        alone = Catalog(LocalStorage(root)).why_damaged(entry)
        assert alone is not None
        assert file in alone
        assert answer(root) == answer(root, 3) == alone
        path.write_bytes(whole)
    assert readers == {0, 1}


def test_a_rank_that_cannot_see_the_folder_makes_no_checkpoint_damaged(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Elsewhere(LocalReadableFolder):
        def __init__(self, path: Path, disk: Disk) -> None:
            super().__init__(path / "elsewhere", disk)

    monkeypatch.setattr(group_verify, "LocalReadableFolder", Elsewhere)
    with caplog.at_level(logging.WARNING):
        assert answer(root) is None
    assert "could be verified by rank 0 only" in caplog.text
