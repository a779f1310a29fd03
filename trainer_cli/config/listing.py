"""The defaults list of a file: what is no list of choices, with file and line, before Hydra is asked to follow it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import yaml

from trainer_cli.config.suggest import did_you_mean
from trainer_cli.errors import ConfigError

_TEXT = "tag:yaml.org,2002:str"
_NULL = "tag:yaml.org,2002:null"
_HOW = "An entry is '- group: option', '- override /group: option', '- file' or '- _self_'."


def mistakes(document: yaml.Node | None, name: str, group: str, groups: Sequence[str]) -> Iterator[ConfigError]:
    """What is wrong with the defaults list of a file that stands in the folder `group` (empty for the top)."""
    pairs = document.value if isinstance(document, yaml.MappingNode) else []
    listed = next((value for key, value in pairs if key.value == "defaults"), None)
    if listed is None:
        return

    def wrong(node: yaml.Node, what: str, cure: str = _HOW) -> ConfigError:
        return ConfigError(what, where=f"{name}:{node.start_mark.line + 1}", cure=cure)

    if not isinstance(listed, yaml.SequenceNode):
        yield wrong(listed, "'defaults' must be a list")
        return
    selves = [entry for entry in listed.value if entry.value == "_self_"]
    for entry in selves[1:]:
        yield wrong(entry, f"_self_ stands twice, first in line {selves[0].start_mark.line + 1}", "Remove one of them.")
    for entry in listed.value:
        if isinstance(entry, yaml.MappingNode) and len(entry.value) == 1:
            key, option = entry.value[0]
            yield from _choice(key, option, group, groups, wrong)
        elif not (isinstance(entry, yaml.ScalarNode) and entry.tag == _TEXT):
            yield wrong(entry, "this entry of the defaults list is no choice")


def _choice(
    key: yaml.Node, option: yaml.Node, group: str, groups: Sequence[str], wrong: Callable[..., ConfigError]
) -> Iterator[ConfigError]:
    """What is wrong with one `- group: option`."""
    *words, last = str(key.value).split() or [""]
    chosen, _, _package = last.partition("@")
    resolved = chosen[1:] if chosen.startswith("/") else f"{group}/{chosen}".lstrip("/")
    texts = option.value if isinstance(option, yaml.SequenceNode) else [option]
    if not all(text.tag == _TEXT or (text is option and text.tag == _NULL) for text in texts):
        yield wrong(option, f"the option of {chosen} must be a name, a list of names, or null", "")
    if not set(words) <= {"override", "optional"}:
        yield wrong(key, f"{' '.join(words)!r} before {chosen} is not known", "Known: override, optional.")
    elif "hydra" in (resolved.split("/")[0], chosen.split("/")[0]):
        yield wrong(key, f"{chosen.lstrip('/')} has no effect", "Hydra only composes the config here.")
    elif resolved in groups:
        return
    elif chosen in groups:
        written = f"- {option.value}" if chosen == group else f"- override /{last}: {option.value}"
        yield wrong(key, f"{chosen} is looked for below {group}/", f"Write '{written}'.")
    elif "optional" not in words:
        cure = f"There are: {', '.join(groups)}.{did_you_mean(chosen.lstrip('/'), groups)}"
        yield wrong(key, f"there is no group '{resolved}'", cure)
