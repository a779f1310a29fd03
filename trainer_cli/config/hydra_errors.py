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
from trainer_cli.config.overrides import CommandLine, line_of, unknown_option_error
from trainer_cli.config.search_path import SearchPath, label
from trainer_cli.config.tree import COMMAND_LINE
from trainer_cli.config.yaml import Reading
from trainer_cli.errors import Code, ConfigError
from trainer_cli.keys import unknown_key
from trainer_cli.patterns import did_you_mean, find_nearest


class _Lists(NamedTuple):
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
    """Translate an error of Hydra. `files` are those read so far; the last one has the mistake or is named by it."""
    # Hydra has one class for most of them: only the words tell which it is.
    text = str(error) or str(error.__cause__ or "")
    entries = {
        name: [*read_entries(reading.tree, name)] for path, reading in files.items() for name in [search.name_of(path)]
    }
    lists = _Lists(search, command, entries)
    if isinstance(error, MissingConfigException):
        return _missing_file(error, lists)
    # Hydra does not detect cycles, but overflows the stack.
    if isinstance(error, RecursionError):
        where = next((source for name in entries if (source := _back_to_itself(entries, name, ())) is not None), None)
        return _wrong("a defaults list leads back to its own file", where, "Remove the line.")
    if match := re.search(r"(\S+) appears more than once in the final|Multiple values for (\S+)\. ", text):
        return _chosen_twice(match[1] or match[2], lists)
    if match := re.search(r"You must specify '([^']+)'", text):
        return _not_chosen(match[1], lists)
    if match := re.search(r"Could not (override|delete) '([^']+)'", text):
        parent = re.search(r"In '([^']+)': Could not override", text)
        suggestion = re.search(r"Did you mean to override (?:one of )?(.+)\?", text)
        candidates = suggestion[1].split(", ") if suggestion else []
        if parent:
            return _wrong_override(parent[1], match[2], candidates, lists)
        return _not_listed(match[2], candidates, lists, deletes=match[1] == "delete")
    if match := re.search(r"Error resolving interpolation '([^']+)'", text):
        return _no_interpolation(match[1], lists)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Words that are not known, as with a newer Hydra, are passed on with the file read last.
    message = " ".join(lines) or f"{type(error).__name__} in a defaults list"
    return _wrong(f"cannot compose: {message}", label([*files][-1], search.cwd) if files else None)


_LENGTH = "In the arguments of a schedule write 1dur: it becomes the number of steps in loop.max_duration."


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
        hint = _LENGTH if name == "loop.total_steps" else _meant(name, known_keys)
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


def _wrong(message: str, source: str | None, hint: str | None = None) -> ConfigError:
    return ConfigError(message, source=source, code=Code.defaults_list, hint=hint)


def _wrong_override(parent: str, key: str, candidates: Sequence[str], lists: _Lists) -> ConfigError:
    """An `override` entry of a group for which no earlier entry chooses an option, or not for this package."""
    group, _, package = key.partition("@")
    entry = next((listed for listed in lists.entries.get(parent, ()) if listed.is_override and listed.is_of(key)), None)
    where, option = (entry.source, entry.option or "null") if entry is not None else (parent, "OPTION")
    if group == "experiment":
        return _of_an_experiment(where, option)
    if candidates:
        # Within a package that the file is merged into, a group of the root is named from there.
        inside = package.partition(".")[0] != group and package.endswith(f".{group}") and candidates == [group]
        names = [f"{group}@_global_.{group}"] if inside else candidates
        corrections = " or ".join(f"'- override /{name}: {option}'" for name in names)
        return _wrong(f"nothing chooses a {group} for {package or group}", where, f"Write {corrections}.")
    message = f"nothing chooses a {group} that could be overridden"
    hint = f"Write '- /{_placed(key)}: {option}' without override, or choose one in {lists.search.primary}.yaml."
    return _wrong(message, where, hint)


def _not_listed(key: str, candidates: Sequence[str], lists: _Lists, *, deletes: bool) -> ConfigError:
    """An override of the command line that changes or removes a choice which no defaults list makes."""
    name = key.partition("=")[0]
    group = name.partition("@")[0]
    chosen = next((candidate.option for candidate in lists.of(group) if candidate.option is not None), None)
    if deletes:
        hint = f"Write '~{group}', for it is {chosen}, or leave it out." if chosen is not None else "Leave it out."
        return _wrong(f"{key} is not in the defaults list, so it cannot be removed", COMMAND_LINE, hint)
    line = lists.typed(name)
    if candidates:
        corrections = " or ".join(f"'{line.replace(name, candidate, 1)}'" for candidate in candidates)
        return _wrong(f"{key} is not in the defaults list", COMMAND_LINE, f"Did you mean {corrections}?")
    hint = f"To add it, write '+{line.replace(name, _placed(name), 1)}'."
    return _wrong(f"{key} is not in the defaults list", COMMAND_LINE, hint)


