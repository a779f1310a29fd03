"""`copy_to`: every k-th checkpoint, and the last, is in a second folder, verified, and a resume takes it from there."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest
import torch
from faulty_disk import FaultyDisk
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from small_parts import present
from tiny import ListLogger, StopAt, loader, trainer

from trainer_cli.addons.stores.copies import Copies
from trainer_cli.addons.stores.mirror import Mirror
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.retention import Retention
from trainer_cli.callbacks.state_saver import RunIdentity
from trainer_cli.catalog.catalog import Catalog
from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, make_sync_checkpointer
from trainer_cli.commands.command_line import main
from trainer_cli.errors import CheckpointError, ConfigError, SaveError, StoreAwayError, UserError
from trainer_cli.files.url_path import as_path
from trainer_cli.layout.naming import MANIFEST_FILE
from trainer_cli.manifest import Manifest
from trainer_cli.policy import RetentionRules
from trainer_cli.schema.checkpoint_config import Newer
from trainer_cli.storage.disk import Disk
from trainer_cli.storage.local import LocalStorage
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.trainer import Trainer


class Patient(Callback):
    """Waits for each copy: steps of microseconds are faster than any disk."""

    def on_train_step_start(self, trainer: Trainer, *arguments: object) -> None:
        assert isinstance(trainer.checkpoint, CheckpointerCallback)
        trainer.checkpoint.drain()
        cast("Any", trainer.checkpoint.copies).mirror.wait(600)


class Run:
    """Fits of one run that saves each step in `own`, and copies to `copies`."""

    def __init__(self, place: Path) -> None:
        self.own, self.copies = place / "own", place / "copies"
        self.log = ListLogger()
        self.prepare: Callable[[CheckpointerCallback], object] = lambda checkpoint: None

    def fit(self, last: int, *callbacks: Callback, every: int = 3, **settings: Any) -> Trainer:
        where = {key: settings.pop(key) for key in ("val", "ckpt_path") if key in settings}
        checkpoint = CheckpointerCallback(
            self.own, copy_to={"folder": str(self.copies), "every": every}, **{"save_interval": 1, **settings}
        )
        self.prepare(checkpoint)
        made = trainer(
            settings={"max_duration": last},
            checkpoint=checkpoint,
            callbacks=callbacks or [Patient()],
            loggers={"list": self.log},
        )
        val = where.pop("val", None)
        made.fit(loader(40, 4), val, **where)
        return made

    @property
    def copied(self) -> list[int]:
        """The steps of the copies, each verified."""
        catalog = Catalog.of(self.copies)
        entries = catalog.entries()
        assert [catalog.why_damaged(entry) for entry in entries] == [None] * len(entries)
        return [entry.step for entry in entries]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.mark.parametrize(
    ("every", "ends", "settings", "copied"),
    [
        (1, [4], {}, [1, 2, 3, 4]),
        (3, [2, 7], {"save_async": False}, [2, 3, 6, 7]),  # The count goes on over a resume.
        (3, [2, 7], {"save_async": True}, [2, 3, 6, 7]),
        (3, [4, 5, 8], {"max_checkpoints": 1, "remove": "ephemeral_only"}, [8]),
        (2, [5, 9], {"max_checkpoints": 2, "save_async": False}, [8, 9]),
        (2, [6], {"save_interval": None, "ephemeral_save_interval": 1, "save_async": True}, [6]),
        (2, [9], {"save_interval": 3, "ephemeral_save_interval": 1}, [6, 9]),
        (5, [3], {}, [3]),
    ],
)
def test_every_kth_checkpoint_and_the_last_are_copied_and_kept_by_the_same_rules(
    run: Run, every: int, ends: list[int], settings: dict[str, Any], copied: list[int]
) -> None:
    for end in ends:
        run.fit(end, every=every, **settings)
    assert run.copied == copied
    for step in copied:
        if (run.own / f"step{step}").is_dir():
            assert (run.own / f"step{step}/{MANIFEST_FILE}").read_bytes() == (
                run.copies / f"step{step}/{MANIFEST_FILE}"
            ).read_bytes()


def never(mirror: Mirror) -> None:
    """In place of the thread of a mirror: the process is killed before it copies anything."""


@pytest.mark.parametrize(
    ("every", "killed_at", "most", "copied"),
    [
        (2, 3, 1, [2, 4]),  # Step 2 was held for its copy, and step 3 is the newest.
        (2, 2, 1, [2, 4]),
        (1, 3, 1, [3, 4]),  # Of those that wait, the rules keep the newest.
        (1, 3, 2, [2, 3, 4]),
        (3, 2, 1, [3, 4]),
    ],
)
def test_a_checkpoint_that_waits_for_its_copy_when_the_process_is_killed_is_copied_by_the_next_start(
    every: int, killed_at: int, most: int, copied: list[int], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"every": every, "max_checkpoints": most, "save_async": False, "save_on_stop": False}
    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "_start", never)
        patch.setattr(Copies, "finish", lambda copies, retention: None)
        run.fit(8, StopAt(killed_at), **settings)
    assert run.copied == []
    seen: set[int] = set()
    usual = Copies._on_sent

    def note(copies: Copies, name: str, manifest: bytes, is_new: bool) -> None:
        seen.add(Manifest.parse(manifest).step)
        usual(copies, name, manifest, is_new)

    monkeypatch.setattr(Copies, "_on_sent", note)
    run.fit(4, **settings)
    assert sorted(seen) == copied


def test_a_start_begins_no_copy_that_would_be_removed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        save_large(tmp_path / "own", step, count=1)
    copies = copies_of(tmp_path, Disk())
    own, added = Retention(tmp_path / "own", copies.source, "ours"), list[str]()
    own.rules = RetentionRules(max_checkpoints=2)
    monkeypatch.setattr(copies.mirror, "add", added.append)
    copies.start(own, 3, Newer.refuse)
    assert added == ["step2", "step3"]


def test_a_start_whose_copies_cannot_be_reached_removes_none_that_waits(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"every": 2, "max_checkpoints": 1, "save_async": False, "save_on_stop": False}
    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "_start", never)
        patch.setattr(Copies, "finish", lambda copies, retention: None)
        run.fit(8, StopAt(3), **settings)
    run.prepare = lambda checkpoint: setattr(_copies(checkpoint), "disk", Away())
    with pytest.raises(SaveError, match="could not be copied: no answer"):
        run.fit(4, **settings)
    assert sorted(LocalStorage(run.own).names()) == ["step2", "step3"]


def test_the_count_is_right_where_most_of_the_counted_checkpoints_are_gone(run: Run) -> None:
    for end in range(1, 9):  # One step in each attempt: none has seen three commits.
        run.fit(10, StopAt(end), Patient(), max_checkpoints=1, remove="ephemeral_only", save_on_stop=False)
    numbers = [entry.manifest.number for entry in Catalog.of(run.copies).entries() if entry.manifest]
    assert numbers == [8]
    own = Catalog.of(run.own).entries()[-1]
    assert own.manifest is not None
    assert (own.step, own.manifest.number) == (8, 8)


def test_a_resume_from_a_copy_is_exact_and_says_so(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    straight = Run(tmp_path / "straight")
    straight.fit(9)
    run.fit(6)
    shutil.rmtree(run.own)
    made = run.fit(9)
    assert made.loaded_from == run.copies / "step6"
    ends = [present(Catalog.of(place.copies).entry("step9").manifest) for place in (run, straight)]
    assert ends[0].files["rank0.safetensors"] == ends[1].files["rank0.safetensors"]
    assert caplog.text.count(f"step6 is taken from the copies in {run.copies}: {run.own} holds no valid") == 1
    assert [entry.step for entry in Catalog.of(run.own).entries()] == [7, 8, 9]
    assert run.copied == straight.copied == [3, 6, 9]


@pytest.mark.parametrize(
    ("gone", "broken_own", "broken_copies", "taken"),
    [
        ([], [], [], "own/step6"),  # A tie.
        ([6], [], [], "copies/step6"),
        ([6, 5, 4, 3, 2, 1, 0], [], [], "copies/step6"),
        ([], [6], [], "copies/step6"),
        ([6], [], [6], "own/step5"),
        ([], [6, 5], [6], "own/step4"),
        ([6, 5, 4, 3], [], [6], "copies/step3"),
        ([], [], [6, 3], "own/step6"),
    ],
)
def test_the_newest_valid_of_both_folders_is_resumed(
    run: Run, gone: list[int], broken_own: list[int], broken_copies: list[int], taken: str
) -> None:
    run.fit(6)
    for step in gone:
        shutil.rmtree(run.own / f"step{step}")
    for folder, steps in ((run.own, broken_own), (run.copies, broken_copies)):
        for step in steps:
            flip(folder / f"step{step}/rank0.safetensors")
    made = run.fit(8)
    assert made.loaded_from == run.own.parent / taken
    assert made.progress.step == 8
    assert Catalog.of(run.copies).entry("step8").valid


def test_nothing_is_removed_while_it_is_copied_and_a_slow_folder_gets_the_newest(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    go, begun = Event(), Event()

    class Slow(Disk):
        def mkdir(self, path: Path) -> None:
            begun.set()
            assert go.wait(500)
            super().mkdir(path)

    seen: list[list[str]] = []

    class Look(Callback):
        def on_train_step_end(self, trainer: Trainer, *results: object) -> None:
            if trainer.progress.step == 3:
                assert begun.wait(500)
            if trainer.progress.step == 6:
                seen.append(sorted(name for name in os.listdir(run.own) if not name.startswith(".")))
            if trainer.progress.step == 7:
                go.set()

    run.prepare = lambda checkpoint: setattr(_copies(checkpoint), "disk", Slow())
    with caplog.at_level(logging.INFO):
        run.fit(7, Look(), every=2, max_checkpoints=1, save_async=False)
    assert seen == [["step2", "step4", "step5"]]  # The one that is copied, the one that waits, the newest.
    assert "step4 is not copied: step6 is due before an earlier copy has ended" in caplog.text
    assert sorted(LocalStorage(run.own).names()) == ["step7"]
    assert run.copied == [7]
    assert "copied step 2 to" in caplog.text


def test_a_copy_gets_the_metrics_of_an_evaluation_that_came_later(run: Run) -> None:
    run.fit(4, every=2)
    assert present(Catalog.of(run.copies).entry("step4").manifest).finished
    run.fit(6, every=2, val=loader(4))
    catalogs = [Catalog.of(folder).entry("step6").manifest for folder in (run.own, run.copies)]
    assert catalogs[0] == catalogs[1]
    assert "val/loss" in present(catalogs[0]).metrics


def test_copies_that_the_training_leaves_behind_are_refused_or_removed(run: Run) -> None:
    run.fit(6)
    for step in (4, 5, 6):
        shutil.rmtree(run.own / f"step{step}")
    with pytest.raises(UserError, match=f"back to step 3, but {run.copies} holds newer checkpoints: step6"):
        run.fit(8, ckpt_path=run.own / "step3")
    run.fit(7, ckpt_path=run.own / "step3", newer="trash")
    assert run.copied == [3, 6, 7]


def test_another_runs_checkpoint_is_not_replaced(run: Run) -> None:
    Run.fit(run, 3)
    shutil.rmtree(run.own)
    before = (run.copies / f"step3/{MANIFEST_FILE}").read_bytes()
    checkpoint = CheckpointerCallback(
        run.own, identity=RunIdentity(run_id="other"), copy_to={"folder": str(run.copies)}, save_interval=3
    )
    with pytest.raises(SaveError, match=r"could not be copied: a checkpoint of another run exists there \(.*step3\)"):
        # Patient: a slow copy of step 3 would be left out for that of the last step.
        trainer(settings={"max_duration": 4}, checkpoint=checkpoint, callbacks=[Patient()]).fit(loader(40, 4))
    assert (run.copies / f"step3/{MANIFEST_FILE}").read_bytes() == before


@pytest.mark.parametrize("name", ["own", "own/copies", "own/../own/x", "link"])
def test_a_folder_in_that_of_the_checkpoints_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to("own")
    with pytest.raises(ConfigError, match=r"copy_to\.folder is .*, which is in the folder of the checkpoints"):
        CheckpointerCallback(tmp_path / "own", copy_to={"folder": str(tmp_path / name)})


def test_python_writes_the_runs_name_itself(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"copy_to.folder is '\{run_name\}/x' .*|write the run's name"):
        CheckpointerCallback(tmp_path, copy_to={"folder": "{run_name}/x"})


def _copies(checkpoint: CheckpointerCallback) -> LocalStorage:
    assert checkpoint.copies is not None
    assert isinstance(checkpoint.copies.storage, LocalStorage)
    return checkpoint.copies.storage


class Strikes(Disk):
    """Does something to a checkpoint between its commit and its copy."""

    def __init__(self, strike: Callable[[Path], object], folder: Path) -> None:
        self.strike, self.folder = strike, folder

    def mkdir(self, path: Path) -> None:
        if path.name.startswith(".tmp"):
            self.strike(self.folder / path.name.split(".")[2])
        super().mkdir(path)


def fill(path: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def spoil(path: Path) -> None:
    file = path / "rank0.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"\xaa")  # Twice the same, since a copy is tried again.


def remove(path: Path) -> None:
    (path / MANIFEST_FILE).unlink(missing_ok=True)
    (path / "rank0.safetensors").unlink(missing_ok=True)


FAULTS = {
    "the disk is full": (fill, "could not be copied: No space left on device .*Free some space"),
    "a byte was altered": (
        spoil,
        "could not be copied: a file of the checkpoint is damaged: .* the digest differs",
    ),
    "the checkpoint is gone": (remove, "could not be copied: No such file"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_copy_follows_on_save_error_and_leaves_nothing_that_is_read(
    run: Run, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    strike, message = FAULTS[fault]
    run.prepare = lambda checkpoint: setattr(_copies(checkpoint), "disk", Strikes(strike, run.own))
    with pytest.raises(SaveError, match=message):
        run.fit(5, every=1, save_async=False)
    assert not Catalog(LocalStorage(run.copies)).names()
    caplog.clear()
    shutil.rmtree(run.own)
    made = run.fit(5, every=1, on_save_error="warn", max_save_errors=0, save_async=False)
    assert made.progress.step == 5
    assert caplog.text.count("could not be copied") == 1
    assert not Catalog(LocalStorage(run.copies)).names()
    run.prepare = lambda checkpoint: None
    run.fit(6, every=1)
    assert run.copied[-1] == 6


def open_manifests(folder: Path) -> list[str]:
    """The manifests below a folder that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [path for path in found if path.startswith(f"{folder}/") and path.endswith(MANIFEST_FILE)]


