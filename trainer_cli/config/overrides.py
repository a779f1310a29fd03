"""The command line's overrides: `ckpt=` and `experiment=` are ours, the rest is Hydra's grammar."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from trainer_cli.errors import ConfigError

KeyPath = tuple[str, ...]
COMMAND_LINE = "command line"
_SYNTAX = set(",={}[]() '\"\\")


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Overrides as Hydra shall see them, and `ckpt`, which it shall not see."""

    overrides: list[Override] = field(default_factory=list)
    ckpt: str | list[str] | None = None
    ckpt_given: bool = False

    @property
    def lines(self) -> list[str]:
        """The overrides as text."""
        return [line_of(override) for override in self.overrides]


def line_of(override: Override) -> str:
    """The override as it was written."""
    return override.input_line or ""


def path_of(override: Override) -> KeyPath:
    """The key as its parts."""
    return tuple(part for part in re.split(r"[.\[\]]+", override.key_or_group) if part)


def read(arguments: Sequence[str]) -> CommandLine:
    """Split off `ckpt=`, rewrite `experiment=x` to `+experiment=x`, and parse the rest.

    Raises:
        ConfigError: naming every argument that is no override, with a hint on quoting.
    """
    patterns: list[str] = []
    given, single = False, True
    rest: list[str] = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key.lstrip("+") == "ckpt":
            given = True
            text, is_list = _patterns(value, argument)
            single = single and not is_list
            patterns += text
        else:
            rest.append("+" + argument if argument.startswith("experiment=") else argument)
    ckpt = patterns if not single or len(patterns) > 1 else (patterns[0] if patterns else None)
    parsed: list[Override] = []
    mistakes: list[ConfigError] = []
    parser = OverridesParser.create()
    for argument in rest:
        try:
            override = parser.parse_override(argument)
        except (HydraException, ValueError):
            mistakes.append(_unreadable(argument))
            continue
        if override.is_sweep_override():
            mistakes.append(_sweep(argument))
        parsed.append(override)
    raise_all(mistakes)
    return CommandLine(parsed, ckpt, given)


def raise_all(mistakes: Sequence[ConfigError]) -> None:
    """Raise the mistakes as one error, if there are any."""
    if len(mistakes) == 1:
        raise mistakes[0]
    if mistakes:
        listed = "\n".join(f"  - {mistake}" for mistake in mistakes)
        raise ConfigError(f"{len(mistakes)} mistakes:\n{listed}\n")


def _patterns(value: str, argument: str) -> tuple[list[str], bool]:
    """What `ckpt=VALUE` names: one pattern, or the parts of `[a,b]`."""
    text = _unquoted(value.strip())
    if text == "null":
        return [], False
    if not text:
        raise ConfigError("ckpt= names nothing", where=COMMAND_LINE, cure="Give a path, a glob, or ckpt=null.")
    if not (text.startswith("[") and text.endswith("]") and _closes_at_end(text)):
        return [text], False
    parts = [_unquoted(part.strip()) for part in _split(text[1:-1])]
    if not all(parts):
        raise ConfigError(f"{argument} has an empty part", where=COMMAND_LINE, cure="Write ckpt='[a,b]'.")
    return parts, True


def _unquoted(text: str) -> str:
    quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" and text[0] not in text[1:-1]
    return text[1:-1] if quoted else text


def _closes_at_end(text: str) -> bool:
    """Whether the bracket that opens the text is the one that ends it: `[a,b]`, but not `[ab]*[cd]`."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth == 0:
            return index == len(text) - 1
    return False


def _split(text: str) -> list[str]:
    """Split at commas that stand in no bracket, brace or quote."""
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


def _unreadable(argument: str) -> ConfigError:
    key, equals, value = argument.partition("=")
    if not equals:
        cure = "Write key=value, group=option, +key=value to add a key, or ~key to remove one."
        return ConfigError(f"{argument!r} is no override", where=COMMAND_LINE, cure=cure)
    cure = "Write key=value."
    if set(value) & _SYNTAX:
        inner = value.replace("\\", "\\\\").replace('"', '\\"')
        cure = f"Spaces and any of , = [ ] {{ }} ( ) in a text need two pairs of quotes: '{key}=\"{inner}\"'."
    return ConfigError(f"cannot read the override {argument!r}", where=COMMAND_LINE, cure=cure)


def _sweep(argument: str) -> ConfigError:
    key, _, value = argument.partition("=")
    return ConfigError(
        f"{argument!r} gives several values, but one run takes one",
        where=COMMAND_LINE,
        cure=f"For a list write '{key}=[{value}]', for a text '{key}=\"{value}\"'.",
    )
