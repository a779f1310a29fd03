"""The whole state: what does not fit is one table by owner, nothing is taken then, and nothing is replaced or lost."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import safetensors.torch
import torch
from small_parts import compiled, present
from tiny import Counts, Noisy, Points, assert_resumes_exactly, everything, loader, same, trainer
from torch import Tensor, nn

from trainer_cli import WarmupCosine
from trainer_cli.callbacks.check_finite import CheckFinite
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.ema import EMA, SWA
from trainer_cli.errors import UserError
from trainer_cli.loads.options import LoadOptions
from trainer_cli.state.generators import capture_rng
from trainer_cli.state.model_state import fit_model
from trainer_cli.state.names import clean_name
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.precision import Precision
from trainer_cli.trainer.trainer import Trainer
from trainer_cli.trainer.training_loop import TrainingLoop


class Spoil(Callback):
    """Changes the state just before it is saved; not where it is only tried, before the first step."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def postprocess_checkpoint(self, trainer: Any, state: dict[str, Any]) -> None:
        if trainer.progress.step:
            self.change(state)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)


def _trainer(folder: Path, *callbacks: Callback, length: int = 2, **more: Any) -> Any:
    settings = {"max_duration": length, "eval_interval": None, "log_interval": 4}
    return trainer(
        **{
            "model": Noisy,
            "optimizer": _adamw,
            "schedulers": {"ours": lambda optimizer: WarmupCosine(optimizer, 20)},
            "precision": Precision("fp16", loss_scale=64),
            "callbacks": {"ema": EMA(0.9), **{f"more_{index}": one for index, one in enumerate(callbacks)}},
            "settings": settings,
            "checkpoint": CheckpointerCallback(folder),
            **more,
        }
    )


def _spoil(state: dict[str, Any]) -> None:
    name = "body.0.weight"
    state["model"][name] = torch.zeros(9, 2)
    state["optimizer"]["state"][name]["exp_avg"] = torch.zeros(8, 3)
    state["optimizer"]["state"]["body.0.bias"]["exp_avg_sq"] = torch.zeros(8, dtype=torch.float64)
    state["schedulers"]["more"] = state["schedulers"]["ours"]
    state["schedulers"]["ours"] = {**state["schedulers"]["ours"], "state": {"step": "two"}}
    del state["scaler"]["scale"]
    state["callbacks"]["ema"]["average"][name] = torch.zeros(1)
    state["progress"] = {**state["progress"], "laps": 3}
    del state["loop"]["meter"]
    del state["rng"]["numpy"]
    state["data"]["length"] = 11


def test_what_does_not_fit_is_one_table_by_owner_and_nothing_is_taken(tmp_path: Path) -> None:
    _trainer(tmp_path, Spoil(_spoil), length=1).fit(loader())
    made = _trainer(tmp_path)
    before, generators = (
        {name: value.clone() for name, value in made.model.state_dict().items()},
        capture_rng(),
    )
    with pytest.raises(UserError) as caught:
        made.fit(loader())
    assert str(caught.value) == (
        f"{tmp_path}/step1 does not fit this run:\n"
        "  model          body.0.weight: has shape (8, 2) in this model, but (9, 2) in the checkpoint\n"
        "  optimizer      body.0.weight: its exp_avg has shape (8, 3) in the checkpoint, but the parameter (8, 2)\n"
        "  optimizer      body.0.bias: its exp_avg_sq is torch.float64 in the checkpoint, "
        "but the parameter is torch.float32\n"
        "  schedulers     more: not in this run\n"
        "  schedulers     ours.step: is a value in the checkpoint, but a number here\n"
        "  scaler         scale: missing in the checkpoint\n"
        "  progress       progress in the checkpoint does not fit this version: laps\n"
        "  loop           meter: missing in the checkpoint\n"
        "  rng            numpy: missing in the checkpoint\n"
        "  callbacks.ema  body.0.weight: has shape (8, 2) in this model, but (1,) in the checkpoint\n"
        "  data           the training data is not what the checkpoint was made with: length was 11 and is 10\n"
        "Nothing was loaded. Resume with the settings and the code of the checkpoint, or save into another folder."
    )
    assert same(dict(made.model.state_dict()), before) == []
    assert same(capture_rng(), generators) == []
    assert made.optimizer.state == {}
    assert (made.progress.step, made.loop.pending_eval_record) == (0, None)
    assert made.callbacks["ema"].state_dict() == {"average": {}}
    assert made.schedulers.state_dict()["ours"]["state"] == {"step": 0}


