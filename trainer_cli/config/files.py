"""Read the YAML files of one composition, check each alone, and tell which defaults list chose which option.

`ConfigFiles` reads a file once and checks it: its defaults list, the shape of each section, and settings of Hydra.
`find_choices` traces each option to the entry or override that chose it. `find_overruled` finds options that an
experiment overwrites.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.types import Override

from trainer_cli.config.hydra_compat import SCHEMA, Merged
from trainer_cli.config.overrides import line_of, override_error
from trainer_cli.config.search_path import SearchPath, search_folders
from trainer_cli.config.tree import COMMAND_LINE, ChosenOption, ConfigTree, Node, ValueOrigin
from trainer_cli.config.yaml import Reading, read_file
from trainer_cli.errors import Code, ConfigError
from trainer_cli.keys import OPEN, SEVERAL, KeyPath, sections, unknown_key, whole_values
from trainer_cli.patterns import find_nearest

log = logging.getLogger(__name__)

_BACKSLASH = "\\"
_ENTRY_FORMS = "An entry is '- group: option', '- override /group: option', '- file' or '- _self_'."


def check_defaults_list(tree: Node, group: str, groups: Sequence[str]) -> Iterator[ConfigError]:
    """Check the defaults list of a file in the folder `group` (empty for the top folder)."""
    defaults = tree.value.get("defaults")
    if defaults is None:
        return
    if not isinstance(defaults.value, list):
        hint = "Write an entry below it, or remove the line." if defaults.value is None else _ENTRY_FORMS
        first = next(iter(defaults.value.values()), defaults) if defaults.is_mapping else defaults
        yield _mistake(first, "'defaults' must be a list", hint)
        return
    self_entries = [entry for entry in defaults.value if entry.value == "_self_"]
    for entry in self_entries[1:]:
        line = self_entries[0].origin.source.rpartition(":")[2]
        yield _mistake(entry, f"_self_ is given twice, first in line {line}", "Remove one of them.")
    # Hydra requires overrides at the end of the list: the first one before another entry is reported.
    override: tuple[str, Node] | None = None
    for entry in defaults.value:
        key = str(next(iter(entry.value), "")) if entry.is_mapping else str(entry.value)
        if "override" in key.split():
            override = override or (key, entry)
        elif override is not None and key != "_self_":
            overridden = override[0].split()[-1].lstrip("/").partition("@")[0]
            message = f"an override of {overridden} comes before {key.lstrip('/')!r}"
            yield _mistake(override[1], message, "Move overrides to the end of the list.")
            override = None
        if entry.is_mapping and len(entry.value) == 1:
            yield from _check_choice(key, entry.value[next(iter(entry.value))], group, groups)
        elif not (isinstance(entry.value, str) and entry.value.strip()):
            yield _mistake(entry, "this entry of the defaults list is not a choice")
        else:
            yield from _check_config(entry)


def _mistake(node: Node, message: str, hint: str = _ENTRY_FORMS) -> ConfigError:
    """An error in a defaults list, at the line of a node."""
    return ConfigError(message, source=node.origin.source, code=Code.defaults_list, hint=hint)


def _check_config(entry: Node) -> Iterator[ConfigError]:
    """Check one `- file`."""
    *words, last = str(entry.value).split()
    name = last.partition("@")[0].lstrip("/")
    if name == "_self_" and entry.value != "_self_":
        yield _mistake(
            entry, f"'{entry.value}' is not an entry: a file's own values go to its own package", "Write '- _self_'."
        )
    elif words and words != ["optional"]:
        yield _mistake(entry, f"'{entry.value}' names no option", f"Write '- {entry.value}: OPTION'.")
    elif _BACKSLASH in last:
        yield _mistake(entry, f"{last} has a backslash", f"Write '{last.replace(_BACKSLASH, '/')}'.")
    elif ".." in last.split("/"):
        yield _mistake(entry, f"{last} leads out of its folder", "Name a group from the top: '- /GROUP: OPTION'.")


def _check_choice(key: str, option: Node, group: str, groups: Sequence[str]) -> Iterator[ConfigError]:
    """Check one `- group: option`, listed by a file in the folder `group`."""
    *words, last = key.split() or [""]
    chosen, at_sign, package = last.partition("@")
    resolved = chosen[1:] if chosen.startswith("/") else f"{group}/{chosen}".lstrip("/")
    plain_name = chosen.lstrip("./")
    if not plain_name or plain_name in ("override", "optional"):
        yield _mistake(option, "this entry names no group")
    elif plain_name == "_self_":
        yield _mistake(option, f"'{key}' is not an entry of a defaults list", "Write '- _self_'.")
    elif _BACKSLASH in key:
        yield _mistake(option, f"{key} has a backslash", f"Write '{key.replace(_BACKSLASH, '/')}'.")
    elif ".." in chosen.split("/"):
        yield _mistake(option, f"{last} leads out of its folder", "Name a group from the top: '- /GROUP: OPTION'.")
    elif not set(words) <= {"override", "optional"}:
        yield _mistake(option, f"{' '.join(words)!r} before {chosen} is not known", "Known: override, optional.")
    elif "hydra" in (resolved.split("/")[0], chosen.split("/")[0]):
        yield _mistake(option, f"{plain_name} has no effect", "Hydra only composes the config here.")
    elif resolved in groups:
        yield from _check_option(chosen, option)
        if at_sign:
            yield from _check_package(option, package)
    elif plain_name in groups:
        is_relative = not chosen.startswith((".", "/"))
        problem = f"looked for below {group}/" if is_relative else "no group of the root"
        correction = str(option.value)
        if plain_name != group:
            correction = write_entry(plain_name, correction, at_sign + package)
        yield _mistake(option, f"{chosen} is {problem}", f"Write '- {correction}'.")
    elif "optional" not in words:
        hint = f"Available: {', '.join(groups)}."
        if (suggestion := find_nearest(plain_name, groups)) is not None:
            given_words = words if words or not group else None
            correction = write_entry(suggestion, str(option.value), at_sign + package, given_words)
            hint += f" Did you mean '- {correction}'?" if isinstance(option.value, str) else f" '{suggestion}'?"
        yield _mistake(option, f"there is no group '{resolved}'", hint)


def write_entry(group: str, option: str, package: str = "", words: Sequence[str] | None = None) -> str:
    """The text of an entry that chooses an option of a top-level group.

    `package` begins with its `@`. `words` are written before the group; by default `override` for a group of the
    schema, of which config.yaml has chosen an option already.
    """
    is_known = unknown_key(tuple(group.split("/"))) is None
    if words is None:
        words = ["override"] if is_known and not package else []
    suffix = package or ("" if is_known else "@KEY")
    return f"{' '.join([*words, '/' + group])}{suffix}: {option}"


def _check_option(chosen: str, option: Node) -> Iterator[ConfigError]:
    """Check the option, or the options, after the colon."""
    is_list = isinstance(option.value, list)
    texts = option.value if is_list else [option]
    if not all(isinstance(text.value, str) or (text is option and text.value is None) for text in texts):
        yield _mistake(option, f"the option of {chosen} must be a name, a list of names, or null", "")
        return
    for text in (text.value for text in texts if text.value is not None):
        if not text.strip():
            yield _mistake(option, f"the option of {chosen} is empty", f"Write '{chosen}: OPTION', or null for none.")
        elif _BACKSLASH in text:
            yield _mistake(option, f"option {text} has a backslash", f"Write '{text.replace(_BACKSLASH, '/')}'.")
        elif ".." in text.split("/"):
            yield _mistake(option, f"an option of {chosen} leads out of its folder", "Name an option of the group.")
        elif is_list and "${" in text:
            yield _mistake(option, f"{text} is one of several options, and cannot be resolved", "Write its name.")
        elif "${defaults." in text:
            yield _mistake(option, f"{text} counts the entries of the list", "Name a group instead: '${GROUP}'.")


def _check_package(option: Node, package: str) -> Iterator[ConfigError]:
    """Check the syntax of `@package`. Whether the config has such a key is checked after the merge."""
    if not re.fullmatch(r"[\w$-]+(\.[\w$-]+)*", package):
        suggestion = ".".join(re.findall(r"[\w$-]+", package.rpartition(":")[2])) or "KEY"
        yield _mistake(option, f"'@{package}' names no place in the config", f"Write '@{suggestion}'.")


class DefaultsEntry(NamedTuple):
    """An entry of a defaults list: a choice (`- group: option`) or a config (`- folder/name`)."""

    config: str
    """Name of the config that lists it, such as `experiment/x`."""
    group: str
    """The group, or the folder of a config."""
    option: str | None
    """None: the entry chooses no option of the group."""
    source: str
    """`file:line`"""
    words: str
    """The entry as it is written."""
    package: str = ""
    is_override: bool = False
    is_choice: bool = True
    """Whether it names a group."""

    @property
    def names(self) -> str:
        """The config that it chooses."""
        return f"{self.group}/{self.option}".lstrip("/")

    @property
    def origin(self) -> ValueOrigin:
        """Where a value of the option was chosen."""
        return ValueOrigin(self.source, f"{self.group}={self.option or 'null'}")

    def is_of(self, key: str) -> bool:
        """Whether it chooses for `group@package`."""
        group, _, package = key.partition("@")
        # The package of an entry in another folder depends on where its file is merged, which is not known here.
        at_root = self.config.partition("/")[0] in (self.config, "experiment")
        entry_package = self.package or self.group.replace("/", ".")
        return self.group == group and (not at_root or entry_package == (package or group.replace("/", ".")))


def find_choices(
    files: ConfigFiles, merged: Sequence[Merged], overrides: Sequence[Override]
) -> dict[KeyPath, ChosenOption]:
    """Section -> the choice of its group. An option that is merged into the tree's root is under `(group,)`."""
    search = files.search
    paths = {config.name: path for config in merged if (path := search.find(config.name))}
    entries = [
        entry for name, path in paths.items() for entry in read_entries(files[path].tree, name) if entry.is_choice
    ]
    # Hydra takes the first entry that names a file; overrides are sorted before the entries that they override.
    entries.sort(key=lambda entry: not entry.is_override)
    chosen_by_line = [override for override in overrides if search.is_choice(override)]
    # experiment=x was rewritten to +experiment=x.
    typed_lines = {
        name: line_of(override).removeprefix("+") for override in chosen_by_line for name in _chosen_files(override)
    }
    chosen: dict[KeyPath, ChosenOption] = {}
    for config in merged:
        group = config.name.rpartition("/")[0]
        path = paths.get(config.name)
        if not group or path is None:
            continue
        origins = [entry.origin for entry in entries if entry.names == config.name]
        if config.name in typed_lines:
            origins.insert(0, ValueOrigin(COMMAND_LINE, typed_lines[config.name]))
        if origins:
            chosen[split_package(config.package or group)] = ChosenOption(origins[0], search.label(path))
    # Overrides and entries that merged no file chose null, or removed the group.
    for override in chosen_by_line:
        chosen.setdefault(
            split_package(override.key_or_group), ChosenOption(ValueOrigin(COMMAND_LINE, line_of(override)))
        )
    for entry in entries:
        if entry.option is None and entry.group != "experiment":
            chosen.setdefault(split_package(entry.group), ChosenOption(entry.origin))
    # The name of a run defaults to that of its experiment.
    experiments = [choice for section, choice in chosen.items() if section[0] == "experiment"]
    return {**chosen, ("name",): experiments[-1]} if experiments else chosen


