"""How values are written on the command line, and the hint for an override that Hydra's grammar cannot read."""

from __future__ import annotations

import re
import shlex

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from trainer_cli.config.yaml_traps import why_no_interpolation

_PLAIN = re.compile(r"[\w\-./:%+*@?|$]*", re.ASCII)
_OPENS = re.compile(r"[\[{]|(?:range|choice|interval|glob|sort|shuffle|int|float|str|bool|tag)\(")
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
    """A text in the quotes that make it one: a pair for the shell, and one for the parser."""
    return f"'\"{text}\"'"


def unquoted(text: str) -> str:
    """A text without the one pair of quotes around it, where it has one."""
    quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" and text[0] not in text[1:-1]
    return text[1:-1] if quoted else text


def split_at_commas(text: str) -> list[str]:
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


def closes_at_end(text: str) -> bool:
    """Whether the bracket that opens the text is the one that ends it: `[a,b]`, but not `[ab]*[cd]`."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter in "[{") - (letter in "]}")
        if depth == 0:
            return index == len(text) - 1
    return False


def hint_for(argument: str) -> str:
    """The hint for an argument that cannot be read."""
    key, equals, value = argument.partition("=")
    if not equals:
        key, equals, value = argument.partition(":")
        meant = f"{key.strip()}={value.strip()}"
        return f"Did you mean {shlex.quote(meant)}?" if equals and value.strip() and _read(meant) else HOW_TO_OVERRIDE
    if not key.strip("+~"):
        return HOW_TO_OVERRIDE
    if found := re.fullmatch(r"([\w.]+)\[\d+\](.*)", key):
        name = found[1]
        return f"A single item cannot be set: write the whole list, {name}=[...], or add to its end, {name}+=ITEM."
    if key.count("@") > 1:
        group, _, *packages = key.split("@")
        return f"A group takes one package: '{group}@{packages[-1]}={value}'."
    if (nested := _in_braces(key, value)) is not None:
        return f"A name with * stands in braces: '{nested}'."
    if re.search(r"[^\w.\-/@+~]|\.\.|^[.-]|\.$", key, re.ASCII):
        meant = f"{_plain_key(key)}={value}"
        instead = f" Did you mean {shlex.quote(meant)}?" if meant != argument and _read(meant) is not None else ""
        return f"{key!r} is no key: keys are words joined by dots.{instead}"
    if value.startswith("=") and _read(f"{key}{value}") is not None:
        return f"Did you mean {shlex.quote(key + value)}?"
    if value.startswith("~"):
        return f"Write the whole path, such as {key}=$HOME{value[1:]}."
    if found := re.fullmatch(r"\(([^()]*)\)", value):
        return f"For a list write '{key}=[{found[1]}]'."
    if _OPENS.match(value) and any(value.count(a) != value.count(b) for a, b in ("[]", "{}", "()")):
        closed = f"{key}={value.rstrip(',')}{_closing(value)}"
        return f"A bracket is not closed, or one too many is{_or_text(closed, key, value)}"
    if value[:1] in ("[", "{") and closes_at_end(value.rstrip()):
        return _within(key, value)
    if value[:1] in ("[", "{") and value[-1] in "'\"" and closes_at_end(value[:-1]):
        return f"One quote is too many{_instead(key, value[:-1])}"
    if found := re.fullmatch(r"extend_list\((.*)\)", value):
        item = found[1] if len(split_at_commas(found[1])) == 1 else f"[{found[1]}]"
        return f"To add to the end of a list, write {shlex.quote(key.lstrip('+') + '+=' + item)}."
    if (found := re.match(r"(\w+)\(", value)) and (usage := _USAGE.get(found[1])):
        return f"It is written {usage}; for a text, write {in_quotes(key, value)}."
    if "${" in value and why_no_interpolation(unquoted(value)) is not None:
        return "An interpolation is written ${KEY}, and closed."
    given = [part for part in split_at_commas(value) if part.strip()]
    if 0 < len(given) < len(split_at_commas(value)) and _read(f"{key}={','.join(given)}") is not None:
        return f"A value is missing beside a comma{_or_text(key + '=' + ','.join(given), key, value)}"
    if not _PLAIN.fullmatch(value):
        is_open = value[:1] in ("'", '"') and value.count(value[0]) == 1
        why = (
            "The quote is not closed; a text needs two pairs"
            if is_open
            else ("A text with spaces, letters beyond a-z or any of , = [ ] { } ( ) # & needs two pairs of quotes")
        )
        return f"{why}: {in_quotes(key, value[is_open:])}."
    return HOW_TO_OVERRIDE


def in_quotes(key: str, value: str) -> str:
    """The override with its value as a text, in the quotes of the parser and of a shell."""
    # Hydra's grammar keeps a backslash as it is, unless a quote follows.
    inner = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), value)
    return shlex.quote(f'{key}="{inner}"')


def _or_text(instead: str, key: str, value: str) -> str:
    """The end of a sentence: what is probably meant, where that can be read, and the value as a text."""
    meant = f": {shlex.quote(instead)}, or" if _read(instead) is not None else ":"
    return f"{meant} as a text {in_quotes(key, value)}."


def _closing(value: str) -> str:
    """The brackets that are still open at the end of a value."""
    still_open: list[str] = []
    for letter in value:
        if letter in "[{(":
            still_open.append({"[": "]", "{": "}", "(": ")"}[letter])
        elif still_open and letter == still_open[-1]:
            still_open.pop()
    return "".join(reversed(still_open))


def _plain_key(key: str) -> str:
    """A key without what does not belong to one: quotes, blanks around it, a flag's dashes, points too many."""
    sign = "".join(re.findall(r"^[+~]+", key))
    words = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", key[len(sign) :]).replace("'", "").replace('"', "").strip(" .-$")
    return sign + re.sub(r"\.\.+", ".", words)


