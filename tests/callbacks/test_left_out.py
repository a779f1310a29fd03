"""`checkpoint.leave_out`: checkpoints that lack states say so, and are resumed only without them, when asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny import Counts, Noisy, loader, trainer

from trainer_cli.callbacks.check_finite import CheckFinite
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.ema import EMA
from trainer_cli.commands.command_line import main
from trainer_cli.config.composing import compose
from trainer_cli.errors import CheckpointError, ConfigError
from trainer_cli.loads import LoadOptions
from trainer_cli.trainer.hooks import Callback

DIGITS = ["+experiment=digits_mlp", "loop.max_duration=2", "loop.limit_train_batches=2", "data.batch_size=8"]
REST = ("model", "schedulers", "progress", "callbacks", "rng")


def _trainer(folder: Path, steps: int = 3, callbacks: Any = (), **saver: Any) -> Any:
    return trainer(
        Noisy, callbacks=callbacks or {"first": Counts(), "second": Counts(), "stateless": Callback()},
        settings={"max_duration": steps}, optimizer=lambda model: torch.optim.Adam(model.parameters(), 0.01),
        checkpoint=CheckpointerCallback(folder, pre_train_checkpoint=False, **saver),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("patterns", "lacking", "left_out"),
    [
        (["optimizer"], {"optimizer"}, ["optimizer"]),
        (["rng", "schedulers"], {"rng", "schedulers"}, ["schedulers", "rng"]),
        (["callbacks.first"], {"callbacks/first"}, ["callbacks.first"]),
        (["callbacks.*"], {"callbacks/first", "callbacks/second"}, ["callbacks.first", "callbacks.second"]),
        (["callbacks"], {"callbacks"}, ["callbacks"]),
        (["{optimizer,callbacks.second}"], {"optimizer", "callbacks/second"}, ["optimizer", "callbacks.second"]),
        (["re:(opt|sch).*"], {"optimizer", "schedulers"}, ["optimizer", "schedulers"]),
        (["*"], {"optimizer", "schedulers", "callbacks", "rng"}, ["optimizer", "schedulers", "callbacks", "rng"]),
    ],
)
def test_a_checkpoint_lacks_what_the_patterns_name_and_says_so(
    tmp_path: Path, patterns: list[str], lacking: set[str], left_out: list[str]
) -> None:
    made = _trainer(tmp_path, leave_out=patterns, save_async=len(patterns) > 1)
    made.fit(loader(2))
    state = made.checkpointer.read(path := made.checkpoint.newest())
    names = set(state) | {f"callbacks/{name}" for name in state.get("callbacks", {})}
    whole = set(made.checkpoint_state()) | {"callbacks/first", "callbacks/second"}
    missing = whole - names
    assert missing - {f"callbacks/{name}" for name in ("first", "second") if "callbacks" in lacking} == lacking
    assert list(made.checkpointer.left_out(path)) == left_out


def test_a_resume_is_refused_by_name_and_goes_on_without_the_state_when_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _trainer(tmp_path, leave_out=["optimizer"]).fit(loader())
    assert "checkpoints lack optimizer (checkpoint.leave_out)" in caplog.text
    for arguments in ({}, {"ckpt_path": tmp_path / "step3"}):
        with pytest.raises(CheckpointError, match="was saved without optimizer") as refused:
            _trainer(tmp_path, 5, leave_out=["optimizer"]).fit(loader(), **arguments)
        assert f"load.states=[{','.join(REST)}]" in str(refused.value.cure)
    again = _trainer(tmp_path, 5, leave_out=["optimizer"])
    result = again.fit(loader(), ckpt_path=tmp_path / "step3", load=LoadOptions(states=REST))
    assert result.step == 5
    assert again.callbacks["first"].count == 5
    assert {float(state["step"]) for state in again.optimizer.state.values()} == {2.0}
    assert "step3 was saved without optimizer: training continues with new ones" in caplog.text


def test_a_state_that_was_left_out_is_refused_by_name_also_where_it_is_chosen(tmp_path: Path) -> None:
    _trainer(tmp_path, leave_out=["callbacks.first", "rng"]).fit(loader())
    for states in (["all"], ["model", "rng"]):
        with pytest.raises(CheckpointError, match=r"saved without .*rng"):
            _trainer(tmp_path).load_checkpoint(tmp_path / "step3", LoadOptions(states=states))
    other = _trainer(tmp_path)
    other.load_checkpoint(tmp_path / "step3", LoadOptions(states=["model", "progress", "callbacks"]))
    assert (other.callbacks["first"].count, other.callbacks["second"].count) == (0, 3)
    assert set(other.validate(loader(6, shuffle=False), tmp_path / "step3")) == {"val"}


@pytest.mark.parametrize(
    ("callbacks", "saver", "message"),
    [
        ({"ema": EMA()}, {"leave_out": ["callbacks.ema"]}, "callbacks.ema, which evaluations see"),
        ({"ema": EMA()}, {"leave_out": ["*"]}, "callbacks.ema, which evaluations see"),
        ({"finite": CheckFinite("roll_back")}, {"leave_out": ["optimizer"]}, "roll_back, and checkpoints lack states"),
        ({"first": Counts()}, {"leave_out": ["callbacks.frist"]}, "names 'callbacks.frist'"),
    ],
)
def test_a_training_that_needs_the_state_is_refused_before_its_first_step(
    tmp_path: Path, callbacks: dict[str, Callback], saver: dict[str, Any], message: str
) -> None:
    made = _trainer(tmp_path, callbacks=callbacks, **saver)
    with pytest.raises(ConfigError, match=message):
        made.fit(loader())
    assert made.progress.step == 0


@pytest.mark.parametrize(
    ("overrides", "message", "cure"),
    [
        (["checkpoint.leave_out=[optimzer]"], "there is no such state", "Did you mean 'optimizer'?"),
        (["checkpoint.leave_out=[callbacks.emaa]", "+callbacks.ema._target_=trainer_cli.EMA"],
         "names 'callbacks.emaa'", "Did you mean 'callbacks.ema'?"),
        (["checkpoint.leave_out=[model]"], "every checkpoint has model and progress", "checkpoint.enabled=false"),
        (["checkpoint.leave_out=['re:(']"], "is not a regular expression", ""),
        (["checkpoint.leave_out=[optimizer]", "restarts.max=2"], "restarts.max is 2, but checkpoints lack", ""),
    ],
)  # fmt: skip
def test_a_name_that_leaves_nothing_out_is_refused_with_its_cure(overrides: list[str], message: str, cure: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        compose([*DIGITS, *overrides])
    assert cure in str(refused.value)
    compose([*DIGITS, "checkpoint.leave_out=[optimizer]", "restarts.max=2", f"load.states=[{','.join(REST)}]"])


def test_the_command_plans_refuses_goes_on_evaluates_and_shows(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lean = [*DIGITS, "checkpoint.leave_out=[optimizer]", "loggers=none"]

    def run(*arguments: str) -> tuple[int, str]:
        code = main([*arguments])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    code, text = run("plan", *lean)
    assert (code, "left out       checkpoints lack optimizer" in text) == (0, True)
    code, text = run("fit", *lean)
    assert code == 0, text
    assert "is finished" in run("plan", *lean)[1]
    for command in ("plan", "fit"):
        for arguments in (["loop.max_duration=3"], ["name=fork", "ckpt=runs/digits_mlp@latest", "load.states=[all]"]):
            code, text = run(command, *lean, *arguments)
            assert (code, "saved without optimizer" in text) == (3, True), text
    assert sorted(path.name for path in Path("runs").iterdir()) == ["digits_mlp"]
    asked = [*lean, "loop.max_duration=3", f"load.states=[{','.join(REST)}]"]
    assert run("fit", *asked)[0] == 0
    assert run("validate", "ckpt=runs/digits_mlp@latest", "data.batch_size=8")[0] == 0
    assert run("ckpt", "export", "runs/digits_mlp@latest", "--format", "safetensors")[0] == 0
    assert "left out  optimizer" in run("ckpt", "show", "runs/digits_mlp@latest")[1]


def test_check_resume_checks_the_whole_state(tmp_path: Path) -> None:
    attempts = pytest.importorskip("trainer_cli.addons.exact.attempts")
    composed = compose([*DIGITS, "checkpoint.leave_out=[optimizer]"])
    path = attempts.freeze(composed, tmp_path, steps=4, plan=tmp_path / "plan")
    assert yaml.safe_load(path.read_text())["checkpoint"]["leave_out"] == []
