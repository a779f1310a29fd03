"""Checkpoints are local, and a mirror makes a second place equal: whatever fails, and whoever else sends, what is
offered there is whole, and what was committed comes to it."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from trainer_cli.addons.stores import object_client
from trainer_cli.addons.stores.mirror import Mirror
from trainer_cli.addons.stores.object_client import ObjectClient
from trainer_cli.addons.stores.object_store import ObjectStorage
from trainer_cli.catalog.catalog import Catalog
from trainer_cli.checkpoint.checkpointer import Checkpointer, make_sync_checkpointer
from trainer_cli.checkpoint.save import CheckpointMetadata
from trainer_cli.errors import StoreAwayError
from trainer_cli.manifest import Manifest
from trainer_cli.storage import Disk, LocalReadableFolder

WAIT_S = 600.0
FILE = Path(__file__)


class Storage:
    """Has every checkpoint."""

    def peek(self, name: str, file: str) -> bytes:
        return b"a manifest"

    @contextmanager
    def reading(self, name: str) -> Iterator[LocalReadableFolder]:
        yield LocalReadableFolder(Path(name), Disk())


class Place:
    """Has none, and does `send` with each that comes."""

    def __init__(self, send: Callable[[str], object]) -> None:
        self.send = send

    def location(self, name: str) -> str:
        return f"s3://bucket/{name}"

    def peek(self, name: str, file: str) -> None:
        return None

    def receive(self, name: str, manifest: bytes, source: object) -> None:
        self.send(name)


def mirror_to(send: Callable[[str], object]) -> Mirror:
    return Mirror(cast("Any", Storage()), cast("Any", Place(send)), on_sent=lambda *sent: None)


@pytest.mark.parametrize(
    "failure", [OSError("no answer"), SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt()], ids=repr
)
def test_a_checkpoint_that_fails_in_any_way_is_reported_and_sent_again(
    failure: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[str] = []
    failures = [failure]

    def send(name: str) -> None:
        if failures:
            raise failures.pop()
        sent.append(name)

    mirror = mirror_to(send)
    mirror.add("step1")
    assert mirror.wait(WAIT_S) == ["step1"]
    assert f"s3://bucket/step1 is not in the store yet: {failure or type(failure).__name__}" in caplog.text
    mirror.add("step2")
    assert mirror.wait(WAIT_S) == []
    assert sent == ["step1", "step2"]


def test_a_checkpoint_that_is_added_again_just_after_it_was_sent_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    mirror = mirror_to(sent.append)
    drop = mirror.drop

    def drop_and_add(name: str) -> None:
        drop(name)
        if len(sent) == 1:
            mirror.add(name)

    monkeypatch.setattr(mirror, "drop", drop_and_add)
    mirror.add("step3")
    assert mirror.wait(WAIT_S) == []
    assert sent == ["step3", "step3"]


def test_without_a_thread_a_checkpoint_waits_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    sent: list[str] = []
    mirror = mirror_to(sent.append)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(threading.Thread, "start", refuse)
        mirror.add("step1")
        mirror.retry()
        assert mirror.wait(WAIT_S) == ["step1"]
    assert "are sent to the store later: can't start new thread" in caplog.text
    mirror.add("step2")
    assert mirror.wait(WAIT_S) == []
    assert sent == ["step1", "step2"]


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_client, "_FIRST_WAIT_S", 0.0)


def save(storage: ObjectStorage, value: int = 0, name: str = "step3") -> None:
    metadata = CheckpointMetadata(run_id=storage.run_id, attempt=storage.attempt, step=3)
    Checkpointer(storage=lambda root: storage).save(
        {"w": torch.full((9,), value)}, f"{storage.url}/{name}", metadata=metadata
    )


def load(url: str, cache: Path) -> int:
    """The value that another machine loads, every byte verified."""
    storage = ObjectStorage(url, cache=cache)
    return int(make_sync_checkpointer(storage=lambda root: storage).load(f"{url}/step3")["w"][0])


def offered(url: str, cache: Path) -> list[str]:
    """What another machine would resume from."""
    return [entry.name for entry in Catalog(ObjectStorage(url, cache=cache)).valid()]


def halt(storage: ObjectStorage, request: str, key: str) -> tuple[threading.Event, threading.Event]:
    """Let a storage wait before this request. Events: it is about to, and it may."""
    about, may, usual = threading.Event(), threading.Event(), getattr(storage.client, request)

    def wait(name: str, *args: Any) -> Any:
        if name == key:
            about.set()
            assert may.wait(WAIT_S)
        return usual(name, *args)

    setattr(storage.client, request, wait)
    return about, may


def completed(storage: ObjectStorage, name: str = "step3") -> bytes:
    """The manifest with a metric of an evaluation that came later."""
    return replace(Manifest.parse(storage.peek(name, "manifest.json") or b""), metrics={"val/loss": 0.5}).to_bytes()


def test_a_metric_that_comes_while_its_checkpoint_is_sent_is_not_lost_and_waits_for_nothing(
    url: str, tmp_path: Path
) -> None:
    storage = ObjectStorage(url, cache=tmp_path, run_id="r")
    about, may = halt(storage, "put_new", "step3/manifest.json")
    save(storage)
    assert about.wait(WAIT_S)
    whole = completed(storage)
    storage.amend("step3", whole)
    assert storage.peek("step3", "manifest.json") == whole
    may.set()
    assert storage.finish_uploads() == []
    assert ObjectClient(url).get("step3/manifest.json") == whole
    assert load(url, tmp_path / "there") == 0


def test_a_metric_that_the_store_did_not_get_is_sent_by_the_next_start(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = ObjectStorage(url, cache=tmp_path, run_id="r", client=ObjectClient(url, attempts=1))
    storage.sweep()
    save(storage)
    assert storage.finish_uploads() == []
    whole = completed(storage)
    with monkeypatch.context() as patch:
        for name in ("pipe_file", "cat_file", "find"):
            patch.setattr(MemoryFileSystem, name, fail(OSError("no answer")))
        storage.amend("step3", whole)
        assert storage.finish_uploads() == ["step3"]
    later = ObjectStorage(url, cache=tmp_path, run_id="r", attempt=2)
    later.sweep()
    assert later.finish_uploads() == []
    assert ObjectClient(url).get("step3/manifest.json") == whole


def fail(error: BaseException) -> Callable[..., Any]:
    def raise_it(*args: Any, **settings: Any) -> Any:
        raise error

    return raise_it


@pytest.mark.parametrize("times", [1, None], ids=["once", "each time"])
def test_a_file_that_arrives_truncated_is_sent_again_and_never_offered(
    times: int | None, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usual, cut = MemoryFileSystem.put_file, list[str]()

    def truncate(files: Any, local: str, remote: str, **settings: Any) -> None:
        usual(files, local, remote, **settings)
        if times is None or len(cut) < times:
            cut.append(remote)
            files.pipe_file(remote, files.cat_file(remote)[:-1])

    monkeypatch.setattr(MemoryFileSystem, "put_file", truncate)
    storage = ObjectStorage(url, cache=tmp_path / "here", run_id="r", client=ObjectClient(url, attempts=3))
    save(storage)
    assert storage.mirror.wait() == ([] if times else ["step3"])
    assert cut
    assert ("not in the store yet" in caplog.text) is (times is None)
    assert offered(url, tmp_path / "there") == (["step3"] if times else [])
    monkeypatch.setattr(MemoryFileSystem, "put_file", usual)
    assert storage.finish_uploads() == []
    assert load(url, tmp_path / "there") == 0


def test_a_local_file_that_was_altered_before_it_is_sent_is_never_offered(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = ObjectStorage(url, cache=tmp_path / "here", run_id="r")
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "pipe_file", fail(PermissionError("no access")))
        save(storage)
        assert storage.finish_uploads() == ["step3"]
    file = tmp_path / "here/step3/rank0.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xaa")
    caplog.clear()
    again = ObjectStorage(url, cache=tmp_path / "here", run_id="r", attempt=2)
    again.sweep()
    assert again.finish_uploads() == ["step3"]
    assert "the digest differs" in caplog.text
    assert offered(url, tmp_path / "there") == []


def test_a_checkpoint_saved_again_after_it_was_half_sent_is_never_a_mixture(url: str, tmp_path: Path) -> None:
    """The first process is thought dead, and its machine lost; it is about to send one more file."""
    first = ObjectStorage(url, cache=tmp_path / "first", run_id="r", attempt=1)
    second = ObjectStorage(url, cache=tmp_path / "second", run_id="r", attempt=2)
    about, may = halt(first, "upload_new", "step3/rank0.safetensors")
    save(first, 1)
    assert about.wait(WAIT_S)
    assert second.sweep() == ["step3"]
    save(second, 2)
    assert second.finish_uploads() == []
    may.set()
    assert first.finish_uploads() == ["step3"]
    assert offered(url, tmp_path / "there") == ["step3"]
    assert load(url, tmp_path / "there") == 2


def test_two_live_senders_of_one_run_and_attempt_do_not_share_a_claim(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after the directory of a run was lost: its next attempt has the number of one that is still alive."""
    first, second = (ObjectStorage(url, cache=tmp_path / name, run_id="r", attempt=2) for name in ("a", "b"))
    about, may = halt(first, "put_new", "step3/manifest.json")
    save(first, 1)
    assert about.wait(WAIT_S)
    save(second, 2)
    assert second.finish_uploads() == ["step3"]
    assert "another attempt of the run sends a checkpoint of that name" in caplog.text
    may.set()
    assert first.finish_uploads() == []
    assert load(url, tmp_path / "there") == 1


