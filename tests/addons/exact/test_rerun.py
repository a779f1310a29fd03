"""`train rerun` makes a whole run again from the source that it keeps, and says what is not equal, and why."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import signal
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command import EXPERIMENTS, ROOT, Result, records, train, trained, write_files

pytestmark = pytest.mark.slow

NET = """
import os
import torch
from mine.layers import FACTOR


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.drop = torch.nn.Dropout(0.2)

    def forward(self, batch):
        logits = self.drop(self.layer(batch[0])) * FACTOR
        return {"loss": torch.nn.functional.cross_entropy(logits, batch[1]), "logits": logits}
"""
POINTS = """
import os
import signal
from pathlib import Path

import torch


class Points(torch.utils.data.Dataset):
    def __init__(self, first, last):
        self.points = torch.arange(first * 2, last * 2).reshape(-1, 2) % 11 / 11

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], (self.points[index][1] > 0.5).long()


class Data:
    def __init__(self):
        self.train, self.val = Points(0, 32), Points(32, 40)
"""
STOPPER = """
import os
import signal
from pathlib import Path

from trainer_cli import Callback


class Stopper(Callback):
    def on_after_optimizer_step(self, trainer, model, optimizer):
        if Path("kill-at").exists() and trainer.progress.step + 1 == int(Path("kill-at").read_text()):
            os.kill(os.getpid(), signal.SIGKILL)
        if Path("stop-at").exists() and trainer.progress.step + 1 == int(Path("stop-at").read_text()):
            trainer.stop("asked for", finished=False)
"""
RETURNER = """
from trainer_cli import Callback


class Returner(Callback):
    returned = False

    def on_train_step_end(self, trainer, *_):
        if trainer.progress.step == 7 and not self.returned:
            self.returned = True
            trainer.ask_to_roll_back()
"""
EXPERIMENT = """# @package _global_
model: {_target_: mine.net.Net}
data: {_target_: mine.points.Data, batch_size: 8}
optimizer: {lr: 0.1}
callbacks: {stopper: {_target_: mine.stopper.Stopper}}
loop: {max_duration: 8, log_interval: 1, eval_interval: 4}
checkpoint: {save_interval: 2, max_checkpoints: 10}
device: cpu
"""
MINE = "+experiment=mine"
AGAIN = "runs/again"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = write_files(tmp_path_factory.mktemp("rerun") / "project", {
        "mine/__init__.py": "", "mine/net.py": NET, "mine/layers.py": "FACTOR = 1\n", "mine/points.py": POINTS,
        "mine/stopper.py": STOPPER, "configs/experiment/mine.yaml": EXPERIMENT,
    })  # fmt: skip
    trained(MINE, cwd=project)
    return project


@pytest.fixture
def project(made: Path, tmp_path: Path) -> Path:
    """A copy of the project with its run."""
    return Path(shutil.copytree(made, tmp_path / "project"))


def rerun(project: Path, *words: str, run: str = "runs/mine", new: str = AGAIN, **env: Any) -> Result:
    return train("rerun", run, "-o", new, *words, cwd=project, **env)


def edit(project: Path) -> None:
    (project / "mine/layers.py").write_text("FACTOR = 3\n")


def last_line(result: Result) -> str:
    return str(result.out.strip().splitlines()[-1])


def change_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def change_record(run: Path, step: int) -> None:
    """Another loss than was computed."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    next(row for row in rows if row["step"] == step)["train/loss"] = 0.125
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextmanager
def asking(project: Path, what: str, step: int) -> Iterator[None]:
    (project / what).write_text(str(step))
    yield
    (project / what).unlink()


def test_an_edited_project_is_made_again_by_the_source_that_the_run_keeps(project: Path) -> None:
    edit(project)
    done = rerun(project)
    assert done.code == 0, done.out + done.err
    assert last_line(done) == "equal up to step 8: 8 records and 5 checkpoints"
    assert records(project / AGAIN / "metrics.jsonl") == records(project / "runs/mine/metrics.jsonl")


