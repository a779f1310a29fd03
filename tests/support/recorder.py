"""Records which functions of the package run in a process, for `scripts/record.py`, which starts it by a .pth file.

Each function of the package gets a first statement `__reached__["trainer_cli.module:Class.method"]`. `__reached__` is a
dictionary that writes down a name when it is first asked for, at once, so that nothing is lost where the process is
killed. A trace or profile function would make tests several times slower, and Python 3.11 has no sys.monitoring.
"""

from __future__ import annotations

import ast
import builtins
import marshal
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from threading import get_ident
from types import CodeType, ModuleType

PACKAGE = "trainer_cli"
# Tests make these fail.
_open, _write, _close = os.open, os.write, os.close


class Recorder(dict[str, None]):
    """Writes each name once to the file that the environment names."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.importing: set[int] = set()
        """The threads that execute a module of the package: what runs then, runs for all tests."""

    def __missing__(self, name: str) -> None:
        if get_ident() in self.importing:
            return
        self[name] = None
        if test := os.environ.get("REACHED_BY"):
            try:
                file = _open(f"{self.folder}/{test}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                _write(file, f"{name}\n".encode())
                _close(file)
            except OSError:
                # A test that is another user for a moment, or has no descriptor left.
                pass


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        # One run has one tree: what is compiled is not compared with the source.
        compiled = Path(recorder.folder, "code", fullname)
        try:
            code = marshal.loads(compiled.read_bytes())
        except (OSError, EOFError, ValueError):
            code = compile(add_calls(self.get_data(self.path), fullname), self.path, "exec", dont_inherit=True)
            part = compiled.with_name(f"{fullname}.{os.getpid()}")
            part.write_bytes(marshal.dumps(code))
            part.replace(compiled)
        assert isinstance(code, CodeType)
        return code

    def exec_module(self, module: ModuleType) -> None:
        thread, was_importing = get_ident(), get_ident() in recorder.importing
        recorder.importing.add(thread)
        try:
            super().exec_module(module)
        finally:
            if not was_importing:
                recorder.importing.discard(thread)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != PACKAGE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def add_calls(source: bytes, module: str) -> ast.Module:
    """The syntax tree of a module, with a first statement in each function that records it."""
    tree = ast.parse(source)

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)
            else:
                name = f"{prefix}{child.name}"
                visit(child, f"{name}.<locals>.")
                text = f"__reached__[{f'{module}:{name}'!r}]"
                statement = ast.parse(text).body[0]
                first = int(ast.get_docstring(child, clean=False) is not None)
                at = child.body[min(first, len(child.body) - 1)]
                for each in ast.walk(statement):
                    ast.copy_location(each, at)
                child.body.insert(first, statement)

    visit(tree, "")
    return tree


def start(folder: str) -> None:
    """Record from now on what this process does, and each one that it starts."""
    global recorder
    if hasattr(builtins, "__reached__"):
        # The .pth file is read once for each of the environment's folders.
        return
    recorder = Recorder(folder)
    vars(builtins)["__reached__"] = recorder
    sys.meta_path.insert(0, _Finder())
    # What a forked process does again may be for another test.
    os.register_at_fork(after_in_child=recorder.clear)


recorder: Recorder
