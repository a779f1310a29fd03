"""Read a YAML file: report what is not YAML with its line, and scan the rest for values that mislead."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import Reader

from trainer_cli.config import yaml_traps
from trainer_cli.config.hydra_compat import get_yaml_loader
from trainer_cli.config.suggest import nearest
from trainer_cli.config.yaml_traps import DEEPEST
from trainer_cli.errors import Code, ConfigError

LARGEST_BYTES = 1 << 20
_INDENT = 400
_HEADER = re.compile(r"\s*#\s*@\s*(\S*)\s*(.*)")
_CURES = (
    (r"'\\t'", "Use spaces, not tabs."),
    (r"mapping values are not allowed",
     "A key is followed by a colon and a space, a text with ': ' in it needs quotes, and keys stand in one column."),
    (r"cannot start any token", "Put a text that begins with this character in quotes."),
    (r"expected ':'", "A key is followed by a colon and a space."),
    (r"expected <block end>", "Keys of one mapping, and items of one list, stand in one column."),
    (r"expected a single document", "A file holds one config: remove the line '---'."),
    (r"found '\?'", "Inside { } and [ ], put ??? in quotes."),
    (r"got '\{'", "Inside { } and [ ], put ${...} in quotes."),
    (r"found undefined alias", "An alias (*name) needs its anchor (&name) above it; a text with * needs quotes."),
    (r"unexpected end of stream|expected ',' or|found '<stream end>'", "A quote or bracket is not closed."),
)  # fmt: skip


@dataclass(slots=True)
class Reading:
    """The values of a file, and the mistakes in it. One that is `broken` has no values."""

    text: str = ""
    values: Any = None
    package: str | None = None
    node: yaml.Node | None = None
    """The document as YAML's node tree, which has line numbers."""
    mistakes: list[ConfigError] = field(default_factory=list)
    broken: bool = False

    def add(self, what: str, where: str, cure: str, *, breaks: bool = False) -> None:
        """Note a mistake."""
        self.mistakes.append(ConfigError(what, source=where, code=Code.yaml, hint=cure or None))
        self.broken = self.broken or breaks


def read_file(path: Path, name: str, *, written: bool = False) -> Reading:
    """Read a file that messages call `name`. `written`: by a program."""
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size <= LARGEST_BYTES else b""
    except OSError as error:
        return _refused(f"{name} cannot be read: {error.strerror}", None, "")
    if size > LARGEST_BYTES:
        what = f"{name} is longer than {LARGEST_BYTES >> 20} MiB, and no config is"
        return _refused(what, None, "Is it a data file?")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return _refused(f"{name} is UTF-16", None, "Save it as UTF-8.")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"{name}:{_line(data[: error.start].decode())}"
        return _refused(f"byte 0x{data[error.start]:02x} is not UTF-8", where, "Save the file as UTF-8.")
    return read_text(text, name, written=written)


def read_text(text: str, name: str, *, written: bool = False) -> Reading:
    """Read the text of a file that messages call `name`."""
    if text.startswith("\ufeff"):
        cure = "Save it as UTF-8 without one: what stands on the first line would be overlooked."
        return _refused("the file begins with a byte-order mark", f"{name}:1", cure)
    if odd := Reader.NON_PRINTABLE.search(text) or re.search("\ufeff", text):
        line = f"{name}:{_line(text[: odd.start()])}"
        return _refused(f"character U+{ord(odd.group()):04X} has no place in YAML", line, "Remove it.")
    if deep := _too_deep(text):
        return _refused(f"nested more than {DEEPEST} deep", f"{name}:{deep}", "")
    reading = Reading(text)
    _header(reading, name)
    try:
        reading.node, loader = _compose(text)
        node = reading.node
        if node is None:
            reading.values = {}
            if not text.strip():
                reading.add("the file is empty", name, "Write something, be it a comment, or remove it.", breaks=True)
            return reading
        if not isinstance(node, yaml.MappingNode):
            kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
            where = f"{name}:{node.start_mark.line + 1}"
            glued = isinstance(node, yaml.ScalarNode) and re.match(r"[\w.]+[=:]\S", node.value)
            cure = "A key is followed by a colon and a space." if glued else ""
            reading.add(f"the file is {kind}, but it must be a mapping of keys to values", where, cure, breaks=True)
            return reading
        for trap in yaml_traps.find_traps(node, written=written):
            reading.add(trap.what, f"{name}:{trap.line}", trap.cure, breaks=trap.breaks)
        if not reading.broken:
            reading.values = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark is not None else name
        problem = error.problem or error.context or "?"
        if problem.startswith("but ") and error.context:
            problem = f"{error.context}, {problem}"
        cure = next((cure for pattern, cure in _CURES if re.search(pattern, problem)), "")
        reading.add(f"this is not valid YAML: {problem}", where, cure, breaks=True)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reading.add(f"this is not valid YAML: {str(error).splitlines()[0]}", name, "", breaks=True)
    return reading


