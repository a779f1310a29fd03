"""Sweeps, restarts and requeues train what was submitted: later edits change nothing until they are asked for."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import textwrap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from command import (
    CODE,
    PROJECT,
    ROOT,
    Result,
    fork_jobs,
    hold,
    make_project,
    records,
    running,
    train,
    weights,
    write_files,
)
from ranks import IMPORTED

from trainer_cli.addons.jobs.fork_server import ProcessStarter
from trainer_cli.addons.jobs.supervise import Child
from trainer_cli.commands.command_line import main
from trainer_cli.origin.keep import keep_project
from trainer_cli.origin.source_files import list_sources
from trainer_cli.ranks import variables_of_rank

pytestmark = pytest.mark.slow

# The weights depend on each Python file beside the model. A training moves what it finds in `.edits` into the project,
# and imports a module after that.
COUNTED = CODE.replace(
    "fetched = 0\n",
    """fetched = 0
HERE = os.path.dirname(__file__)
FILES = len([name for name in os.listdir(HERE) if name.endswith(".py")])


def take_edits():
    if fetched == 1:
        with open(os.path.join(HERE, "written.txt"), "a") as file:
            file.write("x")
    if fetched > 60:
        from mine.late import STATE

        assert STATE == "submitted"
    if fetched > 50 and os.environ.get("RANK", "0") == "0" and os.path.exists(".edits"):
        os.rename(".edits", ".edited")
        shutil.copytree(".edited", ".", dirs_exist_ok=True)
        if os.path.exists(".edited/kill"):
            os.kill(os.getpid(), signal.SIGKILL)
""",
)
COUNTED = COUNTED.replace("import os\n", "import os\nimport shutil\nimport signal\n")
COUNTED = COUNTED.replace("        fetched += 1\n", "        fetched += 1\n        take_edits()\n")
COUNTED = COUNTED.replace("- y) ** 2)", "- y - FILES) ** 2)")
FIT = ("fit", "experiment=mine", "loggers=jsonl", "loop.max_duration=20", "checkpoint.ephemeral_save_interval=3")
SWEEP = (*FIT, "-m", "seed=1,2")
KEPT = "the source is the one that was submitted: here differs "
RAN = "the source is the one that the run keeps (runs/mine): here differs "
EDITED = {
    "mine/parts.py": COUNTED.replace("FILES) ** 2", "FILES).abs() ** 3"),
    "mine/late.py": "STATE = 'edited'",
    "configs/model/line.yaml": "][",
    "mine/new.py": "",
}
NARROW = "_target_: mine.parts.Line\nwidth: 4\n"
SGD = "_target_: torch.optim.SGD\nlr: 0.1\n"
SHIPPED = ROOT / "configs"
EXPERIMENT = PROJECT["configs/experiment/mine.yaml"]


def make(root: Path, edits: Mapping[str, str] = MappingProxyType({})) -> Path:
    """A project; its first training edits it in the middle."""
    assert (COUNTED.count("take_edits()"), COUNTED.count("- FILES")) == (2, 1)
    files = {"mine/parts.py": COUNTED, "mine/late.py": "STATE = 'submitted'"}
    return make_project(root, **files, **{f".edits/{name}": text for name, text in edits.items()})


def run(project: Path, *arguments: str) -> int:
    """Run a command whose jobs are forks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        fork_jobs(patch)
        return main([*arguments])


def trained(project: Path, run: str = "runs/mine") -> bytes:
    return weights(project / run / "checkpoints/step20")


