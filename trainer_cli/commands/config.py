"""`train config`: print the composed config, where each value comes from, what differs, or every key of the schema.

Hydra and OmegaConf are imported inside functions: the help, shell completion and `--schema` answer without them.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.commands.choices import experiment_by_name
from trainer_cli.commands.command_line import add_config_arguments
from trainer_cli.errors import CheckpointError, TrainError, UserError
from trainer_cli.gc_pause import gc_paused
from trainer_cli.layout import CONFIG_FILE
from trainer_cli.patterns import did_you_mean
from trainer_cli.terminal import beside, format_count, line_width, print_json
from trainer_cli.values import to_yaml_line

if TYPE_CHECKING:
    from trainer_cli.config import Composed
    from trainer_cli.keys import KeyPath

EXAMPLES = """examples:
  train config digits optimizer.lr=0.01
  train config digits --provenance
  train config digits model=mlp --diff digits
  train config digits --diff runs/digits
  train config --fields

It imports no class, so the values of a class's arguments are checked by `train plan` and `train fit` alone.
"""
_RESOLVER = re.compile(r"\$\{[^${}]*:")
_HIDDEN = "(hidden)"
"""Stands for a value that calls a resolver."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the overrides, and the flags that choose what is printed."""
    add_config_arguments(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--provenance", action="store_true", help="show the values that are set, and where")
    output.add_argument(
        "--diff",
        nargs="?",
        const="",
        metavar="OTHER",
        help="show only what differs, from OTHER's value to this config's. OTHER is a run directory, a checkpoint or "
        "RUN@latest; or overrides after an equals sign (--diff='model=mlp seed=1'); without OTHER: the config without "
        "overrides. A second run may follow instead of overrides",
    )
    output.add_argument(
        "--fields",
        nargs="?",
        const="",
        metavar="KEY",
        help="show every key with its default and meaning; with KEY that one, and those below it",
    )
    output.add_argument("--json", action="store_true", help="print the composed config as JSON")
    output.add_argument("--schema", action="store_true", help="print the JSON Schema that editors check YAML with")


def before_parsing(words: Sequence[str]) -> list[str]:
    """Join `--diff` and its OTHER by an equals sign. An override after `--diff` belongs to this config."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] == "--diff" and not word.startswith("-"):
            # A run directory may have an equals sign in its name, such as those of a sweep.
            joined[-1:] = ["--diff=", word] if _is_override(word) else [f"--diff={word}"]
        else:
            joined.append(word)
    return joined


# Composing makes many objects and no garbage.
@gc_paused()
def run(args: argparse.Namespace) -> int:
    """Print what the flags ask for. Values that must still be given show as `???`."""
    settings = {"config_dir": args.config_dir, "config_name": args.config_name, "missing_ok": True}
    if args.schema:
        from trainer_cli.keys import json_schema

        print_json(json_schema())
    elif args.fields is not None:
        print("\n".join(field_lines(args.fields)))
    elif args.provenance:
        print("\n".join(provenance_lines(args.overrides, settings)))
    elif args.diff is not None:
        print("\n".join(difference_lines(args.diff, args.overrides, settings)))
    else:
        from trainer_cli.config import compose

        # It is left unresolved, so that no secret of the environment is printed.
        text = compose(args.overrides, **settings).to_yaml()
        if args.json:
            import yaml

            # Of the YAML, so that both outputs hold the same values.
            print_json(yaml.safe_load(text))
        else:
            print(text, end="")
    return 0


def field_lines(key: str = "") -> Iterator[str]:
    """Every key of the schema as YAML, with its default, its meaning, and whether it may change on a resume.

    With `key` only this key, the keys below it, and the sections above it.

    Raises:
        UserError: there is no such key.
    """
    from trainer_cli.keys import list_keys

    path = tuple(key.split(".")) if key else ()
    if path and path not in {entry.path for entry in list_keys()}:
        sections = ", ".join(entry.key for entry in list_keys() if len(entry.path) == 1)
        hint = did_you_mean(key, [entry.key for entry in list_keys()]).strip() or f"The topmost keys are {sections}."
        raise UserError(f"there is no key {key!r}", where="--fields", cure=hint)
    for entry in list_keys():
        length = min(len(path), len(entry.path))
        is_on_path = entry.path[:length] == path[:length]
        if not is_on_path or (len(entry.path) < len(path) and not entry.is_section):
            continue
        indent = "  " * (len(entry.path) - 1)
        if entry.is_section:
            yield beside(f"{indent}# ", entry.meaning, line_width(sys.stdout), sign="# ")
            yield f"{indent}{entry.path[-1]}:"
        else:
            resume = " May change on a resume." if entry.may_change else ""
            label = f"{f'{indent}{entry.path[-1]}: {to_yaml_line(entry.default)}':<36}  # "
            yield beside(label, f"{entry.meaning}{resume}", line_width(sys.stdout), sign="# ")


def difference_lines(other: str, overrides: Sequence[str], settings: Mapping[str, Any]) -> Iterator[str]:
    """The keys that differ, each with the value in `other`, the value in this config, and what set the latter."""
    from trainer_cli.config import compose, diff, from_yaml

    file = _find_config_file(other) if other else None
    words = [] if file is not None else _split_overrides(other, settings["config_dir"])
    # A second run or checkpoint may stand in place of overrides.
    is_name = len(overrides) == 1 and not _is_override(overrides[0])
    second = _find_config_file(overrides[0]) if is_name else None
    if is_name and second is None:
        overrides = _split_overrides(overrides[0], settings["config_dir"])
    old = from_yaml(file, trusted=True, **settings) if file is not None else compose(words, **settings)
    new = from_yaml(second, trusted=True, **settings) if second is not None else compose(overrides, **settings)
    changes = diff(old.raw, new.raw)
    if not changes:
        yield "no difference"
        return
    yield f"# from: {file or shlex.join(words) or 'no overrides'}"
    yield f"# to: {second or shlex.join(overrides) or 'no overrides'}"
    yield from _align_comments([(str(change), str(change.origin(new.tree) or "")) for change in changes])


def _find_config_file(name: str) -> Path | None:
    """Find the config of a run directory, a checkpoint, `RUN@latest` or a file; None for other names.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged or holds no config.
        UserError: the name is a folder that is neither run nor checkpoint.
    """
    from trainer_cli.runs import RunDir, is_checkpoint
    from trainer_cli.selection import StoredCheckpoint, select_one

    path = Path(name)
    if path.is_file():
        return path
    if RunDir(path).is_run():
        return path / CONFIG_FILE
    if not path.is_dir() and not _is_run_at(name):
        return None
    if path.is_dir() and not is_checkpoint(path):
        cure = "Name a run directory, which holds a config.yaml, a checkpoint in one, or RUN@latest."
        raise UserError(f"{name} is neither a run directory nor a checkpoint", where="--diff", cure=cure)
    try:
        checkpoint = select_one(name)
        source, _ = StoredCheckpoint(checkpoint).read_config()
    except TrainError as error:
        error.where = "--diff"
        raise
    if not source:
        raise CheckpointError(f"{checkpoint} holds no {CONFIG_FILE}")
    return Path(source)


def _is_override(word: str) -> bool:
    """Whether a word is an override, and not a path with an equals sign in it."""
    return ("=" in word or word.startswith("~")) and not _is_on_disk(word)


def _is_on_disk(name: str) -> bool:
    """Whether a name with `=` is a path: the name of a sweep's run has one."""
    from trainer_cli.runs import is_checkpoint

    path = Path(name)
    return path.is_file() or (path / CONFIG_FILE).is_file() or is_checkpoint(path) or _is_run_at(name)


def _is_run_at(name: str) -> bool:
    """Whether a name is `RUN@latest`, and not an override: the name of a sweep's run has `=` too."""
    run, at, selector = name.rpartition("@")
    return bool(at) and "=" not in selector and ("=" not in run or Path(run).is_dir())


def _split_overrides(text: str, config_dir: Path | None) -> list[str]:
    """Split the overrides of the other config as a shell would."""
    cure = "Name a run directory, a checkpoint or RUN@latest, or overrides, as --diff='model=cnn seed=1'."
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"cannot read {text!r}: {error}", where="--diff", cure=cure) from None
    words = experiment_by_name(words, config_dir)
    if any("=" not in word and not word.startswith("~") for word in words):
        from trainer_cli.selection import suggest_nearby

        nearby = suggest_nearby(text) if len(words) == 1 and "/" in text else None
        message = f"there is no {text!r}, and it is not a list of overrides"
        raise UserError(message, where="--diff", cure=" ".join(filter(None, (nearby, cure))))
    return words


