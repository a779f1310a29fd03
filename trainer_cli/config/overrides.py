"""Parse the overrides of the command line, and say how to write those that Hydra's grammar cannot read.

`ckpt=` and `key+=value` are ours; all else is Hydra's grammar.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, Sweep
from hydra.errors import HydraException

from trainer_cli.bounds import DEEPEST
from trainer_cli.config.hydra_compat import value_in_quotes
from trainer_cli.config.tree import COMMAND_LINE
from trainer_cli.config.yaml import PYTHONS_NULL, instead_of, looks_like_number, why_no_interpolation
from trainer_cli.elsewhere import hint_on, normalise
from trainer_cli.errors import Code, ConfigError, raise_all
from trainer_cli.keys import DATA_KEYS, OPEN, SEVERAL, KeyPath, kind_at, sections, unknown_key, why_refused
from trainer_cli.layout import in_runs, parse_step
from trainer_cli.parts import explain_missing
from trainer_cli.patterns import find_key, find_name, find_nearest

_USUAL_KEYS = ("optimizer.lr", "optimizer.weight_decay", "data.batch_size", "data.num_workers")
"""Keys of open sections that most components have, for suggestions."""
_TORCH_OPTIMIZERS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
"""Classes of torch.optim, by name: importing it takes seconds."""
_MAX_LISTED = 16
"""Keys that a hint lists."""


class Append(NamedTuple):
    """`key+=value`: values to add to the end of a list."""

    path: KeyPath
    values: list[Any]
    line: str
    quoted: Any = None
    """The value with its quotes."""


@dataclass(slots=True)
class CommandLine:
    """A parsed command line: overrides in Hydra's grammar, `ckpt`, appends, and mistakes for the other arguments."""

    overrides: list[Override] = field(default_factory=list)
    ckpt: str | list[str] | None = None
    ckpt_given: bool = False
    appends: list[Append] = field(default_factory=list)
    mistakes: list[ConfigError] = field(default_factory=list)


def override_error(message: str, hint: str | None = None, code: Code = Code.override) -> ConfigError:
    """The error for something on the command line."""
    return ConfigError(message, source=COMMAND_LINE, code=code, hint=hint)


def unknown_key_error(
    path: KeyPath, known_keys: Sequence[str], source: str, value: str | None = None, subpath: KeyPath = ()
) -> ConfigError:
    """The error for a key that does not exist, with the key that was probably meant, written as at `source`.

    Args:
        path: up to the first unknown name.
        value: its value as text, or that of the key below it.
        subpath: the names below `path`.
    """
    # On the command line the whole key, so that two of one section do not read alike; in a file all below it is wrong.
    key = ".".join((*path, *subpath) if source == COMMAND_LINE else path)
    # A section with a misspelt name is no section of another program.
    similar = get_close_matches(path[-1], known_keys, n=1, cutoff=0.8) if subpath else []
    intended: str | None
    if similar:
        hint, intended = "", ".".join((*path[:-1], *similar, *subpath))
    else:
        hint = hint_on_setting(".".join((*path, *subpath)), value, source=source)
        intended = _find_intended_key(path, subpath, known_keys, source)
    if not hint and intended:
        hint = did_you_mean_override(intended, value if source == COMMAND_LINE else None)
    if not hint:
        section = ".".join(path[:-1])
        hint = f"Known here: {', '.join(known_keys)}."
        if len(known_keys) > _MAX_LISTED:
            arguments = "" if section else ", and `train config NAME` the arguments of your own classes"
            hint = f"`train config --fields{section and f' {section}'}` lists the keys{arguments}."
    return ConfigError(f"there is no key '{key}'", location=key, source=source, code=Code.unknown_key, hint=hint)


def did_you_mean_override(key: str, value: str | None) -> str:
    """The question that suggests a key, with the value if the key takes it and a shell needs no other quotes."""
    line = f"{key}={value}"
    can_be_read = value and parse_override(line) is not None and shlex.quote(line) in (line, f"'{line}'")
    # The options of a group are not known here, and a section takes no value.
    is_valid = not _is_section(key) and can_be_read and _why_refused(line) is None
    return f"Did you mean '{line if is_valid else key}'?"


