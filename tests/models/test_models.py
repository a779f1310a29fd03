"""The shipped models: a batch goes in, a loss and metrics come out, and they learn."""

import math

import pytest
import torch
from torch import nn

from trainer_cli.addons.text.gpt import GPT
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


def gpt(**settings: float) -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT(vocab_size=11, context=8, layers=2, heads=2, width=16, **settings)  # type: ignore[arg-type]


def text_batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(11, (3, 9), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def test_a_gpt_gives_loss_and_tokens_and_starts_at_chance() -> None:
    model = gpt()
    outputs = model(text_batch())
    assert set(outputs) == {"loss", "tokens"}
    assert outputs["tokens"] == 24
    assert torch.as_tensor(outputs["loss"]).item() == pytest.approx(math.log(11), rel=0.05)
    assert set(model.eval()(text_batch())) == {"loss", "tokens", "accuracy"}


def test_a_gpt_never_looks_ahead() -> None:
    model = gpt().eval()
    tokens, _ = text_batch()
    changed = tokens.clone()
    changed[:, 5:] = 0
    assert torch.allclose(model.logits(tokens)[:, :5], model.logits(changed)[:, :5], atol=1e-6)
    assert not torch.allclose(model.logits(tokens)[:, 5:], model.logits(changed)[:, 5:], atol=1e-6)


def test_a_gpt_ties_its_head_and_scales_residual_layers() -> None:
    model = GPT(vocab_size=300, context=8, layers=8, heads=4, width=128)
    assert model.head.weight is model.tokens.weight
    assert model.blocks[0].attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert model.blocks[0].mlp.hidden.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_a_gpts_norms_and_biases_are_known_by_name() -> None:
    plain = {name for name, parameter in gpt().named_parameters() if parameter.ndim < 2}
    assert plain
    assert all("norm" in name for name in plain)
    biased = {name for name, parameter in gpt(bias=True).named_parameters() if parameter.ndim < 2}
    assert all("norm" in name or name.endswith("bias") for name in biased)
    assert biased > plain


def test_a_gpt_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="context of 8"):
        gpt().logits(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match="multiple of heads"):
        GPT(vocab_size=5, width=10, heads=3)


def test_a_gpt_learns_a_batch_by_heart() -> None:
    model = gpt(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(150):
            optimizer.zero_grad()
            model(text_batch())["loss"].backward()  # type: ignore[union-attr]
            optimizer.step()
    assert torch.as_tensor(model.eval()(text_batch())["loss"]).item() < 0.5


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