def _within(key: str, value: str) -> str:
    """What is wrong inside a list or a mapping: quotes around all of it would make a text of it."""
    quoted = [found[2] or found[3] or "" for found in _QUOTED_KEY.finditer(value)]
    if odd := next((name for name in quoted if not _can_be_key(name)), None):
        return f"Within {{ }} a key takes no quotes, and so {odd!r} cannot be one: say it in a YAML file."
    if quoted:
        return f"Keys within {{ }} take no quotes{_instead(key, _unquoted_keys(value))}"
    doubled = value.replace("\\", "\\\\")
    if doubled != value and _read(f"{key}={doubled}") is not None:
        return f"A backslash before a quote keeps it open{_instead(key, doubled)}"
    bare = _QUOTED.sub(lambda found: "q" * len(found[0]), value)
    if re.search(r",\s*,", bare):
        return "An element is missing between two commas."
    if found := re.search(r"([\[{])\s*,", bare):
        return f"An element is missing between {found[1]} and the comma after it."
    if found := re.search(r",\s*([\]}])", bare):
        shorter = value[: found.start()] + value[found.start() + 1 :]
        return f"An element is missing between the last comma and {found[1]}{_instead(key, shorter)}"
    if value[0] == "{" and re.search(r"[{,]\s*[\w.*?-]+\s*=", bare):
        colons = re.sub(r"([{,]\s*[\w.*?-]+)\s*=\s*", r"\1: ", value)
        return f"Within {{ }} a key and its value are joined by a colon{_instead(key, colons)}"
    if re.search(r"\{\s*[\[{]", bare):
        return "Within { } a key is a word, as in {KEY: VALUE}."
    if "(" in bare:
        square = {"(": "[", ")": "]"}
        lists = "".join(square.get(plain, letter) for plain, letter in zip(bare, value, strict=True))
        return f"A list stands in [ ]{_instead(key, lists)}"
    if _lacks_a_value(bare):
        return "Within { } each key has its value, as in {KEY: VALUE}; a list stands in [ ]."
    letters = "letters beyond a-z or any of , : = ( ) [ ] { } # &"
    return f"Within brackets a text with {letters} needs quotes of its own, as in '{key}=[\"a=b\"]'."


def _unquoted_keys(value: str) -> str:
    return _QUOTED_KEY.sub(lambda found: f"{found[1]}{found[2] or found[3] or ''}{found[4]}", value)


def _lacks_a_value(bare: str) -> bool:
    """Whether a key in braces stands alone: `{a}`, `{a:}`. Looked for from the innermost brackets outwards."""
    while found := re.search(r"\{([^\[\]{}]*)\}|\[[^\[\]{}]*\]", bare):
        if any(part.strip() and not part.partition(":")[2].strip() for part in (found[1] or "").split(",")):
            return True
        bare = f"{bare[: found.start()]}q{bare[found.end() :]}"
    return False


def _instead(key: str, value: str) -> str:
    """The end of a sentence: how the whole would be written, where that could be read."""
    text = f"{key}={value}"
    if _read(text) is None:
        return "."
    return f': "{text}".' if "'" in text and not re.search(r'["$`\\!]', text) else f": {shlex.quote(text)}."


def _can_be_key(name: str) -> bool:
    read = _read(f"x={{{name}:1}}")
    value = read.value() if read is not None and not read.is_sweep_override() else None
    return isinstance(value, dict) and list(value) in ([name], [_whole(name)])


def _whole(name: str) -> int | None:
    return int(name) if re.fullmatch(r"-?(0|[1-9]\d*)", name) else None


def _read(text: str) -> Override | None:
    try:
        return OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError):
        return None


def _in_braces(key: str, value: str) -> str | None:
    """An override of a key that has a glob in it, as Hydra's grammar takes it: `+a={*b:{c:value}}`; None for others."""
    parts = re.sub(r"['\"]", "", key.lstrip("+")).split(".")
    first = next((index for index, part in enumerate(parts) if "*" in part), 0)
    if first == 0 or not all(re.fullmatch(r"[\w*?-]+", part) for part in parts):
        return None
    inner = _unquoted_keys(value)
    for part in reversed(parts[first:]):
        inner = f"{{{part}:{inner}}}"
    return f"+{'.'.join(parts[:first])}={inner}"
