"""Tensors that are not trained are written once: later checkpoints link to their file, if its bytes are the same."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_disk import FaultyDisk
from tiny import ListLogger, StopAt, everything, loader, on, same, trainer
from torch import Tensor, nn

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.ema import EMA
from trainer_cli.catalog.catalog import Catalog
from trainer_cli.checkpoint.checkpointer import Checkpointer, make_sync_checkpointer
from trainer_cli.format.rank_files import FilesOfRank
from trainer_cli.format.readable import check_readable
from trainer_cli.format.sharded import ShardedFormat
from trainer_cli.format.stored import StoredState
from trainer_cli.manifest import Digest, FileEntry, new_digest
from trainer_cli.schema.checkpoint_config import CheckpointFormat
from trainer_cli.storage import folder as storage_folder
from trainer_cli.storage.disk import Disk
from trainer_cli.storage.local import LocalStorage
from trainer_cli.trainer.hooks import Callback

FROZEN = FilesOfRank(0).frozen
WIDTH = 512
"""A square matrix of float32 has 1 MiB, the least for a file of its own."""


class Tuned(nn.Module):
    """A frozen layer, and a small one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.base.requires_grad_(False)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        hidden = self.base(x.repeat(1, WIDTH // 2)).tanh()
        loss: Tensor = (self.head(hidden).squeeze(-1) - y).square().mean()
        return loss


class Tied(Tuned):
    """The frozen matrix has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH, bias=False)
        self.other.weight = self.base.weight


class Keeps(Callback):
    """Copies of all weights at the end of each step, after what the step has changed."""

    def __init__(self, change: Callable[[Any], object], at: Iterable[int]) -> None:
        self.change, self.at, self.weights = change, set(at), dict[int, dict[str, Tensor]]()

    def on_train_batch_end(self, trained: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trained.progress.step in self.at:
            self.change(model)
        values = trained.checkpoint_state()["model"]
        self.weights[trained.progress.step] = {name: value.clone() for name, value in values.items()}


def fit(
    folder: Path,
    change: Callable[[Any], object] = lambda model: None,
    *,
    at: Iterable[int] = (),
    model: Any = Tuned,
    callbacks: Mapping[str, Callback] | None = None,
    steps: int = 5,
    **settings: Any,
) -> Keeps:
    """Train five steps, each of which is saved; the weights after each."""
    keeps = Keeps(change, at)
    save = {"save_interval": 1, "remove": "never", "pre_train_checkpoint": False, **settings}
    made = trainer(
        model,
        callbacks={"keeps": keeps, **(callbacks or {})},
        settings={"max_duration": steps},
        checkpoint=CheckpointerCallback(folder, **save),
        run_dir=folder,
    )
    made.fit(loader())
    return keeps


def inodes(folder: Path, file: str = FROZEN) -> dict[int, int]:
    """Step -> the inode of the file of frozen tensors."""
    return {int(path.parent.name[4:]): path.stat().st_ino for path in folder.glob(f"step*/{file}")}


def groups(folder: Path) -> list[list[int]]:
    """The steps whose files are one, in the order of their first."""
    found: dict[int, list[int]] = {}
    for step, inode in sorted(inodes(folder).items()):
        found.setdefault(inode, []).append(step)
    return list(found.values())


def assert_sound(folder: Path, kept: Keeps) -> list[int]:
    """Every checkpoint is intact, and has the weights of its step, bit for bit; their steps."""
    catalog = Catalog.of(folder)
    entries = catalog.entries()
    for entry in entries:
        assert catalog.why_damaged(entry) is None
        tree = Checkpointer().read(folder / entry.name)
        assert same(kept.weights[entry.step], tree["model"]) == []
        with LocalStorage(folder).reading(entry.name) as opened:
            assert entry.manifest is not None
            check_readable(opened, entry.manifest)
            assert {f"model/{name}" for name in kept.weights[entry.step]} <= {
                *(stored := StoredState(folder / entry.name, opened, entry.manifest)).tensors,
                *stored.aliases,
            }
    return [entry.step for entry in entries]


def _edit_view(model: Any) -> None:
    model.base.weight.detach()[3].view(2, -1)[1, 5] += 1


def _edit_array(model: Any) -> None:
    # By an array of numpy, of which torch's counter of versions knows nothing.
    model.base.bias.detach().numpy()[7] = 5


def _edit_in_place(model: Any) -> None:
    with torch.no_grad():
        model.base.weight.mul_(2)


def _edit_data(model: Any) -> None:
    model.base.weight.data[0, 0] = 3


def _replace_data(model: Any) -> None:
    model.base.weight.data = torch.full((WIDTH, WIDTH), 0.5)


def _load(model: Any) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def _negate_zero(model: Any) -> None:
    model.base.weight.data[0, :2] = torch.tensor([0.0, -0.0])


def _unfreeze(model: Any) -> None:
    model.base.requires_grad_(True)


EDITS = (_edit_view, _edit_array, _edit_in_place, _edit_data, _replace_data, _load, _negate_zero)


@pytest.mark.parametrize("change", EDITS, ids=lambda change: change.__name__)
def test_a_frozen_tensor_that_is_changed_is_written_and_what_follows_links_to_it(
    tmp_path: Path, change: Callable[[Any], object]
) -> None:
    # Both ways of saving, in turn.
    kept = fit(tmp_path, change, at=[3], save_async=EDITS.index(change) % 2 == 0)
    assert assert_sound(tmp_path, kept) == [1, 2, 3, 4, 5]
    assert groups(tmp_path) == [[1, 2], [3, 4, 5]]


def test_one_that_changes_at_each_step_is_never_linked(tmp_path: Path) -> None:
    kept = fit(tmp_path, _edit_array, at=[2])
    assert groups(tmp_path) == [[1], [2, 3, 4, 5]]
    kept = fit(tmp_path / "teacher", _edit_in_place, at=range(9))
    assert assert_sound(tmp_path / "teacher", kept) == [1, 2, 3, 4, 5]
    assert groups(tmp_path / "teacher") == [[1], [2], [3], [4], [5]]


def test_what_is_unfrozen_leaves_the_file_and_what_is_frozen_enters_it(tmp_path: Path) -> None:
    def change(model: Any) -> None:
        model.base.weight.requires_grad_(not model.base.weight.requires_grad)

    kept = fit(tmp_path, change, at=[2, 4])
    assert assert_sound(tmp_path, kept) == [1, 2, 3, 4, 5]
    # Step 3 has trained the matrix. Its bias alone is too small for a file.
    assert groups(tmp_path) == [[1], [4, 5]]
    assert FROZEN not in os.listdir(tmp_path / "step2")


@pytest.mark.parametrize(
    ("model", "callbacks"),
    [(Tied, {}), (Tuned, {"ema": EMA(0.9)}), (lambda: torch.compile(Tuned(), backend="eager"), {})],
    ids=["tied", "EMA", "compiled"],
)
def test_tied_averaged_and_compiled_models_are_the_same_from_linked_files(
    tmp_path: Path, model: Any, callbacks: dict[str, Callback]
) -> None:
    kept = fit(tmp_path, _edit_data, at=[3], model=model, callbacks=callbacks)
    assert assert_sound(tmp_path, kept) == [1, 2, 3, 4, 5]
    assert groups(tmp_path) == [[1, 2], [3, 4, 5]]


def test_a_link_reads_the_tensors_once_and_writes_none_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digested, written = Counted(), list[int]()
    monkeypatch.setattr(storage_folder, "new_digest", digested.new)

    def write(self: Disk, fd: int, data: memoryview, offset: int) -> int:
        written.append(len(data))
        return os.pwrite(fd, data, offset)

    monkeypatch.setattr(Disk, "write", write)
    fit(tmp_path, _edit_array, at=[2], steps=3, save_async=False)
    frozen_bytes = (tmp_path / "step1" / FROZEN).stat().st_size
    # Written in steps 1 and 2, and digested once in each step, as every file is without links.
    assert 2 * frozen_bytes <= sum(written) < 2.2 * frozen_bytes
    assert 3 * frozen_bytes <= digested.size_bytes < 3.2 * frozen_bytes


class Counted:
    """Counts the bytes that are digested."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def new(self, algorithm: str) -> Digest:
        counted, digest = self, new_digest(algorithm)

        class Counting:
            def update(self, data: bytes | bytearray | memoryview, /) -> None:
                counted.size_bytes += len(data)
                digest.update(data)

            def hexdigest(self) -> str:
                return digest.hexdigest()

        return Counting()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EMLINK, errno.EXDEV, errno.ENOTSUP, errno.ENOSYS])
