"""What a confusion matrix cannot count is one message that names it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer_cli import ConfusionMatrix, UserError

SCORES = torch.eye(3)
DTYPES = (
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip


def count(predicted: Any, targets: Any) -> ConfusionMatrix:
    matrix, trainer = ConfusionMatrix(), SimpleNamespace()
    loop: Any = SimpleNamespace(counts=True)
    matrix.on_validate_start(trainer, torch.nn.Identity(), None, loop)  # type: ignore[arg-type]
    outputs = {"logits": predicted, "labels": targets}
    matrix.on_validate_batch_end(trainer, torch.nn.Identity(), outputs, None, 0)  # type: ignore[arg-type]
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
