"""Saving and loading state trees, with a Trainer and without."""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from small_parts import present
from states import same, small_state
from torch import nn

from trainer_cli import addon, latest_checkpoint, load_checkpoint, save_checkpoint
from trainer_cli.checkpoint.checkpointer import (
    AsyncCheckpointer,
    Checkpointer,
    CheckpointMetadata,
    CheckpointReader,
    SyncCheckpointer,
    make_async_checkpointer,
    make_sync_checkpointer,
)
from trainer_cli.checkpoint.save import CheckpointWriter, InFlightSave
from trainer_cli.checkpoint.snapshot import CopyStager, LiveStager, Stager
from trainer_cli.errors import CheckpointError, SaveError, UserError
from trainer_cli.format.sharded import TensorsFormat
from trainer_cli.manifest import Manifest, UnsavableState
from trainer_cli.policy.rules import CheckpointKind
from trainer_cli.storage import manifest_lock
from trainer_cli.storage.base import ReadableFolder
from trainer_cli.storage.disk import Disk
from trainer_cli.storage.local import LocalStorage
from trainer_cli.storage.open import open_storage


class Awaited(AsyncCheckpointer):
    """Raises a failed save where the other one does, so that both pass the same tests."""

    def save(self, *args: Any, **kwargs: Any) -> InFlightSave:
        saving = present(super().save(*args, **kwargs))
        saving.staged.result(500)
        saving.raise_failure()
        return saving


@pytest.fixture(
    params=[SyncCheckpointer, Awaited, lambda: Awaited(stager=CopyStager(lambda: 0))], ids=["sync", "async", "full"]
)
def checkpointer(request: pytest.FixtureRequest) -> Iterator[Checkpointer]:
    made = request.param()
    yield made
    made.close()


def test_a_state_comes_back_as_it_was(checkpointer: Checkpointer, tmp_path: Path) -> None:
    assert isinstance(checkpointer, Checkpointer)
    saving = checkpointer.save(small_state(3), tmp_path / "runs" / "step3")
    assert (saving is None) is isinstance(checkpointer, SyncCheckpointer)
    assert same(dict(checkpointer.load(tmp_path / "runs" / "step3")), small_state(3))
    checkpointer.close()
    assert same(dict(make_sync_checkpointer().load(str(tmp_path / "runs" / "step3"))), small_state(3))


def test_the_manifest_says_what_the_caller_said(checkpointer: Checkpointer, tmp_path: Path) -> None:
    facts = CheckpointMetadata(
        run_id="r", attempt=2, step=5, epoch=1, kind=CheckpointKind.ephemeral, reason="every 5 steps",
        finished="max_duration",
        metrics={"val/loss": math.inf}, finite=False, config_digest="sha256:x", target_packages=("mine",), world_size=1,
        versions={"trainer-cli": "1"}, files={"config.yaml": b"a: 1\n", "empty": b""},
    )  # fmt: skip
    checkpointer.save(small_state(), tmp_path / "step5", metadata=facts)
    manifest = checkpointer.manifest(tmp_path / "step5")
    for name in ("run_id", "attempt", "step", "epoch", "kind", "reason", "finished", "metrics", "finite",
                 "config_digest", "target_packages", "world_size"):  # fmt: skip
        assert getattr(manifest, name) == getattr(facts, name)
    assert manifest.versions["torch"] == torch.__version__
    assert manifest.versions["trainer-cli"] == "1"
    assert set(manifest.files) == {"rank0.safetensors", "rank0.json", "config.yaml", "empty"}
    assert manifest.aliases == {"rank0.safetensors": {"model/tied": "model/weight"}}
    assert set(os.listdir(tmp_path / "step5")) == {*manifest.files, "manifest.json"}
    assert (tmp_path / "step5" / "config.yaml").read_bytes() == b"a: 1\n"
    assert checkpointer.verify(tmp_path / "step5") == manifest


def test_no_name_has_to_follow_our_pattern(checkpointer: Checkpointer, tmp_path: Path) -> None:
    checkpointer.save({"a": 1}, tmp_path / "best model (new)")
    assert checkpointer.load(tmp_path / "best model (new)") == {"a": 1}


