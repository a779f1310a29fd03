"""A config as a tree of nodes, each of which knows where it was written.

Files and overrides are merged node by node, by OmegaConf's rules, so that the source of a value is a property of the
value, and nothing has to look it up afterwards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hydra.core.override_parser.types import QuotedString
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer_cli.keys import OPEN, KeyPath, defaults, whole_values
from trainer_cli.values import MISSING

DEFAULT, COMMAND_LINE = "default", "command line"


class ValueOrigin(NamedTuple):
    """Where a value was set (`file:line`, `command line` or `default`), and the words there."""

    source: str = DEFAULT
    words: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.words}" if self.words else self.source


class ChosenOption(NamedTuple):
    """An option of a group: where it was chosen, and the label of its file (empty for none)."""

    origin: ValueOrigin
    label: str = ""


_DEFAULT_ORIGIN = ValueOrigin()


@dataclass(slots=True)
class Node:
    """A value, a list of nodes or a mapping of nodes; where it was set, and the text there.

    `text` is a scalar as it was written, without quotes, or all after the `=` of an override. It is `???` where the
    last file that names the key asks for a value.
    """

    value: Any
    origin: ValueOrigin = _DEFAULT_ORIGIN
    text: str = ""

    @classmethod
    def of(cls, value: Any, origin: ValueOrigin = _DEFAULT_ORIGIN, text: str = "") -> Node:
        """The node of a plain value; all of it has one origin."""
        if isinstance(value, Mapping):
            return cls({_without_quotes(key): cls.of(item, origin, text) for key, item in value.items()}, origin, text)
        if isinstance(value, list):
            return cls([cls.of(item, origin, text) for item in value], origin, text)
        return cls(_without_quotes(value), origin, text)

    @property
    def is_mapping(self) -> bool:
        """Whether the value is a mapping."""
        return isinstance(self.value, dict)

    @property
    def is_interpolation(self) -> bool:
        """Whether the value is a string with an interpolation."""
        return isinstance(self.value, str) and "${" in self.value

    @property
    def where(self) -> str:
        """The source of the value; for a mapping that no file names, such as a package, of the first value in it."""
        return next((node.origin.source for _, node in self.walk() if node.origin.source != DEFAULT), DEFAULT)

    def written(self, number: float) -> str:
        """The number as it was written: `1_0` for 10. Its plain form if the text is unknown."""
        plain = str(number).lower()
        if self.origin.source != COMMAND_LINE:
            return self.text or plain
        # The text of an override may be a list or mapping, which holds the number among others.
        words = [word for word in re.findall(r"[-+.\w]+", self.text) if _reads_as(word, number)]
        return plain if plain in words else next(iter(words), plain)

    def plain(self) -> Any:
        """The value without origins; interpolations stay as they are written."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def copy(self) -> Node:
        """The tree with nodes of its own, which may be changed."""
        if isinstance(self.value, dict):
            return Node({key: child.copy() for key, child in self.value.items()}, self.origin, self.text)
        value = [child.copy() for child in self.value] if isinstance(self.value, list) else self.value
        return Node(value, self.origin, self.text)

    def get(self, name: str) -> Node | None:
        """The value of a key of a mapping, or the item of a list at an index; None if there is none."""
        if isinstance(self.value, list):
            return self.value[int(name)] if name.isdecimal() and int(name) < len(self.value) else None
        if not isinstance(self.value, dict):
            return None
        # A key may be a number, of which a path has only the text.
        by_text = (child for key, child in self.value.items() if str(key) == name)
        return self.value.get(name) or next(by_text, None)

    def at(self, path: KeyPath) -> Node | None:
        """The node at a path; None where the path leads to nothing."""
        node: Node | None = self
        for name in path:
            node = None if node is None else node.get(name)
        return node

    def walk(self, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
        """This node and every one below it, with their paths."""
        yield path, self
        if isinstance(self.value, dict | list):
            items = self.value.items() if isinstance(self.value, dict) else enumerate(self.value)
            for key, child in items:
                yield from child.walk((*path, str(key)))

    def put(self, path: KeyPath, child: Node) -> None:
        """Set the node at a path; a value on the way that is no mapping becomes one."""
        node = self
        for name in path[:-1]:
            next_node = node.get(name)
            if next_node is None or not next_node.is_mapping:
                next_node = node.value[name] = Node({})
            node = next_node
        node.value[path[-1]] = child


def _without_quotes(value: Any) -> Any:
    return value.text if isinstance(value, QuotedString) else value


_NO_NODE = Node(None)


class MergeError(Exception):
    """A list and a mapping do not merge: the path, and both nodes."""

    def __init__(self, path: KeyPath, old: Node, new: Node) -> None:
        super().__init__(".".join(path))
        self.path, self.old, self.new = path, old, new


def name_kind(value: Any) -> str:
    """A list or mapping in words."""
    return "a list" if isinstance(value, list) else "a mapping"


def merge(root: Node, new: Node, path: KeyPath = ()) -> None:
    """Merge a mapping over the one at a path of the tree, as OmegaConf does.

    Raises:
        MergeError: a list and a mapping do not merge.
    """
    old = root.at(path)
    assert old is not None
    for key, child in new.value.items():
        current, key_path = old.value.get(key), (*path, str(key))
        # Resolved only where the value decides: each time it costs a copy of the whole tree.
        is_decisive = isinstance(child.value, dict | list) or child.value == MISSING
        if current is not None and is_decisive and current.is_interpolation:
            current = old.value[key] = _dereference(root, key_path, current)
        if current is None:
            old.value[key] = child.copy()
        elif child.value == MISSING:
            # `???` asks for a value: the current one stays, with the place that asks as its origin.
            current.origin, current.text = child.origin, child.text
        elif isinstance(current.value, dict) and isinstance(child.value, dict):
            if child.origin != _DEFAULT_ORIGIN:
                current.origin, current.text = child.origin, child.text
            merge(root, child, key_path)
        elif {type(current.value), type(child.value)} == {dict, list}:
            raise MergeError(key_path, current, child)
        else:
            old.value[key] = child.copy()


def _dereference(root: Node, path: KeyPath, node: Node) -> Node:
    """The mapping or list that an interpolation refers to, into which OmegaConf merges; else the node itself."""
    try:
        value = resolve(OmegaConf.create(root.plain()), path, below=False)
    except (OmegaConfBaseException, RecursionError):
        return node
    return Node.of(value, node.origin) if isinstance(value, dict | list) else node


def resolve(config: Any, path: KeyPath, *, below: bool = True) -> Any:
    """The plain value at a path of OmegaConf's nodes, or what its interpolation refers to.

    With `below`, the interpolations in that are resolved too.

    Raises:
        OmegaConfBaseException, RecursionError: it cannot be resolved.
    """
    for name in path:
        # A key may be a number, of which a path has only the text.
        keys = range(len(config)) if OmegaConf.is_list(config) else config
        config = config[next(key for key in keys if str(key) == name)]
    return OmegaConf.to_container(config, resolve=below) if OmegaConf.is_config(config) else config


def fill_defaults(node: Node) -> Node:
    """The tree with the schema's default of each key that it lacks, in the order of the schema."""
    return _fill_node(node, Node.of(defaults()))


def _fill_node(node: Node, default: Node) -> Node:
    """A mapping with the keys of `default` that it lacks, and the same for the mappings in it."""
    children = {**default.value, **node.value}
    for key, child in children.items():
        if child.is_mapping:
            # An open section is whole: a default entry that it lacks was removed.
            child_default: Node | None = None if key in OPEN else default.value.get(key)
            children[key] = _fill_node(
                child, child_default if child_default is not None and child_default.is_mapping else Node({})
            )
    return Node(children, node.origin, node.text)


@dataclass(slots=True)
class ConfigTree:
    """All values of a composed config, the options that were chosen, and what was removed."""

    root: Node = field(default_factory=lambda: Node({}))
    choices: dict[KeyPath, ChosenOption] = field(default_factory=dict)
    """Section -> the option of its group that was chosen; what is merged into the tree's root under its group."""
    removed: dict[KeyPath, ValueOrigin] = field(default_factory=dict)
    """Path -> the override `~key` that removed its value."""

    def source(self, key: KeyPath) -> str:
        """`file:line`, `command line` or `default`: of the key, of one below it, or of the nearest above.

        A component that only its group's file sets has the line of its target, and another package that of the first
        value in it.
        """
        node = self.root.at(key) or _NO_NODE
        if any(child.origin.source == COMMAND_LINE for _, child in node.walk()):
            return COMMAND_LINE
        if any(path[: len(key)] == key for path in self.removed):
            return COMMAND_LINE
        # Itself first, then the sections around it, from the innermost.
        candidates = [*(self.root.at(key[:length]) for length in range(len(key), 0, -1)), node.get("_target_")]
        sources = [candidate.origin.source for candidate in candidates if candidate is not None]
        choice = self._chosen_above(key)
        default = choice.origin.source if choice is not None else DEFAULT
        return next((source for source in (*sources, node.where) if source != DEFAULT), default)

    def exact(self, key: KeyPath) -> ValueOrigin:
        """What set this very value: itself, or a value above it that is not a mapping; else the choice of its group."""
        for length in range(len(key), 0, -1):
            node = self.root.at(key[:length])
            # A mapping above has the place of the mapping, not of the value in it.
            is_setter = node is not None and (length == len(key) or not node.is_mapping)
            if node is not None and is_setter and node.origin != _DEFAULT_ORIGIN:
                return node.origin
        choice = self.choices.get(key)
        return self.removed.get(key) or (choice.origin if choice is not None else _DEFAULT_ORIGIN)

    def is_default(self, key: KeyPath) -> bool:
        """Whether nothing sets a value."""
        return self.exact(key).source == DEFAULT

    def collect_sources(self, values: Mapping[Any, Any]) -> dict[str, str]:
        """Dotted key -> source, for each value that is not a default."""
        sources = {".".join(path): self.exact(path).source for path, _ in whole_values(values)}
        return {key: source for key, source in sources.items() if source != DEFAULT}

    def written(self, key: KeyPath, number: float) -> str:
        """A number as it was written: `1_0` for 10. Its plain form if the text is unknown."""
        return (self.root.at(key) or _NO_NODE).written(number)

    def gone(self, key: KeyPath) -> ValueOrigin | None:
        """What removed a value: `~key`, or the choice of another option above it."""
        choice = self._chosen_above(key)
        return self.removed.get(key) or (choice.origin if choice is not None else None)

    def chosen(self, section: KeyPath) -> ValueOrigin | None:
        """Where the option of a section was chosen; None if no value of the section comes from an option."""
        choice, node = self.choices.get(section), self.root.at(section)
        if choice is None or not choice.label or node is None:
            return None
        sources = (child.origin.source for _, child in node.walk())
        return choice.origin if any(source.startswith(f"{choice.label}:") for source in sources) else None

    def _chosen_above(self, key: KeyPath) -> ChosenOption | None:
        """The option that was chosen for the key or the nearest section around it; None if none was."""
        choices = (self.choices.get(key[:length]) for length in range(len(key), 0, -1))
        return next((choice for choice in choices if choice is not None), None)


def _reads_as(word: str, number: float) -> bool:
    """Whether Hydra's grammar reads a word as this number or truth value."""
    if isinstance(number, bool):
        return word.lower() == str(number).lower()
    try:
        value = float(word)
    except ValueError:
        return False
    return value == number or (math.isnan(value) and math.isnan(number))