@pytest.mark.parametrize(
    ("part", "change"),
    [
        *((part, "missing") for part in ("optimizer", "schedulers", "loop", "rng", "data")),
        *((part, "another form") for part in ("optimizer", "schedulers", "loop", "scaler", "data")),
    ],
)
def test_a_part_that_is_missing_or_of_another_form_is_in_the_table(tmp_path: Path, part: str, change: str) -> None:
    spoil = Spoil(lambda state: state.pop(part) if change == "missing" else state.update({part: {"what": [1]}}))
    _trainer(tmp_path, spoil, length=1).fit(loader())
    problem = "missing in the checkpoint" if change == "missing" else ""
    with pytest.raises(UserError, match=rf"does not fit this run:\n  {part}  {problem}"):
        _trainer(tmp_path).fit(loader())


class Keeps(Callback):
    """Keeps something."""

    def __init__(self, seen: int = 0) -> None:
        self.seen = seen

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_a_callback_that_only_one_side_has_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fit(callbacks: dict[str, Callback], length: int) -> None:
        trainer(callbacks=callbacks, settings={"max_duration": length}, checkpoint=CheckpointerCallback(tmp_path)).fit(
            loader()
        )

    fit({"old": Keeps(), "both": Keeps(7)}, 1)
    new, both = Keeps(3), Keeps()
    fit({"both": both, "new": new, "none": Callback()}, 2)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "the checkpoint has state of callback 'old', which this run does not have: it is dropped",
        "callback 'new' has state, but the checkpoint has none for it: it starts new",
    ]
    assert (both.seen, new.seen) == (7, 3)


@pytest.mark.parametrize("how", ["setitem", "update", "ior"])
@pytest.mark.parametrize("key", ["model", "mine"])
def test_a_key_that_is_taken_is_refused_before_step_1(tmp_path: Path, key: str, how: str) -> None:
    class Adds(Callback):
        def on_save_checkpoint(self, trainer: Any, state: dict[str, Any]) -> None:
            if how == "setitem":
                state[key] = 1
            elif how == "update":
                state.update({key: 1})
            else:
                state |= {key: 1}

    made = trainer(callbacks=[Adds(), Adds()], checkpoint=CheckpointerCallback(tmp_path))
    with pytest.raises(UserError, match=f"has a '{key}' already, and it would be replaced") as caught:
        made.fit(loader())
    culprit = "Adds" if key == "model" else "Adds_2"
    assert caught.value.__notes__[0] == f"in on_save_checkpoint of callback '{culprit}' (Adds)"
    assert (made.progress.step, list(tmp_path.glob("step*"))) == (0, [])


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)])
def test_a_compiled_model_and_a_plain_one_go_on_from_each_other(tmp_path: Path, first: bool, second: bool) -> None:
    def fit(compiled: bool, length: int, folder: str) -> Any:
        made = _trainer(
            tmp_path / folder,
            length=length,
            model=(lambda: torch.compile(Noisy(), backend="eager")) if compiled else Noisy,
        )
        made.fit(loader())
        return everything(made)

    straight = fit(False, 6, "straight")
    fit(first, 3, "parts")
    assert same(straight, fit(second, 6, "parts")) == []


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_the_prefixes_of_wrappers_are_understood_in_every_part(tmp_path: Path, prefix: str) -> None:
    def renamed(tensors: dict[str, Any]) -> dict[str, Any]:
        return {prefix + name: value for name, value in tensors.items()}

    def wrap(state: dict[str, Any]) -> None:
        optimizer, ema = state["optimizer"], state["callbacks"]["ema"]
        state["model"] = renamed(state["model"])
        optimizer["state"] = renamed(optimizer["state"])
        for group in optimizer["groups"]:
            group["params"] = [prefix + name for name in group["params"]]
        ema["average"] = renamed(ema["average"])

    def fit(folder: Path, *callbacks: Callback) -> Any:
        made = _trainer(folder, *callbacks, *([Spoil(wrap)] if callbacks else []), length=6)
        made.fit(loader())
        return made

    assert_resumes_exactly(fit, tmp_path, 3)


