"""`train config`: the composed config, where each value comes from, what differs, what keys there are."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trainer_cli.cli.main import add_config_arguments
from trainer_cli.config import check, schema
from trainer_cli.config.compose import Composed, compose, diff, to_yaml
from trainer_cli.config.difference import shown
from trainer_cli.config.overrides import KeyPath


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    add_config_arguments(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--provenance", action="store_true", help="show where each value comes from")
    what.add_argument("--diff", action="store_true", help="show only what differs from the config without overrides")
    what.add_argument("--schema", action="store_true", help="show every key with its default and meaning")


def run(args: argparse.Namespace) -> int:
    """Print what is asked for. Values that must still be given show as `???`."""
    if args.schema:
        print("\n".join(describe()))
        return 0
    ask = partial(compose, config_dir=args.config_dir, config_name=args.config_name, missing_ok=True)
    composed = ask(args.overrides)
    if args.provenance:
        print("\n".join(_provenance(composed)))
    elif args.diff:
        changes = diff(ask([]).raw, composed.raw)
        print("\n".join(map(str, changes)) or "no difference")
    else:
        print(to_yaml(composed), end="")
    return 0


def describe() -> Iterator[str]:
    """Every key of the schema as YAML, with its default and the docstring under it as a comment."""
    meanings = _meanings()
    for key, value in check.plain().items():
        if isinstance(value, Mapping) and (section := _section(key)) in meanings:
            if text := meanings[section].get(""):
                yield f"# {text}"
            yield f"{key}:"
            for name, default in value.items():
                yield _line(f"  {name}: {shown(default)}", meanings[section].get(str(name), ""))
        else:
            yield _line(f"{key}: {shown(value)}", meanings["TrainConfig"].get(key, ""))


def _section(key: str) -> str:
    return f"{key.capitalize()}Config"


def _line(text: str, meaning: str) -> str:
    return f"{text:<36}  # {meaning}" if meaning else text


def _meanings() -> dict[str, dict[str, str]]:
    """Class -> field -> the docstring under it; the class's own under the empty name."""
    tree = ast.parse(Path(schema.__file__).read_text("utf-8"))
    found: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            fields = {"": ast.get_docstring(node) or ""}
            for statement, below in zip(node.body, node.body[1:], strict=False):
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    fields[statement.target.id] = _docstring(below)
            found[node.name] = fields
    return found


def _docstring(node: ast.stmt) -> str:
    text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else ""
    return " ".join(text.split()) if isinstance(text, str) else ""


def _provenance(composed: Composed) -> Iterator[str]:
    """The YAML with the origin of each value after it."""
    rows = list(_rows(composed, check.contents(composed.raw), ()))
    width = min(60, max(len(text) for text, _ in rows))
    for text, origin in rows:
        yield f"{text:<{width}}  # {origin}" if origin else text


def _rows(composed: Composed, values: Mapping[Any, Any], path: KeyPath) -> Iterator[tuple[str, str]]:
    indent = "  " * len(path)
    for key, value in values.items():
        here = (*path, str(key))
        name = shown(key)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:", ""
            yield from _rows(composed, value, here)
        else:
            yield f"{indent}{name}: {shown(value)}", composed.origins.of(here)
