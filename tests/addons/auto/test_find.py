"""Learning rate and batch size by trial: what is found, and that the trainer is as before, bit for bit."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from tiny import Noisy, Points, everything, loader, recorder, same, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainer_cli import Trainer, WarmupCosine
from trainer_cli.addons.auto.decisions import batch_sizes
from trainer_cli.addons.auto.find import find_batch_size, find_learning_rate, try_batch_sizes
from trainer_cli.addons.auto.trial_memory import TrialMemory
from trainer_cli.auto_values import auto_keys
from trainer_cli.config.composing import compose
from trainer_cli.config.contradictions import check_processes
from trainer_cli.data.loader import Loader
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.strategies.strategy import Single


class Quadratic(nn.Module):
    """Falls fastest just below the rate at which it diverges, 2."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((4,), 3.0))

    def forward(self, batch: Any) -> Tensor:
        return self.w.square().sum() / 2


class Hungry(nn.Module):
    """Has memory for so many samples at once."""

    def __init__(self, most: int = 9) -> None:
        super().__init__()
        self.linear, self.most = nn.Linear(2, 1), most
        self.seen: list[int] = []

    def forward(self, batch: Any) -> Any:
        self.seen.append(len(batch[0]))
        if len(batch[0]) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.linear(batch[0]).square().mean()


def test_the_rate_is_where_the_loss_falls_fastest_and_not_where_it_diverges() -> None:
    made = trainer(Quadratic, callbacks=[recorder([], fail_in=("on_after_forward",))])  # A trial is no training.
    result = find_learning_rate(made, loader(), min_lr=1e-4, max_lr=100, steps=80)
    assert result.suggestion is not None
    assert 0.01 < result.suggestion < 2
    assert len(result.rates) == len(result.losses) < 80, "it ended when the loss rose"
    assert result.rates == sorted(result.rates)


