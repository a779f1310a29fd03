"""Bad input: one message with what, where and cure, the right exit code, no traceback, nothing written."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command import (
    LIMIT_S,
    SMALL,
    Result,
    environment,
    flip_a_byte,
    hold,
    make_project,
    names,
    running,
    start_program,
    train,
    trained,
    weights,
)
from printed import message
from undecodable import make_undecodable

from trainer_cli import make_sync_checkpointer


def assert_reported(result: Result, code: int, *parts: str) -> None:
    """One message on stderr, with these parts, and the exit code."""
    assert result.code == code, result
    assert "Traceback" not in result.err
    said = message(result.err)
    for part in parts:
        assert part in said


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's project with models and data that break their contracts."""
    return make_project(
        tmp_path_factory.mktemp("project"),
        **{
            "mine/wrong.py": WRONG,
            "mine/broken.py": "import no_such_dependency\n",
            "configs/experiment/typo.yaml": "# @package _global_\nloop:\n  max_durations: 3\n",
            "configs/experiment/wide.yaml": "# @package _global_\nmodel:\n  hiden: [3]\n",
        },
    )


WRONG = '''
import torch


class Model(torch.nn.Module):
    """Returns what it is reported to."""

    def __init__(self, returns):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.returns = returns

    def forward(self, batch):
        loss = self.layer(batch[0])
        if self.returns == "an error":
            raise RuntimeError("from within the model")
        return {"nothing": None, "a vector": loss, "a number": 1.0}[self.returns]


class Pair(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 1)

    def forward(self, x, y):
        return ((super().forward(x) - y) ** 2).mean()


class NoTrain:
    val = [1, 2, 3]


class Empty:
    train = []


class Late:
    def __init__(self, size):
        raise FileNotFoundError(f"no file of size {size}")
'''

MISTAKES: dict[str, Any] = {
    "unknown verb": (["ft", "experiment=digits"], "there is no verb 'ft'", "Did you mean 'fit'?"),
    "no verb": (["experiment=digits"], "is not a verb", "train fit experiment=digits"),
    "unknown flag": (["fit", "--fast"], "--fast", "train fit --help"),
    "several mistakes": (["fit", "loop.max_step=3", "seet=1"], "2 mistakes", "loop.max_step", "'seet'"),
    "validate without ckpt": (["validate"], "validate needs ckpt=", "ckpt='runs/digits/checkpoints/step*'"),
    "no data": (
        ["fit", "experiment=char_gpt", "data.path=no/where.txt"],
        "there is no text at 'no/where.txt' (data.path, command line)",
        "Give a file, a list of files or a folder",
    ),
    "unknown class": (
        ["fit", "model._target_=trainer_cli.models.mlp.MPL"],
        "module trainer_cli.models.mlp has no 'MPL' (model._target_",
        "Did you mean 'MLP'?",
    ),
    "argument": (
        ["fit", "digits_mlp", "+model.hiden=[3]"],
        "MLP takes no argument 'hiden' (model.hiden",
        "Did you mean 'hidden'?",
    ),
    "constructor": (
        ["fit", "digits_mlp", "optimizer.lr=-1"],
        "torch.optim.AdamW refused its arguments",
        "-1",
        "(optimizer",
    ),
    "batch size": (["fit", "data.batch_size=0"], "data.batch_size is 0"),
    "resume a path": (["fit", "resume=runs/x/step3"], "resume=runs/x/step3: there is no such directory"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.addon("text") if case == "no data" else ()) for case in MISTAKES]
)
def test_a_mistake_is_reported_before_anything_is_written(case: str, tmp_path: Path) -> None:
    arguments, *parts = MISTAKES[case]
    result = train(*arguments, cwd=tmp_path)
    assert_reported(result, 2, *parts)
    assert result.err.startswith("error: ")
    assert result.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = train("fit", *SMALL, "device=cuda", cwd=tmp_path)
    assert_reported(result, 2, "device is cuda, but this machine has none", "It has: cpu.")
    assert list(tmp_path.iterdir()) == []


