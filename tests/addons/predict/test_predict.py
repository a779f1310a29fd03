"""Trainer.predict: each sample once and in order, on one rank and on several; the training is as before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from small_parts import data_loader
from thread_ranks import ThreadGroup, on_ranks
from tiny import everything, loader, on, same, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.ema import EMA
from trainer_cli.data.adapt import as_loader
from trainer_cli.errors import UserError
from trainer_cli.strategies.strategy import Single


class Numbers(nn.Module):
    """Returns the numbers in a batch, times a weight, in a buffer that the next forward overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.buffer = torch.zeros(32)

    def forward(self, batch: Any) -> Any:
        values = (batch[0] if isinstance(batch, list) else batch) * self.weight
        if self.training:
            return values.square().mean()
        self.buffer[: len(values)] = values.detach()
        return {"value": self.buffer[: len(values)], "half": values / 2, "loss": values.mean()}


class Errors(nn.Module):
    """Dropout and batch norm: all that an evaluation in between could disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, batch: Any) -> Any:
        error = self.body(batch[0]).squeeze(-1) - batch[1]
        return {"loss": error.square().mean(), "error": error}


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(numbers(11))


class Batches:
    """An iterable without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.split(numbers(11), 3))


def numbers(length: int) -> Tensor:
    return torch.arange(float(length))


def batched(data: Any) -> Any:
    return as_loader(data, shuffle=False, seed=0, batch_size=3)


def values(rows: Any) -> list[float]:
    return [row["value"].item() for row in rows]


LOADERS: dict[str, Callable[[int], Any]] = {
    "dataset": lambda length: numbers(length),
    "dataloader": lambda length: DataLoader(TensorDataset(numbers(length)), batch_size=3),
    "loader": lambda length: batched(numbers(length)),
}


@pytest.mark.parametrize(
    "data",
    [pytest.param(make(11), id=name) for name, make in LOADERS.items()]
    + [pytest.param(batched(Stream()), id="stream"), pytest.param(Batches(), id="iterable")],
)
def test_each_sample_has_a_row_in_order(data: Any) -> None:
    rows = trainer(Numbers).predict(data)
    assert values(rows) == list(range(11))
    assert {name for row in rows for name in row} == {"value", "half"}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(("world_size", "tensor_size", "length"), [(2, 1, 8), (2, 1, 7), (3, 1, 1), (4, 2, 10)])
def test_each_rank_has_the_rows_of_all(kind: str, world_size: int, tensor_size: int, length: int) -> None:
    model = Numbers()

    def predict(group: ThreadGroup) -> list[float]:
        strategy = Single()
        strategy.group, strategy.world_size, group.tensor_size = group, world_size, tensor_size
        # Not with a seed: the ranks are threads, and share the generators.
        made = trainer(Numbers(), optimizer=None, strategy=strategy, seed=None)
        made.model.load_state_dict(model.state_dict())
        return values(made.predict(LOADERS[kind](length)))

    assert on_ranks(world_size, predict) == [list(range(length))] * world_size


@pytest.mark.parametrize("outputs", ["half", ["half"], ["h*", "none"]], ids=str)
def test_outputs_are_selected_by_globs(outputs: Any) -> None:
    assert [list(row) for row in trainer(Numbers).predict(numbers(3), outputs=outputs)] == [["half"]] * 3


def test_the_weights_are_those_that_validate_uses(tmp_path: Path) -> None:
    def saver() -> CheckpointerCallback:
        return CheckpointerCallback(tmp_path / "ckpt", save_interval=3)

    def made(**more: Any) -> Any:
        return trainer(Numbers, lr=1e-3, checkpoint=saver(), **more)

    trained, first = made(callbacks={"ema": EMA(decay=0.5)}), trainer(Numbers)
    trained.fit(numbers(11))
    weight, average = trained.model.weight.item(), values(trained.predict(numbers(2)))[1]
    assert trained.model.weight.item() == weight
    assert weight < average < 1
    # A new trainer predicts with the newest checkpoint, a path or the first weights if that is asked for.
    assert values(made().predict(numbers(2)))[1] == pytest.approx(weight)
    assert values(made(callbacks={"ema": EMA(decay=0.5)}).predict(numbers(2)))[1] == pytest.approx(average)
    assert weight < values(first.predict(numbers(2), tmp_path / "ckpt/step3"))[1] < 1
    assert first.loaded_step == 3
    assert values(made().predict(numbers(2), None)) == [0, 1]
    with pytest.raises(UserError, match="predict uses one checkpoint"):
        made().predict(numbers(2), f"{tmp_path}/ckpt/step*")


def test_a_prediction_within_a_fit_changes_nothing_of_it() -> None:
    def predict(made: Any, *arguments: Any) -> None:
        assert len(made.predict(loader(5))) == 5

    states = []
    for callbacks in ([], [on(on_train_batch_end=predict)]):
        run = trainer(Errors, callbacks=callbacks)
        run.fit(loader())
        states.append(everything(run))
    assert same(*states) == []


def test_a_prediction_keeps_the_mode_of_each_module_and_the_random_state() -> None:
    made = trainer(Errors)
    made.model.train()
    made.model.get_submodule("body.2").eval()
    before = torch.get_rng_state()
    made.predict(loader(5))
    assert [module.training for module in made.model.get_submodule("body").children()] == [True, True, False, True]
    assert torch.equal(torch.get_rng_state(), before)


class OnlyLoss(Numbers):
    def forward(self, batch: Any) -> Any:
        return {"loss": batch.mean()}


class Changing(Numbers):
    def forward(self, batch: Any) -> Any:
        return {"value": batch, **({"first": batch} if batch[0] == 0 else {})}


@pytest.mark.parametrize(
    ("model", "data", "more", "message"),
    [
        (OnlyLoss, numbers(4), {}, "the model returned a mapping of loss for 4 samples"),
        (Numbers, numbers(4), {"outputs": "logitz"}, "no output is called so: logitz .* Available: value, half"),
        (Changing, batched(numbers(4)), {}, "first: only some batches have a value"),
        (Numbers, [data_loader(numbers(4))] * 2, {}, "a list of 2 where one loader or dataset"),
        (Numbers, numbers(4), {"ckpt_path": "none/step1"}, "none/step1"),
    ],
    ids=["loss", "no-output", "changing", "several", "no-checkpoint"],
)
def test_what_cannot_be_predicted_is_refused(model: Any, data: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises((UserError, FileNotFoundError), match=message):
        trainer(model).predict(data, **more)


def test_a_sampler_that_divides_the_samples_itself_is_refused() -> None:
    data = data_loader(numbers(4), sampler=DistributedSampler(cast("Any", range(4)), 2, 0, shuffle=False))
    strategy = Single()
    strategy.group, strategy.world_size = ThreadGroup(0, 2, None), 2  # type: ignore[arg-type]
    with pytest.raises(UserError, match="divides among the ranks itself"):
        trainer(Numbers(), strategy=strategy, optimizer=None).predict(data)
