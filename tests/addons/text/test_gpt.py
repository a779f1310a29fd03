"""The shipped language model: what it gives, hides and refuses, and that it learns."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trainer_cli import Trainer
from trainer_cli.addons.text.gpt import GPT


def gpt(**settings: Any) -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT(vocab_size=11, context=8, layers=2, heads=2, width=16, **settings)


def text_batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(11, (3, 9), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def test_a_gpt_gives_loss_and_tokens_and_starts_at_chance() -> None:
    model = gpt()
    outputs = model(text_batch())
    assert set(outputs) == {"loss", "tokens"}
    assert outputs["tokens"] == 24
    assert torch.as_tensor(outputs["loss"]).item() == pytest.approx(math.log(11), rel=0.05)
    assert set(model.eval()(text_batch())) == {"loss", "tokens", "accuracy", "logits", "labels"}


@pytest.mark.parametrize("packed", [False, True], ids=["windows", "packed rows"])
def test_the_predictions_of_a_gpt_are_the_scores_of_each_next_token(packed: bool) -> None:
    tokens, targets = text_batch()
    row = {"tokens": tokens, "targets": targets, "segments": torch.zeros_like(tokens), "positions": torch.arange(8)}
    samples = [
        {name: value[index] if value.ndim > 1 else value for name, value in row.items()} if packed else pair
        for index, pair in enumerate(zip(tokens, targets, strict=True))
    ]
    model = gpt()
    rows = Trainer(model=model).predict(samples, ckpt_path=None)
    assert [list(one["labels"]) for one in rows] == targets.tolist()
    torch.testing.assert_close(torch.stack([one["logits"] for one in rows]), model.logits(tokens))


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
    assert model.get_parameter("blocks.0.attention.out.weight").std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert model.get_parameter("blocks.0.mlp.hidden.weight").std().item() == pytest.approx(0.02, rel=0.05)
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
            model(text_batch())["loss"].backward()
            optimizer.step()
    assert torch.as_tensor(model.eval()(text_batch())["loss"]).item() < 0.5
