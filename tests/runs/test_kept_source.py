"""The source that a run keeps: written whole and once, read only as it was written, and never as code of others."""

from __future__ import annotations

import json
import os
import subprocess
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dying_disk import Died, die_at

from trainer_cli.files import durable
from trainer_cli.origin import source_files
from trainer_cli.origin.kept_source import DamagedSourceError, KeptSource, SourceFacts
from trainer_cli.origin.source_files import add_imports, find_ignored, find_import_roots
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.user_key import is_signed, sign

FACTS = SourceFacts("/project", [""], "3.11.7", {"torch": "2"}, {"train": {"0": "abc"}}, {"old.py": "ignored by git"})
FILES = {"parts.py": b"x = 1\n", "mine/__init__.py": b"", "mine/deep/net.py": b"y = 2\n"}
CONFIG = "name: x\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "run").mkdir()
    return RunDir(tmp_path / "run")


def keep(run: RunDir, **more: Any) -> Path:
    given: dict[str, Any] = {"facts": FACTS, "files": FILES, "config": CONFIG, "values": {"seed": 1}}
    return run.source_folder / KeptSource.write(run, **{**given, **more})


def test_a_source_is_read_as_it_was_written(run: RunDir) -> None:
    source = KeptSource.read(keep(run))
    assert (source.facts, source.files, source.config, source.is_own) == (FACTS, FILES, CONFIG, True)


def test_the_same_source_is_written_once_and_any_other_beside_it(run: RunDir) -> None:
    folder = keep(run)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    # Another name or length of the run is no other source.
    assert keep(run, config="name: y\n") == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    others = [keep(run, files={**FILES, "parts.py": b"x = 2\n"}), keep(run, values={"seed": 2})]
    assert len({folder, *others}) == 3
    assert sorted(run.source_folder.iterdir()) == sorted([folder, *others])


def test_a_run_that_starts_again_at_step_0_keeps_the_config_that_makes_step_1(run: RunDir) -> None:
    folder = keep(run)
    assert keep(run, config="name: y\n", begins=True) == folder
    assert KeptSource.read(folder).config == "name: y\n"
    before = folder.stat().st_ino
    assert keep(run, config="name: y\n", begins=True) == folder
    assert folder.stat().st_ino == before
    assert list(run.source_folder.iterdir()) == [folder]


def test_every_file_and_folder_is_synced_before_the_source_has_its_name(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync, rename = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def note_rename(old: Any, new: Any) -> None:
        synced.append(f"renamed to {new}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_rename)
    folder = keep(run)
    renamed = synced.index(f"renamed to {folder}")
    below = {path.split(f"/{folder.name}", 2)[-1].lstrip("/") for path in synced[:renamed] if ".part" in path}
    expected = {str(path.relative_to(folder)) for path in folder.rglob("*")} | {""}
    assert below >= expected
    assert synced[renamed + 1 :] == [str(run.source_folder), str(run.path)]


@pytest.mark.parametrize("at", range(1, 24))
def test_a_process_that_dies_while_it_keeps_a_source_leaves_none_or_all_of_it(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    sign("the key is there")
    with monkeypatch.context() as patch:
        die_at(patch, at, ("mkdir", "fsync", "replace", "rename", "unlink", "rmdir"))
        with suppress(Died):
            keep(run)
    # As when a process ends.
    for descriptor in list(durable._private):
        durable.close_private(descriptor)
    whole = list(run.source_folder.glob("[0-9a-f]*"))
    assert all(KeptSource.read(folder).files == FILES for folder in whole)
    # The next one keeps it, and removes what is left.
    folder = keep(run)
    assert KeptSource.read(folder).files == FILES
    assert list(run.source_folder.iterdir()) == [folder]


def edit_json(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / "source.json").read_text())
        change(content)
        (folder / "source.json").write_text(json.dumps(content))

    return edit


def name_file(path: str) -> Callable[[Path], object]:
    return edit_json(lambda content: content["files"].update({path: "0" * 64}))


def replace_by_link(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        moved = folder.parent.parent / "elsewhere"
        (folder / name).rename(moved)
        (folder / name).symlink_to(moved)

    return edit


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda folder: (folder / "files/parts.py").write_text("x = 3\n"), "files/parts.py is not what was kept"),
        (lambda folder: (folder / "files/parts.py").unlink(), "files/parts.py is a link, or no file"),
        (lambda folder: (folder / "config.yaml").write_text("name: z\n"), "config.yaml is not what was kept"),
        (replace_by_link("files/parts.py"), "files/parts.py is a link"),
        (replace_by_link("files/mine"), "is a link"),
        (replace_by_link("source.json"), "source.json is a link"),
        (lambda folder: (folder / "source.json").write_text("[1, 2"), "source.json is no JSON"),
        (lambda folder: (folder / "source.json").write_bytes(b"\xff\xfe"), "source.json is no JSON"),
        (lambda folder: (folder / "source.json").write_text("[" * 100_000), "source.json is no JSON"),
        (lambda folder: (folder / "source.json").write_text("{}"), "source.json lacks values"),
        (lambda folder: (folder / "source.json").unlink(), "source.json is a link, or no file"),
        (edit_json(lambda content: content.update(files=[1])), "source.json lacks values"),
        (edit_json(lambda content: content.update(import_roots=[1])), "source.json lacks values"),
        (edit_json(lambda content: content.update(import_roots=["../x"])), "leads out of the project"),
        (edit_json(lambda content: content.update(versions=3)), "source.json lacks values"),
        (name_file("../outside.py"), "'../outside.py' leads out of the project"),
        (name_file("a/../../outside.py"), "leads out of the project"),
        (name_file("/etc/passwd"), "leads out of the project"),
        (name_file("a//b.py"), "leads out of the project"),
        (name_file("a\0b.py"), "leads out of the project"),
        (lambda folder: os.truncate(folder / "files/parts.py", (1 << 30) + 1), "files/parts.py is too large"),
        (lambda folder: os.truncate(folder / "source.json", (1 << 24) + 1), "source.json is too large"),
    ],
)
def test_what_is_not_as_it_was_written_is_refused(run: RunDir, edit: Callable[[Path], object], why: str) -> None:
    folder = keep(run)
    edit(folder)
    with pytest.raises(DamagedSourceError, match=r"the source kept in .* is damaged: ") as raised:
        KeptSource.read(folder)
    assert why in str(raised.value)


