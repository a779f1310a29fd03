"""The defaults lists in YAML files: their mistakes, and which entry chose the option of each group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from hydra.core.override_parser.types import Override

from trainer_cli.config.fields import KeyPath
from trainer_cli.config.hydra_compat import Merged
from trainer_cli.config.overrides import COMMAND_LINE, line_of
from trainer_cli.config.provenance import Choice, Origin, label
from trainer_cli.config.search_path import SearchPath, find
from trainer_cli.config.suggest import did_you_mean
from trainer_cli.errors import Code, ConfigError

_TEXT = "tag:yaml.org,2002:str"
_NULL = "tag:yaml.org,2002:null"
_HOW = "An entry is '- group: option', '- override /group: option', '- file' or '- _self_'."


def defaults_list_mistakes(
    document: yaml.Node | None, name: str, group: str, groups: Sequence[str]
) -> Iterator[ConfigError]:
    """What is wrong with the defaults list of a file that stands in the folder `group` (empty for the top)."""
    pairs = document.value if isinstance(document, yaml.MappingNode) else []
    listed = next((value for key, value in pairs if key.value == "defaults"), None)
    if listed is None:
        return

    def wrong(node: yaml.Node, what: str, hint: str = _HOW) -> ConfigError:
        source = f"{name}:{node.start_mark.line + 1}"
        return ConfigError(what, source=source, code=Code.defaults_list, hint=hint)

    if not isinstance(listed, yaml.SequenceNode):
        yield wrong(listed, "'defaults' must be a list")
        return
    selves = [entry for entry in listed.value if entry.value == "_self_"]
    for entry in selves[1:]:
        yield wrong(entry, f"_self_ stands twice, first in line {selves[0].start_mark.line + 1}", "Remove one of them.")
    override: yaml.Node | None = None
    for entry in listed.value:
        key = entry.value[0][0] if isinstance(entry, yaml.MappingNode) and entry.value else entry
        if "override" in str(key.value).split():
            override = override or key
        elif override is not None and key.value != "_self_":
            overridden = str(override.value).split()[-1].lstrip("/").partition("@")[0]
            what = f"an override of {overridden} stands before {str(key.value).lstrip('/')!r}"
            yield wrong(override, what, "Move overrides to the end of the list.")
            override = None
        if ".." in str(key.value).split("/"):
            yield wrong(entry, f"{key.value} leads out of its folder", "Name a group from the top: '- /GROUP: OPTION'.")
        elif isinstance(entry, yaml.MappingNode) and len(entry.value) == 1:
            key, option = entry.value[0]
            yield from _choice(key, option, group, groups, wrong)
        elif not (isinstance(entry, yaml.ScalarNode) and entry.tag == _TEXT):
            yield wrong(entry, "this entry of the defaults list is no choice")


def _choice(
    key: yaml.Node, option: yaml.Node, group: str, groups: Sequence[str], wrong: Callable[..., ConfigError]
) -> Iterator[ConfigError]:
    """What is wrong with one `- group: option`."""
    *words, last = str(key.value).split() or [""]
    chosen, _, _package = last.partition("@")
    resolved = chosen[1:] if chosen.startswith("/") else f"{group}/{chosen}".lstrip("/")
    texts = option.value if isinstance(option, yaml.SequenceNode) else [option]
    if not all(text.tag == _TEXT or (text is option and text.tag == _NULL) for text in texts):
        yield wrong(option, f"the option of {chosen} must be a name, a list of names, or null", "")
    if any(".." in str(text.value).split("/") for text in texts):
        yield wrong(option, f"an option of {chosen} leads out of its folder", "Name an option of the group.")
    elif not set(words) <= {"override", "optional"}:
        yield wrong(key, f"{' '.join(words)!r} before {chosen} is not known", "Known: override, optional.")
    elif "hydra" in (resolved.split("/")[0], chosen.split("/")[0]):
        yield wrong(key, f"{chosen.lstrip('/')} has no effect", "Hydra only composes the config here.")
    elif resolved in groups:
        return
    elif chosen in groups:
        written = f"- {option.value}" if chosen == group else f"- override /{last}: {option.value}"
        yield wrong(key, f"{chosen} is looked for below {group}/", f"Write '{written}'.")
    elif "optional" not in words:
        hint = f"There are: {', '.join(groups)}.{did_you_mean(chosen.lstrip('/'), groups)}"
        yield wrong(key, f"there is no group '{resolved}'", hint)


class _Entry(NamedTuple):
    """An entry of a defaults list: `option` of `group`, or none of it."""

    group: str
    option: str | None
    origin: Origin
    is_override: bool


def choices(
    search: SearchPath,
    listed: Sequence[Merged],
    overrides: Sequence[Override],
    read: Callable[[Path], yaml.Node | None],
) -> dict[KeyPath, Choice]:
    """Section -> the choice of its group. An option that is merged into the tree's root is under `(group,)`.

    `read` returns the YAML document of a file that was merged.
    """
    files = {one.name: file for one in listed if (file := find(search.dirs, one.name))}
    entries = [
        _Entry(group, option, Origin(f"{label(file, search.cwd)}:{line}", f"{group}={option or 'null'}"), is_override)
        for name, file in files.items()
        for group, option, line, is_override in _listed(read(file), name.rpartition("/")[0])
    ]
    # An override comes before what it overrides; of several the first counts, as in Hydra.
    entries.sort(key=lambda entry: not entry.is_override)
    groups = [override for override in overrides if search.is_choice(override)]
    # experiment=x was rewritten to +experiment=x.
    written = {path: line_of(override).removeprefix("+") for override in groups for path in _paths(override)}
    found: dict[KeyPath, Choice] = {}
    for one in listed:
        group = one.name.rpartition("/")[0]
        file = files.get(one.name)
        if not group or file is None:
            continue
        section = _path(one.package or group)
        by = _who(one.name, written, entries)
        if by is not None:
            found[section] = Choice(by, label(file, search.cwd))
    # The rest chose nothing: null, or ~group.
    for override in groups:
        found.setdefault(_path(override.key_or_group), Choice(Origin(COMMAND_LINE, line_of(override))))
    for entry in entries:
        if entry.option is None and entry.group != "experiment":  # as if the line were not there
            found.setdefault(_path(entry.group), Choice(entry.origin))
    # A run that is not named is called after its experiment.
    experiments = [choice for section, choice in found.items() if section[0] == "experiment"]
    return {**found, ("name",): experiments[-1]} if experiments else found


def _path(name: str) -> KeyPath:
    return tuple(name.replace("/", ".").split("."))


def _paths(override: Override) -> list[str]:
    """The files that a choice on the command line names."""
    value = None if override.is_delete() else override.value()
    options = value if isinstance(value, list) else [value]
    return [f"{override.key_or_group}/{str(one).removesuffix('.yaml')}" for one in options if one is not None]


def _who(path: str, written: dict[str, str], entries: Sequence[_Entry]) -> Origin | None:
    """Who chose a file: the command line, or the first entry that names it."""
    if path in written:
        return Origin(COMMAND_LINE, written[path])
    return next((entry.origin for entry in entries if f"{entry.group}/{entry.option}" == path), None)


def _listed(node: yaml.Node | None, folder: str) -> Iterator[tuple[str, str | None, int, bool]]:
    """Group, option, line, and whether it overrides, of each entry; a relative group is one within `folder`."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    lists = [value for key, value in pairs if key.value == "defaults" and isinstance(value, yaml.SequenceNode)]
    for entry in (entry for one in lists for entry in one.value if isinstance(entry, yaml.MappingNode)):
        for key, value in entry.value:
            words = str(key.value).split() or [""]
            name = words[-1].partition("@")[0]
            group = name[1:] if name.startswith("/") else f"{folder}/{name}".lstrip("/")
            for item in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                option = None if item.tag == _NULL else str(item.value).removesuffix(".yaml")
                yield group, option, key.start_mark.line + 1, "override" in words
