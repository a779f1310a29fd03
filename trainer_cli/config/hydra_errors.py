"""Translate Hydra's errors about defaults lists and OmegaConf's about interpolations into errors about the config.

Only the text of their exceptions says which key or file is wrong, so this module, and no other, parses messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from hydra.errors import MissingConfigException
from omegaconf.errors import InterpolationToMissingValueError, UnsupportedInterpolationType

from trainer_cli.config.files import DefaultsEntry, read_entries, write_entry
from trainer_cli.config.hydra_compat import SCHEMA, resolver_names
from trainer_cli.config.overrides import CommandLine, find_sibling, line_of, unknown_option_error
from trainer_cli.config.search_path import SearchPath, label
from trainer_cli.config.tree import COMMAND_LINE
from trainer_cli.config.yaml import Reading
from trainer_cli.errors import Code, ConfigError
from trainer_cli.keys import unknown_key
from trainer_cli.patterns import did_you_mean


class _DefaultsLists(NamedTuple):
    """The command line and the entries of all defaults lists that were read before the error."""

    search: SearchPath
    command: CommandLine
    entries: dict[str, list[DefaultsEntry]]
    """Name of a config, such as `experiment/x` -> its entries, in the order in which the files were read."""

    def of(self, key: str) -> list[DefaultsEntry]:
        """The entries that choose for `group@package`, or a config in the folder of a group."""
        return [entry for entries in self.entries.values() for entry in entries if entry.is_of(key)]

    def typed(self, key: str) -> str:
        """The override of the command line that chooses for `group@package`, as it was written; empty for none."""
        choices = (override for override in self.command.overrides if self.search.is_choice(override))
        return next((line_of(override) for override in choices if override.get_key_element().lstrip("+~") == key), "")


def translate_error(
    error: Exception, search: SearchPath, command: CommandLine, files: Mapping[Path, Reading]
) -> ConfigError:
    """Translate an error of Hydra. `files` are those read so far; the mistake is in the last one or names it."""
    # Hydra has one class for most of them: only the words tell which it is.
    text = str(error) or str(error.__cause__ or "")
    named = {search.name_of(path): reading.tree for path, reading in files.items()}
    entries = {name: [*read_entries(tree, name)] for name, tree in named.items()}
    lists = _DefaultsLists(search, command, entries)
    if isinstance(error, MissingConfigException):
        return _missing_file_error(error, lists)
    # Hydra does not detect cycles, but overflows the stack.
    if isinstance(error, RecursionError):
        cycles = (_find_cycle(entries, name, ()) for name in entries)
        where = next((source for source in cycles if source is not None), None)
        return _list_error("a defaults list leads back to its own file", where, "Remove the line.")
    if match := re.search(r"(\S+) appears more than once in the final|Multiple values for (\S+)\. ", text):
        return _chosen_twice_error(match[1] or match[2], lists)
    if match := re.search(r"You must specify '([^']+)'", text):
        return _not_chosen_error(match[1], lists)
    if match := re.search(r"Could not (override|delete) '([^']+)'", text):
        parent = re.search(r"In '([^']+)': Could not override", text)
        suggestion = re.search(r"Did you mean to override (?:one of )?(.+)\?", text)
        candidates = suggestion[1].split(", ") if suggestion else []
        if parent:
            return _wrong_override_error(parent[1], match[2], candidates, lists)
        return _not_listed_error(match[2], candidates, lists, deletes=match[1] == "delete")
    if match := re.search(r"Error resolving interpolation '([^']+)'", text):
        return _interpolation_error(match[1], lists)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Words that are not known, as with a newer Hydra, are passed on with the file read last.
    message = " ".join(lines) or f"{type(error).__name__} in a defaults list"
    return _list_error(f"cannot compose: {message}", label([*files][-1], search.cwd) if files else None)


_HINT_ON_TOTAL_STEPS = "In the arguments of a schedule write 1dur: it becomes the number of steps in loop.max_duration."


def explain_unresolved(error: Exception, text: str, known_keys: Sequence[str]) -> tuple[str, str]:
    """The mistake in the interpolation `text`, and a hint; `known_keys` are the keys that it could name."""
    words = str(getattr(error, "msg", None) or error or type(error).__name__).splitlines()[0]
    last = words.rpartition(" ")[2]
    if isinstance(error, InterpolationToMissingValueError):
        return f"{text} names {last}, which must be given", f"Add {last}=VALUE to the command line."
    if isinstance(error, UnsupportedInterpolationType):
        return f"{text} asks for {last!r}, which is not a resolver", (
            f"Known: ${{key}}, ${{oc.env:NAME,DEFAULT}}, ${{now:%Y-%m-%d}}. Define your own as 'def {last}(…)' in "
            "configs/resolvers.py."
        )
    key = re.search(r"Interpolation key '([^']+)' not found|Error resolving key '([^']+)'|access ([^:]+): node", words)
    if key is not None:
        name = key[1] or key[2] or key[3]
        if name in resolver_names():
            return f"{text} is a resolver without its colon", f"Write ${{{name}:ARGUMENT}}."
        hint = _HINT_ON_TOTAL_STEPS if name == "loop.total_steps" else _suggest_key(name, known_keys)
        return f"{text} names a key that does not exist: {name}", hint
    if match := re.search(r"Environment variable '([^']+)' not found", words):
        return f"the environment variable {match[1]} is not set", f"Set it, or write ${{oc.env:{match[1]},DEFAULT}}."
    if isinstance(error, RecursionError) or "Recursive interpolation" in words or "parent node" in words:
        return f"{text} leads back to itself", "Write the value in one of the keys."
    if "HydraConfig was not set" in words:
        return f"{text} asks for Hydra's own settings, and there are none", "Hydra only composes the config here."
    if match := re.search(r"(\w+) raised while resolving interpolation: (.*)", words):
        return f"{text} fails: {match[1]}: {match[2]}", ""
    return words.replace("while resolving interpolation", f"in {text}"), ""


def _list_error(message: str, source: str | None, hint: str | None = None) -> ConfigError:
    """An error about a defaults list."""
    return ConfigError(message, source=source, code=Code.defaults_list, hint=hint)


def _wrong_override_error(parent: str, key: str, candidates: Sequence[str], lists: _DefaultsLists) -> ConfigError:
    """An `override` entry of a group for which no earlier entry chooses an option, or not for this package."""
    group, _, package = key.partition("@")
    overrides = (listed for listed in lists.entries.get(parent, ()) if listed.is_override and listed.is_of(key))
    entry = next(overrides, None)
    where, option = (entry.source, entry.option or "null") if entry is not None else (parent, "OPTION")
    if group == "experiment":
        return _nested_experiment_error(where, option)
    if candidates:
        # Within a package that the file is merged into, a group of the root is named from there.
        is_below = package.partition(".")[0] != group and package.endswith(f".{group}")
        is_root_group = is_below and candidates == [group]
        names = [f"{group}@_global_.{group}"] if is_root_group else candidates
        corrections = " or ".join(f"'- override /{name}: {option}'" for name in names)
        return _list_error(f"nothing chooses a {group} for {package or group}", where, f"Write {corrections}.")
    message = f"nothing chooses a {group} that could be overridden"
    hint = f"Write '- /{_with_package(key)}: {option}' without override, or choose one in {lists.search.primary}.yaml."
    return _list_error(message, where, lists.search.hint_on_experiment() or hint)


def _not_listed_error(key: str, candidates: Sequence[str], lists: _DefaultsLists, *, deletes: bool) -> ConfigError:
    """An override of the command line that changes or removes a choice which no defaults list makes."""
    name = key.partition("=")[0]
    group = name.partition("@")[0]
    chosen = next((candidate.option for candidate in lists.of(group) if candidate.option is not None), None)
    if deletes:
        hint = f"Write '~{group}', for it is {chosen}, or leave it out." if chosen is not None else "Leave it out."
        return _list_error(f"{key} is not in the defaults list, so it cannot be removed", COMMAND_LINE, hint)
    line = lists.typed(name)
    if candidates:
        corrections = " or ".join(f"'{line.replace(name, candidate, 1)}'" for candidate in candidates)
        return _list_error(f"{key} is not in the defaults list", COMMAND_LINE, f"Did you mean {corrections}?")
    hint = f"To add it, write '+{line.replace(name, _with_package(name), 1)}'."
    return _list_error(f"{key} is not in the defaults list", COMMAND_LINE, hint)


def _not_chosen_error(slot: str, lists: _DefaultsLists) -> ConfigError:
    """A defaults list leaves the choice of a group to the command line (`- group: ???`)."""
    group = slot.partition("@")[0]
    where = next((entry.source for entry in lists.of(slot) if entry.option == "???"), None)
    hint = f"Add {slot}=NAME to the command line: {', '.join(lists.search.options(group)) or 'none'}."
    return ConfigError(f"{slot} must be chosen", source=where, code=Code.not_given, hint=hint)


def _chosen_twice_error(key: str, lists: _DefaultsLists) -> ConfigError:
    """The error for a group whose option is chosen twice: by two defaults lists, or by one and `+group=`."""
    group = key.partition("@")[0]
    added = [line_of(override) for override in lists.command.overrides if override.get_key_element() == f"+{key}"]
    entries = [entry for entry in lists.of(key) if not entry.is_override]
    if group == "experiment":
        nested = next((entry for entry in entries if entry.config.startswith("experiment/")), None)
        if nested is not None:
            return _nested_experiment_error(nested.source, nested.option or "null")
        if (where := next((entry.source for entry in entries if entry.option is not None), None)) is not None:
            hint = "Remove the line, and choose it on the command line alone."
            return _list_error("experiment is chosen already", where, hint)
    if group != "experiment" and added and (entries or len(added) == 1):
        return _list_error(f"{added[0]}: {key} is chosen already", COMMAND_LINE, "Leave out the '+'.")
    for first, last in pairwise(sorted(entries, key=lambda entry: entry.config)):
        if first.config == last.config:
            return _list_error(f"{key} is chosen twice", last.source, "Name it once.")
    if len(entries) > 1:
        first, last = entries[:2]
        # The file that lists the other decides, so its entry is the one to change.
        if _is_above(first, last, lists):
            first, last = last, first
        message = f"{key} is chosen already, in {first.source.rpartition(':')[0]}"
        return _list_error(message, last.source, f"Write '- override /{key}: {last.option}'.")
    return _list_error(f"{key} is chosen twice", COMMAND_LINE, "Name it once.")


def _is_above(first: DefaultsEntry, second: DefaultsEntry, lists: _DefaultsLists) -> bool:
    """Whether the file of the first entry lists that of the second, and so overrides what it chooses."""
    names = [entry.names for entry in lists.entries.get(first.config, ())]
    return second.config in names and not second.config.startswith("experiment/")


def _nested_experiment_error(where: str, option: str) -> ConfigError:
    """An experiment that chooses another as an option of its group: the group has been chosen from already."""
    return _list_error("an experiment lists another one by its name alone", where, f"Write '- {option}'.")


def _interpolation_error(text: str, lists: _DefaultsLists) -> ConfigError:
    """An interpolation in a defaults list that names no group which is chosen before."""
    all_entries = (entry for entries in lists.entries.values() for entry in entries)
    entry = next((candidate for candidate in all_entries if text in candidate.words), None)
    option_names = ", ".join(lists.search.options(entry.group)) if entry is not None and entry.group else ""
    hint = "It can name a group that an earlier line of the same list chooses. " + (
        f"Write the option itself: {option_names}." if option_names else "Write the name itself."
    )
    return _list_error(f"a defaults list cannot resolve {text}", entry.source if entry is not None else None, hint)


def _missing_file_error(error: MissingConfigException, lists: _DefaultsLists) -> ConfigError:
    """A defaults list names a file that is not there."""
    search = lists.search
    group, _, option = (error.missing_cfg_file or "").removesuffix(".yaml").rpartition("/")
    missing = f"{group}/{option}".lstrip("/")
    all_entries = [entry for entries in lists.entries.values() for entry in entries]
    # Groups may stand in groups: the entry says how much of the name is the group.
    entry = next((candidate for candidate in all_entries if candidate.names == missing), None)
    where = entry.source if entry is not None else "defaults list"
    if entry is not None:
        group, option = entry.group, entry.option or ""
    if search.is_group(option) and not search.find(option):
        message = f"{option} is a group, and this entry names no option of it"
        return _list_error(message, where, f"Write '- {write_entry(option, 'OPTION')}'.")
    if group and not search.is_group(group):
        known_groups = search.every_group()
        hint = f"Available: {', '.join(known_groups)}.{did_you_mean(group, known_groups)}"
        return ConfigError(f"there is no group '{group}'", source=where, code=Code.unknown_option, hint=hint)
    if group:
        return unknown_option_error(group, option, list(search.options(group)), where)
    hint = did_you_mean(option, [*search.primaries(), SCHEMA]).strip() or "Remove the line."
    return _list_error(f"the defaults list names {option}.yaml, which does not exist", where, hint)


def _with_package(key: str) -> str:
    """`group@package` as it is; a group alone gets the package `KEY` to fill in, unless it is a key of the config."""
    group, at_sign, _ = key.partition("@")
    has_package = at_sign or unknown_key(tuple(group.split("/"))) is None
    return key if has_package else f"{group}@KEY"


def _find_cycle(entries: Mapping[str, Sequence[DefaultsEntry]], name: str, trail: tuple[str, ...]) -> str | None:
    """The source of the entry that leads back to a file above it, `trail`; None if no entry below `name` does."""
    for entry in entries.get(name, ()):
        if entry.names in (*trail, name):
            return entry.source
        if (source := _find_cycle(entries, entry.names, (*trail, name))) is not None:
            return source
    return None


def _suggest_key(key: str, known_keys: Sequence[str]) -> str:
    """A suggestion for a misspelt key: from its section if that exists, else from all keys."""
    section = key.rpartition(".")[0]
    split_keys = (known_key.rpartition(".") for known_key in known_keys)
    names_in_section = [known_name for known_section, _, known_name in split_keys if known_section == section]
    if not names_in_section:
        return did_you_mean(key, known_keys).strip()
    suggestion = find_sibling(key, names_in_section)
    return f"Did you mean '{suggestion}'?" if suggestion is not None else ""
