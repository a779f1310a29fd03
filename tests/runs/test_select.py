"""Which checkpoints `ckpt=` names, that they are held until they are read, and those that a watch names."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from trainer_cli import make_sync_checkpointer
from trainer_cli.catalog.find import expanded
from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, SyncCheckpointer
from trainer_cli.config.overrides import read_overrides
from trainer_cli.errors import CheckpointError
from trainer_cli.running.validation import watched
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.selection.holds import Holds
from trainer_cli.selection.patterns import ckpt_argument, select, select_all, select_one, suggest_nearby
from trainer_cli.steps.run_status import RunStatus
from trainer_cli.storage.local import LocalStorage


def save(path: Path, step: int, *, finite: bool = True, loss: float | None = None) -> None:
    metrics = {} if loss is None else {"val/loss": loss}
    metadata = CheckpointMetadata(step=step, finite=finite, metrics=metrics)
    make_sync_checkpointer().save({"model": {"weight": torch.full((3,), float(step))}}, path, metadata=metadata)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 10 to 30, and a folder of step 40 that was never committed."""
    for step in (10, 20, 30):
        save(tmp_path / f"run/checkpoints/step{step}", step)
    (tmp_path / "run/config.yaml").write_text("{}\n")
    (tmp_path / "run/checkpoints/step40").mkdir()
    return tmp_path / "run"