@pytest.mark.parametrize("find", [find_learning_rate, find_batch_size])
@pytest.mark.parametrize("trained", [False, True])
def test_a_trial_leaves_everything_as_it_was(find: Any, trained: bool, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Any:
        made = trainer(
            Noisy, optimizer=lambda model: torch.optim.Adam(model.parameters(), 0.01), settings={"max_duration": 8},
            schedulers=lambda optimizer: WarmupCosine(optimizer, 8, warmup=2),
        )  # fmt: skip
        if trained:
            made.loop.settings.hard_stop = 4
            made.fit(loader())
            made.loop.settings.hard_stop = None
        return made

    bare, tried = make(), make()
    random = torch.get_rng_state()
    weights, state = copy.deepcopy(tried.model.state_dict()), copy.deepcopy(tried.optimizer.state_dict())
    find(tried, Points(10) if find is find_batch_size else loader())
    assert "as in the checkpoint" not in caplog.text
    assert torch.equal(torch.get_rng_state(), random)
    assert same(tried.model.state_dict(), weights) == []
    assert same(tried.optimizer.state_dict(), state) == []
    assert all(parameter.grad is None for parameter in tried.model.parameters())
    torch.set_rng_state(random)
    bare.fit(loader())
    torch.set_rng_state(random)
    tried.fit(loader())
    assert same(everything(bare), everything(tried)) == []


@pytest.mark.parametrize("freeze", [None, ["body.1.*"], {"body.[01].*": "2ep"}])
@pytest.mark.parametrize("fails", [False, True])
def test_a_trial_leaves_modes_and_what_is_trained_as_they_were(freeze: Any, fails: bool) -> None:
    made = trainer(Noisy, freeze=freeze)
    made.model.train()
    made.model.get_submodule("body.1").eval()

    def modes() -> dict[str, bool]:
        trained = {name: parameter.requires_grad for name, parameter in made.model.named_parameters()}
        return trained | {f"mode of {name}": module.training for name, module in made.model.named_modules()}

    before = modes()
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        find_learning_rate(made, Broken() if fails else loader(), steps=4)
    assert modes() == before


class Broken:
    """A loader that fails after its first batch."""

    def __iter__(self) -> Iterator[Any]:
        yield next(iter(DataLoader(Points(8), 4)))
        raise ZeroDivisionError


@pytest.mark.parametrize("is_training", [False, True])
def test_norms_of_a_schedule_are_frozen_in_the_block_alone(is_training: bool) -> None:
    made = trainer(Noisy, freeze={"body.[01].*": "2ep"})
    norm = made.model.get_submodule("body.1").train(is_training)
    with made.freezing.applied(made):
        assert not norm.training
    assert norm.training == is_training


@pytest.mark.parametrize("fails", [False, True])
def test_the_strategy_learns_what_a_trial_trains(fails: bool) -> None:
    class Recording(Single):
        changes: ClassVar[list[bool]] = []

        def on_trained_changed(self, model: nn.Module) -> None:
            self.changes.append(model.get_parameter("body.0.weight").requires_grad)

    made = trainer(Noisy, freeze={"body.[01].*": 2}, settings={"max_duration": 3}, strategy=Recording())
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        find_learning_rate(made, Broken() if fails else loader(), steps=4)
    made.fit(loader())
    assert Recording.changes == ([False, False, True] if fails else [False, True, False, True])


def test_the_generator_of_the_users_loader_is_kept() -> None:
    generator = torch.Generator().manual_seed(3)
    own = torch.utils.data.DataLoader(Points(10), batch_size=4, shuffle=True, generator=generator)
    before = generator.get_state()
    find_learning_rate(trainer(Quadratic), own, steps=7)
    assert torch.equal(generator.get_state(), before)


def test_the_batch_size_is_the_largest_that_fits() -> None:
    made = trainer(Hungry)
    assert find_batch_size(made, Points(100), steps=1) == 8
    assert made.model.seen == [2, 4, 8, 16]
    assert find_batch_size(trainer(Hungry), Points(5), steps=1) == 4, "no more than there are samples"
    assert find_batch_size(trainer(Hungry), Points(100), max_size=4) == 4
    with pytest.raises(UserError, match="no batch of 16 samples fits"):
        find_batch_size(trainer(Hungry), Points(100), start=16)
    with pytest.raises(UserError, match="map-style dataset"):
        find_batch_size(trainer(Hungry), torch.utils.data.DataLoader(Points(8)))


class Budget(TrialMemory):
    """The memory of a CPU in which a sample takes a byte, and 20 bytes are free."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.limit_bytes, self.peaks = 20, iter([2, 4, 8, 16, 32])

    def end_trial(self) -> int:
        return next(self.peaks)


def test_on_the_cpu_a_size_that_would_not_fit_is_not_tried() -> None:
    made = trainer(Hungry)
    cast("Hungry", made.model).most = 1000
    source = Loader(Points(100), 1, shuffle=False, seed=0)
    trials = try_batch_sizes(made, source, [2, 4, 8, 16, 32, 64], Budget(), steps=1)
    assert made.model.seen == [2, 4, 8, 16], "the system would kill the process"
    assert [(trial.size, trial.fits, trial.peak_bytes) for trial in trials[-2:]] == [(16, True, 16), (32, False, None)]


def test_the_free_memory_is_that_of_this_machine_less_a_margin() -> None:
    # Garbage that is freed within the trial would count against it.
    gc.collect()
    memory, shared = (TrialMemory(torch.device("cpu"), processes=processes) for processes in (1, 1000))
    assert memory.limit_bytes is not None
    assert shared.limit_bytes is not None
    assert shared.limit_bytes < memory.limit_bytes / 100
    held = torch.ones(2**26)
    peak = memory.end_trial()
    assert peak is not None
    assert peak >= held.nbytes // 2, "of a page that other tests have freed nothing is seen"


def test_an_error_that_is_not_of_memory_is_raised() -> None:
    made = trainer(lambda: Failing())
    with pytest.raises(RuntimeError, match="no such kernel"):
        find_batch_size(made, Points(10))


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, batch: Any) -> Tensor:
        raise RuntimeError("no such kernel")


def test_mistakes_are_reported() -> None:
    with pytest.raises(UserError, match="which is not a range"):
        find_learning_rate(trainer(Quadratic), loader(), min_lr=1, max_lr=0.1)
    with pytest.raises(UserError, match="has no optimizer"):
        find_learning_rate(trainer(Quadratic, optimizer=None), loader())


class Sees(nn.Module):
    """Remembers which parameters were trained in its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.trained: set[tuple[bool, bool]] = set()

    def forward(self, batch: tuple[Tensor, Tensor]) -> Any:
        x, y = batch
        self.trained.add((self.body.weight.requires_grad, self.norm.training))
        return (self.head(self.norm(self.body(x))).squeeze(-1) - y).square().mean()


def test_a_range_test_freezes_what_is_frozen_at_the_beginning() -> None:
    made = Trainer(
        model=Sees,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        freeze={"{body,norm}.*": "2ep"},
        device="cpu",
        seed=0,
    )
    find_learning_rate(made, Points(16), steps=20)
    assert made.model.trained == {(False, False)}
    assert made.model.get_parameter("body.weight").requires_grad


# Values that are `auto`: how they are written, what contradicts them, and what is tried.


ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("data", "samples", "ranks", "sizes"),
    [
        ({"batch_size": "auto"}, 20, 1, [2, 4, 8, 16]),
        ({"batch_size": "auto"}, 20, 2, [2, 4, 8]),
        ({"batch_size": "auto"}, 10**9, 1, [2**power for power in range(1, 14)]),
        ({"batch_size": "auto:100"}, 10**9, 1, [2, 4, 8, 16, 32, 64]),
        ({"batch_size": "auto:1"}, 20, 1, [1]),
        ({"batch_size": "auto"}, 1, 2, [1]),
        ({"batch_size": "auto", "global_batch_size": 90}, 200, 1, [2, 5, 10, 30, 90]),
        ({"batch_size": "auto", "global_batch_size": 90}, 20, 1, [2, 5, 10]),
        ({"batch_size": "auto:10", "global_batch_size": 90}, 200, 2, [3, 9]),
    ],
)
def test_the_sizes_that_are_tried_double_or_divide_the_global_batch(
    data: dict[str, Any], samples: int, ranks: int, sizes: list[int]
) -> None:
    assert batch_sizes(data, samples, ranks) == sizes


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.batch_size=auto", "loop.microbatch=4"], "data.batch_size is auto, and loop.microbatch splits"),
        (["data.batch_size=auto", "parallel=fsdp"], "under fsdp the other ranks would wait"),
        (
            ["data.batch_size=auto", "data.global_batch_size=64", "loop.grad_accum_steps=2"],
            "data.global_batch_size and loop.grad_accum_steps decide it",
        ),
        (["data.batch_size=auto:0"], "'auto:0', but it must be a whole number of at least 1, or auto, or auto:LIMIT"),
        (["data.batch_size=automatic"], "or auto, or auto:LIMIT"),
        (["optimizer.lr=auto", "parallel=fsdp"], "optimizer.lr is auto, but one process makes the range test alone"),
        (
            ["optimizer.lr=auto", "+param_groups={*.bias: {lr: 0.1}}"],
            "the rate of param_groups.*.bias is a number, which does not follow it",
        ),
        (["optimizer.lr=auto", "ckpt=x", "load.states=[all]"], "takes more than the weights from the checkpoint"),
        (
            ["optimizer=null", "optimizer={a: {_target_: torch.optim.SGD, lr: auto}}"],
            "optimizer.a.lr is auto, which only a single optimizer may have",
        ),
        (["data.val_batch_size=auto"], "data.val_batch_size is 'auto', but it must be a whole number"),
    ],
)
def test_what_contradicts_auto_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=digits_mlp", *overrides], cwd=ROOT)
    assert message in str(caught.value)
    assert "command line" in str(caught.value)


