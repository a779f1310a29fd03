"""Which checkpoint `ckpt=` names where the newest ones are bad: an older one, with a warning."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainer_cli import make_sync_checkpointer
from trainer_cli.checkpoint.checkpointer import CheckpointMetadata
from trainer_cli.checkpoint.find import expanded
from trainer_cli.config.overrides import read_overrides
from trainer_cli.runs.select import ckpt_argument, select, select_all, select_one


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 10 to 30, and a folder of step 40 that was never committed."""
    for step in (10, 20, 30):
        metadata = CheckpointMetadata(step=step, finite=True)
        path = tmp_path / "run/checkpoints" / f"step{step}"
        make_sync_checkpointer().save({"model": {"weight": torch.ones(3)}}, path, metadata=metadata)
    (tmp_path / "run/config.yaml").write_text("{}\n")
    (tmp_path / "run/checkpoints/step40").mkdir()
    return tmp_path / "run"


def truncate(checkpoint: Path) -> None:
    """Take a byte of the weights away."""
    file = checkpoint / "rank0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


NAMES: dict[str, Callable[[Path], str]] = {
    "the run": str,
    "its latest": lambda run: f"{run}@latest",
    "a glob": lambda run: f"{run}/checkpoints/step*",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(
    name: Callable[[Path], str], run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert select_one(name(run)).name == "step30"
    assert not caplog.records
    truncate(run / "checkpoints/step30")
    assert select_one(name(run)).name == "step20"
    [warning] = caplog.messages
    assert "step30 is passed over, and step20 is used: rank0.safetensors" in warning


def test_an_older_damaged_checkpoint_is_no_matter_of_the_latest(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    truncate(run / "checkpoints/step10")
    assert select_one(f"{run}@latest").name == "step30"
    assert not caplog.records


def test_a_newer_checkpoint_that_is_not_finite_is_passed_over_with_a_warning(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = run / "checkpoints/step50"
    metadata = CheckpointMetadata(step=50, finite=False)
    make_sync_checkpointer().save({"model": {"weight": torch.ones(3)}}, path, metadata=metadata)
    caplog.clear()
    assert select_one(f"{run}@latest").name == "step30"
    assert caplog.messages == ["step50 is passed over, and step30 is used: its weights are not finite"]


def test_a_glob_passes_over_a_copy_whose_original_is_there_and_takes_any_other(run: Path) -> None:
    for name in ("step30_backup", "best"):
        shutil.copytree(run / "checkpoints/step30", run / f"checkpoints/{name}")
    selection = select([f"{run}/checkpoints/*"])
    assert [path.name for path in selection.paths] == ["step10", "step20", "step30"]
    copies = {path.name: problem for path, problem in selection.skipped.items() if path.name != "step40"}
    assert copies == dict.fromkeys(["best", "step30_backup"], "it is a copy of step30")
    assert select_one(f"{run}/checkpoints/best").name == "best"
    (run / "checkpoints/best").rename(run.parent / "paper")
    assert [path.name for path in select([f"{run.parent}/pap*"]).paths] == ["paper"]


ODD_NAMES = ("a[1]", "[b]", "a,b", "a{1,2}", "a b", "it's", 'say "x"', "$HOME", "a=b", "größe", "a;b", "#a", "!a", "a*")


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("rest", ["/checkpoints/step*", "/checkpoints/step{10,20,30}", "@latest", ""])
def test_a_folder_that_exists_is_taken_as_written(name: str, rest: str, run: Path) -> None:
    folder = run.rename(run.parent / name)
    shutil.copytree(folder, run.parent / "a1")
    pattern = f"{folder}{rest}"
    paths = [folder / f"checkpoints/step{step}" for step in (10, 20, 30)][0 if "step" in rest else 2 :]
    assert select([pattern]).paths == paths
    assert [path for path in select_all([pattern]) if path.name != "step40"][-1] == paths[-1]
    if "step" in rest:
        assert expanded(pattern) == paths


@pytest.mark.parametrize("name", [*ODD_NAMES, " a", "null"])
def test_an_argument_that_is_printed_works_as_typed_in_a_shell(name: str) -> None:
    for pattern in (name, f"{name}/checkpoints/step*", f"{name}@latest"):
        [typed] = shlex.split(ckpt_argument(pattern))
        assert Path(str(read_overrides([typed]).ckpt)) == Path(pattern)
