"""Every key of the config with its type, default and meaning, read from config/schema.py and nowhere else."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from trainer_cli.config import schema
from trainer_cli.config.resumable import why_may_change


@dataclasses.dataclass(frozen=True, slots=True)
class Described:
    """A key, or a section, whose `kind` is then its dataclass. `rules` are what `at_least` and `duration` say of it."""

    path: tuple[str, ...]
    kind: Any
    default: Any
    meaning: str
    rules: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The path with dots."""
        return ".".join(self.path)

    @property
    def is_section(self) -> bool:
        """Whether further keys stand below it, and no others can."""
        return dataclasses.is_dataclass(self.kind)

    @property
    def may_change(self) -> str | None:
        """Why it may change on a resume, or None."""
        return None if self.is_section else why_may_change(self.key)


@cache
def fields() -> tuple[Described, ...]:
    """Every key in the order of the YAML, each section before its keys."""
    return tuple(_fields(schema.TrainConfig, ()))


def _fields(section: type, path: tuple[str, ...]) -> Iterator[Described]:
    meanings = _meanings()
    for one in dataclasses.fields(section):
        here = (*path, one.name)
        if dataclasses.is_dataclass(one.type):
            assert isinstance(one.type, type)
            yield Described(here, one.type, None, meanings[one.type.__name__][""], one.metadata)
            yield from _fields(one.type, here)
        else:
            made = one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default
            default = made.value if isinstance(made, Enum) else made
            yield Described(here, one.type, default, meanings[section.__name__].get(one.name, ""), one.metadata)


@cache
def _meanings() -> dict[str, dict[str, str]]:
    """Class -> field -> the docstring under it; the class's own under the empty name."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(Path(schema.__file__).read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {"": ast.get_docstring(node) or ""}
            for statement, below in zip(node.body, node.body[1:], strict=False):
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    found[node.name][statement.target.id] = _docstring(below)
    return found


def _docstring(node: ast.stmt) -> str:
    text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else ""
    return " ".join(text.split()) if isinstance(text, str) else ""
