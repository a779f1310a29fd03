"""Read a YAML file: report syntax errors by line, and refuse values that YAML reads as something else.

In YAML, `12:30:45` is a number, `014` is 12, `no` is false, `0o14` and `None` are strings, and the last of two equal
keys counts. Each is refused with its line and a correction.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml.reader import Reader

from trainer_cli.bounds import DEEPEST, LARGEST_COUNT, find_too_deep
from trainer_cli.config.hydra_compat import get_yaml_loader
from trainer_cli.config.tree import Node, ValueOrigin
from trainer_cli.errors import Code, ConfigError, raise_all
from trainer_cli.keys import KeyPath, text_keys
from trainer_cli.patterns import find_nearest
from trainer_cli.values import MISSING

LARGEST_BYTES = 1 << 20
_HEADER = re.compile(r"\s*#\s*@\s*(\S*)\s*(.*)")
_CURES = (
    (r"'\\t'", "Use spaces, not tabs."),
    (r"mapping values are not allowed",
     "A key is followed by a colon and a space, a string with ': ' in it needs quotes, and keys start in one column."),
    (r"cannot start any token", "Put a string that begins with this character in quotes."),
    (r"expected ':'", "A key is followed by a colon and a space."),
    (r"expected <block end>", "Keys of one mapping, and items of one list, start in one column."),
    (r"expected a single document", "A file holds one config: remove the line '---'."),
    (r"found '\?'", "Inside { } and [ ], put ??? in quotes."),
    (r"got '\{'", "Inside { } and [ ], put ${...} in quotes."),
    (r"found undefined alias", "An alias (*name) needs its anchor (&name) above it; a string with * needs quotes."),
    (r"unexpected end of stream|expected ',' or|found '<stream end>'", "A quote or bracket is not closed."),
)  # fmt: skip


@dataclass(slots=True)
class Reading:
    """The values of a file and the mistakes in it. Of a `broken` file no value may be used."""

    text: str = ""
    tree: Node = field(default_factory=lambda: Node({}))
    """The keys and values; those that are refused as they stand are left out of a `broken` file."""
    package: str | None = None
    mistakes: list[ConfigError] = field(default_factory=list)
    broken: bool = False

    @property
    def values(self) -> dict[Any, Any]:
        """The plain values; none of a broken file, whose tree may have too many."""
        values: dict[Any, Any] = {} if self.broken else self.tree.plain()
        return values

    def add(self, message: str, where: str, cure: str, *, breaks: bool = False) -> None:
        """Add a mistake, which `breaks` the file if no value of it may be used."""
        self.mistakes.append(ConfigError(message, source=where, code=Code.yaml, hint=cure or None))
        self.broken = self.broken or breaks


def read_values(source: Path | str, name: str) -> dict[Any, Any]:
    """The plain values of a file or a text that messages call `name`.

    Raises:
        ConfigError: the file cannot be read, or is not the YAML of a config.
    """
    reading = read_file(source, name) if isinstance(source, Path) else read_text(source, name)
    raise_all(reading.mistakes)
    return reading.values


def read_file(path: Path, name: str, *, written: bool = False) -> Reading:
    """Read a file that messages call `name`. In a file that a program has `written`, strings mean what they say."""
    try:
        # The size first, so that a data file named by mistake is not read into memory.
        size = path.stat().st_size
        data = path.read_bytes() if size <= LARGEST_BYTES else b""
    except OSError as error:
        return _broken_reading(f"{name} cannot be read: {error.strerror}", None, "")
    if size > LARGEST_BYTES:
        message = f"{name} is longer than {LARGEST_BYTES >> 20} MiB, and no config is"
        return _broken_reading(message, None, "Is it a data file?")
    # Before the decoding, which would report its first byte as broken UTF-8.
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return _broken_reading(f"{name} is UTF-16", None, "Save it as UTF-8.")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"{name}:{_count_lines(data[: error.start].decode())}"
        return _broken_reading(f"byte 0x{data[error.start]:02x} is not UTF-8", where, "Save the file as UTF-8.")
    return read_text(text, name, written=written)


def read_text(text: str, name: str, *, written: bool = False) -> Reading:
    """Read the text of a file that messages call `name`; see `read_file`."""
    if text.startswith("\ufeff"):
        cure = "Save it as UTF-8 without one: the first line would be ignored."
        return _broken_reading("the file begins with a byte-order mark", f"{name}:1", cure)
    if unprintable := Reader.NON_PRINTABLE.search(text) or re.search("\ufeff", text):
        line = f"{name}:{_count_lines(text[: unprintable.start()])}"
        return _broken_reading(f"character U+{ord(unprintable.group()):04X} has no place in YAML", line, "Remove it.")
    if deep_line := find_too_deep(text):
        return _broken_reading(f"nested more than {DEEPEST} deep", f"{name}:{deep_line}", "")
    reading = Reading(text)
    _read_header(reading, name)
    try:
        # OmegaConf's loader: YAML's own would read 1e-3 as a string.
        loader = get_yaml_loader()(text)
        document = loader.get_single_node()
        if document is None:
            if not text.strip():
                reading.add("the file is empty", name, "Write something, be it a comment, or remove it.", breaks=True)
            return reading
        if not isinstance(document, yaml.MappingNode):
            kind = "a list" if isinstance(document, yaml.SequenceNode) else "a single value"
            where = f"{name}:{document.start_mark.line + 1}"
            lacks_space = isinstance(document, yaml.ScalarNode) and re.match(r"[\w.]+[=:]\S", document.value)
            cure = "A key is followed by a colon and a space." if lacks_space else ""
            reading.add(f"the file is {kind}, but it must be a mapping of keys to values", where, cure, breaks=True)
            return reading
        reading.tree = Node(_Walk(reading, name, loader, written).read(document, (), 0)[0])
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark is not None else name
        problem = error.problem or error.context or "?"
        if problem.startswith("but ") and error.context:
            problem = f"{error.context}, {problem}"
        cure = next((cure for pattern, cure in _CURES if re.search(pattern, problem)), "")
        reading.add(f"this is not valid YAML: {problem}", where, cure, breaks=True)
    # A tag such as !!int before what is none raises whatever PyYAML's constructor for it does.
    except (yaml.YAMLError, ValueError, LookupError, RecursionError) as error:
        reading.add(f"this is not valid YAML: {str(error).splitlines()[0]}", name, "", breaks=True)
    return reading


def _broken_reading(message: str, where: str | None, cure: str) -> Reading:
    """The reading of a file without usable values, for this reason."""
    return Reading(mistakes=[ConfigError(message, source=where, code=Code.yaml, hint=cure or None)], broken=True)


def _count_lines(before: str) -> int:
    """The number of the line that follows a text, from 1."""
    return before.count("\n") + 1


def _read_header(reading: Reading, name: str) -> None:
    """Read `# @package` at the top of the file; further down it is a comment without effect, and refused."""
    is_at_top = True
    for number, line in enumerate(reading.text.split("\n"), start=1):
        match = _HEADER.fullmatch(line)
        if match is None:
            is_at_top = is_at_top and not line.strip()
            continue
        word, value = match.group(1), match.group(2).strip()
        if find_nearest(word.rstrip(":"), ["package"]) is None:
            is_at_top = False
        elif not is_at_top:
            cure = "Make it the first line of the file."
            reading.add("'# @package' counts only at the top of a file", f"{name}:{number}", cure)
        elif reading.package is not None:
            reading.add("the file says '# @package' twice", f"{name}:{number}", "Remove one of them.", breaks=True)
        elif word != "package" or not _is_package(value):
            cure = "Write '# @package _global_' and nothing else on this line."
            reading.add(f"'{line.strip()}' does not say a package", f"{name}:{number}", cure, breaks=True)
        else:
            reading.package = value


def _is_package(value: str) -> bool:
    """Whether a text is a package: words joined by dots, and no word such as `_here_`, which has no meaning here."""
    if not re.fullmatch(r"[\w$-]+(\.[\w$-]+)*", value):
        return False
    first, *later_words = value.split(".")
    words = later_words if first == "_global_" else [first, *later_words]
    return not any(re.fullmatch(r"_\w+_", word) for word in words if word not in ("_group_", "_name_"))


PYTHONS_NULL = "None"
_MAX_DIGITS = 400
_TAG = "tag:yaml.org,2002:"
_TAGS = {_TAG + kind for kind in ("map", "seq", "str", "int", "float", "bool", "null", "merge")}
_SEXAGESIMAL = re.compile(r"[-+]?([\d_]+(?::[0-5]?\d)+)(?:\.[\d_]*)?")
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
TRUTH_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def why_no_interpolation(text: str) -> str | None:
    """Why a string with `${` is not a valid interpolation, or None."""
    if "${" not in text:
        return None
    try:
        # OmegaConf parses the text here, and does not resolve it.
        OmegaConf.create({"value": text})
    except OmegaConfBaseException as error:
        return str(error.msg or error).splitlines()[0]
    except RecursionError:
        return "nested too deep"
    return None


def looks_like_number(text: str) -> float | None:
    """The number that a string looks like, or None."""
    plain = text
    # Commas between thousands, or in place of the decimal point.
    if re.fullmatch(r"[-+]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?", text):
        plain = text.replace(",", "")
    elif re.fullmatch(r"[-+]?0,\d+", text):
        plain = text.replace(",", ".")
    try:
        return int(plain, 0) if re.match(r"[-+]?0[xob]", plain, re.IGNORECASE) else float(plain)
    except ValueError:
        return None


class _Walk:
    """One walk over the nodes of a file, which makes its tree and reports what is misleading in it."""

    def __init__(self, reading: Reading, name: str, loader: Any, written: bool) -> None:
        self._reading = reading
        self._name = name
        self._loader = loader
        self._written = written
        self._results: dict[int, tuple[Any, int, int]] = {}
        """Id of a node -> what `read` returned for it: a node that aliases share is read once."""
        self._open: set[int] = set()
        """Ids of the nodes that are being read, which contain the current one."""

    def read(self, node: yaml.Node, path: KeyPath, depth: int) -> tuple[Any, int, int]:
        """The value of a node, with nodes for the values in it; the count of these; and how deep they are nested."""
        if id(node) in self._open:
            self._refuse(node, path, "an anchor's value contains itself", "", breaks=True)
            return None, 1, 0
        is_too_deep = depth > DEEPEST and not isinstance(node, yaml.ScalarNode)
        if id(node) not in self._results and not is_too_deep:
            self._open.add(id(node))
            self._results[id(node)] = self._read_unshared(node, path, depth)
            self._open.discard(id(node))
        value, count, levels = self._results.get(id(node), (None, 1, 1))
        if depth + levels > DEEPEST + 1 and not self._reading.broken:
            self._refuse(node, path, f"nested more than {DEEPEST} deep", "", breaks=True)
        elif count > LARGEST_COUNT and not self._reading.broken:
            message = f"this expands to more than {LARGEST_COUNT:,} values"
            self._refuse(node, path, message, "Do aliases multiply?", breaks=True)
        return value, count, levels

    def _read_unshared(self, node: yaml.Node, path: KeyPath, depth: int) -> tuple[Any, int, int]:
        """`read` for a node that has not been read yet."""
        if isinstance(node, yaml.ScalarNode):
            return self._read_scalar(node, path), 1, 0
        if node.tag not in _TAGS:
            self._refuse_tag(node, path)
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, path, depth)
        items: list[Node] = []
        count = levels = 0
        for index, item in enumerate(node.value):
            value, item_count, item_levels = self.read(item, (*path, str(index)), depth + 1)
            items.append(self._with_line(item, value, item))
            count, levels = count + item_count, max(levels, item_levels)
        return items, count + 1, levels + 1

    def _read_mapping(self, node: yaml.MappingNode, path: KeyPath, depth: int) -> tuple[dict[Any, Node], int, int]:
        """`read` for a mapping, with the keys that `<<` merges into it."""
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            self._check_key(key, path, lines)
            if key.tag == _TAG + "merge":
                self.read(value, (*path, "<<"), depth + 1)
        # YAML's `<<` merges keys of another node into this one.
        self._loader.flatten_mapping(node)
        children: dict[Any, Node] = {}
        count = levels = 0
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag not in (_TAG + "str", _TAG + "int"):
                continue
            child, child_count, child_levels = self.read(value, (*path, key.value), depth + 1)
            children[self._loader.construct_object(key)] = self._with_line(key, child, value)
            count, levels = count + child_count, max(levels, child_levels)
        return children, count + 1, levels + 1

    def _with_line(self, at: yaml.Node, value: Any, source: yaml.Node) -> Node:
        """The value that was read from `source`, as a node with the line of `at`.

        For a value in a mapping `at` is its key, since a list may begin in a later line.
        """
        is_unquoted = isinstance(source, yaml.ScalarNode) and (not source.style or source.value == MISSING)
        text = str(source.value) if is_unquoted else ""
        return Node(value, ValueOrigin(f"{self._name}:{at.start_mark.line + 1}"), text)

    def _check_key(self, key: yaml.Node, path: KeyPath, lines: dict[tuple[str, str], int]) -> None:
        """Report a key that is given twice or misread. `lines`: tag and text of each key so far -> its line."""
        if not isinstance(key, yaml.ScalarNode):
            self._refuse(key, path, "a key must be a single string", "", breaks=True)
            return
        if key.tag == _TAG + "merge":
            return
        text, line = str(key.value), key.start_mark.line + 1
        if (key.tag, text) in lines:
            first = lines[key.tag, text]
            self._refuse(key, (*path, text), f"the key is given twice, first in line {first}", "Remove one of them.")
        lines.setdefault((key.tag, text), line)
        is_other_number = key.tag == _TAG + "int" and (_SEXAGESIMAL.fullmatch(text) or _OCTAL.fullmatch(text))
        # A key that YAML reads as false or a number would not be found under the name that was written.
        if is_other_number or key.tag not in (_TAG + "str", _TAG + "int"):
            message = f"the key {text or 'of nothing'} is read by YAML as {_describe_value(key)}"
            self._refuse(key, path, message, f"Put it in quotes: '{text}'.", breaks=True)

    def _read_scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        """The value of a scalar; None if it is refused as it stands."""
        text = str(node.value)
        if node.tag not in _TAGS or node.tag == _TAG + "merge":
            self._refuse_tag(node, path)
            return None
        # Converting a number takes time that grows with the square of its digits.
        if node.tag in (_TAG + "int", _TAG + "float") and len(text) > _MAX_DIGITS:
            self._refuse(node, path, f"a number of {len(text)} characters is too long", "", breaks=True)
            return None
        self._check_scalar(node, path, text)
        return self._loader.construct_object(node)

    def _check_scalar(self, node: yaml.ScalarNode, path: KeyPath, text: str) -> None:
        """Report a scalar that YAML reads as something else than it looks like."""
        if node.style in ("'", '"', "|", ">"):
            self._check_interpolation(node, path, text)
        elif node.tag == _TAG + "str":
            self._check_interpolation(node, path, text)
            number = None if self._written else looks_like_number(text)
            if number is not None and (math.isfinite(number) or path not in text_keys()):
                message = f"{text} is read by YAML as a string, not as a number"
                cure = f"Write {instead_of(text, number)}, or '{text}' in quotes."
                if not math.isfinite(number):
                    cure = f"A number must be finite; if a string is meant, write '{text}' in quotes."
                self._refuse(node, path, message, cure)
            elif text == PYTHONS_NULL and not self._written:
                # A defaults list would look for an option of that name.
                self._refuse(node, path, f"{text} is read by YAML as a string, not as null",
                             f"Write null, or '{text}' in quotes.", breaks=path[0] == "defaults")  # fmt: skip
        elif node.tag == _TAG + "bool":
            if plain := TRUTH_WORDS.get(text.lower()):
                cure = f"Write {plain}, or '{text}' in quotes."
                self._refuse(node, path, f"{text} is read by YAML as {plain}", cure)
        elif match := _SEXAGESIMAL.fullmatch(text):
            message = f"{text} is read by YAML as {_describe_value(node)}"
            self._refuse(node, path, message, f"Write {_suggest_duration(match.group(1))}, or put it in quotes.")
        elif node.tag == _TAG + "int" and _OCTAL.fullmatch(text):
            plain = text.replace("_", "").lstrip("+-").lstrip("0") or "0"
            cure = f"Write {plain}, or '{text}' in quotes."
            self._refuse(node, path, f"{text} is read by YAML as {_describe_value(node)} (octal)", cure)

    def _check_interpolation(self, node: yaml.Node, path: KeyPath, text: str) -> None:
        """Report a string with `${` that is not a valid interpolation."""
        if (why := why_no_interpolation(text)) is not None:
            self._refuse(node, path, f"{text!r} is not an interpolation: {why}", "Write ${key}.", breaks=True)

    def _refuse_tag(self, node: yaml.Node, path: KeyPath) -> None:
        """Report a value whose tag, written or implied, has no meaning in a config."""
        if node.tag in (_TAG + "value", _TAG + "merge"):
            self._refuse(node, path, f"{node.value} alone means something else in YAML", f"Write '{node.value}'.",
                         breaks=True)  # fmt: skip
        else:
            tag = node.tag.replace(_TAG, "!!")
            cure = "Remove it; a string that begins with ! needs quotes."
            self._refuse(node, path, f"the tag {tag} is not known in a config", cure, breaks=True)

    def _refuse(self, node: yaml.Node, path: KeyPath, message: str, cure: str, *, breaks: bool = False) -> None:
        """Report a mistake at the line of a node; see `Reading.add`."""
        key = f"{'.'.join(path)}: " if path else ""
        self._reading.add(key + message, f"{self._name}:{node.start_mark.line + 1}", cure, breaks=breaks)


def _describe_value(node: yaml.ScalarNode) -> str:
    """The value that YAML reads from a plain scalar, in words."""
    loader = yaml.SafeLoader("")
    try:
        value = loader.construct_object(node)
    finally:
        loader.dispose()
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return f"the number {value}"


def instead_of(text: str, number: float) -> str:
    """How to write the number that a text looks like."""
    if not math.isfinite(number):
        return "a finite number"
    is_whole = number == int(number) and not re.search(r"[.eE]", text)
    return str(int(number) if is_whole else number)


def _suggest_duration(text: str) -> str:
    """The durations that a sexagesimal number probably means."""
    parts = [str(int(digits)) for digits in text.replace("_", "").split(":")]
    if len(parts) == 3:
        return "{}h{}m{}s".format(*parts)
    return "{0}h{1}m or {0}m{1}s".format(*parts) if len(parts) == 2 else "a duration such as 1h30m"