def truncate(checkpoint: Path) -> None:
    """Take a byte of the weights away."""
    file = checkpoint / "rank0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["{run}", "{run}@latest", "{run}/checkpoints/step*"])
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(
    name: str, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = name.format(run=run)
    if "*" not in name:
        truncate(run / "checkpoints/step10")  # No matter of the latest.
    assert select_one(name).name == "step30"
    assert not caplog.records
    truncate(run / "checkpoints/step30")
    assert select_one(name).name == "step20"
    [warning] = caplog.messages
    assert "step30 is skipped, and step20 is used: rank0.safetensors" in warning


@pytest.mark.parametrize("rest", ["", "@latest", "@step30", "/checkpoints"])
def test_the_folder_of_a_trainer_in_python_names_its_checkpoints(rest: str, run: Path) -> None:
    (run / "config.yaml").unlink()
    newest = run / "checkpoints/step30"
    assert select_one(f"{run}{rest}") == newest
    assert newest in select_all([f"{run}{rest}"])


def test_a_newer_checkpoint_that_is_not_finite_is_passed_over_with_a_warning(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(run / "checkpoints/step50", 50, finite=False)
    caplog.clear()
    assert select_one(f"{run}@latest").name == "step30"
    assert caplog.messages == ["step50 is skipped, and step30 is used: its weights are not finite"]


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


SEVERAL = {
    "{a,b}@latest": ["a/step30", "b/step20"],
    "{b,a}@step10": ["a/step10", "b/step10"],
    "{a@latest,b@step10}": ["a/step30", "b/step10"],
    "a@{step10,latest}": ["a/step10", "a/step30"],
    "{a,{b,more/d}}@latest": ["a/step30", "b/step20", "more/d/step10"],
    "*@latest": ["a/step30", "b/step20"],
    "?@step10": ["a/step10", "b/step10"],
    "?@step30": ["a/step30"],
    "[ab]@latest": ["a/step30", "b/step20"],
    "**@latest": ["a/step30", "b/step20", "more/d/step10"],
    "{a,mo*/*}@latest": ["a/step30", "more/d/step10"],
    "*@best": ["a/step20", "b/step10"],
    "a@latest,b@latest": ["a/step30", "b/step20"],
    "{a,c}@latest": "c@latest: there is no ",
    "{a,x}@latest": "x@latest: there is no ",
    "{a,b}@step30": "b@step30: there is none",
    "x*@latest": "matches nothing",
    "*@step70": "matches nothing",
    "{a,b}@lates": "matches nothing",
}
"""Pattern below a folder of runs -> checkpoints, or the error."""


@pytest.mark.parametrize("pattern", SEVERAL)
def test_several_runs_are_named_before_an_at(pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, steps in {"a": (10, 20, 30), "b": (10, 20), "c": (), "more/d": (10,)}.items():
        for step in steps:
            # The middle one of the first run is the best, and the first of the others.
            save(tmp_path / f"{name}/checkpoints/step{step}", step, loss=abs(step - 20 + 10 * (name != "a")))
        Path(name).mkdir(exist_ok=True)
        Path(name, "config.yaml").write_text("{}\n")
    expected = SEVERAL[pattern]
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=re.escape(expected)):
            select([pattern])
        return
    paths = [Path(name).parent / "checkpoints" / Path(name).name for name in expected]
    assert select([pattern]).paths == paths
    if pattern != "a@latest,b@latest":
        assert sorted(select_all([pattern])) == paths


@contextmanager
def saving_and_removing(folder: Path) -> Iterator[None]:
    """Another thread saves one step after another, and removes all older ones."""
    ends, storage = threading.Event(), LocalStorage(folder)

    def run() -> None:
        for step in range(1, 100_000):
            if ends.is_set():
                return
            save(folder / f"step{step}", step)
            for name in storage.names():
                if name != f"step{step}":
                    storage.remove(name)

    save(folder / "step0", 0)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def test_what_was_listed_is_there_until_it_is_read(tmp_path: Path) -> None:
    seen = set[Path]()
    with saving_and_removing(tmp_path):
        while len(seen) < 5:
            with Holds() as holds:
                selection, removed = holds.select([f"{tmp_path}/step*"])
                assert selection.paths
                assert not selection.damaged
                assert not set(removed) & set(selection.paths)
                for path in selection.paths:
                    weight = make_sync_checkpointer().load(path)["model"]["weight"]
                    assert int(weight[0]) == int(path.name.removeprefix("step"))
                    holds.release(path)
                    seen.add(path)


def test_a_released_checkpoint_can_be_removed_and_a_removed_one_cannot_be_held(tmp_path: Path) -> None:
    save(tmp_path / "step1", 1)
    storage = LocalStorage(tmp_path)
    with Holds() as holds:
        assert holds.take(tmp_path / "step1")
        assert not storage.remove("step1")
    assert storage.remove("step1")
    with Holds() as holds:
        assert not holds.take(tmp_path / "step1")
        with pytest.raises(CheckpointError, match="matches nothing"):
            holds.select([f"{tmp_path}/step*"])


class Waited(Exception):
    """A watch waits, and would do so for good."""


def given_up(seconds: float) -> None:
    raise Waited


class Watched:
    """A run directory whose state is written by hand."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder / "runs/x")
        self.pattern = f"{self.run.checkpoints_folder}/step*"

    def begin(self) -> None:
        self.run.checkpoints_folder.mkdir(parents=True)
        self.run.config_file.write_text("name: x\n")

    def save(self, *steps: int) -> None:
        for step in steps:
            SyncCheckpointer().save({"w": step}, self.run.checkpoints_folder / f"step{step}")

    def write_status(self, status: str) -> None:
        self.run.summary_file.write_text(json.dumps({"status": status}))

    def seen(self, wait: Callable[[float], object]) -> list[list[str]]:
        return [[path.name for path in selection.paths] for selection in watched([self.pattern], wait)]


@pytest.fixture
def begun(tmp_path: Path) -> Watched:
    run = Watched(tmp_path)
    run.begin()
    return run


@pytest.mark.parametrize("status", [RunStatus.finished, RunStatus.failed, RunStatus.interrupted])
def test_a_watch_ends_when_the_run_has_ended(begun: Watched, status: RunStatus) -> None:
    begun.write_status(status)
    with pytest.raises(CheckpointError, match="matches nothing"):
        begun.seen(given_up)
    begun.save(9, 10)
    assert begun.seen(given_up) == [["step9", "step10"]]


@pytest.mark.parametrize("status", [RunStatus.running, RunStatus.killed])
def test_a_watch_waits_for_a_run_that_may_go_on_unless_it_is_stopped(begun: Watched, status: RunStatus) -> None:
    begun.save(9)
    begun.write_status(status)
    with pytest.raises(Waited):
        begun.seen(given_up)
    assert list(watched([begun.pattern], given_up, lambda: True)) == []


def test_each_checkpoint_is_named_once_and_a_partial_one_when_it_is_complete(tmp_path: Path) -> None:
    """The run does not exist at first, and the last checkpoint is there only when it has ended."""
    run = Watched(tmp_path)
    folder = run.run.checkpoints_folder / "step2"
    moments: list[Callable[[], object]] = [
        run.begin,
        lambda: [act() for act in (partial(run.save, 1), folder.mkdir)],
        lambda: None,
        lambda: [act() for act in (folder.rmdir, partial(run.save, 2))],
        lambda: [act() for act in (partial(run.save, 3), partial(run.write_status, "finished"))],
    ]
    assert run.seen(lambda seconds: moments.pop(0)()) == [["step1"], ["step2"], ["step3"]]
    assert moments == []


def test_a_file_is_near_to_another_of_its_kind_alone(empty_folder: Path) -> None:
    for name in ("best.pt", "pre.py", "same.pt"):
        Path(name).touch()
    assert suggest_nearby("nope.pt") == "The current folder holds best.pt, pre.py, same.pt."
    assert "Did you mean 'same.pt'?" in (suggest_nearby("sam.pt") or "")


@pytest.mark.parametrize(
    ("name", "hint"), [("step99", "holds step0, step180."), ("stepp0", "holds step0, step180. Did you mean 'step0'?")]
)
def test_a_step_is_not_near_another_for_its_digits(name: str, hint: str, empty_folder: Path) -> None:
    for step in (0, 180):
        Path(f"checkpoints/step{step}").mkdir(parents=True)
    assert suggest_nearby(f"checkpoints/{name}") == f"checkpoints {hint}"
