"""What the Trainer of Cerebras' ModelZoo takes and gives: the same here, or what docs/moving.md says instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Line, loader

from trainer_cli import Callback, CheckpointerCallback, Trainer, TrainingLoop, UserError, ValidationLoop
from trainer_cli.callbacks.sparse_training import Static

PAGE = (Path(__file__).parents[2] / "docs/moving.md").read_text("utf-8").split("## ModelZoo of Cerebras")[1]


class Seen(Callback):
    """Keeps the arguments of the hooks that differ."""

    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[Any, ...]]] = {}

    def _note(self, hook: str, *args: Any) -> None:
        self.calls.setdefault(hook, []).append(args)

    def on_before_load_checkpoint(self, *args: Any) -> None:
        self._note("on_before_load_checkpoint", *args)

    def on_before_backward(self, *args: Any) -> None:
        self._note("on_before_backward", *args)

    def on_after_forward(self, *args: Any) -> None:
        self._note("on_after_forward", *args)

    def run_validation(self, *args: Any) -> None:
        self._note("run_validation", *args)

    def on_enter_validate_all(self, *args: Any) -> None:
        self._note("on_enter_validate_all", *args)

    def on_enter_validate(self, *args: Any) -> None:
        self._note("on_enter_validate", *args)

    def on_train_batch_end(self, *args: Any) -> None:
        self._note("on_train_batch_end", *args)

    def finalize(self) -> None:
        self._note("finalize")


def made(*callbacks: Callback, **options: Any) -> Trainer:
    settings = {"loop": TrainingLoop(max_duration=3, eval_interval=1, log_interval=None), "seed": 0, **options}
    sgd = options.pop("optimizer", lambda model: torch.optim.SGD(model.parameters(), lr=0.01))
    return Trainer(**{"model": Line, "optimizer": sgd, "callbacks": list(callbacks), "device": "cpu", **settings})


def fitted(folder: Path) -> tuple[Trainer, Seen]:
    seen = Seen()
    trainer = made(seen, checkpoint=CheckpointerCallback(folder))
    trainer.fit(loader(12, 4), loader(4, 4))
    return trainer, seen


def a_validation_loop_is_the_loop_of_a_trainer_that_only_validates(folder: Path) -> None:
    own = ValidationLoop(eval_steps=1)
    trainer = made(loop=own, optimizer=None)
    assert list(trainer.validate(loader(12, 4))) == ["val"]
    assert trainer.evaluating is own
    with pytest.raises(UserError, match="loop is a ValidationLoop, so this trainer can only validate"):
        made(loop=ValidationLoop()).fit(loader())


def sparsity_may_be_a_function(folder: Path) -> None:
    assert type(made(sparsity=lambda: Static(0.5)).callbacks["sparsity"]) is Static


def validate_takes_the_newest_checkpoint(folder: Path) -> None:
    trained = fitted(folder)[0].validate(loader(8, 4))
    other = made(checkpoint=CheckpointerCallback(folder))
    assert other.validate(loader(8, 4)) == trained == other.validate(loader(8, 4), folder / "step3")


def validate_takes_what_the_trainer_has_trained(folder: Path) -> None:
    trained = fitted(folder)[0].validate(loader(8, 4))
    trainer = made(checkpoint=CheckpointerCallback(folder))
    trainer.load_checkpoint(folder / "step0")
    assert trainer.validate(loader(8, 4)) != trained


def present_weights_can_be_asked_for(folder: Path) -> None:
    fitted(folder)
    trainer = made(checkpoint=CheckpointerCallback(folder))
    assert trainer.validate(loader(8, 4), None) == made().validate(loader(8, 4))


def validate_all_needs_no_paths(folder: Path) -> None:
    fitted(folder)
    (row,) = made(checkpoint=CheckpointerCallback(folder)).validate_all(loader(8, 4))
    assert (row.path, row.step) == (folder / "step3", 3)
    (row,) = made().validate_all(loader(8, 4))
    assert (row.path, row.step) == (None, 0)


def finalize_ends_an_evaluation(folder: Path) -> None:
    seen = Seen()
    made(seen).validate(loader(8, 4))
    assert len(seen.calls["finalize"]) == 1


def finalize_is_called_once_where_a_fit_evaluates(folder: Path) -> None:
    class Evaluates(Callback):
        def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
            trainer.validate(loader(8, 4))

    seen = Seen()
    made(seen, Evaluates()).fit(loader(12, 4))
    assert len(seen.calls["finalize"]) == 1


def name_scope_gives_the_name_and_its_path_ends_in_a_slash(folder: Path) -> None:
    trainer = made()
    with trainer.name_scope("a") as outer, trainer.name_scope("b") as inner:
        assert (outer, inner, trainer.name_scope_path) == ("a", "b", "a/b/")


THE_SAME: list[Callable[[Path], None]] = [
    a_validation_loop_is_the_loop_of_a_trainer_that_only_validates,
    sparsity_may_be_a_function,
    validate_takes_the_newest_checkpoint,
    validate_takes_what_the_trainer_has_trained,
    present_weights_can_be_asked_for,
    validate_all_needs_no_paths,
    finalize_ends_an_evaluation,
    finalize_is_called_once_where_a_fit_evaluates,
    name_scope_gives_the_name_and_its_path_ends_in_a_slash,
]


@pytest.mark.parametrize("claim", THE_SAME, ids=lambda claim: claim.__name__)
def test_as_in_modelzoo(claim: Callable[[Path], None], tmp_path: Path) -> None:
    claim(tmp_path)


@pytest.mark.parametrize(
    ("hook", "sentence", "kinds"),
    [
        ("on_before_backward", "has the loss", ["Trainer", "Line", "Tensor"]),
        ("on_after_forward", "the outputs", ["Trainer", "Line", "dict", "list"]),
        ("run_validation", "has no number of the loop", ["Trainer", "bool"]),
        ("on_enter_validate_all", "has no loop", ["Trainer", "ExitStack", "dict"]),
        ("on_enter_validate", "has.", ["Trainer", "ExitStack", "Loader", "ValidationLoop"]),
    ],
)
def test_a_hook_is_called_with_what_the_page_says(hook: str, sentence: str, kinds: list[str], tmp_path: Path) -> None:
    _, seen = fitted(tmp_path)
    assert [type(each).__name__ for each in seen.calls[hook][0]] == kinds
    assert any(f"`{hook}`" in line and sentence in line for line in PAGE.splitlines())


def test_a_path_is_given_only_where_a_checkpoint_is_read(tmp_path: Path) -> None:
    assert "on_before_load_checkpoint" not in fitted(tmp_path)[1].calls
    assert fitted(tmp_path)[1].calls["on_before_load_checkpoint"][0][1] == tmp_path / "step3"
    assert "not called: the path is always one" in PAGE


def test_a_callback_given_twice_is_called_once_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    seen = Seen()
    made(seen, seen).fit(loader(12, 4))
    assert len(seen.calls["on_train_batch_end"]) == 3
    assert "callbacks: 'Seen_2' is the same object as 'Seen', and is used once" in caplog.text
    assert "it is called once, and a warning names it" in PAGE
