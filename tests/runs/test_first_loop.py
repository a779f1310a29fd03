"""The first loop of a newcomer: write, fail, correct, run again. A run without a step has nothing to keep."""

from __future__ import annotations

import errno
import importlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from command import fork_jobs, records, train, weights

from trainer_cli import CheckpointerCallback, Precision, Trainer, TrainingLoop
from trainer_cli.commands.command_line import main
from trainer_cli.config.composing import compose
from trainer_cli.errors import UserError
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.schema.sections import LoopConfig

CODE = """
import os
import signal
import torch
from torch import nn

def fail_at(place):
    what = os.environ.get("FAILS", "")
    if what.partition(" ")[0] != place:
        return
    if what.endswith("memory"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    if what.endswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if what.endswith("interrupted"):
        raise KeyboardInterrupt
    if what.endswith("interrupt"):
        os.kill(os.getpid(), signal.SIGINT)
    elif what.endswith("nan"):
        return float("nan")
    else:
        raise ValueError("a mistake of the user")

class Points(torch.utils.data.Dataset):
    def __init__(self, size=8, scale=1.0):
        self.x = torch.arange(size * 2.0).reshape(size, 2) / size * scale
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is None:
            fail_at("data")
        return {"x": self.x[index]}

class Net(nn.Module):
    def __init__(self, width=2):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))
    def forward(self, batch):
        factor = fail_at("train" if self.training else "evaluation") or 1.0
        return (self.layers(batch["x"]) * factor).square().mean()
"""
EXPERIMENT = """# @package _global_
defaults:
  - override /optimizer: sgd
model: {_target_: ours.Net}
data:
  _target_: trainer_cli.Datasets
  batch_size: 4
  train: {_target_: ours.Points}
  val: {_target_: ours.Points}
optimizer: {lr: 0.1}
loop: {max_duration: 4, eval_interval: 2, eval_at_start: true, log_interval: 1}
checkpoint: {save_interval: 2}
logging: {console: "off"}
"""


def make_project(folder: Path) -> Path:
    """The newcomer's project in a folder, which is returned."""
    (folder / "configs/experiment").mkdir(parents=True)
    (folder / "configs/experiment/mine.yaml").write_text(EXPERIMENT)
    (folder / "ours.py").write_text(CODE)
    return folder


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(make_project(tmp_path))
    sys.modules.pop("ours", None)
    yield tmp_path
    sys.modules.pop("ours", None)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory `runs` of a project in which `train fit mine` was run to its end."""
    folder = make_project(tmp_path_factory.mktemp("trained"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delitem(sys.modules, "ours", raising=False)
        assert main(["fit", "mine"]) == 0
        sys.modules.pop("ours", None)
    return folder / "runs"


@pytest.fixture
def finished(project: Path, trained: Path) -> Path:
    """A project whose run `mine` is finished."""
    shutil.copytree(trained, project / "runs")
    return project


def rewrite(project: Path, old: str, new: str) -> None:
    """Correct the code: its length differs, so that Python compiles it again."""
    code = (project / "ours.py").read_text()
    (project / "ours.py").write_text(code.replace(old, new))
    sys.modules.pop("ours", None)


FAILURES = ["train", "train memory", "train kill", "data", "evaluation", "evaluation interrupt", "train nan"]
CORRECTIONS: dict[str, list[str]] = {
    "code": [],
    "model": ["+model.width=3"],
    "model of the same shapes": ["seed=1", "+model.width=2"],
    "data": ["+data.train.scale=2.0"],
    "rate": ["optimizer.lr=0.2"],
    "seed": ["seed=5"],
    "another optimizer": ["optimizer=adamw"],
    "nothing": [],
}


def fail(how: str, command: list[str]) -> int:
    """Run the command once, so that it fails before step 1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAILS", how)
        if how.endswith("kill"):
            return train(*command, cwd=Path.cwd()).code
        return main(command)


