"""Hydra's errors about defaults lists and OmegaConf's about interpolations, in the words of the config.

Their exceptions say in their text alone which key or file is wrong, so this is the one module that reads messages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import MissingConfigException
from omegaconf.errors import InterpolationToMissingValueError, UnsupportedInterpolationType

from trainer_cli.config.hydra_compat import SCHEMA
from trainer_cli.config.overrides import COMMAND_LINE, CommandLine, line_of, no_option
from trainer_cli.config.provenance import label
from trainer_cli.config.search_path import SearchPath, find, options, primaries
from trainer_cli.config.suggest import did_you_mean, nearest
from trainer_cli.errors import Code, ConfigError


def translated(error: Exception, search: SearchPath, command: CommandLine, files: Sequence[Path]) -> ConfigError:
    """The error for one of Hydra's. `files` are those read so far: the mistake is in the last one, or it names it."""
    text = str(error) or str(error.__cause__ or "")
    if isinstance(error, MissingConfigException):
        return _missing_file(error, search, command)
    if found := re.search(r"(\S+) appears more than once in the final|Multiple values for (\S+)\. ", text):
        return _chosen_twice(found[1] or found[2], search, command, files)
    if found := re.search(r"You must specify '([^']+)'", text):
        return _not_chosen(found[1], search, files)
    if wrong := _wrong_override(text, search):
        return wrong
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    what = " ".join(lines) or f"{type(error).__name__} in a defaults list"
    if isinstance(error, RecursionError):
        what = "a defaults list leads back to its own file"
    where = label(files[-1], search.cwd) if files else None
    if found := re.search(r"Error resolving interpolation '([^']+)'", text):
        what = f"a defaults list cannot resolve {found[1]}"
        where = next((at for path in files if (at := _mention(path, re.escape(found[1]), search.cwd))), where)
    return _wrong(f"cannot compose: {what}", where)


def why_unresolved(error: Exception, text: str, known: Sequence[str]) -> tuple[str, str]:
    """What is wrong with the interpolation in `text`, and a hint; `known` are the keys that it could name."""
    words = str(getattr(error, "msg", None) or error or type(error).__name__).splitlines()[0]
    last = words.rpartition(" ")[2]
    if isinstance(error, InterpolationToMissingValueError):
        return f"{text} names {last}, which must be given", f"Add {last}=VALUE to the command line."
    if isinstance(error, UnsupportedInterpolationType):
        return f"{text} asks for {last!r}, which is no resolver", (
            f"Known: ${{key}}, ${{oc.env:NAME,DEFAULT}}, ${{now:%Y-%m-%d}}. Define your own as 'def {last}(…)' in "
            "configs/resolvers.py."
        )
    if found := re.search(r"Interpolation key '([^']+)' not found", words):
        return f"{text} names a key that is not there: {found[1]}", _meant(found[1], known)
    if found := re.search(r"Environment variable '([^']+)' not found", words):
        return f"the environment variable {found[1]} is not set", f"Set it, or write ${{oc.env:{found[1]},DEFAULT}}."
    if isinstance(error, RecursionError) or "Recursive interpolation" in words or "parent node" in words:
        return f"{text} leads back to itself", ""
    if "HydraConfig was not set" in words:
        return f"{text} asks for Hydra's own settings, and there are none", "Hydra only composes the config here."
    return words.replace("while resolving interpolation", f"in {text}"), ""


def _wrong(what: str, source: str | None, hint: str | None = None) -> ConfigError:
    return ConfigError(what, source=source, code=Code.defaults_list, hint=hint)


def _wrong_override(text: str, search: SearchPath) -> ConfigError | None:
    """An override of what nothing chose, on the command line or in a file, or in a file before the end of its list."""
    if found := re.search(r"In '([^']+)': Could not override '([^'@]+)[^']*'\. No match in the defaults list", text):
        what = f"nothing chooses a {found[2]} that could be overridden"
        hint = f"Write '- /{found[2]}: OPTION' without override, or choose one in {search.primary}.yaml."
    elif found := re.search(
        r"In '([^']+)': Could not override '([^'@]+)(@[^']*)'\.\s*Did you mean to override (\S+)\?", text
    ):
        what, hint = f"nothing chooses a {found[2]} for {found[3][1:]}", f"Write '- override /{found[4]}: OPTION'."
    elif found := re.search(r"Could not (override|delete) '([^']+)'\. No match in the defaults list", text):
        add = f"To add it, write '+{found[2]}=NAME'." if found[1] == "override" else None
        remove = "" if add else ", so it cannot be removed"
        return _wrong(f"{found[2]} is not in the defaults list{remove}", COMMAND_LINE, add)
    elif found := re.search(r"Could not override '([^']+)'\.\s*Did you mean to override (\S+)\?", text):
        return _wrong(f"{found[1]} is not in the defaults list", COMMAND_LINE, f"Did you mean '{found[2]}=NAME'?")
    else:
        return None
    file = find(search.dirs, found[1])
    entry = rf"^\s*-\s*override\s+/?{re.escape(found[2])}(?:@\S*)?\s*:"
    at = _mention(file, entry, search.cwd) if file is not None else None
    return _wrong(what, at or found[1], hint)


