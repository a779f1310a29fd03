"""Which modules of a model are sharded, or computed again, as one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer_cli.errors import ConfigError
from trainer_cli.models.gpt import GPT
from trainer_cli.parallel.blocks import find_blocks, recompute, without_tied
from trainer_cli.parallel.fsdp import FSDP
from trainer_cli.parallel.process_group import ALONE

LARGE = ("attention", "mlp.hidden", "mlp.out")


def gpt() -> nn.Module:
    return GPT(vocab_size=11, context=8, layers=2, heads=2, width=16, dropout=0.0)


def names(model: nn.Module, found: list[nn.Module]) -> list[str]:
    of = {module: name for name, module in model.named_modules()}
    return sorted(of[module] for module in found)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["blocks.0", "blocks.1"]),
        ({"classes": ["Attention"]}, ["blocks.0.attention", "blocks.1.attention"]),
        ({"classes": ["Block"], "min_parameters": 10**6}, ["blocks.0", "blocks.1"]),
        # Attention has 1,024 parameters, as has each Linear of a perceptron; the rest of a block 32.
        ({"min_parameters": 1000}, [f"blocks.{index}.{part}" for index in (0, 1) for part in LARGE]),
    ],
)  # fmt: skip
def test_blocks_are_found_by_class_by_size_or_as_lists_of_modules(
    settings: dict[str, object], expected: list[str]
) -> None:
    model = gpt()
    found = find_blocks(model, **settings)  # type: ignore[arg-type]
    assert names(model, found) == expected
    order = {module: place for place, module in enumerate(found)}
    for outer in found:
        assert all(order[inner] < order[outer] for inner in outer.modules() if inner in order and inner is not outer)


def test_blocks_with_a_tied_weight_are_not_sharded_by_themselves() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4)))
    model[1][0].weight = model[1][1].weight
    model[2][1].weight = model[3][0].weight
    blocks = find_blocks(model, ["Sequential", "Linear"])
    assert names(model, without_tied(model, blocks)) == ["0", "0.0", "0.1", "1", "2.0", "3.1"]


def test_a_class_that_the_model_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.wrap names Blok, but the model has no module of such a class"):
        find_blocks(gpt(), ["Blok"])


def test_blocks_computed_again_give_the_same_gradients_and_names() -> None:
    torch.manual_seed(0)
    plain, again = gpt(), gpt()
    again.load_state_dict(plain.state_dict())
    recompute(find_blocks(again))
    kept: list[int] = []
    batch = torch.randint(11, (2, 8)), torch.randint(11, (2, 8))
    for model in (plain, again):
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda one, seen=sizes: (seen.append(one.numel()), one)[1], lambda one: one
        ):
            loss = model(batch)["loss"]
        loss.backward()
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 2
    assert list(plain.state_dict()) == list(again.state_dict())
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_a_parameter_that_cannot_be_sharded_is_named() -> None:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match=r"the parameter scale has no dimension"):
        FSDP(ALONE).place(model, torch.device("cpu"))
