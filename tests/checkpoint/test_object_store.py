"""Checkpoints in an object store: the promises of every storage, and what is sent, fetched and kept."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from s3 import new_bucket, s3_server
from states import same, small_state
from test_storage import StorageContract, put

from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.checkpoint.manifest import DamagedCheckpoint
from trainer_cli.checkpoint.storage.object_client import ObjectClient, StoreAwayError
from trainer_cli.checkpoint.storage.object_store import ObjectStorage
from trainer_cli.errors import UserError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def url(endpoint: str) -> str:
    return f"s3://{new_bucket(endpoint)}/run"


class Sent(ObjectStorage):
    """Returns from a save once the checkpoint is in the store."""

    @contextmanager
    def writing(self, name: str, **settings: Any) -> Iterator[Any]:
        with super().writing(name, **settings) as folder:
            yield folder
        assert self.finish_uploads() == []


class Waiting(ObjectStorage):
    """Sends nothing: all that is saved waits on the local disk."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.uploader.add = lambda name: None  # type: ignore[method-assign]


class TestObjectStorage(StorageContract):
    @pytest.fixture(params=[Waiting, Sent], ids=["waiting", "sent"])
    def storage(self, request: pytest.FixtureRequest, tmp_path: Path, url: str) -> Iterator[ObjectStorage]:
        made = request.param(url, cache=tmp_path / "cache", run_id="run1", attempt=3)
        yield made
        made.finish_uploads()


def objects(url: str) -> list[str]:
    return sorted(ObjectClient(url).list())