def split_package(name: str) -> KeyPath:
    """The keys of a group or package: `a/b` and `a.b` are both `("a", "b")`."""
    return tuple(name.replace("/", ".").split("."))


def _chosen_files(override: Override) -> list[str]:
    """Names of the configs that an override of a group chooses."""
    chosen = None if override.is_delete() else override.value()
    options = chosen if isinstance(chosen, list) else [chosen]
    return [f"{override.key_or_group}/{str(option).removesuffix('.yaml')}" for option in options if option is not None]


def read_entries(tree: Node, config: str) -> Iterator[DefaultsEntry]:
    """The entries of the defaults list of a config."""
    folder = config.rpartition("/")[0]

    def resolved(name: str) -> str:
        return name[1:] if name.startswith("/") else f"{folder}/{name}".lstrip("/")

    defaults = tree.value.get("defaults")
    for entry in defaults.value if defaults is not None and isinstance(defaults.value, list) else ():
        source = entry.origin.source
        if isinstance(entry.value, str) and entry.value != "_self_":
            name, _, package = entry.value.partition("@")
            group, _, option = resolved(name.removesuffix(".yaml")).rpartition("/")
            yield DefaultsEntry(config, group, option, source, entry.value, package, is_choice=False)
        for key, value in entry.value.items() if entry.is_mapping else ():
            words = str(key).split() or [""]
            name, _, package = words[-1].partition("@")
            for item in value.value if isinstance(value.value, list) else [value]:
                chosen = None if item.value is None else str(item.value).removesuffix(".yaml")
                text = f"{key}: {item.value}"
                yield DefaultsEntry(config, resolved(name), chosen, source, text, package, "override" in words)


