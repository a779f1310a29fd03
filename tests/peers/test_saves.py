"""When checkpoints are saved, what is kept of them, and how the kinds of saves work together."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_disk import FaultyDisk
from small_runs import FailIn, Net, Run, Script, fit, make_trainer, saved
from torch import nn

from trainer_cli import (
    Callback,
    CheckpointerCallback,
    LoadOptions,
    Scheduled,
    Trainer,
    latest_checkpoint,
    make_sync_checkpointer,
)
from trainer_cli.storage.local import LocalStorage

BEST = {"metric": "val/score"}


def manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint."""
    content: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return content


@pytest.mark.parametrize(
    ("save", "loop", "batches", "steps"),
    [
        ({"save_interval": "3ep"}, {"max_duration": "5ep"}, 1, [3]),
        ({"save_interval": None}, {"max_duration": "5ep"}, 1, []),
        ({"save_interval": 16}, {"max_duration": 64}, 32, [16, 32, 48, 64]),
        ({"save_interval": "0.3ep"}, {"max_duration": "2ep"}, 10, [3, 6, 9, 12, 15, 18]),
        ({"save_final": True}, {"max_duration": "2ep"}, 3, [6]),
        ({"save_final": True, "save_interval": "5ep"}, {"max_duration": "7ep"}, 1, [5, 7]),
        ({"save_interval": "1ep"}, {"eval_interval": "0.5ep"}, 2, [2, 4]),
        ({"save_interval": 1, "max_checkpoints": 1}, {"max_duration": 3}, 1, [3]),
        ({"save_interval": "2ep", "ephemeral_save_interval": 3}, {"max_duration": 10}, 4, [8, 9]),
    ],
)
def test_steps_that_leave_a_checkpoint(
    folder: Path, save: Mapping[str, Any], loop: Mapping[str, Any], batches: int, steps: Any
) -> None:
    fit(folder, save={"save_final": False, **save}, loop=loop, batches=batches)
    assert saved(folder) == list(steps)


@pytest.mark.parametrize(("interval", "least", "most"), [("0.02s", 1, 8), ("1h", 0, 0)])
def test_an_interval_may_be_a_time(folder: Path, interval: str, least: int, most: int) -> None:
    class Sleep(Callback):
        def on_train_batch_start(self, trainer: Trainer, model: nn.Module, batch: Any, batch_idx: int) -> None:
            time.sleep(0.01)

    fit(folder, save={"save_interval": interval, "save_final": False}, loop={"max_duration": 8}, callbacks=[Sleep()])
    assert least <= len(saved(folder)) <= most


@pytest.mark.parametrize("save", [{"save_interval": 1}, {"keep_best": {}}, {"max_checkpoints": 1}])
def test_settings_without_a_metric_are_accepted(folder: Path, save: Mapping[str, Any]) -> None:
    fit(folder, save=save)
    assert saved(folder)[-1] == 4


def fit_scored(folder: Path, scores: Sequence[float], best: Mapping[str, Any], **save: Any) -> Run:
    """One step, one evaluation with the next of the scores, and so on."""
    return fit(
        folder,
        batches=1,
        save={"save_final": False, "keep_best": {"mode": "min", **BEST, **best}, **save},
        loop={"max_duration": len(scores), "eval_interval": 1},
        callbacks=[Script(scores)],
    )


@pytest.mark.parametrize(
    ("scores", "best", "steps"),
    [
        ([10, 9, 2.8, 5, 2.5], {"count": 5}, [1, 2, 3, 4, 5]),
        ([10, 9, 2.8, 5, 2.5], {"count": 1}, [5]),
        ([10, 9, 2.8, 5, 2.5], {"count": 2}, [3, 5]),
        ([10, 9, 2.8, 5, 2.5], {"count": 3}, [3, 4, 5]),
        ([10, 9, 2.8, 5, 2.5], {"count": 4}, [2, 3, 4, 5]),
        ([1, 1.1, 0.8, 1.3], {"count": 1}, [3]),
        ([math.nan, 8, 7, 5], {"mode": "min"}, [4]),
        ([math.nan, 5, 7, 8], {"mode": "max"}, [4]),
    ],
)
def test_the_best_scores_are_kept(
    folder: Path, scores: Sequence[float], best: Mapping[str, Any], steps: Sequence[int]
) -> None:
    fit_scored(folder, scores, best)
    assert saved(folder) == steps