def _find_intended_key(path: KeyPath, subpath: KeyPath, known_keys: Sequence[str], source: str) -> str | None:
    """The key that was probably meant by one that does not exist; None if no key is similar.

    `path` ends in the first unknown name, in place of which `known_keys` exist; `subpath` is below it.
    """
    names = [*known_keys]
    if len(path) == 1 and source != COMMAND_LINE:
        names.append("defaults")  # Hydra's own, which no schema knows.
    prefix = path[:-1]
    if (section := find_name(path[-1], names)) is not None:
        valid_subpath = subpath if unknown_key((*prefix, section, *subpath)) is None else ()
        return ".".join((*prefix, section, *valid_subpath))
    # For a key without its section, such as `lr`, or in another one.
    nested = (
        ".".join((*section, schema_field.name)) for section, kind in sections().items() for schema_field in fields(kind)
    )
    if (key_of_section := find_key((*path, *subpath)[-1], [*_USUAL_KEYS, *nested])) is not None:
        return key_of_section
    similar = find_sibling(".".join(path), names)
    return None if similar is None else ".".join((similar, *subpath))


def find_sibling(key: str, names: Sequence[str]) -> str | None:
    """The dotted key with the nearest of the `names` that its section has for its last; None if none is near."""
    # Only the last names are compared: with their common section any two keys would look alike.
    section, dot, name = key.rpartition(".")
    nearest = find_nearest(name, names)
    return None if nearest is None else f"{section}{dot}{nearest}"


def writer(source: str) -> Callable[[str], str]:
    """A function that writes overrides as a source has them: unchanged for the command line, as YAML for a file."""

    def write_yaml(overrides: str) -> str:
        lines = []
        for override in overrides.split(" "):
            key, _, value = override.lstrip("+").partition("=")
            is_group = "." not in key and _is_section(key)
            lines.append(f"- override /{key}: {value}" if is_group else f"{key}: {value}")
        return ", ".join(lines)

    return str if source == COMMAND_LINE else write_yaml


def hint_on_setting(word: str, value: str | None, *, source: str = COMMAND_LINE, below: bool = True) -> str:
    """The hint on a setting of other trainers (`hint_on`), without suggestions that the schema refuses."""
    hint = hint_on(word, value, below=below, written=writer(source), refused=_why_refused if value else lambda _: None)
    if value and re.search("(resume|ckpt)=", hint):
        hint = hint.replace(f"={value}", f"={in_runs(value) or value}")
    if value and f"resume={value}" in hint:
        return _suggest_going_back(value) or hint
    return hint


def _suggest_going_back(checkpoint: str) -> str:
    """The commands for a checkpoint that is not the newest of its folder, of which a resume alone is refused.

    Empty for any other path: the names of a folder's checkpoints tell which are newer.
    """
    folder = Path(checkpoint)
    step = parse_step(folder.name)
    names = [path.name for path in folder.parent.iterdir()] if folder.is_dir() else []
    if step is None or not any((parse_step(name) or 0) > step for name in names):
        return ""
    path = shlex.quote(checkpoint)
    return (
        f"There are newer checkpoints: `resume={path} checkpoint.newer=trash` goes back to this one and removes "
        f"them, `name=OTHER ckpt={path} 'load.states=[all]'` continues it as another run, and `ckpt={path}` takes "
        "its weights alone."
    )


def _why_refused(overrides: str) -> str | None:
    """Why the schema refuses a suggested override, or one of several joined by spaces; None if it accepts them."""
    for word in re.split(r" (?=[\w.]+=)", overrides):
        override = None if word[0] in "+-" else parse_override(word)
        if override is None or override.is_sweep_override() or _is_section(override.key_or_group):
            continue
        value = override.value()
        # In capitals: a word that the reader replaces.
        if not str(value).isupper() and (reason := why_refused(override.key_or_group, value)) is not None:
            return reason
    return None


