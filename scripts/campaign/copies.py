"""The process is killed between any two requests of the copies that a run makes in an object store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from campaign.fault_class import FaultClass, Size, Trials
from campaign.kill_points import ALL, spread
from campaign.uploads import MortalClient, make_state, read_store
from campaign.verdict import Outcome, Verdict
from trainer_cli.addons.stores.copies import Copies
from trainer_cli.addons.stores.object_store import ObjectStorage
from trainer_cli.callbacks.retention import Retention
from trainer_cli.checkpoint.checkpointer import Checkpointer
from trainer_cli.checkpoint.save import CheckpointMetadata
from trainer_cli.files.url_path import as_path
from trainer_cli.policy import RetentionRules
from trainer_cli.schema import Newer
from trainer_cli.storage.local import LocalStorage

STEPS, EVERY = 7, 2


class Run:
    """A training that saves on the local disk, keeps one checkpoint there and one copy in a store, and may be killed
    and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, f"memory://{uuid4().hex}"
        self.saved = self.attempt = 0

    def start(self, at: int | None = None) -> None:
        """Start a process, the first or another, which is killed before request number `at`."""
        self.attempt += 1
        self.client = MortalClient(self.url, wait=lambda seconds: None)
        self.client.at = at
        own = LocalStorage(self.folder / "own", run_id="run", attempt=self.attempt)
        place = ObjectStorage(
            self.url, cache=self.folder / "cache", run_id="run", attempt=self.attempt, client=self.client
        )
        self.checkpointer = Checkpointer(storage=lambda root: own)
        self.retention = Retention(own.root, own, "run")
        self.retention.rules = RetentionRules(max_checkpoints=1)
        self.copies = Copies(own, place, as_path(self.url), "run", every=EVERY, raises=False)
        self.retention.held = self.copies.waiting
        self.copies.start(self.retention, self.saved, Newer.refuse)
        self.retention.retire(self.saved)

    def save_all(self) -> None:
        """Save each step, copy it if it is due, and remove what may go, until the end or the death of the process: it
        comes a step after that of its requests, as a request may hang while the training goes on."""
        has_died = False
        while self.saved < STEPS and not has_died:
            has_died = self.client.killed
            name, metadata = (
                f"step{self.saved + 1}",
                CheckpointMetadata(run_id="run", attempt=self.attempt, step=self.saved + 1, number=self.saved + 1),
            )
            self.checkpointer.save(make_state(metadata.step), self.folder / "own" / name, metadata=metadata)
            self.saved += 1
            self.copies.on_committed(name, metadata)
            self.copies.mirror.wait()
            self.retention.retire(self.saved)

    def kill(self) -> None:
        """Nothing of this process reaches the store any more, and its locks end."""
        self.client.killed = True
        self.copies.close(0)


@contextmanager
def prepare(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Count the requests of an undisturbed run."""
    undisturbed = Run(folder / "undisturbed")
    undisturbed.start()
    undisturbed.save_all()
    points = spread(range(1, undisturbed.client.count + 1), count)

    def run_trial(number: int) -> Outcome:
        return kill_at(points[number], folder / str(number))

    yield Trials(len(points), run_trial)


def kill_at(at: int, folder: Path) -> Outcome:
    """Kill a process before this request, start another that saves nothing, and look at the store from a third."""
    run = Run(folder)
    try:
        run.start(at)
        run.save_all()
    except ValueError as error:
        if str(error) != "killed":
            raise
    run.kill()
    run.start()
    if uncopied := run.copies.mirror.wait():
        return Outcome(Verdict.hard_fail, f"{uncopied} were not copied by the next start")
    steps, newest = read_store(run.url, folder / "reader"), run.saved // EVERY * EVERY
    if wrong := [step for step, right in steps.items() if not right]:
        return Outcome(Verdict.diverged, f"the store has another state of steps {wrong}", run.saved)
    if newest and newest not in steps:
        return Outcome(Verdict.lost, f"step {newest} was due, and the store has only {sorted(steps)}", run.saved)
    # As the end of a training does, whose last checkpoint is copied too.
    run.copies.finish(run.retention)
    left = read_store(run.url, folder / "reader")
    if left != ({run.saved: True} if run.saved else {}):
        return Outcome(Verdict.hard_fail, f"{left} is in the store at the end, not {run.saved} alone", run.saved)
    return Outcome(Verdict.passed, announced=run.saved)


CLASSES = (
    FaultClass(
        "copies",
        "Killed between any two requests of copies to an object store",
        "A run saves seven checkpoints on its disk, copies every second one to a store, and keeps one in each place; "
        "the process ends before each request, and the next start copies what is left.",
        "L1 L2 L3",
        {Size.quick: 20, Size.full: ALL, Size.nightly: ALL},
        prepare,
    ),
)
