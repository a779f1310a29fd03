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
from trainer_cli.layout import parse_step
from trainer_cli.patterns import find_key, find_name, find_nearest

_USUAL = ("optimizer.lr", "optimizer.weight_decay", "data.batch_size", "data.num_workers")
"""Keys of open sections that most components have, for suggestions."""
_TORCH_OPTIMIZERS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
"""Classes of torch.optim, by name: importing it takes seconds."""
_MAX_KNOWN = 16
"""Keys that a hint lists."""


class Append(NamedTuple):
    """`key+=value`: values to add to the end of a list."""

    path: KeyPath
    values: list[Any]
    line: str
    quoted: Any = None
    """The value with its quotes."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A parsed command line: overrides in Hydra's grammar, `ckpt`, appends, and mistakes for the other arguments."""

    overrides: list[Override] = field(default_factory=list)
    ckpt: str | list[str] | None = None
    ckpt_given: bool = False
    appends: list[Append] = field(default_factory=list)
    mistakes: list[ConfigError] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """The overrides as text."""
        return [line_of(override) for override in self.overrides]


def override_error(message: str, hint: str | None = None, code: Code = Code.override) -> ConfigError:
    """The error for something on the command line."""
    return ConfigError(message, source=COMMAND_LINE, code=code, hint=hint)


def unknown_key_error(
    path: KeyPath, known_keys: Sequence[str], source: str, value: str | None = None, rest: KeyPath = ()
) -> ConfigError:
    """The error for a key that does not exist, with what is meant as it is written at `source`.

    Args:
        path: up to the first unknown name.
        value: its value as text, or that of the key below it.
        rest: the names below `path`.
    """
    # On the command line the whole key, so that two of one section do not read alike; in a file all below it is wrong.
    key = ".".join((*path, *rest) if source == COMMAND_LINE else path)
    # A section with a misspelt name is no section of another program.
    typo = get_close_matches(path[-1], known_keys, n=1, cutoff=0.8) if rest else []
    hint = "" if typo else hint_on_setting(".".join((*path, *rest)), value, source=source)
    meant = ".".join((*path[:-1], *typo, *rest)) if typo else _find_meant(path, rest, known_keys, source)
    if not hint and meant:
        hint = did_you_mean_override(meant, value if source == COMMAND_LINE else None)
    if not hint:
        section = ".".join(path[:-1])
        hint = f"Known here: {', '.join(known_keys)}."
        if len(known_keys) > _MAX_KNOWN:
            own = "" if section else ", and `train config NAME` the arguments of your own classes"
            hint = f"`train config --fields{section and f' {section}'}` lists the keys{own}."
    return ConfigError(f"there is no key '{key}'", location=key, source=source, code=Code.unknown_key, hint=hint)


def did_you_mean_override(key: str, value: str | None) -> str:
    """The question that suggests a key, with the value that was given where the key takes it."""
    line = f"{key}={value}"
    # What a group may be is not known here, and a section takes no value.
    is_read = value and parse_override(line) is not None and shlex.quote(line) in (line, f"'{line}'")
    takes_value = key not in OPEN and tuple(key.split(".")) not in sections()
    return f"Did you mean '{line if takes_value and is_read and _why_refused(line) is None else key}'?"


def _find_meant(path: KeyPath, rest: KeyPath, known_keys: Sequence[str], source: str) -> str | None:
    """The key that is meant by one that does not exist."""
    names = [*known_keys]
    if len(path) == 1 and source != COMMAND_LINE:
        names.append("defaults")  # Hydra's own, which no schema knows.
    prefix = path[:-1]
    if (section := find_name(path[-1], names)) is not None:
        below = rest if unknown_key((*prefix, section, *rest)) is None else ()
        return ".".join((*prefix, section, *below))
    # For a key without its section, such as `lr`, or in another one.
    nested = (
        ".".join((*section, schema_field.name)) for section, kind in sections().items() for schema_field in fields(kind)
    )
    if (elsewhere := find_key((*path, *rest)[-1], [*_USUAL, *nested])) is not None:
        return elsewhere
    # Of the last name alone: a common beginning makes any two keys of a section alike.
    near = find_nearest(path[-1], names)
    return None if near is None else ".".join((*prefix, near, *rest))


