"""Callbacks that evaluate: every n-th time and the last; text samples, confusion matrix, metrics of torchmetrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tiny import ListLogger, StopAt, loader, trainer
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from trainer_cli.addons.inspect.metrics import ConfusionMatrix, Metrics
from trainer_cli.addons.inspect.samples import TextSamples
from trainer_cli.addons.text.gpt import GPT
from trainer_cli.addons.text.text import Windows
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.validation_callback import ValidationCallback
from trainer_cli.data.loader import Loader
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.models.classification import classification
from trainer_cli.trainer.trainer import Trainer

F1_OF_ONE_EPOCH = {"max_duration": 4, "eval_interval": 2}


class Downstream(ValidationCallback):
    """Reports where it was called, and whether gradients and train mode were off."""

    scope = "task"

    def evaluate(self, trainer: Trainer) -> Mapping[str, float]:
        assert not torch.is_grad_enabled()
        assert not trainer.model.training
        assert "val" in self.val_loaders
        torch.rand(3)
        return {"score": float(trainer.progress.step)}


@pytest.mark.parametrize(("every", "steps"), [(1, [2, 4, 6, 7]), (2, [4, 7]), (3, [6, 7]), (9, [7])])
def test_it_is_called_every_nth_time_and_the_last(every: int, steps: list[int]) -> None:
    logger = ListLogger()
    settings = {"max_duration": 7, "eval_interval": 2}
    made = trainer(callbacks=[Downstream(every)], loggers=[logger], settings=settings)
    made.fit(loader(), loader(4, shuffle=False))
    assert logger.steps("task/score") == steps
    assert made.model.training


def test_the_count_survives_a_resume_and_an_early_end_has_its_last_call(tmp_path: Any) -> None:
    logger, settings = ListLogger(), {"max_duration": 9, "eval_interval": 2}

    def fit(*more: Any) -> None:
        saver = CheckpointerCallback(tmp_path, save_interval=2)
        made = trainer(callbacks=[Downstream(2), *more], loggers=[logger], checkpoint=saver, settings=settings)
        made.run_dir = tmp_path
        made.fit(loader(), loader(4, shuffle=False))

    with StopAt(2):
        fit()
    fit()
    assert logger.steps("task/score") == [4, 8, 9]
    early = ListLogger()

    class Ends(ValidationCallback):
        def on_after_evaluation(self, trainer: Trainer, metrics: Any) -> None:
            trainer.stop("enough")

        def evaluate(self, trainer: Trainer) -> None:
            return None

    made = trainer(callbacks=[Ends(5), Downstream(5)], loggers=[early], settings=settings)
    made.fit(loader(), loader(4, shuffle=False))
    assert early.steps("task/score") == [2]


def test_it_is_called_for_each_checkpoint_and_needs_a_count() -> None:
    rows = trainer(optimizer=None, callbacks=[Downstream(7)]).validate_all(loader(4), [None, None])
    assert [row.metrics for row in rows if row.loader == "task"] == [{"score": 0.0}, {"score": 0.0}]
    with pytest.raises(ConfigError, match="every is 0"):
        Downstream(0)


def _gpt(vocabulary: int) -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=vocabulary, context=8, layers=1, heads=1, width=8)


def test_a_language_model_continues_prompts_by_the_tokens_of_its_data() -> None:
    windows = Windows(torch.arange(40) % 5, 8, stride=8, characters="abcd\n")
    logger, samples = ListLogger(), TextSamples(["ab", "c"], length=12, every=1)

    def fit() -> list[dict[str, str]]:
        logger.records.clear()
        made = trainer(_gpt(5), callbacks=[samples], loggers=[logger], settings={"max_duration": 2})
        before = torch.get_rng_state()
        made.fit(Loader(windows, 2, shuffle=False, seed=0), Loader(windows, 2, shuffle=False, seed=0))
        assert torch.equal(before, torch.get_rng_state())
        return [dict(record.texts) for record in logger.records if record.texts]

    (texts,) = fit()
    assert set(texts) == {"samples/0", "samples/1"}
    assert texts["samples/0"].startswith("ab")
    assert len(texts["samples/0"]) == 14
    assert set("".join(texts.values())) <= set("abcd\n")
    assert fit() == [texts], "samples depend on weights, step and seed alone"
    with pytest.raises(UserError, match="the text has no character 'z'"):
        windows.encode("az")


def test_without_a_codec_tokens_are_bytes_and_greedy_is_the_likeliest() -> None:
    class Next(nn.Module):
        """The next token is the last one and one."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def logits(self, tokens: torch.Tensor) -> torch.Tensor:
            return nn.functional.one_hot((tokens + 1) % 256, 256) * self.weight

        def forward(self, batch: Any) -> Any:
            return self.weight.sum()

    logger = ListLogger()
    made = trainer(Next, callbacks=[TextSamples("a", length=3, temperature=0)], loggers=[logger])
    made.fit(loader(), loader(4))
    assert [dict(record.texts) for record in logger.records if record.texts] == [{"samples/0": "abcd"}]