def test_the_first_difference_ends_it_and_the_code_is_named(project: Path) -> None:
    edit(project)
    done = rerun(project, "source=project")
    assert done.code == 1, done.err
    assert "not equal: step 1: train/loss is" in done.out
    assert "next: run the same command again" not in done.out
    assert last_line(done) == "likely cause: the code is another: mine/layers.py"
    summary = json.loads((project / AGAIN / "summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("stopped", 1)


def test_another_version_of_a_package_is_named(project: Path) -> None:
    run = project / "runs/mine"
    change_json(run / "environment.json", lambda facts: facts["versions"].update(torch="1.0"))
    change_record(run, 3)
    done = rerun(project)
    assert done.code == 1, done.err
    assert "not equal: step 3: train/loss is" in done.out
    assert last_line(done).startswith("likely cause: torch 1.0 (here ")


def test_a_difference_without_a_known_cause_says_what_to_try(project: Path) -> None:
    change_record(project / "runs/mine", 5)
    done = rerun(project)
    assert done.code == 1, done.err
    assert "likely cause: nothing that the run keeps differs here" in " ".join(done.out.split())


def test_a_state_that_differs_is_named_although_all_records_are_equal(project: Path) -> None:
    other = project / "runs/other"
    trained(MINE, "name=other", "optimizer.weight_decay=0.5", "optimizer.lr=0.0", cwd=project)
    trained(MINE, "name=third", "optimizer.weight_decay=0.4", "optimizer.lr=0.0", cwd=project)
    # With lr=0 both have the same losses; the settings of the optimizer are part of the state.
    shutil.rmtree(other / "checkpoints/step4")
    shutil.copytree(project / "runs/third/checkpoints/step4", other / "checkpoints/step4")
    identity = json.loads((other / "environment.json").read_text())["run_id"]
    adopt(other / "checkpoints/step4", identity)
    done = rerun(project, run="runs/other")
    assert done.code == 1, done.err
    assert "not equal: step 4: optimizer.groups[0].weight_decay differs from the kept checkpoint" in done.out


def adopt(checkpoint: Path, run_id: str) -> None:
    """Have a checkpoint belong to another run."""
    from dataclasses import replace

    from trainer_cli.manifest import Manifest

    file = checkpoint / "manifest.json"
    file.write_bytes(replace(Manifest.parse(file.read_bytes()), run_id=run_id).to_bytes())


def test_a_killed_rerun_is_continued_by_the_same_command_and_compares_all(project: Path) -> None:
    with asking(project, "kill-at", 5):
        assert rerun(project).code == -signal.SIGKILL
    done = rerun(project)
    assert done.code == 0, done.out + done.err
    assert "resuming at step" in done.err
    assert last_line(done) == "equal up to step 8: 8 records and 5 checkpoints"
    # Once more: nothing is trained.
    assert last_line(rerun(project)) == "equal up to step 8: 8 records and 5 checkpoints"


def test_a_difference_that_was_found_before_a_kill_is_still_there(project: Path) -> None:
    change_record(project / "runs/mine", 2)
    with asking(project, "kill-at", 3):
        assert rerun(project).code in (1, -signal.SIGKILL)
    done = rerun(project)
    assert done.code == 1, done.err
    assert "not equal: step 2: train/loss" in done.out


def test_a_run_that_was_stopped_is_made_again_up_to_its_last_step(project: Path) -> None:
    with asking(project, "stop-at", 5):
        assert train("fit", MINE, "name=stopped", cwd=project).code == 75
    done = rerun(project, run="runs/stopped")
    assert done.code == 0, done.out + done.err
    assert last_line(done) == "equal up to step 5: 5 records and 4 checkpoints"
    assert "next: run the same command again" not in done.out


def test_a_run_of_several_attempts_is_made_again_at_once(project: Path) -> None:
    for step in (3, 6):
        with asking(project, "stop-at", step):
            assert train("fit", MINE, "name=parts", cwd=project).code == 75
    trained(MINE, "name=parts", cwd=project)
    done = rerun(project, run="runs/parts")
    assert done.code == 0, done.out + done.err
    assert last_line(done).startswith("equal up to step 8: 8 records and ")


def test_a_run_that_began_anew_is_made_again_by_the_config_that_made_its_steps(project: Path) -> None:
    # A second config that may change, so that the kept source is the same.
    wrong = train("fit", MINE, "name=anew", "loop.eval_interval=3", "checkpoint.ephemeral_save_interval=2", cwd=project)
    assert wrong.code == 2, wrong.err
    trained(MINE, "name=anew", cwd=project)
    assert len(list((project / "runs/anew/source").iterdir())) == 1
    done = rerun(project, run="runs/anew")
    assert done.code == 0, done.out + done.err
    assert last_line(done) == "equal up to step 8: 8 records and 5 checkpoints"


def test_steps_that_a_rollback_undid_are_made_again_too_or_named(project: Path) -> None:
    write_files(project, {"mine/returner.py": RETURNER})
    words = (
        MINE,
        "loop.max_duration=12",
        "checkpoint.save_interval=4",
        "+callbacks.back={_target_: mine.returner.Returner}",
    )
    trained(*words, "name=back", cwd=project)
    done = rerun(project, run="runs/back")
    assert done.code == 0, done.out + done.err
    assert last_line(done) == "equal up to step 12: 12 records and 4 checkpoints"
    assert train("pack", "runs/back", cwd=project).code == 0
    assert last_line(rerun(project, run="back.tar.gz", new="runs/third")) == last_line(done)
    reason = "the run passed over data between steps 4 and 8, as after a rollback: replay up to step 8"
    undone = train("replay", "runs/back", "6", "--quiet", cwd=project)
    assert (undone.code, undone.out.count(reason)) == (1, 1), undone.out
    for steps in ("6..8", "8", "10"):
        assert train("replay", "runs/back", steps, "--quiet", cwd=project).out.startswith("verified: equal at")
    # Without a record that shows it, a state of the first time is not taken for that of the run.
    trained(*words, "name=silent", "loop.log_interval=12", cwd=project)
    refused = train("ckpt", "show", "runs/silent@step6", cwd=project)
    assert (refused.code, refused.err.count(f"is not kept: {reason}")) == (3, 1), refused.out + refused.err
    assert not list((project / "runs/silent/replayed").glob("step*"))


def test_equality_is_expected_until_an_attempt_with_another_source(project: Path) -> None:
    with asking(project, "stop-at", 5):
        assert train("fit", MINE, "name=edited", cwd=project).code == 75
    edit(project)
    trained(MINE, "name=edited", cwd=project)
    done = rerun(project, run="runs/edited")
    assert done.code == 0, done.out + done.err
    assert " ".join(done.out.split()).endswith(
        "equal up to step 5: 5 records and 3 checkpoints; later steps are not made again: attempt 2, which has another "
        "source than the first, began at step 5"
    )


def test_a_run_that_was_continued_after_its_end_is_made_again_up_to_that_end(project: Path) -> None:
    trained(MINE, "loop.max_duration=12", cwd=project)
    done = rerun(project)
    assert done.code == 0, done.out + done.err
    assert "equal up to step 8: " in done.out
    assert "attempt 2, which continued the finished run, began at step 8" in " ".join(done.out.split())


def test_a_run_of_two_processes_is_made_again_in_two(project: Path) -> None:
    trained(MINE, "name=two", "parallel=ddp", "parallel.processes_per_node=2", cwd=project)
    edit(project)
    done = rerun(project, run="runs/two")
    assert done.code == 0, done.out + done.err
    assert last_line(done) == "equal up to step 8: 8 records and 5 checkpoints"
    assert json.loads((project / AGAIN / "environment.json").read_text())["processes"] == 2
    assert train("pack", "runs/two", cwd=project).code == 0
    assert last_line(rerun(project, run="two.tar.gz", new="runs/third")) == last_line(done)


def test_a_run_with_restarts_is_made_again_with_them(project: Path) -> None:
    trained(MINE, "name=restarts", "restarts.max=2", "restarts.backoff=0.1s", cwd=project)
    done = rerun(project, run="runs/restarts")
    assert done.code == 0, done.out + done.err
    assert last_line(done) == "equal up to step 8: 8 records and 5 checkpoints"


def test_a_packed_run_is_made_again_where_neither_project_nor_run_is(project: Path, tmp_path: Path) -> None:
    done = train("pack", "runs/mine", "-o", str(tmp_path / "mine.tar.gz"), cwd=project)
    assert done.code == 0, done.out + done.err
    assert "mine.tar.gz: " in done.out
    shutil.rmtree(project)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    again = rerun(elsewhere, run="../mine.tar.gz", new="again")
    assert again.code == 0, again.err
    assert last_line(again) == "equal up to step 8: 8 records and 5 checkpoints"


def test_a_packed_run_of_somebody_else_needs_trust(project: Path, tmp_path: Path) -> None:
    assert train("pack", "runs/mine", cwd=project).code == 0
    elsewhere, key = tmp_path / "elsewhere", str(tmp_path / "other-user")
    elsewhere.mkdir()
    refused = rerun(elsewhere, run="../project/mine.tar.gz", XDG_STATE_HOME=key)
    assert refused.code == 2
    assert "is not signed by this user's key" in refused.err
    done = rerun(elsewhere, "trust=[source]", run="../project/mine.tar.gz", XDG_STATE_HOME=key)
    assert done.code == 0, done.out + done.err


def test_a_packed_run_has_neither_weights_nor_secrets(project: Path) -> None:
    assert (
        train("fit", MINE, "name=secret", "+vars.token=${oc.env:MY_TOKEN}", cwd=project, MY_TOKEN="s3cr3t-value").code
        == 0
    )
    assert train("pack", "runs/secret", cwd=project, MY_TOKEN="s3cr3t-value").code == 0
    with tarfile.open(project / "secret.tar.gz") as tar:
        contents = {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}  # type: ignore[union-attr]
    assert not any(name.endswith(".safetensors") for name in contents)
    assert "source" in {name.split("/")[0] for name in contents}
    assert b"s3cr3t-value" not in b"".join(contents.values())


@pytest.mark.parametrize("name", ["../evil.py", "/tmp/evil.py", "source/../../evil.py", "source//evil.py"])
def test_a_packed_run_that_leads_out_of_its_folder_is_refused(name: str, project: Path, tmp_path: Path) -> None:
    write_tar(tmp_path / "evil.tar.gz", [tarfile.TarInfo(name)])
    refused = rerun(project, run=str(tmp_path / "evil.tar.gz"))
    assert refused.code == 2
    assert "is no packed run" in refused.err
    assert not list((project / AGAIN).iterdir())
    assert not list(tmp_path.rglob("evil.py"))
    assert not Path("/tmp/evil.py").exists()


def test_a_packed_run_with_a_link_or_of_any_size_is_refused(project: Path, tmp_path: Path) -> None:
    link, huge = tarfile.TarInfo("packed.json"), tarfile.TarInfo("packed.json")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    huge.size = 1 << 40
    for member, words in (
        (link, "absolute path"),
        (huge, "is no packed run"),
        (tarfile.TarInfo("a"), "no packed.json"),
    ):
        write_tar(tmp_path / "evil.tar.gz", [member])
        refused = rerun(project, run=str(tmp_path / "evil.tar.gz"))
        assert (refused.code, words in refused.err) == (2, True), refused.err
    with gzip.open(tmp_path / "evil.tar.gz", "wb", compresslevel=1) as bomb:
        for _ in range(65):
            bomb.write(bytes(1 << 24))
    assert "it is too large" in rerun(project, run=str(tmp_path / "evil.tar.gz")).err
    (tmp_path / "text").write_text("no archive")
    assert "is no packed run" in rerun(project, run=str(tmp_path / "text")).err
    assert not list((project / AGAIN).iterdir())


def write_tar(file: Path, members: list[tarfile.TarInfo]) -> None:
    with io.BytesIO() as content:
        for member in members:
            content.write(member.tobuf())
        file.write_bytes(gzip.compress(content.getvalue() + bytes(1024)))


def test_a_directory_that_is_in_use_and_a_run_that_is_not_there_are_refused(project: Path) -> None:
    used = rerun(project, new="runs/mine")
    assert (used.code, "runs/mine is not empty" in used.err) == (2, True)
    missing = rerun(project, run="runs/none")
    assert (missing.code, "runs/none is not a run" in missing.err) == (2, True)
    assert rerun(project).code == 0
    trained(MINE, "name=other", "seed=3", cwd=project)
    other = rerun(project, run="runs/other")
    assert (other.code, "was begun as a rerun of another run" in other.err) == (2, True)


def test_a_run_without_kept_source_needs_that_of_the_project(project: Path) -> None:
    shutil.rmtree(project / "runs/mine/source")
    change_json(project / "runs/mine/summary.json", lambda summary: summary["attempts"][0].pop("source"))
    refused = rerun(project)
    assert (refused.code, "keeps no source" in refused.err, "source=project" in refused.err) == (2, True, True)
    packed = train("pack", "runs/mine", cwd=project)
    assert (packed.code, "keeps no source" in packed.err) == (2, True)
    done = rerun(project, "source=project")
    assert done.code == 0, done.out + done.err


def test_kept_source_that_was_changed_is_refused(project: Path) -> None:
    (kept,) = (project / "runs/mine/source").glob("*/files/mine/layers.py")
    kept.write_text("FACTOR = 9\n")
    refused = rerun(project)
    assert refused.code != 0
    assert "is damaged: files/mine/layers.py is not what was kept" in refused.err


def test_a_stopped_rerun_says_how_far_it_is_equal(project: Path) -> None:
    with asking(project, "stop-at", 4):
        done = rerun(project)
    assert done.code == 75, done.err
    assert last_line(done) == "equal up to step 4: 4 records and 3 checkpoints, so far"
    assert "next: run the same command again" in done.out


SHORT = (
    "loop.max_duration=3", "loop.eval_steps=2", "loop.eval_interval=2",
    "checkpoint.save_interval=2", "checkpoint.ephemeral_save_interval=null",
)  # fmt: skip
CASES = {name: (ROOT, name) for name in EXPERIMENTS} | {
    file.stem: (file.parents[2], file.stem)
    for file in sorted(ROOT.glob("examples/*/configs/experiment/*.yaml"))
    if file.stem != "finetune"
}


@pytest.mark.parametrize(
    "name",
    [name if name in ("digits_mlp", "text") else pytest.param(name, marks=pytest.mark.campaign) for name in CASES],
)
def test_each_experiment_and_recipe_is_equal_from_step_1_to_its_end(name: str, tmp_path: Path) -> None:
    folder, experiment = CASES[name]
    project = tmp_path / "project"
    if folder != ROOT:
        shutil.copytree(folder, project, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    else:
        project.mkdir()
    words = []
    if experiment == "char_gpt":
        (project / "text.txt").write_text("to be, or not to be, that is the question. " * 100)
        words = ["data.path=text.txt"]
    trained(f"+experiment={experiment}", "name=first", *SHORT, *words, cwd=project)
    done = rerun(project, run="runs/first")
    assert done.code == 0, done.out + done.err
    assert last_line(done).startswith("equal up to step 3: ")