def of_sweep(project: Path) -> list[bytes]:
    return [trained(project, f"runs/mine/sweep/seed={seed}") for seed in (1, 2)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that is not edited, with a run and a sweep."""
    project = make(tmp_path_factory.mktemp("straight"))
    assert train(*FIT, cwd=project).code == 0
    assert run(project, *SWEEP) == 0
    return project


@pytest.mark.parametrize("submit", [(), ("--submit", "local")], ids=["children", "submitit"])
def test_an_edit_after_the_submission_changes_no_run_of_a_sweep(
    submit: tuple[str, ...], straight: Path, tmp_path: Path
) -> None:
    if submit:
        pytest.importorskip("submitit")
    project = make(tmp_path, EDITED)
    assert run(project, *SWEEP, *submit) == 0
    assert of_sweep(project) == of_sweep(straight)
    environment = json.loads((project / "runs/mine/sweep/seed=2/environment.json").read_text())
    assert environment["project_root"] == str(project)
    # What code writes beside itself is in the project.
    assert (project / "mine/written.txt").read_text() == "xx"
    texts = [file.read_text() for file in (project / "runs/mine/sweep").rglob("*_log.out" if submit else ".jobs/*.log")]
    differs = "configs/model/line.yaml (changed), mine/late.py (changed), mine/parts.py (changed); source=project takes"
    assert sum(f"{KEPT}{differs} what is here" in text for text in texts) == 1


def test_an_edit_between_the_start_of_a_job_and_its_imports_changes_nothing(straight: Path, tmp_path: Path) -> None:
    edit = """
        import shutil
        from pathlib import Path

        if Path(".edits").exists() and Path("runs/mine/sweep/.jobs/submitted.json").exists():
            shutil.copytree(Path(".edits").rename(".edited"), ".", dirs_exist_ok=True)
        """
    project = make(tmp_path, EDITED)
    (project / "mine/__init__.py").write_text(textwrap.dedent(edit))
    assert run(project, *SWEEP[:-1], "seed=range(1,2)") == 0
    assert (project / "mine/parts.py").read_text() == EDITED["mine/parts.py"]
    assert trained(project, "runs/mine/sweep/seed=1") == of_sweep(straight)[0]


def test_an_error_in_submitted_code_names_the_files_of_the_project(tmp_path: Path) -> None:
    project = make(tmp_path)
    (project / "mine/parts.py").write_text(COUNTED.replace("x, y = batch", "x, z = batch"))
    assert run(project, *SWEEP[:-1], "seed=range(1,2)") == 1
    (log,) = (project / "runs/mine/sweep/.jobs").glob("*.log")
    assert f'File "{project}/mine/parts.py", line' in log.read_text()
    assert "train-source-" not in log.read_text()


def test_the_same_sweep_again_takes_the_project_or_on_demand_what_was_submitted(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = make(tmp_path)
    assert run(project, *SWEEP[:-1], "seed=1,5", "loop.max_duration=1") == 0
    (project / "mine/parts.py").write_text(EDITED["mine/parts.py"])
    capsys.readouterr()
    assert run(project, *SWEEP, "source=run") == 0
    assert of_sweep(project) == of_sweep(straight)
    assert "the source is not what" not in capsys.readouterr().err
    # Without source=run it is what is here now.
    assert run(project, *SWEEP[:-1], "seed=2,3") == 0
    said = "the source is not what runs/mine/sweep was trained with: mine/parts.py (changed); source=run goes on with"
    assert said in capsys.readouterr().err
    assert len(list((project / "runs/mine/sweep/.jobs/source").iterdir())) == 2
    source = json.loads((project / "runs/mine/sweep/seed=3/summary.json").read_text())["attempts"][0]["source"]
    kept = project / f"runs/mine/sweep/seed=3/source/{source}/files/mine/parts.py"
    assert kept.read_text() == EDITED["mine/parts.py"]


def test_with_source_project_each_run_takes_what_it_finds(straight: Path, tmp_path: Path) -> None:
    project = make(tmp_path, {"mine/parts.py": EDITED["mine/parts.py"]})
    assert run(project, *SWEEP, "source=project") == 0
    assert [a == b for a, b in zip(of_sweep(project), of_sweep(straight), strict=True)] == [True, False]


def test_a_source_that_another_user_has_submitted_is_not_run(straight: Path, tmp_path: Path) -> None:
    refused = train(*SWEEP[:-1], "seed=4,5", "source=run", cwd=straight, XDG_STATE_HOME=str(tmp_path))
    assert refused.code == 2
    assert "is not signed by this user's key, so it is not run" in refused.err


@pytest.mark.parametrize(
    "ranks",
    [
        (),
        # Slow, because it starts four processes.
        pytest.param(("parallel.processes_per_node=2", "parallel.strategy=ddp"), marks=pytest.mark.campaign),
    ],
)
def test_a_restart_after_a_kill_trains_what_the_first_attempt_did(
    ranks: tuple[str, ...], straight: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    project = make(tmp_path / ".edited", {**EDITED, "kill": ""})
    if ranks:
        straight = make(tmp_path / "straight")
        assert run(straight, *FIT, *ranks) == 0
    assert run(project, *FIT, *ranks, "restarts.max=2", "restarts.backoff=null") == 0
    assert len(json.loads((project / "runs/mine/summary.json").read_text())["attempts"]) == 2
    assert trained(project) == trained(straight)
    assert capfd.readouterr().err.count(KEPT) == 1
    # Where values were set is said of the project.
    places = json.loads((project / "runs/mine/provenance.json").read_text())
    assert places["model.width"] == "configs/model/line.yaml:3"


def test_a_restart_takes_the_configs_of_a_search_path_in_the_project(straight: Path, tmp_path: Path) -> None:
    edits = {"more/model/line.yaml": NARROW, "kill": ""}
    project = make(tmp_path, edits)
    write_files(project, {"configs/wide.yaml": "defaults: [config, _self_]\nhydra: {searchpath: ['file://more']}\n"})
    (project / "more").mkdir()
    (project / "configs/model").rename(project / "more/model")
    assert run(project, *FIT, "--config-name=wide", "restarts.max=2", "restarts.backoff=null") == 0
    assert trained(project) == trained(straight)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run that the first start of job 7 of Slurm has begun."""
    project = make(tmp_path_factory.mktemp("stopped"))
    held = hold(project, "train")
    with running(*FIT, cwd=project, SLURM_JOB_ID="7") as command:
        command.reach("train")
        command.signal(signal.SIGUSR1)
        command.notice()
        held.unlink()
        assert command.end().code == 75
    return project


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        pytest.param({"mine/parts.py": EDITED["mine/parts.py"]}, f"{RAN}mine/parts.py (changed)", id="code"),
        pytest.param({"configs/model/line.yaml": NARROW}, "model.width: 8 -> 4", id="fixed key"),
        pytest.param(
            {"configs/experiment/mine.yaml": EXPERIMENT.replace("eval_interval: 16st", "eval_interval: 4st")},
            "loop.eval_interval: 16st -> 4st",
            id="free key",
        ),
        pytest.param({"configs/optimizer/adam.yaml": SGD}, "optimizer._target_: ", id="new file"),
        pytest.param(
            {"configs/experiment/mine.yaml": EXPERIMENT.replace("max_duration: 40st", "max_duration: 9st")},
            "",
            id="key that an override sets",
        ),
    ],
)  # fmt: skip
def test_a_requeued_job_trains_what_its_first_start_did(
    edits: dict[str, str], said: str, straight: Path, stopped: Path, tmp_path: Path
) -> None:
    project = shutil.copytree(stopped, tmp_path / "project")
    write_files(project, edits)
    done = train(*FIT, cwd=project, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1")
    assert done.code == 0, done.err
    lines = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert len(lines) == bool(said), lines
    assert said in done.err
    assert trained(project) == trained(straight)
    assert records(project / "runs/mine/metrics.jsonl") == records(straight / "runs/mine/metrics.jsonl")
    places = [json.loads((folder / "runs/mine/provenance.json").read_text()) for folder in (straight, project)]
    assert places[0] == places[1]


@pytest.mark.parametrize(
    ("change", "env"),
    [
        pytest.param((), {"SLURM_JOB_ID": "7"}, id="typed again"),
        pytest.param((), {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, id="another job"),
        pytest.param(("source=project",), {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, id="asked for"),
    ],
)
def test_a_person_trains_what_is_here(
    change: tuple[str, ...], env: dict[str, Any], stopped: Path, tmp_path: Path
) -> None:
    project = shutil.copytree(stopped, tmp_path / "project")
    write_files(project, {"configs/model/line.yaml": NARROW})
    done = train(*FIT, *change, cwd=project, **env)
    assert done.code == 2
    assert re.search(r"refused +model.width +8 -> 4", done.err), done.err


def test_another_command_of_a_requeued_job_takes_its_own_overrides(stopped: Path, tmp_path: Path) -> None:
    project = shutil.copytree(stopped, tmp_path / "project")
    write_files(project, {"mine/parts.py": EDITED["mine/parts.py"]})
    done = train(*FIT, "loop.max_duration=8", cwd=project, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1")
    assert done.code == 0, done.err
    assert json.loads((project / "runs/mine/summary.json").read_text())["step"] == 8
    assert f"{RAN}mine/parts.py (changed)" in done.err


def on_two_ranks(project: Path, *arguments: str, **env: str) -> list[Result]:
    """Run a command as torchrun starts it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {**variables_of_rank(0, 2, port), "TORCHELASTIC_USE_AGENT_STORE": "False", **env}
    with ThreadPoolExecutor(2) as pool:
        ranks = [{**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        return [*pool.map(lambda rank: train(*arguments, cwd=project, imports=IMPORTED, **rank), ranks)]


@pytest.mark.campaign
def test_ranks_that_are_started_again_train_what_their_first_start_did(tmp_path: Path) -> None:
    command, launch = (*FIT, "parallel.strategy=ddp", "parallel.timeout=10s"), {"TORCHELASTIC_RUN_ID": "none"}
    straight = make(tmp_path / "straight")
    assert [rank.code for rank in on_two_ranks(straight, *command)] == [0, 0]
    edited = {**EDITED, "configs/model/line.yaml": NARROW, "kill": ""}
    del edited["mine/new.py"]
    project = make(tmp_path / "edited", edited)
    assert 0 not in {rank.code for rank in on_two_ranks(project, *command, **launch)}
    again = on_two_ranks(project, *command, **launch, TORCHELASTIC_RESTART_COUNT="1")
    assert [rank.code for rank in again] == [0, 0], again
    assert again[0].err.count(f"{RAN}mine/late.py (changed), mine/parts.py (changed)") == 1
    assert again[0].err.count("model.width: 8 -> 4") == 1
    assert trained(project) == trained(straight)


def test_a_job_of_a_sweep_that_slurm_starts_again_trains_what_was_submitted(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make(tmp_path, {**EDITED, "kill": ""})
    commands: list[Sequence[str]] = []
    monkeypatch.chdir(project)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    fork_jobs(monkeypatch)
    start = ProcessStarter.start

    def start_noted(starter: ProcessStarter, words: Sequence[str], *given: Any, **named: Any) -> Any:
        commands.append(words)
        return start(starter, words, *given, **named)

    monkeypatch.setattr(ProcessStarter, "start", start_noted)
    assert main([*SWEEP[:-1], "seed=range(1,2)"]) == 1
    (words,) = commands[:]
    # As the function does that runs in a job of submitit.
    with Child() as child:
        assert child.run(words, {**os.environ, "SLURM_RESTART_COUNT": "1"}) == 0
    assert trained(project, "runs/mine/sweep/seed=1") == of_sweep(straight)[0]


def test_a_fit_without_restarts_keeps_nothing_more(
    straight: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(straight)
    monkeypatch.setattr("trainer_cli.processes.fit.keep_project", lambda *_: pytest.fail("the project was kept"))
    assert main([*FIT, f"run_dir={tmp_path / 'plain'}"]) == 0


FILES = ("net.py", "lib/part.py", "lib/generated.py", "configs/a/b.yaml", "runs/x/source/0123456789abcdef/files/net.py")


@pytest.mark.parametrize("git", [True, False])
def test_what_is_kept_of_a_project_are_its_python_files_and_configs(git: bool, tmp_path: Path) -> None:
    for name in (*FILES, ".hidden/net.py", "venv/site-packages/lib.py", "other.yaml", "data.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / ".gitignore").write_text("generated.py\n.hidden\n")
    expected = {*FILES[:-1]} - ({"lib/generated.py"} if git else set())
    if git:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert {*list_sources(tmp_path, ["configs"])} == expected
    folder = keep_project(tmp_path / "runs/kept", tmp_path, [tmp_path / "configs"])
    assert folder is not None
    kept = {path.relative_to(folder / "files").as_posix() for path in (folder / "files").rglob("*") if path.is_file()}
    assert kept == expected
    not_kept = json.loads((folder / "source.json").read_text())["not_kept"]
    assert not_kept == ({"lib/generated.py": "ignored by git"} if git else {})


def test_what_is_kept_of_a_project_in_git(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def git(folder: str, *words: str) -> None:
        (tmp_path / folder).mkdir(exist_ok=True)
        options = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
        subprocess.run(["git", "-C", str(tmp_path / folder), *options, *words], check=True, capture_output=True)

    for repository in ("library", "project"):
        git(repository, "init", "-q")
        write_files(tmp_path / repository, {"code/tracked.py": "", "configs/a.yaml": "", "data.csv": ""})
        git(repository, "add", ".")
        git(repository, "commit", "-qm", "First")
    git("project", "submodule", "add", str(tmp_path / "library"), "code/sub")
    git("project/cloned", "clone", str(tmp_path / "library"), ".")
    root = tmp_path / "project"
    new = {f"{folder}new.py": "" for folder in ("", "folder/", "code/sub/", "cloned/")}
    write_files(root, {**new, "more/b.yaml": "", "other/c.yaml": "", "code/ignored.py": "", ".gitignore": "ignored.py"})
    (root / "code/sub/code/tracked.py").unlink()
    folder = keep_project(tmp_path, root, [root / "configs", root / "more", tmp_path / "outside", SHIPPED])
    assert folder is not None
    facts = json.loads((folder / "source.json").read_text())
    assert {*facts["files"]} == {*new, "code/tracked.py", "cloned/code/tracked.py", "configs/a.yaml", "more/b.yaml"}
    assert facts["not_kept"] == {
        "code/ignored.py": "ignored by git",
        "code/sub/code/tracked.py": "No such file or directory",
    }
    said = f"configs outside of the project are not kept, so edits of them count: {tmp_path / 'outside'}"
    assert [record.message for record in caplog.records] == [said]


def test_a_project_that_cannot_be_kept_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "net.py").write_text("")
    (tmp_path / "kept").write_text("a file where a folder should be")
    assert keep_project(tmp_path / "kept", tmp_path, [tmp_path / "configs"]) is None
    assert "the source is not kept, so edits count until the last run has started" in caplog.text
