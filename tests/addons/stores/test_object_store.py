"""Checkpoints in an object store: the promises of every storage, and what is sent, fetched and kept."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from command import run_program
from fsspec.implementations.memory import MemoryFileSystem
from small_parts import note
from states import same, small_state
from storage_contract import StorageContract
from torch import nn

from trainer_cli.addons.formats.whole_archive import write_archive
from trainer_cli.addons.stores import object_client
from trainer_cli.addons.stores.download import fetch
from trainer_cli.addons.stores.mirror import Mirror
from trainer_cli.addons.stores.object_client import ObjectClient, explain_refusal
from trainer_cli.addons.stores.object_store import ObjectStorage
from trainer_cli.checkpoint.checkpointer import Checkpointer, make_async_checkpointer, make_sync_checkpointer
from trainer_cli.checkpoint.without_trainer import load_checkpoint, save_checkpoint
from trainer_cli.commands import ckpt_remove
from trainer_cli.commands.ckpt_inspect import open_content
from trainer_cli.errors import NotDurableError, StoreAwayError, UserError
from trainer_cli.files.url_path import as_path
from trainer_cli.manifest import DamagedCheckpoint
from trainer_cli.selection.stored import StoredCheckpoint
from trainer_cli.storage.local import LocalStorage

pytestmark = pytest.mark.slow


class Sent(ObjectStorage):
    """Returns from a save once the checkpoint is in the store."""

    @contextmanager
    def writing(self, name: str, **settings: Any) -> Iterator[Any]:
        with super().writing(name, **settings) as folder:
            yield folder
        assert self.finish_uploads() == []

    def amend(self, name: str, manifest: bytes) -> None:
        super().amend(name, manifest)
        assert self.finish_uploads() == []


class Waiting(ObjectStorage):
    """Sends nothing: all that is saved waits on the local disk."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        cast("Any", self.mirror).add = lambda name, **how: []


class TestObjectStorage(StorageContract):
    @pytest.fixture(params=[Waiting, Sent], ids=["waiting", "sent"])
    def storage(self, request: pytest.FixtureRequest, tmp_path: Path, url: str) -> Iterator[ObjectStorage]:
        made = request.param(url, cache=tmp_path / "cache", run_id="run1", attempt=3)
        yield made
        made.finish_uploads()


def objects(url: str) -> list[str]:
    return sorted(ObjectClient(url).list())


def save(storage: ObjectStorage, step: int) -> None:
    # As in a run, which waits for the store at its end.
    made = Checkpointer(storage=lambda root: storage)
    made.save(small_state(step), f"{storage.url}/step{step}")


def load(storage: ObjectStorage, step: int) -> dict[str, Any]:
    return dict(make_sync_checkpointer(storage=lambda root: storage).load(f"{storage.url}/step{step}"))


def test_the_manifest_is_sent_last_and_nothing_else_stays(tmp_path: Path, url: str) -> None:
    storage = ObjectStorage(url, cache=tmp_path, run_id="r")
    order: list[str] = []
    for name in ("upload_new", "put", "put_new", "delete"):
        usual = getattr(storage.client, name)

        def recorded(key: str, *args: Any, usual: Any = usual, name: str = name) -> Any:
            order.append(f"{name} {key}")
            return usual(key, *args)

        setattr(storage.client, name, recorded)
    save(storage, 3)
    assert storage.finish_uploads() == []
    assert order[0] == "put_new step3/.writing"
    assert sorted(order[1:3]) == ["upload_new step3/rank0.json", "upload_new step3/rank0.safetensors"]
    assert order[3:] == ["put_new step3/manifest.json", "delete step3/.writing"]
    assert objects(url) == ["step3/manifest.json", "step3/rank0.json", "step3/rank0.safetensors"]


def test_another_machine_loads_what_was_sent_once(tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture) -> None:
    here = ObjectStorage(url, cache=tmp_path / "here")
    save(here, 3)
    here.finish_uploads()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            there = ObjectStorage(url, cache=tmp_path / "there")
            assert same(load(there, 3), small_state(3))
    assert caplog.text.count("downloading") == 1


