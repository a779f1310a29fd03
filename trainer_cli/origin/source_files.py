"""The files of a project that a run is made from: those that are imported, and those that these may import later."""

from __future__ import annotations

import ast
import logging
import os
import re
import sys
import sysconfig
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path, PurePosixPath

from trainer_cli.config import PACKAGE
from trainer_cli.environment import run_git
from trainer_cli.terminal import format_count

log = logging.getLogger(__name__)

_INSTALLED = frozenset({"site-packages", "dist-packages"})
_ENDINGS = (".py", ".yaml", ".yml")
_MOST_FILE_BYTES = 1 << 20
"""A larger file is data or was generated, and takes seconds to parse."""
_MOST_ENTRIES = 100_000
"""Of a project that is not in git."""
_OF_A_RUN = re.compile(r"(^|/)source/[0-9a-f]{16}/files/")
_MODULE = re.compile(r"(\.*)(\w+(?:\.\w+)*)")
_MOST_PARSED_BYTES = 4 << 20
"""Of all files: a start waits for it. It is no time, by which equal projects would have other sources."""


def find_imported_modules(root: Path) -> dict[str, str]:
    """Module -> path, relative to the project's root, of the imported files below it that are its own source."""
    modules, prefix = {}, f"{root}{os.sep}"
    # A copy, because another thread may import a module meanwhile.
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or not file.startswith(prefix):
            continue
        # A virtual environment inside the project is no source of it.
        path = Path(file)
        if not is_installed(path, root):
            modules[name] = path.relative_to(root).as_posix()
    return modules


def is_installed(path: Path, root: Path) -> bool:
    """Whether a path below a project's root is of a library."""
    libraries = [folder for folder in _find_libraries() if not root.is_relative_to(folder)]
    return bool(_INSTALLED.intersection(path.parts)) or any(path.is_relative_to(folder) for folder in libraries)


@cache
def _find_libraries() -> tuple[Path, ...]:
    return (*(Path(path).resolve() for path in (sys.prefix, sysconfig.get_path("stdlib"))), PACKAGE)


def list_sources(root: Path, configs: Sequence[str]) -> list[str]:
    """The Python files of a project, and the YAML files of its folders `configs`, that git does not ignore.

    Without git: those that are not in hidden folders or installed.
    """
    folders = tuple(f"{folder}/" for folder in configs)
    paths = (path for path in [*_list_in_git(root)] or _walk(root) if path.endswith(".py") or path.startswith(folders))
    # The sources that runs keep are in the project, too.
    return [path for path in paths if not (_OF_A_RUN.search(path) or is_installed(root / path, root))]


def _list_in_git(root: Path) -> Iterator[str]:
    """Python and YAML files that git does not ignore, also those of submodules and of other repositories below; none
    without git."""
    paths: list[str] = []
    for options in (("--cached", "--recurse-submodules"), ("--others", "--exclude-standard")):
        listed = run_git(
            root, "-c", "core.quotePath=false", "ls-files", *options, "--", "*.py", "*.yaml", "*.yml", "*/"
        )
        paths += (listed or "").splitlines()
    # Git lists another repository as a folder, and of a submodule no files that are new.
    folders = {folder for path in paths for folder in PurePosixPath(path, "_").parents}
    for folder in folders - {PurePosixPath()}:
        if (root / folder / ".git").exists():
            paths += (f"{folder}/{path}" for path in _list_in_git(root / folder))
    yield from sorted({path for path in paths if path.endswith(_ENDINGS)})


def _walk(root: Path) -> Iterator[str]:
    left = _MOST_ENTRIES
    for folder, names, files in os.walk(root):
        below = Path(folder).relative_to(root)
        left -= len(names) + len(files)
        if left < 0:
            log.warning("%s has many files and is not in git: those from %s on are not kept", root, below)
            return
        names[:] = [name for name in sorted(names) if not name.startswith(".") and name not in _INSTALLED]
        yield from ((below / name).as_posix() for name in files if name.endswith(_ENDINGS))


def find_search_roots(root: Path) -> list[str]:
    """The folders, relative to the project's root, from which Python imports its modules: the root itself is ''."""
    paths = (Path(entry).resolve() for entry in sys.path if entry)
    inside = {
        path.relative_to(root).as_posix()
        for path in paths
        if path.is_relative_to(root) and not is_installed(path, root)
    }
    return sorted({"", *find_import_roots(find_imported_modules(root)), *inside} - {"."})


def find_import_roots(modules: dict[str, str]) -> list[str]:
    """The folders, relative to the project's root, from which modules were imported; the root itself, '', is first."""
    roots = {""}
    for name, path in modules.items():
        parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
        names = name.split(".")
        if parts[-len(names) :] == names:
            roots.add("/".join(parts[: -len(names)]))
    return sorted(roots)


def add_imports(root: Path, files: Iterable[str], import_roots: Iterable[str]) -> set[str]:
    """The files, and all files of the project that their import statements lead to, also those inside functions."""
    found, roots = set(files), [PurePosixPath(folder) for folder in import_roots]
    unread, left = deque(sorted(found)), _MOST_PARSED_BYTES
    while unread and left > 0:
        path = PurePosixPath(unread.popleft())
        content = _read_code(root / path)
        left -= len(content)
        for folder, names in _read_imports(content, path):
            for base in roots if folder is None else [folder]:
                files = (file for file in _find_files(root, base, names) if file not in found)
                new = {file for file in files if not is_installed(root / file, root)}
                found |= new
                unread += sorted(new)
    if unread:
        log.warning("the source of the run is large: imports in %s are not followed", format_count(len(unread), "file"))
    return found


def find_ignored(root: Path, files: Iterable[str]) -> set[str]:
    """Which of the files git ignores; none without git."""
    names = sorted(files)
    listed = run_git(root, "-c", "core.quotePath=false", "check-ignore", "--", *names) if names else None
    return set(names) & set((listed or "").splitlines())


def _read_code(file: Path) -> bytes:
    """The content of a file; none if it cannot be read, or is too large."""
    try:
        content = file.read_bytes()
    except OSError:
        return b""
    return content if len(content) <= _MOST_FILE_BYTES else b""


def _read_imports(content: bytes, path: PurePosixPath) -> Iterator[tuple[PurePosixPath | None, list[str]]]:
    """What a file imports: names from a package on, with the folder of a relative import.

    A text with a dot may name a module, as in a call of `import_module` or a table of plugins.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((None, alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level <= len(path.parts):
            folder = path.parents[node.level - 1] if node.level else None
            names = node.module.split(".") if node.module else []
            yield from ((folder, [*names, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            module = _MODULE.fullmatch(node.value)
            if module is not None and (level := len(module[1])) <= len(path.parents):
                yield path.parents[level - 1] if level else None, module[2].split(".")


def _find_files(root: Path, folder: PurePosixPath, names: list[str]) -> Iterator[str]:
    """The files of the project that an import of dotted names from a folder runs; the last may be a class in them."""
    for name in names:
        folder /= name
        for file in (folder.with_name(f"{name}.py"), folder / "__init__.py"):
            if (root / file).is_file():
                yield file.as_posix()
        if not (root / folder).is_dir():
            return