@pytest.mark.parametrize(("settings", "most"), [({"max_checkpoints": 1}, 2), ({"remove": "never"}, 8)])
def test_while_copies_fail_only_checkpoints_that_the_rules_keep_are_held_and_none_is_kept_open(
    run: Run, settings: dict[str, Any], most: int
) -> None:
    seen: list[tuple[int, int]] = []

    class Look(Callback):
        def on_train_step_end(self, trainer: Trainer, *results: object) -> None:
            names = [name for name in os.listdir(run.own) if not name.startswith(".")]
            seen.append((len(names), len(open_manifests(run.own))))

    run.prepare = lambda checkpoint: setattr(_copies(checkpoint), "disk", Strikes(fill, run.own))
    settings |= {"on_save_error": "warn", "max_save_errors": 0, "save_async": False}
    run.fit(7, Patient(), Look(), every=1, **settings)
    assert max(names for names, _ in seen) <= most, seen
    assert max(manifests for _, manifests in seen) <= 1, seen
    run.prepare = lambda checkpoint: None
    run.fit(8, Patient(), every=1, **settings)
    assert run.copied[-1] == 8


@pytest.mark.parametrize("failure", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_a_failure_that_only_ends_a_thread_is_one_of_the_copy(
    run: Run, failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **more: Any) -> None:
        raise failure

    monkeypatch.setattr(Mirror, "_send", fail)
    with pytest.raises(SaveError, match=f"could not be copied: {failure or type(failure).__name__}"):
        run.fit(3)


def save(folder: Path, step: int = 3) -> None:
    metadata = CheckpointMetadata(run_id="ours", step=step)
    make_sync_checkpointer().save({"w": torch.arange(9.0)}, folder / f"step{step}", metadata=metadata)


def copies_of(folder: Path, disk: Disk) -> Copies:
    """The copies of the checkpoints in `own`, in `copies`."""
    place = LocalStorage(folder / "copies", disk=disk, run_id="ours")
    return Copies(LocalStorage(folder / "own", run_id="ours"), place, folder / "copies", "ours", every=1, raises=False)


@pytest.mark.parametrize("reports", [True, False], ids=["the list is refused", "the report fails"])
def test_a_failure_after_a_failure_does_not_end_the_thread(
    tmp_path: Path, reports: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any) -> None:
        raise UserError("the token has expired")

    save(tmp_path / "own")
    copies = copies_of(tmp_path, Strikes(fill, tmp_path / "own"))
    if reports:
        monkeypatch.setattr(copies.retention, "own", refuse)
    else:
        cast("Any", copies).on_failure = refuse
    copies.copy("step3")
    assert copies.mirror.wait(600) == ["step3"]
    assert copies.close(20)
    copies.raise_failure()
    assert "could not be copied: No space left" in caplog.text
    assert ("the token has expired" in caplog.text) is not reports


class Away(Disk):
    """Cannot be listed."""

    def listdir(self, path: Any) -> list[str]:
        raise OSError(errno.EIO, "no answer")


def test_a_folder_of_copies_that_cannot_be_listed_ends_a_start_that_needs_it(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.fit(3)
    run.prepare = lambda checkpoint: setattr(_copies(checkpoint), "disk", Away())
    with pytest.raises(SaveError, match=r"could not be copied: no answer"):
        run.fit(5)
    made = run.fit(5, on_save_error="warn")
    assert made.progress.step == 5
    assert caplog.text.count(f"the copies in {run.copies} cannot be listed, so none is resumed") == 2
    shutil.rmtree(run.own)
    with pytest.raises(CheckpointError, match=r"holds no valid checkpoint, .* copies .*copy_to.folder=null"):
        run.fit(5, on_save_error="warn")


def test_a_copy_that_ends_at_any_operation_is_whole_or_not_there(tmp_path: Path) -> None:
    save(tmp_path / "own")
    source, folder = LocalStorage(tmp_path / "own", run_id="ours"), tmp_path / "copies"

    def copy(disk: Disk) -> Copies:
        storage = LocalStorage(folder, disk=disk, run_id="ours")
        copies = Copies(source, storage, folder, "ours", every=1, raises=False)
        copies.copy("step3")
        copies.close(20)
        return copies

    counting = FaultyDisk()
    copy(counting)
    assert {"mkdir", "write", "fsync", "rename"} <= {name.split()[0] for name in counting.operations}
    whole = 0
    for at in range(1, len(counting.operations) + 1):
        shutil.rmtree(folder, ignore_errors=True)
        # All later operations fail too, as after a kill: nothing is tidied up.
        copy(FaultyDisk(at, persistent=True))
        catalog = Catalog.of(folder)
        entries = [entry for entry in catalog.entries() if entry.manifest is not None]
        assert all(catalog.is_intact(entry) for entry in entries), counting.operations[at - 1]
        whole += bool(entries)
        copy(Disk())  # The next start makes up for it, and removes what is left.
        assert os.listdir(folder) == ["step3"]
        assert catalog.is_intact(catalog.entry("step3"))
    assert 0 < whole < len(counting.operations)


@pytest.mark.slow  # It asks git for the commit.
def test_a_run_with_a_store_needs_no_folder_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def has_no_home(url: str) -> Path:
        raise UserError(f"there is no folder for the copy of {url}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainer_cli.addons.stores.object_store.cache_of", has_no_home)
    small = ("experiment=digits_mlp", "loggers=none", "data.num_workers=0", "loop.max_duration=2")
    store = f"checkpoint.folder=memory://{tmp_path.name}"
    assert main(["fit", *small, "name=first", "loop.eval_interval=null", store]) == 0


class Slow(Disk):
    """Waits before each write until it may go on; its blocks are small, so that a file has many."""

    block_bytes = 4096

    def __init__(self) -> None:
        self.begun, self.may = Event(), Event()
        self.writes = 0

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self.writes += 1
        self.begun.set()
        assert self.may.wait(500)
        return super().write(fd, data, offset)


def save_large(folder: Path, step: int = 3, *, count: int = 1 << 23) -> None:
    """Save a checkpoint that is copied in eight blocks."""
    metadata = CheckpointMetadata(run_id="ours", step=step, number=step)
    make_sync_checkpointer().save({"w": torch.zeros(count)}, folder / f"step{step}", metadata=metadata)


@pytest.mark.parametrize("how", ["abandoned", "closed"])
def test_a_copy_that_is_under_way_ends_when_it_is_abandoned_and_is_no_failure(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (3, 4):
        save_large(tmp_path / "own", step)
    disk = Slow()
    copies = copies_of(tmp_path, disk)
    copies.copy("step3")
    assert disk.begun.wait(500)
    copies.mirror.add("step4")
    if how == "abandoned":
        copies.abandon()
    assert not copies.close(0.01)
    disk.may.set()
    copies.mirror.wait(500)
    assert disk.writes < 9, "the rest is not copied"
    assert os.listdir(tmp_path / "copies") == []
    copies.raise_failure()
    assert "could not be copied" not in caplog.text
    # The next start copies it.
    again = copies_of(tmp_path, Disk())
    again.start(Retention(tmp_path / "own", again.source, "ours"), 4, Newer.refuse)
    assert again.mirror.wait(500) == []
    assert sorted(os.listdir(tmp_path / "copies")) == ["step3", "step4"]


def test_a_second_ctrl_c_ends_the_copy_that_is_under_way(run: Run) -> None:
    disk = Slow()

    class Interrupt(Callback):
        def on_train_step_end(self, trainer: Trainer, *results: object) -> None:
            if trainer.progress.step == 2:
                assert disk.begun.wait(500)
                disk.may.set()
                raise KeyboardInterrupt

    run.prepare = lambda checkpoint: setattr(_copies(checkpoint), "disk", disk)
    with pytest.raises(KeyboardInterrupt):
        run.fit(4, Interrupt(), every=1, save_async=False)
    assert all(thread.name != "checkpoint-mirror" for thread in threading.enumerate())
    run.prepare = lambda checkpoint: None
    run.fit(4, every=1)
    assert run.copied == [1, 2, 3, 4]


@pytest.mark.parametrize("where", ["folder", "copy_to"])
def test_a_second_ctrl_c_ends_the_upload_that_is_under_way(
    where: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may, usual, parts = Event(), Event(), MemoryFile.write, list[int]()

    def write(file: MemoryFile, data: bytes) -> int:
        if file.path.endswith("rank0.safetensors"):
            parts.append(len(data))
            begun.set()
            assert may.wait(500)
        return int(usual(file, data))

    class Interrupt(Callback):
        def on_train_step_end(self, trainer: Trainer, *results: object) -> None:
            if trainer.progress.step == 2 and not may.is_set():
                assert begun.wait(500)
                raise KeyboardInterrupt

        def on_fit_exception(self, trainer: Trainer, exception: BaseException) -> None:
            # After the checkpointer, which is the last callback, and thus the first that is torn down.
            may.set()

    monkeypatch.setattr(MemoryFile, "write", write)
    monkeypatch.setattr(MemoryFileSystem, "blocksize", 64)
    store = f"memory://{uuid.uuid4().hex}"
    setattr(run, {"folder": "own", "copy_to": "copies"}[where], store)
    with pytest.raises(KeyboardInterrupt):
        run.fit(3, Interrupt(), every=1, save_async=False)
    # The process waits for these at its end.
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint-transfer"):
            thread.join(500)
    assert len(parts) == 1, "the other parts are not sent"
    run.fit(3, every=1)
    assert [entry.step for entry in Catalog.of(as_path(store)).valid()][-3:] == [1, 2, 3]


PLACE_ERRORS = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EROFS]


class Broken(Disk):
    """Cannot do any of these operations below a folder with this name."""

    def __init__(self, number: int, name: str, operations: tuple[str, ...]) -> None:
        self.number, self.name = number, name
        self.struck: list[str] = []
        for operation in operations:
            setattr(self, operation, partial(self._do, getattr(self, operation)))

    def _do(self, act: Callable[..., Any], first: Any, *more: Any, **settings: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
        if self.name in path:
            self.struck.append(path)
            raise OSError(self.number, os.strerror(self.number))
        return act(first, *more, **settings)


@pytest.mark.parametrize(
    ("number", "operation"),
    [
        *((errno.EIO, operation) for operation in ("mkdir", "open_new", "write", "fsync", "rename", "listdir")),
        *((number, "write") for number in PLACE_ERRORS if number != errno.EIO),
    ],
    ids=lambda value: errno.errorcode.get(value, value),
)
def test_a_place_that_is_full_or_dead_is_looked_at_once_for_each_save(
    number: int, operation: str, tmp_path: Path
) -> None:
    (tmp_path / "copies").mkdir()
    for step in (1, 2, 3):
        save(tmp_path / "own", step)
    disk = Broken(number, "/copies", (operation,))
    copies = copies_of(tmp_path, disk)
    seen = [0]
    for step in (1, 2, 3):
        copies.copy(f"step{step}")
        assert len(copies.mirror.wait(500)) == step, "all are kept for another try"
        seen.append(len(disk.struck))
    refusals = [after - before for before, after in pairwise(seen)]
    assert refusals[1] == refusals[2] <= 2, "not one for each that waits"
    copies.storage.disk = Disk()  # type: ignore[attr-defined]
    copies.mirror.retry()
    assert copies.mirror.wait(500) == []


def be_away(path: Path) -> None:
    raise StoreAwayError("no answer", where="s3://bucket")


@pytest.mark.parametrize("fail", [fill, be_away, spoil])
def test_while_copies_fail_none_waits_that_would_be_removed_at_once(
    fail: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copies = copies_of(tmp_path, Strikes(fail, tmp_path / "own"))
    copies.retention.rules = RetentionRules(max_checkpoints=1)
    for step in range(1, 6):
        save(tmp_path / "own", step)
        copies.copy(f"step{step}")
        assert copies.mirror.wait(500) == [f"step{step}"]
        copies.raise_failure()
    assert caplog.text.count("could not be copied") == (fail is not be_away)
    # Of one that stops waiting it would not be true that it is sent again.
    assert caplog.text.count("is sent again later") == (fail is be_away)


@pytest.mark.parametrize("operation", ["open", "read"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["own/step1/manifest.json", "own/step1/rank0.safetensors"])
def test_a_checkpoint_that_cannot_be_read_keeps_no_other_from_being_copied(
    name: str, number: int, operation: str, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        save(tmp_path / "own", step)
    copies = copies_of(tmp_path, Disk())
    copies.source.disk = disk = Broken(number, name, (operation,))  # type: ignore[attr-defined]
    for step in (1, 2, 3):
        copies.mirror.add(f"step{step}")
    assert copies.mirror.wait(500) in ([], ["step1"])
    assert disk.struck
    assert {"step2", "step3"} <= set(os.listdir(tmp_path / "copies"))


def test_a_copy_that_fails_for_another_reason_than_before_is_a_failure_too(tmp_path: Path) -> None:
    reasons = [be_away, spoil]
    copies = copies_of(tmp_path, Strikes(lambda path: reasons.pop(0)(path), tmp_path / "own"))
    save(tmp_path / "own")
    copies.raises = True
    copies.copy("step3")
    assert copies.mirror.wait(500) == ["step3"]
    copies.raise_failure()
    copies.mirror.retry()
    assert copies.mirror.wait(500) == ["step3"]
    with pytest.raises(SaveError, match="could not be copied"):
        copies.raise_failure()