@pytest.mark.parametrize(
    ("count", "epochs", "interval", "saves"),
    [(1, 1, "1ep", 1), (2, 2, "1ep", 2), (2, 1, "0.25ep", 4), (2, 2, "0.3ep", 7)],
)
def test_each_improvement_is_one_save(folder: Path, count: int, epochs: int, interval: str, saves: int) -> None:
    class Saves(Callback):
        number = 0

        def on_after_save_checkpoint(self, trainer: Trainer, path: Path) -> None:
            self.number += 1

    counted = Saves()
    fit(
        folder,
        batches=10,
        save={"save_final": False, "keep_best": {"mode": "min", **BEST, "count": count}},
        loop={"max_duration": f"{epochs}ep", "eval_interval": interval},
        callbacks=[Script([10 * 0.99**number for number in range(20)]), counted],
    )
    assert counted.number == saves
    assert len(saved(folder)) == count


@pytest.mark.parametrize(
    ("metric", "interval", "plateau"),
    [
        ("val/score", "1ep", False),
        ("train/mae", "1ep", False),
        ("val/score", "1ep", True),
        ("val/score", 5, False),
    ],
)
def test_saves_for_a_score_have_stepped_rates(folder: Path, metric: str, interval: str, plateau: bool) -> None:
    """Checkpoints made for a metric have it, and the rates after the schedule's step of that moment."""

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        if plateau:
            return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    run = fit(
        folder,
        batches=12,
        save={"save_final": False, "keep_best": {"metric": metric, "mode": "min", "count": 20}},
        loop={"max_duration": "3ep", "eval_interval": interval, "log_interval": interval},
        callbacks=[Script([3, 1, 2])],
        schedulers=Scheduled(schedule, metric=metric if plateau else None),
    )
    logged = run.log.values(metric)
    assert saved(folder) == sorted(logged)
    for step, value in logged.items():
        path = folder / "checkpoints" / f"step{step}"
        assert manifest(path)["metrics"][metric] == value
        trainer = make_trainer(schedulers=Scheduled(schedule, metric=metric if plateau else None))
        trainer.load_checkpoint(path)
        assert trainer.optimizer is not None
        rate = trainer.optimizer.param_groups[0]["lr"]
        assert rate == pytest.approx(0.1 if plateau else 0.1 * 0.5 ** (step // 12))


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_is_no_score(folder: Path, mode: str) -> None:
    fit_scored(folder, [math.nan] * 3, {"mode": mode})
    assert not saved(folder)


@pytest.mark.parametrize(("scores", "mode", "step"), [([0, 1, 2], "max", 3), ([2, 1, 0], "max", 1)])
def test_the_best_checkpoint_outlives_the_rotation(folder: Path, scores: Sequence[float], mode: str, step: int) -> None:
    run = fit_scored(folder, scores, {"mode": mode}, save_interval=1, max_checkpoints=1)
    checkpoint = run.trainer.checkpoint
    assert isinstance(checkpoint, CheckpointerCallback)
    assert saved(folder) == sorted({step, len(scores)})
    assert step == len(scores) or "best" in checkpoint.kept()[f"step{step}"]


def kind_of(path: Path) -> str:
    return str(json.loads((path / "manifest.json").read_text())["kind"])


class Saves(Callback):
    """Notes each save as (step, kind), and the steps on the disk after it."""

    def __init__(self) -> None:
        self.made: list[tuple[int, str]] = []
        self.left: list[list[int]] = []

    def on_after_save_checkpoint(self, trainer: Trainer, path: Path) -> None:
        self.made.append((int(path.name.removeprefix("step")), kind_of(path)))

    def on_train_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.left.append(saved(path_of(trainer).parent))

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.made]


def path_of(trainer: Trainer) -> Path:
    assert isinstance(trainer.checkpoint, CheckpointerCallback)
    return Path(trainer.checkpoint.folder)


def train(folder: Path, duration: int = 10, *callbacks: Callback, **save: Any) -> Saves:
    """Train to a step, from the newest checkpoint in the folder if there is one."""
    saves = Saves()
    fit(folder, loop={"max_duration": duration}, save=save, callbacks=[*callbacks, saves], val=None)
    return saves


@pytest.mark.parametrize(("ephemeral", "permanent"), [(1, 2), (249, 250), (10, None)])
def test_ephemeral_intervals_are_accepted(ephemeral: Any, permanent: Any) -> None:
    settings = CheckpointerCallback(ephemeral_save_interval=ephemeral, save_interval=permanent).settings
    assert (settings.ephemeral_save_interval, settings.save_interval) == (ephemeral, permanent)


def test_only_ephemeral_ones_are_removed_and_none_is_saved_by_default() -> None:
    settings = CheckpointerCallback().settings
    assert (settings.remove, settings.ephemeral_save_interval, settings.ephemeral_cooldown) == (
        "ephemeral_only",
        None,
        None,
    )
    assert settings.pre_train_checkpoint is None
    assert settings.enabled


def test_a_saver_that_is_off_still_loads(folder: Path) -> None:
    train(folder, 2)
    kept = saved(folder)
    run = fit(folder, loop={"max_duration": 5}, save={"enabled": False, "save_interval": 1}, val=None)
    assert run.trained.batches[0][0] == kept[-1] == 2
    assert saved(folder) == kept


@pytest.mark.parametrize(
    ("setting", "loaded", "is_saved"),
    [(False, False, False), (None, False, True), (None, True, False), (True, False, True)],
)
def test_step_0_is_saved_if_nothing_was_loaded(
    folder: Path, setting: bool | None, loaded: bool, is_saved: bool
) -> None:
    train(folder / "before", 1)
    source = {"ckpt_path": folder / "before" / "checkpoints" / "step1", "load": LoadOptions(states=["model"])}
    save = {"pre_train_checkpoint": setting}
    fit(folder, loop={"max_duration": 1}, save=save, val=None, fit_arguments=source if loaded else None)
    assert saved(folder) == ([0, 1] if is_saved else [1])


def test_a_resumed_run_saves_nothing_before_its_first_step(folder: Path) -> None:
    train(folder, 2, save_final=True)
    assert train(folder, 4, pre_train_checkpoint=True).steps == [4]


def test_step_0_is_permanent(folder: Path) -> None:
    saves = train(folder, pre_train_checkpoint=True, save_interval=4, remove="all_non_permanent", max_checkpoints=1)
    assert saves.made[0] == (0, "permanent")
    assert 0 in saved(folder)


def test_permanent_saves_stay_and_ephemeral_ones_go(folder: Path) -> None:
    saves = train(folder, save_interval=5, ephemeral_save_interval=2)
    assert saves.steps == [2, 4, 5, 6, 8, 10]
    assert [step for step, kind in saves.made if kind == "permanent"] == [5, 10]
    # Noted at the end of each batch, before a save at this step.
    assert saves.left[8] == [5, 8]
    assert saved(folder) == [5, 10]


def test_a_step_of_both_intervals_is_saved_once_as_permanent(folder: Path) -> None:
    assert train(folder, 5, save_interval=4, ephemeral_save_interval=2).made[:2] == [(2, "ephemeral"), (4, "permanent")]


def test_a_permanent_checkpoint_removes_the_ephemeral_one_before_it(folder: Path) -> None:
    assert train(folder, 6, save_interval=3, ephemeral_save_interval=2).left[3] == [3]


@pytest.mark.parametrize(
    ("cooldown", "steps"),
    [(None, [0, 2, 4, 5, 6, 8, 10]), (2, [0, 2, 4, 5, 8, 10]), (3, [0, 4, 5, 8, 10]), (100, [0, 5, 10])],
)
def test_a_cooldown_leaves_out_saves(folder: Path, cooldown: int | None, steps: list[int]) -> None:
    save: dict[str, Any] = {"save_interval": 5, "ephemeral_save_interval": 2, "ephemeral_cooldown": cooldown}
    assert train(folder, pre_train_checkpoint=True, **save).steps == steps


@pytest.mark.parametrize(("remove", "left"), [("ephemeral_only", [4]), ("all_non_permanent", [4]), ("never", [2, 4])])
def test_an_ephemeral_checkpoint_of_an_earlier_run_is_removed(folder: Path, remove: str, left: list[int]) -> None:
    train(folder, 3, save_final=False, ephemeral_save_interval=2, save_interval=10)
    assert saved(folder) == [2]
    assert kind_of(folder / "checkpoints" / "step2") == "ephemeral"
    train(folder, 5, save_interval=4, save_final=False, remove=remove)
    assert saved(folder) == left


def test_the_kind_of_a_checkpoint_is_in_its_manifest(folder: Path) -> None:
    train(folder, 7, save_final=False, ephemeral_save_interval=3, save_interval=10)
    assert saved(folder) == [6]
    saves = train(folder, 9, save_final=False, ephemeral_save_interval=3, save_interval=6)
    assert saves.made == [(9, "ephemeral")]
    assert saved(folder) == [9], "step 6 was saved as an ephemeral one, and goes"


def test_a_permanent_checkpoint_off_the_new_interval_is_removed(folder: Path) -> None:
    train(folder, 3, save_interval=3)
    assert kind_of(folder / "checkpoints" / "step3") == "permanent"
    train(folder, 8, save_interval=4, remove="all_non_permanent")
    assert saved(folder) == [4, 8]


def test_a_fixed_step_at_a_multiple_of_the_ephemeral_interval_is_permanent(folder: Path) -> None:
    saves = train(folder, 5, fixed_steps=[4], ephemeral_save_interval=2)
    assert saves.made == [(2, "ephemeral"), (4, "permanent"), (5, "permanent")]


def test_the_final_save_is_synchronous_and_made_once(folder: Path) -> None:
    saves = train(folder, 3, save_async=True)
    assert saves.made == [(3, "permanent")]
    assert json.loads((folder / "checkpoints" / "step3" / "manifest.json").read_text())["finished"]


def test_a_final_step_that_was_saved_already_is_not_saved_twice(folder: Path) -> None:
    assert train(folder, 4, save_interval=2, save_async=True).steps == [2, 4]


def test_an_interrupted_removal_leaves_no_half_checkpoint(folder: Path) -> None:
    """Wherever a removal is interrupted, the newest checkpoint that counts is whole."""
    train(folder, 4, save_interval=2)
    newest = set()
    for at in itertools.count(1):
        copy = folder / f"copy{at}"
        shutil.copytree(folder / "checkpoints", copy)
        disk = FaultyDisk(at, persistent=True)
        with contextlib.suppress(OSError):
            LocalStorage(copy, disk=disk).remove("step4")
        path = latest_checkpoint(copy)
        make_sync_checkpointer().load(path)
        newest.add(path.name)
        if not disk.struck:
            break
    assert newest == {"step4", "step2"}


def test_a_subclass_of_the_saver_takes_its_place(folder: Path) -> None:
    class Saver(CheckpointerCallback):
        pass

    saver = Saver(folder / "checkpoints")
    assert Trainer(model=Net, checkpoint=saver).get_callbacks(CheckpointerCallback) == {"checkpoint": saver}


IN_FIT = ("on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward",
          "on_before_optimizer_step", "on_before_optimizer_zero_grad", "on_train_start", "on_train_end",
          "on_validate_start", "on_validate_end", "on_validate_batch_start", "on_validate_batch_end",
          "on_fit_end")  # fmt: skip


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
def test_without_a_new_step_an_exception_saves_nothing(folder: Path, case: str) -> None:
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
