"""Several machines that save together in an object store: nothing but the store is shared, and a save is all or
nothing."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from object_store_proxy import Schedule, proxy
from small_parts import present
from states import same
from thread_ranks import ThreadGroup, on_ranks

from trainer_cli.addons.stores.object_client import ObjectClient
from trainer_cli.addons.stores.object_store import ObjectStorage
from trainer_cli.catalog.catalog import Catalog, newest_intact
from trainer_cli.checkpoint.checkpointer import AsyncCheckpointer, CheckpointMetadata, SyncCheckpointer
from trainer_cli.checkpoint.group_verify import GroupVerifier
from trainer_cli.errors import SaveError, StoreAwayError
from trainer_cli.format.sharded import SMALL_BYTES
from trainer_cli.schema.checkpoint_config import DigestAlgorithm

pytestmark = pytest.mark.slow
LARGE = SMALL_BYTES // 4 + 1


class Client(ObjectClient):
    """Records its requests and those that write."""

    def __init__(self, url: str, writes: list[str], rank: int, **settings: Any) -> None:
        super().__init__(url, wait=lambda seconds: None, **settings)
        self.writes, self.requests, self.rank = writes, list[str](), rank
        self.before: Callable[[str], object] = lambda request: None

    def _repeat(self, description: str, request: Callable[[], Any]) -> Any:
        self.before(description)
        self.requests.append(description)
        result = super()._repeat(description, request)
        if description.startswith(("put", "delete")):
            self.writes.append(f"rank {self.rank} {description}")
        return result


def state(rank: int, step: int) -> dict[str, Any]:
    return {
        "model": {"a": torch.full((LARGE,), 1.0), "b": torch.full((LARGE,), float(step))},
        "progress": {"step": step},
        "rng": torch.arange(rank, rank + 3),
    }


class Machines:
    """Two machines, each with a rank, a folder and a client of its own."""

    def __init__(self, url: str, folder: Path, **settings: Any) -> None:
        self.url, self.writes = url, list[str]()
        self.clients = [Client(url, self.writes, rank, **settings) for rank in range(2)]
        self.caches = [folder / f"machine{rank}" for rank in range(2)]

    def storage(self, rank: int, attempt: int = 1) -> ObjectStorage:
        return ObjectStorage(
            self.url, cache=self.caches[rank], run_id="run", attempt=attempt, client=self.clients[rank]
        )

    def together(self, act: Callable[[Any, int], Any], *, background: bool = False) -> list[Any]:
        """What each rank returns or raises."""

        def act_on_rank(group: ThreadGroup) -> Any:
            group.machines = 2
            storage = self.storage(group.rank)
            checkpointer = (AsyncCheckpointer if background else SyncCheckpointer)(storage=lambda root: storage)
            checkpointer.join(group)
            try:
                return act(checkpointer, group.rank)
            except Exception as error:
                if not isinstance(error, SaveError):
                    group.leave()
                raise
            finally:
                checkpointer.close()

        return on_ranks(2, act_on_rank)

    def save(self, step: int, *, background: bool = False) -> list[Any]:
        metadata = CheckpointMetadata(run_id="run", step=step, files={"config.yaml": b"seed: 1\n"})

        def save(checkpointer: SyncCheckpointer, rank: int) -> None:
            path = f"{self.url}/step{step}"
            saving = checkpointer.save(state(rank, step), path, metadata=metadata, overwrite=False)
            if saving is not None:
                saving.raise_failure()

        return self.together(save, background=background)

    def load(self, step: int) -> list[Any]:
        return self.together(lambda checkpointer, rank: dict(checkpointer.load(f"{self.url}/step{step}")))

    def objects(self) -> list[str]:
        return sorted(ObjectClient(self.url).list())


@pytest.fixture
def machines(url: str, tmp_path: Path) -> Machines:
    return Machines(url, tmp_path)


@pytest.mark.parametrize("background", [False, True])
def test_each_rank_sends_its_own_files_and_rank_0_the_manifest_after_all(machines: Machines, background: bool) -> None:
    assert machines.save(2, background=background) == [None, None]
    sent = [f"step2/{file}" for file in present(Catalog(machines.storage(0)).entry("step2").manifest).files]
    assert machines.objects() == sorted([*sent, "step2/manifest.json"])
    assert machines.writes[0] == "rank 0 put step2/.writing"
    assert machines.writes[-2:] == ["rank 0 put step2/manifest.json", "rank 0 delete step2/.writing"]
    assert sorted(machines.writes[1:-2]) == sorted(f"rank {1 if 'rank1' in key else 0} put {key}" for key in sent)
    left = [path for cache in machines.caches for path in cache.iterdir()]
    assert left == [], "a machine keeps no part of a checkpoint that it has sent"


def test_the_training_waits_for_few_requests_of_a_save(machines: Machines) -> None:
    machines.save(2)
    machines.clients[0].requests.clear()
    machines.save(4)
    requests = machines.clients[0].requests
    assert requests[: requests.index("put step4/.writing")] == [
        "list", "get step2/manifest.json", "get step4/manifest.json", "get step4/manifest.json", "get step4/.writing"
    ]  # fmt: skip
    assert requests[-4:] == [
        "get step4/.writing", "put step4/manifest.json", "get step4/.writing", "delete step4/.writing"
    ]  # fmt: skip


def test_each_machine_downloads_what_all_have_sent(machines: Machines, tmp_path: Path) -> None:
    machines.save(2)
    for rank, loaded in enumerate(machines.load(2)):
        assert same(
            loaded, {**state(rank, 2), "_ranks": loaded.get("_ranks")} if "_ranks" in loaded else state(rank, 2)
        )
    assert [sorted(path.name for path in cache.iterdir()) for cache in machines.caches] == [["step2"], ["step2"]]


def test_a_checkpoint_of_several_machines_is_removed_with_the_parts_of_all_and_the_manifest_first(
    machines: Machines,
) -> None:
    machines.save(2)
    machines.load(2)
    machines.writes.clear()
    assert machines.storage(0, attempt=2).remove("step2")
    assert machines.objects() == []
    # The claim, then the manifest: a crash later leaves a partial checkpoint, not a damaged one.
    assert machines.writes[:3] == [
        "rank 0 put step2/.writing", "rank 0 put step2/.removed.run", "rank 0 delete step2/manifest.json"
    ]  # fmt: skip


def test_a_rank_that_cannot_send_fails_the_save_on_all_and_the_next_save_succeeds(machines: Machines) -> None:
    def refuse(request: str) -> None:
        if request == "put step2/rank1.safetensors":
            raise StoreAwayError("put failed 6 times", where="the store")

    machines.clients[1].before = refuse
    failed = machines.save(2)
    assert [type(error) for error in failed] == [SaveError, SaveError]
    assert str(failed[0]) == (
        f"rank 1: the checkpoint could not be saved: put failed 6 times ({machines.url}/step2). "
        "Older checkpoints were not touched. Check the network and the address of the store."
    )
    assert machines.objects() == []
    machines.clients[1].before = lambda request: None
    assert machines.save(2) == [None, None]
    assert same(machines.load(2)[1]["model"], state(1, 2)["model"])


@pytest.mark.parametrize(
    ("rank", "last"),
    [
        pytest.param(1, "put step4/rank1.safetensors", id="another machine, while it sends"),
        pytest.param(0, "put step4/rank0.safetensors", id="that of rank 0, while it sends"),
        pytest.param(0, "put step4/manifest.json", id="that of rank 0, before the manifest"),
    ],
)
def test_a_machine_that_dies_leaves_no_checkpoint_and_the_next_attempt_clears_what_it_sent(
    rank: int, last: str, machines: Machines
) -> None:
    machines.save(2)
    killed = False

    def die(request: str) -> None:
        nonlocal killed
        killed = killed or request == last
        if killed:
            raise ValueError("killed")

    machines.clients[rank].before = die
    # The other machine waits for it in vain, and is ended too.
    machines.clients[1 - rank].before = lambda request: die("") if killed else None
    assert all(isinstance(error, Exception) for error in machines.save(4))
    for client in machines.clients:
        client.before = lambda request: None
    assert [key for key in machines.objects() if key.startswith("step4/")], "what was sent is still there"
    later = machines.storage(0, attempt=2)
    assert [entry.name for entry in Catalog(later).valid("run")] == ["step2"]
    assert later.sweep() == ["step4"]
    assert not [key for key in machines.objects() if not key.startswith("step2/")]
    assert machines.save(4) == [None, None]


def test_a_save_that_is_never_ended_makes_no_request_while_the_process_ends(machines: Machines) -> None:
    storage = machines.storage(0)
    storage.separate(0)
    saving = storage.writing("step2")
    saving.__enter__()
    machines.clients[0].requests.clear()
    del saving
    gc.collect()
    assert machines.clients[0].requests == []
    assert machines.storage(0, attempt=2).sweep() == ["step2"]
    assert machines.objects() == []


def test_what_an_earlier_attempt_still_sends_changes_no_checkpoint(machines: Machines) -> None:
    machines.save(2)
    late = machines.storage(1)
    late.separate(1)
    with (
        pytest.raises(FileExistsError, match="another file of that name"),
        late.joining("step2", digest=DigestAlgorithm.xxh3_128).create("rank1.safetensors") as writer,
    ):
        writer.write(b"other bytes")
    assert same(machines.load(2)[1]["model"], state(1, 2)["model"])


def test_objects_of_no_run_are_not_in_the_way_of_a_save(machines: Machines, caplog: pytest.LogCaptureFixture) -> None:
    ObjectClient(machines.url).put("step2/rank1.safetensors", b"whose is this")
    assert machines.save(2) == [None, None]
    assert "step2 is quarantined as .aside.step2" in caplog.text
    assert same(machines.load(2)[1]["model"], state(1, 2)["model"])


def test_a_manifest_that_arrived_after_its_save_was_given_up_keeps_its_files(machines: Machines) -> None:
    machines.save(2)
    storage, client = machines.storage(0), ObjectClient(machines.url)
    storage.separate(0)
    manifest = client.get("step2/manifest.json") or b""
    client.delete("step2/manifest.json")
    client.put("step2/.writing", b"run")
    assert storage.names() == ["step2"]
    client.put("step2/manifest.json", manifest)
    with pytest.raises(FileExistsError), storage.writing("step2"):
        pass
    assert storage.peek("step2", "manifest.json") == manifest
    assert same(machines.load(2)[1]["model"], state(1, 2)["model"])


def test_objects_that_another_run_is_sending_are_refused(machines: Machines) -> None:
    ObjectClient(machines.url).put("step2/.writing", b"other")
    failed = machines.save(2)
    assert [type(error) for error in failed] == [SaveError, SaveError]
    assert "another run sends a checkpoint of that name" in str(failed[0])
    assert machines.objects() == ["step2/.writing"]


def test_rank_0_verifies_a_checkpoint_of_a_store_alone(machines: Machines, caplog: pytest.LogCaptureFixture) -> None:
    for step in (2, 4):
        machines.save(step)
    content = bytearray(ObjectClient(machines.url).get("step4/rank1.safetensors") or b"")
    content[-1] ^= 1
    ObjectClient(machines.url).put("step4/rank1.safetensors", bytes(content))

    def newest(group: ThreadGroup) -> str:
        verifier, catalog = GroupVerifier(group), Catalog(machines.storage(group.rank))
        entry = group.on_main(lambda: newest_intact(catalog, "run", check=verifier.verify), verifier)
        assert entry is not None
        return entry.name

    with caplog.at_level(logging.WARNING):
        assert on_ranks(2, newest) == ["step2", "step2"]
    assert "by rank 0 only" not in caplog.text


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(1, 40))])
def test_under_seeded_faults_a_save_of_two_machines_is_all_or_nothing(
    seed: int, endpoint: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep, schedule = asyncio.sleep, Schedule(seed, share=0.15)
    # The pauses of the library below fsspec.
    monkeypatch.setattr(asyncio, "sleep", lambda seconds, *result: sleep(0, *result))
    with proxy(endpoint, schedule) as address:
        machines = Machines(url, tmp_path, attempts=3, options={"endpoint_url": address})
        outcomes = {step: machines.save(step) for step in (1, 2, 3)}
    assert schedule.happened
    reader = ObjectStorage(url, cache=tmp_path / "reader", run_id="run", attempt=2)
    valid = {entry.step for entry in Catalog(reader).valid("run")}
    assert {step for step, errors in outcomes.items() if errors == [None, None]} <= valid
    whole = Machines(url, tmp_path / "whole")
    for step in valid:
        assert all(same(loaded["model"], state(0, step)["model"]) for loaded in whole.load(step))
    reader.sweep()
    assert all(key.partition("/")[0] in {f"step{step}" for step in valid} for key in whole.objects())


def test_an_upload_whose_reply_is_lost_is_recognised_by_its_content(endpoint: str, url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    schedule = Schedule(seed=0, share=1.0)
    cast("Any", schedule.random).choice = lambda faults: "lost reply"
    with proxy(endpoint, schedule) as address:
        client = ObjectClient(
            url, wait=lambda seconds: setattr(schedule, "calm", True), options={"endpoint_url": address}
        )
        assert client.upload_new("step1/file", tmp_path / "file")
    assert schedule.happened
    (tmp_path / "file").write_bytes(b"another")
    assert not ObjectClient(url).upload_new("step1/file", tmp_path / "file")
    assert ObjectClient(url).get("step1/file") == b"content"