def test_where_the_file_system_refuses_a_link_the_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(old: Path, new: Path) -> None:
        raise OSError(number, os.strerror(number), str(new))

    monkeypatch.setattr(os, "link", refuse)
    kept = fit(tmp_path)
    assert assert_sound(tmp_path, kept) == [1, 2, 3, 4, 5]
    assert groups(tmp_path) == [[1], [2], [3], [4], [5]]


def test_after_links_are_used_up_the_file_is_written_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def refuse_third(old: Path, new: Path) -> None:
        if os.stat(old).st_nlink == 2:
            raise OSError(errno.EMLINK, "Too many links")
        link(old, new)

    monkeypatch.setattr(os, "link", refuse_third)
    kept = fit(tmp_path)
    assert assert_sound(tmp_path, kept) == [1, 2, 3, 4, 5]
    assert groups(tmp_path) == [[1, 2], [3, 4], [5]]


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))


def _replace(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.with_name("new").write_bytes(content)
    os.replace(path.with_name("new"), path)


@pytest.mark.parametrize("damage", [_flip, _replace, Path.unlink, lambda path: os.truncate(path, 5000)])
def test_a_file_that_is_not_as_it_was_written_is_not_linked(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    kept = fit(tmp_path, lambda model: damage(tmp_path / "step2" / FROZEN), at=[3], save_async=False)
    catalog = Catalog.of(tmp_path)
    damaged = {entry.step for entry in catalog.entries() if catalog.why_damaged(entry) is not None}
    # What steps 1 and 2 share is one file; a file of its own damages step 2 alone, and a name that is gone is none.
    assert damaged == ({1, 2} if damage not in (_replace, Path.unlink) else {2})
    assert set(kept.weights) == {1, 2, 3, 4, 5}
    assert len({inodes(tmp_path)[step] for step in (3, 4, 5)}) == 1
    assert inodes(tmp_path).get(2) not in {inodes(tmp_path)[3]}


def test_one_that_is_replaced_between_the_look_and_the_link_is_not_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, calls = Disk.link, list[Path]()

    def replace_first(self: Disk, old: Path, new: Path) -> None:
        calls.append(new)
        if len(calls) == 1:
            _replace(old)
        link(self, old, new)

    monkeypatch.setattr(Disk, "link", replace_first)
    fit(tmp_path, save_async=False, steps=3)
    catalog = Catalog.of(tmp_path)
    assert [entry.step for entry in catalog.entries() if catalog.why_damaged(entry) is not None] == [1]
    assert groups(tmp_path) == [[1], [2, 3]]


SAFETY = {"save_interval": None, "ephemeral_save_interval": "1st"}
RULES: dict[str, dict[str, Any]] = {
    "the newest": {"max_checkpoints": 1},
    "two": {"max_checkpoints": 2},
    "every third": {**SAFETY, "keep_every": "3st"},
    "fixed": {**SAFETY, "fixed_steps": [2, 3]},
    "every fourth": {**SAFETY, "save_interval": "4st"},
    "for safety": SAFETY,
    "all without a rule": {**SAFETY, "remove": "all_without_rule"},
}


@pytest.mark.parametrize("rule", RULES)
def test_whatever_is_removed_the_others_stay_whole(tmp_path: Path, rule: str) -> None:
    kept = fit(tmp_path, steps=7, **{"remove": "ephemeral_only", **RULES[rule]})
    steps = assert_sound(tmp_path, kept)
    assert steps[-1] == 7
    assert len(steps) < 7
    assert len(groups(tmp_path)) == 1, "written once, although its first checkpoint was removed"
    (count,) = {path.stat().st_nlink for path in tmp_path.glob(f"step*/{FROZEN}")}
    assert count == len(steps), "no link is left of those that were removed"


def test_a_failed_save_does_not_make_the_next_one_write_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_new = Disk.open_new

    def fail_step3(self: Disk, path: Path) -> int:
        if ".step3." in path.parent.name and path.name == "manifest.json":
            raise OSError(errno.EIO, "Input/output error")
        return open_new(self, path)

    monkeypatch.setattr(Disk, "open_new", fail_step3)
    kept = fit(tmp_path, on_save_error="warn")
    assert assert_sound(tmp_path, kept) == [1, 2, 4, 5]
    assert groups(tmp_path) == [[1, 2, 4, 5]]


@pytest.mark.parametrize("link_frozen", [True, False])
def test_a_resume_links_to_what_it_has_verified_and_ends_as_one_run(tmp_path: Path, link_frozen: bool) -> None:
    def run(folder: Path, *more: Callback, links: bool = link_frozen) -> tuple[Any, list[Any]]:
        log = ListLogger()
        made = trainer(
            Tuned,
            callbacks={str(number): callback for number, callback in enumerate(more)},
            settings={"max_duration": 5, "log_interval": 1},
            optimizer=lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01),
            checkpoint=CheckpointerCallback(folder, save_interval=1, remove="never", link_frozen=links),
            loggers=[log],
            run_dir=folder,
        )
        made.fit(loader())
        return made, log.stream

    straight, _ = run(tmp_path / "straight", links=False)
    assert groups(tmp_path / "straight") == []
    run(tmp_path / "parts", StopAt(2))
    resumed, _ = run(tmp_path / "parts")
    assert resumed.loaded_step == 2
    assert same(everything(straight), everything(resumed)) == []
    assert groups(tmp_path / "parts") == ([[0, 1, 2, 3, 4, 5]] if link_frozen else [])
    for step in range(6):
        one, other = (Checkpointer().read(tmp_path / part / f"step{step}") for part in ("straight", "parts"))
        assert same(one["model"], other["model"]) == []
        assert same(one["optimizer"], other["optimizer"]) == []


def test_what_was_only_read_is_fsynced_before_a_checkpoint_shares_it(tmp_path: Path) -> None:
    fit(tmp_path, steps=1)

    def verified(disk: Disk) -> tuple[LocalStorage, FileEntry]:
        # By another process, for all that the disk of this one knows.
        storage = LocalStorage(tmp_path, disk=disk)
        entry = Catalog(storage).entry("step1")
        assert entry.manifest is not None
        assert Catalog(storage).why_damaged(entry) is None
        return storage, entry.manifest.files[FROZEN]

    disk = FaultyDisk()
    storage, frozen = verified(disk)
    with storage.writing("step2") as folder:
        assert folder.link(FROZEN, frozen)
        (fsync,) = (number for number, done in enumerate(disk.operations, 1) if done == "fsync file")
        assert disk.operations[fsync:][0] == f"link {FROZEN}"
        (folder.path / FROZEN).unlink()
        assert folder.link(FROZEN, frozen)
        assert disk.operations.count("fsync file") == 1, "once"
    storage, frozen = verified(FaultyDisk(at=fsync))
    with storage.writing("step2") as folder:
        # The fsync of the file fails.
        assert not folder.link(FROZEN, frozen)


def test_the_space_of_a_removed_checkpoint_is_not_free_if_another_shares_it(tmp_path: Path) -> None:
    fit(tmp_path, steps=2)
    later: list[Callable[[], object]] = []
    storage = LocalStorage(tmp_path, later=later.append)
    assert storage.remove("step1")
    assert storage.removed_bytes() < WIDTH * WIDTH * 4
    later[0]()
    assert storage.remove("step2")
    assert storage.removed_bytes() > WIDTH * WIDTH * 4


@pytest.mark.parametrize("format", [CheckpointFormat.torch_file, CheckpointFormat.archive])
def test_other_formats_write_one_file_as_ever(tmp_path: Path, format: CheckpointFormat) -> None:
    pytest.importorskip("trainer_cli.addons.formats")
    keeps = fit(tmp_path, format=format, steps=2)
    assert groups(tmp_path) == []
    assert same(keeps.weights[2], Checkpointer().read(tmp_path / "step2")["model"]) == []


def test_other_numbers_of_ranks_read_the_files_of_one_process(tmp_path: Path) -> None:
    kept = fit(tmp_path, steps=2)
    entry = Catalog.of(tmp_path).entry("step2")
    assert entry.manifest is not None
    with LocalStorage(tmp_path).reading("step2") as folder:
        for rank in (0, 1):
            tree = ShardedFormat(rank, 2).read(folder, entry.manifest, ["model"])
            assert same(kept.weights[2], tree["model"]) == []


def test_a_load_into_live_tensors_fills_them_from_both_files(tmp_path: Path) -> None:
    kept = fit(tmp_path, steps=2)
    live = {"model": Tuned().state_dict()}
    make_sync_checkpointer().load(tmp_path / "step2", live)
    assert same(kept.weights[2], live["model"]) == []


def test_small_frozen_tensors_get_no_file(tmp_path: Path) -> None:
    fit(tmp_path, lambda model: model.base.weight.requires_grad_(True), at=[1], steps=1)
    assert groups(tmp_path) == []


def test_copies_in_a_second_folder_share_a_file_there(tmp_path: Path) -> None:
    pytest.importorskip("trainer_cli.addons.stores")
    kept = fit(
        tmp_path / "run",
        callbacks={"wait": on(on_train_batch_start=_wait_for_copies)},
        copy_to={"folder": str(tmp_path / "copies"), "every": 1},
        save_async=False,
    )
    assert assert_sound(tmp_path / "copies", kept) == [1, 2, 3, 4, 5]
    assert groups(tmp_path / "copies") == [[1, 2, 3, 4, 5]]
    assert inodes(tmp_path / "copies")[1] != inodes(tmp_path / "run")[1], "a copy is one of the bytes"


def _wait_for_copies(trained: Any, *rest: Any) -> None:
    copies = trained.checkpoint.copies
    if copies is not None:
        copies.mirror.wait()