def writer(source: str) -> Callable[[str], str]:
    """What writes overrides for a source: as they are for the command line, for a file as YAML."""

    def in_file(overrides: str) -> str:
        pairs = (override.lstrip("+").partition("=") for override in overrides.split(" "))
        return ", ".join(
            f"- override /{key}: {value}"
            if "." not in key and (key in OPEN or (key,) in sections())
            else f"{key}: {value}"
            for key, _, value in pairs
        )

    return str if source == COMMAND_LINE else in_file


def hint_on_setting(word: str, value: str | None, *, source: str = COMMAND_LINE, below: bool = True) -> str:
    """The hint on a setting of other trainers (`hint_on`), without suggestions that the schema refuses."""
    hint = hint_on(word, value, below=below, written=writer(source), refused=_why_refused if value else lambda _: None)
    return _suggest_going_back(value) if value and f"resume={value}" in hint and _has_newer(Path(value)) else hint


def _has_newer(checkpoint: Path) -> bool:
    """Whether the folder of a checkpoint holds newer ones, by their names."""
    step = parse_step(checkpoint.name)
    if step is None or not checkpoint.is_dir():
        return False
    return any((parse_step(path.name) or 0) > step for path in checkpoint.parent.iterdir())


def _suggest_going_back(checkpoint: str) -> str:
    """The commands for a checkpoint that is not the newest of its folder: a resume of it alone is refused."""
    path = shlex.quote(checkpoint)
    return (
        f"There are newer checkpoints: `resume={path} checkpoint.newer=trash` goes back to this one and removes "
        f"them, `name=OTHER ckpt={path} 'load.states=[all]'` continues it as another run, and `ckpt={path}` takes "
        "its weights alone."
    )


def _why_refused(overrides: str) -> str | None:
    """Why a suggestion of one or several overrides is refused by the schema, whatever the config; None if it is not."""
    for word in re.split(r" (?=[\w.]+=)", overrides):
        override = None if word[0] in "+-" else parse_override(word)
        if override is None or override.is_sweep_override() or _is_choice_of_group(override):
            continue
        value = override.value()
        # In capitals: a word that the reader replaces.
        if not str(value).isupper() and (reason := why_refused(override.key_or_group, value)) is not None:
            return reason
    return None


def _is_choice_of_group(override: Override) -> bool:
    return override.key_or_group in OPEN or (override.key_or_group,) in sections()


def unknown_option_error(
    group: str, option: str, known_options: Sequence[str], source: str, line: str = ""
) -> ConfigError:
    """The error for an option that a group does not have.

    Args:
        line: the override that names it, if one does.
    """
    near = _near_option(group, option, known_options)
    target = _torch_optimizer(group, option) if near is None and source == COMMAND_LINE else None
    if target is not None:
        suggestion = f"torch has it: write optimizer=null 'optimizer={{_target_: {target}, lr: 0.001}}'."
    elif near is not None:
        suggestion = f"Did you mean '{_with_option(line, option, near) or near}'?"
    else:
        suggestion = hint_on_setting(group, option, below=False, source=source)
    hint = f"{suggestion} Available: {', '.join(known_options) or 'none'}.".strip()
    if suggestion.startswith("Did you mean") and near is None and f"{group}=" not in suggestion:
        hint = suggestion  # It is no option of this group.
    is_closed = (group,) in sections()
    if not suggestion and option.isidentifier() and not is_closed:
        hint += f" A file configs/{group}/{option}.yaml would be one."
    noun = f"option of {group}" if is_closed else group.removesuffix("s") if group in SEVERAL else group
    return ConfigError(f"there is no {noun} called {option!r}", source=source, code=Code.unknown_option, hint=hint)


def mend_choice(override: Override, known_options: Sequence[str]) -> Override | None:
    """The choice that is meant by one of options that do not exist; None if no option is near."""
    line, value = line_of(override), override.value()
    for option in map(str, value if isinstance(value, list) else [value]):
        near = None if option in known_options else _near_option(override.key_or_group, option, known_options)
        line = line if near is None else _with_option(line, option, near)
    return parse_override(line) if line != line_of(override) else None


def _torch_optimizer(group: str, option: str) -> str | None:
    """The class of torch that is an optimizer of this name, whatever its case; None if there is none."""
    names = {normalise(name): name for name in _TORCH_OPTIMIZERS} if group == "optimizer" else {}
    return f"torch.optim.{names[normalise(option)]}" if normalise(option) in names else None


