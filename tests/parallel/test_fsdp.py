"""How FSDP and tensor parallelism take a model apart: blocks that are sharded or computed again, and divided layers."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_parts import note
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from trainer_cli.errors import ConfigError
from trainer_cli.models.mlp import MLP
from trainer_cli.parallel.process_group import ALONE, ProcessGroup
from trainer_cli.running.build import strategy_of
from trainer_cli.schema.sections import Dtype, ParallelConfig, ParallelStrategy
from trainer_cli.strategies.blocks import find_blocks, recompute, without_tied
from trainer_cli.strategies.fsdp import FSDP, read_styles

LARGE = ("attention", "mlp.hidden", "mlp.out")


def gpt(vocab_size: int = 11, **settings: Any) -> nn.Module:
    make: type[nn.Module] = pytest.importorskip("trainer_cli.addons.text.gpt").GPT
    return make(vocab_size, **{"context": 8, "layers": 2, "heads": 2, "width": 16, "dropout": 0.0} | settings)


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
    settings: dict[str, Any], expected: list[str]
) -> None:
    model = gpt()
    found = find_blocks(model, **settings)
    assert names(model, found) == expected
    order = {module: place for place, module in enumerate(found)}
    for outer in found:
        assert all(order[inner] < order[outer] for inner in outer.modules() if inner in order and inner is not outer)


def test_blocks_with_a_tied_weight_are_not_sharded_by_themselves() -> None:
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4)))
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
            partial(lambda seen, one: (note(seen, one.numel()), one)[1], sizes), lambda one: one
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


class Planned(nn.Module):
    """Two layers and a norm, with any plan."""

    def __init__(self, plan: Any) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(6, 9), nn.Linear(9, 6), nn.LayerNorm(6)
        self.plan = plan

    def tensor_parallel_plan(self, tensor_size: int) -> Any:
        return self.plan


def kinds(model: nn.Module, size: int) -> dict[str, str]:
    return {name: type(style).__name__.removesuffix("Parallel") for name, style in read_styles(model, size).items()}


def test_the_shipped_models_are_divided_in_pairs() -> None:
    assert kinds(MLP(hidden=[8, 8, 8]), 2) == {
        "layers.1": "Colwise", "layers.4": "Rowwise", "layers.7": "Colwise", "layers.10": "Rowwise"
    }  # fmt: skip
    assert kinds(MLP(hidden=[8, 8]), 2) == {"layers.1": "Colwise", "layers.4": "Rowwise"}
    perceptron = {"blocks.0.mlp.hidden": "Colwise", "blocks.0.mlp.out": "Rowwise"}
    assert kinds(gpt(layers=1), 2) == perceptron
    heads = {f"blocks.0.attention.{name}": "Colwise" for name in ("query", "key", "value")}
    assert kinds(gpt(layers=1, heads=4, fused_qkv=False), 4) == {
        **perceptron, **heads, "blocks.0.attention.out": "Rowwise"
    }  # fmt: skip


def test_a_plan_may_have_styles_of_torch_and_gather_outputs() -> None:
    own = RowwiseParallel()
    styles = read_styles(Planned({"first": "colwise_gather_output", "second": own}), 3)
    assert styles["second"] is own
    assert isinstance(styles["first"], ColwiseParallel)
    assert styles["first"].output_layouts == (Replicate(),)


class OfTransformers(nn.Module):
    """What a model of transformers says of itself."""

    tp_plan = {"embed": "embedding_rowwise", "query": "colwise", "head": "colwise_gather_output"}  # noqa: RUF012
    config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.query, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8)


def test_plans_of_transformers_are_taken() -> None:
    assert kinds(OfTransformers(), 2) == {"embed": "Rowwise", "query": "Colwise", "head": "Colwise"}
    embed = read_styles(OfTransformers(), 2)["embed"]
    assert isinstance(embed, RowwiseParallel)
    assert embed.input_layouts == (Replicate(),)
    with pytest.raises(ConfigError, match="is 4, which does not divide the model's 2 num_key_value_heads"):
        read_styles(OfTransformers(), 4)


@pytest.mark.parametrize(
    ("model", "size", "said"),
    [
        (nn.Linear(2, 2), 2, "tensor_size is 2, but Linear has no method tensor_parallel_plan"),
        (Planned({}), 3, "is empty"),
        (Planned({"frist": "colwise"}), 3, "names 'frist', and no module is called so.*Did you mean 'first'"),
        (Planned({"first": "colwize"}), 3, "the style 'colwize', which does not exist.*Did you mean 'colwise'"),
        (Planned({"first": 1}), 3, "gives 'first' a int, which is not a style"),
        (Planned({"norm": "colwise"}), 3, "norm is a LayerNorm"),
        (Planned({"first": "colwise"}), 2, "first has 9 outputs, which 2 processes cannot divide in equal parts"),
        (Planned({"second": "rowwise"}), 2, "second has 9 inputs, which 2 processes"),
        (None, 4, "model.heads is 2, which 4 processes cannot divide"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(model: nn.Module | None, size: int, said: str) -> None:
    """None is the model of an add-on, which may have been deleted."""
    model = model or gpt(fused_qkv=False)
    with pytest.raises(ConfigError, match=f"(?s){said}") as raised:
        read_styles(model, size)
    assert raised.value.location == "parallel.tensor_size"


def test_a_tensor_size_needs_fsdp_and_must_divide_the_processes() -> None:
    for strategy in (ParallelStrategy.single, ParallelStrategy.ddp):
        with pytest.raises(ConfigError, match="Choose parallel=fsdp"):
            strategy_of(ParallelConfig(strategy=strategy, tensor_size=2), Dtype.fp32, ALONE)
    with pytest.raises(ConfigError, match="tensor_size is 2, which does not divide 1 process"):
        ALONE.divide_layers(2)
    four = ProcessGroup()
    four.rank, four.world_size, four.tensor_size = 3, 4, 2
    assert (four.data_rank, four.data_size) == (1, 2)
    with pytest.raises(ConfigError, match="tensor_size is 3, which does not divide 4 processes"):
        four.divide_layers(3)