def provenance_lines(overrides: Sequence[str], settings: Mapping[str, Any]) -> Iterator[str]:
    """The values that are set as YAML, each with its origin, what chose each option, and the number of defaults."""
    from omegaconf import OmegaConf

    from trainer_cli.config import compose
    from trainer_cli.keys import whole_values

    composed = compose(overrides, **settings)
    tree = composed.tree
    values = composed.raw
    for section, choice in tree.choices.items():
        if section[0] not in values:
            yield f"# {choice.origin}"
    yield from _align_comments(
        list(_provenance_rows(composed, values, (), OmegaConf.create(_without_resolvers(values))))
    )
    paths = [path for path, _ in whole_values(values)]
    defaults = sum(tree.is_default(path) for path in paths)
    counted = f"{defaults:,} of {format_count(len(paths), 'value')} are defaults; train config shows them"
    yield beside("# ", counted, line_width(sys.stdout), sign="# ")


def _provenance_rows(
    composed: Composed, values: Mapping[Any, Any], path: KeyPath, resolving: Any
) -> Iterator[tuple[str, str]]:
    """(line of YAML, origin of its value) of each key that is set in the section at `path`.

    `resolving` is the section as OmegaConf has it, which resolves interpolations.
    """
    tree, indent = composed.tree, "  " * len(path)
    for key, value in values.items():
        key_path = (*path, str(key))
        if isinstance(value, Mapping) and value:
            rows = list(_provenance_rows(composed, value, key_path, resolving[key]))
            if rows:
                yield f"{indent}{to_yaml_line(key)}:", str(tree.chosen(key_path) or "")
                yield from rows
        elif not tree.is_default(key_path):
            result = _resolve(resolving, key, value)
            note = f" ({result})" if result else ""
            yield f"{indent}{to_yaml_line(key)}: {to_yaml_line(value)}", f"{tree.exact(key_path)}{note}"


