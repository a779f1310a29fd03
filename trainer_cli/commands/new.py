"""`train new DIR`: a project of the user's own that trains, tests and resumes before a line of it is changed.

Its files stand in trainer_cli/scaffold, named as in the project but for `.tmpl`, so that nothing takes them for
code of ours. All of them appear or none: they are written into a folder beside (for a DIR that exists already,
inside) and then renamed.
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

from trainer_cli.config.json_schema import json_schema
from trainer_cli.config.search_path import PACKAGE
from trainer_cli.errors import UserError

EXAMPLES = """examples:
  train new mine                      then: cd mine && train fit +experiment=mine
  train new work --name spirals       package and experiment are called spirals
"""
SCAFFOLD = PACKAGE / "scaffold"
_SUFFIX = ".tmpl"
_VALUES = frozenset({"null", "true", "false", "inf", "nan"})
"""What Hydra does not read as text: such an experiment could not be chosen."""
_OWN_FOLDERS = frozenset({"configs", "tests", "runs", "dist", "build"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("dir", metavar="DIR", type=Path, help="the project's directory: new, or empty")
    parser.add_argument(
        "--name", metavar="NAME", help="name of the package and of its experiment (default: that of DIR)"
    )


def run(args: argparse.Namespace) -> int:
    """Make the project, and say what to do with it."""
    package = package_name(args.name or args.dir.resolve().name, chosen=args.name is not None)
    make_project(args.dir, package)
    here = args.dir.resolve() == Path.cwd()
    print(f"made {args.dir}, with the package and experiment {package}\nnext:")
    if not here:
        print(f"  cd {shlex.quote(str(args.dir))}")
    print(f"  train fit +experiment={package}\n  pytest")
    return 0


def package_name(name: str, *, chosen: bool) -> str:
    """A name for the package, that Python can import and that hides no other, and for its experiment.

    Raises:
        UserError: nothing of the name can be used, or the user has chosen one that is taken.
    """
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    words = re.sub(r"[^a-z0-9]+", "_", plain).strip("_")
    if not words:
        raise UserError(
            f"no package can be called {name!r}", where="--name", cure="Give one of plain letters: --name my_project."
        )
    package = words if words[0].isalpha() else f"project_{words}"
    taken = _taken(package)
    if taken is None:
        return package
    free = f"{package}_project"
    if chosen:
        raise UserError(f"{package!r} is {taken}", where="--name", cure=f"Choose another, such as --name {free}.")
    return free


def make_project(folder: Path, package: str) -> None:
    """Write all files of the project, or none.

    Raises:
        UserError: the folder is not empty, or cannot be written.
    """
    files = dict(_files(package))
    try:
        if folder.is_dir():
            if any(folder.iterdir()):
                raise _occupied(folder, "is not empty")
            _fill(folder, files)
        elif os.path.lexists(folder):
            raise _occupied(folder, "is no directory")
        else:
            _make(folder, files)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise UserError(f"cannot make {folder}: {error.strerror}{where}") from None


def _occupied(folder: Path, why: str) -> UserError:
    return UserError(f"{folder} {why}, and nothing is overwritten", cure="Name a new directory.")


def _taken(package: str) -> str | None:
    """Why a package cannot have this name, or None."""
    if keyword.iskeyword(package) or keyword.issoftkeyword(package):
        return "a word of Python"
    if package in _VALUES:
        return "a value of YAML"
    if package in sys.stdlib_module_names:
        return "a module of Python"
    if package in _OWN_FOLDERS:
        return "a folder of the project itself"
    spec = find_spec(package)
    # Without an origin it is any folder of that name that happens to be on the path.
    return "an installed package" if spec is not None and spec.origin is not None else None


def _files(package: str) -> Iterator[tuple[Path, str]]:
    """Every file of a project with its text."""
    names = {"@PACKAGE@": package, "@PROJECT@": package.replace("_", "-"), "@TRAINER@": _requirement()}
    for template in sorted(SCAFFOLD.rglob(f"*{_SUFFIX}")):
        path = template.relative_to(SCAFFOLD).with_suffix("")
        parts = [".gitignore" if part == "gitignore" else part.replace("package", package) for part in path.parts]
        text = template.read_text("utf-8")
        for mark, name in names.items():
            text = text.replace(mark, name)
        yield Path(*parts), text
    yield Path("configs/train.schema.json"), json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def _requirement() -> str:
    try:
        return f"trainer-cli>={metadata.version('trainer-cli')}"
    except metadata.PackageNotFoundError:
        return "trainer-cli"


def _make(folder: Path, files: dict[Path, str]) -> None:
    """A folder that was not there appears whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = folder.parent / f".{secrets.token_hex(4)}.new"
    try:
        _write(staged, files)
        staged.rename(folder)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def _fill(folder: Path, files: dict[Path, str]) -> None:
    """An empty folder stays the same one: it may be the current one, or a mount."""
    staged = folder / f".{secrets.token_hex(4)}.new"
    moved: list[Path] = []
    try:
        _write(staged, files)
        for path in sorted(staged.iterdir()):
            moved.append(folder / path.name)
            path.rename(moved[-1])
        staged.rmdir()
    except BaseException:
        for path in [*moved, staged]:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        raise


def _write(folder: Path, files: dict[Path, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, "utf-8")
