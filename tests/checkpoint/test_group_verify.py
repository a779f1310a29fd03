"""A checkpoint that several ranks verify, each some of its files: the answer is that of one process."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from thread_ranks import ThreadGroup, on_ranks

from trainer_cli.catalog.catalog import Catalog
from trainer_cli.checkpoint import group_verify
from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, SyncCheckpointer
from trainer_cli.checkpoint.group_verify import GroupVerifier, share_of
from trainer_cli.manifest import FileEntry, Manifest
from trainer_cli.policy.rules import CheckpointKind
from trainer_cli.storage.local import LocalStorage

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
    class Elsewhere(group_verify.LocalReadableFolder):
        def __init__(self, path: Path, disk: object) -> None:
            super().__init__(path / "elsewhere", disk)  # type: ignore[arg-type]

    monkeypatch.setattr(group_verify, "LocalReadableFolder", Elsewhere)
    with caplog.at_level(logging.WARNING):
        assert answer(root) is None
    assert "could be verified by rank 0 only" in caplog.text
