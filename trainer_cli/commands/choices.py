"""What there is to choose from, and what can be set: read from files and the schema alone, so that it is quick.

Listing, completing and guessing what was meant all ask here; neither Hydra nor torch is imported.

What was probably meant by a command that cannot be read: the likeliest mistakes, each with its cure.
"""

from __future__ import annotations

import shlex
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from trainer_cli.config import search_path
from trainer_cli.config.fields import whole_values
from trainer_cli.core.patterns import did_you_mean, nearest
from trainer_cli.errors import UserError

if TYPE_CHECKING:
    from trainer_cli.config.fields import ConfigKey

EXPERIMENT = "experiment"


@dataclass(frozen=True, slots=True)
class Choices:
    """The folders of configs in use, in the order in which they are searched."""

    dirs: list[Path]
    shipped: Path | None = None
    """That of `dirs` which is not the user's."""

    @classmethod
    def of(cls, config_dir: Path | None = None, cwd: Path | None = None) -> Choices:
        """What stands in `--config-dir`, `./configs` and the shipped folder.

        Raises:
            ConfigError: `config_dir` is no folder.
        """
        shipped = search_path.shipped_configs(search_path.PACKAGE)
        dirs = search_path.config_dirs(config_dir, cwd or Path.cwd(), search_path.PACKAGE)
        return cls(dirs, None if shipped is None else shipped.resolve())

    @property
    def groups(self) -> list[str]:
        """Names of all groups, `experiment` first."""
        return search_path.groups(self.dirs)

    def options(self, group: str) -> dict[str, Path]:
        """Option -> file of a group: the user's own first, each part sorted."""
        found = search_path.options(self.dirs, group)
        return dict(sorted(found.items(), key=lambda item: (not self.is_own(item[1]), item[0])))

    def is_own(self, file: Path) -> bool:
        """Whether a config file is the user's, and not one of those that ship."""
        return self.shipped is None or self.shipped not in file.parents

    def groups_with(self, option: str) -> list[str]:
        """The groups that have an option of this name."""
        return [group for group in self.groups if option in search_path.options(self.dirs, group)]

    def settings(self, primary: str, words: Iterable[str]) -> dict[str, Any]:
        """Dotted key -> value in every component that the words choose: their own keys, the experiment's on top.

        This is a guess for completion, made without composing: interpolations and nested defaults are left out.
        """
        chosen = {key.lstrip("+"): value for word in words for key, _, value in [word.partition("=")]}
        experiment = self._read(f"{EXPERIMENT}/{chosen[EXPERIMENT]}") if EXPERIMENT in chosen else {}
        options = {**_defaults(self._read(primary)), **_defaults(experiment), **chosen}
        chosen_groups = [group for group in self.groups if group != EXPERIMENT and group in options]
        components = {group: self._read(f"{group}/{options[group]}") for group in chosen_groups}
        trees = (components, experiment)
        return {".".join(path): value for tree in trees for path, value in whole_values(tree)}

    def _read(self, name: str) -> dict[Any, Any]:
        import yaml

        file = search_path.find(self.dirs, name)
        try:
            content = yaml.safe_load(file.read_text("utf-8")) if file is not None else None
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            return {}  # Composing reports the mistake; here the file offers nothing.
        return content if isinstance(content, dict) else {}


def keys() -> dict[str, ConfigKey]:
    """Every dotted key of the schema that is no section."""
    from trainer_cli.config.fields import fields

    return {one.key: one for one in fields() if not one.is_section}


def sections() -> list[str]:
    """The closed sections of the schema."""
    from trainer_cli.config.fields import fields

    return [one.key for one in fields() if one.is_section]


def values_of(kind: Any) -> Iterator[str]:
    """The values of a type that are known beforehand, if it has such."""
    if get_origin(kind) in (Union, types.UnionType):
        for part in get_args(kind):
            yield from ("null",) if part is type(None) else values_of(part)
    elif kind is bool:
        yield from ("true", "false")
    elif isinstance(kind, type) and issubclass(kind, Enum):
        yield from (member.name for member in kind)


def _defaults(content: Mapping[Any, Any]) -> dict[str, str]:
    """Group -> option, as a file's defaults list chooses them."""
    entries = content.get("defaults")
    found: dict[str, str] = {}
    for entry in entries if isinstance(entries, Sequence) else ():
        for key, value in entry.items() if isinstance(entry, Mapping) else ():
            found[str(key).split()[-1].partition("@")[0].lstrip("/")] = str(value)
    return found


_LISTED = 8
"""Experiments that a cure names."""
_PATH_SIGNS = ("/", "*", "@")
_ELSEWHERE = {
    **dict.fromkeys(("epochs", "max_epochs", "num_epochs"), "loop.max_duration={}ep"),
    **dict.fromkeys(("steps", "max_steps", "num_steps"), "loop.max_duration={}st"),
}
"""What other trainers' flags are called here."""


def no_verb(word: str, arguments: Sequence[str], verbs: Iterable[str]) -> UserError:
    """A first word that is no verb: an override without one, an experiment, a flag, or a misspelling."""
    whole = shlex.join(arguments)
    if "=" in word and not word.startswith("-"):
        return UserError(f"{word!r} stands where a verb belongs", cure=f"Did you mean 'train fit {whole}'?")
    if word.startswith("-"):
        return UserError(f"{word!r} stands where a verb belongs", cure="Write train VERB first; see train --help.")
    known = list(verbs)
    cure = did_you_mean(word, known).strip()
    if not cure and word in Choices.of().options(EXPERIMENT):
        rest = shlex.join([f"experiment={word}", *arguments[1:]])
        return UserError(f"{word!r} is an experiment, and no verb", cure=f"Did you mean 'train fit {rest}'?")
    return UserError(f"there is no verb {word!r}", cure=cure or f"There are: {', '.join(known)}.")