class Remembering(Noisy):
    """A queue that grows up to 20 rows, buffers that are None at first, and one in a part of the model."""

    queue: Tensor
    first: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(0, 2))
        self.register_buffer("first", None)
        self.register_buffer("scratch", None, persistent=False)
        self.body[0].register_buffer("counts", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Any) -> Any:
        loss, outputs = super().forward(batch)
        if self.training:
            self.first = batch[0][:1].clone() if self.first is None else self.first
            self.queue = torch.cat([self.queue, batch[0]])[-20:]
            self.body[0].counts = torch.arange(len(self.queue))
        counts = self.body.get_buffer("0.counts").float()
        terms = [self.queue.mean(), present(self.first).mean(), counts.mean()]
        return loss + sum(terms) * self.body.get_parameter("0.bias").mean(), outputs


def test_buffers_have_the_shape_of_the_checkpoint_on_a_resume_and_in_an_evaluation(tmp_path: Path) -> None:
    def fit(folder: Path, *callbacks: Callback) -> Any:
        more = {f"more_{index}": one for index, one in enumerate(callbacks)}
        made = _trainer(folder, model=Remembering, callbacks=more, length=6)
        made.fit(loader())
        return made

    straight, _ = assert_resumes_exactly(fit, tmp_path, 1, 3, 5)
    state = straight.model.state_dict()
    assert (state["queue"].shape, state["first"].shape, state["body.0.counts"].shape) == ((20, 2), (1, 2), (20,))
    newest = straight.checkpoint.newest()
    made = _trainer(tmp_path / "other", model=Remembering, callbacks={})
    assert made.validate(loader(), ckpt_path=newest) == straight.validate(loader())
    assert not same(made.model.state_dict(), state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.update(queue=torch.zeros(3, 2).double()), "queue: has shape"),
        (lambda model: model.update(queue=7), "queue: is a Tensor in this model, but a int"),
        (lambda model: model.update(scratch=torch.ones(1)), "scratch: not in this model"),
        (lambda model: model.update(frozen=torch.ones(4)), "frozen: has shape"),
        (lambda model: model.pop("queue"), "queue: missing in the checkpoint"),
    ],
    ids=["type of numbers", "no tensor", "not persistent", "a parameter", "missing"],
)
def test_nothing_but_the_shape_of_a_persistent_buffer_may_differ(tmp_path: Path, change: Any, message: str) -> None:
    spoil = Spoil(lambda state: change(state["model"]))
    _trainer(tmp_path, model=Remembering, callbacks=[spoil], length=1).fit(loader())
    made = _trainer(tmp_path, model=Remembering, callbacks=[])
    with pytest.raises(UserError, match=message):
        made.fit(loader())
    assert made.model.first is None


def test_buffers_that_have_grown_begin_anew_with_a_fit_from_step_0_and_after_a_trial() -> None:
    made = trainer(Remembering, settings={"max_duration": 3})
    pytest.importorskip("trainer_cli.addons.auto.find").find_learning_rate(made, loader(), steps=5)
    assert made.model.first is None
    assert len(made.model.queue) == 0
    made.fit(loader())
    first = copy.deepcopy(everything(made))
    made.fit(loader(), ckpt_path=None)
    assert same(everything(made), first) == []