_IDENTITY_KEYS = (("_target_",), ("dtype",))
"""Keys that identify an option. An option that loses one of these to an experiment has no effect."""


def is_component(section: str, node: Any) -> bool:
    """Whether a value is a whole component: it has a target, or is a mapping of names to schedulers."""
    if not isinstance(node, Mapping) or "_target_" in node or section != "scheduler":
        return isinstance(node, Mapping) and "_target_" in node
    schedulers = [child for child in node.values() if isinstance(child, Mapping) and "_target_" in child]
    return bool(schedulers) and all(child is None or child in schedulers for child in node.values())


def find_overruled(
    choices: Sequence[Override],
    merged: Sequence[Merged],
    files: ConfigFiles,
    tree: ConfigTree,
) -> Iterator[ConfigError]:
    """A mistake for each of the command line's `choices` whose values an experiment overwrites in the tree.

    `merged` has the package of each option. Options merged into the tree's root are left out.
    """
    for override in choices:
        group, option = override.key_or_group, None if override.is_delete() else override.value()
        file = files.search.find(f"{group}/{option}") if isinstance(option, str) else None
        if file is None:
            continue
        section = _find_section(override, merged)
        file_values = {key: value for key, value in files[file].values.items() if key != "defaults"}
        option_values = {(*section, *path): value for path, value in whole_values(file_values)}
        # Compared by value: an experiment that repeats the option's own value takes nothing away from it.
        overwritten = [
            path
            for path, value in option_values.items()
            if _plain_at(tree, path) != value and tree.exact(path).source != COMMAND_LINE
        ]
        overwritten_identity = [path for path in overwritten if path[len(section) :] in _IDENTITY_KEYS]
        is_all_overwritten = overwritten and len(overwritten) == len(option_values)
        if section and (overwritten_identity or is_all_overwritten):
            key = (overwritten_identity or overwritten)[0]
            source = tree.exact(key).source
            line = line_of(override).removeprefix("+")
            yield override_error(
                f"{line} has no effect: {source} sets {'.'.join(key)} to {_plain_at(tree, key)}",
                f"Set its values ({'.'.join(key)}=…), or choose the option in the experiment "
                f"('- override /{line.replace('=', ': ')}') instead of its values.",
                Code.no_effect,
            )