@pytest.mark.parametrize("meanwhile", ["swept", "sent again", "being sent again"])
def test_a_manifest_that_the_first_machine_of_an_earlier_attempt_sends_late_makes_no_checkpoint(
    meanwhile: str, url: str, tmp_path: Path
) -> None:
    stale = ObjectStorage(url, cache=tmp_path / "stale", run_id="r", attempt=1)
    stale.separate(0)
    model = ObjectStorage(f"{url}-model", cache=tmp_path / "model", run_id="r", attempt=1)
    save(model, 1)
    assert model.finish_uploads() == []
    files = {file: (tmp_path / "model/step3" / file).read_bytes() for file in model.sizes("step3")}
    later = ObjectStorage(url, cache=tmp_path / "later", run_id="r", attempt=2)
    about, may = halt(later, "put_new", "step3/manifest.json")

    def send_late() -> None:
        with stale.writing("step3") as folder:
            for file, content in files.items():
                with folder.create(file) as writer:
                    writer.write(content)
            assert later.sweep() == ["step3"]
            if meanwhile != "swept":
                save(later, 2)
                assert about.wait(WAIT_S)
            if meanwhile == "sent again":
                may.set()
                assert later.finish_uploads() == []
            folder.publish()

    with pytest.raises(OSError, match="deleted by a later attempt"):
        send_late()
    if meanwhile == "swept":
        assert ObjectClient(url).list() == {}
        return
    may.set()
    assert later.finish_uploads() == []
    assert offered(url, tmp_path / "there") == ["step3"]
    assert load(url, tmp_path / "there") == 2