def test_a_saved_step_is_never_written_again(
    checkpointer: Checkpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    facts = CheckpointMetadata(run_id="r", step=5)
    checkpointer.save(small_state(5), tmp_path / "step5", metadata=facts)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "step5").iterdir()}
    checkpointer.save(small_state(6), tmp_path / "step5", metadata=facts, overwrite=False)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "step5").iterdir()} == before
    assert "step5 already exists, and is not written again" in caplog.text
    assert os.listdir(tmp_path) == ["step5"]


def test_a_step_whose_bytes_were_altered_is_quarantined_and_written_again(
    checkpointer: Checkpointer, tmp_path: Path
) -> None:
    facts = CheckpointMetadata(run_id="r", step=5, files={"config.yaml": b"seed: 1\n"})
    checkpointer.save(small_state(5), tmp_path / "step5", metadata=facts)
    # Of the same size: only the digest shows it.
    (tmp_path / "step5" / "config.yaml").write_bytes(b"seed: 2\n")
    checkpointer.save(small_state(5), tmp_path / "step5", metadata=facts, overwrite=False)
    assert checkpointer.verify(tmp_path / "step5").step == 5
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize(
    "facts", [CheckpointMetadata(run_id="other", step=5), CheckpointMetadata(run_id="r", step=6), None]
)
def test_a_checkpoint_in_the_way_is_refused_where_none_may_be_replaced(
    checkpointer: Checkpointer, tmp_path: Path, facts: CheckpointMetadata | None
) -> None:
    checkpointer.save(small_state(5), tmp_path / "step5", metadata=CheckpointMetadata(run_id="r", step=5))
    with pytest.raises(SaveError, match=r"another checkpoint is in the way.*step 5 of run r"):
        checkpointer.save(small_state(6), tmp_path / "step5", metadata=facts, overwrite=False)
    assert same(dict(checkpointer.load(tmp_path / "step5")), small_state(5))


def damage(path: Path) -> None:
    (path / "rank0.json").write_bytes(b"other")


def make_partial(path: Path) -> None:
    (path / "manifest.json").unlink()


def make_link(path: Path) -> None:
    path.rename(path.parent / "target")
    path.symlink_to("target")


@pytest.mark.parametrize("change", [lambda path: None, damage, make_partial, make_link])
@pytest.mark.parametrize("swaps", [True, False], ids=["swap", "two renames"])
@pytest.mark.parametrize("kind", [SyncCheckpointer, Awaited])
def test_a_path_that_is_saved_again_has_the_new_state(
    kind: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool, change: Callable[..., Any]
) -> None:
    if not swaps:
        monkeypatch.setattr(Disk, "exchange", refuse_swap)
    checkpointer = kind()
    checkpointer.save(small_state(5), tmp_path / "last")
    change(tmp_path / "last")
    for step in (6, 7):
        checkpointer.save(small_state(step), tmp_path / "last")
        assert same(dict(make_sync_checkpointer().load(tmp_path / "last")), small_state(step))
    checkpointer.close()
    visible = {name for name in os.listdir(tmp_path) if not name.startswith(".aside.")}
    assert visible == ({"last", "target"} if change is make_link else {"last"})
    if change is make_link:
        assert same(dict(make_sync_checkpointer().load(tmp_path / "target")), small_state(5))


def refuse_swap(disk: Disk, first: Path, second: Path) -> None:
    raise OSError(errno.EINVAL, "Invalid argument", str(first))


def test_a_pinned_checkpoint_is_not_replaced(checkpointer: Checkpointer, tmp_path: Path) -> None:
    checkpointer.save(small_state(5), tmp_path / "best")
    LocalStorage(tmp_path).pin("best", pinned=True)
    with pytest.raises(SaveError, match="is pinned, so it is not replaced"):
        checkpointer.save(small_state(6), tmp_path / "best")
    assert same(dict(checkpointer.load(tmp_path / "best")), small_state(5))


@pytest.mark.parametrize("swaps", [True, False], ids=["swap", "two renames"])
def test_who_loads_a_path_that_is_saved_again_gets_the_old_state_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool
) -> None:
    if not swaps:
        monkeypatch.setattr(Disk, "exchange", refuse_swap)
    writer, reader = make_async_checkpointer(), make_sync_checkpointer()
    state = {"step": 0, "weights": torch.zeros(1000)}
    present(writer.save(state, tmp_path / "last")).raise_failure()
    steps = [0]
    for step in range(1, 15):
        saving = writer.save({"step": step, "weights": torch.full((1000,), float(step))}, tmp_path / "last")
        while not present(saving).written.done():
            loaded = reader.load(tmp_path / "last")
            assert torch.equal(loaded["weights"], torch.full((1000,), float(loaded["step"])))
            steps.append(loaded["step"])
    writer.close()
    assert steps == sorted(steps)
    assert os.listdir(tmp_path) == ["last"]


