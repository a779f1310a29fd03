"""Sparse training: the ratio is as asked for, masked weights stay zero, and a resume is exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tiny import ListLogger, Noisy, StopAt, everything, loader, same, trainer
from torch import Tensor, nn

import trainer_cli as t
from trainer_cli import Trainer
from trainer_cli.addons.sparsity.selective_grad import SelectiveGrad
from trainer_cli.addons.sparsity.sparse_training import GMP, SET, RigL, Static
from trainer_cli.addons.sparsity.sparsity import Sparsity, cosine, cubic, erdos_renyi_kernel, replaced
from trainer_cli.callbacks.check_finite import CheckFinite
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.precision import Precision
from trainer_cli.trainer.train_step import TrainStep


class Wide(nn.Module):
    """Two matrices large enough to be sparse, one of which is small."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 10), nn.ReLU(), nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Any:
        return (self.net(batch[0]).squeeze(-1) - batch[1]).square().mean()


class Watch(Callback):
    """Keeps the weights, and the masks, after each step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.masks: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weights.append({name: one.detach().clone() for name, one in model.named_parameters()})
        if "sparsity" in trainer.callbacks:
            self.masks.append(trainer.callbacks["sparsity"].state_dict()["masks"])

    @property
    def zeros(self) -> list[dict[str, int]]:
        """How many weights of each parameter have no place in the mask, by step."""
        return [{name: int((~mask).sum()) for name, mask in masks.items()} for masks in self.masks]


def _fit(sparsity: Sparsity | None, *callbacks: Callback, folder: Path | None = None, **more: Any) -> Any:
    made = trainer(
        more.pop("model", Wide),
        sparsity=sparsity,
        callbacks=list(callbacks),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1),
        settings={"max_duration": 24, "log_interval": 6, **more.pop("settings", {})},
        checkpoint=None if folder is None else CheckpointerCallback(folder, save_interval=5),
        **more,
    )
    made.fit(loader(12))
    return made


SIZES = {"net.0.weight": 20, "net.2.weight": 200, "net.4.weight": 20}
KINDS: dict[str, Callable[[], Sparsity]] = {
    "static": lambda: Static(0.8),
    "magnitude": lambda: Static(0.8, init="magnitude", distribution="erk"),
    "gmp": lambda: GMP(0.8, start=2, stop=16, every=3, initial=0.2),
    "set": lambda: SET(0.8, every=3),
    "rigl": lambda: RigL(0.8, every=3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_ratio_is_as_asked_for_and_logged(kind: str) -> None:
    watch, logger = Watch(), ListLogger()
    made = _fit(KINDS[kind](), watch, loggers=[logger], precision=Precision(clip_norm=1.0))
    assert sum(watch.zeros[-1].values()) == pytest.approx(0.8 * 240, abs=2)
    masks = watch.masks[-1]
    for name, mask in masks.items():
        assert not made.model.get_parameter(name)[~mask].any()
        for moment in ("exp_avg", "exp_avg_sq"):
            assert not made.optimizer.state[made.model.get_parameter(name)][moment][~mask].any()
    ratio = 1 - sum(int(mask.sum()) for mask in masks.values()) / 240
    rows = [record.metrics["train/sparsity"] for record in logger.records if "train/loss" in record.metrics]
    assert rows[-1] == pytest.approx(ratio)
    if kind == "gmp":
        expected = [cubic(step, 2, 16, 0.2, 0.8) for step in (5, 11, 24, 24)]  # due at 2, 5, 8, 11, 14 and 16
        assert rows == pytest.approx(expected, abs=0.02)
    else:
        assert len(set(rows)) == 1, "the same at every log"


@pytest.mark.parametrize(("stop", "every"), [(5, 3), (6, 3), (5, 4), (5, 100), (9, 7), (1, 1)])
def test_gmp_has_its_sparsity_at_the_step_at_which_it_stops(stop: int, every: int) -> None:
    watch = Watch()
    _fit(GMP(0.8, stop=stop, every=every), watch)
    masked = {"net.0.weight": 16, "net.2.weight": 160, "net.4.weight": 16}
    assert next(step for step, zeros in enumerate(watch.zeros, 1) if zeros == masked) == stop
    assert watch.zeros[-1] == masked


def test_a_static_mask_stays_and_replaced_weights_begin_at_zero_without_momentum() -> None:
    for kind, moves in (("static", False), ("magnitude", False), ("set", True), ("rigl", True)):
        watch = Watch()
        _fit(KINDS[kind](), watch)
        assert any(same(watch.masks[0], masks) != [] for masks in watch.masks[1:]) == moves, kind
        for step in range(1, 24):
            for name in SIZES:
                grown = ~watch.masks[step - 1][name] & watch.masks[step][name]
                # The first step of a weight with Adam's moments of others is bounded by its learning rate and bias.
                assert not grown.any() or float(watch.weights[step][name][grown].abs().max()) < 0.1
        assert len({sum(zeros.values()) for zeros in watch.zeros}) == 1, kind


def test_rigl_grows_where_the_gradient_is_largest_and_set_anywhere() -> None:
    mask, weight = torch.tensor([1.0, 1, 1, 0, 0, 0]), torch.tensor([0.5, -0.1, 0.3, 0, 0, 0])
    growth = torch.tensor([9.0, 0.2, 9, 0.1, 0.7, 0.4])
    assert replaced(mask, weight, growth, 1, 1, 3).tolist() == [1, 0, 1, 0, 1, 0]
    assert replaced(mask, weight, growth, 2, 3, 3).tolist() == [1, 0, 1, 0, 1, 1], "a dropped one may grow again"
    assert replaced(mask, weight, growth, 1, 0, 3).tolist() == [1, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_is_exact(kind: str, tmp_path: Path) -> None:
    whole = _fit(KINDS[kind](), folder=tmp_path / "whole")
    for stop in (4, 13):
        _fit(KINDS[kind](), StopAt(stop), folder=tmp_path / str(stop))
        resumed = _fit(KINDS[kind](), folder=tmp_path / str(stop))
        assert same(everything(whole), everything(resumed)) == [], stop


class Noise(Callback):
    """Writes weights after the mask."""

    def on_after_optimizer_step(self, trainer: Any, model: nn.Module, optimizer: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_written_behind_a_mask_are_reported_and_a_resume_is_exact(
    kind: str, writes: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more = [Noise()] if writes else []
    straight = _fit(KINDS[kind](), *more, folder=tmp_path / "straight")
    assert ("are not zero though they are masked" in caplog.text) is writes
    _fit(KINDS[kind](), *more, StopAt(11), folder=tmp_path / "parts")
    resumed = _fit(KINDS[kind](), *more, folder=tmp_path / "parts")
    assert resumed.loaded_step == 11
    assert same(everything(straight), everything(resumed)) == []


class Alternating(Wide):
    """Has no gradient of the second matrix at every third step, at which masks of `every=3` are due."""

    calls: Tensor

    def __init__(self, never: bool = False) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.never = never

    def forward(self, batch: tuple[Tensor, Tensor]) -> Any:
        self.calls += self.training
        if int(self.calls) % 3 and not self.never:
            return super().forward(batch)
        return (self.net[0](batch[0]).sum(1) - batch[1]).square().mean()


@pytest.mark.parametrize("kind", ["gmp", "set", "rigl"])
def test_a_mask_without_a_gradient_when_it_is_due_changes_at_the_next_chance(kind: str, tmp_path: Path) -> None:
    make = partial(GMP, 0.8, start=3, stop=15, every=3) if kind == "gmp" else KINDS[kind]
    watch = Watch()
    whole = _fit(make(), watch, folder=tmp_path / "whole", model=Alternating)
    changes = [step + 1 for step in range(1, 24) if same(*(watch.masks[at]["net.2.weight"] for at in (step - 1, step)))]
    late = 1 if kind == "rigl" else 0
    assert changes[:3] == [due + late for due in ((6, 9, 12) if kind == "gmp" else (3, 6, 9))]
    if kind == "gmp":
        assert watch.zeros[-1] == {"net.0.weight": 16, "net.2.weight": 160, "net.4.weight": 16}
    # Step 6 is due and not yet done for RigL.
    _fit(make(), StopAt(6), folder=tmp_path / "parts", model=Alternating)
    resumed = _fit(make(), folder=tmp_path / "parts", model=Alternating)
    assert same(everything(whole), everything(resumed)) == []


def test_a_mask_of_an_optimizer_that_is_not_stepped_when_due_changes_at_its_next_step() -> None:
    class Turns(TrainStep):
        def train_batch(self, batch: Any) -> Any:
            loss = self.forward(batch)
            self.backward(loss, optimizer=self.turn)
            return loss

        def update(self) -> None:
            self.optimizer_step(self.turn)

        @property
        def turn(self) -> str:
            return "a" if self.trainer.progress.step % 2 else "b"

    watch = Watch()
    made = trainer(
        Wide,
        sparsity=GMP(0.8, start=2, stop=8, every=2),
        callbacks=[watch],
        step=Turns(),
        optimizer={
            "a": lambda m: torch.optim.SGD(m.net[0].parameters(), 0.01),
            "b": lambda m: torch.optim.SGD([*m.net[2].parameters(), *m.net[4].parameters()], 0.01),
        },
        settings={"max_duration": 12},
    )
    made.fit(loader(12))
    assert sum(watch.zeros[-1].values()) == 192


@pytest.mark.parametrize(("first", "then"), [(24, 60), (60, 30)], ids=["longer", "shorter"])
def test_gmp_of_another_length_masks_ever_more_and_reaches_its_sparsity(first: int, then: int, tmp_path: Path) -> None:
    watch = Watch()
    _fit(GMP(0.8, every=3), watch, StopAt(24), folder=tmp_path, settings={"max_duration": first})
    _fit(GMP(0.8, every=3), watch, folder=tmp_path, settings={"max_duration": then})
    counts = [sum(zeros.values()) for zeros in watch.zeros]
    assert counts == sorted(counts)
    assert counts[-1] == 192


def test_a_mask_that_never_had_a_gradient_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    _fit(RigL(0.8, every=3), model=partial(Alternating, never=True))
    text = "sparsity: net.2.weight, net.4.weight were not changed as due at step 18: there was no gradient since"
    assert text in caplog.text


def test_the_random_numbers_of_the_training_are_left_alone() -> None:
    assert same(everything(_fit(None))["rng"], everything(_fit(SET(0.5, every=2)))["rng"]) == []


def test_filters_and_shares_by_name() -> None:
    weights = Watch()
    _fit(Static({"net.0.*": 0.5, "*": 0.9}, exclude=["net.4.*"], distribution="uniform"), weights)
    assert weights.zeros[-1] == {"net.0.weight": 10, "net.2.weight": 180}


def test_a_sparse_model_is_fine_tuned_as_it_is() -> None:
    class Sparse(Wide):
        def __init__(self) -> None:
            super().__init__()
            with torch.no_grad():
                self.net.get_parameter("2.weight")[:, 3:] = 0

    watch = Watch()
    made = trainer(Sparse, sparsity=Static(0.0, init="zeros"), callbacks=[watch])
    made.fit(loader(12))
    assert not made.model.get_parameter("net.2.weight")[:, 3:].any()
    assert watch.zeros[-1] == {"net.0.weight": 0, "net.2.weight": 140, "net.4.weight": 0}


def test_masks_survive_accumulation_and_loss_scaling() -> None:
    watch = Watch()
    precision = Precision("fp16", loss_scale=8.0)
    _fit(RigL(0.8, every=2), watch, settings={"grad_accum_steps": 2, "max_duration": 8}, precision=precision)
    assert sum(watch.zeros[-1].values()) == 192


def test_gradients_that_are_not_finite_change_no_mask() -> None:
    class Plant(Callback):
        def on_train_step_start(self, trainer: Any, model: nn.Module, batch: Any) -> None:
            if trainer.progress.step == 5:
                batch[0].fill_(float("nan"))

    watch = Watch()
    _fit(RigL(0.8, every=3), Plant(), CheckFinite("skip"), watch)
    changes = [step + 1 for step in range(1, 24) if same(watch.masks[step - 1], watch.masks[step])]
    assert changes[:3] == [3, 7, 9], "due at step 6"
    assert same(watch.weights[4], watch.weights[5]) == []


def test_the_densities_are_those_of_the_papers() -> None:
    shapes = {"large": (100, 100), "small": (10, 10), "tiny": (2, 2)}
    found = erdos_renyi_kernel(shapes, 0.9)
    assert found["tiny"] == 0.0
    assert (1 - found["small"]) / (1 - found["large"]) == pytest.approx((20 / 100) / (200 / 10000))
    active = sum((1 - found[name]) * math.prod(shape) for name, shape in shapes.items())
    assert active == pytest.approx(0.1 * 10104)
    assert [cubic(step, 10, 20, 0.0, 0.8) for step in (0, 10, 15, 20, 30)] == pytest.approx([0, 0, 0.7, 0.8, 0.8])
    assert [cosine(step, 10) for step in (0, 5, 10, 20)] == pytest.approx([1, 0.5, 0, 0])


def test_a_checkpoint_of_other_masks_is_refused(tmp_path: Path) -> None:
    _fit(Static(0.5), StopAt(6), folder=tmp_path)
    with pytest.raises(UserError, match="has a mask in the checkpoint, but none here"):
        _fit(Static(0.5, exclude=["net.4.*"]), folder=tmp_path)


def test_what_a_step_holds_is_not_sparse() -> None:
    step, watch = TrainStep(), Watch()
    cast("Any", step).criterion = nn.Linear(4, 4)
    _fit(Static(0.5), watch, step=step)
    assert "train_step.criterion.weight" in watch.weights[-1]
    assert watch.masks[-1].keys() == SIZES.keys()


@pytest.mark.parametrize("init", ["random", "magnitude"])
def test_only_the_chosen_elements_move(init: str) -> None:
    before = trainer(Noisy).model.state_dict()
    made = trainer(Noisy, callbacks=[SelectiveGrad(0.25, ["body.0.*"], init=init)], settings={"max_duration": 8})
    made.fit(loader())
    after = made.model.state_dict()
    moved = (before["body.0.weight"] != after["body.0.weight"]).sum()
    assert 0 < int(moved) <= 4
    assert 0 < int((before["body.0.bias"] != after["body.0.bias"]).sum()) <= 2
    assert (before["body.4.weight"] != after["body.4.weight"]).all(), "others are trained as usual"
    if init == "magnitude":
        largest = before["body.0.weight"].abs().flatten().topk(4).indices
        still = torch.ones(16, dtype=torch.bool).index_fill(0, largest, False)
        assert torch.equal(before["body.0.weight"].flatten()[still], after["body.0.weight"].flatten()[still])


def test_sparsity_may_be_a_function() -> None:
    assert type(trainer(Wide, sparsity=lambda: Static(0.5)).callbacks["sparsity"]) is Static


def test_the_mask_of_another_model_is_refused() -> None:
    mask = Static(0.5)

    def sparse(width: int) -> Trainer:
        model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 1))
        return Trainer(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), sparsity=mask, device="cpu")

    sparse(8)
    with pytest.raises(UserError, match=r"this Static was given to an earlier trainer"):
        sparse(16)


def _train(**more: Any) -> None:
    trainer(Noisy, **more).fit(loader(12))


# The call, and words of its error.
WRONG: list[tuple[Callable[[], Any], str]] = [
    (partial(t.SelectiveGrad, 1.5), r"share is 1\.5, but it must be above 0 and at most 1"),
    (partial(t.Static, 1.0), r"sparsity is 1\.0"),
    (partial(t.Static, 0.5, init="first"), "init is 'first'"),
    (partial(t.Static, 0.5, distribution="even"), "distribution is 'even'"),
    (partial(t.Static, {"*": 0.5}, distribution="erk"), "needs one number"),
    (partial(t.SET, 0.5, drop_fraction=1.5), r"drop_fraction is 1\.5"),
    (partial(t.SET, 0.5, every=0), "every: 0 is not a duration"),
    (lambda: _train(sparsity=t.Static(0.5, parameters=["*.bias"])), "no parameter has a mask"),
    (lambda: _train(sparsity=t.Static({"body.0.*": 0.5})), r"no glob of sparsity matches body\.4\.weight"),
    (lambda: _train(sparsity=t.GMP(0.5, stop="30min")), r"sparsity\.stop is 1800s, which is not a number of steps"),
    (lambda: _train(sparsity=t.GMP(0.5, start=4, stop=4)), "stops changing at step 4"),
    (lambda: _train(sparsity=t.Static(0.5), callbacks={"sparsity": t.EMA()}), "two callbacks are called 'sparsity'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), WRONG, ids=[words for _, words in WRONG])
def test_a_wrong_setting_is_refused_by_name(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((ConfigError, UserError), match=words):
        call()
