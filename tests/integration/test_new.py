"""`train new`: what it makes trains, tests and resumes untouched; and it never writes over anything."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from command import ROOT, names, records, train

from trainer_cli.commands import new
from trainer_cli.commands.command_line import main
from trainer_cli.commands.new import make_project, package_name
from trainer_cli.errors import UserError

FILES = {
    ".gitignore",
    "AGENTS.md",
    "README.md",
    "configs/data/spiral.yaml",
    "configs/experiment/shapes.yaml",
    "configs/model/large.yaml",
    "configs/model/small.yaml",
    "configs/train.schema.json",
    "pyproject.toml",
    "shapes/__init__.py",
    "shapes/data.py",
    "shapes/model.py",
    "tests/test_shapes.py",
}


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that nobody has touched."""
    folder = tmp_path_factory.mktemp("new") / "shapes"
    make_project(folder, "shapes")
    return folder


def test_it_makes_a_whole_project_and_says_what_to_do(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "shapes"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "made shapes, with the package and experiment shapes", "next:", "  cd shapes",
        "  train fit shapes", "  python -m pytest",
    ]  # fmt: skip
    assert files(empty_folder) == {f"shapes/{name}" for name in FILES}
    assert not [path for path in (empty_folder / "shapes").rglob("*") if b"@" in path.name.encode()]


def test_the_experiment_has_the_name_of_the_project(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "alpha"]) == 0
    assert "  train fit alpha\n" in capsys.readouterr().out
    made = [file.relative_to(empty_folder / "alpha").as_posix() for file in (empty_folder / "alpha").rglob("*alpha*")]
    assert sorted(made) == ["alpha", "configs/experiment/alpha.yaml", "tests/test_alpha.py"]
    texts = {file: file.read_text() for file in (empty_folder / "alpha").rglob("*") if file.is_file()}
    assert [str(file) for file, text in texts.items() if "mine" in text.replace("determine", "")] == []
    monkeypatch.chdir("alpha")
    assert main(["config", "experiment=alpha"]) == 0
    assert "name: alpha\n" in capsys.readouterr().out


def test_no_mark_of_a_template_is_left(project: Path) -> None:
    texts = {name: (project / name).read_text() for name in FILES - {"configs/train.schema.json"}}
    assert not [name for name, text in texts.items() if "@P" in text or "@T" in text]


@pytest.mark.parametrize("written", ["runs/shapes/config.yaml", "shapes-samples/step1.png", "report.html"])
def test_git_ignores_what_commands_write(project: Path, written: str) -> None:
    lines = (project / ".gitignore").read_text().splitlines()
    folder, _, _ = written.rpartition("/")
    names = [f"/{written}", *(f"/{part}/" for part in folder.split("/")[:1])]
    assert any(fnmatch(name, line) for name in names for line in lines if line.startswith("/"))


def test_it_trains_finds_itself_done_and_is_validated(project: Path) -> None:
    done = train("fit", "+experiment=shapes", cwd=project)
    assert done.code == 0, done.err
    run = project / "runs/shapes"
    assert len(names(run / "checkpoints")) > 1
    scores = [one["val/accuracy"] for one in records(run / "metrics.jsonl") if "val/accuracy" in one]
    assert scores[-1] > 0.9
    assert "is finished at step" in train("fit", "+experiment=shapes", cwd=project).out
    result = train("validate", "ckpt=runs/shapes/checkpoints/step*", cwd=project)
    assert (result.code, "val" in result.out) == (0, True), result.err


@pytest.mark.addon("predict")
def test_it_is_predicted_from_as_it_is(project: Path) -> None:
    train("fit", "+experiment=shapes", "name=predicted", "loop.max_duration=2", cwd=project)
    done = train("predict", "ckpt=runs/predicted@latest", cwd=project)
    assert done.code == 0, done.err
    (file,) = (project / "runs/predicted/predictions").rglob("*.jsonl")
    assert set(records(file)[0]) == {"sample", "scores"}


def test_its_other_model_is_chosen_by_name(project: Path) -> None:
    done = train("fit", "+experiment=shapes", "model=large", "name=large", "loop.max_duration=3st", cwd=project)
    assert done.code == 0, done.err


