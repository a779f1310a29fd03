"""Checkpoints found on the disk, by step, epoch and suffix."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thread_ranks import ThreadGroup, on_ranks

from trainer_cli import Trainer
from trainer_cli.catalog.find import checkpoint_path, checkpoint_pattern, expanded, latest_checkpoint
from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, make_sync_checkpointer
from trainer_cli.checkpoint.without_trainer import load_checkpoint, save_checkpoint
from trainer_cli.commands.command_line import main
from trainer_cli.errors import CheckpointError, SaveError, UserError
from trainer_cli.selection.patterns import select, select_one
from trainer_cli.storage.disk import Disk
from trainer_cli.storage.local import LocalStorage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "checkpoints"
    saver = make_sync_checkpointer()
    for name, step, epoch in (
        ("step9", 9, 0), ("step10", 10, 1), ("step100", 100, 1), ("step200-ema", 200, 2), ("ep1-ba7", 57, 1),
    ):  # fmt: skip
        saver.save({"w": torch.zeros(2)}, root / name, metadata=CheckpointMetadata(run_id="r", step=step, epoch=epoch))
    (root / "step300").mkdir()
    (root / "notes").mkdir()
    saver.save({"w": torch.zeros(2)}, root / "step400", metadata=CheckpointMetadata(run_id="r", step=400, epoch=4))
    os.truncate(root / "step400" / "rank0.safetensors", 9)
    return root


def test_the_latest_is_the_numerically_newest_valid_one(folder: Path) -> None:
    assert latest_checkpoint(folder) == folder / "step100"
    assert latest_checkpoint(folder, suffix="ema").name == "step200-ema"


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ({"step": 10}, "step10"),
        ({"step": 57}, "ep1-ba7"),
        ({"step": 200, "suffix": "ema"}, "step200-ema"),
        ({"epoch": 1}, "step100"),
        ({"epoch": 0}, "step9"),
    ],
)
def test_a_checkpoint_is_found_by_what_it_says_of_itself(folder: Path, wanted: dict[str, Any], name: str) -> None:
    assert checkpoint_path(folder, **wanted) == folder / name


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"step": 300}, "no valid checkpoint of step 300 in"),
        ({"step": 400}, "rank0.safetensors has 9 bytes"),
        ({"epoch": 7}, "no valid checkpoint of epoch 7 in"),
        ({"step": 10, "suffix": "ema"}, "with suffix 'ema'"),
    ],
)
def test_where_there_is_none_it_says_where_it_looked(folder: Path, wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(FileNotFoundError) as error:
        checkpoint_path(folder, **wanted)
    assert said in str(error.value)
    assert str(folder) in str(error.value)


def test_an_empty_suffix_is_none(folder: Path) -> None:
    assert latest_checkpoint(folder, "") == latest_checkpoint(folder)
    assert checkpoint_path(folder, step=10, suffix="") == folder / "step10"
    assert checkpoint_pattern("") == checkpoint_pattern()


def test_a_missing_suffix_says_what_is_there(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"with suffix 'zz' .* it holds .*: another suffix"):
        latest_checkpoint(folder, "zz")
    for name in ("step9", "step10", "step100", "ep1-ba7"):
        shutil.rmtree(folder / name)
    with pytest.raises(FileNotFoundError, match=r"it holds .*step200-ema: another suffix"):
        latest_checkpoint(folder)


def test_the_path_of_a_checkpoint_that_is_still_to_be_saved_can_be_asked_for(folder: Path) -> None:
    assert checkpoint_path(folder, step=77, must_exist=False) == folder / "step77"
    assert checkpoint_path(folder, step=77, suffix="ema", must_exist=False) == folder / "step77-ema"
    assert checkpoint_path(folder, step=57, must_exist=False) == folder / "ep1-ba7"
    assert checkpoint_path(folder, epoch=1, must_exist=False) == folder / "step100"
    path = checkpoint_path(folder, epoch=7, must_exist=False)
    assert path == folder / "epoch7"
    make_sync_checkpointer().save({"w": 1}, path, metadata=CheckpointMetadata(epoch=7))
    assert checkpoint_path(folder, epoch=7) == path
    assert checkpoint_path(folder, epoch=8, suffix="ema", must_exist=False) == folder / "epoch8-ema"


def test_a_folder_that_is_not_there_and_an_unclear_question_are_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        latest_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="either step or epoch"):
        checkpoint_path(tmp_path)


def test_the_pattern_fits_the_usual_names(folder: Path) -> None:
    saver = make_sync_checkpointer()
    for name in ("step20-rank0", "step20-big-ema", "step20-e[m]a", "step20"):
        saver.save({"w": 1}, folder / name)
    suffixes = {
        None: {"step9", "step10", "step20", "step100"}, "ema": {"step200-ema"}, "rank0": {"step20-rank0"},
        "e[m]a": {"step20-e[m]a"},
    }  # fmt: skip
    for suffix, names in suffixes.items():
        assert {path.name for path in expanded(folder / checkpoint_pattern(suffix))} == names


@pytest.mark.parametrize(
    ("saved", "suffix", "newest"),
    [
        (["step9", "step10", "step100"], None, "step100"),
        (["step0009", "step10", "step008"], None, "step10"),
        (["step10", "step10-ema", "step10-ema2"], None, "step10"),
        (["step9-ema", "step10-ema", "step0100-raw"], "ema", "step10-ema"),
        (["step9", "step10-ema"], None, "step9"),
        (["step9", "step10-rank0", "step10-v2"], None, "step9"),
        (["step9-ema", "step10-big-ema"], "ema", "step9-ema"),
        (["ep1-ba9", "ep1-ba20"], None, "ep1-ba20"),
        (["digits-step99", "digits-step100"], None, "digits-step100"),
        (["ckpt9", "ckpt10", "ckpt008"], None, "ckpt10"),
        (["step5-rank0", "step6-rank0", "step7-rank1"], "rank{rank}", "step6-rank0"),
    ],
)
def test_the_newest_by_number_with_any_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: list[str], suffix: str | None, newest: str
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    saver = make_sync_checkpointer()
    for name in saved:
        saver.save({"w": 1}, tmp_path / name)
    assert latest_checkpoint(tmp_path, suffix).name == newest


def test_copies_and_what_only_resembles_a_checkpoint_are_never_found(folder: Path) -> None:
    for name in ("step10.bak", "step-100.backup", "step10-ema.tmp", "step200-ema.old"):
        shutil.copytree(folder / "step200-ema", folder / name)
    (folder / "step999.txt").touch()
    assert latest_checkpoint(folder).name == "step100"
    assert latest_checkpoint(folder, "ema").name == "step200-ema"
    assert checkpoint_path(folder, step=200, suffix="ema").name == "step200-ema"


def test_each_rank_finds_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 3):
        make_sync_checkpointer().save({"w": rank}, tmp_path / f"rank{rank}" / "step1")
    for environment, rank in (({}, 0), ({"RANK": "3"}, 3)):
        monkeypatch.delenv("RANK", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert latest_checkpoint(tmp_path / "rank{rank}") == tmp_path / f"rank{rank}" / "step1"
        assert checkpoint_path(str(tmp_path / "rank{rank}"), step=1).parent.name == f"rank{rank}"


@pytest.mark.parametrize("door", ["load", "read", "verify", "load_checkpoint", "validate_all", "ckpt=", "archive"])
def test_the_ranks_are_filled_in_at_every_door(door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("RANK", "2")
    model = torch.nn.Linear(2, 1)
    save_checkpoint(tmp_path / "step1-2", 1, model, torch.optim.SGD(model.parameters(), lr=0.1))
    path = tmp_path / "step1-{rank}"
    checkpointer = make_sync_checkpointer()
    match door:
        case "load" | "read":
            assert torch.equal(getattr(checkpointer, door)(path)["model"]["bias"], model.bias)
        case "verify":
            assert checkpointer.verify(path).step == 1
        case "load_checkpoint":
            assert load_checkpoint(path, model, finetune=True)[0] == 0
        case "validate_all":
            assert expanded(path) == [tmp_path / "step1-2"]
        case "ckpt=":
            assert select_one(str(path)) == tmp_path / "step1-2"
        case "archive":
            archives = pytest.importorskip("trainer_cli.addons.formats.whole_archive")
            archives.write_archive(tmp_path / "step1-2", tmp_path / "a2.tar")
            assert checkpointer.load(tmp_path / "a{rank}.tar")["epoch"] == 1


def _save_at(door: str, path: Path, folder: Path) -> object:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    match door:
        case "Checkpointer.save":
            return make_sync_checkpointer().save({"w": 1}, path, metadata=CheckpointMetadata(step=7, epoch=2))
        case "save_checkpoint":
            save_checkpoint(path, 2, model, optimizer)
            return None
        case "Trainer.save_checkpoint":
            return Trainer(model=model, optimizer=optimizer, name="mine", device="cpu").save_checkpoint(path)
        case "export":
            save_checkpoint(folder / "step7", 2, model, optimizer)
            return main(["ckpt", "export", str(folder / "step7"), "-o", str(path), "--format", "safetensors"])
        case "archive":
            save_checkpoint(folder / "step7", 2, model, optimizer)
            return main(["ckpt", "export", str(folder / "step7"), "-o", str(path), "--format", "archive"])
        case _:
            save_checkpoint(folder / "step7", 2, model, optimizer)
            return main(["ckpt", "strip", str(folder / "step7"), "-o", str(path)])


@pytest.mark.parametrize(
    ("door", "named", "filled"),
    [
        ("Checkpointer.save", "a{rank}-{local_rank}-{node_rank}", "a2-1-0"),
        ("Checkpointer.save", "a{step:04d}-{epoch}-{rank}", "a0007-2-2"),
        ("save_checkpoint", "r{rank}/epoch{epoch}", "r2/epoch2"),
        ("Trainer.save_checkpoint", "{run_name}-{step}-{epoch}-{batch}-{world_size}-r{rank}", "mine-0-0-0-1-r2"),
        ("export", "w{step}-{rank}.safetensors", "w7-2.safetensors"),
        ("archive", "w{epoch}-{rank}.tar", "w2-2.tar"),
        ("strip", "s{step}-{rank}", "s7-2"),
    ],
)
def test_names_are_filled_in_at_every_door_of_saves_and_unknown_ones_refused(
    door: str, named: str, filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name, value in {"RANK": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    # A folder that exists is meant as it is written.
    (tmp_path / "as {written}").mkdir()
    for folder in (tmp_path, tmp_path / "as {written}"):
        _save_at(door, folder / named, tmp_path / "source")
        assert (folder / filled).exists()
        shutil.rmtree(tmp_path / "source", ignore_errors=True)
    try:
        assert _save_at(door, tmp_path / "x-{rnak}", tmp_path / "source") == 2
        message = capsys.readouterr().err
    except UserError as error:
        message = str(error)
    message = " ".join(message.split())
    assert re.search(r"x-\{rnak\} has \{rnak\}, and there is no such variable here.* There are \{rank\}, ", message)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("x")]


@pytest.mark.parametrize("find", [latest_checkpoint, expanded, make_sync_checkpointer().load, select_one])
def test_an_unknown_variable_of_a_path_to_load_is_refused(find: Any, tmp_path: Path) -> None:
    make_sync_checkpointer().save({"w": 1}, tmp_path / "a" / "step1")
    with pytest.raises(UserError, match=r"has \{rnk\}, and there is no such variable here"):
        find(str(tmp_path / "{rnk}" / "step1"))
    (tmp_path / "{rnk}").mkdir()
    with pytest.raises(CheckpointError):
        find(str(tmp_path / "{rnk}" / "step1"))


@pytest.mark.parametrize("find", [lambda path: select([path]).paths, expanded])
@pytest.mark.parametrize(
    ("named", "matched"),
    [
        ("lr {b}/step1", ["lr {b}/step1"]), ("lr*{b}/step*", ["lr {b}/step1", "lr {b}/step2"]),
        ("l{r,x} {b}/step[12]", ["lr {b}/step1", "lr {b}/step2"]), ("lr {b}/{step2,step9}", ["lr {b}/step2"]),
        ("{rank}/step1", ["{rank}/step1"]), ("r{rank}/step1", ["r3/step1"]),
        ("r{rank}*/step1", ["r3/step1", "r3 {b}/step1"]),
    ],
)  # fmt: skip
def test_a_path_to_load_may_hold_braces_where_they_exist(
    named: str, matched: list[str], find: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    for path in ("lr {b}/step1", "lr {b}/step2", "{rank}/step1", "r3/step1", "r3 {b}/step1"):
        make_sync_checkpointer().save({"w": 1}, tmp_path / "made" / path.replace("{", "(").replace("}", ")"))
    for made in (tmp_path / "made").iterdir():
        made.rename(tmp_path / made.name.replace("(", "{").replace(")", "}"))
    assert sorted(find(str(tmp_path / named))) == [tmp_path / path for path in matched]


@pytest.mark.parametrize("name", ["rank", "local_rank", "node_rank"])
def test_ranks_that_save_together_have_one_path(name: str, tmp_path: Path) -> None:
    def save(group: ThreadGroup) -> None:
        make_sync_checkpointer(group=group).save({"w": 1}, tmp_path / f"a-{{{name}}}")

    for error in on_ranks(2, save):
        assert isinstance(error, UserError)
        assert f"has {{{name}}}, and 2 ranks save one checkpoint together" in str(error)
    assert list(tmp_path.iterdir()) == []


class NoSwap(Disk):
    def exchange(self, first: Path, second: Path) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


@pytest.mark.parametrize("disk", [Disk, NoSwap])
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_two_ranks_that_save_one_checkpoint_without_a_group_are_refused(
    when: str, there: bool, disk: type[Disk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last"
    if there:
        make_sync_checkpointer().save({"by": "an earlier program"}, path)
    launch = {"WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)

    def save_as(rank: int, pre_commit: Callable[[str], None] = lambda path: None) -> None:
        monkeypatch.setenv("RANK", str(rank))
        hook = SimpleNamespace(pre_commit=pre_commit, post_commit=lambda path: None)
        storage = partial(LocalStorage, disk=disk(), run_id=f"r{rank}")
        make_sync_checkpointer(commit_hook=hook, storage=storage).save({"by": rank}, path)

    if when == "before":
        save_as(0)
    meanwhile = (lambda path: None) if when == "before" else (lambda path: save_as(0))
    with pytest.raises(SaveError, match=r"rank 1 of 2 would replace what rank 0 of 2 of the same launch has saved"):
        save_as(1, meanwhile)
    assert dict(make_sync_checkpointer().load(path)) == {"by": 0}
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]
    # The same rank, and another launch, replace it.
    save_as(0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    save_as(1)
    assert dict(make_sync_checkpointer().load(path)) == {"by": 1}
