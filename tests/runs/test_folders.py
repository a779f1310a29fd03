"""Names and folders of runs: one rule for names, no run in another, and checkpoints in a folder of the run's own, whose
name is not a literal `{run_name}`, `~` or `s3:`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import loader, trainer

from trainer_cli.addons.jobs.sweep import plan_jobs
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.catalog.catalog import Catalog
from trainer_cli.catalog.find import latest_checkpoint
from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, make_sync_checkpointer
from trainer_cli.checkpoint.without_trainer import load_checkpoint, save_checkpoint
from trainer_cli.commands.command_line import main
from trainer_cli.config.composing import compose
from trainer_cli.errors import ConfigError, RunDirectoryError, UserError
from trainer_cli.files.url_path import as_path
from trainer_cli.loggers.tensorboard import TensorBoardLogger
from trainer_cli.loggers.text_files import CsvLogger, JsonlLogger
from trainer_cli.running.start import refuse_other_runs, start_new
from trainer_cli.runs.find_runs import RunFinder
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.schema.checkpoint_config import CheckpointConfig
from trainer_cli.selection.patterns import select_all, select_one
from trainer_cli.storage.local import LocalStorage
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.trainer import Trainer

DIGITS = "+experiment=digits_mlp"
REFUSED = ("", " ", ".", "..", ".hidden", "a/.b", "a/..", "/a", "a/", "a//b", "-a", " a", "a /b", "a\n", "a\x1b[1m")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder; the home folder beside it."""
    (tmp_path / "here").mkdir()
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "here"


def save(path: Path | str, run_id: str = "other") -> None:
    metadata = CheckpointMetadata(run_id=run_id, step=4)
    make_sync_checkpointer().save({"w": torch.zeros(2)}, path, metadata=metadata)


def start(name: str) -> None:
    """Begin a run of this name."""
    composed = compose([DIGITS, f'name="{name}"'])
    run = RunDir(composed.config.run_dir)
    start_new(run, composed)
    run.create("{}", [], {}).release()


def swept(name: str) -> None:
    plan_jobs([DIGITS, f'name="{name}"', "seed=1,2"], config_dir=None, config_name="config")


def in_python(name: str) -> None:
    Trainer(model=torch.nn.Linear(1, 1), optimizer=None, name=name)


@pytest.mark.parametrize(
    ("begin", "name"), [*((in_python, name) for name in REFUSED), (start, "a/.b"), (start, ""), (swept, "-a")]
)
def test_a_name_that_is_no_folder_of_its_own_is_refused(begin: Callable[[str], None], name: str, here: Path) -> None:
    with pytest.raises((ConfigError, UserError), match="name is") as refused:
        begin(name)
    assert refused.value.cure
    assert not list(here.iterdir())


@pytest.mark.parametrize("name", ["a", "group/sub/a", "a b", "größe", "a.b", "a[1]", "lr=0.1,wd=0"])
def test_any_other_name_is_a_run_that_is_found(name: str, here: Path) -> None:
    start(name)
    assert [run.path for run in RunFinder(Path("runs")).find()] == [Path("runs", name)]


INSIDE = "is inside the run runs/mine,"