class Late(nn.Module):
    """A buffer that is None at first, and one that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("late", None)
        self.register_buffer("queue", torch.zeros(0, 2))


def _compiled() -> nn.Module:
    model = nn.Module()
    model.part = compiled(Late())
    return model


def _named_twice() -> nn.Module:
    model = nn.Module()
    model.part = model.other = Late()
    return model


@pytest.mark.parametrize("make", [_compiled, _named_twice])
def test_a_buffer_has_its_values_under_each_name_of_its_module(make: Callable[[], nn.Module]) -> None:
    state = {
        f"{part}.{leaf}": value
        for part in (("part",) if make is _compiled else ("part", "other"))
        for leaf, value in (("late", torch.ones(3)), ("queue", torch.full((4, 2), 5.0)))
    }
    model = make()
    fitting, _ = fit_model(model, state, reshape_buffers=True)
    assert fitting.faults == []
    fitting.load()
    assert same({clean_name(name): value for name, value in model.state_dict().items()}, state) == []


def test_other_shapes_of_buffers_are_refused_where_a_new_run_takes_the_weights(tmp_path: Path) -> None:
    _trainer(tmp_path / "a", model=Remembering, callbacks={}, length=1).fit(loader())
    made = _trainer(tmp_path / "b", model=Remembering, callbacks={})
    with pytest.raises(UserError, match="queue: has shape"):
        made.fit(loader(), ckpt_path=tmp_path / "a" / "step1", load=LoadOptions(states=["model"]))


def test_weights_alone_that_do_not_fit_are_a_table_too(tmp_path: Path) -> None:
    _trainer(tmp_path / "a", Spoil(_spoil), length=1).fit(loader())
    with pytest.raises(UserError, match=r"step1 does not fit this run:\n  model  body\.0\.weight: has shape"):
        _trainer(tmp_path / "b").fit(loader(), ckpt_path=tmp_path / "a" / "step1", load=LoadOptions(states=["model"]))


def test_loaded_weights_are_logged_and_other_weights_are_refused_with_what_can_be_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _trainer(tmp_path).fit(loader())
    (path,) = tmp_path.glob("step2")
    with caplog.at_level("INFO", logger="trainer_cli"):
        made = trainer(Noisy, optimizer=_adamw)
        made.load_checkpoint(path, load=LoadOptions(states=["model"]))
    assert f"weights from {path} step 2 ({len(made.model.state_dict())} tensors)" in caplog.text
    loads: tuple[Callable[[Trainer], object], ...] = (
        lambda other: other.load_checkpoint(path, load=LoadOptions(states=["model"])),
        lambda other: other.validate(loader(), path),
    )
    for load in loads:
        with pytest.raises(UserError) as caught:
            load(trainer())
        assert "linear.weight: missing in the checkpoint" in str(caught.value)
        assert str(caught.value).endswith(
            "Nothing was loaded. The model must have the layers and shapes that the checkpoint was saved with. "
            "load.strict=false loads what both have; load.key_mapping={OLD.*: NEW.*} renames."
        )


class Classes(nn.Module):
    """A body, a head for so many classes, and a parameter that is in no layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 4), nn.Linear(4, classes)
        self.scale = nn.Parameter(torch.ones(classes))

    def forward(self, batch: Any) -> Any:
        return {"loss": (self.head(self.body(batch[0])) * self.scale).mean()}