def test_a_file_that_the_json_does_not_name_is_in_no_view(run: RunDir, tmp_path: Path) -> None:
    folder = keep(run)
    (folder / "files/sitecustomize.py").write_text("raise SystemExit\n")
    source = KeptSource.read(folder)
    source.write_view(make(tmp_path / "view"), tmp_path / "gone")
    assert sorted(source.files) == sorted(FILES)
    assert not (tmp_path / "view/sitecustomize.py").exists()


@pytest.mark.parametrize(
    "edit",
    [
        edit_json(lambda content: content.update(python="3.9")),
        edit_json(lambda content: content.update(mac=None)),
        edit_json(lambda content: content.pop("mac")),
        edit_json(lambda content: content.update(mac="é")),
        lambda folder: (folder.parents[2] / "state/trainer-cli/key").write_bytes(b"1" * 32),
        lambda folder: (folder.parents[2] / "state/trainer-cli/key").unlink(),
        lambda folder: (folder.parents[2] / "state/trainer-cli/key").chmod(0o644),
    ],
)
def test_what_another_key_or_none_has_signed_is_not_ones_own(run: RunDir, edit: Callable[[Path], object]) -> None:
    folder = keep(run)
    edit(folder)
    assert not KeptSource.read(folder).is_own


def test_an_attempt_names_a_source_by_its_digest_and_nothing_else(run: RunDir) -> None:
    digest = keep(run).name
    attempts = [{"attempt": number, "source": name} for number, name in enumerate((digest, "../../x", 7, None), 1)]
    run.summary_file.write_text(json.dumps({"attempts": attempts}))
    sources = [KeptSource.of_attempt(run, number) for number in range(1, 6)]
    assert [source is not None and source.digest for source in sources] == [digest, False, False, False, False]


