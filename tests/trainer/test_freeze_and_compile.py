"""Frozen, unfrozen and added parameters, and a compiled forward: what is trained, saved and resumed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import (
    BodyAndHead,
    Noisy,
    StopAt,
    StopInEvaluation,
    assert_resumes_exactly,
    everything,
    loader,
    on,
    same,
    trainer,
)
from torch import Tensor, nn

from trainer_cli import WarmupCosine
from trainer_cli.callbacks.check_finite import CheckFinite
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.components.targets import Trust
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.loads.options import LoadOptions
from trainer_cli.optim.optimizers import optimizer_factory, parameter_groups
from trainer_cli.patterns import check_pattern, matches
from trainer_cli.running.build import Builder
from trainer_cli.schema.sections import CompileConfig, CompileMode, Device, TrainConfig
from trainer_cli.trainer.hooks import Callback
from trainer_cli.user_cache import folder_of_compiled

COMPILED = "TORCHINDUCTOR_CACHE_DIR"
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
    assert not ours.model.get_submodule("body.1").training


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
    before = made.model.get_parameter("body.0.weight").detach().clone()
    result = made.fit(loader())
    assert result.finished
    assert not torch.equal(made.model.get_parameter("body.0.weight"), before)


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
        CompileConfig(mode=CompileMode("max-autotune"))


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
    assert torch.equal(tuned.model.get_parameter("body.0.weight"), source.model.get_parameter("body.0.weight"))
    assert not torch.equal(tuned.model.get_parameter("body.4.weight"), source.model.get_parameter("body.4.weight"))


def test_a_config_freezes_and_compiles() -> None:
    config = TrainConfig(
        model={"_target_": "trainer_cli.MLP", "hidden": [4]},
        data={"_target_": "trainer_cli.Digits"},
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.1},
        freeze=["re:layers[.]1[.].*"],
        compile=CompileConfig(enabled=True, backend="eager", dynamic=False),
        device=Device["cpu"],
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


@pytest.mark.parametrize("given", [None, "mine", "torchinductor_me"])
def test_what_is_compiled_is_kept_in_the_users_cache_unless_a_folder_is_given(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(COMPILED, raising=False)
    given = str(tmp_path / given) if given is not None else None
    if given is not None:
        monkeypatch.setenv(COMPILED, given)
    trainer(Noisy)
    assert os.environ.get(COMPILED) == given, "nothing is compiled"
    trainer(Noisy, compile={"backend": "eager"})
    folder = os.environ[COMPILED]
    # What torch sets itself when the compiler is imported is no choice of the user.
    given = given if given is not None and given.endswith("mine") else None
    compiled = tmp_path / "trainer-cli/compiled"
    assert folder == given or re.fullmatch(rf"{compiled}/{re.escape(torch.__version__)}-[0-9a-f]{{8}}", folder)
    assert given is not None or Path(folder).is_dir()
    other = folder_of_compiled("9.9")
    assert other.name.startswith("9.9-"), "another torch loads nothing of this one"


def test_without_a_folder_for_it_the_compiler_works_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMPILED, raising=False)
    for cache in (tmp_path / "file", Path("~nobody-here")):
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        trainer(Noisy, compile={"backend": "eager"})
        assert "trainer-cli" not in os.environ.get(COMPILED, "")


def test_deterministic_covers_cublas_cudnn_and_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.delenv("TORCHINDUCTOR_DETERMINISTIC", raising=False)
    inductor = SimpleNamespace(deterministic=False)
    monkeypatch.setitem(sys.modules, "torch._inductor.config", inductor)
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


def _unfreeze(trainer: Any, model: Any, *_: Any) -> None:
    """Adds the body's weight, and its bias as a group of its own that stays untrained, at a step."""
    if trainer.progress.step == ADDED_AT:
        model.body.weight.requires_grad_(True)
        trainer.optimizer.add_param_group({"params": [model.body.weight], "lr": 0.02})
        trainer.optimizer.add_param_group({"params": [model.body.bias]})