def _find_section(choice: Override, merged: Sequence[Merged]) -> KeyPath:
    """The keys below which the option of a choice was merged; none for the tree's root."""
    name = f"{choice.key_or_group}/{str(choice.value()).removesuffix('.yaml')}"
    packages = [entry.package for entry in merged if entry.name == name]
    package = choice.package if choice.package in packages else next(iter(packages), "")
    return tuple(package.split(".")) if package else ()


def _plain_at(tree: ConfigTree, path: KeyPath) -> Any:
    """The plain value at a path; None where there is no such key."""
    node = tree.root.at(path)
    return None if node is None else node.plain()


class ConfigFiles:
    """The configs by name, as Hydra's defaults list needs them.

    A file with mistakes counts as empty, so that the other files are still checked.
    """

    def __init__(self, search: SearchPath) -> None:
        self.search = search
        self._groups = search.every_group()
        self.read: dict[Path, Reading] = {}
        """The files read so far, in that order."""

    def load(self, name: str) -> Reading | None:
        """The config of this name; empty for the schema, which is no file."""
        file = self.search.find(name.removesuffix(".yaml"))
        if file is None:
            return Reading() if name == SCHEMA else None
        return self[file]

    @property
    def mistakes(self) -> list[ConfigError]:
        """The mistakes in the files read so far."""
        return [mistake for reading in self.read.values() for mistake in reading.mistakes]

    @property
    def broken(self) -> bool:
        """Whether one of them has no usable values."""
        return any(reading.broken for reading in self.read.values())

    def __getitem__(self, path: Path) -> Reading:
        # Each is checked once: the same file may be listed by several configs, and its mistakes are reported once.
        if path not in self.read:
            self.read[path] = self._read(path)
        return self.read[path]

    def _read(self, path: Path) -> Reading:
        """Read a file and check what can be checked without the other files."""
        name = self.search.label(path)
        reading = read_file(path, name)
        group, _, option = self.search.name_of(path).rpartition("/")
        if reading.package is not None and re.search("_(group|name)_", reading.package):
            _replace_words(reading, name, group, option)
        # Checked before Hydra sees it: its own errors do not name a line.
        if not reading.broken:
            for mistake in check_defaults_list(reading.tree, group, self._groups):
                reading.mistakes.append(mistake)
                # Hydra would follow the wrong list and report a second mistake.
                reading.broken = True
        if self.search.primary == self.search.name_of(path) and reading.package not in (None, "_global_"):
            message = f"the primary config cannot go to '{reading.package}': all else is merged into it"
            reading.add(message, f"{name}:1", "Remove the line '# @package'.", breaks=True)
        # An experiment sets keys of the whole config: without the header its keys would be below `experiment`.
        if group.partition("/")[0] == "experiment" and reading.package is None:
            if not reading.broken and not reading.mistakes and reading.tree.value.keys() - {"defaults"}:
                section = group.replace("/", ".")
                hint = f"Make that its first line: without it all goes to '{section}', and nothing reads that."
                reading.add("the file does not say '# @package _global_'", f"{name}:1", hint)
            reading.package = "_global_"
        if not reading.broken and (reading.package == "_global_" or not group):
            _refuse_shapes(reading)
            _refuse_hydra(reading, self.search.cwd, primary=not group)
        return reading