def _near_option(group: str, option: str, known_options: Sequence[str]) -> str | None:
    if (same := find_name(option, known_options)) is not None or _torch_optimizer(group, option) is not None:
        return same
    return find_nearest(option, known_options) or find_nearest(
        option.removesuffix(".yaml").rpartition("/")[2], known_options
    )


def _with_option(line: str, option: str, other: str) -> str:
    """An override that chooses `other` in place of `option`."""
    return re.sub(rf"(?<=[=,\[]){re.escape(option)}(?![^,\]])", other, line)


def line_of(override: Override) -> str:
    """The override as it was written."""
    return override.input_line or ""


def path_of(override: Override) -> KeyPath:
    """The key as its parts."""
    return tuple(word for word in re.split(r"[.\[\]]+", override.key_or_group) if word)


def given_value(arguments: Sequence[str], key: str) -> str | None:
    """The value that overrides give a key last, as text without quotes; None if they give none."""
    pairs = (argument.lstrip("+").partition("=") for argument in arguments)
    return next((strip_quotes(value) for name, equals, value in reversed([*pairs]) if equals and name == key), None)


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
    line = CommandLine()
    patterns: list[str] = []
    ckpt_given, ckpt_is_single = False, True
    # One for all arguments: each builds a table of Hydra's functions.
    parser = OverridesParser.create()
    for argument in join_split(arguments):
        if " " in argument and argument not in arguments:
            message = f"the shell has split {argument!r} at its spaces"
            line.mistakes.append(override_error(message, f"Put it in quotes: {shlex.quote(argument)}."))
            continue
        if not _is_text(argument):
            message = f"{argument!r} holds bytes that are not characters of {sys.getfilesystemencoding()}"
            line.mistakes.append(override_error(message, "Write it in UTF-8, under a locale such as LC_ALL=C.UTF-8."))
            continue
        key, equals, value = argument.partition("=")
        if equals and key.lstrip("+").rstrip("+") == "ckpt":
            ckpt_given = True
            try:
                new_patterns, is_list = _parse_ckpt(value, argument)
            except ConfigError as error:
                line.mistakes.append(error)
                continue
            ckpt_is_single = ckpt_is_single and not is_list and not key.endswith("+")
            patterns += new_patterns
            continue
        appends = bool(equals) and key.endswith("+")
        if appends and key.startswith(("+", "~")):
            hint = f"To add to the end of a list, write '{key.strip('+~')}+={value}'."
            line.mistakes.append(override_error(f"cannot read the override {argument!r}", hint))
            continue
        # Hydra's grammar has no `+=`: the value is parsed as that of `key=value`.
        plain_argument = f"{key[:-1]}={value}" if appends else argument
        try:
            sign = _implied_sign(key) if equals else ""
            override = parser.parse_override(f"{sign}{plain_argument}")
            if sign == "++":
                # Messages and provenance show the key as it is documented.
                override.input_line = argument
            is_too_deep = not override.is_sweep_override() and _depth(override.value()) > DEEPEST
        except (HydraException, ValueError, RecursionError):
            message = f"cannot read the override {argument!r}" if equals else f"{argument!r} is not an override"
            line.mistakes.append(override_error(message, hint_on_syntax(argument)))
            continue
        if is_too_deep:
            line.mistakes.append(override_error(f"{argument[:40]}... is nested more than {DEEPEST} deep"))
        elif override.is_sweep_override():
            line.mistakes.append(_several_values_error(argument, override.value(), arguments))
        elif _has_sweep(override.value()):
            hint = f"Give whole values instead: '{override.get_key_element()}=[A],[B]', with -m (train fit -m)."
            line.mistakes.append(override_error(f"{argument!r} has values to sweep inside of another", hint))
        elif appends:
            parsed_value: Any = override.value()
            values = parsed_value if isinstance(parsed_value, list) else [parsed_value]
            line.appends.append(Append(path_of(override), values, argument, value_in_quotes(override)))
        else:
            line.overrides.append(override)
            # Overrides apply before all appends, so an append that was written before its list is replaced must go.
            line.appends[:] = [append for append in line.appends if not _replaces(override, append.path)]
    # A single name stays a string, as a config file has it.
    ckpt = patterns if not ckpt_is_single or len(patterns) > 1 else (patterns[0] if patterns else None)
    return CommandLine(line.overrides, ckpt, ckpt_given, line.appends, line.mistakes)