def test_a_found_value_stands_in_the_config_and_in_what_refers_to_it() -> None:
    composed = compose(
        ["experiment=digits_mlp", "data.batch_size=auto", "+data.val_batch_size=${data.batch_size}"],
        cwd=ROOT,
    )
    assert auto_keys(composed.config) == ("data.batch_size",)
    filled = composed.with_values({"data.batch_size": 16})
    assert auto_keys(filled.config) == ()
    assert (filled.config.data["batch_size"], filled.config.data["val_batch_size"]) == (16, 16)
    assert filled.raw["data"]["batch_size"] == 16
    assert composed.raw["data"]["batch_size"] == "auto", "the other config is unchanged"


def test_a_global_batch_that_ranks_cannot_divide_is_refused_before_anything_is_tried() -> None:
    composed = compose(
        ["experiment=digits_mlp", "data.batch_size=auto", "data.global_batch_size=9", "parallel=ddp"], cwd=ROOT
    )
    check_processes(composed.config, 3)
    with pytest.raises(ConfigError, match="cannot be divided between 2 ranks"):
        check_processes(composed.config, 2)


@pytest.mark.gpu
def test_the_batch_size_that_is_found_leaves_a_tenth_of_the_memory() -> None:
    class Wide:
        def __len__(self) -> int:
            return 2**20

        def __getitem__(self, index: int) -> Tensor:
            return torch.ones(2**16)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, batch: Tensor) -> Tensor:
            # Sixteen activations of 256 KiB for each sample are kept for the backward.
            for _ in range(16):
                batch = (batch * self.weight).sin()
            return batch.mean()

    trainer = Trainer(model=Model, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), device="cuda")
    memory = TrialMemory(trainer.device)
    assert memory.limit_bytes is not None
    # Of a known share of the memory, so that the search is short.
    memory.limit_bytes = min(memory.limit_bytes, 2**30)
    trials = try_batch_sizes(
        trainer, Loader(Wide(), 1, shuffle=False, seed=0), [2**power for power in range(1, 14)], memory
    )
    peaks = [trial.peak_bytes for trial in trials]
    assert [trial.fits for trial in trials] == [*[True] * (len(trials) - 1), False]
    assert all(peak is not None and peak <= memory.limit_bytes for peak in peaks[:-1])