def test_a_checkpoint_that_is_read_is_replaced_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_lock, "_READERS_S", 0.05)
    checkpointer = make_sync_checkpointer()
    checkpointer.save({"step": 1}, tmp_path / "last")
    with LocalStorage(tmp_path).reading("last"), pytest.raises(SaveError, match=r"being read.*It is in use: try again"):
        checkpointer.save({"step": 2}, tmp_path / "last")
    assert checkpointer.load(tmp_path / "last") == {"step": 1}
    checkpointer.save({"step": 3}, tmp_path / "last")
    assert checkpointer.load(tmp_path / "last") == {"step": 3}
    assert os.listdir(tmp_path) == ["last"]


def test_what_cannot_be_saved_leaves_nothing(checkpointer: Checkpointer, tmp_path: Path) -> None:
    with pytest.raises(UnsavableState, match="callbacks/x is a set"):
        checkpointer.save({"model": torch.ones(3), "callbacks": {"x": {1}}}, tmp_path / "step5")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_refused_with_its_owner_before_anything_is_written(
    checkpointer: Checkpointer, tmp_path: Path, layout: torch.layout
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about a prototype of torch
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    with pytest.raises(UnsavableState, match="model/x is a "):
        checkpointer.save({"model": {"x": nested}}, tmp_path / "step1")
    assert os.listdir(tmp_path) == []


class Talking:
    """A stager, writer and reader with arguments of their own, which note their calls and leave the work to the usual
    ones."""

    def __init__(self) -> None:
        self.stager, self.writer, self.reader = LiveStager(), CheckpointWriter(), CheckpointReader()
        self.calls: list[str] = []
        self.held_bytes = 0

    def stage(self, *args: Any, tag: str = "", **named: Any) -> Any:
        self.calls.append(f"stage {tag}")
        self.calls.append(f"staged with {sorted(named)}")
        return self.stager.stage(*args)

    def write(self, *args: Any, tag: str = "", level: int = 0, **named: Any) -> None:
        self.calls.append(f"write {tag} {level} {sorted(named)}")
        self.writer.write(*args, **{name: value for name, value in named.items() if name != "other"})

    def read(self, *args: Any, depth: int = 0, **named: Any) -> Any:
        self.calls.append(f"read {depth}")
        return self.reader.read(*args, **named)

    def close(self) -> None:
        self.calls.append("close")


@pytest.mark.parametrize("kind", [SyncCheckpointer, AsyncCheckpointer])
def test_parts_are_replaced_and_get_the_arguments_that_they_take(tmp_path: Path, kind: Callable[..., Any]) -> None:
    parts = Talking()
    checkpointer: Checkpointer = kind(stager=LiveStager(), writer=parts, reader=parts)
    checkpointer.save({"x": 3}, tmp_path / "step1", level=2)
    checkpointer.stager = cast("Stager", parts)
    checkpointer.save({"x": 3}, tmp_path / "step2", tag="a", other=1)
    assert checkpointer.load(tmp_path / "step1", depth=5) == {"x": 3}
    checkpointer.close()
    ours = "['before_commit', 'format', 'overwrite']"
    theirs = "['before_commit', 'format', 'other', 'overwrite']"
    staged = ["stage a", "staged with ['other']"]
    assert parts.calls == [f"write  2 {ours}", *staged, f"write a 0 {theirs}", "read 5", "close"]


class Doubling(CheckpointReader):
    """A reader that changes what it has read, with the arguments of `StateReader.read`."""

    def read(self, folder: Any, manifest: Any, only: Any = None, *, targets: Any = None, **more: Any) -> dict[str, Any]:
        tree = super().read(folder, manifest, only, targets=targets, **more)
        return {name: value * 2 for name, value in tree.items()}


def test_a_reader_of_a_subclass_has_the_saved_tensors_when_it_changes_them(tmp_path: Path) -> None:
    make_sync_checkpointer().save({"x": torch.arange(4096.0)}, tmp_path / "step1")
    live = {"x": torch.ones(4096)}
    SyncCheckpointer(reader=Doubling()).load(tmp_path / "step1", live)
    assert torch.equal(live["x"], torch.arange(4096.0) * 2)


@pytest.mark.parametrize("kind", [SyncCheckpointer, AsyncCheckpointer])
def test_an_argument_that_no_part_takes_is_refused_before_anything_is_written(
    tmp_path: Path, kind: type[SyncCheckpointer]
) -> None:
    checkpointer = kind()
    with pytest.raises(TypeError, match="'overwrit', which is none of its stager and writer"):
        checkpointer.save({"x": 3}, tmp_path / "step1", overwrit=False)
    assert os.listdir(tmp_path) == []
    with pytest.raises(TypeError, match="'foo', which is none of its reader"):
        checkpointer.load(tmp_path / "step1", foo=1)
    checkpointer.close()


def test_another_format_is_reported_apart(tmp_path: Path) -> None:
    class Foreign(TensorsFormat):
        name = "zarr"

        def read(self, folder: ReadableFolder, manifest: Manifest, *others: Any) -> dict[str, Any]:
            return {"foreign": 1}

    foreign = SyncCheckpointer(format=Foreign())
    foreign.save({}, tmp_path / "step1")
    assert foreign.load(tmp_path / "step1") == {"foreign": 1}
    with pytest.raises(CheckpointError, match="the format 'zarr' is unknown; known is 'tensors'"):
        make_sync_checkpointer().load(tmp_path / "step1")


class Other(TensorsFormat):
    name = "other"


def test_a_checkpoint_is_read_by_the_format_that_its_manifest_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sync_checkpointer().save({"a": 1}, tmp_path / "step1")
    other = make_sync_checkpointer(format=Other())
    assert other.load(tmp_path / "step1") == {"a": 1}
    other.save({"a": 2}, tmp_path / "step2")
    monkeypatch.setattr(
        addon, "_find_installed", lambda: {"more": addon.AddOn(parts={"format.other": f"{__name__}:Other"})}
    )
    assert make_sync_checkpointer().load(tmp_path / "step2") == {"a": 2}
    with pytest.raises(CheckpointError, match=r"'nothing' is unknown; known is 'tensors'.*, 'other'"):
        make_sync_checkpointer(format="nothing")


def test_a_place_with_an_unknown_scheme_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no storage for nosuch://"):
        open_storage("nosuch://bucket/run")
    assert open_storage(f"file://{tmp_path}").location("step1") == f"{tmp_path}/step1"


def test_a_checkpoint_that_is_loaded_cannot_be_removed_meanwhile(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    removed = []

    checkpointer = SyncCheckpointer(storage=lambda root: storage)
    checkpointer.save(small_state(), tmp_path / "step1")

    class Slow(TensorsFormat):
        def read(self, folder: ReadableFolder, manifest: Manifest, *others: Any) -> dict[str, Any]:
            removed.append(LocalStorage(tmp_path).remove("step1"))
            return super().read(folder, manifest, *others)

    checkpointer.reader = CheckpointReader(Slow())
    assert same(dict(checkpointer.load(tmp_path / "step1")), small_state())
    assert removed == [False]
    assert LocalStorage(tmp_path).remove("step1")


class Hook:
    """Records what is called around a commit, and what is on the disk then."""

    def __init__(self, error: OSError | None = None) -> None:
        self.calls: list[tuple[str, str, bool]] = []
        self.error = error

    def pre_commit(self, path: str) -> None:
        self.calls.append(("pre", Path(path).name, Path(path).exists()))
        if self.error is not None:
            raise self.error

    def post_commit(self, path: str) -> None:
        self.calls.append(("post", Path(path).name, (Path(path) / "manifest.json").is_file()))


@pytest.mark.parametrize("make", [make_sync_checkpointer, make_async_checkpointer])
def test_commit_hooks_are_called_before_and_after_the_commit(tmp_path: Path, make: Callable[..., Any]) -> None:
    hook = Hook()
    checkpointer = make(commit_hook=hook)
    for step in (1, 2):
        checkpointer.save({"x": torch.ones(3)}, tmp_path / f"step{step}")
    checkpointer.close()
    assert hook.calls == [
        ("pre", "step1", False), ("post", "step1", True), ("pre", "step2", False), ("post", "step2", True)
    ]  # fmt: skip


def test_a_commit_hook_that_fails_fails_the_save(tmp_path: Path) -> None:
    hook = Hook(OSError(5, "no barrier"))
    with pytest.raises(SaveError, match="no barrier"):
        make_sync_checkpointer(commit_hook=hook).save({"x": 1}, tmp_path / "step1")
    assert [name for name, *_ in hook.calls] == ["pre"]
    assert list(tmp_path.iterdir()) == []


def test_a_save_is_none_or_the_pair_of_its_futures(tmp_path: Path) -> None:
    assert make_sync_checkpointer().save({"x": 1}, tmp_path / "step1") is None
    checkpointer = make_async_checkpointer()
    saving = checkpointer.save({"x": 1}, tmp_path / "step2")
    staged, written = present(saving)
    assert isinstance(saving, tuple)
    assert (saving[0], saving[1], len(saving)) == (staged, written, 2)
    assert staged.done()
    assert written.result(timeout=500) is None
    assert (tmp_path / "step2/manifest.json").is_file()
    checkpointer.close()


@pytest.mark.parametrize("make", [make_sync_checkpointer, make_async_checkpointer])
def test_format_and_digest_are_those_that_were_set(tmp_path: Path, make: type) -> None:
    pytest.importorskip("trainer_cli.addons.formats")
    checkpointer = make(digest="sha256", format="torch_file")
    checkpointer.save({"x": torch.ones(2)}, tmp_path / "step1")
    checkpointer.close()
    manifest = make_sync_checkpointer().manifest(tmp_path / "step1")
    assert manifest.format == "torch_file"
    assert {entry.algorithm for entry in manifest.files.values()} == {"sha256"}


def test_small_tensors_take_little_space(tmp_path: Path) -> None:
    state = {f"scalar{number}": torch.tensor(float(number)) for number in range(3000)}
    make_sync_checkpointer().save(state, tmp_path / "step1")
    assert sum(path.stat().st_size for path in (tmp_path / "step1").iterdir()) < 1_000_000


# Saving and loading in a loop of one's own: everything or the model alone, and nothing unless all fits.


class Training:
    def __init__(self, seed: int = 0, width: int = 4) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)

    def train(self, steps: int = 2) -> list[float]:
        losses = []
        for step in range(steps):
            loss = self.model(torch.full((2, 3), float(step + 1))).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    @property
    def parts(self) -> tuple[nn.Module, Any, Any]:
        return self.model, self.optimizer, self.scheduler


def test_a_loaded_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    one, other = Training(), Training(seed=1)
    one.train()
    save_checkpoint(tmp_path / "step2", 7, *one.parts, best=0.25, history=[1, 2])
    assert load_checkpoint(latest_checkpoint(tmp_path), *other.parts) == (7, {"best": 0.25, "history": [1, 2]})
    assert other.train() == one.train()


def test_a_schedule_is_optional(tmp_path: Path) -> None:
    one, other = Training(), Training(seed=1)
    save_checkpoint(tmp_path / "step1", 1, one.model, one.optimizer)
    assert load_checkpoint(tmp_path / "step1", other.model, other.optimizer) == (1, {})
    with pytest.raises(CheckpointError, match=r"has no lr_scheduler .*To load the model alone, add finetune=True"):
        load_checkpoint(tmp_path / "step1", *other.parts)


def test_fine_tuning_loads_the_model_alone_from_epoch_0(tmp_path: Path) -> None:
    one, other = Training(), Training(seed=1)
    one.train()
    save_checkpoint(tmp_path / "step1", 3, *one.parts, note="x")
    assert load_checkpoint(tmp_path / "step1", *other.parts, finetune=True) == (0, {"note": "x"})
    assert all(torch.equal(*pair) for pair in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert not other.optimizer.state
    pytest.importorskip("trainer_cli.addons.formats")
    torch.save({"model": one.model.state_dict()}, tmp_path / "x.pt")
    assert load_checkpoint(tmp_path / "x.pt", Training(seed=2).model, finetune=True) == (0, {})
    with pytest.raises(UserError, match=r"only its weights can be loaded\. Add finetune=True"):
        load_checkpoint(tmp_path / "x.pt", other.model)


class Refusing(torch.optim.lr_scheduler.StepLR):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise ValueError("not mine")


@pytest.mark.parametrize(
    ("width", "schedule", "why"),
    [
        (5, None, r"0\.weight: has shape \(4, 3\) in this model, but \(5, 3\)"),
        (
            4,
            lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
            r"(?s)lr_scheduler +T_max: missing.*step_size: not in this schedule",
        ),
        (4, lambda optimizer: Refusing(optimizer, 1, gamma=0.5), "not mine"),
    ],
    ids=["a model of another width", "another schedule", "a schedule that refuses its state"],
)
def test_nothing_is_changed_unless_all_fits(tmp_path: Path, width: int, schedule: Any, why: str) -> None:
    save_checkpoint(tmp_path / "step1", 1, *Training(width=width).parts)
    other = Training(seed=1)
    before = [parameter.clone() for parameter in other.model.parameters()]
    own = other.scheduler if schedule is None else schedule(other.optimizer)
    with pytest.raises((UserError, ValueError), match=why):
        load_checkpoint(tmp_path / "step1", other.model, other.optimizer, own)
    assert all(torch.equal(*pair) for pair in zip(before, other.model.parameters(), strict=True))
    assert not other.optimizer.state


def test_a_model_with_more_layers_is_loaded_unless_strict(tmp_path: Path) -> None:
    one = Training()
    save_checkpoint(tmp_path / "step1", 1, *one.parts)
    more = nn.Sequential(*one.model, nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"2\.weight: missing in the checkpoint"):
        load_checkpoint(tmp_path / "step1", more, finetune=True)
    load_checkpoint(tmp_path / "step1", more, finetune=True, strict=False)


def test_the_cure_of_weights_that_do_not_fit_is_an_argument_that_helps(tmp_path: Path) -> None:
    one, other = Training(), Training(seed=1)
    save_checkpoint(tmp_path / "step2", 7, *one.parts)
    head = nn.Sequential(other.model[0], nn.Linear(4, 5))
    with pytest.raises(UserError, match=re.escape("add ignore_keys=['1.*'].")):
        load_checkpoint(tmp_path / "step2", head, finetune=True)
    load_checkpoint(tmp_path / "step2", head, finetune=True, ignore_keys=["1.*"])
    assert torch.equal(head.get_parameter("0.weight"), one.model.get_parameter("0.weight"))
    inner = nn.ModuleDict({"net": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))})
    with pytest.raises(UserError, match=re.escape("add key_mapping={'*': 'net.*'}.")):
        load_checkpoint(tmp_path / "step2", inner, finetune=True)
    load_checkpoint(tmp_path / "step2", inner, finetune=True, key_mapping={"*": "net.*"})
    assert torch.equal(inner.get_parameter("net.1.weight"), one.model.get_parameter("1.weight"))
    with pytest.raises(UserError, match=r"Nothing was loaded\. To load the model alone, add finetune=True\."):
        load_checkpoint(tmp_path / "step2", other.model, torch.optim.SGD(other.model.parameters(), lr=0.1))


