"""The start of a run whose checkpoints are not where it saves: their disk may only be not mounted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer_cli.commands.command_line import main
from trainer_cli.config.composing import compose
from trainer_cli.errors import CheckpointError
from trainer_cli.running.fitting import fit
from trainer_cli.running.start import start_existing
from trainer_cli.runs.run_dir import RunDir

RUN = [
    "+experiment=digits_mlp", "name=mine", "loop.max_duration=4", "loop.eval_interval=null", "loop.log_interval=1",
    "checkpoint.save_interval=2", "logging.console=off",
]  # fmt: skip
OWN, ELSEWHERE = Path("runs/mine/checkpoints"), Path("disk/mine")


@pytest.fixture(scope="module", params=[OWN, ELSEWHERE], ids=["own folder", "folder elsewhere"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder in which a run was trained, and the folder of its checkpoints."""
    place = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert fit(compose([*RUN, *_folder(request.param)])) == 0
    return place, request.param


def _folder(checkpoints: Path) -> list[str]:
    return [] if checkpoints == OWN else [f"checkpoint.folder={checkpoints}"]


def _delete(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints)


def _empty(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints)
    checkpoints.mkdir()


def _link_to_nothing(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints)
    checkpoints.symlink_to("/not/mounted")


def _link_to_an_empty_folder(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints)
    Path("mount point").mkdir()
    checkpoints.symlink_to(Path("mount point").absolute())


def _lose_all_but_step_0(checkpoints: Path) -> None:
    # As of a run that was killed: one that has finished holds its config.
    Path("runs/mine/summary.json").unlink()
    for checkpoint in checkpoints.glob("step[1-9]"):
        shutil.rmtree(checkpoint)


def _remove_by_command(checkpoints: Path) -> None:
    assert main(["ckpt", "rm", f"{checkpoints}/step*", "--yes", "--force"]) == 0


@pytest.mark.parametrize(
    ("lose", "refused"),
    [
        (_delete, {ELSEWHERE}),
        (_empty, {ELSEWHERE}),
        (_lose_all_but_step_0, {ELSEWHERE}),
        (_link_to_nothing, {OWN, ELSEWHERE}),
        (_link_to_an_empty_folder, {OWN, ELSEWHERE}),
        (_remove_by_command, set()),
    ],
)
def test_a_run_begins_anew_only_if_its_user_has_removed_its_checkpoints(
    trained: tuple[Path, Path],
    lose: Callable[[Path], None],
    refused: set[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, checkpoints = trained
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    lose(checkpoints)
    run, longer = RunDir("runs/mine"), compose([*RUN, *_folder(checkpoints), "loop.max_duration=6"])
    records = run.metrics_file.read_bytes()
    if checkpoints in refused:
        with pytest.raises(CheckpointError, match=r"holds no checkpoint after step 0 now, but .* step4.*Mount"):
            fit(longer)
        assert run.metrics_file.read_bytes() == records
    else:
        start = start_existing(run, longer, read_only=True)
        assert getattr(start, "entry", ...) is None


def test_a_run_that_began_anew_elsewhere_is_not_refused_for_what_it_had_saved_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fit(compose(RUN)) == 0
    _empty(OWN)
    elsewhere = [*RUN, *_folder(ELSEWHERE)]
    none = ["checkpoint.pre_train_checkpoint=false", "checkpoint.save_final=false", "checkpoint.save_interval=9"]
    assert fit(compose([*elsewhere, *none, "loop.max_duration=1"])) == 0, "it ends before it has saved anything"
    start = start_existing(RunDir("runs/mine"), compose([*elsewhere, *none]), read_only=True)
    assert getattr(start, "entry", ...) is None