OWN_DATA = ["~data.augment", "~data.val_fraction", "~data.seed"]
OWN_MODEL = ["experiment=mine", "~model.width", "model._target_=mine.wrong.Model"]
OF_THE_PROJECT: dict[str, Any] = {
    "typo in a file": (
        ["experiment=typo"],
        "there is no key 'loop.max_durations' (configs/experiment/typo.yaml:3)",
        "Did you mean 'loop.max_duration'?",
    ),
    "argument in a file": (
        ["experiment=wide"],
        "MLP takes no argument 'hiden' (model.hiden, configs/experiment/wide.yaml:3)",
        "Did you mean 'hidden'?",
    ),
    "data without train": ([*OWN_DATA, "data._target_=mine.wrong.NoTrain"], "(NoTrain) has no 'train' (data"),
    "data without samples": ([*OWN_DATA, "data._target_=mine.wrong.Empty"], "the train dataset is empty", "(data"),
    "a file that is not there": (
        [*OWN_DATA, "data._target_=mine.wrong.Late", "+data.size=7"],
        "mine.wrong.Late refused its arguments: no file of size 7 (data",
    ),
    "lacking argument": (
        [*OWN_DATA, "data._target_=mine.wrong.Late"],
        "Late: missing a required argument: 'size' (data",
    ),
    "returns nothing": ([*OWN_MODEL, "+model.returns=nothing"], "the model returned NoneType", "expected a loss"),
    "called with the whole batch": (
        ["experiment=mine", "~model.width", "model._target_=mine.wrong.Pair"],
        "Pair.forward cannot be called with a batch: missing 1 required positional argument: 'y'",
        "batch:   [float32[8, 2], float32[8]]",
        "forward: (x, y)",
        "Set model_call=args.",
    ),
    "a logger that is none": (
        ["experiment=mine", "+loggers.x={_target_: torch.nn.Identity}"],
        "loggers.x: expected Logger, got Identity",
        "Subclass it: from trainer_cli import Logger.",
    ),
    "returns a vector": ([*OWN_MODEL, "+model.returns=a vector"], "loss is a tensor of shape (8, 1)", "a scalar"),
}


@pytest.mark.parametrize("case", OF_THE_PROJECT)
def test_a_mistake_in_a_users_own_part_is_reported(case: str, project: Path, tmp_path: Path) -> None:
    arguments, *parts = OF_THE_PROJECT[case]
    assert_reported(train("fit", *arguments, f"run_dir={tmp_path}/run", cwd=project), 2, *parts)
    if "returns" not in case and "called" not in case:  # that shows only in the first step
        assert list(tmp_path.iterdir()) == []