@pytest.mark.parametrize(
    ("begin", "first", "second", "message"),
    [
        (start, "mine", "mine/child", INSIDE),
        (start, "mine", "mine/checkpoints/child", INSIDE),
        (start, "group/a", "group", "runs/group holds other runs, such as runs/group/a"),
        (swept, "mine", "mine/child", INSIDE),
    ],
)
def test_a_run_inside_another_or_around_one_is_refused(
    begin: Callable[[str], None], first: str, second: str, message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(first)
    with pytest.raises(UserError, match=message) as refused:
        begin(second)
    assert "Choose " in str(refused.value)
    assert main(["plan", DIGITS, f"name={second}"]) == 2
    assert message in capsys.readouterr().err


def test_a_run_and_the_jobs_of_a_sweep_of_its_name_stand_beside_each_other(here: Path) -> None:
    start("mine")
    swept("mine")
    composed = compose([DIGITS, "name=mine", "run_dir='runs/mine/sweep/seed=1'"])
    start_new(RunDir(composed.config.run_dir), composed)
    start("group/a")
    swept("group")


@pytest.mark.parametrize(
    ("run_ids", "own", "settings", "refused"),
    [
        ([], None, {}, False),
        (["other"], None, {}, True),
        (["other"], "own", {}, True),
        (["own"], "own", {}, False),
        (["own", "other"], "own", {}, False),
        (["other"], None, {"enabled": False}, False),
        (["other"], None, {"folder": None}, False),
    ],
)
def test_a_folder_of_another_run_is_refused(
    here: Path, run_ids: list[str], own: str | None, settings: dict[str, Any], refused: bool
) -> None:
    for number, run_id in enumerate(run_ids):
        save(here / f"shared/at-{number}", run_id)
    config = CheckpointConfig(**{"folder": "shared", **settings})
    places = [Catalog.of(here / "shared")]
    if not refused:
        refuse_other_runs(places, own, config)
        return
    with pytest.raises(RunDirectoryError, match=r"holds checkpoints of another run, such as at-0.*\{run_name\}"):
        refuse_other_runs(places, own, config)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_new_run_is_refused_before_anything_is_made(here: Path, resume: str) -> None:
    save("shared/step4")
    composed = compose([DIGITS, "name=two", "checkpoint.folder=shared", f"resume={resume}"])
    with pytest.raises(RunDirectoryError, match="holds checkpoints of another run"):
        start_new(RunDir("runs/two"), composed)
    assert os.listdir(here) == ["shared"]


def test_jobs_of_a_sweep_with_one_folder_are_refused(here: Path) -> None:
    arguments = [DIGITS, "seed=1,2"]
    with pytest.raises(ConfigError, match=r"seed=1 and seed=2 both save in one"):
        plan_jobs([*arguments, "checkpoint.folder=one"])
    assert len(plan_jobs([*arguments, "checkpoint.folder=of-${seed}"])) == 2
    assert len(plan_jobs([*arguments, "checkpoint.folder=one", "checkpoint.enabled=false"])) == 2


def test_the_name_of_the_run_is_filled_in(here: Path) -> None:
    config = compose([DIGITS, "name=mine", "checkpoint.folder='all/{run_name}/x'"]).config
    assert config.checkpoint.folder == "all/mine/x"
    with pytest.raises(ConfigError, match=r"may have \{run_name\} alone.*\{step\} into checkpoint\.name"):
        compose([DIGITS, "checkpoint.folder='all/{step}'"])
    (here / "runs/mine").mkdir(parents=True)
    (here / "runs/mine/config.yaml").write_text("name: mine\ncheckpoint: {folder: 'all/{run_name}'}\n")
    assert RunDir(Path("runs/mine")).stored_checkpoints() == Path("all/mine")
    with pytest.raises(UserError, match="write the run's name"):
        CheckpointerCallback("{run_name}/checkpoints")


def _saves(path: str) -> None:
    model = torch.nn.Linear(1, 1)
    save_checkpoint(path, 1, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert load_checkpoint(path, model, finetune=True)[0] == 0
    assert latest_checkpoint(os.path.dirname(path)).name == "step1"
    assert select_one(path).name == "step1"
    assert [found.name for found in select_all([path])] == ["step1"]


@pytest.mark.parametrize("use", [save, _saves, lambda path: JsonlLogger(path), lambda path: CheckpointerCallback(path)])
def test_the_home_folder_is_meant_by_its_sign(here: Path, use: Callable[[str], object]) -> None:
    use("~/x/step1")
    assert os.listdir(here) == []
    assert as_path("~/x") == Path(os.environ["HOME"]) / "x"


@pytest.mark.parametrize("url", ["s3://bucket/m", "memory://x/m", "https://x/m"])
@pytest.mark.parametrize("make", [JsonlLogger, CsvLogger, TensorBoardLogger, partial(as_path, local=True)])
def test_a_url_is_no_local_file(here: Path, make: Callable[[str], object], url: str) -> None:
    with pytest.raises(UserError, match=f"{url}', but it must be a local path"):
        make(url)
    assert os.listdir(here) == []


def test_an_output_may_begin_with_the_home_folder_and_is_local(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("runs/step4")
    assert main(["ckpt", "export", "runs/step4", "--format", "archive", "--output=~/a.tar"]) == 0
    assert (Path(os.environ["HOME"]) / "a.tar").is_file()
    assert main(["ckpt", "export", "runs/step4", "--format", "archive", "--output=s3://b/a.tar"]) == 2
    assert "--output is 's3://b/a.tar', but it must be a local path" in capsys.readouterr().err
    assert os.listdir(here) == ["runs"]


@pytest.mark.parametrize("save_async", [True, False])
def test_the_link_points_to_the_newest_checkpoint_and_is_none(tmp_path: Path, save_async: bool) -> None:
    seen: list[bool] = []

    class Look(Callback):
        def on_train_step_end(self, trainer: Trainer, *results: object) -> None:
            link = tmp_path / "latest"
            if link.is_symlink():  # In the background the first save may not be committed yet.
                seen.append((link / "manifest.json").is_file())

    rules: dict[str, Any] = {
        "save_interval": 2,
        "save_async": save_async,
        "max_checkpoints": 1,
        "pre_train_checkpoint": True,
    }
    for end in (6, 9):  # A resume goes on with the link.
        made = trainer(
            settings={"max_duration": end}, callbacks=[Look()],
            checkpoint=CheckpointerCallback(tmp_path, latest_link=True, **rules),
        )  # fmt: skip
        made.fit(loader(20))
        assert os.readlink(tmp_path / "latest") == f"step{end}"
    assert all(seen)
    assert LocalStorage(tmp_path).names() == [f"step{end}"]
    assert [entry.name for entry in Catalog.of(tmp_path).entries()] == [f"step{end}"]


def test_a_link_that_is_in_the_way_is_replaced_and_a_folder_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".latest.new").symlink_to("half")
    (tmp_path / "latest").symlink_to("gone")
    checkpoint = CheckpointerCallback(tmp_path, latest_link=True)
    trainer(settings={"max_duration": 1}, checkpoint=checkpoint).fit(loader(20))
    assert os.readlink(tmp_path / "latest") == "step1"
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    trainer(settings={"max_duration": 2}, checkpoint=CheckpointerCallback(tmp_path, latest_link=True)).fit(loader(20))
    assert (tmp_path / "latest").is_dir()
    assert "latest could not be replaced" in caplog.text


def test_a_link_in_an_object_store_is_refused() -> None:
    with pytest.raises(ConfigError, match="can hold no link"):
        compose([DIGITS, "checkpoint.latest_link=true", "checkpoint.folder=s3://bucket/run"])
