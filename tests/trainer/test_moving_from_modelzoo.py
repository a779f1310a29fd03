"""What the Trainer of the ModelZoo takes and gives is the same here, or docs/moving/modelzoo.md says what differs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from small_parts import present
from tiny import Line, loader, make_sgd, on, same, trainer

from trainer_cli import (
    Callback,
    CheckpointerCallback,
    SaveCheckpointState,
    Trainer,
    UserError,
    ValidationLoop,
)
from trainer_cli.catalog.catalog import Catalog
from trainer_cli.errors import NoCheckpointError

PAGE = (Path(__file__).parents[2] / "docs/moving/modelzoo.md").read_text("utf-8")
HOOKS = (
    "on_before_load_checkpoint", "on_before_backward", "on_after_forward", "run_validation", "on_enter_validate_all",
    "on_enter_validate", "on_train_batch_end", "finalize",
)  # fmt: skip
VAL = loader(8, 4, shuffle=False)


def seen_by(calls: list[tuple[Any, ...]]) -> Callback:
    """A callback that keeps the name and the arguments of each call of the hooks that differ."""
    return on(**{hook: lambda *args, hook=hook: calls.append((hook, *args)) for hook in HOOKS})


def made(*callbacks: Callback, **options: Any) -> Trainer:
    settings = {"max_duration": 3, "eval_interval": 1}
    optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=0.01)  # noqa: E731
    return trainer(Line, **{"callbacks": list(callbacks), "settings": settings, "optimizer": optimizer, **options})


def fitted(folder: Path, *callbacks: Callback) -> Trainer:
    fitted = made(*callbacks, checkpoint=CheckpointerCallback(folder))
    fitted.fit(loader(12, 4), loader(4, 4))
    return fitted


def test_a_validation_loop_is_the_loop_of_a_trainer_that_only_validates() -> None:
    loop = ValidationLoop(eval_steps=1)
    only = Trainer(model=Line, loop=loop, device="cpu")
    assert list(only.validate(loader(12, 4))) == ["val"]
    assert only.evaluating is loop
    with pytest.raises(UserError, match="loop is a ValidationLoop, so this trainer can only validate"):
        Trainer(model=Line, optimizer=make_sgd, loop=loop, device="cpu").fit(loader())


def test_an_evaluation_takes_what_was_trained_or_loaded_then_the_newest_checkpoint_or_what_was_asked_for(
    tmp_path: Path,
) -> None:
    trained = fitted(tmp_path).validate(VAL)
    saver = CheckpointerCallback(tmp_path)
    assert made(checkpoint=saver).validate(VAL) == trained
    assert made(checkpoint=saver).validate(VAL, tmp_path / "step3") == trained
    assert made(checkpoint=saver).validate(VAL, None) == made().validate(VAL) != trained
    other = made(checkpoint=saver)
    other.load_checkpoint(tmp_path / "step0")
    assert other.validate(VAL) != trained
    every = [(tmp_path / f"step{step}", step) for step in (0, 3)]
    assert [(row.path, row.step) for row in made(checkpoint=saver).validate_all(VAL)] == every
    (row,) = made().validate_all(VAL)
    assert (row.path, row.step) == (None, 0)


def test_what_is_saved_loaded_and_evaluated_without_arguments_is_of_the_run(tmp_path: Path) -> None:
    trained = made(checkpoint=CheckpointerCallback(tmp_path), settings={"max_duration": 2})
    with pytest.raises(UserError, match="validate_all has no val_loaders"):
        trained.validate_all()
    with pytest.raises(NoCheckpointError, match="this run has no checkpoint yet"):
        trained.load_checkpoint()
    with pytest.raises(UserError, match="before its first fit a run has no position in its data"):
        trained.save_checkpoint()
    trained.fit(loader(12, 4), {"a": VAL, "b": loader(4)})
    assert trained.save_checkpoint() == tmp_path / "step2"
    assert present(Catalog.of(tmp_path).entry("step2").manifest).reason == "end of training"
    assert [(row.step, row.loader) for row in trained.validate_all()] == [
        (step, name) for step in (0, 2) for name in "ab"
    ]
    weights = copy.deepcopy(trained.model.state_dict())
    trained.model.get_parameter("linear.weight").data.zero_()
    trained.load_checkpoint()
    assert same(trained.model.state_dict(), weights) == []
    with pytest.raises(UserError, match="this trainer has no folder of checkpoints"):
        made().save_checkpoint()
    with pytest.raises(UserError, match=r"trainer\.ask_for_save\(\)"):
        made(on(on_train_batch_end=lambda trainer, *args: trainer.save_checkpoint())).fit(loader(12, 4))


def test_a_loaded_state_is_saved_without_the_metrics_of_another_step(tmp_path: Path) -> None:
    trained = fitted(tmp_path / "first")
    other = made(settings={"max_duration": 7}, checkpoint=CheckpointerCallback(tmp_path / "other"))
    other.fit(loader(12, 4), VAL)
    other.load_checkpoint(trained.save_checkpoint(tmp_path / "by hand"))
    path = other.save_checkpoint()
    assert path == tmp_path / "other/step3"
    assert same(other.checkpointer.read(path)["model"], trained.model.state_dict()) == []
    assert dict(other.checkpointer.metrics(path)) == {}


def test_a_checkpoint_saved_by_hand_is_told_to_callbacks(tmp_path: Path) -> None:
    calls: list[Path] = []
    states = SaveCheckpointState(folder=str(tmp_path / "states"))
    seen = on(on_after_save_checkpoint=lambda trainer, path: calls.append(path))
    trained = made(states, seen, checkpoint=CheckpointerCallback(tmp_path / "run", pre_train_checkpoint=False))
    trained.fit(loader(12, 4))
    assert trained.save_checkpoint(tmp_path / "best") == tmp_path / "best"
    assert calls == [tmp_path / "run/step3", tmp_path / "best"]
    # One elsewhere is none of the run's.
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["step3"]


@pytest.mark.parametrize("inside_a_fit", [True, False])
def test_finalize_ends_an_evaluation_and_is_called_once_where_a_fit_evaluates(inside_a_fit: bool) -> None:
    calls: list[tuple[Any, ...]] = []
    evaluates = on(on_fit_end=lambda trainer, loop: trainer.validate(VAL))
    if inside_a_fit:
        made(seen_by(calls), evaluates).fit(loader(12, 4))
    else:
        made(seen_by(calls)).validate(VAL)
    assert [hook for hook, *_ in calls].count("finalize") == 1


@pytest.mark.parametrize(
    ("hook", "sentence", "kinds"),
    [
        ("on_before_backward", "has the loss", ["Trainer", "Line", "Tensor"]),
        ("on_after_forward", "the outputs", ["Trainer", "Line", "dict", "list"]),
        ("run_validation", "has no number of the loop", ["Trainer", "bool"]),
        ("on_enter_validate_all", "has no loop", ["Trainer", "ExitStack", "dict"]),
        ("on_enter_validate", "argument of", ["Trainer", "ExitStack", "Loader", "ValidationLoop"]),
    ],
)
def test_a_hook_is_called_with_what_the_page_says(hook: str, sentence: str, kinds: list[str], tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []
    fitted(tmp_path, seen_by(calls))
    _, *args = next(call for call in calls if call[0] == hook)
    assert [type(each).__name__ for each in args] == kinds
    assert any(f"`{hook}`" in line and sentence in line for line in PAGE.splitlines())


def test_a_path_is_given_only_where_a_checkpoint_is_read(tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []
    fitted(tmp_path, seen_by(calls))
    assert [call for call in calls if call[0] == "on_before_load_checkpoint"] == []
    fitted(tmp_path, seen_by(calls))
    assert [call[2] for call in calls if call[0] == "on_before_load_checkpoint"] == [tmp_path / "step3"]
    assert "not called: the path is always one" in PAGE


def test_a_callback_given_twice_is_called_once_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[tuple[Any, ...]] = []
    seen = seen_by(calls)
    made(seen, seen).fit(loader(12, 4))
    assert [hook for hook, *_ in calls].count("on_train_batch_end") == 3
    assert "callbacks: 'On_2' is the same object as 'On', and is used once" in caplog.text
    assert "it is called once, and a warning names it" in PAGE