def _is_section(key: str) -> bool:
    """Whether a key is a section, or a component; at the top level it may also be a group."""
    return key in OPEN or tuple(key.split(".")) in sections()


def unknown_option_error(
    group: str, option: str, known_options: Sequence[str], source: str, line: str = ""
) -> ConfigError:
    """The error for an option that a group does not have.

    Args:
        line: the override that names it, if one does, as `correct_choice` has it.
    """
    missing = explain_missing(f"{group}={option}", "configs", f"{group}/{option}")
    if missing is not None:
        return ConfigError(missing.what, source=source, code=Code.unknown_option, hint=missing.cure)
    similar = _find_similar_option(group, option, known_options)
    target = _find_torch_optimizer(group, option) if similar is None and source == COMMAND_LINE else None
    if target is not None:
        suggestion = f"torch has it: write optimizer=null 'optimizer={{_target_: {target}, lr: 0.001}}'."
    elif similar is not None:
        suggestion = f"Did you mean '{line or similar}'?"
    else:
        suggestion = hint_on_setting(group, option, below=False, source=source)
    hint = f"{suggestion} Available: {', '.join(known_options) or 'none'}.".strip()
    if suggestion.startswith("Did you mean") and similar is None and f"{group}=" not in suggestion:
        hint = suggestion  # It is no option of this group.
    is_closed = (group,) in sections()
    if not suggestion and option.isidentifier() and not is_closed:
        hint += f" A file configs/{group}/{option}.yaml would be one."
    noun = f"option of {group}" if is_closed else group.removesuffix("s") if group in SEVERAL else group
    return ConfigError(f"there is no {noun} called {option!r}", source=source, code=Code.unknown_option, hint=hint)


def as_list(value: Any) -> list[Any]:
    """A list as it is, any other value as the only item of one."""
    return value if isinstance(value, list) else [value]


def correct_choice(override: Override, known_options: Sequence[str]) -> Override | None:
    """A choice with each option that does not exist replaced by the most similar one, or left out of a list if there
    is none; None for a choice that stays the same.
    """
    line, value = line_of(override), override.value()
    options = as_list(value)
    for option in map(str, options):
        similar = option in known_options or _find_similar_option(override.key_or_group, option, known_options)
        if similar is None and options[1:]:
            line = re.sub(rf"(?<=\[){re.escape(option)}, *|, *{re.escape(option)}(?=[,\]])", "", line)
        elif isinstance(similar, str):
            line = _replace_option(line, option, similar)
    return parse_override(line) if line != line_of(override) else None


def _find_torch_optimizer(group: str, option: str) -> str | None:
    """The optimizer of torch that an option names in upper or lower case; None for any other option."""
    classes = {normalise(name): name for name in _TORCH_OPTIMIZERS} if group == "optimizer" else {}
    name = classes.get(normalise(option))
    return None if name is None else f"torch.optim.{name}"


def _find_similar_option(group: str, option: str, known_options: Sequence[str]) -> str | None:
    """The option of a group that a misspelt one probably means; None if none is similar, or torch has the optimizer."""
    if (same := find_name(option, known_options)) is not None or _find_torch_optimizer(group, option) is not None:
        return same
    file_name = option.removesuffix(".yaml").rpartition("/")[2]
    return find_nearest(option, known_options) or find_nearest(file_name, known_options)


def _replace_option(line: str, option: str, other: str) -> str:
    """An override that chooses `other` in place of `option`."""
    return re.sub(rf"(?<=[=,\[ ]){re.escape(option)}(?![^,\]])", other, line)


def line_of(override: Override) -> str:
    """The override as it was written."""
    return override.input_line or ""


def path_of(override: Override) -> KeyPath:
    """The key as its parts."""
    return tuple(word for word in re.split(r"[.\[\]]+", override.key_or_group) if word)


def given_value(arguments: Sequence[str], key: str) -> str | None:
    """The value of the last override of a key, as text without quotes; None if no override sets the key."""
    for argument in reversed(arguments):
        name, equals, value = argument.lstrip("+").partition("=")
        if equals and name == key:
            return strip_quotes(value)
    return None