def test_a_store_that_knows_no_conditional_writes_gets_checkpoints_and_replaces_none(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(usual: Callable[..., Any]) -> Callable[..., Any]:
        def request(*args: Any, mode: str = "overwrite", **settings: Any) -> Any:
            if mode == "create":
                cause = RuntimeError("a header implies functionality that is not implemented")
                cast("Any", cause).response = {
                    "Error": {"Code": "NotImplemented"}, "ResponseMetadata": {"HTTPStatusCode": 501}
                }  # fmt: skip
                raise OSError(errno.ENOSYS, str(cause)) from cause
            return usual(*args, **settings)

        return request

    for name in ("pipe_file", "put_file"):
        monkeypatch.setattr(MemoryFileSystem, name, refusing(getattr(MemoryFileSystem, name)))
    ours, theirs = (ObjectStorage(url, cache=tmp_path / name, run_id=name) for name in ("ours", "theirs"))
    ours.sweep()
    save(ours, 1)
    assert ours.finish_uploads() == [], caplog.text
    client = ObjectClient(url)
    assert not client.put_new("step3/manifest.json", b"another")
    client.put("step4/.writing", b"ours 1 process")
    save(theirs, 2, "step4")
    assert theirs.finish_uploads() == ["step4"]
    assert load(url, tmp_path / "there") == 1


def test_what_a_killed_process_was_sending_is_sent_by_the_next_one_of_the_same_attempt(
    url: str, tmp_path: Path
) -> None:
    """A run from Python is always attempt 1."""
    killed, again = (ObjectStorage(url, cache=tmp_path / "here", run_id="r", attempt=1) for _ in range(2))
    about, may = halt(killed, "upload_new", "step3/rank0.safetensors")
    save(killed, 1)
    assert about.wait(WAIT_S)
    assert again.sweep() == []
    unsent = again.finish_uploads()
    may.set()
    killed.finish_uploads()
    assert unsent == []
    assert load(url, tmp_path / "there") == 1


def test_a_stalled_attempt_deletes_no_file_of_the_one_that_has_committed(url: str, tmp_path: Path) -> None:
    first, second = (ObjectStorage(url, cache=tmp_path / str(n), run_id="r", attempt=n) for n in (1, 2))
    about, may = halt(first, "info", "step3/rank0.safetensors")
    save(first, 1)
    assert about.wait(WAIT_S)
    second.sweep()
    tensors = {"w": torch.full((12,), 2)}
    metadata = CheckpointMetadata(run_id="r", attempt=2, step=3)
    Checkpointer(storage=lambda root: second).save(tensors, f"{url}/step3", metadata=metadata)
    unsent = second.finish_uploads()
    may.set()
    assert (unsent, first.finish_uploads()) == ([], ["step3"])
    assert offered(url, tmp_path / "there") == ["step3"]
    assert load(url, tmp_path / "there") == 2


def test_a_removal_by_a_command_that_was_killed_keeps_no_run_from_the_name(url: str, tmp_path: Path) -> None:
    client = ObjectClient(url)
    for name in ("step3", "step4"):
        client.put(f"{name}/.writing", b"local 0 process")
    assert ObjectStorage(url, cache=tmp_path / "command").clear("step4")
    assert [key for key in client.list() if key.startswith("step4/")] == []
    run = ObjectStorage(url, cache=tmp_path / "run", run_id="r", attempt=2)
    save(run, 1)
    assert run.finish_uploads() == []
    assert load(url, tmp_path / "there") == 1


def test_a_checkpoint_that_was_committed_since_the_listing_is_not_quarantined(url: str, tmp_path: Path) -> None:
    first, second = (ObjectStorage(url, cache=tmp_path / str(n), run_id="r", attempt=n) for n in (1, 2))
    about, may = halt(first, "put_new", "step3/manifest.json")
    save(first, 1)
    assert about.wait(WAIT_S)
    assert second.remote.names() == ["step3"]
    may.set()
    assert first.finish_uploads() == []
    with pytest.raises(FileExistsError, match="exists"):
        second.remote._take("step3")
    assert load(url, tmp_path / "there") == 1


@pytest.mark.parametrize("request_name", ["put_new", "upload_new"])
def test_a_conditional_write_asks_a_store_that_is_away_as_often_as_other_requests_and_none_once_it_is_ended(
    request_name: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[str] = []

    def away(name: str) -> Callable[..., Any]:
        def request(*args: Any, callback: Any = None, **settings: Any) -> Any:
            if callback is not None:
                callback.set_size(1)
            requests.append(name)
            raise OSError("no answer")

        return request

    for name in ("pipe_file", "put_file", "cat_file", "info"):
        monkeypatch.setattr(MemoryFileSystem, name, away(name))
    client = ObjectClient(url, attempts=5)
    write = partial(client.put_new, "a", b"") if request_name == "put_new" else partial(client.upload_new, "a", FILE)
    with pytest.raises(StoreAwayError, match=r"failed 5 times: OSError: no answer"):
        write()
    assert len(requests) == 1 + 5
    if request_name == "upload_new":
        requests.clear()
        with pytest.raises(InterruptedError):
            write(on_part=fail(InterruptedError(errno.EINTR, "it is abandoned")))
        assert requests == []


def test_a_checkpoint_that_is_saved_after_uploads_were_abandoned_is_sent(url: str, tmp_path: Path) -> None:
    storage = ObjectStorage(url, cache=tmp_path / "here", run_id="r")
    storage.abandon_uploads()
    save(storage)
    assert storage.finish_uploads() == []
    assert offered(url, tmp_path / "there") == ["step3"]
