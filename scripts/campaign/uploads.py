"""The process is killed between any two requests of saves, uploads and removals in an object store."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from s3 import new_bucket, s3_server

from campaign.fault_class import FaultClass, Size, Trials
from campaign.kill_points import ALL, spread
from campaign.verdict import Outcome, Verdict
from trainer_cli.addons.stores.object_client import ObjectClient
from trainer_cli.addons.stores.object_store import ObjectStorage
from trainer_cli.catalog.catalog import Catalog
from trainer_cli.checkpoint.checkpointer import Checkpointer
from trainer_cli.checkpoint.save import CheckpointMetadata

STEPS = 4


def make_state(step: int) -> dict[str, torch.Tensor]:
    """The state at a step."""
    return {"weights": torch.full((64,), float(step))}


def read_store(url: str, cache: Path) -> dict[int, bool]:
    """What another machine sees in the store: step -> whether its state is right. Partial ones are not listed."""
    storage = ObjectStorage(url, cache=cache)
    checkpointer = Checkpointer(storage=lambda root: storage)
    return {
        entry.step: torch.equal(checkpointer.load(f"{url}/{entry.name}")["weights"], make_state(entry.step)["weights"])
        for entry in Catalog(storage).entries()
        if entry.manifest is not None
    }


class MortalClient(ObjectClient):
    """A client whose process is killed before request number `at`, counted from 1, or when `killed` is set."""

    killed = False
    at: int | None = None
    count = 0

    def _repeat(self, description: str, request: Any) -> Any:
        def request_while_alive() -> Any:
            self.count += 1
            self.killed |= self.count == self.at
            if self.killed:
                raise ValueError("killed")
            return request()

        return super()._repeat(description, request_while_alive)


class Run:
    """A training that saves and removes in a store, and may be killed and started again.

    Args:
        address: of the server, or of a proxy before it.
    """

    def __init__(self, url: str, address: str, folder: Path, seed: int) -> None:
        self.url, self.address, self.folder = url, address, folder
        self.random = random.Random(seed)
        self.kept: set[int] = set()
        self.attempt = 0

    def kill(self) -> None:
        """Nothing of this process reaches the store any more."""
        self.client.killed = True
        self.storage.mirror.wait()

    def start(self, at: int | None = None) -> None:
        """Start a process, the first or another, which is killed before request number `at`."""
        self.attempt += 1
        self.client = MortalClient(self.url, wait=lambda seconds: None, options={"endpoint_url": self.address})
        self.client.at = at
        self.storage = ObjectStorage(
            self.url, cache=self.folder / "cache", run_id="run", attempt=self.attempt, client=self.client
        )
        self.checkpointer = Checkpointer(storage=lambda root: self.storage)
        while True:
            try:
                self.storage.sweep()
            except OSError:
                continue
            return

    def save(self, step: int) -> None:
        """As a training does: a save is committed once this returns."""
        metadata = CheckpointMetadata(run_id="run", attempt=self.attempt, step=step)
        self.checkpointer.save(make_state(step), f"{self.url}/step{step}", metadata=metadata)
        self.kept.add(step)

    def remove(self) -> None:
        """Remove the oldest, as retention does: what fails is tried again another time."""
        oldest = min(self.kept)
        # Before the attempt: one that is half gone, or gone, is no loss.
        self.kept.discard(oldest)
        try:
            if not self.storage.remove(f"step{oldest}"):
                self.kept.add(oldest)
        except OSError:
            return

    def save_all(self) -> None:
        """Save each step, send it, and remove all but two, until the end or the death of the process."""
        for step in range(1, STEPS + 1):
            self.save(step)
            self.storage.finish_uploads()
            if len(self.kept) > 2:
                self.remove()


@contextmanager
def prepare(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Start a server, and count the requests of an undisturbed run."""
    # The server's lines on requests.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with s3_server() as endpoint:
        undisturbed = Run(f"s3://{new_bucket(endpoint)}/run", endpoint, folder / "undisturbed", 0)
        undisturbed.start()
        undisturbed.save_all()
        points = spread(range(1, undisturbed.client.count + 1), count)

        def run_trial(number: int) -> Outcome:
            return kill_at(points[number], f"s3://{new_bucket(endpoint)}/run", endpoint, folder / str(number))

        yield Trials(len(points), run_trial)


def kill_at(at: int, url: str, endpoint: str, folder: Path) -> Outcome:
    """Kill a process before this request, start another, and look at the store from a third."""
    run = Run(url, endpoint, folder, 0)
    try:
        run.start(at)
        run.save_all()
    except ValueError as error:
        if str(error) != "killed":
            raise
    kept = len(run.kept)
    run.kill()
    run.start()
    if unsent := run.storage.finish_uploads():
        return Outcome(Verdict.hard_fail, f"{unsent} were not sent by the next start", kept)
    steps = read_store(url, folder / "reader")
    if wrong := [step for step, right in steps.items() if not right]:
        return Outcome(Verdict.diverged, f"the store has another state of steps {wrong}", kept)
    if lost := run.kept - steps.keys():
        return Outcome(Verdict.lost, f"steps {lost} were saved and are not in the store", kept)
    return Outcome(Verdict.passed, announced=kept)


CLASSES = (
    FaultClass(
        "uploads",
        "Killed between any two requests to an object store",
        "A run saves, sends and removes four checkpoints; the process ends before each of its requests, and the next "
        "start sends what is left.",
        "L1 L2 L3",
        {Size.quick: 20, Size.full: ALL, Size.nightly: ALL},
        prepare,
        share=2.0,
    ),
)
