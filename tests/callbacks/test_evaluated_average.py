"""Where an average of the weights was evaluated, what a checkpoint gives to others is that average, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Noisy, everything, loader, same, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.ema import EMA, SWA
from trainer_cli.callbacks.save_checkpoint_state import SaveCheckpointState
from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.checkpoint.export import ExportFormat
from trainer_cli.core.load_options import WEIGHTS, LoadOptions
from trainer_cli.errors import UserError
from trainer_cli.runs.export import average, export_one, strip
from trainer_cli.trainer.hooks import Callback

AVERAGES = {"ema": lambda: EMA(0.5), "swa": lambda: SWA(1, 1)}


def _fit(folder: Path, callbacks: dict[str, Callback], **settings: Any) -> Any:
    made = trainer(
        Noisy,
        callbacks=callbacks,
        settings={"max_duration": 4, "eval_interval": 2, **settings},
        checkpoint=CheckpointerCallback(folder, save_interval=2, save_async=False),
    )
    made.fit(loader(), loader(6, shuffle=False))
    return made


def _evaluated(path: Path, name: str) -> dict[str, torch.Tensor]:
    """What evaluations of a checkpoint see."""
    state = make_sync_checkpointer().load(path)
    return {**state["model"], **state["callbacks"][name]["average"]}


def _trained(path: Path) -> dict[str, torch.Tensor]:
    return make_sync_checkpointer().load(path)["model"]


@pytest.fixture(params=AVERAGES)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """Name of the callback, and the folder of the checkpoints."""
    _fit(tmp_path / "run", {request.param: AVERAGES[request.param]()})
    return request.param, tmp_path / "run"


def test_the_manifest_names_the_callback_whose_average_was_evaluated(run: tuple[str, Path]) -> None:
    name, folder = run
    manifests = [make_sync_checkpointer().manifest(folder / f"step{step}") for step in (2, 4)]
    assert [manifest.average for manifest in manifests] == [name, name]


@pytest.mark.parametrize("callbacks", [{}, {"ema": EMA(0.5, start=4)}], ids=["no average", "one that has not begun"])
def test_where_weights_were_evaluated_no_average_is_named(callbacks: dict[str, Callback], tmp_path: Path) -> None:
    _fit(tmp_path, callbacks, max_duration=2)
    assert make_sync_checkpointer().manifest(tmp_path / "step2").average is None
    assert b'"average"' not in (tmp_path / "step2" / "manifest.json").read_bytes()


def test_of_several_averages_the_last_is_named(tmp_path: Path) -> None:
    _fit(tmp_path, {"ema": EMA(0.5), "swa": SWA(1, 1)})
    assert make_sync_checkpointer().manifest(tmp_path / "step4").average == "swa"


@pytest.mark.parametrize("ema", [None, "its own", "none"])
def test_export_strip_and_average_give_what_was_evaluated(run: tuple[str, Path], tmp_path: Path, ema: str) -> None:
    name, folder = run
    source = folder / "step4"
    ema = name if ema == "its own" else ema
    expected = _trained(source) if ema == "none" else _evaluated(source, name)
    assert same(_trained(source), _evaluated(source, name)) != []

    exported = export_one(source, ExportFormat.torch, tmp_path / "weights.pt", ema=ema)
    assert same(torch.load(tmp_path / "weights.pt"), expected) == []
    stripped = strip(source, tmp_path / "stripped1", ema=ema)
    assert same(_trained(tmp_path / "stripped1"), expected) == []
    mean = average([source, source], tmp_path / "mean1", ema=ema)
    assert same(_trained(tmp_path / "mean1"), expected) == []
    assert {written.average for written in (exported, stripped, mean)} == {None if ema == "none" else name}
    assert make_sync_checkpointer().manifest(tmp_path / "stripped1").average is None


def test_a_mean_of_averages_and_of_trained_weights_is_refused(run: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = run
    _fit(tmp_path / "plain", {})
    both = [folder / "step4", tmp_path / "plain" / "step4"]
    with pytest.raises(UserError, match="--ema none"):
        average(both, tmp_path / "mean1")
    average(both, tmp_path / "mean1", ema="none")


@pytest.mark.parametrize("takes_average", [True, False])
def test_a_run_that_begins_with_its_weights_begins_with_what_was_evaluated(
    run: tuple[str, Path], takes_average: bool, caplog: pytest.LogCaptureFixture
) -> None:
    name, folder = run
    caplog.set_level("INFO")
    fresh = trainer(Noisy, settings={"max_duration": 1})
    fresh.load_checkpoint(folder / "step4", LoadOptions(WEIGHTS.states, average=takes_average))
    source = folder / "step4"
    assert same(everything(fresh)["model"], _evaluated(source, name) if takes_average else _trained(source)) == []
    assert (f"the average of callback '{name}'" in caplog.text) is takes_average


def test_a_fork_of_everything_keeps_weights_and_average_apart(run: tuple[str, Path]) -> None:
    name, folder = run
    fresh = trainer(Noisy, callbacks={name: AVERAGES[name]()}, settings={"max_duration": 6})
    fresh.load_checkpoint(folder / "step4")
    assert same(everything(fresh)["model"], _trained(folder / "step4")) == []
    assert same(fresh.callbacks[name].state_dict()["average"], _average(folder / "step4", name)) == []


def _average(path: Path, name: str) -> dict[str, torch.Tensor]:
    average: dict[str, torch.Tensor] = make_sync_checkpointer().load(path)["callbacks"][name]["average"]
    return average


@pytest.mark.parametrize(
    ("states", "expected", "named", "measured"),
    [
        (["model"], "evaluated", False, True),
        (["model", "callbacks"], "trained", True, True),
        (["model", "optimizer"], "trained", False, False),
    ],
)
def test_a_copy_of_states_has_the_metrics_of_the_weights_that_are_in_it(
    states: list[str], expected: str, named: bool, measured: bool, tmp_path: Path
) -> None:
    copies = SaveCheckpointState(states, folder=str(tmp_path / "copies"))
    _fit(tmp_path / "run", {"ema": EMA(0.5), "copies": copies})
    source, copy = tmp_path / "run" / "step4", tmp_path / "copies" / "step4"
    wanted = _evaluated(source, "ema") if expected == "evaluated" else _trained(source)
    assert same(_trained(copy), wanted) == []
    manifest = make_sync_checkpointer().manifest(copy)
    assert (manifest.average == "ema", "val/loss" in manifest.metrics) == (named, measured)