def join_split(arguments: Sequence[str]) -> list[str]:
    """The arguments, with the parts of a list or mapping that a shell has split at its spaces joined again."""
    joined: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if "=" in word and _OPENING.match(word.partition("=")[2]) and _is_text(word) and _is_open(word):
            # The shortest that can be read: the words after it are arguments of their own.
            lengths = (length for length in range(1, len(rest) + 1) if not _is_open(" ".join([word, *rest[:length]])))
            length = next(lengths, 0)
            text = " ".join([word, *rest[:length]])
            if length and parse_override(text) is not None:
                word, rest = text, rest[length:]
        joined.append(word)
    return joined


def _is_open(text: str) -> bool:
    return _with_closed_brackets(text) != text


def _implied_sign(key: str) -> str:
    """The sign that an override may leave out: a choice for the root, and keys that every `data` may have."""
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


def _depth(value: Any) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if items is None else 1 + max(map(_depth, items), default=0)


def _parse_ckpt(value: str, argument: str) -> tuple[list[str], bool]:
    """The patterns of `ckpt=VALUE`, and whether VALUE is a list `[a,b]`."""
    text = strip_quotes(value.strip())
    if text == "null":
        return [], False
    if value.strip() == PYTHONS_NULL:
        hint = "Write ckpt=null."
        raise override_error(f"ckpt: {PYTHONS_NULL} is a string here, and not null", hint)
    if not text:
        raise override_error("ckpt= names nothing", "Give a path, a glob, or ckpt=null.")
    if not (text.startswith("[") and text.endswith("]") and closes_at_end(text)):
        return [text], False
    patterns = [strip_quotes(pattern.strip()) for pattern in split_at_commas(text[1:-1])]
    if not all(patterns):
        raise override_error(f"{argument} has an empty part", "Write ckpt='[a,b]'.")
    return patterns, True


def suggest_list(key: str, interval: IntervalSweep) -> str:
    """The hint that lists values of an interval: its ends, and 1 and 3 of each decade if they differ tenfold."""
    start, end = float(interval.start or 0), float(interval.end or 0)
    values = [start, end]
    if 0 < 10 * start <= end:
        decades = range(math.floor(math.log10(start)), math.ceil(math.log10(end)) + 1)
        inner = [float(f"{digit}e{decade}") for decade in decades for digit in (1, 3)]
        values = [start, *(value for value in inner if start < value < end), end]
    texts = ",".join(f"{value:g}" for value in values)
    return f"An interval is for a search that draws values, which -m does not do. Did you mean {key}={texts}?"


def _several_values_error(argument: str, sweep: Any, arguments: Sequence[str]) -> ConfigError:
    """The error for an override with several values where a command makes one run of these arguments."""
    key, _, value = argument.partition("=")
    message = f"{argument!r} gives several values, but one run takes one"
    text = in_quotes(key, value)
    if isinstance(sweep, IntervalSweep):
        return override_error(message, f"{suggest_list(key, sweep)} With -m: train fit -m.")
    words = [word.removeprefix("experiment=") for word in arguments]
    command = f"To run each: `train fit -m {shlex.join(words)}`."
    if re.match(r"\w+\(", value):
        others = {"str": f"For a string write {text}."}
    else:
        list_text = shlex.quote(f"{key}=[{value}]")
        others = {"list": f"For a list write {list_text}.", "str": f"For a string write {text}."}
    if (number := looks_like_number(value)) is not None:
        command = f"For a number write '{key}={instead_of(value, number)}'. {command}"
    kind = kind_at(key)
    taken = [other for name, other in others.items() if kind is None or name in kind.names]
    return override_error(message, " ".join([command, *taken]))