def read_overrides(arguments: Sequence[str]) -> CommandLine:
    """Parse the overrides.

    Raises:
        ConfigError: naming every argument that cannot be read, with a hint on quoting.
    """
    line = parse_overrides(arguments)
    raise_all(line.mistakes)
    return line


def parse_overrides(arguments: Sequence[str]) -> CommandLine:
    """Split off `ckpt=` and `key+=value`, rewrite `experiment=x` to `+experiment=x`, and parse the rest.

    The result has a mistake for each argument that cannot be read.
    """
    command = CommandLine()
    # One parser for all arguments: to make one takes a table of Hydra's functions.
    parser = OverridesParser.create()
    for argument in join_split(arguments):
        try:
            if " " in argument and argument not in arguments:
                message = f"the shell has split {argument!r} at its spaces"
                raise override_error(message, f"Put it in quotes: {shlex.quote(argument)}.")
            if not _is_text(argument):
                message = f"{argument!r} holds bytes that are not characters of {sys.getfilesystemencoding()}"
                raise override_error(message, "Write it in UTF-8, under a locale such as LC_ALL=C.UTF-8.")
            key, equals, value = argument.partition("=")
            if equals and key.lstrip("+").rstrip("+") == "ckpt":
                _add_ckpt(command, _parse_ckpt(value, argument), appends=key.endswith("+"))
            else:
                _add_override(command, argument, parser, arguments)
        except ConfigError as mistake:
            command.mistakes.append(mistake)
    return command


def _add_ckpt(command: CommandLine, ckpt: str | list[str] | None, *, appends: bool) -> None:
    """Add the value of a `ckpt=` to the command line; of several, all count."""
    command.ckpt_given = True
    if ckpt is None:
        return
    if command.ckpt is not None:
        command.ckpt = [*as_list(command.ckpt), *as_list(ckpt)]
    else:
        # A single name stays a string, as a config file has it.
        command.ckpt = as_list(ckpt) if appends else ckpt


def _add_override(command: CommandLine, argument: str, parser: OverridesParser, arguments: Sequence[str]) -> None:
    """Parse an argument and add it to the overrides or appends of the command line. `arguments`: all that are given.

    Raises:
        ConfigError: it cannot be read, or does not have one value.
    """
    key, equals, value = argument.partition("=")
    is_append = bool(equals) and key.endswith("+")
    if is_append and key.startswith(("+", "~")):
        hint = f"To add to the end of a list, write '{key.strip('+~')}+={value}'."
        raise override_error(f"cannot read the override {argument!r}", hint)
    # Hydra's grammar has no `+=`: the value is parsed as that of `key=value`.
    plain_argument = f"{key[:-1]}={value}" if is_append else argument
    try:
        sign = _implied_sign(key) if equals else ""
        override = parser.parse_override(f"{sign}{plain_argument}")
        if sign == "++":
            # Messages and provenance show the key as it is documented.
            override.input_line = argument
        is_too_deep = not override.is_sweep_override() and _nesting_depth(override.value()) > DEEPEST
    except (HydraException, ValueError, RecursionError):
        message = f"cannot read the override {argument!r}" if equals else f"{argument!r} is not an override"
        raise override_error(message, hint_on_syntax(argument)) from None
    if is_too_deep:
        raise override_error(f"{argument[:40]}... is nested more than {DEEPEST} deep")
    if override.is_sweep_override():
        raise _several_values_error(argument, override.value(), arguments)
    if _has_sweep(override.value()):
        hint = f"Give whole values instead: '{override.get_key_element()}=[A],[B]', with -m (train fit -m)."
        raise override_error(f"{argument!r} has values to sweep inside of another", hint)
    if is_append:
        parsed_value: Any = override.value()
        values = as_list(parsed_value)
        command.appends.append(Append(path_of(override), values, argument, value_in_quotes(override)))
    else:
        command.overrides.append(override)
        # Overrides apply before all appends, so an append that was written before its list is replaced must go.
        command.appends[:] = [append for append in command.appends if not _replaces(override, append.path)]