def _refused(what: str, where: str | None, cure: str) -> Reading:
    return Reading(mistakes=[ConfigError(what, source=where, code=Code.yaml, hint=cure or None)], broken=True)


def _line(before: str) -> int:
    return before.count("\n") + 1


def _too_deep(text: str) -> int:
    """The line where a text nests so deep that the parser in C could overflow its stack; else 0."""
    depth = 0
    for number, line in enumerate(text.split("\n"), start=1):
        start = re.match(r"(?: |- |\? )*", line)
        for letter in re.findall(r"[\[\]{}]", line):
            depth = depth + 1 if letter in "[{" else max(0, depth - 1)
            if depth > 2 * DEEPEST:
                return number
        if start is not None and start.end() > _INDENT and line.strip():
            return number
    return 0


def _header(reading: Reading, name: str) -> None:
    """The `# @package` above everything else; elsewhere it would be a comment without effect."""
    above = True
    for number, line in enumerate(reading.text.split("\n"), start=1):
        found = _HEADER.fullmatch(line)
        if found is None:
            above = above and not line.strip()
            continue
        word, value = found.group(1), found.group(2).strip()
        if nearest(word.rstrip(":"), ["package"]) is None:
            above = False
        elif not above:
            cure = "Make it the first line of the file."
            reading.add("'# @package' counts only at the top of a file", f"{name}:{number}", cure)
        elif reading.package is not None:
            reading.add("the file says '# @package' twice", f"{name}:{number}", "Remove one of them.", breaks=True)
        elif word != "package" or not re.fullmatch(r"[\w$-]+(\.[\w$-]+)*", value) or _is_odd_package(value):
            cure = "Write '# @package _global_' and nothing else on this line."
            if re.search(r"_(group|name)_", value):
                cure = "Remove the line; an experiment says '# @package _global_' instead."
            reading.add(f"'{line.strip()}' does not say a package", f"{name}:{number}", cure, breaks=True)
        else:
            reading.package = value


def _is_odd_package(value: str) -> bool:
    """Whether a package looks like one of Hydra's words, and is none."""
    first, *rest = value.split(".")
    return any(re.fullmatch(r"_\w+_", word) for word in ([first, *rest] if first != "_global_" else rest))


@cache
def _loaders() -> tuple[type[Any], type[Any]]:
    """OmegaConf's own loader, and one in C that resolves plain values as it does (the first again if there is none)."""
    careful = get_yaml_loader()
    if not yaml.__with_libyaml__:
        return careful, careful
    quick = type("QuickLoader", (yaml.CSafeLoader,), {"yaml_implicit_resolvers": careful.yaml_implicit_resolvers})
    return careful, quick


def _compose(text: str) -> tuple[yaml.Node | None, Any]:
    """The document, and the loader to construct it: the loader in C is faster, OmegaConf's own reports mistakes.

    The one in C also accepts tabs that OmegaConf's refuses.
    """
    careful, quick = _loaders()
    loader = (careful if "\t" in text else quick)(text)
    try:
        return loader.get_single_node(), loader
    except yaml.YAMLError:
        if isinstance(loader, careful):
            raise
        loader = careful(text)
        return loader.get_single_node(), loader
