"""Find values that YAML reads as something else than they look like, in a file that could be parsed.

`12:30:45` is a number to YAML, `014` another one than it seems, `no` is false, `0o14` and `None` are texts, and of a
key that stands twice the last one counts. Each is refused here, with its line and what to write instead.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

LARGEST_COUNT = 100_000
"""Values in one file, aliases counted as often as they stand: few lines of aliases make billions."""
DEEPEST = 40
PYTHONS_NULL = "None"
_LONGEST = 400
_TAG = "tag:yaml.org,2002:"
_TAGS = {_TAG + kind for kind in ("map", "seq", "str", "int", "float", "bool", "null", "merge")}
_SEXAGESIMAL = re.compile(r"[-+]?([\d_]+(?::[0-5]?\d)+)(?:\.[\d_]*)?")
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false"}


class Trap(NamedTuple):
    """A mistake in a line. One that `breaks` leaves no values that could be used."""

    what: str
    line: int
    cure: str = ""
    breaks: bool = False


def find_traps(document: yaml.MappingNode, *, written: bool = False) -> list[Trap]:
    """The traps in a file. `written`: by a program, which quotes nothing that looks like a number by mistake."""
    walk = _Walk(written)
    walk.mapping(document, (), 0)
    return walk.found


def why_no_interpolation(text: str) -> str | None:
    """Why a text with `${` in it cannot be resolved whatever else there is, or None."""
    if "${" not in text:
        return None
    try:
        OmegaConf.create({"value": text})
    except OmegaConfBaseException as error:
        return str(error.msg or error).splitlines()[0]
    except RecursionError:
        return "nested too deep"
    return None


def looks_like_number(text: str) -> float | None:
    """The number that a text looks like, or None."""
    plain = text
    if re.fullmatch(r"[-+]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?", text):
        plain = text.replace(",", "")
    elif re.fullmatch(r"[-+]?0,\d+", text):
        plain = text.replace(",", ".")
    try:
        return int(plain, 0) if re.match(r"[-+]?0[xob]", plain, re.IGNORECASE) else float(plain)
    except ValueError:
        return None


class _Walk:
    """One walk over the nodes of a file."""

    def __init__(self, written: bool) -> None:
        self.found: list[Trap] = []
        self._written = written
        self._counts: dict[int, int] = {}
        self._above: set[int] = set()

    def mapping(self, node: yaml.MappingNode, path: tuple[str, ...], depth: int) -> int:
        """Scan keys and values; the count of values in it."""
        seen: dict[tuple[str, str], int] = {}
        count = 0
        for key, value in node.value:
            count += self._any(value, (*path, self._key(key, path, seen)), depth + 1)
        return count

    def _key(self, key: yaml.Node, path: tuple[str, ...], seen: dict[tuple[str, str], int]) -> str:
        if not isinstance(key, yaml.ScalarNode):
            self._refuse(key, path, "a key must be a single text", "", breaks=True)
            return "?"
        if key.tag == _TAG + "merge":
            return "<<"
        text, line = str(key.value), key.start_mark.line + 1
        if (key.tag, text) in seen:
            first = seen[key.tag, text]
            self._refuse(key, (*path, text), f"the key stands twice, first in line {first}", "Remove one of them.")
        seen.setdefault((key.tag, text), line)
        octal = key.tag == _TAG + "int" and (_SEXAGESIMAL.fullmatch(text) or _OCTAL.fullmatch(text)) is not None
        if octal or key.tag not in (_TAG + "str", _TAG + "int"):
            read = _shown(key)
            self._refuse(key, path, f"the key {text or 'of nothing'} is read by YAML as {read}",
                         f"Put it in quotes: '{text}'.", breaks=True)  # fmt: skip
        return text

    def _any(self, node: yaml.Node, path: tuple[str, ...], depth: int) -> int:
        if isinstance(node, yaml.ScalarNode):
            self._scalar(node, path)
            return 1
        if id(node) in self._above:
            self._refuse(node, path, "an anchor's value contains itself", "", breaks=True)
            return 1
        if depth > DEEPEST:
            self._refuse(node, path, f"nested more than {DEEPEST} deep", "", breaks=True)
            return 1
        if id(node) not in self._counts:
            self._above.add(id(node))
            if node.tag not in _TAGS:
                self._tag(node, path)
            if isinstance(node, yaml.MappingNode):
                count = self.mapping(node, path, depth)
            else:
                items = enumerate(node.value)
                count = sum(self._any(item, (*path, str(index)), depth + 1) for index, item in items)
            self._above.discard(id(node))
            self._counts[id(node)] = count + 1
            if count >= LARGEST_COUNT and not any(trap.breaks for trap in self.found):
                what = f"this stands for more than {LARGEST_COUNT:,} values"
                self._refuse(node, path, what, "Do aliases multiply?", breaks=True)
        return self._counts[id(node)]

    def _scalar(self, node: yaml.ScalarNode, path: tuple[str, ...]) -> None:
        text = str(node.value)
        if node.tag not in _TAGS or node.tag == _TAG + "merge":
            self._tag(node, path)
        elif node.style in ("'", '"', "|", ">"):
            self._interpolation(node, path, text)
        elif node.tag == _TAG + "str":
            self._interpolation(node, path, text)
            number = None if self._written else looks_like_number(text)
            if number is not None:
                self._refuse(node, path, f"{text} is read by YAML as a text, not as a number", _instead(text, number))
            elif text == PYTHONS_NULL and not self._written:
                # A defaults list would look for an option of that name.
                self._refuse(node, path, f"{text} is read by YAML as a text, not as null",
                             f"Write null, or '{text}' in quotes.", breaks=path[0] == "defaults")  # fmt: skip
        elif node.tag == _TAG + "bool":
            if plain := _WORDS.get(text.lower()):
                cure = f"Write {plain}, or '{text}' in quotes."
                self._refuse(node, path, f"{text} is read by YAML as {plain}", cure)
        elif len(text) > _LONGEST:
            self._refuse(node, path, f"a number of {len(text)} characters is too long", "", breaks=True)
        elif found := _SEXAGESIMAL.fullmatch(text):
            what = f"{text} is read by YAML as {_shown(node)}"
            self._refuse(node, path, what, f"Write {_clock(found.group(1))}, or put it in quotes.")
        elif node.tag == _TAG + "int" and _OCTAL.fullmatch(text):
            plain = text.replace("_", "").lstrip("+-").lstrip("0") or "0"
            cure = f"Write {plain}, or '{text}' in quotes."
            self._refuse(node, path, f"{text} is read by YAML as {_shown(node)} (octal)", cure)

    def _interpolation(self, node: yaml.Node, path: tuple[str, ...], text: str) -> None:
        if (why := why_no_interpolation(text)) is not None:
            self._refuse(node, path, f"{text!r} is no interpolation: {why}", "Write ${key}.", breaks=True)

    def _tag(self, node: yaml.Node, path: tuple[str, ...]) -> None:
        if node.tag in (_TAG + "value", _TAG + "merge"):
            self._refuse(node, path, f"{node.value} alone means something else in YAML", f"Write '{node.value}'.",
                         breaks=True)  # fmt: skip
        else:
            tag = node.tag.replace(_TAG, "!!")
            cure = "Remove it; a text that begins with ! needs quotes."
            self._refuse(node, path, f"the tag {tag} is not known in a config", cure, breaks=True)

    def _refuse(self, node: yaml.Node, path: tuple[str, ...], what: str, cure: str, *, breaks: bool = False) -> None:
        key = f"{'.'.join(path)}: " if path else ""
        self.found.append(Trap(key + what, node.start_mark.line + 1, cure, breaks))


def _shown(node: yaml.ScalarNode) -> str:
    """What YAML reads a plain value as, in words."""
    loader = yaml.SafeLoader("")
    try:
        value = loader.construct_object(node)
    finally:
        loader.dispose()
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return f"the number {value}"


def instead_of(text: str, number: float) -> str:
    """A number as it should be written."""
    if not math.isfinite(number):
        return "a finite number"
    return str(int(number) if number == int(number) and not re.search(r"[.eE]", text) else number)


def _instead(text: str, number: float) -> str:
    if not math.isfinite(number):
        return f"A number must be finite; if a text is meant, write '{text}' in quotes."
    return f"Write {instead_of(text, number)}, or '{text}' in quotes."


def _clock(text: str) -> str:
    """The durations that sexagesimal digits look like."""
    parts = [str(int(part)) for part in text.replace("_", "").split(":")]
    if len(parts) == 3:
        return "{}h{}m{}s".format(*parts)
    return "{0}h{1}m or {0}m{1}s".format(*parts) if len(parts) == 2 else "a duration such as 1h30m"
