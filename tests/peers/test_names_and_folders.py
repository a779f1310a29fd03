"""Names of checkpoints and archives, and folders that hold other things."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from user_loaders import Sum, batches, make_trainer, same_weights, weights

from trainer_cli import (
    Callback,
    CheckpointerCallback,
    CheckpointError,
    Trainer,
    load_checkpoint,
    save_checkpoint,
)
from trainer_cli.commands.command_line import main


def test_a_name_has_the_run_the_world_size_and_the_counts(folder: Path) -> None:
    name = "{run_name}-step{step}-e{epoch}-b{batch}-s{samples}-t{tokens}-w{world_size}"
    checkpoint = CheckpointerCallback(folder / "kept", name=name, save_interval=None)
    make_trainer(7, checkpoint=checkpoint, name="awesome").fit(batches(10, 2))
    assert (folder / "kept/awesome-step7-e1-b2-s14-t56-w1/manifest.json").is_file()


def export(checkpoint: Path, output: Path) -> int:
    return main(["ckpt", "export", str(checkpoint), "--format", "archive", "--output", str(output)])


def save_small(path: Path) -> Sum:
    model = Sum()
    save_checkpoint(path, 1, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


@pytest.mark.parametrize("name", ["x.tar", "x.tgz", "x.tar.gz", "x.tar.bz2", "x.tar.xz", "x.tar.lzma"])
def test_names_of_archives_are_known(folder: Path, name: str) -> None:
    model = save_small(folder / "step1")
    assert export(folder / "step1", folder / name) == 0
    other = Sum()
    torch.nn.init.zeros_(other.linear.weight)
    load_checkpoint(folder / name, other, finetune=True)
    assert same_weights(weights(model), weights(other))


@pytest.mark.parametrize("name", ["x.y", "tar", "x.tar.unknown"])
def test_names_without_the_ending_are_no_archives(folder: Path, name: str) -> None:
    save_small(folder / "step1")
    assert export(folder / "step1", folder / name) == 2
    assert not (folder / name).exists()
    (folder / name).write_bytes(b"some text")
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(folder / name, Sum(), finetune=True)


def test_an_archive_is_read_under_any_name(folder: Path) -> None:
    save_small(folder / "step1")
    assert export(folder / "step1", folder / "x.tar.foo") == 2
    assert export(folder / "step1", folder / "right.tar.gz") == 0
    shutil.copy(folder / "right.tar.gz", folder / "x.tar.foo")
    assert load_checkpoint(folder / "x.tar.foo", Sum(), finetune=True) == (0, {})


@pytest.mark.parametrize("kind", ["file", "folder", "checkpoint"])
def test_foreign_things_in_the_folder_stay(folder: Path, kind: str) -> None:
    """The removal of old checkpoints leaves alone what is not of the run."""
    kept = folder / "kept"
    kept.mkdir()
    if kind == "file":
        (kept / "other").write_text("mine")
    elif kind == "folder":
        (kept / "other/below").mkdir(parents=True)
    else:
        save_small(kept / "step2-other")
    before = set(kept.rglob("*"))
    made = make_trainer(3, checkpoint=CheckpointerCallback(kept, save_interval=1, max_checkpoints=1))
    made.fit(batches())
    assert made.progress.step == 3
    assert set(kept.rglob("*")) - set((kept / "step3").rglob("*")) == before | {kept / "step3"}


def test_a_run_removes_no_checkpoint_of_another(folder: Path) -> None:
    class SavesToo(Callback):
        def on_after_optimizer_step(self, trainer: Trainer, model: Any, optimizer: Any) -> None:
            make_trainer().save_checkpoint(folder / f"other{trainer.progress.step}")

    made = make_trainer(3, SavesToo(), checkpoint=CheckpointerCallback(folder, save_interval=1, max_checkpoints=1))
    made.fit(batches())
    assert len(list(folder.glob("other*/manifest.json"))) == 3
    assert [path.name for path in folder.glob("step*")] == ["step3"]


@pytest.mark.parametrize("override", ["loop.max_duration=90", "checkpoint.save_interval=2"])
def test_another_runs_checkpoints_are_refused_at_the_start(folder: Path, override: str) -> None:
    make_trainer(2, checkpoint=CheckpointerCallback(folder / "shared")).fit(batches())
    before = sorted(folder.rglob("*"))
    assert main(["fit", "+experiment=digits_mlp", "name=other", "checkpoint.folder=shared", override]) == 4
    assert sorted(folder.rglob("*")) == before


def test_one_folder_for_all_jobs_of_a_sweep_is_refused_at_the_start(folder: Path) -> None:
    assert main(["fit", "+experiment=digits_mlp", "-m", "seed=1,2", "checkpoint.folder=shared"]) == 2
    assert list(folder.iterdir()) == []