def test_it_is_shown_and_composed_first_class(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    assert main(["list", "experiment"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("* shapes      Classify points by the arm")
    assert main(["config", "+experiment=shapes"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["_target_"] == "shapes.model.Net"


def test_it_passes_ruff_with_default_rules(project: Path) -> None:
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--isolated", "--no-cache", "."],
            cwd=project, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout


def test_its_pyproject_names_it_and_needs_us(project: Path) -> None:
    content = tomllib.loads((project / "pyproject.toml").read_text())
    assert content["project"]["name"] == "shapes"
    assert content["project"]["dependencies"][0].startswith("trainer-cli")
    assert content["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["shapes"]


def test_it_can_be_built(project: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("shapes-*.whl")
    assert "shapes/model.py" in zipfile.ZipFile(wheel).namelist()


def test_every_class_and_function_of_it_reports_its_purpose(project: Path) -> None:
    for name in ("shapes/__init__.py", "shapes/data.py", "shapes/model.py", "tests/test_shapes.py"):
        tree = ast.parse((project / name).read_text())
        assert ast.get_docstring(tree), name
        assert [one.name for one in tree.body if isinstance(one, ast.ClassDef) and not ast.get_docstring(one)] == []


def test_the_commands_of_its_readme_can_be_run(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that train are composed; that a project trains and passes its tests is held above."""
    monkeypatch.chdir(project)
    block = (project / "README.md").read_text().split("```sh\n")[1].split("```")[0]
    verbs = []
    for line in block.splitlines():
        command, verb, *arguments = [*shlex.split(line, comments=True), ""]
        arguments = arguments[:-1]
        verbs.append(verb if command == "train" else command)
        if verb in ("fit", "config"):
            assert main(["config", *arguments]) == 0, line
        elif verb == "list":
            assert main([verb, *arguments]) == 0
    assert verbs == ["fit", "fit", "validate", "config", "list", "python"]
    assert "\n* shapes " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("shapes", "shapes"),
        ("My Shapes", "my_shapes"),
        ("my-shapes.v2", "my_shapes_v2"),
        ("2fast", "project_2fast"),
        ("_hidden_", "hidden"),
        ("Modèle", "modele"),
        ("class", "class_project"),
        ("match", "match_project"),
        ("null", "null_project"),
        ("True", "true_project"),
        ("nan", "nan_project"),
        ("json", "json_project"),
        ("test", "test_project"),
        ("torch", "torch_project"),
        ("trainer-cli", "trainer_cli_project"),
        ("Torch", "torch_project"),
        ("tests", "tests_project"),
        ("configs", "configs_project"),
        ("a b'c\"d;e", "a_b_c_d_e"),
    ],
)
def test_a_directory_of_any_name_gets_a_package_that_can_be_imported(name: str, package: str) -> None:
    assert package_name(name, chosen=False) == package


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("torch", "an installed package"),
        ("class", "a word of Python"),
        ("random", "a module of Python"),
        ("tests", "a folder of the project itself"),
        ("inf", "a value of YAML"),
    ],
)
def test_a_chosen_name_that_is_taken_is_refused_with_another(
    empty_folder: Path, capsys: pytest.CaptureFixture[str], name: str, why: str
) -> None:
    assert main(["new", "work", "--name", name]) == 2
    error = capsys.readouterr().err
    assert f"{name!r} is {why}\n  --> --name\n" in error
    assert f"--name {name}_project" in error
    assert list(empty_folder.iterdir()) == []


def test_a_name_of_which_nothing_can_be_used_says_what_to_do(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "模型"]) == 2
    assert "--name my_project" in capsys.readouterr().err
    assert main(["new", "模型", "--name", "moxing"]) == 0
    assert (empty_folder / "模型" / "moxing" / "model.py").is_file()


def test_a_directory_with_an_odd_name_trains(tmp_path: Path) -> None:
    folder = tmp_path / "2 fast = {a,b} [x]"
    make_project(folder, package_name(folder.name, chosen=False))
    done = train("fit", "+experiment=project_2_fast_a_b_x", "loop.max_duration=3st", cwd=folder)
    assert done.code == 0, done.err


# -- nothing is overwritten, and nothing half-made is left -----------------------------------------------------------


def _occupied(folder: Path) -> None:
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")


def _hidden(folder: Path) -> None:
    folder.mkdir()
    (folder / ".git").mkdir()


def _file(folder: Path) -> None:
    folder.write_text("mine")


def _dangling(folder: Path) -> None:
    folder.symlink_to("nowhere")


@pytest.mark.parametrize("make", [_occupied, _hidden, _file, _dangling])
def test_what_is_there_is_never_overwritten(
    empty_folder: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], None]
) -> None:
    make(empty_folder / "shapes")
    before = sorted((path.as_posix(), path.lstat().st_mtime_ns) for path in empty_folder.rglob("*"))
    assert main(["new", "shapes"]) == 2
    assert "nothing is overwritten\nhelp: Name a new directory.\n" in capsys.readouterr().err
    assert sorted((path.as_posix(), path.lstat().st_mtime_ns) for path in empty_folder.rglob("*")) == before


def test_an_empty_directory_is_filled_and_stays_the_same_one(empty_folder: Path) -> None:
    inode = empty_folder.stat().st_ino
    assert main(["new", ".", "--name", "shapes"]) == 0
    assert files(empty_folder) == FILES
    assert empty_folder.stat().st_ino == inode
    assert Path.cwd().is_dir()


def test_directories_above_are_made(empty_folder: Path) -> None:
    assert main(["new", "deep/down/shapes"]) == 0
    assert (empty_folder / "deep/down/shapes/README.md").is_file()


@pytest.mark.parametrize("exists", [False, True])
def test_a_failure_midway_leaves_nothing(empty_folder: Path, monkeypatch: pytest.MonkeyPatch, exists: bool) -> None:
    folder = empty_folder / "shapes"
    if exists:
        folder.mkdir()
    made = dict(new._render_files("shapes"))
    # The last file lies below what is already a file: the disk refuses it.
    made[Path("README.md/more")] = "x"
    monkeypatch.setattr(new, "_render_files", lambda package: made.items())
    with pytest.raises(UserError, match=r"cannot make .*shapes: (Not a directory|File exists)"):
        make_project(folder, "shapes")
    assert sorted(empty_folder.rglob("*")) == ([folder] if exists else [])


def test_a_directory_that_cannot_be_written_is_one_line(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (empty_folder / "file").write_text("")
    assert main(["new", "file/shapes"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: cannot make file/shapes: ")
    assert error.count("\n") == 1


def test_permissions_follow_the_umask(empty_folder: Path) -> None:
    before = os.umask(0o027)
    try:
        make_project(empty_folder / "shapes", "shapes")
    finally:
        os.umask(before)
    assert (empty_folder / "shapes").stat().st_mode & 0o777 == 0o750
    assert (empty_folder / "shapes/README.md").stat().st_mode & 0o777 == 0o640


def test_no_template_is_taken_for_code_of_ours() -> None:
    scaffold = ROOT / "trainer_cli" / "scaffold"
    assert {path.suffix for path in scaffold.rglob("*") if path.is_file()} == {".tmpl"}
