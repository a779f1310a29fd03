"""What a failed save says: which checkpoint, what the system said, and what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from states import small_state

from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, SyncCheckpointer
from trainer_cli.checkpoint.save import disk_error
from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.errors import NotDurableError, SaveError
from trainer_cli.testing.faults import FaultyDisk

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
            assert (" bytes are free" in text) is (number == errno.ENOSPC)


def test_a_file_that_is_no_part_of_the_checkpoint_is_named() -> None:
    error = disk_error(OSError(errno.ENOSPC, "Full", "runs/x/metrics.jsonl"), "runs/x/checkpoints/step1", 10, 5)
    assert str(error) == (
        "the checkpoint could not be saved: Full: runs/x/metrics.jsonl (runs/x/checkpoints/step1). "
        "Older checkpoints are intact. Free some space on the disk."
    )