def _not_chosen(slot: str, search: SearchPath, files: Sequence[Path]) -> ConfigError:
    """A defaults list leaves the choice of a group to the command line (`- group: ???`)."""
    group = slot.partition("@")[0]
    entry = rf"^\s*-\s*(?:override\s+)?/?{re.escape(group)}(?:@\S*)?\s*:\s*['\"]?\?\?\?"
    where = next((at for path in files if (at := _mention(path, entry, search.cwd))), None)
    hint = f"Add {slot}=NAME to the command line: {', '.join(options(search.dirs, group)) or 'none'}."
    return ConfigError(f"{slot} must be chosen", source=where, code=Code.not_given, hint=hint)


def _chosen_twice(group: str, search: SearchPath, command: CommandLine, files: Sequence[Path]) -> ConfigError:
    """Two defaults lists choose an option of one group, or one and a `+group=` do."""
    added = [line_of(one) for one in command.overrides if one.key_or_group == group and one.is_add()]
    if added and group != "experiment":
        return _wrong(f"{added[0]}: {group} is chosen already", COMMAND_LINE, "Leave out the '+'.")
    entry = rf"^\s*-\s*(?:optional\s+)?/?{re.escape(group)}(?:@\S*)?\s*:"
    primary = find(search.dirs, search.primary)
    for path in files:
        if len(places := _mentions(path, entry, search.cwd)) > 1:
            return _wrong(f"{group} is chosen twice", places[1], "Name it once.")
    for path in [path for path in files if path != primary]:
        if where := _mention(path, entry, search.cwd):
            what = f"{group} is chosen already, in {label(primary or path, search.cwd)}"
            return _wrong(what, where, f"Write '- override /{group}: OPTION'.")
    choice = rf"{entry}(?!\s*(?:null|~|$))"
    if group == "experiment" and primary is not None and (where := _mention(primary, choice, search.cwd)):
        hint = "Remove the line, and choose it on the command line alone."
        return _wrong("experiment is chosen already", where, hint)
    return _wrong(f"{group} is chosen twice", COMMAND_LINE, "Name it once.")


def _missing_file(error: MissingConfigException, search: SearchPath, command: CommandLine) -> ConfigError:
    """A defaults list names a file that is not there: one that the command line chose, or the one Hydra names."""
    parent = re.search(r"In '([^']+)'", str(error))
    group, _, option = (error.missing_cfg_file or "").removesuffix(".yaml").rpartition("/")
    chosen = [f"{one.key_or_group}/{one.value()}" for one in command.overrides if search.is_choice(one)]
    names = [*chosen, parent[1] if parent else "", search.primary]
    files = [file for name in names if (file := find(search.dirs, name))]
    entries = [rf"{re.escape(group)}\S*\s*[:/].*\b{re.escape(option)}\b"] if group else []
    entries.append(rf"^\s*-\s*/?{re.escape(option)}\b")
    places = (at for entry in entries for file in files if (at := _mention(file, entry, search.cwd)))
    where = next(places, "defaults list")
    if group:
        return no_option(group, option, list(options(search.dirs, group)), where)
    hint = did_you_mean(option, [*primaries(search.dirs), SCHEMA]).strip() or None
    return _wrong(f"the defaults list names {option}.yaml, which is not there", where, hint)


def _mention(file: Path, pattern: str, cwd: Path) -> str | None:
    """`file:line` of the first line that the pattern matches, comments left out."""
    return next(iter(_mentions(file, pattern, cwd)), None)


def _mentions(file: Path, pattern: str, cwd: Path) -> list[str]:
    lines = enumerate(file.read_text("utf-8").splitlines(), start=1)
    return [f"{label(file, cwd)}:{number}" for number, line in lines if re.search(pattern, line.partition("#")[0])]


def _meant(key: str, known: Sequence[str]) -> str:
    """The key that a misspelt one stands for: one beside it where its section is right, else any."""
    above, dot, name = key.rpartition(".")
    beside = [one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == above]
    if not beside:
        return did_you_mean(key, known).strip()
    meant = nearest(name, beside)
    return f"Did you mean '{above}{dot}{meant}'?" if meant is not None else ""
