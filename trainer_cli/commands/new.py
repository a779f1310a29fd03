"""`train new DIR`: a project of the user's own that trains, tests and resumes before a line of it is changed.

The templates are in trainer_cli/scaffold, with the suffix `.tmpl`, so that no tool takes them for code of this package.
All files of a project appear or none: they are written into a folder beside DIR, or inside a DIR that exists, and then
renamed.
"""

from __future__ import annotations

import argparse
import json
import keyword
import os
import re
import secrets
import shlex
import shutil
import sys
import unicodedata
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from trainer_cli.config import PACKAGE
from trainer_cli.errors import UserError
from trainer_cli.keys import json_schema

EXAMPLES = """examples:
  train new mine                      then: cd mine && train fit mine
  train new work --name spirals       package and experiment are called spirals
"""
SCAFFOLD = PACKAGE / "scaffold"
_SUFFIX = ".tmpl"
_VALUES = frozenset({"null", "true", "false", "inf", "nan"})
"""Words that Hydra does not read as text: an experiment of that name could not be chosen."""
_OWN_FOLDERS = frozenset({"configs", "tests", "runs", "dist", "build"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("dir", metavar="DIR", type=Path, help="the project's directory: new, or empty")
    parser.add_argument(
        "--name", metavar="NAME", help="name of the package and of its experiment (default: that of DIR)"
    )


def run(args: argparse.Namespace) -> int:
    """Make the project, and print the next commands."""
    package = package_name(args.name or args.dir.resolve().name, chosen=args.name is not None)
    make_project(args.dir, package)
    print(f"made {args.dir}, with the package and experiment {package}\nnext:")
    if args.dir.resolve() != Path.cwd():
        print(f"  cd {shlex.quote(str(args.dir))}")
    print(f"  train fit {package}\n  python -m pytest")
    return 0


def package_name(name: str, *, chosen: bool) -> str:
    """The name of the package and its experiment: one that Python can import and that hides no other module.

    Args:
        chosen: whether the user chose the name, which then is not changed to a free one.

    Raises:
        UserError: the name has no letter or digit, or the chosen name is taken.
    """
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    words = re.sub(r"[^a-z0-9]+", "_", plain).strip("_")
    if not words:
        raise UserError(
            f"no package can be called {name!r}", where="--name", cure="Give one of plain letters: --name my_project."
        )
    package = words if words[0].isalpha() else f"project_{words}"
    conflict = _why_taken(package)
    if conflict is None:
        return package
    free = f"{package}_project"
    if chosen:
        raise UserError(f"{package!r} is {conflict}", where="--name", cure=f"Choose another, such as --name {free}.")
    return free


def make_project(folder: Path, package: str) -> None:
    """Write all files of the project, or none.

    Raises:
        UserError: the folder is not empty, or cannot be written.
    """
    files = dict(_render_files(package))
    try:
        if folder.is_dir():
            if any(folder.iterdir()):
                raise _occupied_error(folder, "is not empty")
            _fill_folder(folder, files)
        elif os.path.lexists(folder):
            raise _occupied_error(folder, "is not a directory")
        else:
            _make_folder(folder, files)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise UserError(f"cannot make {folder}: {error.strerror}{where}") from None


def _occupied_error(folder: Path, why: str) -> UserError:
    """The error for a directory that cannot become a project."""
    return UserError(f"{folder} {why}, and nothing is overwritten", cure="Name a new directory.")


def _why_taken(package: str) -> str | None:
    """Why a package cannot have this name; None if it can."""
    if keyword.iskeyword(package) or keyword.issoftkeyword(package):
        return "a word of Python"
    if package in _VALUES:
        return "a value of YAML"
    # The project's root is first on sys.path: its package would hide the module.
    if package in sys.stdlib_module_names:
        return "a module of Python"
    if package in _OWN_FOLDERS:
        return "a folder of the project itself"
    spec = find_spec(package)
    # A namespace package without an origin is only a folder of that name somewhere on the path.
    return "an installed package" if spec is not None and spec.origin is not None else None


def _render_files(package: str) -> Iterator[tuple[Path, str]]:
    """Every file of a project with its text."""
    values = {"@PACKAGE@": package, "@PROJECT@": package.replace("_", "-"), "@TRAINER@": _requirement()}
    for template in sorted(SCAFFOLD.rglob(f"*{_SUFFIX}")):
        path = template.relative_to(SCAFFOLD).with_suffix("")
        # In the scaffold its name has no dot, or git would apply it there.
        segments = [segment.replace("package", package) for segment in path.parts]
        segments = [".gitignore" if segment == "gitignore" else segment for segment in segments]
        text = template.read_text("utf-8")
        for mark, value in values.items():
            text = text.replace(mark, value)
        yield Path(*segments), text
    # The schema of this very version: editors accept what the command accepts.
    yield Path("configs/train.schema.json"), json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def _requirement() -> str:
    """How a project requires this package: at least its present version, if that is known."""
    try:
        return f"trainer-cli>={metadata.version('trainer-cli')}"
    except metadata.PackageNotFoundError:
        return "trainer-cli"


def _make_folder(folder: Path, files: dict[Path, str]) -> None:
    """Make a new folder: it appears with all files, or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = folder.parent / f".{secrets.token_hex(4)}.new"
    try:
        _write_files(staged, files)
        # One rename: an interrupt leaves a hidden folder, never half a project.
        staged.rename(folder)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def _fill_folder(folder: Path, files: dict[Path, str]) -> None:
    """Fill an empty folder without replacing it: it may be the current folder, or a mount."""
    staged = folder / f".{secrets.token_hex(4)}.new"
    moved: list[Path] = []
    try:
        _write_files(staged, files)
        for path in sorted(staged.iterdir()):
            # Listed before the move, so that an interrupt between the two removes it too.
            moved.append(folder / path.name)
            path.rename(moved[-1])
        staged.rmdir()
    except BaseException:
        for path in [*moved, staged]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        raise


def _write_files(folder: Path, files: dict[Path, str]) -> None:
    """Write files, by path within a folder, and make the folders that they need."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, "utf-8")