def join_split(arguments: Sequence[str]) -> list[str]:
    """The arguments, with the parts of a list or mapping that a shell has split at its spaces joined again."""
    joined: list[str] = []
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        starts_value = _OPENS_BRACKET.match(word.partition("=")[2]) is not None
        if "=" in word and starts_value and _is_text(word) and _is_open(word):
            # Up to the word that closes the bracket: those after it are arguments of their own.
            texts = [" ".join([word, *remaining[:length]]) for length in range(len(remaining) + 1)]
            length = next((length for length, text in enumerate(texts) if not _is_open(text)), 0)
            if length and parse_override(texts[length]) is not None:
                word, remaining = texts[length], remaining[length:]
        joined.append(word)
    return joined


def _is_open(text: str) -> bool:
    """Whether a bracket of the text is not closed."""
    return _with_closed_brackets(text) != text


def _implied_sign(key: str) -> str:
    """The sign that an override may leave out: `+` for an experiment, `++` for keys that every `data` may have."""
    if key in ("experiment", "debug"):
        return "+"
    section, _, name = key.partition(".")
    return "++" if section == "data" and name in DATA_KEYS else ""


def _replaces(override: Override, key: KeyPath) -> bool:
    """Whether an override sets `key`. A mapping is merged, and sets only the keys in it."""
    path = path_of(override)
    if path != key[: len(path)]:
        return False
    value = override.value()
    for name in key[len(path) :]:
        if override.is_delete() or not isinstance(value, dict):
            return True
        if name not in value:
            return False
        value = value[name]
    return True


def _nesting_depth(value: Any) -> int:
    """How deep lists and mappings are nested in a value; 0 for a scalar."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if items is None else 1 + max(map(_nesting_depth, items), default=0)


def _parse_ckpt(value: str, argument: str) -> str | list[str] | None:
    """The pattern of `ckpt=VALUE`, or the patterns of a list `[a,b]`."""
    text = strip_quotes(value.strip())
    if text == "null":
        return None
    if value.strip() == PYTHONS_NULL:
        raise override_error(f"ckpt: {PYTHONS_NULL} is a string here, and not null", "Write ckpt=null.")
    if not text:
        raise override_error("ckpt= names nothing", "Give a path, a glob, or ckpt=null.")
    if not (text.startswith("[") and closes_at_end(text)):
        return text
    patterns = [strip_quotes(pattern.strip()) for pattern in split_at_commas(text[1:-1])]
    if not all(patterns):
        raise override_error(f"{argument} has an empty part", "Write ckpt='[a,b]'.")
    return patterns


def suggest_list(key: str, interval: IntervalSweep) -> str:
    """The hint that lists values of an interval: its ends, and 1 and 3 of each decade if they differ tenfold."""
    start, end = float(interval.start or 0), float(interval.end or 0)
    values = [start, end]
    if 0 < 10 * start <= end:
        decades = range(math.floor(math.log10(start)), math.ceil(math.log10(end)) + 1)
        inner = [float(f"{digit}e{decade}") for decade in decades for digit in (1, 3)]
        values = [start, *(value for value in inner if start < value < end), end]
    texts = ",".join(f"{value:g}" for value in values)
    return f"To draw from it, add sweep.search=random sweep.trials=20. For a grid, did you mean {key}={texts}?"


def _several_values_error(argument: str, sweep: Any, arguments: Sequence[str]) -> ConfigError:
    """The error for an override with several values where a command makes one run of these arguments."""
    key, _, value = argument.partition("=")
    message = f"{argument!r} gives several values, but one run takes one"
    # An option of a group may have any name, also that of a data set elsewhere.
    if not _is_section(key) and (hint := hint_on_setting(key, value)).endswith("."):
        return override_error(message, hint)
    text = in_quotes(key, value)
    if isinstance(sweep, IntervalSweep):
        return override_error(message, f"{suggest_list(key, sweep)} With -m: train fit -m.")
    words = [word.removeprefix("experiment=") for word in arguments]
    command = f"To run each: `train fit -m {shlex.join(words)}`."
    readings = {"list": f"For a list write {shlex.quote(f'{key}=[{value}]')}.", "str": f"For a string write {text}."}
    if re.match(r"\w+\(", value):
        del readings["list"]
    if (number := looks_like_number(value)) is not None:
        command = f"For a number write '{key}={instead_of(value, number)}'. {command}"
    kind = kind_at(key)
    accepted = [hint for kind_name, hint in readings.items() if kind is None or kind_name in kind.names]
    return override_error(message, " ".join([command, *accepted]))


def _has_sweep(value: Any) -> bool:
    """Whether a list or mapping contains values to sweep, which Hydra does not expand."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(isinstance(item, Sweep) or _has_sweep(item) for item in items)


