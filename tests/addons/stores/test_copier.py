"""`copy_to`: every k-th checkpoint, and the last, is in a second folder, verified, and a resume takes it from there."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from faulty_disk import FaultyDisk
from tiny import ListLogger, StopAt, loader, trainer

from trainer_cli.addons.stores.copies import Copies
from trainer_cli.addons.stores.mirror import Mirror
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.state_saver import RunIdentity
from trainer_cli.catalog.catalog import Catalog
from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, make_sync_checkpointer
from trainer_cli.commands.command_line import main
from trainer_cli.errors import CheckpointError, ConfigError, SaveError, UserError
from trainer_cli.layout.naming import MANIFEST_FILE
from trainer_cli.storage.disk import Disk
from trainer_cli.storage.local import LocalStorage
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.trainer import Trainer


class Patient(Callback):
    """Waits for each copy: steps of microseconds are faster than any disk."""

    def on_train_step_start(self, trainer: Trainer, *arguments: object) -> None:
        assert isinstance(trainer.checkpoint, CheckpointerCallback)
        assert trainer.checkpoint.copies is not None
        trainer.checkpoint.drain()
        trainer.checkpoint.copies.mirror.wait(600)


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
    ends = [Catalog.of(place.copies).entry("step9").manifest for place in (run, straight)]
    assert {one.files["rank0.safetensors"] for one in ends if one is not None} == {ends[0].files["rank0.safetensors"]}  # type: ignore[union-attr]
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
    assert Catalog.of(run.copies).entry("step4").manifest.finished  # type: ignore[union-attr]
    run.fit(6, every=2, val=loader(4))
    catalogs = [Catalog.of(folder).entry("step6").manifest for folder in (run.own, run.copies)]
    assert catalogs[0] == catalogs[1]
    assert "val/loss" in catalogs[0].metrics  # type: ignore[union-attr]


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
        copies.on_failure = refuse  # type: ignore[assignment]
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
