"""Frozen parameters, groups that a callback adds, and a compiled forward: what is trained, saved and resumed."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import Noisy, StopAt, assert_resumes_exactly, everything, loader, on, same, trainer
from torch import Tensor, nn

from trainer_cli import WarmupCosine
from trainer_cli.callbacks.check_finite import CheckFinite
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.components.targets import Trust
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.loads.options import LoadOptions
from trainer_cli.optim.optimizers import optimizer_factory, parameter_groups
from trainer_cli.patterns import check_pattern, matches
from trainer_cli.running.build import Builder
from trainer_cli.schema.sections import CompileConfig, TrainConfig
from trainer_cli.trainer.hooks import Callback

BODY = ["body.0.*", "re:body[.]1[.].*"]
"""The first layer and the batch norm behind it."""


def test_a_regular_expression_may_stand_where_a_glob_may() -> None:
    assert matches("layers.12.norm.weight", r"re:layers\.\d+\.(norm|bias)\..*")
    assert not matches("layers.12.norm.weight.more", r"re:layers\.\d+\.norm\.weight")
    check_pattern("layers.[*", "freeze")
    with pytest.raises(ConfigError, match=r"freeze: 're:layers.\(' is not a regular expression"):
        check_pattern("re:layers.(", "freeze")


def test_groups_by_a_regular_expression_have_their_settings() -> None:
    groups = parameter_groups(Noisy(), {"re:.*(bias|1[.]weight)": {"weight_decay": 0.0}})
    assert [len(group["params"]) for group in groups] == [2, 4]
    with pytest.raises(ConfigError, match=r"param_groups: 're:[(]' is not a regular expression"):
        parameter_groups(Noisy(), {"re:(": {}})


def test_frozen_parameters_and_statistics_stay_and_the_optimizer_has_none_of_them() -> None:
    ours = trainer(Noisy, freeze=BODY, optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.1))
    before = {name: value.clone() for name, value in ours.model.state_dict().items()}
    ours.fit(loader(), loader(4, shuffle=False))
    kept = {name for name, value in ours.model.state_dict().items() if torch.equal(value, before[name])}
    assert kept == {name for name in before if name.startswith(("body.0.", "body.1."))} | {"frozen"}
    assert ours.optimizer is not None
    assert len(ours.optimizer.param_groups[0]["params"]) == 2
    assert ours.model.training
    assert not ours.model.body[1].training


@pytest.mark.parametrize(
    ("freeze", "warned"),
    [(None, "2 parameters, such as body.0.weight"), (["body.0.weight"], "1 parameter, such as body.0.bias"),
     (["body.0.*"], None), ({"body.0.*": "100st"}, None), ({"body.0.b*": 9}, "1 parameter, such as body.0.weight")],
    ids=["none", "some", "all", "all for a while", "some for a while"],
)  # fmt: skip
@pytest.mark.parametrize("first", [["body.0.*"], {"body.0.*": "100st"}], ids=["frozen", "for a while"])
def test_what_an_earlier_trainer_has_frozen_of_a_model_is_said(
    first: Any, freeze: Any, warned: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = Noisy()
    trainer(model, freeze=first, settings={"max_duration": 200, "hard_stop": 1}).fit(loader(8, 4))
    # What the user has frozen is no mistake.
    model.body[1].weight.requires_grad_(False)
    assert "earlier trainer" not in caplog.text
    trainer(model, freeze=freeze)
    assert [text for text in caplog.messages if "earlier trainer" in text and str(warned) in text] or warned is None
    assert ("earlier trainer" in caplog.text) is (warned is not None)


def test_parameters_and_statistics_are_frozen_until_their_duration_has_passed() -> None:
    seen: list[tuple[int, dict[str, Tensor], int]] = []

    def note(trainer: Any, model: Any, *_: Any) -> None:
        values = {name: value.clone() for name, value in model.state_dict().items() if name.startswith("body")}
        seen.append((trainer.progress.step, values, len(trainer.optimizer.state)))

    # Accumulation and epochs of three batches: a step of two, and one of one.
    ours = trainer(
        Noisy, freeze={"body.0.*": 2, "body.1.*": "2ep", "frozen*": None}, callbacks=[on(on_train_batch_end=note)],
        optimizer=optimizer_factory(torch.optim.Adam), settings={"grad_accum_steps": 2},
    )  # fmt: skip
    first = {name: value.clone() for name, value in ours.model.state_dict().items() if name.startswith("body")}
    ours.fit(loader(), loader(4, shuffle=False))
    for name, value in first.items():
        moved = min(step for step, values, _ in seen if not torch.equal(values[name], value))
        # The statistics of a norm move with the first batch of a step.
        expected = {"0": 3, "1": 5, "4": 1}[name.split(".")[1]]
        assert moved == (expected - 1 if "running" in name or "tracked" in name else expected), name
    states = {step: count for step, _, count in seen}
    assert states == {0: 0, 1: 2, 2: 2, 3: 4, 4: 4, 5: 6, 6: 6}, "one that was never trained has no state"


# Optimizers of torch that accept any dense parameter.
KINDS = {
    **{kind.__name__: {"kind": kind} for kind in (torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam)},
    **{kind.__name__: {"kind": kind} for kind in (torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)},
    **{kind.__name__: {"kind": kind} for kind in (torch.optim.Adamax, torch.optim.ASGD, torch.optim.Rprop)},
    "RMSprop": {"kind": torch.optim.RMSprop, "momentum": 0.9, "centered": True},
    "SGD": {"kind": torch.optim.SGD, "lr": 0.1},
    "SGD with momentum": {"kind": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "dampening": 0.1},
    "SGD, momentum of one group": {"kind": torch.optim.SGD, "param_groups": {"*.weight": {"momentum": 0.9}}},
    "Nesterov": {"kind": torch.optim.SGD, "momentum": 0.9, "nesterov": True},
}


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_every_optimizer_trains_parameters_that_are_unfrozen_later(settings: dict[str, Any]) -> None:
    made = trainer(Noisy, freeze={"body.0.*": 2}, optimizer=optimizer_factory(**settings))
    before = made.model.body[0].weight.detach().clone()
    result = made.fit(loader())
    assert result.finished
    assert not torch.equal(made.model.body[0].weight, before)


def test_going_back_to_before_parameters_were_unfrozen_freezes_them_again(tmp_path: Path) -> None:
    frozen: list[tuple[int, bool]] = []

    def note(trainer: Any, model: Any, batch: Any) -> None:
        if trainer.progress.step == 4 and (4, False) not in frozen:
            batch[1].fill_(float("nan"))
        frozen.append((trainer.progress.step, not model.body[0].weight.requires_grad))

    made = trainer(
        Noisy, freeze={"body.0.*": 4}, optimizer=optimizer_factory(torch.optim.Adam),
        callbacks=[CheckFinite("roll_back"), on(on_train_step_start=note)],
        checkpoint=CheckpointerCallback(tmp_path, save_interval=3, save_async=False),
    )  # fmt: skip
    made.fit(loader())
    from_3 = [(3, True), (4, False), (5, False)]
    # The loss of step 4 is read at the end of the run.
    assert frozen == [(0, True), (1, True), (2, True), *from_3, *from_3]


def test_an_evaluation_that_a_resume_makes_first_finds_the_same_parameters_frozen(tmp_path: Path) -> None:
    def fit(folder: Path, *stops: Any) -> dict[int, list[bool]]:
        frozen: dict[int, list[bool]] = {}

        def note(trainer: Any, model: Any, *_: Any) -> None:
            if not trainer.sanity_checking:
                frozen[trainer.progress.step] = [not parameter.requires_grad for parameter in model.body.parameters()]

        made = trainer(
            Noisy, freeze={"body.0.*": 2, "body.1.*": 4}, callbacks=[on(on_validate_start=note), *stops],
            optimizer=optimizer_factory(torch.optim.Adam), settings={"eval_interval": 2},
            checkpoint=CheckpointerCallback(folder),
        )  # fmt: skip
        made.fit(loader(), loader(4, shuffle=False))
        return frozen

    straight = fit(tmp_path / "straight")
    assert len({tuple(frozen) for frozen in straight.values()}) == 2
    parts = [fit(tmp_path / "parts", StopAt(step)) for step in (2, 4)]
    # The evaluation after the step at which a process is stopped is made by the next one.
    assert parts == [{}, {2: straight[2]}]
    assert fit(tmp_path / "parts") == {4: straight[4], 6: straight[6]}


def test_a_frozen_duration_of_a_training_whose_length_is_a_time_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'body.0.\*' is frozen for .* of a run whose length is a time"):
        trainer(Noisy, freeze={"body.0.*": "0.5dur"}, settings={"max_duration": "90s"}).fit(loader())


def test_a_model_given_in_evaluation_mode_trains_but_for_its_frozen_norms() -> None:
    ours = trainer(Noisy().eval(), freeze=BODY)
    ours.fit(loader())
    modes = {name: module.training for name, module in ours.model.named_modules()}
    assert [name for name, training in modes.items() if not training] == ["body.1"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"freeze": ["bdy.0.*"]}, r"freeze: 'bdy.0.\*' matches no parameter of the model.* Did you mean 'body.0.\*'\?"),
        ({"freeze": ["re:["]}, "freeze: 're:\\[' is not a regular expression"),
        ({"freeze": ["*"]}, "no parameter is left to train"),
        (
            {"freeze": "body.0.*"},
            r"freeze is 'body.0.\*', but it must be a list of patterns.*Write freeze=\[body\.0\.\*\]",
        ),
        ({"freeze": {"bdy.0.*": 2}}, r"freeze: 'bdy.0.\*' matches no trained parameter.* Did you mean 'body.0.\*'\?"),
        ({"freeze": {"frozen": 2}}, "'frozen' matches no trained parameter"),
        ({"freeze": {"body.*": 2}}, "no parameter is left to train for optimizer, before 'body.\\*' is unfrozen"),
        ({"freeze": {"body.0.*": "soon"}}, "freeze.body.0.\\*: 'soon' is not a duration"),
        ({"freeze": {"body.0.*": "90s"}}, "freeze.body.0.\\* is '90s', but it must be counted in steps"),
        ({"compile": {"backend": "eagr"}}, "there is no compiler 'eagr'.*Did you mean 'eager'"),
        (
            {"compile": {"backend": "eager", "mode": "default", "options": {"a": 1}}},
            "torch.compile refused its settings",
        ),
    ],
)
def test_wrong_patterns_to_freeze_and_settings_of_the_compiler_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(Noisy, **settings)


def test_settings_of_a_compiler_that_is_off_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"compile.mode is max-autotune, but compile.enabled is false"):
        CompileConfig(mode="max-autotune")


def test_a_frozen_training_fine_tunes_other_weights(tmp_path: Path) -> None:
    made = [
        trainer(
            Noisy, freeze=BODY, checkpoint=CheckpointerCallback(tmp_path / name), settings={"max_duration": 1},
            optimizer=optimizer_factory(torch.optim.Adam, lr=0.1),
        )
        for name in ("source", "tuned")
    ]  # fmt: skip
    source, tuned = made
    source.fit(loader())
    tuned.fit(loader(), ckpt_path=tmp_path / "source/step1", load=LoadOptions(states=("model",)))
    assert torch.equal(tuned.model.body[0].weight, source.model.body[0].weight)
    assert not torch.equal(tuned.model.body[4].weight, source.model.body[4].weight)


def test_a_config_freezes_and_compiles() -> None:
    config = TrainConfig(
        model={"_target_": "trainer_cli.MLP", "hidden": [4]},
        data={"_target_": "trainer_cli.Digits"},
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.1},
        freeze=["re:layers[.]1[.].*"],
        compile=CompileConfig(enabled=True, backend="eager", dynamic=False),
        device="cpu",
    )
    builder = Builder(config, Trust())
    made = builder.shapes(builder.data())
    frozen = [name for name, parameter in made.model.named_parameters() if not parameter.requires_grad]
    assert frozen
    assert all(name.startswith("layers.1.") for name in frozen)
    assert builder._compile() == {"backend": "eager", "mode": "default", "dynamic": False, "fullgraph": False}


@pytest.mark.slow
def test_a_compiled_model_is_saved_under_its_own_names_and_resumes_exactly(tmp_path: Path) -> None:
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def made(folder: str, steps: int, **more: Any) -> Any:
        saver = CheckpointerCallback(tmp_path / folder, save_interval=3)
        settings = {"max_duration": steps, "eval_interval": 3}
        return trainer(Noisy, checkpoint=saver, settings=settings, **more)

    plain = made("plain", 6)
    plain.fit(loader(), loader(4, shuffle=False))
    made("compiled", 3, compile={"backend": counting}).fit(loader(), loader(4, shuffle=False))
    resumed = made("compiled", 6, compile={"backend": counting})
    resumed.fit(loader(), loader(4, shuffle=False))
    assert graphs
    assert "torch._dynamo" in sys.modules
    assert list(resumed.checkpoint_state()["model"]) == list(nn.Module.state_dict(Noisy()))
    assert same(everything(plain)["model"], everything(resumed)["model"]) == []


def test_deterministic_covers_cublas_cudnn_and_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.delenv("TORCHINDUCTOR_DETERMINISTIC", raising=False)
    inductor = SimpleNamespace(deterministic=False)
    monkeypatch.setitem(sys.modules, "torch._inductor.config", inductor)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    try:
        trainer(Noisy, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["TORCHINDUCTOR_DETERMINISTIC"] == "1"
    assert inductor.deterministic
    assert not torch.backends.cudnn.benchmark


ADDED_AT = 4


class Frozen(nn.Module):
    """Its body is not trained at first."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 4), nn.Linear(4, 1)
        self.body.requires_grad_(False)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.head(self.body(batch[0]).relu()).squeeze(-1) - batch[1]).square().mean()


