"""`train config`: the composed config, where each value comes from, what differs, what keys there are.

What `train config` shows of a config: every key, what differs from another config, where each value comes from.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer_cli.commands.main import add_config_arguments
from trainer_cli.config.check import contents
from trainer_cli.config.compose import compose, diff, from_yaml
from trainer_cli.config.diff import shown
from trainer_cli.config.fields import KeyPath, fields
from trainer_cli.config.provenance import Provenance
from trainer_cli.core.gc_pause import uncollected
from trainer_cli.core.patterns import did_you_mean
from trainer_cli.errors import UserError

_RESOLVER = re.compile(r"\$\{[^${}]*:")
_HIDDEN = "(hidden)"


def field_lines(key: str = "") -> Iterator[str]:
    """Every key of the schema as YAML, with its default, its meaning, and whether it may change on a resume.

    With `key` that one, what is below it, and the sections above it.

    Raises:
        UserError: there is no such key.
    """
    path = tuple(key.split(".")) if key else ()
    if path and path not in {one.path for one in fields()}:
        sections = ", ".join(one.key for one in fields() if len(one.path) == 1)
        hint = did_you_mean(key, [one.key for one in fields()]).strip() or f"The topmost keys are {sections}."
        raise UserError(f"there is no key {key!r}", where="--fields", cure=hint)
    for one in fields():
        length = min(len(path), len(one.path))
        if one.path[:length] != path[:length] or (len(one.path) < len(path) and not one.is_section):
            continue
        indent = "  " * (len(one.path) - 1)
        if one.is_section:
            yield f"{indent}# {one.meaning}"
            yield f"{indent}{one.path[-1]}:"
        else:
            resume = " May change on a resume." if one.may_change else ""
            yield f"{f'{indent}{one.path[-1]}: {shown(one.default)}':<36}  # {one.meaning}{resume}"


def difference_lines(other: str, overrides: Sequence[str], places: Mapping[str, Any]) -> Iterator[str]:
    """The keys that differ, each with the value of `other`, that of this config, and what set the latter."""
    from trainer_cli.runs.start import config_file  # The parts of a checkpoint come with it.

    file = config_file(other) if other else None
    words = [] if file is not None else _overrides(other)
    old = from_yaml(file, trusted=True, **places) if file is not None else compose(words, **places)
    new = compose(overrides, **places)
    changes = diff(old.raw, new.raw)
    if not changes:
        yield "no difference"
        return
    yield f"# from: {file or shlex.join(words) or 'no overrides'}"
    yield f"# to: {shlex.join(overrides) or 'no overrides'}"
    yield from _commented([(str(change), str(change.origin(new.provenance) or "")) for change in changes])


def _overrides(text: str) -> list[str]:
    """The overrides of another composition, as a shell would split them."""
    cure = "Name a run directory, a checkpoint or RUN@latest, or overrides, as --diff='model=cnn seed=1'."
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"cannot read {text!r}: {error}", where="--diff", cure=cure) from None
    if any("=" not in word and not word.startswith("~") for word in words):
        raise UserError(f"there is no {text!r}, and it is no list of overrides", where="--diff", cure=cure)
    return words


def provenance_lines(overrides: Sequence[str], places: Mapping[str, Any]) -> Iterator[str]:
    """The YAML with the origin of each value after it, and who chose the option of each group."""
    composed = compose(overrides, **places)
    provenance = composed.provenance
    values = contents(composed.raw)
    for section, choice in provenance.choices.items():
        if section[0] not in values:
            yield f"# {choice.origin}"
    yield from _commented(list(_rows(provenance, values, (), OmegaConf.create(_without_resolvers(values)))))


def _rows(
    provenance: Provenance, values: Mapping[Any, Any], path: KeyPath, resolving: Any
) -> Iterator[tuple[str, str]]:
    indent = "  " * len(path)
    for key, value in values.items():
        here = (*path, str(key))
        if isinstance(value, Mapping) and value:
            yield f"{indent}{shown(key)}:", str(provenance.chosen(here, value) or "")
            yield from _rows(provenance, value, here, resolving[key])
        else:
            comes_to = f" ({found})" if (found := _resolved(resolving, key, value)) else ""
            yield f"{indent}{shown(key)}: {shown(value)}", f"{provenance.exact(here)}{comes_to}"


def _without_resolvers(value: Any) -> Any:
    """The values without what a resolver would give: `${oc.env:…}` may be a secret."""
    if isinstance(value, Mapping):
        return {key: _without_resolvers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_resolvers(item) for item in value]
    return _HIDDEN if isinstance(value, str) and _RESOLVER.search(value) else value


def _resolved(resolving: Any, key: Any, value: Any) -> str:
    """What a value with interpolations of other keys comes to; nothing if it has none, or a resolver is asked."""
    if "${" not in str(value):
        return ""
    try:
        node = resolving[key]
        found = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException:
        return ""
    return "" if _HIDDEN in str(found) else shown(found)


def _commented(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Lines with a comment after each, in one column as far as that is wide enough."""
    width = min(60, max(len(text) for text, _ in rows))
    for text, comment in rows:
        yield f"{text:<{width}}  # {comment}" if comment else text


EXAMPLES = """examples:
  train config +experiment=digits optimizer.lr=0.01
  train config +experiment=digits --provenance
  train config +experiment=digits model=mlp --diff=+experiment=digits
  train config --diff runs/digits +experiment=digits
  train config --fields
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    add_config_arguments(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--provenance", action="store_true", help="show where each value comes from")
    what.add_argument(
        "--diff",
        nargs="?",
        const="",
        metavar="OTHER",
        help="show only what differs, from OTHER's value to this config's. OTHER is a run directory, a checkpoint or "
        "RUN@latest; or overrides after an equals sign (--diff='model=mlp seed=1'); without OTHER: the config without "
        "overrides",
    )
    what.add_argument(
        "--fields",
        nargs="?",
        const="",
        metavar="KEY",
        help="show every key with its default and meaning; with KEY that one, and those below it",
    )
    what.add_argument("--json", action="store_true", help="print the composed config as JSON")
    what.add_argument("--schema", action="store_true", help="print the JSON Schema that editors check YAML with")


def before_parsing(words: Sequence[str]) -> list[str]:
    """Join `--diff` and its OTHER by an equals sign. An override after `--diff` is one of this config, and no OTHER."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] == "--diff" and not word.startswith("-"):
            from trainer_cli.runs.start import is_on_disk

            is_override = ("=" in word or word.startswith("~")) and not is_on_disk(word)
            joined[-1:] = ["--diff=", word] if is_override else [f"--diff={word}"]
        else:
            joined.append(word)
    return joined


@uncollected()
def run(args: argparse.Namespace) -> int:
    """Print the config. Values that must still be given show as `???`."""
    places = {"config_dir": args.config_dir, "config_name": args.config_name, "missing_ok": True}
    # Each way imports only what it needs: flags and help need no Hydra, and the schema too.
    if args.schema:
        import json

        from trainer_cli.config.json_schema import json_schema

        print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    elif args.provenance or args.fields is not None or args.diff is not None:
        if args.fields is not None:
            lines = field_lines(args.fields)
        elif args.provenance:
            lines = provenance_lines(args.overrides, places)
        else:
            lines = difference_lines(args.diff, args.overrides, places)
        print("\n".join(lines))
    else:
        from trainer_cli.config.compose import compose, to_yaml

        text = to_yaml(compose(args.overrides, **places))
        if args.json:
            import yaml

            from trainer_cli.terminal import print_json

            print_json(yaml.safe_load(text))
        else:
            print(text, end="")
    return 0
