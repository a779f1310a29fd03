"""The claims of Lightning's tests about names and links of checkpoints, and what is saved after exceptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from small_runs import FailIn, Net, fit, make_trainer, saved
from torch import nn

from trainer_cli import (
    Callback,
    CheckpointerCallback,
    ConfigError,
    LoadOptions,
    Trainer,
    latest_checkpoint,
)

IN_FIT = ("on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward",
          "on_before_optimizer_step", "on_before_optimizer_zero_grad", "on_train_start", "on_train_end",
          "on_validate_start", "on_validate_end", "on_validate_batch_start", "on_validate_batch_end",
          "on_fit_end")  # fmt: skip


@pytest.mark.parametrize("what", ["newest", "loaded", "relative"])
def test_a_link_points_at_the_newest_checkpoint(folder: Path, what: str) -> None:
    fit(folder, save={"save_interval": 1, "latest_link": True})
    link = folder / "checkpoints" / "latest"
    if what == "newest":
        assert link.is_symlink()
        assert link.resolve().name == "step4"
    elif what == "relative":
        assert str(link.readlink()) == "step4"
    else:
        trainer = make_trainer()
        trainer.load_checkpoint(link)
        assert trainer.progress.step == 4


@pytest.mark.parametrize("what", ["file", "link"])
def test_what_is_in_the_links_place_is_replaced(folder: Path, what: str) -> None:
    (folder / "checkpoints").mkdir()
    link = folder / "checkpoints" / "latest"
    (folder / "elsewhere").mkdir()
    if what == "file":
        link.touch()
    else:
        link.symlink_to(folder / "elsewhere")
    fit(folder, save={"latest_link": True})
    assert str(link.readlink()) == "step4"


@pytest.mark.parametrize(
    ("save", "names"),
    [
        ({"name": "ep{epoch}-st{step}"}, ["ep0-st2", "ep1-st4", "ep1-st6"]),
        ({"name": "{step:03d}"}, ["002", "004", "006"]),
        ({"suffix": "x"}, ["step2-x", "step4-x", "step6-x"]),
        ({"name": "{run_name}-{step}"}, ["default-2", "default-4", "default-6"]),
        ({"name": "s{step}b{batch}n{samples}"}, ["s2b2n2", "s4b0n4", "s6b2n6"]),
        ({"name": "step{step}.tpkc"}, ["step2.tpkc", "step4.tpkc", "step6.tpkc"]),
    ],
)
def test_names_have_counts(folder: Path, save: Mapping[str, Any], names: Sequence[str]) -> None:
    fit(folder, save={"save_interval": 2, **save}, loop={"max_duration": 6})
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == names


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("{val/loss}-{step}", "Metrics are no part of a name"),
        ("step{step}-{val_loss:.2f}", "val_loss"),
        ("test", "alike"),
    ],
)
def test_names_without_a_count_are_refused(folder: Path, name: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        CheckpointerCallback(folder / "checkpoints", name=name)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("~/checkpoints", Path.home() / "checkpoints"),
        (Path("~/checkpoints"), Path.home() / "checkpoints"),
        ("./~/checkpoints", Path("~/checkpoints")),
    ],
)
def test_a_tilde_is_the_home(folder: Path, path: str | Path, expected: Path) -> None:
    assert CheckpointerCallback(path).folder == expected


@pytest.mark.parametrize("hook", list(IN_FIT))
def test_the_state_is_saved_after_an_exception_in_a_hook(folder: Path, hook: str) -> None:
    with pytest.raises(RuntimeError, match=f"{hook} failed"):
        fit(
            folder,
            save={"save_interval": 3, "save_final": False},
            loop={"eval_interval": 2},
            callbacks=[FailIn(hook, 2)],
        )
    (path,) = (folder / "checkpoints" / "exception").iterdir()
    trainer = make_trainer()
    trainer.load_checkpoint(path, LoadOptions(states=["model"]))
    assert trainer.progress.step == 0


@pytest.mark.parametrize(("training", "name"), [(True, "step2"), (False, "step4")])
def test_the_state_is_saved_after_an_exception_in_the_model(folder: Path, training: bool, name: str) -> None:
    class Failing(Net):
        calls = 0

        def forward(self, batch: Any) -> Any:
            self.calls += 1
            if self.training is training and self.calls > 2:
                raise RuntimeError("Trouble")
            return super().forward(batch)

    with pytest.raises(RuntimeError, match="Trouble"):
        fit(folder, model=Failing, save={"save_interval": 3}, loop={"eval_interval": 4})
    assert [path.name for path in (folder / "checkpoints" / "exception").iterdir()] == [name]


@pytest.mark.parametrize("case", ["sanity check", "saved already"])
def test_nothing_new_means_nothing_saved_after_an_exception(folder: Path, case: str) -> None:
    class InSanityCheck(Callback):
        def on_validate_start(self, trainer: Trainer, model: nn.Module, val_loader: Any, loop: Any) -> None:
            raise RuntimeError("Trouble")

    failing = InSanityCheck() if case == "sanity check" else FailIn("on_train_batch_start", 1)
    with pytest.raises(RuntimeError):
        fit(folder, save={"save_interval": 1}, loop={"eval_sanity_steps": 1}, callbacks=[failing])
    assert not (folder / "checkpoints" / "exception").exists()
    assert saved(folder) == ([] if case == "sanity check" else [1])


@pytest.mark.parametrize("case", ["none", "given"])
def test_the_given_saver_is_the_only_one(folder: Path, case: str) -> None:
    if case == "none":
        trainer = make_trainer(folder)
        assert trainer.checkpoint is None
        assert trainer.get_callback(CheckpointerCallback) is None
    else:
        trainer = make_trainer(folder, save={})
        assert list(trainer.get_callbacks(CheckpointerCallback)) == ["checkpoint"]
        assert list(trainer.callbacks)[-1] == "checkpoint"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], None),
        (["last", "log.txt"], None),
        (["step2", "last"], "step2"),
        (["step2", "step4"], "step4"),
        (["step2", "step9.bak"], "step2"),
    ],
)
def test_the_newest_checkpoint_of_a_folder(folder: Path, names: Sequence[str], expected: str | None) -> None:
    """Of the folder's content the newest checkpoint is found; what is none is not taken for one."""
    fit(folder, save={"save_interval": 2}, loop={"max_duration": 4})
    whole = folder / "checkpoints"
    found = folder / "found"
    found.mkdir()
    for name in names:
        if name.startswith("step") and name[4:].isdigit():
            (whole / name).rename(found / name)
        else:
            (found / name).mkdir()
    if expected is None:
        with pytest.raises(FileNotFoundError):
            latest_checkpoint(found)
    else:
        assert latest_checkpoint(found).name == expected
