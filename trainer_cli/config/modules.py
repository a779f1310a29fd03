"""Find modules by looking at files, without importing them: names that a target path lacks, and shadowed libraries.

`find_missing` reports only names that certainly do not exist; config/arguments.py later imports the target and reports
the others. `refuse_shadows` refuses modules of the project with the name of a library, since one hides the other.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from trainer_cli.errors import ConfigError


class Missing(NamedTuple):
    """A name on a path that does not exist."""

    message: str
    name: str
    candidates: tuple[str, ...]
    """The names that exist beside it."""


class _Module(NamedTuple):
    name: str
    file: str | None
    folders: list[str]
    """Folders of its submodules; empty for a plain module."""

    @property
    def source(self) -> str | None:
        """The source text; None for a compiled module or a namespace package."""
        if self.file is None or not self.file.endswith(".py"):
            return None
        try:
            # Not open(): a source may declare an encoding of its own in its first two lines.
            return importlib.util.decode_source(Path(self.file).read_bytes())
        except (OSError, UnicodeDecodeError, SyntaxError, LookupError):
            return None


_STAR = re.compile(r"^from\s+([.\w]+)\s+import\s+\*", re.M)
_DYNAMIC = re.compile(
    r"^\s*def __getattr__\(|^\s*from\s+[.\w]+\s+import\s+\*|\b(?:globals|vars|locals|exec|setattr)\s*\("
    r"|sys\.modules",
    re.M,
)


def find_missing(path: str, roots: Iterable[Path]) -> Missing | None:
    """The first name on a dotted path that certainly does not exist; None if all may exist.

    `roots` are searched before `sys.path`.
    """
    folders = [*map(str, roots), *sys.path]
    first, *names = path.split(".")
    module = _find(first, folders)
    if module is None:
        return Missing(f"there is no package {first!r}", first, tuple(_submodules(folders)))
    for depth, name in enumerate(names, start=1):
        submodule = _find(f"{module.name}.{name}", module.folders) if module.folders else None
        if submodule is None:
            if _may_define(module, name, last=depth == len(names)):
                return None
            kind = "package" if module.folders else "module"
            candidates = (*_defined(module), *_submodules(module.folders))
            return Missing(f"{kind} {module.name} has no {name!r}", name, candidates)
        module = submodule
    return None


def _may_define(module: _Module, name: str, *, last: bool) -> bool:
    """Whether a module may define a name: it occurs in the source, or names are set dynamically."""
    source = module.source
    if source is None or re.search(rf"\b{re.escape(name)}\b", source):
        return True
    if module.name == "torch":
        # torch sets some of its names dynamically, but no package that its source does not mention.
        return last or not name.islower()
    # The name may come from a module that this one imports with a star.
    starred = [_absolute(module, match[1]) for match in _STAR.finditer(source)]
    if _DYNAMIC.search(_STAR.sub("", source)) or _tree(source) is None:
        return True
    return any(
        _may_define(star_module, name, last=last) if star_module is not None else True for star_module in starred
    )


def _tree(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # Importing it reports the error with its line.


def _defined(module: _Module) -> Iterator[str]:
    """Names defined at the top level of a module, for suggestions."""
    tree = _tree(module.source or "")
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            if (star_module := _absolute(module, "." * node.level + (node.module or ""))) is not None:
                yield from _defined(star_module)
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


def _absolute(module: _Module, name: str) -> _Module | None:
    """The module of a star import; None if it is not a submodule of the same package."""
    prefix = "." if name.startswith(".") else f"{module.name}."
    submodule = name.removeprefix(prefix) if module.folders and name.startswith(prefix) else ""
    return _find(f"{module.name}.{submodule}", module.folders) if submodule.isidentifier() else None


def _find(name: str, folders: list[str]) -> _Module | None:
    """A module in the given folders; for a top-level name, one that another finder knows (built-in, editable) too."""
    try:
        # PathFinder reads folders only; util.find_spec would import the parent package of a submodule.
        spec = PathFinder.find_spec(name, folders)
        if spec is None and "." not in name:
            spec = importlib.util.find_spec(name)
    except (KeyError, ValueError, ImportError, AttributeError):
        return _Module(name, None, [])  # It cannot be searched without an import: assume that it exists.
    if spec is None:
        return None
    return _Module(name, spec.origin if spec.has_location else None, list(spec.submodule_search_locations or ()))


def _submodules(folders: Iterable[str]) -> Iterator[str]:
    for folder in folders:
        try:
            for path in Path(folder).iterdir():
                if path.suffix == ".py" or (path / "__init__.py").is_file():
                    yield path.stem
        except OSError:
            continue


_LIBRARIES = frozenset({
    "absl", "filelock", "fsspec", "grpc", "hydra", "jinja2", "markdown", "markupsafe", "mpmath", "networkx", "numpy",
    "omegaconf", "packaging", "PIL", "rich", "safetensors", "sympy", "tensorboard", "torch", "trainer_cli", "triton",
    "typing_extensions", "werkzeug", "xxhash", "yaml",
})  # fmt: skip
"""Libraries that a run imports, directly or through its dependencies."""
_UNUSED = frozenset({"antigravity", "idlelib", "lib2to3", "test", "this", "tkinter", "turtle", "turtledemo", "venv"})
"""Modules of Python that no run imports, so that hiding them does no harm."""


def refuse_shadows(root: Path) -> None:
    """Refuse modules in a project's root that have the name of a library.

    The root is first on `sys.path`: a library that is not imported yet would be taken from there.

    Raises:
        ConfigError: naming each module.
    """
    if shadows := sorted(_shadows(root)):
        raise ConfigError(
            "; ".join(shadows),
            location=str(root),
            hint="Rename it." if len(shadows) == 1 else "Rename them.",
        )


def _shadows(root: Path) -> Iterator[str]:
    package = Path(__file__).parents[1]
    try:
        paths = list(root.iterdir())
    except OSError:
        return  # Nothing is imported from a folder that cannot be listed.
    for path in paths:
        name, is_package = path.stem, not path.suffix and (path / "__init__.py").is_file()
        of_python = name in sys.stdlib_module_names - _UNUSED
        if not (path.suffix == ".py" or is_package) or not (of_python or name in _LIBRARIES):
            continue
        if is_package and name == package.name:
            continue  # a checkout of this program
        # A library that is imported already stays in use, so that the project's module cannot be reached.
        loaded = sys.modules.get(name)
        file = getattr(loaded, "__file__", None)
        is_own = file is not None and Path(file) in (path, path / "__init__.py")
        shadowed = f"Python's module {name}" if of_python else f"the library {name}"
        yield f"{path.name} {'hides' if loaded is None or is_own else 'is hidden by'} {shadowed}"