def _not_chosen(slot: str, lists: _Lists) -> ConfigError:
    """A defaults list leaves the choice of a group to the command line (`- group: ???`)."""
    group = slot.partition("@")[0]
    where = next((entry.source for entry in lists.of(slot) if entry.option == "???"), None)
    hint = f"Add {slot}=NAME to the command line: {', '.join(lists.search.options(group)) or 'none'}."
    return ConfigError(f"{slot} must be chosen", source=where, code=Code.not_given, hint=hint)


def _chosen_twice(key: str, lists: _Lists) -> ConfigError:
    """Two defaults lists choose an option of one group, or one and a `+group=` do."""
    group = key.partition("@")[0]
    added = [line_of(override) for override in lists.command.overrides if override.get_key_element() == f"+{key}"]
    entries = [entry for entry in lists.of(key) if not entry.is_override]
    if group == "experiment":
        inside = next((entry for entry in entries if entry.config.startswith("experiment/")), None)
        if inside is not None:
            return _of_an_experiment(inside.source, inside.option or "null")
        if (where := next((entry.source for entry in entries if entry.option is not None), None)) is not None:
            hint = "Remove the line, and choose it on the command line alone."
            return _wrong("experiment is chosen already", where, hint)
    if group != "experiment" and added and (entries or len(added) == 1):
        return _wrong(f"{added[0]}: {key} is chosen already", COMMAND_LINE, "Leave out the '+'.")
    for first, last in pairwise(sorted(entries, key=lambda entry: entry.config)):
        if first.config == last.config:
            return _wrong(f"{key} is chosen twice", last.source, "Name it once.")
    if len(entries) > 1:
        first, last = entries[:2]
        # The file that lists the other decides, so its entry is the one to change.
        if _is_above(first, last, lists):
            first, last = last, first
        message = f"{key} is chosen already, in {first.source.rpartition(':')[0]}"
        return _wrong(message, last.source, f"Write '- override /{key}: {last.option}'.")
    return _wrong(f"{key} is chosen twice", COMMAND_LINE, "Name it once.")


def _is_above(first: DefaultsEntry, second: DefaultsEntry, lists: _Lists) -> bool:
    """Whether the file of the first entry lists that of the second, and so overrides what it chooses."""
    names = [entry.names for entry in lists.entries.get(first.config, ())]
    return second.config in names and not second.config.startswith("experiment/")


def _of_an_experiment(where: str, option: str) -> ConfigError:
    """An experiment that chooses another as an option of its group: the group has been chosen from already."""
    return _wrong("an experiment lists another one by its name alone", where, f"Write '- {option}'.")


def _no_interpolation(text: str, lists: _Lists) -> ConfigError:
    """An interpolation in a defaults list that names no group which is chosen before."""
    entry = next(
        (candidate for name in lists.entries for candidate in lists.entries[name] if text in candidate.words), None
    )
    option_names = ", ".join(lists.search.options(entry.group)) if entry is not None and entry.group else ""
    hint = "It can name a group that an earlier line of the same list chooses. " + (
        f"Write the option itself: {option_names}." if option_names else "Write the name itself."
    )
    return _wrong(f"a defaults list cannot resolve {text}", entry.source if entry is not None else None, hint)


def _missing_file(error: MissingConfigException, lists: _Lists) -> ConfigError:
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
        return _wrong(message, where, f"Write '- {write_entry(option, 'OPTION')}'.")
    if group and not search.is_group(group):
        known_groups = search.every_group()
        hint = f"Available: {', '.join(known_groups)}.{did_you_mean(group, known_groups)}"
        return ConfigError(f"there is no group '{group}'", source=where, code=Code.unknown_option, hint=hint)
    if group:
        return unknown_option_error(group, option, list(search.options(group)), where)
    hint = did_you_mean(option, [*search.primaries(), SCHEMA]).strip() or "Remove the line."
    return _wrong(f"the defaults list names {option}.yaml, which does not exist", where, hint)


def _placed(key: str) -> str:
    """`group@package`, with a word for the package where none is given and the group is no key of the config."""
    group, at, _ = key.partition("@")
    return key if at or unknown_key(tuple(group.split("/"))) is None else f"{group}@KEY"


def _back_to_itself(entries: Mapping[str, Sequence[DefaultsEntry]], name: str, trail: tuple[str, ...]) -> str | None:
    """The place of the entry that leads back to a file above it."""
    for entry in entries.get(name, ()):
        if entry.names in (*trail, name):
            return entry.source
        if (source := _back_to_itself(entries, entry.names, (*trail, name))) is not None:
            return source
    return None


def _meant(key: str, known_keys: Sequence[str]) -> str:
    """A suggestion for a misspelt key: from its section if that exists, else from all keys."""
    above, dot, name = key.rpartition(".")
    beside = [known_key.rpartition(".")[2] for known_key in known_keys if known_key.rpartition(".")[0] == above]
    if not beside:
        return did_you_mean(key, known_keys).strip()
    suggestion = find_nearest(name, beside)
    return f"Did you mean '{above}{dot}{suggestion}'?" if suggestion is not None else ""
