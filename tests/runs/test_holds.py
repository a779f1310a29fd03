"""What a command has listed stays until it is read, beside a run that saves and removes at every step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainer_cli import make_sync_checkpointer
from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.errors import CheckpointError
from trainer_cli.runs.validate import Holds, select_held


def save(folder: Path, step: int) -> None:
    make_sync_checkpointer().save({"step": step}, folder / f"step{step}")


@contextmanager
def saving_and_removing(folder: Path) -> Iterator[None]:
    """Another thread saves one step after another, and removes all older ones."""
    ends, storage = threading.Event(), LocalStorage(folder)

    def run() -> None:
        for step in range(1, 100_000):
            if ends.is_set():
                return
            save(folder, step)
            for name in storage.names():
                if name != f"step{step}":
                    storage.remove(name)

    save(folder, 0)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def test_what_was_listed_is_there_until_it_is_read(tmp_path: Path) -> None:
    seen = set()
    with saving_and_removing(tmp_path):
        while len(seen) < 5:
            with Holds() as holds:
                selection, removed = select_held([f"{tmp_path}/step*"], holds)
                assert selection.paths
                assert not selection.damaged
                assert not set(removed) & set(selection.paths)
                for path in selection.paths:
                    assert make_sync_checkpointer().load(path)["step"] == int(path.name.removeprefix("step"))
                    holds.release(path)
                    seen.add(path)


def test_a_released_checkpoint_can_be_removed_and_a_removed_one_cannot_be_held(tmp_path: Path) -> None:
    save(tmp_path, 1)
    storage = LocalStorage(tmp_path)
    with Holds() as holds:
        assert holds.take(tmp_path / "step1")
        assert not storage.remove("step1")
    assert storage.remove("step1")
    with Holds() as holds:
        assert not holds.take(tmp_path / "step1")


def test_what_matches_nothing_is_reported_as_by_any_command(tmp_path: Path) -> None:
    with Holds() as holds, pytest.raises(CheckpointError, match="matches nothing"):
        select_held([f"{tmp_path}/step*"], holds)
