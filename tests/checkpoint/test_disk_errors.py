"""A save that would not fit on the disk is not begun, so that nothing of the run is written to a disk that is full."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_disk import FaultyDisk
from thread_ranks import ThreadGroup, on_ranks

from trainer_cli.addons.formats.archive import ArchiveFormat
from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, SyncCheckpointer
from trainer_cli.errors import NoSpaceError, SaveError
from trainer_cli.schema.checkpoint_config import Compression
from trainer_cli.storage.local import LocalStorage

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


def save(root: Path, disk: Filled, name: str = "step2", **arguments: Any) -> LocalStorage:
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
    save(tmp_path, Filled(ENOUGH, 4), "step1")
    disk = Filled(*left)
    with pytest.raises(SaveError) as caught:
        save(tmp_path, disk)
    where = re.escape(str(tmp_path / "step2"))
    cure = "Older checkpoints are intact. Free some space on the disk."
    assert re.fullmatch(rf"the checkpoint was not started: {words} \({where}\)\. {cure}", str(caught.value))
    assert not [name for name in disk.operations if name.startswith(("mkdir", "open_new", "write", "rename"))]
    assert [path.name for path in tmp_path.iterdir()] == ["step1"]


def test_a_file_system_that_does_not_say_what_is_free_refuses_no_save(tmp_path: Path) -> None:
    save(tmp_path, Filled(None, None))
    assert (tmp_path / "step2").is_dir()


def test_what_a_removed_checkpoint_still_takes_counts_as_free(tmp_path: Path) -> None:
    later: list[Callable[[], object]] = []
    storage = save(tmp_path, Filled(ENOUGH), "step1", later=later.append)
    assert storage.remove("step1")
    assert 200_000 < storage.removed_bytes() < 210_000
    save(tmp_path, Filled(100_000))
    later[0]()
    assert storage.removed_bytes() == 0
    with pytest.raises(SaveError, match="not started"):
        save(tmp_path, Filled(100_000), "step3")


def test_a_compressed_archive_whose_size_is_unknown_is_begun(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path, disk=Filled(100_000))
    SyncCheckpointer(storage=lambda root: storage, format=ArchiveFormat(Compression.gz)).save(STATE, tmp_path / "step2")
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