def _fit(folder: Path, *callbacks: Callback, kind: Any = torch.optim.Adam, schedule: bool = False, **more: Any) -> Any:
    made = trainer(
        lambda: BodyAndHead(trained=False),
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
            lambda: BodyAndHead(trained=True),
            optimizer=lambda m: torch.optim.SGD([{"params": [p]} for p in list(m.parameters())[:groups]], lr=0.1),
            checkpoint=CheckpointerCallback(tmp_path, save_async=False),
        ).fit(loader())

    fit(4)
    with pytest.raises(UserError, match="it has 3 parameter groups, but the checkpoint has 4"):
        fit(3)


# What hooks and steps change of `requires_grad` is as in a plain loop, and stays over every kind of resume.


STEPS = 8


class Batches:
    """A loader of three batches."""

    def __init__(self) -> None:
        self.batches = [(torch.tensor([[k, 1.0], [1.0, k]]), torch.tensor([k, 1.0])) for k in (0.5, 1.5, 2.5)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


BATCHES = Batches()


class Net(nn.Module):
    """Its body is trained, its middle is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.middle.requires_grad_(False)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Any:
        return (self.head(self.middle(self.body(batch[0]).tanh()).tanh()).squeeze(-1) - batch[1]).square().mean()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def _set(**parts_at: dict[int, bool]) -> Callable[[Any, int], None]:
    """A function that sets `requires_grad` of parts before steps."""

    def change(model: Any, step: int) -> None:
        for part, values in parts_at.items():
            if step in values:
                model.get_submodule(part).requires_grad_(values[step])

    return change


CHANGES: dict[str, Callable[[Any, int], None]] = {
    "unfrozen once": _set(middle={5: True}),
    "frozen once": _set(body={5: False}),
    "frozen, then unfrozen": _set(body={2: False, 6: True}),
    "unfrozen, then frozen": _set(middle={2: True, 6: False}),
    "one frozen as the other is unfrozen": _set(body={3: False, 7: True}, middle={3: True}),
    "in turn": _set(body={k: k % 2 == 0 for k in range(9)}, middle={k: k % 2 == 1 for k in range(9)}),
}


def _loop_by_hand(change: Callable[[Any, int], None]) -> Any:
    torch.manual_seed(0)
    model = Net()
    optimizer = _sgd(model)
    for step in range(1, STEPS + 1):
        change(model, step)
        model(BATCHES.batches[(step - 1) % 3]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _before_steps(change: Callable[[Any, int], None]) -> Callback:
    return on(on_train_batch_start=lambda trainer, model, *_: change(model, trainer.progress.step + 1))


def _fit_with_hooks(
    folder: Path, *callbacks: Callback, hooks: Callable[[], Callback], data: Any = None, steps: int = STEPS, **more: Any
) -> Any:
    made = trainer(
        Net,
        optimizer=_sgd,
        callbacks=[hooks(), *callbacks],
        settings={"max_duration": steps, "eval_interval": 3},
        checkpoint=CheckpointerCallback(folder, save_async=False),
        **more,
    )
    made.fit(loader() if data is None else data, loader(4, shuffle=False))
    return made


def _state(made: Any) -> Any:
    """The flags in clear, beside all that a checkpoint has."""
    return everything(made), {name: parameter.requires_grad for name, parameter in made.model.named_parameters()}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_are_those_of_a_plain_loop_straight_and_resumed(change: str, tmp_path: Path) -> None:
    expected = _loop_by_hand(CHANGES[change])
    hooks = partial(_before_steps, CHANGES[change])
    assert same(_fit_with_hooks(tmp_path / "straight", hooks=hooks, data=BATCHES).model.state_dict(), expected) == []
    for stop in range(1, STEPS):
        _fit_with_hooks(tmp_path / "parts", StopAt(stop), hooks=hooks, data=BATCHES)
    assert same(_fit_with_hooks(tmp_path / "parts", hooks=hooks, data=BATCHES).model.state_dict(), expected) == []


def _at(steps: dict[int, tuple[str, bool]], **more: Any) -> Callable[[], Callback]:
    """A callback that sets `requires_grad` of a part at the end of steps, and has further hooks."""

    def change(trainer: Any, model: Any, *_: Any) -> None:
        if (found := steps.get(trainer.progress.step)) is not None:
            model.get_submodule(found[0]).requires_grad_(found[1])

    return lambda: on(on_train_batch_end=change, **more)


def _freeze_body(trainer: Any, *_: Any) -> None:
    trainer.model.body.requires_grad_(False)


def _switch_body(trainer: Any, model: Any, *_: Any) -> None:
    model.body.requires_grad_(not model.body.weight.requires_grad)


TABLE: dict[str, tuple[Callable[[], Callback], dict[str, Any]]] = {
    "frozen in setup, unfrozen later": (_at({4: ("body", True)}, setup=_freeze_body), {}),
    "frozen at the start of a fit, unfrozen later": (_at({4: ("body", True)}, on_fit_start=_freeze_body), {}),
    "frozen before each stretch, unfrozen in it": (_at({4: ("body", True)}, on_train_start=_freeze_body), {}),
    "other in each stretch": (_at({}, on_train_start=_switch_body), {}),
    "scheduled": (_at({}), {"freeze": {"body.*": 4}}),
    "scheduled, but unfrozen before": (_at({2: ("body", True)}), {"freeze": {"body.*": 5}}),
    "scheduled, and frozen after": (_at({6: ("body", False)}), {"freeze": {"body.*": 4}}),
    "scheduled, and frozen before another rule ends": (
        _at({3: ("body", False)}), {"freeze": {"body.*": 2, "head.bias": 5}},
    ),
    "frozen for the run, and unfrozen": (_at({3: ("body", True)}), {"freeze": ["body.bias"]}),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_a_stop_changes_nothing(case: str, tmp_path: Path) -> None:
    hooks, more = TABLE[case]
    expected = _state(_fit_with_hooks(tmp_path / "straight", hooks=hooks, **more))
    for stop in (1, 3, 4, 6, 7):
        _fit_with_hooks(tmp_path / f"at{stop}", StopAt(stop), hooks=hooks, **more)
        resumed = _fit_with_hooks(tmp_path / f"at{stop}", hooks=hooks, **more)
        assert (resumed.loaded_step, same(expected, _state(resumed))) == (stop, [])


@pytest.mark.parametrize("case", TABLE)
def test_neither_does_a_stop_in_an_evaluation_or_an_end_that_is_moved(case: str, tmp_path: Path) -> None:
    hooks, more = TABLE[case]
    expected = _state(_fit_with_hooks(tmp_path / "straight", hooks=hooks, **more))
    _fit_with_hooks(tmp_path / "evaluation", StopInEvaluation(3), hooks=hooks, **more)
    assert same(expected, _state(_fit_with_hooks(tmp_path / "evaluation", hooks=hooks, **more))) == []
    for end in (3, 5):
        _fit_with_hooks(tmp_path / f"end{end}", hooks=hooks, steps=end, **more)
        assert same(expected, _state(_fit_with_hooks(tmp_path / f"end{end}", hooks=hooks, **more))) == []


@pytest.mark.parametrize("case", TABLE)
def test_a_fit_continues_those_before_it_and_begins_anew_if_asked_to(case: str, tmp_path: Path) -> None:
    hooks, more = TABLE[case]
    expected = _state(_fit_with_hooks(tmp_path / "straight", hooks=hooks, **more))
    settings = {"max_duration": STEPS, "eval_interval": 3}
    made = trainer(Net, optimizer=_sgd, callbacks=[hooks(), StopAt(2), StopAt(5)], settings=settings, **more)
    for from_start in (False, False, False, True, False, False):
        start: dict[str, Any] = {"ckpt_path": None} if from_start else {}
        made.fit(loader(), loader(4, shuffle=False), **start)
        if made.progress.step == STEPS:
            state = _state(made)
            assert same((expected[0]["model"], expected[1]), (state[0]["model"], state[1])) == []
    assert made.progress.step == STEPS


@pytest.mark.parametrize("case", TABLE)
def test_a_rollback_trains_what_its_checkpoint_did(case: str, tmp_path: Path) -> None:
    hooks, more = TABLE[case]
    seen: dict[int, list[dict[str, bool]]] = {}

    def look(trainer: Any, model: Any, *_: Any) -> None:
        flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        seen.setdefault(trainer.progress.step + 1, []).append(flags)
        if trainer.progress.step == 5 and len(seen[6]) == 1:
            trainer.ask_to_roll_back()

    made = trainer(
        Net,
        optimizer=_sgd,
        callbacks=[hooks(), on(on_train_batch_start=look)],
        settings={"max_duration": STEPS},
        checkpoint=CheckpointerCallback(tmp_path, save_interval=2, save_async=False),
        **more,
    )
    made.fit(loader())
    assert [len(flags) for flags in seen.values()] == [1, 1, 1, 1, 2, 2, 1, 1]
    assert all(flags[0] == flags[-1] for flags in seen.values())


def test_what_the_user_sets_after_a_load_stays(tmp_path: Path) -> None:
    _fit_with_hooks(tmp_path / "run", hooks=_at({4: ("body", False)}), steps=6)
    made = trainer(Net, optimizer=_sgd, settings={"max_duration": 7})
    made.load_checkpoint(tmp_path / "run/step6")
    assert not made.model.get_parameter("body.weight").requires_grad
    made.save_checkpoint(tmp_path / "copy")
    made.model.get_parameter("body.weight").requires_grad_(True)
    made.fit(loader())
    assert [parameter.requires_grad for parameter in made.model.get_submodule("body").parameters()] == [True, False]
    again = trainer(Net, optimizer=_sgd)
    again.load_checkpoint(tmp_path / "copy")
    assert not any(parameter.requires_grad for parameter in again.model.get_submodule("body").parameters())


@pytest.mark.parametrize(
    ("states", "frozen"),
    [(["model"], False), (["model", "optimizer"], False), (["model", "progress"], True), (["all"], True)],
)
def test_the_changes_belong_to_the_progress_of_a_training(states: list[str], frozen: bool, tmp_path: Path) -> None:
    _fit_with_hooks(tmp_path, hooks=_at({4: ("body", False)}), steps=6)
    made = trainer(Net, optimizer=_sgd)
    made.load_checkpoint(tmp_path / "step6", LoadOptions(states=states))
    assert made.model.get_parameter("body.weight").requires_grad is not frozen


def test_a_checkpoint_without_the_state_leaves_all_as_hooks_set_it(tmp_path: Path) -> None:
    def forget(trainer: Any, state: dict[str, Any]) -> None:
        del state["requires_grad"]

    hooks = _at({4: ("body", True)}, on_fit_start=_freeze_body)
    _fit_with_hooks(tmp_path, on(postprocess_checkpoint=forget), hooks=hooks, steps=6)
    assert not _fit_with_hooks(tmp_path, hooks=hooks).model.body.weight.requires_grad


def test_only_what_differs_from_the_build_is_saved(tmp_path: Path) -> None:
    made = _fit_with_hooks(tmp_path, hooks=_at({4: ("body", False)}), freeze={"head.bias": 7}, steps=6)
    assert made.checkpoint_state()["requires_grad"]["changed"] == {"body.weight": False, "body.bias": False}


@pytest.mark.parametrize("saved", [7, {"changed": 7}, {"changed": {"body.weight": "no"}}, {}])
def test_a_state_of_another_layout_is_refused(saved: Any, tmp_path: Path) -> None:
    def spoil(trainer: Any, state: dict[str, Any]) -> None:
        state["requires_grad"] = saved

    _fit_with_hooks(tmp_path, on(postprocess_checkpoint=spoil), hooks=_at({}), steps=1)
    with pytest.raises(UserError, match="does not fit this run"):
        _fit_with_hooks(tmp_path, hooks=_at({}))


def test_a_checkpoint_with_nan_in_a_part_whose_turn_it_is_not_is_not_finite(tmp_path: Path) -> None:
    def spoil(trainer: Any, model: Any, *_: Any) -> None:
        model.body.requires_grad_(False)
        with torch.no_grad():
            model.body.weight.fill_(float("nan"))

    made = trainer(Net, optimizer=_sgd)
    spoil(made, made.model)
    made.save_checkpoint(tmp_path / "step0")
    assert not make_sync_checkpointer().manifest(tmp_path / "step0").finite