_NEEDS_NO_QUOTES = re.compile(r"[\w\-./:%+*@?|$]*", re.ASCII)
_OPENS_BRACKET = re.compile(r"[\[{]|(?:range|choice|interval|glob|sort|shuffle|int|float|str|bool|tag)\(")
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_QUOTED_KEY = re.compile(r"([{,]\s*)(?:'([^'\\]*)'|\"([^\"\\]*)\")(\s*:)")


HOW_TO_OVERRIDE = (
    "Write key=value, group=option, +key=value for a new key, key+=value to add to a list, or ~key to remove."
)
_USAGE = {
    "choice": "choice(A,B)", "range": "range(START,STOP,STEP)", "interval": "interval(START,END)",
    "glob": "glob(PATTERN)", "sort": "sort(A,B), of one type", "shuffle": "shuffle(A,B)", "tag": "tag(NAME,VALUES)",
    "int": "int(NUMBER)", "float": "float(NUMBER)", "str": "str(VALUE)", "bool": "bool(true)",
}  # fmt: skip
"""Function of Hydra's grammar -> how it is written."""


def as_text(text: str) -> str:
    """A string in two pairs of quotes: one for the shell, and one for Hydra's parser."""
    return f"'\"{text}\"'"


def strip_quotes(text: str) -> str:
    """A string without the one pair of quotes around it, where it has one."""
    has_quotes = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
    is_one_pair = has_quotes and text[0] not in text[1:-1]
    return text[1:-1] if is_one_pair else text


def split_at_commas(text: str) -> list[str]:
    """Split at the commas outside brackets, braces and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def closes_at_end(text: str) -> bool:
    """Whether the first bracket is closed by the last character: `[a,b]`, but not `[ab]*[cd]`."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter in "[{") - (letter in "]}")
        if depth == 0:
            return index == len(text) - 1
    return False