def make(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def test_a_view_has_the_kept_files_and_leads_to_what_lies_beside_them(run: RunDir, tmp_path: Path) -> None:
    project = make(tmp_path / "project")
    for name, text in {
        "parts.py": "x = 9\n", "other.py": "", "points.csv": "1,2", "mine/deep/table.txt": "t", "data/big.bin": "b",
        "configs/config.yaml": "", "mine/helper.py": "",
    }.items():  # fmt: skip
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    KeptSource.read(keep(run)).write_view(view := make(tmp_path / "view"), project)
    assert {name: (view / name).read_bytes() for name in FILES} == FILES
    assert (view / "points.csv").read_text() == "1,2"
    assert (view / "mine/deep/table.txt").read_text() == "t"
    assert (view / "data").is_symlink()
    assert (view / "configs/config.yaml").is_file()
    # Today's files would be imported beside those of the run.
    assert not (view / "other.py").exists()
    assert not (view / "mine/helper.py").exists()
    (view / "parts.py").write_text("z = 1\n")
    assert (project / "parts.py").read_text() == "x = 9\n"


def test_a_view_leads_to_code_that_was_not_kept_because_git_ignores_it(run: RunDir, tmp_path: Path) -> None:
    project = make(tmp_path / "project")
    (project / "mine").mkdir()
    (project / "mine/local.py").write_text("z = 1\n")
    facts = replace(FACTS, not_kept={"mine/local.py": "ignored by git", "gone.py": "ignored by git"})
    KeptSource.read(keep(run, facts=facts)).write_view(view := make(tmp_path / "view"), project)
    assert (view / "mine/local.py").read_text() == "z = 1\n"
    assert not (view / "gone.py").is_symlink()


def test_a_view_of_a_project_that_now_has_a_file_where_a_folder_was_has_the_kept_files(
    run: RunDir, tmp_path: Path
) -> None:
    project = make(tmp_path / "project")
    (project / "mine").write_text("")
    KeptSource.read(keep(run)).write_view(view := make(tmp_path / "view"), project)
    assert {name: (view / name).read_bytes() for name in FILES} == FILES


def test_differences_are_told_by_file_and_line_ends_are_none(run: RunDir, tmp_path: Path) -> None:
    project = make(tmp_path / "project/mine/deep").parents[1]
    source = KeptSource.read(keep(run))
    (project / "parts.py").write_bytes(b"x = 1\r\n")
    (project / "mine/deep/net.py").write_bytes(b"y = 3\n")
    assert source.find_differences(project) == {"mine/__init__.py": "not there", "mine/deep/net.py": "changed"}


def test_files_that_are_imported_later_are_found_by_their_statements_and_names(tmp_path: Path) -> None:
    project = make(tmp_path / "project")
    for name, text in {
        "main.py": "import torch, lone\ndef late():\n    from package.sub import name, Other\n",
        "lone.py": "import package.deep.leaf as leaf\n",
        "package/__init__.py": "",
        "package/sub.py": "from . import sibling\nfrom .deep import twig\nfrom ..outside import x\nimport torch.nn\n",
        "package/sibling.py": "import broken\nTABLE = {'one': 'plugins.one', 'file': 'a.csv', 'up': '.......x'}\n",
        "package/deep/twig.py": "import importlib\ndef late():\n    importlib.import_module('.bud', __package__)\n",
        "package/deep/bud.py": "import_module('..above', 'package.deep')\n",
        "package/above.py": "",
        "plugins/one.py": "",
        "plugins/two.py": "",
        "package/deep/leaf.py": "from src_only import y\n",
        "broken.py": "def (:\n",
        "src/src_only.py": "",
        "unused.py": "",
        "package/unused.py": "",
    }.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    found = add_imports(project, ["main.py"], ["", "src"])
    assert found == {
        "main.py", "lone.py", "package/__init__.py", "package/sub.py", "package/sibling.py", "package/deep/leaf.py",
        "package/deep/twig.py", "package/deep/bud.py", "package/above.py", "plugins/one.py", "broken.py",
        "src/src_only.py",
    }  # fmt: skip


def test_imports_of_a_large_project_are_followed_up_to_a_size_and_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(source_files, "_MOST_PARSED_BYTES", 25)
    for number in range(9):
        (tmp_path / f"m{number}.py").write_text(f"import m{number + 1}\n")
    assert add_imports(tmp_path, ["m0.py"], [""]) == {"m0.py", "m1.py", "m2.py", "m3.py"}
    assert [record.getMessage() for record in caplog.records] == [
        "the source of the run is large: imports in 1 file are not followed"
    ]


def test_code_that_python_warns_of_is_read_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text("import other\nX = '\\d'\n")
    (tmp_path / "other.py").write_text("")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert add_imports(tmp_path, ["odd.py"], [""]) == {"odd.py", "other.py"}
    assert told == []


def test_the_folders_that_modules_are_imported_from_are_told_by_their_names() -> None:
    modules = {"a": "a.py", "p": "src/p/__init__.py", "p.q": "src/p/q.py", "_of_configs": "configs/resolvers.py"}
    assert find_import_roots(modules) == ["", "src"]


def test_what_git_ignores_is_told_and_nothing_without_git(tmp_path: Path) -> None:
    assert find_ignored(tmp_path, ["secret.py"]) == set()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("secret*.py\n")
    assert find_ignored(tmp_path, ["secret.py", "secret é.py", "open.py"]) == {"secret.py", "secret é.py"}
    assert find_ignored(tmp_path, []) == set()


def test_a_key_is_made_once_for_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    code = sign("text")
    assert code is not None
    assert code == sign("text")
    assert is_signed("text", code)
    assert not is_signed("other", code)
    key = tmp_path / "state/trainer-cli/key"
    assert (key.stat().st_mode & 0o777, key.stat().st_size) == (0o600, 32)
    assert [path.name for path in key.parent.iterdir()] == ["key"]


def test_without_a_place_for_a_key_nothing_is_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for folder in (str(tmp_path / "file"), "~nobody/x"):
        monkeypatch.setenv("XDG_STATE_HOME", folder)
        assert sign("text") is None
        assert not is_signed("text", "0" * 64)
