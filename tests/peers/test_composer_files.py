"""The claims of Composer's tests of files: names of checkpoints and archives, and folders that hold other things."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_claims import Claim, claims, each, try_claim
from peer_runs import Sum, batches, make_trainer, same_weights, weights

from trainer_cli import (
    Callback,
    CheckpointerCallback,
    CheckpointError,
    ConfigError,
    Trainer,
    load_checkpoint,
    save_checkpoint,
)
from trainer_cli.commands.main import main


def check_variables(folder: Path) -> None:
    name = "{run_name}-step{step}-e{epoch}-b{batch}-s{samples}-t{tokens}-w{world_size}"
    checkpoint = CheckpointerCallback(folder / "kept", name=name, save_interval=None)
    make_trainer(7, checkpoint=checkpoint, name="awesome").fit(batches(10, 2))
    assert (folder / "kept/awesome-step7-e1-b2-s14-t56-w1/manifest.json").is_file()


def check_unknown_variable(folder: Path, variable: str) -> None:
    with pytest.raises(ConfigError, match=rf"there is no \{{{variable}\}}; there are \{{step\}}, \{{epoch\}}"):
        CheckpointerCallback(folder, name=f"step{{step}}-{{{variable}}}")


def export(checkpoint: Path, output: Path) -> int:
    return main(["ckpt", "export", str(checkpoint), "--format", "archive", "--output", str(output)])


def save_small(path: Path) -> Sum:
    model = Sum()
    save_checkpoint(path, 1, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def check_archive(folder: Path, name: str) -> None:
    model = save_small(folder / "step1")
    assert export(folder / "step1", folder / name) == 0
    other = Sum()
    torch.nn.init.zeros_(other.linear.weight)
    load_checkpoint(folder / name, other, finetune=True)
    assert same_weights(weights(model), weights(other))


def check_no_archive(folder: Path, name: str) -> None:
    save_small(folder / "step1")
    assert export(folder / "step1", folder / name) == 2
    assert not (folder / name).exists()
    (folder / name).write_bytes(b"some text")
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(folder / name, Sum(), finetune=True)


def check_archive_of_another_name(folder: Path, name: str) -> None:
    check_archive(folder, "right.tar.gz")
    assert export(folder / "step1", folder / name) == 2
    shutil.copy(folder / "right.tar.gz", folder / name)
    assert load_checkpoint(folder / name, Sum(), finetune=True) == (0, {})


def check_foreign_things_stay(folder: Path, kind: str) -> None:
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


def check_other_run_keeps_its_checkpoints(folder: Path) -> None:
    class SavesToo(Callback):
        def on_after_optimizer_step(self, trainer: Trainer, model: Any, optimizer: Any) -> None:
            make_trainer().save_checkpoint(folder / f"other{trainer.progress.step}")

    made = make_trainer(3, SavesToo(), checkpoint=CheckpointerCallback(folder, save_interval=1, max_checkpoints=1))
    made.fit(batches())
    assert len(list(folder.glob("other*/manifest.json"))) == 3
    assert [path.name for path in folder.glob("step*")] == ["step3"]


def check_other_run_is_refused(folder: Path, *overrides: str) -> None:
    make_trainer(2, checkpoint=CheckpointerCallback(folder / "shared")).fit(batches())
    before = sorted(folder.rglob("*"))
    assert main(["fit", "+experiment=digits_mlp", "name=other", "checkpoint.folder=shared", *overrides]) == 4
    assert sorted(folder.rglob("*")) == before


def check_folder_of_a_sweep_is_refused(folder: Path) -> None:
    assert main(["fit", "+experiment=digits_mlp", "-m", "seed=1,2", "checkpoint.folder=shared"]) == 2
    assert list(folder.iterdir()) == []


SHARED = "test_file_helpers: test_ensure_folder_has_no_conflicting_files"
IS_TAR = "test_file_helpers: test_is_tar"

CLAIMS: list[Claim] = [
    *claims(
        IS_TAR,
        check_archive,
        {
            f"{name} is an archive": (name,)
            for name in ("x.tar", "x.tgz", "x.tar.gz", "x.tar.bz2", "x.tar.xz", "x.tar.lzma")
        },
    ),
    *claims(
        IS_TAR,
        check_archive_of_another_name,
        {"x.tar.foo is an archive": ("x.tar.foo",)},
        difference="An archive is written under a known ending alone, but is read under any name, by its content.",
    ),
    *claims(IS_TAR, check_no_archive, {f"{name} is no archive": (name,) for name in ("x.y", "tar")}),
    *claims(
        "test_file_helpers: test_format_name_with_dist_and_time",
        check_variables,
        {"a name has the run's name, the number of processes, and the counts of the training": ()},
    ),
    *claims(
        "test_file_helpers: test_format_name_with_dist",
        check_unknown_variable,
        {
            f"a name may have {{{variable}}}": (variable,)
            for variable in (
                "batch_in_epoch", "extra", "local_rank", "local_world_size", "node_rank", "rank", "total_wct",
            )
        },
        difference="Refused with the list of variables: all ranks save one checkpoint; its manifest has the counts.",
    ),
    *claims(
        "test_file_helpers: test_ensure_folder_is_empty",
        check_foreign_things_stay,
        {
            f"a run saves in a folder that holds a {kind} of another origin, which stays": (kind,)
            for kind in ("file", "folder", "checkpoint")
        },
    ),
    *claims(
        SHARED,
        check_other_run_is_refused,
        {
            "another run's checkpoints of other steps are refused at the start": ("loop.max_duration=90",),
            "another run's checkpoints of equal steps are refused at the start": ("checkpoint.save_interval=2",),
        },
    ),
    *claims(
        SHARED,
        check_other_run_keeps_its_checkpoints,
        {"the removal of one run's old checkpoints removes none of another run": ()},
    ),
    *claims(
        SHARED, check_folder_of_a_sweep_is_refused, {"one folder for all jobs of a sweep is refused at the start": ()}
    ),
]  # fmt: skip


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
