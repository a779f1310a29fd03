"""One trainer, or one folder, used more than once: nothing of an earlier fit is in the way of the next."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tiny import Line, ListLogger, Noisy, StopAt, StopInEvaluation, everything, loader, on, same, trainer
from torch import Tensor

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.early_stopping import EarlyStopping
from trainer_cli.callbacks.ema import EMA
from trainer_cli.errors import UserError
from trainer_cli.loads.options import LoadOptions
from trainer_cli.loggers.text_files import JsonlLogger
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.train_step import TrainStep
from trainer_cli.trainer.trainer import Trainer
from trainer_cli.trainer.training_loop import TrainingLoop
from trainer_cli.trainer.validation_loop import EvaluationInterruptedError


def made(folder: Path | None, *callbacks: Callback, **more: Any) -> Trainer:
    return trainer(
        Noisy,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        schedulers=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
        callbacks=[EMA(decay=0.5), *callbacks],
        settings={"max_duration": 9, "eval_interval": 3, "log_interval": 1},
        checkpoint=CheckpointerCallback(folder, save_interval=3) if folder else None,
        **more,
    )


def test_a_library_user_stops_evaluates_loads_and_goes_on(tmp_path: Path) -> None:
    vals = {"near": loader(3), "far": loader(5)}
    straight = made(tmp_path / "straight")
    straight.fit(loader(22, 4), vals)

    first = made(tmp_path / "own", StopAt(4))
    result = first.fit(loader(22, 4), vals)
    assert (result.finished, result.step) == (False, 4)
    assert set(first.validate(vals)) == {"near", "far"}, "a stop of the fit is none of the evaluation"
    assert first.fit(loader(22, 4), vals).step == 9, "nor of the next fit"
    assert same(everything(first), everything(straight)) == []

    other = made(tmp_path / "other")
    other.load_checkpoint(tmp_path / "own" / "step3")
    assert other.progress.step == 3
    assert set(other.validate(vals)) == {"near", "far"}
    assert other.fit(loader(22, 4), vals).step == 9
    assert same(everything(other), everything(straight)) == []


def test_a_stop_in_an_evaluation_is_not_kept_for_the_next_one() -> None:
    one = trainer(Line, callbacks=[StopInEvaluation(0)])
    with pytest.raises(EvaluationInterruptedError):
        one.validate(loader(9, 2))
    cast("Any", one.callbacks["StopInEvaluation"]).step = -1
    assert one.validate(loader(9, 2))["val"]["loss"] > 0


def test_without_a_checkpoint_a_reused_trainer_begins_anew() -> None:
    logs, ends, streams = ListLogger(), [], []
    reused = made(None, EarlyStopping("val/loss", patience=2), loggers=[logs])
    for _ in range(2):
        reused.fit(loader(22, 4), loader(3), ckpt_path=None)
        ends.append(copy.deepcopy(reused.model.state_dict()))
        streams.append(logs.stream)
        logs.records.clear()
    assert streams[0] == streams[1]
    assert same(*ends) == []


def test_a_model_given_as_an_instance_begins_anew_from_its_weights() -> None:
    seen: list[torch.Tensor] = []
    model = Line()
    looks = on(on_fit_start=lambda trainer, *_: seen.append(trainer.model.linear.weight.detach().clone()))
    one = trainer(model, callbacks=[looks])
    one.fit(loader(), ckpt_path=None)
    after = model.linear.weight.detach().clone()
    assert one.fit(loader(), ckpt_path=None).step == 6
    assert torch.equal(seen[1], after)


def test_a_list_of_samples_is_still_a_dataset() -> None:
    samples = [(torch.rand(2), torch.rand(())) for _ in range(8)]
    one = trainer()
    one.fit(samples, samples)
    assert one.progress.samples > 0


def test_gradients_of_an_interrupted_step_are_not_in_the_next_fit(tmp_path: Path) -> None:
    failed: list[int] = []

    def fail_once(trainer: Trainer, *_: Any) -> None:
        if trainer.progress.step == 4 and not failed:
            failed.append(4)
            raise KeyboardInterrupt

    straight = made(tmp_path / "straight")
    straight.fit(loader(22, 4))
    again = made(tmp_path / "again", on(on_after_backward=fail_once))
    with pytest.raises(KeyboardInterrupt):
        again.fit(loader(22, 4))
    assert again.fit(loader(22, 4)).step == 9
    assert same(everything(again), everything(straight)) == []


@pytest.mark.parametrize("use", ["load", "validate"])
def test_a_fit_without_a_checkpoint_forgets_what_was_loaded_before(use: str, tmp_path: Path) -> None:
    made(tmp_path).fit(loader(22, 4))
    straight, again = (trainer(Noisy, settings={"max_duration": 3}) for _ in range(2))
    straight.fit(loader(22, 4))
    if use == "validate":
        again.validate(loader(3), tmp_path / "step9")
    else:
        again.load_checkpoint(tmp_path / "step9", load=LoadOptions(states=["model"]))
    assert again.fit(loader(22, 4), ckpt_path=None).step == 3
    assert same(straight.model.state_dict(), again.model.state_dict()) == []


def test_a_fit_that_goes_on_in_memory_keeps_every_record(tmp_path: Path) -> None:
    def fitted(stop: int, fits: int) -> list[dict[str, Any]]:
        run = tmp_path / str(stop)
        settings = {"max_duration": 12, "log_interval": 4}
        one = trainer(Line, callbacks=[StopAt(stop)], loggers=[JsonlLogger()], settings=settings, run_dir=run)
        for _ in range(fits):
            one.fit(loader(noise=0))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [{key: line[key] for key in ("step", "train/loss")} for line in lines]

    assert fitted(6, fits=2) == fitted(-1, fits=1)


def test_a_longer_loop_goes_on_with_the_means_of_the_earlier_one() -> None:
    def losses(*ends: int) -> list[tuple[int, float]]:
        logger = ListLogger()
        one = trainer(Line, loggers=[logger])
        for end in ends:
            one.loop = TrainingLoop(max_duration=end, log_interval=4)
            one.fit(loader(noise=0))
        return [(record.step, record.metrics["train/loss"]) for record in logger.records if record.step % 4 == 0]

    assert losses(9, 12) == losses(12)


PAGE = Path(__file__).parents[2] / "docs/python.md"


@pytest.fixture
def never_seeded() -> Any:
    """Torch's generator as a new process has it: seeded by chance."""
    before = torch.get_rng_state()
    torch.seed()
    yield
    torch.set_rng_state(before)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_duration": 5},
        {"max_duration": 5, "eval_interval": 2, "log_interval": 2},
        {"max_duration": 9, "hard_stop": 5, "log_interval": 5, "eval_interval": 5},
    ],
)
def test_a_finished_run_returns_again_what_it_reported_and_makes_no_step(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    results, loggers = [], [ListLogger(), ListLogger()]
    for logger in loggers:
        trained = trainer(settings=settings, loggers=[logger], checkpoint=CheckpointerCallback(tmp_path))
        results.append(trained.fit(loader(12, 4), loader(4, 4, shuffle=False)))
    assert (results[1].finished, results[1].step, results[1].metrics) == (True, 5, results[0].metrics)
    assert "val/loss" in results[1].metrics
    assert trained.model.calls == 0
    assert loggers[1].records == []


def test_a_run_that_goes_on_returns_what_it_measured_itself(tmp_path: Path) -> None:
    settings = {"max_duration": 3, "log_interval": None}
    trainer(settings=settings, checkpoint=CheckpointerCallback(tmp_path)).fit(loader(12, 4), loader(4, 4))
    longer = trainer(settings={**settings, "max_duration": 4}, checkpoint=CheckpointerCallback(tmp_path))
    assert longer.fit(loader(12, 4)).metrics.keys() == {"train/loss", "train/lr", "train/mae", "train/samples_per_s"}
    weights_alone = trainer(settings={"max_duration": 1})
    weights_alone.load_checkpoint(tmp_path / "step4")
    assert weights_alone.fit(loader(12, 4)).step == 4


def test_the_first_example_of_the_page_gives_the_same_in_every_process(
    never_seeded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example, *_) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    printed = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        torch.seed()
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(example, "example", "exec"), {})
        first, again = output.getvalue().splitlines()
        assert first == again
        printed.append(first)
    assert printed[0] == printed[1]