def test_a_store_that_is_opened_again_reads_only_new_manifests(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Sent(url, cache=tmp_path / "training")
    for step in (1, 2, 3):
        save(storage, step)
    ObjectStorage(url, cache=tmp_path / "first").names()
    save(storage, 4)
    storage.remove("step1")
    read: list[str] = []
    usual = ObjectClient.get
    monkeypatch.setattr(ObjectClient, "get", lambda self, key: note(read, key) or usual(self, key))
    assert ObjectStorage(url, cache=tmp_path / "second").names() == ["step2", "step3", "step4"]
    # Of the removed one it is asked whether the listing only lacks it.
    assert sorted(read) == ["step1/manifest.json", "step4/manifest.json"]


def test_only_the_newest_local_copy_stays(tmp_path: Path, url: str) -> None:
    storage = ObjectStorage(url, cache=tmp_path)
    for step in (1, 2, 3):
        save(storage, step)
        storage.finish_uploads()
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["step3"]
    assert storage.names() == ["step1", "step2", "step3"]


def test_a_checkpoint_that_is_sent_during_a_listing_is_listed(tmp_path: Path, url: str) -> None:
    writer = Waiting(url, cache=tmp_path, run_id="r")
    save(writer, 3)
    reader = ObjectStorage(url, cache=tmp_path)
    listing = reader.client.list

    def listed_before_it_was_sent(folder: str = "") -> Any:
        objects_then = listing(folder)
        Mirror.add(writer.mirror, "step3")
        assert writer.finish_uploads() == []
        return objects_then

    cast("Any", reader.client).list = listed_before_it_was_sent
    assert reader.names() == ["step3"]
    assert same(load(reader, 3), small_state(3))


@pytest.mark.parametrize("make", [make_sync_checkpointer, make_async_checkpointer])
def test_without_a_trainer_a_save_is_in_the_store_once_it_or_close_has_returned(
    make: Callable[[], Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = MemoryFileSystem.put_file

    def slow(*args: Any, **settings: Any) -> None:
        time.sleep(0.1)
        usual(*args, **settings)

    monkeypatch.setattr(MemoryFileSystem, "put_file", slow)
    url = f"memory://{uuid.uuid4().hex}"
    with closing(make()) as checkpointer:
        checkpointer.save(small_state(3), f"{url}/step3")
    assert MemoryFileSystem().exists(f"{url}/step3/manifest.json")


UNCLOSED = """
import sys, torch
from trainer_cli import make_async_checkpointer
checkpointer = make_async_checkpointer()
checkpointer.save({"w": torch.ones(3)}, sys.argv[1])
"""


def test_a_background_save_of_a_script_that_closes_nothing_is_in_the_store_at_its_end(tmp_path: Path, url: str) -> None:
    done = run_program(UNCLOSED, f"{url}/step3", folder=tmp_path, imports=["s3fs"])
    assert (done.code, done.out) == (0, "")
    assert "step3/manifest.json" in objects(url)


def test_without_a_trainer_a_save_that_the_store_does_not_take_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **settings: Any) -> None:
        raise OSError("no answer")

    monkeypatch.setattr(MemoryFileSystem, "put_file", fails)
    monkeypatch.setattr(object_client, "_FIRST_WAIT_S", 0.0)
    with pytest.raises(NotDurableError, match="step3 could not be sent"):
        make_sync_checkpointer().save(small_state(3), f"memory://{uuid.uuid4().hex}/step3")


@pytest.fixture(scope="module")
def failing_store(endpoint: str) -> Iterator[tuple[str, Any]]:
    """The address of a store before that of `endpoint`, and the schedule of its faults."""
    from object_store_proxy import Schedule, proxy

    schedule = Schedule(seed=0, share=0.0)
    # One for all tests: s3fs makes a client for each address, which takes longer than the requests.
    with proxy(endpoint, schedule) as address:
        yield address, schedule


@pytest.mark.parametrize("fault", ["503", "400 ExpiredToken", "400 InvalidToken", "403 AccessDenied"])
def test_while_the_store_is_away_or_refuses_saves_go_on_and_are_sent_later(
    fault: str,
    tmp_path: Path,
    failing_store: tuple[str, Any],
    url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (address, schedule), sleep = failing_store, asyncio.sleep
    schedule.begin(seed=0, share=0.0)
    # The pauses of the client below ours.
    monkeypatch.setattr(asyncio, "sleep", lambda seconds, *result: sleep(0, *result))
    client = ObjectClient(url, wait=lambda seconds: None, attempts=2, options={"endpoint_url": address})
    storage = ObjectStorage(url, cache=tmp_path, run_id="r", client=client)
    storage.sweep()
    save(storage, 1)
    assert storage.finish_uploads() == []
    schedule.share, schedule.random.choice = 1.0, lambda faults: fault
    for step in (2, 3):
        save(storage, step)
    assert storage.finish_uploads() == ["step2", "step3"]
    assert storage.names() == ["step1", "step2", "step3"]
    assert same(load(storage, 3), small_state(3))
    assert caplog.text.count("step2 is not in the store yet") == 1
    assert ".;" not in caplog.text
    schedule.calm = True
    assert storage.finish_uploads() == []
    assert sorted(key for key in objects(url) if "manifest" in key) == [f"step{n}/manifest.json" for n in (1, 2, 3)]


def test_a_request_without_an_answer_is_repeated(tmp_path: Path, endpoint: str, url: str) -> None:
    from object_store_proxy import Schedule, proxy

    schedule = Schedule(seed=0, share=1.0)
    cast("Any", schedule.random).choice = lambda faults: "hang"
    with proxy(endpoint, schedule) as address:
        options = {"endpoint_url": address, "config_kwargs": {"read_timeout": 0.3}}
        client = ObjectClient(url, wait=lambda seconds: setattr(schedule, "calm", True), options=options)
        client.put("step1/a", b"content")
        assert client.get("step1/a") == b"content"
    # The client's own first attempt counts too.
    assert set(schedule.happened) == {"hang"}


def test_a_later_attempt_sends_what_an_earlier_one_could_not_and_removes_its_orphans(tmp_path: Path, url: str) -> None:
    waiting = Waiting(url, cache=tmp_path, run_id="r")
    save(waiting, 4)
    client = ObjectClient(url)
    for name, run_id in (("step2", b"r"), ("step3", b"other")):
        client.put(f"{name}/.writing", run_id)
        client.put(f"{name}/rank0.json", b"half")
    later = ObjectStorage(url, cache=tmp_path, run_id="r", attempt=2)
    assert later.sweep() == ["step2"]
    assert later.finish_uploads() == []
    assert [key for key in objects(url) if not key.startswith("step4")] == ["step3/.writing", "step3/rank0.json"]
    assert later.names() == ["step3", "step4"]


def test_a_checkpoint_that_a_later_attempt_has_swept_is_sent_again_before_its_local_copy_goes(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that was thought dead goes on, and has sent all but the manifest when the next attempt begins."""
    earlier = ObjectStorage(url, cache=tmp_path / "earlier", run_id="r", attempt=1)
    later = ObjectStorage(url, cache=tmp_path / "later", run_id="r", attempt=2)
    usual = earlier.client.put_new

    def put_after_the_sweep(key: str, content: bytes) -> bool:
        if key == "step3/manifest.json":
            cast("Any", earlier.client).put_new = usual
            assert later.sweep() == ["step3"]
        return usual(key, content)

    cast("Any", earlier.client).put_new = put_after_the_sweep
    save(earlier, 3)
    assert earlier.mirror.wait() == ["step3"]
    assert "step3/manifest.json" not in objects(url), "no reader takes what is left for a checkpoint"
    assert "it was deleted by a later attempt of the run" in caplog.text
    assert earlier.finish_uploads() == []
    save(earlier, 4)
    assert earlier.finish_uploads() == []
    assert same(load(later, 3), small_state(3))


def hold_manifest(storage: ObjectStorage, key: str) -> tuple[threading.Event, threading.Event]:
    """Let a store wait before it sends this manifest. Events: it is about to, and it may."""
    sends, may_send = threading.Event(), threading.Event()
    usual_put = storage.client.put_new

    def put_held(name: str, content: bytes) -> bool:
        if name == key:
            sends.set()
            assert may_send.wait(500)
        return usual_put(name, content)

    cast("Any", storage.client).put_new = put_held
    return sends, may_send


def test_a_checkpoint_that_is_sent_while_a_later_attempt_sweeps_is_not_lost(tmp_path: Path, url: str) -> None:
    """The manifest is sent after the sweep has looked for it, and all files are still there."""
    earlier = ObjectStorage(url, cache=tmp_path / "earlier", run_id="r", attempt=1)
    later = ObjectStorage(url, cache=tmp_path / "later", run_id="r", attempt=2)
    sends, looked = hold_manifest(earlier, "step3/manifest.json")
    usual_get = later.client.get

    def get_before_the_manifest(key: str) -> bytes | None:
        content = usual_get(key)
        if key == "step3/manifest.json" and later.client.is_training:
            looked.set()
            earlier.mirror.wait()
        return content

    save(earlier, 3)
    assert sends.wait(500)
    cast("Any", later.client).get = get_before_the_manifest
    assert later.sweep() == ["step3"]
    assert objects(url) == []
    assert earlier.finish_uploads() == []
    save(earlier, 4)
    assert earlier.finish_uploads() == []
    assert same(load(later, 3), small_state(3))


def test_a_sweep_leaves_a_checkpoint_whose_manifest_came_after_the_listing(tmp_path: Path, url: str) -> None:
    earlier = ObjectStorage(url, cache=tmp_path / "earlier", run_id="r", attempt=1)
    later = ObjectStorage(url, cache=tmp_path / "later", run_id="r", attempt=2)
    sends, listed = hold_manifest(earlier, "step3/manifest.json")
    usual_put = later.client.put

    def mark_after_the_manifest(key: str, content: bytes) -> None:
        if key.startswith("step3/"):
            listed.set()
            assert earlier.mirror.wait() == []
        usual_put(key, content)

    save(earlier, 3)
    assert sends.wait(500)
    cast("Any", later.client).put = mark_after_the_manifest
    assert later.sweep() == []
    assert objects(url) == ["step3/manifest.json", "step3/rank0.json", "step3/rank0.safetensors"]
    assert later.names() == ["step3"]
    assert same(load(later, 3), small_state(3))


def test_what_an_interrupted_removal_left_hinders_no_later_save_of_that_name(tmp_path: Path, url: str) -> None:
    ObjectClient(url).put("step3/.removed.r", b"")
    storage = ObjectStorage(url, cache=tmp_path, run_id="r")
    save(storage, 3)
    assert storage.mirror.wait() == []
    assert same(load(storage, 3), small_state(3))


def test_a_checkpoint_of_another_run_is_never_replaced_in_the_store(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = (Waiting(url, cache=tmp_path / name, run_id=name) for name in ("ours", "theirs"))
    for storage in (ours, theirs):
        make_sync_checkpointer(storage=partial(lambda storage, root: storage, storage)).save(
            {"who": storage.run_id}, f"{url}/step1"
        )
    Mirror.add(ours.mirror, "step1")
    assert ours.finish_uploads() == []
    Mirror.add(theirs.mirror, "step1")
    assert theirs.finish_uploads() == ["step1"]
    assert "another checkpoint of that name exists there" in caplog.text
    assert dict(make_sync_checkpointer().load(f"{url}/step1")) == {"who": "ours"}


def test_altered_and_missing_objects_are_noticed(tmp_path: Path, url: str) -> None:
    storage = ObjectStorage(url, cache=tmp_path / "here")
    for step in (1, 2):
        save(storage, step)
    storage.finish_uploads()
    client = ObjectClient(url)
    content = bytearray(client.get("step1/rank0.safetensors") or b"")
    content[-1] ^= 1
    client.put("step1/rank0.safetensors", bytes(content))
    client.delete("step2/rank0.json")
    there = ObjectStorage(url, cache=tmp_path / "there")
    with pytest.raises(DamagedCheckpoint, match="the digest differs"):
        load(there, 1)
    with pytest.raises(DamagedCheckpoint, match=r"rank0\.json is missing"):
        load(there, 2)
    assert [path.name for path in (tmp_path / "there").iterdir() if path.name.startswith("step")] == []


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("s3://no-such-bucket-here/run", "cannot be written: .*Make the bucket first"),
        ("nosuch://x/y", "there is no storage for nosuch://"),
        ("gs://x/y", "gs:// needs another package: .*pip install gcsfs"),
    ],
)
def test_a_place_that_cannot_be_is_one_message(endpoint: str, tmp_path: Path, place: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        ObjectStorage(place, cache=tmp_path).sweep()


_REQUESTS: list[Callable[[ObjectClient], object]] = [
    lambda client: client.list(),
    lambda client: client.get("a"),
    lambda client: client.put("a", b"x"),
    lambda client: client.put_new("a", b"x"),
    lambda client: client.delete("a"),
]


ClientOfFailing = Callable[[str, list[float]], ObjectClient]


@pytest.fixture
def client_of_failing(failing_store: tuple[str, Any], url: str) -> ClientOfFailing:
    """(fault, pauses) -> a client each of whose requests is answered with the fault; its pauses are recorded."""
    address, schedule = failing_store

    def make(fault: str, pauses: list[float]) -> ObjectClient:
        schedule.begin(seed=0, share=1.0)
        schedule.random.choice = lambda faults: fault
        return ObjectClient(url, wait=pauses.append, attempts=2, options={"endpoint_url": address})

    return make


@pytest.mark.parametrize(
    ("fault", "cure"),
    [
        *[(fault, r"gives no access: .*Check the credentials") for fault in (
            "400 InvalidToken", "400 TokenRefreshRequired", "400 ExpiredToken", "400 CredentialsNotSupported",
            "405 MethodNotAllowed", "403 InvalidAccessKeyId", "403 SignatureDoesNotMatch", "403 AccessDenied",
            "403 OfAnotherStore")],
        ("403 RequestTimeTooSkewed", r"Set the clock"),
        *[(fault, r"Set the region of the bucket") for fault in (
            "400 AuthorizationHeaderMalformed", "400 IllegalLocationConstraintException", "301 PermanentRedirect")],
        *[(fault, r"refuses the request: .*Check the region, the credentials and the address") for fault in (
            "400 InvalidBucketName", "400 InvalidRequest", "501 NotImplemented")],
    ],
)  # fmt: skip
def test_a_request_that_no_repetition_mends_ends_at_once_with_its_cure(
    client_of_failing: ClientOfFailing, fault: str, cure: str
) -> None:
    pauses: list[float] = []
    client = client_of_failing(fault, pauses)
    for request in _REQUESTS:
        with pytest.raises(UserError, match=cure) as caught:
            request(client)
        assert (caught.value.exit_code, pauses) == (2, [])


@pytest.mark.parametrize(
    "fault",
    [
        "500 InternalError", "503 SlowDown", "503 ServiceUnavailable", "429 TooManyRequests", "400 Throttling",
        "400 RequestTimeout", "400 IncompleteBody", "400 BadDigest", "409 OperationAborted",
    ],
)  # fmt: skip
def test_a_request_that_may_succeed_later_is_repeated(client_of_failing: ClientOfFailing, fault: str) -> None:
    pauses: list[float] = []
    client = client_of_failing(fault, pauses)
    with pytest.raises(StoreAwayError, match=r"failed 2 times: .*Check the network"):
        client.list()
    assert len(pauses) == 1


@pytest.mark.parametrize(
    "response",
    [
        pytest.param(None, id="none"),
        pytest.param({}, id="empty"),
        pytest.param({"Error": None, "ResponseMetadata": None}, id="without an error"),
        # As huggingface_hub and adlfs have it.
        pytest.param(SimpleNamespace(status_code=503), id="an object"),
    ],
)
def test_an_error_of_a_client_with_another_kind_of_response_is_no_refusal(response: Any) -> None:
    error = OSError("busy")
    error.__cause__ = cause = RuntimeError("busy")
    cast("Any", cause).response = response
    assert explain_refusal(error) is None


def test_a_store_that_does_not_answer_is_one_message(tmp_path: Path) -> None:
    client = ObjectClient("s3://b/run", wait=lambda seconds: None, options={"endpoint_url": "http://127.0.0.1:9"})
    with pytest.raises(StoreAwayError, match=r"list failed 6 times: .*\(s3://b/run\)\. Check the network"):
        ObjectStorage("s3://b/run", cache=tmp_path, client=client).names()


def test_a_file_that_was_replaced_by_one_of_the_same_size_is_fetched_again(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    client = ObjectClient(url)
    copies = []
    for content in (b"old", b"old", b"new"):
        client.put("weights.pt", content)
        copies.append(fetch(f"{url}/weights.pt", ()))
        assert copies[-1] is not None
        assert copies[-1].read_bytes() == content
    assert copies[0] == copies[1] != copies[2]


def _verify(path: Path) -> None:
    [item] = ckpt_remove.find_items([str(path)])
    assert ckpt_remove.verify_all([item], lambda done, item: None) == {path: None}


def _show(path: Path) -> None:
    with open_content(path) as content:
        assert content.states()


def _load(path: Path) -> None:
    made = make_sync_checkpointer()
    assert same(dict(made.load(path)), small_state(int(path.name.removeprefix("step"))))


def _archive(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert write_archive(path, Path(folder) / "a.tar") > 0


def _read_side_file(path: Path) -> None:
    assert StoredCheckpoint(path).read("rank0.json")


READERS = [_verify, _show, _load, _archive, _read_side_file]


@pytest.mark.parametrize("reads", [[_load], READERS], ids=["load", "all"])
def test_parallel_readers_of_a_store_leave_each_other_their_copies(
    reads: list[Callable[[Path], None]], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    storage = ObjectStorage(url, cache=tmp_path / "made")
    for step in range(4):
        save(storage, step)
    assert storage.finish_uploads() == []
    calls = [(reads[number % len(reads)], as_path(f"{url}/step{number % 4}")) for number in range(24)]
    with ThreadPoolExecutor(6) as pool:
        for answer in [pool.submit(read, path) for read, path in calls]:
            answer.result()


def test_a_copy_that_is_marked_and_removed_while_it_is_listed_is_not_damaged(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = ObjectStorage(url, cache=tmp_path)
    save(storage, 1)
    assert storage.finish_uploads() == []
    files = storage.sizes("step1")
    # As after a download, before its mark; then another reader has marked it, and begun to remove it.
    listings = iter([files, {"manifest.json": files["manifest.json"]}])
    monkeypatch.setattr(storage.local, "sizes", lambda name: next(listings))
    assert storage.sizes("step1") == files


def test_a_copy_that_is_listed_in_part_as_it_is_removed_is_not_damaged(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = ObjectStorage(url, cache=tmp_path)
    save(storage, 1)
    assert storage.finish_uploads() == []
    files = storage.sizes("step1")
    # The folder was moved away after the size of its first file was read.
    listings = iter([{"manifest.json": files["manifest.json"]}, {}])
    monkeypatch.setattr(storage.local, "sizes", lambda name: next(listings))
    assert storage.sizes("step1") == files


def test_a_manifest_whose_copy_is_trimmed_meanwhile_is_read_from_the_store(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = ObjectStorage(url, cache=tmp_path / "made")
    save(storage, 1)
    assert storage.finish_uploads() == []
    reader = ObjectStorage(url, cache=tmp_path / "read")
    with reader.reading("step1"):
        pass
    (tmp_path / "read/step1/sent").unlink()
    manifest = storage.peek("step1", "manifest.json")
    assert manifest is not None
    peek = reader.local.peek

    def trim_and_peek(name: str, file: str) -> bytes | None:
        reader._mark_sent(name, manifest)
        assert reader.local.remove(name)
        return peek(name, file)

    monkeypatch.setattr(reader.local, "peek", trim_and_peek)
    assert reader.peek("step1", "manifest.json") == manifest
    assert "step1" not in reader.local.names()


def test_a_copy_that_is_always_taken_away_is_not_told_as_removed(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    storage = ObjectStorage(url, cache=tmp_path / "made")
    save(storage, 1)
    assert storage.finish_uploads() == []
    path = as_path(f"{url}/step1")
    items = ckpt_remove.find_items([str(path)])

    class Taken(LocalStorage):
        @contextmanager
        def reading(self, name: str) -> Iterator[Any]:
            self.remove(name)
            with super().reading(name) as folder:
                yield folder

    monkeypatch.setattr("trainer_cli.addons.stores.object_store.LocalStorage", Taken)
    problems = ckpt_remove.verify_all(items, lambda done, item: None)
    assert problems == {path: "it cannot be read: its local copy is being removed"}
    storage.remove("step1")
    assert ckpt_remove.verify_all(items, lambda done, item: None) == {}


def test_two_threads_that_fetch_one_file_share_the_copy(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ObjectClient(url).put("weights.pt", b"content")
    with ThreadPoolExecutor(4) as pool:
        copies = list(pool.map(partial(fetch, marks=()), [f"{url}/weights.pt"] * 8))
    assert {path.read_bytes() for path in copies if path is not None} == {b"content"}
    assert not list(tmp_path.rglob(".*weights.pt*"))


@pytest.mark.parametrize("door", ["Checkpointer.load", "load_checkpoint", "load_checkpoint of a torch file"])
def test_the_ranks_of_a_machine_download_once(
    door: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    ObjectClient(url).upload_new("weights.pt", tmp_path / "weights.pt")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of the machine that saved"))
    save_checkpoint(f"{url}/step1", 1, model, torch.optim.SGD(model.parameters(), lr=0.1))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))

    def load(rank: int) -> bool:
        other = nn.Linear(3, 2)
        if door == "Checkpointer.load":
            other.load_state_dict(make_sync_checkpointer().load(f"{url}/step1")["model"])
        else:
            load_checkpoint(f"{url}/{'weights.pt' if 'torch' in door else 'step1'}", other, finetune=True)
        return torch.equal(other.weight, model.weight)

    with caplog.at_level(logging.INFO), ThreadPoolExecutor(4) as pool:
        assert all(pool.map(load, range(4)))
    assert caplog.text.count("downloading") == 1