def no_action(verb: str, arguments: Sequence[str], actions: Iterable[str]) -> UserError:
    """A verb of several actions without one of them in the first place."""
    known = list(actions)
    cure = f"There are: {', '.join(known)}."
    if not arguments:
        return UserError(f"train {verb} needs an action", cure=cure)
    word = arguments[0]
    if word.startswith("-"):
        rest = [one for one in arguments if one in known]
        meant = f"Did you mean 'train {verb} {rest[0]} {word}'?" if rest else cure
        return UserError(f"{word!r} stands where an action of train {verb} belongs", cure=meant)
    return UserError(f"train {verb} has no action {word!r}", cure=did_you_mean(word, known).strip() or cure)


def no_flag(
    flag: str,
    arguments: Sequence[str],
    flags: Iterable[str],
    *,
    verb: str,
    overrides: bool,
    owners: Sequence[str] = (),
) -> UserError:
    """A flag that the verb does not have: mostly a key written as one (`--experiment digits`).

    `owners` are the other actions of the verb that have it.
    """
    name, equals, value = flag.partition("=")
    what = f"train {verb} has no flag {name}"
    if owners:
        return UserError(what, cure=f"It is one of {', '.join(owners)}; see train {verb} --help.")
    key = name.lstrip("-").replace("-", "_")
    if overrides and key:
        if not equals:
            rest = arguments[arguments.index(flag) + 1 :] if flag in arguments else ()
            value = rest[0] if rest and not rest[0].startswith("-") and "=" not in rest[0] else "VALUE"
        settings = [*Choices.of().settings("config", arguments), *keys()]
        if key in settings or key in Choices.of().groups:
            return UserError(what, cure=f"Did you mean '{key}={value}'?")
        if key in _ELSEWHERE:
            return UserError(what, cure=f"Did you mean '{_ELSEWHERE[key].format(value)}'?")
        owners = [setting for setting in settings if setting.rpartition(".")[2] == key]
        if owners:
            listed = " or ".join(f"'{owner}={value}'" for owner in owners[:3])
            return UserError(what, cure=f"Did you mean {listed}?")
    cure = did_you_mean(name, flags).strip()
    if not cure and overrides:
        cure = f"Values are given as key=value, without dashes. See train {verb} --help."
    return UserError(what, cure=cure or f"See train {verb} --help.")


def experiment_by_name(words: Sequence[str], config_dir: Path | None) -> list[str]:
    """The overrides, with the name of an experiment as the first word written as `experiment=NAME`."""
    chosen = any(word.lstrip("+").startswith("experiment=") for word in words)
    if chosen or words[0] not in Choices.of(config_dir).options(EXPERIMENT):
        return list(words)
    return [f"experiment={words[0]}", *words[1:]]


def stray_word(words: Sequence[str], *, verb: str, config_dir: Path | None) -> UserError | None:
    """The cure for the first word among overrides that sets nothing, where one suggests itself."""
    index = next((i for i, word in enumerate(words) if "=" not in word and word.strip("~") == word), None)
    if index is None:
        return None
    word = words[index]
    if (joined := _joined(words, index)) is not None:
        return UserError(f"{word!r} stands by itself", where="command line", cure=f"Write '{joined}', without spaces.")
    following = words[index + 1] if index + 1 < len(words) and "=" not in words[index + 1] else None
    meant = _meant(word, following, Choices.of(config_dir), verb)
    if meant is None:
        return None
    return UserError(f"{word!r} stands where key=value belongs", where="command line", cure=meant)


def _joined(words: Sequence[str], index: int) -> str | None:
    """An override that spaces around its `=` have torn apart, put together again; `index` is of a part without one."""
    before, word, *after = ["", *words, "", ""][index : index + 4]
    if after[0] == "=":
        return f"{word}={after[1]}"
    if after[0].startswith("="):
        return f"{word}{after[0]}"
    return f"{before}{word}" if before.endswith("=") and before.count("=") == 1 else None


def _meant(word: str, following: str | None, choices: Choices, verb: str) -> str | None:
    name = word.lstrip("+-")
    if following is not None and (name in choices.groups or name in keys()) and name not in sections():
        return f"Did you mean '{name}={following}'?"
    if groups := choices.groups_with(name):
        return f"Did you mean {' or '.join(repr(f'{group}={name}') for group in groups)}?"
    path = Path(word)
    if path.suffix == ".yaml" and (groups := choices.groups_with(path.stem)):
        return f"Did you mean '{path.parent.name if path.parent.name in groups else groups[0]}={path.stem}'?"
    if verb == "validate" and any(sign in word for sign in _PATH_SIGNS):
        return (
            "Write ckpt='GLOB', in quotes, so that the shell leaves the glob alone."
            if following
            else (f"Did you mean 'ckpt={word}'?")
        )
    if name in choices.groups or name in keys():
        return f"Write {name}=VALUE."
    experiments = list(choices.options(EXPERIMENT))
    if near := nearest(name, experiments):
        return f"Did you mean 'experiment={near}'?"
    if name.isidentifier():
        more = ", …" if len(experiments) > _LISTED else ""
        return f"Write key=value, or the name of an experiment: {', '.join(experiments[:_LISTED])}{more}."
    return None