FAILING = """
from mine.parts import Data as Quiet, Line, Points
from trainer_cli import Callback


class Model(Line):
    def forward(self, batch):
        raise RuntimeError("of the model\\nin two lines")


class Broken(Points):
    def __getitem__(self, index):
        return super().__getitem__(index)[7]


class Data(Quiet):
    def __init__(self, size=160):
        super().__init__(size)
        self.train = Broken(size, "train")


class Failing(Callback):
    def on_train_step_end(self, trainer, model, outputs, batch):
        assert trainer.progress.step < 13


class Late(Callback):
    def on_fit_end(self, trainer, loop):
        open("not/there")
"""
OF_THE_USER = {
    "forward": (
        "model._target_=mine.failing.Model",
        "error: RuntimeError: of the model\nin two lines",
        'mine/failing.py:8, in forward: raise RuntimeError("of the model\\nin two lines")',
        "nothing, as no step was made",
    ),
    "dataset": (
        "data._target_=mine.failing.Data",
        "error: IndexError: tuple index out of range",
        "mine/failing.py:13, in __getitem__: return super().__getitem__(index)[7]",
        "nothing, as no step was made",
    ),
    "callback": (
        "+callbacks.failing._target_=mine.failing.Failing",
        "error: AssertionError",
        "mine/failing.py:24, in on_train_step_end: assert trainer.progress.step < 13",
        "3 steps after step10; the same command continues from it",
    ),
    "at the end": (
        "+callbacks.late._target_=mine.failing.Late",
        "error: FileNotFoundError: [Errno 2] No such file or directory: 'not/there'",
        'mine/failing.py:29, in on_fit_end: open("not/there")',
        "nothing, as step20 is saved; the same command continues from it",
    ),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("case", OF_THE_USER)
def test_an_error_of_the_users_code_ends_with_their_line_and_what_is_lost(
    case: str, workers: int, tmp_path: Path
) -> None:
    project = make_project(tmp_path, **{"mine/failing.py": FAILING})
    override, error, place, lost = OF_THE_USER[case]
    settings = (
        "loop.max_duration=20",
        "checkpoint.save_interval=10",
        "loop.eval_interval=null",
        "checkpoint.save_async=false",
    )
    done = train("fit", "experiment=mine", override, *settings, f"data.num_workers={workers}", cwd=project)
    assert done.code == 1
    trace, _, end = done.err[done.err.index("Traceback (") :].partition("\nerror: ")
    files = [line for line in trace.splitlines() if line.startswith("  File ")]
    assert "mine/failing.py" in files[0], "what is not the user's is left out"
    lines = f"error: {end}".rstrip().splitlines()
    assert "\n".join(lines).startswith(error)
    assert f"  --> {place}" in lines
    assert lines[-1] == f"lost: {lost}"
    assert ("report: " in done.out) is ("as no step" not in lost)


def test_an_error_inside_a_users_own_model_is_replayed(project: Path, tmp_path: Path) -> None:
    result = train("fit", *OWN_MODEL, "+model.returns=an error", f"run_dir={tmp_path}/run", cwd=project)
    assert f"`train replay {tmp_path}/run 1` computes the step again" in result.err
    again = train("replay", f"{tmp_path}/run", "1", cwd=project)
    assert again.out.startswith("step 1 (epoch 0, batch 0)")
    assert "error: RuntimeError: from within the model" in again.err
    assert "train replay" not in again.err, "it does not name itself"
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "failed"
    assert "from within the model" in summary["reason"]


def test_the_traceback_of_a_mistake_is_shown_on_demand(tmp_path: Path) -> None:
    result = train("fit", "experiment=nope", cwd=tmp_path, TRAIN_FULL_ERROR="1")
    assert result.code == 2
    assert "Traceback" in result.err
    assert message(result.err).startswith("there is no experiment called 'nope'")


CHECKPOINTS: dict[str, Any] = {
    "matches nothing": ("ckpt=runs/base/checkpoints/step7*", 3, "matches nothing", "holds step0, step10, step20"),
    "a file": ("ckpt=runs/base/config.yaml", 2, "is a file, but not a checkpoint", "A checkpoint is a directory, or"),
    "no such step": ("ckpt=runs/base@step99", 3, "has made 20 steps, so there is no step 99"),
    "no such run": ("ckpt=runs/bases@latest", 3, "runs holds base"),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_that_cannot_be_is_reported(case: str, base: Path) -> None:
    argument, code, *parts = CHECKPOINTS[case]
    assert_reported(train("validate", argument, cwd=base), code, *parts)
    assert not (base / "runs/base/validation").exists()


def test_a_run_begins_with_one_checkpoint(base: Path) -> None:
    result = train("fit", *SMALL, "name=fork", "ckpt=[runs/base@step0,runs/base@step10]", cwd=base)
    assert_reported(result, 2, "names 2 checkpoints, and a run begins with one")
    assert not (base / "runs/fork").exists()


@pytest.mark.parametrize(
    ("argument", "code", "parts"),
    [
        ("resume=never", 2, ["runs/base holds a run already", "name=OTHER"]),
        ("resume=runs/base/checkpoints/step10", 2, ["newer checkpoints exist: step20"]),
        ("resume=runs/base@step10", 2, ["newer checkpoints exist: step20"]),
        ("resume=runs/base@step7", 3, ["runs/base@step7: there is none", "holds step0, step10, step20"]),
        ("resume=runs/other@latest", 3, ["runs/other@latest: there is no runs/other", "runs holds base"]),
        ("resume=runs/base/checkpoints/step7", 2, ["runs/base/checkpoints holds step0, step10, step20."]),
        ("+model.imgsz=640", 2, ["MLP takes no argument 'imgsz' (model.imgsz, command line)", "It takes: "]),
        ("resume=runs/nowhere", 2, ["runs/nowhere is neither auto, never, must, anew, a run directory, nor a"]),
    ],
)
def test_a_way_to_resume_that_cannot_be_is_reported(base: Path, argument: str, code: int, parts: list[str]) -> None:
    assert_reported(train("fit", *SMALL, "name=base", argument, cwd=base), code, *parts)


def test_a_resume_that_must_be_needs_a_run(tmp_path: Path) -> None:
    assert_reported(
        train("fit", *SMALL, "resume=must", cwd=tmp_path), 3, "resume=must, but runs/digits_mlp holds no run"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        ([], ""),
        (["loop.max_duration=10"], " (loop.max_duration=10 is below what is trained)"),
        (["resume=runs/base@latest"], ""),
    ],
)
def test_a_finished_run_is_done_and_nothing_is_rewritten(base: Path, arguments: list[str], note: str) -> None:
    run = base / "runs/base"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    result = train("fit", *SMALL, "name=base", *arguments, cwd=base)
    assert result.code == 0, result
    assert f"runs/base is finished at step 20 (max_duration of 20 steps reached); nothing to do{note}." in result.out
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_run_that_ended_at_hard_stop_says_how_to_train_further(tmp_path: Path) -> None:
    part = [*SMALL, "name=part", "loop.hard_stop=2"]
    assert train("fit", *part, cwd=tmp_path).code == 0
    cure = "To train further, give a later loop.hard_stop, or loop.hard_stop=null"
    for verb in ("fit", "plan"):
        again = train(verb, *part, cwd=tmp_path)
        assert (again.code, cure in again.out) == (0, True), again
    assert "nothing to do" not in train("fit", *SMALL, "name=part", "loop.hard_stop=null", cwd=tmp_path).out


def test_the_second_start_of_a_finished_run_imports_no_torch(base: Path) -> None:
    again = train("fit", *SMALL, "name=base", cwd=base, cold=True, PYTHONPROFILEIMPORTTIME="1")
    assert "nothing to do" in again.out
    imported = {line.rpartition("|")[2].strip() for line in again.err.splitlines() if line.startswith("import time:")}
    assert "trainer_cli.running.resume" in imported
    assert "torch" not in imported


@pytest.mark.parametrize(
    ("damage", "reopens", "resumes"),
    [
        (lambda checkpoint: flip_a_byte(checkpoint / "rank0.json"), False, True),
        (lambda checkpoint: flip_a_byte(checkpoint / "rank0.safetensors"), False, True),
        (lambda checkpoint: flip_a_byte(checkpoint / "manifest.json"), False, True),
        # Nothing is loaded, so nothing is decoded.
        (make_undecodable, False, False),
        (make_undecodable, True, True),
    ],
    ids=["states", "tensors", "manifest", "undecodable", "undecodable and reopened"],
)
def test_a_damaged_final_checkpoint_is_noticed_by_the_next_start(
    place: Path, damage: Callable[[Path], None], reopens: bool, resumes: bool
) -> None:
    run = place / "runs/base"
    damage(run / "checkpoints/step20")
    longer = []
    if reopens:
        # As after a first attempt to reopen it: the run's config is the new one, the checkpoint's is not.
        longer = ["loop.max_duration=30"]
        config = run / "config.yaml"
        config.write_text(config.read_text().replace("max_duration: 20", "max_duration: 30"))
    again = train("fit", *SMALL, *longer, "name=base", cwd=place)
    assert again.code == 0, again.err
    assert ("resuming at step 10" in again.err) == resumes
    assert ("nothing to do" in again.out) != resumes


def test_a_damaged_final_checkpoint_is_named_although_its_copy_is_intact(tmp_path: Path) -> None:
    root = make_project(tmp_path)
    command = ["fit", "experiment=mine", "name=one", "checkpoint.copy_to.folder=copies"]
    assert train(*command, cwd=root).code == 0
    flip_a_byte(root / "runs/one/checkpoints/step40/rank0.safetensors")
    again = train(*command, cwd=root)
    assert again.code == 0, again.err
    assert "step40 is quarantined" in again.err
    assert "runs/one is finished at step 40" in again.out


@pytest.mark.parametrize(
    "ending",
    [
        ["checkpoint.enabled=false"],
        ["checkpoint.save_final=false", "checkpoint.save_interval=15"],
    ],
    ids=["nothing saved", "its end not saved"],
)
def test_a_run_whose_end_no_checkpoint_can_tell_is_done_too(ending: list[str], tmp_path: Path) -> None:
    root, command = make_project(tmp_path), ["fit", "experiment=mine", "name=one", *ending]
    assert train(*command, cwd=root).code == 0
    before = {path: path.stat().st_mtime_ns for path in (root / "runs/one").rglob("*")}
    again = train(*command, cwd=root)
    assert (again.code, again.err) == (0, "")
    assert "runs/one is finished at step 40" in again.out
    assert {path: path.stat().st_mtime_ns for path in (root / "runs/one").rglob("*")} == before
    longer = train(*command, "loop.max_duration=45", cwd=root)
    assert longer.code == 0, longer.err
    assert "finished at step 45" in longer.out


def test_a_parameter_groups_setting_that_may_change_takes_effect(tmp_path: Path) -> None:
    root = make_project(tmp_path)
    experiment = root / "configs/experiment/mine.yaml"
    text = experiment.read_text()
    for decay, more in ((0.1, []), (0.2, ["resume_allow=[param_groups.*]", "loop.max_duration=45"])):
        experiment.write_text(f'{text}param_groups:\n  "*bias*": {{weight_decay: {decay}}}\n')
        assert train("fit", "experiment=mine", *more, cwd=root).code == 0
    state = make_sync_checkpointer().load(root / "runs/mine/checkpoints/step45")
    assert [group["weight_decay"] for group in state["optimizer"]["groups"]] == [0, 0.2]


def test_a_run_in_use_is_left_alone(tmp_path: Path) -> None:
    root = make_project(tmp_path)
    train_hold = hold(root, "train")
    with running("fit", "experiment=mine", cwd=root) as first:
        first.reach("train")
        second = train("fit", "experiment=mine", cwd=root)
        assert_reported(second, 4, "runs/mine is in use by process", str(first.process.pid), "name=")
        train_hold.unlink()
        assert first.end().code == 0
    train_hold = hold(root, "train")
    with running("fit", "experiment=mine", "loop.max_duration=120", cwd=root) as first:
        first.reach("train")
        assert_reported(train("fit", "experiment=mine", cwd=root), 4, "in use by process", str(first.process.pid))
    assert names(root / "runs/mine/checkpoints") == ["step0", "step16", "step32", "step40"]


def test_the_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    run = tmp_path / "runs/digits_mlp"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "theirs").touch()
    (run / "config.yaml").write_text("theirs: 1\n")
    result = train("fit", *SMALL, cwd=tmp_path)
    assert_reported(result, 4, "runs/digits_mlp is not a complete run directory", "checkpoints", "run_dir=")
    assert (run / "config.yaml").read_text() == "theirs: 1\n"
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.yaml"]


