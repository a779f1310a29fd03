"""Flipped bits, truncations and appended bytes, in any file, are always found, and named."""

from __future__ import annotations

import os
import random
import shutil

import pytest
from states import same, small_state

from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, SyncCheckpointer
from trainer_cli.core.checkpoint_config import DigestAlgorithm
from trainer_cli.core.manifest import DamagedCheckpoint

FILES = ["manifest.json", "rank0.safetensors", "rank0.json", "config.yaml"]


@pytest.fixture(params=list(DigestAlgorithm))
def checkpointer(request):
    return SyncCheckpointer(digest=request.param)


@pytest.fixture
def path(memory_path, checkpointer):
    path = memory_path / "step5"
    facts = CheckpointMetadata(run_id="r", step=5, files={"config.yaml": b"seed: 1\nname: x\n"})
    checkpointer.save(small_state(5), path, metadata=facts)
    return path


def is_found(checkpointer, path) -> bool:
    """True where both a check and a use of the damaged file refuse it."""
    found = 0
    for use in (
        lambda: checkpointer.verify(path),
        lambda: (checkpointer.load(path), checkpointer.verify(path)),
    ):
        try:
            use()
        except DamagedCheckpoint:
            found += 1
    return found == 2


@pytest.mark.parametrize("file", FILES)
def test_flipped_bits_are_found(checkpointer, path, file):
    whole = (path / file).read_bytes()
    places = range(len(whole)) if len(whole) < 200 else random.Random(0).sample(range(len(whole)), 200)
    for place in places:
        altered = bytearray(whole)
        altered[place] ^= 1 << random.Random(place).randrange(8)
        (path / file).write_bytes(altered)
        assert is_found(checkpointer, path), (file, place)
    (path / file).write_bytes(whole)
    assert same(dict(checkpointer.load(path)), small_state(5))


@pytest.mark.parametrize("file", FILES)
def test_truncated_and_grown_files_are_found(checkpointer, path, file):
    whole = (path / file).read_bytes()
    for content in (b"", whole[:-1], whole[: len(whole) // 2], whole + b"\0", whole + whole, whole + b"\n"):
        (path / file).write_bytes(content)
        assert is_found(checkpointer, path), (file, len(content))


@pytest.mark.parametrize("file", FILES)
def test_missing_files_are_found(checkpointer, path, file):
    (path / file).unlink()
    assert is_found(checkpointer, path)


@pytest.mark.parametrize("file", FILES[1:])
def test_zeroed_files_of_the_right_size_are_found_and_named(checkpointer, path, file):
    (path / file).write_bytes(bytes((path / file).stat().st_size))
    with pytest.raises(DamagedCheckpoint, match=file):
        checkpointer.verify(path)


@pytest.mark.parametrize("file", FILES[1:])
def test_files_of_another_checkpoint_are_found(checkpointer, path, memory_path, file):
    other = memory_path / "step6"
    facts = CheckpointMetadata(run_id="r", step=6, files={"config.yaml": b"seed: 2\nname: x\n"})
    checkpointer.save(small_state(6), other, metadata=facts)
    shutil.copy(other / file, path / file)
    assert is_found(checkpointer, path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("file", FILES)
def test_what_is_no_file_is_found_without_waiting(checkpointer, path, file, make):
    (path / file).unlink()
    make(path / file)
    assert is_found(checkpointer, path)


def test_a_damaged_checkpoint_in_the_way_is_set_aside_and_saved_anew(checkpointer, path):
    content = bytearray((path / "rank0.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "rank0.safetensors").write_bytes(content)
    metadata = CheckpointMetadata(run_id="r", step=5)
    checkpointer.save(small_state(5), path, metadata=metadata, overwrite=False)
    assert same(dict(checkpointer.load(path)), small_state(5))
    assert len([name for name in os.listdir(path.parent) if name.startswith(".aside.step5.")]) == 1