@pytest.mark.parametrize(
    ("how", "correction"),
    [*((how, "model") for how in FAILURES), *(("train", key) for key in CORRECTIONS if key != "model")],
)
def test_a_run_without_a_step_begins_anew_as_a_run_that_never_failed(
    project: Path, how: str, correction: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["fit", "mine", "callbacks=check_finite"]
    assert fail(how, command) != 0
    run = RunDir("runs/mine")
    assert run.log_file.is_file(), "it began, and failed later"
    assert {path.name for path in run.checkpoints_folder.glob("step*")} <= {"step0"}
    if correction == "code":
        rewrite(project, "* factor)", "* factor + 1.0)")
    corrected = [*command, *CORRECTIONS[correction]]
    capsys.readouterr()
    assert main(corrected) == 0
    (begun,) = (line for line in run.log_file.read_text().splitlines() if "starting runs/mine" in line)
    assert re.search(r"at step 0 \((anew: it has no checkpoint after step 0|\S+ holds no checkpoint yet)\)", begun)
    assert [attempt["status"] for attempt in run.attempts][1:] == ["finished"]

    assert main([*corrected, "name=fresh"]) == 0
    fresh = RunDir("runs/fresh")
    assert records(run.metrics_file) == records(fresh.metrics_file)
    for step in ("step0", "step4"):
        assert weights(run.checkpoints_folder / step) == weights(fresh.checkpoints_folder / step)
    names = [sorted(path.name for path in each.checkpoints_folder.glob("step*")) for each in (run, fresh)]
    assert names[0] == names[1]
    assert main(["ckpt", "verify", "runs/mine"]) == 0


KEPT: dict[str, list[str]] = {
    "it has made steps": ["loop.hard_stop=2"],
    "ckpt= was loaded, and saved": [
        "ckpt=runs/source@latest",
        "checkpoint.pre_train_checkpoint=true",
    ],
    "it is pinned": [],
}


@pytest.mark.parametrize("why", KEPT)
def test_a_run_that_has_something_to_continue_is_kept(
    project: Path, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = KEPT[why]
    assert main(["fit", "mine", "name=source"]) == 0
    if why == "it has made steps":
        assert main(["fit", "mine", *first]) == 0
    else:
        assert fail("train", ["fit", "mine", *first]) == 1
    if why == "it is pinned":
        assert main(["ckpt", "pin", "runs/mine/checkpoints/step0"]) == 0
    capsys.readouterr()
    before = weights(Path("runs/mine/checkpoints/step0"))
    assert main(["fit", "mine", *first, "optimizer.lr=0.2"]) == 2
    assert "the config differs" in capsys.readouterr().err
    assert weights(Path("runs/mine/checkpoints/step0")) == before


@pytest.mark.parametrize("loaded", ["model", "all"])
def test_a_fork_over_a_run_without_a_step_is_a_fork(project: Path, loaded: str) -> None:
    assert main(["fit", "mine", "name=source"]) == 0
    assert fail("train", ["fit", "mine"]) == 1
    fork = ["fit", "mine", "ckpt=runs/source@step2", f"load.states=[{loaded}]"]
    assert main(fork) == 0
    assert main([*fork, "name=fresh"]) == 0
    assert weights(Path("runs/mine/checkpoints/step4")) == weights(Path("runs/fresh/checkpoints/step4"))
    assert {*os.listdir("runs/mine/checkpoints")} == {*os.listdir("runs/fresh/checkpoints")}


def test_a_fork_without_a_step_loads_its_checkpoint_again(project: Path) -> None:
    assert main(["fit", "mine", "name=source"]) == 0
    fork = ["fit", "mine", "ckpt=runs/source@latest"]
    assert fail("train", fork) == 1
    assert main([*fork, "optimizer.lr=0.2"]) == 0
    assert main([*fork, "optimizer.lr=0.2", "name=fresh"]) == 0
    assert weights(Path("runs/mine/checkpoints/step4")) == weights(Path("runs/fresh/checkpoints/step4"))


@pytest.mark.parametrize("resume", ["must", "runs/mine@step0"])
def test_resume_must_begins_anew_and_a_named_checkpoint_of_step_0_is_loaded(project: Path, resume: str) -> None:
    assert fail("train", ["fit", "mine"]) == 1
    first = weights(Path("runs/mine/checkpoints/step0"))
    rewrite(project, "nn.Linear(width, 1))", "nn.Linear(width, 1)); nn.init.zeros_(self.layers[0].bias)")
    words = ["mine"] if resume == "must" else []
    assert main(["fit", *words, f"resume={resume}"]) == 0
    assert (weights(Path("runs/mine/checkpoints/step0")) == first) is (resume != "must")


@pytest.mark.parametrize("lost", [None, "runs/mine", "disk"])
def test_a_run_that_saves_elsewhere_begins_anew_too(project: Path, lost: str | None) -> None:
    command = ["fit", "mine", "checkpoint.folder='disk/{run_name}'", "checkpoint.copy_to.folder='copies/{run_name}'"]
    assert fail("train", command) == 1
    assert Path("disk/mine/step0").is_dir()
    if lost is not None:
        shutil.rmtree(lost)
    if lost == "runs/mine":
        # Whether it is intact does not matter: it is not loaded.
        file = Path("disk/mine/step0/rank0.safetensors")
        file.write_bytes(bytes(file.stat().st_size))
    assert main([*command, "+model.width=3"]) == 0
    assert ("(anew: it has" in Path("runs/mine/train.log").read_text()) is (lost != "disk")
    assert main([*command, "+model.width=3", "name=fresh"]) == 0
    assert weights(Path("disk/mine/step0")) == weights(Path("disk/fresh/step0"))
    assert weights(Path("copies/mine/step4")) == weights(Path("disk/fresh/step4"))


def test_a_trial_of_a_sweep_that_made_no_step_begins_anew(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fork_jobs(monkeypatch)
    sweep = ["fit", "-m", "mine", "seed=1,2"]
    monkeypatch.setenv("FAILS", "train")
    assert main(sweep) != 0
    assert "is a run, too" not in capsys.readouterr().err
    monkeypatch.delenv("FAILS")
    assert main([*sweep, "+model.width=3"]) == 0
    for seed in (1, 2):
        assert main(["fit", "mine", f"seed={seed}", "+model.width=3", f"name=fresh{seed}"]) == 0
        same = [Path(run, "checkpoints/step4") for run in (f"runs/mine/sweep/seed={seed}", f"runs/fresh{seed}")]
        assert weights(same[0]) == weights(same[1])


def test_a_plan_shows_that_a_run_begins_anew_and_changes_nothing(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fail("train", ["fit", "mine"]) == 1
    before = {file: file.read_bytes() for file in Path("runs").rglob("*") if file.is_file()}
    capsys.readouterr()
    assert main(["plan", "mine", "+model.width=3"]) == 0
    planned = capsys.readouterr().out
    assert "it has no checkpoint after step 0" in planned
    assert re.search(r"^ *checkpoints +3: 0, 2, 4$", planned, re.MULTILINE), "step 0 is saved again"
    assert {file: file.read_bytes() for file in Path("runs").rglob("*") if file.is_file()} == before


def make_trainer(width: int = 2, seed: int = 0, folder: str = "saved", **more: Any) -> Trainer:
    ours = importlib.import_module("ours")

    settings = {"lr": 0.1, "weight_decay": 0.0} | {key: more.pop(key) for key in ("lr", "weight_decay") if key in more}
    loop = {"max_duration": 4} | {key: more.pop(key) for key in list(more) if hasattr(LoopConfig(), key)}
    return Trainer(
        model=lambda: ours.Net(width),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), **settings),
        loop=TrainingLoop(log_interval=1, **loop),
        checkpoint=CheckpointerCallback(folder, save_interval=2),
        seed=seed,
        **more,
    )


@pytest.mark.parametrize("corrected", [{"width": 3}, {"seed": 1}, {}], ids=str)
@pytest.mark.parametrize("how", ["train", "train memory", "data"])
def test_in_python_a_fit_whose_folder_has_no_step_begins_anew(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    corrected: dict[str, int],
    how: str,
) -> None:
    monkeypatch.syspath_prepend(project)
    ours = importlib.import_module("ours")

    monkeypatch.setenv("FAILS", how)
    with pytest.raises((ValueError, RuntimeError)):
        make_trainer().fit(torch.utils.data.DataLoader(ours.Points(), 4))
    assert os.listdir("saved") == ["step0"]
    monkeypatch.delenv("FAILS")
    made = []
    for folder in ("saved", "fresh"):
        trainer = make_trainer(**corrected, folder=folder)
        assert trainer.fit(torch.utils.data.DataLoader(ours.Points(), 4)).step == 4
        made.append(trainer.model.state_dict())
    assert all(torch.equal(made[0][key], made[1][key]) for key in made[0])
    assert weights(Path("saved/step0")) == weights(Path("fresh/step0"))
    anew = "the training begins anew: saved holds no checkpoint after step 0"
    assert [record.getMessage() for record in caplog.records if "anew" in record.getMessage()] == [anew]


def test_in_python_the_same_trainer_continues_from_its_own_step_0(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(project)
    ours = importlib.import_module("ours")

    trainer, loader = make_trainer(), torch.utils.data.DataLoader(ours.Points(), 4)
    monkeypatch.setenv("FAILS", "train")
    with pytest.raises(ValueError, match="mistake"):
        trainer.fit(loader)
    monkeypatch.delenv("FAILS")
    first = weights(Path("saved/step0"))
    assert trainer.fit(loader).step == 4
    assert weights(Path("saved/step0")) == first


def half(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3)


CHANGED: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "nothing": ({}, {}, None),
    "length": ({}, {"min_duration": 2}, None),
    "rate": ({}, {"lr": 0.2}, "optimizer: lr is 0.1, as in the checkpoint; 0.2 is configured"),
    "rate of a schedule": (
        {"schedulers": half},
        {"schedulers": half, "lr": 0.2},
        "optimizer.lr was 0.1 in the steps before, and is 0.2 from here on",
    ),
    "weight decay": ({}, {"weight_decay": 0.1}, "optimizer: weight_decay is 0.0, as in the checkpoint; 0.1 is"),
    "accumulation": ({}, {"grad_accum_steps": 2}, "loop.grad_accum_steps was 1 in the steps before, and is 2 from"),
    "clipping": ({}, {"precision": Precision(clip_norm=1.0)}, "precision.clip_norm was None in the steps before, and"),
    "precision": (
        {},
        {"precision": Precision(dtype="bf16")},
        "precision.dtype was fp32 in the steps before, and is bf",
    ),
    "batch size": ({}, {"batch_size": 8}, "data.batch_size was 4 in the steps before, and is 8 from here on"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_in_python_a_resume_with_a_changed_setting_warns_of_it(
    project: Path, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(project)
    ours = importlib.import_module("ours")

    before, after, warning = CHANGED[what]
    batch_size, after = after.get("batch_size", 4), {key: after[key] for key in after if key != "batch_size"}
    assert make_trainer(**before).fit(torch.utils.data.DataLoader(ours.Points(), 4)).step == 4
    caplog.clear()
    trainer = make_trainer(max_duration=6, **after)
    assert trainer.fit(torch.utils.data.DataLoader(ours.Points(), batch_size)).step == 6
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (warning is not None)
    assert all(line.startswith(str(warning)) for line in warnings)


def test_in_python_a_checkpoint_that_is_loaded_before_the_data_is_known_warns_of_no_batch_size(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(project)
    ours = importlib.import_module("ours")

    make_trainer().fit(torch.utils.data.DataLoader(ours.Points(), 4))
    caplog.clear()
    make_trainer().load_checkpoint("saved/step4")
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


@pytest.mark.parametrize("same", [True, False], ids=["the same trainer", "a new trainer"])
def test_in_python_a_fit_of_a_finished_run_says_that_nothing_was_trained(
    project: Path, same: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(project)
    ours = importlib.import_module("ours")

    trainer, loader = make_trainer(), torch.utils.data.DataLoader(ours.Points(), 4)
    trainer.fit(loader)
    assert "nothing was trained" not in caplog.text
    assert (trainer if same else make_trainer()).fit(loader).step == 4
    (line,) = (record for record in caplog.records if "nothing was trained" in record.getMessage())
    assert line.levelname == "WARNING"
    assert line.getMessage() == (
        "nothing was trained: the run was finished at step 4 before (max_duration of 4 steps reached); a larger "
        "max_duration continues it"
    )


def files(folder: Path) -> dict[str, bytes]:
    """Every file of a run but its lock, which names the last process that held it."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


SETS = [
    "data.val=null",
    "data.val={clean: {_target_: ours.Points}, noisy: {_target_: ours.Points}, test: {_target_: ours.Points}}",
]
BEST: dict[str, tuple[list[str], str | None]] = {
    "one set": ([], None),
    "several sets": (SETS, "clean/loss"),
    "several sets and an average": ([*SETS, "callbacks=ema"], "clean/loss"),
    "several sets of which one is watched": (
        [*SETS, "callbacks=early_stopping", "callbacks.early_stopping.metric=noisy/loss"],
        "noisy/loss",
    ),
    "several sets of which a metric is watched": (
        [*SETS, "callbacks=early_stopping", "callbacks.early_stopping.metric=noisy/accuracy"],
        "noisy/accuracy",
    ),
    "a rule": ([*SETS, "checkpoint.keep_best.metric=noisy/loss"], "noisy/loss"),
    "a folder of its own": ([*SETS, "checkpoint.folder=disk"], "clean/loss, in disk"),
}


@pytest.mark.parametrize("case", BEST)
def test_the_start_is_eight_lines_of_a_terminal_and_names_what_is_best_of_several_sets(
    project: Path, case: str
) -> None:
    words, best = BEST[case]
    mean = '(self.layers(batch["x"]) * factor).square().mean()'
    rewrite(project, mean, f'{{"loss": {mean}, "accuracy": torch.tensor(0.5)}}')
    assert main(["fit", "mine", *words]) == 0
    rows = re.findall(r"INFO +(\w+ {2,}.*)", Path("runs/mine/train.log").read_text())
    assert 7 <= len(rows) <= 8
    assert max(map(len, rows)) < 80, rows
    said = re.search(r"best by (.*)", rows[-1])
    assert (said[1] if said else None) == best


def test_a_refused_change_names_the_three_ways(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["fit", "mine", "optimizer.lr=0.2"]) == 2
    refused = " ".join(capsys.readouterr().err.split())
    assert main(["fit", "optimizer.lr=0.2", "resume=runs/mine@step2"]) == 2
    assert "add name=OTHER, and ckpt=runs/mine@step2" in capsys.readouterr().err, "the checkpoint that was asked for"
    for way in (
        "add 'resume_allow=[optimizer.lr]'",
        "add name=OTHER, and ckpt=runs/mine@latest",
        "add resume=anew: it is moved to runs/.trash, and nothing is deleted",
    ):
        assert way in refused


def test_a_fork_whose_weights_do_not_fit_names_all_that_it_needs(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(finished, "nn.Linear(width, 1))", "nn.Linear(width, 1), nn.Linear(1, 1))")
    fork = ["fit", "mine", "name=fork", "+model.width=3", "ckpt=runs/mine@latest"]
    capsys.readouterr()
    assert main(fork) == 2
    cure = re.search(r"add '(load\.ignore_keys=\S+)' (load\.strict=false)\.", " ".join(capsys.readouterr().err.split()))
    assert cure is not None
    assert main([*fork, *cure.groups()]) == 0


@pytest.mark.parametrize("verb", ["fit", "plan"])
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["mine", "name=forked", "resume=runs/mine@best", "optimizer.lr=0.2"],
            "resume=runs/mine@best continues the run runs/mine, and name=forked names another --> resume help: To "
            "begin that one with these weights: `train fit experiment=mine name=forked optimizer.lr=0.2 "
            "ckpt=runs/mine@best`",
        ),
        (
            ["mine", "run_dir=runs/two", "resume=runs/mine"],
            "experiment=mine run_dir=runs/two ckpt=runs/mine`",
        ),
        (["name=two", "resume=runs/mine", "ckpt=runs/mine@best"], "`train fit name=two ckpt=runs/mine@best`"),
        (["name=mine", "run_dir=./runs/mine", "resume=runs/mine"], ""),
    ],
)
def test_another_run_beside_the_one_that_resume_names_is_a_fork(
    finished: Path, capsys: pytest.CaptureFixture[str], verb: str, words: list[str], says: str
) -> None:
    before = files(Path("runs/mine"))
    capsys.readouterr()
    assert main([verb, *words]) == (2 if says else 0)
    assert says in " ".join(capsys.readouterr().err.split())
    assert files(Path("runs/mine")) == before


def test_resume_anew_moves_the_run_and_begins_it_as_a_new_one(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):
        before, id = files(Path("runs/mine")), RunDir("runs/mine").run_id
        assert main(["plan", "mine", "+model.width=3", "resume=anew"]) == 0
        assert "anew: the run is moved to runs/.trash" in capsys.readouterr().out
        assert files(Path("runs/mine")) == before, "a plan moves nothing"
        assert main(["fit", "mine", "+model.width=3", "resume=anew"]) == 0
        assert "from now on, give the same command without resume=anew: with anew" in capsys.readouterr().out
        assert files(Path(f"runs/.trash/mine-{number}")) == before
        moved = Path(f"runs/.trash/mine-{number}")
        assert f"with resume={moved} alone" in RunDir.describe_moved(moved)
        assert """with 'resume="x/seed=1-1"' alone""" in RunDir.describe_moved(Path("x/seed=1-1"))
        assert f"moved the earlier run to {RunDir.describe_moved(moved)}" in Path("runs/mine/train.log").read_text()
        assert RunDir("runs/mine").run_id != id
        assert len(RunDir("runs/mine").attempts) == 1
    assert main(["fit", "mine", "+model.width=3", "name=fresh"]) == 0
    assert records(Path("runs/mine/metrics.jsonl")) == records(Path("runs/fresh/metrics.jsonl"))
    for step in ("step0", "step4"):
        assert weights(Path("runs/mine/checkpoints", step)) == weights(Path("runs/fresh/checkpoints", step))
    assert main(["fit", "mine", "+model.width=3", "loop.max_duration=6"]) == 0, "it is an ordinary run"
    capsys.readouterr()
    for command in (["ckpt", "ls"], ["top", "--once"], ["report", "runs", "--output", "report.html"]):
        assert main(command) == 0
    printed = capsys.readouterr().out + Path("report.html").read_text()
    assert "mine" in printed
    assert ".trash" not in printed
    assert main(["fit", "resume=runs/.trash/mine-1"]) == 0, "a moved run is a run"


def _a_sweep(project: Path) -> list[str]:
    Path("runs/mine/sweep/seed=1").mkdir(parents=True)
    return []


def _checkpoints_elsewhere(project: Path) -> list[str]:
    shutil.copytree("runs/mine/checkpoints", "disk/mine")
    return ["checkpoint.folder=disk/mine"]


def _copies_elsewhere(project: Path) -> list[str]:
    shutil.copytree("runs/mine/checkpoints", "copies/mine")
    return ["checkpoint.copy_to.folder=copies/mine"]


def _a_link(project: Path) -> list[str]:
    os.rename("runs/mine", "big")
    os.symlink("../big", "runs/mine")
    return []


NOT_MOVED: dict[str, tuple[Callable[[Path], list[str]], int, str]] = {
    "it holds a sweep": (_a_sweep, 2, "holds the runs of a sweep"),
    "it is a link": (_a_link, 2, "it is a link"),
    "its path ends elsewhere": (
        lambda project: ["run_dir=runs/mine/../../runs/mine"],
        2,
        "its path leads through ..",
    ),
    "its checkpoints are elsewhere": (
        _checkpoints_elsewhere,
        4,
        "disk/mine holds checkpoints of the run that",
    ),
    "its copies are elsewhere": (_copies_elsewhere, 4, "copies/mine holds checkpoints of the run that"),
    "ckpt= names it": (lambda project: ["ckpt=runs/mine@latest"], 2, "is a checkpoint of the run that resume=anew"),
    "the model cannot be made": (lambda project: ["+model.width=-1"], 1, "negative dimension"),
    "the config is wrong": (lambda project: ["optimizer.lrr=1"], 2, "lrr"),
    "another process trains": (lambda project: [], 4, "is in use by"),
}


@pytest.mark.parametrize("why", NOT_MOVED)
def test_resume_anew_that_is_refused_moves_nothing(
    finished: Path, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make, code, text = NOT_MOVED[why]
    more, before = make(finished), files(Path("runs/mine"))
    capsys.readouterr()
    with RunDir("runs/mine").lock() if why == "another process trains" else nullcontext():
        assert main(["fit", "mine", "resume=anew", *more]) == code
    assert text in " ".join(capsys.readouterr().err.split())
    assert files(Path("runs/mine")) == before
    assert not Path("runs/.trash").exists()


def test_a_run_that_cannot_be_renamed_stays(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rename = files(Path("runs/mine")), os.rename

    def on_another_disk(source: Path, target: Path) -> None:
        if "mine-1" in str(target):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        rename(source, target)

    monkeypatch.setattr(os, "rename", on_another_disk)
    assert main(["fit", "mine", "resume=anew"]) == 2
    assert "cannot be moved to runs/.trash/mine-1: Invalid cross-device link" in capsys.readouterr().err
    assert files(Path("runs/mine")) == before


def test_a_plan_of_resume_anew_writes_nothing(finished: Path) -> None:
    Path("runs/mine/.lock").unlink()
    before = {*Path("runs").rglob("*")}
    assert main(["plan", "mine", "resume=anew"]) == 0
    assert {*Path("runs").rglob("*")} == before


def test_records_of_steps_without_a_checkpoint_are_kept_when_the_run_begins_anew(project: Path) -> None:
    command = ["fit", "mine", "checkpoint.save_interval=100"]
    assert fail("evaluation", [*command, "loop.eval_at_start=false"]) == 1, "after step 2"
    before = Path("runs/mine/metrics.jsonl").read_bytes()
    assert main([*command, "+model.width=3"]) == 0
    assert Path("runs/mine/metrics.before_attempt2.jsonl").read_bytes() == before
    assert [record["step"] for record in records(Path("runs/mine/metrics.jsonl"))] == [0, 1, 2, 3, 4]


def test_records_after_step_0_are_kept_when_its_checkpoint_is_resumed(project: Path) -> None:
    command = ["fit", "mine", "checkpoint.save_interval=100"]
    assert fail("evaluation", [*command, "loop.eval_at_start=false"]) == 1, "after step 2"
    before = Path("runs/mine/metrics.jsonl").read_bytes()
    assert main(["fit", "resume=runs/mine@step0"]) == 0
    assert Path("runs/mine/metrics.before_attempt2.jsonl").read_bytes() == before
    assert "are kept in runs/mine/metrics.before_attempt2.jsonl" in Path("runs/mine/train.log").read_text()


def test_a_crash_between_the_move_and_the_new_run_loses_nothing(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(Path("runs/mine"))
    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "create", lambda *args, **named: (_ for _ in ()).throw(SystemExit(9)))
        with pytest.raises(SystemExit):
            main(["fit", "mine", "resume=anew", "+model.width=3"])
    assert files(Path("runs/.trash/mine-1")) == before
    assert main(["fit", "mine", "+model.width=3"]) == 0
    assert files(Path("runs/.trash/mine-1")) == before


LATE = ["loop.eval_at_start=false", "checkpoint.save_interval=1"]
ENDS = {
    "evaluation interrupt": (LATE, 75, "next: run the same command {}to resume from here."),
    "evaluation": (LATE, 1, "lost: 1 step after step1; the same command {}continues from it"),
    "evaluation interrupted": (LATE, 130, "interrupted lost: 1 step after step1; the same command {}continues from it"),
    "train interrupted": ([], 130, "interrupted lost: nothing, as no step was made"),
}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("anew", [[], ["resume=anew"]])
def test_what_is_said_to_resume_never_moves_the_run_away(
    project: Path, how: str, anew: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    more, code, text = ENDS[how]
    assert fail(how, ["fit", "mine", *more, *anew]) == code
    printed = capsys.readouterr()
    again = "without resume=anew " if anew else "again " if code == 75 else ""
    assert text.format(again) in " ".join((printed.out + printed.err).split())


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("seed=1", None),
        ("resume=auto", None),
        ("resume=anew", "without resume=anew"),
        ("++resume=anew", "without resume=anew"),
        ("resume='anew'", "with resume=auto"),
        ("experiment=again", "with resume=auto"),
    ],
)
def test_the_same_command_is_named_without_what_would_move_the_run_away(
    project: Path, override: str, shown: str | None
) -> None:
    Path("configs/experiment/again.yaml").write_text("# @package _global_\ndefaults: [mine]\nresume: anew\n")
    composed = compose(["experiment=mine"] * ("experiment" not in override) + [override])
    for text in (
        "The same command resumes it.",
        "Run the same command again to send it.",
        "the same command: it continues",
    ):
        wanted = text if shown is None else re.sub("same command( again)?", f"same command {shown}", text)
        assert composed.naming_again(composed.naming_again(text)) == wanted
        with pytest.raises(UserError) as raised, composed.placing():
            raise UserError("x", cure=text)
        assert raised.value.cure == wanted


@pytest.mark.parametrize(
    ("job", "count"),
    [("SLURM_JOB_ID", "SLURM_RESTART_COUNT"), ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")],
)
def test_a_command_that_is_started_again_by_its_launcher_resumes(
    project: Path, job: str, count: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["fit", "mine", "resume=anew"]
    monkeypatch.setenv(job, "7")
    assert main([*command, "loop.hard_stop=2"]) == 0
    monkeypatch.setenv(count, "1")
    assert main(command) == 0
    assert [attempt["start_step"] for attempt in RunDir("runs/mine").attempts] == [0, 2]
    assert not Path("runs/.trash").exists()
    # The first start of another job has failed before its new run existed.
    monkeypatch.setenv(job, "8")
    assert main(command) == 0
    assert [attempt["start_step"] for attempt in RunDir("runs/mine").attempts] == [0]
    assert len(list(Path("runs/.trash").iterdir())) == 1


def test_a_sweep_moves_each_of_its_runs_alone(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fork_jobs(monkeypatch)
    sweep = ["fit", "-m", "mine", "seed=1,2"]
    assert main(["fit", "mine"]) == 0
    capsys.readouterr()
    assert main(sweep) == 0
    assert "runs/mine is a run, too: while it holds this sweep" in capsys.readouterr().err
    alone, before = files(Path("runs/mine/checkpoints")), files(Path("runs/mine/sweep/seed=1"))
    assert main([*sweep, "optimizer.lr=0.2"]) == 2
    assert "resume=anew" in capsys.readouterr().err
    assert fail("train", [*sweep, "optimizer.lr=0.2", "resume=anew"]) == 1
    printed = capsys.readouterr()
    assert "next: the same command without resume=anew resumes" in printed.out
    assert "is a run, too" not in printed.err, "it was said when the sweep began"
    assert main([*sweep, "optimizer.lr=0.2"]) == 0
    assert files(Path("runs/mine/sweep/.trash/seed=1-1")) == before
    assert files(Path("runs/mine/checkpoints")) == alone
    assert main([*sweep, "optimizer.lr=0.2"]) == 0, "they are finished"
    assert [len(RunDir(f"runs/mine/sweep/seed={seed}").attempts) for seed in (1, 2)] == [2, 2]