def test_what_is_not_there_or_cannot_be_saved_is_named(tmp_path: Path) -> None:
    one = Training()
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_checkpoint(tmp_path / "step9", one.model)
    with pytest.raises(UserError, match="thing"):
        save_checkpoint(tmp_path / "step3", 1, one.model, one.optimizer, thing=object())


@pytest.mark.parametrize(
    ("kept", "lacking"),
    [
        ((), "model and no epoch and no optimizer and no lr_scheduler"),
        (("model", "epoch", "optimizer"), "lr_scheduler"),
        (("epoch", "lr_scheduler", "optimizer"), "model"),
        (("model", "epoch", "lr_scheduler"), "optimizer"),
        (("model", "lr_scheduler", "optimizer"), "epoch"),
    ],
)
def test_what_a_checkpoint_lacks_is_named(tmp_path: Path, kept: tuple[str, ...], lacking: str) -> None:
    save_checkpoint(tmp_path / "step1", 1, *Training().parts)
    whole = SyncCheckpointer().read(tmp_path / "step1")
    SyncCheckpointer().save({name: whole[name] for name in kept}, tmp_path / "step2")
    with pytest.raises(CheckpointError, match=rf"the checkpoint has no {lacking} \("):
        load_checkpoint(tmp_path / "step2", *Training(seed=1).parts)


@pytest.mark.parametrize("with_schedule", [True, False])
def test_a_rate_that_the_schedule_moved_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, with_schedule: bool
) -> None:
    def parts() -> tuple[Any, ...]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)

    model, optimizer, schedule = parts()
    optimizer.step()
    schedule.step()
    save_checkpoint(tmp_path / "step1", 1, model, optimizer, schedule)
    load_checkpoint(tmp_path / "step1", *parts()[: 3 if with_schedule else 2])
    assert ("lr is 0.01" in caplog.text) is not with_schedule
