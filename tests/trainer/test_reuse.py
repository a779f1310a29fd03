"""One trainer used more than once, as a library user does: nothing of an earlier fit is in the way of the next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Line, ListLogger, Noisy, StopAt, StopInEvaluation, everything, loader, same, trainer
from torch.utils.data import DataLoader, TensorDataset

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.early_stopping import EarlyStopping
from trainer_cli.callbacks.ema import EMA
from trainer_cli.core.load_options import LoadOptions
from trainer_cli.errors import UserError
from trainer_cli.loggers.text_files import JsonlLogger
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.trainer import Trainer
from trainer_cli.trainer.validation_loop import EvaluationInterruptedError


def made(folder: Path, *callbacks: Callback, length: int = 9, model: Any = Noisy, **more: Any) -> Trainer:
    return trainer(
        model,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        schedulers=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
        callbacks=[EMA(decay=0.5), *callbacks],
        settings={"max_duration": length, "eval_interval": 3, "log_interval": 1},
        checkpoint=CheckpointerCallback(folder, save_interval=3),
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
    one.callbacks["StopInEvaluation"].step = -1  # type: ignore[attr-defined]
    assert one.validate(loader(9, 2))["val"]["loss"] > 0


def test_without_a_checkpoint_a_reused_trainer_begins_anew(tmp_path: Path) -> None:
    logs = ListLogger()
    patient = EarlyStopping("val/loss", patience=2)
    one = trainer(
        Noisy,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        schedulers=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
        callbacks=[EMA(decay=0.5), patient],
        loggers=[logs],
        settings={"max_duration": 9, "eval_interval": 3, "log_interval": 1},
    )
    ends, streams = [], []
    for _ in range(2):
        one.fit(loader(22, 4), loader(3), ckpt_path=None)
        ends.append({name: value.clone() for name, value in one.model.state_dict().items()})
        streams.append(logs.stream)
        logs.records.clear()
    assert streams[0] == streams[1]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_model_given_as_an_instance_begins_anew_from_its_weights() -> None:
    seen: list[torch.Tensor] = []

    class Looks(Callback):
        def on_fit_start(self, trainer: Trainer, *_: Any) -> None:
            seen.append(trainer.model.linear.weight.detach().clone())

    model = Line()
    one = trainer(model, callbacks=[Looks()])
    one.fit(loader(), ckpt_path=None)
    after = model.linear.weight.detach().clone()
    assert one.fit(loader(), ckpt_path=None).step == 6
    assert torch.equal(seen[1], after)


@pytest.mark.parametrize("kind", [list, tuple])
def test_several_training_loaders_are_refused(kind: type) -> None:
    several = kind(DataLoader(TensorDataset(torch.ones(4, 2), torch.ones(4))) for _ in range(2))
    with pytest.raises(UserError, match="join training data in one dataset"):
        trainer().fit(several)


def test_a_list_of_samples_is_still_a_dataset() -> None:
    samples = [(torch.rand(2), torch.rand(())) for _ in range(8)]
    one = trainer()
    one.fit(samples, samples)
    assert one.progress.samples > 0


class FailsOnce(Callback):
    """Raises between backward and the optimizer's step of step 5, once."""

    failed = False

    def on_after_backward(self, trainer: Trainer, *_: Any) -> None:
        if trainer.progress.step == 4 and not self.failed:
            self.failed = True
            raise KeyboardInterrupt


def test_gradients_of_an_interrupted_step_are_not_in_the_next_fit(tmp_path: Path) -> None:
    straight = made(tmp_path / "straight")
    straight.fit(loader(22, 4))
    again = made(tmp_path / "again", FailsOnce())
    with pytest.raises(KeyboardInterrupt):
        again.fit(loader(22, 4))
    assert again.fit(loader(22, 4)).step == 9
    assert same(everything(again), everything(straight)) == []


def test_a_fit_without_a_checkpoint_forgets_what_was_loaded_before(tmp_path: Path) -> None:
    source = made(tmp_path / "source")
    source.fit(loader(22, 4))
    straight = trainer(Noisy, settings={"max_duration": 3})
    straight.fit(loader(22, 4))
    for use in ("load", "validate"):
        one = trainer(Noisy, settings={"max_duration": 3})
        if use == "validate":
            one.validate(loader(3), tmp_path / "source" / "step9")
        else:
            one.load_checkpoint(tmp_path / "source" / "step9", load=LoadOptions(states=["model"]))
        assert one.fit(loader(22, 4), ckpt_path=None).step == 3
        assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), straight.model.parameters(), strict=True))


def test_a_fit_that_goes_on_in_memory_keeps_every_record(tmp_path: Path) -> None:
    def fitted(*stops: int) -> list[dict[str, Any]]:
        run = tmp_path / str(len(stops))
        stop = StopAt(stops[0]) if stops else StopAt(-1)
        one = trainer(
            Line,
            callbacks=[stop],
            loggers=[JsonlLogger()],
            settings={"max_duration": 12, "log_interval": 4},
            run_dir=run,
        )
        one.fit(loader(noise=0))
        if stops:
            one.fit(loader(noise=0))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [{key: line[key] for key in ("step", "train/loss")} for line in lines]

    assert fitted(6) == fitted()
