"""The claims of Lightning's tests about names and links of checkpoints, and what is saved after exceptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from peer_claims import Claim, claims, each, try_claim
from small_runs import FailIn, Net, fit, make_trainer, saved
from torch import nn

from trainer_cli import (
    Callback,
    CheckpointerCallback,
    ConfigError,
    LoadOptions,
    Trainer,
    UserError,
    latest_checkpoint,
)

TOP = "test_model_checkpoint: "
IN_FIT = ("on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward",
          "on_before_optimizer_step", "on_before_optimizer_zero_grad", "on_train_start", "on_train_end",
          "on_validate_start", "on_validate_end", "on_validate_batch_start", "on_validate_batch_end",
          "on_fit_end")  # fmt: skip


def check_link(folder: Path, what: str) -> None:
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


def check_link_replaced(folder: Path, what: str) -> None:
    (folder / "checkpoints").mkdir()
    link = folder / "checkpoints" / "latest"
    (folder / "elsewhere").mkdir()
    if what == "file":
        link.touch()
    else:
        link.symlink_to(folder / "elsewhere")
    fit(folder, save={"latest_link": True})
    assert str(link.readlink()) == "step4"


def check_names(folder: Path, save: Mapping[str, Any], names: Sequence[str]) -> None:
    fit(folder, save={"save_interval": 2, **save}, loop={"max_duration": 6})
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == names


def check_refused_name(folder: Path, name: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        CheckpointerCallback(folder / "checkpoints", name=name)


def check_home(folder: Path, path: str | Path, expected: Path) -> None:
    assert CheckpointerCallback(path).folder == expected


def check_saved_after_exception(folder: Path, hook: str) -> None:
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


def check_saved_after_failing_model(folder: Path, training: bool, name: str) -> None:
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


def check_nothing_saved_after_exception(folder: Path, case: str) -> None:
    class InSanityCheck(Callback):
        def on_validate_start(self, trainer: Trainer, model: nn.Module, val_loader: Any, loop: Any) -> None:
            raise RuntimeError("Trouble")

    failing = InSanityCheck() if case == "sanity check" else FailIn("on_train_batch_start", 1)
    with pytest.raises(RuntimeError):
        fit(folder, save={"save_interval": 1}, loop={"eval_sanity_steps": 1}, callbacks=[failing])
    assert not (folder / "checkpoints" / "exception").exists()
    assert saved(folder) == ([] if case == "sanity check" else [1])


def check_second_saver(folder: Path) -> None:
    with pytest.raises(UserError, match="One saves"):
        Trainer(model=Net, callbacks=[CheckpointerCallback(folder / "a")], device="cpu", seed=0)


def check_saver(folder: Path, case: str) -> None:
    if case == "none":
        trainer = make_trainer(folder)
        assert trainer.checkpoint is None
        assert trainer.get_callback(CheckpointerCallback) is None
    else:
        trainer = make_trainer(folder, save={})
        assert list(trainer.get_callbacks(CheckpointerCallback)) == ["checkpoint"]
        assert list(trainer.callbacks)[-1] == "checkpoint"


def check_newest(folder: Path, names: Sequence[str], expected: str | None) -> None:
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


CLAIMS: list[Claim] = [
    *claims(
        f"{TOP}test_model_checkpoint_save_last",
        check_link,
        {"a link of a fixed name points at the newest checkpoint": ("newest",)},
    ),
    *claims(
        f"{TOP}test_model_checkpoint_save_last_checkpoint_contents",
        check_link,
        {"what the link points at is loaded as the newest": ("loaded",)},
    ),
    *claims(
        f"{TOP}test_model_checkpoint_link_checkpoint_relative_path",
        check_link,
        {"the link is relative, so a folder that is moved keeps it": ("relative",)},
    ),
    *claims(
        f"{TOP}test_model_checkpoint_link_checkpoint",
        check_link_replaced,
        {
            "a file in the link's place is replaced": ("file",),
            "a link to another folder is replaced": ("link",),
        },
    ),
    *claims(
        f"{TOP}test_model_checkpoint_format_checkpoint_name",
        check_names,
        {
            "a name may have epoch and step": ({"name": "ep{epoch}-st{step}"}, ["ep0-st2", "ep1-st4", "ep1-st6"]),
            "numbers may be padded": ({"name": "{step:03d}"}, ["002", "004", "006"]),
            "a name may end in a text of the user's": ({"suffix": "x"}, ["step2-x", "step4-x", "step6-x"]),
            "a name may have the run's": ({"name": "{run_name}-{step}"}, ["default-2", "default-4", "default-6"]),
            "a name may have more counts": ({"name": "s{step}b{batch}n{samples}"}, ["s2b2n2", "s4b0n4", "s6b2n6"]),
        },
    ),
    *claims(
        f"{TOP}test_model_checkpoint_format_checkpoint_name",
        check_refused_name,
        {"a metric in a name": ("{val/loss}-{step}", "Metrics are no part of a name")},
        difference="Names come before an evaluation does and must not change with it; the metric is in the manifest, "
        "and `train ckpt ls` shows it.",
    ),
    *claims(
        f"{TOP}test_ckpt_metric_names",
        check_refused_name,
        {"a formatted metric in a name": ("step{step}-{val_loss:.2f}", "val_loss")},
        difference="As for every metric in a name: refused with the variables that there are; the manifest has it.",
    ),
    *claims(
        f"{TOP}test_ckpt_version_after_rerun_same_trainer",
        check_refused_name,
        {"a name without any count": ("test", "alike")},
        difference="Lightning adds -v1, -v2 to names that are taken; here a name must tell checkpoints apart.",
    ),
    *claims(
        f"{TOP}test_model_checkpoint_file_extension",
        check_names,
        {
            "a checkpoint may have an extension": (
                {"name": "step{step}.tpkc"},
                ["step2.tpkc", "step4.tpkc", "step6.tpkc"],
            )
        },
    ),
    *claims(
        f"{TOP}test_expand_home",
        check_home,
        {
            "~ in a folder is the home": ("~/checkpoints", Path.home() / "checkpoints"),
            "~ in a Path is the home": (Path("~/checkpoints"), Path.home() / "checkpoints"),
            "a folder may be called ~": ("./~/checkpoints", Path("~/checkpoints")),
        },
    ),
    *claims(
        f"{TOP}test_model_checkpoint_on_exception_in_other_callbacks",
        check_saved_after_exception,
        {f"the state is saved after an exception in {hook}": (hook,) for hook in IN_FIT},
        difference="It is saved in the folder `exception`, which no resume takes by itself: an exception is not the "
        "end of a step, and a resume from between steps would not be exact.",
    ),
    *claims(
        f"{TOP}test_model_checkpoint_on_exception_parametrized",
        check_saved_after_failing_model,
        {
            "the state is saved after an exception in the model's training": (True, "step2"),
            "the state is saved after an exception in the model's evaluation": (False, "step4"),
        },
    ),
    *claims(
        f"{TOP}test_model_checkpoint_on_exception_run_condition_on_validation_start",
        check_nothing_saved_after_exception,
        {"nothing is saved after an exception in the sanity check": ("sanity check",)},
    ),
    *claims(
        f"{TOP}test_model_checkpoint_on_exception_run_condition_on_train_batch_start",
        check_nothing_saved_after_exception,
        {"a step that is saved already is not saved for an exception": ("saved already",)},
    ),
    *claims(
        f"{TOP}test_configure_model_checkpoint",
        check_saver,
        {"without a saver there is none": ("none",), "the saver that is given is the only one, and last": ("given",)},
    ),
    *claims(
        f"{TOP}test_configure_model_checkpoint",
        check_second_saver,
        {"a saver among the callbacks": ()},
        difference="One callback saves, as checkpoint=: what two of them keep could not both be resumed.",
    ),
    *claims(
        f"{TOP}test_find_last_checkpoints",
        check_newest,
        {
            "an empty folder has no newest checkpoint": ([], None),
            "folders of other names are none": (["last", "log.txt"], None),
            "the only one is the newest": (["step2", "last"], "step2"),
            "the larger step is the newest": (["step2", "step4"], "step4"),
            "a folder that only looks like a checkpoint is none": (["step2", "step9.bak"], "step2"),
        },
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