@pytest.mark.parametrize(
    ("model", "seed", "seeded", "warned"),
    [
        ("module", 0, False, True),
        ("module", 0, True, False),
        ("class", 0, False, False),
        ("module", None, False, False),
    ],
)
def test_a_seed_that_comes_too_late_for_the_weights_is_a_warning(
    model: str, seed: int | None, seeded: bool, warned: bool, never_seeded: None, caplog: pytest.LogCaptureFixture
) -> None:
    if seeded:
        torch.manual_seed(3)
    trainer(Line() if model == "module" else Line, seed=seed)
    assert ("made before the seed was set" in caplog.text) is warned


class Drawing(Noisy):
    """Draws random numbers in evaluations too."""

    def forward(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        loss, outputs = super().forward(batch)
        return loss, {**outputs, "drawn": torch.rand(())}


class Draws(Callback):
    """Draws numbers before the model is made, and when a fit begins."""

    def pre_setup(self, trainer: Trainer) -> None:
        torch.rand(3)

    def on_fit_start(self, trainer: Trainer, *_: Any) -> None:
        torch.rand(2)


class FailsOnce(Callback):
    """Raises an error at the start of the first fit, or after the first forward."""

    def __init__(self, hook: str) -> None:
        self.hook, self.count = hook, 0

    def on_fit_start(self, trainer: Trainer, *_: Any) -> None:
        self._fail("on_fit_start")

    def on_after_forward(self, trainer: Trainer, *_: Any) -> None:
        self._fail("on_after_forward")

    def _fail(self, hook: str) -> None:
        if hook == self.hook and not self.count:
            self.count += 1
            raise RuntimeError("once")


class Adding(TrainStep):
    """A step with state: it counts batches, and the loss depends on the count."""

    def __init__(self) -> None:
        self.count = 0

    def train_batch(self, batch: Any) -> Any:
        self.count += 1
        loss, outputs = self.forward(batch)
        self.backward(loss * self.count)
        return loss, outputs

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def drawing(*callbacks: Callback, **parts: Any) -> Trainer:
    """A trainer whose callbacks, step and model draw numbers or keep state. `parts` may be those of an earlier one."""
    return Trainer(
        model=Drawing,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        schedulers=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
        callbacks=[Draws(), *(callbacks or [EMA(decay=0.5)])],
        seed=0,
        device="cpu",
        **{"loop": TrainingLoop(max_duration=9, eval_interval=3, log_interval=2), "step": Adding(), **parts},
    )


def draw() -> None:
    torch.rand(5), random.random(), np.random.rand()


def fitted(one: Trainer, **more: Any) -> Trainer:
    one.fit(loader(22, 4), loader(3), **more)
    return one


def fitted_again(*callbacks: Callback, error: bool = False, **more: Any) -> Trainer:
    one = drawing(EMA(decay=0.5), *callbacks)
    with pytest.raises(RuntimeError, match="once") if error else contextlib.nullcontext():
        fitted(one)
    draw()
    one.validate(loader(3), ckpt_path=None)
    return fitted(one, **more)


def built_together() -> Trainer:
    first, second = drawing(), drawing()
    fitted(first)
    return fitted(second)


def built_one_after_the_other() -> Trainer:
    fitted(drawing())
    return fitted(drawing())


def evaluated_before() -> Trainer:
    one = drawing()
    draw()
    one.validate(loader(5))
    return fitted(one)


def made_of_the_same_parts() -> Trainer:
    average, loop = EMA(decay=0.5), TrainingLoop(max_duration=9, eval_interval=3, log_interval=2)
    step = Adding()
    fitted(drawing(average, loop=loop, step=step))
    return fitted(drawing(average, loop=loop, step=step))


USES: dict[str, Callable[[], Trainer]] = {
    "built together": built_together,
    "built one after the other": built_one_after_the_other,
    "made of the same parts": made_of_the_same_parts,
    "evaluated before": evaluated_before,
    "after a fit that failed at its start": lambda: fitted_again(FailsOnce("on_fit_start"), error=True),
    "stopped in between": lambda: fitted_again(StopAt(4)),
    "from the beginning again": lambda: fitted_again(ckpt_path=None),
    "from the beginning with used parts": lambda: fitted(made_of_the_same_parts(), ckpt_path=None),
}


@pytest.mark.parametrize("use", USES)
def test_a_fit_depends_on_its_config_alone(use: str) -> None:
    expected = everything(fitted(drawing()))
    draw()
    assert same(expected, everything(USES[use]())) == []


def test_an_evaluation_draws_the_same_numbers_each_time() -> None:
    one = fitted(drawing())
    first = one.validate(loader(3))
    draw()
    assert one.validate(loader(3)) == first


def test_a_callback_with_state_is_of_the_trainer_that_was_made_last(tmp_path: Path) -> None:
    average = EMA(decay=0.5)
    first, second = drawing(average), drawing(average)
    uses: list[Callable[[], Any]] = [
        lambda: fitted(first),
        lambda: first.validate(loader(3)),
        lambda: first.predict(loader(3)),
        lambda: first.save_checkpoint(tmp_path / "first"),
    ]
    for use in uses:
        with pytest.raises(
            UserError, match=r"callbacks\.EMA: this EMA was also given to a trainer that was made later"
        ):
            use()
    assert fitted(second).progress.step == 9


class Growing(Callback):
    """Its state is empty at first."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.state["step"] = trainer.progress.step

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def test_a_callback_that_cannot_begin_anew_is_refused() -> None:
    growing = Growing()
    first = fitted(drawing(growing))
    with pytest.raises(UserError, match=r"this Growing was given to an earlier trainer, and its state does not fit"):
        drawing(growing)
    # It was set up for the later one already.
    with pytest.raises(UserError, match=r"made later"):
        fitted(first)


@pytest.mark.parametrize("in_fit", [False, True])
def test_an_evaluation_of_a_checkpoint_leaves_a_training_as_it_is(in_fit: bool, tmp_path: Path) -> None:
    def evaluate(trainer: Trainer, *_: Any) -> None:
        if trainer.progress.step in (4, 5):
            trainer.validate_all(loader(3), tmp_path / "step3")

    made(tmp_path).fit(loader(22, 4))
    straight = made(None)
    straight.fit(loader(22, 4))
    other = made(None, on(on_train_batch_end=evaluate) if in_fit else StopAt(4))
    other.fit(loader(22, 4))
    if not in_fit:
        evaluate(other)
        other.fit(loader(22, 4))
    assert same(everything(straight), everything(other)) == []


class SavesOnly(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}


class LoadsOnly(Callback):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class LoadsToo(SavesOnly):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Loading:
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


class BesideAnother(Callback, Loading):
    """Has the methods of Callback."""


class StepSavesOnly(TrainStep):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}


@pytest.mark.parametrize(
    ("part", "missing"),
    [
        (SavesOnly, "SavesOnly has state_dict and no load_state_dict"),
        (LoadsOnly, "LoadsOnly has load_state_dict and no state_dict"),
        (StepSavesOnly, "StepSavesOnly has state_dict and no load_state_dict"),
        (LoadsToo, None),
        (BesideAnother, None),
        (Callback, None),
        (TrainStep, None),
    ],
)
def test_what_saves_a_state_loads_it_too(part: Any, missing: str | None) -> None:
    made = part()
    parts: dict[str, Any] = {"step": made} if isinstance(made, TrainStep) else {"callbacks": [made]}
    with contextlib.nullcontext() if missing is None else pytest.raises(UserError, match=missing):
        trainer(**parts)
