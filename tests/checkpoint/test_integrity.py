"""Which checkpoint is the newest that is sound, and what is done while its bytes are read."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from functools import partial

import pytest
from states import small_state

from trainer_cli.checkpoint.catalog import Catalog, newest_intact, verify_beside, why_damaged
from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, SyncCheckpointer
from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.core.manifest import DamagedCheckpoint, Manifest, new_digest


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


def reseal(checkpoint, file: str, content: bytes) -> None:
    """Other content with right digests: by a faulty disk no, but by a faulty or hostile writer."""
    path = checkpoint / "manifest.json"
    manifest = Manifest.parse(path.read_bytes())
    digest = new_digest("xxh3_128")
    digest.update(content)
    entry = replace(manifest.files[file], size_bytes=len(content), digest=f"xxh3_128:{digest.hexdigest()}")
    (checkpoint / file).write_bytes(content)
    path.write_bytes(replace(manifest, files={**manifest.files, file: entry}).to_bytes())


def state_of(value: str) -> bytes:
    return f'{{"version": 1, "state": {{"a": {value}}}}}'.encode()


def header_of(fields: object) -> bytes:
    text = json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text


HOSTILE = {
    "nested lists": ("rank0.json", state_of("[" * 100_000 + "]" * 100_000)),
    "no JSON": ("rank0.json", b"\xff\xfe"),
    "a tensor that no file has": ("rank0.json", state_of('{"$":"tensor","v":"b"}')),
    "no header": ("rank0.safetensors", b""),
    "no tensors": ("rank0.safetensors", header_of({})),
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_whatever_reading_raises_is_damage_and_the_next_older_one_is_taken(catalog, caplog, hostile):
    reseal(catalog.storage.root / "step3", *hostile)
    assert why_damaged(catalog.storage, catalog.entry("step3")) is not None
    with pytest.raises(DamagedCheckpoint):
        SyncCheckpointer().load(catalog.storage.root / "step3")
    found = newest_intact(catalog, "r", "here")
    assert found is not None
    assert found.step == 2
    assert "step3 is not used, and is quarantined" in caplog.text