class Classifier(nn.Module):
    """Three classes; the metric of torchmetrics is a part of it, as in Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.f1 = MulticlassF1Score(num_classes=3, average="macro")

    def forward(self, batch: Any) -> Any:
        x, y = batch
        logits = self.linear(x)
        self.f1.update(logits, y)
        return {**classification(logits, y, training=self.training), "own_f1": self.f1}


def _points() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(23, 2, generator=generator), torch.arange(23) % 3)


def test_metrics_of_torchmetrics_are_computed_over_all_samples_and_not_averaged_over_batches() -> None:
    points, logger = _points(), ListLogger()
    given = {"f1": MulticlassF1Score(num_classes=3), "both": MetricCollection([MulticlassAccuracy(num_classes=3)])}
    made = trainer(
        Classifier, callbacks=[Metrics(given), ConfusionMatrix(cell=2)], loggers=[logger], settings=F1_OF_ONE_EPOCH
    )
    made.fit(Loader(points, 5, shuffle=True, seed=0), Loader(points, 4, shuffle=False, seed=0))
    made.model.eval()
    with torch.no_grad():
        scores = made.model.linear(points.tensors[0])
    expected = float(MulticlassF1Score(num_classes=3, average="macro")(scores, points.tensors[1]))
    last = logger.records[-1]
    assert last.metrics["val/f1"] == pytest.approx(expected)
    assert last.metrics["val/own_f1"] == pytest.approx(expected)
    assert last.metrics["val/both/MulticlassAccuracy"] <= 1
    matrix = made.get_callback(ConfusionMatrix)
    assert matrix is not None
    wanted = torch.zeros(3, 3, dtype=torch.int64)
    for target, predicted in zip(points.tensors[1], scores.argmax(1), strict=True):
        wanted[target, predicted] += 1
    assert torch.equal(matrix.counts, wanted)
    assert last.images["val/confusion"].shape == (6, 6, 1)
    table = last.tables["val/confusion"]
    assert table.columns == ("class", "0", "1", "2")
    assert [row[1:] for row in table.rows] == [tuple(row) for row in wanted.tolist()]
    assert table.is_matrix
    assert made.model.training is False


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Metrics({"f1": 3}), r"metrics\.f1 is a int, but it must have update"),
        (lambda: Metrics({"f1": MulticlassF1Score(num_classes=3)}, predictions="scores"), "nor the batch has 'scores'"),
        (lambda: ConfusionMatrix(targets=5), "nor the batch has '5'"),
    ],
)
def test_a_wrong_name_says_what_there_is(made: Any, message: str) -> None:
    with pytest.raises((ConfigError, UserError), match=message):
        trainer(Classifier, optimizer=None, callbacks=[made()]).validate(Loader(_points(), 4, shuffle=False, seed=0))


def test_a_confusion_matrix_is_drawn_with_labels_numbers_and_a_scale() -> None:
    matrix = ConfusionMatrix(cell=20, labels=["cat", "a label that is far too long to be drawn"])
    matrix.counts = torch.tensor([[9, 1], [0, 10**9]])
    drawn = matrix.picture(matrix.labels)
    channels, height, width = drawn.shape
    assert channels == 3
    assert min(height, width) > 2 * 20
    assert drawn.dtype.name == "uint8"
    # Red along the scale at the right, from the share 1 down to the white of 0.
    scale = drawn[0, :, -30].astype(int)
    assert scale.min() == 8
    assert (np.diff(scale[scale.argmin() :]) >= 0).all()
