"""Helps to find mistakes: the first batch, anomalies, a sanity evaluation, a few batches to overfit."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import ListLogger, loader, recorder, trainer
from torch import nn
from torch.utils.data import DataLoader

from trainer_cli.callbacks.check_finite import AnomalyDetection
from trainer_cli.callbacks.learning_rate_monitor import COLUMNS, BatchSummary
from trainer_cli.components.targets import Trust
from trainer_cli.errors import ConfigError
from trainer_cli.running.build import Builder
from trainer_cli.schema.sections import TrainConfig
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.trainer import Trainer


class Data:
    """Twenty numbers; two validation sets."""

    def __init__(self, batches: bool = False) -> None:
        numbers = torch.utils.data.TensorDataset(torch.arange(20.0))
        self.train: Any = DataLoader(numbers) if batches else numbers
        self.val = {"near": numbers, "far": numbers}


def test_the_first_batch_and_its_outputs_are_shown_once(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, batch: Any) -> Any:
            odd = torch.tensor([1.0, float("nan")])
            return {"loss": self.weight.sum(), "all": {"nan": odd}, "none": torch.zeros(0)}

    logger = ListLogger()
    with caplog.at_level("INFO", logger="trainer_cli"):
        trainer(Odd, callbacks=[BatchSummary()], loggers=[logger], settings={"max_duration": 3}).fit(loader())
    (table,) = (record.tables["debug/first_batch"] for record in logger.records if record.tables)
    assert table.columns == COLUMNS
    assert table.rows[2:] == (
        ("outputs.loss", "()", "float32", 1.0, 1.0, 1.0, 0),
        ("outputs.all.nan", "(2,)", "float32", 1.0, 1.0, 1.0, 1),
        ("outputs.none", "(0,)", "float32", "", "", "", ""),
    )
    assert [row[:3] for row in table.rows[:2]] == [("batch.0", "(4, 2)", "float32"), ("batch.1", "(4,)", "float32")]
    assert sum("outputs.loss: ()" in one.getMessage() for one in caplog.records) == 1


def test_an_anomaly_names_the_operation_and_is_looked_for_in_the_fit_alone() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, batch: Any) -> Any:
            return (self.weight.sqrt() * 0).sum()

    with pytest.warns(UserWarning, match="Error detected in SqrtBackward"), pytest.raises(RuntimeError, match="Sqrt"):
        trainer(Root, callbacks=[AnomalyDetection()], settings={"max_duration": 1}).fit(loader())
    assert not torch.is_anomaly_enabled()


def test_a_sanity_evaluation_sees_so_many_batches_and_leaves_no_trace() -> None:
    book: list[str] = []
    logger = ListLogger()
    settings = {"max_duration": 1, "eval_sanity_steps": 2, "eval_interval": None}
    trainer(callbacks=[recorder(book)], loggers=[logger], settings=settings).fit(loader(), loader(12, shuffle=False))
    first = book[: book.index("on_enter_train")]
    assert (first.count("on_validate_batch_end"), first.count("run_validation")) == (2, 1)
    assert logger.steps("val/loss") == [1]


@pytest.mark.parametrize(
    ("settings", "batches"),
    [
        ({"eval_sanity_steps": 3}, {"a": 3, "b": 3}),
        ({"eval_sanity_steps": 3, "eval_steps": 2}, {"a": 2, "b": 2}),
        ({"eval_sanity_steps": 3, "eval_loaders": {"a": {"steps": 1}}}, {"a": 1, "b": 3}),
        ({"eval_sanity_steps": 1, "eval_steps": 2}, {"a": 1, "b": 1}),
    ],
)
def test_a_sanity_evaluation_is_no_longer_than_an_evaluation(settings: dict[str, Any], batches: dict[str, int]) -> None:
    seen = {"a": 0, "b": 0}

    class Counts(Callback):
        def on_validate_batch_end(self, trainer: Trainer, *args: Any) -> None:
            seen[trainer.name_scope_path[:1]] += trainer.sanity_checking

    loaders = {name: loader(16, 4, shuffle=False) for name in "ab"}
    trainer(callbacks=[Counts()], settings={"max_duration": 1, **settings}).fit(loader(), loaders)
    assert seen == batches


def _data(**settings: Any) -> Any:
    node = {"_target_": "debugged.Data", "batch_size": 4, **settings}
    return Builder(TrainConfig(data=node, seed=3), Trust()).data()


def test_a_few_batches_are_the_same_in_every_epoch_and_are_evaluated_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "debugged", SimpleNamespace(Data=Data))
    made = _data(overfit_batches=2)
    epochs = [[batch[0].tolist() for batch in made.train.iterate(epoch)] for epoch in (0, 1)]
    assert epochs[0] == epochs[1]
    assert [len(batch) for batch in epochs[0]] == [4, 4]
    assert list(made.val) == ["near", "far"]
    assert [batch[0].tolist() for batch in made.val["far"].iterate(0)] == epochs[0]
    assert {one for batch in epochs[0] for one in batch} != set(range(8)), "they are not the first of sorted data"
    with pytest.raises(ConfigError, match=r"data\.overfit_batches needs a dataset"):
        _data(overfit_batches=2, batches=True)
