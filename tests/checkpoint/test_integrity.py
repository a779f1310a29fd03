"""Which checkpoint is the newest that is sound, and what is done while its bytes are read."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from states import small_state

from trainer_cli.checkpoint.catalog import Catalog
from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, SyncCheckpointer
from trainer_cli.checkpoint.integrity import newest_intact, verify_beside
from trainer_cli.checkpoint.storage.local import LocalStorage


@pytest.fixture
def catalog(memory_path):
    checkpointer = SyncCheckpointer()
    for step in (1, 2, 3):
        checkpointer.save(
            small_state(step), memory_path / f"step{step}", metadata=CheckpointMetadata(run_id="r", step=step)
        )
    return Catalog(LocalStorage(memory_path, run_id="r"))


def damage(catalog: Catalog, step: int) -> None:
    file = catalog.storage.root / f"step{step}" / "rank0.safetensors"  # type: ignore[attr-defined]
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")


@pytest.mark.parametrize(("damaged", "left"), [([], 3), ([3], 2), ([3, 2], 1)])
def test_work_is_done_beside_each_reading_and_changes_nothing_of_the_choice(catalog, damaged, left):
    for step in damaged:
        damage(catalog, step)
    done = []
    found = newest_intact(
        catalog, "r", "here", check=partial(verify_beside, lambda: done.append(threading.current_thread()))
    )
    assert found is not None
    assert found.step == left
    assert done == [threading.main_thread()] * (len(damaged) + 1)
    assert [entry.step for entry in catalog.entries()] == list(range(1, left + 1)), "the damaged are set aside"


def test_a_failure_of_that_work_is_its_own_and_sets_nothing_aside(catalog):
    def fails() -> None:
        raise ImportError("no torch here")

    damage(catalog, 3)
    with pytest.raises(ImportError, match="no torch"):
        newest_intact(catalog, "r", "here", check=partial(verify_beside, fails))
    assert len(catalog.entries()) == 3
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint-proof")]