def _without_resolvers(value: Any) -> Any:
    """The values with each that calls a resolver replaced: `${oc.env:…}` may be a secret."""
    if isinstance(value, Mapping):
        return {key: _without_resolvers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_resolvers(item) for item in value]
    return _HIDDEN if isinstance(value, str) and _RESOLVER.search(value) else value


def _resolve(resolving: Any, key: Any, value: Any) -> str:
    """The result of a value's interpolations; empty if it has none, or if a resolver takes part."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if "${" not in str(value):
        return ""
    try:
        node = resolving[key]
        result = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException:
        return ""
    return "" if _HIDDEN in str(result) else to_yaml_line(result)


def _align_comments(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Lines, each followed by its comment; the comments are aligned unless a line is too long.

    On a terminal that is too narrow, those of each section are aligned, and a comment without room is above its line.
    """
    width, column = line_width(sys.stdout), min(60, max(len(text) for text, _ in rows))
    if all(_fits(row, width, column) for row in rows):
        sections = [rows]
    else:
        # A section begins with a key without indentation.
        begins = [index for index, (text, _) in enumerate(rows) if text.endswith(":") and not text.startswith(" ")]
        sections = [rows[begin:end] for begin, end in pairwise([0, *begins, len(rows)]) if begin < end]
        column = 0
    for section in sections:
        section_column = column or max((len(row[0]) for row in section if _fits(row, width)), default=0)
        for text, comment in section:
            if not comment:
                yield text
            elif _fits((text, comment), width, section_column):
                yield f"{text:<{section_column}}  # {comment}"
            elif _fits((text, comment), width):
                yield f"{text}  # {comment}"
            else:
                yield from (f"{' ' * (len(text) - len(text.lstrip()))}# {comment}", text)


def _fits(row: tuple[str, str], width: int, column: int = 0) -> bool:
    """Whether a line with its comment at a column is at most `width` letters long."""
    text, comment = row
    return max(column, len(text)) + len(f"  # {comment}") <= width
