"""Text samples, confusion matrix and metrics of torchmetrics, which are over all samples of an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tiny import ListLogger, loader, trainer
from torch import nn
from torch.utils.data import TensorDataset

import trainer_cli as t
from trainer_cli.addons.inspect.metrics import ConfusionMatrix, Metrics
from trainer_cli.addons.inspect.samples import TextSamples
from trainer_cli.data.loader import Loader
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.models.classification import classification

F1_OF_ONE_EPOCH = {"max_duration": 4, "eval_interval": 2}


def _f1(**settings: Any) -> Any:
    # Here, as importing it takes long.
    from torchmetrics.classification import MulticlassF1Score

    return MulticlassF1Score(num_classes=3, **settings)


def _gpt(vocabulary: int) -> Any:
    torch.manual_seed(0)
    make = pytest.importorskip("trainer_cli.addons.text.gpt").GPT
    return make(vocab_size=vocabulary, context=8, layers=1, heads=1, width=8)


def test_a_language_model_continues_prompts_by_the_tokens_of_its_data() -> None:
    windows = pytest.importorskip("trainer_cli.addons.text.text").Windows(
        torch.arange(40) % 5, 8, stride=8, characters="abcd\n"
    )
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
        self.f1 = _f1(average="macro")

    def forward(self, batch: Any) -> Any:
        x, y = batch
        logits = self.linear(x)
        self.f1.update(logits, y)
        return {**classification(logits, y, training=self.training), "own_f1": self.f1}


def _points() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(23, 2, generator=generator), torch.arange(23) % 3)


def test_metrics_of_torchmetrics_are_computed_over_all_samples_and_not_averaged_over_batches() -> None:
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy

    points, logger = _points(), ListLogger()
    given = {"f1": _f1(), "both": MetricCollection([MulticlassAccuracy(num_classes=3)])}
    made = trainer(
        Classifier, callbacks=[Metrics(given), ConfusionMatrix(cell=2)], loggers=[logger], settings=F1_OF_ONE_EPOCH
    )
    made.fit(Loader(points, 5, shuffle=True, seed=0), Loader(points, 4, shuffle=False, seed=0))
    made.model.eval()
    with torch.no_grad():
        scores = made.model.get_submodule("linear")(points.tensors[0])
    expected = float(_f1(average="macro")(scores, points.tensors[1]))
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
        (lambda: Metrics({"f1": _f1()}, predictions="scores"), "nor the batch has 'scores'"),
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


# What a confusion matrix cannot count is one message that names it.


SCORES = torch.eye(3)
DTYPES = (
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip


def count(predicted: Any, targets: Any) -> ConfusionMatrix:
    matrix = ConfusionMatrix()
    trainer, loop = cast("Any", SimpleNamespace()), cast("Any", SimpleNamespace(counts=True))
    matrix.on_validate_start(trainer, torch.nn.Identity(), None, loop)
    outputs = {"logits": predicted, "labels": targets}
    matrix.on_validate_batch_end(trainer, torch.nn.Identity(), outputs, None, 0)
    return matrix


@pytest.mark.parametrize(
    ("predicted", "targets", "message"),
    [
        (SCORES, torch.tensor([0, 1, -100]), "targets 'labels' have the class -100. Leave samples without"),
        (SCORES, torch.tensor([0, 1, 3]), "targets 'labels' have the class 3, but the scores are of 3 classes"),
        (SCORES, torch.tensor([0, 1]), "3 predictions for 2 targets"),
        (SCORES, torch.tensor([0.5, 1, 2]), "targets 'labels' are torch.float32, and no numbers of classes"),
        (SCORES, torch.tensor([0, float("nan"), 2]), "targets 'labels' are torch.float32, and no numbers of classes"),
        (SCORES, torch.tensor([0, float("inf"), 2]), "targets 'labels' are torch.float32, and no numbers of classes"),
        (SCORES, torch.tensor([0, -float("inf"), 2]), "targets 'labels' are torch.float32, and no numbers of classes"),
        (SCORES, torch.tensor([0, 1e30, 2]), "targets 'labels' are torch.float32, and no numbers of classes"),
        (SCORES, torch.tensor([0, 1j, 2]), "targets 'labels' are torch.complex64, and no numbers of classes"),
        (SCORES, torch.tensor([0, 1, 3]).to(torch.uint16), "targets 'labels' have the class 3, but the scores are"),
        (SCORES, torch.tensor([0, 1, -100]).to(torch.uint64), "targets 'labels' have the class -100. Leave samples"),
        (torch.tensor([0.2, 0.9]), torch.tensor([0, 1]), "predictions 'logits' are torch.float32, and no numbers"),
        (torch.tensor([-1, 1]), torch.tensor([0, 1]), "predictions 'logits' have the class -1"),
        (SCORES, [0, 1, 2], "targets 'labels' is a list, and no tensor"),
        (torch.zeros(0, 3), torch.tensor([1]), "0 predictions for 1 target"),
    ],
)
def test_what_has_no_cell_is_named(predicted: Any, targets: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        count(predicted, targets)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("predicted", "targets", "total"),
    [
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), 0),
        (SCORES, torch.tensor([0.0, 1.0, 2.0]), 3),
        (torch.tensor([True, False]), torch.tensor([True, True]), 2),
        *((torch.arange(3).to(dtype), torch.arange(3).to(dtype), 3) for dtype in DTYPES),
        *((SCORES.to(dtype), torch.arange(3), 3) for dtype in DTYPES),
        (SCORES.bool(), torch.arange(3), 3),
        (torch.zeros(2, 3, 4, 4), torch.ones(2, 4, 4, dtype=torch.uint8), 32),
    ],
)
def test_what_has_a_cell_is_counted(predicted: Any, targets: Any, total: int) -> None:
    assert int(count(predicted, targets).counts.sum()) == total


# The call, and words of its error.
WRONG: list[tuple[Callable[[], Any], str]] = [
    (partial(t.TextSamples, length=0), "length is 0"),
    (partial(t.TextSamples, temperature=-0.5), r"temperature is -0\.5"),
    (partial(t.TextSamples, every=0), "every is 0"),
    (partial(t.TensorListener, statistics=["median"]), "'median' is not a statistic"),
    (partial(t.DumpActivations, ["*"], every=0), "every is 0"),
    (partial(t.Throughput, peak_tflops=-1), "peak_tflops is -1"),
    (partial(t.TorchProfiler, active=0), "active is 0"),
    (lambda: trainer(callbacks=[t.ActivationStatistics(["nowhere.*"])]), "no module matches"),
    (lambda: trainer(callbacks=[t.TorchProfiler(), t.TorchProfiler()]), "there are two TorchProfilers"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), WRONG, ids=[words for _, words in WRONG])
def test_a_wrong_setting_is_refused_by_name(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((ConfigError, UserError), match=words):
        call()