def test_a_directory_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    assert_reported(train("fit", *SMALL, cwd=tmp_path), 2, "runs/digits_mlp cannot be made", "run_dir=")


def test_a_run_whose_output_is_closed_ends_as_any_other(tmp_path: Path) -> None:
    result = train("fit", *SMALL, "loop.max_duration=2", cwd=tmp_path, preexec_fn=partial(os.close, 1))
    assert (result.code, result.out) == (0, "")
    assert "Traceback" not in result.err
    assert json.loads((tmp_path / "runs/digits_mlp/summary.json").read_text())["status"] == "finished"


def test_a_full_disk_ends_the_run_and_leaves_older_checkpoints_intact(place: Path) -> None:
    run = place / "runs/base"
    before = {name: weights(run / "checkpoints" / name) for name in names(run / "checkpoints")}
    arguments = ["fit", *SMALL, "name=base", "loop.max_duration=30"]
    program = place / "small_files_only.py"
    program.write_text(
        "import resource, sys\n\nfrom trainer_cli.__main__ import main\n\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))\nsys.exit(main())\n"
    )
    with start_program(program, arguments, environment(), cwd=place, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=LIMIT_S)
    result = Result(process.returncode or 0, out, err)
    assert_reported(result, 1, "the checkpoint could not be saved", "File too large", "Older checkpoints are intact.")
    assert {name: weights(run / "checkpoints" / name) for name in names(run / "checkpoints")} == before
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step0", "step10", "step20"]
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"
    assert trained(*arguments[1:], cwd=place).code == 0
    assert names(run / "checkpoints") == ["step0", "step10", "step20", "step30"]
