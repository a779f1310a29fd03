"""Each recipe trains as the loop that people write by hand, and is exact after a resume in its middle."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from reader import ROOT

from trainer_cli import SyncCheckpointer
from trainer_cli.commands.command_line import main

RECIPES = ROOT / "examples/recipes"
NAMES = sorted(path.stem for path in (RECIPES / "configs/experiment").glob("*.yaml"))
IN_CAMPAIGNS = ("bert_lora", "byol", "ddpm", "detection", "simclr")
"""Those whose parts are in another recipe, or in tests of their own."""
STEPS = 6
HALFWAY = """
from trainer_cli import Callback

class StopAt(Callback):
    def __init__(self, step): self.step = step

    def on_after_optimizer_step(self, trainer, model, optimizer):
        if trainer.progress.step + 1 == self.step: trainer.stop("halfway", finished=False)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the recipes, with a callback that stops a run before its end."""
    folder = Path(shutil.copytree(RECIPES, tmp_path_factory.mktemp("recipes") / "recipes"))
    (folder / "halfway.py").write_text(HALFWAY)
    return folder


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.campaign if name in IN_CAMPAIGNS else ()) for name in NAMES]
)
def test_a_recipe_trains_as_its_hand_written_loop_and_resumes_exactly(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    # Of other tests, for this test alone.
    for path in folder.iterdir():
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    compare = importlib.import_module("compare")
    quiet = ["logging.console=off", "loggers=none", "loop.eval_steps=1"]
    assert main([*compare.command(name, STEPS), *quiet]) == 0
    of_loss, of_weight = compare.compare(name)
    record = torch.load(f"{name}.pt", weights_only=False)
    assert of_loss <= 1e-6 * max(1.0, *map(abs, map(float, record["losses"])))
    assert of_weight <= 1e-6
    # Not because nothing was trained.
    start = record["model"].state_dict()
    assert any(not torch.equal(start[key], value) for key, value in record["end"].items())
    arguments = [f"+experiment={name}", f"run_dir=runs/{name}", f"loop.hard_stop={STEPS}", "loop.eval_interval=2"]
    halfway = f"+callbacks.halfway={{_target_: halfway.StopAt, step: {STEPS // 2}}}"
    assert main(["fit", *arguments, halfway, *quiet]) == 75
    assert main(["fit", *arguments, halfway, *quiet]) == 0
    state = SyncCheckpointer().load(folder / f"runs/{name}/checkpoints/step{STEPS}")["model"]
    for key, value in record["end"].items():
        assert torch.equal(state[key], value), key


def test_every_recipe_is_in_the_table_with_its_lines() -> None:
    text = (RECIPES / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)\.py\) \| .* \| (\d+) \| (\d+) \| [^|]+ \| [^|]+ \|$", text, re.MULTILINE)

    def lines(path: str) -> str:
        return str(len((RECIPES / path).read_text(encoding="utf-8").splitlines()))

    assert [row[0] for row in rows] == NAMES
    for name, module, by_hand, config in rows:
        assert (RECIPES / f"{module}.py").is_file()
        original = "bert" if name == "bert_lora" else name
        assert (by_hand, config) == (lines(f"originals/{original}.py"), lines(f"configs/experiment/{name}.yaml"))
