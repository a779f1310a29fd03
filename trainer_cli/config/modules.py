"""A module as a file: where it lies, and what its source tells. Read, never run."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from trainer_cli.config.scopes import Scope, scope_of


class UnreadableError(Exception):
    """The source cannot be told: another kind of module, an encoding, a disk that does not answer."""


class BrokenError(Exception):
    """The source is not Python: what is wrong, in which file and line."""

    def __init__(self, problem: str, file: str, line: int) -> None:
        super().__init__(problem, file, line)
        self.problem, self.file, self.line = problem, file, line


@dataclass(slots=True, eq=False)
class Module:
    """A module that was found, its source read only when asked for."""

    name: str
    file: str | None
    """Null for a namespace package, which has no source."""
    folders: list[str]
    """Where its submodules lie; empty for a plain module."""
    _scope: Scope | None = None

    @property
    def text(self) -> str:
        """Its source.

        Raises:
            UnreadableError: it is not Python source, or cannot be read.
        """
        return "" if self.file is None else _text(*_version(self.file))

    @property
    def scope(self) -> Scope:
        """What its names are bound to.

        Raises:
            UnreadableError: it is not Python source, or cannot be read.
            BrokenError: it has a syntax error.
        """
        if self._scope is None:
            self._scope = Scope() if self.file is None else scope_of(_tree(*_version(self.file)).body)
        return self._scope

    @property
    def package(self) -> str:
        """What its relative imports start from."""
        return self.name if self.folders else self.name.rpartition(".")[0]

    def absolute(self, node: ast.ImportFrom) -> str:
        """The whole name of the module that an import names."""
        if not node.level:
            return node.module or ""
        parts = self.package.split(".")
        above = parts[: len(parts) - node.level + 1]
        return ".".join([*above, *([node.module] if node.module else [])])

    def binds_itself(self, name: str) -> bool:
        """Whether the source binds the name otherwise than by importing the submodule; told without parsing all."""
        if name not in self.text:
            return False
        word = re.escape(name)
        if re.search(rf"^\s*(?:class|(?:async\s+)?def)\s+{word}\b|^\s*{word}\s*(?::[^=\n]+)?=(?!=)", self.text, re.M):
            return True
        mention = re.compile(rf"\b{word}\b")
        for match in _FROM_IMPORT.finditer(self.text):
            if match[1] not in (".", self.name) and mention.search(match[2]):
                return True
        return re.search(rf"^\s*import\b.*\b{word}\b", self.text, re.M) is not None

    @property
    def has_star(self) -> bool:
        """Whether it imports a star."""
        return _STAR.search(self.text) is not None

    @property
    def is_open(self) -> bool:
        """Whether names may appear in it that no statement binds."""
        return self.file is None or _OPEN.search(self.text) is not None


_FROM_IMPORT = re.compile(r"^\s*from\s+([.\w]+)\s+import\s+(\([^)]*\)|[^\n]*(?:(?<=\\)\n[^\n]*)*)", re.M)
_STAR = re.compile(r"^\s*from\s+[.\w]+\s+import\s+\*", re.M)
_OPEN = re.compile(r"^\s*def __getattr__\(|\b(?:globals|vars|locals|exec|setattr)\s*\(|sys\.modules|__dict__", re.M)


class Finder:
    """Finds modules as an import would: the roots first, then `sys.path`. Nothing is imported."""

    def __init__(self, path: Sequence[str]) -> None:
        self.path = list(path)
        self._found: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """The module of a whole name, or None where there is none.

        Raises:
            UnreadableError: it cannot be told whether there is one, or it has no source.
        """
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def names(self, module: Module) -> Iterator[str]:
        """The names of its submodules."""
        for folder in module.folders:
            for path in Path(folder).iterdir() if Path(folder).is_dir() else ():
                if path.suffix == ".py" or (path.is_dir() and (path / "__init__.py").is_file()):
                    yield path.stem

    def tops(self) -> Iterator[str]:
        """The names of the modules and packages on the path."""
        for folder in self.path:
            try:
                yield from self.names(Module("", None, [folder]))
            except OSError:
                continue

    def _find(self, name: str) -> Module | None:
        above, _, last = name.rpartition(".")
        if not above:
            spec = PathFinder.find_spec(name, self.path) or _elsewhere(name)
            return None if spec is None else _module(name, spec)
        parent = self.module(above)
        if parent is None or not parent.folders:
            return None
        try:
            spec = PathFinder.find_spec(name, parent.folders)
        except KeyError:
            # A namespace package in a namespace package, whose parent would have to be imported.
            folders = [str(path) for folder in parent.folders if (path := Path(folder) / last).is_dir()]
            return Module(name, None, folders)
        if spec is None and parent.file is None:
            raise UnreadableError(f"{above} is a namespace package")
        return None if spec is None else _module(name, spec)


def literal_names(module: Module) -> list[str] | None:
    """`__all__`, where it is written out; None where there is none or it is computed.

    Raises:
        UnreadableError: it is computed.
    """
    ways = module.scope.bindings.get("__all__")
    if ways is None:
        return None
    if len(ways) == 1 and isinstance(ways[0].node, ast.expr):
        try:
            return [str(name) for name in ast.literal_eval(ways[0].node)]
        except (ValueError, TypeError):
            pass
    raise UnreadableError(f"{module.name}.__all__ is computed")


def _elsewhere(name: str) -> ModuleSpec | None:
    """What other finders than that of `sys.path` know of a top-level name: built-in, editable, imported already."""
    try:
        return importlib.util.find_spec(name)
    except (ValueError, ImportError, AttributeError):
        raise UnreadableError(f"{name} has no file") from None


def _module(name: str, spec: ModuleSpec) -> Module:
    folders = list(spec.submodule_search_locations or ())
    if spec.origin is None or not spec.has_location:
        if folders:
            return Module(name, None, folders)
        raise UnreadableError(f"{name} has no file")
    return Module(name, spec.origin, folders)


def _version(file: str) -> tuple[str, int, int]:
    try:
        status = Path(file).stat()
    except OSError:
        raise UnreadableError(f"{file} cannot be read") from None
    return file, status.st_mtime_ns, status.st_size


@lru_cache(maxsize=256)
def _text(file: str, mtime_ns: int, size: int) -> str:
    if not file.endswith(".py"):
        raise UnreadableError(f"{file} is no source")
    try:
        return importlib.util.decode_source(Path(file).read_bytes())
    except (OSError, UnicodeDecodeError, SyntaxError, LookupError):
        raise UnreadableError(f"{file} cannot be read") from None


@lru_cache(maxsize=256)
def _tree(file: str, mtime_ns: int, size: int) -> ast.Module:
    try:
        return ast.parse(_text(file, mtime_ns, size))
    except SyntaxError as error:
        raise BrokenError(error.msg, file, error.lineno or 1) from None
    except (ValueError, RecursionError, MemoryError):
        raise UnreadableError(f"{file} cannot be read") from None