@pytest.fixture(scope="module")
def of_three_classes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of a model of three classes: one of this program, and others."""
    folder = tmp_path_factory.mktemp("classes")
    made = trainer(lambda: Classes(3), optimizer=_adamw, settings={"max_duration": 1})
    made.fit(loader())
    made.save_checkpoint(folder / "own")
    torch.save(made.model.state_dict(), folder / "x.pt")
    safetensors.torch.save_file(made.model.state_dict(), folder / "x.safetensors")
    (folder / "hf").mkdir()
    safetensors.torch.save_file(made.model.state_dict(), folder / "hf" / "model.safetensors")
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("kind", "command", "states"),
    [
        ("own", "fit", ["all"]), ("own", "fit", ["model"]), ("own", "fit", ["model", "optimizer"]),
        ("own", "validate", ["all"]), ("x.pt", "fit", ["all"]), ("x.pt", "fit", ["model"]),
        ("x.safetensors", "fit", ["model"]), ("x.safetensors", "validate", ["all"]),
        ("hf", "fit", ["model", "optimizer"]), ("hf", "validate", ["model"]),
    ],
)  # fmt: skip
def test_a_head_of_another_shape_is_refused_with_what_loads_the_rest(
    kind: str, command: str, states: list[str], strict: bool, of_three_classes: dict[str, Path]
) -> None:
    path = of_three_classes[kind]

    def run(ignored: Sequence[str]) -> None:
        made = trainer(lambda: Classes(5), optimizer=_adamw, settings={"max_duration": 2})
        load = LoadOptions(states=states, strict=strict, ignore_keys=ignored)
        if command == "fit":
            made.fit(loader(), ckpt_path=path, load=load)
        else:
            made.validate(loader(), path, load=load)

    with pytest.raises(UserError) as caught:
        run([])
    if kind != "own" and command == "fit" and states != ["model"]:
        assert "from which only the weights can be loaded (load.states)" in str(caught.value)
        return
    assert "head.weight: has shape (5, 4) in this model, but (3, 4) in the checkpoint" in str(caught.value)
    assert str(caught.value).endswith(
        "Nothing was loaded. To keep the model's own values of these layers, add 'load.ignore_keys=[head.*,scale]'."
    )
    run(["head.*", "scale"])


def test_of_another_run_an_optimizer_that_does_not_fit_can_be_left_out(of_three_classes: dict[str, Path]) -> None:
    made = trainer(lambda: Classes(3), settings={"max_duration": 2})
    with pytest.raises(UserError, match=r"(?s)optimizer  .*or less of it: load\.states=\[model\]\.") as caught:
        made.fit(loader(), ckpt_path=of_three_classes["own"])
    assert "name=OTHER" not in str(caught.value)


def _with_two_counts() -> Trainer:
    return trainer(Noisy, callbacks={"a": Counts(), "b": Counts()}, settings={"max_duration": 2})


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["callbacks.a"], {"a": 2, "b": 0}),
        (["callbacks.a", "callbacks.b"], {"a": 2, "b": 2}),
        (["callbacks"], {"a": 2, "b": 2}),
        (["model", "callbacks.b"], {"a": 0, "b": 2}),
    ],
)
def test_the_state_of_one_callback_is_loaded_alone(
    states: list[str], expected: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, other = _with_two_counts(), _with_two_counts()
    first.fit(loader())
    weights = copy.deepcopy(other.model.state_dict())
    other.load_checkpoint(first.save_checkpoint(tmp_path / "saved"), LoadOptions(states=states))
    assert {name: callback.state_dict()["count"] for name, callback in other.callbacks.items()} == expected
    loaded = first if "model" in states else None
    assert same(other.model.state_dict(), weights if loaded is None else loaded.model.state_dict()) == []
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


@pytest.mark.parametrize(("name", "reason"), [("c", "not in this run"), ("b", "missing in the checkpoint")])
def test_a_callback_whose_state_cannot_be_loaded_is_refused_by_its_name(name: str, reason: str, tmp_path: Path) -> None:
    first = trainer(Noisy, callbacks={"a": Counts()}, settings={"max_duration": 2})
    first.fit(loader())
    other = _with_two_counts()
    with pytest.raises(ValueError, match=rf"callbacks\.{name} +{reason}"):
        other.load_checkpoint(
            first.save_checkpoint(tmp_path / "saved"), LoadOptions(states=["callbacks.a", f"callbacks.{name}"])
        )
    assert other.callbacks["a"].state_dict() == {"count": 0}


class Noting(Trainer):
    """Has more in its checkpoints than a Trainer."""

    def checkpoint_state(self) -> dict[str, Any]:
        return {**super().checkpoint_state(), "note": f"step {self.progress.step}"}


@pytest.mark.parametrize("save_async", [True, False])
def test_what_a_subclass_of_the_trainer_adds_is_in_every_checkpoint(tmp_path: Path, save_async: bool) -> None:
    saver = CheckpointerCallback(tmp_path / "saved", save_interval=2, save_async=save_async)
    loop = TrainingLoop(max_duration=3, eval_interval=None)
    made = Noting(model=Noisy(), optimizer=_adamw, loop=loop, checkpoint=saver, device="cpu")
    made.fit(loader(2))
    paths = [tmp_path / "saved" / f"step{step}" for step in (2, 3)] + [made.save_checkpoint(tmp_path / "by_hand")]
    assert [made.checkpointer.read(path)["note"] for path in paths] == ["step 2", "step 3", "step 3"]


class Scripted(Noisy):
    """A body of TorchScript, with a buffer that its forward replaces."""

    body: Any

    def __init__(self, how: str = "script") -> None:
        super().__init__()
        self.body.append(_Counted())
        if how == "script":
            self.body = torch.jit.script(self.body)
        if how == "trace":
            self.body = cast("Any", torch.jit).trace(self.body, torch.zeros(2, 2), check_trace=False)
        if how == "load":
            file = io.BytesIO()
            torch.jit.save(torch.jit.script(self.body), file)
            self.body = cast("Any", torch.jit).load(io.BytesIO(file.getvalue()))


class _Counted(nn.Module):
    if TYPE_CHECKING:
        count: Tensor  # TorchScript cannot read it as a text.

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return x


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", ["script", "trace", "load"])
def test_a_part_of_torchscript_trains_as_its_module_and_resumes_exactly(tmp_path: Path, how: str) -> None:
    def fit(folder: Path, *callbacks: Callback, how: str = how) -> Any:
        made = _trainer(
            folder,
            CheckFinite(),
            SWA(start=2),
            *callbacks,
            model=partial(Scripted, how),
            freeze=["body.0.*"],
            precision=Precision("fp32"),
            settings={"max_duration": 4, "eval_interval": 2, "microbatch": 2},
        )
        made.fit(loader(), loader())
        return made

    straight, _ = assert_resumes_exactly(fit, tmp_path / how, 3)
    # A trace stays in the mode in which it was made, in evaluations too.
    if how != "trace":
        plain = fit(tmp_path / "plain", how="")
        assert same(dict(plain.model.state_dict()), dict(straight.model.state_dict())) == []
    twice = trainer(partial(Scripted, how))
    twice.fit(loader())
    first = copy.deepcopy(dict(twice.model.state_dict()))
    twice.fit(loader(), ckpt_path=None)
    assert same(first, dict(twice.model.state_dict())) == []


# States that a training changes on the way: buffers made late, groups added late, a schedule of frozen weights.


CREATED = 3
"""The forward of the training that creates the buffer."""


class LateParts(nn.Module):
    """Creates a buffer in a later forward, replaces it in each one, and lets it grow."""

    count: Tensor
    seen: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", None)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Any:
        x, y = batch
        if self.training:
            self.count += 1
            if self.count >= CREATED:
                self.seen = x.mean(0) if self.seen is None else self.seen * 0.9 + x.mean(0)
            if self.count == CREATED + 2:
                seen = present(self.seen)
                self.seen = torch.cat([seen, seen])[:2] if len(seen) != 2 else seen.clone()
        shift = 0 if self.seen is None else self.seen.mean()
        return (self.linear(x).squeeze(-1) - y + shift).square().mean()


def late_trainer(folder: Path, steps: int, average: Callback) -> Trainer:
    return Trainer(
        model=LateParts,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
        loop=TrainingLoop(max_duration=steps),
        checkpoint=CheckpointerCallback(folder, save_interval=1, newer="trash", save_async=False),
        callbacks={"average": average},
        device="cpu",
        seed=0,
    )


def all_tensors(made: Trainer) -> dict[str, Tensor]:
    averages = made.callbacks["average"].state_dict()["average"]
    return {**made.model.state_dict(), **{f"average {name}": value for name, value in averages.items()}}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


AVERAGES: dict[str, Callable[[], Callback]] = {
    "swa before": lambda: SWA(1, every=1),
    "swa after": lambda: SWA(5, every=1),
    "ema": lambda: EMA(0.5),
}


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 6])
def test_a_resume_is_exact_around_a_buffer_that_is_made_late(average: str, stop: int, tmp_path: Path) -> None:
    whole = late_trainer(tmp_path / "whole", 8, AVERAGES[average]())
    whole.fit(Points(16))
    late_trainer(tmp_path / "parts", stop, AVERAGES[average]()).fit(Points(16))
    resumed = late_trainer(tmp_path / "parts", 8, AVERAGES[average]())
    resumed.fit(Points(16))
    assert_same(all_tensors(whole), all_tensors(resumed))


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("step", [1, 2, 3, 6])
def test_a_trainer_goes_back_to_before_a_buffer_was_made(average: str, step: int, tmp_path: Path) -> None:
    made = late_trainer(tmp_path / "a", 8, AVERAGES[average]())
    made.fit(Points(16))
    first = {name: value.clone() for name, value in all_tensors(made).items()}
    made.fit(Points(16), ckpt_path=tmp_path / f"a/step{step}")
    assert_same(first, all_tensors(made))


def test_a_buffer_that_the_model_always_had_must_be_in_the_checkpoint(tmp_path: Path) -> None:
    made = late_trainer(tmp_path / "a", 1, EMA())
    made.fit(Points(16))

    class Other(LateParts):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.zeros(2)

    other = Trainer(model=Other, optimizer=lambda model: torch.optim.Adam(model.parameters()), device="cpu")
    with pytest.raises(UserError, match="seen: missing"):
        other.load_checkpoint(tmp_path / "a/step1")


class Adds(Callback):
    """Adds a group with a parameter, at the end of a step or at the beginning of a fit."""

    def __init__(self, hook: str, *, of_model: bool) -> None:
        self.hook, self.of_model = hook, of_model

    def add(self, made: Trainer) -> None:
        assert made.optimizer is not None
        if self.of_model:
            made.model.register_parameter("extra", nn.Parameter(torch.ones(2)))
        parameter = made.model.get_parameter("extra") if self.of_model else nn.Parameter(torch.ones(2))
        made.optimizer.add_param_group({"params": [parameter]})

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        if self.hook == "on_train_start" and trainer.progress.step == 0:
            self.add(trainer)

    def on_train_step_end(self, trainer: Trainer, *_: Any) -> None:
        if self.hook == "on_train_step_end" and trainer.progress.step == 1:
            self.add(trainer)


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_step_end"])
def test_a_group_with_a_parameter_that_no_checkpoint_has_is_refused(hook: str, tmp_path: Path) -> None:
    made = late_trainer(tmp_path / hook, 3, Adds(hook, of_model=False))
    with pytest.raises(UserError, match=r"optimizer: a parameter of shape \(2,\) does not belong to the model"):
        made.fit(Points(16))


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_step_end"])
def test_a_group_with_a_parameter_that_was_added_to_the_model_is_trained(hook: str, tmp_path: Path) -> None:
    assert late_trainer(tmp_path / hook, 3, Adds(hook, of_model=True)).fit(Points(16)).step == 3


def test_two_trainers_made_first_train_as_each_alone(tmp_path: Path) -> None:
    def weights(made: Trainer) -> Tensor:
        made.fit(Points(16))
        return made.model.get_parameter("linear.weight").detach().clone()

    alone = [weights(late_trainer(tmp_path / f"alone{number}", 4, EMA())) for number in range(2)]
    both = [late_trainer(tmp_path / f"both{number}", 4, EMA()) for number in range(2)]
    for value, made in zip(alone, both, strict=True):
        assert torch.equal(value, weights(made))


def test_a_notebook_logger_outside_of_a_notebook_warns_and_trains(caplog: pytest.LogCaptureFixture) -> None:
    from trainer_cli.loggers.notebook import NotebookLogger

    made = Trainer(
        model=LateParts,
        optimizer=lambda model: torch.optim.Adam(model.parameters()),
        loop=TrainingLoop(max_duration=2),
        loggers=[NotebookLogger()],
        device="cpu",
    )
    with caplog.at_level(logging.WARNING):
        assert made.fit(Points(16)).step == 2
    assert "NotebookLogger shows nothing outside of a notebook: use ConsoleLogger" in caplog.messages
