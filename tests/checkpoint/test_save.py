"""What a failed save says; a save that would not fit on the disk is not begun."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_disk import FaultyDisk
from states import small_state
from thread_ranks import ThreadGroup, on_ranks

from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, SyncCheckpointer
from trainer_cli.checkpoint.disk_errors import disk_error
from trainer_cli.errors import NoSpaceError, NotDurableError, SaveError
from trainer_cli.schema.checkpoint_config import Compression
from trainer_cli.storage.disk import Disk
from trainer_cli.storage.local import LocalStorage

FACTS = CheckpointMetadata(step=1, files={"config.yaml": b"x" * 1000})


def save(root: Path, disk: FaultyDisk) -> SaveError | None:
    """The failure of a save on this disk, if it fails."""
    try:
        SyncCheckpointer(storage=lambda root: LocalStorage(root, disk=disk)).save(
            small_state(1), root / "step1", metadata=FACTS
        )
    except SaveError as error:
        return error
    return None


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_each_failure_of_the_disk_is_one_sentence_about_it_and_one_about_what_to_do(
    memory_path: Path, number: int
) -> None:
    counting = FaultyDisk()
    (memory_path / "whole").mkdir()
    assert save(memory_path / "whole", counting) is None
    sizes = [path.stat().st_size for path in (memory_path / "whole/step1").iterdir() if path.name != "manifest.json"]
    first = counting.operations.index(next(one for one in counting.operations if one.startswith("mkdir .tmp")))
    for at in range(first + 1, len(counting.operations) + 1):
        root = memory_path / str(at)
        root.mkdir()
        error = save(root, FaultyDisk(at, number=number))
        assert error is not None, counting.operations[at - 1]
        text = str(error)
        assert text.count(os.strerror(number)) == 1
        assert f"({root}/step1). Older checkpoints are intact. " in text
        is_there = isinstance(error, NotDurableError)
        assert is_there is (root / "step1").exists()
        says_space = "it needs" in text
        assert says_space is (number in (errno.ENOSPC, errno.EDQUOT) and not is_there)
        if says_space:
            assert f"; it needs {sum(sizes):,} bytes" in text
            assert ("free" in text.partition("Older")[0]) is (number == errno.ENOSPC)


def test_a_file_that_is_no_part_of_the_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    where = tmp_path / "checkpoints/step1"
    error = disk_error(OSError(errno.ENOSPC, "Full", f"{tmp_path}/metrics.jsonl"), where, 10, LocalStorage(tmp_path))
    assert str(error) == (
        f"the checkpoint could not be saved: Full: {tmp_path}/metrics.jsonl ({where}). "
        "Older checkpoints are intact. Free some space on the disk."
    )


class Limited(Disk):
    """A file system that has so much left."""

    def __init__(self, free_bytes: int, free_files: int | None) -> None:
        self.left = free_bytes, free_files

    def free_bytes(self, path: Path) -> int:
        return self.left[0]

    def free_files(self, path: Path) -> int | None:
        return self.left[1]


@pytest.mark.parametrize(
    ("number", "free_bytes", "free_files", "why"),
    [
        (errno.ENOSPC, 99, 5, "; it needs 1,000 bytes, 99 bytes are free ("),
        (errno.ENOSPC, 99, None, "; it needs 1,000 bytes, 99 bytes are free ("),
        (errno.ENOSPC, 5000, 0, "; the file system can hold no more files (no inode is free) ("),
        (errno.ENOSPC, 5000, 5, "and 5,000 bytes are free now: a quota may be used up, or space was freed since ("),
        (errno.ENOSPC, 5000, None, "a quota may be used up"),
        (errno.EDQUOT, 5000, 5, "; it needs 1,000 bytes ("),
        (errno.EIO, 99, 0, "could not be saved: Words ("),
    ],
)
def test_what_a_full_disk_lacks_is_looked_up(
    tmp_path: Path, number: int, free_bytes: int, free_files: int | None, why: str
) -> None:
    storage = LocalStorage(tmp_path, disk=Limited(free_bytes, free_files))
    assert why in str(disk_error(OSError(number, "Words"), tmp_path / "step1", 1000, storage))


@pytest.mark.parametrize(
    ("where", "older"),
    [
        ("{root}/step1", "Older checkpoints are intact."),
        ("{root}/gone/step1", "{root}/gone is not there (any more)."),
        ("s3://bucket/run/step1", "Older checkpoints were not touched."),
    ],
)
def test_what_became_of_older_checkpoints_is_looked_up(tmp_path: Path, where: str, older: str) -> None:
    text = str(disk_error(OSError(errno.EIO, "Words"), where.format(root=tmp_path)))
    assert older.format(root=tmp_path) in text


# A save that would not fit on the disk is not begun, so that nothing of the run is written to a disk that is full.


STATE = {"model": {"a": torch.zeros(50_000)}, "step": 1}
"""Of 200,000 bytes, for which at least 220,000 and a block for each file are to be free."""
ENOUGH = 300_000


class Filled(FaultyDisk):
    """Lists its operations, and says that so much is free."""

    def __init__(self, size_bytes: int | None, files: int | None = None) -> None:
        super().__init__()
        self.left = size_bytes, files

    def free_bytes(self, path: Path) -> int | None:
        return self.left[0]

    def free_files(self, path: Path) -> int | None:
        return self.left[1]


def save_on(root: Path, disk: Filled, name: str = "step2", **arguments: Any) -> LocalStorage:
    storage = LocalStorage(root, disk=disk, **arguments)
    SyncCheckpointer(storage=lambda root: storage).save(STATE, root / name)
    return storage


@pytest.mark.parametrize(
    ("left", "words"),
    [
        ((100_000, None), r"it needs 204,\d\d\d bytes and \d\d,\d\d\d for blocks and logs, 100,000 bytes are free"),
        ((ENOUGH, 3), r"it needs 4 files, and the file system can hold 3 more \(free inodes\)"),
    ],
    ids=["bytes", "files"],
)
def test_a_save_that_does_not_fit_touches_nothing(tmp_path: Path, left: tuple[int, int | None], words: str) -> None:
    save_on(tmp_path, Filled(ENOUGH, 4), "step1")
    disk = Filled(*left)
    with pytest.raises(SaveError) as caught:
        save_on(tmp_path, disk)
    where = re.escape(str(tmp_path / "step2"))
    cure = "Older checkpoints are intact. Free some space on the disk."
    assert re.fullmatch(rf"the checkpoint was not started: {words} \({where}\)\. {cure}", str(caught.value))
    assert not [name for name in disk.operations if name.startswith(("mkdir", "open_new", "write", "rename"))]
    assert [path.name for path in tmp_path.iterdir()] == ["step1"]


def test_a_file_system_that_does_not_say_what_is_free_refuses_no_save(tmp_path: Path) -> None:
    save_on(tmp_path, Filled(None, None))
    assert (tmp_path / "step2").is_dir()


def test_what_a_removed_checkpoint_still_takes_counts_as_free(tmp_path: Path) -> None:
    later: list[Callable[[], object]] = []
    storage = save_on(tmp_path, Filled(ENOUGH), "step1", later=later.append)
    assert storage.remove("step1")
    assert 200_000 < storage.removed_bytes() < 210_000
    save_on(tmp_path, Filled(100_000))
    later[0]()
    assert storage.removed_bytes() == 0
    with pytest.raises(SaveError, match="not started"):
        save_on(tmp_path, Filled(100_000), "step3")


def test_a_compressed_archive_whose_size_is_unknown_is_begun(tmp_path: Path) -> None:
    archive = pytest.importorskip("trainer_cli.addons.formats.archive").ArchiveFormat(Compression.gz)
    storage = LocalStorage(tmp_path, disk=Filled(100_000))
    SyncCheckpointer(storage=lambda root: storage, format=archive).save(STATE, tmp_path / "step2")
    assert sum(storage.sizes("step2").values()) < 10_000


def test_rank_0_compares_the_parts_of_all_ranks_with_what_is_free(tmp_path: Path) -> None:
    def act(group: ThreadGroup) -> None:
        storage = LocalStorage(tmp_path, disk=Filled(150_000), run_id="run", attempt=1)
        checkpointer = SyncCheckpointer(storage=lambda root: storage)
        checkpointer.join(group)
        facts = CheckpointMetadata(run_id="run", step=2)
        checkpointer.save({**STATE, "rng": torch.arange(group.rank)}, tmp_path / "step2", metadata=facts)

    errors = on_ranks(2, act)
    assert [type(error) for error in errors] == [NoSpaceError, NoSpaceError]
    assert "not started: it needs 219," in str(errors[0])
    assert str(errors[1]).startswith("rank 0: the checkpoint was not started")
    assert list(tmp_path.iterdir()) == []
