"""How values are written on the command line, and the hint for an override that Hydra's grammar cannot read."""

from __future__ import annotations

import re
import shlex

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

_PLAIN = re.compile(r"[\w\-./:%+*@?|$]*", re.ASCII)
_OPENS = re.compile(r"[\[{]|(?:range|choice|interval|glob|sort|shuffle|int|float|str|bool|tag)\(")
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_QUOTED_KEY = re.compile(r"([{,]\s*)(?:'([^'\\]*)'|\"([^\"\\]*)\")(\s*:)")


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
        return (
            "Write key=value, group=option, +key=value for a new key, key+=value to add to a list, or ~key to remove."
        )
    if found := re.fullmatch(r"([\w.]+)\[\d+\](.*)", key):
        name = found[1]
        return f"A single item cannot be set: write the whole list, {name}=[...], or add to its end, {name}+=ITEM."
    if key.count("@") > 1:
        group, _, *packages = key.split("@")
        return f"A group takes one package: '{group}@{packages[-1]}={value}'."
    if (nested := _in_braces(key, value)) is not None:
        return f"A name with * stands in braces: '{nested}'."
    if re.search(r"[^\w.\-/@+~]|\.\.|^\.|\.$", key, re.ASCII):
        return f"{key!r} is no key: keys are words joined by dots."
    if value.startswith("~"):
        return f"Write the whole path, such as {key}=$HOME{value[1:]}."
    if found := re.fullmatch(r"\(([^()]*)\)", value):
        return f"For a list write '{key}=[{found[1]}]'."
    if _OPENS.match(value) and any(value.count(a) != value.count(b) for a, b in ("[]", "{}", "()")):
        return "A bracket is not closed, or one too many is."
    if value[:1] in ("[", "{") and closes_at_end(value.rstrip()):
        return _within(key, value)
    if not _PLAIN.fullmatch(value):
        is_open = value[:1] in ("'", '"') and value.count(value[0]) == 1
        inner = value[is_open:].replace("\\", "\\\\").replace('"', '\\"')
        why = (
            "The quote is not closed; a text needs two pairs"
            if is_open
            else ("A text with spaces, letters beyond a-z or any of , = [ ] { } ( ) # & needs two pairs of quotes")
        )
        quoted = shlex.quote(key + f'="{inner}"')
        return f"{why}: {quoted}."
    return "Write key=value."


def _within(key: str, value: str) -> str:
    """What is wrong inside a list or a mapping: quotes around all of it would make a text of it."""
    quoted = [found[2] or found[3] or "" for found in _QUOTED_KEY.finditer(value)]
    if odd := next((name for name in quoted if not _can_be_key(name)), None):
        return f"Within {{ }} a key takes no quotes, and so {odd!r} cannot be one: say it in a YAML file."
    if quoted:
        return f"Keys within {{ }} take no quotes{_instead(key, _unquoted_keys(value))}"
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
    return isinstance(value, dict) and [str(key) for key in value] == [name]


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
