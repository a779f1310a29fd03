"""The shipped models: a batch goes in, a loss and metrics come out, and they learn."""

import math

import pytest
import torch
from torch import nn

from trainer_cli.data.datasets import Digits
from trainer_cli.data.loader import Loader
from trainer_cli.models.cnn import CNN
from trainer_cli.models.mlp import MLP

IMAGES = (torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 9]))


@pytest.mark.parametrize("model", [MLP(), MLP(hidden=[]), MLP(hidden=[16, 8], dropout=0.5), CNN(), CNN(channels=[4])])
def test_a_classifier_gives_a_loss_and_in_evaluation_its_accuracy(model: nn.Module) -> None:
    training = model.train()(IMAGES)
    assert set(training) == {"loss"}
    training["loss"].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    evaluation = model.eval()(IMAGES)
    assert set(evaluation) == {"loss", "accuracy", "logits", "labels"}
    assert 0 <= evaluation["accuracy"] <= 1
    assert not evaluation["accuracy"].requires_grad
    assert evaluation["loss"].shape == ()


def test_accuracy_is_the_share_of_right_answers() -> None:
    model = MLP(hidden=[]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert model(IMAGES)["accuracy"].item() == pytest.approx(0.2)
    assert model(IMAGES)["loss"].item() == pytest.approx(math.log(10))


def test_the_cnn_has_the_states_that_a_resume_must_not_forget() -> None:
    model = CNN()
    assert any(name.endswith("running_mean") for name, _ in model.named_buffers())
    assert any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


def test_the_cnn_reads_digits_after_a_few_epochs() -> None:
    digits = Digits(augment=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CNN()
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        for epoch in range(3):
            for batch in Loader(digits.train, 32, shuffle=True, seed=0).iterate(epoch):
                optimizer.zero_grad()
                model(batch)["loss"].backward()
                optimizer.step()
        model.eval()
        outputs = model(next(Loader(digits.val, 359, shuffle=False, seed=0).iterate(0)))
    assert outputs["accuracy"] > 0.85