def _replace_words(reading: Reading, name: str, group: str, option: str) -> None:
    """Replace Hydra's words for the group of a file and its own name in the package that the file says."""
    assert reading.package is not None
    package = reading.package.replace("_group_", group.replace("/", ".")).replace("_name_", option)
    cure = "remove the line" if reading.package == "_group_" else f"write '# @package {package}'"
    log.warning("%s:1: Hydra has deprecated '# @package %s': %s", name, reading.package, cure)
    # Without a package the entry of a defaults list may name another one, as if the line were not there.
    reading.package = None if reading.package == "_group_" else package


def _refuse_shapes(reading: Reading) -> None:
    """Refuse a list in the place of a mapping, and the reverse: the other's values would vanish in the merge."""
    for section, key, problem in list(_misshapen(reading.tree, ())):
        # Without the value, the rest of the file can still be merged and checked.
        node, cure = section.value.pop(key[-1]), ""
        if len(key) == 1 and isinstance(node.value, list):
            options = [item.value for item in node.value]
            if key[0] in ("optimizer", "scheduler"):
                cure = f"For several write a mapping of names: {key[0]}: {{first: {{_target_: …}}}}."
            elif key[0] in SEVERAL and all(isinstance(option, str) for option in options):
                chosen = f"- override /{key[0]}: [{', '.join(options)}]"
                cure = f"To choose from the group, write '{chosen}' in the defaults list."
        reading.add(f"{'.'.join(key)} is {problem}", node.origin.source, cure)


def _misshapen(section: Node, path: KeyPath) -> Iterator[tuple[Node, KeyPath, str]]:
    """Lists where the schema has a section or components, and mappings where it has a list: section, path, problem."""
    types = {field.name: field.type for field in dataclasses.fields(sections()[path])}
    for name, node in section.value.items():
        key = (*path, str(name))
        if isinstance(node.value, list) and (key in sections() or key[0] in OPEN):
            yield section, key, "a list, but it must be a mapping of keys to values"
        elif node.is_mapping and key in sections():
            yield from _misshapen(node, key)
        elif node.is_mapping and str(types.get(key[-1])).startswith("list"):
            yield section, key, "a mapping, but it must be a list"


def _refuse_hydra(reading: Reading, cwd: Path, *, primary: bool) -> None:
    """Refuse Hydra's own settings: only the primary config's search path has an effect here."""
    settings = reading.tree.value.get("hydra")
    for name, folders in settings.value.items() if settings is not None and settings.is_mapping else ():
        source = folders.origin.source
        if not (primary and name == "searchpath"):
            reading.add(f"hydra.{name} has no effect", source, "Hydra only composes the config here.")
        elif not isinstance(folders.value, list):
            reading.add("hydra.searchpath must be a list", source, "Write hydra.searchpath: [FOLDER].")
        else:
            for entry in folders.value:
                if not any(folder.is_dir() for folder in search_folders(entry.plain(), cwd)):
                    message = f"hydra.searchpath names {entry.plain()}, which is not a folder"
                    hint = "A path counts from the current folder; pkg://NAME is an installed package."
                    reading.add(message, entry.origin.source, hint)
