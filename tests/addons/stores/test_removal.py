"""A removal in a store, seen between any two of its requests: the checkpoint is whole, being removed, or gone."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_cli.addons.stores.object_client import ObjectClient
from trainer_cli.addons.stores.object_store import ObjectStorage
from trainer_cli.catalog.catalog import REMOVING, Catalog
from trainer_cli.checkpoint.checkpointer import Checkpointer, make_sync_checkpointer
from trainer_cli.checkpoint.save import CheckpointMetadata
from trainer_cli.errors import NoCheckpointError

WHOLE, GONE = "whole", "gone"
REQUESTS = 9
"""Of a removal: claim, marker, manifest, a listing, two files, claim, marker; and one that is never made."""


class Client(ObjectClient):
    """Calls `before` with the number of each request, counted from 1."""

    count = 0
    before: Callable[[int], object] = staticmethod(lambda number: None)

    def _repeat(self, description: str, request: Callable[[], Any]) -> Any:
        self.count += 1
        self.before(self.count)
        return super()._repeat(description, request)


class Store:
    """A store with one checkpoint of the run `r`."""

    def __init__(self, folder: Path) -> None:
        self.url, self.folder = f"memory://{uuid.uuid4().hex}", folder
        run = self.open("here")
        metadata = CheckpointMetadata(run_id="r", attempt=1, step=3)
        Checkpointer(storage=lambda root: run).save({"w": torch.ones(9)}, f"{self.url}/step3", metadata=metadata)
        assert run.finish_uploads() == []

    def open(self, machine: str, run_id: str = "r", attempt: int = 1) -> ObjectStorage:
        cache = self.folder / machine
        return ObjectStorage(self.url, cache=cache, run_id=run_id, attempt=attempt, client=Client(self.url))

    def seen(self) -> str:
        """What another machine sees."""
        return state_of(self.open("reader", "reader"))

    def objects(self) -> list[str]:
        return sorted(ObjectClient(self.url).list())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def state_of(storage: ObjectStorage) -> str:
    entries = Catalog(storage).entries()
    if not entries:
        return GONE
    return WHOLE if entries[0].valid else str(entries[0].problem)


def remove_until(store: Store, run_id: str, at: int) -> None:
    """Remove the checkpoint in a process that is killed before request number `at` of the removal."""
    storage: Any = store.open("remover", run_id, attempt=2)
    assert storage.names() == ["step3"]
    begin = storage.client.count

    def die(number: int) -> None:
        if number >= begin + at:
            raise ValueError("killed")

    storage.client.before = die
    if at < REQUESTS:
        with pytest.raises(ValueError, match="killed"):
            storage.remove("step3")
    else:
        assert storage.remove("step3")
    storage.client.before = Client.before


@pytest.mark.parametrize("run_id", ["r", "local"], ids=["by the run", "by a command"])
@pytest.mark.parametrize("at", range(1, REQUESTS + 1))
def test_what_a_removal_that_was_killed_leaves_is_seen_as_such_and_cleared_by_the_run(
    at: int, run_id: str, store: Store
) -> None:
    remove_until(store, run_id, at)
    seen = WHOLE if at <= 3 else REMOVING if at < REQUESTS else GONE
    assert store.seen() == seen
    later = store.open("later", attempt=3)
    assert later.sweep() == (["step3"] if seen == REMOVING else [])
    if seen == WHOLE:
        assert store.seen() == WHOLE
        assert later.remove("step3")
    assert store.objects() == []


@pytest.mark.parametrize("at", range(4, REQUESTS + 1))
def test_a_name_whose_removal_was_killed_is_saved_again(at: int, store: Store) -> None:
    remove_until(store, "local", at)
    again = store.open("again", attempt=3)
    metadata = CheckpointMetadata(run_id="r", attempt=3, step=3)
    Checkpointer(storage=lambda root: again).save({"w": torch.ones(9)}, f"{store.url}/step3", metadata=metadata)
    assert again.finish_uploads() == []
    assert store.seen() == WHOLE
    assert [key for key in store.objects() if "/." in key] == []


@pytest.mark.parametrize("at", range(1, REQUESTS + 1))
def test_a_removal_that_goes_on_between_the_requests_of_a_reader_is_no_partial_checkpoint(
    at: int, store: Store
) -> None:
    reader: Any = store.open("reader", "reader")
    is_listed = False

    def go_on(number: int) -> None:
        nonlocal is_listed
        # After the listing, which is the first request, and before the manifest is read.
        if number == 2 and not is_listed:
            is_listed = True
            remove_until(store, "r", at)

    reader.client.before = go_on
    assert state_of(reader) in ((WHOLE,) if at <= 3 else (REMOVING, GONE))
    assert is_listed


@pytest.mark.parametrize("at", range(4, REQUESTS + 1))
@pytest.mark.parametrize("before", range(1, 6))
def test_a_checkpoint_that_is_removed_while_it_is_loaded_is_not_called_damaged(
    before: int, at: int, store: Store
) -> None:
    reader: Any = store.open("reader", "reader")
    loader = make_sync_checkpointer(storage=lambda root: reader)
    is_removed = False

    def remove(number: int) -> None:
        nonlocal is_removed
        # A listing, the manifest, the manifest as it is now, and two files.
        if number == before and not is_removed:
            is_removed = True
            remove_until(store, "r", at)

    reader.client.before = remove
    # The files may have been read before they were deleted.
    with suppress(NoCheckpointError):
        loader.load(f"{store.url}/step3")
    assert is_removed
    with pytest.raises(NoCheckpointError, match="is being removed" if at < REQUESTS else "there is no checkpoint"):
        loader.load(f"{store.url}/step3")
