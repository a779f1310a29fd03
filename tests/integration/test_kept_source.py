"""A run keeps the source that made it, and later commands compute with it as if nothing had been edited since."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import Result, train, write_files

pytestmark = pytest.mark.slow

NET = """
import torch
from mine.layers import Scaled


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, batch):
        from mine.late import shift

        logits = Scaled.apply_to(self.layer(batch[0])) + shift()
        return {"loss": torch.nn.functional.cross_entropy(logits, batch[1]), "logits": logits}
"""
LAYERS = """
FACTOR = 1


class Scaled:
    @staticmethod
    def apply_to(values):
        return values * FACTOR
"""
LATE = "import mine.deeper as deeper\n\n\ndef shift():\n    return deeper.SHIFT\n"
POINTS = """
import csv
from pathlib import Path

import torch

TABLE = Path(__file__).with_name("points.csv")


class Points(torch.utils.data.Dataset):
    def __init__(self, first, last):
        rows = list(csv.reader(TABLE.open()))[first:last]
        self.points = torch.tensor([[float(cell) for cell in row] for row in rows])

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], (self.points[index][1] > 0.5).long()


class Data:
    def __init__(self):
        self.train, self.val = Points(0, 32), Points(32, 40)
"""
EXPERIMENT = """# @package _global_
model: {_target_: mine.net.Net}
data: {_target_: mine.points.Data, batch_size: 8}
optimizer: {lr: 0.1}
loop: {max_duration: 8, log_interval: 1, eval_interval: 4}
checkpoint: {save_interval: 4, max_checkpoints: 10}
device: cpu
"""
MINE = "+experiment=mine"
OWN = "the source is the one that the run keeps"


def write_project(folder: Path) -> Path:
    rows = [f"{(i * 37 % 41) / 41:.4f},{(i * 17 % 41) / 41:.4f}" for i in range(40)]
    return write_files(folder, {
        "mine/__init__.py": "", "mine/net.py": NET, "mine/layers.py": LAYERS, "mine/late.py": LATE,
        "mine/deeper.py": "SHIFT = 0.5\n", "mine/points.py": POINTS, "mine/points.csv": "\n".join(rows) + "\n",
        "mine/unused.py": "", "configs/experiment/mine.yaml": EXPERIMENT,
    })  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = write_project(tmp_path_factory.mktemp("kept") / "project")
    done = train("fit", MINE, cwd=project)
    assert done.code == 0, done.err
    other = train("fit", MINE, "name=other", "optimizer.lr=0.11", cwd=project)
    assert other.code == 0, other.err
    return project


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    """A copy of the project with its runs, in its place as far as they know."""
    return copy(trained, tmp_path / "project")


def copy(project: Path, to: Path) -> Path:
    shutil.copytree(project, to)
    for file in to.glob("runs/*/environment.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "project_root": str(to)}))
    return to


def edit(project: Path, factor: int = 3) -> None:
    """Change what the model computes, in a file that it imports."""
    (project / "mine/layers.py").write_text(LAYERS.replace("FACTOR = 1", f"FACTOR = {factor}"))


def attempts(project: Path, name: str = "mine") -> list[dict[str, Any]]:
    summary = json.loads((project / f"runs/{name}/summary.json").read_text())
    return list(summary["attempts"])


def sources(project: Path, name: str = "mine") -> list[Path]:
    return sorted(path for path in (project / f"runs/{name}/source").glob("*") if not path.name.startswith("."))


def records(project: Path, name: str = "mine") -> list[dict[str, Any]]:
    """What the run computed, without times."""
    rows = map(json.loads, (project / f"runs/{name}/metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if key == "step" or "loss" in key} for row in rows]


def test_a_run_keeps_the_files_that_it_imports_now_or_later(trained: Path) -> None:
    (folder,) = sources(trained)
    files = {str(path.relative_to(folder / "files")) for path in (folder / "files").rglob("*") if path.is_file()}
    assert files == {f"mine/{name}.py" for name in ("__init__", "net", "layers", "late", "deeper", "points")}
    assert (folder / "files/mine/net.py").read_text() == NET
    assert (folder / "config.yaml").read_text() == (trained / "runs/mine/config.yaml").read_text()
    assert [attempt["source"] for attempt in attempts(trained)] == [folder.name]


def test_a_resume_with_the_same_source_writes_nothing_more(project: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (project / "runs/mine/source").rglob("*")}
    # A longer run, on other workers, is made from the same source.
    done = train("fit", MINE, "loop.max_duration=10", "data.num_workers=1", cwd=project)
    assert done.code == 0, done.err
    assert {path: path.stat().st_mtime_ns for path in (project / "runs/mine/source").rglob("*")} == before
    assert [attempt["source"] for attempt in attempts(project)] == [sources(project)[0].name] * 2


def test_a_resume_with_edited_source_keeps_both(project: Path) -> None:
    edit(project)
    done = train("fit", MINE, "loop.max_duration=10", cwd=project)
    assert done.code == 0, done.err
    first, second = (attempt["source"] for attempt in attempts(project))
    assert {first, second} == {path.name for path in sources(project)}
    assert "FACTOR = 3" in (project / f"runs/mine/source/{second}/files/mine/layers.py").read_text()


def test_no_secret_of_the_environment_is_kept(project: Path) -> None:
    done = train("fit", MINE, "name=secret", "+vars.token=${oc.env:MY_TOKEN}", cwd=project, MY_TOKEN="s3cr3t-value")
    assert done.code == 0, done.err
    kept = b"".join(path.read_bytes() for path in sources(project, "secret")[0].rglob("*") if path.is_file())
    assert b"MY_TOKEN" in kept
    assert b"s3cr3t-value" not in kept


def test_what_git_ignores_is_named_unless_it_is_imported(project: Path) -> None:
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    (project / ".gitignore").write_text("mine/layers.py\nmine/deeper.py\nruns\n")
    done = train("fit", MINE, "name=ignored", cwd=project)
    assert done.code == 0, done.err
    (folder,) = sources(project, "ignored")
    assert (folder / "files/mine/layers.py").exists()
    assert not (folder / "files/mine/deeper.py").exists()
    assert json.loads((folder / "source.json").read_text())["not_kept"] == {"mine/deeper.py": "ignored by git"}


def test_a_large_source_is_told(project: Path) -> None:
    (project / "mine/deeper.py").write_text("SHIFT = 0.5\n" + f"#{'x' * 999}\n" * 21_000)
    done = train("fit", MINE, "name=large", cwd=project)
    assert done.code == 0, done.err
    assert "the source of the run has 21 MB in 6 files" in done.err


def test_a_source_that_cannot_be_kept_is_a_warning_and_the_run_is_the_same(project: Path) -> None:
    (project / "runs/broken").mkdir()
    (project / "runs/broken/source").write_text("a file where a folder should be")
    done = train("fit", MINE, "name=broken", cwd=project)
    assert done.code == 0, done.err
    assert done.err.count("the source of the run is not kept: ") == 1
    assert "source" not in attempts(project, "broken")[-1]
    assert records(project, "broken") == records(project)


def test_a_run_that_is_begun_anew_takes_its_source_to_the_trash(project: Path) -> None:
    kept = sources(project)[0].name
    edit(project)
    done = train("fit", MINE, "resume=anew", cwd=project)
    assert done.code == 0, done.err
    assert (project / f"runs/.trash/mine-1/source/{kept}/source.json").exists()
    assert [path.name for path in sources(project)] == [attempts(project)[0]["source"]] != [kept]


def test_without_a_project_of_its_own_a_run_keeps_config_and_versions(tmp_path: Path) -> None:
    done = train("fit", "digits_mlp", "loop.max_duration=2", cwd=tmp_path)
    assert done.code == 0, done.err
    (folder,) = sources(tmp_path, "digits_mlp")
    assert json.loads((folder / "source.json").read_text())["files"] == {}


DATA_EDIT = "        self.train, self.val = Points(0, 32)", "        self.train, self.val = Points(8, 40)"
VERBS = {
    "replay": ("replay", "runs/mine", "6"),
    "replay range": ("replay", "runs/mine", "5..8", "--digests", "--json"),
    "RUN@stepN": ("validate", "ckpt=runs/mine@step3"),
    "diverge": ("diverge", "runs/mine", "runs/other", "--json"),
    "bisect": ("bisect", "runs/mine", "val/loss < 0.703", "--json"),
    "bisect train": ("bisect", "runs/mine", "train/loss < 0.7", "--json"),
    "data": ("data", "runs/mine", "3", "--show", "--json"),
    "check run": ("check", "run", "runs/mine", "--stretches", "all"),
    "validate": ("validate", "ckpt=runs/mine/checkpoints/step*"),
    "predict": ("predict", "ckpt=runs/mine/checkpoints/step8"),
}


def _leave_to_campaigns(*rows: str) -> list[Any]:
    """The rows of `VERBS`, of which some take their steps as others do, and many processes."""
    return [pytest.param(verb, marks=pytest.mark.campaign) if verb in rows else verb for verb in VERBS]


def edit_all(project: Path) -> None:
    """Edit what the model computes and what the data is."""
    edit(project)
    (project / "mine/points.py").write_text(POINTS.replace(*DATA_EDIT))


def outcome(done: Result, project: Path) -> tuple[int, str]:
    """The exit code and what was printed, without the time that it took and the folder."""
    out = re.sub(r"\(?\d+\.\d+ ?s\b|\b\d+(\.\d+)? samples/s|\"(seconds|checked)\": [^,\n]*", "TIME", done.out)
    return done.code, out.replace(str(project), "PROJECT")


@pytest.mark.parametrize("verb", _leave_to_campaigns("bisect", "bisect train", "diverge"))
def test_a_verb_gives_what_it_gave_before_the_source_was_edited(project: Path, tmp_path: Path, verb: str) -> None:
    edited = copy(project, tmp_path / "edited" / "project")
    edit_all(edited)
    before = train(*VERBS[verb], cwd=project)
    after = train(*VERBS[verb], cwd=edited)
    print(before.out, before.err, after.out, after.err)
    assert OWN not in before.err
    assert outcome(after, edited) == outcome(before, project)
    told = [line for line in after.err.splitlines() if OWN in line]
    assert all(
        ": here differs mine/layers.py (changed), mine/points.py (changed); source=project" in line for line in told
    )
    assert 1 <= len(told) <= 1 + (verb == "RUN@stepN") + (verb == "diverge")
    assert "not what" not in after.err
    if verb == "predict":
        files = [folder / "runs/mine/predictions/step8/val.jsonl" for folder in (project, edited)]
        assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("verb", _leave_to_campaigns(*VERBS.keys() - {"replay", "data", "validate"}))
def test_the_source_of_the_project_is_taken_on_demand(project: Path, verb: str) -> None:
    edit(project)
    if verb == "data":
        (project / "mine/points.py").write_text(POINTS.replace(*DATA_EDIT))
    done = train(*VERBS[verb], "source=project", cwd=project)
    print(done.out, done.err)
    assert OWN not in done.err
    told = done.err + done.out
    assert "the source is not what" in told or "source has changed" in told or "not equal" in told or verb == "data"


def validate(project: Path, *overrides: str, **more: Any) -> Result:
    return train("validate", "ckpt=runs/mine/checkpoints/step8", *overrides, cwd=project, **more)


def losses(done: Result) -> list[str]:
    assert done.code == 0, done.err
    return re.findall(r"val +([\d.]+)", done.out)


def test_of_a_project_that_is_gone_the_kept_files_are_enough(tmp_path: Path) -> None:
    project, moved, elsewhere = (tmp_path / name for name in ("project", "moved", "elsewhere"))
    write_project(project)
    assert train("fit", MINE, cwd=project).code == 0
    expected = losses(validate(project))
    elsewhere.mkdir()
    shutil.move(project / "runs", elsewhere / "runs")
    # Files beside the code are found where the project is.
    done = validate(elsewhere)
    assert losses(done) == expected
    assert f"in {elsewhere} is none" in done.err
    project.rename(moved)
    gone = validate(elsewhere)
    assert gone.code != 0
    assert "points.csv" in gone.err
    (elsewhere / "mine").mkdir()
    shutil.copy(moved / "mine/points.csv", elsewhere / "mine")
    assert losses(validate(elsewhere)) == expected


def test_each_step_is_replayed_with_the_source_of_its_own_attempt(project: Path) -> None:
    edit(project)
    done = train("fit", MINE, "loop.max_duration=12", cwd=project)
    assert done.code == 0, done.err
    edit(project, 5)
    for step, kept in ((6, "1"), (10, "3")):
        done = train("replay", "runs/mine", str(step), "--quiet", cwd=project)
        print(kept, done.out, done.err)
        assert (done.code, done.out.startswith("verified: equal at")) == (0, True)
    refused = train("replay", "runs/mine", "7..10", cwd=project)
    assert "attempt 2, which continued the finished run, began at step 8" in refused.err
    done = train("check", "run", "runs/mine", "--stretches", "all", cwd=project)
    assert done.code == 0, done.out + done.err
    # One process imports one source: that of the newest.
    done = train("validate", "ckpt=runs/mine/checkpoints/step*", cwd=project)
    assert done.code == 0, done.err
    assert "the source is not what runs/mine/checkpoints/step0 was trained with: mine/layers.py (changed)" in done.err
    found = train("bisect", "runs/mine", "val/loss < 100", "--first", "1", "--last", "11", cwd=project)
    assert "the condition holds at step 1 already" in found.err, found.err


def test_steps_of_two_sources_are_named_where_the_checkpoint_between_is_gone(project: Path) -> None:
    stop = "import os, pathlib, signal\n\npathlib.Path('stop').exists() and os.kill(os.getpid(), signal.SIGTERM)\n"
    (project / "mine/late.py").write_text(stop + LATE)
    (project / "stop").touch()
    assert train("fit", MINE, "name=two", cwd=project).code == 75
    (project / "stop").unlink()
    edit(project)
    assert train("fit", MINE, "name=two", cwd=project).code == 0
    assert not (project / "runs/two/checkpoints/step1").exists()
    reason = "attempt 2, which has another source than the one before, began at step 1: first make runs/two@step1"
    replayed = train("replay", "runs/two", "4", "--quiet", cwd=project)
    assert replayed.code == 1
    assert reason in " ".join(replayed.out.split())
    checked = train("check", "run", "runs/two", "--stretches", "all", cwd=project)
    assert checked.code == 1
    assert reason in " ".join(checked.out.split())
    # With that state each part is made with its own source.
    assert train("ckpt", "show", "runs/two@step1", cwd=project).code == 0
    assert train("replay", "runs/two", "4", "--quiet", cwd=project).out.startswith("verified: equal at 3 of 3")


def test_source_of_others_is_run_only_if_it_is_trusted(project: Path, tmp_path: Path) -> None:
    expected = losses(validate(project))
    edit(project)
    rows = (project / "runs/mine/validation/validation.jsonl").read_text()
    mine = losses(validate(project, "source=project"))
    assert (project / "runs/mine/validation/validation.jsonl").read_text() == rows
    stranger = {"XDG_STATE_HOME": str(tmp_path / "stranger")}
    refused = validate(project, **stranger)
    assert losses(refused) == mine != expected
    assert "is not signed by this user's key, so it is not run; that of the project is used, which differs in" in (
        refused.err
    )
    assert "mine/layers.py. If you trust whoever wrote it, add 'trust=[source]'." in refused.err
    assert losses(validate(project, "trust=[source]", **stranger)) == expected
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(project / "runs", elsewhere / "runs")
    refused = validate(elsewhere, **stranger)
    assert refused.code == 2
    assert "is not signed by this user's key, so it is not run" in refused.err


def test_a_damaged_source_is_reported_and_not_run(project: Path) -> None:
    edit(project)
    mine = losses(validate(project, "source=project"))
    shutil.rmtree(project / "runs/mine/other-source-validation")
    for file in (project / "runs/mine/source").rglob("net.py"):
        file.write_text("raise SystemExit('run')\n")
    done = validate(project)
    assert losses(done) == mine
    # The run's own curve stays without it.
    run = project / "runs/mine"
    [row] = map(json.loads, (run / "other-source-validation/validation.jsonl").read_text().splitlines())
    assert not (run / "validation").exists()

    def is_shown(path: str) -> bool:
        assert train("report", path, "-o", "shown.html", cwd=project).code == 0
        return f"{row['val/loss']:.6g}" in (project / "shown.html").read_text()

    assert not any(map(is_shown, ("runs/mine", "runs")))
    (run / "other-source-validation").rename(run / "validation")
    assert is_shown("runs/mine")
    assert re.search(r"the source kept in .* is damaged: files/mine/net.py is not what was kept; that of", done.err)


def test_resolvers_and_spawned_workers_have_the_source_of_the_run(project: Path) -> None:
    resolvers = "from mine.layers import FACTOR\n\n\ndef rate():\n    return FACTOR / 10\n"
    (project / "configs/resolvers.py").write_text(resolvers)
    spawns = "torch.multiprocessing.set_start_method('spawn', force=True)\n        self.train, "
    scaled = "from mine.layers import FACTOR\n\n        return self.points[index] * FACTOR"
    points = POINTS.replace("self.train, ", spawns).replace("return self.points[index]", scaled)
    (project / "mine/points.py").write_text(points)
    fit = train("fit", MINE, "name=spawned", "optimizer.lr=${rate:}", "data.num_workers=2", cwd=project, cold=True)
    assert fit.code == 0, fit.err
    edit(project)
    done = train("replay", "runs/spawned", "6", "--quiet", cwd=project, cold=True)
    assert (done.code, done.out[:8]) == (0, "verified"), done.err + done.out


@pytest.mark.parametrize("edited", [False, True])
def test_a_view_is_gone_after_the_command_and_made_only_if_something_differs(project: Path, edited: bool) -> None:
    folder = project.parent / "temporary"
    folder.mkdir()
    if edited:
        edit(project)
    done = validate(project, TMPDIR=str(folder), cold=True)
    assert done.code == 0, done.err
    assert (OWN in done.err) is edited
    assert list(folder.glob("train-source-*")) == []


def test_a_source_finds_what_lies_beside_its_project_and_what_git_ignores(project: Path) -> None:
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    (project / ".gitignore").write_text("mine/deeper.py\nruns\n")
    beside = 'TABLE = Path(__file__).resolve().parents[2] / "tables/points.csv"'
    (project / "mine/points.py").write_text(POINTS.replace('TABLE = Path(__file__).with_name("points.csv")', beside))
    (project.parent / "tables").mkdir()
    shutil.copy(project / "mine/points.csv", project.parent / "tables")
    done = train("fit", MINE, "name=beside", cwd=project)
    assert done.code == 0, done.err
    edit(project)
    done = train("replay", "runs/beside", "6", "--quiet", cwd=project)
    assert (done.code, done.out[:8]) == (0, "verified"), done.err + done.out
    assert OWN in done.err


@pytest.mark.parametrize("edited", [False, True])
def test_a_module_by_a_computed_name_is_told_where_it_is_not_that_of_the_run(project: Path, edited: bool) -> None:
    write_files(project, {"mine/plugins/__init__.py": "", "mine/plugins/one.py": "SHIFT = 0.5\n"})
    late = (
        "import importlib\n\n\ndef shift(name='one'):\n    module = importlib.import_module(f'mine.plugins.{name}')\n"
    )
    (project / "mine/late.py").write_text(late + "    return module.SHIFT\n")
    done = train("fit", MINE, "name=computed", cwd=project)
    assert done.code == 0, done.err
    if edited:
        edit(project)
    done = train("replay", "runs/computed", "6", "--quiet", cwd=project, cold=True)
    assert (done.code, done.out[:8]) == (0, "verified"), done.err + done.out
    warning = "not kept with the source, and imported from the project: mine/plugins/__init__.py, mine/plugins/one.py"
    assert (warning in done.err) is edited


def test_an_error_in_the_source_of_a_run_does_not_send_to_the_project_that_one_is_in(project: Path) -> None:
    edit(project)
    done = validate(project, "model._target_=mine.net.Other")
    assert done.code == 2
    assert "Run the command in" not in done.err


def test_a_script_that_runs_a_command_stays_the_main_module(project: Path) -> None:
    script = project / "go.py"
    script.write_text(
        "import sys\nfrom trainer_cli.running import validate\n"
        "code = validate(['ckpt=runs/mine/checkpoints/step8'])\n"
        "print(code, sys.modules['__main__'].__file__, sys.modules['mine.layers'].FACTOR)\n"
    )
    edit(project)
    done = subprocess.run([sys.executable, "go.py"], cwd=project, capture_output=True, text=True, check=False)
    assert OWN in done.stderr
    assert done.stdout.splitlines()[-1] == f"0 {script} 1", done.stderr


def test_a_view_that_does_not_fit_on_the_disk_is_an_error_with_a_cure_and_leaves_nothing(project: Path) -> None:
    (project.parent / "temporary").mkdir()
    edit(project)
    script = project / "go.py"
    script.write_text(
        "import resource, sys\n"
        "from trainer_cli.commands import main\n"
        "from trainer_cli.origin.kept_source import KeptSource\n"
        "write = KeptSource.write_view\n"
        "def write_on_full_disk(*args, **more):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (10, 1 << 30))\n"
        "    try:\n"
        "        write(*args, **more)\n"
        "    finally:\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))\n"
        "KeptSource.write_view = write_on_full_disk\n"
        "sys.argv = ['train', 'validate', 'ckpt=runs/mine/checkpoints/step8']\n"
        "sys.exit(main())\n"
    )
    environment = {**os.environ, "TMPDIR": str(project.parent / "temporary")}
    done = subprocess.run([sys.executable, "go.py"], cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "cannot be written to a temporary folder: [Errno 27]" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((project.parent / "temporary").iterdir()) == []


def test_a_source_that_cannot_be_searched_ends_no_training(project: Path) -> None:
    late = f"def shift():\n    if 0:\n        import {'x' * 300}\n    return 0.5\n"
    (project / "mine/late.py").write_text(late)
    done = train("fit", MINE, "name=odd", cwd=project)
    assert done.code == 0, done.err
    assert records(project, "odd") == records(project)


def test_two_ranks_keep_one_source_and_replay_with_it(project: Path) -> None:
    done = train("fit", MINE, "name=ranks", "parallel.processes_per_node=2", "parallel.strategy=ddp", cwd=project)
    assert done.code == 0, done.err
    assert len(sources(project, "ranks")) == 1
    edit(project)
    done = train("replay", "runs/ranks", "6", "--quiet", cwd=project)
    assert (done.code, done.out[:8]) == (0, "verified"), done.err + done.out
    assert done.err.count(OWN) == 1


SENTENCE = "runs/mine is a finished run of the same config, source and data; its best val/loss is "


def fit_anew(*words: str, cwd: Path) -> str:
    """Train to the end; the messages."""
    done = train("fit", *words, cwd=cwd)
    assert done.code == 0, done.err
    return done.err


def test_a_new_run_says_which_finished_run_it_repeats(project: Path) -> None:
    assert SENTENCE in fit_anew(MINE, "name=same", cwd=project)


@pytest.mark.parametrize("word", ["seed=7", "loop.max_duration=6", "optimizer.lr=0.2"])
def test_a_run_of_another_config_says_nothing(word: str, project: Path) -> None:
    assert "is a finished run of the same" not in fit_anew(MINE, "name=unlike", "resume=anew", word, cwd=project)


def test_a_job_of_a_sweep_says_it_too(project: Path) -> None:
    swept = train("fit", "-m", MINE, "name=swept", "seed=0,1", cwd=project)
    assert swept.code == 0, swept.err
    logs = {path.stem: path.read_text() for path in (project / "runs/swept/sweep/.jobs").glob("*.log")}
    assert [key for key, text in logs.items() if SENTENCE in text] == ["seed=0"]


def test_a_run_that_is_begun_anew_is_not_its_own_repetition(project: Path) -> None:
    assert "is a finished run of the same" not in fit_anew(MINE, "resume=anew", cwd=project)
    edit(project)
    assert "is a finished run of the same" not in fit_anew(MINE, "name=edited", cwd=project)


def test_predictions_of_edited_source_are_not_taken_for_those_of_the_run(project: Path) -> None:
    words = ("predict", "ckpt=runs/mine@latest")
    done = train(*words, cwd=project)
    assert done.code == 0, done.err
    (file,) = (project / "runs/mine/predictions").rglob("val.jsonl")
    of_the_run = file.read_bytes()
    edit(project)
    refused = train(*words, "source=project", cwd=project)
    assert refused.code == 2
    assert "predictions of 'val' that were made with another source" in refused.err
    done = train(*words, cwd=project)
    assert done.code == 0, done.err
    assert "is complete already" in done.err
    done = train(*words, "source=project", "predict.folder=edited", cwd=project)
    assert done.code == 0, done.err
    edit(project, 4)
    refused = train(*words, "source=project", "predict.folder=edited", cwd=project)
    assert refused.code == 2, "edited once more"
    assert file.read_bytes() == of_the_run
    (edited,) = (project / "edited").rglob("val.jsonl")
    assert edited.read_bytes() != of_the_run