def _has_sweep(value: Any) -> bool:
    """Whether a list or mapping contains values to sweep, which Hydra does not expand."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(isinstance(item, Sweep) or _has_sweep(item) for item in items)


_PLAIN = re.compile(r"[\w\-./:%+*@?|$]*", re.ASCII)
_OPENING = re.compile(r"[\[{]|(?:range|choice|interval|glob|sort|shuffle|int|float|str|bool|tag)\(")
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
    quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" and text[0] not in text[1:-1]
    return text[1:-1] if quoted else text


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


def hint_on_syntax(argument: str) -> str:
    """The hint for an argument that cannot be read."""
    key, equals, value = argument.partition("=")
    if not equals:
        key, equals, value = argument.partition(":")
        suggestion = f"{key.strip()}={value.strip()}"
        return (
            f"Did you mean {shlex.quote(suggestion)}?"
            if equals and value.strip() and parse_override(suggestion)
            else HOW_TO_OVERRIDE
        )
    if not key.strip("+~"):
        return HOW_TO_OVERRIDE
    if match := re.fullmatch(r"([\w.]+)\[\d+\](.*)", key):
        name = match[1]
        return f"A single item cannot be set: write the whole list, {name}=[...], or add to its end, {name}+=ITEM."
    if key.count("@") > 1:
        group, _, *packages = key.split("@")
        return f"A group takes one package: '{group}@{packages[-1]}={value}'."
    if (nested := _in_braces(key, value)) is not None:
        return f"A name with * is written in braces: '{nested}'."
    if re.search(r"[^\w.\-/@+~]|\.\.|^[.-]|\.$", key, re.ASCII):
        suggestion = f"{_plain_key(key)}={value}"
        question = (
            f" Did you mean {shlex.quote(suggestion)}?"
            if suggestion != argument and parse_override(suggestion) is not None
            else ""
        )
        return f"{key!r} is not a key: keys are words joined by dots.{question}"
    if value.startswith("~"):
        return f"Write the whole path, such as {key}=$HOME{value[1:]}."
    if (corrected := _corrected(key, value)) is not None:
        return corrected
    as_string = f"as a string {in_quotes(key, value)}"
    if _OPENING.match(value) and any(value.count(a) != value.count(b) for a, b in ("[]", "{}", "()")):
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
    if not _PLAIN.fullmatch(value):
        quote_is_open = value[:1] in ("'", '"') and value.count(value[0]) == 1
        problem = (
            "The quote is not closed; a string needs two pairs"
            if quote_is_open
            else ("A string with spaces, letters beyond a-z or any of , = [ ] { } ( ) # & needs two pairs of quotes")
        )
        return f"{problem}: {in_quotes(key, value[quote_is_open:])}."
    return HOW_TO_OVERRIDE


def _corrected(key: str, value: str) -> str | None:
    """The hint of the first correction, or else of two after another, with which the override can be read."""
    for first, second in product((None, *_CORRECTIONS), _CORRECTIONS):
        before = value if first is None else first.rewrite(value)
        after = second.rewrite(before)
        text = f"{key}={after}"
        if after == before or parse_override(text) is None:
            continue
        reasons = second.reason if first is None else f"{first.reason}. {second.reason}"
        shown = f"'{text}'" if "'" not in text else shlex.quote(text)
        if "'" in text and not re.search(r'["$`\\!]', text):
            shown = f'"{text}"'
        return f"{reasons}: {shown}{f', or as a string {in_quotes(key, value)}' if second.may_be_string else ''}."
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
    stray = {match.end() - 1 for match in _STRAY_COMMA.finditer(_without_quoted(value))}
    return "".join(letter for index, letter in enumerate(value) if index not in stray)


def _with_square_brackets(value: str) -> str:
    bare, square = _without_quoted(value), {"(": "[", ")": "]"}
    return "".join(square.get(plain, letter) for plain, letter in zip(bare, value, strict=True))


def _with_colons(value: str) -> str:
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
    read = parse_override(f"x={{{name}:1}}")
    value = read.value() if read is not None and not read.is_sweep_override() else None
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


def _in_braces(key: str, value: str) -> str | None:
    """An override of a key with a glob, written as Hydra's grammar accepts it: `+a={*b:{c:value}}`. Else None."""
    names = re.sub(r"['\"]", "", key.lstrip("+")).split(".")
    first = next((index for index, name in enumerate(names) if "*" in name), 0)
    if first == 0 or not all(re.fullmatch(r"[\w*?-]+", name) for name in names):
        return None
    inner = _unquoted_keys(value)
    for name in reversed(names[first:]):
        inner = f"{{{name}:{inner}}}"
    return f"+{'.'.join(names[:first])}={inner}"
