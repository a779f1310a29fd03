"""Where YAML is looked for, in which order, and what of it is refused: the line and the cure of each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer_cli.config import search_path
from trainer_cli.config.search_path import SearchPath
from trainer_cli.config.yaml import LARGEST_BYTES, read_file
from trainer_cli.errors import Code, ConfigError


def package_in(folder: Path, *, wheel: bool = False, project: str | None = "trainer-cli") -> Path:
    package = folder / "trainer_cli"
    package.mkdir(parents=True)
    (package / "configs" if wheel else folder / "configs").mkdir()
    if project is not None:
        (folder / "pyproject.toml").write_text(f'[project]\nname = "{project}"\n')
    return package


def folders(dirs: list[Path]) -> SearchPath:
    return SearchPath(dirs, Path(), Path(), "config")


def test_a_folder_is_searched_once(tmp_path: Path) -> None:
    package = package_in(tmp_path)
    assert search_path.config_dirs(Path("configs"), tmp_path, package) == [tmp_path / "configs"]


def test_a_wheel_carries_its_configs_inside(tmp_path: Path) -> None:
    package = package_in(tmp_path / "site-packages", wheel=True, project=None)
    assert search_path.shipped_folder("configs", package) == package / "configs"


@pytest.mark.parametrize("project", [None, "someone-elses"])
def test_a_configs_folder_beside_the_package_counts_only_in_our_own_checkout(
    tmp_path: Path, project: str | None
) -> None:
    assert search_path.shipped_folder("configs", package_in(tmp_path, project=project)) is None


def test_a_named_folder_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere is not a folder \(--config-dir\)"):
        search_path.config_dirs(Path("nowhere"), tmp_path, package_in(tmp_path))


def test_the_project_root_holds_the_configs_in_use(tmp_path: Path) -> None:
    assert search_path.project_root(Path("a/conf"), tmp_path) == tmp_path / "a"
    assert search_path.project_root(None, tmp_path) == tmp_path


def test_options_of_an_earlier_folder_stand_before_later_ones_and_nested_ones_have_paths(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for file in (first / "model/mlp.yaml", second / "model/mlp.yaml", second / "model/big/gpt.yaml"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("# text\n")
    assert folders([first, second]).options("model") == {
        "big/gpt": second / "model/big/gpt.yaml",
        "mlp": first / "model/mlp.yaml",
    }


def test_experiments_come_first_among_the_groups(tmp_path: Path) -> None:
    for group in ("model", "data", "experiment"):
        (tmp_path / group).mkdir()
        (tmp_path / group / "x.yaml").write_text("")
    (tmp_path / "empty").mkdir()
    assert folders([tmp_path]).groups() == ["experiment", "data", "model"]


def test_what_is_hidden_no_file_or_linked_to_nothing_is_no_config(tmp_path: Path) -> None:
    group = tmp_path / "configs/model"
    for file in ("mine.yaml", ".mine.yaml", "old.yaml/note.txt", ".git/kept.yaml", "notes.yml", "deep/.backup/x.yaml"):
        (group / file).parent.mkdir(parents=True, exist_ok=True)
        (group / file).write_text("# text\n")
    (group / ".#mine.yaml").symlink_to("somebody@somewhere.1234")  # As an editor marks a file that is being changed.
    (group / "gone.yaml").symlink_to("nowhere.yaml")
    (group / "round.yaml").symlink_to("round.yaml")
    os.mkfifo(group / "pipe.yaml")
    (tmp_path / "configs/.idea").symlink_to("model")
    (tmp_path / "configs/.#config.yaml").symlink_to("somebody@somewhere.1234")
    (tmp_path / "configs/config.yaml").write_text("")
    dirs = [tmp_path / "configs"]
    assert folders(dirs).options("model") == {"mine": group / "mine.yaml"}
    assert folders(dirs).groups() == folders(dirs).every_group() == ["model"]
    assert folders(dirs).primaries() == ["config"]


def test_links_to_files_and_folders_are_followed_as_hydra_follows_them(tmp_path: Path) -> None:
    team, dirs = tmp_path / "team", [tmp_path / "configs"]
    for file in (team / "backbone/resnet.yaml", team / "trials/deep/wide.yaml", dirs[0] / "experiment/mine.yaml"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    (dirs[0] / "backbone").symlink_to("../team/backbone")
    (dirs[0] / "experiment/team").symlink_to(team / "trials")
    (dirs[0] / "experiment/same.yaml").symlink_to("mine.yaml")
    assert folders(dirs).groups() == ["experiment", "backbone"]
    assert folders(dirs).every_group() == ["backbone", "experiment", "experiment/team", "experiment/team/deep"]
    assert list(folders(dirs).options("backbone")) == ["resnet"]
    assert folders(dirs).options("experiment") == {
        name: dirs[0] / f"experiment/{name}.yaml" for name in ("mine", "same", "team/deep/wide")
    }


def test_links_that_lead_back_are_followed_no_further(tmp_path: Path) -> None:
    for file in ("model/a.yaml", "other/b.yaml"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text("")
    (tmp_path / "model/again").symlink_to(".")
    (tmp_path / "model/up").symlink_to("..")
    (tmp_path / "model/other").symlink_to("../other")
    (tmp_path / "other/model").symlink_to("../model")
    assert list(folders([tmp_path]).options("model")) == ["a", "other/b", "up/other/b"]


def test_a_file_that_cannot_be_read_has_no_description(tmp_path: Path) -> None:
    assert search_path.SearchPath.describe_file(tmp_path / "gone.yaml") == ""
    assert search_path.SearchPath.describe_file(tmp_path) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# A model.\nx: 1\n", "A model."),
        ("# @package _global_\n# An experiment.\n", "An experiment."),
        ("\n#\n# Late.\n", "Late."),
        ("x: 1\n# not this\n", ""),
        ("", ""),
    ],
)
def test_the_description_is_the_first_comment(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    assert search_path.SearchPath.describe_file(file) == expected


# What YAML refuses, or reads as something else than it seems: the line and the cure of each.


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
COLUMNS = (
    "A key is followed by a colon and a space, a string with ': ' in it needs quotes, and keys start in one column."
)
CLOSED = "A quote or bracket is not closed."
TAG = "Remove it; a string that begins with ! needs quotes."
ROWS: list[tuple[str, str | bytes, int | None, str, str]] = [
    # Read as something else
    ("three parts of a clock", "a: 12:30:45\n", 1, "a: 12:30:45 is read by YAML as the number 45045", "12h30m45s"),
    ("two parts of a clock", "a:\n  b: 12:30\n", 2, "a.b: 12:30 is read", "Write 12h30m or 12m30s, or put it in"),
    ("octal", "a: 014\n", 1, "as the number 12 (octal)", "Write 14, or '014' in quotes."),
    ("octal of the new kind", "a: 0o14\n", 1, "as a string, not as a number", "Write 12, or '0o14' in quotes."),
    ("leading zero", "a: [08]\n", 1, "a.0: 08 is read by YAML as a string", "Write 8, or '08' in quotes."),
    ("thousands", "a: 1,000\n", 1, "as a string, not as a number", "Write 1000, or '1,000' in quotes."),
    ("comma for a point", "a: 0,001\n", 1, "as a string, not as a number", "Write 0.001, or '0,001' in quotes."),
    ("sign before a point", "a: +.5\n", 1, "as a string, not as a number", "Write 0.5, or '+.5' in quotes."),
    ("infinity", "a: inf\n", 1, "as a string, not as a number", "A number must be finite; if a string is meant"),
    ("no", "a: no\n", 1, "a: no is read by YAML as false", "Write false, or 'no' in quotes."),
    ("On", "a: On\n", 1, "a: On is read by YAML as true", "Write true, or 'On' in quotes."),
    ("equals sign alone", "a: =\n", 1, "a: = alone means something else in YAML", "Write '='."),
    ("None", "a: None\n", 1, "as a string, not as null", "Write null, or 'None' in quotes."),
    # Keys
    ("no as a key", "a:\n  no: 1\n", 2, "a: the key no is read by YAML as false", "Put it in quotes: 'no'."),
    ("number as a key", "a:\n  1.5: 1\n", 2, "the key 1.5 is read by YAML as the number", "Put it in quotes: '1.5'."),
    ("null as a key", "a:\n  ~: 1\n", 2, "the key ~ is read by YAML as null", "Put it in quotes: '~'."),
    ("list as a key", "a:\n  ? [a, b]\n  : 1\n", 2, "a: a key must be a single string", ""),
    ("key twice", "a: 1\nb: x\na: 2\n", 3, "a: the key is given twice, first in line 1", "Remove one of them."),
    # Characters and encodings
    ("tab", "a:\n\tb: 3\n", 2, "cannot start any token", "Use spaces, not tabs."),
    ("byte-order mark", "\ufeff# @package _global_\n", 1, "begins with a byte-order mark", "Save it as UTF-8 without"),
    ("byte-order mark in the middle", "a: 1\n\n\ufeff", 3, "character U+FEFF has no place in YAML", "Remove it."),
    ("control character", "b: 1\na: a\u0007b\n", 2, "character U+0007 has no place in YAML", "Remove it."),
    ("Latin-1", b"b: 1\na: \xe9\n", 2, "byte 0xe9 is not UTF-8", "Save the file as UTF-8."),
    ("UTF-16", "a: x\n".encode("utf-16"), None, "x.yaml is UTF-16", "Save it as UTF-8."),
    # Syntax
    ("colon in a string", "a: a: b\n", 1, "mapping values are not allowed", COLUMNS),
    ("no space after the colon", "a:\n  b:3\n  c: 5\n", 3, "mapping values are not allowed", COLUMNS),
    ("wrong indent", "a:\n  b: 3\n   c: 5\n", 3, "mapping values are not allowed", COLUMNS),
    ("no space after the only colon", "a:b\n", 1, "a single value, but it must be", "followed by a colon and a space."),
    ("bracket not closed", "a: [a, b\n", 2, "expected ',' or ']'", CLOSED),
    ("quote not closed", "a: 'x\n", 2, "unexpected end of stream", CLOSED),
    ("@ before a string", "a: @home\n", 1, "'@' that cannot start any token", "Put a string that begins with this"),
    ("tag", "a: !ruby x\n", 1, "a: the tag !ruby is not known in a config", TAG),
    ("code in a tag", "a: !!python/object/apply:os.system [ls]\n", 1, "tag !!python/object/apply:os.system is", TAG),
    ("alias without anchor", "a: *best\n", 1, "found undefined alias 'best'", "needs its anchor (&name) above it"),
    ("missing value in braces", "a: {b: ???}\n", 1, "found '?'", "Inside { } and [ ], put ??? in quotes."),
    ("two documents", "a: 1\n---\nb: 2\n", 2, "expected a single document", "remove the line '---'."),
    # What is no config
    ("anchor in itself", "a: &m\n  b: *m\n", 1, "a.b: an anchor's value contains itself", ""),
    ("aliases that multiply", BOMB, 5, "e: this expands to more than 100,000 values", "Do aliases multiply?"),
    ("deep nesting", "a: " + "[" * 100 + "]" * 100, 1, "nested more than 40 deep", ""),
    ("huge file", "# " + "x" * LARGEST_BYTES, None, "x.yaml is longer than 1 MiB", "Is it a data file?"),
    ("list at the top", "- a\n", 1, "the file is a list, but it must be a mapping of keys to values", ""),
    ("text at the top", "hello\n", 1, "the file is a single value, but it must be a mapping of keys to values", ""),
    ("empty file", "", None, "the file is empty", "Write something, be it a comment, or remove it."),
    ("blank file", "\n", None, "the file is empty", "Write something, be it a comment, or remove it."),
]  # fmt: skip


@pytest.mark.parametrize(("content", "line", "says", "cure"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_a_trap_of_yaml_is_refused_at_its_line_with_a_cure(
    content: str | bytes, line: int | None, says: str, cure: str, tmp_path: Path
) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    (mistake,) = read_file(file, "x.yaml").mistakes
    assert mistake.code is Code.yaml
    assert says in mistake.message
    assert cure in (mistake.hint or "")
    assert mistake.source in ((None, "x.yaml") if line is None else (f"x.yaml:{line}",))
