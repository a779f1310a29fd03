"""Seeded faults of an object store: nothing that was committed is lost, and nothing partial is accepted."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from object_store_proxy import FAULTS, Schedule, proxy
from s3 import new_bucket, s3_server

from campaign.uploads import Run, make_state, read_store
from trainer_cli.addons.stores.copies import Copies
from trainer_cli.addons.stores.object_client import ObjectClient
from trainer_cli.addons.stores.object_store import ObjectStorage
from trainer_cli.callbacks.retention import Retention
from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.checkpoint.save import CheckpointMetadata
from trainer_cli.errors import SaveError
from trainer_cli.files.url_path import as_path
from trainer_cli.schema.checkpoint_config import Newer
from trainer_cli.storage.local import LocalStorage

pytestmark = pytest.mark.slow
COUNT = int(os.environ.get("TRAIN_STORE_FAULTS", "4"))
BATCH = 10


@pytest.fixture(scope="module")
def store() -> Iterator[tuple[str, str, Schedule]]:
    """A server, a proxy before it, and the schedule of its faults. The client's own pauses are left out."""
    schedule, sleep = Schedule(0, share=0.0), asyncio.sleep
    with (
        s3_server() as endpoint,
        proxy(endpoint, schedule) as address,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(asyncio, "sleep", lambda seconds, *result: sleep(0, *result))
        yield endpoint, address, schedule


@pytest.mark.timeout(0 if "TRAIN_STORE_FAULTS" in os.environ else 1800)  # A campaign may take as long as it likes.
@pytest.mark.parametrize("batch", range(0, COUNT, BATCH))
def test_under_seeded_faults_nothing_committed_is_lost_and_nothing_partial_is_accepted(
    batch: int, store: tuple[str, str, Schedule], tmp_path: Path
) -> None:
    endpoint, address, schedule = store
    happened: set[str] = set()
    for seed in range(batch, min(batch + BATCH, COUNT)):
        url, place = f"s3://{new_bucket(endpoint)}/run", tmp_path / str(seed)
        schedule.begin(seed, share=0.15)
        run = Run(url, address, place, seed)
        run.start()
        for step in range(1, 5):
            run.save(step)
            if run.random.random() < 0.3:
                run.storage.finish_uploads(0.01)
            if run.random.random() < 0.3 and len(run.kept) > 1:
                run.remove()
            if run.random.random() < 0.3:
                run.kill()
                run.start()
            if run.random.random() < 0.3:
                assert all(read_store(url, place / f"reader{step}").values()), seed
        schedule.calm = True
        run.kill()
        run.start()
        assert run.storage.finish_uploads() == [], seed
        found = read_store(url, place / "last")
        assert all(found.values()), seed
        assert run.kept <= found.keys(), (seed, schedule.happened)
        happened |= set(schedule.happened)
    assert len(happened) > len(FAULTS) // 2


@pytest.mark.parametrize("raises", [True, False])
def test_copies_wait_for_a_store_that_is_away_and_the_next_start_sends_them(
    raises: bool, store: tuple[str, str, Schedule], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, own = f"s3://{new_bucket(store[0])}/run", LocalStorage(tmp_path / "own", run_id="run")

    def client(address: str) -> ObjectClient:
        return ObjectClient(url, wait=lambda seconds: None, attempts=2, options={"endpoint_url": address})

    def begun(reached: ObjectClient) -> Copies:
        storage = ObjectStorage(url, cache=tmp_path / "cache", run_id="run", client=reached)
        copies = Copies(own, storage, as_path(url), "run", every=1, raises=raises)
        copies.start(Retention(own.root, own, "run"), 3, Newer.refuse)
        return copies

    def save(step: int) -> None:
        metadata = CheckpointMetadata(run_id="run", step=step, number=step)
        make_sync_checkpointer(storage=lambda root: own).save(
            make_state(step), own.root / f"step{step}", metadata=metadata
        )

    nowhere = client("http://127.0.0.1:9")
    with pytest.raises(SaveError, match="could not be copied") if raises else nullcontext():
        begun(nowhere)
    copies = begun(client(store[0]))
    cast("Any", copies.storage).remote.client = nowhere
    for step in (1, 2, 3):
        save(step)
        copies.copy(f"step{step}")
        copies.mirror.wait(600)
        copies.raise_failure()  # That the store is away fails nothing yet.
    with (
        pytest.raises(SaveError, match="the copies step1, step2, step3 could not be sent") if raises else nullcontext()
    ):
        copies.finish(Retention(own.root, own, "run"))
    assert ("could not be sent" in caplog.text) is not raises
    assert read_store(url, tmp_path / "other") == {}
    begun(client(store[0])).finish(Retention(own.root, own, "run"))
    assert read_store(url, tmp_path / "another") == {1: True, 2: True, 3: True}


@pytest.mark.parametrize("more", [{}, {"config_kwargs": {"retries": {"max_attempts": 3}}}], ids=["own", "client's"])
def test_repeated_requests_draw_from_no_global_generator(
    more: dict[str, object], store: tuple[str, str, Schedule]
) -> None:
    endpoint, address, schedule = store
    client = ObjectClient(
        f"s3://{new_bucket(endpoint)}/run", wait=lambda seconds: None, options={"endpoint_url": address, **more}
    )
    schedule.begin(3, share=0.3)
    random.seed(1)
    before = random.getstate(), cast("Any", np.random.get_state())[1].tolist(), torch.get_rng_state().tolist()
    for number in range(30):
        client.put(f"object{number}", b"content")
        assert client.get(f"object{number}") == b"content"
    assert len(schedule.happened) > 10
    assert before == (random.getstate(), cast("Any", np.random.get_state())[1].tolist(), torch.get_rng_state().tolist())
    schedule.calm = True
