"""What an add-on brings, and who brings what.

An add-on is a folder of `trainer_cli/addons/` whose module `addon.py` has an `ADDON`, or such an object that another
distribution names as an entry point of the group `trainer_cli.addons`. All that it names is imported when it is used.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_GROUP = "trainer_cli.addons"
"""The package of the shipped add-ons, and the group of entry points of all others."""


class Verb(NamedTuple):
    """A module with `EXAMPLES`, `add_arguments(parser)` and `run(args) -> int`, imported only when called.

    It may have `before_parsing(words)`, which rewrites the words of the command line before argparse reads them.

    Args:
        summary: what it does, in half a sentence; empty for a verb that `train` itself starts, which is listed nowhere.
        after: the verb after which it is listed; None: after all others.
        loads_torch: whether it needs seconds until it prints something.
        error_offset: added to the exit codes of errors, for a verb whose own exit codes are answers.
    """

    module: str
    summary: str = ""
    after: str | None = None
    loads_torch: bool = False
    error_offset: int = 0


class AddOn(NamedTuple):
    """What an add-on brings.

    Args:
        verbs: name -> verb.
        names: module, by its whole name -> its public names, separated by spaces. They become names of `trainer_cli`.
        parts: what other code asks for (`parts.py`) -> `module:name` of the function or class that is it.
        components: packages and modules, all of whose public classes a config from disk may name.
        bases: `module:name` of classes, of whose subclasses in a package that the user trusts the same holds.
        configs: the folder of its configs, each in the folder of its group.
    """

    verbs: Mapping[str, Verb] = {}
    names: Mapping[str, str] = {}
    parts: Mapping[str, str] = {}
    components: Sequence[str] = ()
    bases: Sequence[str] = ()
    configs: str | None = None


class _HasPosition(Protocol):
    @property
    def after(self) -> str | None: ...


Listed = TypeVar("Listed", bound=_HasPosition)


@cache
def _find_shipped() -> Mapping[str, AddOn]:
    folder = os.path.join(os.path.dirname(__file__), "addons")
    names = sorted(name for name in os.listdir(folder) if os.path.isfile(os.path.join(folder, name, "addon.py")))
    return {name: import_module(f"{_GROUP}.{name}.addon").ADDON for name in names}


@cache
def _find_installed() -> Mapping[str, AddOn]:
    """Name -> the add-on of another distribution that is installed."""
    if not any(map(_has_addon, filter(os.path.isdir, sys.path))):
        return {}
    # Imported here: the import and the look at all that is installed take longer than a fast verb.
    from importlib.metadata import entry_points

    return {entry.name: entry.load() for entry in entry_points(group=_GROUP)}


def _has_addon(folder: str) -> bool:
    """Whether a distribution in a folder of `sys.path` names an entry point of an add-on."""
    try:
        names = os.listdir(folder)
    except OSError:
        # Python, too, passes over a folder that it may not list.
        return False
    for name in names:
        if name.endswith((".dist-info", ".egg-info")):
            with suppress(OSError), open(os.path.join(folder, name, "entry_points.txt"), "rb") as file:
                if f"[{_GROUP}]".encode() in file.read():
                    return True
    return False


def each_addon() -> Iterator[tuple[str, AddOn]]:
    """Each add-on with its name: first the shipped ones, then those of other distributions."""
    yield from _find_shipped().items()
    yield from _find_installed().items()


def find_part(name: str) -> Any:
    """The function or class that an add-on brings under this name; None if there is no such add-on."""
    return next(each_part(name), None)


def each_part(name: str) -> Iterator[Any]:
    """The functions or classes that add-ons bring under this name."""
    for _, addon in each_addon():
        if name in addon.parts:
            module, _, attribute = addon.parts[name].partition(":")
            yield getattr(import_module(module), attribute)


def add_verbs(verbs: Mapping[str, Verb]) -> dict[str, Verb]:
    """The verbs with those of all add-ons, in the order in which they are listed."""
    return insert_each(verbs, (addon.verbs for _, addon in each_addon()))


def insert_each(listed: Mapping[str, Listed], of_addons: Iterable[Mapping[str, Listed]]) -> dict[str, Listed]:
    """What is listed, with what add-ons add, each entry after the one that its `after` names, or at the end."""
    merged = list(listed.items())
    for added in of_addons:
        for name, entry in added.items():
            words = [word for word, _ in merged]
            merged.insert(words.index(entry.after) + 1 if entry.after in words else len(words), (name, entry))
    return dict(merged)


def find_verb(word: str) -> Verb | None:
    """The verb of an add-on with this name; None if no add-on has it."""
    return next((addon.verbs[word] for _, addon in each_addon() if word in addon.verbs), None)


@cache
def public_names() -> Mapping[str, str]:
    """Public name that an add-on brings -> its module."""
    return {name: module for _, addon in each_addon() for module, text in addon.names.items() for name in text.split()}