def _unfreeze(trainer: Any, model: Any, *_: Any) -> None:
    """Adds the body's weight, and its bias as a group of its own that stays untrained, at a step."""
    if trainer.progress.step == ADDED_AT:
        model.body.weight.requires_grad_(True)
        trainer.optimizer.add_param_group({"params": [model.body.weight], "lr": 0.02})
        trainer.optimizer.add_param_group({"params": [model.body.bias]})


def _fit(folder: Path, *callbacks: Callback, kind: Any = torch.optim.Adam, schedule: bool = False, **more: Any) -> Any:
    made = trainer(
        Frozen,
        optimizer=lambda m: kind([p for p in m.parameters() if p.requires_grad], lr=0.05),
        schedulers=(lambda o: WarmupCosine(o, 10, warmup=2)) if schedule else None,
        callbacks=[on(on_train_batch_end=_unfreeze), *callbacks],
        settings={"max_duration": 10},
        checkpoint=CheckpointerCallback(folder, save_async=False, **more),
    )
    made.fit(loader())
    return made


@pytest.mark.parametrize("schedule", [False, True], ids=["constant rate", "schedule"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9)], ids=["Adam", "SGD"])
def test_a_resume_makes_the_added_groups_again(tmp_path: Path, kind: Any, schedule: bool) -> None:
    straight, resumed = assert_resumes_exactly(partial(_fit, kind=kind, schedule=schedule), tmp_path, ADDED_AT, 7)
    assert len(straight.optimizer.param_groups) == 3
    assert [p.requires_grad for p in resumed.model.parameters()] == [True, False, True, True]


def test_going_back_to_before_a_group_was_added_removes_it(tmp_path: Path) -> None:
    planted: list[int] = []

    def plant_once(trainer: Any, model: Any, batch: Any) -> None:
        if trainer.progress.step == ADDED_AT + 1 and not planted:
            planted.append(trainer.progress.step)
            batch[1].fill_(float("nan"))

    made = _fit(tmp_path, CheckFinite("roll_back"), on(on_train_step_start=plant_once), save_interval=3)
    assert made.progress.step == 10
    assert len(made.optimizer.param_groups) == 3, "added again"


def test_a_config_with_fewer_groups_is_refused_as_before(tmp_path: Path) -> None:
    def fit(groups: int) -> None:
        trainer(
            lambda: Frozen().requires_grad_(True),
            optimizer=lambda m: torch.optim.SGD([{"params": [p]} for p in list(m.parameters())[:groups]], lr=0.1),
            checkpoint=CheckpointerCallback(tmp_path, save_async=False),
        ).fit(loader())

    fit(4)
    with pytest.raises(UserError, match="it has 3 parameter groups, but the checkpoint has 4"):
        fit(3)
