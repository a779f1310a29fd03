"""Every part with a state: a run that was stopped and resumed ends bit for bit where one without a stop ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_parts import data_loader
from tiny import (
    Line,
    ListLogger,
    Noisy,
    Points,
    StopAt,
    StopInEvaluation,
    Unsized,
    assert_resumes_exactly,
    everything,
    loader,
    make_sgd,
    on,
    same,
    trainer,
    without_clock,
)
from torch.optim import lr_scheduler as lr
from torch.utils.data import DataLoader, TensorDataset, default_collate

from trainer_cli import Scheduled, WarmupCosine, optimizer_factory
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.early_stopping import EarlyStopping
from trainer_cli.callbacks.ema import EMA
from trainer_cli.catalog.catalog import Catalog
from trainer_cli.errors import UserError
from trainer_cli.trainer.precision import Precision


def twice(samples: list[Any]) -> Any:
    """A batch whose leading size is not the number of its samples."""
    return default_collate(samples + samples)


class Counting:
    """A lazy stream with a position, and no length."""

    def __init__(self, batches: int = 5) -> None:
        self.batches, self.position = batches, 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < self.batches:
            self.position += 1
            x = torch.full((2, 2), self.position / 10)
            yield x, x.sum(1)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Restarting(Counting):
    """One that knows its length, and begins anew with each epoch unless a position was loaded."""

    resumed = False

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        self.position, self.resumed = self.position if self.resumed else 0, False
        return super().__iter__()

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.resumed = True


def _shuffled() -> Any:
    torch.manual_seed(8)
    return DataLoader(TensorDataset(torch.rand(10, 2), torch.arange(10.0)), batch_size=2, shuffle=True)


def _adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=0.05)


def _lbfgs(model: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=4, history_size=3)


OPTIMIZERS: dict[str, Any] = {"sgd": make_sgd, "adamw": _adamw}
SCHEDULES: dict[str, Any] = {
    "no schedule": None,
    "warmup cosine": lambda optimizer: WarmupCosine(optimizer, 18, warmup=2),
    "one cycle": lambda optimizer: lr.OneCycleLR(optimizer, max_lr=0.1, total_steps=40),
    "step": lambda optimizer: lr.StepLR(optimizer, step_size=3, gamma=0.5),
}
_TO_9 = {"max_duration": 9, "eval_interval": None}
# Settings of the trainer, with functions that make what has a state; and the steps after which the run is stopped.
RUNS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    **{
        f"{optimizer}, {schedule}": ({"optimizer": OPTIMIZERS[optimizer], "schedulers": SCHEDULES[schedule]}, (4, 6))
        for optimizer in OPTIMIZERS
        for schedule in SCHEDULES
    },
    "many stops": ({"schedulers": SCHEDULES["warmup cosine"]}, (1, 6, 7, 12)),
    "accumulation of 3": (
        {"optimizer": _adamw, "schedulers": SCHEDULES["step"], "settings": {"grad_accum_steps": 3}}, (1, 2),
    ),
    "accumulation of 4": ({"schedulers": SCHEDULES["warmup cosine"], "settings": {"grad_accum_steps": 4}}, (1, 3)),
    "samples left out": ({"train": lambda: loader(22, 4, drop_last=True), "optimizer": _adamw}, (4, 5, 7)),
    "two workers": ({"optimizer": _adamw, "train": lambda: loader(22, 4, num_workers=2)}, (4, 6)),
    "two workers and accumulation": (
        {"train": lambda: loader(22, 4, num_workers=2), "settings": {"grad_accum_steps": 3}}, (1,),
    ),
    "batches of other leading sizes": ({"train": lambda: loader(22, 4, collate_fn=twice)}, (3,)),
    "the same in a DataLoader": (
        {"train": lambda: data_loader(Points(22), 4, shuffle=True, collate_fn=twice)}, (3,),
    ),
    "a stream with a position": ({"train": Counting, "model": Line, "settings": _TO_9}, (1, 3, 5, 7)),
    "a loader without length": ({"train": lambda: Unsized(5), "model": Line, "settings": _TO_9}, (1, 3, 5, 7)),
    "a shuffled DataLoader": ({"train": _shuffled, "model": Line, "settings": _TO_9}, (1, 3, 5, 7)),
    "a loader with a position": ({"train": Restarting, "model": Line, "settings": _TO_9}, (2, 3, 5, 6)),
    "a limited loader with a position": (
        {"train": Restarting, "model": Line, "settings": {**_TO_9, "limit_train_batches": 3}}, (2, 3, 5, 6),
    ),
    "lbfgs": ({"optimizer": _lbfgs}, (4,)),
    "lbfgs, clipped": ({"optimizer": _lbfgs, "precision": Precision(clip_norm=0.5)}, (4,)),
    "frozen parameters": (
        {"optimizer": optimizer_factory(torch.optim.Adam, lr=0.1), "freeze": ["body.0.*", "re:body[.]1[.].*"]}, (3,),
    ),
    "unfreezing": (
        {
            "optimizer": optimizer_factory(torch.optim.Adam, lr=0.1), "freeze": {"body.0.*": "1ep", "body.1.*": 4},
            "callbacks": lambda: [EMA(0.9, start=2)], "schedulers": SCHEDULES["warmup cosine"],
        },
        (3, 4, 6, 7),
    ),
    "unfreezing with accumulation, by samples": (
        {
            "optimizer": _adamw, "freeze": {"body.0.*": "20sp", "body.1.*": "0.5dur"},
            "settings": {"grad_accum_steps": 2},
        },
        (1, 3, 4),
    ),
    "all at once": (
        {
            "optimizer": _adamw, "schedulers": SCHEDULES["warmup cosine"], "callbacks": lambda: [EMA(0.9)],
            "precision": Precision("fp16", loss_scale=64),
        },
        (1, 3, 6),
    ),
}  # fmt: skip


def _fit(name: str, folder: Path, *callbacks: Any) -> Any:
    settings = dict(RUNS[name][0])
    train: Callable[[], Any] = settings.pop("train", lambda: loader(22, 4))
    made = trainer(
        settings.pop("model", Noisy),
        optimizer=settings.pop("optimizer", make_sgd),
        callbacks={str(number): callback for number, callback in
                   enumerate([*settings.pop("callbacks", list)(), *callbacks])},
        settings={"max_duration": "3ep", "eval_interval": "0.5ep", "log_interval": 4, **settings.pop("settings", {})},
        checkpoint=CheckpointerCallback(folder),
        **settings,
    )  # fmt: skip
    made.fit(train(), loader(5, 2, shuffle=False))
    return made


@pytest.mark.parametrize("name", RUNS)
def test_a_resume_ends_bit_for_bit_where_going_through_ends(name: str, tmp_path: Path) -> None:
    """With dropout, batch norm, noisy samples and a smaller last batch: six batches an epoch, if not said otherwise."""
    straight, resumed = assert_resumes_exactly(lambda *args: _fit(name, *args), tmp_path, *RUNS[name][1])
    assert straight.progress.samples == resumed.progress.samples


def test_two_runs_with_other_seeds_do_not_end_alike() -> None:
    """So that the comparison above can fail at all."""
    ends = []
    for seed in (0, 1):
        trained = trainer(Noisy, seed=seed)
        trained.fit(loader(22, 4))
        ends.append(everything(trained))
    assert same(ends[0]["model"], ends[1]["model"])
    assert same(ends[0]["rng"], ends[1]["rng"])


def _plateau(optimizer: torch.optim.Optimizer) -> lr.ReduceLROnPlateau:
    return lr.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)


def _logging_run(folder: Path, logger: ListLogger, *callbacks: Any, **settings: Any) -> Any:
    """A run whose rate and patience follow the loss that is logged every five steps; it evaluates every four."""
    made = trainer(
        Noisy,
        optimizer=_adamw,
        schedulers=Scheduled(_plateau, "log", metric="train/loss"),
        callbacks=[EarlyStopping("train/loss", patience=100), *callbacks],
        settings={"max_duration": 16, "eval_interval": 4, "log_interval": 5, **settings},
        checkpoint=CheckpointerCallback(
            folder, save_interval=6, ephemeral_save_interval=4, max_checkpoints=3, keep_best={"metric": "val/loss"}
        ),
        loggers=[logger],
        run_dir=folder,
    )
    made.fit(loader(22, 4), loader(5, 2, shuffle=False))
    return made


def _training_metrics(logger: ListLogger) -> dict[int, dict[str, float]]:
    """Step -> what was logged of the training, and never twice."""
    steps = [step for step, _ in logger.stream]
    assert len(steps) == len(set(steps))
    by_step = {
        step: {key: value for key, value in metrics.items() if key.startswith("train/")}
        for step, metrics in logger.stream
    }
    return {step: metrics for step, metrics in by_step.items() if metrics}


PARTS: dict[str, list[dict[str, Any]]] = {
    "at hard_stop": [{"hard_stop": 7}],
    "at hard_stop in epochs": [{"hard_stop": "1.5ep"}],
    "at hard_stop in samples": [{"hard_stop": "41sp"}, {"hard_stop": "41sp"}],
    "where an evaluation is due": [{"hard_stop": 8}],
    "where a log is due": [{"hard_stop": 10}],
    "where both are due": [{"hard_stop": 20}],
    "where a save is due": [{"hard_stop": 6}],
    "before the first log": [{"hard_stop": 1}],
    "twice": [{"hard_stop": 6}, {"hard_stop": 8}],
    "and again": [{"hard_stop": 7}, {"hard_stop": 7}],
    "with its evaluation interrupted": [{"hard_stop": 8, "interrupted": 8}, {"hard_stop": 8}],
    "at max_time": [{"max_time": "0.001s"}] * 9,
    "at hard_stop and max_time": [{"hard_stop": 1, "max_time": "0.001s"}],
    "by a signal": [{"signal": 7}, {"signal": 12}],
}
"""Parts of a run, by what ends them."""


def _looking_run(folder: Path, logger: ListLogger, *callbacks: Any, **settings: Any) -> Any:
    looks = on(on_train_batch_end=lambda trainer, *_: trainer.is_log_step and trainer.log_metrics(looked=1.0))
    return _logging_run(folder, logger, *callbacks, looks, max_duration=24, eval_sanity_steps=1, **settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """What a run without an end in between logs, has at its end, and saves."""
    folder, logger = tmp_path_factory.mktemp("whole"), ListLogger()
    straight = _looking_run(folder, logger)
    return logger.stream, everything(straight), _saved(folder)


@pytest.mark.parametrize("parts", PARTS)
def test_the_end_of_a_part_of_a_run_leaves_no_trace(parts: str, whole: tuple[Any, ...], tmp_path: Path) -> None:
    logger = ListLogger()
    for part in map(dict, PARTS[parts]):
        stops = StopAt(part.pop("signal", -1)), StopInEvaluation(part.pop("interrupted", -1))
        _looking_run(tmp_path, logger, *stops, **part)
    rest = _looking_run(tmp_path, logger)
    stream, end, saved = whole
    assert logger.stream == stream
    assert same(end, everything(rest)) == []
    assert _saved(tmp_path) == saved


def _saved(folder: Path) -> list[Any]:
    """What the manifests of the checkpoints in a folder say of the run."""
    manifests = [Catalog.of(folder).entry(path.name).manifest for path in sorted(folder.glob("step*"))]
    return [
        (manifest.step, manifest.kind, manifest.reason, manifest.finished, without_clock(manifest.metrics))
        for manifest in manifests
        if manifest is not None
    ]


def test_a_hard_stop_behind_the_position_is_refused(tmp_path: Path) -> None:
    _logging_run(tmp_path, ListLogger(), StopAt(9), max_duration=12)
    for passed in (8, "1ep", "30sp"):
        with pytest.raises(UserError, match=rf"loop.hard_stop is {passed}, but the run is at step 9 already"):
            _logging_run(tmp_path, ListLogger(), max_duration=12, hard_stop=passed)
    made = _logging_run(tmp_path, ListLogger(), max_duration=12, hard_stop=9)
    assert (made.progress.step, made.stop_reason) == (9, "hard_stop at 9 steps")
    assert _logging_run(tmp_path, ListLogger(), max_duration=12).progress.step == 12


@pytest.mark.parametrize(("hard_stop", "later"), [(7, None), (9, None), ("2ep", None), (9, 12), (None, 12)])
def test_a_hard_stop_reopens_no_run_that_a_callback_has_ended(
    hard_stop: int | str | None, later: int | None, tmp_path: Path
) -> None:
    whole, logger = ListLogger(), ListLogger()
    straight = _logging_run(tmp_path / "whole", whole, StopAt(7, finished=True), max_duration=24)
    _logging_run(tmp_path / "parts", logger, StopAt(7, finished=True), max_duration=24, hard_stop=hard_stop)
    again = _logging_run(tmp_path / "parts", logger, StopAt(-1, finished=True), max_duration=24, hard_stop=later)
    assert (again.progress.step, again.stop_reason) == (7, straight.stop_reason)
    assert logger.stream == whole.stream
    assert _saved(tmp_path / "parts") == _saved(tmp_path / "whole")


ENDS: dict[str, list[dict[str, Any]]] = {
    "at max_duration": [{"max_duration": 7}],
    "where an evaluation is due": [{"max_duration": 8}],
    "where a log is due": [{"max_duration": 10}],
    "by request": [{"stop": 7}],
    "twice": [{"max_duration": 6}, {"max_duration": 8}],
    "with its evaluation interrupted": [{"max_duration": 7, "interrupted": 7}, {"max_duration": 7}],
    "and finished again": [{"max_duration": 7}, {"max_duration": 7}],
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """What a run that was never ended logs, and has at its end."""
    logger = ListLogger()
    made = _logging_run(tmp_path_factory.mktemp("straight"), logger)
    metrics = _training_metrics(logger)
    # The last record is that of its end.
    del metrics[16]
    return metrics, everything(made)


@pytest.mark.parametrize("ends", ENDS)
def test_a_run_that_had_ended_logs_the_same_steps_as_one_that_had_not(
    ends: str, straight: tuple[Any, ...], tmp_path: Path
) -> None:
    parts = ListLogger()
    for settings in map(dict, ENDS[ends]):
        stop, interrupted = settings.pop("stop", -1), settings.pop("interrupted", -1)
        _logging_run(tmp_path / "parts", parts, StopAt(stop, finished=True), StopInEvaluation(interrupted), **settings)
    # A run that was finished by a request goes on with a longer `max_duration` alone.
    longer = _logging_run(tmp_path / "parts", parts, max_duration=17, hard_stop=16)
    logged, (expected, end) = _training_metrics(parts), straight
    assert {step: logged[step] for step in expected} == expected
    assert same(end, everything(longer)) == []