def _is_text(argument: str) -> bool:
    """Whether Python could decode a word of the command line: it keeps other bytes as surrogates."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def hint_on_list(key: str) -> str:
    """How to change a list, whose items are not set singly: their indices change with the list."""
    return f"Write the whole list, {key}=[...], or add to its end, {key}+=ITEM."


def hint_on_syntax(argument: str) -> str:
    """The hint for an argument that cannot be read."""
    key, equals, value = argument.partition("=")
    if not equals:
        key, equals, value = argument.partition(":")
        # Such as `key: value`, copied from a file.
        suggestion = f"{key.strip()}={value.strip()}"
        is_pair = equals and value.strip() and parse_override(suggestion)
        return f"Did you mean {shlex.quote(suggestion)}?" if is_pair else HOW_TO_OVERRIDE
    if not key.strip("+~"):
        return HOW_TO_OVERRIDE
    if match := re.fullmatch(r"([\w.]+)\[\d+\](.*)", key):
        return f"A single item cannot be set. {hint_on_list(match[1])}"
    if key.count("@") > 1:
        group, _, *packages = key.split("@")
        return f"A group takes one package: '{group}@{packages[-1]}={value}'."
    if (nested := _write_in_braces(key, value)) is not None:
        return f"A name with * is written in braces: '{nested}'."
    if re.search(r"[^\w.\-/@+~]|\.\.|^[.-]|\.$", key, re.ASCII):
        suggestion = f"{_plain_key(key)}={value}"
        is_valid = suggestion != argument and parse_override(suggestion) is not None
        question = f" Did you mean {shlex.quote(suggestion)}?" if is_valid else ""
        return f"{key!r} is not a key: keys are words joined by dots.{question}"
    if value.startswith("~"):
        return f"Write the whole path, such as {key}=$HOME{value[1:]}."
    if (corrected := _suggest_correction(key, value)) is not None:
        return corrected
    as_string = f"as a string {in_quotes(key, value)}"
    if _OPENS_BRACKET.match(value) and any(value.count(a) != value.count(b) for a, b in ("[]", "{}", "()")):
        return f"{_OPEN_BRACKET}: {as_string}."
    if value[:1] in ("[", "{") and closes_at_end(value.rstrip()):
        return _WITHIN_BRACKETS.format(key)
    if match := re.fullmatch(r"extend_list\((.*)\)", value):
        item = match[1] if len(split_at_commas(match[1])) == 1 else f"[{match[1]}]"
        return f"To add to the end of a list, write {shlex.quote(key.lstrip('+') + '+=' + item)}."
    if (match := re.match(r"(\w+)\(", value)) and (usage := _USAGE.get(match[1])):
        return f"It is written {usage}; for a string, write {in_quotes(key, value)}."
    if "${" in value and why_no_interpolation(strip_quotes(value)) is not None:
        return "An interpolation is written ${KEY}, and closed."
    if not _NEEDS_NO_QUOTES.fullmatch(value):
        quote_is_open = value[:1] in ("'", '"') and value.count(value[0]) == 1
        problem = "A string with spaces, letters beyond a-z or any of , = [ ] { } ( ) # & needs two pairs of quotes"
        if quote_is_open:
            problem = "The quote is not closed; a string needs two pairs"
        return f"{problem}: {in_quotes(key, value[quote_is_open:])}."
    return HOW_TO_OVERRIDE


def _suggest_correction(key: str, value: str) -> str | None:
    """The hint on the first of `_CORRECTIONS`, or on two in succession, after which the override can be read.

    None if no correction helps.
    """
    for first, second in product((None, *_CORRECTIONS), _CORRECTIONS):
        before = value if first is None else first.rewrite(value)
        after = second.rewrite(before)
        text = f"{key}={after}"
        if after == before or parse_override(text) is None:
            continue
        reasons = second.reason if first is None else f"{first.reason}. {second.reason}"
        quoted_text = f"'{text}'" if "'" not in text else shlex.quote(text)
        if "'" in text and not re.search(r'["$`\\!]', text):
            quoted_text = f'"{text}"'
        return f"{reasons}: {quoted_text}{f', or as a string {in_quotes(key, value)}' if second.may_be_string else ''}."
    return None


def in_quotes(key: str, value: str) -> str:
    """The override with its value as a string, in the quotes of the parser and of a shell."""
    # Hydra's grammar keeps a backslash as it is, unless a quote follows.
    inner = re.sub(r'(\\*)("|$)', lambda match: match[1] * 2 + ('\\"' if match[2] else ""), value)
    return shlex.quote(f'{key}="{inner}"')


def _plain_key(key: str) -> str:
    """A key without quotes, surrounding blanks, leading dashes and repeated dots."""
    sign = "".join(re.findall(r"^[+~]+", key))
    words = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", key[len(sign) :]).replace("'", "").replace('"', "").strip(" .-$")
    return sign + re.sub(r"\.\.+", ".", words)


class _Correction(NamedTuple):
    """What may be wrong with a value, and the value without that."""

    reason: str
    rewrite: Callable[[str], str]
    may_be_string: bool = False
    """Whether the value may have been meant as a string."""


def _without_quoted(value: str) -> str:
    """The value with a letter in place of each one in quotes."""
    return _QUOTED.sub(lambda match: "q" * len(match[0]), value)


def _without_stray_commas(value: str) -> str:
    """The value without commas outside of quotes that separate nothing."""
    stray = {match.end() - 1 for match in _STRAY_COMMA.finditer(_without_quoted(value))}
    return "".join(letter for index, letter in enumerate(value) if index not in stray)


def _with_square_brackets(value: str) -> str:
    """The value with `[` and `]` for `(` and `)` outside of quotes."""
    square = {"(": "[", ")": "]"}
    pairs = zip(_without_quoted(value), value, strict=True)
    return "".join(square.get(unquoted, letter) for unquoted, letter in pairs)


def _with_colons(value: str) -> str:
    """A mapping with `key: ` for `key=`."""
    return re.sub(r"([{,]\s*[\w.*?-]+)\s*=\s*", r"\1: ", value) if value.startswith("{") else value


def _with_closed_brackets(value: str) -> str:
    """The value with the brackets that are still open at its end closed."""
    still_open: list[str] = []
    for letter in value:
        if letter in "[{(":
            still_open.append({"[": "]", "{": "}", "(": ")"}[letter])
        elif still_open and letter == still_open[-1]:
            still_open.pop()
    return f"{value.rstrip(',')}{''.join(reversed(still_open))}" if still_open else value


def _unquoted_keys(value: str) -> str:
    """The value without the quotes of its keys, but for those that would be read as something else."""

    def unquoted(match: re.Match[str]) -> str:
        name = match[2] or match[3] or ""
        return f"{match[1]}{name}{match[4]}" if _can_be_key(name) else match[0]

    return _QUOTED_KEY.sub(unquoted, value)


def _can_be_key(name: str) -> bool:
    """Whether Hydra's grammar reads a key without quotes as this very name."""
    override = parse_override(f"x={{{name}:1}}")
    value = override.value() if override is not None and not override.is_sweep_override() else None
    number = int(name) if re.fullmatch(r"-?(0|[1-9]\d*)", name) else None
    return isinstance(value, dict) and list(value) in ([name], [number])


