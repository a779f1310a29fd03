"""A file of tensors that are not trained is sent to a store once: the store copies it for later checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from states import same

from trainer_cli.addons.stores import object_client
from trainer_cli.addons.stores.object_client import ObjectClient
from trainer_cli.addons.stores.object_store import ObjectStorage
from trainer_cli.checkpoint.checkpointer import Checkpointer, make_sync_checkpointer
from trainer_cli.format.rank_files import FilesOfRank

pytestmark = pytest.mark.slow
FROZEN = FilesOfRank(0).frozen
TRAINED = ["rank0.json", "rank0.safetensors"]
ALL = sorted([*TRAINED, FROZEN])
PART_BYTES = 5 * 1024 * 1024


class Sender:
    """Saves states with a frozen tensor, and lists the files of which the bytes were sent."""

    def __init__(self, url: str, cache: Path) -> None:
        self.storage = ObjectStorage(url, cache=cache, run_id="run")
        self.base = torch.randn(PART_BYTES // 3, generator=torch.Generator().manual_seed(1))
        self.sent: list[str] = []
        usual = self.storage.client.upload_new

        def upload_new(key: str, *arguments: Any) -> bool:
            self.sent.append(key.partition("/")[2])
            return usual(key, *arguments)

        cast("Any", self.storage.client).upload_new = upload_new

    def state(self, step: int) -> dict[str, Any]:
        return {"model": {"base": self.base, "head": torch.full((3,), step)}}

    def save(self, step: int) -> list[str]:
        """The files of which the bytes were sent; what the store then has is intact."""
        self.sent.clear()
        path = f"{self.storage.url}/step{step}"
        Checkpointer(storage=lambda root: self.storage).save(self.state(step), path, frozen=[self.base])
        assert self.storage.finish_uploads() == []
        there = ObjectStorage(self.storage.url, cache=self.storage.cache.with_name(f"reader{step}"))
        assert same(dict(make_sync_checkpointer(storage=lambda root: there).load(path)), self.state(step))
        return sorted(self.sent)


@pytest.fixture
def sender(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sender]:
    monkeypatch.setattr(object_client, "_FIRST_WAIT_S", 0.0)
    # The file is copied in two parts, the second of which is smaller.
    monkeypatch.setattr(object_client, "_COPIED_BYTES", PART_BYTES)
    made = Sender(url, tmp_path / "cache")
    yield made
    files = made.storage.client._files
    unfinished = files.call_s3("list_multipart_uploads", Bucket=files.split_path(url)[0])
    assert not unfinished.get("Uploads"), "parts that stay are paid for"


def test_later_checkpoints_send_only_what_is_trained(sender: Sender) -> None:
    assert sender.save(1) == ALL
    assert [sender.save(step) for step in (2, 3)] == [TRAINED, TRAINED]
    contents = {sender.storage.client.get(f"step{step}/{FROZEN}") for step in (1, 2, 3)}
    assert contents == {(sender.storage.cache / "step3" / FROZEN).read_bytes()}


def test_it_is_copied_from_any_checkpoint_that_is_left_and_sent_if_none_is(sender: Sender) -> None:
    assert [sender.save(step) for step in (1, 2)] == [ALL, TRAINED]
    assert sender.storage.remove("step2")
    assert sender.save(3) == TRAINED
    # As by another process, of which this one does not hear.
    for step in (1, 3):
        sender.storage.client.delete(f"step{step}/{FROZEN}")
    assert [sender.save(step) for step in (4, 5)] == [ALL, TRAINED]
    assert all(sender.storage.remove(f"step{step}") for step in (4, 5))
    assert sender.save(6) == ALL


def test_a_changed_tensor_is_sent_and_copied_from_then_on(sender: Sender) -> None:
    sender.save(1)
    sender.base[7] += 1
    assert [sender.save(step) for step in (2, 3)] == [ALL, TRAINED]


def test_a_later_process_sends_it_once_again(sender: Sender, tmp_path: Path) -> None:
    sender.save(1)
    later = Sender(sender.storage.url, tmp_path / "later")
    assert [later.save(step) for step in (2, 3)] == [ALL, TRAINED]


def test_an_object_that_was_replaced_by_one_of_the_same_size_is_not_copied(sender: Sender) -> None:
    sender.save(1)
    key = f"step1/{FROZEN}"
    content = bytearray(sender.storage.client.get(key) or b"")
    content[5000] ^= 1
    sender.storage.client.put(key, bytes(content))
    assert sender.save(2) == ALL


REFUSALS: list[tuple[str, Exception]] = [
    ("create_multipart_upload", PermissionError("AccessDenied")),
    ("upload_part_copy", NotImplementedError("A header you provided implies functionality that is not implemented")),
    ("upload_part_copy", OSError("Internal error")),
    ("complete_multipart_upload", OSError("At least one of the pre-conditions you specified did not hold")),
]


@pytest.mark.parametrize(("call", "error"), REFUSALS, ids=lambda value: value if isinstance(value, str) else "")
def test_where_a_store_does_not_copy_it_is_sent(
    sender: Sender, monkeypatch: pytest.MonkeyPatch, call: str, error: Exception
) -> None:
    files = sender.storage.client._files
    usual: Callable[..., Any] = files.call_s3

    def refuse(name: str, **arguments: Any) -> Any:
        if name == call:
            raise error
        return usual(name, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(files, "call_s3", refuse)
        assert [sender.save(step) for step in (1, 2, 3)] == [ALL, ALL, ALL]
    assert sender.save(4) == TRAINED


def test_a_copy_replaces_no_object_and_ends_where_the_upload_is_abandoned(sender: Sender) -> None:
    sender.save(1)
    client, key = sender.storage.client, f"step1/{FROZEN}"
    info = client.info(key)
    assert info is not None
    client.put("step2/other", b"of another process")
    with pytest.raises(OSError, match=r"re-?condition"):
        client.copy_new(key, "step2/other", info, lambda: None)
    assert client.get("step2/other") == b"of another process"

    def abandon() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        client.copy_new(key, "step2/new", info, abandon)
    assert client.get("step2/new") is None


def test_stores_without_conditional_copies_get_it_each_time(tmp_path: Path) -> None:
    sender = Sender("memory://linked/run", tmp_path / "cache")
    assert not ObjectClient("memory://linked/run").copies_new
    assert [sender.save(step) for step in (1, 2)] == [ALL, ALL]