_OPEN_BRACKET = "A bracket is not closed, or one too many is"
_STRAY_COMMA = re.compile(r"(?:^|(?<=[\[{(]))\s*,|,(?=\s*(?:[,\]})]|$))")
_CORRECTIONS = (
    _Correction("One = is too many", lambda value: value.removeprefix("=")),
    _Correction("A list is written in [ ]", _with_square_brackets),
    _Correction(_OPEN_BRACKET, _with_closed_brackets, may_be_string=True),
    _Correction("One quote is too many", lambda value: value[:-1] if value[-1:] in ("'", '"') else value),
    _Correction("Keys within { } take no quotes", _unquoted_keys),
    _Correction("A backslash before a quote keeps it open", lambda value: value.replace("\\", "\\\\")),
    _Correction("A value is missing beside a comma", _without_stray_commas, may_be_string=True),
    _Correction("Within { } a key and its value are joined by a colon", _with_colons),
)
_WITHIN_BRACKETS = (
    "Within brackets a string with letters beyond a-z or any of , : = ( ) [ ] {{ }} # & needs quotes of its own, as in "
    "'{}=[\"a=b\"]'. Within {{ }} a key is a word, and each key has its value, as in {{KEY: VALUE}}; for another key, "
    "say it in a YAML file."
)


def parse_override(text: str) -> Override | None:
    """The override, or None if Hydra's grammar cannot read it."""
    try:
        return OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError):
        return None


def _write_in_braces(key: str, value: str) -> str | None:
    """An override of a key with a glob, written as Hydra's grammar accepts it: `+a={*b:{c:value}}`. Else None."""
    names = re.sub(r"['\"]", "", key.lstrip("+")).split(".")
    first = next((index for index, name in enumerate(names) if "*" in name), 0)
    if first == 0 or not all(re.fullmatch(r"[\w*?-]+", name) for name in names):
        return None
    inner = _unquoted_keys(value)
    for name in reversed(names[first:]):
        inner = f"{{{name}:{inner}}}"
    return f"+{'.'.join(names[:first])}={inner}"
